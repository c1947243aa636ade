"""Folders with metadata: which pictures and captions they give, and every way a folder or a row can be wrong."""

import os

import pytest
from bad_pictures_kit import TOO_SMALL, write_bad_folder
from folders_kit import BLUE, RED, row, write_jsonl, write_pictures

from mmpreproj.data.sources.folder import FolderSource, open_folder
from mmpreproj.data.sources.pictures import UnreadablePictureError
from mmpreproj.data.sources.sidecars import SidecarSource

# What works


def test_jsonl_gives_captions_and_paths_in_the_order_of_the_metadata(tmp_path):
    write_pictures(tmp_path, "z.png")
    write_pictures(tmp_path, "sub/deep/a.png", colour=BLUE)
    write_jsonl(tmp_path, row("z.png", "red"), "", row("sub/deep/a.png", "blue 🌹\u2028 line"))
    source = FolderSource(tmp_path)
    assert source.names == ["z.png", "sub/deep/a.png"]
    assert source.captions == ["red", "blue 🌹\u2028 line"]
    assert source.open(0).getpixel((0, 0)) == RED
    assert source.open(1).getpixel((0, 0)) == BLUE
    assert len(source) == 2


def test_another_caption_column_can_be_chosen(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(prompt="a tulip"))
    assert FolderSource(str(tmp_path), "prompt").captions == ["a tulip"]


def test_pictures_that_the_metadata_omits_are_counted_and_ignored(tmp_path):
    write_pictures(tmp_path, "a.png", "b.jpg", "sub/c.PNG", ".hidden.png")
    (tmp_path / "notes.txt").write_text("no picture")
    write_jsonl(tmp_path, row("./a.png"))
    source = FolderSource(tmp_path)
    assert source.names == ["a.png"]
    assert source.unlisted == 2


def test_pictures_that_a_run_has_left_are_not_counted_but_may_be_listed(tmp_path):
    write_pictures(tmp_path, "a.png", "run/loss.png", "run/previews/pictures-000001.png")
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "run" / name).write_text("")
    write_jsonl(tmp_path, row("a.png"), row("run/previews/pictures-000001.png"))
    source = FolderSource(tmp_path)
    assert source.names == ["a.png", "run/previews/pictures-000001.png"]
    assert (source.unlisted, source.runs) == (0, (str(tmp_path / "run"),))


def test_the_metadata_of_today_is_read_not_that_of_yesterday(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(text="old"))
    before = FolderSource(tmp_path)
    write_jsonl(tmp_path, row(text="new"))
    assert (before.captions, FolderSource(tmp_path).captions) == (["old"], ["new"])


def test_nothing_is_written_into_the_folder(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row())
    before = sorted(os.listdir(tmp_path))
    FolderSource(tmp_path).open(0)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_damaged_picture_does_not_stop_construction_and_is_named_when_opened(tmp_path):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.png").write_text("no picture")
    write_jsonl(tmp_path, row(), row("sub/b.png"))
    source = FolderSource(tmp_path)
    assert source.read(1) == b"no picture"
    with pytest.raises(UnreadablePictureError, match=r"sub/b\.png"):
        source.open(1)
    (tmp_path / "a.png").unlink()
    with pytest.raises(UnreadablePictureError, match=r"a\.png.*FileNotFoundError"):
        source.read(0)


# Leaving out what is unusable


def test_every_kind_of_bad_row_and_picture_is_listed_with_its_reason_and_the_rest_is_read(tmp_path):
    expected = write_bad_folder(tmp_path / "in", good=28)
    source = FolderSource(tmp_path / "in", on_error="skip")
    found = {fault.name: fault.reason for fault in source.faults}
    readable = set()
    for index, name in enumerate(source.names):
        try:
            source.open(index)
            readable.add(name)
        except UnreadablePictureError as error:
            found[error.name] = error.reason
    assert len(readable) == 28 + 1
    assert expected.pop(TOO_SMALL) == "small"
    assert found.keys() == expected.keys()
    assert [name for name, word in expected.items() if word not in found[name]] == []


