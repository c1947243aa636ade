"""The mask of a text, the arguments of a patched model, and tables of sizes that take turns."""

from typing import Any

import numpy as np
import pytest
import torch
from positions_kit import NOWHERE, SCALINGS, SIZES, close, gradients, output, picture, positioned, relative
from torch import Tensor, nn

import mmpreproj
from mmpreproj import Positions, PreProjConfig

# Padding of the text

MASKING = [
    PreProjConfig(mask_padding=True),
    PreProjConfig(positions=Positions(text="1d", absolute="remove")),
    PreProjConfig(positions=Positions(text="none", start="full")),
    PreProjConfig(positions=Positions(text="diagonal", scaling="yarn", base_size=3), mask_padding=True),
    PreProjConfig(positions=NOWHERE, mask_padding=True),
]


@pytest.fixture(params=MASKING, ids=["mask alone", "1d", "none", "diagonal", "nowhere"])
def masking(request, transformer, shake) -> nn.Module:
    """A trained model in whose attention padding can be masked."""
    mmpreproj.patch(transformer, request.param)
    shake(transformer)
    return transformer


def mask_of(lengths: tuple[int, int], total: int, dtype: torch.dtype) -> dict[str, Tensor]:
    mask = torch.arange(total)[None] < torch.tensor(lengths)[:, None]
    return {"attention_mask": mask.to(dtype)}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
@pytest.mark.parametrize("lengths", [(3, 3), (2, 5), (7, 1)], ids=str)
def test_padding_does_not_reach_the_image(masking, dtype, lengths: tuple[int, int]):
    inputs = picture(6, 10, 7)
    mask = mask_of(lengths, 7, dtype)
    found = output(masking, inputs, joint_attention_kwargs=mask)
    other = inputs["encoder_hidden_states"].clone()
    for row, length in enumerate(lengths):
        other[row, length:] = 100 * torch.randn_like(other[row, length:])
    changed = inputs | {"encoder_hidden_states": other}
    assert torch.equal(output(masking, changed, joint_attention_kwargs=mask), found)
    assert relative(output(masking, changed), output(masking, inputs)) > 1e-3, "without a mask it does"
    for row, length in enumerate(lengths):
        alone = {key: value[row : row + 1] for key, value in inputs.items()}
        alone["encoder_hidden_states"] = alone["encoder_hidden_states"][:, :length]
        close(found[row : row + 1], output(masking, alone))


def test_a_mask_without_padding_changes_nothing(masking):
    inputs = picture(6, 10, 7)
    close(output(masking, inputs, joint_attention_kwargs=mask_of((7, 7), 7, torch.bool)), output(masking, inputs))


def test_an_unpatched_model_ignores_a_mask_again_as_stock_does(masking, make_transformer, style):
    inputs, mask = picture(6, 10, 7), mask_of((3, 2), 7, torch.bool)
    mmpreproj.unpatch(masking)
    expected = output(make_transformer(style), inputs, joint_attention_kwargs=mask)
    assert torch.equal(output(masking, inputs, joint_attention_kwargs=mask), expected)
    assert torch.equal(output(masking, inputs), expected)


@pytest.mark.parametrize(
    ("mask", "error", "match"),
    [
        (torch.ones(2, 7), TypeError, "of 1 at tokens and 0 at padding; got torch.float32"),
        (torch.ones(2, 7, dtype=torch.bfloat16), TypeError, "got torch.bfloat16"),
        (torch.ones(2, 7, dtype=torch.complex64), TypeError, "got torch.complex64"),
        ([[1] * 7] * 2, TypeError, "got list"),
        (np.ones((2, 7), dtype=bool), TypeError, "got ndarray"),
        (torch.ones(2, 6, dtype=torch.bool), ValueError, r"shape of the text, \[2, 7\] .*; got \[2, 6\]"),
        (torch.ones(2, 22, dtype=torch.bool), ValueError, r"got \[2, 22\]"),
        (torch.ones(1, 7, dtype=torch.bool), ValueError, r"got \[1, 7\]"),
        (torch.ones(7, dtype=torch.bool), ValueError, r"got \[7\]"),
        (torch.ones(2, 1, 1, 7, dtype=torch.int64), ValueError, r"got \[2, 1, 1, 7\]"),
    ],
    ids=repr,
)
def test_a_mask_of_another_kind_or_shape_is_refused(transformer, mask: Any, error, match: str):
    mmpreproj.patch(transformer, PreProjConfig(mask_padding=True))
    with pytest.raises(error, match=f"attention_mask must (be|have) .*{match}"):
        output(transformer, picture(6, 10, 7), joint_attention_kwargs={"attention_mask": mask})


# How the model is called


