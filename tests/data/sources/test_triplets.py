"""Pictures with captions and clouds from a folder: what is read, and every way a row can be wrong."""

import json

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from mmpreproj.data.sources.folder import FolderSource
from mmpreproj.data.sources.triplets import TripletFolderSource, TripletSource
from mmpreproj.points.clouds import UnreadableCloudError

CORNERS = np.array([[0, 0, 0], [9, 0, 0], [0, 9, 0], [0, 0, 9]], dtype=np.float32)


def row(name="a.png", **more):
    return {"file_name": name, "text": "a chair", **more}


def write(folder, *rows, clouds=("a.npy",)):
    """Write the rows, their pictures, and the clouds."""
    folder.mkdir(exist_ok=True)
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    for fields in rows:
        Image.new("RGB", (4, 4)).save(folder / fields["file_name"])
    for place, name in enumerate(clouds):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, CORNERS + place)
    return folder


# --- what works ---


def test_each_row_gives_its_picture_its_caption_and_its_cloud(tmp_path):
    write(
        tmp_path,
        {"file_name": "b.png", "text": "a stool", "points": "shapes/b.npy"},
        {"file_name": "a.png", "text": "a chair", "points": "./a.npy"},
        clouds=["a.npy", "shapes/b.npy"],
    )
    source = TripletFolderSource(tmp_path)
    assert source.captions == ["a stool", "a chair"]
    assert source.names == ["b.png", "a.png"]
    assert source.clouds == ["shapes/b.npy", "a.npy"]
    assert source.open(1).size == (4, 4)
    for index, expected in enumerate([CORNERS + 1, CORNERS]):
        cloud = source.cloud(index, 4)
        assert (cloud.shape, cloud.dtype) == ((4, 3), np.float32)
        assert sorted(cloud.tolist()) == sorted(expected.tolist())  # not normalised


def test_it_is_a_source_of_triplets_and_of_pictures(tmp_path):
    source: TripletSource = TripletFolderSource(write(tmp_path, row(points="a.npy")))
    assert isinstance(source, FolderSource)
    assert (len(source), source.unlisted) == (1, 0)
    assert "1 pictures, 1 cloud" in repr(source)


def test_a_row_without_a_cloud_says_so_and_has_none_to_read(tmp_path):
    rows = [row("a.png", points="a.npy"), row("b.png", points=""), row("c.png", points=None), row("d.png")]
    source = TripletFolderSource(write(tmp_path, *rows))
    assert source.has_cloud == [True, False, False, False]
    assert source.clouds == ["a.npy", None, None, None]
    for index in (1, 2, 3):
        with pytest.raises(ValueError, match=rf"{source.names[index]} has no cloud: its row leaves 'points' empty"):
            source.cloud(index, 4)


def test_csv_cells_may_be_empty_or_cut_off(tmp_path):
    write(tmp_path, *(row(f"{letter}.png") for letter in "abc"))
    (tmp_path / "metadata.jsonl").unlink()
    (tmp_path / "metadata.csv").write_text("file_name,text,points\na.png,x,\nb.png,x\nc.png,x,a.npy\n")
    assert TripletFolderSource(tmp_path).has_cloud == [False, False, True]


def test_several_pictures_may_show_one_shape(tmp_path):
    write(tmp_path, row("a.png", points="a.npy"), row("b.png", points="a.npy"))
    assert TripletFolderSource(tmp_path).clouds == ["a.npy", "a.npy"]


def test_another_column_can_be_chosen(tmp_path):
    write(tmp_path, {"file_name": "a.png", "prompt": "oak", "points": "none.npy", "mesh": "a.npy"})
    source = TripletFolderSource(tmp_path, "prompt", "mesh")
    assert (source.captions, source.clouds) == (["oak"], ["a.npy"])


def test_the_seed_decides_which_points_are_taken_and_features_are_passed_on(tmp_path):
    write(tmp_path, row(points="a.npy"))
    table = np.arange(400, dtype=np.float32).reshape(100, 4)
    np.save(tmp_path / "a.npy", table)
    source = TripletFolderSource(tmp_path)
    first, again, other = (source.cloud(0, 10, features=1, seed=seed) for seed in (0, 0, 1))
    assert first.shape == (10, 4)
    assert {tuple(point) for point in first.tolist()} <= {tuple(point) for point in table.tolist()}
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_row_with_a_bad_cloud_keeps_its_picture_and_a_row_with_a_bad_caption_does_not_shift_the_clouds(tmp_path):
    rows = [
        row("a.png", points="gone.npy"),
        {**row("b.png", points="a.npy"), "text": ""},
        row("c.png", points="c.npy"),
    ]
    source = TripletFolderSource(write(tmp_path, *rows, clouds=["a.npy", "c.npy"]), on_error="skip")
    assert source.names == ["a.png", "c.png"]
    assert source.clouds == [None, "c.npy"]
    assert source.has_cloud == [False, True]
    assert {fault.name: fault.reason for fault in source.faults} == {
        "metadata.jsonl, line 2": "the caption is empty",
        "metadata.jsonl, line 1": "the cloud 'gone.npy' is not in the folder",
    }


