"""Furniture from Sweet Home 3D's libraries: tiny ones built here, and the real package where one names it."""

import io
import os
import zipfile

import numpy as np
import pytest
from PIL import Image

from mmpreproj.data.sources.furniture import CATALOGUE, FurnitureSource
from mmpreproj.data.sources.pictures import UnreadablePictureError
from mmpreproj.points.clouds import UnreadableCloudError

CUBE = """mtllib cube.mtl
v 0 0 0\nv 2 0 0\nv 2 2 0\nv 0 2 0\nv 0 0 2\nv 2 0 2\nv 2 2 2\nv 0 2 2
usemtl wood
f 1 2 3 4\nf 5 6 7 8\nf 1 2 6 5\nf 2 3 7 6\nf 3 4 8 7\nf 4 1 5 8
"""


def icon(colour=(255, 0, 0, 255)):
    picture = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    picture.paste(colour, (2, 2, 6, 6))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def entry(number, name="Chair", model="/set/a/a.obj", **more):
    fields = {"name": name, "category": "Office", "icon": "/set/a.png", "model": model, "creator": "Ann", **more}
    return "".join(f"{field}#{number}={value}\n" for field, value in fields.items() if value is not None)


def library(folder, *entries, file="set.sh3f", **members):
    """Write a library with the entries, one icon and one cube."""
    contents = {CATALOGUE: "".join(entries).encode("latin-1"), "set/a.png": icon(), "set/a/a.obj": CUBE.encode()}
    with zipfile.ZipFile(folder / file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**contents, **members}.items():
            if content is not None:
                archive.writestr(name, content)
    return folder


# --- what works ---


def test_entries_come_by_file_and_by_number(tmp_path):
    library(tmp_path, entry(10, "Oak Table"), entry(9, "Chair"), file="b.sh3f")
    library(tmp_path, "name=The whole set\n", entry(1, "Bed", category="Bedroom", creator="Bo"), file="a.sh3f")
    source = FurnitureSource(tmp_path)
    assert source.names == ["a.sh3f#1", "b.sh3f#9", "b.sh3f#10"]
    assert source.captions == ["bed", "chair", "oak table"]
    assert source.categories == ["Bedroom", "Office", "Office"]
    assert source.creators == ["Bo", "Ann", "Ann"]
    assert source.has_cloud == [True, True, True]
    assert "3 pieces" in repr(source)


def test_an_icon_is_seen_on_white(tmp_path):
    picture = FurnitureSource(library(tmp_path, entry(1))).open(0)
    assert (picture.mode, picture.size) == ("RGB", (8, 8))
    assert picture.getpixel((0, 0)) == (255, 255, 255)
    assert picture.getpixel((4, 4)) == (255, 0, 0)


def test_a_cloud_lies_on_the_cube_in_the_units_of_the_file(tmp_path):
    cloud = FurnitureSource(library(tmp_path, entry(1))).cloud(0, 600)
    assert (cloud.shape, cloud.dtype) == ((600, 3), np.float32)
    distance = np.minimum(np.abs(cloud), np.abs(cloud - 2)).min(axis=1)
    assert distance.max() < 1e-5
    assert np.abs(cloud.mean(axis=0) - 1).max() < 0.2


def test_a_mesh_that_lies_is_turned_upright(tmp_path):
    lying = (
        "v 0 0 0\n \tv 1 0 0\nv  1 2.0 0e0 \nv 0 2 0\nvn 0 0 1\nf 1//1 2//1 3//1 4//1\n"  # 1 x 2 in the plane z = 0
    )
    library(
        tmp_path,
        entry(1),
        entry(2, modelRotation="1 0 0 0 0 1 0 -1 0"),  # y = old z, z = -old y
        **{"set/a/a.obj": lying.encode()},
    )
    source = FurnitureSource(tmp_path)
    before, after = source.cloud(0, 50, features=3), source.cloud(1, 50, features=3)
    for columns in (slice(0, 3), slice(3, 6)):  # places and normals
        x, y, z = before[:, columns].T
        np.testing.assert_allclose(after[:, columns], np.stack([x, z, -y], axis=1), atol=1e-6)


