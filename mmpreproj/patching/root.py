"""The seam of positions at the model itself: tables from the latents' size, the mask of the text, the sin-cos table.

Plain module-level hooks, as at the attention modules: a pre-hook on the model hands tables and mask to every joint
attention through the model's own attention kwargs, so that a patched model is right in any pipeline or script; a hook
on the patch embedding takes the absolute positions out.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mmpreproj.core.scale import Scale
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import Argument, Family, PositionSeam
from mmpreproj.patching.hooks import CHILD, remove_hook
from mmpreproj.patching.tables import Grid, rotary_tables

TABLES = "rotary_tables"
MASK = "attention_mask"


class RootAdapter(nn.Module):
    """One adapter's part at the model: its positions, and how strongly the absolute ones are removed.

    Args:
        config: the adapter's settings.
        device: where the scale is made.
    """

    def __init__(self, config: PreProjConfig, *, device: torch.device | None = None) -> None:
        super().__init__()
        # Not the config itself: a compiled graph would be bound to the object, which a swap in place replaces.
        self.positions = config.positions
        self.mask_padding = config.mask_padding
        self.enabled = True
        self.suspended = 0
        self.scale = Scale(device=device)

    @property
    def takes_part(self) -> bool:
        """Whether the adapter is switched on, and in no `disabled` block."""
        return self.enabled and not self.suspended

    @property
    def removes_absolute(self) -> bool:
        """Whether the base's sin-cos table is taken out of the residual stream."""
        return self.positions is not None and self.positions.absolute == "remove"

    @property
    def masks_padding(self) -> bool:
        """Whether the adapter acts, and wants attention kept from padding."""
        return self.takes_part and self.mask_padding and self.scale.factor != 0

    def forward(self, stock: Tensor, bare: Tensor) -> Tensor:
        """Go from patches with absolute positions `[B, N, D]` to those without, by the scale; exact at 0 and at 1."""
        wide = torch.promote_types(stock.dtype, torch.float32)
        weight = self.scale(torch.ones_like(stock[:1, :1, :1], dtype=wide))
        return torch.lerp(stock.to(wide), bare.to(wide), weight).to(stock.dtype)


class RootLayer(nn.Module):
    """The child `preproj` of a patched model and of its patch embedding, which is one and the same.

    Args:
        family: the row of the table.
        head_width: width of an attention head.
        patch_size: side of a patch, in latent cells.
    """

    def __init__(self, family: Family, *, head_width: int, patch_size: int) -> None:
        super().__init__()
        self.family = family
        self.head_width = head_width
        self.patch_size = patch_size
        self.adapters = nn.ModuleDict()

    @property
    def seam(self) -> PositionSeam:
        """Where the model's positions can be set."""
        return cast(PositionSeam, self.family.seam)

    def active(self) -> dict[str, RootAdapter]:
        """Return the adapters that take part, by name."""
        parts = {name: cast(RootAdapter, adapter) for name, adapter in self.adapters.items()}
        return {name: adapter for name, adapter in parts.items() if adapter.takes_part}


