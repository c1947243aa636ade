"""What a run trains on: pictures from every place people keep them, their sizes, their shares, and the cache."""

import csv
import io
import json
import sys
import tarfile
import zipfile
from collections import Counter
from itertools import islice

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import SD3Transformer2DModel
from PIL import Image
from rich.console import Console

from mmpreproj.core.draws import Draw
from mmpreproj.data.buckets import Size, bucket_sizes, fit, kept_share, nearest_bucket
from mmpreproj.data.sources.furniture import CATALOGUE
from mmpreproj.data.sources.pictures import UnreadablePictureError, decode
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.progress import Reporter
from mmpreproj.recipes.train.inputs import cache_folder, make_inputs
from mmpreproj.recipes.train.preparation import open_base, prepare_pipeline
from mmpreproj.recipes.train.sources import open_source
from mmpreproj.training.batches import BucketBatches, make_loader
from mmpreproj.training.config import ConfigError
from mmpreproj.training.loop import make_accelerator

COUNT = 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keep what `datasets` prepares out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def encode(make_config):
    """Make a run's inputs without training; returns them and what a person would have seen."""

    def make(config=None, **changes):
        config = config or make_config(**changes)
        screen = io.StringIO()
        with Reporter(Console(file=screen, width=200)) as reporter:
            pipeline = open_base(config)
            prepare_pipeline(pipeline, config)
            found = make_inputs(
                pipeline, open_source(config.data), config, accelerator=make_accelerator(config), reporter=reporter
            )
        return found, screen.getvalue()

    return make


def png(number, size=(20, 20)):
    """Make a picture's file: noise, so that no two are alike and none is like its mirror image."""
    width, height = size
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_files(folder, first=0, count=COUNT, sizes=None):
    """Write pictures and return their names and captions; picture `n` is captioned "red n"."""
    folder.mkdir(parents=True)
    rows = []
    for place in range(count):
        number = first + place
        (folder / f"{number:02}.png").write_bytes(png(number, (20, 20) if sizes is None else sizes[place]))
        rows.append({"file_name": f"{number:02}.png", "text": f"red {number}"})
    return rows


def jsonl(folder, **settings):
    rows = write_files(folder, **settings)
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"folder": folder}


def table_csv(folder, **settings):
    rows = write_files(folder, **settings)
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["file_name", "text"])
        writer.writeheader()
        writer.writerows(rows)
    return {"folder": folder}


def table_parquet(folder, **settings):
    rows = [{"file_name": row["file_name"], "prompt": row["text"]} for row in write_files(folder, **settings)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "metadata.parquet")
    return {"folder": folder, "caption_column": "prompt"}


def sidecars(folder, **settings):
    for row in write_files(folder, **settings):
        (folder / row["file_name"]).with_suffix(".txt").write_text(row["text"])
    return {"folder": folder}


def rows_of(folder, **settings):
    rows = write_files(folder / "files", **settings)
    pictures = [{"bytes": (folder / "files" / row["file_name"]).read_bytes(), "path": None} for row in rows]
    table = datasets.Dataset.from_dict({"picture": pictures, "text": [row["text"] for row in rows]})
    return table.cast_column("picture", datasets.Image())


def saved_to_disk(folder, **settings):
    rows_of(folder, **settings).save_to_disk(folder / "saved")
    return {"source": "dataset", "folder": None, "dataset": str(folder / "saved"), "picture_column": "picture"}


def built(folder, **settings):
    rows_of(folder, **settings).to_parquet(folder / "rows.parquet")
    files = {"data_files": str(folder / "rows.parquet"), "picture_column": "picture"}
    return {"source": "dataset", "folder": None, "dataset": "parquet", **files}


