"""The card of a run's result: its figures are the run's, its code runs, and it tells nothing of this disk."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from typer.testing import CliRunner

import mmpreproj
from mmpreproj.cli import app
from mmpreproj.data.sources.pictures import SkippedPicture
from mmpreproj.recipes.train.card import RunFacts, write_training_card
from mmpreproj.recipes.train.card_parts import data_section, public_place, public_settings, results_section
from mmpreproj.training.config import parse_config
from mmpreproj.training.loop import StepRecord
from mmpreproj.training.lora import lora_parameters


@pytest.fixture(params=["adapter", "lora", "model"])
def result(request, trained, trained_together):
    """Each kind of result that a run leaves, with its run."""
    run = trained["full"][0] if request.param == "model" else trained_together
    return run.config.output / request.param, run


@pytest.fixture
def rewrite(tmp_path):
    """Write the card of a copy of a run's result, with other facts."""

    def write(run, name="adapter", **changes):
        folder = shutil.copytree(run.config.output / name, tmp_path / name)
        settings = changes.pop("settings", {})
        facts = RunFacts(run.config.model_copy(update=settings), run.pipeline, run.inputs, run.history)
        assert write_training_card(folder, replace(facts, **changes))
        return ModelCard.load(folder / "README.md")

    return write


def text_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def block_of(text, language):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return next(block for found, block in blocks if found == language)


# --- what it says ----------------------------------------------------------------------------------------------------


def test_the_hub_reads_what_it_is(result):
    folder, _ = result
    data = ModelCard.load(folder / "README.md").data
    assert data.pipeline_tag == "text-to-image"
    assert data.library_name == ("diffusers" if folder.name == "lora" else "mmpreproj")
    assert {"text-to-image", "mmpreproj", "diffusers"} <= set(data.tags)
    assert ("lora" in data.tags) == (folder.name != "model")
    assert (data.base_model, data.license) == (None, None)  # a folder is no base that others could load


@pytest.mark.parametrize(("name", "relation"), [("adapter", "adapter"), ("lora", "adapter"), ("model", "finetune")])
def test_a_base_and_a_data_set_on_the_hub_are_named(trained, trained_together, rewrite, name, relation):
    run = trained["full"][0] if name == "model" else trained_together
    data = run.config.data.model_copy(update={"source": "dataset", "folder": None, "dataset": "someone/some-flowers"})
    card = rewrite(run, name, settings={"model": "someone/some-base", "data": data})
    assert (card.data.base_model, card.data.base_model_relation) == ("someone/some-base", relation)
    assert card.data.datasets == ["someone/some-flowers"]
    assert "data set [someone/some-flowers](https://huggingface.co/datasets/someone/some-flowers)" in card.text
    assert ('from_pretrained("someone/some-base"' in card.text) == (name != "model")


def test_the_figures_are_the_runs(trained_together):
    run = trained_together
    text = text_of(run.config.output / "adapter")
    adapter = mmpreproj.report(run.pipeline.transformer).parameters
    lora = sum(parameter.numel() for parameter in lora_parameters(run.pipeline.transformer))
    everything = sum(parameter.numel() for parameter in run.pipeline.transformer.parameters())
    for said in (
        f"| the adapter | {adapter:,} |",
        f"| the LoRA | {lora:,} |",
        f"| left as it was | {everything - adapter - lora:,} |",
        f"Trained for {run.config.steps} steps of {run.config.batch_size} pictures",
        f"from {run.history[0].held_out:.4f} to {run.held_out_loss:.4f}",
        *(f"| {record.step} | {record.held_out:.4f} |" for record in run.history if record.held_out is not None),
        "- folder `pictures`\n",
        "9 pictures trained on; 2 held out",
        "- 1 left out:\n  - 1 ×: the file is empty",
        "8 × 8 pixels",
        f"| longest text | {run.config.max_sequence_length} tokens |",
        str(mmpreproj.profile(run.pipeline.transformer)),
    ):
        assert said in text
    buckets = re.findall(r"^\| \d+ × \d+ \| (\d+) \|", text, re.MULTILINE)
    assert sum(map(int, buckets)) == 11


