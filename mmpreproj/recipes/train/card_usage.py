"""How the result of a run is used: a few lines of Python, and the command, to be pasted as they are."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmpreproj.pipelines.length import STOCK_LENGTH
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.train.card_parts import public_place
from mmpreproj.training.config import TrainConfig

Result = Literal["adapter", "lora", "model"]


@dataclass(frozen=True)
class _Places:
    """Where things are, as code may write it for anybody.

    Attributes:
        results: what stands before the names of results: `runs/mine`, from where the run began; or `..`, from here.
        repository: of the hub, which the result goes to; None for none.
        here: the result that the card lies beside.
        base: what it was trained on, if that can be named; None if a person has to put its path in.
        base_name: what the base's folder is called, then.
    """

    results: str
    repository: str | None
    here: str
    base: str | None
    base_name: str

    def beside(self, name: Result) -> str:
        """Name another result of the run on this disk."""
        return f"{self.results}/{name}"


def usage_section(config: TrainConfig, pipeline: PreProjSD3Pipeline, *, result: Result, base: str | None) -> list[str]:
    """Show how an adapter, a LoRA or a model is put to use, in lines.

    A path that is relative in the configuration is written as it is there. Of another the card may tell nothing but a
    name, so the result is `.`, and the base a variable for its reader to fill in.

    Args:
        config: the run's settings.
        pipeline: that was trained.
        result: what it left.
        base: hub id of the base; None where it has none.
    """
    places = _places(config, result, base)
    lines = ["## How to use it", "", *_where_to_run(config, places, result)]
    lines += ["```python", *_python(config, pipeline, places, result), "```", ""]
    command = _command(config, places, result)
    if command is not None:
        lines += ["```", *command, "```", "", "On a GPU, add `--precision bf16`.", ""]
    return [*lines, *_notes(config, result)]


def _places(config: TrainConfig, result: Result, base: str | None) -> _Places:
    output, model = str(config.output), config.model if isinstance(config.model, str) else ""
    from_start = config.push_to_hub is None and public_place(output) == output
    here = config.push_to_hub or (f"{Path(output, result).as_posix()}" if from_start else ".")
    is_known = base is not None or (from_start and model and public_place(model) == model)
    return _Places(
        results=Path(output).as_posix() if from_start else "..",
        repository=config.push_to_hub,
        here=here,
        base=(base or model) if is_known else None,
        base_name=Path(public_place(model)).name if model else "",
    )


def _where_to_run(config: TrainConfig, places: _Places, result: Result) -> list[str]:
    """Say from where the paths below are seen, and what has to be put in."""
    said = []
    if places.repository is None:
        started = "in the folder that the run was started in; elsewhere, put in your own paths"
        said.append(f"Run this {'in the folder of this file' if places.here == '.' else started}.")
    if result != "model" and places.base is None:
        kept = ", which `adapter_config.json` has," if config.adapter is not None else ""
        said.append(
            f"The base is no repository of the hub but a folder called `{places.base_name}`: put its path{kept} in "
            f"place of `{_placeholder(places)}`."
        )
    return [" ".join(said), ""] if said else []


def _placeholder(places: _Places) -> str:
    return f"/path/to/{places.base_name}"


def _python(config: TrainConfig, pipeline: PreProjSD3Pipeline, places: _Places, result: Result) -> list[str]:
    # Told by a tokenizer, since the text encoders may be out of memory when a run ends.
    stock = result == "lora" and config.adapter is None and pipeline.tokenizer_2 is not None
    kind = "StableDiffusion3Pipeline" if stock else "PreProjSD3Pipeline"
    imports = ["import torch", f"from {'diffusers' if stock else 'mmpreproj.pipelines'} import {kind}"]
    start = json.dumps(places.here if result == "model" else places.base, ensure_ascii=False)
    loads = [
        'device = "cuda" if torch.cuda.is_available() else "cpu"',
        'dtype = torch.bfloat16 if device == "cuda" else torch.float32',
    ]
    if result != "model" and places.base is None:
        loads.insert(0, f"base = {json.dumps(_placeholder(places), ensure_ascii=False)}")
        start = "base"
    loads.append(f"pipe = {kind}.from_pretrained({start}, dtype=dtype).to(device)")
    if result != "model" and config.adapter is not None:
        imports.insert(0, "import mmpreproj")
        loads.append(f"mmpreproj.load(pipe.transformer, {json.dumps(_adapter(places, result), ensure_ascii=False)})")
    if result != "model" and config.lora is not None:
        folder = json.dumps(_lora(places, result), ensure_ascii=False)
        within = ', subfolder="lora"' if config.adapter is not None and places.repository is not None else ""
        loads.append(f"pipe.load_lora_weights({folder}{within})")
    prompt, arguments = _call(config)
    if result == "lora" and config.adapter is None:
        arguments["max_sequence_length"] = config.max_sequence_length
    further = ", ".join(f"{name}={value:g}" for name, value in arguments.items())
    made = f'pipe({json.dumps(prompt, ensure_ascii=False)}, {further}).images[0].save("picture.png")'
    return [*imports, "", *loads, made]


def _command(config: TrainConfig, places: _Places, result: Result) -> list[str] | None:
    """Write the command, in lines; None where it could not do what Python does."""
    together = config.adapter is not None and config.lora is not None and result != "model"
    if together and places.repository is not None:  # of a repository it finds no folder within
        return None
    if result == "lora" and config.adapter is None and config.max_sequence_length != STOCK_LENGTH:
        return None
    lines: list[str] = []
    if result == "model":
        words = ["--model", shlex.quote(places.here)]
    elif config.adapter is not None and places.base is None and places.repository is None:
        words = ["--model", shlex.quote(_adapter(places, result))]  # it knows its base on this disk
    else:
        if places.base is None:
            lines.append(f"BASE={shlex.quote(_placeholder(places))}")
        words = ["--model", '"$BASE"' if places.base is None else shlex.quote(places.base)]
        if config.adapter is not None:
            words += ["--adapter", shlex.quote(_adapter(places, result))]
    if result != "model" and config.lora is not None:
        words += ["--lora", shlex.quote(_lora(places, result))]
    prompt, arguments = _call(config)
    words += ["--prompt", shlex.quote(prompt), "--size", f"{arguments['width']:g}x{arguments['height']:g}"]
    for option, name in (("--steps", "num_inference_steps"), ("--guidance", "guidance_scale")):
        words += [option, f"{arguments[name]:g}"] if name in arguments else []
    return [*lines, f"mmpreproj generate {' '.join(words)}"]


def _call(config: TrainConfig) -> tuple[str, dict[str, float]]:
    """Return a prompt, and the other arguments of a call as the run's own previews have them."""
    settings, side = config.validation, config.data.resolution
    prompt = " ".join(settings.prompts[0].split()) if settings.prompts else "a red apple"
    arguments: dict[str, float] = {"height": settings.height or side, "width": settings.width or side}
    if settings.prompts:
        arguments |= {"num_inference_steps": settings.steps, "guidance_scale": settings.guidance}
    return prompt, arguments


def _adapter(places: _Places, result: Result) -> str:
    return places.here if result == "adapter" or places.repository else places.beside("adapter")


def _lora(places: _Places, result: Result) -> str:
    return places.here if result == "lora" or places.repository else places.beside("lora")


def _notes(config: TrainConfig, result: Result) -> list[str]:
    if result == "model":
        return []
    lines: list[str] = []
    if config.adapter is not None and config.lora is not None:
        lines += ["The adapter and the LoRA were trained together: use both.", ""]
    if result == "lora" and config.adapter is None:
        lines += ["A LoRA's file has no place for the length of texts that it was trained with; give it, as here.", ""]
    return lines
