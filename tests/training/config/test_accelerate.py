"""Shipped files for `accelerate launch`: accelerate takes them, and they say what their comments say."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin, patch_environment
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from diffusers.models.attention import JointTransformerBlock
from processes_kit import build_patched
from torch.distributed.fsdp import StateDictType

from mmpreproj import PreProjConfig

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "accelerate"
KINDS = {
    "ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "zero2": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
}

# Tells what a process was started as; the precision is handed over as our trainer does. Imports little, to start soon.
PROGRAM = """
import json, os, pathlib, sys
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16")
state = {
    "process": accelerator.process_index,
    "processes": accelerator.num_processes,
    "backend": accelerator.state.backend,
    "asked": os.environ["ACCELERATE_MIXED_PRECISION"],
    "precision": accelerator.mixed_precision,
    "fsdp": os.environ.get("FSDP_VERSION"),
}
(pathlib.Path(sys.argv[1]) / f"{accelerator.process_index}.json").write_text(json.dumps(state))
accelerator.end_training()
"""


def launch_arguments(name: str) -> argparse.Namespace:
    """What `accelerate launch` makes of a file."""
    parsed = launch_command_parser().parse_args(["--config_file", str(FOLDER / f"{name}.yaml"), "script.py"])
    arguments, *_ = _validate_launch_command(parsed)
    arguments.deepspeed_fields_from_accelerate_config = ""  # set by launch_command
    return arguments


def sharding() -> FullyShardedDataParallelPlugin:
    with patch_environment(**prepare_multi_gpu_env(launch_arguments("fsdp2"))):
        return FullyShardedDataParallelPlugin()


def deepspeed(name: str) -> DeepSpeedPlugin:
    with patch_environment(**prepare_deepspeed_cmd_env(launch_arguments(name))[1]):
        return DeepSpeedPlugin()


def test_every_file_is_known_here():
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.yaml" for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_accelerate_reads_each_file_and_its_head_says_how_it_is_used(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert config.distributed_type == KINDS[name]
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (2, 1, "no")
    head = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").split("compute_environment")[0].splitlines()
    assert all(line.startswith("# ") for line in head)
    assert f"accelerate launch --config_file configs/accelerate/{name}.yaml -m mmpreproj train" in head[-1]


def test_fsdp2_shares_out_whole_weights_that_every_process_has_loaded():
    plugin = sharding()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    assert not plugin.cpu_ram_efficient_loading
    assert not plugin.activation_checkpointing


def test_fsdp2_wraps_the_joint_blocks_and_nothing_else():
    plugin, model = sharding(), build_patched(PreProjConfig())
    plugin.set_auto_wrap_policy(model)
    wraps = fsdp2_prepare_auto_wrap_policy(plugin, model)
    wrapped = [module for module in model.modules() if wraps(module)]
    assert wrapped == list(model.transformer_blocks)
    assert all(isinstance(module, JointTransformerBlock) for module in wrapped)


@pytest.mark.parametrize(("name", "stage"), [("zero2", 2), ("zero3", 3)])
def test_deepspeed_takes_accumulation_clipping_and_precision_from_the_trainer(name, stage):
    plugin = deepspeed(name)
    assert (plugin.zero_stage, plugin.zero3_init_flag, plugin.zero3_save_16bit_model) == (stage, False, stage == 3)
    settings = plugin.deepspeed_config
    assert settings["zero_optimization"]["stage"] == stage
    assert settings["gradient_accumulation_steps"] == settings["gradient_clipping"] == "auto"
    plugin.set_mixed_precision("bf16")
    assert settings["bf16"]["enabled"]


@pytest.mark.slow  # half a minute: two processes import torch, twice
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_starts_two_processes_from_a_file_and_the_trainers_precision_counts(tmp_path, name):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FOLDER / f"{name}.yaml")]
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    # `--cpu` would start one process; this starts both, and joins them over gloo.
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--main_process_port", "0", str(tmp_path / "program.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [state["process"] for state in told] == [0, 1]
    assert all((state["processes"], state["backend"]) == (2, "gloo") for state in told)
    assert all((state["asked"], state["precision"]) == ("no", "bf16") for state in told)
    assert all(state["fsdp"] == ("2" if name == "fsdp2" else None) for state in told)
