import io
import json
import os
import re
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import trimesh

from mmpreproj.points.clouds import (
    CLOUD_SUFFIXES,
    UnreadableCloudError,
    check_cloud,
    denormalise,
    normalise,
    read_cloud,
    write_ply,
)

SMALL, LARGE = [[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[10, 0, 0], [13, 0, 0], [10, 1, 0]]  # areas 1 to 3


def moved(points, offset):
    return points + np.asarray(offset)


def some_points(count=50, width=3, seed=0):
    return np.random.default_rng(seed).random((count, width)).astype(np.float32)


def two_triangles(**visual):
    return trimesh.Trimesh([*SMALL, *LARGE], [[0, 1, 2], [3, 4, 5]], process=False, **visual)


def rows(points):
    return {tuple(row) for row in points.tolist()}


def write_text(path, text):
    path.write_text(text)
    return path


def ascii_ply(path, names, table, kind="float"):
    """Write a PLY of points whose columns are called `names`, the first three and normals float, others `kind`."""
    kinds = ["float" if name[-1] in "xyz" else kind for name in names]
    properties = [f"property {kind} {name}" for kind, name in zip(kinds, names, strict=True)]
    lines = [" ".join(f"{value:g}" for value in row) for row in table]
    header = ["ply", "format ascii 1.0", f"element vertex {len(table)}", *properties, "end_header"]
    return write_text(path, "\n".join([*header, *lines, ""]))


# files of points


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".xyz", ".txt", ".pts", ".ply", ".obj", ".glb", ".PLY"])
def test_files_of_points_give_their_points_in_order(tmp_path, suffix):
    points, path = some_points(), tmp_path / f"cloud{suffix}"
    match suffix.lower():
        case ".npy":
            np.save(path, points)
        case ".npz":
            np.savez(path, points)
        case ".ply":
            write_ply(path, points)
        case ".obj":
            path.write_text("".join(f"v {x} {y} {z}\n" for x, y, z in points.tolist()))
        case ".glb":
            trimesh.Scene(trimesh.PointCloud(points)).export(path)
        case _:
            np.savetxt(path, points, fmt="%.9g")
    read = read_cloud(path)
    assert (read.dtype, type(read)) == (np.float32, np.ndarray)
    np.testing.assert_array_equal(read, points)


def test_text_may_have_commas_comments_and_a_first_line_with_the_count(tmp_path):
    path = write_text(tmp_path / "a.pts", "# a scan\n2\n1,2,3\n\n4, 5, 6  # the last\n")
    np.testing.assert_array_equal(read_cloud(str(path)), [[1, 2, 3], [4, 5, 6]])


def test_whole_numbers_and_doubles_become_float32(tmp_path):
    for dtype in (np.int64, np.uint8, np.float64, np.float16):
        np.save(tmp_path / "a.npy", np.arange(12, dtype=dtype).reshape(4, 3, order="F"))
        assert read_cloud(tmp_path / "a.npy").dtype == np.float32


@pytest.mark.parametrize("called", ["points", "xyz", "arr_0"])
def test_an_archive_gives_the_array_that_is_called_for_points(tmp_path, called):
    points = some_points()
    np.savez(tmp_path / "a.npz", **{"labels": np.zeros(50), called: points})
    np.testing.assert_array_equal(read_cloud(tmp_path / "a.npz"), points)


def test_a_count_takes_points_at_random_and_none_twice(tmp_path):
    points = some_points(1000)
    np.save(tmp_path / "a.npy", points)
    drawn = read_cloud(tmp_path / "a.npy", count=300)
    assert len(rows(drawn)) == len(drawn) == 300
    assert rows(drawn) < rows(points)
    assert not rows(drawn) <= rows(points[:500])  # not only the beginning


def test_a_count_above_what_is_there_takes_all_and_then_repeats(tmp_path):
    points = some_points(10)
    np.save(tmp_path / "a.npy", points)
    drawn = read_cloud(tmp_path / "a.npy", count=25)
    np.testing.assert_array_equal(drawn[:10], points)
    assert len(drawn) == 25
    assert rows(drawn[10:]) <= rows(points)


def test_the_seed_decides_which_points(tmp_path):
    np.save(tmp_path / "points.npy", some_points(100))
    two_triangles().export(tmp_path / "mesh.stl")
    for file in ("points.npy", "mesh.stl"):
        first, again, other = (read_cloud(tmp_path / file, count=50, seed=seed) for seed in (3, 3, 4))
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()


# features


def test_what_is_wider_is_cut(tmp_path):
    table = some_points(width=8)
    np.save(tmp_path / "a.npy", table)
    np.testing.assert_array_equal(read_cloud(tmp_path / "a.npy", features=2), table[:, :5])


