"""diffusers' caching hooks on SD3: the ones that work on the stock model work patched; the others fail without us too.

SD3 has no `CacheMixin`, so neither `enable_cache` nor `cache_context`. TaylorSeer runs where its context is set as the
mixin would set it. FirstBlockCache does not run at all: it subtracts the text output of the last block, where
SD3 has none.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    apply_faster_cache,
    apply_first_block_cache,
    apply_mag_cache,
    apply_pyramid_attention_broadcast,
    apply_taylorseer_cache,
)
from diffusers.hooks.hooks import CacheContext, HookRegistry, _set_cache_context
from diffusers.models.cache_utils import CacheMixin
from torch import Tensor, nn

import mmpreproj

TIMES = (900.0, 800.0, 600.0, 400.0, 200.0)


def first_block(model: nn.Module, clock: SimpleNamespace, *, skip: bool) -> None:
    apply_first_block_cache(model, FirstBlockCacheConfig(threshold=1e9 if skip else -1.0))


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
    ratio = 0.0 if skip else 1.0
    config = MagCacheConfig(
        threshold=0.1, num_inference_steps=len(TIMES), retention_ratio=ratio, mag_ratios=[1.0] * len(TIMES)
    )
    apply_mag_cache(model, config)


WORKING = (pyramid, faster, taylorseer, magnitude)


WORKING = (pyramid, faster, taylorseer, magnitude)


def reset(model: nn.Module) -> None:
    """Let the caches of a model forget what they keep from one step to the next."""
    HookRegistry.check_if_exists_or_initialize(model).reset_stateful_hooks()


@pytest.fixture
def clock() -> SimpleNamespace:
    """The timestep that the caches are told."""
    return SimpleNamespace(time=TIMES[0])


@pytest.fixture
def denoise(clock) -> Callable[..., Tensor]:
    """Run a tiny transformer at three timesteps, where the caches keep something from one to the next."""

    def run(model: nn.Module) -> Tensor:
        generator, outputs = torch.Generator().manual_seed(5), []
        _set_cache_context(model, CacheContext("cond"))
        for time in TIMES:
            clock.time = time
            with torch.no_grad():
                output = model(
                    hidden_states=torch.randn(2, 4, 8, 8, generator=generator),
                    encoder_hidden_states=torch.randn(2, 5, 24, generator=generator),
                    pooled_projections=torch.randn(2, 20, generator=generator),
                    timestep=torch.tensor([time, time]),
                    return_dict=False,
                )
            outputs.append(output[0])
        return torch.stack(outputs)

    return run


@pytest.fixture
def make_cached(make_transformer, style, shake, clock) -> Callable[..., nn.Module]:
    """Build a transformer that is cached, and patched before or after that or not at all."""

    def make(cache: Callable[..., None], order: str, *, skip: bool) -> nn.Module:
        model = make_transformer(style)
        for step in {"stock": ("cache",), "before": ("cache", "patch"), "after": ("patch", "cache")}[order]:
            if step == "cache":
                cache(model, clock, skip=skip)
            else:
                torch.manual_seed(0)
                mmpreproj.patch(model)
                shake(model)
        return model

    return make


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("cache", WORKING)
def test_a_cache_that_never_skips_changes_nothing(make_cached, make_transformer, style, shake, denoise, cache, order):
    plain = make_transformer(style)
    base = denoise(plain)
    assert torch.equal(denoise(make_cached(cache, "stock", skip=False)), base)
    torch.manual_seed(0)
    torch.manual_seed(0)
    mmpreproj.patch(plain)
    shake(plain)
    patched = denoise(plain)
    model = make_cached(cache, order, skip=False)
    assert torch.equal(denoise(model), patched)
    assert not torch.equal(patched, base)
    mmpreproj.unpatch(model)
    reset(model)
    assert torch.equal(denoise(model), base)


@pytest.mark.parametrize("cache", WORKING)
def test_a_cache_that_skips_gives_the_same_in_either_order_and_the_base_at_scale_0(make_cached, denoise, cache):
    base, uncached = (denoise(make_cached(cache, "stock", skip=skip)) for skip in (True, False))
    assert not torch.equal(base, uncached)
    models = [make_cached(cache, order, skip=True) for order in ("before", "after")]
    outputs = [denoise(model) for model in models]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], denoise(make_cached(cache, "after", skip=False)))
    for model in models:
        reset(model)
        mmpreproj.set_scale(model, 0.0)
        assert torch.equal(denoise(model), base)


def test_a_broadcast_attention_still_gets_the_skip_of_the_current_tokens(
    make_cached, make_transformer, style, shake, clock
):
    """The cache holds what attention gave; what goes around it is computed anew."""
    model, plain = make_cached(pyramid, "after", skip=True), make_transformer(style)
    mmpreproj.patch(plain)
    shake(plain)
    attention, reference = model.transformer_blocks[0].attn, plain.transformer_blocks[0].attn
    text = torch.randn(2, 5, 32)
    clock.time = 500.0
    first, second = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    with torch.no_grad():
        attention(first, text)
        cached = attention(second, text)[0]
        before = reference(first, text)[0]
        _, skips = zip(*(reference.preproj(tokens, "image") for tokens in (first, second)), strict=True)
    torch.testing.assert_close(cached, before - skips[0] + skips[1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(cached, before)


@pytest.mark.parametrize("order", ["stock", "before", "after"])
@pytest.mark.parametrize("skip", [False, True])
def test_first_block_cache_fails_on_stock_sd3_and_in_the_same_way_patched(make_cached, denoise, skip, order):
    """It subtracts the text output of the last block, where SD3 has none; this fails as soon as diffusers mends it."""
    with pytest.raises(TypeError, match=r"unsupported operand type.* 'NoneType' and 'Tensor'"):
        denoise(make_cached(first_block, order, skip=skip))


def test_sd3_has_no_cache_interface_of_its_own(make_transformer):
    """When it gets one, the contexts set by hand above should go."""
    assert not isinstance(make_transformer(), CacheMixin)