def bring_positions(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add rotary tables, and the mask of image and text, to what a model's joint attentions are called with."""
    layer = root_layer(model)
    seam = layer.seam
    latents, text = _read(seam.latents, args, kwargs), _read(seam.text, args, kwargs)
    if not (isinstance(latents, Tensor) and latents.ndim == 4 and isinstance(text, Tensor) and text.ndim == 3):
        return None  # the model says what is wrong with them
    given = _read(seam.attention_kwargs, args, kwargs) or {}
    grid = Grid(latents.shape[-2] // layer.patch_size, latents.shape[-1] // layer.patch_size, text.shape[1])
    tables = {
        name: rotary_tables(adapter.positions, grid, head_width=layer.head_width, device=latents.device).packed()
        for name, adapter in layer.active().items()
        if adapter.positions is not None
    }
    brought = {**given, TABLES: tables}
    if given.get(MASK) is not None:
        brought[MASK] = joint_mask(given[MASK], text, patches=grid.rows * grid.columns)
    return _replace(seam.attention_kwargs, brought, args, kwargs)


def joint_mask(mask: Any, text: Tensor, *, patches: int) -> Tensor:
    """Turn a text's mask into that of image and text, image first.

    Args:
        mask: `[B, L]` or `[2B, L]`, true or 1 at tokens, false or 0 at padding.
        text: `[B, L, D]`.
        patches: number N of image tokens, all of which may be attended to.

    Returns:
        Truth values `[B, N + L]` on the text's device.

    A mask of twice as many rows is that of negative prompts and prompts, by a pipeline that calls the model with the
    prompts alone, as for skip-layer guidance: then the latter half counts.

    Raises:
        TypeError: if the mask is no tensor of truth values or whole numbers.
        ValueError: if its shape is not that of the text.
    """
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{MASK} must be a tensor of truth values, or of 1 at tokens and 0 at padding; got {kind}")
    if mask.shape[0] == 2 * text.shape[0]:
        mask = mask[text.shape[0] :]
    if mask.shape != text.shape[:2]:
        raise ValueError(
            f"{MASK} must have the shape of the text, {list(text.shape[:2])} (batch, tokens); got {list(mask.shape)}. "
            "With guidance a pipeline puts the negative prompts before the prompts: give the mask in that order"
        )
    image = torch.ones((mask.shape[0], patches), dtype=torch.bool, device=text.device)
    return torch.cat([image, mask.to(text.device) != 0], dim=1)  # [B, N + L]


class LargeLatents(tuple):
    """A single patch for the stock patch embedding, and the latents that are larger than its table."""

    latents: Tensor | None = None


def spare_the_table(embedding: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep latents that are larger than the sin-cos table from a patch embedding whose table is not used."""
    latents = _latents(args, kwargs)
    if not _is_beyond_table(embedding, latents) or _kept_share(embedding):
        return None
    side = embedding.patch_size
    patch = LargeLatents((latents[..., :side, :side],))
    patch.latents = latents
    return patch, {}


def remove_absolute(embedding: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    """Replace patches with absolute positions `[B, N, D]` by those without."""
    removing = [adapter for adapter in root_layer(embedding).active().values() if adapter.removes_absolute]
    if not removing:
        return output
    large = getattr(args, "latents", None)
    bare = _bare_patches(embedding, _latents(args, kwargs) if large is None else large)
    if large is not None:
        return bare
    if output.shape != bare.shape:
        raise RuntimeError(
            f"the patch embedding gives {list(output.shape)} for {list(bare.shape)} patches, so another hook splits "
            "its output before the absolute positions are removed; with context parallelism split the inputs of the "
            "first block in cp_plan, not the output of the patch embedding"
        )
    for adapter in removing:
        output = adapter(output, bare)
    return output


def attach_root(model: nn.Module, layer: RootLayer) -> None:
    """Make `layer` the child of a model and of its patch embedding, and register the hooks."""
    embedding = patch_embedding(model, layer.seam)
    for owner in (model, embedding):
        owner.add_module(CHILD, layer)
    model.register_forward_pre_hook(bring_positions, with_kwargs=True)
    embedding.register_forward_pre_hook(spare_the_table, with_kwargs=True)
    embedding.register_forward_hook(remove_absolute, with_kwargs=True)


def detach_root(model: nn.Module) -> None:
    """Take layer and hooks off a model and its patch embedding."""
    embedding = patch_embedding(model, root_layer(model).seam)
    remove_hook(model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs, bring_positions)
    remove_hook(embedding._forward_pre_hooks, embedding._forward_pre_hooks_with_kwargs, spare_the_table)
    remove_hook(embedding._forward_hooks, embedding._forward_hooks_with_kwargs, remove_absolute)
    for owner in (model, embedding):
        owner._modules.pop(CHILD, None)


def has_root(model: nn.Module) -> bool:
    """Tell whether a model carries a root layer."""
    return isinstance(model._modules.get(CHILD), RootLayer)


def is_root_attached(model: nn.Module) -> bool:
    """Tell whether a model carries a root layer, and it and its patch embedding all hooks."""
    if not has_root(model):
        return False
    embedding = patch_embedding(model, root_layer(model).seam)
    return (
        bring_positions in model._forward_pre_hooks.values()
        and spare_the_table in embedding._forward_pre_hooks.values()
        and remove_absolute in embedding._forward_hooks.values()
    )


def root_layer(module: nn.Module) -> RootLayer:
    """Return the root layer of a patched model or patch embedding."""
    return cast(RootLayer, module._modules[CHILD])


def patch_embedding(model: nn.Module, seam: PositionSeam) -> nn.Module:
    """Return what cuts a model's latents into patches."""
    return cast(nn.Module, getattr(model, seam.patch_embedding))


def absolute_removed(model: nn.Module) -> bool:
    """Tell whether a model's absolute positions are taken out in full, and with them the limit to its pictures."""
    return has_root(model) and not _kept_share(patch_embedding(model, root_layer(model).seam))


def _kept_share(embedding: nn.Module) -> float:
    """Return the share of the absolute positions that is left."""
    share = 1.0
    for adapter in root_layer(embedding).active().values():
        if adapter.removes_absolute:
            share *= 1 - adapter.scale.factor
    return share


def _bare_patches(embedding: Any, latents: Tensor) -> Tensor:
    patches = embedding.proj(latents)
    patches = patches.flatten(2).transpose(1, 2) if embedding.flatten else patches
    return embedding.norm(patches) if embedding.layer_norm else patches


def _is_beyond_table(embedding: Any, latents: Tensor) -> bool:
    limit = embedding.pos_embed_max_size
    return limit is not None and max(latents.shape[-2:]) // embedding.patch_size > limit


def _latents(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["latent"]


def _read(argument: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[argument.place] if argument.place < len(args) else kwargs.get(argument.name)


def _replace(
    argument: Argument, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if argument.place < len(args):
        return (*args[: argument.place], value, *args[argument.place + 1 :]), kwargs
    return args, {**kwargs, argument.name: value}
