"""`python -m mmpreproj`, and `accelerate launch -m mmpreproj`."""

from mmpreproj.cli import main

main()
