"""The configuration of a study: what it takes, how it is written, and how each mistake is refused."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmpreproj.language.config import (
    EvaluationConfig,
    LanguageLora,
    LanguageModel,
    LanguageOptimizer,
    LanguageTraining,
    SplitNames,
    StudyConfig,
    TaskFile,
    TextSource,
)
from mmpreproj.language.trials import Trial
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.training.config import ConfigError, TrainConfig, find_config, parse_config, read_config, write_config
from mmpreproj.training.config.file import COMMANDS, SHARED

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHIPPED = sorted(CONFIGS.glob("probe_*.yaml"))
MINIMAL = {"model": "some/model", "output": "runs/x", "texts": {"wiki": {"files": "a.txt"}}}
SECTIONS = (
    StudyConfig,
    LanguageModel,
    LanguageLora,
    LanguageTraining,
    LanguageOptimizer,
    EvaluationConfig,
    TaskFile,
    TextSource,
    SplitNames,
)


def parse(**changes):
    return parse_config({**MINIMAL, **changes}, origin="here", kind=StudyConfig)


def refusal(**changes):
    """The message with which a study is refused."""
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    return str(caught.value)


@pytest.fixture
def read(tmp_path):
    def run(values, *overrides):
        path = tmp_path / "study.yaml"
        path.write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False))
        return read_config(path, overrides, kind=StudyConfig)

    return run


# --- the shipped files -----------------------------------------------------------------------------------------------


def test_there_are_shipped_studies():
    assert {path.stem for path in SHIPPED} == {"probe_pythia160m", "probe_pythia410m", "probe_smollm2"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_study_is_read_by_its_name_written_and_read_back_equal(tmp_path, path):
    config = read_config(path.stem, kind=StudyConfig)
    assert config == read_config(path, kind=StudyConfig)
    assert config.adapter == PreProjConfig()
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.training.steps >= 10 * config.optimizer.warmup_steps
    write_config(config, tmp_path / "copy.yaml")
    assert read_config(tmp_path / "copy.yaml", kind=StudyConfig) == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_study_can_be_made_smaller_from_the_command_line(path):
    config = read_config(
        path, ["arms=[base,skip]", "training.steps=3", "texts.x.files=a.txt", "seeds=4"], kind=StudyConfig
    )
    assert (config.arms, config.training.steps, config.seeds) == (("base", "skip"), 3, (4,))
    assert list(config.texts)[-1] == "x"
    assert config.texts["x"] == TextSource(files=("a.txt",))


# --- reading and writing ---------------------------------------------------------------------------------------------


def test_a_model_is_a_name_or_settings():
    assert parse().model == LanguageModel(name="some/model")
    assert parse(model={"name": "a", "gguf_file": "b.gguf"}).model.gguf_file == "b.gguf"
    assert "model: give a hub id or a folder, or settings such as {name: …, dtype: bfloat16} (got 3)" in refusal(
        model=3
    )
    assert "model.name: is empty; give a name" in refusal(model=" ")


def test_one_of_several_may_stand_without_brackets(read):
    config = parse(arms="skip", seeds=7, learning_rates=1e-3, arm_learning_rates={"skip": 1e-2})
    assert (config.arms, config.seeds, config.learning_rates) == (("skip",), (7,), (1e-3,))
    assert config.rates_of("skip") == (1e-2,)
    assert read(MINIMAL, "learning_rates=1e-3", "evaluation.lm_eval=hellaswag").evaluation.lm_eval == ("hellaswag",)


def test_the_order_of_arms_texts_and_rates_is_kept(tmp_path):
    texts = {"z": {"files": "a"}, "a": {"files": "b"}}
    config = parse(arms=["skip", "base", "lora"], texts=texts, learning_rates=[3e-3, 1e-3], seeds=[2, 0])
    write_config(config, tmp_path / "copy.yaml")
    again = read_config(tmp_path / "copy.yaml", kind=StudyConfig)
    for found in (config, again):
        assert (found.arms, list(found.texts)) == (("skip", "base", "lora"), ["z", "a"])
        assert (found.learning_rates, found.seeds) == ((3e-3, 1e-3), (2, 0))


def test_no_value_is_lost_on_the_way_to_a_file_and_back(tmp_path):
    config = parse(
        model={"name": "1e5", "revision": "no", "gguf_file": "007"},
        output=tmp_path / "a: b #c",
        texts={"2024": {"files": ["2e-3", "é 🍎"], "document_separator": "\n\n"}, "no": {"dataset": "null"}},
        arm_learning_rates={"pre_projection+skip": [1e-7, 1e-6, 1e-5]},
        evaluation={"tasks": [{"file": tmp_path / "a.jsonl", "prompt_suffix": " "}, {"name": "1e3", "file": "~/b"}]},
        training={"precision": False},
    )
    write_config(config, tmp_path / "copy.yaml")
    again = read_config(tmp_path / "copy.yaml", kind=StudyConfig)
    assert again == config
    assert isinstance(again.output, Path)
    assert isinstance(again.evaluation.tasks[0].file, Path)
    assert list(yaml.safe_load((tmp_path / "copy.yaml").read_text(encoding="utf-8"))) == list(StudyConfig.model_fields)


def test_one_setting_of_the_optimizer_leaves_the_others_as_they_are_by_default(read):
    assert parse().optimizer.betas == (0.9, 0.95)
    assert parse(optimizer={"warmup_steps": 6}).optimizer.betas == (0.9, 0.95)
    assert read(MINIMAL, "optimizer.name=lion").optimizer == LanguageOptimizer(name="lion")


def test_overrides_reach_tasks_texts_and_arms(read):
    values = {**MINIMAL, "evaluation": {"tasks": [{"file": "a.jsonl"}]}, "learning_rates": [1e-3]}
    config = read(values, "evaluation.tasks.0.name=b", "arm_learning_rates.pre_projection+skip=[2e-3]")
    assert config.evaluation.tasks[0].called == "b"
    assert config.rates_of("pre_projection+skip") == (2e-3,)
    assert config.rates_of("skip") == (1e-3,)
    with pytest.raises(
        ConfigError, match=r"evaluation\.tasks\.0\.limit: unknown key; did you mean 'evaluation.limit'"
    ):
        read(values, "evaluation.tasks.0.limit=3")


def test_an_override_reaches_a_text_that_is_called_by_a_number(read):
    values = {**MINIMAL, "texts": {"2024": {"files": "a.txt"}}}
    assert read(values, "texts.2024.held_out=0.2").texts["2024"].held_out == 0.2


def test_the_records_lie_in_the_output():
    assert parse(output="o").records == Path("o/trials")


# --- which command a file is for -------------------------------------------------------------------------------------


def test_kinds_of_files_are_told_apart_by_keys_that_they_have():
    kinds = {"train": TrainConfig, "probe": StudyConfig}
    assert set(COMMANDS.values()) == set(kinds)
    for key, command in COMMANDS.items():
        for name, kind in kinds.items():
            assert (key in kind.model_fields) == (name == command)
        assert kinds[command].model_fields[key].is_required()
    assert set(TrainConfig.model_fields) & set(StudyConfig.model_fields) == SHARED


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("probe_smollm2", TrainConfig, "has 'texts', so it is for another command; run mmpreproj probe probe_smollm2"),
        ("quickstart", StudyConfig, "has 'data', so it is for another command; run mmpreproj train quickstart"),
    ],
)
def test_a_file_for_another_command_is_named_with_that_command(name, kind, told):
    for overrides in ([], ["arms=[base]"], ["steps=3"]):
        with pytest.raises(ConfigError) as caught:
            read_config(name, overrides, kind=kind)
        assert str(caught.value) == f"{name} {told}"


def test_a_study_with_a_key_of_a_training_is_still_a_study(read):
    with pytest.raises(ConfigError, match="data: unknown key; did you mean 'texts'"):
        read({"model": "m", "output": "o", "data": {"folder": "p"}, "arms": ["base"]})


def test_a_file_that_is_not_there_is_answered_with_those_of_the_command():
    for kind, listed in (
        (StudyConfig, [path.stem for path in SHIPPED]),
        (TrainConfig, sorted(path.stem for path in CONFIGS.glob("*.yaml") if path not in SHIPPED)),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            read_config("nowhere", kind=kind)
        assert str(caught.value).endswith(f"shipped with mmpreproj are {', '.join(listed)}")
        with pytest.raises(FileNotFoundError, match=f"are {', '.join(listed)}$"):
            find_config("nowhere", kind=kind)


# --- unknown keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field", "hint"),
    [
        ({"arm": ["base"]}, "arm", "did you mean 'arms'?"),
        ({"zzz": 1}, "zzz", "keys here: model, output, texts"),
        ({"training": {"stepz": 1}}, "training.stepz", "did you mean 'steps'?"),
        ({"evaluation": {"strid": 1}}, "evaluation.strid", "did you mean 'stride'?"),
        ({"evaluation": {"tasks": [{"file": "a", "nam": "b"}]}}, "evaluation.tasks.0.nam", "did you mean 'name'?"),
        ({"model": {"nam": "m", "name": "m"}}, "model.nam", "did you mean 'name'?"),
        ({"lora": {"rnk": 1}}, "lora.rnk", "did you mean 'rank'?"),
        ({"texts": {"a": {"fils": "x"}}}, "texts.a.fils", "did you mean 'files'?"),
        ({"texts": {"a": {"zzz": "x"}}}, "texts.a.zzz", "keys here: dataset, subset"),
        (
            {"texts": {"a": {"dataset": "x", "splits": {"tran": "b"}}}},
            "texts.a.splits.tran",
            "did you mean 'train'?",
        ),
        ({"adapter": {"expansoin": 1}}, "adapter", "no field 'expansoin'; did you mean 'expansion'?"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(change, field, hint):
    message = refusal(**change)
    assert f"  {field}: " in message
    assert hint in message


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_what_other_tools_call_a_key_leads_to_a_key_that_there_is(section):
    assert not set(section.also_called) & set(section.model_fields)
    for target in section.also_called.values():
        first, *rest = target.split(".")
        assert first in (StudyConfig if rest else section).model_fields
        if rest:
            assert rest[0] in StudyConfig.model_fields[first].annotation.model_fields


def test_what_other_tools_call_a_key_is_answered():
    message = refusal(
        output_dir="o", text={}, lr=1, training={"max_steps": 3, "block_size": 2}, lora={"r": 2, "lora_alpha": 3}
    )
    for told in (
        "output_dir: unknown key; did you mean 'output'?",
        "text: unknown key; did you mean 'texts'?",
        "lr: unknown key; did you mean 'learning_rates'?",
        "training.max_steps: unknown key; did you mean 'steps'?",
        "training.block_size: unknown key; did you mean 'length'?",
        "lora.r: unknown key; did you mean 'rank'?",
        "lora.lora_alpha: unknown key; did you mean 'alpha'?",
    ):
        assert told in message


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["model", "output", "texts"])
def test_what_must_be_given_is_named(field):
    values = {key: value for key, value in MINIMAL.items() if key != field}
    with pytest.raises(ConfigError, match=f"  {field}: missing"):
        parse_config(values, origin="here", kind=StudyConfig)


@pytest.mark.parametrize("field", ["texts", "arms", "seeds", "learning_rates"])
def test_an_empty_list_is_refused(field):
    assert f"{field}: is empty; give one at least" in refusal(**{field: {} if field == "texts" else []})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"arms": ["base", "skip", "base"]}, "arms: 'base' is there twice; remove one"),
        ({"seeds": [0, 1, 1]}, "seeds: 1 is there twice; remove one"),
        ({"seeds": [0, 0.0]}, "seeds: 0 is there twice; remove one"),
        ({"learning_rates": [1e-3, 1e-3]}, "learning_rates: 0.001 is there twice; remove one"),
        ({"arm_learning_rates": {"skip": [1, 2, 1]}}, "arm_learning_rates.skip: 1.0 is there twice; remove one"),
    ],
)
def test_what_is_there_twice_is_named(change, told):
    assert told in refusal(**change)


def test_rates_that_would_share_a_folder_are_refused():
    told = "0.001 and 0.00100000001 would share the folder lr-0.001; give them with six digits at most"
    alike = [1e-3, 0.00100000001]
    assert f"learning_rates: {told}" in refusal(learning_rates=alike)
    message = refusal(learning_rates=[1e-3, 2e-3], arm_learning_rates={"skip": alike})
    assert f"arm_learning_rates.skip: {told}" in message


@given(st.lists(st.floats(1e-9, 1e3), min_size=2, max_size=2))
@settings(max_examples=50, deadline=None)
def test_trials_at_rates_that_are_taken_have_folders_of_their_own(rates):
    def folders():
        return {Trial("a", "skip", rate, 0).folder(Path()) for rate in rates}

    try:
        config = parse(learning_rates=rates)
    except ConfigError:
        assert len(folders()) == 1
    else:
        assert config.learning_rates == tuple(rates)
        assert len(folders()) == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"learning_rates": [float("nan")]}, "learning_rates.0: Input should be a finite number"),
        ({"learning_rates": [float("inf")]}, "learning_rates.0: Input should be a finite number"),
        ({"learning_rates": -1e-3}, "learning_rates.0: Input should be greater than 0 (got -0.001)"),
        ({"learning_rates": 0}, "learning_rates.0: Input should be greater than 0 (got 0)"),
        ({"learning_rates": 1e31}, "learning_rates: too large; give a number of at most 1e+30"),
        ({"learning_rates": [True]}, "learning_rates: give a number, not true or false"),
        ({"learning_rates": True}, "learning_rates: give a number, not true or false"),
        ({"learning_rates": "fast"}, "learning_rates.0: Input should be a valid number"),
        ({"learning_rates": None}, "learning_rates: give a list, such as [a, b] (got null, or nothing"),
        ({"arm_learning_rates": {"skip": [float("inf")] * 3}}, "arm_learning_rates.skip.0: Input should be a finite"),
        ({"arm_learning_rates": {"skip": [1, 2, 0]}}, "arm_learning_rates.skip.2: Input should be greater than 0"),
        ({"arm_learning_rates": {"skip": [True, 2, 3]}}, "arm_learning_rates.skip: give a number, not true or false"),
        ({"arm_learning_rates": {"skip": [1, 2, 1e300]}}, "arm_learning_rates.skip: too large; give a number of at"),
        ({"arm_learning_rates": {"skip": []}}, "arm_learning_rates.skip: is empty; give one at least"),
        ({"arm_learning_rates": {"skp": [1, 2, 3]}}, "arm_learning_rates.skp: Input should be 'base', 'lora'"),
        ({"arm_learning_rates": [1]}, "arm_learning_rates: give settings, such as {key: value}"),
        ({"seeds": -1}, "seeds.0: Input should be greater than or equal to 0 (got -1)"),
        ({"seeds": 2**32}, "seeds.0: Input should be less than 4294967296"),
        ({"seeds": 0.5}, "seeds.0: Input should be a valid integer"),
        ({"seeds": True}, "seeds: give a number, not true or false"),
        ({"arms": ["base", "skp"]}, "arms.1: Input should be 'base', 'lora', 'lora_matched'"),
        ({"arms": "skip+pre_projection"}, "arms.0: Input should be 'base', "),
        ({"arms": {"base": 1}}, "arms: give a list, such as [a, b]"),
        ({"training": {"steps": 0}}, "training.steps: Input should be greater than or equal to 1 (got 0)"),
        ({"training": {"steps": 2**32}}, "training.steps: too large; give a number below 4294967296"),
        ({"training": {"length": 1}}, "training.length: Input should be greater than or equal to 2"),
        ({"training": {"batch_size": 0}}, "training.batch_size: "),
        ({"training": {"micro_batch_size": 0}}, "training.micro_batch_size: "),
        ({"training": {"checkpoint_every": 0}}, "training.checkpoint_every: "),
        ({"training": {"precision": "fp8"}}, "training.precision: Input should be 'no', 'bf16' or 'fp16' (got 'fp8')"),
        ({"training": 60}, "training: give settings, such as {key: value}, or {} for the defaults; keys here: steps"),
        ({"model": {"name": "m", "dtype": "int8"}}, "model.dtype: Input should be 'float32', 'bfloat16' or 'float16'"),
        ({"model": {"dtype": "float32"}}, "model.name: missing"),
        ({"model": {"name": "m", "revision": " "}}, "model.revision: is empty; give a name, or leave it out"),
        ({"model": {"name": "m", "gguf_file": ""}}, "model.gguf_file: is empty; give a name, or leave it out"),
        ({"lora": {"rank": 0}}, "lora.rank: "),
        ({"lora": {"alpha": 0}}, "lora.alpha: Input should be greater than 0"),
        ({"lora": {"dropout": 1}}, "lora.dropout: Input should be less than 1"),
        ({"lora": None}, "lora: give settings, such as {key: value}, or {} for the defaults; keys here: rank"),
        ({"output": ""}, "output: is empty; give a path, such as . for the current folder"),
        ({"output": "a\0b"}, "output: has a NUL character in it"),
        ({"evaluation": {"length": 1}}, "evaluation.length: "),
        ({"evaluation": {"stride": 0}}, "evaluation.stride: "),
        ({"evaluation": {"validation_tokens": 1}}, "evaluation.validation_tokens: "),
        ({"evaluation": {"test_tokens": 1}}, "evaluation.test_tokens: "),
        ({"evaluation": {"limit": 0}}, "evaluation.limit: "),
        ({"evaluation": {"batch_size": 0}}, "evaluation.batch_size: "),
        ({"evaluation": {"resamples": 99}}, "evaluation.resamples: Input should be greater than or equal to 100"),
        ({"evaluation": {"resamples": 10**9}}, "evaluation.resamples: Input should be less than or equal to 1000000"),
        ({"evaluation": {"tasks": "a.jsonl"}}, "evaluation.tasks: give a list, such as [a, b]"),
        ({"evaluation": {"tasks": ["a.jsonl"]}}, "evaluation.tasks.0: give settings, such as {key: value}"),
        ({"evaluation": {"tasks": [{"name": "a"}]}}, "evaluation.tasks.0.file: missing"),
        ({"evaluation": {"tasks": [{"file": " "}]}}, "evaluation.tasks.0.file: is empty; give a path"),
        (
            {"evaluation": {"tasks": [{"file": "a", "kind": "choice"}]}},
            "evaluation.tasks.0.kind: Input should be 'last_word' or 'multiple_choice'",
        ),
        ({"evaluation": {"lm_eval": ["hellaswag", " "]}}, "evaluation.lm_eval: one of them is empty; remove it"),
    ],
)
def test_a_value_of_a_wrong_kind_or_out_of_range_is_named(change, told):
    assert f"  {told}" in refusal(**change)


# --- names of texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".", "..", "", "a b", "a/b", "a\\b", "a.b", "é", "a\n", "~", "x" * 65, " a"])
def test_a_text_whose_name_is_none_for_a_folder_is_refused(name):
    message = refusal(texts={name: {"files": "a.txt"}})
    assert "a text's results lie in a folder of its name; give up to 64 letters, digits, _ and -" in message
    assert f"(got {name!r})" in message
    assert "[key]" not in message


@pytest.mark.parametrize(("name", "place"), [(2024, "2024"), (False, "0"), (None, "None"), (1.5, "1.5")])
def test_a_text_whose_name_is_no_text_is_refused_with_the_way_out(name, place):
    message = refusal(texts={name: {"files": "a.txt"}})
    assert f"  texts.{place}: YAML reads this name as no text; put it in quotes" in message


@pytest.mark.parametrize("name", ["wiki", "wiki-103_raw", "2024", "_", "x" * 64])
def test_names_that_any_disk_takes_are_taken(name):
    assert list(parse(texts={name: {"files": "a.txt"}}).texts) == [name]


def test_texts_whose_names_differ_in_case_alone_are_refused():
    message = refusal(texts={"Wiki": {"files": "a"}, "b": {"files": "a"}, "wiki": {"files": "b"}})
    assert "texts: 'Wiki' and 'wiki' differ in case alone, and share a folder on some disks; rename one" in message


@pytest.mark.parametrize("texts", [{"files": "a.txt"}, {"dataset": "d", "held_out": 0.2}, {"data_files": ["a"]}])
def test_a_text_without_a_name_is_answered_with_the_way_out(texts):
    message = refusal(texts=texts)
    assert "texts: each text has a name, under which its settings are, such as {mine: {files: docs/*.txt}}" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("texts", ["a.txt", ["a.txt"], 3, None])
def test_texts_that_are_no_mapping_are_answered_with_names(texts):
    message = refusal(texts=texts)
    assert "texts: give settings under a name, such as {name: {key: value}}; keys of one: dataset, subset" in message


def test_a_text_may_have_the_name_of_a_setting():
    texts = {"files": {"files": "a.txt"}, "column": TextSource(files=("b.txt",))}
    assert list(parse(texts=texts).texts) == ["files", "column"]


def test_a_fault_inside_a_text_is_named_with_its_place():
    message = refusal(texts={"a": {"files": "x", "held_out": 0.5}, "b": {}, "c": "x.txt"})
    assert "  texts.a.held_out: Input should be less than 0.5 (got 0.5)" in message
    assert "  texts.b: give dataset, a hub id or a folder, or files" in message
    assert "  texts.c: give settings, such as {key: value}" in message


# --- what settings ask of each other ---------------------------------------------------------------------------------


def test_a_stride_leaves_no_tokens_out():
    assert parse(evaluation={"length": 8, "stride": 8}).evaluation.stride == 8
    told = "evaluation: stride 9 would leave tokens out between windows of length 8"
    assert told in refusal(evaluation={"length": 8, "stride": 9})


def test_arms_choose_from_equally_many_rates():
    own = {"skip": [1e-2, 3e-2], "lora": [1e-4, 2e-4]}
    config = parse(learning_rates=[1e-3, 3e-3], arm_learning_rates=own)
    assert (config.rates_of("skip"), config.rates_of("lora_matched")) == ((1e-2, 3e-2), (1e-3, 3e-3))
    message = refusal(learning_rates=[1e-3], arm_learning_rates=own)
    assert "arm_learning_rates.skip: 2 rates, and the other arms choose from 1; give equally many" in message


def test_rates_of_an_arm_that_is_not_compared_do_no_harm():
    assert parse(arms=["base"], arm_learning_rates={"skip": [1, 2, 3]}).arms == ("base",)


def test_the_base_has_no_learning_rates():
    message = refusal(arm_learning_rates={"base": [1, 2, 3]})
    assert "arm_learning_rates.base: the base does not train; leave it out" in message


@pytest.mark.parametrize("settings", [{"learning_rate": 1e-4}, {"learning_rates": {"adapter": 1e-4}}])
def test_the_rate_is_the_trials(settings):
    told = "optimizer: learning_rate is set by each trial; give learning_rates, the list it is from, at the top"
    assert told in refusal(optimizer=settings)


@pytest.mark.parametrize("adapter", [{"positions": {}}, {"mask_padding": True}, {"points": {}}])
def test_parts_of_the_adapter_for_other_models_are_refused(adapter):
    told = "adapter: positions, mask_padding and points are for multimodal models; leave them out"
    assert told in refusal(adapter=adapter)


@pytest.mark.parametrize("adapter", [{"skip": False}, {"pre_projection": False}])
def test_which_parts_there_are_is_the_arms_to_say(adapter):
    told = "adapter: whether there is pre_projection or skip is the arm's to say; leave both out"
    assert told in refusal(adapter=adapter)


# --- names of tasks --------------------------------------------------------------------------------------------------


def test_a_task_is_called_by_its_name_or_its_file():
    assert TaskFile(file="a/arc_easy-v1.2.jsonl").called == "arc_easy-v1.2"
    assert TaskFile(file="a/b c.jsonl", name="b_c").called == "b_c"


@pytest.mark.parametrize("name", ["a/b", "", "a b", "a|b", "é", "x" * 65])
def test_a_name_that_would_not_fit_into_results_is_refused(name):
    message = refusal(evaluation={"tasks": [{"file": "a.jsonl", "name": name}]})
    assert "evaluation.tasks.0.name: give up to 64 letters, digits, _, - and ." in message


@pytest.mark.parametrize(("file", "stem"), [("a/b c.jsonl", "b c"), ("ü.jsonl", "ü"), ("/", "")])
def test_a_file_whose_name_would_not_fit_into_results_needs_one(file, stem):
    message = refusal(evaluation={"tasks": [{"file": file}]})
    assert f"evaluation.tasks.0: the file's name {stem!r} cannot be the task's in results; give name, of" in message


@pytest.mark.parametrize(
    ("evaluation", "told"),
    [
        ({"tasks": [{"file": "x/a.jsonl"}, {"file": "y/a.jsonl"}]}, "two tasks are called 'a'; give one of them, in"),
        ({"tasks": [{"file": "b"}, {"file": "x", "name": "b"}]}, "two tasks are called 'b'; give one of them, in"),
        ({"tasks": [{"file": "arc_easy.jsonl"}], "lm_eval": "arc_easy"}, "two tasks are called 'arc_easy'; give one"),
        ({"lm_eval": ["arc_easy", "arc_easy"]}, "lm_eval: 'arc_easy' is there twice; remove one"),
    ],
)
def test_two_tasks_of_one_name_are_refused(evaluation, told):
    message = refusal(evaluation=evaluation)
    assert "evaluation" in message
    assert told in message


# --- nonsense --------------------------------------------------------------------------------------------------------


KEYS = st.sampled_from(sorted({name for section in SECTIONS for name in section.model_fields} | {"base", "skip", "x"}))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
NONSENSE = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | PLAIN, inner, max_size=4), max_leaves=10
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(KEYS | PLAIN, NONSENSE, max_size=6))
def test_nonsense_is_refused_and_nothing_else_is_raised(values):
    try:
        config = parse_config({**MINIMAL, **values}, origin="here", kind=StudyConfig)
    except ConfigError as error:
        assert str(error).startswith("here cannot be used:\n  ")
    else:
        assert isinstance(config, StudyConfig)
