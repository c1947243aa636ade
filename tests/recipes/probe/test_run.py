"""A study from its configuration: what it leaves, how it goes on, and what it refuses."""

import json
import math

import numpy as np
import pytest
import torch
from interruption_kit import FORKING
from locking_kit import hold
from scoring_kit import tiny_llama, tiny_tokenizer
from study_kit import ARMS, run_quietly

from mmpreproj.language import fitting
from mmpreproj.language.config import StudyConfig
from mmpreproj.language.evaluation.scores import SCORES
from mmpreproj.language.trials import RECORD, Trial, TrialRecord
from mmpreproj.recipes.probe import Study
from mmpreproj.recipes.probe import run as run_module
from mmpreproj.training.config import ConfigError, read_config

SLOW = pytest.mark.slow
BOTH = "pre_projection+skip"
TRAINED = [arm for arm in ARMS if arm != "base"]


@pytest.fixture
def fitted(monkeypatch):
    """Note which trials are trained."""
    stock, made = run_module.fit, []

    def fit(*args, **settings):
        made.append((settings["folder"].relative_to(settings["folder"].parents[3]), settings["seed"]))
        return stock(*args, **settings)

    monkeypatch.setattr(run_module, "fit", fit)
    return made


def weights_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def without_clock(folder):
    """Read all records but for what no two runs have alike."""
    found = {}
    for path in sorted(folder.rglob(RECORD)):
        values = json.loads(path.read_text())
        found[str(path.relative_to(folder))] = {
            key: value for key, value in values.items() if key not in ("step_seconds", "peak_memory")
        }
    return found


def assert_same_outcome(folder, expected):
    assert without_clock(folder) == without_clock(expected)
    assert weights_of(folder) == weights_of(expected)
    paths = sorted(path.relative_to(expected) for path in expected.rglob(SCORES))
    assert sorted(path.relative_to(folder) for path in folder.rglob(SCORES)) == paths
    for path in paths:
        found, wanted = np.load(folder / path), np.load(expected / path)
        assert found.files == wanted.files
        assert all(np.array_equal(found[name], wanted[name]) for name in found.files)


def test_a_study_leaves_what_each_trial_has_learned_and_scored(finished):
    study, records = finished.study, finished.study.config.records
    for text in ("docs", "tales"):
        assert {path.name for path in (records / text / "base").iterdir()} == {RECORD, SCORES}
        for arm in TRAINED:
            place = records / text / arm
            folders = {str(path.parent.relative_to(place)) for path in place.rglob(RECORD)}
            chosen = study.chosen_rate(text, arm)
            assert folders == {"lr-0.001/seed-0", "lr-0.01/seed-0", f"lr-{chosen:g}/seed-1"}
            for folder in folders:
                names = {path.name for path in (place / folder).iterdir()}
                parts = {"lora"} if arm == "lora" else {"adapter"}
                scored = {SCORES} if folder.startswith(f"lr-{chosen:g}/") else set()
                assert names == parts | scored | {"losses.json", RECORD}
                assert len(json.loads((place / folder / "losses.json").read_text())) == 3
    assert len(study.trials) == 2 * (1 + 3 * 3) and len(study.scores) == 2 * (1 + 3 * 2)
    assert read_config(finished.folder / "config.yaml", [], kind=StudyConfig) == study.config
    assert not list(finished.folder.parent.glob(".*"))


def test_a_person_sees_a_line_for_each_training_and_each_arm(finished):
    lines = finished.told.splitlines()
    assert len(lines) == 2 + 20 + 8
    assert lines[0].startswith("docs: ") and " tokens of train, " in lines[0]
    assert lines[2].startswith("[ 1/20] docs: base: validation perplexity ")
    assert lines[3].startswith("docs: base: test perplexity ")
    assert lines[4].startswith("[ 2/20] docs: lora, rate 0.001, seed 0: validation perplexity ")
    assert "about" in lines[4] and "left)" in lines[4]
    assert "left" not in next(line for line in lines if line.startswith("[20/20]"))


def test_the_chosen_rate_has_the_lowest_validation_perplexity_at_the_first_seed(make_study):
    config = make_study(texts={"docs": {"files": ["x"]}}, arms=("base", "skip"), learning_rates=(1e-4, 1e-3, 1e-2))
    trials = {}
    for rate, values in {1e-4: (9.0, 1.0), 1e-3: (7.0, 9.0), 1e-2: (8.0, 1.0)}.items():
        for seed, value in enumerate(values):
            trial = Trial("docs", "skip", rate, seed)
            trials[trial] = TrialRecord(trial, {}, 1, 0, value, 0)
    study = Study(config, trials, {})
    assert study.chosen_rate("docs", "skip") == 1e-3
    assert study.chosen_rate("docs", "base") is None


