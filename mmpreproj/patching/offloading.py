"""Read from diffusers' hooks where a model's weights are, and refuse where they can be neither read nor changed."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmpreproj.patching.lookup import unwrap


def diffusers_hook(module: nn.Module, name: str) -> Any:
    """Return the diffusers hook of that name on a module, None if there is none."""
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(name)


def check_values_present(model: nn.Module) -> None:
    """Refuse a model that diffusers' group offloading keeps on disk.

    Between two runs its tensors hold whatever was in memory. What is read from them are no weights, what is written to
    them is lost when the next run reads the files, and the files are not written anew for other modules.

    Raises:
        ValueError: naming the way out.
    """
    for module in unwrap(model).modules():
        hook = diffusers_hook(module, "group_offloading")
        if hook is not None and hook.config.offload_to_disk_path is not None:
            raise ValueError(
                f"group offloading keeps the weights of this {type(unwrap(model)).__name__} on disk in "
                f"{hook.config.offload_to_disk_path}, where adapters cannot be added, read, changed or removed; do "
                "that before you enable it, or enable it without offload_to_disk_path"
            )
