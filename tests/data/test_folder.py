import csv
import json
import os

import pytest
from PIL import Image

from mmpreproj.data.folder import FolderSource
from mmpreproj.data.pictures import UnreadablePictureError, read_pictures

RED, BLUE = (255, 0, 0), (0, 0, 255)


def write_pictures(folder, *names, colour=RED):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), colour).save(folder / name)


def write_jsonl(folder, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def row(name="a.png", text="a rose", **more):
    return {"file_name": name, "text": text, **more}


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


def test_csv_captions_keep_quotes_commas_newlines_emoji_and_leading_zeros(tmp_path):
    captions = ['say "hi", please', "two\nlines", "🍎 apple", "None", "007"]
    names = [f"{index}.png" for index in range(len(captions))]
    write_pictures(tmp_path, *names)
    with (tmp_path / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file_name", "text"), *zip(names, captions, strict=True)])
    assert FolderSource(tmp_path).captions == captions


@pytest.mark.parametrize(
    ("name", "text"),
    [("metadata.jsonl", '{"file_name": "a.png", "text": "é"}'), ("metadata.csv", "file_name,text\r\na.png,é\r\n")],
)
def test_a_byte_order_mark_is_no_part_of_the_metadata(tmp_path, name, text):
    write_pictures(tmp_path, "a.png")
    (tmp_path / name).write_bytes(text.encode("utf-8-sig"))
    assert FolderSource(tmp_path).captions == ["é"]


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
    with pytest.raises(UnreadablePictureError, match=r"sub/b\.png"):
        source.open(1)
    skipped = []
    assert [indices for indices, _ in read_pictures(source, 4, skipped=skipped)] == [[0]]
    assert [picture.name for picture in skipped] == ["sub/b.png"]


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
    with pytest.raises(ValueError, match=r"both metadata\.jsonl and metadata\.csv; keep one"):
        FolderSource(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [("metadata.jsonl", ""), ("metadata.jsonl", "\n\n"), ("metadata.csv", ""), ("metadata.csv", "file_name,text\n")],
)
def test_metadata_without_rows_is_refused(tmp_path, name, text):
    write_pictures(tmp_path, "a.png")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} is empty; expected one row a picture"):
        FolderSource(tmp_path)


def test_metadata_in_another_encoding_is_refused(tmp_path):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_bytes("file_name,text\na.png,é\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"metadata\.csv is not UTF-8 .* save it as UTF-8"):
        FolderSource(tmp_path)


# Its rows


@pytest.mark.parametrize("line", ['{"file_name": "b.png", "text": ', "b.png,a tulip"])
def test_a_broken_json_line_is_named(tmp_path, line):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(), line)
    with pytest.raises(ValueError, match=r"metadata\.jsonl, line 2: broken JSON"):
        FolderSource(tmp_path)


def test_a_json_line_that_is_no_object_is_named(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(), '["b.png", "a tulip"]')
    with pytest.raises(ValueError, match=r"line 2: got a list; expected one object a line"):
        FolderSource(tmp_path)


def test_an_unquoted_comma_in_a_csv_caption_is_named(tmp_path):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text('file_name,text\n\na.png,"two\nlines"\nb.png,red, and big\n')
    with pytest.raises(ValueError, match=r"metadata\.csv, line 5: more fields .* double quotes"):
        FolderSource(tmp_path)


def test_an_unclosed_quote_in_csv_is_named(tmp_path):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text('file_name,text\na.png,a rose\nb.png,"a tulip\n\n')
    with pytest.raises(ValueError, match=r"metadata\.csv, in the row from line 3: .*check its quotes"):
        FolderSource(tmp_path)


@pytest.mark.parametrize("bad", [{"text": "a tulip"}, row(name=None), row(name=""), row(name=3)])
def test_a_row_without_a_file_name_is_named(tmp_path, bad):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(), bad)
    with pytest.raises(ValueError, match=r"metadata\.jsonl, line 2: the row has no 'file_name'"):
        FolderSource(tmp_path)