def shards(folder, **settings):
    rows = write_files(folder / "files", **settings)
    for shard in range(2):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as archive:
            for row in rows[shard::2]:
                stem = row["file_name"].removesuffix(".png")
                members = {"png": (folder / "files" / row["file_name"]).read_bytes(), "txt": row["text"].encode()}
                for extension, data in members.items():
                    info = tarfile.TarInfo(f"{stem}.{extension}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    return {"source": "shards", "folder": None, "shards": str(folder / "{000..001}.tar")}


LAYOUTS = (jsonl, table_csv, table_parquet, sidecars, saved_to_disk, built, shards)


def check_latents(pictures, sizes=None):
    """Hold the cache against the files: every latent is the pixels of its caption's picture, in its bucket."""
    for place, caption in enumerate(pictures.captions):
        number = int(caption.removeprefix("red "))
        data = png(number, (20, 20) if sizes is None else sizes[number])
        expected = fit(decode(data, "it"), pictures.groups[place])
        assert torch.equal(pictures[place]["latents"], expected)


# --- where pictures are kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_run_trains_on_pictures_from_where_people_keep_them(run, make_config, tmp_path, layout):
    done, screen = run(make_config(data=layout(tmp_path / "data")))
    assert done.counts == (COUNT - 2, 2)
    assert sorted(done.pictures.captions) == [f"red {number}" for number in range(COUNT)]
    check_latents(done.pictures)
    assert done.history[-1].step == 3 and done.held_out_loss is not None
    assert done.saved.is_dir() and not done.skipped
    assert f"pictures: {COUNT} of {COUNT}" in screen


def draws_by_part(trained, parts, *, batch_size, draws):
    """Count which source each draw of a run comes from."""
    batches = BucketBatches(trained.groups, trained.times or None, batch_size=batch_size, seed=0)
    drawn = [draw.index for batch in islice(batches, draws // batch_size) for draw in batch]
    return Counter(next(n for n, part in enumerate(parts) if trained.places[index] in part) for index in drawn)


def test_three_sources_are_mixed_by_their_weights(run, make_config, tmp_path):
    mix = [
        {**jsonl(tmp_path / "a"), "weight": 6},
        {**built(tmp_path / "b", first=10, count=4), "weight": 3, "repeats": 2},
        {**shards(tmp_path / "c", first=20, count=2), "weight": 1},
    ]
    config = make_config(data={"folder": None, "mix": mix, "held_out": 0})
    done, _ = run(config)
    parts = open_source(config.data).parts
    assert [len(part) for part in parts] == [6, 4, 2]
    assert done.counts == (12, 0)
    check_latents(done.pictures)
    times = torch.tensor(done.inputs.trained.times, dtype=torch.float64)
    assert float(times.sum()) == pytest.approx(6 + 2 * 4 + 2), "repeats set the length of an epoch"
    shares = [float(times[part.start : part.stop].sum() / times.sum()) for part in parts]
    assert shares == pytest.approx([0.6, 0.3, 0.1])
    counts = draws_by_part(done.inputs.trained, parts, batch_size=4, draws=16 * 20)
    assert [counts[number] / 320 for number in range(3)] == pytest.approx([0.6, 0.3, 0.1], abs=0.02)


def test_repeats_alone_draw_a_picture_that_often_an_epoch(encode, tmp_path):
    mix = [{**jsonl(tmp_path / "a"), "repeats": 3}, {**sidecars(tmp_path / "b", first=10), "repeats": 0.5}]
    found, _ = encode(data={"folder": None, "mix": mix, "held_out": 3})
    parts = [range(6), range(6, 12)]
    here = [sum(place in part for place in found.trained.places) for part in parts]
    expected = [3 * here[0], 0.5 * here[1]]
    assert min(here) > 0 and sum(here) == 9
    counts = draws_by_part(found.trained, parts, batch_size=1, draws=int(20 * sum(expected)))
    assert [counts[0] / 20, counts[1] / 20] == pytest.approx(expected, abs=0.1)


def test_one_part_of_a_mix_has_clouds_and_the_others_train_without(run, make_config, tmp_path):
    jsonl(tmp_path / "a")
    clouds, rows = {}, []
    for number in range(COUNT):
        clouds[number] = np.random.default_rng(number).normal(size=(24, 3)).astype(np.float32)
        np.save(tmp_path / "a" / f"{number}.npy", clouds[number])
        rows.append({"file_name": f"{number:02}.png", "text": f"red {number}", "points": f"{number}.npy"})
    (tmp_path / "a" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    mix = [sidecars(tmp_path / "b", first=10), {"folder": tmp_path / "a", "points_column": "points"}]
    points = {"adapter": {"points": {"frequencies": 2, "shown": 8}}, "points": {"stored": 24, "per_step": 5}}
    done, screen = run(make_config(mode="full", data={"folder": None, "mix": mix, "held_out": 4}, **points))
    numbers = [int(caption.removeprefix("red ")) for caption in done.pictures.captions]
    assert done.pictures.has_cloud.tolist() == [number < 10 for number in numbers]
    assert not done.pictures.clouds[~done.pictures.has_cloud].any()
    assert "6 of 12 pictures have a cloud" in screen
    assert set(done.history[-1].losses) == {"pictures", "points"}


def test_what_reads_meshes_is_asked_for_whichever_part_of_a_mix_has_them(run, make_config, tmp_path, monkeypatch):
    fields = {"name": "Chair", "category": "Office", "creator": "Ann", "icon": "/a.png", "model": "/a.obj"}
    with zipfile.ZipFile(tmp_path / "set.sh3f", "w") as library:
        for member in ("a.png", "a.obj"):
            library.writestr(member, "")
        library.writestr(CATALOGUE, "".join(f"{field}#1={value}\n" for field, value in fields.items()))
    mix = [jsonl(tmp_path / "a"), {"source": "furniture", "folder": tmp_path}]
    monkeypatch.setitem(sys.modules, "trimesh", None)
    settings = {"mode": "full", "adapter": {"points": {}}, "model": str(tmp_path / "nowhere")}
    with pytest.raises(ImportError, match=r"trimesh: pip install 'mmpreproj\[points\]'"):
        run(make_config(data={"folder": None, "mix": mix}, **settings))  # loading would fail with another error


def test_a_source_of_which_nothing_is_trained_on_is_told(encode, tmp_path):
    mix = [jsonl(tmp_path / "a"), sidecars(tmp_path / "b", first=10, count=2)]
    kept = [f"red {number}" for number in range(COUNT)]
    found, screen = encode(data={"folder": None, "mix": mix, "held_out": 2, "always_train": kept})
    assert "data.mix.1: none of its 2 pictures is trained on" in screen
    assert "6 pictures to train on, 2 held out" in screen
    assert sorted(found.trained.captions) == kept


def test_repeats_that_leave_nothing_to_draw_cost_no_earlier_results(run, make_config):
    config = make_config(steps=1)
    run(config)
    before = (config.output / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"data\.repeats: 0\.1 draws an epoch of 10 pictures in all.*raise repeats"):
        run(make_config(steps=1, data={"repeats": 0.01}), overwrite=True)
    assert (config.output / "metrics.jsonl").read_bytes() == before


def test_parts_that_the_model_does_not_have_cost_no_earlier_results(run, make_config):
    config = make_config(steps=1)
    run(config)
    before = (config.output / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="thaw: this SD3Transformer2DModel has no norms that are learned"):
        run(make_config(steps=1, thaw=["norms"]), overwrite=True)
    assert (config.output / "metrics.jsonl").read_bytes() == before
    assert (config.output / "adapter").is_dir()


# --- what cannot be used ---------------------------------------------------------------------------------------------


def test_faults_of_mixed_sources_name_the_source_where_names_are_the_same(encode, tmp_path):
    mix = [jsonl(tmp_path / "a"), jsonl(tmp_path / "b")]
    for part in "ab":
        (tmp_path / part / "03.png").write_bytes(b"torn")
        with (tmp_path / part / "metadata.jsonl").open("a") as file:
            file.write('\n{"file_name": "09.png", "text": "red"}')
    found, _ = encode(data={"folder": None, "mix": mix})
    a, b = tmp_path / "a", tmp_path / "b"
    assert [one.name for one in found.skipped] == [
        f"{a}: metadata.jsonl, line 7",
        f"{b}: metadata.jsonl, line 7",
        f"{a}: 03.png",
        f"{b}: 03.png",
    ]
    assert len(found.pictures) == 10


def test_a_folder_without_one_usable_picture_is_refused_with_the_first_reasons(encode, tmp_path):
    data = jsonl(tmp_path / "a", sizes=[(3, 3)] * COUNT)
    with (tmp_path / "a" / "metadata.jsonl").open("a") as file:
        file.write("\nno row")
    reasons = (
        r"none of the 6 pictures can be used; the first: 00\.png: it is too small: 3 × 3 .*; 01\.png: .*; 02\.png"
    )
    with pytest.raises(ValueError, match=reasons):
        encode(data=data)
    (tmp_path / "b").mkdir()
    with pytest.raises(FileNotFoundError, match="no pictures in"):
        encode(data={"folder": tmp_path / "b"})
    for path in (tmp_path / "a").glob("*.png"):
        path.write_bytes(png(1)[:200])
    with pytest.raises(ValueError, match=r"none of the 6 pictures could be read; the first: 00\.png: .*truncated"):
        encode(data=data)


def test_with_on_error_raise_a_missing_caption_ends_a_run_before_the_model_is_loaded(run, make_config, tmp_path):
    data = sidecars(tmp_path / "a")
    (tmp_path / "a" / "02.txt").unlink()
    with pytest.raises(ValueError, match=r"02\.png"):  # loading would fail with another error
        run(make_config(model=str(tmp_path / "nowhere"), data={**data, "on_error": "raise"}))
    for change in ({"text": ""}, {}):
        rows = [{"file_name": "00.png", **change}, {"file_name": "01.png", "text": "red"}]
        (tmp_path / "a" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(ValueError, match=r"line 1 \((the caption is empty|the row has no 'text')\)"):
            run(make_config(model=str(tmp_path / "nowhere"), data={**data, "on_error": "raise"}))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("content", "reason"), [(b"torn", "no picture format"), (png(3)[:300], "truncated")])
def test_with_on_error_raise_the_first_picture_that_cannot_be_used_raises(encode, pictures, content, reason):
    (pictures / "03.png").write_bytes(content)
    (pictures / "05.png").write_bytes(b"")
    with pytest.raises(UnreadablePictureError, match=rf"0[35]\.png.*({reason}|empty)"):
        encode(data={"on_error": "raise"})


def test_a_cloud_is_read_and_listed_once_for_all_sizes_of_its_picture(encode, tmp_path):
    rows = write_files(tmp_path / "a")
    for number, row in enumerate(rows):
        row["points"] = f"{number}.npy"
        np.save(tmp_path / "a" / row["points"], np.random.default_rng(number).normal(size=(24, 3)))
    (tmp_path / "a" / "3.npy").write_bytes(b"torn")
    (tmp_path / "a" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"folder": tmp_path / "a", "points_column": "points", "more_resolutions": [12]}
    points = {"adapter": {"points": {"frequencies": 2, "shown": 8}}, "points": {"stored": 24, "per_step": 5}}
    found, screen = encode(mode="full", data=data, **points)
    assert len(found.pictures) == 2 * COUNT
    assert [one.name for one in found.pictures.skipped_clouds] == ["3.npy"]
    assert "clouds: 6 of 6" in screen and "5 of 6 pictures have a cloud" in screen
    for place in range(COUNT):
        here = [row for row, at in enumerate(found.pictures.places) if at == place]
        assert len(here) == 2 and torch.equal(found.pictures.clouds[here[0]], found.pictures.clouds[here[1]])


# --- sizes -----------------------------------------------------------------------------------------------------------

SHAPES = ((32, 32), (48, 24), (24, 48), (40, 30), (64, 32), (31, 44), (90, 30), (36, 33))


@pytest.fixture
def watched_shapes(monkeypatch):
    """The shapes of latents that transformers are called with."""
    seen, forward = set(), SD3Transformer2DModel.forward

    def wrapped(self, hidden_states, *args, **kwargs):
        seen.add(tuple(hidden_states.shape[2:]))
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(SD3Transformer2DModel, "forward", wrapped)
    return seen


def test_pictures_of_several_shapes_are_trained_without_being_squashed(run, make_config, tmp_path, watched_shapes):
    data = jsonl(tmp_path / "a", count=len(SHAPES), sizes=SHAPES)
    done, screen = run(make_config(steps=8, batch_size=2, data={**data, "resolution": 12, "held_out": 0}))
    check_latents(done.pictures, SHAPES)
    buckets = bucket_sizes(12, multiple=2, largest=16)
    for place, (width, height) in enumerate(SHAPES):
        assert done.pictures.groups[place] == nearest_bucket(Size(height, width), buckets)
        assert tuple(done.pictures[place]["latents"].shape[1:]) == done.pictures.groups[place]
    batches = BucketBatches(done.inputs.trained.groups, batch_size=2, seed=0)
    for batch in islice(make_loader(done.inputs.trained, batches, workers=0), 8):  # would not stack if sizes mixed
        assert len(batch["latents"]) == 2
    assert len(watched_shapes) > 2 and any(height != width for height, width in watched_shapes)
    assert watched_shapes <= set(buckets)
    for bucket in set(done.pictures.groups):
        inside = [Size(h, w) for (w, h), group in zip(SHAPES, done.pictures.groups, strict=True) if group == bucket]
        worst = max(1 - kept_share(size, bucket) for size in inside)
        noun = "picture" if len(inside) == 1 else "pictures"
        assert f"{bucket.width} × {bucket.height}: {len(inside)} {noun}, cropped " in screen
        assert f"{worst:.0%} at most".replace("%", " %") in screen


def test_buckets_end_where_the_positions_of_a_small_model_end(run, make_config, tmp_path, watched_shapes):
    data = jsonl(tmp_path / "a", count=len(SHAPES), sizes=SHAPES)
    done, _ = run(make_config(steps=4, batch_size=2, data={**data, "resolution": 16, "held_out": 1}))
    check_latents(done.pictures, SHAPES)
    assert max(max(size) for size in done.pictures.groups) == 16
    assert any(height != width for height, width in watched_shapes)


def test_square_pictures_are_the_largest_centred_squares(encode, tmp_path):
    data = jsonl(tmp_path / "a", count=len(SHAPES), sizes=SHAPES)
    found, screen = encode(data={**data, "aspect": "square"})
    assert set(found.pictures.groups) == {Size(8, 8)}
    check_latents(found.pictures, SHAPES)
    assert "8 × 8: 8 pictures, cropped " in screen


def test_a_picture_is_trained_or_held_out_at_all_of_its_sizes(encode, tmp_path):
    sizes = [(40, 40)] * 5 + [(7, 7)]  # the last is too small to be enlarged to 16
    data = {**jsonl(tmp_path / "a", sizes=sizes), "more_resolutions": [16, 12]}
    found, screen = encode(data=data)
    check_latents(found.pictures, sizes)
    of_place = {place: [] for place in range(COUNT)}
    for place, group in zip(found.pictures.places, found.pictures.groups, strict=True):
        of_place[place].append(group.height)
    assert [sorted(found) for found in of_place.values()] == [[8, 12, 16]] * 5 + [[8, 12]]
    assert not set(found.trained.places) & set(found.held_out.places)
    assert len(set(found.held_out.places)) == 2
    assert Counter(found.trained.places + found.held_out.places) == Counter(found.pictures.places)
    assert "4 pictures to train on, 2 held out" in screen, "pictures, not samples"


def test_draws_are_mirrored_and_what_is_measured_on_is_not(encode, tmp_path):
    found, _ = encode(data={**jsonl(tmp_path / "a"), "flip": 0.5})
    check_latents(found.pictures)  # by index, as the held-out loss reads them
    upright = [found.trained[index]["latents"] for index in range(len(found.trained))]
    kinds = Counter()
    for number in range(40):
        drawn = found.trained[Draw(number % len(upright), number)]["latents"]
        expected = upright[number % len(upright)]
        kinds["upright" if torch.equal(drawn, expected) else "mirrored"] += 1
        # bicubic sampling is its own mirror image up to the rounding of 8-bit values
        assert torch.equal(drawn, expected) or torch.allclose(drawn, expected.flip(-1), atol=0.02)
    assert 10 < kinds["mirrored"] < 30


def test_resolutions_that_cannot_be_cut_into_patches_are_refused(run, make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.more_resolutions: 11 pixels cannot be cut .* multiples of 2"):
        run(make_config(data={"more_resolutions": [12, 11]}))
    with pytest.raises(ConfigError, match=r"18 pixels are more than this model has positions for; it takes 16"):
        run(make_config(data={"more_resolutions": [18]}))
    assert not (tmp_path / "run").exists()


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch):
    """How many pictures and captions pipelines have encoded."""
    counts = Counter()
    posterior, prompt = PreProjSD3Pipeline.encode_posterior, PreProjSD3Pipeline.encode_prompt

    def count_pictures(self, pixels):
        counts["pictures"] += len(pixels)
        return posterior(self, pixels)

    def count_prompts(self, *args, **kwargs):
        counts["captions"] += len(kwargs.get("prompt") or ())
        return prompt(self, *args, **kwargs)

    monkeypatch.setattr(PreProjSD3Pipeline, "encode_posterior", count_pictures)
    monkeypatch.setattr(PreProjSD3Pipeline, "encode_prompt", count_prompts)
    return counts


def test_a_second_run_encodes_nothing_and_trains_the_same(run, make_config, tmp_path, encoded, saved_pipelines):
    settings = {"model": str(saved_pipelines["latents"]), "data": {"resolution": 16, "flip": 0.5}, "steps": 2}
    first, _ = run(make_config(**settings, validation={"prompts": ["blue tree"], "steps": 1}))
    assert encoded == {"pictures": 24, "captions": 5}, "both sides; three captions, the empty one and the prompt"
    encoded.clear()
    second, screen = run(make_config(**settings, output=tmp_path / "again"))
    assert not encoded
    assert "pictures: 12 of 12" in screen
    losses = [[(record.loss, record.held_out) for record in one.history] for one in (first, second)]
    assert losses[0] == losses[1]


def test_captions_that_are_cut_off_are_counted_in_one_line(encode, pictures, caplog):
    rows = [json.loads(line) for line in (pictures / "metadata.jsonl").read_text().splitlines()]
    for place, row in enumerate(rows[:5]):
        row["text"] = f"red apple green tree blue square {place}"
    (pictures / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, screen = encode()
    assert screen.count("cut off") == 1 and not caplog.records
    assert "5 captions too long for the text encoder; the last: The following part of a prompt was cut off" in screen
    _, again = encode()
    assert "cut off" not in again


def test_only_what_is_new_is_encoded(encode, pictures, encoded):
    encode()
    encoded.clear()
    lines = (pictures / "metadata.jsonl").read_text().splitlines()
    (pictures / "metadata.jsonl").write_text("\n".join([*lines[:-1], lines[-1].replace("blue", "apple")]))
    (pictures / "03.png").write_bytes(png(77))
    encode()
    assert encoded == {"pictures": 1, "captions": 1}


def test_the_cache_is_beside_the_run_or_where_the_configuration_says(encode, make_config, tmp_path, monkeypatch):
    assert cache_folder(make_config()) == tmp_path / "cache"
    monkeypatch.setenv("HOME", str(tmp_path))
    encode(data={"cache": "~/kept"})
    assert list((tmp_path / "kept").glob("*.safetensors")) and not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_names_the_setting_and_costs_nothing(run, make_config, tmp_path):
    config = make_config(steps=1)
    run(config)
    before = (config.output / "metrics.jsonl").read_bytes()
    (tmp_path / "file").write_text("mine")
    for cache, kind in ((tmp_path / "file" / "cache", OSError), (tmp_path / "file", ValueError)):
        with pytest.raises(kind, match=r"file.*data\.cache|data\.cache.*file"):
            run(make_config(steps=1, data={"cache": cache}), overwrite=True)
    assert (config.output / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "file").read_text() == "mine"


def test_damaged_files_of_the_cache_are_told_and_what_they_held_is_encoded_anew(encode, tmp_path, encoded):
    first, screen = encode()
    before = [first.pictures[place]["latents"] for place in range(12)]
    assert "cannot be read" not in screen
    encoded.clear()
    for path in (tmp_path / "cache").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])
    again, screen = encode()
    assert encoded == {"pictures": 12, "captions": 4}
    assert f"2 files of the cache {tmp_path / 'cache'} cannot be read; encoding anew:\n" in screen
    assert screen.count("remove it, what it held is computed anew") == 2
    assert all(torch.equal(again.pictures[place]["latents"], before[place]) for place in range(12))


def test_copies_of_a_picture_are_never_on_both_sides(encode, pictures):
    for path in sorted(pictures.glob("*.png")):
        path.write_bytes(png(int(path.stem)))
    found, _ = encode(data={"mix": [{"folder": str(pictures)}] * 2, "folder": None, "held_out": 4})
    held, trained = (set(side.latents.identity()) for side in (found.held_out, found.trained))
    assert not held & trained
    assert len(found.held_out) >= 4


def test_what_the_cache_has_already_is_said(encode):
    _, cold = encode()
    _, warm = encode()
    assert "pictures: 0 of 12 are in the cache" in cold
    assert "pictures: 12 of 12 are in the cache" in warm
    assert "captions: 4 of 4 are in the cache" in warm


# --- the run's own folder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["metadata", "sidecars", "mixed"])
def test_a_second_run_beside_the_first_trains_on_the_same_pictures(encode, run, make_config, pictures, layout):
    if layout != "metadata":
        for line in (pictures / "metadata.jsonl").read_text().splitlines():
            row = json.loads(line)
            (pictures / row["file_name"]).with_suffix(".txt").write_text(row["text"])
        (pictures / "metadata.jsonl").unlink()
    data = {"mix": [{"folder": pictures}], "folder": None} if layout == "mixed" else {}
    validation = {"prompts": ("red square",), "count": 1, "steps": 1}
    data |= {"on_error": "raise"}
    config = make_config(output=pictures / "runs" / "a", validation=validation, data=data)
    before, screen = encode(config)
    assert "was written by a run" not in screen
    run(config)
    assert list((config.output / "previews").iterdir())
    found, screen = encode(make_config(output=pictures / "runs" / "b", validation=validation, data=data))
    assert found.pictures.captions == before.pictures.captions and found.skipped == ()
    assert found.places == before.places
    assert f"{pictures}/runs/a was written by a run, so its pictures are left out of the data" in screen


@pytest.mark.parametrize("way", ["as it is", "by a link"])
def test_pictures_in_the_runs_own_folder_are_refused(run, make_config, pictures, tmp_path, way):
    output = pictures
    if way == "by a link":
        output = tmp_path / "link"
        output.symlink_to(pictures, target_is_directory=True)
    before = sorted(pictures.iterdir())
    with pytest.raises(ConfigError, match=r"output: .* is data\.folder too, .*choose another output"):
        run(make_config(output=output))
    data = {"mix": [{"folder": tmp_path / "pictures"}, {"folder": pictures}], "folder": None}
    with pytest.raises(ConfigError, match=r"output: .* is data\.mix\.0\.folder too"):
        run(make_config(output=output, data=data))
    assert [path for path in sorted(pictures.iterdir()) if path.suffix != ".lock"] == before


def test_sizes_are_counted_without_pictures_that_cannot_be_decoded(encode, pictures):
    torn = pictures / "03.png"
    torn.write_bytes(torn.read_bytes()[:60])  # of which the header is whole
    found, screen = encode()
    assert sum(report.pictures for report in found.buckets) == len(found.pictures) == 11
    assert "without 1 picture that could not be decoded:" in screen
    again = screen.partition("could not be decoded:")[2]
    assert all(str(report) in again for report in found.buckets)
