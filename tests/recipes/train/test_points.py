"""A run on text, picture and shape: from a folder to a model that makes both, and what it draws on the way."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from mmpreproj import load
from mmpreproj.data.splitting import split_held_out
from mmpreproj.pipelines import PreProjSD3Pipeline, PreProjShapePipeline
from mmpreproj.recipes.train.previews import Preview, choose_previews, draw_previews
from mmpreproj.training.config import ConfigError

POINTS = {"stored": 24, "per_step": 5, "previews": 4}
ADAPTER = {"points": {"frequencies": 2, "shown": 8}}


@pytest.fixture
def triplets(pictures):
    """The twelve pictures, with clouds for all but the first; the file of the last is torn."""
    rows = [json.loads(line) for line in (pictures / "metadata.jsonl").read_text().splitlines()]
    draws = np.random.default_rng(0)
    for place, row in enumerate(rows[1:], start=1):
        row["points"] = f"{place}.npy"
        np.save(pictures / row["points"], draws.normal(size=(40, 3)).astype(np.float32))
    (pictures / "11.npy").write_bytes(b"torn")
    (pictures / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return pictures


@pytest.fixture
def point_config(make_config, triplets):
    def make(**changes):
        data = {"points_column": "points", "held_out": 4} | changes.pop("data", {})
        return make_config(**({"adapter": ADAPTER, "points": POINTS, "mode": "full", "data": data} | changes))

    return make


def test_a_run_on_triplets_leaves_a_model_that_makes_pictures_and_clouds(run, point_config):
    done, screen = run(point_config(evaluate_every=2))
    output = done.config.output
    assert "clouds: 12 of 12" in screen
    assert "1 cloud could not be used and its picture trained without:\n  11.npy: " in screen
    assert re.search(r"step 3 of 3  loss [\d.]+ \(pictures [\d.]+, points [\d.]+\)", screen)
    assert [path.name for path in sorted((output / "previews").iterdir())] == [
        "shapes-000002.png",
        "shapes-000003.png",
    ]
    assert Image.open(output / "previews" / "shapes-000003.png").size[0] > 200
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert set(records[-1]["losses"]) == {"pictures", "points"}
    assert set(records[-1]["held_out_losses"]) >= {"pictures", "pictures with clouds", "points"}

    pictured, shaped = (cls.from_pretrained(done.saved) for cls in (PreProjSD3Pipeline, PreProjShapePipeline))
    for pipe in (pictured, shaped):
        pipe.set_progress_bar_config(disable=True)
    clouds = shaped("red square", num_points=7, num_inference_steps=2).clouds
    assert clouds.shape == (1, 7, 3)
    made = pictured("red square", point_cloud=clouds[0], num_inference_steps=2, output_type="np").images
    assert made.shape == (1, 8, 8, 3)


def test_a_probe_saves_the_path_with_the_adapter(run, point_config, base):
    done, _ = run(point_config(mode="probe"))
    fresh = PreProjShapePipeline.from_pretrained(base)
    fresh.set_progress_bar_config(disable=True)
    load(fresh.transformer, done.saved)
    settings = {"num_points": 5, "num_inference_steps": 2, "output_type": "pt"}
    shared = PreProjShapePipeline.from_pipe(done.pipeline)
    shared.set_progress_bar_config(disable=True)
    again = [
        pipe("red square", generator=torch.Generator().manual_seed(2), **settings).clouds for pipe in (fresh, shared)
    ]
    assert torch.equal(*again)


def test_an_earlier_runs_previews_are_refused_and_replaced_like_its_other_results(run, point_config):
    config = point_config()
    stale, own = config.output / "previews" / "shapes-000001.png", config.output / "previews" / "mine.png"
    stale.parent.mkdir(parents=True)
    for path in (stale, own):
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"earlier run, or what looks like it \(shapes-000001\.png\)"):
        run(config)
    run(config, overwrite=True)
    assert not stale.exists()
    assert own.exists()


def test_without_previews_none_are_drawn(run, point_config):
    done, _ = run(point_config(points=POINTS | {"previews": 0}))
    assert not (done.config.output / "previews").exists()


def test_previews_are_of_captions_with_clouds_from_both_sides(run, point_config):
    done, _ = run(point_config(points=POINTS | {"previews": 0}))
    trained, held_out = (done.pictures.subset(list(places)) for places in done.places)
    chosen = choose_previews(trained, held_out, count=3)
    assert [preview.label.split(" (")[1] for preview in chosen] == ["trained)", "trained)", "held out)"]
    for preview in chosen:
        place = done.pictures.captions.index(preview.label.split(" (")[0])
        assert torch.equal(preview.pooled, done.pictures[place]["pooled"])


def test_previews_need_no_text_encoder_and_change_nothing(run, point_config, tmp_path):
    done, _ = run(point_config(points=POINTS | {"previews": 0}))
    previews = choose_previews(done.pictures, done.pictures.subset([]), count=1)
    done.pipeline.text_encoder = done.pipeline.tokenizer = None
    transformer = done.pipeline.transformer.train()
    state, before = torch.get_rng_state(), [value.clone() for value in transformer.state_dict().values()]
    assert draw_previews(done.pipeline, previews, tmp_path / "p.png") is None
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert transformer.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(*pair) for pair in zip(before, transformer.state_dict().values(), strict=True))


def test_views_of_one_shape_are_never_on_both_sides(run, point_config, triplets):
    rows = [json.loads(line) for line in (triplets / "metadata.jsonl").read_text().splitlines()]
    for place, row in enumerate(rows):
        row["points"] = f"{1 + place % 4}.npy"
    (triplets / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done, _ = run(point_config(points=POINTS | {"previews": 0}))
    trained, held_out = ({place % 4 for place in places} for places in done.places)
    assert held_out and not trained & held_out


def test_a_run_without_a_cloud_to_train_on_is_refused(run, point_config, triplets):
    rows = [json.loads(line) for line in (triplets / "metadata.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        row.pop("points")
    rows[0]["points"] = "1.npy"
    (triplets / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seed = next(s for s in range(50) if 0 in split_held_out([row["text"] for row in rows], 4, seed=s)[1])
    with pytest.raises(ConfigError, match="none of the pictures that are trained on has a cloud"):
        run(point_config(data={"held_out_seed": seed}))


def test_a_missing_reader_is_told_of_before_anything_is_encoded(run, point_config, triplets, monkeypatch):
    rows = [json.loads(line) for line in (triplets / "metadata.jsonl").read_text().splitlines()]
    rows[5]["points"] = "5.obj"
    (triplets / "5.obj").write_text("v 0 0 0")
    (triplets / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setitem(sys.modules, "trimesh", None)
    monkeypatch.setattr("mmpreproj.recipes.train.run.open_base", lambda *arguments: pytest.fail("too late"))
    with pytest.raises(ImportError, match=r"pip install 'mmpreproj\[points\]'"):
        run(point_config())


def test_a_file_in_the_place_of_previews_is_refused(run, point_config):
    config = point_config()
    config.output.mkdir(parents=True)
    (config.output / "previews").write_text("mine")
    with pytest.raises(ConfigError, match="previews is a file"):
        run(config)


def test_a_model_whose_clouds_cannot_be_drawn_ends_no_run(run, point_config, tmp_path):
    done, _ = run(point_config(points=POINTS | {"previews": 0}))
    for parameter in done.pipeline.transformer.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    reason = draw_previews(done.pipeline, [Preview("red square", torch.zeros(24))], tmp_path / "p.png")
    assert "NaN or infinite" in reason
    assert not (tmp_path / "p.png").exists()


def test_held_out_names_follow_their_own_seed(run, point_config):
    splits = [
        run(
            point_config(
                seed=seed,
                points=POINTS | {"previews": 0},
                output=point_config().output.parent / f"run{seed}",
                data={"held_out": 3, "held_out_by": "caption", "held_out_seed": 5},
            )
        )[0].places
        for seed in (0, 1)
    ]
    assert splits[0] == splits[1]
