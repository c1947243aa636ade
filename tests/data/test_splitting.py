"""Which pictures are held out: as many as asked for, by the seed alone, and what belongs together on one side."""

import pytest
import torch

from mmpreproj.data.splitting import split_held_out

# --- holding out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 19])
def test_the_split_is_disjoint_and_exhaustive(count):
    train, held_out = split_held_out([f"c{i}" for i in range(20)], count)
    assert len(held_out) == count
    assert sorted(train + held_out) == list(range(20))
    assert (train, held_out) == (sorted(train), sorted(held_out))


def test_the_split_depends_on_the_seed_alone():
    captions = [f"c{i}" for i in range(50)]
    torch.manual_seed(1)
    first = split_held_out(captions, 10, seed=3)
    torch.manual_seed(2)
    assert split_held_out(captions, 10, seed=3) == first
    assert split_held_out(captions, 10, seed=4) != first


def test_named_captions_are_always_trained_on_each_time_they_occur():
    captions = ["apple", "pear"] * 10
    for seed in range(5):
        _, held_out = split_held_out(captions, 10, seed=seed, always_train=["apple"])
        assert {captions[index] for index in held_out} == {"pear"}


@pytest.mark.parametrize(("count", "always"), [(4, []), (5, []), (3, ["a", "b"])])
def test_holding_out_too_many_is_refused(count, always):
    with pytest.raises(ValueError, match=f"held_out asks for {count} of 4 pictures"):
        split_held_out(["a", "b", "c", "d"], count, always_train=always)


def test_an_unknown_caption_to_keep_is_named():
    with pytest.raises(ValueError, match="'plum', 'quince'"):
        split_held_out(["apple", "pear"], 1, always_train=["quince", "apple", "plum"])


# --- holding out what belongs together -------------------------------------------------------------------------------


def test_pictures_alike_in_something_are_held_out_together():
    captions = [f"c{place % 7}" for place in range(30)]
    for count in (0, 1, 5, 12):
        train, held_out = split_held_out(captions, count, seed=count, together=[captions])
        assert sorted(train + held_out) == list(range(30))
        assert not {captions[place] for place in train} & {captions[place] for place in held_out}
        assert count <= len(held_out) < count + 5


def test_what_is_connected_through_another_is_one_group_and_none_is_like_nothing():
    captions = ["a", "b", "c", "d", "e", "f"]
    views = ["x", "x", None, None, "y", None]
    rooms = [None, 1, 1, None, None, None]
    groups = [{0, 1, 2}, {3}, {4}, {5}]
    for seed in range(12):
        _, held_out = split_held_out(captions, 1, seed=seed, together=[views, rooms])
        assert set(held_out) in groups


def test_captions_to_keep_hold_their_whole_group():
    captions, shapes = ["a", "b", "c", "d"] * 3, ["x", "x", "y", "z"] * 3
    for seed in range(5):
        _, held_out = split_held_out(captions, 3, seed=seed, always_train=["b"], together=[shapes])
        assert {captions[place] for place in held_out} <= {"c", "d"}


@pytest.mark.parametrize("captions", [["a"] * 4, ["a", "a", "a", "b"]])
def test_groups_that_leave_too_few_are_refused(captions):
    with pytest.raises(ValueError, match=r"held_out asks for 3 of 4 pictures, but those that belong together"):
        split_held_out(captions, 3, always_train=["b"] if "b" in captions else [], together=[captions, ["s"] * 4])
