"""Rectified flow: straight paths from pictures (σ = 0) to noise (σ = 1)."""

import torch
from torch import Tensor


def interpolate(clean: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
    """Mix a picture and noise: `z = (1 - σ)·x + σ·ε`.

    Args:
        clean: `x`, `[B, ...]`.
        noise: `ε`, the shape of `clean`.
        sigmas: `σ` in [0, 1], `[B]`.

    Returns:
        `z`, the shape of `clean`.

    Raises:
        ValueError: if the shapes do not agree.

    Source: arXiv 2403.03206, section 2 (rectified flow).
    """
    _check_shapes(clean, noise)
    if sigmas.shape != clean.shape[:1]:
        raise ValueError(f"sigmas must hold one value per sample, [{clean.shape[0]}]; got {list(sigmas.shape)}")
    sigmas = sigmas.view(-1, *[1] * (clean.ndim - 1))  # [B, 1, ...]
    return (1 - sigmas) * clean + sigmas * noise


def velocity(clean: Tensor, noise: Tensor) -> Tensor:
    """Return the regression target `ε - x`, the derivative of the path by σ, in the shape of `clean`.

    Raises:
        ValueError: if the shapes do not agree.

    Source: arXiv 2403.03206, section 2.
    """
    _check_shapes(clean, noise)
    return noise - clean


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """Move noise levels towards 1 for large pictures: `s·σ / (1 + (s - 1)·σ)`; `shift = 1` changes nothing.

    Source: arXiv 2403.03206, section 5.3.2, equation 23; the `shift` of diffusers' flow-matching schedulers.
    """
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def spread_sigmas(pictures: int, levels: int) -> Tensor:
    """Place a fixed grid of noise levels that is uniform over (0, 1) across all pictures together.

    Picture `i` gets one level in each of `levels` equal cells, at a place inside the cell that the golden ratio moves
    from picture to picture. A held-out loss on such a grid has no sampling noise between evaluations.

    Args:
        pictures: number of pictures P.
        levels: noise levels per picture K.

    Returns:
        `σ`, `[P, K]`, float32.
    """
    golden = 0.6180339887498949
    place = (torch.arange(pictures, dtype=torch.float64) * golden + 0.5) % 1  # [P]
    cell = torch.arange(levels, dtype=torch.float64)  # [K]
    return ((cell[None, :] + place[:, None]) / levels).float()


def _check_shapes(clean: Tensor, noise: Tensor) -> None:
    if clean.shape != noise.shape:
        raise ValueError(
            f"noise must have the shape of the clean sample, {list(clean.shape)}; got {list(noise.shape)}"
        )
