"""The training loop: what moves and what does not, seeds, accumulation, precision, and stopping in time."""

import copy
import math
import multiprocessing
from itertools import islice

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import mmpreproj
from mmpreproj.training.batches import BucketBatches, make_loader
from mmpreproj.training.checkpoints import checkpoints
from mmpreproj.training.config import ConfigError
from mmpreproj.training.loop import TrainingDivergedError, make_accelerator, train
from mmpreproj.training.objective import FlowObjective
from mmpreproj.training.optimisation import make_optimizer
from mmpreproj.training.trainable import select_trainable


@pytest.fixture
def make_patched(make_transformer):
    def make(dtype=torch.float32, **overrides):
        transformer = make_transformer(**overrides)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            mmpreproj.patch(transformer)
        return transformer.to(dtype)

    return make


@pytest.fixture
def steps_taken():
    """Count optimiser steps."""
    taken = []
    handle = register_optimizer_step_post_hook(lambda *call: taken.append(1))
    yield taken
    handle.remove()


def values(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def moved(before, model):
    """Names of the parameters that are no longer what they were."""
    return {name for name, value in model.named_parameters() if not torch.equal(before[name], value)}


def adapter_names(model):
    return {name for name, _ in mmpreproj.named_parameters(model)}


def idle(model):
    """Names of the weights that no output depends on: the last block makes queries of text that nobody reads."""
    last = f"transformer_blocks.{len(model.transformer_blocks) - 1}.attn"
    return {name for name in values(model) if name.startswith((f"{last}.add_q_proj.", f"{last}.norm_added_q."))}


def same(first, second):
    return all(torch.equal(value, second.state_dict()[key]) for key, value in first.state_dict().items())


# --- what moves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16)])
def test_probe_moves_every_adapter_weight_in_fp32_and_no_bit_of_the_base(
    make_patched, make_pictures, make_config, precision, dtype
):
    transformer = make_patched(dtype)
    before = values(transformer)
    train(transformer, make_pictures(), make_config(precision=precision))
    assert moved(
        {name: value.to(transformer.get_parameter(name).dtype) for name, value in before.items()}, transformer
    ) == (adapter_names(transformer))
    for name, parameter in transformer.named_parameters():
        expected = torch.float32 if name in adapter_names(transformer) else dtype
        assert parameter.dtype == expected, name


def test_full_moves_everything(make_patched, make_pictures, make_config):
    transformer = make_patched()
    before = values(transformer)
    train(transformer, make_pictures(), make_config(mode="full"))
    assert moved(before, transformer) == set(before) - idle(transformer)


def test_full_trains_a_model_without_adapter(make_transformer, make_pictures, make_config):
    transformer = make_transformer()
    before = values(transformer)
    train(transformer, make_pictures(), make_config(mode="full", adapter=None))
    assert moved(before, transformer) == set(before) - idle(transformer)


@pytest.mark.parametrize("mode", ["probe", "full"])
@pytest.mark.parametrize("style", ["sd3", "sd35"])
def test_every_trained_parameter_gets_a_gradient_in_the_first_step(
    make_patched, make_pictures, make_config, mode, style
):
    transformer = make_patched(style=style)
    trained = adapter_names(transformer) if mode == "probe" else set(values(transformer))
    norms = {}
    for name, parameter in transformer.named_parameters():
        if name in trained:
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: norms.update({name: float(p.grad.norm())})
            )
    train(transformer, make_pictures(), make_config(mode=mode, steps=1, batch_size=4))
    assert set(norms) == trained
    assert {name for name, norm in norms.items() if norm == 0} == trained & idle(transformer)


def test_probe_thaws_the_adapter_again_after_something_froze_it(make_patched, make_pictures, make_config):
    transformer = make_patched().requires_grad_(False)
    before = values(transformer)
    train(transformer, make_pictures(), make_config())
    assert moved(before, transformer) == adapter_names(transformer)


