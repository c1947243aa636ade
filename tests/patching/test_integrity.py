"""What else may take a patch off a model, and that it is noticed and named."""

import copy
import io
import pickle

import pytest
import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from torch import nn

import mmpreproj
from mmpreproj import Positions, PreProjConfig
from mmpreproj.patching import lifecycle


def fresh_attention(attention: nn.Module) -> Attention:
    """Build an attention as a tool that rebuilds modules would: the same weights, none of our hooks."""
    made = Attention(
        query_dim=32,
        added_kv_proj_dim=32,
        dim_head=16,
        heads=2,
        out_dim=32,
        context_pre_only=attention.context_pre_only,
        bias=True,
        processor=JointAttnProcessor2_0(),
    ).eval()
    made.load_state_dict({key: value for key, value in attention.state_dict().items() if "preproj" not in key})
    return made


def replace_attention(model: nn.Module, block: int = 1) -> None:
    model.transformer_blocks[block].attn = fresh_attention(model.transformer_blocks[block].attn)


def replace_block(model: nn.Module) -> None:
    old = model.transformer_blocks[0]
    new = JointTransformerBlock(dim=32, num_attention_heads=2, attention_head_dim=16).eval()
    new.load_state_dict({key: value for key, value in old.state_dict().items() if "preproj" not in key})
    model.transformer_blocks[0] = new


def clear_hooks(model: nn.Module, table: str = "_forward_hooks") -> None:
    getattr(model.transformer_blocks[0].attn, table).clear()


def replace_all(model: nn.Module) -> None:
    for block in range(2):
        replace_attention(model, block)


@pytest.fixture
def patched(make_transformer, shake):
    model = make_transformer()
    mmpreproj.patch(model, name="style")
    shake(model)
    return model


DAMAGE = [
    (replace_attention, r"'style' at transformer_blocks\.1\.attn \(1 of 2 attentions\)"),
    (replace_block, r"'style' at transformer_blocks\.0\.attn \(1 of 2"),
    (clear_hooks, r"'style' at transformer_blocks\.0\.attn \(1 of 2"),
    (lambda model: clear_hooks(model, "_forward_pre_hooks"), r"'style' at transformer_blocks\.0\.attn \(1 of 2"),
    (lambda model: delattr(model.transformer_blocks[1].attn, "preproj"), r"transformer_blocks\.1\.attn \(1 of 2"),
    (replace_all, r"'style' at transformer_blocks\.0\.attn \(2 of 2"),
]


@pytest.mark.parametrize("name", ["default", "style"])
def test_an_intact_model_passes_whatever_its_adapters_do(transformer, predict, name):
    mmpreproj.check_intact(transformer)
    mmpreproj.patch(transformer, name=name)
    mmpreproj.patch(transformer, PreProjConfig(blocks=[1]), name="second")
    mmpreproj.check_intact(transformer)
    with mmpreproj.disabled(transformer):
        mmpreproj.check_intact(transformer)
    mmpreproj.set_scale(transformer, 0)
    mmpreproj.check_intact(transformer)
    mmpreproj.unpatch(transformer, "second")
    mmpreproj.check_intact(transformer)
    mmpreproj.unpatch(transformer)
    mmpreproj.check_intact(transformer)
    assert not [key for key in vars(transformer) if "preproj" in key]


@pytest.mark.parametrize(("damage", "match"), DAMAGE)
def test_every_way_to_lose_an_adapter_is_named_and_unpatching_goes_on(patched, predict, damage, match):
    whole = predict(patched)
    base = copy.deepcopy(patched)
    mmpreproj.unpatch(base)
    damage(patched)
    with pytest.raises(ValueError, match=f"SD3Transformer2DModel has lost the adapter .*{match}.* mmpreproj.unpatch"):
        mmpreproj.check_intact(patched)
    try:
        assert not torch.equal(predict(patched), whole)  # it is a loss, not a false alarm
    except (AttributeError, RuntimeError):
        pass  # hooks without their layer, or one hook without the other
    clear_hooks_without_layer(patched)
    mmpreproj.unpatch(patched)
    mmpreproj.check_intact(patched)
    assert not mmpreproj.is_patched(patched)
    assert torch.equal(predict(patched), predict(base))
    assert list(patched.state_dict()) == list(base.state_dict())


