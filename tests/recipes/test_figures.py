"""The pictures of a run, looked at as pixels."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from mmpreproj.recipes.figures import draw_grid, draw_loss_curves
from mmpreproj.training.loop import StepRecord


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def count(path, colour):
    return int((np.abs(pixels(path) - np.array(colour)).max(axis=-1) < 12).sum())


def record(step, loss=0.5, held_out=None):
    return StepRecord(step, loss, held_out, 1e-3, 1.0, 10.0)


RED, BLUE, HELD_OUT = (255, 0, 0), (0, 0, 255), (0xB3, 0x28, 0x2D)


def test_a_grid_shows_every_picture_in_its_row_and_column(tmp_path):
    colours = [[(250, 0, 0), (0, 250, 0)], [(0, 0, 250), (250, 0, 250)]]
    rows = [(f"row {i}", [Image.new("RGB", (8, 8), c) for c in line]) for i, line in enumerate(colours)]
    draw_grid(rows, tmp_path / "new" / "grid.png", cell=96)
    image = pixels(tmp_path / "new" / "grid.png")
    places = {}
    for line in colours:
        for colour in line:
            ys, xs = np.where(np.abs(image - np.array(colour)).max(axis=-1) < 5)
            assert len(ys) > 80 * 80, colour
            places[colour] = ys.mean(), xs.mean()
    (a, b), (c, d) = [[places[colour] for colour in line] for line in colours]
    assert a[0] == pytest.approx(b[0], abs=2) and a[0] < c[0] and a[1] < b[1] and a[1] == pytest.approx(c[1], abs=2)
    assert d[0] > b[0]


def test_a_grid_labels_its_rows(tmp_path):
    image = [Image.new("RGB", (8, 8), RED)]
    for name, prompt in (("short", "a"), ("long", "a very long prompt " * 20), ("empty", "")):
        draw_grid([(prompt, image)], tmp_path / f"{name}.png")
    ink = {
        name: int((pixels(tmp_path / f"{name}.png").max(axis=-1) < 100).sum()) for name in ("short", "long", "empty")
    }
    assert 0 < ink["short"] < ink["empty"] < ink["long"]


def test_small_pictures_are_enlarged_without_smoothing(tmp_path):
    checker = Image.fromarray(np.array([[[255, 0, 0], [0, 0, 255]]] * 2, dtype=np.uint8))
    draw_grid([("x", [checker])], tmp_path / "grid.png", cell=200)
    assert count(tmp_path / "grid.png", (128, 0, 128)) == 0
    assert min(count(tmp_path / "grid.png", RED), count(tmp_path / "grid.png", BLUE)) > 5000


def test_rows_may_differ_in_length(tmp_path):
    draw_grid(
        [("x", [Image.new("RGB", (8, 8), RED)] * 3), ("y", [Image.new("RGB", (8, 8), BLUE)])], tmp_path / "g.png"
    )
    assert count(tmp_path / "g.png", RED) > 2.5 * count(tmp_path / "g.png", BLUE)


@pytest.mark.parametrize("rows", [[], [("x", [])]])
def test_a_grid_of_nothing_is_refused(rows, tmp_path):
    with pytest.raises(ValueError, match="at least one row, and a picture in each"):
        draw_grid(rows, tmp_path / "grid.png")
    assert not (tmp_path / "grid.png").exists()


def test_loss_curves_show_the_held_out_loss_where_there_is_one(tmp_path):
    train = [record(step, loss=1 / step) for step in range(1, 40)]
    draw_loss_curves(train, tmp_path / "without.png")
    draw_loss_curves([record(0, None, 1.0), *train, record(40, 0.02, 0.3)], tmp_path / "with.png")
    assert count(tmp_path / "without.png", HELD_OUT) == 0
    assert count(tmp_path / "with.png", HELD_OUT) > 50


def test_a_single_step_can_be_drawn(tmp_path):
    draw_loss_curves([record(1)], tmp_path / "loss.png")
    assert pixels(tmp_path / "loss.png").shape[:2] == (400, 700)


def test_a_prompt_is_drawn_as_it_is_and_not_read_as_mathematics(tmp_path):
    draw_grid([(r"$\foo$ costs $5", [Image.new("RGB", (8, 8))])], tmp_path / "grid.png")
    assert (tmp_path / "grid.png").is_file()


def test_drawing_leaves_the_users_own_figures_and_backend_alone(tmp_path):
    code = (
        "import sys; from mmpreproj.recipes.figures import draw_loss_curves; "
        "from mmpreproj.training.loop import StepRecord; from pathlib import Path; "
        f"draw_loss_curves([StepRecord(1, 0.5, None, 1e-3, 1.0, 10.0)], Path({str(tmp_path / 'loss.png')!r})); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
