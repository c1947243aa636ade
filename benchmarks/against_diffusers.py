"""Pictures per second of a LoRA run: diffusers' own example and `mmpreproj train`, on the same model and pictures.

The peer is `examples/dreambooth/train_dreambooth_lora_sd3.py` of https://github.com/huggingface/diffusers, as its
authors wrote it; it is no part of this repository. Beside the `test` extra it needs `datasets` and `tensorboard`.

    python benchmarks/against_diffusers.py runs/against_diffusers --peer train_dreambooth_lora_sd3.py
    python benchmarks/against_diffusers.py runs/against_diffusers --peer train_dreambooth_lora_sd3.py --profile
    python benchmarks/against_diffusers.py runs/against_diffusers --report

The model is Stable Diffusion 3 medium with every width an eighth and every depth a quarter, and random weights; its
VAE keeps the stock depth. So text encoders, VAE and transformer share the work of a step about as in the real one. The
pictures are OpenMoji drawings, each with its own caption. Every run is a command in a process of its own, timed whole,
and from the end of its first step to the end of its last. Rounds are interleaved, and ratios taken within a round. A
short run of each arm comes first and is not counted: it fills the machine's file cache, and the peer's of its data.
"""

from __future__ import annotations

import json
import os
import pstats
import re
import shutil
import statistics
import string
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers as tf
import typer
import yaml
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from mmpreproj.data.sources.openmoji import OpenMojiSource

ARMS = {
    "peer": "diffusers' example",
    "peer-cached": "diffusers' example, --cache_latents",  # shuffled once for latents, and again for captions
    "cold": "mmpreproj, cold cache",
    "warm": "mmpreproj, warm cache",  # what the arm before left
}
Sizes = dict[str, Any]
TEXT_TOKENS, RANK, LEARNING_RATE = 77, 16, 1e-4
LETTERS = string.digits + string.ascii_lowercase + string.punctuation
# The layers that the example trains unless told otherwise.
TARGETS = ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "to_k", "to_out.0", "to_q", "to_v"]
# Where time goes: a part, the end of its file's path, and the function; of several in a file the longest counts.
PLACES = (
    ("imports", "importlib._bootstrap>", "_find_and_load"),
    ("models read, the peer's last ones too", "modeling_utils.py", "from_pretrained"),
    ("pictures read (peer)", "train_dreambooth_lora_sd3.py", "__init__"),
    ("pictures to latents", "autoencoder_kl.py", "encode"),
    ("captions to embeddings", "", "encode_prompt"),
    ("transformer, forward", "transformer_sd3.py", "forward"),
    ("transformer, backward", "torch/_tensor.py", "backward"),
    ("optimiser", "adam.py", "step"),
    ("batches", "accelerate/data_loader.py", "__iter__"),
)


@dataclass(frozen=True)
class Job:
    """What every arm is asked to do, below a folder with `model` and `pictures`."""

    steps: int
    batch_size: int
    resolution: int
    threads: int


def build_text_components() -> dict[str, Any]:
    """Build the text encoders of the pipeline, and tokenizers that know single letters."""
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    clip = tf.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=TEXT_TOKENS)
    t5 = tf.T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=TEXT_TOKENS)
    ends: Sizes = {f"{end}_token_id": getattr(clip, f"{end}_token_id") for end in ("bos", "eos", "pad")}

    def build_clip(width: int, layers: int, heads: int) -> tf.CLIPTextModelWithProjection:
        sizes: Sizes = {"hidden_size": width, "intermediate_size": 4 * width, "projection_dim": width}
        counts: Sizes = {"vocab_size": len(clip), "num_hidden_layers": layers, "num_attention_heads": heads}
        return tf.CLIPTextModelWithProjection(tf.CLIPTextConfig(**sizes, **counts, **ends))

    t5_sizes: Sizes = {"vocab_size": len(t5), "d_model": 512, "d_ff": 1280, "num_layers": 6, "num_heads": 8}
    return {
        "text_encoder": build_clip(96, 3, 2),
        "text_encoder_2": build_clip(160, 8, 4),
        "text_encoder_3": tf.T5EncoderModel(tf.T5Config(**t5_sizes, feed_forward_proj="gated-gelu")),
        **{"tokenizer": clip, "tokenizer_2": clip, "tokenizer_3": t5},
    }


def write_model(folder: Path) -> None:
    """Write a small Stable Diffusion 3 pipeline with random weights, in the stock layout."""
    torch.manual_seed(0)
    widths = {"caption_projection_dim": 192, "joint_attention_dim": 512, "pooled_projection_dim": 96 + 160}
    blocks: Sizes = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    blocks |= {"layers_per_block": 2, "block_out_channels": (16, 32, 32, 32), "norm_num_groups": 8}
    latents: Sizes = {"latent_channels": 16, "scaling_factor": 1.5305, "shift_factor": 0.0609}
    StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(num_layers=6, num_attention_heads=3, attention_head_dim=64, **widths),
        vae=AutoencoderKL(**blocks, **latents, use_quant_conv=False, use_post_quant_conv=False),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        **build_text_components(),
    ).save_pretrained(folder)


