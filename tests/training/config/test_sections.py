"""The sections' own rules: which settings go together, and what each refusal says."""

import pytest

from mmpreproj.training.config import ConfigError, parse_config
from mmpreproj.training.config.data import NEEDS

MINIMAL = {"model": "some/base", "output": "runs/x", "data": {"folder": "pics"}}
SCRATCH = {"model": {"width": 32, "heads": 2}, "mode": "full"}
TWO = [{"folder": "a"}, {"source": "openmoji"}]


def parse(**changes):
    return parse_config({**MINIMAL, **changes}, origin="here")


def refusal(**changes):
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    return str(caught.value)


# --- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", NEEDS)
def test_each_source_needs_its_field_alone_and_in_a_mix(source):
    field, explanation = NEEDS[source]
    expected = f"source {source!r} needs {field}: {explanation}"
    assert f"data: {expected}" in refusal(data={"source": source})
    assert f"data.mix.1: {expected}" in refusal(data={"mix": [{"folder": "a"}, {"source": source}]})
    assert parse(data={"source": source, field: "x"}).data.source == source


@pytest.mark.parametrize("empty", ["", None])
def test_an_empty_name_of_a_data_set_is_none(empty):
    assert "source 'dataset' needs dataset" in refusal(data={"source": "dataset", "dataset": empty})


def test_one_of_several_names_may_stand_without_brackets():
    data = parse(data={"source": "shards", "shards": "a.tar"}).data
    assert data.shards == ("a.tar",)
    assert parse(validation={"prompts": "a cat"}).validation.prompts == ("a cat",)
    assert parse(lora={"targets": "all-linear"}).lora.targets == ("all-linear",)


def test_sources_are_those_of_the_mix_or_the_data_itself():
    one, several = parse().data, parse(data={"mix": TWO}).data
    assert one.sources == (one,)
    assert [part.source for part in several.sources] == ["folder", "openmoji"]


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"folder": "p"}, "folder"),
        ({"source": "openmoji"}, "source"),
        ({"caption_column": "caption", "repeats": 2}, "caption_column, repeats"),
        ({"weight": 1}, "weight"),
    ],
)
def test_a_mix_names_its_sources_alone(own, named):
    message = refusal(data={"mix": TWO, **own})
    assert f"data: mix names the sources, so {named} belongs into one of them" in message


def test_a_mix_keeps_what_is_done_with_its_pictures():
    data = parse(data={"mix": TWO, "resolution": 256, "flip": 0.5, "held_out": 3}).data
    assert (data.resolution, data.flip, data.held_out) == (256, 0.5, 3)


def test_a_source_in_a_mix_has_no_settings_of_the_whole():
    assert "data.mix.0.resolution: unknown key" in refusal(data={"mix": [{"folder": "p", "resolution": 64}]})
    assert "data.mix.0.mix: unknown key" in refusal(data={"mix": [{"folder": "p", "mix": []}]})


def test_weights_are_given_for_all_sources_or_none():
    weighted = [{"folder": "a", "weight": 1}, {"folder": "b", "weight": 3}]
    assert [part.weight for part in parse(data={"mix": weighted}).data.mix] == [1, 3]
    assert [part.weight for part in parse(data={"mix": TWO}).data.mix] == [None, None]
    assert "data: give each source of mix a weight, or none" in refusal(data={"mix": [weighted[0], *TWO]})


@pytest.mark.parametrize(
    ("field", "value"), [("repeats", 0), ("repeats", -1), ("weight", 0), ("weight", float("inf"))]
)
def test_shares_of_sources_are_above_nothing(field, value):
    assert f"data.mix.0.{field}: " in refusal(data={"mix": [{"folder": "a", field: value}]})


# --- pictures --------------------------------------------------------------------------------------------------------


def test_resolutions_are_all_of_them_and_differ():
    assert parse(data={"folder": "p", "resolution": 64, "more_resolutions": [32, 96]}).data.resolutions == (64, 32, 96)
    for more in ([64], [32, 32], [32, 64]):
        message = refusal(data={"folder": "p", "resolution": 64, "more_resolutions": more})
        assert "data.more_resolutions: the resolutions must differ from each other and from resolution" in message
    assert "data.more_resolutions" in refusal(data={"folder": "p", "more_resolutions": [512]})  # the default