@pytest.mark.parametrize(("kind", "most"), [("uchar", 255), ("ushort", 65535), ("float", 1)])
def test_colours_of_a_ply_come_first_in_0_to_1_and_normals_after_them(tmp_path, kind, most):
    names = ["x", "y", "z", "nx", "ny", "nz", "red", "green", "blue"]
    table = [[1, 2, 3, 0, 0, 1, 0, most, most], [4, 5, 6, 1, 0, 0, most, 0, most]]
    path = ascii_ply(tmp_path / "a.ply", names, table, kind)
    np.testing.assert_array_equal(read_cloud(path, features=3), [[1, 2, 3, 0, 1, 1], [4, 5, 6, 1, 0, 1]])
    both = [[1, 2, 3, 0, 1, 1, 0, 0, 1], [4, 5, 6, 1, 0, 1, 1, 0, 0]]
    np.testing.assert_array_equal(read_cloud(path, features=6), both)


def test_normals_of_a_ply_are_the_features_where_there_are_no_colours(tmp_path):
    table = [[1, 2, 3, 0, 0, 1], [4, 5, 6, 1, 0, 0]]
    path = ascii_ply(tmp_path / "a.ply", ["x", "y", "z", "nx", "ny", "nz"], table)
    np.testing.assert_array_equal(read_cloud(path, features=3), table)


def test_points_of_an_obj_have_colours(tmp_path):
    path = write_text(tmp_path / "a.obj", "v 0 0 0 1 0 0\nv 1 2 3 0 0 1\n")
    np.testing.assert_array_equal(read_cloud(path, features=3), [[0, 0, 0, 1, 0, 0], [1, 2, 3, 0, 0, 1]])


def test_meshes_give_the_normals_of_their_faces(tmp_path):
    mesh = trimesh.creation.box(extents=(1, 2, 3))
    mesh.export(tmp_path / "a.stl")
    cloud = read_cloud(tmp_path / "a.stl", count=200, features=3)
    _, _, faces = trimesh.proximity.closest_point_naive(mesh, cloud[:, :3])
    np.testing.assert_allclose(cloud[:, 3:], mesh.face_normals[faces], atol=1e-6)


@pytest.mark.parametrize("suffix", [".ply", ".glb", ".obj"])
def test_colours_of_vertices_are_interpolated(tmp_path, suffix):
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)
    trimesh.Trimesh(SMALL, [[0, 1, 2]], vertex_colors=colours, process=False).export(tmp_path / f"a{suffix}")
    cloud = read_cloud(tmp_path / f"a{suffix}", count=100, features=6)
    x, y, ones = cloud[:, 0], cloud[:, 1], np.ones(100)
    np.testing.assert_allclose(cloud[:, 3:6], np.stack([1 - x - y, x, y], axis=1), atol=1e-5)
    np.testing.assert_allclose(cloud[:, 6:], np.stack([0 * ones, 0 * ones, ones], axis=1), atol=1e-6)


def test_colours_of_faces_stay_on_their_faces(tmp_path):
    two_triangles(face_colors=[[255, 0, 0, 255], [0, 0, 255, 255]]).export(tmp_path / "a.ply")
    cloud = read_cloud(tmp_path / "a.ply", count=100, features=3)
    on_large = cloud[:, :1] > 5
    np.testing.assert_array_equal(cloud[:, 3:], np.where(on_large, [0, 0, 1], [1, 0, 0]))


def test_colours_that_one_mesh_of_a_scene_lacks_are_left_out(tmp_path):
    coloured, plain = trimesh.creation.box(), trimesh.creation.box()
    coloured.visual.vertex_colors = [255, 0, 0, 255]
    trimesh.Scene([coloured, plain]).export(tmp_path / "a.glb")
    cloud = read_cloud(tmp_path / "a.glb", count=20, features=3)
    np.testing.assert_allclose(np.linalg.norm(cloud[:, 3:], axis=1), 1, atol=1e-6)  # normals
    with pytest.raises(UnreadableCloudError, match="it has 6 columns; expected at least 9"):
        read_cloud(tmp_path / "a.glb", features=6)


# meshes


@pytest.mark.parametrize("suffix", [".ply", ".obj", ".glb", ".stl", ".off"])
def test_meshes_are_sampled_uniformly_by_area(tmp_path, suffix):
    two_triangles().export(tmp_path / f"a{suffix}")
    cloud = read_cloud(tmp_path / f"a{suffix}", count=4000)
    large = cloud[cloud[:, 0] > 5]
    assert abs(len(large) / 4000 - 3 / 4) < 4 * np.sqrt(3 / 4 / 4 / 4000)  # four standard deviations
    np.testing.assert_allclose(large.mean(axis=0), np.mean(LARGE, axis=0), atol=0.05)  # nor uneven within a triangle
    assert (cloud[:, 2] == 0).all()


def test_meshes_without_a_count_give_4096_points(tmp_path):
    two_triangles().export(tmp_path / "a.stl")
    assert read_cloud(tmp_path / "a.stl").shape == (4096, 3)


