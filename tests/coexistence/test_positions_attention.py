"""What works on the attention of a model with rotary positions: diffusers' caches, and its choice of backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from diffusers.hooks import (
    FasterCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    apply_faster_cache,
    apply_mag_cache,
    apply_pyramid_attention_broadcast,
    apply_taylorseer_cache,
)
from diffusers.hooks.hooks import CacheContext, HookRegistry, _set_cache_context
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
from torch import Tensor, nn

import mmpreproj
from mmpreproj import Positions, PreProjConfig

KINDS = {"identity": Positions(), "full": Positions(start="full", absolute="remove")}
TIMES = (900.0, 800.0, 600.0, 400.0, 200.0)


@pytest.fixture
def style() -> str:
    """Dual attention in the first block, and norms of queries and keys."""
    return "sd35"


@pytest.fixture(params=KINDS)
def patch(request, shake) -> Callable[[nn.Module], None]:
    """Put an adapter with positions on a model, all of it at a size that matters."""

    def put(model: nn.Module) -> None:
        torch.manual_seed(0)
        mmpreproj.patch(model, PreProjConfig(positions=KINDS[request.param]))
        shake(model)

    return put


@pytest.fixture
def patched(make_transformer, style, patch) -> nn.Module:
    """A patched model without anything else."""
    model = make_transformer(style)
    patch(model)
    return model


@pytest.fixture
def inputs(make_inputs) -> dict[str, Tensor]:
    """A batch of two pictures that are not square."""
    return make_inputs() | {"hidden_states": torch.randn(2, 4, 8, 12)}


@pytest.fixture
def predict(inputs) -> Callable[[nn.Module], Tensor]:
    """Run a transformer on them, without gradients."""

    def run(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(**inputs, return_dict=False)[0]

    return run


# Caches


def pyramid(model: nn.Module, clock: SimpleNamespace, *, skip: bool) -> None:
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 700) if skip else (0, 0),
        current_timestep_callback=lambda: clock.time,
    )
    apply_pyramid_attention_broadcast(model, config)


def faster(model: nn.Module, clock: SimpleNamespace, *, skip: bool) -> None:
    config = FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 700 if skip else 0),
        current_timestep_callback=lambda: clock.time,
        is_guidance_distilled=True,
        attention_weight_callback=lambda module: 0.5,
        tensor_format="BCHW",
    )
    apply_faster_cache(model, config)


def taylorseer(model: nn.Module, clock: SimpleNamespace, *, skip: bool) -> None:
    config = TaylorSeerCacheConfig(cache_interval=2 if skip else 1, disable_cache_before_step=1, max_order=0)
    apply_taylorseer_cache(model, config)


def magnitude(model: nn.Module, clock: SimpleNamespace, *, skip: bool) -> None:
    ratios, ratio = [1.0] * len(TIMES), 0.0 if skip else 1.0
    config = MagCacheConfig(threshold=0.1, num_inference_steps=len(TIMES), retention_ratio=ratio, mag_ratios=ratios)
    apply_mag_cache(model, config)


@pytest.mark.parametrize("cache", [pyramid, faster, taylorseer, magnitude])
def test_caches_do_what_they_do_on_the_base(make_transformer, style, patch, patched, cache):
    """One that never skips changes nothing; one that skips gives the same in either order, and the base at scale 0."""
    clock = SimpleNamespace(time=TIMES[0])

    def denoise(model: nn.Module) -> Tensor:
        generator, outputs = torch.Generator().manual_seed(5), []
        HookRegistry.check_if_exists_or_initialize(model).reset_stateful_hooks()
        _set_cache_context(model, CacheContext("cond"))
        for clock.time in TIMES:
            inputs = {
                "hidden_states": torch.randn(2, 4, 8, 12, generator=generator),
                "encoder_hidden_states": torch.randn(2, 5, 24, generator=generator),
                "pooled_projections": torch.randn(2, 20, generator=generator),
                "timestep": torch.tensor([clock.time] * 2),
            }
            with torch.no_grad():
                outputs.append(model(**inputs, return_dict=False)[0])
        return torch.stack(outputs)

    def build(*, skip: bool, patch_first: bool) -> nn.Module:
        model = make_transformer(style)
        for step in (patch, lambda one: cache(one, clock, skip=skip))[:: 1 if patch_first else -1]:
            step(model)
        return model

    expected, base = denoise(patched), make_transformer(style)
    cache(base, clock, skip=True)
    cached = []
    for patch_first in (True, False):
        assert torch.equal(denoise(build(skip=False, patch_first=patch_first)), expected)
        model = build(skip=True, patch_first=patch_first)
        cached.append(denoise(model))
        mmpreproj.set_scale(model, 0.0)
        assert torch.equal(denoise(model), denoise(base))
    assert torch.equal(*cached)
    assert not torch.equal(cached[0], expected)


# Attention backends


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The backends that are called, in order; what is set for the whole process is put back."""
    seen: list[str] = []
    registry, active = _AttentionBackendRegistry, _AttentionBackendRegistry._active_backend

    def spy(name: AttentionBackendName, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda **kwargs: (seen.append(name.value), function(**kwargs))[1]

    for name, function in list(registry._backends.items()):
        monkeypatch.setitem(registry._backends, name, spy(name, function))
    yield seen
    registry.set_active_backend(active)


@pytest.mark.parametrize("backend", ["_native_math", "_native_flash", "flex"])
def test_a_backend_is_used_where_stock_sd3_has_none(make_transformer, style, patched, predict, calls, backend):
    before, stock = predict(patched), make_transformer(style)
    assert calls == ["native"] * 3  # attention, second attention, attention
    calls.clear()
    base = predict(stock)
    stock.set_attention_backend(backend)
    assert torch.equal(predict(stock), base)
    assert not calls
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)  # diffusers sets it for all models

    patched.set_attention_backend(backend)
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    torch.testing.assert_close(predict(patched), before, rtol=1e-5, atol=1e-5)
    assert calls == [backend] * 3
    calls.clear()
    patched.reset_attention_backend()
    assert torch.equal(predict(patched), before)
    assert calls == ["native"] * 3
    calls.clear()
    with attention_backend(backend):
        torch.testing.assert_close(predict(patched), before, rtol=1e-5, atol=1e-5)
    assert calls == [backend] * 3
    assert torch.equal(predict(patched), before)


@pytest.mark.parametrize("backend", ["native", "_native_math", "flex"])
def test_a_mask_acts_alike_in_every_backend_that_takes_one(patched, inputs, calls, backend):
    """Reference: the shorter text."""
    lengths = (3, 5)
    mask = torch.arange(5)[None] < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        with attention_backend(backend):
            found = patched(**inputs, joint_attention_kwargs={"attention_mask": mask}, return_dict=False)[0]
        assert calls == [backend] * 3
        for row, length in enumerate(lengths):
            one = {key: value[row : row + 1] for key, value in inputs.items()}
            one["encoder_hidden_states"] = one["encoder_hidden_states"][:, :length]
            torch.testing.assert_close(found[row], patched(**one, return_dict=False)[0][0], rtol=1e-4, atol=1e-5)