def test_a_study_that_is_done_trains_and_scores_nothing(finished, make_study, tmp_path, monkeypatch):
    def fail(*args, **settings):
        raise AssertionError("there is nothing left to do")

    for name in ("fit", "score_model", "validation_perplexity"):
        monkeypatch.setattr(run_module, name, fail)
    study, told = run_quietly(make_study(output=finished.copied(tmp_path / "study")))
    assert study.trials == finished.study.trials
    assert study.scores.keys() == finished.study.scores.keys()
    assert len(told.splitlines()) == 2


@pytest.mark.parametrize(
    "place", ["in training", *(pytest.param(place, marks=SLOW) for place in ("before the record", "in scoring"))]
)
def test_a_study_that_was_broken_off_goes_on_to_the_same(place, finished, make_study, tmp_path, monkeypatch):
    """With the weights, records and scores of one that was not, bit for bit."""
    config = make_study()
    config = make_study(texts={"docs": config.texts["docs"]}, arms=("base", "lora", "pre_projection+skip"))

    def stop(*args, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "in training":
            stock = fitting._step
            steps = iter(range(100))
            patch.setattr(fitting, "_step", lambda *args: stop() if next(steps) == 11 else stock(*args))
        elif place == "before the record":
            stock_finish = run_module._finished
            records = iter(range(100))
            patch.setattr(run_module, "_finished", lambda *a: stop() if next(records) == 5 else stock_finish(*a))
        else:
            stock_score = run_module.score_model
            arms = iter(range(100))
            patch.setattr(
                run_module, "score_model", lambda *a, **s: stop() if next(arms) == 2 else stock_score(*a, **s)
            )
        with pytest.raises(KeyboardInterrupt):
            run_quietly(config)
    left = list(config.output.rglob(fitting.UNFINISHED))
    assert len(left) == (0 if place == "in scoring" else 1)
    run_quietly(config)
    assert not list(config.output.rglob(fitting.UNFINISHED))
    for arm in config.arms:
        assert_same_outcome(config.records / "docs" / arm, finished.study.config.records / "docs" / arm)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"arms": (*ARMS, "skip")}, {("skip", 0), ("skip", 1)}),
        pytest.param({"seeds": (0, 1, 2)}, {(arm, 2) for arm in TRAINED}, marks=SLOW),
        ({"arms": ("base", "lora")}, set()),
        ({"evaluation__resamples": 300, "evaluation__batch_size": 3, "training__micro_batch_size": 1}, set()),
    ],
    ids=["arm", "seed", "fewer", "no matter"],
)
def test_what_is_added_to_a_study_is_all_that_is_trained(changes, expected, finished, make_study, tmp_path, fitted):
    config = make_study(output=finished.copied(tmp_path / "study"), **changes)
    before = weights_of(config.records)
    study, _ = run_quietly(config)
    assert {(folder.parts[1], seed) for folder, seed in fitted} == expected
    after = weights_of(config.records)
    assert all(after[name] == value for name, value in before.items())
    assert {trial.arm for trial in study.trials} == set(config.arms)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"training__steps": 4}, r"record.json was made with other settings: training.steps was 3, is 4\. Choose"),
        ({"lora": {"rank": 3}}, r"lora.alpha was 8.0, is 8.0|lora.rank was 8, is 3"),
        ({"adapter": {"expansion": 2.0}}, r"adapter.expansion was 1.25, is 2"),
        ({"evaluation__stride": 4}, r"validation.stride was 8, is 4"),
        ({"evaluation__limit": 3}, r"scores.npz was made .*: evaluation.limit was null, is 3.*remove that file"),
        ({"model": {"dtype": "bfloat16"}}, r"model was .*, is "),
    ],
    ids=["steps", "lora", "adapter", "stride", "limit", "dtype"],
)
def test_a_study_with_other_settings_is_refused_naming_them(changes, told, finished, make_study, tmp_path, fitted):
    if "model" in changes:
        changes = {"model": changes["model"] | {"name": finished.study.config.model.name}}
    config = make_study(output=finished.copied(tmp_path / "study"), **changes)
    with pytest.raises(ConfigError, match=told):
        run_quietly(config)
    assert not fitted


def test_scores_that_were_removed_are_those_of_the_saved_weights(finished, make_study, tmp_path, fitted):
    output = finished.copied(tmp_path / "study")
    for path in output.rglob(SCORES):
        path.unlink()
    run_quietly(make_study(output=output))
    assert not fitted
    assert_same_outcome(output, finished.folder)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_an_output_that_is_a_file_is_refused(make_study, tmp_path):
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "study"):
        with pytest.raises(ConfigError, match=r"output: .*/file is a file; choose another output"):
            run_quietly(make_study(output=output))
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "no/such/folder"}, r"model: 'no/such/folder': no such folder here, and on the hub: "),
        (
            {"model": "somebody/no-such-model"},
            r"model: 'somebody/no-such-model': no such folder here, and on the hub: ",
        ),
        ({"training__length": 65}, r"training.length: 65 tokens, and .* reads 64; give at most that"),
        ({"evaluation__length": 65, "training__length": 16}, r"evaluation.length: 65 tokens, and .* reads 64; give"),
        ({"optimizer": {"name": "adamww"}}, r"optimizer.name: timm has no optimiser 'adamww'"),
        ({"lora": {"targets": ["no_such"]}}, r"lora.targets: \['no_such'\] cannot be used on LlamaForCausalLM"),
        ({"evaluation__tasks": [{"file": "no_such.jsonl"}]}, r"evaluation.tasks.0: no task file no_such.jsonl; give"),
        ({"texts": {"docs": {"files": ["no_such/*.txt"]}}}, r"texts.docs: .*no_such"),
    ],
    ids=["folder", "hub", "length", "window", "optimizer", "lora", "task", "text"],
)
def test_what_cannot_be_used_is_told_before_anything_is_trained(changes, told, make_study, fitted):
    config = make_study(**changes)
    with pytest.raises((ConfigError, FileNotFoundError), match=told) as refused:
        run_quietly(config)
    assert len(str(refused.value).splitlines()) == 1
    assert not fitted and not config.output.exists()


