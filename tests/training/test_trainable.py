"""What trains: by mode, adapter, LoRA and thaw; in which dtype; in which groups, at which rates."""

import re

import pytest
import torch

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.training.config import ConfigError, LoraSettings
from mmpreproj.training.lora import inject_lora
from mmpreproj.training.trainable import named_parts, parameter_groups, select_trainable, settle_dtypes

IDLE = ("transformer_blocks.1.attn.add_q_proj.", "transformer_blocks.1.attn.norm_added_q.")  # queries nobody reads


@pytest.fixture
def make_patched(make_transformer):
    """Build a transformer with an adapter that has matrices and gains, and a LoRA where one is asked for."""

    def make(style="sd35", *, dtype=torch.float32, adapter=True, lora=False, **overrides):
        transformer = make_transformer(style, **overrides).to(dtype)
        if adapter:
            mmpreproj.patch(transformer, PreProjConfig.from_dict({"positions": {"start": "identity"}}))
        if lora:
            inject_lora(transformer, LoraSettings(rank=4))
        return transformer

    return make


def part_by_name(model):
    """Tell parts by names alone, as a reader would."""
    adapter = {name for name, _ in mmpreproj.named_parameters(model)} if mmpreproj.is_patched(model) else set()

    def part(name):
        if name in adapter:
            return "adapter"
        if ".lora_A." in name or ".lora_B." in name:
            return "lora"
        if name.endswith(".bias"):
            return "biases"
        return "norms" if re.search(r"\.norm_(added_)?[qk]\.weight$", name) else "base"

    return {name: part(name) for name, _ in model.named_parameters()}


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# --- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("adapter", [False, True])
def test_every_parameter_is_of_one_part(make_patched, adapter, lora):
    model = make_patched(adapter=adapter, lora=lora)
    found = list(named_parts(model))
    assert {name: part for name, part, _ in found} == part_by_name(model)
    assert [(name, parameter) for name, _, parameter in found] == list(model.named_parameters())
    there = {"adapter": adapter, "lora": lora, "norms": True, "biases": True, "base": True}
    assert {part for _, part, _ in found} == {part for part, is_there in there.items() if is_there}


def test_modulation_is_no_norm_though_its_modules_are_called_so(make_patched):
    parts = part_by_name(make_patched())
    modulation = [name for name in parts if re.search(r"norm\w*\.linear\.weight$", name)]
    assert len(modulation) == 5 and {parts[name] for name in modulation} == {"base"}
    model = make_patched()
    assert {name: part for name, part, _ in named_parts(model) if name in modulation} == dict.fromkeys(
        modulation, "base"
    )


# --- what trains -----------------------------------------------------------------------------------------------------

CASES = [
    ({}, {"adapter"}),
    ({"lora": {}}, {"adapter", "lora"}),
    ({"adapter": None, "lora": {}}, {"lora"}),
    ({"thaw": ["norms"]}, {"adapter", "norms"}),
    ({"thaw": ["biases"]}, {"adapter", "biases"}),
    ({"adapter": None, "thaw": ["norms", "biases"]}, {"norms", "biases"}),
    ({"mode": "full"}, {"adapter", "norms", "biases", "base"}),
    ({"mode": "full", "adapter": None}, {"norms", "biases", "base"}),
]


@pytest.mark.parametrize(("changes", "parts"), CASES, ids=[str(changes) for changes, _ in CASES])
def test_that_trains_which_the_configuration_asks_for_in_fp32_and_the_rest_keeps_its_dtype(
    make_patched, make_config, changes, parts
):
    model = make_patched(dtype=torch.bfloat16, adapter="adapter" in parts, lora="lora" in parts)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    select_trainable(model, make_config(**changes))
    assert trained(model) == {name for name, part in part_by_name(model).items() if part in parts}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
        assert torch.equal(parameter, before[name].to(parameter.dtype)), name


@pytest.mark.parametrize("there", ["lora", "adapter"])
def test_what_is_there_unasked_stays_frozen(make_patched, make_config, there):
    model = make_patched(lora=True)
    changes = {} if there == "lora" else {"adapter": None, "lora": {}}
    select_trainable(model, make_config(**changes))
    assert {part_by_name(model)[name] for name in trained(model)} == {"adapter", "lora"} - {there}


def test_choosing_again_forgets_the_first_choice(make_patched, make_config):
    model = make_patched()
    select_trainable(model, make_config(mode="full"))
    select_trainable(model, make_config(thaw=["norms"]))
    assert {part_by_name(model)[name] for name in trained(model)} == {"adapter", "norms"}


def test_an_adapter_without_weights_may_stand_beside_something_that_trains(make_transformer, make_config):
    model = make_transformer("sd35")
    mmpreproj.patch(
        model, PreProjConfig.from_dict({"pre_projection": False, "skip": False, "positions": {"start": "full"}})
    )
    with pytest.raises(ValueError, match=r"has no weights: .*set positions\.start: identity"):
        select_trainable(model, make_config())
    select_trainable(model, make_config(thaw=["norms"]))
    assert trained(model)


