"""The command line: help that answers at once, errors in one message, and each command on a tiny model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import transformers
import typer
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler
from huggingface_hub.utils import are_progress_bars_disabled
from PIL import Image
from transformers import BertConfig, BertModel, BertTokenizerFast
from typer.testing import CliRunner

import mmpreproj
from mmpreproj import PointPathConfig, PreProjConfig
from mmpreproj.cli import app
from mmpreproj.cli.app import reports_errors
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.points import read_cloud, write_ply
from mmpreproj.recipes.scratch import build_transformer
from mmpreproj.training.config import ScratchModel
from mmpreproj.training.stopping import TrainingStoppedError

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = typer.main.get_command(app).commands
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "matplotlib", "timm", "datasets")


def invoke(*arguments):
    """Run a command in this process, on a wide terminal without colours."""
    settings = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", "_TYPER_FORCE_DISABLE_TERMINAL": "1"}
    return CliRunner(env=settings).invoke(app, [str(argument) for argument in arguments])


def python(*arguments, **settings):
    """Run Python as a user would, from anywhere."""
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        **settings,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny pipeline on disk: eight pixels square, a BERT of three words."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "square"]
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    folder = tmp_path_factory.mktemp("cli") / "base"
    with torch.random.fork_rng():
        torch.manual_seed(8)
        transformer = build_transformer(ScratchModel(width=32, heads=2, depth=2), resolution=8, text_width=24)
        for parameter in transformer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        PreProjSD3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(),
            text_encoder=BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=8, **sizes)),
            tokenizer=BertTokenizerFast(vocab={word: i for i, word in enumerate(vocabulary)}, model_max_length=6),
        ).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(base, tmp_path):
    transformer = PreProjSD3Pipeline.from_pretrained(base).transformer
    mmpreproj.patch(transformer)
    return mmpreproj.save(transformer, tmp_path / "adapter", base_model=str(base))


@pytest.fixture
def config(base, tmp_path):
    """A configuration file for four pictures."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    lines = []
    for index, colour in enumerate(("red", "green") * 2):
        Image.new("RGB", (8, 8), colour).save(pictures / f"{index}.png")
        lines.append(json.dumps({"file_name": f"{index}.png", "text": f"{colour} square"}))
    (pictures / "metadata.jsonl").write_text("\n".join(lines))
    values = {
        "model": str(base),
        "output": str(tmp_path / "run"),
        "data": {"folder": str(pictures), "resolution": 8, "held_out": 1},
        "steps": 50,
        "batch_size": 2,
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    assert set(COMMANDS) == {"quickstart", "train", "generate", "shapes", "view", "inspect", "probe"}
    assert all(re.search(rf"\b{name}\b", result.output) for name in COMMANDS)
    assert "--version" in result.output
    assert "--traceback" in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_lists_and_explains_its_options(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    for parameter in COMMANDS[command].params:
        shown = [parameter.metavar] if parameter.metavar else parameter.opts
        assert all(name.lower() in result.output.lower() for name in shown), shown
        assert parameter.help, parameter.name
        assert parameter.help[:20] in result.output, parameter.name
    assert "[[" not in result.output


def test_no_arguments_show_the_help():
    assert "Usage" in invoke().output


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from mmpreproj.cli import app\n"
        f"heavy = {HEAVY}\n"
        "assert not [name for name in heavy if name in sys.modules], 'import'\n"
        f"for arguments in (['--help'], ['--version'], *([name, '--help'] for name in {list(COMMANDS)})):\n"
        "    try:\n"
        "        app(arguments)\n"
        "    except SystemExit as error:\n"
        "        assert not error.code\n"
        "print('heavy:', [name for name in heavy if name in sys.modules])\n"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "heavy: []"


def test_a_mistake_in_a_configuration_is_answered_without_heavy_imports(config):
    code = (
        "import sys\n"
        "from mmpreproj.cli import app\n"
        "try:\n"
        f"    app(['train', {str(config)!r}, 'stps=3'])\n"
        "except SystemExit as error:\n"
        f"    print(error.code, [name for name in {HEAVY} if name in sys.modules])\n"
    )
    assert python("-c", code).stdout.splitlines() == ["1 []"]


def test_the_package_runs_as_a_module(tmp_path):
    result = python("-m", "mmpreproj", "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert all(name in result.stdout for name in COMMANDS)


def test_version_is_the_packages():
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"mmpreproj {mmpreproj.__version__}\n")


# --- errors ----------------------------------------------------------------------------------------------------------


def refused(*arguments):
    """Run a command that must fail, and return its one message."""
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("mmpreproj: ")
    assert "Traceback" not in result.output
    return result.stderr


def test_errors_are_one_message_and_exit_status_1(config, tmp_path):
    assert "no configuration file" in refused("train", tmp_path / "nowhere.yaml")
    assert "stps: unknown key; did you mean 'steps'?" in refused("train", config, "stps=3")
    assert "data.resolution: 9 pixels" in refused("train", config, "data.resolution=9")
    assert "there is no folder" in refused("inspect", tmp_path / "nowhere")
    assert "holds neither a pipeline" in refused("generate", "--model", tmp_path, "--prompt", "x")
    assert "stepz: unknown key" in refused("quickstart", "stepz=3")
    assert not (tmp_path / "run").exists()


def test_a_configuration_is_not_written_over_itself(config, tmp_path):
    target = tmp_path / "config.yaml"
    target.write_text(config.read_text())
    assert "which it was read from" in refused("train", target, f"output={tmp_path}", "--overwrite")
    assert target.read_text() == config.read_text()


def test_errors_of_a_real_process_have_no_traceback_unless_asked_for(tmp_path):
    shipped = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith("probe_"))
    assert {"quickstart", "sd3_medium_probe"} <= set(shipped)
    plain = python("-m", "mmpreproj", "train", "nowhere.yaml", cwd=tmp_path)
    assert (plain.returncode, plain.stdout) == (1, "")
    assert plain.stderr == (
        f"mmpreproj: there is no configuration file nowhere.yaml; shipped with mmpreproj are {', '.join(shipped)}\n"
    )
    long = python("-m", "mmpreproj", "--traceback", "train", "nowhere.yaml", cwd=tmp_path)
    assert long.returncode == 1
    assert "Traceback (most recent call last)" in long.stderr
    assert "FileNotFoundError: there is no configuration file nowhere.yaml" in long.stderr


def test_traceback_is_for_one_run_only(tmp_path):
    result = invoke("--traceback", "inspect", tmp_path / "nowhere")
    assert isinstance(result.exception, FileNotFoundError)
    refused("inspect", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("generate", "--prompt", "x"), "Missing option '--model'"),
        (("generate", "--model", "m"), "Missing option '--prompt'"),
        (("generate", "--model", "m", "--prompt", "x", "--steps", "0"), "--steps"),
        (("generate", "--model", "m", "--prompt", "x", "--precision", "fp8"), "fp8"),
        (("generate", "--model", "m", "--prompt", "x", "--size"), "--size"),
        (("shapes", "--prompt", "x"), "Missing option '--model'"),
        (("shapes", "--model", "m", "--prompt", "x", "--points", "1"), "--points"),
        (("shapes", "--model", "m", "--prompt", "x", "--steps", "0"), "--steps"),
        (("view", "a.ply"), "Missing argument"),
        (("view", "a.ply", "a.png", "--up", "w"), "--up"),
        (("train",), "Missing argument"),
        (("trian",), "No such command 'trian'"),
    ],
)
def test_misuse_is_explained_with_exit_status_2(arguments, match):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert match in result.output


