"""The model card of a saved adapter: a README with its skip profile as a picture; and the parts that cards share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from mmpreproj.files import write_atomically
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import FAMILIES
from mmpreproj.patching.files.format import SavedAdapter
from mmpreproj.patching.points.settings import PointPathConfig
from mmpreproj.patching.profile import Profile
from mmpreproj.patching.report import PatchReport

CARD_NAME = "README.md"
PICTURE_NAME = "profile.png"
MARK = "<!-- written by mmpreproj.save, and written anew by it while this line is here -->"
INITIAL = "#e08a2e"
TAGS = ("mmpreproj", "diffusers", "adapter")
LANGUAGE_TAGS = ("mmpreproj", "transformers", "adapter")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def write_card(folder: Path, saved: SavedAdapter, report: PatchReport, profile: Profile) -> None:
    """Write `README.md` and `profile.png` beside an adapter; a README without our mark is left alone."""
    if not may_write(folder, MARK):
        return
    if profile.rows or profile.gains:
        write_atomically(folder / PICTURE_NAME, lambda path: draw_profile(profile, Path(path)))
    write_text(folder / CARD_NAME, _card(saved, report, profile))


def may_write(folder: Path, *marks: str) -> bool:
    """Tell whether a folder has no README, or one with a mark of ours."""
    card = folder / CARD_NAME
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else None
    return text is None or any(mark in text for mark in marks)


def write_text(path: Path, text: str) -> None:
    """Write a text in one move."""
    write_atomically(path, lambda place: Path(place).write_text(text, encoding="utf-8"))


def is_hub_id(source: str | None) -> bool:
    """Tell whether this names a repository of the hub, `owner/name`, and no folder on this disk."""
    return source is not None and HUB_ID.fullmatch(source) is not None and not Path(source).exists()


def front_matter(base: str | None, *, library: str, tags: Sequence[str], **further: Any) -> list[str]:
    """Write what the hub reads of a card, in lines.

    Args:
        base: hub id of the base; None where it has none.
        library: what loads the files.
        tags: for the hub's search.
        further: other fields of `huggingface_hub.ModelCardData`; those that are None are left out.
    """
    data = ModelCardData(library_name=library, base_model=base, tags=list(tags), **further)
    return ["---", *data.to_yaml().splitlines(), "---"]


def draw_profile(profile: Profile, path: Path) -> None:
    """Draw `‖W_skip‖_F` and `‖W_down‖_F` per block as PNG, and the rotary gains where there are any.

    Initial values are ticks across the bars.
    """
    from matplotlib.figure import Figure  # a second to import, and not needed to patch

    names = [row.attention for row in profile.rows] + [row.attention for row in profile.gains]
    several = len(set(names)) > 1  # in some blocks
    labels = [_row_label(row.block, row.attention if several else "", row.weights) for row in profile]
    skips = [(row.skip, row.skip_initial) for row in profile]
    downs = [(row.down, row.down_initial) for row in profile]
    panels = [
        ("‖W_skip‖, content skip (Frobenius norm)", labels, skips),
        ("‖W_down‖, pre-projection (Frobenius norm)", labels, downs),
    ]
    if profile.gains:
        streams = [_row_label(row.block, row.attention if several else "", row.stream) for row in profile.gains]
        panels = [panel for panel in panels if panel[1]]
        panels.append(("rotary gain, mean size over heads", streams, [(row.gain, 0.0) for row in profile.gains]))
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, *panel)
    figure.savefig(path, dpi=100, format="png")


def _draw_panel(axes: Any, title: str, labels: list[str], values: list[tuple[float | None, float | None]]) -> None:
    now, start = [end or 0.0 for end, _ in values], [first or 0.0 for _, first in values]
    places = range(len(labels))
    axes.bar(places, now, color="#2b5d8c", label="now")
    axes.scatter(places, start, color=INITIAL, marker="_", s=200, label="at the start")
    axes.set_xticks(places, labels, fontsize=9 if len(labels) <= 16 else 6)
    axes.set(title=title, xlabel="block", ylim=(0, 1.25 * max([*now, *start, 1e-12])))
    axes.legend(frameon=False, loc="upper center", ncols=2)


def _row_label(block: int, attention: str, weights: str) -> str:
    label = str(block) if attention in ("", "attn") else f"{block} {attention}"
    return label if weights == "shared" else f"{label}\n{weights}"


def _card(saved: SavedAdapter, report: PatchReport, profile: Profile) -> str:
    source = saved.base.name_or_path
    is_multimodal = "image" in report.streams
    tags, model = (TAGS, "pipe.transformer") if is_multimodal else (LANGUAGE_TAGS, "model")
    is_known = any(row.model_class == saved.base.model_class for row in FAMILIES)
    place = "in the folder of this file; else its path, or its hub id"
    lines = [
        *front_matter(source if is_hub_id(source) else None, library="mmpreproj", tags=tags),
        MARK,
        "",
        f"# {title_of(saved.config)}",
        "",
        describe_adapter(saved),
        "",
        "```python",
        "import mmpreproj",
        "",
        *([] if is_known else ["row = ...  # the Family that the model was patched by"]),
        f'mmpreproj.load({model}, "."{"" if is_known else ", family=row"})  # {place}',
        "```",
        "",
        *adapter_table(saved, report),
        "",
        *profile_section(profile),
    ]
    return "\n".join(lines)


def describe_adapter(saved: SavedAdapter) -> str:
    """Say in a sentence what an adapter is and for what."""
    source = saved.base.name_or_path
    where = f"`{source}`" if is_hub_id(source) else f"a `{saved.base.model_class}`"
    return (
        f"An adapter for {where}: pre-projection is nonlinear features before Q/K/V, content skip a linear "
        "way around attention ([arXiv 2604.10791](https://arxiv.org/abs/2604.10791))."
    )


def adapter_table(saved: SavedAdapter, report: PatchReport) -> list[str]:
    """Write what an adapter is as a table, in lines."""
    points, length = saved.config.points, saved.max_sequence_length
    return [
        "| what | value |",
        "|---|---|",
        f"| made for | {saved.base} |",
        f"| blocks | {_ranges(report.blocks)} |",
        f"| streams | {', '.join(report.streams)} |",
        f"| parameters | {report.parameters:,} |",
        *([f"| point path | {_points(points)}; {report.point_parameters:,} parameters |"] if points else []),
        *([f"| longest text | {length} tokens |"] if length is not None else []),
        *(f"| `{field}` | {value!r} |" for field, value in saved.config.to_dict().items()),
        f"| saved by | mmpreproj {saved.library_version} |",
    ]


def profile_section(profile: Profile) -> list[str]:
    """Show the skip profile, picture and figures, in lines; none where there is none."""
    if not (profile.rows or profile.gains):
        return []
    picture = f"![norms of W_skip and W_down, and rotary gains, per block]({PICTURE_NAME})"
    return ["## Skip profile", "", picture, "", "```", str(profile), "```", ""]


def title_of(config: PreProjConfig) -> str:
    """Name what an adapter adds, as a heading."""
    parts = {
        "pre-projection": config.pre_projection,
        "content skip": config.skip,
        "rotary positions": config.positions is not None,
        "padding mask": config.mask_padding,
        "point path": config.points is not None,
    }
    *others, last = (part for part, there in parts.items() if there)
    title = f"{', '.join(others)} and {last}" if others else last
    return title[0].upper() + title[1:]


def _points(config: PointPathConfig) -> str:
    """Say what the point path is for."""
    uses = []
    if config.condition:
        uses.append('clouds condition pictures, `joint_attention_kwargs={"point_cloud": …, "point_mask": …}`')
    if config.generate:
        uses.append("clouds are generated, `mmpreproj.points.point_velocity`")
    return "; ".join(uses)


def _ranges(blocks: Sequence[int]) -> str:
    """Write ascending indices shortly: `0 to 3, 7`."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
