"""What a card says of a run's data, results and settings; of paths on this disk it gives names alone."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import yaml

from mmpreproj.patching.files.card import is_hub_id
from mmpreproj.recipes.train.inputs import Inputs
from mmpreproj.training.config import SourceConfig, TrainConfig
from mmpreproj.training.loop import StepRecord

CURVES_NAME = "loss.png"
REASONS, SHARDS, EVALUATIONS = 8, 3, 20  # how many are listed at most
NAMES_PLACES = frozenset({"model", "dataset", "data_files", "shards"})  # fields of text that may hold a path
_VARYING = re.compile(r"""(?<!\w)b?'[^']*'|(?<!\w)b?"[^"]*"|\S*[/\\]\S*|\d[\d.,]*""")


def data_section(config: TrainConfig, inputs: Inputs) -> list[str]:
    """Say what a run was trained on, in lines."""
    data = config.data
    trained, held_out = (len({inputs.pictures.places[place] for place in side}) for side in inputs.places)
    how = {"picture": "chosen at random", "caption": "whole captions, with all their pictures"}[data.held_out_by]
    sizes = " and ".join(f"{side} × {side}" for side in data.resolutions)
    shapes = "cut to the centred square" if data.aspect == "square" else "in buckets of their own shapes"
    lines = ["## Data", "", *(f"- {_describe(source)}" for source in data.sources)]
    lines += [
        f"- {trained} pictures trained on; "
        + (f"{held_out} held out, {how}, never trained on" if held_out else "none held out"),
        f"- {sizes} pixels, {shapes}",
        f"- captions dropped for guidance: {_percent(config.caption_dropout)}; pictures mirrored: "
        f"{_percent(data.flip)}; texts of at most {config.max_sequence_length} tokens",
    ]
    if inputs.pictures.has_cloud is not None:
        count = int(inputs.pictures.has_cloud.sum())
        lines.append(f"- {count} of {len(inputs.pictures)} samples have a point cloud")
    left_out = [fault.reason for fault in inputs.skipped]
    lines += [f"- {len(left_out)} left out:" if left_out else "- none left out", *_reasons(left_out)]
    return [*lines, "", *_bucket_table(inputs)]


def results_section(config: TrainConfig, history: Sequence[StepRecord]) -> list[str]:
    """Show what was measured, as curves and in figures, in lines."""
    lines = ["## Results", ""]
    if (config.output / CURVES_NAME).is_file():
        lines += [f"![loss against steps]({CURVES_NAME})", ""]
    records = [record for record in history if record.held_out_losses]
    if not records:
        return [*lines, "No pictures were held out, so the training loss is all that was measured.", ""]
    names = list(dict.fromkeys(name for record in records for name in record.held_out_losses))
    rows = [
        f"| {record.step:,} | "
        + " | ".join("" if (loss := record.held_out_losses.get(name)) is None else f"{loss:.4f}" for name in names)
        + " |"
        for record in _spread(records)
    ]
    return [
        *lines,
        "Held-out loss: mean squared error of the velocity `ε − x`, over noise levels spread evenly, on the same "
        "pictures and noise each time. It is not on one scale with the training loss.",
        "",
        f"| step | {' | '.join(f'held out: {name}' for name in names)} |",
        "|" + "---|" * (1 + len(names)),
        *rows,
        "",
    ]


def data_sets(config: TrainConfig) -> list[str]:
    """Name the data sets of the hub that a run was trained on."""
    return [source.dataset for source in config.data.sources if source.dataset and is_hub_id(source.dataset)]


def settings_section(config: TrainConfig) -> list[str]:
    """Give the whole configuration, folded, in lines."""
    text = yaml.safe_dump(public_settings(config), sort_keys=False, allow_unicode=True, width=110)
    head = ["## Settings", "", "<details>", "<summary>The run's configuration, with all defaults</summary>", ""]
    return [*head, "```yaml", *text.splitlines(), "```", "", "</details>", ""]


def public_settings(config: TrainConfig) -> dict[str, Any]:
    """Return a configuration as plain values that read back, without what only this disk knows.

    A path that leads away from the folder that the run began in is cut to its last part, and an address loses
    whatever may be a password.
    """
    paths, plain = config.model_dump(mode="python"), config.model_dump(mode="json")
    return _without_places(paths, plain)


def public_place(place: str) -> str:
    """Return a path, hub id or address as it may be shown to anybody."""
    if "://" in place:
        parts = urlsplit(place)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    windows = PureWindowsPath(place)  # knows both slashes
    away = windows.anchor or place.startswith("~") or ".." in windows.parts
    return windows.name or "root" if away else place


def quoted(text: str) -> str:
    """Put a text between quotation marks, on one line and as no markup."""
    return f"“{html.escape(' '.join(text.split()), quote=False)}”"


def _without_places(value: Any, plain: Any, *, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _without_places(value[name], plain[name], key=name) for name in plain}
    if isinstance(value, (list, tuple)):
        return [_without_places(*pair, key=key) for pair in zip(value, plain, strict=True)]
    is_place = isinstance(value, Path) or (key in NAMES_PLACES and isinstance(value, str))
    return public_place(plain) if is_place else plain


def _describe(source: SourceConfig) -> str:
    """Say what a source is, by kind and name."""
    if source.source == "openmoji":
        what = "drawings of [OpenMoji](https://openmoji.org), CC BY-SA 4.0, with their Unicode names"
    elif source.source == "furniture":
        what = "named shapes and their icons, of the Debian package sweethome3d-furniture"
    elif source.source == "dataset":
        name = source.dataset or ""
        shown = f"[{name}](https://huggingface.co/datasets/{name})" if is_hub_id(name) else f"`{_last(name)}`"
        what = f"data set {shown}, {f'{source.subset}, ' if source.subset else ''}split `{source.split}`"
    elif source.source == "shards":
        named = ", ".join(f"`{_last(shard)}`" for shard in source.shards[:SHARDS])
        more = len(source.shards) - SHARDS
        what = f"tar files {named}{f' and {more} more' if more > 0 else ''}"
    else:
        what = f"folder `{public_place(str(source.folder))}`"
    draws = "" if source.weight is None else f", of weight {source.weight:g}"
    return what + draws + ("" if source.repeats == 1 else f", each picture {source.repeats:g} times an epoch")


def _spread(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Keep some of many records, evenly, the first and the last among them."""
    last = len(records) - 1
    count = min(EVALUATIONS, len(records))
    return [records[round(place * last / max(1, count - 1))] for place in range(count)]


def _last(place: str) -> str:
    """Name a folder or a file without where it lies."""
    return PureWindowsPath(public_place(place)).name


def _reasons(reasons: Sequence[str]) -> list[str]:
    """Count reasons, those that differ in names and numbers alone as one."""
    counted = Counter(html.escape(_VARYING.sub("…", reason), quote=False) for reason in reasons).most_common()
    lines = [f"  - {count} ×: {' '.join(reason.split())}" for reason, count in counted[:REASONS]]
    others = sum(count for _, count in counted[REASONS:])
    return [*lines, *([f"  - {others} for other reasons"] if others else [])]


def _bucket_table(inputs: Inputs) -> list[str]:
    if not inputs.buckets:
        return []
    rows = [
        f"| {bucket.bucket.width} × {bucket.bucket.height} | {bucket.pictures} | {_percent(bucket.mean_cropped)} | "
        f"{_percent(bucket.largest_cropped)} |"
        for bucket in inputs.buckets
    ]
    head = [
        "| pixels, width × height | pictures, held out too | cropped on average | cropped at most |",
        "|---|---|---|---|",
    ]
    return [*head, *rows, ""]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