def test_meshes_of_a_scene_lie_where_their_transforms_put_them(tmp_path):
    scene = trimesh.Scene(trimesh.creation.box(extents=(1, 1, 1)))
    scene.add_geometry(
        trimesh.creation.box(extents=(1, 1, 1)), transform=trimesh.transformations.translation_matrix([9, 0, 0])
    )
    scene.add_geometry(trimesh.PointCloud([[0, 500, 0], [0, 501, 0]]))
    scene.export(tmp_path / "a.glb")
    cloud = read_cloud(tmp_path / "a.glb", count=2000)
    np.testing.assert_allclose([cloud.min(axis=0), cloud.max(axis=0)], scene.to_mesh().bounds, atol=0.05)
    np.testing.assert_allclose((cloud[:, 0] > 4).mean(), 0.5, atol=0.05)


def test_a_gltf_is_read_with_the_files_beside_it(tmp_path):
    for file, content in trimesh.exchange.gltf.export_gltf(trimesh.Scene(two_triangles())).items():
        (tmp_path / file).write_bytes(content)
    np.testing.assert_allclose(read_cloud(tmp_path / "model.gltf")[:, :2].max(axis=0), [13, 1], atol=0.05)


def test_materials_that_are_damaged_or_missing_do_no_harm(tmp_path):
    (tmp_path / "a.mtl").write_text("newmtl wood\nmap_Kd wood.png\n")
    (tmp_path / "wood.png").write_bytes(b"no picture")
    text = "mtllib {}.mtl\nv 0 0 0\nv 1 0 0\nv 0 1 0\nvt 0 0\nusemtl wood\nf 1/1 2/1 3/1\n"
    there = read_cloud(write_text(tmp_path / "a.obj", text.format("a")), count=10)
    missing = read_cloud(write_text(tmp_path / "b.obj", text.format("b")), count=10)
    np.testing.assert_array_equal(there, missing)


def test_polygons_count_as_their_triangles(tmp_path):
    path = write_text(tmp_path / "a.obj", "v 0 0 0\nv 2 0 0\nv 2 1 0\nv 0 1 0\nv 5 5 5\nf 1 2 3 4\n")
    cloud = read_cloud(path)
    np.testing.assert_allclose([cloud.min(axis=0), cloud.max(axis=0)], [[0, 0, 0], [2, 1, 0]], atol=0.05)
    np.testing.assert_allclose(cloud.mean(axis=0), [1, 0.5, 0], atol=0.05)


@pytest.mark.parametrize("indent", [" ", "\t", " \t "])
def test_indented_lines_of_an_obj_count(tmp_path, indent):
    text = "".join(f"{indent}{line}\n" for line in ["v 0 0 0", "v 2 0 0", "v 0 1 0", "f 1 2 3"])
    plain = read_cloud(write_text(tmp_path / "b.obj", text.replace(indent + "v", "v").replace(indent + "f", "f")))
    np.testing.assert_array_equal(read_cloud(write_text(tmp_path / "a.obj", text)), plain)


def test_faces_of_an_obj_may_count_backwards_from_the_end_alone(tmp_path):
    text = "v 0 0 0\nv 2 0 0\nv 0 1 0\nf {}\n"
    forth, back = write_text(tmp_path / "a.obj", text.format("1 2 3")), text.format("-3 -2 -1")
    np.testing.assert_array_equal(read_cloud(write_text(tmp_path / "b.obj", back)), read_cloud(forth))
    refuse(write_text(tmp_path / "b.obj", back + "v 5 5 5\n"), "its faces count vertices backwards, .* export it")


# refusals of files


def refuse(path, reason, **options):
    with pytest.raises(UnreadableCloudError, match=reason) as caught:
        read_cloud(path, **options)
    assert caught.value.name == str(path)
    assert str(caught.value) == f"cannot read the point cloud {str(path)!r}: {caught.value.reason}"


def test_errors_use_the_name_that_was_given(tmp_path):
    with pytest.raises(UnreadableCloudError, match="cannot read the point cloud 'chair 7': there is no such file"):
        read_cloud(tmp_path / "a.ply", name="chair 7")


def test_unknown_suffixes_are_refused_with_the_known_ones(tmp_path):
    reason = f"no reader for the suffix '.docx'; expected one of {re.escape(', '.join(CLOUD_SUFFIXES))}"
    refuse(write_text(tmp_path / "a.docx", "1 2 3"), reason)
    refuse(tmp_path / "a", "no reader for the suffix ''")


def test_folders_are_refused(tmp_path):
    (tmp_path / "a.ply").mkdir()
    refuse(tmp_path / "a.ply", "it is not a file")


def test_paths_that_the_system_refuses_are_unreadable(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "is_file", fail)
    refuse(tmp_path / "a.npy", "it could not be opened: not yours")


