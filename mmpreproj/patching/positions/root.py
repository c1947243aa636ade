"""The seam of positions at the model itself: tables from the latents' size, the mask of the text, the sin-cos table.

Plain module-level hooks, as at the attention modules: a pre-hook on the model hands tables and mask to every joint
attention through the model's own attention kwargs, so that a patched model is right in any pipeline or script; a hook
on the patch embedding takes the absolute positions out.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import Family, PositionSeam
from mmpreproj.patching.hooks import CHILD, remove_hook
from mmpreproj.patching.model_part import ModelPart
from mmpreproj.patching.positions.tables import Grid, rotary_tables

TABLES = "rotary_tables"
MASK = "attention_mask"
PADDING = "padding_mask"


class RootAdapter(ModelPart):
    """One adapter's part at the model: its positions, and how strongly the absolute ones are removed.

    Args:
        config: the adapter's settings.
        device: where the scale is made.
    """

    def __init__(self, config: PreProjConfig, *, device: torch.device | None = None) -> None:
        super().__init__(device=device)
        # Not the config itself: a compiled graph would be bound to the object, which a swap in place replaces.
        self.positions = config.positions
        self.mask_padding = config.mask_padding

    @property
    def removes_absolute(self) -> bool:
        """Whether the base's sin-cos table is taken out of the residual stream."""
        return self.positions is not None and self.positions.absolute == "remove"

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
    latents, text = seam.latents.read(args, kwargs), seam.text.read(args, kwargs)
    if not (isinstance(latents, Tensor) and latents.ndim == 4 and isinstance(text, Tensor) and text.ndim == 3):
        return None  # the model says what is wrong with them
    given = seam.attention_kwargs.read(args, kwargs) or {}
    grid = Grid(latents.shape[-2] // layer.patch_size, latents.shape[-1] // layer.patch_size, text.shape[1])
    tables = {
        name: rotary_tables(adapter.positions, grid, head_width=layer.head_width, device=latents.device).packed()
        for name, adapter in layer.active().items()
        if adapter.positions is not None
    }
    brought = {**given, TABLES: tables}
    mask = _mask_of(layer, brought.pop(PADDING, None), brought.pop(MASK, None), batch=text.shape[0])
    if mask is not None:
        brought[MASK] = joint_mask(mask, text, patches=grid.rows * grid.columns)
    return seam.attention_kwargs.replace(brought, args, kwargs)


def _mask_of(layer: RootLayer, padding: Tensor | None, mask: Any, *, batch: int) -> Any:
    """Choose the mask of a text: the caller's, else the pipeline's if an adapter wants it; none if no adapter acts."""
    if mask is None and padding is None:
        return None
    acting = [adapter for adapter in layer.active().values() if adapter.acts]
    if mask is not None:
        return mask if acting else None  # the base ignores it
    if padding is None or not any(adapter.mask_padding for adapter in acting):
        return None
    # Negative prompts come first. For skip-layer guidance a pipeline calls the model with the prompts alone.
    return padding[batch:] if padding.shape[0] == 2 * batch else padding


def joint_mask(mask: Any, text: Tensor, *, patches: int) -> Tensor:
    """Turn a text's mask into that of image and text, image first.

    Args:
        mask: `[B, L]`, true or 1 at tokens, false or 0 at padding.
        text: `[B, L, D]`.
        patches: number N of image tokens, all of which may be attended to.

    Returns:
        Truth values `[B, N + L]` on the text's device.

    Raises:
        TypeError: if the mask is no tensor of truth values or whole numbers.
        ValueError: if its shape is not that of the text.
    """
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{MASK} must be a tensor of truth values, or of 1 at tokens and 0 at padding; got {kind}")
    if mask.shape != text.shape[:2]:
        raise ValueError(
            f"{MASK} must have the shape of the text, {list(text.shape[:2])} (batch, tokens); got {list(mask.shape)}. "
            "With guidance a pipeline puts the negative prompts before the prompts: give the mask in that order"
        )
    image = torch.ones((mask.shape[0], patches), dtype=torch.bool, device=text.device)
    return torch.cat([image, mask.to(text.device) != 0], dim=1)  # [B, N + L]


class LargeLatents(dict):
    """No keyword arguments for the stock patch embedding, and the latents that are larger than its table."""

    latents: Tensor | None = None


def spare_the_table(embedding: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keep latents that are larger than the sin-cos table from a patch embedding whose table is not used."""
    latents = _latents(args, kwargs)
    if not _is_beyond_table(embedding, latents):
        return None
    if _kept_share(embedding):
        _explain_limit(embedding)
        return None  # the model refuses them
    side = embedding.patch_size
    keywords = LargeLatents()
    keywords.latents = latents
    return (latents[..., :side, :side],), keywords


def remove_absolute(embedding: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    """Replace patches with absolute positions `[B, N, D]` by those without."""
    removing = [adapter for adapter in root_layer(embedding).active().values() if _removes(adapter)]
    if not removing:
        return output
    large = getattr(kwargs, "latents", None)
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
    # First, so that other hooks act on patches without positions, rather than on what is replaced.
    embedding.register_forward_hook(remove_absolute, with_kwargs=True, prepend=True)


def detach_root(owner: nn.Module) -> None:
    """Take layer and hooks off a model, or off a patch embedding."""
    remove_hook(owner._forward_pre_hooks, owner._forward_pre_hooks_with_kwargs, bring_positions)
    remove_hook(owner._forward_pre_hooks, owner._forward_pre_hooks_with_kwargs, spare_the_table)
    remove_hook(owner._forward_hooks, owner._forward_hooks_with_kwargs, remove_absolute)
    owner._modules.pop(CHILD, None)


def has_root(model: nn.Module) -> bool:
    """Tell whether a model carries a root layer."""
    return CHILD in model._modules and isinstance(model._modules[CHILD], RootLayer)


def is_model(owner: nn.Module) -> bool:
    """Tell a patched model from its patch embedding."""
    return hasattr(owner, root_layer(owner).family.blocks)


def is_root_attached(model: nn.Module) -> bool:
    """Tell whether a model carries a root layer, and it and its patch embedding all hooks."""
    if not has_root(model):
        return False
    embeddings = list(patch_embedding(model, root_layer(model).seam).modules())  # also inside a wrapper
    return (
        bring_positions in model._forward_pre_hooks.values()
        and any(spare_the_table in part._forward_pre_hooks.values() for part in embeddings)
        and any(remove_absolute in part._forward_hooks.values() for part in embeddings)
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


def _explain_limit(embedding: Any) -> None:
    adapters = (cast(RootAdapter, adapter) for adapter in root_layer(embedding).adapters.values())
    if any(adapter.removes_absolute for adapter in adapters):
        raise ValueError(
            f"these latents have more patches a side than the sin-cos table, {embedding.pos_embed_max_size}, and the "
            "adapter that removes it is switched off or not at scale 1 in every block, so a share of the table is "
            "back; call mmpreproj.enable(model) and mmpreproj.set_scale(model, 1.0) for larger pictures"
        )


def _removes(adapter: RootAdapter) -> bool:
    """Tell whether an adapter takes a share of the table out; under a compiler its scale is not looked at."""
    return adapter.removes_absolute and (torch.compiler.is_compiling() or adapter.scale.factor != 0)


def _bare_patches(embedding: Any, latents: Tensor) -> Tensor:
    # Whoever brings weights along for the length of `forward` has taken them away again before a hook runs.
    with align_module_device(embedding) if hasattr(embedding, "_hf_hook") else nullcontext():
        patches = embedding.proj(latents)
    patches = patches.flatten(2).transpose(1, 2) if embedding.flatten else patches
    return embedding.norm(patches) if embedding.layer_norm else patches


def _is_beyond_table(embedding: Any, latents: Tensor) -> bool:
    limit = embedding.pos_embed_max_size
    return limit is not None and max(latents.shape[-2:]) // embedding.patch_size > limit


def _latents(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["latent"]
