"""Text, picture and shape in one model: the losses against the equations, what is shown, and what moves."""

import math
from dataclasses import replace

import pytest
import torch

import mmpreproj
from mmpreproj import PointPathConfig, PreProjConfig
from mmpreproj.core.draws import Draw, generator_of
from mmpreproj.patching.hooks import POINT_CLOUD, POINT_MASK
from mmpreproj.points import point_velocity
from mmpreproj.points.path import point_path
from mmpreproj.training.config import FlowConfig, PointTraining
from mmpreproj.training.held_out import HeldOutLoss
from mmpreproj.training.loop import train
from mmpreproj.training.triplets import (
    CloudHeldOutLoss,
    PointHeldOutLoss,
    TripletDenoiser,
    TripletObjective,
    _with_clouds_of,
)

POINTS = {"stored": 32, "per_step": 6}


@pytest.fixture
def make_triplets(make_pictures):
    """Encoded pictures of which all but the second have a cloud of 32 points."""

    def make(count=8, *, channels=3, without=(1,)):
        clouds = torch.randn(count, 32, channels, generator=torch.Generator().manual_seed(5)) / 4
        there = torch.tensor([place not in without for place in range(count)])
        return make_pictures(count).with_clouds(clouds * there[:, None, None], there)

    return make


@pytest.fixture
def make_model(make_transformer, shake):
    def make(*, shaken=True, **points):
        transformer = make_transformer()
        mmpreproj.patch(transformer, PreProjConfig(points=PointPathConfig(**({"shown": 8} | points))))
        if shaken:
            shake(transformer)
        return transformer

    return make


@pytest.fixture
def make_objective(make_pictures):
    def make(*, caption_dropout=0.0, seed=3, timesteps=1000, cloud_share=1.0, **points):
        return TripletObjective(
            make_pictures().empty,
            flow=FlowConfig(),
            shift=3.0,
            timesteps=timesteps,
            caption_dropout=caption_dropout,
            seed=seed,
            points=PointTraining(**(POINTS | points)),
            cloud_share=cloud_share,
        )

    return make


def batch_of(pictures, indices=None):
    """Draw pictures, all of them by default, as the first draws of a run."""
    chosen = range(len(pictures)) if indices is None else indices
    items = [pictures[Draw(index, number)] for number, index in enumerate(chosen)]
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def shown_of(objective, batch, most):
    return objective.show_clouds(batch, objective.generators(batch), most=most)


def noisy_of(objective, transformer, batch):
    return objective.noisy_points(
        batch, objective.generators(batch), pooled=batch["pooled"], path=point_path(transformer)
    )


def losses(objective, transformer, batch):
    return objective.losses(objective.denoiser(transformer), batch)


@pytest.mark.parametrize("scheme", ["logit_normal", "cosmap"])
def test_the_loss_of_points_equals_a_reference_written_from_the_equations(
    make_objective, make_model, make_triplets, scheme
):
    transformer, batch = make_model(spread=1.7, condition=False), batch_of(make_triplets())
    flow = {"scheme": scheme, "logit_mean": 0.4, "logit_std": 0.6, "shift": 1.5}
    found = losses(make_objective(flow=flow, cloud_share=7 / 8), transformer, batch)["points"]

    expected = 0.0
    for place in range(8):
        own = generator_of(3, place)
        torch.randn(4, 8, 8, generator=own)  # of the picture: its noise, level and dropout
        torch.normal(0.0, 1.0, (1,), generator=own)
        torch.rand(1, generator=own)
        clean = 1.7 * batch["cloud"][place][torch.randint(32, (6,), generator=own)]
        noise = torch.randn(6, 3, generator=own)
        if scheme == "cosmap":
            sigma = torch.rand(1, generator=own)
        else:
            sigma = 1 / (1 + torch.exp(-torch.normal(0.4, 0.6, (1,), generator=own)))
        sigma = 1.5 * sigma / (1 + 0.5 * sigma)
        weight = 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2)) if scheme == "cosmap" else torch.ones(1)
        with torch.no_grad():
            predicted = point_velocity(
                transformer,
                ((1 - sigma) * clean + sigma * noise)[None],
                timestep=1000 * sigma,
                pooled_projections=batch["pooled"][place][None],
            )[0]
        there = float(batch["has_cloud"][place])
        expected += there * float(weight) * float((predicted - (noise - clean)).double().square().mean()) / 7
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_features_are_not_widened_with_the_coordinates(make_objective, make_model, make_triplets):
    batch = batch_of(make_triplets(channels=5))
    batch["cloud"] = torch.ones_like(batch["cloud"])
    inputs, target, _ = noisy_of(make_objective(), make_model(features=2, spread=3.0), batch)
    sigma = (inputs["timestep"] / 1000)[:, None, None]
    clean = inputs["points"] - sigma * target  # z - σ(ε - x) = x
    torch.testing.assert_close(clean, torch.tensor([3.0, 3, 3, 1, 1]).expand_as(clean), rtol=1e-4, atol=1e-4)


