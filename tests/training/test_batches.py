"""The order of batches, against a slow walk in plain Python, and how they are loaded."""

import time
from collections import Counter, defaultdict, deque
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from mmpreproj.core.draws import Draw, generator_of
from mmpreproj.training import batches as module
from mmpreproj.training.batches import BucketBatches, fill_batches, make_loader, times_of

PROPERTY = settings(deadline=None, derandomize=True, database=None, max_examples=50)
GROUPS = st.lists(st.sampled_from(["wide", "square", "tall", (24, 44)]), min_size=1, max_size=40)
SEEDS = st.integers(0, 2**64 - 1)
MASK = 2**64 - 1


def take(batches, count):
    return list(islice(batches, count))


def drawn(groups, times=None, *, draws, seed=0):
    """The indices that a run draws before they are sorted into batches: one group, a batch a draw."""
    walk = BucketBatches([0] * len(groups), times, batch_size=1, seed=seed)
    return [draw.index for batch in take(walk, draws) for draw in batch]


def split_mix(state, place):
    """Return one number of SplitMix64's stream from a state; 0 gives e220a8397b1dcdaf first, as in Vigna's C."""
    bits = state + (place + 1) * 0x9E3779B97F4A7C15 & MASK
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
    return bits ^ bits >> 31


def slow_batches(groups, order, size):
    """Walk through samples one by one, and give a batch whenever a queue holds one; then what is left."""
    queues = defaultdict(deque)
    found = []
    for index in order:
        queue = queues[groups[index]]
        queue.append(index)
        if len(queue) == size:
            found.append(list(queue))
            queue.clear()
    return found, sorted(index for queue in queues.values() for index in queue)


# BucketBatches: the order


def test_an_epoch_is_sorted_by_numbers_that_do_not_change_with_the_libraries():
    assert split_mix(0, 0) == 0xE220A8397B1DCDAF
    seed = 7
    key = split_mix(split_mix(0 ^ seed, 0) ^ 1, 0)
    expected = []
    for epoch in range(3):
        numbers = [split_mix(split_mix(key, epoch), place) for place in range(20)]
        expected += sorted(range(20), key=numbers.__getitem__)
    assert drawn(range(20), draws=60, seed=seed) == expected


@PROPERTY
@given(groups=GROUPS, size=st.integers(1, 12), seed=SEEDS)
def test_batches_are_those_of_a_slow_walk_through_the_epochs(groups, size, seed):
    order = drawn(groups, draws=size * 30 + len(groups), seed=seed)
    expected, _ = slow_batches(groups, order, size)
    found = take(BucketBatches(groups, batch_size=size, seed=seed), len(expected))
    assert [[draw.index for draw in batch] for batch in found] == expected


@PROPERTY
@given(groups=GROUPS, size=st.integers(1, 12))
def test_filling_batches_loses_no_sample(groups, size):
    numbers = np.array([["wide", "square", "tall", (24, 44)].index(group) for group in groups])
    places, left = fill_batches(numbers, size)
    expected, rest = slow_batches(groups, range(len(groups)), size)
    assert places.tolist() == expected
    assert left.tolist() == rest


@PROPERTY
@given(groups=GROUPS, size=st.integers(1, 12), seed=SEEDS, first=st.integers(0, 50))
def test_a_batch_has_one_group_and_numbers_count_the_draws(groups, size, seed, first):
    found = take(BucketBatches(groups, batch_size=size, seed=seed, first_batch=first), 20)
    assert all(len({groups[draw.index] for draw in batch}) == 1 for batch in found)
    numbers = [draw.number for batch in found for draw in batch]
    assert numbers == list(range(first * size, (first + 20) * size))


