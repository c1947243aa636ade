"""How the result of a run is used: a few lines of Python, and the command."""

from __future__ import annotations

import json
import shlex
from typing import Literal

from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.training.config import TrainConfig

THIS, BASE, LORA_BESIDE = "this folder or hub id", "the base's folder or hub id", "the folder lora/ beside it"


def usage_section(
    config: TrainConfig, pipeline: PreProjSD3Pipeline, *, result: Literal["adapter", "lora", "model"], base: str | None
) -> list[str]:
    """Show how an adapter, a LoRA or a model is put to use, in lines.

    Args:
        config: the run's settings.
        pipeline: that was trained.
        result: what it left.
        base: hub id of the base; None where it has none.
    """
    here = config.push_to_hub or THIS
    start = here if result == "model" else base or BASE
    stock = result == "lora" and config.adapter is None and not pipeline.uses_generic_text_encoder
    kind = "StableDiffusion3Pipeline" if stock else "PreProjSD3Pipeline"
    imports = ["import torch", f"from {'diffusers' if stock else 'mmpreproj.pipelines'} import {kind}"]
    loads = [f'pipe = {kind}.from_pretrained("{start}", dtype=torch.bfloat16).to("cuda")']
    if result != "model" and config.adapter is not None:
        imports.insert(0, "import mmpreproj")
        loads.append(f'mmpreproj.load(pipe.transformer, "{here if result == "adapter" else _beside(config)}")')
    if result != "model" and config.lora is not None:
        loads.append(f"pipe.load_lora_weights({_lora(config, result)})")
    prompt, further = _call(config, result)
    lines = ["## How to use it", "", "```python", *imports, "", *loads]
    lines += [f'pipe({json.dumps(prompt, ensure_ascii=False)}, {further}).images[0].save("picture.png")', "```", ""]
    command = {
        "adapter": f"mmpreproj generate --model {shlex.quote(start)} --adapter {shlex.quote(here)}",
        "model": f"mmpreproj generate --model {shlex.quote(here)}",
    }.get(result)
    if command is not None and (result == "model" or config.lora is None):
        lines += ["```", f"{command} --prompt {shlex.quote(prompt)}", "```", ""]
    return [*lines, *_notes(config, result)]


def _call(config: TrainConfig, result: str) -> tuple[str, str]:
    """Return a prompt, and the other arguments of a call as the run's own previews have them."""
    settings, side = config.validation, config.data.resolution
    prompt = " ".join(settings.prompts[0].split()) if settings.prompts else "a red apple"
    arguments: dict[str, float] = {"height": settings.height or side, "width": settings.width or side}
    if settings.prompts:
        arguments |= {"num_inference_steps": settings.steps, "guidance_scale": settings.guidance}
    if result == "lora" and config.adapter is None:
        arguments["max_sequence_length"] = config.max_sequence_length
    return prompt, ", ".join(f"{name}={value:g}" for name, value in arguments.items())


def _lora(config: TrainConfig, result: str) -> str:
    """Name where the LoRA is: beside the adapter on disk, and in a folder of the adapter's repository on the hub."""
    if config.adapter is None:
        return f'"{config.push_to_hub or THIS}"'
    if config.push_to_hub:
        return f'"{config.push_to_hub}", subfolder="lora"'
    return f'"{THIS if result == "lora" else LORA_BESIDE}"'


def _beside(config: TrainConfig) -> str:
    return config.push_to_hub or "the folder adapter/ beside it"


def _notes(config: TrainConfig, result: str) -> list[str]:
    if result == "model":
        return []
    lines: list[str] = []
    if config.adapter is not None and config.lora is not None:
        lines += ["The adapter and the LoRA were trained together: use both.", ""]
    if result == "lora" and config.adapter is None:
        lines += ["A LoRA's file has no place for the length of texts that it was trained with; give it, as here.", ""]
    return lines