def test_the_loss_of_pictures_is_that_of_pictures_alone_where_no_cloud_is_shown(
    make_objective, make_model, make_triplets
):
    transformer, batch = make_model(), batch_of(make_triplets())
    alone = super(TripletObjective, make_objective()).__call__(transformer, batch)
    torch.testing.assert_close(losses(make_objective(dropout=1.0), transformer, batch)["pictures"], alone)
    assert not torch.allclose(losses(make_objective(dropout=0.0), transformer, batch)["pictures"], alone)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_clouds_are_shown_to_the_given_share_of_pictures(make_objective, make_triplets, share):
    batch = batch_of(make_triplets(), [0] * 4000)
    mask = shown_of(make_objective(dropout=share), batch, 8)[POINT_MASK]
    assert float(mask.any(dim=1).float().mean()) == pytest.approx(1 - share, abs=0.03)


def test_shown_clouds_differ_in_size_and_are_points_of_their_own_cloud(make_objective, make_triplets):
    pictures = make_triplets()
    shown = shown_of(make_objective(dropout=0.0), batch_of(pictures, [0, 2, 1] * 300), 10)
    counts = shown[POINT_MASK].sum(dim=1)
    assert set(counts[2::3].tolist()) == {0}  # it has no cloud
    assert set(counts[0::3].tolist()) == set(range(3, 11))
    for row, place in zip(shown[POINT_CLOUD][:2], (0, 2), strict=True):
        own = {tuple(point) for point in pictures.clouds[place].tolist()}
        assert all(tuple(point) in own for point in row.tolist())


def test_a_batch_without_any_cloud_still_gives_every_weight_a_gradient(make_objective, make_model, make_triplets):
    transformer, objective = make_model(), make_objective()
    found = losses(objective, transformer, batch_of(make_triplets(without=range(8))))
    assert found["points"].item() == 0
    objective.total(found).backward()
    assert all(parameter.grad is not None for parameter in mmpreproj.parameters(transformer))


def test_text_picture_and_points_reach_the_same_shared_weights(make_objective, make_model, make_triplets):
    transformer = make_model()
    found = losses(make_objective(dropout=0.0), transformer, batch_of(make_triplets()))
    shared = transformer.transformer_blocks[0].attn.preproj.adapters["default"].content_skip["shared"].map.weight
    for loss in found.values():
        (gradient,) = torch.autograd.grad(loss, shared, retain_graph=True)
        assert float(gradient.abs().max()) > 0


@pytest.mark.parametrize("part", ["condition", "generate"])
def test_a_path_of_one_use_trains_that_use_alone(make_objective, make_model, make_triplets, part):
    transformer, objective = make_model(**{part: False}), make_objective(dropout=0.0)
    found = losses(objective, transformer, batch_of(make_triplets()))
    assert set(found) == ({"pictures"} if part == "generate" else {"pictures", "points"})
    objective.total(found).backward()
    assert all(parameter.grad is not None for parameter in mmpreproj.parameters(transformer))


def test_no_loss_depends_on_how_draws_are_cut_into_batches(make_objective, make_model, make_triplets):
    transformer, batch = make_model(), batch_of(make_triplets(without=(1, 2, 3, 6)))
    objective = make_objective(cloud_share=0.5, caption_dropout=0.3, flow={"scheme": "cosmap"})

    def found(rows):
        parts = losses(objective, transformer, {key: value[rows] for key, value in batch.items()})
        return {name: value.item() for name, value in parts.items()} | {"total": objective.total(parts).item()}

    whole = found(slice(0, 8))
    assert set(whole) == {"pictures", "points", "total"}
    for size in (1, 2, 4):
        parts = [found(slice(start, start + size)) for start in range(0, 8, size)]
        for name, value in whole.items():
            assert sum(part[name] for part in parts) / len(parts) == pytest.approx(value, rel=1e-5)
        assert len({part["total"] for part in parts}) == len(parts)