@PROPERTY
@given(samples=st.integers(1, 40), epochs=st.integers(1, 6), seed=SEEDS)
def test_every_epoch_draws_every_sample_once(samples, epochs, seed):
    order = drawn(range(samples), draws=samples * epochs, seed=seed)
    for epoch in range(epochs):
        assert sorted(order[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@PROPERTY
@given(groups=GROUPS, size=st.integers(1, 12), seed=SEEDS)
def test_no_sample_of_a_group_is_drawn_twice_more_than_another(groups, size, seed):
    """Whatever waits in a queue: a group's samples come an epoch after the other, so their counts differ by one."""
    counts = Counter(
        draw.index for batch in take(BucketBatches(groups, batch_size=size, seed=seed), 60) for draw in batch
    )
    for group in set(groups):
        mine = [counts[index] for index, other in enumerate(groups) if other == group]
        assert max(mine) - min(mine) <= 1


@PROPERTY
@given(groups=GROUPS, size=st.integers(1, 4), seed=SEEDS)
def test_all_groups_are_drawn_alike_but_for_what_waits_in_the_queues(groups, size, seed):
    epochs = 30
    batches = take(BucketBatches(groups, batch_size=size, seed=seed), epochs * len(groups) // size)
    counts = Counter(groups[draw.index] for batch in batches for draw in batch)
    waiting = len(set(groups)) * (size - 1)  # in all queues together, at most
    for group, members in Counter(groups).items():
        assert (epochs - 1) * members - size < counts[group] <= epochs * members + waiting + members


def test_a_group_smaller_than_a_batch_repeats_a_sample_only_as_epochs_bring_it():
    (batch,) = take(BucketBatches(["a"] * 3, batch_size=9, seed=0), 1)
    assert [sorted(draw.index for draw in batch[start : start + 3]) for start in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = [tuple(drawn(range(50), draws=100, seed=seed)) for seed in (0, 1, 2, 2**40)]
    assert len({order[:50] for order in orders} | {order[50:] for order in orders}) == 8


def test_every_sample_is_as_likely_in_every_place():
    """Chi² of the table place × sample over 2,000 epochs: mean 49, standard deviation 9.9."""
    order = np.array(drawn(range(8), draws=16_000)).reshape(2000, 8)
    table = np.stack([np.bincount(order[:, place], minlength=8) for place in range(8)])
    assert ((table - 250) ** 2 / 250).sum() < 49 + 4 * 9.9


@pytest.mark.parametrize("at_once", [1, 30, 1000])
def test_the_order_does_not_depend_on_how_many_epochs_are_made_together(monkeypatch, at_once):
    groups, times = [0, 1, 0, 0, 1], [1.0, 0.3, 2.5, 0.0, 1.7]
    expected = take(BucketBatches(groups, times, batch_size=3, seed=4), 60)
    monkeypatch.setattr(module, "DRAWS_AT_ONCE", at_once)
    assert take(BucketBatches(groups, times, batch_size=3, seed=4), 60) == expected


# BucketBatches: resuming and processes


@PROPERTY
@given(groups=GROUPS, size=st.integers(1, 12), seed=SEEDS, first=st.integers(0, 60), data=st.data())
def test_skipping_batches_is_the_same_as_having_drawn_them(groups, size, seed, first, data):
    times = data.draw(st.lists(st.floats(0.5, 2.5), min_size=len(groups), max_size=len(groups)))
    times[0] = max(times[0], 1.0)
    whole = take(BucketBatches(groups, times, batch_size=size, seed=seed), first + 20)
    assert take(BucketBatches(groups, times, batch_size=size, seed=seed, first_batch=first), 20) == whole[first:]


@PROPERTY
@given(groups=GROUPS, size=st.integers(1, 5), processes=st.integers(1, 4), seed=SEEDS, first=st.integers(0, 9))
def test_the_slices_of_the_processes_are_the_batch_of_one(groups, size, processes, seed, first):
    one = take(BucketBatches(groups, batch_size=size * processes, seed=seed, first_batch=first), 12)
    ranks = [
        take(BucketBatches(groups, batch_size=size, processes=processes, rank=rank, seed=seed, first_batch=first), 12)
        for rank in range(processes)
    ]
    assert [[draw for part in parts for draw in part] for parts in zip(*ranks, strict=True)] == one
    assert all(len(batch) == size for rank in ranks for batch in rank)


def test_iterating_again_starts_at_the_same_batch():
    batches = BucketBatches(range(6), batch_size=2, seed=0, first_batch=3)
    assert take(batches, 5) == take(batches, 5)


def test_twenty_epochs_of_a_hundred_thousand_samples_are_skipped_in_seconds():
    groups = np.random.default_rng(0).integers(0, 30, 100_000).tolist()
    start = time.process_time()
    (batch,) = take(BucketBatches(groups, batch_size=8, seed=0, first_batch=250_000), 1)
    assert time.process_time() - start < 4
    assert batch[0].number == 2_000_000


# BucketBatches: times


@PROPERTY
@given(times=st.lists(st.floats(0, 3), min_size=1, max_size=12).filter(lambda times: sum(times) >= 1), seed=SEEDS)
def test_a_sample_is_drawn_as_often_as_its_times_say(times, seed):
    """Within one draw after any epoch; where epochs end is not seen from outside, so their own bound comes on top."""
    epochs = 40
    counts = Counter(drawn(times, times, draws=int(epochs * sum(times)), seed=seed))
    slack = 1 + max(times) + len(times) / sum(times) * max(times)
    assert all(abs(counts[index] - epochs * each) <= 1 + slack for index, each in enumerate(times))


@PROPERTY
@given(times=st.lists(st.integers(0, 3), min_size=1, max_size=12).filter(any), seed=SEEDS)
def test_whole_times_are_kept_in_every_epoch(times, seed):
    length = sum(times)
    order = drawn(times, times, draws=5 * length, seed=seed)
    for epoch in range(5):
        counts = Counter(order[epoch * length : (epoch + 1) * length])
        assert [counts[index] for index in range(len(times))] == times


def test_a_fraction_is_the_chance_of_one_more_draw_and_comes_out_even():
    """Of 4,000 samples at 1.25, a quarter come twice in an epoch, give or take 27; in four all come 5 times."""
    order = drawn(range(4000), [1.25] * 4000, draws=20_000)
    twice = sum(count > 1 for count in Counter(order[:5000]).values())
    assert abs(twice - 1000) < 4 * 27
    assert set(Counter(order).values()) == {5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": []}, "there are no samples to draw; expected at least one"),
        ({"times": [1.0]}, "1 times for 3 samples; expected one a sample"),
        ({"times": [1.0, -0.5, 1.0]}, r"times\[1\] is -0\.5; expected a finite number of at least 0"),
        ({"times": [1.0, 1.0, float("nan")]}, r"times\[2\] is nan; expected a finite number"),
        ({"times": [float("inf"), 1.0, 1.0]}, r"times\[0\] is inf; expected a finite number"),
        ({"times": [0.0, 0.0, 0.0]}, "times: none is above 0, so nothing would be drawn"),
        ({"times": [0.25, 0.25, 0.25]}, r"times: 0\.75 draws an epoch in all; expected at least 1: raise the repeats"),
        ({"batch_size": 0}, "batch_size is 0; expected a whole number from 1"),
        ({"batch_size": 2.0}, r"batch_size is 2\.0; expected a whole number from 1"),
        ({"processes": 0}, "processes is 0; expected a whole number from 1"),
        ({"rank": -1}, "rank is -1; expected a whole number from 0"),
        ({"rank": 2, "processes": 2}, "rank is 2; expected less than the number of processes, 2"),
        ({"first_batch": -1}, "first_batch is -1; expected a whole number from 0"),
        ({"seed": -1}, "seed is -1; expected a whole number from 0"),
        ({"seed": 2**64}, r"seed is 18446744073709551616; expected a whole number from 0 to 2\*\*64 - 1"),
        ({"seed": True}, "seed is True; expected a whole number"),
    ],
)
def test_batches_that_cannot_be_made_are_refused(arguments, message):
    arguments = {"groups": ["a", "a", "b"], "batch_size": 2, "seed": 0, **arguments}
    with pytest.raises(ValueError, match=message):
        BucketBatches(**arguments)


# times_of


def test_repeats_are_the_times_of_their_source():
    assert times_of([range(2), range(2, 5)], [3, 0.5]) == [3.0, 3.0, 0.5, 0.5, 0.5]
    assert times_of([range(2), range(2, 5)], [3, 0.5], [None, None]) == [3.0, 3.0, 0.5, 0.5, 0.5]


SOURCES = st.lists(
    st.tuples(st.integers(1, 20), st.floats(0.1, 5), st.floats(0.1, 10)), min_size=1, max_size=5
)  # samples, repeats, weight


@PROPERTY
@given(sources=SOURCES)
def test_weights_set_the_shares_and_repeats_the_length_of_an_epoch(sources):
    lengths, repeats, weights = zip(*sources, strict=True)
    ends = np.cumsum(lengths).tolist()
    parts = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    times = times_of(parts, repeats, weights)
    epoch = sum(length * repeat for length, repeat in zip(lengths, repeats, strict=True))
    assert sum(times) == pytest.approx(epoch)
    for part, weight in zip(parts, weights, strict=True):
        mine = times[part.start : part.stop]
        assert sum(mine) / sum(times) == pytest.approx(weight / sum(weights))
        assert len(set(mine)) == 1


def test_in_the_long_run_each_source_gets_its_weight_of_the_draws():
    parts = [range(3), range(3, 53)]
    times = times_of(parts, [1, 1], [0.7, 0.3])
    first = sum(index in parts[0] for index in drawn(times, times, draws=5300))
    assert first / 5300 == pytest.approx(0.7, abs=0.002)


def test_a_source_of_weight_zero_is_never_drawn():
    assert times_of([range(2), range(2, 4)], [1, 1], [0, 5]) == [0.0, 0.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repeats": [1]}, "2 parts, 1 repeats and 2 weights; expected one a source"),
        ({"weights": [1, 2, 3]}, "2 parts, 2 repeats and 3 weights; expected one a source"),
        ({"weights": [1, None]}, "weights: source 1 has none and others do; give one to all or to none"),
        ({"weights": [1, -1]}, r"weights\[1\] is -1; expected a finite number of at least 0"),
        ({"weights": [0, 0]}, "weights: none is above 0"),
        ({"repeats": [1, -1]}, r"repeats\[1\] is -1; expected a finite number of at least 0"),
        ({"repeats": [0, 0]}, "repeats: none is above 0"),
        ({"parts": [range(2), range(2, 2)]}, r"parts\[1\] is empty; leave sources without samples out"),
        ({"parts": [range(2), range(3, 5)]}, r"parts\[1\] is range\(3, 5\); expected a range from 2"),
        ({"parts": [range(1, 2), range(2, 5)]}, r"parts\[0\] is range\(1, 2\); expected a range from 0"),
        ({"parts": [range(2), range(2, 6, 2)]}, r"parts\[1\] is range\(2, 6, 2\); expected a range from 2"),
        ({"parts": [], "repeats": [], "weights": []}, "repeats: none is above 0"),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(arguments, message):
    arguments = {"parts": [range(2), range(2, 5)], "repeats": [1, 1], "weights": [1, 1], **arguments}
    with pytest.raises(ValueError, match=message):
        times_of(**arguments)


# make_loader


class Noised(Dataset):
    """Ten pictures, each with the noise of the draw that asks for it."""

    def __len__(self):
        return 10

    def __getitem__(self, draw):
        assert isinstance(draw, Draw)
        noise = torch.randn(3, generator=generator_of(1, draw.number))
        return {"picture": torch.full((3,), float(draw.index)) + noise, "number": draw.number}


def loaded(workers, count=12, **options):
    options = {"batch_size": 3, "seed": 1, **options}
    batches = BucketBatches(["a"] * 6 + ["b"] * 4, **options)
    return take(make_loader(Noised(), batches, workers=workers), count)


def test_batches_are_the_same_with_and_without_workers():
    for alone, helped in zip(loaded(0), loaded(2), strict=True):
        assert torch.equal(alone["picture"], helped["picture"])
        assert torch.equal(alone["number"], helped["number"])


def test_a_loader_that_starts_late_goes_on_as_one_that_never_stopped():
    for late, whole in zip(loaded(0, 5, first_batch=7), loaded(0)[7:], strict=True):
        assert torch.equal(late["picture"], whole["picture"])


def test_two_processes_load_what_one_loads():
    halves = [loaded(0, batch_size=2, processes=2, rank=rank) for rank in range(2)]
    for first, second, both in zip(*halves, loaded(0, batch_size=4), strict=True):
        assert torch.equal(torch.cat([first["picture"], second["picture"]]), both["picture"])


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_global_random_numbers_alone(workers):
    state = torch.get_rng_state()
    loaded(workers, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_negative_number_of_workers_is_refused():
    with pytest.raises(ValueError, match="workers is -1; expected a whole number from 0"):
        loaded(-1)
