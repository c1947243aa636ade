"""Names that become folders of a study, keys of its files and cells of its tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import BeforeValidator, Field

TEXT, TASK = r"^[A-Za-z0-9_-]{1,64}$", r"^[A-Za-z0-9_.-]{1,64}$"
FOR_TASKS = "up to 64 letters, digits, _, - and ."


def _text_name(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("YAML reads this name as no text; put it in quotes")
    if not re.fullmatch(TEXT[1:-1], value):
        raise ValueError("a text's results lie in a folder of its name; give up to 64 letters, digits, _ and -")
    return value


def _task_name(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(TASK[1:-1], value):
        raise ValueError(f"give {FOR_TASKS}")
    return value


# The patterns are for the schema; the functions before them say more.
TextName = Annotated[str, Field(pattern=TEXT), BeforeValidator(_text_name)]
TaskName = Annotated[str, Field(pattern=TASK), BeforeValidator(_task_name)]


def check_task_name(stem: str) -> None:
    """Refuse a file's name as its task's.

    Args:
        stem: the file's name without its end.

    Raises:
        ValueError: if it has characters that do not fit into results.
    """
    if not re.fullmatch(TASK[1:-1], stem):
        raise ValueError(f"the file's name {stem!r} cannot be the task's in results; give name, of {FOR_TASKS}")


def collision(names: Iterable[str]) -> tuple[str, str] | None:
    """Find two names that differ in case alone; None where there are none."""
    taken: dict[str, str] = {}
    for name in names:
        if name.casefold() in taken:
            return taken[name.casefold()], name
        taken[name.casefold()] = name
    return None
