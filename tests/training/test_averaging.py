"""The moving average: its formula, that it comes and goes without a trace, and that it survives a file."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from mmpreproj.training.averaging import Average
from mmpreproj.training.config import EmaConfig

SHAPES = ((3, 4), (5,), (2, 1, 3))


def make_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


@torch.no_grad()
def move(parameters, *, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def values(parameters):
    return [parameter.detach().clone() for parameter in parameters]


def same(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture
def mesh():
    """Make a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# --- formula ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("warmup", [True, False])
def test_it_is_the_exponential_moving_average_in_fp32(dtype, warmup):
    parameters = make_parameters(dtype)
    average = Average(parameters, EmaConfig(decay=0.3, warmup=warmup))
    expected = [value.double() for value in values(parameters)]
    for updates in range(8):
        move(parameters, seed=updates)
        average.update()
        decay = min(0.3, (1 + updates) / (10 + updates)) if warmup else 0.3
        decay = 0.0 if warmup and updates == 0 else decay
        expected = [decay * kept + (1 - decay) * new.double() for kept, new in zip(expected, parameters, strict=True)]
    for found, value in zip(average.state_dict()["averages"], expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), value, rtol=1e-6, atol=1e-6)


def test_small_updates_of_half_precision_weights_are_not_lost():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    average = Average([parameter], EmaConfig(decay=0.999, warmup=False))
    with torch.no_grad():
        parameter.fill_(1.5)
    average.update()
    torch.testing.assert_close(average.state_dict()["averages"][0], torch.full((4,), 1.0005))


def test_only_what_trains_is_kept():
    trained, frozen = make_parameters(), make_parameters()
    for parameter in frozen:
        parameter.requires_grad_(False)
    average = Average([*frozen, *trained], EmaConfig())
    assert same(average.state_dict()["averages"], trained)
    before = values(frozen)
    move(trained, seed=1)
    average.update()
    average.copy_to_parameters()
    assert same(frozen, before)
    with pytest.raises(ValueError, match=r"no parameter requires a gradient; call select_trainable first"):
        Average(frozen, EmaConfig())


# --- in the place of the weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_in_the_place_of_the_weights_for_a_block_and_they_are_back_every_bit(dtype):
    parameters = make_parameters(dtype)
    average = Average(parameters, EmaConfig(decay=0.5, warmup=False))
    move(parameters, seed=1)
    average.update()
    before = values(parameters)
    with average.applied():
        assert same(parameters, [value.to(dtype) for value in average.state_dict()["averages"]])
        assert not same(parameters, before)
    assert same(parameters, before)


def test_after_an_error_the_weights_are_back_too():
    parameters = make_parameters()
    average = Average(parameters, EmaConfig(warmup=False))
    move(parameters, seed=1)
    before = values(parameters)
    with pytest.raises(KeyError, match="out of disk"), average.applied():
        raise KeyError("out of disk")
    assert same(parameters, before)
    with average.applied():  # and it can be put there again
        assert not same(parameters, before)


def test_applying_does_not_change_the_average():
    parameters = make_parameters()
    average = Average(parameters, EmaConfig(warmup=False))
    move(parameters, seed=1)
    average.update()
    before = values(average.state_dict()["averages"])
    with average.applied():
        move(parameters, seed=2)  # somebody's doing inside the block
    assert same(average.state_dict()["averages"], before)


def test_it_can_be_put_there_for_good():
    parameters = make_parameters()
    average = Average(parameters, EmaConfig(warmup=False))
    move(parameters, seed=1)
    average.update()
    average.copy_to_parameters()
    assert same(parameters, average.state_dict()["averages"])


@pytest.mark.parametrize("action", ["update", "copy_to_parameters"])
def test_inside_the_block_it_takes_in_nothing(action):
    average = Average(make_parameters(), EmaConfig())
    with average.applied(), pytest.raises(RuntimeError, match=r"leave the `with average\.applied\(\)` block"):
        getattr(average, action)()
    getattr(average, action)()


def test_blocks_are_not_nested():
    parameters = make_parameters()
    average = Average(parameters, EmaConfig(warmup=False))
    move(parameters, seed=1)
    before = values(parameters)
    with average.applied(), pytest.raises(RuntimeError, match="in the place of the weights now"):
        with average.applied():
            pass
    assert same(parameters, before)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("warmup", [True, False])
