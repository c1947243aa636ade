"""The patched blocks against a slow float64 reference that is written from the equations, in numpy.

Source: arXiv 2604.10791 for the adapter, arXiv 2403.03206 (figure 2) for the joint block. Nothing here calls the
package to compute; it only reads weights by their names in the state dict.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mmpreproj
from mmpreproj import PreProjConfig

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Variant:
    """The equations as they are, or with one deliberate mistake, to see that the comparison would notice it."""

    gate_skip: bool = True
    project_text: bool = True
    project_dual: bool = True
    skip_text: bool = True
    skip_reads_features: bool = True
    skip_reads_own_features: bool = True
    scale_increment_once: bool = True


@dataclass(frozen=True)
class Adapter:
    """What the reference must know of an adapter beside its weights."""

    name: str = "default"
    share: str = "block"
    scale: float = 1.0

    def key(self, stream: str) -> str:
        return "shared" if self.share == "block" else stream


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """`W x + b`; the bias where there is one."""
    return np.einsum("oi,bni->bno", w[f"{name}.weight"], x) + w.get(f"{name}.bias", 0.0)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def layer_norm(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def modulate(x: np.ndarray, shift: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return layer_norm(x) * (1 + scale) + shift


def modulation(w: Weights, name: str, temb: np.ndarray, parts: int) -> list[np.ndarray]:
    """`parts` vectors `[B, 1, D]` from the time embedding."""
    return np.split(linear(w, f"{name}.linear", silu(temb)[:, None]), parts, axis=-1)


def mlp(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    hidden = linear(w, f"{name}.net.0.proj", x)
    hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    return linear(w, f"{name}.net.2", hidden)


def increment(w: Weights, attention: str, x_hat: np.ndarray, stream: str, adapter: Adapter) -> np.ndarray:
    """`Δ(x_hat) = W_down · SiLU(W_up · x_hat)`; zeros where the adapter has none."""
    prefix = f"{attention}.preproj.adapters.{adapter.name}.pre_projection.{adapter.key(stream)}"
    if f"{prefix}.up.weight" not in w:
        return np.zeros_like(x_hat)
    return linear(w, f"{prefix}.down", silu(linear(w, f"{prefix}.up", x_hat)))


def features(w: Weights, attention: str, x_hat: np.ndarray, stream: str, adapters: Sequence[Adapter]) -> np.ndarray:
    """`x_tilde = x_hat + Σ sᵢ Δᵢ(x_hat)`."""
    return x_hat + sum(adapter.scale * increment(w, attention, x_hat, stream, adapter) for adapter in adapters)


def content_skip(
    w: Weights, attention: str, x_hat: np.ndarray, stream: str, adapters: Sequence[Adapter], variant: Variant
) -> np.ndarray:
    """`Σ sᵢ Wᵢ (x_hat + Δᵢ(x_hat))`."""
    total = np.zeros_like(x_hat)
    for adapter in adapters:
        name = f"{attention}.preproj.adapters.{adapter.name}.content_skip.{adapter.key(stream)}.map"
        if f"{name}.weight" not in w:
            continue
        source = x_hat
        if not variant.skip_reads_own_features:
            source = features(w, attention, x_hat, stream, adapters)
        elif variant.skip_reads_features:
            factor = 1.0 if variant.scale_increment_once else adapter.scale
            source = x_hat + factor * increment(w, attention, x_hat, stream, adapter)
        total = total + adapter.scale * linear(w, name, source)
    return total


def split_heads(w: Weights, norm: str, x: np.ndarray, heads: int) -> np.ndarray:
    """`[B, N, H·K]` to `[B, N, H, K]`, each head divided by its root mean square where the model has that norm."""
    x = x.reshape(*x.shape[:2], heads, -1)
    if f"{norm}.weight" in w:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[f"{norm}.weight"]
    return x


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax attention of `[B, N, H, K]`, head by head, query by query; returns `[B, N, H·K]`."""
    out = np.zeros(q.shape)
    for batch, head, query in np.ndindex(q.shape[0], q.shape[2], q.shape[1]):
        scores = k[batch, :, head] @ q[batch, query, head] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[batch, query, head] = weights / weights.sum() @ v[batch, :, head]
    return out.reshape(*q.shape[:2], -1)


