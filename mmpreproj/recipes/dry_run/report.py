"""What a dry run found out, and how it is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from rich.text import Text

from mmpreproj.data.sources.pictures import SkippedPicture
from mmpreproj.recipes.dry_run.looking import DataLook
from mmpreproj.recipes.dry_run.memory import StepMemory, in_bytes
from mmpreproj.recipes.dry_run.trial import Widths
from mmpreproj.training.config import ScratchModel, TrainConfig

Row = tuple[str, str]


@dataclass(frozen=True)
class Parameters:
    """How many parameters a part has, and how many of them train."""

    part: str
    count: int
    trained: int


@dataclass(frozen=True)
class DryRun:
    """What was found out of a run before it began; as text, a few lines for people.

    Attributes:
        config: the run's settings.
        device: where the run would compute.
        data: what was seen of the data.
        widths: what the encoders give.
        parameters: by part, of those parts that there are.
        memory: of a training step.
        encoders: bytes of the weights of VAE and text encoders, which are gone from the device when training begins.
        encoding: bytes of all weights that are on the device before that: on the CPU the transformer's too.
        there: bytes of memory that there are; None where that is not known.
        resumed: the step that the run would go on from.
        warnings: what does not keep the run from beginning.
        seconds: that the dry run took.
    """

    config: TrainConfig
    device: torch.device
    data: DataLook
    widths: Widths
    parameters: tuple[Parameters, ...]
    memory: StepMemory
    encoders: int
    encoding: int
    there: int | None
    resumed: int | None
    warnings: tuple[str, ...]
    seconds: float

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(part.count for part in self.parameters)

    @property
    def trained(self) -> int:
        """Number of parameters that train."""
        return sum(part.trained for part in self.parameters)

    @property
    def fits(self) -> bool:
        """Whether training and encoding fit into the memory that there is; true where that is not known."""
        return self.there is None or max(self.memory.total, self.encoding) <= self.there

    def __str__(self) -> str:
        """Say it in lines, each with what it is about."""
        return "\n".join(f"{label:<10}  {text}".rstrip() for label, text in self.rows())

    def table(self) -> Table:
        """Build what `str` says as a table, whose cells are wrapped where the terminal is narrow."""
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for label, text in self.rows():
            table.add_row(label, Text(text))
        return table

    def rows(self) -> Iterator[Row]:
        """Yield what there is to say, line by line: what it is about, where that changes, and the text."""
        yield from _data_rows(self.data)
        yield from _model_rows(self)
        yield from _memory_rows(self)
        yield from _labelled("warning", self.warnings)


def warnings_of(
    config: TrainConfig, memory: StepMemory, *, encoding: int, there: int | None, device: torch.device
) -> list[str]:
    """Say what does not fit into memory, and the ways out that are left."""
    if there is None:
        return []
    where = f"{device} has {in_bytes(there)}" + (" free" if device.type == "cuda" else "")
    found = []
    if memory.total > there:
        ways = {
            "gradient_checkpointing: true": not config.gradient_checkpointing,
            "a smaller batch_size, with gradient_accumulation": config.batch_size > 1,
            "precision: bf16": config.precision == "no",
            "adapter: {blocks: {last: 8}}": config.mode == "probe" and config.adapter is not None,
            "a smaller data.resolution": True,
        }
        left = ", ".join(way for way, is_left in ways.items() if is_left)
        found.append(f"a step takes about {in_bytes(memory.total)}, and {where}; ways out: {left}")
    if encoding > there:
        way = "" if config.precision != "no" or config.mode == "full" else "; way out: precision: bf16"
        found.append(f"encoding takes {in_bytes(encoding)} for weights alone, and {where}{way}")
    return found


def _data_rows(data: DataLook) -> Iterator[Row]:
    yield from _labelled(
        "data",
        [
            f"{one.name}: {_count(one.pictures, 'picture')}, {_count(one.captions, 'different caption')}, "
            f"{_count(one.faults, 'fault')}"
            for one in data.sources
        ],
    )
    yield from _labelled("left out", [f"{run}, which a run has written" for run in data.runs])
    most = "" if data.is_whole else "at most "
    less = "" if data.is_whole else "; less what is wrong with pictures that were not decoded here"
    yield "split", f"{most}{data.trained:,} trained on, {data.held_out:,} held out{less}"
    yield "looked at", f"{data.looked:,} of {_count(data.pictures, 'picture')}, of which {data.decoded:,} decoded"
    yield from _left_out("faults", data.faults)
    yield from _left_out("unreadable", data.unreadable)
    yield from _left_out("too small", data.too_small)
    yield from _labelled("sizes", [str(report) for report in data.buckets])
    yield from _labelled(
        "captions",
        [
            f"{one.tokenizer}: the longest of {one.captions:,} has {one.longest} tokens, and there is room for "
            f"{one.room}; {one.cut:,} are cut"
            for one in data.captions
        ]
        or ["not measured: the model's tokenizers are not on this machine yet"],
    )
    if data.clouds is not None:
        yield (
            "clouds",
            f"{data.clouds:,} of {_count(data.pictures, 'picture')} have one; {data.clouds_read:,} were read",
        )
        yield from _left_out("unreadable", data.unreadable_clouds)


def _model_rows(found: DryRun) -> Iterator[Row]:
    config, widths, sizes = found.config, found.widths, found.data.sizes
    name = config.model
    if isinstance(name, ScratchModel):
        name = "a new one, " + ", ".join(f"{key} {value}" for key, value in name.model_dump().items())
    yield "model", f"{name}; built without its weights"
    lines = [f"{one.part}: {one.count:,}, of which {one.trained:,} train" for one in found.parameters]
    yield from _labelled("parameters", [*lines, f"in all: {found.count:,}, of which {found.trained:,} train"])
    count, texts = config.batch_size, f"texts {[config.batch_size, widths.length, widths.text]}"
    shapes = [
        f"latents {[count, widths.channels, size.height // widths.cell, size.width // widths.cell]}, {texts}, "
        f"pooled {[count, widths.pooled]}: fits"
        for size in dict.fromkeys((sizes[-1], sizes[0]))
    ]
    yield from _labelled("a batch", shapes)
    yield from _text_rows(found)
    if found.resumed is not None:
        yield "resume", f"after step {found.resumed:,} of {config.steps:,}"


def _text_rows(found: DryRun) -> Iterator[Row]:
    """Say how long texts are, and why they are not as long as was asked for."""
    asked, length = found.config.max_sequence_length, found.widths.length
    if length < asked:
        yield (
            "text length",
            f"{length} tokens, all that the tokenizer takes (model_max_length); max_sequence_length: {asked} changes "
            "nothing",
        )
    elif length > asked:
        yield "text length", f"{length} tokens, {length - asked} of CLIP and {asked} of T5 (max_sequence_length)"
    else:
        yield "text length", f"{length} tokens (max_sequence_length)"


def _memory_rows(found: DryRun) -> Iterator[Row]:
    memory, where = found.memory, str(found.device)
    kept = ", with gradient checkpointing" if found.config.gradient_checkpointing else ""
    parts = {
        "frozen weights": memory.frozen,
        "trained weights": memory.trained,
        "gradients": memory.gradients,
        f"states of {found.config.optimizer.name}": memory.optimiser,
        "moving average": memory.average,
        f"activations{kept}": memory.activations,
    }
    yield "memory", f"a step takes about {in_bytes(memory.total)} on {where}:"
    yield from (("", f"{in_bytes(size, beside=memory.total):>12}  {part}") for part, size in parts.items() if size)
    of = "the whole pipeline" if found.encoding > found.encoders else "VAE and text encoders"
    yield "", f"encoding, before that, takes {in_bytes(found.encoding)} for the weights of {of}"
    if found.there is None:
        yield "", f"how much memory {where} has is not known"
    else:
        yield "", f"{where} has {in_bytes(found.there)}" + (" free" if found.device.type == "cuda" else "")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _left_out(label: str, skipped: Sequence[SkippedPicture]) -> Iterator[Row]:
    return _labelled(label, [f"{one.name}: {one.reason}" for one in skipped])


def _labelled(label: str, texts: Sequence[str]) -> Iterator[Row]:
    """Put a label before the first of some lines."""
    return ((label if not number else "", text) for number, text in enumerate(texts))
