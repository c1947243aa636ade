"""Between pixels and latents: a VAE's encode and decode with its scale and shift, in its own dtype."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mmpreproj.patching.lookup import unwrap
from mmpreproj.patching.positions.root import absolute_removed


def encode_pixels(vae: Any, pixels: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Encode pixels `[B, 3, H, W]` in [-1, 1] into latents `(x - shift) · scale`, `[B, C, H / f, W / f]`.

    Args:
        vae: an `AutoencoderKL`, whose posterior is sampled, or an `AutoencoderTiny`.
        pixels: on the VAE's device unless the VAE is offloaded.
        generator: draws the sample.

    Raises:
        ValueError: if the latents are not finite.
    """
    scale, shift = scale_and_shift(vae)
    encoded = vae.encode(_to_vae(vae, pixels))
    posterior = getattr(encoded, "latent_dist", None)
    latents = encoded.latents if posterior is None else posterior.sample(generator)
    latents = (latents - shift) * scale  # [B, C, H / f, W / f]
    check_finite(latents, "latents after encoding", f"the VAE ran in {vae.dtype}; try vae.to(torch.float32)")
    return latents


def encode_posterior(vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Encode pixels `[B, 3, H, W]` in [-1, 1] into the posterior of latents, shifted and scaled as they are used.

    Returns:
        Its mean and its standard deviation, `[B, C, H / f, W / f]` each, in the VAE's dtype; the latter is None for an
        `AutoencoderTiny`, which has none.

    Raises:
        ValueError: if they are not finite.
    """
    scale, shift = scale_and_shift(vae)
    encoded = vae.encode(_to_vae(vae, pixels))
    posterior = getattr(encoded, "latent_dist", None)
    mean, deviation = (encoded.latents, None) if posterior is None else (posterior.mean, posterior.std * scale)
    mean = (mean - shift) * scale  # [B, C, H / f, W / f]
    cause = f"the VAE ran in {vae.dtype}; try vae.to(torch.float32)"
    check_finite(mean, "latents after encoding", cause)
    if deviation is not None:
        check_finite(deviation, "standard deviations of latents", cause)
    return mean, deviation


def decode_to_pixels(vae: Any, latents: Tensor) -> Tensor:
    """Decode latents `[B, C, H / f, W / f]` into pixels `[B, 3, H, W]`, about in [-1, 1] and not clipped.

    Raises:
        ValueError: if the pixels are not finite.
    """
    scale, shift = scale_and_shift(vae)
    pixels = vae.decode(_to_vae(vae, latents) / scale + shift, return_dict=False)[0]  # [B, 3, H, W]
    check_finite(pixels, "pixels", f"the VAE ran in {vae.dtype} on finite latents; try vae.to(torch.float32)")
    return pixels


def scale_and_shift(vae: Any) -> tuple[float, float]:
    """Return a VAE's scale and shift; 1 and 0 where its config has none, or None."""
    scale, shift = vae.config.get("scaling_factor"), vae.config.get("shift_factor")
    return 1.0 if scale is None else scale, 0.0 if shift is None else shift


def check_finite(tensor: Tensor, what: str, cause: str) -> None:
    """Refuse a tensor with NaN or infinite values.

    Raises:
        ValueError: with the number of such values, `what` they are, and the `cause`.
    """
    finite = torch.isfinite(tensor)
    if not finite.all():
        count = tensor.numel() - int(finite.sum())
        raise ValueError(f"{count} of {tensor.numel()} {what} are NaN or infinite: {cause}")


def _to_vae(vae: Any, tensor: Tensor) -> Tensor:
    """Cast to the VAE's dtype and, if the VAE is offloaded, move to where it is about to run."""
    # `encode` and `decode` are not `forward`: accelerate's hooks bring the module there, but not its input.
    device = getattr(getattr(vae, "_hf_hook", None), "execution_device", None)
    return tensor.to(device=tensor.device if device is None else device, dtype=vae.dtype)


def largest_side(transformer: Any, *, vae_scale_factor: int) -> float:
    """Return the side, in pixels, of the largest square picture that a transformer has positions for.

    Infinite where its absolute positions are removed: rotary ones have no end.
    """
    if absolute_removed(unwrap(transformer)):
        return math.inf
    settings = transformer.config
    return settings.pos_embed_max_size * settings.patch_size * vae_scale_factor
