"""Several sources as one: whose picture is whose, and what each is called."""

import json
import pickle

import numpy as np
import pytest
from PIL import Image

from mmpreproj.data.sources.folder import FolderSource
from mmpreproj.data.sources.mix import MixedSource
from mmpreproj.data.sources.pictures import SkippedPicture, UnreadablePictureError
from mmpreproj.data.sources.triplets import TripletFolderSource, TripletSource
from mmpreproj.points.clouds import UnreadableCloudError


def folder_of(folder, *names, level=0, clouds=()):
    """Write pictures captioned by folder and name, the first ones with clouds."""
    folder.mkdir()
    rows = []
    for index, name in enumerate(names):
        Image.new("RGB", (4, 4), (level + index, 0, 0)).save(folder / name)
        cloud = {"points": clouds[index]} if index < len(clouds) else {}
        rows.append({"file_name": name, "text": f"{folder.name} {name}", **cloud})
    for place, cloud in enumerate(clouds):
        np.save(folder / cloud, (level + place) * np.eye(4, 3, dtype=np.float32))
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return TripletFolderSource(folder) if clouds else FolderSource(folder)


def red(source, index):
    return source.open(index).getpixel((0, 0))[0]


def test_sources_follow_each_other_and_know_their_parts(tmp_path):
    parts = [folder_of(tmp_path / "x", "a.png", "b.png"), folder_of(tmp_path / "y", "c.png", level=10)]
    source = MixedSource(parts)
    assert source.sources == parts
    assert source.parts == [range(0, 2), range(2, 3)]
    assert source.names == ["a.png", "b.png", "c.png"]
    assert source.captions == ["x a.png", "x b.png", "y c.png"]
    assert [red(source, index) for index in (2, 0, 1)] == [10, 0, 1]
    assert source.read(2) == parts[1].read(0)
    assert len(source) == 3
    assert "FolderSource" in repr(source)


def test_names_are_labelled_where_two_sources_share_one(tmp_path):
    parts = [folder_of(tmp_path / "x", "a.png", "b.png"), folder_of(tmp_path / "y", "a.png")]
    assert MixedSource(parts).names == ["1: a.png", "1: b.png", "2: a.png"]
    assert MixedSource(parts, labels=["roses", "tulips"]).names == ["roses: a.png", "roses: b.png", "tulips: a.png"]


def test_an_error_of_a_part_goes_by_the_name_in_the_mix(tmp_path):
    source = MixedSource([folder_of(tmp_path / name, "a.png", clouds=["a.npy"]) for name in "xy"])
    (tmp_path / "y" / "a.png").unlink()
    (tmp_path / "y" / "a.npy").write_text("no cloud")
    assert red(source, 0) == 0
    with pytest.raises(UnreadablePictureError) as picture:
        source.read(1)
    with pytest.raises(UnreadableCloudError) as cloud:
        source.cloud(1, 4)
    assert (picture.value.name, cloud.value.name) == ("2: a.png", "2: a.npy")
    assert picture.value.reason.startswith("FileNotFoundError")


def test_clouds_come_from_the_parts_that_have_them(tmp_path):
    parts = [
        folder_of(tmp_path / "x", "a.png"),
        folder_of(tmp_path / "y", "b.png", "c.png", level=5, clouds=["b.npy"]),
        folder_of(tmp_path / "z", "d.png", level=9, clouds=["d.npy"]),
    ]
    source: TripletSource = MixedSource(parts)
    assert source.has_cloud == [False, True, False, True]
    assert source.clouds == [None, "b.npy", None, "d.npy"]
    assert [source.cloud(index, 4).max() for index in (1, 3)] == [5, 9]
    for index in (0, 2):
        with pytest.raises(ValueError, match=rf"{source.names[index]} has no cloud; ask only where has_cloud is true"):
            source.cloud(index, 4)


def test_the_same_cloud_name_in_two_sources_is_two_clouds(tmp_path):
    parts = [folder_of(tmp_path / name, f"{name}.png", clouds=["a.npy"]) for name in "xy"]
    source = MixedSource(parts)
    assert source.clouds == ["1: a.npy", "2: a.npy"]
    assert source.names == ["1: x.png", "2: y.png"]


def test_faults_of_all_parts_are_kept(tmp_path):
    for name in "xy":
        folder_of(tmp_path / name, "a.png", "b.png")
        (tmp_path / name / "b.png").unlink()
    source = MixedSource([FolderSource(tmp_path / name, on_error="skip") for name in "xy"])
    assert source.faults == tuple(
        SkippedPicture(f"{label}: metadata.jsonl, line 2", "'b.png' is not in the folder") for label in (1, 2)
    )


def test_a_mix_may_be_mixed_again_and_go_to_another_process(tmp_path):
    parts = [folder_of(tmp_path / name, f"{name}.png", level=level) for level, name in enumerate("xyz")]
    source = pickle.loads(pickle.dumps(MixedSource([MixedSource(parts[:2]), parts[2]])))
    assert source.parts == [range(0, 2), range(2, 3)]
    assert [red(source, index) for index in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("index", [-1, 1])
def test_an_index_out_of_range_is_refused(tmp_path, index):
    source = MixedSource([folder_of(tmp_path / "x", "a.png")])
    for call in (lambda: source.read(index), lambda: source.cloud(index, 4)):
        with pytest.raises(IndexError, match=f"index is {index}; the sources have 1 pictures"):
            call()


def test_no_sources_and_labels_that_do_not_fit_are_refused(tmp_path):
    part = folder_of(tmp_path / "x", "a.png")
    with pytest.raises(ValueError, match="sources is empty"):
        MixedSource([])
    for labels in (["a"], ["a", "a"]):
        with pytest.raises(ValueError, match=r"labels is .*; expected 2 different ones"):
            MixedSource([part, part], labels=labels)