def test_adapter_learning_rate_is_the_adapters_alone(make_patched, make_pictures, make_config):
    transformer = make_patched()
    before = values(transformer)
    train(
        transformer,
        make_pictures(),
        make_config(mode="full", optimizer={"learning_rate": 1e-2, "learning_rates": {"adapter": 1e-7}}),
    )
    for name in set(before) - idle(transformer):
        value = transformer.get_parameter(name)
        distance = float((value.detach() - before[name]).abs().max())
        assert (distance < 1e-6) == (name in adapter_names(transformer)), name


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "share"), [("probe", 0.9), ("full", 0.8)])
def test_the_loss_on_a_few_pictures_goes_down(make_patched, make_pictures, make_config, mode, share):
    pictures, records = make_pictures(4), []
    config = make_config(mode=mode, steps=60, batch_size=4, caption_dropout=0.0, optimizer={"learning_rate": 5e-3})
    train(make_patched(), pictures, config, held_out=pictures, on_step=records.append)
    assert records[-1].held_out < share * records[0].held_out


@pytest.mark.parametrize("mode", ["probe", "full"])
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(make_patched, make_pictures, make_config, mode):
    def run(seed):
        torch.manual_seed(torch.seed())  # whatever happened before must not matter
        return train(make_patched(), make_pictures(5), make_config(mode=mode, seed=seed, steps=4))

    first, again, other = run(0), run(0), run(1)
    assert same(first, again)
    assert not same(first, other)


def test_evaluation_and_checkpoints_do_not_change_the_weights(make_patched, make_pictures, make_config):
    plain = train(make_patched(), make_pictures(), make_config())
    busy = make_config(evaluate_every=1, checkpoint_every=1)
    watched = train(make_patched(), make_pictures(), busy, held_out=make_pictures(2, seed=5))
    assert same(plain, watched)


def test_gradient_checkpointing_gives_the_same_weights(make_patched, make_pictures, make_config):
    plain, saving = (
        train(make_patched(), make_pictures(), make_config(gradient_checkpointing=choice)) for choice in (False, True)
    )
    assert saving.gradient_checkpointing and not plain.gradient_checkpointing
    assert same(plain, saving)


def test_fewer_pictures_than_a_batch_still_train(make_patched, make_pictures, make_config, steps_taken):
    transformer = make_patched()
    before = values(transformer)
    train(transformer, make_pictures(3), make_config(batch_size=8, steps=2))
    assert moved(before, transformer) == adapter_names(transformer)
    assert len(steps_taken) == 2


# --- accumulation and schedule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_each_accumulated_step_is_one_update_by_the_mean_gradient_of_its_batches(
    make_patched, make_pictures, make_config, steps_taken, count
):
    """Also where epochs end in the middle of a step, or every batch is an epoch."""
    pictures = make_pictures(count)
    config = make_config(steps=3, batch_size=2, gradient_accumulation=2, mode="full")
    records = []
    trained = train(make_patched(), pictures, config, on_step=records.append)
    assert len(steps_taken) == 3

    reference = make_patched()
    select_trainable(reference, config)
    optimizer = make_optimizer(reference.train(), config.optimizer)
    objective = FlowObjective(
        pictures.empty, flow=config.flow, shift=1.0, timesteps=1000, caption_dropout=0.1, seed=config.seed
    )
    batches = iter(make_loader(pictures, BucketBatches([None] * count, batch_size=2, seed=config.seed), workers=0))
    for step in range(3):
        losses = [objective(reference, next(batches)) for _ in range(2)]
        (sum(losses) / 2).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + math.cos(math.pi * step / 3)) / 2
        optimizer.step()
        optimizer.zero_grad()
        assert records[step].loss == pytest.approx(sum(losses).item() / 2, rel=1e-4)
    for name, value in trained.named_parameters():
        torch.testing.assert_close(value, reference.get_parameter(name), rtol=1e-3, atol=2e-4)


