"""Do clouds from prompts look like the named thing, and does a cloud help to make its picture?

Trains `configs/furniture_points.yaml` once a seed and measures, in the same run, on names that were trained on and on
names that were not:

- prompts to clouds: Chamfer distance to the real cloud of the name, coverage and 1-NNA of the set, beside three
  references: a Gaussian fitted to all points of the training clouds, the pooled points of the category (its mean
  shape), and a random training cloud;
- clouds to pictures: the held-out flow loss with the right cloud, with none, and with that of another name.

What is in the folder already is not run again; `--report` prints the tables.

    python benchmarks/points.py runs/points --folder furniture/usr/share/sweethome3d/furniture
    python benchmarks/points.py runs/points --report
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.data.sources.furniture import FurnitureSource
from mmpreproj.pipelines.shapes import PreProjShapePipeline
from mmpreproj.points.drawing import draw_clouds_grid
from mmpreproj.points.metrics import chamfer_distance, coverage, nearest_neighbour_accuracy, pairwise_chamfer
from mmpreproj.recipes.train import TrainingRun, run_training
from mmpreproj.training.config import read_config
from mmpreproj.training.held_out import HeldOutLoss
from mmpreproj.training.triplets import CloudHeldOutLoss, with_clouds_alone

CONFIG = Path(__file__).parents[1] / "configs" / "furniture_points.yaml"
NAMES = 48  # of each split
STEPS = 30
POINTS = 512  # of each cloud that is scored
Split = dict[str, Any]


def pick_names(pictures: EncodedPictures, places: list[int], *, count: int) -> list[int]:
    """Pick one picture for each of some names, among those at `places`; the same ones every time."""
    first = {pictures.captions[place]: place for place in reversed(places)}
    names = sorted(first)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))[:count].tolist()
    return sorted(first[names[place]] for place in order)


def score(made: Tensor, real: Tensor, among_real: Tensor) -> dict[str, float]:
    """Score clouds `[N, P, 3]` against the real ones of the same names, whose own distances are `[N, N]`."""
    across = pairwise_chamfer(made, real)
    return {
        "chamfer": float(chamfer_distance(made, real).mean()),
        "coverage": coverage(across),
        "1-NNA": nearest_neighbour_accuracy(pairwise_chamfer(made, made), across, among_real),
    }


class Judge:
    """What a run is measured against: the clouds of its training pictures."""

    def __init__(self, run: TrainingRun, categories: list[str], *, seed: int) -> None:
        self.pictures, (self.trained, self.held_out) = run.pictures, map(list, run.places)
        self.categories = [categories[place] for place in run.pictures.places]
        self.generator = torch.Generator().manual_seed(seed)
        self.clouds = run.pictures.clouds
        self.pipeline = PreProjShapePipeline.from_pipe(run.pipeline)
        self.pipeline.set_progress_bar_config(disable=True)

    def measure(self, guidance: float) -> Split:
        """Score the model and the references on training names and held-out names."""
        results: Split = {}
        for split, places in (("training", self.trained), ("held-out", self.held_out)):
            chosen = pick_names(self.pictures, list(places), count=NAMES)
            real = self.subset(self.clouds[chosen])
            among_real = pairwise_chamfer(real, real)
            arms: dict[str, Callable[[], Tensor]] = {
                "model": lambda chosen=chosen: self.generate(chosen, guidance),
                "Gaussian": lambda chosen=chosen: self.gaussian(len(chosen)),
                "mean of the category": lambda chosen=chosen: self.category_means(chosen),
                "random training cloud": lambda chosen=chosen: self.random_clouds(len(chosen)),
                "another sample of the real cloud": lambda chosen=chosen: self.subset(self.clouds[chosen]),
            }
            results[split] = {arm: score(make(), real, among_real) for arm, make in arms.items()}
        return results

    def subset(self, clouds: Tensor) -> Tensor:
        """Draw points of clouds `[N, K, 3]`, others for each call: `[N, P, 3]`."""
        places = torch.stack([torch.randperm(clouds.shape[1], generator=self.generator)[:POINTS] for _ in clouds])
        return clouds.gather(1, places[..., None].expand(-1, -1, 3))

    def generate(self, chosen: list[int], guidance: float, *, points: int = POINTS) -> Tensor:
        """Generate a cloud for each picture's name."""
        prompts = [self.pictures.captions[place] for place in chosen]
        made = self.pipeline(
            prompts,
            num_points=points,
            num_inference_steps=STEPS,
            guidance_scale=guidance,
            generator=self.generator,
            output_type="pt",
        )
        return made.clouds

    def gaussian(self, count: int) -> Tensor:
        """Draw clouds from a Gaussian fitted to all points of the training clouds."""
        points = self.clouds[self.trained].reshape(-1, 3).double()
        mean, factor = points.mean(dim=0), torch.linalg.cholesky(points.T.cov())
        noise = torch.randn(count, POINTS, 3, generator=self.generator, dtype=torch.float64)
        return (mean + noise @ factor.T).float()

    def category_means(self, chosen: list[int]) -> Tensor:
        """Draw, for each picture, points of all training clouds of its category."""
        made = []
        for place in chosen:
            members = [other for other in self.trained if self.categories[other] == self.categories[place]]
            points = self.clouds[members].reshape(-1, 3)
            made.append(points[torch.randint(len(points), (POINTS,), generator=self.generator)])
        return torch.stack(made)

    def random_clouds(self, count: int) -> Tensor:
        """Draw real clouds at random from the training pictures."""
        places = torch.tensor(self.trained)[torch.randint(len(self.trained), (count,), generator=self.generator)]
        return self.subset(self.clouds[places])

    def pictures_from_clouds(self) -> dict[str, float]:
        """Measure the held-out flow loss of pictures with the right cloud, none, and that of another name."""
        held_out, transformer = self.pictures.subset(self.held_out), self.pipeline.transformer
        held_out = with_clouds_alone(held_out)  # the same pictures in each row
        return {
            "right": CloudHeldOutLoss(held_out, clouds="own", levels=8)(transformer),
            "none": HeldOutLoss(held_out, levels=8)(transformer),
            "other": CloudHeldOutLoss(held_out, clouds="other", levels=8)(transformer),
        }


