"""Read from diffusers' hooks where a model's weights are, and refuse where they can be neither read nor changed."""

from __future__ import annotations

import torch
from accelerate.hooks import AlignDevicesHook
from torch import nn

from mmpreproj.patching.lookup import unwrap
from mmpreproj.patching.onloading import diffusers_hook

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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


def placement(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Choose where new weights live: device and dtype of the module they join.

    Where its own dtype is for storage only, the one that layerwise casting computes in, or else fp32.
    """
    parameters = list(module.parameters())
    # Quantised weights may call themselves `meta` although they have values; a whole module on it has none.
    devices = [parameter.device for parameter in parameters if not parameter.is_meta] or [torch.device("meta")]
    device = torch.device("cpu") if not parameters or offloaded_to(module) is not None else devices[0]
    for parameter in parameters:
        if parameter.dtype in COMPUTE_DTYPES:
            return device, parameter.dtype
    casts = (diffusers_hook(part, "layerwise_casting") for part in module.modules())
    return device, next((cast.compute_dtype for cast in casts if cast is not None), torch.float32)


def offloaded_to(module: nn.Module) -> torch.device | str | int | None:
    """Return the device that accelerate brings a module's offloaded weights to; None if they are not offloaded."""
    for member in module.modules():
        hook = getattr(member, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            if isinstance(part, AlignDevicesHook) and part.offload:
                return part.execution_device
    return None