# --- the commands ----------------------------------------------------------------------------------------------------


def test_train_takes_overrides_and_says_where_the_result_is(config, tmp_path):
    result = invoke("train", config, "steps=2", "optimizer.learning_rate=2e-3", "checkpoint_every=0")
    assert result.exit_code == 0, result.output
    assert re.search(r"held-out loss: \d+\.\d{4}\n", result.stdout)
    assert f"saved: {tmp_path / 'run' / 'adapter'}" in result.stdout
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (written["steps"], written["optimizer"]["learning_rate"]) == (2, 2e-3)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3

    assert "add --overwrite" in refused("train", config, "steps=1")
    again = invoke("train", config, "steps=1", "--overwrite", "data.held_out=0")
    assert again.exit_code == 0, again.output
    assert "held-out" not in again.stdout


def test_train_goes_on_from_a_checkpoint(config, tmp_path):
    assert invoke("train", config, "steps=3", "checkpoint_every=1", "keep_checkpoints=3").exit_code == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    again = invoke("train", config, "steps=3", "checkpoint_every=1", "keep_checkpoints=3", "--resume", "1")
    assert again.exit_code == 0, again.output
    gone_on = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in gone_on] == [json.loads(line)["loss"] for line in lines]
    assert "no checkpoint '7' to go on from" in refused("train", config, "--resume", "7")


