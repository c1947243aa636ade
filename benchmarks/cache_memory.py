"""How much memory data sets of different sizes take: folders of small pictures, looked at, cached, and drawn from.

    python benchmarks/cache_memory.py --counts 1000 --counts 100000

Each size runs in a process of its own: pictures are written, read through the folder source, encoded into the cache
(pixels as latents, embeddings of made-up numbers), and drawn from in a random order; twice, with a cold cache and a
warm one. Anonymous memory cannot be given back by the system; that of mapped files can. Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

CAPTIONS = 1000
SIDE = 16


def write_folder(folder: Path, count: int) -> None:
    """Write pictures of random pixels, and their captions."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    generator = np.random.default_rng(0)
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as metadata:
        for place in range(count):
            name = f"{place // 1000:03}/{place:06}.png"
            (folder / name).parent.mkdir(exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(folder / name)
            metadata.write(json.dumps({"file_name": name, "text": f"picture of kind {place % CAPTIONS}"}) + "\n")


class Pixels:
    """An encoder without networks."""

    def encode_posterior(self, pixels: Any) -> tuple[Any, None]:
        return pixels, None

    def encode_prompt(self, prompt: list[str], **settings: Any) -> Sequence[Any]:
        import torch

        return torch.ones(len(prompt), 12, 384), None, torch.ones(len(prompt), 384), None

    def encode_prompt_mask(self, prompt: list[str], *, max_sequence_length: int) -> Any:
        import torch

        return torch.ones(len(prompt), 12, dtype=torch.bool)


def memory() -> dict[str, int]:
    """Return this process's resident memory in MB, by kind."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines if line.startswith(("Rss", "VmHWM"))}
    return {"anonymous": found["RssAnon"], "mapped files": found["RssFile"], "peak": found["VmHWM"]}


def run_one(folder: Path, draws: int) -> None:
    """Prepare a folder as a run does, draw from it, and print what was used, as JSON."""
    from mmpreproj.data.buckets import Size
    from mmpreproj.data.caching import Encoding, encode_pictures
    from mmpreproj.data.samples import look_at_pictures, plan_samples
    from mmpreproj.data.sources.folder import FolderSource
    from mmpreproj.data.store import TensorStore
    from mmpreproj.training.batches import BucketBatches, make_loader

    before, began = memory(), time.perf_counter()
    source = FolderSource(folder / "pictures")
    looks = look_at_pictures(source)
    samples = plan_samples(looks, [(Size(SIDE, SIDE),)], names=source.names)
    looked = time.perf_counter()
    encoding, store = Encoding(vae="pixels", text="ones"), TensorStore(folder / "cache")
    pictures = encode_pictures(Pixels(), source, samples, encoding=encoding, store=store)
    del looks, samples
    encoded = time.perf_counter()
    loader = iter(make_loader(pictures, BucketBatches(pictures.groups, batch_size=16, seed=0), workers=0))
    for _ in range(draws // 16):
        next(loader)
    drawn = time.perf_counter()
    after = memory()
    seconds = {"look": looked - began, "encode": encoded - looked, "µs a draw": 1e6 * (drawn - encoded) / draws}
    print(json.dumps({"before": before, "after": after, "seconds": seconds}))


def main(
    counts: Annotated[list[int], typer.Option(help="Sizes of data sets.")] = [1000, 100_000],  # noqa: B006 - typer's way
    draws: int = 20_000,
    one: Path | None = None,
) -> None:
    """Measure each size, and print a table."""
    if one is not None:
        run_one(one, draws)
        return
    columns = (
        "pictures",
        "cache",
        "anonymous, MB",
        "mapped files, MB",
        "peak, MB",
        "look, s",
        "encode, s",
        "µs a draw",
    )
    table = Table(*columns)
    for count in counts:
        with tempfile.TemporaryDirectory() as place:
            write_folder(Path(place) / "pictures", count)
            for cache in ("cold", "warm"):
                command = [sys.executable, __file__, "--one", place, "--draws", str(draws)]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found = json.loads(output.strip().splitlines()[-1])
                grown = {
                    kind: f"{found['before'][kind]} + {found['after'][kind] - found['before'][kind]}"
                    for kind in found["after"]
                }
                table.add_row(
                    f"{count:,}", cache, *grown.values(), *(f"{value:.1f}" for value in found["seconds"].values())
                )
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
