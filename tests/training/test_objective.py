"""The training loss against the equations: z = (1-σ)x + σε, target ε - x, drawn σ and its weight, dropped captions."""

import math

import pytest
import torch

import mmpreproj
from mmpreproj.core.draws import Draw, generator_of
from mmpreproj.training.config import FlowConfig
from mmpreproj.training.held_out import HeldOutLoss
from mmpreproj.training.objective import FlowObjective


@pytest.fixture
def make_objective(make_pictures):
    def make(*, shift=1.0, timesteps=1000, caption_dropout=0.0, seed=3, cell=1, **flow):
        return FlowObjective(
            make_pictures().empty,
            flow=FlowConfig(**flow),
            shift=shift,
            timesteps=timesteps,
            caption_dropout=caption_dropout,
            seed=seed,
            cell=cell,
        )

    return make


def batch_of(pictures, draws):
    items = [pictures[Draw(index, number)] for index, number in draws]
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


@pytest.fixture
def batch(make_pictures):
    return batch_of(make_pictures(6), [(index, 20 + index) for index in range(6)])


def blank_batch(draws, *, height=8, width=8):
    """A batch of zeros, with a caption of zeros and of padding alone."""
    return {
        "latents": torch.zeros(draws, 4, height, width),
        "tokens": torch.zeros(draws, 5, 24),
        "pooled": torch.zeros(draws, 20),
        "mask": torch.zeros(draws, 5, dtype=torch.bool),
        "draw": torch.arange(draws),
    }


def zeros(hidden_states, **rest):
    return torch.zeros_like(hidden_states)


def logits(sigmas):
    return torch.log(sigmas.double()) - torch.log1p(-sigmas.double())


@pytest.mark.parametrize(
    ("flow", "level", "weight"),
    [
        (
            {"logit_mean": 0.3, "logit_std": 0.7},
            lambda own: 1 / (1 + math.exp(-float(torch.normal(0.3, 0.7, (1,), generator=own)))),
            lambda sigma: 1,
        ),
        (
            {"scheme": "cosmap"},
            lambda own: float(torch.rand(1, generator=own)),
            lambda sigma: 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2)),
        ),
    ],
    ids=["logit_normal", "cosmap"],
)
def test_loss_equals_a_reference_written_from_the_equations(
    make_transformer, make_objective, batch, shake, flow, level, weight
):
    transformer = make_transformer()
    mmpreproj.patch(transformer)
    shake(transformer)
    objective = make_objective(shift=3.0, caption_dropout=0.5, **flow)
    found = objective(transformer, batch).item()

    total, drops = 0.0, 0
    for index in range(6):
        own = generator_of(3, 20 + index)
        x, eps = batch["latents"][index], torch.randn(4, 8, 8, generator=own)
        s = level(own)
        s = 3 * s / (1 + 2 * s)
        dropped = float(torch.rand(1, generator=own)) < 0.5
        with torch.no_grad():
            predicted = transformer(
                hidden_states=((1 - s) * x + s * eps)[None],
                encoder_hidden_states=objective.empty.tokens if dropped else batch["tokens"][index][None],
                pooled_projections=objective.empty.pooled if dropped else batch["pooled"][index][None],
                timestep=torch.tensor([1000 * s]),
            ).sample[0]
        total += weight(s) * float((predicted.double() - (eps - x).double()).square().mean()) / 6
        drops += dropped
    assert 0 < drops < 6
    assert found == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("timesteps", [1000, 250])
def test_an_oracle_of_noise_minus_picture_has_no_loss(make_objective, batch, spy, timesteps):
    def velocity(hidden_states, timestep, **text):
        sigma = (timestep / timesteps).view(-1, 1, 1, 1)
        noise = (hidden_states - (1 - sigma) * batch["latents"]) / sigma
        return noise - batch["latents"]

    objective = make_objective(timesteps=timesteps)
    assert float(objective(spy(velocity), batch)) < 1e-9
    assert float(objective(spy(lambda **inputs: -velocity(**inputs)), batch)) > 1


def test_the_noise_is_standard_normal_and_another_for_every_draw(make_objective, spy):
    seen = spy(zeros)
    make_objective()(seen, blank_batch(128))
    (call,) = seen.calls
    noise = call["hidden_states"] / (call["timestep"] / 1000).view(-1, 1, 1, 1)
    assert float(noise.mean()) == pytest.approx(0, abs=0.03)
    assert float(noise.std()) == pytest.approx(1, abs=0.03)
    assert float((noise[1:] * noise[:-1]).mean()) == pytest.approx(0, abs=0.03)
    assert len(noise.flatten(1).unique(dim=0)) == 128