@pytest.mark.parametrize("asked", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_run_that_is_stopped_saves_and_ends_as_shells_expect(config, tmp_path, asked):
    command = [sys.executable, "-m", "mmpreproj", "train", str(config), "steps=100000", "checkpoint_every=0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) > 2) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(asked)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + asked, said
    assert f"mmpreproj: {asked.name} came and was heard" in said
    assert "Traceback" not in said
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_run_that_another_process_stopped_ends_with_status_1():
    @reports_errors
    def stop():
        raise TrainingStoppedError(1, 2, None, checkpoint=Path("step-000001"))

    with pytest.raises(typer.Exit) as ended:
        stop()
    assert ended.value.exit_code == 1


def test_a_dry_run_says_what_a_run_would_be_and_leaves_nothing(config, tmp_path):
    result = invoke("train", config, "--dry-run", "optimizer.name=lion")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "ready"
    for said in ("4 of 4 pictures", "2 trained on, 2 held out", "states of lion", "adapter: "):
        assert said in result.stdout
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()
    assert "optimizer.name: timm has no optimiser 'lino'" in refused(
        "train", config, "--dry-run", "optimizer.name=lino"
    )
    assert "no checkpoint 'latest' to go on from" in refused("train", config, "--dry-run", "--resume", "latest")


def test_train_generate_and_inspect_fit_together(config, tmp_path):
    assert invoke("train", config, "steps=1", "mode=full", f"output={tmp_path / 'full'}").exit_code == 0
    model = tmp_path / "full" / "model"
    drawn = invoke("generate", "--model", model, "--prompt", "red square", "--steps", 2, "--output", tmp_path / "out")
    assert drawn.exit_code == 0, drawn.output
    assert "with its adapter" in drawn.stderr
    assert "skip profile" in invoke("inspect", tmp_path / "full").stdout


def test_loading_shows_no_bars_but_denoising_and_downloads_do(base, tmp_path):
    diffusers.utils.logging.enable_progress_bar()
    transformers.utils.logging.enable_progress_bar()
    result = invoke("generate", "--model", base, "--prompt", "red", "--steps", 1, "--output", tmp_path)
    assert "Loading" not in result.stderr
    assert "1/1" in result.stderr
    assert not are_progress_bars_disabled()


def test_generate_writes_pictures_named_by_prompt_and_seed(adapter, tmp_path):
    result = invoke(
        *("generate", "--model", adapter, "--prompt", "red square", "--prompt", "green", "--count", 2, "--seed", 5),
        *("--steps", 2, "--output", tmp_path / "out"),
    )
    assert result.exit_code == 0, result.output
    names = ["red-square-5.png", "red-square-6.png", "green-5.png", "green-6.png"]
    assert result.stdout.split() == [str(tmp_path / "out" / name) for name in names]
    assert all(Image.open(path).size == (8, 8) for path in result.stdout.split())


def test_generate_with_a_grid_writes_the_grid_alone_unless_told_otherwise(base, adapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = (
        "generate",
        "--model",
        base,
        "--adapter",
        adapter,
        "--prompt",
        "red",
        "--steps",
        1,
        "--grid",
        "new/g.png",
    )
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [os.path.join("new", "g.png")]
    assert not (tmp_path / "pictures").exists()
    assert invoke(*command, "--output", "out").stdout.split()[1:] == [os.path.join("out", "red-0.png")]
    Image.open(tmp_path / "new" / "g.png").verify()


def test_generate_writes_to_pictures_by_default(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("generate", "--model", base, "--prompt", "red", "--steps", 1, "--precision", "bf16")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "pictures" / "red-0.png").is_file()
    assert "without an adapter" in result.stderr


def test_inspect_shows_base_and_profile(adapter, base):
    result = invoke("inspect", adapter)
    assert result.exit_code == 0, result.output
    assert "SD3Transformer2DModel, width 32, depth 2, 2 heads" in result.stdout
    assert str(base) in result.stdout
    norm = next(iter(mmpreproj.profile(with_adapter(base, adapter)))).skip
    assert f"{norm:.4f} (from {norm:.4f})" in result.stdout


def with_adapter(base, adapter):
    transformer = PreProjSD3Pipeline.from_pretrained(base).transformer
    mmpreproj.load(transformer, adapter)
    return transformer


@pytest.mark.parametrize("name", ["2024", "a: b", "null", "[x]", "with space"])
def test_quickstart_takes_any_folder_as_output(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("a file where the folder would be")
    assert f"output: {name} is a file" in refused("quickstart", "--output", name)


def test_a_grid_of_an_unknown_kind_is_refused_before_anything_is_generated(tmp_path):
    assert "--grid takes a .png file" in refused("generate", "--model", tmp_path, "--prompt", "x", "--grid", "a.xyz")


@pytest.mark.parametrize(("size", "expected"), [("4", (4, 4)), ("8x4", (8, 4))])
def test_generate_takes_a_side_or_width_and_height(base, tmp_path, size, expected):
    command = ("generate", "--model", base, "--prompt", "red", "--steps", 1, "--size", size, "--output", tmp_path)
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    assert Image.open(result.stdout.strip()).size == expected


@pytest.mark.parametrize(
    ("size", "match"),
    [
        ("big", "size: expected a side such as 64, or width and height such as 48x32; got 'big'"),
        ("0", "size must be a side or a width and a height, of at least 1 pixel; got 0"),
    ],
)
def test_what_is_no_size_is_refused_before_a_model_is_loaded(tmp_path, size, match):
    assert match in refused("generate", "--model", tmp_path, "--prompt", "x", "--size", size)


def test_a_size_that_does_not_divide_is_refused(base):
    result = invoke("generate", "--model", base, "--prompt", "x", "--size", "8x5")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "mmpreproj: size: 5 pixels do not divide into patches of 4; take 4 or 8\n" in result.stderr


# --- point clouds ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pointed(base, tmp_path, shake):
    """The folder of an adapter with a point path, made for the tiny pipeline."""
    transformer = PreProjSD3Pipeline.from_pretrained(base).transformer
    mmpreproj.patch(transformer, PreProjConfig(points=PointPathConfig()))
    shake(transformer)
    return mmpreproj.save(transformer, tmp_path / "pointed", base_model=str(base))


@pytest.fixture
def ball(tmp_path):
    """A file with a cloud of thirty points."""
    write_ply(tmp_path / "ball.ply", np.random.default_rng(0).standard_normal((30, 3)))
    return tmp_path / "ball.ply"


def test_shapes_writes_clouds_and_pictures_named_by_prompt_and_seed(pointed, tmp_path):
    result = invoke(
        *("shapes", "--model", pointed, "--prompt", "red square", "--prompt", "green", "--count", 2, "--seed", 5),
        *("--steps", 2, "--points", 40, "--output", tmp_path / "out"),
    )
    assert result.exit_code == 0, result.output
    stems = ["red-square-5", "red-square-6", "green-5", "green-6"]
    paths = [tmp_path / "out" / f"{stem}.{suffix}" for stem in stems for suffix in ("ply", "png")]
    assert result.stdout.split() == [str(path) for path in paths]
    assert all(read_cloud(path).shape == (40, 3) for path in paths[::2])
    assert Image.open(paths[1]).width > 500
    assert "with its adapter" in result.stderr


def test_shapes_with_a_grid_writes_the_grid_alone_unless_told_otherwise(base, pointed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("shapes", "--model", base, "--adapter", pointed, "--prompt", "red", "--steps", 1, "--points", 9)
    result = invoke(*command, "--grid", "new/g.png", "--guidance", 1, "--precision", "bf16")
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [os.path.join("new", "g.png")]
    assert not (tmp_path / "shapes").exists()
    Image.open(tmp_path / "new" / "g.png").verify()
    assert invoke(*command).stdout.split() == [os.path.join("shapes", f"red-0.{suffix}") for suffix in ("ply", "png")]


def test_shapes_of_a_model_without_a_point_path_are_refused(adapter, base):
    for model in (base, adapter):
        result = invoke("shapes", "--model", model, "--prompt", "red")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "mmpreproj: SD3Transformer2DModel has no point path" in result.stderr
    assert "--grid takes a .png file" in refused("shapes", "--model", base, "--prompt", "x", "--grid", "a.ply")


def test_view_draws_clouds_and_meshes(ball, tmp_path):
    (tmp_path / "mesh.obj").write_text("v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 2 3\nf 1 2 4\nf 1 3 4\n")
    for cloud in (ball, tmp_path / "mesh.obj"):
        result = invoke("view", cloud, tmp_path / "new" / "out.png", "--up", "z", "--points", 20)
        assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'new' / 'out.png'}\n"), result.output
        Image.open(tmp_path / "new" / "out.png").verify()


def test_view_does_without_the_heavy_libraries(ball, tmp_path):
    heavy = [name for name in HEAVY if name != "matplotlib"]
    code = (
        "import sys\n"
        "from mmpreproj.cli import app\n"
        "try:\n"
        f"    app(['view', {str(ball)!r}, {str(tmp_path / 'out.png')!r}])\n"
        "except SystemExit as error:\n"
        f"    print(error.code, [name for name in {heavy} if name in sys.modules])\n"
    )
    assert python("-c", code).stdout.splitlines()[-1] == "0 []"


def test_a_cloud_that_cannot_be_read_is_one_clear_message(pointed, ball, tmp_path):
    (tmp_path / "empty.ply").write_text("")
    for cloud, reason in (("none.ply", "there is no such file"), ("empty.ply", "the file is empty")):
        expected = f"mmpreproj: cannot read the point cloud '{tmp_path / cloud}': {reason}\n"
        assert refused("view", tmp_path / cloud, tmp_path / "out.png") == expected
        shown = invoke("generate", "--model", pointed, "--prompt", "red", "--point-cloud", tmp_path / cloud)
        assert (shown.exit_code, shown.stdout) == (1, "")
        assert shown.stderr.endswith(expected)
    assert "the picture takes a .png file; got a.jpg" in refused("view", ball, "a.jpg")
    long = invoke("--traceback", "view", tmp_path / "none.ply", tmp_path / "out.png")
    assert type(long.exception).__name__ == "UnreadableCloudError"


def test_generate_shows_a_cloud(pointed, ball, base, tmp_path):
    command = ("generate", "--model", pointed, "--prompt", "red", "--steps", 2)
    bare, shown = (
        invoke(*command, "--output", tmp_path / name, *extra)
        for name, extra in (("bare", ()), ("shown", ("--point-cloud", ball)))
    )
    assert shown.exit_code == 0, shown.output
    pictures = [np.asarray(Image.open(result.stdout.strip())) for result in (bare, shown)]
    assert not np.array_equal(*pictures)
    without = invoke("generate", "--model", base, "--prompt", "red", "--point-cloud", ball)
    assert (without.exit_code, without.stdout) == (1, "")
    assert "mmpreproj: SD3Transformer2DModel has no point path" in without.stderr