def test_every_kind_of_bad_row_is_counted_in_one_error_that_names_the_first(tmp_path):
    write_bad_folder(tmp_path / "in", good=28)
    with pytest.raises(
        ValueError, match=r"in has 20 faults: .*line \d+ \(the caption is null\).* and 10 more; correct"
    ):
        FolderSource(tmp_path / "in")


def test_a_row_that_was_left_out_does_not_take_its_picture_with_it(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(text=""), row(text="a rose"))
    source = FolderSource(tmp_path, on_error="skip")
    assert (source.captions, [fault.name for fault in source.faults]) == (["a rose"], ["metadata.jsonl, line 1"])


@pytest.mark.parametrize("lines", [[row(text=None), row("b.png")], ["{", "["]])
def test_skipping_everything_is_refused_with_the_reasons(tmp_path, lines):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, *lines)
    with pytest.raises(ValueError, match=r"has 2 faults: metadata\.jsonl, line 1 .*; nothing usable is left"):
        FolderSource(tmp_path, on_error="skip")


@pytest.mark.parametrize("content", [b"file_name,caption\na.png,x\n", "file_name,text\na.png,é\n".encode("latin-1")])
def test_what_is_wrong_with_the_whole_is_never_skipped(tmp_path, content):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"metadata\.csv (has no column 'text'|is not UTF-8)"):
        FolderSource(tmp_path, on_error="skip")


def test_an_unknown_way_to_treat_errors_is_refused(tmp_path):
    with pytest.raises(ValueError, match="on_error is 'ignore'; expected 'raise', or 'skip'"):
        FolderSource(tmp_path, on_error="ignore")


# open_folder


def test_a_folder_is_opened_by_its_metadata_first(tmp_path):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "a.txt").write_text("beside")
    write_jsonl(tmp_path, row(prompt="listed"), row("b.png"))
    source = open_folder(tmp_path, caption_column="prompt", on_error="skip")
    assert isinstance(source, FolderSource)
    assert (source.captions, len(source.faults)) == (["listed"], 1)


@pytest.mark.parametrize("extension", [".txt", ".caption"])
def test_a_folder_without_metadata_is_opened_by_the_texts_beside_its_pictures(tmp_path, extension):
    write_pictures(tmp_path, "a.png", "b.png")
    (tmp_path / f"a{extension}").write_text("beside")
    (tmp_path / "notes.txt").write_text("no caption")
    source = open_folder(str(tmp_path), on_error="skip")
    assert isinstance(source, SidecarSource)
    assert (source.captions, [fault.name for fault in source.faults]) == (["beside"], ["b.png"])
    with pytest.raises(ValueError, match=rf"b\.png \(there is no b{extension}"):
        open_folder(tmp_path)


def test_two_kinds_of_texts_beside_pictures_are_refused(tmp_path):
    write_pictures(tmp_path, "a.png", "b.png")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.caption").write_text("b")
    with pytest.raises(ValueError, match=r"holds both \.txt and \.caption files .*; keep one kind"):
        open_folder(tmp_path)


@pytest.mark.parametrize("opened", [open_folder, FolderSource])
def test_pictures_without_any_captions_are_refused_with_both_ways_to_give_them(tmp_path, opened):
    write_pictures(tmp_path, "sub/a.png")
    (tmp_path / "notes.txt").write_text("no caption")
    with pytest.raises(
        FileNotFoundError, match=r'1 picture but no metadata.*"file_name": "sub/a\.png".*such as sub/a\.txt'
    ):
        opened(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        opened(tmp_path / "nowhere")


# The folder and its metadata file


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        FolderSource(tmp_path / "nowhere")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    write_pictures(tmp_path, "a.png")
    with pytest.raises(ValueError, match=r"a\.png is a file; expected the folder"):
        FolderSource(tmp_path / "a.png")


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no pictures in {tmp_path}"):
        FolderSource(tmp_path)


def test_pictures_without_metadata_are_refused_with_an_example_line(tmp_path):
    write_pictures(tmp_path, "a.png", "sub/b.png")
    with pytest.raises(
        FileNotFoundError, match=r'2 pictures but no metadata.*\{"file_name": "a\.png", "text": ".*"\}'
    ):
        FolderSource(tmp_path)


def test_metadata_one_folder_down_is_pointed_out(tmp_path):
    write_pictures(tmp_path, "train/a.png")
    write_jsonl(tmp_path / "train", row())
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'train'} does; pass that folder"):
        FolderSource(tmp_path)


