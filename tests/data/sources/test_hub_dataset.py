"""Pictures through the library `datasets`, from every place it reads; nothing here needs a network."""

import io
import json
import pickle
import sys

import datasets
import pytest
from PIL import Image

from mmpreproj.data.sources.hub_dataset import HubDatasetSource
from mmpreproj.data.sources.pictures import SkippedPicture, UnreadablePictureError


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keep what `datasets` prepares out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def picture(level=0):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (level, 0, 0)).save(file, "PNG")
    return file.getvalue()


def rows(captions=("a", "b"), **more):
    """Return a data set with the captions, and a picture of another red in each row."""
    pictures = [{"bytes": picture(index), "path": None} for index in range(len(captions))]
    table = datasets.Dataset.from_dict({"image": pictures, "text": list(captions), **more})
    return table.cast_column("image", datasets.Image())


def saved(folder, table):
    table.save_to_disk(folder)
    return folder


# --- where data sets are ---


def test_a_split_saved_to_disk_gives_its_rows_as_they_were_stored(tmp_path):
    source = HubDatasetSource(saved(tmp_path / "flowers", rows()))
    assert source.captions == ["a", "b"]
    assert source.names == ["flowers/train#0", "flowers/train#1"]
    assert [source.read(index) for index in (1, 0)] == [picture(1), picture(0)]
    assert source.open(1).getpixel((0, 0)) == (1, 0, 0)
    assert (len(source), source.faults) == (2, ())
    assert "'flowers/train')  # 2 pictures" in repr(source)


def test_of_several_splits_saved_to_disk_the_one_asked_for_is_taken(tmp_path):
    both = datasets.DatasetDict({"train": rows(["a"]), "valid": rows(["b", "c"])})
    folder = saved(tmp_path / "d", both)
    assert HubDatasetSource(str(folder), split="valid").captions == ["b", "c"]
    with pytest.raises(
        ValueError, match=r"d' cannot be loaded: no split 'test', only 'train', 'valid'; name one of them"
    ):
        HubDatasetSource(folder, split="test")


def test_a_split_saved_alone_goes_by_its_own_name(tmp_path):
    rows().to_parquet(tmp_path / "x.parquet")
    files = {"valid": str(tmp_path / "x.parquet")}
    folder = saved(tmp_path / "d", datasets.load_dataset("parquet", data_files=files, split="valid"))
    assert HubDatasetSource(folder, split="valid").names[0] == "d/valid#0"
    with pytest.raises(ValueError, match=r"d' cannot be loaded: it was saved as the one split 'valid'; got 'test'"):
        HubDatasetSource(folder, split="test")


def test_parquet_files_are_read_by_their_builder_with_the_columns_mapped(tmp_path):
    table = rows(["a", "b", "c"]).rename_columns({"image": "jpg", "text": "prompt"})
    table.to_parquet(tmp_path / "x.parquet")
    source = HubDatasetSource(
        "parquet",
        data_files=(str(tmp_path / "*.parquet"),),
        split="train[1:]",
        picture_column="jpg",
        caption_column="prompt",
    )
    assert source.captions == ["b", "c"]
    assert source.names == ["parquet/train[1:]#0", "parquet/train[1:]#1"]
    assert source.read(0) == picture(1)


def test_a_folder_that_the_library_knows_is_read_from_its_files(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.png").write_bytes(picture(7))
    (tmp_path / "train" / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "a"}))
    source = HubDatasetSource(tmp_path)
    assert (source.captions, source.read(0)) == (["a"], picture(7))
    (tmp_path / "train" / "a.png").unlink()
    with pytest.raises(UnreadablePictureError, match="FileNotFoundError"):
        source.read(0)


@pytest.mark.parametrize("kind", ["binary", "struct"])
def test_bytes_that_nobody_declared_a_picture_are_taken_as_one(tmp_path, kind):
    content = {"binary": [picture(3)], "struct": [{"bytes": picture(3), "path": None}]}[kind]
    datasets.Dataset.from_dict({"image": content, "text": ["a"]}).to_parquet(tmp_path / "x.parquet")
    source = HubDatasetSource("parquet", data_files=str(tmp_path / "x.parquet"))
    assert source.read(0) == picture(3)


def test_the_source_can_go_to_another_process(tmp_path):
    source = pickle.loads(pickle.dumps(HubDatasetSource(saved(tmp_path / "d", rows()))))
    assert source.read(1) == picture(1)


# --- rows ---


def test_of_a_list_of_captions_the_first_is_taken(tmp_path):
    assert HubDatasetSource(saved(tmp_path / "d", rows([["a", "b"], ["c"]]))).captions == ["a", "c"]