def test_a_fault_in_resolution_is_not_followed_by_one_of_the_others():
    message = refusal(data={"folder": "p", "resolution": 4, "more_resolutions": [64]})
    assert message.count("\n") == 1
    assert "data.resolution: " in message


# --- what trains -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": None, "lora": {}},
        {"adapter": None, "thaw": ["norms"]},
        {"adapter": {}, "lora": {}},
        {"adapter": {}, "thaw": ["norms", "biases"]},
        {"adapter": None, "mode": "full"},
        {"adapter": {}, "mode": "full"},
        {"adapter": None, **SCRATCH},
        SCRATCH,
    ],
)
def test_something_trains_once(changes):
    parse(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"adapter": None}, "mode 'probe' trains what is added to the base, but adapter is null; set adapter: {}"),
        ({"adapter": None, "lora": None, "thaw": []}, "set adapter: {}, lora: {} or mode: full"),
        ({"lora": {}, "thaw": ["norms"]}, "thaw trains weights of the base, which lora leaves as they are"),
        ({"lora": {}, "mode": "full"}, "mode 'full' trains weights of the base, which lora leaves as they are"),
        ({"thaw": ["norms"], "mode": "full"}, "leave thaw out, or use probe"),
        ({**SCRATCH, "mode": "probe"}, "mode 'probe' would leave a new model's random weights as they are"),
        ({**SCRATCH, "mode": "probe", "lora": {}}, "set mode: full"),
        ({"thaw": ["all"]}, "thaw.0: Input should be 'norms' or 'biases' (got 'all')"),
    ],
)
def test_what_would_train_nothing_or_twice_is_refused_with_a_way_out(changes, expected):
    assert expected in refusal(**changes)


# --- clouds ----------------------------------------------------------------------------------------------------------


CLOUDS = {"folder": "b", "points_column": "cloud"}
POINTED = {"points": {}}


@pytest.mark.parametrize(
    ("data", "has_clouds"),
    [
        ({"folder": "p"}, False),
        (CLOUDS, True),
        ({"source": "furniture", "folder": "f"}, True),
        ({"mix": [{"folder": "a"}, CLOUDS]}, True),
        ({"mix": TWO}, False),
    ],
)
def test_points_are_trained_on_where_a_source_has_clouds(data, has_clouds):
    if has_clouds:
        config = parse(adapter=POINTED, data=data)
        assert config.data.has_clouds
        assert config.trains_points
    else:
        assert "the data has no clouds; set data.points_column" in refusal(adapter=POINTED, data=data)


def test_pictures_are_not_mirrored_where_their_clouds_are_not():
    assert "data.flip mirrors pictures" in refusal(adapter=POINTED, data=CLOUDS | {"flip": 0.5})


@pytest.mark.parametrize("adapter", [{}, None])
def test_a_column_of_clouds_that_nothing_trains_on_is_refused_where_it_is(adapter):
    base = {"adapter": adapter, "mode": "full"}
    assert "data.points_column is set, but nothing trains on clouds" in refusal(**base, data=CLOUDS)
    message = refusal(**base, data={"mix": [{"folder": "a"}, CLOUDS]})
    assert "data.mix.1.points_column is set, but nothing trains on clouds; set adapter: {points: {}}" in message


def test_only_a_folder_has_a_column_of_clouds():
    wrong = {"source": "dataset", "dataset": "d", "points_column": "cloud"}
    assert "data.mix.0: points_column is of source 'folder'; source 'dataset'" in refusal(data={"mix": [wrong]})


def test_sources_have_labels_of_their_own():
    mix = [
        {"folder": "a/b"},
        {"source": "openmoji"},
        {"source": "shards", "shards": ["x.tar", "y.tar"]},
        {"folder": "a/b"},
    ]
    assert parse(data={"mix": mix}).data.labels == ("a/b (1)", "openmoji", "x.tar", "a/b (2)")
    assert parse(data={"source": "dataset", "dataset": "me/set"}).data.labels == ("me/set",)