# --- half precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"thaw": ["norms", "biases"]}, {"adapter": None, "thaw": ["norms", "biases"]}, {"lora": {}}],
    ids=["adapter and thaw", "thaw", "adapter and LoRA"],
)
def test_in_a_bf16_base_autocast_gives_all_that_trains_finite_gradients(
    make_patched, make_config, make_inputs, changes
):
    model = make_patched(dtype=torch.bfloat16, adapter="adapter" not in changes, lora="lora" in changes)
    select_trainable(model, make_config(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part_by_name(model)[name] in ("adapter", "lora"):
                parameter.normal_(std=0.2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**make_inputs(torch.bfloat16), return_dict=False)[0]
    output.float().square().mean().backward()
    assert torch.isfinite(output).all()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if parameter.requires_grad:
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.any() != name.startswith(IDLE), name


def test_settled_the_model_runs_without_autocast_in_its_own_dtype(make_patched, make_config, predict):
    model = make_patched(dtype=torch.bfloat16)
    before = predict(model)
    select_trainable(model, make_config(thaw=["norms", "biases"]))
    with pytest.raises(RuntimeError, match="should be the same"):
        predict(model)
    settle_dtypes(model)
    assert torch.equal(predict(model), before)
    for name, part in part_by_name(model).items():
        expected = torch.float32 if part == "adapter" else torch.bfloat16
        assert model.get_parameter(name).dtype == expected, name


def test_adapter_and_lora_in_fp32_serve_a_bf16_base_without_autocast(make_patched, make_config, predict):
    model = make_patched(dtype=torch.bfloat16, lora=True)
    before = predict(model)
    select_trainable(model, make_config(lora={}))
    settle_dtypes(model)
    assert {part_by_name(model)[name] for name in trained(model)} == {"adapter", "lora"}
    assert {model.get_parameter(name).dtype for name in trained(model)} == {torch.float32}
    torch.testing.assert_close(predict(model), before, rtol=0.02, atol=0.02)


def test_there_is_nothing_to_settle_where_everything_trains(make_patched, make_config):
    model = make_patched(dtype=torch.bfloat16)
    select_trainable(model, make_config(mode="full"))
    settle_dtypes(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "changes", "error", "message"),
    [
        ({"adapter": False}, {}, ValueError, r"is not patched; call mmpreproj\.patch\(transformer, config\) first"),
        ({"adapter": False}, {"lora": {}}, ValueError, r"is not patched"),
        ({}, {"lora": {}}, ValueError, r"lora is to train, but this SD3.* carries none; call inject_lora\("),
        ({"style": "sd3"}, {"thaw": ["norms"]}, ConfigError, r"thaw: this SD3.* has no norms that are learned; leave"),
    ],
)
def test_what_is_not_there_cannot_train(make_patched, make_config, snapshot, built, changes, error, message):
    model = make_patched(**built)
    before = snapshot(model)
    with pytest.raises(error, match=message):
        select_trainable(model, make_config(**changes))
    before.check(model)


@pytest.mark.parametrize("mode", ["probe", "full"])
def test_an_adapter_that_is_to_train_must_act(make_patched, make_config, mode):
    model = make_patched()
    mmpreproj.set_scale(model, {0: 0.0})
    with pytest.raises(ValueError, match=r"'default' is switched off or not at scale 1.*set_scale\(model, 1\.0\)"):
        select_trainable(model, make_config(mode=mode))
    mmpreproj.set_scale(model, 0.5)
    if mode == "probe":
        with pytest.raises(ValueError, match="not at scale 1"):
            select_trainable(model, make_config())
    else:
        select_trainable(model, make_config(mode=mode))


# --- groups ----------------------------------------------------------------------------------------------------------


def groups_of(model, make_config, **changes):
    config = make_config(**changes)
    select_trainable(model, config)
    return parameter_groups(model, config.optimizer)


@pytest.mark.parametrize(("changes", "parts"), CASES, ids=[str(changes) for changes, _ in CASES])
def test_groups_hold_each_trained_parameter_once_by_part_and_decay_matrices_only(
    make_patched, make_config, changes, parts
):
    model = make_patched(adapter="adapter" in parts, lora="lora" in parts)
    groups = groups_of(model, make_config, **changes, optimizer={"weight_decay": 0.1})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = [names[id(parameter)] for group in groups for parameter in group["params"]]
    assert sorted(members) == sorted(trained(model))
    assert {group["name"] for group in groups} == parts
    for group in groups:
        assert {part_by_name(model)[names[id(parameter)]] for parameter in group["params"]} == {group["name"]}
        assert {parameter.ndim > 1 for parameter in group["params"]} == {group["weight_decay"] == 0.1}


def test_each_part_has_its_own_rate_and_the_rest_the_common_one(make_patched, make_config):
    rates = {"adapter": 4e-3, "norms": 3e-3, "biases": 2e-3}
    settings = {"learning_rate": 1e-3, "learning_rates": rates}
    groups = groups_of(make_patched(), make_config, mode="full", optimizer=settings)
    assert {group["name"]: group["lr"] for group in groups} == {**rates, "base": 1e-3}
    model = make_patched(lora=True)
    settings = {"learning_rate": 1e-3, "learning_rates": {"lora": 5e-4}}
    groups = groups_of(model, make_config, lora={}, optimizer=settings)
    assert {group["name"]: group["lr"] for group in groups} == {"adapter": 1e-3, "lora": 5e-4}


def test_groups_come_in_the_order_of_their_parts_matrices_first(make_patched, make_config):
    groups = groups_of(make_patched(), make_config, mode="full", optimizer={"weight_decay": 0.1})
    found = [(group["name"], group["weight_decay"] > 0) for group in groups]
    assert found == [("adapter", True), ("adapter", False), ("norms", False), ("biases", False), ("base", True)]
