"""Which pictures are trained on, and which are held out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch


def split_held_out(
    captions: Sequence[str],
    count: int,
    *,
    seed: int = 0,
    always_train: Sequence[str] = (),
    together: Sequence[Sequence[Hashable | None]] = (),
) -> tuple[list[int], list[int]]:
    """Split pictures into those to train on and those never to be trained on.

    Args:
        captions: one per picture.
        count: number of pictures to hold out.
        seed: of the random choice.
        always_train: captions that must stay among the training pictures.
        together: what must not be on both sides, a value for each picture, several times over: pictures that are alike
            in one of them are held out together, until there are `count` at least. None is like nothing else.

    Returns:
        Indices to train on and indices held out, each in ascending order.

    Raises:
        ValueError: if that leaves no picture to train on, or names a caption that is not there.
    """
    unknown = sorted(set(always_train) - set(captions))
    if unknown:
        raise ValueError(f"always_train names captions that the data does not have: {', '.join(map(repr, unknown))}")
    kept = set(always_train)
    free = [index for index, caption in enumerate(captions) if caption not in kept]
    if count > len(free) or count >= len(captions):
        raise ValueError(
            f"held_out asks for {count} of {len(captions)} pictures, which leaves none to train on; hold out fewer"
        )
    order = torch.randperm(len(free), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = sorted(free[place] for place in order[:count])
    if together:
        held_out = _whole_groups(together, [free[place] for place in order], count, kept=kept, captions=captions)
    left_out = set(held_out)
    return [index for index in range(len(captions)) if index not in left_out], held_out


def _whole_groups(
    together: Sequence[Sequence[Hashable | None]],
    order: Sequence[int],
    count: int,
    *,
    captions: Sequence[str],
    kept: set[str],
) -> list[int]:
    """Take pictures in an order, each with all that are alike, until there are `count` at least."""
    group = _groups(together, len(captions))
    fixed = {group[place] for place, caption in enumerate(captions) if caption in kept}
    members: dict[int, list[int]] = {}
    for place, number in enumerate(group):
        members.setdefault(number, []).append(place)
    held_out: set[int] = set()
    for index in order:
        if len(held_out) >= count:
            break
        if group[index] not in fixed:
            held_out.update(members[group[index]])
    if len(held_out) < count or len(held_out) == len(captions):
        raise ValueError(
            f"held_out asks for {count} of {len(captions)} pictures, but those that belong together (by caption, or "
            f"by a cloud that they share) leave {len(held_out)} to hold out and {len(captions) - len(held_out)} to "
            "train on; hold out fewer"
        )
    return sorted(held_out)


def _groups(together: Sequence[Sequence[Hashable | None]], count: int) -> list[int]:
    """Number the groups of pictures that are connected by being alike in something: `[count]`."""
    group = list(range(count))

    def root(place: int) -> int:
        while group[place] != place:
            place = group[place]
        return place

    for values in together:
        first: dict[Hashable, int] = {}
        for place, value in enumerate(values):
            if value is not None:
                group[root(place)] = root(first.setdefault(value, place))
    return [root(place) for place in range(count)]
