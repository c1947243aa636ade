"""The held-out loss: a fixed measure that depends on the model alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from mmpreproj.data.encoding import Latents
from mmpreproj.training.held_out import HeldOutLoss

SIZES = ((8, 8), (8, 12), (6, 10))


def zeros(hidden_states, **rest):
    return torch.zeros_like(hidden_states)


@dataclass(frozen=True)
class LatentsOfSizes(Latents):
    """Latents of several sizes, each `[C, h, w]`; `reads` notes which were read."""

    values: tuple[torch.Tensor, ...]
    reads: list[int]

    def __len__(self) -> int:
        return len(self.values)

    def read(self, index: int, *, mirrored: bool = False) -> tuple[torch.Tensor, None]:
        self.reads.append(index)
        return self.values[index], None

    def subset(self, indices: Sequence[int]) -> "LatentsOfSizes":
        return LatentsOfSizes(tuple(self.values[index] for index in indices), self.reads)

    def identity(self) -> Sequence[str]:
        return [str(index) for index in range(len(self))]


@pytest.fixture
def make_mixed(make_pictures):
    """Build N encoded pictures of three sizes in turn, each size a group."""

    def make(count=7):
        draws = torch.Generator().manual_seed(2)
        sizes = [SIZES[index % 3] for index in range(count)]
        values = tuple(torch.randn(4, *size, generator=draws) for size in sizes)
        return replace(make_pictures(count), latents=LatentsOfSizes(values, []), groups=tuple(sizes))

    return make


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
    clean = pictures.latents.values.repeat_interleave(3, dim=0)
    _, noise = seen_noise(model.calls, clean)
    assert value == pytest.approx(float((noise - clean).double().square().mean()), rel=1e-4)


def test_a_model_of_zeros_expects_one_plus_the_pictures_mean_square(make_pictures, spy):
    pictures = make_pictures(64)
    expected = 1 + float(pictures.latents.values.square().mean())
    assert HeldOutLoss(pictures)(spy(zeros)) == pytest.approx(expected, rel=0.02)


def test_an_oracle_of_noise_minus_picture_has_no_loss(make_pictures, spy):
    pictures = make_pictures(1)

    def velocity(hidden_states, timestep, **text):
        sigma = (timestep / 1000).view(-1, 1, 1, 1)
        return (hidden_states - pictures.latents.values) / sigma

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
    sigmas, noise = seen_noise(model.calls, pictures.latents.values.repeat_interleave(5, dim=0))
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


# several sizes


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_batches_never_mix_sizes_and_hold_every_triple_once(make_mixed, spy, batch_size):
    pictures, model = make_mixed(), spy(zeros)
    HeldOutLoss(pictures, levels=3, batch_size=batch_size)(model)
    assert {len(call["timestep"]) <= batch_size for call in model.calls} == {True}
    sizes = [tuple(call["hidden_states"].shape[-2:]) for call in model.calls]
    assert set(sizes) == set(SIZES)
    if batch_size == 32:
        assert len(sizes) == 3  # one for each, as full as it can be
    seen = [
        (tuple(row.tolist()), float(time))
        for call in model.calls
        for row, time in zip(call["pooled_projections"], call["timestep"], strict=True)
    ]
    assert len(seen) == len(set(seen)) == 7 * 3
    assert {pooled for pooled, _ in seen} == {tuple(row.tolist()) for row in pictures.text.pooled}


def test_of_several_sizes_it_does_not_depend_on_the_batch_size(make_transformer, make_mixed):
    transformer = make_transformer()
    values = [HeldOutLoss(make_mixed(), batch_size=size)(transformer) for size in (1, 5, 32)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)


def test_of_several_sizes_it_is_the_mean_over_the_values_of_all_triples(make_transformer, make_mixed):
    transformer, pictures = make_transformer(), make_mixed()
    measure = HeldOutLoss(pictures, levels=2, seed=5)
    errors = []
    for index in range(7):
        for level in range(2):
            clean, sigma = pictures.latents.values[index], measure.sigmas[index, level]
            noise = torch.randn(
                clean.shape, generator=torch.Generator().manual_seed(5 * 1_000_003 + 2 * index + level)
            )
            with torch.no_grad():
                found = transformer(
                    hidden_states=((1 - sigma) * clean + sigma * noise)[None],
                    encoder_hidden_states=pictures.text.tokens[index][None],
                    pooled_projections=pictures.text.pooled[index][None],
                    timestep=1000 * sigma[None],
                ).sample[0]
            errors.append((found - (noise - clean)).double().square().flatten())
    assert measure(transformer) == pytest.approx(float(torch.cat(errors).mean()), rel=1e-6)


def test_pictures_of_one_size_have_the_same_loss_in_groups_and_without(make_transformer, make_pictures):
    transformer, plain = make_transformer(), make_pictures(6)
    grouped = replace(plain, groups=("a", "b", "a", "a", "b", "a"))
    assert HeldOutLoss(grouped)(transformer) == pytest.approx(HeldOutLoss(plain)(transformer), rel=1e-6)


def test_a_subset_of_several_sizes_is_measured_as_its_own(make_transformer, make_mixed, spy):
    one, transformer = make_mixed().subset([4, 1]), make_transformer()
    model = spy(zeros)
    HeldOutLoss(one)(model)
    assert [tuple(call["hidden_states"].shape) for call in model.calls] == [(8, 4, 8, 12)]
    both = make_mixed().subset([1, 2])
    assert HeldOutLoss(both, batch_size=3)(transformer) == pytest.approx(HeldOutLoss(both)(transformer), rel=1e-6)


def test_a_picture_is_read_once_for_all_its_levels(make_mixed, spy):
    pictures = make_mixed()
    HeldOutLoss(pictures, levels=4)(spy(zeros))
    assert sorted(pictures.latents.reads) == list(range(7))


def test_without_pictures_there_is_nothing_to_measure(make_pictures):
    with pytest.raises(ValueError, match="no held-out pictures to measure on; expected at least one"):
        HeldOutLoss(make_pictures(3).subset([]))


@pytest.mark.parametrize("name", ["levels", "batch_size"])
def test_numbers_below_one_are_refused(make_pictures, name):
    with pytest.raises(ValueError, match=f"{name} is 0; expected a whole number from 1"):
        HeldOutLoss(make_pictures(3), **{name: 0})
