"""The seam: two stateless hooks on each patched attention module.

Plain module-level functions, so that a patched model can be pickled, deep-copied and compiled. The pre-hook makes
everything from `x_hat`: the features that attention reads, and what goes around attention. Torch hands the forward
hook the very arguments that the pre-hook returned, so the second part travels with them, and nothing is kept on a
module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from diffusers.models.attention_processor import FusedJointAttnProcessor2_0
from torch import Tensor, nn

from mmpreproj.patching.families import Stream
from mmpreproj.patching.layer import PreProjLayer
from mmpreproj.patching.positions.processor import is_ours

CHILD = "preproj"
POINT_CLOUD = "point_cloud"
POINT_MASK = "point_mask"
PROMPT_CLOUDS = "prompt_clouds"  # of our pipeline's prompts alone, whether or not negative ones stand before them


class ProjectedArguments(tuple):
    """No positional arguments, and what goes around the attention: by stream, `[B, N, D]`."""

    bypass: dict[str, Tensor] | None = None


class ProjectedKeywords(dict):
    """Keyword arguments of an attention call, and what goes around it: by stream, `[B, N, D]`."""

    bypass: dict[str, Tensor] | None = None


def project_streams(
    attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace each stream's normed tokens by its features before the attention reads them."""
    layer = layer_of(attention)
    _check_processor(attention, layer)
    _check_no_points(kwargs)
    positional, keywords, bypass = list(args), dict(kwargs), {}
    found = False
    for stream in layer.site.streams:
        tokens = _stream_tokens(stream, args, kwargs)
        if tokens is None:
            continue
        found = True
        features, skip = layer(tokens, stream.name)
        if skip is not None:
            bypass[stream.name] = skip
        if stream.position < len(positional):
            positional[stream.position] = features
        else:
            keywords[stream.argument] = features
    if not found:
        raise _nothing_found(attention, layer, args, kwargs)
    carrier = ProjectedKeywords(keywords)
    carrier.bypass = bypass
    if positional:  # kept plain: torch's full backward hooks build a tuple anew by its own class
        return tuple(positional), carrier
    arguments = ProjectedArguments()
    arguments.bypass = bypass
    return arguments, carrier