def test_the_loss_is_in_float32_whatever_the_model_answers_in(make_objective, batch, spy):
    answer = spy(lambda hidden_states, **rest: torch.zeros_like(hidden_states, dtype=torch.bfloat16))
    assert make_objective()(answer, batch).dtype == torch.float32


# draws: what decides the loss of a sample


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1), (1, 3)])
@pytest.mark.parametrize("scheme", ["logit_normal", "cosmap"])
def test_the_loss_does_not_depend_on_how_draws_are_cut_into_batches(
    make_transformer, make_objective, make_pictures, sizes, scheme
):
    transformer, pictures = make_transformer(), make_pictures()
    objective = make_objective(shift=3.0, caption_dropout=0.5, scheme=scheme)
    draws = [(5, 40), (2, 41), (2, 42), (7, 43)]
    whole = objective(transformer, batch_of(pictures, draws)).item()
    parts = [batch_of(pictures, draws[sum(sizes[:place]) :][:size]) for place, size in enumerate(sizes)]
    losses = [objective(transformer, part).item() for part in parts]
    assert sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / 4 == pytest.approx(whole, rel=1e-5)
    assert len({*losses, whole}) == len(sizes) + 1


def test_the_same_draw_has_the_same_loss_beside_others_and_alone(make_transformer, make_objective, make_pictures, spy):
    pictures, objective = make_pictures(), make_objective(caption_dropout=0.5)
    seen = spy(zeros)
    objective(seen, batch_of(pictures, [(3, 70), (1, 71), (3, 72)]))
    objective(seen, batch_of(pictures, [(1, 71)]))
    among, alone = seen.calls
    for name in ("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections"):
        assert torch.equal(among[name][1:2], alone[name])
    one = batch_of(pictures, [(1, 71)])
    transformer = make_transformer()
    assert objective(transformer, one).item() == objective(transformer, one).item()


def test_the_same_picture_in_another_draw_has_other_noise_and_another_level(make_objective, make_pictures, spy):
    seen = spy(zeros)
    make_objective()(seen, batch_of(make_pictures(), [(3, number) for number in range(50)]))
    (call,) = seen.calls
    assert len(call["timestep"].unique()) == 50
    assert len(call["hidden_states"].flatten(1).unique(dim=0)) == 50


def test_other_seeds_have_other_noise_levels_and_dropped_captions(make_objective, batch, spy):
    seen = spy(zeros)
    for seed in (3, 4):
        make_objective(caption_dropout=0.5, seed=seed)(seen, batch)
    for name in ("hidden_states", "timestep", "encoder_hidden_states"):
        first, second = (call[name] for call in seen.calls)
        assert not torch.equal(first, second)


# noise levels


def test_a_shift_moves_the_logit_by_its_logarithm(make_objective, spy):
    seen = spy(zeros)
    for shift in (1.0, 3.0):
        make_objective(shift=shift)(seen, blank_batch(100))
    plain, shifted = (logits(call["timestep"] / 1000) for call in seen.calls)
    torch.testing.assert_close(shifted, plain + math.log(3), rtol=1e-4, atol=1e-4)


def test_the_configurations_shift_goes_before_the_schedulers(make_pictures, make_objective, batch, spy):
    seen = spy(zeros)
    settings = {"timesteps": 1000, "caption_dropout": 0.0, "seed": 3}
    FlowObjective(make_pictures().empty, flow=FlowConfig(shift=1.5), shift=3.0, **settings)(seen, batch)
    make_objective(shift=1.5)(seen, batch)
    first, second = seen.calls
    assert torch.equal(first["timestep"], second["timestep"])


@pytest.mark.parametrize(("height", "width", "shift"), [(8, 8, 3.0), (4, 16, 3.0), (16, 16, 6.0), (8, 4, 3 / 2**0.5)])
def test_levels_are_shifted_by_the_pictures_size_in_pixels(make_objective, spy, height, width, shift):
    """A cell of 8 pixels makes 8×8 latents a picture of 64×64."""
    seen, blank = spy(zeros), blank_batch(100, height=height, width=width)
    make_objective(shift=3.0, cell=8, shift_resolution=64)(seen, blank)
    make_objective(shift=shift)(seen, blank)
    found, expected = (call["timestep"] for call in seen.calls)
    torch.testing.assert_close(found, expected)


# captions


