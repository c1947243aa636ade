"""`mmpreproj view` and `mmpreproj inspect`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mmpreproj.cli.app import reports_errors
from mmpreproj.cli.paths import check_png


class Axis(str, Enum):
    """An axis of a point cloud."""

    x = "x"
    y = "y"
    z = "z"


@reports_errors
def view(
    cloud: Annotated[Path, typer.Argument(help="A point cloud or mesh: .ply, .obj, .glb, .npy, .xyz …")],
    picture: Annotated[Path, typer.Argument(help="The PNG file to draw into.")],
    up: Annotated[Axis, typer.Option(help="The axis that points up.")] = Axis.y,
    points: Annotated[int | None, typer.Option(min=2, help="Points to draw.  [default: all; 4096 of a mesh]")] = None,
) -> None:
    """Draw a point cloud, or points of a mesh, from several sides."""
    from mmpreproj.recipes.view import view_cloud

    check_png(picture, "the picture")
    view_cloud(cloud, picture, up=up.value, count=points)
    typer.echo(str(picture))


@reports_errors
def inspect(
    folder: Annotated[Path, typer.Argument(help="An adapter's folder, or a pipeline's folder that holds one.")],
) -> None:
    """Show what is inside a saved adapter: base, blocks, sizes, and the skip profile."""
    from mmpreproj.recipes.inspect import inspect_adapter
    from mmpreproj.recipes.tables import print_summary

    print_summary(inspect_adapter(folder))
