"""The table of model families: where the attention sits, and which argument is which stream.

A family is data. To patch a model that is not listed, write a row of your own and pass it to `patch(family=…)`.
"""

from __future__ import annotations

from torch import nn

from mmpreproj.patching.families.language import LANGUAGE
from mmpreproj.patching.families.multimodal import MULTIMODAL
from mmpreproj.patching.families.refused import REFUSED
from mmpreproj.patching.families.row import AttentionSite, Family, Stream
from mmpreproj.patching.families.seams import Argument, PointSeam, PositionSeam

__all__ = [
    "FAMILIES",
    "REFUSED",
    "Argument",
    "AttentionSite",
    "Family",
    "PointSeam",
    "PositionSeam",
    "Stream",
    "find_family",
    "joint_blocks",
]

FAMILIES: tuple[Family, ...] = (*MULTIMODAL, *LANGUAGE)


def find_family(model: nn.Module) -> Family:
    """Find the row for a model by its class or a base class of it.

    Raises:
        TypeError: if the table does not know the model; with the reason where the class is one of `REFUSED`.
    """
    rows = {family.model_class: family for family in FAMILIES}
    for base in type(model).__mro__:
        if base.__name__ in rows:
            return rows[base.__name__]
    reasons = (REFUSED[base.__name__] for base in type(model).__mro__ if base.__name__ in REFUSED)
    reason = "".join(f": {reason}" for reason in list(reasons)[:1])
    raise TypeError(
        f"{type(model).__name__} has no attention blocks that mmpreproj knows{reason}. Known model classes: "
        f"{', '.join(rows)}. For another one, describe it with mmpreproj.patching.families.Family(…) and pass that "
        "row as patch(model, config, family=…), and so to load; docs/own_models.md shows how"
    )


def joint_blocks(model: nn.Module, family: Family) -> nn.ModuleList:
    """Return the blocks whose attention is patched.

    Raises:
        TypeError: if the model has no such module list, or an empty one.
    """
    blocks = _child(model, family.blocks)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        lists = [
            path for path, part in model.named_modules() if path and isinstance(part, nn.ModuleList) and len(part)
        ]
        raise TypeError(
            f"{type(model).__name__} has no blocks with attention to patch: {family.blocks!r} should be a non-empty "
            f"torch.nn.ModuleList, found {type(blocks).__name__}. Correct Family.blocks, or pass a row of your own as "
            f"family=… if this is another {family.model_class} than the table's; module lists there: "
            f"{', '.join(lists[:5]) or 'none'}"
        )
    return blocks


def _child(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
