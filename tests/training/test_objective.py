"""The training loss against the equations: z = (1-σ)x + σε, target ε - x, logit-normal σ, dropped captions."""

import math

import pytest
import torch

import mmpreproj
from mmpreproj.training.config import FlowConfig
from mmpreproj.training.held_out import HeldOutLoss
from mmpreproj.training.objective import FlowObjective


@pytest.fixture
def make_objective(make_pictures):
    def make(*, shift=1.0, timesteps=1000, caption_dropout=0.0, seed=3, **flow):
        return FlowObjective(
            make_pictures().empty,
            flow=FlowConfig(**flow),
            shift=shift,
            timesteps=timesteps,
            caption_dropout=caption_dropout,
            seed=seed,
        )

    return make


@pytest.fixture
def batch(make_pictures):
    pictures = make_pictures(6)
    items = [pictures[index] for index in range(6)]
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def logits(sigmas):
    return torch.log(sigmas.double()) - torch.log1p(-sigmas.double())


def test_loss_equals_a_reference_written_from_the_equations(make_transformer, make_objective, batch, shake):
    transformer = make_transformer()
    mmpreproj.patch(transformer)
    shake(transformer)
    objective = make_objective(shift=3.0, caption_dropout=0.5, logit_mean=0.3, logit_std=0.7)
    found = objective(transformer, batch).item()

    draws = torch.Generator().manual_seed(3)
    noise = torch.randn(batch["latents"].shape, generator=draws)
    sigma = 1 / (1 + torch.exp(-torch.normal(0.3, 0.7, (6,), generator=draws)))
    sigma = 3 * sigma / (1 + 2 * sigma)
    dropped = torch.rand(6, generator=draws) < 0.5
    total = 0.0
    for index in range(6):
        text = objective.empty if dropped[index] else None
        x, eps, s = batch["latents"][index], noise[index], float(sigma[index])
        with torch.no_grad():
            predicted = transformer(
                hidden_states=((1 - s) * x + s * eps)[None],
                encoder_hidden_states=text.tokens if text else batch["tokens"][index][None],
                pooled_projections=text.pooled if text else batch["pooled"][index][None],
                timestep=torch.tensor([1000 * s]),
            ).sample[0]
        total += float((predicted.double() - (eps - x).double()).square().mean()) / 6
    assert 0 < int(dropped.sum()) < 6
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


def test_the_noise_is_standard_normal_and_new_in_every_call(make_objective, spy):
    text = {"tokens": torch.zeros(64, 5, 24), "pooled": torch.zeros(64, 20), "mask": torch.ones(64, 5) > 0}
    blank = {"latents": torch.zeros(64, 4, 8, 8), **text}
    seen = spy(lambda hidden_states, **rest: torch.zeros_like(hidden_states))
    objective = make_objective()
    objective(seen, blank)
    objective(seen, blank)
    first, second = (call["hidden_states"] / (call["timestep"] / 1000).view(-1, 1, 1, 1) for call in seen.calls)
    assert float(first.mean()) == pytest.approx(0, abs=0.03)
    assert float(first.std()) == pytest.approx(1, abs=0.03)
    assert float((first * second).mean()) == pytest.approx(0, abs=0.03)


def test_the_loss_is_in_float32_whatever_the_model_answers_in(make_objective, batch, spy):
    answer = spy(lambda hidden_states, **rest: torch.zeros_like(hidden_states, dtype=torch.bfloat16))
    assert make_objective()(answer, batch).dtype == torch.float32


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 0.6), (-1.0, 1.4)])
def test_noise_levels_are_logit_normal(make_objective, mean, std):
    sigmas = make_objective(logit_mean=mean, logit_std=std).draw_sigmas(100_000)
    assert 0 < float(sigmas.min()) < float(sigmas.max()) < 1
    assert float(logits(sigmas).mean()) == pytest.approx(mean, abs=0.02)
    assert float(logits(sigmas).std()) == pytest.approx(std, abs=0.02)


def test_a_shift_moves_the_logit_by_its_logarithm(make_objective):
    plain, shifted = (make_objective(shift=shift).draw_sigmas(1000) for shift in (1.0, 3.0))
    torch.testing.assert_close(logits(shifted), logits(plain) + math.log(3), rtol=1e-4, atol=1e-4)


def test_the_configurations_shift_goes_before_the_schedulers(make_pictures, make_objective):
    both = FlowObjective(
        make_pictures().empty, flow=FlowConfig(shift=1.5), shift=3.0, timesteps=1000, caption_dropout=0.0, seed=3
    )
    assert torch.equal(both.draw_sigmas(5), make_objective(shift=1.5).draw_sigmas(5))


@pytest.mark.parametrize("share", [0.25, 0.9])
def test_captions_are_dropped_in_the_given_share(make_objective, share):
    tokens, pooled, mask = torch.zeros(4000, 5, 24), torch.zeros(4000, 20), torch.zeros(4000, 5, dtype=torch.bool)
    kept_tokens, kept_pooled, kept_mask = make_objective(caption_dropout=share).drop_captions(tokens, pooled, mask)
    dropped = (kept_tokens != 0).flatten(1).any(dim=1)
    assert torch.equal(dropped, (kept_pooled != 0).any(dim=1))
    assert torch.equal(dropped, kept_mask.any(dim=1))
    assert float(dropped.float().mean()) == pytest.approx(share, abs=0.03)


def test_dropped_captions_become_the_empty_prompt_in_every_part(make_objective, batch):
    objective = make_objective(caption_dropout=1.0)
    tokens, pooled, mask = objective.drop_captions(batch["tokens"], batch["pooled"], batch["mask"])
    assert torch.equal(tokens, objective.empty.tokens.expand(6, -1, -1))
    assert torch.equal(pooled, objective.empty.pooled.expand(6, -1))
    assert torch.equal(mask, objective.empty.mask.expand(6, -1))


def test_no_caption_is_dropped_at_a_share_of_zero(make_objective, batch):
    objective = make_objective(caption_dropout=0.0)
    for _ in range(50):
        tokens, pooled, mask = objective.drop_captions(batch["tokens"], batch["pooled"], batch["mask"])
        assert torch.equal(tokens, batch["tokens"])
        assert torch.equal(pooled, batch["pooled"])
        assert torch.equal(mask, batch["mask"])


def test_the_model_is_given_what_is_left_of_the_captions(make_objective, batch, spy):
    seen = spy(lambda hidden_states, **rest: torch.zeros_like(hidden_states))
    objective = make_objective(caption_dropout=1.0)
    objective(seen, batch)
    (call,) = seen.calls
    assert torch.equal(call["encoder_hidden_states"], objective.empty.tokens.expand(6, -1, -1))
    assert torch.equal(call["pooled_projections"], objective.empty.pooled.expand(6, -1))


def test_randomness_comes_from_the_seed_alone(make_objective, batch, spy):
    zero = spy(lambda hidden_states, **rest: torch.zeros_like(hidden_states))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = make_objective(caption_dropout=0.5)(zero, batch)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(make_objective(caption_dropout=0.5)(zero, batch), first)
    assert not torch.equal(make_objective(caption_dropout=0.5, seed=4)(zero, batch), first)


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
        items = [pictures[index] for index in range(6)]
        batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
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
