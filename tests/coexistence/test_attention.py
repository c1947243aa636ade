"""What reaches into a patched model's attention: fused projections, other processors, backends, ControlNets."""

import copy
from dataclasses import replace

import pytest
import torch
from diffusers import SD3ControlNetModel
from diffusers.models.attention_processor import JointAttnProcessor2_0

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.patching.families import FAMILIES

KINDS = {
    "plain": {},
    "normed": {"qk_norm": "rms_norm"},
    "dual": {"dual_attention_layers": (0,)},
    "both": {"qk_norm": "rms_norm", "dual_attention_layers": (0,)},
}


@pytest.fixture
def patched(transformer, shake):
    mmpreproj.patch(transformer)
    shake(transformer)
    return transformer


# --- fuse_qkv_projections --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse_first", [True, False])
def test_fusing_is_exact_where_it_is_exact_unpatched(make_transformer, predict, shake, fuse_first):
    model, stock = make_transformer(), make_transformer()
    base = predict(stock)
    stock.fuse_qkv_projections()
    torch.testing.assert_close(predict(stock), base, rtol=1e-5, atol=1e-5)

    unfused = make_transformer()
    mmpreproj.patch(unfused)
    shake(unfused)
    if fuse_first:
        model.fuse_qkv_projections()
    mmpreproj.patch(model)
    shake(model)
    if not fuse_first:
        model.fuse_qkv_projections()
    torch.testing.assert_close(predict(model), predict(unfused), rtol=1e-5, atol=1e-5)
    mmpreproj.set_scale(model, 0)
    assert torch.equal(predict(model), predict(stock))
    mmpreproj.set_scale(model, 1)
    model.unfuse_qkv_projections()
    assert torch.equal(predict(model), predict(unfused))
    mmpreproj.unpatch(model)
    assert torch.equal(predict(model), base)


@pytest.mark.parametrize("fuse_first", [True, False])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("normed", "leaves out the norms of queries and keys"),
        ("dual", "cannot run the second, image-only attention"),
        ("both", "leaves out the norms|cannot run the second"),
    ],
)
def test_fusing_is_refused_where_stock_goes_wrong(make_transformer, predict, shake, kind, reason, fuse_first):
    stock, model = make_transformer(**KINDS[kind]), make_transformer(**KINDS[kind])
    base = predict(stock)
    stock.fuse_qkv_projections()
    try:
        assert (predict(stock) - base).abs().max() > 1e-3  # the unpatched model drifts without a word
        assert kind == "normed"
    except AttributeError as error:
        assert "'ndim'" in str(error)  # or fails without a reason
        assert kind in ("dual", "both")

    if fuse_first:
        model.fuse_qkv_projections()
    mmpreproj.patch(model)
    shake(model)
    if not fuse_first:
        before = predict(model)
        model.fuse_qkv_projections()
    with pytest.raises(ValueError, match=rf"({reason}).* whether patched or not; call model\.unfuse_qkv_projections"):
        predict(model)
    model.unfuse_qkv_projections()
    if not fuse_first:
        assert torch.equal(predict(model), before)
    mmpreproj.unpatch(model)
    assert torch.equal(predict(model), base)


# --- processors and backends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_dict", [True, False])
def test_new_processors_leave_the_adapter_in_place(patched, predict, as_dict):
    before = predict(patched)
    if as_dict:
        patched.set_attn_processor({name: JointAttnProcessor2_0() for name in patched.attn_processors})
    else:
        patched.set_attn_processor(JointAttnProcessor2_0())
    mmpreproj.check_intact(patched)
    assert torch.equal(predict(patched), before)


def test_the_adapter_adds_no_processor(transformer):
    names = list(transformer.attn_processors)
    mmpreproj.patch(transformer)
    assert list(transformer.attn_processors) == names


def test_a_processor_that_changes_attention_works_on_the_features(patched, predict):
    """Reference: the same processor on an unpatched attention that is given `x_tilde`, plus the skip."""

    class Halved(JointAttnProcessor2_0):
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
            outputs = super().__call__(attn, hidden_states, encoder_hidden_states, *args, **kwargs)
            return tuple(output * 0.5 for output in outputs)

    attention = patched.transformer_blocks[0].attn
    adapter = attention.preproj.adapters["default"]
    patched.set_attn_processor({**patched.attn_processors, "transformer_blocks.0.attn.processor": Halved()})
    stock = copy.deepcopy(patched)
    mmpreproj.unpatch(stock)
    image, text = torch.randn(2, 6, 32), torch.randn(2, 4, 32)
    with torch.no_grad():
        tilde = [tokens + adapter.pre_projection["shared"](tokens) for tokens in (image, text)]
        expected = stock.transformer_blocks[0].attn(*tilde)
        for output, tokens, found in zip(expected, tilde, attention(image, text), strict=True):
            assert torch.equal(found, output + adapter.content_skip["shared"](tokens))


