"""A store of tensors: keys, reading, and what it costs."""

import gc
import itertools
import os
import pickle
import random
import resource
import sys
from contextlib import contextmanager

import pytest
import torch
from store_kit import fill, item, key
from torch.utils.data import DataLoader

from mmpreproj.data.store.tensor_store import OPEN_AT_MOST, TensorStore, key_of

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process holds")


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def resident(kind):
    """Return the resident memory of this process, `RssAnon` or `RssFile`, in kB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(f"{kind}:"))


@contextmanager
def few_files(number):
    """Let this process open so many more files than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_keys_differ_wherever_a_part_differs_in_value_or_in_kind():
    parts = [
        *({"a": value} for value in (1, 1.0, True, "1", None, "None", "", "é", "e\u0301", "\ud800", 0.1, -1, [], [1])),
        *({"a": value} for value in (["1"], ["1", "2"], ["1,2"], ['1","2'], [["1"], "2"], [["1", "2"]])),
        {"a": "x", "b": "y"},
        {"a": "xy"},
        {"a": "y", "b": "x"},
        {"ab": "xy"},
        {"b": 1},
        {"a": 'x","b":"y'},
    ]
    keys = [key_of(**part) for part in parts]
    assert len(set(keys)) == len(parts)
    assert all(len(key) == 32 and set(key) <= set("0123456789abcdef") for key in keys)


def test_a_key_depends_neither_on_the_order_of_its_parts_nor_on_the_kind_of_a_sequence():
    assert key_of(a=1, size=(2, 3)) == key_of(size=[2, 3], a=1)


def test_a_key_is_the_same_in_the_next_version():
    """A change here would have everybody's cache computed anew."""
    assert key_of(model="vae", size=(512, 512), dtype=None) == "a8cd9fd27a419ea50683915cc96889e3"


@pytest.mark.parametrize("part", [b"x", {"x": 1}, {1}, torch.ones(1), [1, [b"x"]], range(2)])
def test_a_key_of_something_else_is_refused(part):
    with pytest.raises(TypeError, match=r"part 'a' of a key is a .*; expected text, a number"):
        key_of(a=part)


@pytest.mark.parametrize("part", [float("nan"), [float("inf")]])
def test_a_key_of_no_finite_number_is_refused(part):
    with pytest.raises(ValueError, match=r"part 'a' of a key is (nan|inf); expected a finite number"):
        key_of(a=part)


def test_a_key_of_nothing_is_refused():
    with pytest.raises(ValueError, match="a key of no parts would be the same for everything"):
        key_of()


def test_a_new_process_reads_what_was_written(tmp_path):
    written = fill(tmp_path, range(50), 10_000)
    assert len(list(tmp_path.iterdir())) > 5
    for store in (written, TensorStore(str(tmp_path))):
        assert len(store) == 50
        assert all(key(number) in store and same(store[key(number)], item(number)) for number in range(50))
        assert key(50) not in store


def test_missing_keeps_the_order_and_names_each_once(tmp_path):
    store = fill(tmp_path, range(5), 10_000)
    asked = [key(number) for number in (9, 3, 7, 9, 0, 8, 7)]
    assert store.missing(asked) == [key(9), key(7), key(8)]
    assert store.missing(iter(asked[1:2])) == store.missing([]) == []


def test_keys_with_zero_bytes_are_told_apart(tmp_path):
    keys = ["0" * 32, "01" + "0" * 30, "0" * 30 + "01", "0001" + "0" * 28, "ff" * 16, "80" + "0" * 30]
    store = TensorStore(tmp_path)
    for number, one in enumerate(keys):
        assert store.missing(keys) == keys[number:]
        with store.writer() as writer:
            writer.add(one, item(number))
    assert all(same(store[one], item(number)) for number, one in enumerate(keys))


def test_a_folder_that_does_not_exist_is_an_empty_store_and_stays_away(tmp_path):
    store = TensorStore(tmp_path / "cache")
    assert (len(store), store.missing([key(0)]), store.damaged) == (0, [key(0)], [])
    assert not (tmp_path / "cache").exists()


def test_what_is_read_is_a_copy(tmp_path):
    store = fill(tmp_path, range(2), 10**6)
    store[key(0)]["mean"].zero_()
    assert same(store[key(0)], item(0))


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(KeyError, match=r"is not in .*; ask `missing` first"):
        fill(tmp_path, range(2), 10**6)[key(2)]
    with pytest.raises(ValueError, match=r"'ABC' is no key; expected 32 hexadecimal digits, as `key_of` makes them"):
        TensorStore(tmp_path)["ABC"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(ValueError, match=r"cache is a file; expected the folder of the cache, `data.cache`"):
        TensorStore(tmp_path / "cache")


def test_refresh_finds_what_others_have_written_and_removed(tmp_path):
    store = TensorStore(tmp_path)
    fill(tmp_path, range(5), 10**6)
    assert len(store) == 0
    store.refresh()
    assert (len(store), len(TensorStore(tmp_path))) == (5, 5)
    (first,) = tmp_path.iterdir()
    fill(tmp_path, range(5, 8), 10**6)
    first.unlink()
    store.refresh()
    assert store.missing(map(key, range(8))) == [key(number) for number in range(5)]
    assert same(store[key(6)], item(6))


def test_a_duplicate_takes_over_when_the_shard_that_was_read_is_removed(tmp_path):
    for folder in ("a", "b"):
        fill(tmp_path / folder, range(5), 10**6)
    (copy,) = (tmp_path / "b").iterdir()
    copy.rename(tmp_path / "a" / copy.name)
    store = TensorStore(tmp_path / "a")
    assert len(store) == 5 and same(store[key(1)], item(1))
    min((tmp_path / "a").iterdir()).unlink()
    store.refresh()
    assert len(store) == 5 and same(store[key(1)], item(1))


def test_a_store_travels_to_workers_that_are_spawned(tmp_path):
    store = fill(tmp_path, range(20), 10_000)
    store[key(0)]  # so that a shard is open
    assert same(pickle.loads(pickle.dumps(store))[key(3)], item(3))
    keys = [key(number) for number in range(20)]
    loader = DataLoader(store, batch_size=None, sampler=keys, num_workers=2, multiprocessing_context="spawn")
    assert all(same(found, item(number)) for number, found in enumerate(loader))


@linux
def test_more_shards_than_files_may_be_open_can_be_read(tmp_path):
    store = fill(tmp_path, range(3 * OPEN_AT_MOST), 1)
    with few_files(OPEN_AT_MOST + 4):
        store = TensorStore(tmp_path)
        for number in itertools.chain(range(3 * OPEN_AT_MOST), reversed(range(3 * OPEN_AT_MOST))):
            assert same(store[key(number)], item(number))


@linux
def test_memory_does_not_grow_with_what_was_read(tmp_path):
    store = fill(tmp_path, range(5000), 2**20)  # 10 MB
    keys = [key(number) for number in random.Random(0).choices(range(5000), k=20_000)]
    store[keys[0]]
    gc.collect()
    before = {kind: resident(kind) for kind in ("RssAnon", "RssFile")}
    for one in keys:
        store[one]
    assert all(resident(kind) - before[kind] < 2000 for kind in before)


def test_the_index_is_small(tmp_path):
    store = fill(tmp_path, range(2000), 2**18)
    assert len(pickle.dumps(store)) < 2000 * 70 + 5000  # 32 bytes a tensor