@pytest.mark.parametrize("suffix", CLOUD_SUFFIXES)
def test_empty_files_are_refused(tmp_path, suffix):
    refuse(write_text(tmp_path / f"a{suffix}", ""), "the file is empty")


@pytest.mark.parametrize("content", [bytes(range(256)) * 4, b"hello\nworld\n", b"%PDF-1.7\n\x00\xff"])
@pytest.mark.parametrize("suffix", CLOUD_SUFFIXES)
def test_foreign_files_are_refused(tmp_path, suffix, content):
    (tmp_path / f"a{suffix}").write_bytes(content)
    refuse(tmp_path / f"a{suffix}", "it could not be decoded|is no NumPy|neither faces nor points")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".ply", ".glb", ".stl"])
def test_files_cut_short_are_refused(tmp_path, suffix, share):
    path = tmp_path / f"a{suffix}"
    if suffix[:3] == ".np":
        (np.save if suffix == ".npy" else np.savez)(path, some_points(200))
    else:
        trimesh.creation.icosphere(subdivisions=1).export(path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    refuse(path, "it could not be decoded|is no NumPy|neither faces nor points")


def test_a_header_that_promises_too_much_takes_no_memory(tmp_path):
    header = np.lib.format.header_data_from_array_1_0(some_points()) | {"shape": (10**12, 3)}
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    refuse(tmp_path / "a.npy", "it could not be decoded")


def test_pickles_are_not_opened(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    refuse(tmp_path / "a.npy", "Python objects")
    np.savez(tmp_path / "a.npz", np.array([{}], dtype=object))
    refuse(tmp_path / "a.npz", "Object arrays cannot be loaded")


def test_archives_without_an_array_of_points_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", left=some_points(), right=some_points())
    refuse(tmp_path / "a.npz", "its arrays are: 'left', 'right'; expected a single one, or one of 'points', 'xyz'")
    np.savez(tmp_path / "b.npz")
    refuse(tmp_path / "b.npz", "its arrays are: none")


def test_ragged_text_is_refused(tmp_path):
    refuse(write_text(tmp_path / "a.xyz", "1 2 3\n4 5\n"), "the number of columns changed from 3 to 2")


def test_text_without_points_is_refused(tmp_path):
    refuse(write_text(tmp_path / "a.xyz", "# nothing\n\n"), "there are no points in it")


def test_too_few_columns_are_refused_with_both_widths(tmp_path):
    refuse(
        write_text(tmp_path / "a.xyz", "1 2\n3 4\n"), "it has 2 columns; expected at least 3: x, y, z and 0 features"
    )
    write_ply(tmp_path / "a.ply", some_points())
    refuse(tmp_path / "a.ply", "it has 3 columns; expected at least 6: x, y, z and 3 features", features=3)


def test_colours_in_an_unknown_range_are_refused(tmp_path):
    path = ascii_ply(tmp_path / "a.ply", ["x", "y", "z", "red", "green", "blue"], [[0, 0, 0, 0, 9, 200], [1] * 6])
    refuse(path, "its colours span 0 to 200; expected 0 to 1")


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (np.zeros(3), r"the cloud is of shape \[3\]; expected \[P, 3\]"),
        (np.zeros((2, 4, 3)), r"the cloud is of shape \[2, 4, 3\]; expected \[P, 3\]"),
        (np.zeros((0, 3)), "the cloud is empty"),
        (np.array([["a", "b", "c"]]), "the cloud is an array of <U1"),
        (np.array([[0, 0, 0], [1, np.nan, 0], [np.inf, 0, 0]]), "in 2 of 3 points; the first is at 1"),
        (np.array([[0, 0, 0], [1e300, 0, 0]]), "NaN or infinite values in 1 of 2 points"),  # in float32
        (np.ones((5, 3)), r"the cloud is degenerate: all of its points \(5\) lie in one place"),
    ],
)
def test_clouds_that_are_none_are_refused(tmp_path, table, reason):
    np.save(tmp_path / "a.npy", table)
    refuse(tmp_path / "a.npy", reason, count=2)


def test_meshes_with_nothing_in_them_are_refused(tmp_path):
    path = write_text(tmp_path / "a.obj", "# nothing\no chair\n")
    refuse(path, "there are neither faces nor points in it")
    refuse(ascii_ply(tmp_path / "a.ply", ["x", "y", "z"], []), "there are neither faces nor points in it")


def test_meshes_without_area_are_refused(tmp_path):
    path = write_text(tmp_path / "a.obj", "v 0 0 0\nv 1 0 0\nv 2 0 0\nf 1 2 3\nf 1 1 2\n")
    refuse(path, r"none of its faces \(2\) has an area")


