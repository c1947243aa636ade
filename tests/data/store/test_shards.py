"""The files of a tensor store: what is no whole shard is left out, told, and built anew."""

import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from store_kit import fill, item, key

from mmpreproj.data.store import TensorStore
from mmpreproj.data.store.shards import UnreadableShardError


def damage(folder, change):
    """Write two shards of five items each, change the bytes of the second, and return its name."""
    fill(folder, range(5), 10**6)
    first = {path.name for path in folder.iterdir()}
    fill(folder, range(5, 10), 10**6)
    (second,) = (path for path in folder.iterdir() if path.name not in first)
    second.write_bytes(change(second.read_bytes()))
    return second.name


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:100],
        lambda content: content[:4],
        lambda content: b"",
        lambda content: bytes(len(content)),
        lambda content: b"\xff" * len(content),
        lambda content: content.replace(b'"F32"', b'"F64"', 1),
        lambda content: content[:8] + b"[" * 50 + content[58:],
    ],
    ids=[
        "a byte short",
        "a byte long",
        "in the header",
        "in its length",
        "empty",
        "zeros",
        "ones",
        "dtype",
        "no JSON",
    ],
)
def test_a_damaged_shard_is_left_out_told_and_built_anew(tmp_path, change):
    name = damage(tmp_path, change)
    store = TensorStore(tmp_path)
    assert [shard.name for shard in store.damaged] == [name]
    assert "remove it, what it held is computed anew" in store.damaged[0].reason
    assert store.missing(map(key, range(10))) == [key(number) for number in range(5, 10)]
    again = fill(tmp_path, range(10), 10**6)
    assert (len(again), len(again.damaged), again.missing(map(key, range(10)))) == (10, 1, [])


@pytest.mark.parametrize("name", ["weight", "0" * 31 + "/mean", "G" * 32 + "/mean", "0" * 32 + "/"])
def test_the_file_of_another_program_is_left_out(tmp_path, name):
    fill(tmp_path, range(3), 10**6)
    save_file({name: torch.ones(2)}, tmp_path / "model.safetensors")
    store = TensorStore(tmp_path)
    assert len(store) == 3
    assert [shard.name for shard in store.damaged] == ["model.safetensors"]
    assert f"it holds {name!r} of F32, which this cache does not write" in store.damaged[0].reason


def test_a_folder_named_like_a_shard_is_left_out(tmp_path):
    (tmp_path / "a.safetensors").mkdir()
    (left_out,) = TensorStore(tmp_path).damaged
    assert left_out.name == "a.safetensors"
    assert "remove it" not in left_out.reason


def test_a_shard_that_is_mended_is_found(tmp_path):
    name = damage(tmp_path, lambda content: content[:-1])
    store = TensorStore(tmp_path)
    assert len(store.damaged) == 1
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"\0")
    store.refresh()
    assert (len(store), store.damaged) == (10, [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes and had .* before; start again"),
        (lambda path: path.unlink(), "No such file or directory; start again"),
    ],
)
def test_a_shard_that_changes_under_a_run_is_an_error(tmp_path, change, reason):
    fill(tmp_path, range(5), 10**6)
    store = TensorStore(tmp_path)
    change(next(tmp_path.iterdir()))
    with pytest.raises(
        UnreadableShardError, match=rf"cannot read the cache file '\w+\.safetensors': .*{reason}"
    ) as caught:
        store[key(0)]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_library_reads_the_shards(tmp_path):
    fill(tmp_path, range(3), 10**6)
    read = load_file(next(tmp_path.iterdir()))
    expected = {f"{key(number)}/{name}": value for number in range(3) for name, value in item(number).items()}
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], value) for name, value in expected.items())
