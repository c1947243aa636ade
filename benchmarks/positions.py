"""Where should positions be? Absolute in the residual stream, rotary at queries and keys, or both.

Trains the quickstart's model from nothing, arm by arm, on the same pictures with the same steps and seeds, and
measures the held-out loss at the training resolution and at a larger one. Learning rates are chosen per arm on a
validation split that is neither trained on nor reported. Results are appended to `results.jsonl` as they come, and
what is there already is not run again; `--report` prints the tables.

    python benchmarks/positions.py runs/positions --steps 300 && python benchmarks/positions.py runs/positions --report
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from diffusers import SD3Transformer2DModel
from diffusers.models.embeddings import get_2d_sincos_pos_embed_from_grid

import mmpreproj
from mmpreproj import Positions, PreProjConfig
from mmpreproj.data.buckets import Size
from mmpreproj.data.caching import Encoding, encode_pictures
from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.data.samples import look_at_pictures, plan_samples
from mmpreproj.data.sources.openmoji import OpenMojiSource
from mmpreproj.data.splitting import split_held_out
from mmpreproj.data.store import TensorStore
from mmpreproj.pipelines.identity import TEXT, VAE, fingerprint
from mmpreproj.recipes.quickstart import quickstart_config
from mmpreproj.recipes.scratch import build_pipeline, build_transformer
from mmpreproj.training.config import ScratchModel, TrainConfig
from mmpreproj.training.held_out import HeldOutLoss
from mmpreproj.training.loop import train

SMALL, LARGE = 32, 48  # pixels
HELD_OUT = 128
ROPE = Positions(absolute="remove", start="full")
POSITIONS = {
    "absolute": None,
    "rope": ROPE,
    "both": replace(ROPE, absolute="keep"),
    "rope theta 100": replace(ROPE, theta=100.0),
    "both theta 100": replace(ROPE, absolute="keep", theta=100.0),
    "rope text none": replace(ROPE, text="none"),
    "rope diagonal": replace(ROPE, text="diagonal"),
    "rope learned": replace(ROPE, start="identity"),
    "none": Positions(text="none", image="none", absolute="remove", start="full"),
}
ARMS = [f"{positions} | {content}" for content in ("stock", "adapter") for positions in ("absolute", "rope", "both")]


def adapter_of(arm: str, *, scaling: str = "none") -> PreProjConfig | None:
    """Return the adapter of an arm such as `rope | adapter`, or `rope | stock` without pre-projection and skip."""
    name, content = arm.split(" | ")
    positions = POSITIONS[name]
    if positions is not None and positions.image == "2d":
        positions = replace(positions, scaling=scaling, base_size=SMALL // 4)  # type: ignore[arg-type]
    if content == "adapter":
        return PreProjConfig(positions=positions)
    return None if positions is None else PreProjConfig(pre_projection=False, skip=False, positions=positions)


class Bench:
    """The data, in both sizes, and what every run shares."""

    def __init__(self, steps: int, *, cache: Path) -> None:
        self.config = quickstart_config()
        assert isinstance(self.config.model, ScratchModel)
        self.sizes = self.config.model
        self.steps, self.cache = steps, cache
        small, large = (self._encode(side) for side in (SMALL, LARGE))
        kept, test = split_held_out(small.captions, HELD_OUT, always_train=self.config.data.always_train)
        rest = small.subset(kept)
        trained, validation = split_held_out(
            rest.captions, HELD_OUT, seed=1, always_train=self.config.data.always_train
        )
        self.train, self.validation = rest.subset(trained), HeldOutLoss(rest.subset(validation))
        self.test, self.test_large = HeldOutLoss(small.subset(test)), HeldOutLoss(large.subset(test), levels=2)

    def _encode(self, side: int) -> EncodedPictures:
        pipeline = build_pipeline(self.sizes, resolution=side)
        source = OpenMojiSource(render_size=64)
        samples = plan_samples(look_at_pictures(source), [(Size(side, side),)], names=source.names)
        encoding = Encoding(vae=fingerprint(pipeline, VAE), text=fingerprint(pipeline, TEXT))
        return encode_pictures(pipeline, source, samples, encoding=encoding, store=TensorStore(self.cache))

    def build(self, arm: str, *, side: int = SMALL, scaling: str = "none") -> SD3Transformer2DModel:
        """Build an arm's model with random weights, for pictures of a side in pixels."""
        transformer = build_transformer(self.sizes, resolution=side, text_width=self.train.empty.tokens.shape[-1])
        adapter = adapter_of(arm, scaling=scaling)
        if adapter is not None:
            mmpreproj.patch(transformer, adapter)
        return transformer

    def run(self, arm: str, *, seed: int, rate: float) -> dict[str, Any]:
        """Train one model and measure it."""
        torch.manual_seed(seed)
        transformer = self.build(arm)
        optimizer = self.config.optimizer.model_copy(update={"learning_rate": rate})
        settings = {"steps": self.steps, "seed": seed, "optimizer": optimizer, "checkpoint_every": 0, "adapter": None}
        config: TrainConfig = self.config.model_copy(update=settings)
        began = time.perf_counter()
        train(transformer, self.train, config)
        seconds = time.perf_counter() - began
        measured = {"validation": self.validation(transformer), "test": self.test(transformer)}
        return {
            "arm": arm,
            "seed": seed,
            "rate": rate,
            "steps": self.steps,
            "seconds": seconds,
            **measured,
            **self.measure_large(arm, transformer),
        }

    def measure_large(self, arm: str, trained: SD3Transformer2DModel) -> dict[str, float]:
        """Measure on larger pictures, with every way there is to give them positions."""
        adapter = adapter_of(arm)
        positions = None if adapter is None else adapter.positions
        if positions is None:
            ways = [("extended", "none"), ("interpolated", "none")]
        elif positions.absolute == "keep":
            ways = [("extended", "none"), ("interpolated", "linear"), ("extended", "ntk"), ("interpolated", "yarn")]
        else:
            scalings = ("none", "linear", "ntk", "yarn") if positions.image == "2d" else ("none",)
            ways = [("removed", scaling) for scaling in scalings]
        losses = {}
        for spacing, scaling in ways:
            model = self.build(arm, side=LARGE, scaling=scaling).eval()
            state = trained.state_dict()
            state["pos_embed.pos_embed"] = larger_table(trained, LARGE // 4, spacing=spacing)
            model.load_state_dict(state)
            losses[f"large, {spacing}, {scaling}"] = self.test_large(model)
        return losses


def larger_table(trained: SD3Transformer2DModel, side: int, *, spacing: str) -> torch.Tensor:
    """Return the sin-cos table of a larger grid: with the trained spacing around the same centre, or squeezed in."""
    small = trained.config.pos_embed_max_size
    places = torch.arange(side, dtype=torch.float32)
    places = places - (side - small) // 2 if spacing == "extended" else places * (small - 1) / (side - 1)
    grid = torch.stack(torch.meshgrid(places, places, indexing="xy")).reshape(2, 1, side, side)
    return get_2d_sincos_pos_embed_from_grid(trained.inner_dim, grid, output_type="pt").float()[None]


def best_rate(results: list[dict[str, Any]], arm: str) -> float:
    """Return the learning rate of the lowest validation loss at seed 0."""
    tried = [result for result in results if result["arm"] == arm and result["seed"] == 0]
    return min(tried, key=lambda result: result["validation"])["rate"]


def plan(
    arms: list[str], rates: list[float], seeds: list[int], results: list[dict[str, Any]]
) -> Iterator[tuple[str, int, float]]:
    """Give the runs that are to be done, as (arm, seed, rate): every rate at seed 0, then the best at every seed."""

    def is_done(*run: Any) -> bool:
        return run in [(result["arm"], result["seed"], result["rate"]) for result in results]

    for rate in rates:
        yield from ((arm, 0, rate) for arm in arms if not is_done(arm, 0, rate))
    for seed in seeds:
        for arm in arms:
            rate = best_rate(results, arm)
            if not is_done(arm, seed, rate):
                yield arm, seed, rate


def summary(results: list[dict[str, Any]]) -> str:
    """Write mean and range over seeds of every arm at its chosen rate, as Markdown."""
    lines = [
        "| arm | rate | seeds | 32 px | 48 px, best way | 48 px, all ways (mean) | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(result["arm"] for result in results):
        rate = best_rate(results, arm)
        runs = [result for result in results if result["arm"] == arm and result["rate"] == rate]
        ways = [key for key in runs[0] if key.startswith("large")]
        best = min(ways, key=lambda way: statistics.mean(run[way] for run in runs))
        means = "; ".join(
            f"{way.removeprefix('large, ')} {statistics.mean(run[way] for run in runs):.4f}" for way in ways
        )
        seconds = statistics.median(run["seconds"] for run in runs)
        losses = (spread(runs, "test"), spread(runs, best), means)
        lines.append(f"| {arm.replace(' |', ',')} | {rate:g} | {len(runs)} | {' | '.join(losses)} | {seconds:.0f} |")
    return "\n".join(lines)


def spread(runs: list[dict[str, Any]], key: str) -> str:
    """Write the mean of a value over runs, and its smallest and largest."""
    values = [run[key] for run in runs]
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def main(
    folder: Path,
    steps: int = 400,
    arms: Annotated[list[str], typer.Option("--arm")] = ARMS,
    rates: Annotated[list[float], typer.Option("--rate")] = [2e-3, 4e-3, 8e-3],  # noqa: B006 - typer's way
    seeds: Annotated[list[int], typer.Option("--seed")] = [0, 1, 2],  # noqa: B006
    report: bool = False,
) -> None:
    """Run what is not in FOLDER/results.jsonl yet, or print the tables of what is."""
    path = folder / "results.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    if report:
        print(summary(results))
        return
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(steps, cache=folder / "cache")
    for arm, seed, rate in plan(arms, rates, seeds, results):
        result = bench.run(arm, seed=seed, rate=rate)
        results.append(result)
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{arm}, seed {seed}, rate {rate:g}: {result['validation']:.4f} {result['test']:.4f}", flush=True)


if __name__ == "__main__":
    typer.run(main)
