"""Records on disk: whole lines, up to a checkpoint, whatever a run that was killed has left."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from mmpreproj.recipes.progress import Reporter
from mmpreproj.recipes.train.inputs import make_inputs
from mmpreproj.recipes.train.preparation import open_base, prepare_pipeline
from mmpreproj.recipes.train.sources import open_source
from mmpreproj.recipes.train.watching import Watch, read_history
from mmpreproj.training.loop import StepRecord, make_accelerator


def record(step, **more):
    return StepRecord(step, 0.5 / max(step, 1), None, 1e-3, 1.0, 2.0, **more)


def write(path, records, tail=""):
    path.write_text("".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in records) + tail)
    return path


RECORDS = [
    StepRecord(0, None, 0.75, 0.0, None, None, held_out_losses={"pictures": 0.75}),
    record(1, losses={"pictures": 0.5}, learning_rates={"adapter": 1e-3, "biases": 1e-4}),
    record(2),
    record(3),
]


@pytest.mark.parametrize(
    "tail",
    [
        "",
        '{"step": 4, "lo',
        '{"step": 4}\n',
        "12\n",
        "\0\0\0\0",
        "no json\n" + json.dumps(dataclasses.asdict(record(4))),
    ],
)
def test_records_are_read_as_far_as_they_are_whole(tmp_path, tail):
    path = write(tmp_path / "metrics.jsonl", RECORDS, tail)
    assert read_history(path, up_to=9) == RECORDS


def test_half_a_character_ends_the_records(tmp_path):
    path = write(tmp_path / "metrics.jsonl", RECORDS)
    path.write_bytes(path.read_bytes() + b'{"step": "\xe2\x82')
    assert read_history(path, up_to=9) == RECORDS


@pytest.mark.parametrize("step", [0, 2, 3])
def test_records_beyond_a_step_are_left_out(tmp_path, step):
    assert read_history(write(tmp_path / "metrics.jsonl", RECORDS), up_to=step) == RECORDS[: step + 1]


def test_without_a_file_there_are_no_records(tmp_path):
    assert read_history(tmp_path / "metrics.jsonl", up_to=3) == []
    assert read_history(write(tmp_path / "metrics.jsonl", []), up_to=3) == []


def test_records_of_a_version_that_knew_fewer_fields_are_read(tmp_path):
    line = {"step": 1, "loss": 0.5, "held_out": None, "learning_rate": 1e-3, "grad_norm": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**line, "pictures_per_second": 2.0}))
    (found,) = read_history(tmp_path / "metrics.jsonl", up_to=1)
    assert found.learning_rates == {} and found.loss == 0.5


@pytest.fixture
def make_watch(make_config):
    """Start to watch a run that has not begun."""

    def make(*, checkpoint=None, **changes):
        config = make_config(**changes)
        config.output.mkdir(exist_ok=True)
        accelerator = make_accelerator(config)
        screen = io.StringIO()
        reporter = Reporter(Console(file=screen, width=200))
        pipeline = open_base(config)
        prepare_pipeline(pipeline, config)
        inputs = make_inputs(pipeline, open_source(config.data), config, accelerator=accelerator, reporter=reporter)
        settings = {"accelerator": accelerator, "reporter": reporter, "checkpoint": checkpoint}
        return Watch(pipeline, inputs, config, **settings), config.output / "metrics.jsonl"

    return make


def test_records_are_on_disk_as_soon_as_they_are_made(make_watch):
    watch, path = make_watch()
    with watch:
        for number, one in enumerate(RECORDS, start=1):
            watch.step(one)
            assert read_history(path, up_to=9) == RECORDS[:number] == watch.history


def test_a_run_that_is_taken_up_again_begins_with_the_records_up_to_its_checkpoint(make_watch, tmp_path):
    (tmp_path / "run").mkdir()
    path = write(tmp_path / "run" / "metrics.jsonl", RECORDS, '{"step": 4, "lo')
    watch, _ = make_watch(checkpoint=tmp_path / "run" / "checkpoints" / "step-000002")
    with watch:
        assert watch.history == RECORDS[:3]
        watch.step(record(3, losses={"pictures": 0.25}))
    assert read_history(path, up_to=9) == [*RECORDS[:3], record(3, losses={"pictures": 0.25})]


def test_a_new_run_begins_without_the_records_of_an_earlier_one(make_watch, tmp_path):
    (tmp_path / "run").mkdir()
    path = write(tmp_path / "run" / "metrics.jsonl", RECORDS)
    watch, _ = make_watch()
    with watch:
        pass
    assert path.read_text() == "" and watch.history == []


def test_trackers_are_ended_when_a_run_fails(make_watch, tmp_path):
    watch, _ = make_watch()
    with pytest.raises(RuntimeError, match="of the run"), watch:
        watch.step(record(1))
        raise RuntimeError("of the run")
    assert watch.trackers._trackers == []
    assert any((tmp_path / "run" / "tensorboard").iterdir())


PROMPTS = {"prompts": ("red apple",), "count": 1, "steps": 1}


@pytest.mark.parametrize(("at_start", "drawn"), [(True, ["pictures-000000.png"]), (False, [])])
def test_before_the_first_step_pictures_are_drawn_where_that_is_asked_for(make_watch, tmp_path, at_start, drawn):
    watch, _ = make_watch(validation=PROMPTS | {"at_start": at_start}, trackers=())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with watch:
        watch.evaluate(0)
        assert sorted(path.name for path in (tmp_path / "run").glob("previews/*")) == drawn
        assert watch._measured == {}, "the first record is of a step that has changed the profile"
        watch.evaluate(1)
    assert sorted(path.name for path in (tmp_path / "run" / "previews").iterdir()) == [*drawn, "pictures-000001.png"]
    assert watch._measured
    assert torch.equal(torch.get_rng_state(), state), "what trains draws the same numbers as without pictures"