@pytest.mark.parametrize("backend", ["native", "_native_math"])
def test_an_attention_backend_changes_as_little_as_unpatched(patched, predict, backend):
    """Stock SD3's processors do not go through the dispatcher, so setting a backend does nothing there."""
    base = copy.deepcopy(patched)
    mmpreproj.unpatch(base)
    before, unpatched = predict(patched), predict(base)
    for model in (patched, base):
        model.set_attention_backend(backend)
    assert torch.equal(predict(patched), before)
    assert torch.equal(predict(base), unpatched)
    for model in (patched, base):
        model.reset_attention_backend()
    assert torch.equal(predict(patched), before)


# --- ControlNet ------------------------------------------------------------------------------------------------------


def test_a_controlnet_from_a_patched_transformer_is_that_of_its_base(transformer, predict, snapshot, shake):
    def build(model):
        torch.manual_seed(3)
        return SD3ControlNetModel.from_transformer(model, num_layers=1, num_extra_conditioning_channels=0)

    twin = copy.deepcopy(transformer)
    expected = build(twin)
    mmpreproj.patch(transformer)
    shake(transformer)
    before, output = snapshot(transformer), predict(transformer)
    found = build(transformer)
    assert not mmpreproj.is_patched(found)
    assert not [name for name, _ in found.named_modules() if "preproj" in name]
    assert found.config == expected.config
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(value, found.state_dict()[key]) for key, value in expected.state_dict().items())
    before.check(transformer)
    mmpreproj.check_intact(transformer)
    assert torch.equal(predict(transformer), output)
    assert transformer.config == twin.config  # stock writes the ControlNet's depth into its source; we add nothing


def test_residuals_of_a_controlnet_meet_the_adapter(patched, make_inputs):
    """A residual enters after its block: the first block's residual is seen by the second block's adapter."""
    residuals = [torch.randn(2, 16, 32) for _ in range(2)]
    inputs = make_inputs()

    def run(model, **kwargs):
        with torch.no_grad():
            return model(**inputs, return_dict=False, **kwargs)[0]

    base = copy.deepcopy(patched)
    mmpreproj.unpatch(base)
    zero = [torch.zeros_like(residual) for residual in residuals]
    assert torch.equal(run(patched, block_controlnet_hidden_states=zero), run(patched))
    found = run(patched, block_controlnet_hidden_states=residuals)
    assert (found - run(patched)).abs().max() > 1e-3
    assert (found - run(base, block_controlnet_hidden_states=residuals)).abs().max() > 1e-3
    mmpreproj.set_scale(patched, 0)
    assert torch.equal(
        run(patched, block_controlnet_hidden_states=residuals), run(base, block_controlnet_hidden_states=residuals)
    )


def test_a_controlnet_is_patched_by_its_row_and_by_one_of_ones_own(transformer, make_inputs):
    controlnet = SD3ControlNetModel.from_transformer(transformer, num_layers=1, num_extra_conditioning_channels=0)
    for blocks in (controlnet.controlnet_blocks, controlnet.pos_embed_input):
        for parameter in blocks.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    controlnet.eval()
    assert mmpreproj.patch(controlnet).model_class == "SD3ControlNetModel"
    mmpreproj.unpatch(controlnet)

    def run():
        with torch.no_grad():
            return controlnet(**make_inputs(), controlnet_cond=torch.ones(2, 4, 8, 8), return_dict=False)[0][0]

    base = run()
    row = replace(FAMILIES[0], model_class="SD3ControlNetModel")
    mmpreproj.patch(controlnet, PreProjConfig(init="zero"), family=row)
    assert torch.equal(run(), base)
    for parameter in mmpreproj.parameters(controlnet):
        torch.nn.init.normal_(parameter, std=0.2)
    assert (run() - base).abs().max() > 1e-3
    mmpreproj.unpatch(controlnet)
    assert torch.equal(run(), base)