def write_pictures(folder: Path, *, count: int, side: int) -> None:
    """Write `count` drawings of `side` pixels, and their captions in metadata.jsonl."""
    source, rows = OpenMojiSource(render_size=side), []
    folder.mkdir(parents=True)
    for index in range(0, len(source), len(source) // count)[:count]:
        name = f"{index:04d}.png"
        source.open(index).save(folder / name)
        rows.append(json.dumps({"file_name": name, "text": source.captions[index]}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(rows), encoding="utf-8")


def peer_arguments(peer: Path, folder: Path, job: Job, *, cached: bool) -> list[str]:
    """Write the arguments of diffusers' example; options that are not here are at its defaults."""
    options = {
        "pretrained_model_name_or_path": folder / "model",
        "dataset_name": folder / "pictures",
        "cache_dir": folder / "peer_cache",
        "caption_column": "text",
        "instance_prompt": "a drawing",  # required; stands in for an empty caption
        "output_dir": folder / "output",
        "resolution": job.resolution,
        "train_batch_size": job.batch_size,
        "max_train_steps": job.steps,
        "rank": RANK,
        "learning_rate": LEARNING_RATE,
        "lr_warmup_steps": 0,
        "seed": 0,
    }
    return [str(peer), *(f"--{name}={value}" for name, value in options.items()), *["--cache_latents"] * cached]


def our_config(folder: Path, job: Job) -> str:
    """Write the configuration of the same run of ours, as YAML."""
    settings = {
        "model": str(folder / "model"),
        "output": str(folder / "output"),
        "mode": "probe",
        "adapter": None,
        "lora": {"rank": RANK, "alpha": RANK, "targets": [f"attn.{name}" for name in TARGETS]},
        "data": {"folder": str(folder / "pictures"), "resolution": job.resolution, "cache": str(folder / "our_cache")},
        "optimizer": {"name": "adamw", "learning_rate": LEARNING_RATE, "warmup_steps": 0},
        "steps": job.steps,
        "batch_size": job.batch_size,
        "max_sequence_length": TEXT_TOKENS,
        "caption_dropout": 0,
        "evaluate_every": 0,
        "checkpoint_every": 0,
        "seed": 0,
    }
    return yaml.safe_dump(settings, sort_keys=False)


def last_step(file: Path, pattern: str) -> int:
    """Read the number of the last step that a growing file tells of; 0 for none yet."""
    if not file.is_file():
        return 0
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 8192))
        found = re.findall(pattern, stream.read().decode("utf-8", errors="replace"))
    return int(found[-1]) if found else 0


