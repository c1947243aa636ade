"""What a run leaves at its end: the trained weights and the figures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from accelerate import Accelerator

from mmpreproj.files import remove_left_over
from mmpreproj.patching.files.card import CARD_NAME, PICTURE_NAME, draw_profile, may_write
from mmpreproj.patching.files.storage import save
from mmpreproj.patching.lookup import is_patched
from mmpreproj.patching.profile import profile
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.figures import draw_loss_curves
from mmpreproj.recipes.train.card import RESULTS, TRAINING_MARK, RunFacts, write_training_card
from mmpreproj.recipes.train.card_parts import CURVES_NAME
from mmpreproj.recipes.train.inputs import Inputs
from mmpreproj.training.config import TrainConfig
from mmpreproj.training.loop import StepRecord
from mmpreproj.training.processes import on_main_process
from mmpreproj.training.sharing import whole_weights
from mmpreproj.training.weights import LORA, trains_base, write_lora


def write_results(
    pipeline: PreProjSD3Pipeline,
    config: TrainConfig,
    history: Sequence[StepRecord],
    *,
    inputs: Inputs,
    accelerator: Accelerator,
    say: Callable[[str], None],
) -> None:
    """Write the trained weights, then the figures, and a card beside the weights; every process calls this.

    Args:
        pipeline: with the trained transformer.
        config: the run's settings.
        history: its records.
        inputs: what it was trained on.
        accelerator: of the run.
        say: told of each figure or card that could not be written, which ends no run whose weights are safe.

    Raises:
        OSError: if the weights cannot be written, on every process.
    """
    transformer, output = pipeline.transformer, config.output
    is_main = accelerator.is_main_process

    def write() -> None:
        for folder in (output, *(output / name for name in RESULTS)):
            remove_left_over(folder)
        pipeline.transformer = transformer  # noted for model_index.json anew: not as the class that FSDP2 made
        _write(pipeline, config)
        facts = RunFacts(config, pipeline, inputs, history, processes=accelerator.num_processes)
        _describe(facts, say)

    with whole_weights(transformer, keep=is_main, frozen=trains_base(config)):
        on_main_process(accelerator, write)


def _describe(facts: RunFacts, say: Callable[[str], None]) -> None:
    """Draw the figures and write the cards, as far as that is possible."""
    output, transformer = facts.config.output, facts.pipeline.transformer
    curves = output / CURVES_NAME
    work: dict[Path, Callable[[], object]] = {curves: partial(draw_loss_curves, facts.history, curves)}
    if is_patched(transformer):
        path = output / PICTURE_NAME
        work[path] = partial(draw_profile, profile(transformer), path)
    for folder in (output / name for name in RESULTS):
        if folder.is_dir():
            work[folder / CARD_NAME] = partial(write_training_card, folder, facts)
    for path, write in work.items():
        try:
            write()
        except OSError as error:
            if path.suffix == ".png":
                with suppress(OSError):
                    path.unlink(missing_ok=True)  # half a picture
            say(f"warning: {path} could not be written ({error.strerror or error}); the weights are safe")


def _write(pipeline: PreProjSD3Pipeline, config: TrainConfig) -> None:
    transformer, output = pipeline.transformer, config.output
    if trains_base(config):
        _write_model(pipeline, output / "model")
        return
    if is_patched(transformer):
        # Its card, too, is written when the weights are safe.
        save(transformer, output / "adapter", base_model=_where(str(config.model)), card=False)
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
