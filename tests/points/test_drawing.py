import os
import re

import numpy as np
import pytest
from PIL import Image

from mmpreproj.points.drawing import VIEWS, View, _wrap, draw_cloud, draw_clouds_grid, render_cloud

FRONT = {"azimuth": 0, "elevation": 0}


def ball(count=400, width=3, seed=0):
    points = np.random.default_rng(seed).standard_normal((count, width))
    points[:, :3] /= np.linalg.norm(points[:, :3], axis=1, keepdims=True)
    return points


def two_lumps(first, second):
    """Return a cloud of two small balls around two places, and colours: the first is red, the second blue."""
    lumps = np.concatenate([0.05 * ball() + first, 0.05 * ball() + second])
    return lumps, np.repeat([[1.0, 0, 0], [0, 0, 1.0]], 400, axis=0)


def places(image):
    """Return where the red and the blue of a picture are on average, in x to the right and y down from 0 to 1."""
    pixels = np.asarray(image).astype(int)
    found = []
    for channel in (0, 2):
        rows, columns = np.nonzero(pixels[..., channel] - pixels[..., 2 - channel] > 60)
        found.append((columns.mean() / pixels.shape[1], rows.mean() / pixels.shape[0]) if len(rows) else None)
    return found


def ink(image):
    """Return which pixels are not white."""
    return (np.asarray(image.convert("RGB")) < 250).any(axis=-1)


# where points come to lie


@pytest.mark.parametrize("up", ["x", "y", "z"])
def test_the_axis_that_is_up_points_up(up):
    axis = np.eye(3)["xyz".index(up)]
    points, colours = two_lumps(axis, -axis)
    red, blue = places(render_cloud(points, colours=colours, up=up, **FRONT))
    assert red[1] < 0.3 and blue[1] > 0.7
    assert red[0] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("up", "front"), [("x", [0, 1, 0]), ("y", [0, 0, 1]), ("z", [0, -1, 0])])
def test_the_front_is_in_front_and_nothing_is_mirrored(up, front):
    points, colours = two_lumps(front, [-place for place in front])
    red, blue = places(render_cloud(points, colours=colours, up=up, **FRONT))
    assert red is not None and blue is None
    right = np.cross(np.eye(3)["xyz".index(up)], front)  # right, up and towards the viewer are right-handed
    points, colours = two_lumps(right, -right)
    red, blue = places(render_cloud(points, colours=colours, up=up, **FRONT))
    assert red[0] > 0.7 and blue[0] < 0.3


def test_near_points_cover_far_ones():
    points, colours = two_lumps([0, 0, 1], [0, 0, -1])
    for azimuth, seen, hidden in ((0, 0, 1), (180, 1, 0)):
        found = places(render_cloud(points, colours=colours, azimuth=azimuth, elevation=0))
        assert found[seen] is not None and found[hidden] is None


def test_a_viewer_to_the_right_of_the_front_sees_the_front_on_the_left():
    points, colours = two_lumps([0, 0, 1], [0, 0, -1])
    red, blue = places(render_cloud(points, colours=colours, azimuth=60, elevation=0))
    assert red[0] < 0.3 and blue[0] > 0.7


def test_a_viewer_above_sees_the_front_below():
    points, colours = two_lumps([0, 0, 1], [0, 0, -1])
    red, blue = places(render_cloud(points, colours=colours, azimuth=0, elevation=60))
    assert red[1] > 0.7 and blue[1] < 0.3


def test_scale_and_place_of_a_cloud_do_not_change_its_picture():
    points = ball()
    moved = 500 * points + [1000, -300, 20]
    np.testing.assert_allclose(np.asarray(render_cloud(points)), np.asarray(render_cloud(moved)), atol=16)


def test_every_view_fits_into_the_picture():
    sticks = np.linspace(-1, 1, 100)[:, None] * np.array([[[1, 1, 1]], [[1, -1, 1]], [[1, 0, 0]]])
    for azimuth, elevation in ((0, 0), (45, 35.26), (90, 90), (200, -50)):
        drawn = ink(render_cloud(sticks.reshape(-1, 3), size=200, azimuth=azimuth, elevation=elevation))
        assert drawn.any()
        assert not (drawn[0].any() or drawn[-1].any() or drawn[:, 0].any() or drawn[:, -1].any())


def test_far_points_are_paler():
    sheet = np.stack(np.meshgrid(np.linspace(-1, 1, 60), np.linspace(-1, 1, 60), [0]), axis=-1).reshape(-1, 3)
    sheet[:, 2] = sheet[:, 0]  # nearer to the right
    pixels = np.asarray(render_cloud(sheet, size=100, **FRONT)).mean(axis=-1)
    assert pixels[50, 75] < pixels[50, 50] < pixels[50, 25] < 230


def test_features_are_not_drawn():
    points = ball(width=6)
    assert render_cloud(points) == render_cloud(points[:, :3])


def test_very_large_clouds_are_thinned_and_look_the_same():
    many = ball(300_000)
    first = render_cloud(many, size=100)
    assert first == render_cloud(many, size=100)
    few = ink(render_cloud(many[:20_000], size=100))
    assert (ink(first) == few).mean() > 0.98


def test_very_small_clouds_are_drawn():
    assert ink(render_cloud(np.array([[0, 0, 0], [1.0, 0, 0]]), **FRONT)).sum() > 8


# files


