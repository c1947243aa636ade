"""Optimisers by name, their settings, and schedules."""

import io
import math
import sys

import pytest
import torch
from diffusers.optimization import get_scheduler
from torch import nn

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.training.config import ConfigError, OptimizerConfig
from mmpreproj.training.optimisation import check_optimizer, make_optimizer, make_schedule
from mmpreproj.training.trainable import select_trainable

NAMES = ["adamw", "cadamw", "muon", "nadamuon", "lion", "adafactor", "adan", "lamb", "sgd", "prodigy"]


@pytest.fixture
def model(make_transformer, make_config):
    """Build a transformer with norms, biases and an adapter, all of which train."""
    transformer = make_transformer("sd35")
    mmpreproj.patch(transformer, PreProjConfig.from_dict({"positions": {"start": "identity"}}))
    select_trainable(transformer, make_config(mode="full"))
    return transformer


def give_gradients(model):
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def make(**values):
    return OptimizerConfig(**values)


# --- optimisers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_step_moves_weights_of_every_shape(model, name):
    config = make(name=name, learning_rate=1.0 if name == "prodigy" else 1e-2, weight_decay=0.01)
    check_optimizer(config)
    optimizer = make_optimizer(model, config)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):  # some have nothing to go by at the first
        give_gradients(model)
        optimizer.step()
    for old, (path, parameter) in zip(before, model.named_parameters(), strict=True):
        assert torch.isfinite(parameter).all(), path
        assert not torch.equal(parameter, old), path


def test_groups_keep_their_names_through_a_file(model):
    optimizer = make_optimizer(model, make())
    names = [group["name"] for group in optimizer.param_groups]
    assert set(names) == {"adapter", "norms", "biases", "base"}
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert [group["name"] for group in optimizer.param_groups] == names


def test_adamw_is_torchs_with_rates_and_decay_by_group(model):
    rates = {"adapter": 3e-2, "norms": 1e-3}
    settings = {"eps": 1e-6}
    config = make(learning_rate=1e-2, learning_rates=rates, betas=(0.8, 0.95), weight_decay=0.3, settings=settings)
    optimizer = make_optimizer(model, config)
    twins = {id(parameter): nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()}
    reference = torch.optim.AdamW(
        [
            {
                "params": [twins[id(parameter)] for parameter in group["params"]],
                "lr": rates.get(group["name"], 1e-2),
                "weight_decay": 0.3 if group["params"][0].ndim > 1 else 0.0,
            }
            for group in optimizer.param_groups
        ],
        betas=(0.8, 0.95),
        **settings,
    )
    for _ in range(3):
        give_gradients(model)
        for parameter in model.parameters():
            twins[id(parameter)].grad = parameter.grad.clone()
        optimizer.step()
        reference.step()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter, twins[id(parameter)])


def test_muon_turns_matrices_and_leaves_the_rest_to_adamw(model):
    config = make(name="muon", learning_rate=1e-2)
    optimizer = make_optimizer(model, config)
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in vectors]
    reference = torch.optim.AdamW(twins, lr=1e-2, betas=config.betas, weight_decay=0.0)
    matrix = model.transformer_blocks[0].attn.to_q.weight
    before = matrix.detach().clone()
    give_gradients(model)
    for twin, parameter in zip(twins, vectors, strict=True):
        twin.grad = parameter.grad.clone()
    optimizer.step()
    reference.step()
    assert len(vectors) > 10
    for twin, parameter in zip(twins, vectors, strict=True):
        torch.testing.assert_close(parameter, twin)
    singular = torch.linalg.svdvals((matrix.detach() - before).double())
    gradient = torch.linalg.svdvals(matrix.grad.double())
    assert singular[0] / singular[-1] < 3 < gradient[0] / gradient[-1]  # nearly orthogonal, whatever the gradient is


