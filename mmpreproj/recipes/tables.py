"""Tables for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmpreproj.patching.profile import Profile, format_norm
from mmpreproj.recipes.inspect import AdapterSummary


def print_summary(summary: AdapterSummary, console: Console | None = None) -> None:
    """Print what is inside a saved adapter."""
    console = console or Console()
    saved, base = summary.saved, summary.saved.base
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    blocks = sorted({row.block for row in summary.profile.rows} | {row.block for row in summary.profile.gains})
    if saved.config.needs_processor:  # in every block, with weights or without
        blocks = list(range(base.depth))
    points, length = saved.config.points, saved.max_sequence_length
    path = [] if points is None else [f"{key} {value}" for key, value in points.to_dict().items()]
    for label, value in (
        ("adapter", str(summary.folder)),
        ("base", str(base).replace(" of width", ", width")),
        ("base model", base.name_or_path or "not recorded"),
        ("blocks", f"{len(blocks)} of {base.depth}: {', '.join(map(str, blocks))}"),
        ("parameters", f"{summary.parameters:,} ({', '.join([*summary.dtypes, f'{summary.bytes / 1e6:.1f} MB'])})"),
        ("points", f"{', '.join(path)}; {summary.point_parameters:,} parameters" if path else "none"),
        ("texts", f"{length} tokens at most (max_sequence_length)" if length is not None else "not recorded"),
        ("config", ", ".join(f"{key}={value}" for key, value in saved.config.to_dict().items())),
        ("written by", f"mmpreproj {saved.library_version}"),
    ):
        facts.add_row(label, Text(value))
    console.print(facts, highlight=False)
    if summary.profile.rows:
        console.print(profile_table(summary.profile), highlight=False)
    if summary.profile.gains:
        console.print(gain_table(summary.profile), highlight=False)


def profile_table(profile: Profile) -> Table:
    """Build a table of the skip profile."""
    table = Table("block", "attention", "weights", "‖W_skip‖", "‖W_down‖", title="skip profile (Frobenius norms)")
    for row in profile:
        skip, down = format_norm(row.skip, row.skip_initial), format_norm(row.down, row.down_initial)
        table.add_row(str(row.block), row.attention, row.weights, skip, down)
    return table


def gain_table(profile: Profile) -> Table:
    """Build a table of the rotary gains."""
    table = Table("block", "attention", "stream", "mean |gain|", title="rotary gains")
    for row in profile.gains:
        table.add_row(str(row.block), row.attention, row.stream, format_norm(row.gain, None))
    return table