def test_a_whole_model_counts_its_base(trained):
    run, _ = trained["full"]
    adapter = mmpreproj.report(run.pipeline.transformer).parameters
    base = sum(parameter.numel() for parameter in run.pipeline.transformer.parameters()) - adapter
    text = text_of(run.saved)
    assert f"| the base, all of it | {base:,} |" in text
    assert "left as it was" not in text


def test_an_adapter_with_a_name_and_a_scale_of_its_own_is_described(run, make_config, make_several):
    done, _ = run(make_config(model=str(make_several(("style",))), mode="full", steps=1))
    assert "| `expansion` | 1.25 |" in text_of(done.saved)


def test_nothing_is_told_of_this_disk(result, tmp_path_factory):
    folder, run = result
    text = text_of(folder)
    for place in (tmp_path_factory.getbasetemp(), run.config.output.parent.name, run.config.data.folder.parent):
        assert str(place) not in text


def test_its_settings_read_back_and_are_the_runs(result):
    folder, run = result
    read = parse_config(yaml.safe_load(block_of(text_of(folder), "yaml")), origin="the card")
    same = {"model": run.config.model, "output": run.config.output}
    data = read.data.model_copy(update={"folder": run.config.data.folder})
    assert read.model_copy(update={**same, "data": data}) == run.config
    assert (read.data.folder.name, read.data.folder.is_absolute()) == ("pictures", False)


def test_evaluations_are_thinned_to_twenty_the_ends_among_them(trained_together):
    losses = [
        StepRecord(step, 1.0, 2.0, 0.1, 1.0, 1.0, held_out_losses={"pictures": 2.0}) for step in range(0, 999, 3)
    ]
    rows = re.findall(r"^\| (\d+) \|", "\n".join(results_section(trained_together.config, losses)), re.MULTILINE)
    assert len(rows) == 20
    assert (rows[0], rows[-1]) == ("0", "996")


def test_without_held_out_pictures_it_says_so(trained_together):
    text = "\n".join(results_section(trained_together.config, [StepRecord(1, 1.0, None, 0.1, 1.0, 1.0)]))
    assert "No pictures were held out" in text


def test_reasons_are_counted_without_names_and_numbers(trained_together):
    reasons = [
        "it is too small: 3 × 4 pixels",
        "it is too small: 5 × 6 pixels",
        "OSError: cannot open '/home/me/secret place/a.png'",
        "/home/me/shard.tar was cut off <b>",
        *(f"reason {'x' * number}" for number in range(9)),
    ]
    skipped = tuple(SkippedPicture("name.png", reason) for reason in reasons)
    text = "\n".join(data_section(trained_together.config, replace(trained_together.inputs, skipped=skipped)))
    assert "- 13 left out:\n  - 2 ×: it is too small: … × … pixels\n" in text
    assert "OSError: cannot open …\n" in text
    assert "  - 1 ×: … was cut off &lt;b&gt;\n" in text
    assert "  - 4 for other reasons" in text
    assert not any(word in text for word in ("home", "secret", "shard", "name.png"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source": "openmoji", "folder": None}, "OpenMoji](https://openmoji.org), CC BY-SA 4.0"),
        ({"source": "furniture"}, "sweethome3d-furniture"),
        ({"source": "dataset", "dataset": "/home/me/flowers", "subset": "small"}, "data set `flowers`, small, split"),
        (
            {"source": "shards", "shards": tuple(f"/home/me/{number}.tar" for number in range(5))},
            "tar files `0.tar`, `1.tar`, `2.tar` and 2 more",
        ),
        ({"repeats": 2.0}, "folder `pictures`, each picture 2 times an epoch"),
        ({"weight": 0.5}, "folder `pictures`, of weight 0.5"),
    ],
)
def test_each_kind_of_source_is_named(trained_together, changes, said):
    run = trained_together
    config = run.config.model_copy(update={"data": run.config.data.model_copy(update=changes)})
    text = "\n".join(data_section(config, run.inputs))
    assert said in text
    assert "/home" not in text


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("/home/me/pictures", "pictures"),
        ("~/pictures", "pictures"),
        ("../other/pictures/", "pictures"),
        ("data/../../pictures", "pictures"),
        (r"C:\Users\me\pictures", "pictures"),
        ("/", "root"),
        ("runs/mine", "runs/mine"),
        ("someone/some-base", "someone/some-base"),
        ("https://me:secret@example.org/a/{000..009}.tar?token=secret", "https://example.org/a/{000..009}.tar"),
    ],
)
def test_a_place_is_shown_without_what_only_this_disk_knows(place, shown):
    assert public_place(place) == shown


