"""The model card of a saved adapter, and the picture in it, looked at as pixels."""

import os

import numpy as np
import pytest
from huggingface_hub import ModelCard
from PIL import Image

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.patching.files.card import draw_profile
from mmpreproj.patching.profile import GainRow, Profile, ProfileRow

BAR = (0x2B, 0x5D, 0x8C)


def count(path, colour):
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return int((np.abs(pixels - np.array(colour)).max(axis=-1) < 12).sum())


def row(block, skip=0.3, down=0.2, attention="attn", weights="shared"):
    return ProfileRow(
        block, attention, weights, skip, None if skip is None else 0.1, down, None if down is None else 0.1
    )


def test_a_card_says_what_the_adapter_is_and_shows_its_profile(transformer, shake, tmp_path):
    report = mmpreproj.patch(transformer, PreProjConfig(expansion=1.5, blocks=[1]))
    shake(transformer)
    mmpreproj.save(transformer, tmp_path, base_model="someone/some-base")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("mmpreproj", "someone/some-base")
    for said in (
        f"| parameters | {report.parameters:,} |",
        "| `expansion` | 1.5 |",
        "| blocks | 1 |",
        "](profile.png)",
    ):
        assert said in card.text
    assert str(mmpreproj.profile(transformer)) in card.text
    assert count(tmp_path / "profile.png", BAR) > 1000


@pytest.mark.parametrize("source", ["{folder}", "./base", "../base", "a/b/c"])
def test_a_base_that_is_a_folder_is_no_hub_id(transformer, tmp_path, source):
    source = source.format(folder=tmp_path)
    mmpreproj.patch(transformer)
    mmpreproj.save(transformer, tmp_path, base_model=source)
    assert ModelCard.load(tmp_path / "README.md").data.base_model is None
    assert source not in (tmp_path / "README.md").read_text()


def test_a_readme_of_ones_own_is_left_alone_and_ours_is_written_anew(transformer, shake, tmp_path):
    mmpreproj.patch(transformer)
    mmpreproj.save(transformer, tmp_path)
    first = (tmp_path / "README.md").read_text()
    shake(transformer)
    mmpreproj.save(transformer, tmp_path)
    assert (tmp_path / "README.md").read_text() != first
    (tmp_path / "README.md").write_text("my own words")
    mmpreproj.save(transformer, tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own words"


def test_no_card_where_none_is_wanted(transformer, tmp_path):
    mmpreproj.patch(transformer)
    mmpreproj.save(transformer, tmp_path, card=False)
    assert sorted(os.listdir(tmp_path)) == ["adapter_config.json", "adapter_model.safetensors"]


def test_the_profile_draws_higher_bars_for_larger_norms(tmp_path):
    bar = (0x2B, 0x5D, 0x8C)
    draw_profile(Profile((row(0, 0.3, 0.3), row(1, 0.3, 0.3))), tmp_path / "full.png")
    draw_profile(Profile((row(0, 0.3, 0.3), row(1, 0.03, 0.03))), tmp_path / "half.png")
    assert count(tmp_path / "full.png", bar) > 1.6 * count(tmp_path / "half.png", bar)


@pytest.mark.parametrize(
    "rows",
    [
        (row(0, down=None), row(1, down=None)),
        (row(0, skip=None),),
        (row(0), row(0, attention="attn2"), row(1, weights="text"), row(1, weights="image")),
    ],
)
def test_profiles_of_every_kind_of_adapter_can_be_drawn(tmp_path, rows):
    draw_profile(Profile(rows), tmp_path / "profile.png")
    assert count(tmp_path / "profile.png", (0x2B, 0x5D, 0x8C)) > 100


@pytest.mark.parametrize("rows", [(), (row(0), row(1))])
def test_gains_are_drawn_beside_the_norms_or_alone(tmp_path, rows):
    gains = tuple(GainRow(0, "attn", stream, size) for stream, size in (("image", 0.4), ("text", 0.1)))
    draw_profile(Profile(rows, gains), tmp_path / "profile.png")
    assert Image.open(tmp_path / "profile.png").width == (1350 if rows else 450)
    assert count(tmp_path / "profile.png", BAR) > 100
