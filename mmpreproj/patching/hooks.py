"""The seam: two stateless hooks on each patched attention module.

Plain module-level functions, so that a patched model can be pickled, deep-copied and compiled. Torch hands the forward
hook the arguments as the pre-hook replaced them, so nothing has to be kept between the two.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from mmpreproj.patching.families import Stream
from mmpreproj.patching.layer import PreProjLayer

CHILD = "preproj"


def project_streams(
    attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace each stream's normed tokens by its features before the attention reads them."""
    layer = layer_of(attention)
    positional, keywords = list(args), dict(kwargs)
    for stream in layer.site.streams:
        tokens = _stream_tokens(stream, args, kwargs)
        if tokens is None:
            continue
        features = layer.features(tokens, stream.name)
        if stream.position < len(positional):
            positional[stream.position] = features
        else:
            keywords[stream.argument] = features
    return tuple(positional), keywords


def add_content_skip(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Add each stream's content skip to its attention output, before the block gates it."""
    layer = layer_of(attention)
    lone = not isinstance(output, tuple)
    outputs = [output] if lone else list(output)
    for stream in layer.site.streams:
        features = _stream_tokens(stream, args, kwargs)
        if features is not None:
            outputs[stream.output] = layer.add_bypass(outputs[stream.output], features, stream.name)
    return outputs[0] if lone else tuple(outputs)


def attach(attention: nn.Module, layer: PreProjLayer) -> None:
    """Make `layer` the child of an attention module and register the hooks."""
    attention.add_module(CHILD, layer)
    attention.register_forward_pre_hook(project_streams, with_kwargs=True)
    attention.register_forward_hook(add_content_skip, with_kwargs=True)


def detach(attention: nn.Module) -> PreProjLayer:
    """Take the layer and its hooks off an attention module and return the layer."""
    _remove_hook(attention._forward_pre_hooks, attention._forward_pre_hooks_with_kwargs, project_streams)
    _remove_hook(attention._forward_hooks, attention._forward_hooks_with_kwargs, add_content_skip)
    return cast(PreProjLayer, attention._modules.pop(CHILD))


def layer_of(attention: nn.Module) -> PreProjLayer:
    """Return the layer of a patched attention module."""
    return cast(PreProjLayer, attention.preproj)


def _stream_tokens(stream: Stream, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return args[stream.position] if stream.position < len(args) else kwargs.get(stream.argument)


def _remove_hook(hooks: dict[int, Any], with_kwargs: dict[int, bool], function: Any) -> None:
    # Found by identity, not by handle: handles do not survive pickling or deepcopy, functions do.
    for key in [key for key, hook in hooks.items() if hook is function]:
        del hooks[key]
        with_kwargs.pop(key, None)