@pytest.mark.parametrize("share", [0.25, 0.9])
def test_captions_are_dropped_in_the_given_share(make_objective, share):
    objective, blank = make_objective(caption_dropout=share), blank_batch(4000)
    tokens, pooled, mask = objective.drop_captions(blank, objective.generators(blank))
    dropped = (tokens != 0).flatten(1).any(dim=1)
    assert torch.equal(dropped, (pooled != 0).any(dim=1))
    assert torch.equal(dropped, mask.any(dim=1))
    assert float(dropped.float().mean()) == pytest.approx(share, abs=0.03)


def test_dropped_captions_become_the_empty_prompt_in_every_part(make_objective, batch):
    objective = make_objective(caption_dropout=1.0)
    tokens, pooled, mask = objective.drop_captions(batch, objective.generators(batch))
    assert torch.equal(tokens, objective.empty.tokens.expand(6, -1, -1))
    assert torch.equal(pooled, objective.empty.pooled.expand(6, -1))
    assert torch.equal(mask, objective.empty.mask.expand(6, -1))


def test_no_caption_is_dropped_at_a_share_of_zero(make_objective, batch):
    objective = make_objective(caption_dropout=0.0)
    generators = objective.generators(batch)
    for _ in range(50):
        for name, kept in zip(("tokens", "pooled", "mask"), objective.drop_captions(batch, generators), strict=True):
            assert torch.equal(kept, batch[name])


def test_the_model_is_given_what_is_left_of_the_captions(make_objective, batch, spy):
    seen = spy(zeros)
    objective = make_objective(caption_dropout=1.0)
    objective(seen, batch)
    (call,) = seen.calls
    assert torch.equal(call["encoder_hidden_states"], objective.empty.tokens.expand(6, -1, -1))
    assert torch.equal(call["pooled_projections"], objective.empty.pooled.expand(6, -1))


def test_randomness_comes_from_the_seed_alone(make_objective, batch, spy):
    zero = spy(zeros)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = make_objective(caption_dropout=0.5)(zero, batch)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(make_objective(caption_dropout=0.5)(zero, batch), first)
    assert not torch.equal(make_objective(caption_dropout=0.5, seed=4)(zero, batch), first)


@pytest.mark.parametrize("name", ["latents", "tokens", "pooled", "mask", "draw"])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_a_batch_of_tensors_that_are_not_of_one_number_of_samples_is_refused(make_objective, batch, spy, name, count):
    """One sample is the dangerous case: its embeddings would be stretched over all pictures, without a word."""
    batch[name] = torch.cat([batch[name]] * 2)[:count]
    with pytest.raises(
        ValueError, match=rf"not of the same number of samples: .*{name} {count}\b.*; give one of each"
    ):
        make_objective()(spy(zeros), batch)


def test_a_tensor_without_samples_is_named(make_objective, batch, spy):
    with pytest.raises(ValueError, match=r"latents 6, .*draw 6, scale no dimension; give one"):
        make_objective()(spy(zeros), {**batch, "scale": torch.tensor(2.0)})


# padding


def spoil_padding(pictures):
    """Change the embeddings of padding, and of nothing else."""
    for text in (pictures.text, pictures.empty):
        text.tokens[~text.mask] += 3.0


@pytest.mark.parametrize("mask_padding", [True, False])
def test_both_losses_depend_on_padding_unless_the_adapter_masks_it(
    make_transformer, make_pictures, make_objective, shake, mask_padding
):
    transformer = make_transformer()
    mmpreproj.patch(transformer, mmpreproj.PreProjConfig(mask_padding=mask_padding))
    shake(transformer)

    def losses(pictures):
        batch = batch_of(pictures, [(index, index) for index in range(6)])
        objective = make_objective(caption_dropout=0.5)
        objective.empty = pictures.empty
        return objective(transformer, batch).item(), HeldOutLoss(pictures)(transformer)

    clean, spoiled = make_pictures(6), make_pictures(6)
    spoil_padding(spoiled)
    unmoved = [
        one == pytest.approx(other, rel=1e-6) for one, other in zip(losses(clean), losses(spoiled), strict=True)
    ]
    assert unmoved == [mask_padding, mask_padding]


def test_an_adapter_that_does_not_act_masks_nothing(make_transformer, make_objective, batch):
    bare, patched = make_transformer(), make_transformer()
    mmpreproj.patch(patched, mmpreproj.PreProjConfig(mask_padding=True))
    with mmpreproj.disabled(patched):
        assert make_objective()(patched, batch).item() == make_objective()(bare, batch).item()
    mmpreproj.set_scale(patched, 0.0)
    assert make_objective()(patched, batch).item() == make_objective()(bare, batch).item()