def test_the_seed_decides_the_cloud(tmp_path):
    source = FurnitureSource(library(tmp_path, entry(1)))
    assert np.array_equal(source.cloud(0, 20), source.cloud(0, 20, seed=0))
    assert not np.array_equal(source.cloud(0, 20), source.cloud(0, 20, seed=1))


def test_no_scratch_file_stays(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    FurnitureSource(library(tmp_path, entry(1))).cloud(0, 5)
    assert list(scratch.iterdir()) == []


def test_an_icon_is_read_as_the_library_holds_it(tmp_path):
    assert FurnitureSource(library(tmp_path, entry(1))).read(0) == icon()


def test_an_entry_may_lack_what_is_not_needed(tmp_path):
    assert FurnitureSource(library(tmp_path, entry(1, creator=None))).creators == [""]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("name#1=Bill 10\\u20ac\n", "bill 10€"),
        ("name#1=Frame H\xf4i An\n", "frame hôi an"),
        ("name#1 : TV 16:9 = wide  \n", "tv 16:9 = wide"),
        ("name\\#1=Chair\n", "chair"),
        ("name#1 Chair\r\n", "chair"),
        ("# name#1=No\n! name#1=No\n\n  name#1=Chair\r", "chair"),
        ("name#1=Sofa and \\\n    chair\n", "sofa and chair"),
        ("name#1=A\\tB\\:\\\\\n", "a\tb:\\"),
        ("name#1=Old\nname#1=New\n", "new"),
        ("name#1=A\x85B\n", "a\x85b"),  # a control character that some would end a line at
    ],
)
def test_catalogues_are_read_as_java_reads_properties(tmp_path, written, meant):
    source = FurnitureSource(library(tmp_path, written, entry(1, name=None)))
    assert source.captions == [meant]


# --- what is refused ---


def test_a_missing_folder_is_refused_with_the_commands_that_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist; run: apt-get download .* && dpkg-deb -x"):
        FurnitureSource(tmp_path / "nowhere")


def test_a_folder_without_libraries_is_refused_with_the_commands(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \.sh3f file; run: apt-get download .* && dpkg-deb -x"):
        FurnitureSource(tmp_path)


def test_the_folder_within_the_unpacked_package_is_pointed_out(tmp_path):
    inner = tmp_path / "usr" / "share" / "sweethome3d" / "furniture"
    inner.mkdir(parents=True)
    library(inner, entry(1))
    with pytest.raises(FileNotFoundError, match=f"{inner} does: pass that folder"):
        FurnitureSource(tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    library(tmp_path, entry(1))
    with pytest.raises(ValueError, match=r"set\.sh3f is a file; expected the folder"):
        FurnitureSource(tmp_path / "set.sh3f")


@pytest.mark.parametrize("keep", [0, 100, -30])
def test_a_damaged_library_is_refused(tmp_path, keep):
    path = library(tmp_path, entry(1)) / "set.sh3f"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"set\.sh3f is damaged .*unpack the package again: apt-get"):
        FurnitureSource(tmp_path)


def test_a_library_without_a_catalogue_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"set\.sh3f holds no PluginFurnitureCatalog\.properties"):
        FurnitureSource(library(tmp_path, **{CATALOGUE: None}))


def test_an_empty_catalogue_is_refused(tmp_path):
    with pytest.raises(ValueError, match="lists nothing; expected entries"):
        FurnitureSource(library(tmp_path, "name=The whole set\n"))


@pytest.mark.parametrize("field", ["name", "category", "icon", "model"])
@pytest.mark.parametrize("value", [None, "  "])
def test_an_entry_without_a_field_is_named(tmp_path, field, value):
    library(tmp_path, entry(1), entry(7, **{field: value}))
    with pytest.raises(ValueError, match=rf"set\.sh3f: entry 7 of {CATALOGUE} has no '{field}'"):
        FurnitureSource(tmp_path)