def test_a_damaged_task_is_refused_with_its_line(make_study, tmp_path):
    (tmp_path / "task.jsonl").write_text('{"context": "a", "continuation": "b"}\n{"context": \n')
    with pytest.raises(ConfigError, match=r"evaluation.tasks.0: .*task.jsonl, line 2"):
        run_quietly(make_study(evaluation__tasks=[{"file": tmp_path / "task.jsonl"}]))


@pytest.mark.parametrize("kind", ["architecture", "type", "no model"])
def test_a_model_of_no_known_kind_is_refused(kind, make_study, tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    folder = tmp_path / "model"
    tiny_tokenizer().save_pretrained(folder)
    if kind == "architecture":
        BloomForCausalLM(BloomConfig(vocab_size=320, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(folder)
    elif kind == "type":
        (folder / "config.json").write_text('{"model_type": "no_such"}')
    with pytest.raises(ConfigError, match=r"model: .*model") as refused:
        run_quietly(make_study(model=str(folder)))
    assert len(str(refused.value).splitlines()) == 1


@SLOW
def test_a_second_study_in_one_output_is_refused(make_study, fitted):
    config = make_study()
    here, there = FORKING.Pipe()
    process = FORKING.Process(target=hold, args=(str(config.output), there, False))
    process.start()
    try:
        assert here.poll(120)
        with pytest.raises(ConfigError, match=r"output: another run is writing to .*study \(process \d+ on "):
            run_quietly(config)
    finally:
        process.kill()
        process.join()
    assert not fitted


# --- smaller studies ----------------------------------------------------------------------------------------------


def test_a_model_that_begins_texts_has_its_beginning_in_each_window(make_study, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer(adds_bos=True).save_pretrained(folder)
    given = []
    from mmpreproj.language.evaluation import scores

    stock = scores.score_text
    monkeypatch.setattr(scores, "score_text", lambda *a, **s: given.append(s["beginning"]) or stock(*a, **s))
    run_quietly(make_study(model=str(folder), arms=("base",)))
    assert given and set(given) == {0}


def test_a_base_in_bf16_is_scored_as_it_was_trained(make_study):
    """The weights on disk are those that the validation text was read with."""
    config = make_study(model={"name": make_study().model.name, "dtype": "bfloat16"}, arms=("pre_projection+skip",))
    config = config.model_copy(update={"learning_rates": (1e-2,)})
    study, _ = run_quietly(config)
    record = next(iter(study.trials.values()))
    inputs = run_module.open_inputs(config, run_module.StudyReporter(run_module.Console(quiet=True), show=False))
    arm = run_module.make_arm("pre_projection+skip", inputs.model, config)
    folder = record.trial.folder(config.records)
    with run_module.on_model(inputs.model, arm, saved=folder) as wrapped:
        text = inputs.texts[record.trial.text]
        assert run_module.validation_perplexity(wrapped, text, config.evaluation) == record.validation_perplexity
        assert {p.dtype for p in wrapped.parameters() if p.requires_grad} == {torch.float32}


def test_a_rate_at_which_training_diverges_is_not_chosen_and_not_tried_again(make_study, fitted):
    study = run_quietly(make_study(arms=(BOTH,), learning_rates=(1e-3, 1e30), seeds=(0,), training__steps=9))[0]
    records = {trial.learning_rate: record for trial, record in study.trials.items()}
    assert records[1e30].validation_perplexity == math.inf and records[1e30].loss is None
    assert {study.chosen_rate(text, BOTH) for text in study.config.texts} == {1e-3}
    done = len(fitted)
    run_quietly(study.config)
    assert len(fitted) == done


def test_an_arm_that_diverges_at_every_rate_ends_a_study_with_the_way_out(make_study):
    with pytest.raises(
        ConfigError,
        match=r"texts\.\w+: pre_projection\+skip diverged at every rate of learning_rates \(1e\+30\); give",
    ):
        run_quietly(make_study(arms=(BOTH,), learning_rates=(1e30,), seeds=(0,), training__steps=9))