def test_what_is_drawn_of_a_cloud_depends_on_the_draw_and_the_seed_alone(make_objective, make_model, make_triplets):
    transformer, batch = make_model(), batch_of(make_triplets(), [0] * 4)
    alone = {key: value[2:3] for key, value in batch.items()}

    def drawn(batch, seed=3):
        objective = make_objective(dropout=0.0, seed=seed)
        inputs, target, _ = noisy_of(objective, transformer, batch)
        return [shown_of(objective, batch, 8)[POINT_CLOUD], inputs["points"], inputs["timestep"], target]

    for among, own, other in zip(drawn(batch), drawn(alone), drawn(alone, seed=4), strict=True):
        assert torch.equal(among[2:3], own)
        assert not torch.equal(among[1:2], own)
        assert not torch.equal(other, own)


@pytest.mark.parametrize("name", ["cloud", "has_cloud", "tokens"])
def test_a_batch_with_fewer_clouds_or_captions_than_pictures_is_refused(
    make_objective, make_model, make_triplets, name
):
    batch = batch_of(make_triplets())
    batch[name] = batch[name][:1]
    with pytest.raises(ValueError, match=rf"not of the same number of samples: latents 8, .*{name} 1\b"):
        losses(make_objective(), make_model(), batch)


def test_points_cannot_be_shifted_by_a_resolution(make_objective):
    with pytest.raises(
        ValueError, match=r"points\.flow\.shift_resolution is 512, but points have no pixels; leave it"
    ):
        make_objective(flow={"shift_resolution": 512})


def test_points_that_happen_to_be_one_are_not_shown(make_objective, make_triplets):
    batch = batch_of(make_triplets(), [0, 2])
    batch["cloud"][0, 1:] = batch["cloud"][0, 0]
    shown = shown_of(make_objective(dropout=0.0), batch, 8)
    assert shown[POINT_MASK].any(dim=1).tolist() == [
        bool((shown[POINT_CLOUD][0] != shown[POINT_CLOUD][0, 0]).any()),
        True,
    ]


def test_the_total_is_weighted(make_objective):
    parts = {"pictures": torch.tensor(2.0), "points": torch.tensor(3.0)}
    assert float(make_objective(weight=0.5).total(parts)) == 3.5
    assert float(make_objective(weight=0.5).total({"pictures": torch.tensor(2.0)})) == 2.0


# --- held out --------------------------------------------------------------------------------------------------------


def test_pictures_with_their_own_clouds_and_with_others_are_told_apart(make_model, make_triplets):
    transformer, pictures = make_model(), make_triplets()
    some = pictures.subset([place for place in range(8) if place != 1])
    values = [CloudHeldOutLoss(pictures, clouds=clouds)(transformer) for clouds in ("own", "other")]
    assert len({*values, HeldOutLoss(some)(transformer)}) == 3
    assert CloudHeldOutLoss(pictures)(transformer) == values[0]


def test_another_cloud_is_never_one_of_the_same_caption(make_triplets):
    pictures = replace(make_triplets(without=()), captions=("a", "a", "a", "b", "a", "c", "b", "a"))
    others = _with_clouds_of(pictures, others=True)
    for place, caption in enumerate(pictures.captions):
        source = next(i for i in range(8) if torch.equal(others.clouds[place], pictures.clouds[i]))
        assert pictures.captions[source] != caption


def test_where_all_captions_are_alike_there_is_no_other_cloud(make_triplets):
    alike = replace(make_triplets(), captions=("a",) * 8)
    with pytest.raises(ValueError, match="no cloud of another caption"):
        CloudHeldOutLoss(alike, clouds="other")


def test_at_a_zero_start_clouds_change_no_held_out_loss(make_model, make_triplets):
    transformer, pictures = make_model(shaken=False), make_triplets(without=())
    assert CloudHeldOutLoss(pictures)(transformer) == pytest.approx(HeldOutLoss(pictures)(transformer))


def test_an_oracle_of_points_has_no_held_out_loss(make_model, make_triplets, monkeypatch):
    transformer, pictures = make_model(), make_triplets(without=())
    measure = PointHeldOutLoss(pictures, per_cloud=8, levels=3)
    spread = point_path(transformer).spread
    clean = iter([cloud[:8] * spread for cloud in pictures.clouds])

    def oracle(model, points, *, timestep, pooled_projections):
        own, sigma = next(clean), (timestep / 1000)[:, None, None]
        return (points - (1 - sigma) * own) / sigma - own

    before = measure(transformer)
    monkeypatch.setattr("mmpreproj.training.triplets.point_velocity", oracle)
    assert measure(transformer) < 1e-6 < before