def test_meshes_with_corners_that_are_no_numbers_are_refused(tmp_path):
    mesh = two_triangles()
    mesh.vertices[4, 1] = np.nan
    mesh.export(tmp_path / "a.ply")
    refuse(tmp_path / "a.ply", "1 of its 2 faces have NaN or infinite corners")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"count": 0}, "count is 0; expected a whole number of at least 1"),
        ({"count": 2.0}, "count is 2.0; expected a whole number of at least 1"),
        ({"features": -1}, "features is -1; expected a whole number of at least 0"),
        ({"seed": -1}, "seed is -1; expected a whole number of at least 0"),
        ({"seed": True}, "seed is True"),
        ({"count": np.float64(2)}, "count is np.float64"),
        ({"count": np.True_}, "count is np.True_"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path, options, reason):
    with pytest.raises(ValueError, match=reason):
        read_cloud(tmp_path / "a.npy", **options)


def test_options_may_be_whole_numbers_of_numpy(tmp_path):
    np.save(tmp_path / "a.npy", some_points(width=4))
    read = read_cloud(tmp_path / "a.npy", count=np.int64(5), features=np.uint8(1), seed=np.int32(3))
    np.testing.assert_array_equal(read, read_cloud(tmp_path / "a.npy", count=5, features=1, seed=3))


def test_only_meshes_need_trimesh(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trimesh", None)
    points = some_points()
    np.save(tmp_path / "a.npy", points)
    np.testing.assert_array_equal(read_cloud(tmp_path / "a.npy"), points)
    write_ply(tmp_path / "a.ply", points)
    with pytest.raises(ImportError, match=r"pip install 'mmpreproj\[points\]'"):
        read_cloud(tmp_path / "a.ply")


# what files promise


def header_of(shape, dtype="<f8"):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def archive(path, name="arr_0.npy", content=b""):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, content)
    return path


def refuse_cheaply(path, reason):
    """Check that a file is refused before a large part of what it promises is held in memory."""
    tracemalloc.start()
    try:
        refuse(path, reason)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def gltf(path, uri="a.bin", **accessor):
    """Write a triangle whose buffer lies at a URI."""
    tree = {
        "asset": {"version": "2.0"},
        "buffers": [{"byteLength": 36, "uri": uri}],
        "bufferViews": [{"buffer": 0, "byteLength": 36}],
        "accessors": [{"bufferView": 0, "componentType": 5126, "type": "VEC3", "count": 3} | accessor],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}}]}],
        "nodes": [{"mesh": 0}],
        "scenes": [{"nodes": [0]}],
        "scene": 0,
    }
    if path.suffix == ".gltf":
        return write_text(path, json.dumps(tree))
    text = json.dumps(tree).encode()
    text += b" " * (-len(text) % 4)
    sizes = [2, 20 + len(text), len(text)]
    path.write_bytes(b"glTF" + b"".join(size.to_bytes(4, "little") for size in sizes) + b"JSON" + text)
    return path


@pytest.mark.parametrize(("name", "content"), [("notes.txt", b"no array"), ("points.npy", b"\x93NUMPY\x01\x00\x09")])
def test_members_that_are_no_arrays_are_refused(tmp_path, name, content):
    refuse(archive(tmp_path / "a.npz", name, content), f"its member '{name}' is no NumPy array of numbers")


def test_members_that_promise_more_than_they_hold_take_no_memory(tmp_path):
    path = archive(tmp_path / "a.npz", content=header_of((10**7, 3)))
    refuse_cheaply(path, "its member 'arr_0.npy' promises 30000000 values and holds 128 bytes")


@pytest.mark.parametrize(("shape", "dtype"), [((2**25, 3), "<f8"), ((1000, 3), "<U100000")])
def test_members_that_unpack_to_too_much_take_no_memory(tmp_path, shape, dtype):
    path = archive(tmp_path / "a.npz", content=header_of(shape, dtype))
    refuse_cheaply(path, rf"it promises \d+ values; at most {2**26} are read: thin it, or store it as \.npy")


@pytest.mark.parametrize("suffix", [".gltf", ".glb"])
@pytest.mark.parametrize("view", [{}, {"bufferView": 0}])
def test_accessors_that_promise_too_much_take_no_memory(tmp_path, suffix, view):
    (tmp_path / "a.bin").write_bytes(np.array(SMALL, "<f4").tobytes())
    path = gltf(tmp_path / f"a{suffix}", count=10**10)
    if not view and suffix == ".gltf":
        tree = json.loads(path.read_text())
        del tree["accessors"][0]["bufferView"]  # all zeros
        write_text(path, json.dumps(tree))
    refuse_cheaply(path, f"it promises 30000000000 values; at most {2**26} are read: thin it")


def test_shapes_that_are_placed_too_often_are_refused(tmp_path, monkeypatch):
    scene = trimesh.Scene(trimesh.creation.box())
    for place in range(1, 10):
        scene.graph.update(f"n{place}", matrix=np.eye(4), geometry=next(iter(scene.geometry)))
    scene.export(tmp_path / "a.glb")
    assert read_cloud(tmp_path / "a.glb", count=5).shape == (5, 3)
    monkeypatch.setattr("mmpreproj.points.promises.MOST_VALUES", 10 * 12 * 3 - 1)
    refuse(tmp_path / "a.glb", "it promises 360 values; at most 359 are read: thin it")


