"""Pictures in tar files, in the layout of webdataset: members of one name are one sample.

flowers-000.tar
  000000.jpg
  000000.txt          a red rose
  000001.jpg
  …
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from mmpreproj.data.sources.captions import caption_fault, caption_from_file
from mmpreproj.data.sources.faults import OnError, check_on_error, settle
from mmpreproj.data.sources.listing import PICTURE_SUFFIXES, is_set_aside
from mmpreproj.data.sources.pictures import PictureSource, SkippedPicture, UnreadablePictureError
from mmpreproj.data.sources.shard_paths import expand_shards, shard_names

PICTURE_EXTENSIONS = tuple(sorted(suffix.removeprefix(".") for suffix in PICTURE_SUFFIXES))
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
END_MARK = bytes(tarfile.BLOCKSIZE)
# As webdataset splits names: the key ends at the first dot of the last part, all the rest is the extension.
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)


class ShardSource(PictureSource):
    """The pictures of tar files, each with its caption; read where they lie, nothing is unpacked.

    A sample is what members of one name have: `000000.jpg` and `000000.txt`. Webdataset wants them next to each other;
    here they may be anywhere in the shard. Samples of one name in two shards are two pictures. At construction the
    headers and the captions are read, later each picture by its place.

    Args:
        shards: the tar files, in order: paths, or patterns such as `data/{000..009}.tar` and `data/*.tar`.
        picture_extensions: which members are pictures, without the dot.
        caption: which member has the caption: "txt" for `000000.txt`, a UTF-8 text as in `SidecarSource`; or
            "json:caption" for the field `caption` of the object in `000000.json`.
        on_error: "raise" to name all samples that cannot be used in one error, "skip" to leave them out and list them
            in `faults`: without a picture or a caption, or with two pictures; and what is lost in a damaged shard.

    Attributes:
        shards: the paths of the tar files.
        captions: one caption a picture, in the order of the shards.
        names: shard and member, such as "flowers-000.tar/000000.jpg".
        faults: what was left out, each with the reason.

    Raises:
        FileNotFoundError: if a path is no file, or a pattern matches none.
        ValueError: if samples or shards cannot be used, or there are none.
    """

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        *,
        picture_extensions: Collection[str] = PICTURE_EXTENSIONS,
        caption: str = "txt",
        on_error: OnError = "raise",
    ) -> None:
        check_on_error(on_error)
        layout = _layout(picture_extensions, caption)
        self.shards = expand_shards(shards)
        self.names: list[str] = []
        self.captions: list[str] = []
        self._places: list[tuple[int, _Place]] = []  # number of the shard, and place in it
        faults: list[SkippedPicture] = []
        for number, (path, name) in enumerate(zip(self.shards, shard_names(self.shards), strict=True)):
            for key, sample in _read_shard(path, name, layout, faults).items():
                try:
                    member, place, text = _usable(sample, layout)
                except ValueError as error:
                    faults.append(SkippedPicture(f"{name}/{key}", str(error)))
                    continue
                self.names.append(f"{name}/{member}")
                self.captions.append(text)
                self._places.append((number, place))
        where = f"{self.shards[0]} and {len(self.shards) - 1} more" if len(self.shards) > 1 else str(self.shards[0])
        self.faults = settle(faults, on_error, where=where, usable=len(self.names))
        if not self.names:
            raise ValueError(f"{where}: no member ends in {', '.join(sorted(layout.pictures))} or {caption}")

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.shards)} shards)  # {len(self)} pictures"

    def read(self, index: int) -> bytes:
        """Return one picture's file; see `PictureSource.read`."""
        shard, place = self._places[index]
        try:
            # Opened for each picture: what is kept open can be neither pickled nor shared by processes.
            with self.shards[shard].open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.size)
        except OSError as error:
            raise UnreadablePictureError(self.names[index], f"{type(error).__name__}: {error.strerror}") from error
        if len(data) < place.size:
            raise UnreadablePictureError(self.names[index], f"{self.shards[shard]} was cut off since it was opened")
        return data


class _Place(NamedTuple):
    offset: int  # bytes
    size: int  # bytes


class _Layout(NamedTuple):
    pictures: frozenset[str]  # extensions
    caption: str  # extension
    field: str | None  # of a JSON object; None: the member is the caption


@dataclass
class _Sample:
    pictures: dict[str, _Place] = field(default_factory=dict)  # by member
    captions: list[bytes] = field(default_factory=list)