def test_text_that_is_no_place_is_left_as_it_is(trained_together):
    validation = trained_together.config.validation.model_copy(update={"prompts": ("/imagine a tree",)})
    config = trained_together.config.model_copy(update={"validation": validation})
    assert public_settings(config)["validation"]["prompts"] == ["/imagine a tree"]


# --- its pictures ----------------------------------------------------------------------------------------------------


def test_curves_and_samples_lie_beside_it(trained_together):
    output = trained_together.config.output
    for name in ("adapter", "lora"):
        text = text_of(output / name)
        shown = {"loss.png": "loss.png", "samples.png": "previews/pictures-000003.png"}
        shown |= {"profile.png": "profile.png"} if name == "adapter" else {}
        for copy, original in shown.items():
            assert f"]({copy})" in text
            assert (output / name / copy).read_bytes() == (output / original).read_bytes()
        assert ("profile.png" in text) == (name == "adapter")
        assert "1. “red square”\n2. “a &lt;b&gt;blue&lt;/b&gt; tree”\n" in text
        assert "after training step 3" in text


def test_the_last_preview_is_told_by_its_number_and_a_stale_copy_goes(trained_together, tmp_path):
    run = trained_together
    output = shutil.copytree(run.config.output, tmp_path / "run")
    facts = RunFacts(run.config.model_copy(update={"output": output}), run.pipeline, run.inputs, run.history)
    (output / "previews" / "pictures-1000000.png").write_bytes(b"later")
    (output / "previews" / "shapes-000002.png").write_bytes(b"shapes")
    write_training_card(output / "adapter", facts)
    assert (output / "adapter" / "samples.png").read_bytes() == b"later"
    assert (output / "adapter" / "shapes.png").read_bytes() == b"shapes"
    assert "](shapes.png)" in text_of(output / "adapter")
    shutil.rmtree(output / "previews")
    write_training_card(output / "adapter", facts)
    assert not (output / "adapter" / "samples.png").exists()
    assert "samples.png" not in text_of(output / "adapter")


def test_without_prompts_no_samples_are_promised(trained):
    run, _ = trained["probe"]
    assert "samples.png" not in text_of(run.saved)
    assert not (run.saved / "samples.png").exists()


# --- how it is used --------------------------------------------------------------------------------------------------


def with_places(text, run):
    """Put places of this disk where the card leaves them to its reader."""
    return text.replace(f"/path/to/{Path(run.config.model).name}", str(run.config.model))


