"""How positions start: as the base bit for bit with gains that learn, or whole."""

import pytest
import torch
from positions_kit import SCALINGS, SIZES, TEXTS, attentions, close, gradients, output, picture, positioned, relative

import mmpreproj
from mmpreproj import Positions, PreProjConfig


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", TEXTS)
def test_identity_start_is_the_base_bit_for_bit_at_every_size(transformer, dtype, training: bool, text: str):
    transformer.to(dtype).train(training)
    inputs = [picture(*size, dtype=dtype) for size in SIZES]
    base = [output(transformer, each) for each in inputs]
    for scaling in SCALINGS:
        mmpreproj.patch(transformer, positioned(text=text, scaling=scaling))
        assert all(torch.equal(output(transformer, each), before) for each, before in zip(inputs, base, strict=True))
        mmpreproj.unpatch(transformer)


def test_identity_start_is_the_base_bit_for_bit_under_autocast(transformer):
    with torch.autocast("cpu", torch.bfloat16):
        base = output(transformer, picture(6, 10, 7))
        mmpreproj.patch(transformer, positioned())
        assert torch.equal(output(transformer, picture(6, 10, 7)), base)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_gain_that_is_not_zero_changes_the_output_at_every_size(transformer, scaling: str):
    """What is equal at the start is not so because nothing is computed."""
    config = positioned(scaling=scaling)
    for size in SIZES:
        base = output(transformer, picture(*size))
        mmpreproj.patch(transformer, config)
        with torch.no_grad():
            for parameter in mmpreproj.parameters(transformer):
                parameter.add_(0.5 if parameter.ndim == 1 else 0)
        assert relative(output(transformer, picture(*size)), base) > 1e-4
        mmpreproj.unpatch(transformer)


@pytest.mark.parametrize("share", ["block", "stream"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_parameter_gets_a_gradient_in_the_first_step(transformer, share: str, text: str, scaling: str):
    config = PreProjConfig(share=share, positions=Positions(text=text, scaling=scaling))
    mmpreproj.patch(transformer.train(), config)
    found = gradients(transformer, picture(16, 12, 5))  # beyond the base's 4 × 4 patches
    gains = [name for name in found if "rotary_gain" in name]
    streams = 1 if text == "none" else 2
    assert len(gains) == 2 * streams + len(attentions(transformer)) - 2, "attn2 has the image's"
    for name, grad in found.items():
        assert grad is not None, f"{name} has no gradient: an error under DDP"
        assert grad.isfinite().all() and grad.abs().max() > 0, name


def test_gains_learn_from_a_base_that_is_not_changed_yet(transformer):
    mmpreproj.patch(transformer.train(), positioned(text="diagonal", scaling="yarn"))
    for name, grad in gradients(transformer, picture(16, 12, 5)).items():
        assert grad is not None and grad.isfinite().all(), name
        assert "rotary_gain" not in name or grad.all(), f"{name}: every head"


def test_the_whole_start_has_nothing_to_learn_and_is_there_at_once(transformer):
    base = output(transformer, picture(6, 10, 5))
    mmpreproj.patch(transformer, positioned(start="full"))
    assert not any("rotary_gain" in name for name, _ in mmpreproj.named_parameters(transformer))
    assert relative(output(transformer, picture(6, 10, 5)), base) > 1e-3


def test_a_gain_of_one_is_the_whole_start(transformer, make_transformer, style):
    whole = make_transformer(style)
    mmpreproj.patch(whole, positioned(start="full", scaling="yarn"))
    mmpreproj.patch(transformer, positioned(scaling="yarn"))
    with torch.no_grad():
        for name, parameter in mmpreproj.named_parameters(transformer):
            parameter.fill_(1.0) if "rotary_gain" in name else None
    for size in SIZES:
        close(output(transformer, picture(*size)), output(whole, picture(*size)))


def test_checkpointing_keeps_the_gradients(transformer, shake):
    mmpreproj.patch(transformer.train(), PreProjConfig(positions=Positions(text="diagonal", absolute="remove")))
    shake(transformer)
    plain = {name: grad.clone() for name, grad in gradients(transformer, picture(6, 10, 5)).items()}
    transformer.enable_gradient_checkpointing()
    for name, grad in gradients(transformer, picture(6, 10, 5)).items():
        torch.testing.assert_close(grad, plain[name], rtol=1e-5, atol=1e-8, msg=name)


# Relative positions
