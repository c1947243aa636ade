"""What an arm puts on a base, what it saves, and that nothing of it is left."""

import copy

import pytest
import torch
from language_models import BRIEF, logits, make_ids, make_model, shake

import mmpreproj
from mmpreproj.language.arms import Arm, LoraShape, count_parameters, make_arm, on_model, save_arm
from mmpreproj.language.config import StudyConfig
from mmpreproj.patching.lookup import is_patched
from mmpreproj.training.config import ConfigError
from mmpreproj.training.trainable import named_parts

pytest.importorskip("peft")

ARMS = (
    "base",
    "lora",
    "lora_matched",
    "pre_projection",
    "skip",
    "pre_projection+skip",
    "pre_projection+skip+lora",
)
PARTS = {
    "base": set(),
    "lora": {"lora"},
    "lora_matched": {"lora"},
    "pre_projection": {"adapter"},
    "skip": {"adapter"},
    "pre_projection+skip": {"adapter"},
    "pre_projection+skip+lora": {"adapter", "lora"},
}


def make_study(**changes):
    values = {"model": "tiny", "output": "runs/study", "texts": {"docs": {"files": ["docs/*.txt"]}}}
    return StudyConfig(**(values | changes))


def parameters_by_part(wrapped):
    found = {}
    for _, part, parameter in named_parts(wrapped):
        if parameter.requires_grad:
            found[part] = found.get(part, 0) + parameter.numel()
    return found