def test_too_little_memory_is_a_reason(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    np.save(tmp_path / "a.npy", some_points())
    for place in ("numpy.load", "numpy.isfinite"):  # when it is opened, and when a mapped one is copied
        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            refuse(tmp_path / "a.npy", "there is not enough memory for it")


@pytest.mark.parametrize("suffix", [".gltf", ".glb"])
@pytest.mark.parametrize(
    "uri", ["../a.bin", "/a.bin", "b/../../a.bin", " ../a.bin", "%2e%2e/a.bin", "..\\a.bin", "C:\\a"]
)
def test_files_outside_the_folder_are_not_read(tmp_path, suffix, uri):
    (tmp_path / "inner").mkdir()
    for folder in (tmp_path, tmp_path / "inner"):
        (folder / "a.bin").write_bytes(np.array(SMALL, "<f4").tobytes())
    path = gltf(tmp_path / "inner" / f"a{suffix}", uri)
    refuse(path, "it names the file .*, which lies outside its folder; put it inside")
    gltf(path, "a.bin")
    np.testing.assert_array_equal(len(read_cloud(path, count=3)), 3)


@pytest.mark.parametrize(
    ("vertices", "faces", "reason"),
    [(4, 1, "promises 4 × vertex, 1 × face; 4 lines follow"), (3, 2, "promises 3 × vertex, 2 × face; 4 lines follow")],
)
def test_an_ascii_ply_that_promises_more_than_it_holds_is_refused(tmp_path, vertices, faces, reason):
    refuse(ply_mesh(tmp_path / "a.ply", vertices=vertices, faces=faces), f"its header {reason}")


def ply_mesh(path, face="3 0 1 2", *, vertices=3, faces=1, kind="int", more=""):
    header = (
        f"ply\nformat ascii 1.0\nelement vertex {vertices}\nproperty float x\nproperty float y\nproperty float z\n"
    )
    header += f"{more}element face {faces}\nproperty list uchar {kind} vertex_indices\nend_header\n"
    rest = " 0 0" if more else ""
    return write_text(path, header + f"0 0 0{rest}\n1 0 0{rest}\n0 1 0{rest}\n{face}\n")


def test_an_ascii_ply_with_just_what_it_promises_is_read(tmp_path):
    assert read_cloud(ply_mesh(tmp_path / "a.ply"), count=5).shape == (5, 3)


@pytest.mark.parametrize("more", ["", "property float u\nproperty float v\n"])
@pytest.mark.parametrize("face", ["3 0 1 7", "3 0 1 -1"])
def test_faces_of_a_ply_that_name_no_vertex_are_refused(tmp_path, face, more):
    refuse(ply_mesh(tmp_path / "a.ply", face, more=more), "its faces name vertices from|could not be decoded: Index")


@pytest.mark.parametrize("face", ["3 0 1 7", "3 0 1 -1"])
def test_faces_of_an_off_that_name_no_vertex_are_refused(tmp_path, face):
    path = write_text(tmp_path / "a.off", f"OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n{face}\n")
    refuse(path, "its faces name vertices from|face index outside the range")


def test_an_off_without_faces_gives_its_points(tmp_path):
    path = write_text(tmp_path / "a.off", "OFF\n2 0 0\n0 0 0\n1 0 0\n")
    np.testing.assert_array_equal(read_cloud(path), [[0, 0, 0], [1, 0, 0]])


# text that can be misread


@pytest.mark.parametrize(
    "line",
    ["1,5 2,5 3,5", "1,5, 2,5, 3,5", "1,5\t2,5\t3,5", "1, 2, 3 4", "1,234.5, 2,000.5, 3.5", "1.5,2.5,3.5 255 0 0"],
)
def test_commas_that_may_be_decimal_are_refused(tmp_path, line):
    path = write_text(tmp_path / "a.xyz", f"0 0 0 # a, b\n\n{line}\n")
    refuse(path, f"line 3, {re.escape(repr(line))}, has both commas and blanks, .* write decimal points, and between")


@pytest.mark.parametrize("line", ["1.5,2.5,3.5", "1.5, 2.5,3.5", "1.5,2.5 3.5", "1.5 ,2.5 , 3.5,", " 1.5,2.5,3.5 , "])
def test_commas_that_part_numbers_are_read(tmp_path, line):
    path = write_text(tmp_path / "a.xyz", f"{line}\n4 5 6\n")
    np.testing.assert_array_equal(read_cloud(path), [[1.5, 2.5, 3.5], [4, 5, 6]])


@pytest.mark.parametrize("line", ["1,,3,4", ",1,2,3"])
def test_numbers_that_are_left_out_are_refused(tmp_path, line):
    refuse(write_text(tmp_path / "a.xyz", f"0,0,0\n{line}\n"), f"line 2, '{line}', leaves out a number")


def test_text_that_announces_more_points_than_it_holds_is_refused(tmp_path):
    refuse(write_text(tmp_path / "a.pts", "3\n1 2 3\n4 5 6\n"), "it announces 3 points and holds 2")


# far from the origin

FAR = np.array([500_000, 4_500_000, 0])


def test_clouds_that_float32_would_blur_are_refused(tmp_path):
    path = tmp_path / "a.npy"
    reason = "the cloud is 0.9.* long at a distance of 4.5.*e.06 from the origin, .*; subtract its centre first"
    for dtype in (np.float64, np.float32):
        np.save(path, (some_points() + FAR).astype(dtype))
        refuse(path, reason if dtype == np.float64 else "subtract its centre first")
    np.savetxt(tmp_path / "a.xyz", some_points() + FAR)
    refuse(tmp_path / "a.xyz", reason)
    np.save(path, 1000 * some_points() + FAR)
    assert len(rows(read_cloud(path))) == 50


def test_meshes_that_float32_would_blur_are_refused(tmp_path):
    text = "v 4e8 0 0\nv 400000001 0 0\nv 4e8 1 0\nf 1 2 3\n"
    refuse(write_text(tmp_path / "a.obj", text), "the mesh is 1 long at a distance of 4e.08 from the origin")
    # A face without area at the origin makes the mesh long, but nothing is drawn there; one with hardly any, too.
    refuse(write_text(tmp_path / "b.obj", text + "v 0 0 0\nf 4 4 1\n"), "the mesh is 1 long at a distance of 4e.08")
    far = "v 4e8 4e8 4e8\nv 400000001 4e8 4e8\nv 4e8 400000001 400000001\nf 1 2 3\n"
    speck = "v 0 0 0\nv 0 1e-9 0\nv 0 0 1e-9\nf 4 5 6\n"
    refuse(write_text(tmp_path / "c.obj", far + speck), r"all of the points drawn from it \(4096\) lie in one place")


def test_points_drawn_that_lie_in_one_place_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[0, 0, 0]] * 10_000 + [[1, 1, 1]]))
    refuse(tmp_path / "a.npy", r"all of the points drawn from it \(4\) lie in one place", count=4)
    assert read_cloud(tmp_path / "a.npy", count=1).shape == (1, 3)


