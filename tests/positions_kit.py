"""Inputs of every size for the tiny transformers, and ways to watch their attention, for tests of positions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import mmpreproj
from mmpreproj import Positions, PreProjConfig

SCALINGS = ("none", "linear", "ntk", "yarn")
TEXTS = ("1d", "diagonal", "none")
NOWHERE = Positions(text="none", image="none", absolute="remove")
# Rows and columns of latents and tokens of text: 3 × 5 patches, 8 × 6, 1 × 4; the models are made for 4 × 4.
SIZES = ((8, 8, 5), (6, 10, 7), (16, 12, 3), (2, 8, 1))
# A fixture is made once for all examples; no example changes it.
property_based = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def positioned(**values: Any) -> PreProjConfig:
    """Settings of an adapter with these positions, and the base until it is trained."""
    return PreProjConfig(init="zero", positions=Positions(**values))


def picture(height: int, width: int, length: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Inputs of a size: latent rows and columns, tokens of text."""
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(2, 4, height, width, generator=generator),
        "encoder_hidden_states": torch.randn(2, length, 24, generator=generator),
        "pooled_projections": torch.randn(2, 20, generator=generator),
        "timestep": torch.tensor([100.0, 700.0]),
    }
    return {key: value.to(dtype) for key, value in inputs.items()}


def output(model: nn.Module, inputs: dict[str, Any], **others: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs, **others, return_dict=False)[0]


def relative(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double() - b.double()) / torch.linalg.vector_norm(b.double()))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The joint attentions by path."""
    pairs = [(f"transformer_blocks.{index}", block) for index, block in enumerate(model.transformer_blocks)]
    children = [(f"{path}.{name}", getattr(block, name)) for path, block in pairs for name in ("attn", "attn2")]
    return {path: attention for path, attention in children if attention is not None}


@dataclass
class Call:
    """One call of an attention: its keyword arguments as the block gave them, and what came out for each stream."""

    arguments: dict[str, Any]
    outputs: list[Tensor]


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, Call]]:
    """Record the attentions' calls from outside of everything that the package hooks in."""
    calls: dict[str, Call] = {}
    handles = []

    def watch(path: str, attention: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert not args
            calls[path] = Call(dict(kwargs), [])

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            calls[path].outputs.extend(result if isinstance(result, tuple) else [result])

        handles.append(attention.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        handles.append(attention.register_forward_hook(after, with_kwargs=True))

    for path, attention in attentions(model).items():
        watch(path, attention)
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class Products(TorchFunctionMode):
    """Record the queries and keys `[B, H, N, D]` that reach PyTorch's attention, whoever computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.seen.append((kwargs["query"], kwargs["key"]))
        return func(*args, **kwargs)


def gradients(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor | None]:
    model.zero_grad()
    model(**inputs, return_dict=False)[0].square().mean().backward()
    return {name: parameter.grad for name, parameter in mmpreproj.named_parameters(model)}
