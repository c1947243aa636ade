"""A folder of good pictures of many kinds, with pictures, captions and rows among them that cannot be used."""

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ORIENTATION = 0x0112
TOO_SMALL = "small.png"  # decodes; whether it is too small is for the reader to say

Row = dict[str, Any] | str


def write_bad_folder(folder: Path, good: int = 200, size: tuple[int, int] = (24, 20)) -> dict[str, str]:
    """Write a folder with metadata.jsonl in which bad pictures and rows are spread among good ones.

    Args:
        folder: where to; made if it is not there.
        good: number of pictures that can be used.
        size: their width and height, upright.

    Returns:
        For each fault its name, of the picture ("zero_bytes.png") or of the row ("metadata.jsonl, line 7"), and a
        word of the reason. The picture `TOO_SMALL`, 1 x 1, decodes; its word is "small".
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = [
        {"file_name": name, "text": f"picture {name}"} for name in write_good_pictures(folder, good, size)
    ]
    files = write_bad_files(folder, size)
    expected: dict[str, str] = {}
    spread = max(1, len(rows) // (len(files) + 20))
    rows_with_faults: list[tuple[Row, str | None]] = [(row, None) for row in rows]
    bad: list[tuple[Row, str | None]] = [({"file_name": name, "text": "bad"}, None) for name in files]
    bad += [(row, word) for row, word in bad_rows(folder)]
    for place, row in enumerate(bad):
        rows_with_faults.insert(min(1 + place * (spread + 1), len(rows_with_faults)), row)
    lines = [row if isinstance(row, str) else json.dumps(row) for row, _ in rows_with_faults]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for number, (_, word) in enumerate(rows_with_faults, start=1):
        if word is not None:
            expected[f"metadata.jsonl, line {number}"] = word
    return {**files, **expected}


def write_good_pictures(folder: Path, count: int, size: tuple[int, int]) -> list[str]:
    """Write pictures of every kind in turn, half red and half blue, and return their names."""
    names = []
    for index in range(count):
        kind, (suffix, make) = list(GOOD.items())[index % len(GOOD)]
        name = f"good/{index:04d}-{kind}.{suffix}"
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(make(_two_colours(size)))
        names.append(name)
    return names


def write_bad_files(folder: Path, size: tuple[int, int]) -> dict[str, str]:
    """Write files that are listed but cannot be decoded; return a word of each one's reason by name."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    png, jpeg = _encoded(noise, "PNG"), _encoded(noise, "JPEG")
    contents: dict[str, tuple[bytes, str]] = {
        "zero_bytes.png": (b"", "empty"),
        "text.png": (b"this is not a picture", "no picture format"),
        "page.jpg": (b"<!DOCTYPE html><title>404</title>", "<!DOCTYPE html"),
        "truncated.png": (png[: len(png) // 2], "truncated"),
        "truncated.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "header_only.jpg": (jpeg[:4], "no picture format"),
        "checksum.png": (png[:29] + bytes([png[29] ^ 255]) + png[30:], "no picture format"),
        "data.png": (png[:200] + bytes(100) + png[300:], "Error"),
        "float.tiff": (_encoded(Image.new("F", size, 0.5), "TIFF"), "floating-point"),
        "bomb.png": (png_of_size(30000, 30000), "DecompressionBombError"),
        "no_frames.gif": (b"GIF89a\x04\x00\x04\x00\x00\x00\x00;", "no picture format"),
        TOO_SMALL: (_encoded(Image.new("RGB", (1, 1)), "PNG"), "small"),
    }
    for name, (content, _) in contents.items():
        (folder / name).write_bytes(content)
    expected = {name: word for name, (_, word) in contents.items()}
    if os.geteuid() != 0:  # root may read everything
        (folder / "forbidden.png").write_bytes(png)
        (folder / "forbidden.png").chmod(0)
        expected["forbidden.png"] = "PermissionError"
    return expected


def bad_rows(folder: Path) -> list[tuple[Row, str]]:
    """Return rows that cannot be used, each with a word of the reason, and write what they need."""
    (folder / "directory.png").mkdir()
    (folder / "link.png").symlink_to(folder / "nowhere.png")
    for name in ("captioned.png", ".hidden.png"):
        (folder / name).write_bytes(_encoded(Image.new("RGB", (9, 9)), "PNG"))
    (folder / "notes.txt").write_text("no picture")
    captions: list[tuple[Any, str]] = [
        ("", "empty"),
        (" \n\t", "empty"),
        (None, "null"),
        (7, "int 7"),
        (["a", "b"], "list"),
        ("a\0b", "NUL"),
        ("\ud800", "half a character"),
    ]
    return [
        *(({"file_name": "captioned.png", "text": caption}, word) for caption, word in captions),
        ({"file_name": "captioned.png"}, "no 'text'"),
        ({"file_name": "directory.png", "text": "a"}, "not in the folder"),
        ({"file_name": "link.png", "text": "a"}, "not in the folder"),
        ({"file_name": "missing.png", "text": "a"}, "not in the folder"),
        ({"file_name": f"{'n' * 300}.png", "text": "a"}, "not in the folder"),
        ({"file_name": "text.png", "text": "again"}, "already listed"),
        ({"file_name": "../out.png", "text": "a"}, "lead out"),
        ({"file_name": "/etc/out.png", "text": "a"}, "lead out"),
        ({"file_name": ".hidden.png", "text": "a"}, "hidden"),
        ({"file_name": "notes.txt", "text": "a"}, "no picture"),
        ({"text": "a"}, "no 'file_name'"),
        ('{"file_name": "captioned.png", "text": ', "broken JSON"),
        ('["captioned.png", "a"]', "got a list"),
    ]


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG of 70 bytes whose header claims a size, with nothing behind it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [png_chunk(b"IHDR", header), png_chunk(b"IDAT", zlib.compress(b"")), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _two_colours(size: tuple[int, int]) -> Image.Image:
    image = Image.new("RGB", size, (255, 0, 0))
    image.paste((0, 0, 255), (size[0] // 2, 0, *size))
    return image


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _sixteen_bit(image: Image.Image) -> bytes:
    grey = np.asarray(image.convert("L")).astype(np.uint16) * 257
    return _encoded(Image.fromarray(grey), "PNG")


def _with_alpha(image: Image.Image) -> bytes:
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return _encoded(image, "PNG")


def _turned(image: Image.Image) -> bytes:
    """Lay the picture on its side, with the note that it has to be turned back."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return _encoded(image.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif)


def _animated(image: Image.Image) -> bytes:
    return _encoded(image, "GIF", save_all=True, append_images=[Image.new("RGB", image.size)])


GOOD: dict[str, tuple[str, Callable[[Image.Image], bytes]]] = {
    "rgb": ("png", lambda image: _encoded(image, "PNG")),
    "jpeg": ("jpg", lambda image: _encoded(image, "JPEG", quality=95)),
    "webp": ("webp", lambda image: _encoded(image, "WEBP", lossless=True)),
    "rgba": ("png", _with_alpha),
    "palette": ("png", lambda image: _encoded(image.quantize(4), "PNG", transparency=0)),
    "cmyk": ("jpg", lambda image: _encoded(image.convert("CMYK"), "JPEG")),
    "sixteen": ("png", _sixteen_bit),
    "grey": ("jpeg", lambda image: _encoded(image.convert("L"), "JPEG")),
    "turned": ("jpg", _turned),
    "animated": ("gif", _animated),
    "bits": ("png", lambda image: _encoded(image.convert("1"), "PNG")),
    "la": ("png", lambda image: _encoded(image.convert("LA"), "PNG")),
    "tiff": ("tif", lambda image: _encoded(image, "TIFF")),
    "upper": ("PNG", lambda image: _encoded(image, "PNG")),
}