def test_only_float64_can_be_normalised_far_from_the_origin():
    points = some_points().astype(np.float64)
    moved, _, _ = normalise(points + FAR)
    np.testing.assert_allclose(moved, normalise(points)[0], atol=1e-8)
    with pytest.raises(ValueError, match="where float32 blurs its shape; subtract its centre first, in float64"):
        normalise((points + FAR).astype(np.float32))
    with pytest.raises(ValueError, match="where float32 blurs its shape"):
        normalise(np.round(1000 * points).astype(np.int64) + 10**9)


# check_cloud


def test_sound_clouds_pass():
    check_cloud(some_points())
    check_cloud(some_points(width=5), features=2)
    check_cloud(some_points(width=7), features=None)
    check_cloud(np.zeros((4, 3), np.int32), degenerate=False)
    check_cloud(np.ma.masked_greater(some_points(), 2))  # none
    check_cloud(moved(some_points(), [0, 1e5, 0]), distant=False)


@pytest.mark.parametrize(
    ("points", "options", "reason"),
    [
        ([[0, 0, 0]], {}, r"the point cloud is a list; expected a NumPy array of real numbers \[P, 3\]"),
        (np.zeros((2, 3), complex), {}, "the point cloud is an array of complex128"),
        (np.ma.masked_greater(np.eye(3), 0), {}, "the point cloud has 3 masked values; expected none"),
        (moved(some_points(), [0, 1e5, 0]), {}, "where float32 blurs its shape"),
        (np.zeros(3), {"name": "it"}, r"it is of shape \[3\]; expected \[P, 3\]"),
        (np.zeros((2, 4)), {}, r"of shape \[2, 4\]; expected \[P, 3\]"),
        (np.zeros((2, 3)), {"features": 3}, r"of shape \[2, 3\]; expected \[P, 6\]"),
        (np.zeros((2, 2)), {"features": None}, r"of shape \[2, 2\]; expected \[P, 3 or more\]"),
        (np.zeros((0, 3)), {"degenerate": False}, "is empty; expected at least one point"),
        (np.array([[0, 0, 0, 1], [1, 1, 1, np.inf]]), {"features": 1}, "in 1 of 2 points; the first is at 1"),
        (np.array([[1, 2, 3, 4], [1, 2, 3, 5]]), {"features": 1}, r"degenerate: all of its points \(2\) lie in one"),
    ],
)
def test_what_is_no_cloud_is_refused(points, options, reason):
    with pytest.raises(ValueError, match=reason):
        check_cloud(points, **options)