@pytest.mark.parametrize(
    ("captions", "reason"),
    [
        (["a", None], "the caption is null"),
        (["a", " "], "the caption is empty"),
        ([["a"], []], "the caption is the list [], expected text"),
        ([["a"], [None]], "the caption is null"),
    ],
)
def test_a_row_without_a_caption_is_named_or_left_out(tmp_path, captions, reason):
    folder = saved(tmp_path / "d", rows(captions))
    with pytest.raises(ValueError, match=r"d, split 'train' has 1 fault: d/train#1 \(the caption is .*; correct them"):
        HubDatasetSource(folder)
    source = HubDatasetSource(folder, on_error="skip")
    assert source.names == ["d/train#0"]
    assert source.faults == (SkippedPicture("d/train#1", reason),)


def test_rows_after_one_left_out_keep_their_pictures(tmp_path):
    source = HubDatasetSource(saved(tmp_path / "d", rows(["a", None, "c"])), on_error="skip")
    assert (source.names[1], source.read(1)) == ("d/train#2", picture(2))


def test_captions_that_are_no_text_at_all_are_refused(tmp_path):
    folder = saved(tmp_path / "d", rows([1, 2]))
    with pytest.raises(ValueError, match=r"2 faults: d/train#0 \(the caption is the int 1.*; nothing usable is left"):
        HubDatasetSource(folder, on_error="skip")


def test_a_row_without_a_picture_is_named_when_read(tmp_path):
    pictures = [None, {"bytes": None, "path": "/etc/passwd"}, {"bytes": b"", "path": None}]
    table = datasets.Dataset.from_dict({"image": pictures, "text": ["a", "b", "c"]})
    table.to_parquet(tmp_path / "x.parquet")  # `save_to_disk` would store the file behind a path
    source = HubDatasetSource("parquet", data_files=str(tmp_path / "x.parquet"))
    with pytest.raises(UnreadablePictureError, match="'parquet/train#0': the row has no picture"):
        source.read(0)
    with pytest.raises(UnreadablePictureError, match="'parquet/train#1': /etc/passwd is no picture file"):
        source.read(1)
    with pytest.raises(UnreadablePictureError, match="'parquet/train#2': the file is empty"):
        source.open(2)


# --- what is refused ---


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            "picture_column",
            r"no column 'x' with the pictures, only 'image', 'text'; the nearest is '.*': pass it as pict",
        ),
        (
            "caption_column",
            r"no column 'x' with the captions, only 'image', 'text'; the nearest is '.*': pass it as capt",
        ),
    ],
)
def test_a_missing_column_lists_those_there(tmp_path, column, message):
    with pytest.raises(ValueError, match=message):
        HubDatasetSource(saved(tmp_path / "d", rows()), **{column: "x"})


def test_a_column_without_pictures_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the column 'text' holds Value\('string'\); expected pictures"):
        HubDatasetSource(saved(tmp_path / "d", rows()), picture_column="text")


def test_a_data_set_without_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"d' cannot be loaded: it was saved without rows"):
        HubDatasetSource(saved(tmp_path / "d", rows().select([])))
    rows().to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"'parquet' cannot be loaded: Instruction .* corresponds to no data"):
        HubDatasetSource("parquet", data_files=str(tmp_path / "x.parquet"), split="train[:0]")


def test_an_unknown_split_of_files_lists_those_there(tmp_path):
    rows().to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"'parquet' cannot be loaded: Unknown split \"valid\".*\['train'\]"):
        HubDatasetSource("parquet", data_files=str(tmp_path / "x.parquet"), split="valid")


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="'parquet' cannot be loaded"):
        HubDatasetSource("parquet", data_files=str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("name", ["nobody/flowers", "./nowhere", "/nowhere/at/all"])
def test_what_is_neither_in_the_cache_nor_on_disk_is_refused_with_the_ways_out(name):
    with pytest.raises(FileNotFoundError, match=rf"the data set '{name}' cannot be loaded: .*load it once with one"):
        HubDatasetSource(name)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'parquet' cannot be loaded: .*gone\.parquet"):
        HubDatasetSource("parquet", data_files=str(tmp_path / "gone.parquet"))


def test_a_missing_library_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # what Python itself does for a module not to be imported
    with pytest.raises(ImportError, match=r"needs the package 'datasets'; run: pip install 'mmpreproj\[data\]'"):
        HubDatasetSource("owner/flowers")


def test_an_unknown_way_to_treat_errors_is_refused():
    with pytest.raises(ValueError, match="on_error is ''"):
        HubDatasetSource("owner/flowers", on_error="")