def test_the_rate_warms_up_and_follows_a_cosine_to_zero(make_patched, make_pictures, make_config):
    records = []
    config = make_config(steps=8, optimizer={"learning_rate": 1.0e-2, "warmup_steps": 4})
    train(make_patched(), make_pictures(), config, held_out=make_pictures(1), on_step=records.append)
    rates = [record.learning_rate / 1e-2 for record in records]
    warm = [0, 0.25, 0.5, 0.75]
    # Step 0 only measures; every later record tells the rate that its own step took.
    assert rates == pytest.approx([0, *warm, *((1 + math.cos(math.pi * k / 4)) / 2 for k in range(4))], abs=1e-9)


def test_gradients_are_clipped_and_their_norm_before_it_is_reported(make_patched, make_pictures, make_config):
    def run(limit):
        records, transformer = [], make_patched()
        before = values(transformer)
        settings = {"name": "sgd", "learning_rate": 1.0, "max_grad_norm": limit}
        config = make_config(steps=1, mode="full", optimizer=settings)
        train(transformer, make_pictures(), config, on_step=records.append)
        change = torch.cat([(value - before[name]).flatten() for name, value in transformer.named_parameters()])
        return records[0].grad_norm, float(change.detach().norm())

    (norm, free), (same_norm, clipped) = run(1e9), run(1e-3)
    assert same_norm == norm > 1e-3
    assert clipped / free == pytest.approx(1e-3 / norm, rel=0.02)


# --- records and held-out loss ---------------------------------------------------------------------------------------


def test_records_come_one_a_step_with_the_held_out_loss_where_it_is_due(make_patched, make_pictures, make_config):
    records = []
    config = make_config(steps=5, evaluate_every=2)
    train(make_patched(), make_pictures(), config, held_out=make_pictures(2), on_step=records.append)
    assert [record.step for record in records] == [0, 1, 2, 3, 4, 5]
    assert [record.step for record in records if record.held_out is not None] == [0, 2, 4, 5]
    assert [record.step for record in records if record.loss is None] == [0]
    assert all(record.pictures_per_second > 0 and record.grad_norm > 0 for record in records[1:])


@pytest.mark.parametrize("none", ["absent", "empty"])
def test_without_held_out_pictures_nothing_is_measured(make_patched, make_pictures, make_config, none):
    records = []
    held_out = None if none == "absent" else make_pictures(3).subset([])
    train(make_patched(), make_pictures(), make_config(), held_out=held_out, on_step=records.append)
    assert [(record.step, record.held_out) for record in records] == [(1, None), (2, None), (3, None)]


def test_checkpoints_are_written_when_due(make_patched, make_pictures, make_config, make_transformer):
    config = make_config(steps=5, checkpoint_every=2)
    train(make_patched(), make_pictures(), config)
    found = checkpoints(config.output / "checkpoints")
    assert [path.name for path in found] == ["step-000002", "step-000004"]
    mmpreproj.load(make_transformer(), found[-1])


# --- afterwards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_trained_model_is_free_of_wrappers(
    make_patched, make_pictures, make_config, make_transformer, predict, tmp_path, precision
):
    transformer = make_patched(torch.bfloat16 if precision == "bf16" else torch.float32)
    trained = train(transformer, make_pictures(), make_config(precision=precision))
    assert trained is transformer
    assert not trained.training
    assert trained.forward.__func__ is type(trained).forward
    assert not {"forward", "_original_forward"} & set(vars(trained))
    output = predict(trained)
    assert output.dtype == next(trained.parameters()).dtype  # accelerate's wrapper would answer in fp32
    twin = copy.deepcopy(trained)
    assert torch.equal(predict(twin), output)
    with torch.no_grad():
        twin.proj_out.weight.zero_()
    assert torch.equal(predict(trained), output)
    fresh = make_transformer().to(next(trained.parameters()).dtype)
    mmpreproj.load(fresh, mmpreproj.save(trained, tmp_path / "adapter"))
    torch.testing.assert_close(predict(fresh), output, rtol=0.02, atol=0.02)


