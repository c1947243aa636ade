"""The end of a run: weights first, and no figure that cannot be drawn costs them."""

import errno

import pytest
import torch

import mmpreproj
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.train import results


@pytest.mark.parametrize(
    ("name", "file"),
    [("draw_loss_curves", "loss.png"), ("draw_profile", "profile.png"), ("write_training_card", "adapter/README.md")],
)
def test_what_cannot_be_drawn_is_told_and_the_run_ends_with_its_weights(
    run, make_config, base, monkeypatch, name, file
):
    config = make_config()

    def fill(*given):
        (config.output / "loss.png").touch()
        assert (config.output / "adapter" / "adapter_model.safetensors").is_file()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(results, name, fill)
    done, screen = run(config)
    assert f"warning: {config.output / file} could not be written (No space left on device)" in screen.replace(
        "\n", ""
    )
    assert screen.count("warning: ") == 1
    others = {"loss.png", "profile.png", "adapter/README.md"} - {file}
    assert all((config.output / other).stat().st_size for other in others) and not (config.output / file).exists()
    fresh = PreProjSD3Pipeline.from_pretrained(base).transformer
    mmpreproj.load(fresh, done.saved)
    for (_, found), (_, expected) in zip(
        mmpreproj.named_parameters(fresh), mmpreproj.named_parameters(done.pipeline.transformer), strict=True
    ):
        assert torch.equal(found, expected)


def test_weights_that_cannot_be_written_end_the_run(run, make_config, monkeypatch):
    def fill(*given, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(results, "save", fill)
    with pytest.raises(OSError, match="No space left on device"):
        run(make_config())
