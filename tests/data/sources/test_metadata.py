"""Metadata files of each kind: how their rows are read, and every way such a file can be wrong."""

import csv
import json
import sys

import pyarrow
import pytest
from folders_kit import row, write_jsonl, write_pictures
from PIL import Image
from pyarrow import parquet

from mmpreproj.data.sources.folder import FolderSource
from mmpreproj.data.sources.pictures import SkippedPicture


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


def test_parquet_metadata_is_read_as_it_is_typed(tmp_path):
    write_pictures(tmp_path, "a.png", "b.png", "c.png")
    columns = {
        "file_name": ["b.png", "a.png", "c.png"],
        "text": pyarrow.array(["two", "007", "two"]).dictionary_encode(),
        "score": [1.5, None, 2.0],
        "thumbnail": [b"x", b"y", b"z"],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "metadata.parquet")
    source = FolderSource(tmp_path)
    assert (source.names, source.captions) == (["b.png", "a.png", "c.png"], ["two", "007", "two"])
    with pytest.raises(
        ValueError, match=r"3 faults: metadata\.parquet, row 0 \(the caption is the float 1\.5, expected"
    ):
        FolderSource(tmp_path, "score")


def test_bad_csv_rows_are_left_out_and_those_after_them_are_read(tmp_path):
    write_pictures(tmp_path, "a.png", "b.png", "c.png", "d.png")
    lines = ["file_name,text", 'a.png,"two\nlines"', "b.png,red, and big", 'b.png,"bad"quote', "c.png", "d.png,d"]
    (tmp_path / "metadata.csv").write_text("\n".join(lines) + "\n")
    source = FolderSource(tmp_path, on_error="skip")
    assert (source.names, source.captions) == (["a.png", "d.png"], ["two\nlines", "d"])
    assert [fault.name.split(", ")[1] for fault in source.faults] == ["line 4", "line 5", "line 6"]
    assert [fault.reason.split(";")[0] for fault in source.faults] == [
        "more fields than the header has columns",
        "',' expected after '\"'",
        "the caption is null",
    ]
    assert source.unlisted == 2


def test_null_rows_of_parquet_are_left_out_by_row(tmp_path):
    write_pictures(tmp_path, "a.png", "b.png")
    columns = {"file_name": ["a.png", None, "b.png"], "text": ["a", "b", None]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "metadata.parquet")
    source = FolderSource(tmp_path, on_error="skip")
    assert source.names == ["a.png"]
    assert source.faults == (
        SkippedPicture("metadata.parquet, row 1", "the row has no 'file_name': it is None"),
        SkippedPicture("metadata.parquet, row 2", "the caption is null"),
    )


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


def test_a_csv_header_that_names_a_column_twice_is_refused(tmp_path):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text("file_name,text,text\na.png,a,b\n")
    with pytest.raises(ValueError, match=r"metadata\.csv has two columns 'text'; rename or remove one"):
        FolderSource(tmp_path)


def test_a_csv_header_that_cannot_be_read_is_refused(tmp_path):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text('"file"_name,text\na.png,a\n')
    with pytest.raises(ValueError, match=r"metadata\.csv: the header cannot be read: .*; check its quotes"):
        FolderSource(tmp_path)


def test_a_damaged_parquet_file_is_refused(tmp_path):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "metadata.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"metadata\.parquet cannot be read as Parquet \(.*\); write it again"):
        FolderSource(tmp_path)


def test_parquet_that_holds_the_pictures_themselves_is_pointed_to_the_source_for_it(tmp_path):
    write_pictures(tmp_path, "a.png")
    columns = {"image": [{"bytes": b"x", "path": "a.png"}], "text": ["a"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "metadata.parquet")
    with pytest.raises(ValueError, match=r"holds the pictures themselves in its column 'image'.*HubDatasetSource"):
        FolderSource(tmp_path)


def test_parquet_without_its_reader_is_refused_with_the_way_to_install_it(tmp_path, monkeypatch):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "metadata.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what Python itself does for a module not to be imported
    with pytest.raises(
        ImportError, match=r"metadata\.parquet needs .*'pyarrow'; run: pip install 'mmpreproj\[data\]'"
    ):
        FolderSource(tmp_path)


@pytest.mark.parametrize("line", ['{"file_name": "b.png", "text": ', "b.png,a tulip"])
def test_a_broken_json_line_is_named(tmp_path, line):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(), line)
    with pytest.raises(ValueError, match=r"1 fault: metadata\.jsonl, line 2 \(broken JSON, .* at column \d+"):
        FolderSource(tmp_path)


def test_a_json_line_that_is_no_object_is_named(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, row(), '["b.png", "a tulip"]')
    with pytest.raises(ValueError, match=r"line 2 \(got a list, expected one object a line\)"):
        FolderSource(tmp_path)


def test_an_unquoted_comma_in_a_csv_caption_is_named(tmp_path):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text('file_name,text\n\na.png,"two\nlines"\nb.png,red, and big\n')
    with pytest.raises(ValueError, match=r"metadata\.csv, line 5 \(more fields .* double quotes"):
        FolderSource(tmp_path)


def test_an_unclosed_quote_in_csv_is_named(tmp_path):
    write_pictures(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text('file_name,text\na.png,a rose\nb.png,"a tulip\n\n')
    with pytest.raises(ValueError, match=r"metadata\.csv, lines 3 to 4 \(unexpected end of data; check the quotes"):
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
        match=r"no column 'caption' with the captions, only 'file_name', 'width', 'captions'; .* is 'captions': pass",
    ):
        FolderSource(tmp_path, "caption")


def test_metadata_with_file_names_only_is_refused(tmp_path):
    write_pictures(tmp_path, "a.png")
    write_jsonl(tmp_path, {"file_name": "a.png"})
    with pytest.raises(ValueError, match="no column 'text' with the captions, only 'file_name'; add it"):
        FolderSource(tmp_path)


def test_a_csv_row_cut_short_has_no_caption(tmp_path):
    write_pictures(tmp_path, "a.png", "b.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,a rose\nb.png\n")
    with pytest.raises(ValueError, match=r"line 3 \(the caption is null\)"):
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