@pytest.mark.parametrize(("name", "taken"), [("adamw", True), ("lion", True), ("prodigy", True), ("adafactor", False)])
def test_betas_go_to_optimisers_that_have_two(model, name, taken):
    group = make_optimizer(model, make(name=name)).param_groups[0]
    assert (group.get("betas") == (0.9, 0.99)) == taken


@pytest.mark.parametrize("name", ["sgd", "adan", "adafactor"])
def test_betas_that_would_be_ignored_are_refused(name):
    with pytest.raises(ConfigError, match=rf"optimizer\.betas: '{name}' does not go by two .*leave betas out"):
        check_optimizer(make(name=name, betas=(0.5, 0.9)))


def test_adamw_is_fused_unless_the_settings_choose(model):
    assert make_optimizer(model, make()).param_groups[0]["fused"] is True
    assert make_optimizer(model, make(settings={"fused": False})).param_groups[0]["fused"] is False
    group = make_optimizer(model, make(settings={"foreach": True})).param_groups[0]
    assert (group["foreach"], group["fused"]) == (True, None)


@pytest.mark.parametrize(
    ("name", "settings"), [("sgd", {"momentum": 0.5, "nesterov": False}), ("muon", {"ns_steps": 3}), ("cadamw", {})]
)
def test_settings_are_passed_on_over_timms_own(model, name, settings):
    group = make_optimizer(model, make(name=name, settings=settings)).param_groups[0]
    assert {key: group[key] for key in settings} == settings
    assert name != "cadamw" or group["caution"] is True


# --- prodigy ---------------------------------------------------------------------------------------------------------


def test_prodigy_finds_a_rate_by_itself():
    config = make(name="prodigy", learning_rate=1.0)
    module = nn.Linear(4, 1, bias=False)
    optimizer = make_optimizer(module, config)
    schedule = make_schedule(optimizer, make(name="prodigy", learning_rate=1.0, schedule="constant"), steps=300)
    inputs = torch.randn(64, 4)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    losses = []
    for _ in range(300):
        loss = (module(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 1e-2 * losses[0]


def test_prodigy_has_diffusers_safeguards_unless_the_settings_choose(model):
    group = make_optimizer(model, make(name="prodigy", learning_rate=1.0)).param_groups[0]
    assert group["use_bias_correction"] and group["safeguard_warmup"]
    settings = {"safeguard_warmup": False, "d_coef": 2.0}
    group = make_optimizer(model, make(name="prodigy", learning_rate=1.0, settings=settings)).param_groups[0]
    assert (group["safeguard_warmup"], group["d_coef"], group["use_bias_correction"]) == (False, 2.0, True)


def test_prodigy_takes_one_rate_for_all_parts():
    rates = {"adapter": 0.5, "base": 1.0}
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rates: \{'adapter': 0\.5\}, but prodigy takes one"):
        check_optimizer(make(name="prodigy", learning_rate=1.0, learning_rates=rates))
    check_optimizer(make(name="prodigy", learning_rate=1.0, learning_rates={"base": 1.0}))


def test_without_prodigyopt_its_name_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "prodigyopt", None)
    with pytest.raises(ConfigError, match=r"optimizer\.name: 'prodigy' needs .*pip install prodigyopt"):
        check_optimizer(make(name="prodigy"))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "near"), [("adamww", "adamw"), ("prodgy", ".*prodigy"), ("schedulefree", "adamw")])
def test_an_unknown_optimiser_is_named_with_others(model, name, near):
    for build in (check_optimizer, lambda config: make_optimizer(model, config)):
        with pytest.raises(ConfigError, match=rf"optimizer\.name: timm has no optimiser '{name}'; it has {near}"):
            build(make(name=name))


