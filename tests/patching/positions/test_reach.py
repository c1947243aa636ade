"""What positions may reach: scores by relative position, and nothing of the features."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from positions_kit import (
    NOWHERE,
    Products,
    attentions,
    close,
    output,
    picture,
    property_based,
    relative,
    watched,
)
from torch import Tensor, nn

import mmpreproj
from mmpreproj import Positions, PreProjConfig


@pytest.fixture
def logits(transformer, shake) -> Callable[..., list[Tensor]]:
    """Products of queries and keys `[B, H, N, M]` of each attention, at positions that are moved by an offset."""

    def measure(scaling: str, rows: int, columns: int, places: int) -> list[Tensor]:
        if not mmpreproj.is_patched(transformer):
            mmpreproj.patch(transformer, PreProjConfig(positions=Positions(text="1d", scaling=scaling)))
            shake(transformer, std=0.5)
        found = []
        with watched(transformer) as calls:
            output(transformer, picture(10, 14, 6))
        for path, call in calls.items():
            (name, packed), *_ = call.arguments["rotary_tables"].items()
            tables = packed.unpacked()
            grid = tables.image.double().unflatten(0, (5, 7))
            row, column = (grid[-1, 0] - grid[0, 0]) / 4, (grid[0, -1] - grid[0, 0]) / 6
            place = (tables.text[-1] - tables.text[0]).double() / 5
            image = tables.image.double() + rows * row + columns * column
            text = tables.text.double() + places * place
            moved = tables._replace(image=image.float(), text=text.float())
            with Products() as products, torch.no_grad():
                attentions(transformer)[path](**call.arguments | {"rotary_tables": {name: moved.packed()}})
            ((query, key),) = products.seen
            found.append(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]))
        return found

    return measure


@property_based
@given(rows=st.integers(-9, 9), columns=st.integers(-9, 9), places=st.integers(-9, 9))
@pytest.mark.parametrize("scaling", ["none", "yarn"])
def test_scores_within_a_modality_depend_on_relative_positions_only(logits, scaling, rows, columns, places):
    patches = 35
    for before, after in zip(logits(scaling, 0, 0, 0), logits(scaling, rows, columns, places), strict=True):
        exact = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(after[..., :patches, :patches], before[..., :patches, :patches], **exact)
        torch.testing.assert_close(after[..., patches:, patches:], before[..., patches:, patches:], **exact)


@pytest.mark.parametrize("shift", [(3, 0, 0), (0, -2, 0), (0, 0, 4)], ids=str)
def test_scores_between_modalities_notice_that_one_of_them_moves(logits, shift):
    """So the offsets of the test above reach the scores."""
    for before, after in zip(logits("none", 0, 0, 0), logits("none", *shift), strict=True):
        if before.shape[-1] > 35:  # attn2 has no text
            assert relative(after[..., :35, 35:], before[..., :35, 35:]) > 1e-2


# Absolute positions removed


def blocks(model: nn.Module, inputs: dict[str, Any], order: Tensor, table_order: Tensor) -> Tensor:
    """Run a model up to its last block, the image tokens and the rows of their table in orders of their own."""
    with watched(model) as calls, torch.no_grad():
        model(**inputs)
        (name, tables), *_ = next(iter(calls.values())).arguments["rotary_tables"].items()
        image = model.pos_embed(inputs["hidden_states"])[:, order]
        text = model.context_embedder(inputs["encoder_hidden_states"])
        temb = model.time_text_embed(inputs["timestep"], inputs["pooled_projections"])
        moved = {name: tables._replace(image=tables.image[table_order])}
        for block in model.transformer_blocks:
            text, image = block(
                hidden_states=image,
                encoder_hidden_states=text,
                temb=temb,
                joint_attention_kwargs={"rotary_tables": moved},
            )
    return image


@pytest.mark.parametrize("start", ["identity", "full"])
def test_tokens_permuted_with_their_positions_give_the_permuted_output(transformer, shake, start: str):
    mmpreproj.patch(transformer, PreProjConfig(positions=Positions(absolute="remove", start=start)))
    shake(transformer)
    inputs, same, order = picture(6, 10, 5), torch.arange(15), torch.randperm(15)
    ends: list[Tensor] = []
    handle = transformer.norm_out.register_forward_pre_hook(lambda _, args: ends.append(args[0]))
    plain = blocks(transformer, inputs, same, same)
    handle.remove()
    assert torch.equal(plain, ends[0]), "it is the model that is permuted"
    close(blocks(transformer, inputs, order, order), plain[:, order])
    assert relative(blocks(transformer, inputs, order, same), plain[:, order]) > 1e-3


def first_features(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """`x_tilde` of the image in the first block."""
    seen: list[Tensor] = []
    layer = model.transformer_blocks[0].attn.preproj
    handle = layer.register_forward_hook(
        lambda _, args, result: seen.append(result[0]) if args[1] == "image" else None
    )
    output(model, inputs)
    handle.remove()
    (features,) = seen
    return features


@property_based
@given(places=st.lists(st.integers(0, 14), min_size=2, max_size=2, unique=True))
@pytest.mark.parametrize("absolute", ["keep", "remove"])
def test_equal_content_has_equal_features_wherever_it_stands(
    make_transformer, shake, absolute: str, places: list[int]
):
    model = make_transformer("sd35")
    mmpreproj.patch(model, PreProjConfig(positions=Positions(absolute=absolute)))
    shake(model)
    inputs, (one, other) = picture(6, 10, 5), places
    patches = rearrange(inputs["hidden_states"], "b c (r p) (s q) -> b (r s) c p q", p=2, q=2).clone()
    patches[:, other] = patches[:, one]
    inputs["hidden_states"] = rearrange(patches, "b (r s) c p q -> b c (r p) (s q)", r=3)
    features = first_features(model, inputs)
    difference = relative(features[:, one], features[:, other])
    assert difference < 1e-6 if absolute == "remove" else difference > 1e-2


def permuted(latents: Tensor, order: Tensor) -> Tensor:
    """Put the patches of `[B, C, H, W]` in another order."""
    patches = rearrange(latents, "b c (r p) (s q) -> b (r s) c p q", p=2, q=2)[:, order]
    return rearrange(patches, "b (r s) c p q -> b c (r p) (s q)", r=latents.shape[-2] // 2)


@property_based
@given(rows=st.integers(1, 11), columns=st.integers(1, 4), length=st.integers(1, 6), data=st.data())
def test_without_any_positions_the_whole_model_is_permutation_equivariant(
    transformer, shake, rows, columns, length, data
):
    if not mmpreproj.is_patched(transformer):
        mmpreproj.patch(transformer, PreProjConfig(positions=NOWHERE))
        shake(transformer)
    inputs = picture(2 * rows, 2 * columns, length)
    plain = output(transformer, inputs)
    order = torch.tensor(data.draw(st.permutations(range(rows * columns))))
    close(
        output(transformer, inputs | {"hidden_states": permuted(inputs["hidden_states"], order)}),
        permuted(plain, order),
    )
    words = torch.tensor(data.draw(st.permutations(range(length))))
    close(output(transformer, inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"][:, words]}), plain)


@pytest.mark.parametrize(
    "values", [None, {"text": "none", "image": "2d", "absolute": "remove"}, {"text": "1d"}], ids=str
)
def test_with_absolute_or_rotary_positions_it_is_not(transformer, shake, values):
    if values is not None:
        mmpreproj.patch(transformer, PreProjConfig(positions=Positions(**values)))
        shake(transformer)
    inputs, order = picture(6, 10, 5), torch.arange(15).flip(0)
    moved = inputs | {"hidden_states": permuted(inputs["hidden_states"], order)}
    assert relative(output(transformer, moved), permuted(output(transformer, inputs), order)) > 1e-3


def test_a_text_with_places_is_read_in_order(transformer, shake):
    mmpreproj.patch(transformer, PreProjConfig(positions=Positions(text="1d", image="none", absolute="remove")))
    shake(transformer)
    inputs = picture(6, 10, 5)
    flipped = inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"].flip(1)}
    assert relative(output(transformer, flipped), output(transformer, inputs)) > 1e-4