def _layout(picture_extensions: Collection[str], caption: str) -> _Layout:
    """Check and parse what tells pictures and captions."""
    if isinstance(picture_extensions, str) or not picture_extensions:
        raise ValueError(f"picture_extensions is {picture_extensions!r}; expected several, such as ('jpg', 'png')")
    foreign = sorted(name for name in picture_extensions if f".{name.rpartition('.')[2]}" not in PICTURE_SUFFIXES)
    if foreign:
        raise ValueError(f"picture_extensions has {foreign[0]!r}; expected some of {', '.join(PICTURE_EXTENSIONS)}")
    extension, colon, name = caption.partition(":")
    if (
        not extension
        or extension in picture_extensions
        or bool(name) != bool(colon)
        or (colon and extension != "json")
    ):
        raise ValueError(f"caption is {caption!r}; expected an extension such as 'txt', or 'json:' and a field's name")
    return _Layout(frozenset(picture_extensions), extension, name or None)


def _read_shard(path: Path, name: str, layout: _Layout, faults: list[SkippedPicture]) -> dict[str, _Sample]:
    """Return a shard's samples by key, as far as it can be read."""
    samples: dict[str, _Sample] = {}
    try:
        for member, place, caption in _members(path, layout):
            match = MEMBER.fullmatch(member)
            if match is None:
                continue
            sample = samples.setdefault(match[1], _Sample())
            if caption is not None:
                sample.captions.append(caption)
            elif member in sample.pictures:
                faults.append(SkippedPicture(f"{name}/{member}", "the shard holds it twice, the first stays"))
            else:
                sample.pictures[member] = place
    except (tarfile.TarError, OSError, ValueError) as error:
        faults.append(SkippedPicture(name, f"{error}; what comes after is lost"))
    return samples


def _members(path: Path, layout: _Layout) -> Iterator[tuple[str, _Place, bytes | None]]:
    """Yield the members that are pictures or captions: name, place, and a caption's content.

    Raises:
        TarError, OSError, ValueError: where the shard cannot be read, or ends too early.
    """
    _check_plain(path)
    size = path.stat().st_size
    with tarfile.open(path, mode="r:") as archive:
        for member in archive:
            if member.offset_data + member.size > size:
                raise tarfile.ReadError(f"the shard is cut off within {member.name!r}")
            name = member.name.removeprefix("./")
            match = MEMBER.fullmatch(name)
            if match is None or not member.isreg() or any(map(is_set_aside, PurePosixPath(name).parts)):
                continue
            extension, place = match[2].lower(), _Place(member.offset_data, member.size)
            if extension == layout.caption:
                content = archive.extractfile(member)
                yield name, place, content.read() if content is not None else b""
            elif extension in layout.pictures and not member.issparse():
                yield name, place, None
        end = archive.offset
    # tarfile takes a damaged header, and the file's end, for the archive's end.
    with path.open("rb") as file:
        file.seek(end)
        mark = file.read(len(END_MARK))
    if mark != END_MARK:
        found = "the shard is cut off" if len(mark) < len(END_MARK) else "the shard is damaged"
        raise tarfile.ReadError(f"{found} at byte {end}, where a header or the end mark should be")


def _check_plain(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    for magic, kind in COMPRESSED.items():
        if start.startswith(magic):
            raise ValueError(f"compressed by {kind}, and pictures within cannot be read by their place, decompress it")


def _usable(sample: _Sample, layout: _Layout) -> tuple[str, _Place, str]:
    """Return a sample's picture, its place, and its caption.

    Raises:
        ValueError: with the reason, if there is not one of each.
    """
    if not sample.pictures:
        raise ValueError(f"it has a caption but no picture (.{', .'.join(sorted(layout.pictures))})")
    if len(sample.pictures) > 1:
        listed = " and ".join(sample.pictures)
        raise ValueError(f"it has several pictures, {listed}: name the extension that counts as picture_extensions")
    if len(sample.captions) != 1:
        raise ValueError(f"it has {'several' if sample.captions else 'no'} .{layout.caption} with a caption")
    [(member, place)] = sample.pictures.items()
    return member, place, _caption(sample.captions[0], layout.field)


def _caption(content: bytes, name: str | None) -> str:
    if name is None:
        return caption_from_file(content)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its JSON is broken: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"its JSON is a {type(fields).__name__}, expected an object")
    if name not in fields:
        raise ValueError(f"its JSON has no field {name!r}, only {', '.join(map(repr, fields))}")
    fault = caption_fault(fields[name])
    if fault is not None:
        raise ValueError(fault)
    return str(fields[name])