def test_one_that_needs_a_closure_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.name: 'adahessian' cannot be used here \(.+\); adamw can"):
        check_optimizer(make(name="adahessian"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it works on a GPU")
def test_eight_bits_without_a_gpu_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"optimizer\.name: 'bnbadamw8bit' cannot be used here \(CUDA.*adamw can"):
        check_optimizer(make(name="bnbadamw8bit"))


@pytest.mark.parametrize("name", ["adamw", "prodigy"])
def test_an_unknown_setting_is_named_with_those_that_there_are(model, name):
    config = make(name=name, settings={"epsilon": 1e-6})
    for build in (check_optimizer, lambda config: make_optimizer(model, config)):
        with pytest.raises(ConfigError, match=rf"optimizer\.settings\.epsilon: '{name}' takes no .*takes .*eps"):
            build(config)


@pytest.mark.parametrize(
    ("setting", "key"), [("lr", "learning_rate"), ("weight_decay", "weight_decay"), ("betas", "betas")]
)
def test_settings_that_have_a_key_of_their_own_are_refused(setting, key):
    with pytest.raises(ConfigError, match=rf"optimizer\.settings\.{setting}: set optimizer\.{key} instead"):
        check_optimizer(make(settings={setting: 0.1}))


def test_a_setting_that_cannot_be_used_is_shown_with_the_reason():
    with pytest.raises(ConfigError, match=r"'adamw' with settings \{'eps': -1\.0\} cannot be used here \(.*epsilon"):
        check_optimizer(make(settings={"eps": -1.0}))


# --- schedules -------------------------------------------------------------------------------------------------------

FALLS = {
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "linear": lambda t: 1 - t,
    "constant": lambda t: 1.0,
    "cosine_with_restarts": lambda t: (1 + math.cos(math.pi * (3 * t % 1))) / 2,
    "polynomial": lambda t: (1 - t) ** 2,
}


def rates(config, *, steps, parts=(1.0,)):
    """List the rate of each step, by group."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": part * config.learning_rate} for part in parts]
    optimizer = torch.optim.SGD(groups, lr=config.learning_rate)
    schedule = make_schedule(optimizer, config, steps=steps)
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("name", FALLS)
def test_the_rate_warms_up_and_falls_as_named(name, warmup):
    config = make(schedule=name, schedule_cycles=3, warmup_steps=warmup, learning_rate=0.5)
    expected = [step / warmup for step in range(warmup)]
    expected += [FALLS[name]((step - warmup) / (20 - warmup)) for step in range(warmup, 20)]
    assert [rate / 0.5 for (rate,) in rates(config, steps=20)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", FALLS)
def test_warm_up_is_half_of_the_run_at_most(name):
    found = [rate for (rate,) in rates(make(schedule=name, warmup_steps=50, learning_rate=1.0), steps=8)]
    assert found[:5] == pytest.approx([0, 0.25, 0.5, 0.75, 1])


@pytest.mark.parametrize("name", FALLS)
def test_parts_keep_the_ratio_of_their_rates(name):
    found = rates(make(schedule=name, warmup_steps=3, learning_rate=0.1), steps=12, parts=(1.0, 0.25, 8.0))
    for first, second, third in found:
        assert (second, third) == pytest.approx((0.25 * first, 8 * first))


def test_a_schedule_taken_up_again_goes_on():
    config = make(schedule="cosine", warmup_steps=2, learning_rate=1.0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(optimizer, config, steps=10)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    again = make_schedule(other, config, steps=10)
    other.load_state_dict(optimizer.state_dict())
    again.load_state_dict(schedule.state_dict())
    for one in (optimizer, other):
        one.step()
    schedule.step()
    again.step()
    assert again.get_last_lr() == schedule.get_last_lr() == [rates(config, steps=10)[5][0]]


def test_a_polynomial_that_would_rise_is_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-8)
    with pytest.raises(ValueError, match="must be smaller"):
        get_scheduler("polynomial", optimizer, num_warmup_steps=0, num_training_steps=5)
    with pytest.raises(
        ConfigError, match=r"optimizer\.learning_rate: 1e-08 is no more than the 1e-07 .*schedule: lin"
    ):
        make_schedule(optimizer, make(schedule="polynomial", learning_rate=1e-8), steps=5)