def test_a_cloud_is_drawn_from_all_sides_at_the_size_asked_for(tmp_path):
    draw_cloud(ball(), tmp_path / "new" / "a.png", size=100, title="A ball with $ and _")
    with Image.open(tmp_path / "new" / "a.png") as image:
        assert (image.format, image.width) == ("PNG", 100 * len(VIEWS))
        panels = np.split(ink(image), len(VIEWS), axis=1)
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert all(panel[40:120].sum() > 3000 for panel in panels)


def test_views_are_drawn_from_left_to_right_with_their_labels():
    points, _ = two_lumps([0, 1, 0], [0, -1, 0])
    figure = draw_cloud(points, views=[View("one", 0, 0), View("two", 0, 90)], size=100)
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["one", "two"]
    heights = [np.ptp(axes.collections[0].get_offsets()[:, 1]) for axes in figure.axes]
    assert heights[0] > 1.9 and heights[1] < 0.2


def test_a_cloud_need_not_be_written(tmp_path):
    assert draw_cloud(ball(), size=50).get_size_inches().tolist() == [2.0, 0.75]


def test_a_grid_has_a_row_a_label(tmp_path):
    rows = [("a ball", [ball(), ball()]), ("a longer label that has to be wrapped into several lines", [ball()])]
    draw_clouds_grid(rows, tmp_path / "grid.png", cell=80)
    with Image.open(tmp_path / "grid.png") as image:
        assert (image.format, image.size) == ("PNG", (320, 160))
        drawn = ink(image)
    filled = [[drawn[top : top + 80, left : left + 80].mean() > 0.3 for left in (160, 240)] for top in (0, 80)]
    assert filled == [[True, True], [True, False]]
    assert drawn[:80, :160].any() and drawn[80:, :160].any()  # labels


@pytest.mark.parametrize(
    "label",
    [
        "shower head and faucet",
        "WWWWWWWWWWWWWWWWWWWWWWWWWW",
        "mmmm " * 100,
        "a label with $ and _ in it",
        "",
        "ж" * 40,
    ],
)
@pytest.mark.parametrize("cell", [16, 80, 160])
def test_labels_of_a_grid_stay_in_their_place(tmp_path, label, cell):
    draw_clouds_grid([("", [ball()]), (label, [ball()]), ("", [ball()])], tmp_path / "grid.png", cell=cell)
    with Image.open(tmp_path / "grid.png") as image:
        drawn = ink(image)[:, :160]
    assert drawn.any() == bool(label)
    assert not drawn[:, :4].any() and not drawn[:, 154:].any()
    assert not drawn[:cell].any() and not drawn[2 * cell :].any()


def test_labels_that_are_cut_say_so():
    wrapped = _wrap("one two three fourfive", lambda text: len(text) <= 5, 3)
    assert wrapped.split("\n") == ["one", "two", "thre…"]
    assert _wrap("one two three fourfive", lambda text: len(text) <= 7, 9) == "one two\nthree\nfourfiv\ne"
    assert _wrap("wide", lambda text: False, 9) == "w\ni\nd\ne"


def test_names_of_files_that_are_not_utf8_are_drawn(tmp_path):
    name = os.fsdecode(b"\xff\xfe.npy")
    figure = draw_cloud(ball(), tmp_path / "a.png", size=50, title=name, views=[View(name, 0, 0)])
    assert figure.texts[0].get_text() == figure.axes[0].texts[0].get_text() == "\ufffd\ufffd.npy"
    draw_clouds_grid([(name, [ball()])], tmp_path / "b.png", cell=50)


# refusals


@pytest.mark.parametrize(
    ("points", "options", "reason"),
    [
        (np.ones((4, 3)), {}, "the point cloud is degenerate"),
        (np.ones((4, 2)), {}, r"of shape \[4, 2\]; expected \[P, 3 or more\]"),
        (np.full((4, 3), np.nan), {}, "NaN or infinite values in 4 of 4 points"),
        (ball(), {"up": "w"}, "up is 'w'; expected 'x', 'y' or 'z'"),
        (ball(), {"size": 8}, "size is 8; expected a whole number of pixels, at least 16"),
        (ball(), {"size": 99.5}, "size is 99.5"),
        (ball(), {"colours": ball(399)}, r"the colours are of shape \[399, 3\]; expected \[400, 3\]"),
        (ball(), {"colours": 2 * np.ones((400, 3))}, "the colours span 2 to 2; expected 0 to 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(points, options, reason):
    with pytest.raises(ValueError, match=reason):
        draw_cloud(points, **options)
    with pytest.raises(ValueError, match=reason):
        render_cloud(points, **options)


@pytest.mark.parametrize("view", [(0, 91), (np.inf, 0), (0, np.nan)])
def test_views_from_nowhere_are_refused(view):
    reason = re.escape(f"the view is from azimuth {view[0]} and elevation {view[1]}; expected degrees")
    with pytest.raises(ValueError, match=reason):
        render_cloud(ball(), azimuth=view[0], elevation=view[1])


def test_no_views_are_refused():
    with pytest.raises(ValueError, match="there are no views; expected at least one"):
        draw_cloud(ball(), views=[])


@pytest.mark.parametrize("rows", [[], [("a", [ball()]), ("b", [])]])
def test_empty_grids_are_refused(tmp_path, rows):
    with pytest.raises(ValueError, match="a grid needs at least one row, and a cloud in each"):
        draw_clouds_grid(rows, tmp_path / "a.png")


def test_grids_of_tiny_cells_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cell is 0; expected a whole number of pixels, at least 16"):
        draw_clouds_grid([("a", [ball()])], tmp_path / "a.png", cell=0)
