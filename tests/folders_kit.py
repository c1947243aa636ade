"""A folder with pictures and metadata.jsonl, for the tests of what reads such folders."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

RED, BLUE = (255, 0, 0), (0, 0, 255)


def write_pictures(folder: Path, *names: str, colour: tuple[int, int, int] = RED) -> None:
    """Write flat pictures of 4 x 4 pixels, with their subfolders."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), colour).save(folder / name)


def write_jsonl(folder: Path, *rows: dict[str, Any] | str) -> None:
    """Write metadata.jsonl; text is a line as it stands."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def row(name: Any = "a.png", text: Any = "a rose", **more: Any) -> dict[str, Any]:
    return {"file_name": name, "text": text, **more}
