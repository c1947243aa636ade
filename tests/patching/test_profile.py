import pytest
import torch

import mmpreproj
from mmpreproj import Positions, PreProjConfig


def norm(model: torch.nn.Module, key: str) -> float:
    return torch.linalg.vector_norm(model.state_dict()[key].double()).item()


@pytest.mark.parametrize("share", ["block", "stream"])
def test_rows_are_the_norms_of_each_set_of_weights(transformer, style: str, share: str, shake):
    mmpreproj.patch(transformer, PreProjConfig(share=share))
    start = {key: norm(transformer, key) for key, _ in mmpreproj.named_parameters(transformer)}
    shake(transformer)  # stands for training
    rows = list(mmpreproj.profile(transformer))
    weights = ["shared"] if share == "block" else ["image", "text"]
    sites = [(0, "attn", weights), (0, "attn2", weights[:1]), (1, "attn", weights)]
    expected = [
        (block, attention, key)
        for block, attention, keys in sites
        for key in keys
        if attention == "attn" or style == "sd35"
    ]
    assert [(row.block, row.attention, row.weights) for row in rows] == expected
    for row in rows:
        prefix = f"transformer_blocks.{row.block}.{row.attention}.preproj.adapters.default"
        down = f"{prefix}.pre_projection.{row.weights}.down.weight"
        skip = f"{prefix}.content_skip.{row.weights}.map.weight"
        assert row.down == pytest.approx(norm(transformer, down), rel=1e-5)
        assert row.down_initial == pytest.approx(start[down], rel=1e-5)
        assert row.down > 100 * row.down_initial > 0
        if row.block == 1 and row.weights == "text":
            assert row.skip is None and row.skip_initial is None, "the last block has no text skip"
        else:
            assert row.skip == pytest.approx(norm(transformer, skip), rel=1e-5)
            assert row.skip_initial == pytest.approx(start[skip], rel=1e-5)
            assert row.skip > 100 * row.skip_initial > 0


def test_norms_are_taken_in_fp32(transformer, shake):
    mmpreproj.patch(transformer.bfloat16())
    shake(transformer)
    for row in mmpreproj.profile(transformer):
        prefix = f"transformer_blocks.{row.block}.{row.attention}.preproj.adapters.default"
        assert row.skip == pytest.approx(norm(transformer, f"{prefix}.content_skip.shared.map.weight"), rel=1e-5)


def test_a_module_that_is_switched_off_has_no_norm(make_transformer):
    model = make_transformer()
    mmpreproj.patch(model, PreProjConfig(skip=False))
    assert all(row.skip is None and row.down is not None for row in mmpreproj.profile(model))
    mmpreproj.unpatch(model)
    mmpreproj.patch(model, PreProjConfig(pre_projection=False))
    assert all(row.down is None and row.skip is not None for row in mmpreproj.profile(model))


def test_table_shows_each_row_with_its_start(transformer):
    mmpreproj.patch(transformer, PreProjConfig(init_std=0.01))
    profile = mmpreproj.profile(transformer)
    lines = str(profile).splitlines()
    assert len(lines) == len(profile) + 1
    assert all(word in lines[0] for word in ("block", "attention", "weights", "‖W_skip‖", "‖W_down‖"))
    for line, row in zip(lines[1:], profile, strict=True):
        assert line.split()[:3] == [str(row.block), row.attention, row.weights]
        assert f"{row.skip:.4f} (from {row.skip_initial:.4f})" in line
        assert f"{row.down:.4f} (from {row.down_initial:.4f})" in line


def test_gains_are_their_mean_size_over_heads(transformer, shake):
    mmpreproj.patch(transformer, PreProjConfig(positions=Positions()))
    profile = mmpreproj.profile(transformer)
    assert {row.gain for row in profile.gains} == {0.0}
    shake(transformer)
    expected = {
        (name.split(".")[1], name.split(".")[2], name.split(".")[-2]): float(gain.abs().mean())
        for name, gain in mmpreproj.named_parameters(transformer)
        if name.endswith(".gain")
    }
    found = {(str(row.block), row.attention, row.stream): row.gain for row in mmpreproj.profile(transformer).gains}
    assert found == pytest.approx(expected)
    assert "mean |gain|" in str(profile)


def test_table_shows_what_is_missing_as_a_dash(make_transformer):
    model = make_transformer()
    mmpreproj.patch(model, PreProjConfig(skip=False))
    assert all(line.split()[3] == "-" for line in str(mmpreproj.profile(model)).splitlines()[1:])


def test_weights_without_values_have_no_norm(make_transformer):
    model = make_transformer().to("meta")
    mmpreproj.patch(model)
    assert all(row.skip is None and row.down_initial is None for row in mmpreproj.profile(model))
    assert "-" in str(mmpreproj.profile(model))
