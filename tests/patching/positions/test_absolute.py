"""The sin-cos table removed from the residual stream, in whole, in part and not at all."""

from typing import Any

import accelerate
import peft
import pytest
import torch
from positions_kit import SIZES, close, output, picture, positioned, relative
from torch import Tensor, nn

import mmpreproj
from mmpreproj import Positions, PreProjConfig

OUTSIDE = ((18, 6, 3), (2, 34, 5), (22, 26, 1), (19, 7, 4))  # the table has 8 × 8 patches, latents of 16 × 16


def without_table(model: nn.Module, latents: Tensor) -> Tensor:
    """Patches as the base's own embedding makes them, but for the table."""
    with torch.no_grad():
        return model.pos_embed.proj(latents).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("size", [*SIZES, *OUTSIDE, (7, 9, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_removed_is_the_patch_embedding_without_its_table(transformer, size, dtype):
    transformer.to(dtype)
    latents = picture(*size, dtype=dtype)["hidden_states"]
    mmpreproj.patch(transformer, positioned(absolute="remove"))
    for call in (transformer.pos_embed, lambda latents: transformer.pos_embed(latent=latents)):
        with torch.no_grad():
            assert torch.equal(call(latents), without_table(transformer, latents))


@pytest.mark.parametrize("size", [*SIZES, (7, 9, 2)], ids=str)
def test_a_removed_table_is_one_of_zeros_and_trains_as_such(transformer, make_transformer, style, shake, size):
    zeros = make_transformer(style)
    zeros.pos_embed.pos_embed.zero_()
    for model, absolute in ((transformer, "remove"), (zeros, "keep")):
        mmpreproj.patch(model.train(), PreProjConfig(positions=Positions(absolute=absolute)))
        shake(model)
        model(**picture(*size))[0].square().mean().backward()
    close(output(transformer, picture(*size)), output(zeros, picture(*size)))
    for (name, found), (_, expected) in zip(transformer.named_parameters(), zeros.named_parameters(), strict=True):
        if expected.grad is not None and expected.grad.any():
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("size", OUTSIDE, ids=str)
@pytest.mark.parametrize("values", [{}, {"scaling": "yarn"}, {"text": "none", "image": "none"}], ids=str)
def test_a_removed_table_sets_no_limit(transformer, make_transformer, style, shake, size, values: dict[str, Any]):
    """The oracle is the same model with a table that is large enough, removed as well."""
    config, larger = (
        PreProjConfig(positions=Positions(absolute="remove", **values)),
        make_transformer(style, pos_embed_max_size=32),
    )
    for model in (transformer, larger):
        mmpreproj.patch(model, config)
        shake(model)
    found = output(transformer, picture(*size))
    assert found.shape == (2, 4, size[0] // 2 * 2, size[1] // 2 * 2)
    assert torch.equal(found, output(larger, picture(*size)))


@pytest.mark.parametrize("size", OUTSIDE, ids=str)
def test_a_table_that_is_kept_even_in_part_sets_the_limit_of_the_base(transformer, size):
    stock = r"(Height|Width) \(\d+\) cannot be greater than `pos_embed_max_size`: 8\."
    ours = r"more patches a side than the sin-cos table, 8, and the adapter that removes it is switched off or not at"
    inputs = picture(*size)

    def refused(match: str = ours) -> None:
        with pytest.raises(ValueError, match=match):
            output(transformer, inputs)

    refused(stock)
    mmpreproj.patch(transformer, positioned(absolute="keep"), name="keeps")
    refused(stock)
    mmpreproj.patch(transformer, positioned(absolute="remove"), name="removes")
    expected = output(transformer, inputs)
    for scale in (0, 0.5, [1, 0]):
        mmpreproj.set_scale(transformer, {"removes": scale})
        refused()
    mmpreproj.set_scale(transformer, 1)
    mmpreproj.disable(transformer, "removes")
    refused()
    mmpreproj.enable(transformer, "removes")
    with mmpreproj.disabled(transformer):
        refused()
    assert torch.equal(output(transformer, inputs), expected)
    mmpreproj.patch(transformer, positioned(absolute="remove", text="none", image="none"), name="removes too")
    for scale in (0.5, 1, 0):
        mmpreproj.set_scale(transformer, {"removes too": scale})
        assert torch.equal(output(transformer, inputs), expected), "what is gone is gone"
    mmpreproj.unpatch(transformer, "removes")
    refused()


@pytest.mark.parametrize("off", ["scale 0", "a list", "by block", "disable", "disabled", "unpatch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_is_off_leaves_the_base_bit_for_bit(transformer, shake, dtype, off: str):
    transformer.to(dtype)
    inputs = [picture(*size, dtype=dtype) for size in SIZES]
    base = [output(transformer, each) for each in inputs]
    config = PreProjConfig(positions=Positions(absolute="remove", scaling="yarn"))
    for name in ("a", "b"):
        mmpreproj.patch(transformer, config, name=name)
    shake(transformer)
    assert relative(output(transformer, inputs[0]), base[0]) > 1e-2
    if off == "disabled":
        with mmpreproj.disabled(transformer):
            found = [output(transformer, each) for each in inputs]
    else:
        {
            "scale 0": lambda: mmpreproj.set_scale(transformer, 0),
            "a list": lambda: mmpreproj.set_scale(transformer, [0, 0.0]),
            "by block": lambda: mmpreproj.set_scale(transformer, {"a": {0: 0, 1: 0}, "b": {1: 0, 0: -0.0}}),
            "disable": lambda: mmpreproj.disable(transformer),
            "unpatch": lambda: mmpreproj.unpatch(transformer),
        }[off]()
        found = [output(transformer, each) for each in inputs]
    assert all(torch.equal(after, before) for after, before in zip(found, base, strict=True))


@pytest.mark.parametrize(
    "values", [{}, {"text": "none", "image": "none", "absolute": "remove"}], ids=["turned", "removed"]
)
def test_a_float64_base_too_is_left_bit_for_bit_at_scale_0(transformer, values: dict[str, Any]):
    transformer.double()
    inputs = picture(6, 10, 5, dtype=torch.float64)
    base = output(transformer, inputs)
    mmpreproj.patch(transformer, positioned(start="full", **values))
    mmpreproj.set_scale(transformer, 0)
    assert torch.equal(output(transformer, inputs), base)


@pytest.mark.parametrize(
    ("scales", "kept"),
    [
        ((1, 1), 0.0),
        ((0.5, 0), 0.5),
        ((0.25, 0), 0.75),
        ((0.5, 0.5), 0.25),
        ((0, 1), 0.0),
        (([0.5, 1], 0), 0.25),
        ((0, 0), 1.0),
    ],
    ids=str,
)
def test_of_the_table_a_share_is_left_that_the_scales_say(transformer, scales, kept: float):
    latents = picture(6, 10, 5)["hidden_states"]
    with torch.no_grad():
        stock = transformer.pos_embed(latents)
    bare = without_table(transformer, latents)
    for name, scale in zip("ab", scales, strict=True):
        mmpreproj.patch(transformer, positioned(absolute="remove"), name=name)
        mmpreproj.set_scale(transformer, {name: scale})
    with torch.no_grad():
        found = transformer.pos_embed(latents)
    torch.testing.assert_close(found, bare + kept * (stock - bare), rtol=1e-6, atol=1e-6)
    assert kept not in (0, 1) or torch.equal(found, stock if kept else bare)


REMOVED = PreProjConfig(pre_projection=False, skip=False, positions=Positions(absolute="remove", start="full"))


def test_a_patch_embedding_whose_weights_come_for_its_forward_only_gives_the_same(transformer):
    mmpreproj.patch(transformer, REMOVED)
    inputs = picture(8, 8, 5)
    expected = output(transformer, inputs)
    accelerate.cpu_offload(transformer, execution_device="cpu", preload_module_classes=["PatchEmbed"])
    assert all(torch.equal(output(transformer, inputs), expected) for _ in range(3))


def test_a_copy_of_the_patch_embedding_by_peft_is_unpatched_too(transformer):
    inputs = picture(8, 8, 5)
    base = output(transformer, inputs)
    mmpreproj.patch(transformer, REMOVED)
    turned = output(transformer, inputs)
    peft.get_peft_model(transformer, peft.LoraConfig(target_modules=["to_q"], modules_to_save=["pos_embed"]))
    mmpreproj.check_intact(transformer)
    assert torch.equal(output(transformer, inputs), turned)
    mmpreproj.unpatch(transformer)
    assert torch.equal(output(transformer, inputs), base)


def test_hooks_of_others_on_the_patch_embedding_act_on_what_is_left(transformer):
    inputs = picture(8, 8, 5)
    transformer.pos_embed.register_forward_hook(lambda module, args, out: out + 1)
    mmpreproj.patch(transformer, REMOVED)
    with torch.no_grad():
        bare = without_table(transformer, inputs["hidden_states"])
        torch.testing.assert_close(transformer.pos_embed(inputs["hidden_states"]), bare + 1)


def test_latents_beyond_the_table_survive_full_backward_hooks(transformer):
    mmpreproj.patch(transformer, REMOVED)
    transformer.pos_embed.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    inputs = picture(18, 6, 3)
    inputs["hidden_states"].requires_grad_(True)
    transformer(**inputs)[0].square().sum().backward()
    assert bool(torch.isfinite(inputs["hidden_states"].grad).all())


def test_dropout_on_the_patches_is_drawn_once_at_scale_0(transformer):
    config = peft.LoraConfig(target_modules=["pos_embed.proj", "to_q"], lora_dropout=0.5, init_lora_weights=False)
    transformer.add_adapter(config)
    transformer.train()
    inputs, outputs = picture(8, 8, 5), []
    for _ in range(2):
        torch.manual_seed(0)
        outputs.append(output(transformer, inputs))
        if not mmpreproj.is_patched(transformer):
            mmpreproj.patch(transformer, REMOVED)
            mmpreproj.set_scale(transformer, 0.0)
    assert torch.equal(*outputs)