def test_a_run_that_went_through_a_file_gives_the_same_bits(dtype, warmup):
    config = EmaConfig(decay=0.9, warmup=warmup)

    def run(interrupted):
        parameters = make_parameters(dtype)
        average = Average(parameters, config)
        for step in range(6):
            move(parameters, seed=step)
            average.update()
            if interrupted and step == 2:
                state = through_file(average.state_dict())
                average = Average(parameters, config)
                average.load_state_dict(state)
        return average.state_dict()

    whole, parted = run(False), run(True)
    assert whole["updates"] == parted["updates"] == 6
    assert same(whole["averages"], parted["averages"])


def test_what_was_loaded_is_not_changed_afterwards():
    parameters = make_parameters()
    average = Average(parameters, EmaConfig(warmup=False))
    state = {"updates": 3, "averages": [torch.zeros(shape) for shape in SHAPES]}
    average.load_state_dict(state)
    average.update()
    assert all(bool((tensor == 0).all()) for tensor in state["averages"])
    assert average.state_dict()["updates"] == 4


def test_decay_is_the_configurations_after_loading():
    first, second = make_parameters(), make_parameters()
    other = Average(second, EmaConfig(decay=0.25, warmup=False))
    other.load_state_dict(Average(first, EmaConfig(decay=0.9, warmup=False)).state_dict())
    before = values(second)
    move(second, seed=1)
    other.update()
    for found, old, new in zip(other.state_dict()["averages"], before, second, strict=True):
        torch.testing.assert_close(found, 0.25 * old + 0.75 * new.detach())


@pytest.mark.parametrize(
    ("shapes", "place"), [(((3, 4), (6,), (2, 1, 3)), 1), (((3, 4),), 1), ((*SHAPES, (1,)), 3), ((), 0)]
)
def test_the_average_of_other_parameters_is_refused(shapes, place):
    average = Average(make_parameters(), EmaConfig())
    before = values(average.state_dict()["averages"])
    with pytest.raises(ValueError, match=rf"it has {len(shapes)}, 3 train, and they differ from number {place} on"):
        average.load_state_dict({"updates": 1, "averages": [torch.zeros(shape) for shape in shapes]})
    assert same(average.state_dict()["averages"], before)
    assert average.state_dict()["updates"] == 0


# --- sharded weights -------------------------------------------------------------------------------------------------


def test_sharded_weights_are_averaged_as_whole_ones_are(mesh):
    whole = make_parameters()
    sharded = [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values(whole)]
    config = EmaConfig(decay=0.5, warmup=False)
    expected, average = Average(whole, config), Average(sharded, config, module=nn.Module())
    with torch.no_grad():
        for parameter in (*whole, *sharded):
            parameter.mul_(3)
    expected.update()
    average.update()
    gathered = average.state_dict()["averages"]
    assert same(gathered, expected.state_dict()["averages"])
    with average.applied():
        assert same([parameter.full_tensor() for parameter in sharded], gathered)
    assert same([parameter.full_tensor() for parameter in sharded], whole)
    again = Average(sharded, config, module=nn.Module())
    again.load_state_dict(through_file(average.state_dict()))
    assert same(again.state_dict()["averages"], gathered)


def test_under_fsdp2_the_model_computes_with_the_average_and_then_with_its_own_weights_again(mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=mesh)
    average = Average(model.parameters(), EmaConfig(decay=0.5, warmup=False), module=model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    average.update()
    twin = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def outputs(values):
        for parameter, value in zip(twin.parameters(), values, strict=True):
            parameter.data.copy_(value)
        return twin(torch.ones(1, 4))

    own = outputs([parameter.full_tensor() for parameter in average.parameters])
    averaged = outputs(average.state_dict()["averages"])
    assert not torch.allclose(own, averaged, atol=1e-2)
    torch.testing.assert_close(model(torch.ones(1, 4)), own)  # its weights are whole from here on
    with average.applied():
        torch.testing.assert_close(model(torch.ones(1, 4)), averaged)
    torch.testing.assert_close(model(torch.ones(1, 4)), own)
    average.copy_to_parameters()
    torch.testing.assert_close(model(torch.ones(1, 4)), averaged)


def test_sharded_weights_come_with_their_module(mesh):
    parameter = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"the parameters are sharded.*give module="):
        Average([parameter], EmaConfig())