def time_python(arguments: list[str], log: Path, told: tuple[Path, str], job: Job) -> dict[str, float]:
    """Time a run of Python, in seconds: all of it, until its first step is done, its loop, and after its last step.

    A step is done when a file, the first of `told`, tells its number, which the second finds there. `computed` is the
    processor's time for all of it, which other work on the machine changes less.

    Raises:
        RuntimeError: if the command failed, or did not come to its last step.
    """
    settings = {"OMP_NUM_THREADS": str(job.threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    done: dict[int, float] = {}
    with log.open("wb") as stream:
        began, computed = time.perf_counter(), sum(os.times()[2:4])  # of commands that have ended
        command = [sys.executable, *arguments]
        with subprocess.Popen(command, stdout=stream, stderr=stream, env=os.environ | settings) as process:
            while process.poll() is None:
                time.sleep(0.02)
                done.setdefault(last_step(*told), time.perf_counter() - began)
    whole = time.perf_counter() - began
    steps = sorted(done.keys() - {0})
    if process.returncode or len(steps) < 2 or steps[-1] != job.steps:
        raise RuntimeError(f"exit status {process.returncode}, steps {steps} of {job.steps}; see {log}")
    first, last = done[steps[0]], done[job.steps]
    loop = (last - first) * job.steps / (job.steps - steps[0])  # as many steps as the whole has
    parts = {"whole": whole, "before": first, "loop": loop, "after": whole - last}
    return parts | {"computed": sum(os.times()[2:4]) - computed}


def run_arm(arm: str, peer: Path, folder: Path, job: Job, *, profile: Path | None = None) -> dict[str, float]:
    """Run one arm once, under cProfile if a file for its figures is given."""
    log, output = folder / f"{arm}.log", folder / "output"
    shutil.rmtree(output, ignore_errors=True)
    if arm.startswith("peer"):
        arguments = peer_arguments(peer, folder, job, cached=arm == "peer-cached")
        told = log, r"Steps:[^\r\n]*\| (\d+)/\d+ \["
    else:
        if arm == "cold":
            shutil.rmtree(folder / "our_cache", ignore_errors=True)
        (folder / "ours.yaml").write_text(our_config(folder, job), encoding="utf-8")
        arguments = ["-m", "mmpreproj", "train", str(folder / "ours.yaml")]
        told = output / "metrics.jsonl", r'"step": (\d+)'
    if profile is not None:
        arguments = ["-m", "cProfile", "-o", str(profile), *arguments]
    return time_python(arguments, log, told, job)


def print_profile(arm: str, file: Path) -> None:
    """Print where a profiled run spent its time; what a part calls counts with it."""
    stats: Any = pstats.Stats(str(file))
    print(f"\n{ARMS[arm]}: {stats.total_tt:.1f} s under cProfile\n\n| part | s | share |\n|---|---|---|")
    for part, end, name in PLACES:
        found = [entry[3] for key, entry in stats.stats.items() if key[2] == name and key[0].endswith(end)]
        print(f"| {part} | {max(found, default=0):.1f} | {max(found, default=0) / stats.total_tt:.0%} |")


def spread(values: list[float]) -> str:
    """Write a median, and the smallest and largest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def print_report(results: list[dict[str, Any]]) -> None:
    """Print a table for each job that was run."""
    for job in {json.dumps(result["job"]): result["job"] for result in results}.values():
        rows = [result for result in results if result["job"] == job]
        peers = {row["round"]: row for row in rows if row["arm"] == "peer"}
        print(f"\n{json.dumps(job)}, {len({row['round'] for row in rows})} rounds: median (smallest to largest)\n")
        print("| arm | pictures/s, whole | × peer | loop | × peer | processor | × peer | s before | s after |")
        print("|" + "---|" * 9)
        for arm in dict.fromkeys(row["arm"] for row in rows):
            own, cells = [row for row in rows if row["arm"] == arm], []
            for part in ("whole", "loop", "computed"):
                cells.append(spread([job["steps"] * job["batch_size"] / row[part] for row in own]))
                ratios = [peers[row["round"]][part] / row[part] for row in own if row["round"] in peers]
                cells.append(spread(ratios) if ratios else "–")
            cells += [spread([row[part] for row in own]) for part in ("before", "after")]
            print(f"| {ARMS[arm]} | {' | '.join(cells)} |")


def main(
    folder: Path,
    peer: Annotated[Path | None, typer.Option(help="diffusers' train_dreambooth_lora_sd3.py.")] = None,
    arms: Annotated[list[str], typer.Option("--arm", help=", ".join(ARMS))] = [*ARMS],  # noqa: B006 - typer's way
    rounds: int = 3,
    steps: int = 200,
    batch_size: int = 4,
    resolution: int = 256,
    threads: int = 1,
    profile: Annotated[bool, typer.Option("--profile", help="One profiled run of each arm instead.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Print what was measured.")] = False,
) -> None:
    """Time every arm once a round, add it to FOLDER/results.jsonl, and print a table."""
    job = Job(steps, batch_size, resolution, threads)
    results_file = folder / "results.jsonl"
    results = [json.loads(line) for line in results_file.read_text().splitlines()] if results_file.is_file() else []
    if report:
        print_report(results)
        return
    if peer is None or not peer.is_file() or not {*arms} <= ARMS.keys():
        raise typer.BadParameter(f"--peer must be the example's file, got {peer}; --arm of {[*ARMS]}, got {arms}")
    if not (folder / "model" / "model_index.json").is_file():
        write_model(folder / "model")
    if not (folder / "pictures" / "metadata.jsonl").is_file():
        write_pictures(folder / "pictures", count=256, side=320)  # larger than trained on, as pictures mostly are
    for arm in arms:
        run_arm(arm, peer, folder, replace(job, steps=3))
    if profile:
        for arm in arms:
            run_arm(arm, peer, folder, job, profile=folder / f"{arm}.prof")
            print_profile(arm, folder / f"{arm}.prof")
        return
    began = max((result["round"] for result in results), default=-1) + 1
    for index in range(began, began + rounds):
        for arm in sorted(arms, key=lambda arm: arm.startswith("peer") == bool(index % 2)):  # who is first alternates
            timing = run_arm(arm, peer, folder, job)
            results.append({"round": index, "arm": arm, "job": asdict(job), **timing})
            with results_file.open("a") as lines:
                lines.write(json.dumps(results[-1]) + "\n")
            print(f"round {index}, {ARMS[arm]}: {timing['whole']:.1f} s, loop {timing['loop']:.1f} s", flush=True)
    print_report(results)


if __name__ == "__main__":
    typer.run(main)