def test_metadata_without_the_file_name_column_is_refused(tmp_path):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text("file,text\na.png,a rose\n")
    with pytest.raises(ValueError, match=r"no column 'file_name', only 'file', 'text'"):
        FolderSource(tmp_path)


def test_a_missing_caption_column_lists_those_there_and_the_nearest(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, {"file_name": "a.png", "width": 4, "captions": "a rose"})
    with pytest.raises(
        ValueError,
        match="no caption column 'caption', only 'file_name', 'width', 'captions'; the nearest is 'captions'",
    ):
        FolderSource(tmp_path, "caption")


def test_metadata_with_file_names_only_is_refused(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, {"file_name": "a.png"})
    with pytest.raises(ValueError, match="no caption column 'text', only 'file_name'; add the captions"):
        FolderSource(tmp_path)


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (row("b.png", None), "null"),
        (row("b.png", ""), "empty"),
        (row("b.png", " \n"), "empty"),
        (row("b.png", 3), "the int 3"),
        (row("b.png", ["a"]), "the list"),
        ({"file_name": "b.png"}, "not there"),
    ],
)
def test_a_caption_that_is_no_text_is_named_with_its_line(tmp_path, bad, fault):
    write_pictures(tmp_path, "a.png", "b.png")
    write_jsonl(tmp_path, row(), bad)
    with pytest.raises(ValueError, match=rf"1 unusable caption in 'text': line 2 \({fault}.*\); expected text"):
        FolderSource(tmp_path)


def test_a_csv_row_cut_short_has_no_caption(tmp_path):
    write_pictures(tmp_path, "a.png", "b.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,a rose\nb.png\n")
    with pytest.raises(ValueError, match=r"line 3 \(null\)"):
        FolderSource(tmp_path)


# Its files


def test_all_missing_files_are_listed(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(), row("b.png"), row("sub/c.png"))
    with pytest.raises(FileNotFoundError, match=r"lists 2 files that .* does not hold: 'b\.png', 'sub/c\.png'; add"):
        FolderSource(tmp_path)


def test_a_long_list_of_missing_files_is_cut_to_ten_and_a_count(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, *(row(f"{index}.png") for index in range(13)))
    with pytest.raises(FileNotFoundError, match=r"lists 13 files .* '9\.png' and 3 more; add") as caught:
        FolderSource(tmp_path)
    assert "'10.png'" not in str(caught.value)


@pytest.mark.parametrize("name", ["../out.png", "sub/../../out.png", "/etc/out.png", "C:\\out.png", "C:/out.png"])
def test_a_path_out_of_the_folder_is_refused_even_if_it_exists(tmp_path, name):
    write_pictures(tmp_path, "out.png", "in/sub/a.png")
    write_jsonl(tmp_path / "in", row(name))
    with pytest.raises(ValueError, match=r"line 1: file_name .* may lead out of .* without '..'"):
        FolderSource(tmp_path / "in")


@pytest.mark.parametrize("again", ["a.png", "./a.png"])
def test_a_file_listed_twice_is_refused_with_both_lines(tmp_path, again):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(), "", row(again, "a tulip"))
    with pytest.raises(ValueError, match=r"line 3: file_name 'a\.png' is already listed in line 1; keep one"):
        FolderSource(tmp_path)


def test_pictures_may_be_listed_as_image_where_there_is_no_file_name(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"image": "a.png", "text": "a square"}))
    source = FolderSource(tmp_path)
    assert (source.names, source.captions) == (["a.png"], ["a square"])
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "image": "what it shows"}))
    assert FolderSource(tmp_path, caption_column="image").captions == ["what it shows"]
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"picture": "a.png", "text": "a square"}))
    with pytest.raises(ValueError, match="no column 'file_name', only 'picture', 'text'"):
        FolderSource(tmp_path)