def test_a_trained_model_can_be_trained_again(make_patched, make_pictures, make_config):
    transformer = train(make_patched(), make_pictures(), make_config())
    before = values(transformer)
    train(transformer, make_pictures(), make_config())
    assert moved(before, transformer) == adapter_names(transformer)


def test_a_forward_that_was_replaced_before_training_is_put_back(make_patched, make_pictures, make_config):
    transformer, calls = make_patched(), []
    stock = transformer.forward
    transformer.forward = replaced = lambda *args, **kwargs: calls.append(1) or stock(*args, **kwargs)
    train(transformer, make_pictures(), make_config(precision="bf16"))
    assert len(calls) == 4  # three steps, and the trial of the weights that the last one made
    assert transformer.forward is replaced


def test_a_run_that_diverges_leaves_no_wrapper_either(make_patched, make_pictures, make_config, predict):
    transformer = make_patched(torch.bfloat16)
    before = predict(transformer)
    with pytest.raises(TrainingDivergedError):
        train(transformer, poison(make_pictures(8), step=1, batch_size=2), make_config(precision="bf16"))
    assert predict(transformer.eval()).dtype == torch.bfloat16
    torch.testing.assert_close(predict(transformer), before, rtol=0.02, atol=0.02)


# --- refusals --------------------------------------------------------------------------------------------------------


def poison(pictures, *, step, batch_size, seed=0):
    """Put NaN into a picture of the batch that a step takes."""
    batches = BucketBatches([None] * len(pictures), batch_size=batch_size, seed=seed)
    chosen = next(islice(batches, step - 1, None))[0]
    pictures.latents.values[chosen.index] = float("nan")
    return pictures


def test_a_loss_that_is_not_finite_stops_with_step_and_last_checkpoint(
    make_patched, make_pictures, make_config, make_transformer
):
    transformer, records = make_patched(), []
    config = make_config(steps=4, checkpoint_every=1)
    with pytest.raises(TrainingDivergedError, match=r"the loss is nan at step 3 .*step-000002.*learning_rate"):
        train(transformer, poison(make_pictures(8), step=3, batch_size=2), config, on_step=records.append)
    assert [record.step for record in records] == [1, 2]
    kept, other = checkpoints(config.output / "checkpoints")[-1], make_transformer()
    mmpreproj.load(other, kept)
    for (name, value), (_, saved) in zip(
        mmpreproj.named_parameters(transformer), mmpreproj.named_parameters(other), strict=True
    ):
        assert torch.isfinite(value).all(), name
        assert torch.equal(value, saved), name


def test_a_loss_that_is_not_finite_in_the_second_batch_of_a_step_moves_nothing(
    make_patched, make_pictures, make_config
):
    transformer = make_patched()
    before = values(transformer)
    config = make_config(batch_size=1, gradient_accumulation=2)
    with pytest.raises(TrainingDivergedError, match=r"at step 1 .*there is no checkpoint yet"):
        train(transformer, poison(make_pictures(8), step=2, batch_size=1), config)
    assert moved(before, transformer) == set()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_stops_before_it_does_harm(make_patched, make_pictures, make_config, value):
    transformer = make_patched().requires_grad_(True)
    next(mmpreproj.parameters(transformer)).register_hook(lambda grad: torch.full_like(grad, value))
    before = values(transformer)
    with pytest.raises(TrainingDivergedError, match=r"gradient's norm is (inf|nan) at step 1 "):
        train(transformer, make_pictures(), make_config())
    assert moved(before, transformer) == set()


def test_probe_of_an_unpatched_model_is_refused(make_transformer, make_pictures, make_config, snapshot):
    transformer = make_transformer()
    before = snapshot(transformer)
    with pytest.raises(ValueError, match=r"SD3Transformer2DModel is not patched; call mmpreproj\.patch"):
        train(transformer, make_pictures(), make_config())
    before.check(transformer)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "adafactor"])
def test_optimisers_of_timm_can_be_named(make_patched, make_pictures, make_config, name):
    transformer = make_patched()
    before = values(transformer)
    train(transformer, make_pictures(), make_config(optimizer={"name": name}))
    assert moved(before, transformer) == adapter_names(transformer)


