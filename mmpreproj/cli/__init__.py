"""The command line: `mmpreproj quickstart | train | generate | shapes | view | inspect | probe`.

Heavy imports happen inside the commands, so that `--help` answers at once.
"""

from mmpreproj.cli.app import app
from mmpreproj.cli.generation import generate, shapes
from mmpreproj.cli.language import probe
from mmpreproj.cli.training import quickstart, train
from mmpreproj.cli.viewing import inspect, view

for command in (quickstart, train, generate, shapes, view, inspect, probe):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    app()
