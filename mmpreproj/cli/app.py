"""The application: its options, and errors as messages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

import click
import typer

from mmpreproj import __version__
from mmpreproj.recipes.quiet import quieten_libraries
from mmpreproj.training.stopping import TrainingStoppedError

app = typer.Typer(
    name="mmpreproj",
    help="Pre-projection and content skip for multimodal diffusion transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
_settings = {"traceback": False}

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"mmpreproj {__version__}")
        raise typer.Exit


def reports_errors(command: _Command) -> _Command:
    """Turn errors that a user can mend into one message and exit status 1; signals give theirs, as in shells."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        quieten_libraries()
        try:
            return command(*args, **kwargs)
        except TrainingStoppedError as stopped:  # as asked, and saved
            typer.secho(f"mmpreproj: {stopped}", err=True, fg="yellow")
            raise typer.Exit(1 if stopped.signal is None else 128 + stopped.signal) from None
        except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
            if _settings["traceback"]:
                raise
            typer.secho(f"mmpreproj: {error}", err=True, fg="red")
            raise typer.Exit(1) from None
        except (typer.Exit, typer.Abort, click.ClickException):
            raise
        except Exception as error:
            if _settings["traceback"]:
                raise
            ours = type(error).__module__.startswith("mmpreproj.")  # says what is wrong by itself
            told = error if ours else f"{type(error).__name__}: {error} (--traceback shows where)"
            typer.secho(f"mmpreproj: {told}", err=True, fg="red")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.secho("mmpreproj: stopped", err=True, fg="red")
            raise typer.Exit(130) from None

    return cast(_Command, wrapped)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Pre-projection and content skip for multimodal diffusion transformers."""
    _settings["traceback"] = traceback
