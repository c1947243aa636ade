"""The most memory that work holds: of the work alone, where the system tells it."""

import sys

import pytest
import torch

from mmpreproj.language import memory
from mmpreproj.language.memory import PeakMemory

SIZE = 64 << 20


def known():
    return PeakMemory(torch.device("cpu")).known


@pytest.mark.skipif(not (sys.platform == "linux" and known()), reason="needs a Linux that lets a peak be set back")
def test_the_peak_is_that_of_the_work_alone():
    """What was held before it begins, and is given back, does not count."""
    torch.ones(4 * SIZE, dtype=torch.uint8)
    least = PeakMemory(torch.device("cpu")).peak()
    work = PeakMemory(torch.device("cpu"))
    torch.ones(SIZE, dtype=torch.uint8)
    assert 0.9 * SIZE < work.peak() - least < 1.5 * SIZE


def test_where_the_system_does_not_tell_it_is_not_known(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "no" / "such")
    assert PeakMemory(torch.device("cpu")).peak() is None
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "clear")
    (tmp_path / "status").write_text("Name: python\nVmHWM:\t   12 kB\nVmRSS: 3 kB\n")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")
    assert PeakMemory(torch.device("cpu")).peak() == 12 * 1024
    assert (tmp_path / "clear").read_text() == "5"
    (tmp_path / "status").write_text("Name: python\n")
    assert PeakMemory(torch.device("cpu")).peak() is None
