"""What a run leaves at its end: the trained weights and the figures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator

from mmpreproj.files import remove_left_over
from mmpreproj.patching.files.card import CARD_NAME, draw_profile, may_write
from mmpreproj.patching.files.storage import save
from mmpreproj.patching.lookup import is_patched
from mmpreproj.patching.profile import profile
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.figures import draw_loss_curves
from mmpreproj.recipes.train.card import RESULTS, TRAINING_MARK, RunFacts, write_training_card
from mmpreproj.recipes.train.inputs import Inputs
from mmpreproj.training.config import TrainConfig
from mmpreproj.training.loop import StepRecord
from mmpreproj.training.sharing import whole_weights
from mmpreproj.training.weights import LORA, trains_base, write_lora


def write_results(
    pipeline: PreProjSD3Pipeline,
    config: TrainConfig,
    history: Sequence[StepRecord],
    *,
    inputs: Inputs,
    accelerator: Accelerator,
) -> None:
    """Write the trained weights, the figures, and a card beside the weights; every process calls this."""
    transformer, output = pipeline.transformer, config.output
    is_main = accelerator.is_main_process
    with whole_weights(transformer, keep=is_main, frozen=trains_base(config)):
        if is_main:
            for folder in (output, *(output / name for name in RESULTS)):
                remove_left_over(folder)
            pipeline.transformer = transformer  # noted for model_index.json anew: not as the class that FSDP2 made
            _write(pipeline, config)
            draw_loss_curves(history, output / "loss.png")
            if is_patched(transformer):
                draw_profile(profile(transformer), output / "profile.png")
            facts = RunFacts(config, pipeline, inputs, history, processes=accelerator.num_processes)
            for folder in (output / name for name in RESULTS):
                if folder.is_dir():
                    write_training_card(folder, facts)


def _write(pipeline: PreProjSD3Pipeline, config: TrainConfig) -> None:
    transformer, output = pipeline.transformer, config.output
    if trains_base(config):
        _write_model(pipeline, output / "model")
        return
    if is_patched(transformer):
        save(transformer, output / "adapter", base_model=_where(str(config.model)))
    if config.lora is not None:
        write_lora(transformer, output / LORA)


def _write_model(pipeline: PreProjSD3Pipeline, folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        pipeline.save_pretrained(partial)
    except Exception as error:  # safetensors has an error of its own for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"the model could not be written to {folder} ({error}); go on with --resume latest") from error
    if not may_write(folder, TRAINING_MARK):  # a person's own, of an earlier end of this run
        shutil.copyfile(folder / CARD_NAME, partial / CARD_NAME)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)  # so that a folder called model is a whole one


def _where(model: str) -> str:
    """Name a base so that it is found from any folder: absolute where it is on this disk, else its hub id."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model