def test_the_callers_arguments_are_not_changed(masking):
    mask = mask_of((3, 2), 7, torch.bool)["attention_mask"]
    given_mask, kwargs = mask.clone(), {"attention_mask": mask, "scale": 1.0}
    inputs = picture(6, 10, 7) | {"joint_attention_kwargs": kwargs}
    before = dict(inputs)
    first, second = output(masking, inputs), output(masking, inputs)
    assert torch.equal(first, second)
    assert inputs == before and inputs["joint_attention_kwargs"] is kwargs
    assert list(kwargs) == ["attention_mask", "scale"] and kwargs["attention_mask"] is mask
    assert torch.equal(mask, given_mask)


def test_a_positional_call_is_the_keyword_call(masking):
    inputs, mask = picture(6, 10, 7), mask_of((3, 2), 7, torch.bool)
    values = tuple(inputs.values())
    masked, plain = output(masking, inputs, joint_attention_kwargs=mask), output(masking, inputs)
    assert not torch.equal(masked, plain)
    kwargs = dict(mask)
    with torch.no_grad():
        assert torch.equal(masking(*values, None, kwargs, False)[0], masked)
        assert torch.equal(masking(*values, None, None, False, None)[0], plain)
        assert torch.equal(masking(*values, None).sample, plain)
        assert torch.equal(masking(*values[:2], **dict(list(inputs.items())[2:])).sample, plain)
        assert torch.equal(
            masking(*values[:1], **dict(list(inputs.items())[1:]), joint_attention_kwargs=mask)[0], masked
        )
    assert list(kwargs) == ["attention_mask"]


def test_bad_inputs_are_the_models_to_refuse(transformer):
    """Before it is patched and after, the same kind of error for the same mistake."""
    mistakes = (
        {"hidden_states": torch.randn(4, 8, 8)[None, None]},
        {"encoder_hidden_states": None},
        {"timestep": None},
    )
    found = []
    for patched in (False, True):
        if patched:
            mmpreproj.patch(transformer, positioned())
        for mistake in mistakes:
            with pytest.raises(Exception) as error:
                output(transformer, picture(8, 8, 5) | mistake)
            found.append((error.type, str(error.value)))
    assert found[:3] == found[3:]


@pytest.mark.parametrize("values", [{}, {"scaling": "yarn", "absolute": "remove"}], ids=str)
def test_sizes_that_alternate_give_what_each_gives_alone(transformer, make_transformer, style, shake, values):
    config, expected = PreProjConfig(positions=Positions(text="diagonal", **values)), {}
    for size in SIZES:
        fresh = make_transformer(style)
        mmpreproj.patch(fresh, config)
        shake(fresh)
        expected[size] = output(fresh, picture(*size))
    mmpreproj.patch(transformer, config)
    shake(transformer)
    for size in (*SIZES, *reversed(SIZES), *SIZES):
        assert torch.equal(output(transformer, picture(*size)), expected[size])


def test_adapters_that_differ_in_one_setting_do_not_share_a_table(make_transformer, style):
    kinds = [
        {},
        {"theta": 50.0},
        {"text": "diagonal"},
        {"text": "none"},
        {"image": "none"},
        *({"scaling": scaling} for scaling in SCALINGS[1:]),
        {"scaling": "linear", "base_size": 2},
    ]
    for _ in range(2):  # made in the first round, kept in the second
        found = []
        for values in kinds:
            model = make_transformer(style)
            mmpreproj.patch(model, positioned(start="full", **values))
            found.append(output(model, picture(6, 12, 5)))
        for index, one in enumerate(found):
            assert all(relative(one, other) > 1e-4 for other in found[index + 1 :])


def test_tables_first_made_in_inference_mode_can_be_trained_through(transformer):
    config = positioned(text="diagonal", theta=1234.5)  # settings that nothing has asked for before
    mmpreproj.patch(transformer, config)
    inputs = picture(6, 10, 5)
    with torch.inference_mode():
        transformer(**inputs)
    for name, grad in gradients(transformer, inputs).items():
        assert grad is not None and ("rotary_gain" not in name or grad.all()), name


# Refusals


@pytest.mark.parametrize("off", ["scale", "disabled"])
def test_a_mask_is_ignored_as_stock_does_while_the_adapter_does_not_act(masking, make_transformer, style, off):
    inputs, mask = picture(8, 8, 5), torch.tensor([[1, 1, 0, 0, 0]] * 2)
    expected = output(make_transformer(style), inputs)
    if off == "scale":
        mmpreproj.set_scale(masking, 0.0)
        found = output(masking, inputs, joint_attention_kwargs={"attention_mask": mask})
    else:
        with mmpreproj.disabled(masking):
            found = output(masking, inputs, joint_attention_kwargs={"attention_mask": mask})
    assert torch.equal(found, expected)


def test_a_mask_of_negative_prompts_and_prompts_is_refused_for_either_alone(masking):
    with pytest.raises(ValueError, match=r"must have the shape of the text, \[2, 5\].*got \[4, 5\]"):
        output(masking, picture(8, 8, 5), joint_attention_kwargs={"attention_mask": torch.ones(4, 5) > 0})
