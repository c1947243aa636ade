"""The rows of Diffusers' multimodal transformers, by kin."""

from __future__ import annotations

from mmpreproj.patching.families.flux import FLUX
from mmpreproj.patching.families.image import IMAGE
from mmpreproj.patching.families.row import Family
from mmpreproj.patching.families.sd3 import SD3
from mmpreproj.patching.families.video import VIDEO

MULTIMODAL: tuple[Family, ...] = (*SD3, *FLUX, *IMAGE, *VIDEO)
