"""The pictures of a run, looked at as pixels."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from mmpreproj.recipes.figures import draw_grid, draw_loss_curves, loss_range
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


def drawn_text(monkeypatch, history, path, **settings):
    """Draw loss curves; returns the words of the legend and the title, and the range of losses."""
    kept = []
    monkeypatch.setattr("mmpreproj.recipes.figures._write", lambda figure, path: kept.append(figure))
    draw_loss_curves(history, path, **settings)
    (axes,) = kept[0].axes
    return axes.get_legend_handles_labels()[1], axes.get_title(loc="left"), axes.get_ylim()


def noisy(count, middle, *, first=()):
    """Losses around a middle, after the first ones."""
    spread = np.random.default_rng(0).normal(size=count - len(first))
    return [*first, *(middle * np.exp(0.1 * spread)).tolist()]


def test_first_steps_that_are_far_above_do_not_flatten_the_rest(monkeypatch, tmp_path):
    losses = noisy(200, 0.4, first=(9.0, 6.0, 3.0))
    history = [record(step, loss) for step, loss in enumerate(losses, start=1)]
    _, title, (low, high) = drawn_text(monkeypatch, history, tmp_path / "loss.png")
    assert low < min(losses) and max(losses[3:]) < high < 1.5 * max(losses[3:])
    assert title == "3 values beyond the top, up to 9"


def test_all_steps_are_shown_where_none_is_astray(monkeypatch, tmp_path):
    for losses in (noisy(200, 0.4), np.geomspace(3.0, 0.2, 300).tolist(), [0.5], [0.5] * 9, noisy(99, 0.004)):
        history = [record(step, loss) for step, loss in enumerate(losses, start=1)]
        _, title, (low, high) = drawn_text(monkeypatch, history, tmp_path / "loss.png")
        assert 0.8 * min(losses) < low < min(losses) and max(losses) < high < 1.2 * max(losses)
        assert title == ""


def test_the_held_out_loss_of_the_start_is_shown_unless_it_is_far_away():
    losses = noisy(100, 0.4)
    assert loss_range([losses], [1.2])[1] > 1.2
    assert loss_range([losses], [12.0, 0.4])[1] < 0.8
    assert loss_range([losses], [0.1])[0] < 0.1


def test_a_modality_of_larger_losses_is_shown_beside_one_of_smaller():
    low, high = loss_range([noisy(100, 0.2), noisy(100, 3.0, first=(90.0,))], [])
    assert low < 0.2 and 3.0 < high < 9.0


@pytest.mark.parametrize("trained", [[], [[]], [[0.0, 0.0]]])
def test_without_losses_above_zero_there_is_a_range_all_the_same(trained):
    assert loss_range(trained, []) == (0.1, 1.0)


def test_curves_are_named_with_the_window_that_they_are_means_of(monkeypatch, tmp_path):
    history = [record(0, None, 0.7), *(record(step) for step in range(1, 31))]
    words, _, _ = drawn_text(monkeypatch, history, tmp_path / "loss.png")
    expected = ["training, each step", "training, mean of the last 25 steps", "held out, 0.7000 at the end"]
    assert words == expected
    words, _, _ = drawn_text(monkeypatch, history[:4], tmp_path / "loss.png")
    assert words[1] == "training, mean of the last 3 steps"


def test_several_modalities_are_named_each(monkeypatch, tmp_path):
    held_out = {"pictures": 0.5, "pictures with clouds": 0.4, "these without": 0.45, "points": 0.9}
    parts = {"losses": {"pictures": 0.5, "points": 1.0}, "held_out_losses": held_out}
    history = [StepRecord(step, 1.5, 0.5, 1e-3, 1.0, 10.0, **parts) for step in (1, 2)]
    words, _, _ = drawn_text(monkeypatch, history, tmp_path / "loss.png")
    assert words[:2] == ["pictures: training, each step", "pictures: training, mean of the last 2 steps"]
    assert words[2:4] == ["points: training, each step", "points: training, mean of the last 2 steps"]
    names = ["pictures", "pictures with clouds", "the same without clouds", "points"]
    losses = (0.5, 0.4, 0.45, 0.9)
    assert words[4:] == [f"{name}: held out, {loss:.4f} at the end" for name, loss in zip(names, losses, strict=True)]


def test_a_prompt_is_drawn_as_it_is_and_not_read_as_mathematics(tmp_path):
    draw_grid([(r"$\foo$ costs $5", [Image.new("RGB", (8, 8))])], tmp_path / "grid.png")
    assert (tmp_path / "grid.png").is_file()


@pytest.mark.slow  # another process imports everything
def test_drawing_leaves_the_users_own_figures_and_backend_alone(tmp_path):
    code = (
        "import sys; from mmpreproj.recipes.figures import draw_loss_curves; "
        "from mmpreproj.training.loop import StepRecord; from pathlib import Path; "
        f"draw_loss_curves([StepRecord(1, 0.5, None, 1e-3, 1.0, 10.0)], Path({str(tmp_path / 'loss.png')!r})); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
