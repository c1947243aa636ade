"""Two processes on the CPU: a test file runs itself in each, and reads what they wrote; and the model they share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import SD3Transformer2DModel
from torch import nn

import mmpreproj
from mmpreproj import PreProjConfig

WORLD = 2


def build_patched(config: PreProjConfig) -> nn.Module:
    """Build a tiny dual-attention transformer whose adapter alone is trained, the same in every process."""
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=20,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ).requires_grad_(False)
    mmpreproj.patch(model, config)
    with torch.no_grad():
        for parameter in mmpreproj.parameters(model):
            parameter.normal_(std=0.2)
    return model


def run_in_processes(file: str, folder: Path) -> Path:
    """Run a file as two processes, `python file RANK FOLDER`, and return the folder that they wrote to."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, file, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        logs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(logs)
    return folder


@contextmanager
def meeting(backend: str = "gloo") -> Iterator[tuple[int, Path]]:
    """Join the other process for a `with` block, which both leave together; gives this one's rank, and the folder."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    place = f"file://{folder / 'meeting'}"
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    try:
        yield rank, folder
        dist.barrier()
    finally:
        dist.destroy_process_group()