def joint_attention(
    w: Weights, image: np.ndarray, text: np.ndarray, heads: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Joint attention over [image, text]; no text output where the block has no projection for it."""
    q, k, v = (
        np.concatenate(
            [
                split_heads(w, f"attn.norm_{kind}", linear(w, f"attn.to_{kind}", image), heads),
                split_heads(w, f"attn.norm_added_{kind}", linear(w, f"attn.add_{kind}_proj", text), heads),
            ],
            axis=1,
        )
        for kind in "qkv"
    )
    both = attend(q, k, v)
    image_out, text_out = both[:, : image.shape[1]], both[:, image.shape[1] :]
    has_text = "attn.to_add_out.weight" in w
    return linear(w, "attn.to_out.0", image_out), linear(w, "attn.to_add_out", text_out) if has_text else None


def self_attention(w: Weights, image: np.ndarray, heads: int) -> np.ndarray:
    q, k, v = (split_heads(w, f"attn2.norm_{kind}", linear(w, f"attn2.to_{kind}", image), heads) for kind in "qkv")
    return linear(w, "attn2.to_out.0", attend(q, k, v))


def gated(gate: np.ndarray, attention: np.ndarray, skip: np.ndarray, variant: Variant) -> np.ndarray:
    """`gate ⊙ (attention(x_tilde) + W_skip · x_tilde)`."""
    return gate * (attention + skip) if variant.gate_skip else gate * attention + skip


def joint_block(
    w: Weights,
    image: np.ndarray,
    text: np.ndarray,
    temb: np.ndarray,
    *,
    heads: int,
    adapters: Sequence[Adapter],
    variant: Variant,
) -> tuple[np.ndarray | None, np.ndarray]:
    """One patched SD3 block; with `attn2` weights the dual block of SD3.5, without text output the last one."""
    dual, last = "attn2.to_q.weight" in w, "attn.to_add_out.weight" not in w

    image_mod = modulation(w, "norm1", temb, 9 if dual else 6)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = image_mod[:6]
    image_hat = modulate(image, shift, scale)
    if last:
        text_scale, text_shift = modulation(w, "norm1_context", temb, 2)
    else:
        text_mod = modulation(w, "norm1_context", temb, 6)
        text_shift, text_scale = text_mod[:2]
    text_hat = modulate(text, text_shift, text_scale)

    image_tilde = features(w, "attn", image_hat, "image", adapters)
    text_tilde = features(w, "attn", text_hat, "text", adapters) if variant.project_text else text_hat
    image_attention, text_attention = joint_attention(w, image_tilde, text_tilde, heads)

    skip = content_skip(w, "attn", image_hat, "image", adapters, variant)
    out = image + gated(gate, image_attention, skip, variant)
    if dual:
        shift2, scale2, gate2 = image_mod[6:]
        dual_hat = modulate(image, shift2, scale2)
        dual_tilde = features(w, "attn2", dual_hat, "image", adapters) if variant.project_dual else dual_hat
        skip = content_skip(w, "attn2", dual_hat, "image", adapters, variant)
        out = out + gated(gate2, self_attention(w, dual_tilde, heads), skip, variant)
    image_out = out + mlp_gate * mlp(w, "ff", modulate(out, mlp_shift, mlp_scale))
    if last:
        return None, image_out

    _, _, text_gate, text_mlp_shift, text_mlp_scale, text_mlp_gate = text_mod
    skip = content_skip(w, "attn", text_hat, "text", adapters, variant) if variant.skip_text else np.zeros(())
    out = text + gated(text_gate, text_attention, skip, variant)
    return out + text_mlp_gate * mlp(w, "ff_context", modulate(out, text_mlp_shift, text_mlp_scale)), image_out


@pytest.fixture(params=["block", "stream"])
def share(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_patched(make_transformer, shake):
    def make(share: str = "block", **overrides: Any) -> nn.Module:
        model = make_transformer(**overrides).double()
        mmpreproj.patch(model, PreProjConfig(share=share))
        shake(model)
        return model

    return make


def run_both(
    model: nn.Module,
    index: int,
    share: str = "block",
    variant: Variant | None = None,
    adapters: Sequence[Adapter] | None = None,
) -> list[tuple[torch.Tensor | None, np.ndarray | None]]:
    """Run one block and its reference on the same tokens; returns (code, reference) for text and for image."""
    generator = torch.Generator().manual_seed(3)
    image, text, temb = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(2, 6, 32), (2, 4, 32), (2, 32)]
    )
    block = model.transformer_blocks[index]
    with torch.no_grad():
        outputs = block(hidden_states=image, encoder_hidden_states=text, temb=temb)
    weights = {key: value.numpy() for key, value in block.state_dict().items()}
    expected = joint_block(
        weights,
        image.numpy(),
        text.numpy(),
        temb.numpy(),
        heads=2,
        adapters=(Adapter(share=share),) if adapters is None else adapters,
        variant=variant or Variant(),
    )
    return list(zip(outputs, expected, strict=True))


def largest_difference(pairs: list[tuple[torch.Tensor | None, np.ndarray | None]]) -> float:
    for code, reference in pairs:
        assert (code is None) == (reference is None)
    return max(float(np.abs(code.numpy() - reference).max()) for code, reference in pairs if code is not None)


def test_joint_block(make_patched, share: str):
    pairs = run_both(make_patched(share), 0, share)
    assert all(code is not None for code, _ in pairs)
    assert largest_difference(pairs) < 1e-10


def test_last_block_projects_its_text_but_has_no_text_skip(make_patched, share: str):
    model = make_patched(share)
    assert largest_difference(run_both(model, 1, share)) < 1e-10
    names = [name for name, _ in mmpreproj.named_parameters(model) if name.startswith("transformer_blocks.1.")]
    assert any("pre_projection.text" in name for name in names) == (share == "stream")
    assert not any("content_skip.text" in name for name in names)


def test_last_block_spends_no_skip_on_the_text_it_discards(make_patched):
    attention = make_patched().transformer_blocks[1].attn
    seen = record(skip=attention.preproj.adapters["default"].content_skip["shared"])
    attention(hidden_states=torch.randn(2, 6, 32).double(), encoder_hidden_states=torch.randn(2, 4, 32).double())
    assert [tuple(value.shape) for value in seen["skip.in"]] == [(2, 6, 32)]


def test_dual_attention_block(make_patched, share: str):
    model = make_patched(share, dual_attention_layers=(0,))
    assert largest_difference(run_both(model, 0, share)) < 1e-10


def test_dual_attention_block_with_normed_queries_and_keys(make_patched):
    # diffusers takes the mean square in fp32 whatever the dtype, so the base itself is no closer than that.
    model = make_patched(style="sd35")
    assert largest_difference(run_both(model, 0)) < 2e-6


@pytest.mark.parametrize(
    "variant",
    [
        Variant(gate_skip=False),
        Variant(project_text=False),
        Variant(project_dual=False),
        Variant(skip_text=False),
        Variant(skip_reads_features=False),
    ],
    ids=lambda variant: next(key for key, value in vars(variant).items() if not value),
)
def test_reference_would_notice_a_misplaced_term(make_patched, variant: Variant):
    model = make_patched(dual_attention_layers=(0,))
    assert largest_difference(run_both(model, 0, variant=variant)) > 1e-2


def test_reference_would_notice_unprojected_text_in_the_last_block(make_patched):
    assert largest_difference(run_both(make_patched(), 1, variant=Variant(project_text=False))) > 1e-2


# Several adapters

SCALES = [(1.0, 1.0, 1.0), (0.7, -0.4, 1.8), (0.0, 0.5, 0.25)]


@pytest.fixture
def make_sum(make_transformer, shake):
    """A float64 model with three adapters that differ in sharing, blocks and parts, and what the reference needs."""

    def make(scales: Sequence[float], **overrides: Any) -> tuple[nn.Module, list[Adapter]]:
        model = make_transformer(**overrides).double()
        mmpreproj.patch(model, PreProjConfig(), name="whole")
        mmpreproj.patch(model, PreProjConfig(share="stream", expansion=0.5, skip=False, blocks=[0]), name="apart")
        mmpreproj.patch(model, PreProjConfig(share="stream", pre_projection=False), name="around")
        shake(model)
        mmpreproj.set_scale(model, dict(zip(("whole", "apart", "around"), scales, strict=True)))
        shares = {"whole": "block", "apart": "stream", "around": "stream"}
        return model, [
            Adapter(name, share, scale) for (name, share), scale in zip(shares.items(), scales, strict=True)
        ]

    return make


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("overrides", [{}, {"dual_attention_layers": (0,)}, {"style": "sd35"}], ids=str)
def test_adapters_sum_as_stated(make_sum, scales: Sequence[float], index: int, overrides: dict[str, Any]):
    model, adapters = make_sum(scales, **overrides)
    # The scale is kept in float32, and so is the mean square of normed queries and keys.
    assert largest_difference(run_both(model, index, adapters=adapters)) < (2e-6 if "style" in overrides else 1e-6)


def test_scales_that_float32_holds_sum_to_the_last_digits(make_sum):
    model, adapters = make_sum((0.5, -0.25, 1.5), dual_attention_layers=(0,))
    for index in (0, 1):
        assert largest_difference(run_both(model, index, adapters=adapters)) < 1e-10


def test_switched_off_adapters_drop_out_of_the_sum(make_sum):
    model, adapters = make_sum((0.5, -0.25, 1.5), dual_attention_layers=(0,))
    mmpreproj.disable(model, "whole")
    assert largest_difference(run_both(model, 0, adapters=adapters[1:])) < 1e-10
    mmpreproj.disable(model)
    mmpreproj.enable(model, "apart")
    assert largest_difference(run_both(model, 0, adapters=[adapters[1]])) < 1e-10


def test_each_block_has_a_scale_of_its_own_in_the_sum(make_sum):
    model, adapters = make_sum((1.0, 1.0, 1.0))
    mmpreproj.set_scale(model, {"whole": [0.5, -2.0], "around": {1: 0.25}})
    expected = {0: (0.5, 1.0, 1.0), 1: (-2.0, 1.0, 0.25)}
    for index, factors in expected.items():
        scaled = [replace(adapter, scale=factor) for adapter, factor in zip(adapters, factors, strict=True)]
        assert largest_difference(run_both(model, index, adapters=scaled)) < 1e-10


@pytest.mark.parametrize("mistake", ["skip_reads_features", "skip_reads_own_features", "scale_increment_once"])
def test_reference_would_notice_a_sum_put_together_otherwise(make_sum, mistake: str):
    model, adapters = make_sum((0.5, -0.25, 1.5))
    assert largest_difference(run_both(model, 0, adapters=adapters, variant=Variant(**{mistake: False}))) > 1e-2


def record(**modules: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Record what enters and leaves each module from now on; keys `name.in` and `name.out`."""
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(name: str):
        def hook(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            seen.setdefault(f"{name}.in", []).append(args[0])
            seen.setdefault(f"{name}.out", []).append(output)

        return hook

    for name, module in modules.items():
        module.register_forward_hook(keep(name))
    return seen


@pytest.mark.parametrize("permuted", ["image", "text"])
def test_permuting_a_stream_permutes_its_features_and_skip_and_changes_nothing_else(make_patched, permuted: str):
    model = make_patched()
    attention = model.transformer_blocks[0].attn
    skip = attention.preproj.adapters["default"].content_skip["shared"]
    seen = record(image=attention.to_q, text=attention.add_k_proj, skip=skip)
    tokens = {name: torch.randn(2, count, 32, dtype=torch.float64) for name, count in [("image", 6), ("text", 4)]}
    order = {name: torch.arange(value.shape[1]) for name, value in tokens.items()}
    order[permuted] = torch.randperm(tokens[permuted].shape[1])
    outputs = []
    for moved in (tokens, {name: value[:, order[name]] for name, value in tokens.items()}):
        with torch.no_grad():
            outputs.append(attention(hidden_states=moved["image"], encoder_hidden_states=moved["text"]))
    assert len(seen["skip.out"]) == 4, "one skip for image and one for text, in each of two runs"
    for place, name in enumerate(("image", "text")):
        before, after = seen[f"{name}.in"]
        assert not torch.equal(before, tokens[name]), "the projections read features, not the normed tokens"
        exact = {"rtol": 0, "atol": 1e-12}
        torch.testing.assert_close(after, before[:, order[name]], **exact)
        torch.testing.assert_close(seen["skip.out"][2 + place], seen["skip.out"][place][:, order[name]], **exact)
        # Stock SD3 attention has no positions of its own, so the whole output only moves along.
        torch.testing.assert_close(outputs[1][place], outputs[0][place][:, order[name]], **exact)


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*mmpreproj.named_parameters(model), strict=True)
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


def test_shared_weights_receive_the_sum_of_the_gradients_of_both_streams(make_patched):
    shared, separate = make_patched("block"), make_patched("stream")
    twins = dict(separate.named_parameters())
    with torch.no_grad():
        for name, parameter in mmpreproj.named_parameters(shared):
            for key in ("image", "text"):
                if name.replace("shared", key) in twins:
                    twins[name.replace("shared", key)].copy_(parameter)
    image, text = torch.randn(2, 6, 32, dtype=torch.float64), torch.randn(2, 4, 32, dtype=torch.float64)
    losses = []
    for model in (shared, separate):
        outputs = model.transformer_blocks[0].attn(hidden_states=image, encoder_hidden_states=text)
        losses.append([output.square().sum() for output in outputs])
    assert torch.equal(losses[0][0], losses[1][0]), "the same weights in both streams compute the same"
    assert torch.equal(losses[0][1], losses[1][1])
    for name, grad in gradients(shared, sum(losses[0])).items():
        parts = gradients(separate, sum(losses[1]))
        of_image, of_text = parts[name.replace("shared", "image")], parts[name.replace("shared", "text")]
        assert min(of_image.abs().max(), of_text.abs().max()) > 1e-3, f"{name}: each stream contributes"
        torch.testing.assert_close(grad, of_image + of_text, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("index", [0, 1])
def test_gradients_are_those_of_the_equations(make_patched, share: str, index: int):
    """Each weight's gradient along a random direction against a central difference of the block itself."""
    model = make_patched(share, dual_attention_layers=(0,))
    image, text, temb = (torch.randn(shape, dtype=torch.float64) for shape in [(2, 6, 32), (2, 4, 32), (2, 32)])

    def loss() -> torch.Tensor:
        outputs = model.transformer_blocks[index](hidden_states=image, encoder_hidden_states=text, temb=temb)
        return sum(output.square().mean() for output in outputs if output is not None)

    found = gradients(model, loss())
    assert found.keys() == {name for name, _ in mmpreproj.named_parameters(model) if f"blocks.{index}." in name}
    parameters = dict(model.named_parameters())
    for name, grad in found.items():
        direction, values = torch.randn_like(grad), []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameters[name].add_(direction, alpha=step)
                values.append(loss().item())
                parameters[name].sub_(direction, alpha=step)
        slope = (values[0] - values[1]) / 2e-5
        assert (grad * direction).sum().item() == pytest.approx(slope, rel=1e-5, abs=1e-8), name


def test_each_stream_alone_trains_the_shared_weights(make_patched):
    model = make_patched()
    image, text = torch.randn(2, 6, 32, dtype=torch.float64), torch.randn(2, 4, 32, dtype=torch.float64)
    outputs = model.transformer_blocks[0].attn(hidden_states=image, encoder_hidden_states=text)
    for output in outputs:
        found = gradients(model, output.square().sum())
        assert sorted(name.rsplit("default.")[1] for name in found) == [
            "content_skip.shared.map.weight",
            "pre_projection.shared.down.weight",
            "pre_projection.shared.up.weight",
        ]
        assert all(grad.abs().max() > 1e-3 for grad in found.values())
    # The text output never touches the image's skip: W_skip's gradient comes from the text's features alone.
    separate = make_patched("stream")
    outputs = separate.transformer_blocks[0].attn(hidden_states=image, encoder_hidden_states=text)
    skips = [name for name in gradients(separate, outputs[1].square().sum()) if "content_skip" in name]
    assert [name.split(".")[-3] for name in skips] == ["text"]
