"""Paths that commands are given."""

from __future__ import annotations

from pathlib import Path


def check_png(path: Path | None, name: str) -> None:
    """Refuse a picture's file of another kind before anything is computed."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise ValueError(f"{name} takes a .png file; got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