def test_clouds_may_be_listed_in_parquet(tmp_path):
    write(tmp_path, row("a.png"), row("b.png"))
    (tmp_path / "metadata.jsonl").unlink()
    columns = {"file_name": ["a.png", "b.png"], "text": ["a", "b"], "points": [None, "a.npy"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "metadata.parquet")
    assert TripletFolderSource(tmp_path).clouds == [None, "a.npy"]


def test_a_mesh_is_sampled(tmp_path):
    write(tmp_path, row(points="a.obj"), clouds=[])
    (tmp_path / "a.obj").write_text("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 3\n")
    cloud = TripletFolderSource(tmp_path).cloud(0, 50)
    assert cloud.shape == (50, 3)
    assert (cloud >= 0).all()
    assert (cloud.sum(axis=1) <= 1 + 1e-6).all()


def test_a_damaged_cloud_does_not_stop_construction_and_is_named_when_read(tmp_path):
    source = TripletFolderSource(write(tmp_path, row(points="sub/a.npy"), clouds=["sub/a.npy"]))
    (tmp_path / "sub" / "a.npy").write_text("no cloud")
    with pytest.raises(UnreadableCloudError) as caught:
        source.cloud(0, 4)
    assert caught.value.name == "sub/a.npy"


# --- what is refused at construction ---


def test_a_missing_column_lists_those_there_and_the_nearest(tmp_path):
    write(tmp_path, row(point="a.npy"))
    with pytest.raises(ValueError, match=r"no column 'points' .*'text', 'point'; the nearest is 'point': pass it as"):
        TripletFolderSource(tmp_path)


def test_a_folder_without_clouds_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"metadata\.jsonl has no column 'points' .*: pass it as points_column"):
        TripletFolderSource(write(tmp_path, row()))


@pytest.mark.parametrize("empty", ["", None])
def test_a_column_that_is_empty_in_every_row_is_refused(tmp_path, empty):
    write(tmp_path, row("a.png", points=empty), row("b.png"))
    with pytest.raises(ValueError, match=r"leaves 'points' empty in every row; .*FolderSource"):
        TripletFolderSource(tmp_path)


@pytest.mark.parametrize("bad", [3, ["a.npy"], True, "  "])
def test_what_is_no_path_is_named_with_its_line(tmp_path, bad):
    write(tmp_path, row("a.png", points="a.npy"), row("b.png", points=bad))
    with pytest.raises(ValueError, match=r"metadata\.jsonl, line 2 \('points' is .*expected the path of a cloud"):
        TripletFolderSource(tmp_path)


@pytest.mark.parametrize("path", ["../out.npy", "sub/../../out.npy", "/etc/out.npy", "C:\\out.npy"])
def test_a_path_out_of_the_folder_is_refused_even_if_it_exists(tmp_path, path):
    np.save(tmp_path / "out.npy", CORNERS)
    folder = write(tmp_path / "in", row(points=path))
    with pytest.raises(ValueError, match=r"line 1 \(.* may lead out of .* without '\.\.'"):
        TripletFolderSource(folder)


def test_all_missing_clouds_are_listed_with_their_lines(tmp_path):
    write(tmp_path, row("a.png", points="a.npy"), row("b.png", points="b.npy"), row("c.png", points="sub/c.ply"))
    with pytest.raises(
        ValueError,
        match=r"2 faults: .*line 2 \(the cloud 'b\.npy' is not in the folder\), .*line 3 \(.*'sub/c\.ply' is",
    ):
        TripletFolderSource(tmp_path)


def test_a_long_list_of_missing_clouds_is_cut_to_ten_and_a_count(tmp_path):
    write(tmp_path, *(row(f"{index}.png", points=f"x{index}.npy") for index in range(13)))
    with pytest.raises(
        ValueError, match=r"13 faults: .*line 10 \(.*'x9\.npy' is not in the folder\) and 3 more; nothing"
    ):
        TripletFolderSource(tmp_path)


def test_kinds_without_a_reader_are_listed_with_their_lines_and_the_choices(tmp_path):
    write(tmp_path, row("a.png", points="a.NPY"), row("b.png", points="b.blend"), clouds=["a.npy"])
    (tmp_path / "a.npy").rename(tmp_path / "a.NPY")
    (tmp_path / "b.blend").touch()
    with pytest.raises(ValueError, match=r"line 2 \('b\.blend' is no cloud, expected one of .*\.ply"):
        TripletFolderSource(tmp_path)


def test_what_a_folder_of_pictures_refuses_is_refused_here_too(tmp_path):
    write(tmp_path, row(points="a.npy"))
    (tmp_path / "a.png").unlink()
    with pytest.raises(ValueError, match=r"'a\.png' is not in the folder"):
        TripletFolderSource(tmp_path)
