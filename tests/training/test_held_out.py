"""The held-out loss: a fixed measure that depends on the model alone."""

import pytest
import torch

from mmpreproj.training.held_out import HeldOutLoss


def zeros(hidden_states, **rest):
    return torch.zeros_like(hidden_states)


def seen_noise(calls, clean):
    """Work out σ `[T]` and ε `[T, C, h, w]` from what a model was given for the pictures `clean` `[T, C, h, w]`."""
    sigmas = torch.cat([call["timestep"] for call in calls]) / 1000
    mixed, wide = torch.cat([call["hidden_states"] for call in calls]), sigmas.view(-1, 1, 1, 1)
    return sigmas, (mixed - (1 - wide) * clean) / wide


def test_two_calls_give_the_same_value(make_transformer, make_pictures):
    measure, transformer = HeldOutLoss(make_pictures(3)), make_transformer()
    assert measure(transformer) == measure(transformer)


def test_it_does_not_depend_on_the_batch_size(make_transformer, make_pictures):
    transformer = make_transformer()
    values = [HeldOutLoss(make_pictures(3), batch_size=size)(transformer) for size in (1, 5, 32)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)


def test_it_depends_on_weights_captions_and_seed(make_transformer, make_pictures):
    pictures = make_pictures(3)
    reference = HeldOutLoss(pictures)(make_transformer())
    assert HeldOutLoss(pictures)(make_transformer(seed=1)) != reference
    assert HeldOutLoss(pictures, seed=1)(make_transformer()) != reference
    swapped = pictures.subset([0, 1, 2])
    object.__setattr__(swapped, "text_index", torch.tensor([1, 0, 2]))
    assert HeldOutLoss(swapped)(make_transformer()) != reference


@pytest.mark.parametrize("training", [True, False])
def test_it_measures_in_eval_mode_and_restores_the_flag(make_pictures, spy, training):
    flags = []
    model = spy(lambda hidden_states, **rest: flags.append(model.training) or torch.zeros_like(hidden_states))
    model.train(training)
    HeldOutLoss(make_pictures(2))(model)
    assert not any(flags)
    assert model.training is training


def test_a_model_of_zeros_gives_the_mean_square_of_noise_minus_picture(make_pictures, spy):
    pictures, model = make_pictures(4), spy(zeros)
    value = HeldOutLoss(pictures, levels=3, batch_size=5)(model)
    clean = pictures.latents.repeat_interleave(3, dim=0)
    _, noise = seen_noise(model.calls, clean)
    assert value == pytest.approx(float((noise - clean).double().square().mean()), rel=1e-4)


def test_a_model_of_zeros_expects_one_plus_the_pictures_mean_square(make_pictures, spy):
    pictures = make_pictures(64)
    expected = 1 + float(pictures.latents.square().mean())
    assert HeldOutLoss(pictures)(spy(zeros)) == pytest.approx(expected, rel=0.02)


def test_an_oracle_of_noise_minus_picture_has_no_loss(make_pictures, spy):
    pictures = make_pictures(1)

    def velocity(hidden_states, timestep, **text):
        sigma = (timestep / 1000).view(-1, 1, 1, 1)
        return (hidden_states - pictures.latents) / sigma

    assert HeldOutLoss(pictures, levels=8)(spy(velocity)) < 1e-9


def test_each_picture_comes_with_its_own_caption(make_pictures, spy):
    pictures, model = make_pictures(3), spy(zeros)
    HeldOutLoss(pictures, levels=2)(model)
    (call,) = model.calls
    assert torch.equal(call["encoder_hidden_states"], pictures.text.tokens.repeat_interleave(2, dim=0))
    assert torch.equal(call["pooled_projections"], pictures.text.pooled.repeat_interleave(2, dim=0))


def test_noise_levels_are_spread_evenly_and_noise_is_standard_normal(make_pictures, spy):
    pictures, model = make_pictures(40), spy(zeros)
    HeldOutLoss(pictures, levels=5)(model)
    sigmas, noise = seen_noise(model.calls, pictures.latents.repeat_interleave(5, dim=0))
    share = torch.histc(sigmas, bins=10, min=0, max=1) / len(sigmas)
    assert float((share - 0.1).abs().max()) < 0.02
    assert float(noise.mean()) == pytest.approx(0, abs=0.02)
    assert float(noise.std()) == pytest.approx(1, abs=0.02)
    assert len({tuple(row.tolist()) for row in noise[:, 0, 0]}) == len(noise)


def test_the_triples_of_a_picture_do_not_depend_on_those_after_it(make_pictures, spy):
    few, many = spy(zeros), spy(zeros)
    pictures = make_pictures(6)
    HeldOutLoss(pictures.subset([0, 1]))(few)
    HeldOutLoss(pictures)(many)
    for name in ("hidden_states", "timestep"):
        assert torch.equal(many.calls[0][name][:8], few.calls[0][name])


def test_the_global_random_state_is_neither_read_nor_touched(make_transformer, make_pictures):
    measure, transformer = HeldOutLoss(make_pictures(2)), make_transformer()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = measure(transformer)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert measure(transformer) == first


def test_no_gradients_are_kept(make_transformer, make_pictures):
    transformer = make_transformer().requires_grad_(True)
    HeldOutLoss(make_pictures(2))(transformer)
    assert all(parameter.grad is None for parameter in transformer.parameters())
