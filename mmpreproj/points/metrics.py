"""How close point clouds are, and how well a generated set of clouds stands for a reference set.

Source of the set scores: arXiv 1906.12320 (PointFlow), section 5.1. All of it is computed and returned in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2**22  # most point-to-point distances held at once: 16 MiB


def chamfer_distance(first: Tensor, second: Tensor) -> Tensor:
    """Measure each cloud of one batch against the same place of the other.

    The convention: squared Euclidean distance to the nearest point, averaged over the points of a cloud, summed over
    both ways. Other texts sum over the points, halve the sum, or leave out the square: such figures do not compare.

    Args:
        first: clouds, `[B, P, 3]`, in any unit of length.
        second: clouds in the same unit, `[B, Q, 3]`.

    Returns:
        Squared lengths, float32 `[B]`. A cloud with a NaN gives NaN.

    Raises:
        TypeError: if the clouds are not floating-point.
        ValueError: if a shape is wrong, a cloud has no points, or the batches differ in size or device.

    Source: arXiv 1906.12320, section 5.1, equation for CD; there the points are summed, here averaged.
    """
    _check_clouds(first, second)
    if len(first) != len(second):
        raise ValueError(
            f"first holds {len(first)} clouds and second {len(second)}; chamfer_distance takes them pair by pair: "
            "give as many of each, or call pairwise_chamfer for all pairs"
        )
    first, second = first.float(), second.float()
    at_once = max(1, BLOCK // (first.shape[1] * second.shape[1]))
    pairs = zip(first.split(at_once), second.split(at_once), strict=True)
    return torch.cat([_chamfer(some, others) for some, others in pairs])  # [B]


def pairwise_chamfer(first: Tensor, second: Tensor) -> Tensor:
    """Measure every cloud of one set against every cloud of the other, as `chamfer_distance` does.

    The cost is `A·B·P·Q` point-to-point distances, of which only a few million are held at once.

    Args:
        first: clouds, `[A, P, 3]`, in any unit of length.
        second: clouds in the same unit, `[B, Q, 3]`.

    Returns:
        Squared lengths, float32 `[A, B]`.

    Raises:
        TypeError: if the clouds are not floating-point.
        ValueError: if a shape is wrong, a cloud has no points, or the devices differ.
    """
    _check_clouds(first, second)
    first, second = first.float(), second.float()
    rows = [chamfer_distance(cloud.expand(len(second), -1, -1), second) for cloud in first]  # A of [B]
    return torch.stack(rows)


def minimum_matching_distance(distances: Tensor) -> float:
    """Average, over the reference clouds, the distance to the nearest generated one (MMD); lower is better.

    Args:
        distances: from each generated cloud to each reference cloud, `[G, R]`, as `pairwise_chamfer` gives them.

    Raises:
        ValueError: if the shape is wrong or a distance is not finite.

    Source: arXiv 1906.12320, section 5.1.
    """
    _check_distances(distances, "distances")
    return float(distances.float().amin(dim=0).mean())


def coverage(distances: Tensor) -> float:
    """Return the share of reference clouds that are the nearest neighbour of some generated one (COV); 1 is best.

    It tells whether the generated set is varied, not whether it is good: bad clouds cover too.

    Args:
        distances: from each generated cloud to each reference cloud, `[G, R]`, as `pairwise_chamfer` gives them.

    Returns:
        A share in (0, 1]; at most `G / R`. Of equally near references the first counts.

    Raises:
        ValueError: if the shape is wrong or a distance is not finite.

    Source: arXiv 1906.12320, section 5.1.
    """
    _check_distances(distances, "distances")
    return distances.argmin(dim=1).unique().numel() / distances.shape[1]


def nearest_neighbour_accuracy(
    generated_generated: Tensor, generated_reference: Tensor, reference_reference: Tensor
) -> float:
    """Tell two sets of clouds apart by leave-one-out nearest neighbours (1-NNA); 0.5 is ideal.

    Every cloud is guessed to come from the set of its nearest neighbour, itself left out. The share of right guesses
    is about 0.5 for two samples of one distribution, 1 for sets that lie apart, and 0 where each generated cloud
    copies a reference. A tie between the two sets counts as half a right guess.

    Args:
        generated_generated: distances among the generated clouds, `[N, N]`; the diagonal is not read.
        generated_reference: from each generated cloud to each reference cloud, `[N, N]`.
        reference_reference: distances among the reference clouds, `[N, N]`; the diagonal is not read.

    Returns:
        The accuracy, in [0, 1].

    Raises:
        ValueError: if a shape is wrong, a distance is not finite, the sets differ in size (chance would no longer be
            0.5), or they hold fewer than two clouds.

    Source: arXiv 1610.06545, section 3, with the 1-NN classifier of arXiv 1906.12320, section 5.1.
    """
    _check_two_samples(generated_generated, generated_reference, reference_reference)
    across = generated_reference.float()
    right = [
        _own_set_is_nearer(generated_generated.float(), across.amin(dim=1)),
        _own_set_is_nearer(reference_reference.float(), across.amin(dim=0)),
    ]
    return float(torch.cat(right).mean())


def _chamfer(first: Tensor, second: Tensor) -> Tensor:
    """Measure pairs of clouds, `[b, P, 3]` and `[b, Q, 3]`, a slice of the first's points at a time."""
    rows = max(1, BLOCK // (len(first) * second.shape[1]))
    there: list[Tensor] = []
    back = first.new_full(second.shape[:2], torch.inf)  # [b, Q]
    for points in first.split(rows, dim=1):
        # Not by matrix products, which cancel: the distance of a cloud to itself would not be 0.
        distances = torch.cdist(points, second, compute_mode="donot_use_mm_for_euclid_dist")  # [b, p, Q]
        there.append(distances.amin(dim=2))
        back = torch.minimum(back, distances.amin(dim=1))
    return torch.cat(there, dim=1).square().mean(dim=1) + back.square().mean(dim=1)  # [b]


def _own_set_is_nearer(own: Tensor, other: Tensor) -> Tensor:
    """Return 1 where the nearest of `own` `[N, N]`, itself left out, is nearer than `other` `[N]`; 0.5 for a tie."""
    itself = torch.eye(len(own), dtype=torch.bool, device=own.device)
    nearest = own.masked_fill(itself, torch.inf).amin(dim=1)  # [N]
    return (nearest < other).float() + 0.5 * (nearest == other).float()


def _check_clouds(first: Tensor, second: Tensor) -> None:
    for name, clouds in (("first", first), ("second", second)):
        if not clouds.is_floating_point():
            raise TypeError(f"{name} is {clouds.dtype}; expected floating-point coordinates: pass {name}.float()")
        if clouds.ndim != 3 or clouds.shape[-1] != 3:
            raise ValueError(
                f"{name} has shape {list(clouds.shape)}; expected clouds [number, points, 3]: "
                "add the first axis to a single cloud, and leave out features with [..., :3]"
            )
        if 0 in clouds.shape:
            raise ValueError(
                f"{name} has shape {list(clouds.shape)}; expected at least one cloud of at least one point"
            )
    if first.device != second.device:
        raise ValueError(f"first is on {first.device} and second on {second.device}; move both to one device")


def _check_distances(distances: Tensor, name: str) -> None:
    if distances.ndim != 2 or 0 in distances.shape:
        raise ValueError(
            f"{name} has shape {list(distances.shape)}; expected a matrix, one row a cloud: see pairwise_chamfer"
        )
    unusable = ~distances.isfinite().all(dim=1)
    if unusable.any():
        raise ValueError(
            f"{name} is not finite in {int(unusable.sum())} of {len(distances)} rows, the first of them row "
            f"{int(unusable.int().argmax())}; look for clouds with NaN or enormous coordinates and leave them out"
        )


def _check_two_samples(generated: Tensor, across: Tensor, reference: Tensor) -> None:
    named = {"generated_generated": generated, "generated_reference": across, "reference_reference": reference}
    for name, distances in named.items():
        _check_distances(distances, name)
    sizes = {name: list(distances.shape) for name, distances in named.items()}
    if any(size != [len(generated)] * 2 for size in sizes.values()):
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"got {listed}; expected three [N, N]: take as many reference clouds as generated ones")
    if len(generated) < 2:
        raise ValueError("each set holds a single cloud; leaving one out takes at least two of each")