def test_its_python_runs(result, tmp_path, monkeypatch):
    folder, run = result
    shutil.copytree(run.config.output, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run" / folder.name)  # where the card says
    assert "Run this in the folder of this file." in text_of(folder)
    code = with_places(block_of(text_of(folder), "python"), run)
    exec(compile(code, "README.md", "exec"), {})
    assert Path("picture.png").is_file()


@pytest.mark.parametrize("mode", ["probe", "full"])
def test_its_command_runs(trained, tmp_path, monkeypatch, mode):
    run, _ = trained[mode]
    shutil.copytree(run.saved, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")  # where the card says
    name, *arguments = shlex.split(block_of(text_of(run.saved), ""))
    assert name == "mmpreproj"
    ended = CliRunner().invoke(app, [*arguments, "--steps", "2"])  # as it is: an adapter knows its base
    assert ended.exit_code == 0, ended.output
    assert [Image.open(path).size for path in Path("pictures").glob("*.png")] == [(8, 8)]


@pytest.mark.parametrize("name", ["adapter", "lora"])
def test_places_that_are_relative_are_written_as_configured(trained_together, rewrite, name):
    text = rewrite(trained_together, name, settings={"model": "my base", "output": Path("runs/mine")}).text
    assert "in the folder that the run was started in" in text
    assert 'from_pretrained("my base", dtype=dtype)' in text
    assert 'mmpreproj.load(pipe.transformer, "runs/mine/adapter")' in text
    assert 'pipe.load_lora_weights("runs/mine/lora")' in text
    words = shlex.split(block_of(text, ""))
    assert words[2:8] == ["--model", "my base", "--adapter", "runs/mine/adapter", "--lora", "runs/mine/lora"]


def test_a_base_that_the_card_may_not_name_is_a_variable_with_what_to_put_in(trained_together):
    text = text_of(trained_together.config.output / "lora")
    name = Path(trained_together.config.model).name
    assert f'base = "/path/to/{name}"' in text
    assert f"a folder called `{name}`: put its path, which `adapter_config.json` has, in place of" in text


def test_a_repository_is_named_where_the_result_goes_to_one(trained_together, rewrite):
    card = rewrite(trained_together, settings={"push_to_hub": "me/mine"})
    assert 'mmpreproj.load(pipe.transformer, "me/mine")' in card.text
    assert 'pipe.load_lora_weights("me/mine", subfolder="lora")' in card.text


def test_a_lora_alone_is_given_its_length(run, make_config):
    done, _ = run(make_config(adapter=None, lora={"rank": 2}, steps=1))
    text = text_of(done.saved)
    assert done.saved.name == "lora"
    assert "max_sequence_length=6)" in text
    assert "mmpreproj.load" not in text
    assert "PreProjSD3Pipeline.from_pretrained" in text  # stock diffusers cannot open a base with one text encoder


# --- what is a person's own ------------------------------------------------------------------------------------------


def test_a_readme_of_ones_own_is_left_alone_by_all_and_ours_is_written_anew(trained_together, tmp_path):
    run = trained_together
    folder = shutil.copytree(run.config.output / "adapter", tmp_path / "adapter")
    facts = RunFacts(run.config, run.pipeline, run.inputs, run.history)
    ours = text_of(folder)
    mmpreproj.save(run.pipeline.transformer, folder)
    assert text_of(folder) == ours
    (folder / "README.md").unlink()
    mmpreproj.save(run.pipeline.transformer, folder)
    assert text_of(folder) != ours
    assert write_training_card(folder, facts)
    assert text_of(folder) == ours
    (folder / "README.md").write_text("my own words")
    assert not write_training_card(folder, facts)
    assert text_of(folder) == "my own words"


def test_going_on_with_a_run_keeps_a_persons_words_beside_the_new_model(run, make_config):
    config = make_config(mode="full")
    done, _ = run(config)
    (done.saved / "README.md").write_text("my own words")
    before = (done.saved / "model_index.json").stat().st_mtime_ns
    run(config, resume="latest")
    assert (done.saved / "model_index.json").stat().st_mtime_ns != before
    assert text_of(done.saved) == "my own words"


def test_what_is_no_result_of_a_run_is_refused(trained_together, tmp_path):
    run = trained_together
    with pytest.raises(ValueError, match=r"a run's results are adapter, lora, model; got .*elsewhere"):
        write_training_card(tmp_path / "elsewhere", RunFacts(run.config, run.pipeline, run.inputs, run.history))