def add_content_skip(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Add each stream's content skip to its attention output, before the block gates it."""
    bypass = getattr(kwargs, "bypass", None)
    if bypass is None:
        bypass = getattr(args, "bypass", None)
    if bypass is None:
        raise RuntimeError(
            f"another forward pre-hook on this {type(attention).__name__} replaced its arguments after mmpreproj's, "
            "and with them the content skip; register that hook with prepend=True"
        )
    if not bypass:
        return output
    lone = not isinstance(output, (tuple, list))
    outputs = [output] if lone else list(output)
    for stream in layer_of(attention).site.streams:
        if stream.name in bypass:
            skip = bypass[stream.name]
            _check_output(attention, stream, outputs, skip)
            outputs[stream.output] = outputs[stream.output] + skip
        elif _stream_tokens(stream, args, kwargs) is None:
            _check_no_output(attention, stream, outputs)
    return outputs[0] if lone else _like(output, outputs)


def attach(attention: nn.Module, layer: PreProjLayer) -> None:
    """Make `layer` the child of an attention module and register the hooks."""
    attention.add_module(CHILD, layer)
    attention.register_forward_pre_hook(project_streams, with_kwargs=True)
    attention.register_forward_hook(add_content_skip, with_kwargs=True)


def detach(attention: nn.Module) -> PreProjLayer:
    """Take the layer and its hooks off an attention module and return the layer."""
    remove_hook(attention._forward_pre_hooks, attention._forward_pre_hooks_with_kwargs, project_streams)
    remove_hook(attention._forward_hooks, attention._forward_hooks_with_kwargs, add_content_skip)
    return cast(PreProjLayer, attention._modules.pop(CHILD))


@contextmanager
def without_layer(attention: nn.Module) -> Iterator[None]:
    """Take layer and hooks off for a `with` block, and put them back in their old places among other hooks."""
    layer = layer_of(attention)
    put_back = taken_off([attention], lambda: detach(attention))
    try:
        yield
    finally:
        attention.add_module(CHILD, layer)
        put_back()


def taken_off(modules: Sequence[nn.Module], take: Callable[[], Any]) -> Callable[[], None]:
    """Call what takes hooks off modules, and return what puts these hooks back in their places among others."""
    tables: list[dict[int, Any]] = [
        table
        for module in modules
        for table in (
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks,
            module._forward_hooks_with_kwargs,
        )
    ]
    before = [dict(table) for table in tables]
    take()
    ours = [old.keys() - table.keys() for old, table in zip(before, tables, strict=True)]

    def put_back() -> None:
        for table, old, own in zip(tables, before, ours, strict=True):
            merged = {key: hook for key, hook in old.items() if key in table or key in own} | table
            table.clear()
            table.update(merged)

    return put_back


def is_attached(attention: nn.Module) -> bool:
    """Tell whether a module carries a layer and both hooks."""
    return (
        isinstance(attention._modules.get(CHILD), PreProjLayer)
        and project_streams in attention._forward_pre_hooks.values()
        and add_content_skip in attention._forward_hooks.values()
    )


def layer_of(attention: nn.Module) -> PreProjLayer:
    """Return the layer of a patched attention module."""
    return cast(PreProjLayer, attention.preproj)


def remove_hook(hooks: dict[int, Any], with_kwargs: dict[int, bool], function: Any) -> None:
    """Take a function out of a module's table of hooks, found by identity."""
    # Handles do not survive pickling or deepcopy, functions do.
    for key in [key for key, hook in hooks.items() if hook is function]:
        del hooks[key]
        with_kwargs.pop(key, None)


def _stream_tokens(stream: Stream, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    tokens = args[stream.position] if stream.position < len(args) else kwargs.get(stream.argument)
    if not isinstance(tokens, (Tensor, type(None))):
        raise TypeError(
            f"{stream.argument!r}, which the row has for the {stream.name} stream, was given {type(tokens).__name__}, "
            "no tensor [B, N, D] of normed tokens. Correct Stream.argument, or have attention take each stream as an "
            "argument of its own"
        )
    return tokens


def _nothing_found(
    attention: nn.Module, layer: PreProjLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ValueError:
    wanted = ", ".join(f"{stream.argument!r} or place {stream.position}" for stream in layer.site.streams)
    return ValueError(
        f"{type(attention).__name__} was called with {len(args)} positional arguments and the keywords "
        f"{', '.join(kwargs) or 'none'}, so with no stream of its row ({wanted}). Correct Stream.argument"
    )


def _check_output(attention: nn.Module, stream: Stream, outputs: list[Any], skip: Tensor) -> None:
    """Refuse to add a skip to what is not its stream's output."""
    given = outputs[stream.output] if stream.output < len(outputs) else None
    if isinstance(given, Tensor) and given.shape == skip.shape:
        return
    problem = f"there are {len(outputs)}" if stream.output >= len(outputs) else f"it is not {list(skip.shape)}"
    raise ValueError(
        f"{type(attention).__name__} gives {_kinds(outputs)}, and the row has the {stream.name} stream at output "
        f"{stream.output}: {problem}. Correct Stream.output, say by discarded_by or Family.unread that nobody reads "
        "it, or have attention return a tensor, or a tuple of one for each stream"
    )


def _check_no_output(attention: nn.Module, stream: Stream, outputs: list[Any]) -> None:
    """Refuse an output of a stream that was not given, as attention has then taken its tokens by another argument."""
    if stream.output < len(outputs) and isinstance(outputs[stream.output], Tensor):
        raise ValueError(
            f"{type(attention).__name__} gives {_kinds(outputs)}, and the row has the {stream.name} stream at output "
            f"{stream.output}, but the call brought it no tokens ({stream.argument!r} or place {stream.position}). "
            "Correct Stream.argument, or Stream.output"
        )


def _kinds(outputs: list[Any]) -> str:
    return ", ".join(str(list(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in outputs)


def _like(output: tuple[Any, ...] | list[Any], outputs: list[Any]) -> tuple[Any, ...] | list[Any]:
    """Return outputs as a tuple, a named tuple or a list, as attention itself gave them."""
    if isinstance(output, list):
        return outputs
    return type(output)(*outputs) if hasattr(output, "_fields") else tuple(outputs)


def _check_no_points(kwargs: dict[str, Any]) -> None:
    """Refuse clouds that came as far as an attention, which would leave them out."""
    for key in (POINT_CLOUD, POINT_MASK, PROMPT_CLOUDS):
        if key in kwargs:
            raise ValueError(
                f"{key} was given to a model without a point path; add one with "
                "mmpreproj.points.add_point_path(transformer, PointPathConfig(…))"
            )


def _check_processor(attention: nn.Module, layer: PreProjLayer) -> None:
    """Refuse a processor that would leave out positions or mask, and one with which the stock model goes wrong.

    The latter is `fuse_qkv_projections`, with or without an adapter.
    """
    if layer.needs_processor and not is_ours(attention):
        found = type(getattr(attention, "processor", None)).__name__
        raise ValueError(
            f"{found} was put in the place of the attention processor that turns queries and keys by their positions "
            "and masks padding (as IP-Adapter, PAG, fuse_qkv_projections and set_attn_processor do), and knows "
            "neither. Put the former one back (model.unfuse_qkv_projections(), or set_attn_processor with the "
            "model.attn_processors of before), disable the adapter, or use one without positions and mask_padding"
        )
    if not isinstance(getattr(attention, "processor", None), FusedJointAttnProcessor2_0):
        return
    reason = None
    if layer.site.dual:
        reason = "cannot run the second, image-only attention of dual-attention blocks"
    elif getattr(attention, "norm_q", None) is not None:
        reason = "leaves out the norms of queries and keys that this model was trained with"
    if reason is not None:
        raise ValueError(
            f"fuse_qkv_projections() put a FusedJointAttnProcessor2_0 into this model, which {reason}, "
            "whether patched or not; call model.unfuse_qkv_projections()"
        )
