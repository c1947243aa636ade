"""What the training loop costs: a step of it over one of a bare loop, on the same model, optimiser and batch size.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/loop_overhead.py --threads 1

The bare loop takes random latents and embeddings from memory, draws noise for the batch at once, and does nothing but
forward, backward, clipping, update and schedule. Ours reads latents and embeddings from the cache on disk, samples the
posterior, draws caption dropout and noise for each sample by itself, and checks losses, gradients and signals. Steps
alternate in one process, and ratios are taken between neighbours. One thread on a CPU is timed by what it computes,
anything else by the clock.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import mmpreproj
from mmpreproj.data.caching import StoredLatents, StoredTexts
from mmpreproj.data.encoding import EncodedPictures, TextEmbeddings
from mmpreproj.data.store import TensorStore, key_of
from mmpreproj.recipes.scratch import build_transformer
from mmpreproj.training.config import OptimizerConfig, ScratchModel, TrainConfig
from mmpreproj.training.loop import make_accelerator
from mmpreproj.training.optimisation import make_optimizer, make_schedule
from mmpreproj.training.stepper import Scheduler, Stepper
from mmpreproj.training.trainable import select_trainable

TEXT_WIDTH = 384


def store_random(folder: Path, *, count: int, side: int, tokens: int) -> EncodedPictures:
    """Put random latents with a spread, and an embedding for each, into a cache; return them as a run reads them."""
    store = TensorStore(folder)
    pictures, texts = ([key_of(kind=kind, place=place) for place in range(count)] for kind in ("picture", "text"))
    with store.writer() as writer:
        for picture, text in zip(pictures, texts, strict=True):
            writer.add(picture, {"mean": torch.randn(3, side, side), "deviation": torch.rand(3, side, side) * 0.1})
            embeddings = {"tokens": torch.randn(tokens, TEXT_WIDTH), "pooled": torch.randn(TEXT_WIDTH)}
            writer.add(text, {**embeddings, "mask": torch.ones(tokens, dtype=torch.bool)})
    empty = TextEmbeddings(**{name: value[None] for name, value in store[texts[0]].items()})
    return EncodedPictures(
        latents=StoredLatents(store, (tuple(pictures),)),
        captions=tuple(texts),
        text=StoredTexts(store, tuple(texts)),
        text_index=torch.arange(count),
        empty=empty,
    )


def bare_steps(transformer: nn.Module, config: TrainConfig, *, side: int, tokens: int) -> Iterator[None]:
    """Train on random tensors with nothing around it; each `next` is a step."""
    optimizer = make_optimizer(transformer, config.optimizer)
    schedule = make_schedule(optimizer, config.optimizer, steps=config.steps)
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    size = config.batch_size
    clean, text = torch.randn(size, 3, side, side), torch.randn(size, tokens, TEXT_WIDTH)
    pooled = torch.randn(size, TEXT_WIDTH)
    transformer.train()
    while True:
        noise, sigmas = torch.randn_like(clean), torch.rand(size)
        wide = sigmas.view(-1, 1, 1, 1)
        predicted = transformer(
            hidden_states=(1 - wide) * clean + wide * noise,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=1000 * sigmas,
            return_dict=False,
        )[0]
        F.mse_loss(predicted, noise - clean).backward()
        nn.utils.clip_grad_norm_(trained, config.optimizer.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield


def timed(step: Callable[[], Any], now: Callable[[], float]) -> float:
    """Return the milliseconds of a step."""
    began = now()
    step()
    return 1000 * (now() - began)


def main(
    width: int = 192,
    depth: int = 6,
    side: int = 32,
    patch_size: int = 4,
    text_tokens: int = 12,
    batch_size: int = 16,
    mode: str = "full",
    steps: int = 60,
    threads: int = 1,
    workers: int = 0,
) -> None:
    """Measure the loop, and print a table."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sizes = ScratchModel(width=width, heads=width // 32, depth=depth, patch_size=patch_size)
    ours = build_transformer(sizes, resolution=side, text_width=TEXT_WIDTH)
    mmpreproj.patch(ours)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            model="none",
            output=Path(folder),
            mode=mode,  # type: ignore[arg-type]
            data={"folder": folder, "workers": workers},  # type: ignore[arg-type]
            optimizer=OptimizerConfig(warmup_steps=0),
            steps=10 * steps,
            batch_size=batch_size,
        )
        select_trainable(ours, config)
        bare = copy.deepcopy(ours)
        pictures = store_random(Path(folder) / "cache", count=512, side=side, tokens=text_tokens)
        stepper = Stepper(ours, pictures, config, accelerator=make_accelerator(config), scheduler=Scheduler())
        stepper.begin()
        twin = copy.deepcopy(bare)
        loops = {"bare": bare_steps(bare, config, side=side, tokens=text_tokens)}
        loops["bare again"] = bare_steps(twin, config, side=side, tokens=text_tokens)
        numbers = iter(range(1, 10 * steps))
        arms: dict[str, Callable[[], Any]] = {name: lambda loop=loop: next(loop) for name, loop in loops.items()}  # type: ignore[misc]
        arms["ours"] = lambda: stepper.step(next(numbers))
        now = time.process_time if threads == 1 and workers == 0 else time.perf_counter
        times: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(-3, steps):
            order = [*arms][turn % len(arms) :] + [*arms][: turn % len(arms)]
            for name in order:
                times[name].append(timed(arms[name], now))
    table = Table("loop", "ms a step", "ratio to bare", title=f"width {width}, {depth} blocks, {batch_size} pictures")
    for name, taken in times.items():
        ratios = [one / other for one, other in zip(taken[3:], times["bare"][3:], strict=True)]
        table.add_row(name, _summary(taken[3:], "{:.1f}"), _summary(ratios, "{:.3f}"))
    Console(width=120).print(table)


def _summary(values: list[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return "{} [{}, {}]".format(*map(form.format, (middle, low, high)))


if __name__ == "__main__":
    typer.run(main)
