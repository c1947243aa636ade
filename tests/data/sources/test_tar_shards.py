"""Pictures in tar shards: read in place, and every way a shard or a sample can be wrong."""

import gzip
import io
import json
import pickle
import tarfile

import pytest
from PIL import Image

from mmpreproj.data.sources.pictures import UnreadablePictureError
from mmpreproj.data.sources.tar_shards import ShardSource


def picture(level=0):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (level, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write_shard(path, members, kind=tarfile.USTAR_FORMAT):
    """Write members in order; pairs of name and content, bytes or text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as archive:
        for name, content in members:
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def samples(*keys):
    """Return members as webdataset writes them, the members of one key next to each other."""
    return [member for key in keys for member in ((f"{key}.png", picture(len(key))), (f"{key}.txt", f"of {key}\n"))]


# --- what works ---


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_each_sample_gives_its_picture_and_its_caption_from_where_it_lies(tmp_path, kind):
    long = "sub/" + "é" * 60 + "/b" + "x" * 70  # longer than a plain header holds
    keys = ["a", "sub/c"] if kind == tarfile.USTAR_FORMAT else ["a", long]
    source = ShardSource(write_shard(tmp_path / "s.tar", samples(*keys), kind))
    assert source.names == [f"s.tar/{key}.png" for key in keys]
    assert source.captions == [f"of {key}" for key in keys]
    assert [source.read(index) for index in (1, 0)] == [picture(len(key)) for key in reversed(keys)]
    assert source.open(0).getpixel((0, 0)) == (1, 0, 0)
    assert source.faults == ()
    assert "1 shards)  # 2 pictures" in repr(source)


def test_names_are_split_at_the_first_dot_as_webdataset_does(tmp_path):
    members = [
        ("./v.1/a.png", picture(1)),
        ("./v.1/a.txt", "dotted folder"),
        ("b.PNG", picture(2)),
        ("b.TXT", "upper case"),
        ("b.mask.png", picture(3)),  # extension "mask.png": no picture
        ("b.cls", "7"),
        ("README", "no extension"),
        (".c.png", b"hidden"),
        ("__MACOSX/a.png", b"notes"),
        ("__MACOSX/a.txt", "notes"),
    ]
    source = ShardSource(write_shard(tmp_path / "s.tar", members))
    assert source.names == ["s.tar/v.1/a.png", "s.tar/b.PNG"]
    assert source.captions == ["dotted folder", "upper case"]


def test_members_of_a_key_need_not_be_next_to_each_other(tmp_path):
    members = sorted(samples("a", "b"), key=lambda member: member[0].rpartition(".")[2])
    source = ShardSource(write_shard(tmp_path / "s.tar", members))
    assert source.captions == ["of a", "of b"]


def test_the_same_key_in_two_shards_is_two_pictures(tmp_path):
    for folder in ("x", "y"):
        write_shard(tmp_path / folder / "s.tar", samples("a"))
    source = ShardSource([tmp_path / "y" / "s.tar", str(tmp_path / "x" / "s.tar")])
    assert source.names == ["y/s.tar/a.png", "x/s.tar/a.png"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("{000..002}.tar", ["000", "001", "002"]),
        ("{001,000}.tar", ["001", "000"]),
        ("00{2..2}.tar", ["002"]),
        ("*.tar", ["000", "001", "002", "{odd}"]),
        ("00[12].tar", ["001", "002"]),
        ("{0,0}{00..01}.tar", None),
        ("{odd}.tar", ["{odd}"]),
    ],
)
def test_patterns_name_shards_in_order(tmp_path, pattern, expected):
    for name in ("000", "001", "002", "{odd}"):
        write_shard(tmp_path / f"{name}.tar", samples("a"))
    if expected is None:
        with pytest.raises(ValueError, match=r"000\.tar is named twice"):
            ShardSource(str(tmp_path / pattern))
        return
    source = ShardSource(str(tmp_path / pattern))
    assert source.names == [f"{name}.tar/a.png" for name in expected]
    assert [path.name for path in source.shards] == [f"{name}.tar" for name in expected]


def test_captions_may_be_a_field_of_json(tmp_path):
    members = [("a.jpg", picture()), ("a.json", json.dumps({"caption": "é\nline"})), ("a.txt", "other")]
    path = write_shard(tmp_path / "s.tar", members)
    assert ShardSource(path, caption="json:caption").captions == ["é\nline"]
    assert ShardSource(path).captions == ["other"]


def test_the_extension_that_counts_can_be_chosen(tmp_path):
    members = [("a.jpg", picture(1)), ("a.input.png", picture(2)), ("a.txt", "a")]
    source = ShardSource(write_shard(tmp_path / "s.tar", members), picture_extensions=["input.png"])
    assert source.names == ["s.tar/a.input.png"]
    assert source.read(0) == picture(2)


def test_nothing_is_unpacked_and_the_source_can_go_to_another_process(tmp_path):
    path = write_shard(tmp_path / "s.tar", samples("a"))
    source = pickle.loads(pickle.dumps(ShardSource(path)))
    assert source.read(0) == picture(1)
    assert list(tmp_path.iterdir()) == [path]


# --- what is refused, or left out ---

FAULTS = {
    "no caption": ([("b.png", picture())], r"s\.tar/b \(it has no \.txt with a caption"),
    "no picture": ([("b.txt", "b")], r"s\.tar/b \(it has a caption but no picture \(\.avif, \.bmp"),
    "two pictures": (
        [*samples("b"), ("b.jpg", picture())],
        r"several pictures, b\.png and b\.jpg: name the extension",
    ),
    "picture twice": ([*samples("b"), ("b.png", picture())], r"s\.tar/b\.png \(the shard holds it twice"),
    "caption twice": ([*samples("b"), ("b.txt", "other")], r"it has several \.txt with a caption"),
    "empty caption": ([("b.png", picture()), ("b.txt", " ")], "the caption is empty"),
    "not UTF-8": ([("b.png", picture()), ("b.txt", b"\xe9t")], "not UTF-8"),
}


@pytest.mark.parametrize(("members", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_bad_sample_is_named_with_the_reason_or_left_out(tmp_path, members, reason):
    path = write_shard(tmp_path / "s.tar", [*members, *samples("z")])
    with pytest.raises(ValueError, match=rf"has 1 fault: .*{reason}.*; correct them"):
        ShardSource(path)
    source = ShardSource(path, on_error="skip")
    assert source.names[-1] == "s.tar/z.png"
    assert source.read(len(source) - 1) == picture(1)
    assert len(source.faults) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "its JSON is broken"),
        ("[1]", "its JSON is a list, expected an object"),
        ('{"text": "a", "url": "b"}', "its JSON has no field 'caption', only 'text', 'url'"),
        ('{"caption": null}', "the caption is null"),
        ('{"caption": 3}', "the caption is the int 3"),
    ],
)
def test_json_without_a_caption_is_named_with_the_reason(tmp_path, content, reason):
    path = write_shard(tmp_path / "s.tar", [("a.png", picture()), ("a.json", content)])
    with pytest.raises(ValueError, match=rf"s\.tar/a \({reason}"):
        ShardSource(path, caption="json:caption")


def cut_in_data(data):
    return data[:3000]


def cut_in_header(data):
    return data[:2148]


def cut_between_members(data):
    return data[:2048]


def damaged_header(data):
    return data[:2060] + b"\xff" * 200 + data[2260:]


def without_end(data):
    return data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512)


@pytest.mark.parametrize("damage", [cut_in_data, cut_in_header, cut_between_members, damaged_header])
def test_a_damaged_shard_keeps_what_comes_before_and_others_go_on(tmp_path, damage):
    bad = write_shard(
        tmp_path / "0.tar",
        [(name, content.ljust(600) if name == "b.txt" else content) for name, content in samples("a", "b")],
    )
    write_shard(tmp_path / "1.tar", samples("c"))
    bad.write_bytes(damage(bad.read_bytes()))
    with pytest.raises(ValueError, match=r"0\.tar and 1 more has \d faults?: 0\.tar \(.*; what comes after is lost\)"):
        ShardSource(str(tmp_path / "*.tar"))
    source = ShardSource(str(tmp_path / "*.tar"), on_error="skip")
    assert source.names == ["0.tar/a.png", "1.tar/c.png"]
    assert [source.read(index) for index in range(2)] == [picture(1)] * 2
    assert source.faults[0].name == "0.tar"


def test_a_shard_that_lost_only_its_end_mark_is_told_of(tmp_path):
    path = write_shard(tmp_path / "s.tar", samples("a"))
    path.write_bytes(without_end(path.read_bytes()))
    source = ShardSource(path, on_error="skip")
    assert len(source) == 1
    assert "cut off at byte 2048, where a header or the end mark should be" in source.faults[0].reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"no archive at all" * 99, "header"),
        (gzip.compress(b"x", mtime=0), "compressed by gzip, .* decompress it"),
    ],
)
def test_what_is_no_plain_tar_file_is_named_with_the_reason(tmp_path, content, reason):
    (tmp_path / "s.tar").write_bytes(content)
    write_shard(tmp_path / "t.tar", samples("a"))
    with pytest.raises(ValueError, match=rf"1 fault: s\.tar \(.*{reason}"):
        ShardSource(str(tmp_path / "*.tar"))
    assert ShardSource(str(tmp_path / "*.tar"), on_error="skip").names == ["t.tar/a.png"]
    with pytest.raises(ValueError, match="nothing usable is left"):
        ShardSource(tmp_path / "s.tar", on_error="skip")


def test_a_shard_cut_off_or_deleted_meanwhile_is_named_when_read(tmp_path):
    path = write_shard(tmp_path / "s.tar", samples("a"))
    source = ShardSource(path)
    path.write_bytes(path.read_bytes()[:520])
    with pytest.raises(UnreadablePictureError, match=r"'s\.tar/a\.png': .*s\.tar was cut off since it was opened"):
        source.read(0)
    path.unlink()
    with pytest.raises(UnreadablePictureError, match=r"'s\.tar/a\.png': FileNotFoundError"):
        source.read(0)


def test_a_link_in_a_shard_is_not_followed(tmp_path):
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in samples("a"):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content if isinstance(content, bytes) else content.encode()))
        link = tarfile.TarInfo("b.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert ShardSource(path).names == ["s.tar/a.png"]


def test_missing_shards_are_listed(tmp_path):
    write_shard(tmp_path / "001.tar", samples("a"))
    with pytest.raises(FileNotFoundError, match=r"2 shards of 3 not found: .*000\.tar, .*002\.tar; check"):
        ShardSource(str(tmp_path / "{000..002}.tar"))
    with pytest.raises(FileNotFoundError, match=r"1 shard of 1 not found: .*x\*\.tar"):
        ShardSource(str(tmp_path / "x*.tar"))


def test_patterns_that_name_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="shards is empty"):
        ShardSource([])
    with pytest.raises(ValueError, match=r"\{2\.\.1\} in .* counts from 2 to 1; expected a range upwards"):
        ShardSource(str(tmp_path / "{2..1}.tar"))


def test_a_shard_without_samples_is_refused(tmp_path):
    path = write_shard(tmp_path / "s.tar", [("a.cls", "1")])
    with pytest.raises(ValueError, match=r"s\.tar: no member ends in avif, .* or txt"):
        ShardSource(path)


@pytest.mark.parametrize("caption", ["", "json:", ":a", "txt:a", "png"])
def test_a_caption_that_is_no_member_is_refused(tmp_path, caption):
    with pytest.raises(ValueError, match=r"caption is .*; expected an extension such as 'txt', or 'json:'"):
        ShardSource(tmp_path / "s.tar", caption=caption)


@pytest.mark.parametrize(
    ("extensions", "message"),
    [("png", "expected several"), ([], "expected several"), (["mp4"], r"has 'mp4'; expected some of avif")],
)
def test_extensions_of_no_picture_are_refused(tmp_path, extensions, message):
    with pytest.raises(ValueError, match=f"picture_extensions .*{message}"):
        ShardSource(tmp_path / "s.tar", picture_extensions=extensions)
