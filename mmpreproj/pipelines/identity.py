"""What tells one set of encoders from another: fingerprints of weights, settings and vocabularies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mmpreproj.patching.onloading import diffusers_hook

SAMPLED = 2**18  # values of each weight that are looked at: some of every row of the largest embeddings there are

VAE = ("vae",)
TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")

# Say nothing of what a model computes, and change when it is saved and loaded; weights tell their dtypes themselves.
HISTORY = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})
# A tokenizer's last call leaves these in it, and every call of an encoder sets them anew.
LEFT_BY_USE = ("padding", "truncation")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(pipeline: Any, names: tuple[str, ...]) -> str:
    """Return a digest of some of a pipeline's components, which differs where their outputs would.

    Of a module it covers class, settings, dtypes, and of every weight the shape and values spread evenly over it; of a
    tokenizer its class, vocabulary, longest text and padding. A component that is None has a digest too. Saving and
    loading change none of these, nor does use.

    Args:
        pipeline: with these components.
        names: of components, such as `VAE` or `TEXT`.

    Raises:
        ValueError: if a module's weights are offloaded to where they cannot be read.
    """
    digest = hashlib.sha256()
    for name in names:
        component = getattr(pipeline, name, None)
        digest.update(f"{name}:{type(component).__name__}".encode())
        if isinstance(component, nn.Module):
            _check_readable(name, component)
            _add_module(digest, component)
        elif component is not None:
            _add_tokenizer(digest, component)
    return digest.hexdigest()


def _check_readable(name: str, module: nn.Module) -> None:
    hooks = (diffusers_hook(part, "group_offloading") for part in module.modules())
    on_disk = any(hook is not None and hook.config.offload_to_disk_path is not None for hook in hooks)
    if on_disk or any(value.is_meta for value in module.state_dict().values()):
        raise ValueError(
            f"the weights of {name} ({type(module).__name__}) are offloaded to where they cannot be read, so it has "
            "no fingerprint; take it before offloading is enabled, or offload whole models (enable_model_cpu_offload)"
        )


def _add_module(digest: Any, module: nn.Module) -> None:
    settings = getattr(module, "config", {})
    settings = settings.to_dict() if hasattr(settings, "to_dict") else dict(settings)
    digest.update(json.dumps(_without_history(settings), sort_keys=True, default=str).encode())
    for key, value in module.state_dict().items():
        for inner, plain in _plain_tensors(key, value):
            digest.update(f"{inner}:{plain.dtype}:{list(plain.shape)}".encode())
            digest.update(_sample(plain))


def _plain_tensors(key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Take a tensor apart that consists of others, as quantised ones of torchao do."""
    if not is_traceable_wrapper_subclass(value):
        yield key, value
        return
    for name in value.__tensor_flatten__()[0]:
        yield from _plain_tensors(f"{key}.{name}", getattr(value, name))


def _without_history(settings: Any) -> Any:
    """Leave out of settings, and of the settings of parts within, what only tells where they come from."""
    if not isinstance(settings, dict):
        return settings
    return {
        key: _without_history(value)
        for key, value in settings.items()
        if key not in HISTORY and not str(key).startswith("_")
    }


def _sample(value: Tensor) -> bytes:
    """Return the bits of values spread evenly over a tensor, its first and last among them."""
    flat = value.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    # As whole numbers: casting would make large ones alike, and there are dtypes that cannot be indexed.
    flat = flat.view(_BITS[flat.element_size()])
    places = torch.linspace(0, max(flat.numel() - 1, 0), min(SAMPLED, flat.numel()), dtype=torch.float64).long()
    return flat[places.to(flat.device)].cpu().numpy().tobytes()


def _add_tokenizer(digest: Any, tokenizer: Any) -> None:
    parts = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "longest": tokenizer.model_max_length,
        "special": {key: str(token) for key, token in tokenizer.special_tokens_map.items()},
        "side": [tokenizer.padding_side, tokenizer.truncation_side],
    }
    digest.update(json.dumps(parts, sort_keys=True).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        rest = {key: value for key, value in state.items() if key not in LEFT_BY_USE}
        digest.update(json.dumps(rest, sort_keys=True).encode())