def change(wrapped, *, std=0.1):
    """Give all that trains weights that matter."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


class Whole:
    """All of a model that an arm must leave as it was."""

    def __init__(self, model, snapshot):
        self.before = snapshot(model)
        self.attributes = {path: set(vars(module)) for path, module in model.named_modules()}
        self.classes = {path: type(module) for path, module in model.named_modules()}
        self.logits = logits(model)

    def check(self, model):
        self.before.check(model)
        assert {path: set(vars(module)) for path, module in model.named_modules()} == self.attributes
        assert {path: type(module) for path, module in model.named_modules()} == self.classes
        assert torch.equal(logits(model), self.logits)


@pytest.fixture
def whole(snapshot):
    return lambda model: Whole(model.requires_grad_(False), snapshot)


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_arm_trains_its_parts_in_fp32_and_nothing_else(name, dtype):
    model = make_model("LlamaForCausalLM").to(dtype)
    base = {id(parameter) for parameter in model.parameters()}
    with on_model(model, make_arm(name, model, make_study())) as wrapped:
        assert parameters_by_part(wrapped).keys() == PARTS[name]
        assert count_parameters(wrapped) == sum(parameters_by_part(wrapped).values())
        for parameter in wrapped.parameters():
            assert parameter.requires_grad == (id(parameter) not in base)
            assert parameter.dtype == (dtype if id(parameter) in base else torch.float32)
        assert torch.isfinite(logits(wrapped)).all()


def test_the_parts_of_the_adapter_are_those_of_the_arm():
    model, study = make_model("LlamaForCausalLM"), make_study()
    counts = {}
    for name in ("pre_projection", "skip", "pre_projection+skip", "lora", "pre_projection+skip+lora"):
        with on_model(model, make_arm(name, model, study)) as wrapped:
            counts[name] = count_parameters(wrapped)
    assert counts["skip"] == 2 * 32 * 32
    assert counts["pre_projection"] + counts["skip"] == counts["pre_projection+skip"]
    assert counts["pre_projection+skip"] + counts["lora"] == counts["pre_projection+skip+lora"]


@pytest.mark.parametrize("row", BRIEF)
def test_matched_lora_has_as_many_parameters_as_the_adapter_within_half_a_rank(row):
    model, study = make_model(row), make_study()
    arm = make_arm("lora_matched", model, study)
    with on_model(model, make_arm("pre_projection+skip", model, study)) as wrapped:
        wanted = count_parameters(wrapped)
    with on_model(model, arm) as wrapped:
        found = count_parameters(wrapped)
    assert abs(found - wanted) <= found / arm.lora.rank / 2
    assert arm.lora.alpha / arm.lora.rank == study.lora.alpha / study.lora.rank


@pytest.mark.parametrize(
    ("row", "targets"),
    [
        ("LlamaForCausalLM", {"q_proj", "v_proj"}),
        ("GPTNeoXForCausalLM", {"query_key_value"}),
        ("GPT2LMHeadModel", {"c_attn"}),
    ],
)
def test_lora_goes_where_peft_puts_it_by_default(row, targets):
    model = make_model(row)
    with on_model(model, make_arm("lora", model, make_study())) as wrapped:
        found = {name.split(".lora_")[0].split(".")[-1] for name, _ in wrapped.named_parameters() if ".lora_" in name}
    assert found == targets


def test_lora_on_all_linear_layers_leaves_the_adapters_own_alone():
    model = make_model("LlamaForCausalLM")
    study = make_study(lora={"targets": ["all-linear"]})
    with on_model(model, make_arm("pre_projection+skip+lora", model, study)) as wrapped:
        names = [name for name, _ in wrapped.named_parameters() if ".lora_" in name]
        assert len(names) == 2 * 2 * 7  # A and B, two blocks, seven maps
        own = {id(parameter) for parameter in mmpreproj.parameters(model)}
        assert not own & {id(p) for name, p in wrapped.named_parameters() if ".lora_" in name or "base_layer" in name}


@pytest.mark.parametrize("row", BRIEF)
@pytest.mark.parametrize("name", ARMS)
def test_after_an_arm_the_model_is_the_base_bit_for_bit(row, name, whole):
    model = make_model(row)
    before = whole(model)
    arm = make_arm(name, model, make_study())
    before.check(model)
    with on_model(model, arm) as wrapped:
        change(wrapped)
        wrapped.train()
        assert name == "base" or not torch.equal(logits(wrapped.eval()), before.logits)
        wrapped.train()
    before.check(model)


@pytest.mark.parametrize("name", ["pre_projection+skip", "pre_projection+skip+lora"])
def test_after_an_error_the_model_is_the_base_too(name, whole):
    model = make_model("LlamaForCausalLM")
    before = whole(model)
    arm = make_arm(name, model, make_study())
    with pytest.raises(KeyError), on_model(model, arm) as wrapped:
        change(wrapped)
        wrapped.train()
        model._is_accelerate_prepared, model.forward = True, None  # as accelerate leaves them
        raise KeyError("in the middle")
    before.check(model)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (["no_such"], r"lora.targets: \['no_such'\] cannot be used on LlamaForCausalLM .*no_such.*; give ends of"),
        (["q_proj", "input_layernorm"], r"lora.targets: .*cannot be used on LlamaForC"),  # some are put on first
    ],
)
def test_wrong_targets_are_told_when_the_arm_is_made_and_change_nothing(targets, told, whole):
    model = make_model("LlamaForCausalLM")
    before = whole(model)
    for name in ("lora", "pre_projection+skip+lora"):
        with pytest.raises(ConfigError, match=told):
            make_arm(name, model, make_study(lora={"targets": targets}))
        before.check(model)
    arm = Arm("lora", lora=LoraShape(2, 2.0, 0.0, tuple(targets)))
    with pytest.raises(ConfigError, match=told), on_model(model, arm):
        pass
    before.check(model)


def test_wrong_matched_targets_are_called_so():
    model = make_model("LlamaForCausalLM")
    with pytest.raises(ConfigError, match=r"lora.matched_targets: \['no_such'\] cannot"):
        make_arm("lora_matched", model, make_study(lora={"matched_targets": ["no_such"]}))


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_arm_gives_the_same_logits(name, dtype, tmp_path, whole):
    model = make_model("LlamaForCausalLM").to(dtype)
    before, arm = whole(model), make_arm(name, model, make_study(lora={"dropout": 0.1}))
    with on_model(model, arm) as wrapped:
        change(wrapped)
        trained = {parameter_name: p.clone() for parameter_name, p in wrapped.named_parameters()}
        expected = logits(wrapped.eval())
        save_arm(wrapped, arm, tmp_path)
    drawn = torch.get_rng_state()
    with on_model(model, arm, saved=None if name == "base" else tmp_path) as wrapped:
        for parameter_name, parameter in wrapped.named_parameters():
            assert torch.equal(parameter, trained[parameter_name])
            assert parameter.dtype == trained[parameter_name].dtype
        assert torch.equal(logits(wrapped), expected)
        assert {n for n, p in wrapped.named_parameters() if p.requires_grad} == {
            n for n in trained if "lora_" in n or "preproj" in n
        }
    assert torch.equal(torch.get_rng_state(), drawn)
    before.check(model)


@pytest.mark.parametrize("damage", ["removed", "cut"])
@pytest.mark.parametrize("part", ["lora", "adapter"])
def test_a_saved_arm_that_is_not_whole_is_refused(part, damage, tmp_path, whole):
    model = make_model("LlamaForCausalLM")
    before, arm = whole(model), make_arm("pre_projection+skip+lora", model, make_study())
    with on_model(model, arm) as wrapped:
        save_arm(wrapped, arm, tmp_path)
    for path in (tmp_path / part).iterdir():
        path.unlink() if damage == "removed" else path.write_bytes(path.read_bytes()[:50])
    with pytest.raises((ConfigError, ValueError, FileNotFoundError), match=rf"{tmp_path.name}/{part}"):
        with on_model(model, arm, saved=tmp_path):
            pass
    before.check(model)


@pytest.mark.parametrize("name", ARMS)
def test_making_an_arm_draws_nothing(name):
    model = make_model("LlamaForCausalLM")
    before = torch.get_rng_state()
    make_arm(name, model, make_study())
    assert torch.equal(torch.get_rng_state(), before)


def test_an_arm_starts_as_the_seed_says():
    model = make_model("LlamaForCausalLM")
    arm = make_arm("pre_projection+skip+lora", model, make_study())
    starts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with on_model(model, arm) as wrapped:
            starts.append(copy.deepcopy([p for p in wrapped.parameters() if p.requires_grad]))
    same, other = (all(torch.equal(a, b) for a, b in zip(starts[0], s, strict=True)) for s in starts[1:])
    assert same and not other


def test_an_arm_starts_anew_whatever_the_one_before_it_has_learned():
    model = make_model("LlamaForCausalLM")
    arm = make_arm("skip", model, make_study())
    with on_model(model, arm):
        shake(model)
    torch.manual_seed(3)
    with on_model(model, arm):
        first = logits(model, make_ids())
    other = make_model("LlamaForCausalLM")
    torch.manual_seed(3)
    with on_model(other, arm) as fresh:
        assert torch.equal(logits(fresh, make_ids()), first)
    assert not is_patched(model)