def test_fp16_is_refused_where_there_is_no_accelerator(make_config):
    with pytest.raises(ConfigError, match=r"precision: fp16 needs a GPU.*bf16 or no"):
        make_accelerator(make_config(precision="fp16"))
    make_accelerator(make_config(precision="bf16"))  # the refusal has not fixed the process to fp16


def test_a_second_precision_in_one_process_is_refused_with_the_reason(make_config):
    make_accelerator(make_config(precision="no"))
    with pytest.raises(ConfigError, match=r"precision: bf16 cannot be used here .*already been initialized"):
        make_accelerator(make_config(precision="bf16"))


def test_weights_that_would_give_no_finite_loss_never_become_the_last_good_checkpoint(
    make_patched, make_pictures, make_config
):
    model = make_patched()
    config = make_config(
        steps=4, checkpoint_every=1, keep_checkpoints=1, optimizer={"learning_rate": 1e20, "warmup_steps": 0}
    )
    with pytest.raises(TrainingDivergedError, match=r"at step 1 .*there is no checkpoint yet"):
        train(model, make_pictures(), config)
    assert checkpoints(config.output / "checkpoints") == []


def test_a_held_out_loss_that_is_not_finite_stops_the_run(make_patched, make_pictures, make_config):
    held_out = make_pictures()
    held_out.latents.values[0, 0, 0, 0] = float("nan")
    with pytest.raises(TrainingDivergedError, match="the held-out loss is nan at step 1"):
        train(make_patched(), make_pictures(), make_config(steps=2, evaluate_every=1), held_out=held_out)


# --- what is refused before anything moves ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["probe", "full"])
def test_a_transformer_that_lost_its_adapter_is_refused_by_name(make_patched, make_pictures, make_config, mode):
    transformer = make_patched()
    transformer.transformer_blocks[1].attn._forward_pre_hooks.clear()
    before = values(transformer)
    with pytest.raises(ValueError, match=r"has lost the adapter 'default' at transformer_blocks\.1\.attn \(1 of 2"):
        train(transformer, make_pictures(), make_config(mode=mode))
    assert not moved(before, transformer)
    mmpreproj.unpatch(transformer)
    train(transformer, make_pictures(), make_config(mode="full", adapter=None, steps=1))


@pytest.mark.parametrize("mode", ["probe", "full"])
def test_several_adapters_are_refused_with_their_names(make_patched, make_pictures, make_config, mode):
    transformer = make_patched()
    mmpreproj.patch(transformer, name="style")
    with pytest.raises(ValueError, match=r"adapters, default, style, and a run trains one; .*mmpreproj\.unpatch"):
        train(transformer, make_pictures(), make_config(mode=mode))
    mmpreproj.unpatch(transformer, "style")
    train(transformer, make_pictures(), make_config(mode=mode, steps=1))


def test_no_process_that_loads_outlives_a_run_whose_error_is_kept(make_patched, make_pictures, make_config):
    before = set(multiprocessing.active_children())
    config = make_config(steps=4, data={"folder": ".", "workers": 2})
    with pytest.raises(TrainingDivergedError) as kept:
        train(make_patched(), poison(make_pictures(8), step=2, batch_size=2), config)
    assert kept.tb is not None  # with all that the run's functions had at hand
    assert set(multiprocessing.active_children()) <= before


def test_what_a_checkpoint_must_not_be_ahead_of_is_done_before_it(make_patched, make_pictures, make_config):
    config, seen = make_config(steps=4, checkpoint_every=2), []

    def note():
        seen.append([path.name for path in checkpoints(config.output / "checkpoints")])

    train(make_patched(), make_pictures(), config, before_checkpoint=note)
    assert seen == [[], ["step-000002"]]

    def fail():
        raise OSError("no room for the records")

    with pytest.raises(OSError, match="no room for the records"):
        train(make_patched(), make_pictures(), make_config(checkpoint_every=1), before_checkpoint=fail)