def one_run(folder: Path, furniture: str, *, seed: int, guidance: float, overrides: list[str]) -> dict[str, Any]:
    """Train a model, measure it, and draw some of its shapes."""
    output = folder / f"seed-{seed}"
    fixed = [f"seed={seed}", f"output={json.dumps(str(output))}", f"data.folder={json.dumps(furniture)}"]
    run = run_training(read_config(CONFIG, [*overrides, *fixed]), overwrite=True)
    judge = Judge(run, FurnitureSource(furniture).categories, seed=seed)
    result = {"seed": seed, "shapes": judge.measure(guidance), "pictures": judge.pictures_from_clouds()}
    rows = []
    for split, places in (("trained", run.places[0]), ("held out", run.places[1])):
        chosen = pick_names(run.pictures, list(places), count=6)
        for place, cloud in zip(chosen, judge.generate(chosen, guidance, points=2048), strict=True):
            real = judge.clouds[place][:2048].numpy()
            rows.append((f"{run.pictures.captions[place]} ({split})", [cloud.numpy(), real]))
    draw_clouds_grid(rows, output / "shapes_and_real.png")
    return result


def spread(values: list[float]) -> str:
    """Write a mean, and the smallest and largest."""
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def print_report(results: list[dict[str, Any]]) -> None:
    """Print both tables."""
    if not results:
        raise typer.BadParameter("there are no results yet; run without --report first")
    seeds = ", ".join(str(result["seed"]) for result in results)
    print(f"seeds {seeds}: mean (smallest to largest)\n")
    print("| names | clouds | Chamfer distance | coverage | 1-NNA |\n|---|---|---|---|---|")
    for split in ("training", "held-out"):
        for arm in results[0]["shapes"][split]:
            cells = [
                spread([result["shapes"][split][arm][key] for result in results])
                for key in ("chamfer", "coverage", "1-NNA")
            ]
            print(f"| {split} | {arm} | {' | '.join(cells)} |")
    print("\n| cloud shown | held-out flow loss of pictures |\n|---|---|")
    for arm in ("right", "none", "other"):
        print(f"| {arm} | {spread([result['pictures'][arm] for result in results])} |")
    gaps = [result["pictures"]["other"] - result["pictures"]["right"] for result in results]
    print(f"\nother - right, seed by seed: {', '.join(f'{gap:.4f}' for gap in gaps)}")


def main(
    folder: Path,
    furniture: Annotated[str, typer.Option("--folder", help="The unpacked furniture.")] = "",
    seeds: Annotated[list[int], typer.Option("--seed")] = [0, 1, 2],  # noqa: B006 - typer's way
    guidance: float = 1.0,
    override: Annotated[list[str], typer.Option(help="KEY=VALUE for the configuration.")] = [],  # noqa: B006
    report: bool = False,
) -> None:
    """Train and measure what is not there yet, or print the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if not report:
        for seed in seeds:
            if seed not in [result["seed"] for result in results]:
                results.append(one_run(folder, furniture, seed=seed, guidance=guidance, overrides=override))
                with file.open("a") as lines:
                    lines.write(json.dumps(results[-1]) + "\n")
    print_report(results)


if __name__ == "__main__":
    typer.run(main)
