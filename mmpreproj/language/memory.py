"""How much memory a piece of work holds at most."""

from __future__ import annotations

import re
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what Linux takes for it, proc_pid_clear_refs(5)


class PeakMemory:
    """The most memory from here on: of a GPU's tensors, or of the whole process on Linux."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known = device.type == "cuda" or _reset_process()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peak(self) -> int | None:
        """Read the peak, in bytes; None where it cannot be had."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _process_peak() if self.known else None


def _reset_process() -> bool:
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _process_peak() -> int | None:
    found = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else None