@pytest.mark.parametrize("field", ["icon", "model"])
def test_an_entry_whose_file_is_not_there_is_named(tmp_path, field):
    library(tmp_path, entry(3, **{field: "/set/none.obj"}))
    with pytest.raises(ValueError, match=f"entry 3 .* names the {field} 'set/none.obj', which the file does not hold"):
        FurnitureSource(tmp_path)


def test_a_model_of_another_kind_is_refused(tmp_path):
    library(tmp_path, entry(1, model="/set/a.3ds"), **{"set/a.3ds": b"3ds"})
    with pytest.raises(ValueError, match=r"has the model 'set/a\.3ds'; expected an \.obj file"):
        FurnitureSource(tmp_path)


@pytest.mark.parametrize("rotation", ["", "1 0 0 0 1 0", "1 0 0 0 1 0 0 0 x"])
def test_a_rotation_of_other_than_nine_numbers_is_refused(tmp_path, rotation):
    with pytest.raises(ValueError, match=r"entry 1 .* has the modelRotation .*; expected nine numbers"):
        FurnitureSource(library(tmp_path, entry(1, modelRotation=rotation)))


def test_a_matrix_that_does_not_rotate_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'2 0 0 0 1 0 0 0 1', which is no rotation; correct or remove it"):
        FurnitureSource(library(tmp_path, entry(1, modelRotation="2 0 0 0 1 0 0 0 1")))


def test_a_broken_escape_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"set\.sh3f: .*broken escape in .*20x.*four hexadecimal digits"):
        FurnitureSource(library(tmp_path, entry(1, name="\\u20xy")))


def test_pictures_and_meshes_that_are_none_are_named_when_read(tmp_path):
    library(tmp_path, entry(1), **{"set/a.png": b"no picture", "set/a/a.obj": b"no mesh"})
    source = FurnitureSource(tmp_path)
    with pytest.raises(UnreadablePictureError) as picture:
        source.open(0)
    with pytest.raises(UnreadableCloudError) as cloud:
        source.cloud(0, 5)
    assert picture.value.name == cloud.value.name == "set.sh3f#1"


def test_a_mesh_whose_numbers_are_none_is_named_when_turned(tmp_path):
    library(tmp_path, entry(1, modelRotation="1 0 0 0 0 1 0 -1 0"), **{"set/a/a.obj": b"v 1.2.3 0 0\nf 1 1 1\n"})
    with pytest.raises(UnreadableCloudError, match=r"'1\.2\.3' in the line 'v 1\.2\.3 0 0' of its mesh") as caught:
        FurnitureSource(tmp_path).cloud(0, 5)
    assert caught.value.name == "set.sh3f#1"


def test_a_library_damaged_or_deleted_meanwhile_is_named_when_read(tmp_path):
    path = library(tmp_path, entry(1)) / "set.sh3f"
    source = FurnitureSource(tmp_path)
    content = path.read_bytes()
    for spoil in (lambda: path.write_bytes(content[:100]), path.unlink):
        spoil()
        with pytest.raises(UnreadablePictureError, match=r"set/a\.png in set\.sh3f"):
            source.open(0)
        with pytest.raises(UnreadableCloudError, match=r"set/a/a\.obj in set\.sh3f"):
            source.cloud(0, 5)


# --- the real package ---


@pytest.mark.skipif("MMPREPROJ_FURNITURE" not in os.environ, reason="MMPREPROJ_FURNITURE names no furniture folder")
def test_the_package_holds_what_its_description_says():
    source = FurnitureSource(os.environ["MMPREPROJ_FURNITURE"])
    assert (len(source), len(set(source.captions)), len(set(source.categories))) == (820, 612, 12)
    assert all(source.creators)
    for index in (0, 410, 819):
        assert source.open(index).mode == "RGB"
        cloud = source.cloud(index, 256)
        assert (cloud.shape, cloud.dtype) == ((256, 3), np.float32)
        assert np.ptp(cloud, axis=0).min() > 0