# normalise, denormalise


def test_normalised_clouds_fill_the_unit_ball_around_their_box():
    points = some_points(width=6) * [10, 2, 5, 1, 1, 1] + [100, -7, 0, 0, 0, 0]
    moved, centre, radius = normalise(points)
    assert np.linalg.norm(moved[:, :3], axis=1).max() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(moved[:, :3].max(axis=0), -moved[:, :3].min(axis=0), atol=1e-12)
    np.testing.assert_array_equal(moved[:, 3:], points[:, 3:])
    assert radius == pytest.approx(np.linalg.norm(points[:, :3] - centre, axis=1).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_denormalise_puts_points_back(dtype):
    points = (some_points(width=4) * 3 + 1000).astype(dtype)
    back = denormalise(*normalise(points))
    assert back.dtype == dtype
    np.testing.assert_allclose(back, points, rtol=2 * np.finfo(dtype).eps)


def test_neither_changes_what_it_is_given_nor_keeps_whole_numbers_whole():
    points = np.array([[0, 0, 0], [4, 0, 0]])
    moved, centre, radius = normalise(points)
    np.testing.assert_array_equal(moved, np.array([[-1, 0, 0], [1, 0, 0]], np.float32))
    assert (moved.dtype, centre.tolist(), radius) == (np.float32, [2, 0, 0], 2)
    before = moved.copy()
    denormalise(moved, centre, radius)
    np.testing.assert_array_equal(moved, before)
    np.testing.assert_array_equal(points, [[0, 0, 0], [4, 0, 0]])


def test_degenerate_clouds_cannot_be_normalised():
    with pytest.raises(ValueError, match="degenerate"):
        normalise(np.ones((3, 3)))


@pytest.mark.parametrize(
    ("centre", "radius", "reason"),
    [
        ([0, 0], 1, r"centre is \[0.0, 0.0\]; expected three finite numbers"),
        ([0, 0, np.nan], 1, "centre is"),
        ([0, 0, 0], 0, "radius is 0; expected a finite number above 0"),
        ([0, 0, 0], np.inf, "radius is inf"),
    ],
)
def test_clouds_are_put_back_only_to_a_real_place(centre, radius, reason):
    with pytest.raises(ValueError, match=reason):
        denormalise(some_points(), centre, radius)
    with pytest.raises(ValueError, match="is empty"):
        denormalise(np.zeros((0, 3)), np.zeros(3), 1.0)


# write_ply


def test_written_clouds_are_read_back_bit_for_bit(tmp_path):
    points = some_points()
    write_ply(tmp_path / "new" / "a.ply", points)
    np.testing.assert_array_equal(read_cloud(tmp_path / "new" / "a.ply"), points)
    np.testing.assert_array_equal(trimesh.load(tmp_path / "new" / "a.ply").vertices, points)


def test_written_colours_are_read_back_in_8_bits(tmp_path):
    points, colours = some_points(), some_points(seed=1)
    write_ply(tmp_path / "a.ply", points, colours=colours)
    np.testing.assert_allclose(read_cloud(tmp_path / "a.ply", features=3)[:, 3:], colours, atol=0.5 / 255 + 1e-6)
    np.testing.assert_array_equal(trimesh.load(tmp_path / "a.ply").colors[:, :3], np.round(255 * colours))


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write_ply(tmp_path / "a.ply", some_points())
    before = (tmp_path / "a.ply").read_bytes()

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(os, "replace", full)
        write_ply(tmp_path / "a.ply", some_points(seed=1))
    assert (tmp_path / "a.ply").read_bytes() == before
    assert os.listdir(tmp_path) == ["a.ply"]


@pytest.mark.parametrize(
    ("points", "colours", "reason"),
    [
        (np.ones((4, 3)), None, "degenerate"),
        (some_points(width=6), None, r"of shape \[50, 6\]; expected \[P, 3\]"),
        (
            np.array([[0, 0, 0], [1e300, 0, 0]]),
            None,
            "the point cloud in float32 has NaN or infinite values in 1 of 2",
        ),
        (some_points(), some_points(49), r"the colours are of shape \[49, 3\]; expected \[50, 3\], one a point"),
        (some_points(), 255 * np.ones((50, 3)), "the colours span 255 to 255; expected 0 to 1"),
        (some_points(), np.full((50, 3), np.nan), "the colours span nan to nan"),
    ],
)
def test_bad_clouds_are_not_written(tmp_path, points, colours, reason):
    with pytest.raises(ValueError, match=reason):
        write_ply(tmp_path / "a.ply", points, colours=colours)
    assert not list(tmp_path.iterdir())


def test_other_suffixes_are_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"the file 'a.xyz' does not end in .ply"):
        write_ply(Path(tmp_path, "a.xyz"), some_points())