def clear_hooks_without_layer(model: nn.Module) -> None:
    """Take off hooks that a deleted layer left behind; the model cannot run with them."""
    for block in model.transformer_blocks:
        if not hasattr(block.attn, "preproj"):
            block.attn._forward_pre_hooks.clear()
            block.attn._forward_hooks.clear()


@pytest.mark.parametrize("damage", [lambda model: replace_attention(model, 0), replace_block, clear_hooks])
def test_unpatching_forgets_an_adapter_that_is_gone_beside_one_that_is_not(make_transformer, predict, damage):
    model = make_transformer()
    base = predict(model)
    mmpreproj.patch(model, PreProjConfig(blocks=[0]), name="lost")
    mmpreproj.patch(model, PreProjConfig(blocks=[1]), name="kept")
    damage(model)
    with pytest.raises(ValueError, match="lost the adapter 'lost'"):
        mmpreproj.check_intact(model)
    twin = copy.deepcopy(model)
    mmpreproj.unpatch(model)
    mmpreproj.check_intact(model)
    assert torch.equal(predict(model), base)

    mmpreproj.unpatch(twin, "lost")
    mmpreproj.check_intact(twin)
    assert mmpreproj.adapters(twin) == ("kept",)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: torch.load(saved(model), weights_only=False),
    ],
)
def test_a_copy_keeps_the_note(patched, copied):
    twin = copied(patched)
    mmpreproj.check_intact(twin)
    replace_attention(twin)
    with pytest.raises(ValueError, match="has lost the adapter 'style'"):
        mmpreproj.check_intact(twin)
    mmpreproj.check_intact(patched)  # nor is a note shared
    mmpreproj.unpatch(patched)
    with pytest.raises(ValueError, match="has lost the adapter 'style'"):
        mmpreproj.check_intact(twin)


def saved(model: nn.Module) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


def test_wrappers_and_lists_of_modules_are_no_loss(patched, predict):
    before = predict(patched)
    torch._dynamo.reset()
    compiled = torch.compile(patched, backend="eager")
    mmpreproj.check_intact(compiled)
    patched.transformer_blocks[0] = torch.compile(patched.transformer_blocks[0], backend="eager")
    mmpreproj.check_intact(patched)
    torch.testing.assert_close(predict(patched), before, rtol=1e-5, atol=1e-5)
    replace_attention(patched)
    with pytest.raises(ValueError, match=r"transformer_blocks\.1\.attn"):
        mmpreproj.check_intact(compiled)


def test_taking_the_adapters_off_for_a_while_is_no_loss_afterwards(patched, predict):
    before = predict(patched)
    with lifecycle.detached(patched):
        pass
    mmpreproj.check_intact(patched)
    assert torch.equal(predict(patched), before)


def test_a_name_that_was_never_there_cannot_be_taken_off(make_transformer, patched):
    with pytest.raises(ValueError, match="is not patched"):
        mmpreproj.unpatch(make_transformer(), "style")
    with pytest.raises(ValueError, match="carries no adapter 'other'; it carries style"):
        mmpreproj.unpatch(patched, "other")
    replace_all(patched)
    with pytest.raises(ValueError, match="is not patched"):
        mmpreproj.unpatch(patched, "other")


def test_a_model_inside_another_module_is_checked_and_forgotten_with_it(patched):
    outer = nn.Module()
    outer.transformer = patched
    mmpreproj.check_intact(outer)
    patched.transformer_blocks[0].attn._forward_hooks.clear()
    with pytest.raises(ValueError, match=r"has lost the adapter .style. at transformer_blocks\.0\.attn"):
        mmpreproj.check_intact(outer)
    mmpreproj.unpatch(outer)
    mmpreproj.check_intact(patched)


def test_a_foreign_processor_is_no_loss_while_the_adapter_with_positions_is_off(transformer, predict):
    """As the refusal advises: disable the adapter, and go on with the other processor."""
    mmpreproj.patch(transformer, PreProjConfig(positions=Positions()))
    for attention in (block.attn for block in transformer.transformer_blocks):
        attention.set_processor(JointAttnProcessor2_0())
    with pytest.raises(ValueError, match="has lost the attention processor"):
        mmpreproj.check_intact(transformer)
    mmpreproj.disable(transformer)
    mmpreproj.check_intact(transformer)
    predict(transformer)
    mmpreproj.enable(transformer)
    with pytest.raises(ValueError, match="has lost the attention processor"):
        mmpreproj.check_intact(transformer)