def test_two_metadata_files_are_refused(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row())
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,other\n")
    for on_error in ("raise", "skip"):
        with pytest.raises(ValueError, match=r"both metadata\.jsonl and metadata\.csv; keep one"):
            FolderSource(tmp_path, on_error=on_error)


# Its rows


@pytest.mark.parametrize("bad", [{"text": "a tulip"}, row(name=None), row(name=""), row(name=3)])
def test_a_row_without_a_file_name_is_named(tmp_path, bad):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(), bad)
    with pytest.raises(ValueError, match=r"metadata\.jsonl, line 2 \(the row has no 'file_name': it is "):
        FolderSource(tmp_path)


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (row("b.png", None), "null"),
        (row("b.png", ""), "empty"),
        (row("b.png", " \n"), "empty"),
        (row("b.png", 3), "the int 3"),
        (row("b.png", ["a"]), "the list"),
        ({"file_name": "b.png"}, "the row has no 'text'"),
    ],
)
def test_a_caption_that_is_no_text_is_named_with_its_line(tmp_path, bad, fault):
    write_pictures(tmp_path, "a.png", "b.png")
    write_jsonl(tmp_path, row(), bad)
    with pytest.raises(ValueError, match=rf"1 fault: metadata\.jsonl, line 2 \(.*{fault}"):
        FolderSource(tmp_path)


# Its files


def test_all_missing_files_are_listed(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(), row("b.png"), row("sub/c.png"))
    with pytest.raises(
        ValueError, match=r"2 faults: .*line 2 \('b\.png' is not in the folder\), .*line 3 \('sub/c\.png' is not in"
    ):
        FolderSource(tmp_path)


def test_a_long_list_of_missing_files_is_cut_to_ten_and_a_count(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, *(row(f"{index}.png") for index in range(13)))
    with pytest.raises(
        ValueError, match=r"13 faults: .*'9\.png' is not in the folder\) and 3 more; nothing"
    ) as caught:
        FolderSource(tmp_path)
    assert "'10.png'" not in str(caught.value)


@pytest.mark.parametrize("name", ["../out.png", "sub/../../out.png", "/etc/out.png", "C:\\out.png", "C:/out.png"])
def test_a_path_out_of_the_folder_is_refused_even_if_it_exists(tmp_path, name):
    write_pictures(tmp_path, "out.png", "in/sub/a.png")
    write_jsonl(tmp_path / "in", row(name))
    with pytest.raises(ValueError, match=r"line 1 \(.* may lead out of .* without '\.\.'"):
        FolderSource(tmp_path / "in")


@pytest.mark.parametrize("again", ["a.png", "./a.png"])
def test_a_file_listed_twice_is_refused_with_both_lines(tmp_path, again):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(), "", row(again, "a tulip"))
    with pytest.raises(ValueError, match=r"line 3 \('a\.png' is already listed in metadata\.jsonl, line 1\)"):
        FolderSource(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("notes.txt", r"'notes\.txt' is no picture; expected one of \.avif"),
        (".hidden.png", "hidden"),
        (".git/a.png", "hidden"),
        ("__MACOSX/a.png", "resource forks"),
    ],
)
def test_only_picture_files_are_taken_even_if_others_are_listed(tmp_path, name, reason):
    write_pictures(tmp_path, "a.png", ".hidden.png", ".git/a.png", "__MACOSX/a.png")
    (tmp_path / "notes.txt").write_text("no picture")
    write_jsonl(tmp_path, row(), row(name))
    with pytest.raises(ValueError, match=rf"line 2 \(.*{reason}"):
        FolderSource(tmp_path)
    assert FolderSource(tmp_path, on_error="skip").unlisted == 0
