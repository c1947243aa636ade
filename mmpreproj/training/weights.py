"""What a run leaves of its weights: the adapter, LoRA's matrices, or the whole transformer."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from mmpreproj.core.sharding import whole
from mmpreproj.patching.files.storage import save
from mmpreproj.patching.lifecycle import detached
from mmpreproj.patching.lookup import is_patched
from mmpreproj.training.config import TrainConfig

LORA = "lora"


def trains_base(config: TrainConfig) -> bool:
    """Tell whether a run changes weights of the base, so that it leaves a whole model."""
    return config.mode == "full" or bool(config.thaw)


def write_weights(transformer: nn.Module, folder: Path, config: TrainConfig, *, base_model: str | None = None) -> None:
    """Write what a run trains, each part in the form that it is loaded in.

    That is the adapter's files and `lora/`; or, where the base trains, `transformer/` (the base) and `preproj/` (the
    adapter). Call it inside `whole_weights` where processes share the weights.
    """
    if trains_base(config):
        with detached(transformer) as base:
            base.save_pretrained(folder / "transformer")  # type: ignore[operator]
    if is_patched(transformer):
        place = folder / "preproj" if trains_base(config) else folder
        save(transformer, place, base_model=base_model, card=False)
    if config.lora is not None:
        write_lora(transformer, folder / LORA)


def write_lora(transformer: nn.Module, folder: Path) -> None:
    """Write LoRA's matrices as `pipeline.load_lora_weights` reads them."""
    from diffusers import StableDiffusion3Pipeline
    from diffusers.training_utils import _collate_lora_metadata
    from peft import get_peft_model_state_dict

    # In PEFT's own names: diffusers' older ones, which it can convert to, it gives to some layers of SD3 alone, and
    # then does not read them.
    state = get_peft_model_state_dict(transformer)
    StableDiffusion3Pipeline.save_lora_weights(
        folder,
        transformer_lora_layers={key: whole(value) for key, value in state.items()},
        **_collate_lora_metadata({"transformer": transformer}),
    )
