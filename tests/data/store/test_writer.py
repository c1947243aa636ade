"""Writing into a tensor store: whatever happens, what was written stays and nothing is broken."""

import errno
import multiprocessing
import os
import random
import resource
import signal
import sys
import time

import pytest
import torch
from store_kit import fill, item, key

from mmpreproj.data.store.shards import DTYPES
from mmpreproj.data.store.tensor_store import LEFT_OVER_SECONDS, TensorStore

linux = pytest.mark.skipif(sys.platform != "linux", reason="a fork is what makes a child cheap enough to repeat")
ITEM_BYTES = 2 * 4 * 8 * 8 * 4


def check(store, numbers):
    """Fail unless the store holds exactly these items, every value as it was written."""
    assert (len(store), store.missing(map(key, numbers)), store.damaged) == (len(numbers), [], [])
    for number in numbers:
        found, expected = store[key(number)], item(number)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def shards(folder):
    return list(folder.glob("*.safetensors"))


def hidden(folder):
    return [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_comes_back_bit_for_bit_beside_others(tmp_path, dtype):
    content = torch.randint(0, 2, (2, 3, dtype.itemsize * 4), dtype=torch.uint8)
    tensors = {"x": content.view(dtype), "odd": torch.ones(3, dtype=torch.uint8), "double": torch.ones(1).double()}
    store = TensorStore(tmp_path)
    with store.writer() as writer:
        writer.add(key(0), tensors)
        writer.add(key(1), tensors)
    found = store[key(1)]
    assert found.keys() == tensors.keys()
    assert (found["x"].dtype, found["x"].shape) == (dtype, (2, 3, 4))
    assert torch.equal(found["x"].view(torch.uint8), content)
    assert torch.equal(found["double"], tensors["double"])


def test_any_strides_and_shapes_come_back_as_values(tmp_path):
    base = torch.randn(4, 6)
    tensors = {
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(3, 6),
        "shared": base,
        "channels last": torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter/of a model": torch.nn.Parameter(torch.randn(2)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    store = TensorStore(tmp_path)
    with store.writer() as writer:
        writer.add(key(0), tensors)
    found = store[key(0)]
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name
        assert not found[name].requires_grad


def test_what_changes_after_it_was_added_is_written_as_it_was(tmp_path):
    batch = torch.ones(2, 3)
    store = TensorStore(tmp_path)
    with store.writer() as writer:
        writer.add(key(0), {"x": batch[0]})
        batch.zero_()
    assert torch.equal(store[key(0)]["x"], torch.ones(3))


def test_the_first_of_two_items_is_kept(tmp_path):
    store = TensorStore(tmp_path)
    with store.writer() as writer:
        for value in (1, 2):
            writer.add(key(0), {"x": torch.tensor(value)})
    with store.writer() as writer:
        writer.add(key(0), {"x": torch.tensor(3)})
    assert store[key(0)]["x"] == 1
    assert len(shards(tmp_path)) == 1


def test_shards_are_written_when_they_are_full(tmp_path):
    store = TensorStore(tmp_path)
    with store.writer(shard_bytes=3 * ITEM_BYTES) as writer:
        for number in range(8):
            writer.add(key(number), item(number))
            assert len(store) == (number + 1) // 3 * 3
    check(TensorStore(tmp_path), range(8))
    assert len(shards(tmp_path)) == 3


def test_shards_are_written_when_they_are_old(tmp_path):
    store = TensorStore(tmp_path)
    with store.writer(every_seconds=0.2) as writer:
        writer.add(key(0), item(0))
        assert len(store) == 0
        time.sleep(0.25)
        writer.add(key(1), item(1))
        writer.add(key(2), item(2))
        assert len(store) == 2


def test_a_shard_has_no_more_items_than_its_header_can_be_read_quickly(tmp_path):
    store = TensorStore(tmp_path)
    with store.writer() as writer:
        for number in range(4096):
            writer.add(f"{number:032x}", {"x": torch.zeros(())})
        assert len(store) == 4096


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_what_was_computed_before_an_exception_is_kept(tmp_path, error):
    store = TensorStore(tmp_path)
    with pytest.raises(error), store.writer() as writer:
        writer.add(key(0), item(0))
        raise error
    check(TensorStore(tmp_path), range(1))


@pytest.mark.parametrize(
    ("name", "tensors", "error", "told"),
    [
        (key(0), {}, ValueError, "has no tensors; give at least one"),
        (key(0), {"": torch.ones(1)}, ValueError, "a tensor is named ''; expected text"),
        (key(0), {"x": [1.0]}, TypeError, "'x' is a list; expected a tensor"),
        (key(0), {"x": torch.eye(2).to_sparse()}, TypeError, "'x' is a tensor of .*sparse_coo; expected a dense one"),
        (key(0), {"x": torch.ones(1, dtype=torch.complex128)}, TypeError, "complex128, .* dense one of bool, uint8"),
        ("x", {"x": torch.ones(1)}, ValueError, "'x' is no key; expected 32 hexadecimal digits"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_the_rest_is_kept(tmp_path, name, tensors, error, told):
    store = TensorStore(tmp_path)
    with store.writer() as writer:
        writer.add(key(1), item(1))
        with pytest.raises(error, match=told):
            writer.add(name, tensors)
    assert len(store) == 1


@pytest.mark.parametrize("settings", [{"shard_bytes": 0}, {"every_seconds": -1.0}, {"every_seconds": float("nan")}])
def test_sizes_that_are_not_positive_are_refused(tmp_path, settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name} must be above 0; got"):
        TensorStore(tmp_path).writer(**settings)


def write_together(folder, numbers, start):
    start.wait()
    fill(folder, numbers, 10_000)


@linux
def test_two_processes_build_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    start, ranges = context.Barrier(2), (range(0, 150), range(100, 250))
    children = [context.Process(target=write_together, args=(tmp_path, numbers, start)) for numbers in ranges]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert len(shards(tmp_path)) > 40
    check(TensorStore(tmp_path), range(250))
    assert hidden(tmp_path) == []


def write_and_die(folder, at):
    """Write shards of two items; at the third, die in the given function of `os`."""
    calls, function = [], getattr(os, at)

    def die(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        function(*arguments)

    setattr(os, at, die)  # in a child alone
    fill(folder, range(10), 2 * ITEM_BYTES)


@linux
@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_run_killed_in_a_shard_loses_that_shard_alone(tmp_path, at):
    child = multiprocessing.get_context("fork").Process(target=write_and_die, args=(tmp_path, at))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(hidden(tmp_path)) == 1
    check(TensorStore(tmp_path), range(4))
    check(fill(tmp_path, range(10), 2 * ITEM_BYTES), range(10))


@linux
def test_a_run_killed_at_any_instant_leaves_whole_shards(tmp_path):
    context, moments, held = multiprocessing.get_context("fork"), random.Random(0), 0
    for _ in range(12):
        child = context.Process(target=fill, args=(tmp_path, range(100_000), 2 * ITEM_BYTES), daemon=True)
        child.start()
        deadline = time.monotonic() + 20
        while len(shards(tmp_path)) * 2 <= held:
            assert child.is_alive() and time.monotonic() < deadline, "the child writes until it is killed"
        time.sleep(moments.uniform(0, 0.03))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        held = len(shards(tmp_path)) * 2
        check(TensorStore(tmp_path), range(held))


def test_temporary_files_are_removed_when_nobody_can_be_writing_them(tmp_path):
    fill(tmp_path, range(2), 10**6)
    names = [".a.safetensors.x1", ".b.safetensors.x2", ".other"]
    for name, age in zip(names, (LEFT_OVER_SECONDS + 60, LEFT_OVER_SECONDS - 60, LEFT_OVER_SECONDS + 60), strict=True):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    check(TensorStore(tmp_path), range(2))
    assert sorted(path.name for path in hidden(tmp_path)) == names[1:]


@linux
def test_a_shard_that_finds_no_room_leaves_the_others_and_says_what_to_do(tmp_path):
    store = fill(tmp_path, range(3), 10**6)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = rf"File too large; the cache cannot be written here: make room, or set `data.cache` elsewhere: '{tmp_path}'"
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=told) as caught, store.writer(shard_bytes=20 * ITEM_BYTES) as writer:
            for number in range(3, 30):
                writer.add(key(number), item(number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    check(TensorStore(tmp_path), range(3))
    assert hidden(tmp_path) == []


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"the cache cannot be written here: make room, or set `data.cache` elsewhere"):
        TensorStore(tmp_path / "file" / "cache").writer()