def test_without_a_cloud_there_is_nothing_to_measure(make_triplets, make_pictures):
    for pictures in (make_triplets(without=range(8)), make_triplets().subset([1]), make_triplets().subset([])):
        for measure in (CloudHeldOutLoss, PointHeldOutLoss):
            with pytest.raises(ValueError, match="none of these pictures has a cloud"):
                measure(pictures)
    with pytest.raises(ValueError, match="none of these pictures has a cloud"):
        PointHeldOutLoss(make_pictures())


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def point_config(make_config, tmp_path):
    def make(**changes):
        return make_config(
            adapter=PreProjConfig(points=PointPathConfig(shown=8)),
            data={"folder": tmp_path, "points_column": "points"},
            points=POINTS,
            **changes,
        )

    return make


def test_pictures_with_clouds_have_a_measure_without_on_the_same_pictures(make_model, make_triplets, point_config):
    transformer, records = make_model(shaken=False), []
    train(transformer, make_triplets(), point_config(), held_out=make_triplets(), on_step=records.append)
    start = records[0].held_out_losses
    assert set(start) == {"pictures", "pictures with clouds", "these without", "points"}
    assert start["pictures with clouds"] == pytest.approx(start["these without"]) != start["pictures"]


def test_a_half_precision_model_is_measured_in_its_precision(make_model, make_triplets, point_config):
    transformer, records = make_model().to(torch.bfloat16), []
    pictures = make_triplets(without=())
    train(transformer, pictures, point_config(precision="bf16"), held_out=pictures, on_step=records.append)
    assert all(0 < loss < 20 for loss in records[-1].held_out_losses.values())


@pytest.mark.parametrize("mode", ["probe", "full"])
def test_a_run_moves_the_whole_path_and_reports_each_modality(make_model, make_triplets, point_config, mode):
    transformer, records = make_model(shaken=False), []
    before = {name: value.detach().clone() for name, value in mmpreproj.named_parameters(transformer)}
    pictures = make_triplets(without=())
    trained = train(transformer, pictures, point_config(mode=mode), held_out=pictures, on_step=records.append)
    assert trained is transformer
    moved = {name for name, value in mmpreproj.named_parameters(transformer) if not torch.equal(before[name], value)}
    assert moved == set(before)
    assert set(records[1].losses) == {"pictures", "points"}
    assert records[1].loss == pytest.approx(sum(records[1].losses.values()))
    assert set(records[-1].held_out_losses) == {"pictures", "pictures with clouds", "points"}
    assert records[-1].held_out == records[-1].held_out_losses["pictures"]


def test_the_same_seed_gives_the_same_run(make_model, make_triplets, point_config):
    models = [make_model(), make_model()]
    for model in models:
        train(model, make_triplets(), point_config(seed=4))
    for first, second in zip(*(mmpreproj.parameters(model) for model in models), strict=True):
        assert torch.equal(first, second)


def test_accumulated_batches_train_points_too(make_model, make_triplets, point_config):
    records = []
    train(make_model(), make_triplets(), point_config(gradient_accumulation=2), on_step=records.append)
    assert all(set(record.losses) == {"pictures", "points"} for record in records)


def test_checkpointing_gives_the_same_gradients(make_objective, make_model, make_triplets):
    gradients = []
    for checkpointed in (False, True):
        transformer, objective = make_model().train(), make_objective(dropout=0.0)
        if checkpointed:
            transformer.enable_gradient_checkpointing()
        objective.total(losses(objective, transformer, batch_of(make_triplets()))).backward()
        gradients.append([parameter.grad for parameter in mmpreproj.parameters(transformer)])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def test_the_denoiser_is_the_transformer_in_one_call(make_model, make_inputs):
    transformer, inputs = make_model(), make_inputs()
    points = {
        "points": torch.randn(2, 7, 3),
        "timestep": torch.tensor([3.0, 900.0]),
        "pooled_projections": inputs["pooled_projections"],
    }
    picture, velocity = TripletDenoiser(transformer)({**inputs, "return_dict": False}, points)
    assert torch.equal(picture, transformer(**inputs, return_dict=False)[0])
    assert torch.equal(velocity, point_velocity(transformer, **points))
