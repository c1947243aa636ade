"""Pictures with a text file beside each: what is a caption, and every way a pair can be wrong."""

import os

import pytest
from PIL import Image

from mmpreproj.data.sources.pictures import SkippedPicture, UnreadablePictureError
from mmpreproj.data.sources.sidecars import SidecarSource


def write(folder, **files):
    """Write pictures and texts; `a_png=None` is a picture, `a_txt="…"` a text; `__` stands for `/`."""
    for key, content in files.items():
        path = folder / ".".join(key.replace("__", "/").rsplit("_", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            Image.new("RGB", (4, 4), (255, 0, 0)).save(path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


# --- what works ---


def test_each_picture_has_the_text_of_its_name_sorted_by_path(tmp_path):
    write(tmp_path, b_png=None, b_txt="bee", a__z_JPG=None, a__z_txt="deep", B_webp=None, B_txt="upper")
    source = SidecarSource(tmp_path)
    assert source.names == ["B.webp", "a/z.JPG", "b.png"]
    assert source.captions == ["upper", "deep", "bee"]
    assert source.open(2).getpixel((0, 0)) == (255, 0, 0)
    assert (len(source), source.unpaired, source.faults) == (3, 0, ())
    assert "3 pictures, 0 unpaired" in repr(source)


@pytest.mark.parametrize(
    ("content", "caption"),
    [
        ("a rose", "a rose"),
        ("  a rose\n", "a rose"),
        ("a rose,\r\n red \n\nbig", "a rose, red big"),
        ("\ufeffé 🌹", "é 🌹"),
        ("two  blanks", "two  blanks"),
    ],
)
def test_a_caption_is_its_lines_stripped_and_joined(tmp_path, content, caption):
    assert SidecarSource(write(tmp_path, a_png=None, a_txt=content)).captions == [caption]


def test_another_extension_can_be_chosen_and_is_found_in_either_case(tmp_path):
    write(tmp_path, a_png=None, a_CAPTION="chosen", a_txt="other")
    assert SidecarSource(str(tmp_path), extension=".caption").captions == ["chosen"]


def test_only_the_last_suffix_is_taken_off(tmp_path):
    (tmp_path / "v1.2.txt").write_text("dotted")
    Image.new("RGB", (4, 4)).save(tmp_path / "v1.2.png")
    assert SidecarSource(tmp_path).captions == ["dotted"]


def test_texts_without_a_picture_are_counted_and_ignored(tmp_path):
    write(tmp_path, a_png=None, a_txt="a", notes_txt="no caption", sub__a_txt="of another folder", b_md="x")
    assert SidecarSource(tmp_path).unpaired == 2


def test_hidden_files_and_those_of_other_systems_are_not_opened(tmp_path):
    write(tmp_path, a_png=None, a_txt="a", __MACOSX__a_png=b"x", Thumbs_db=b"x")
    write(tmp_path / "__MACOSX", b_png=None, b_txt="b")
    write(tmp_path / ".cache", b_png=None, b_txt="b")
    (tmp_path / "._a.png").write_bytes(b"x")
    assert SidecarSource(tmp_path).names == ["a.png"]


def test_a_picture_deleted_meanwhile_is_named_when_read(tmp_path):
    source = SidecarSource(write(tmp_path, a_png=None, a_txt="a"))
    (tmp_path / "a.png").unlink()
    with pytest.raises(UnreadablePictureError, match=r"'a\.png': FileNotFoundError"):
        source.read(0)


# --- what is refused, or left out ---

FAULTS = {
    "missing": ({}, r"there is no bad\.txt with its caption"),
    "empty": ({"bad_txt": ""}, "the caption is empty"),
    "blank": ({"bad_txt": " \n\t"}, "the caption is empty"),
    "latin-1": (
        {"bad_txt": "é".encode("latin-1")},
        r"not UTF-8 \(unexpected end of data at byte 0\), save it as UTF-8",
    ),
    "utf-16": ({"bad_txt": "rose".encode("utf-16")}, "not UTF-8"),
    "utf-16 without its mark": ({"bad_txt": "rose".encode("utf-16-le")}, "NUL characters"),
}


@pytest.mark.parametrize(("files", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_picture_without_a_caption_is_named_with_the_reason_or_left_out(tmp_path, files, reason):
    write(tmp_path, a_png=None, a_txt="a", bad_png=None, **files)
    with pytest.raises(
        ValueError, match=rf"has 1 fault: bad\.png \(.*{reason}.*\); correct them, or pass on_error='skip'"
    ):
        SidecarSource(tmp_path)
    source = SidecarSource(tmp_path, on_error="skip")
    assert source.names == ["a.png"]
    [fault] = source.faults
    assert fault.name == "bad.png"


def test_pictures_that_share_a_text_are_both_at_fault(tmp_path):
    write(tmp_path, a_png=None, a_jpg=None, a_txt="which?", b_png=None, b_txt="b")
    with pytest.raises(ValueError, match=r"has 2 faults: a\.jpg \(a\.txt belongs to a\.jpg and a\.png, give each"):
        SidecarSource(tmp_path)
    reason = "a.txt belongs to a.jpg and a.png, give each picture a name of its own"
    assert SidecarSource(tmp_path, on_error="skip").faults == (
        SkippedPicture("a.jpg", reason),
        SkippedPicture("a.png", reason),
    )


def test_a_text_that_is_a_broken_link_is_named(tmp_path):
    write(tmp_path, a_png=None)
    (tmp_path / "a.txt").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"a\.png \(a\.txt cannot be read: No such file"):
        SidecarSource(tmp_path)


def test_many_missing_texts_are_cut_to_ten_and_a_count(tmp_path):
    write(tmp_path, a_txt="a", a_png=None, **{f"p{index:02}_png": None for index in range(14)})
    with pytest.raises(
        ValueError, match=r"has 14 faults: p00\.png .*p09\.png \(there is no p09\.txt .*\) and 4 more; corr"
    ):
        SidecarSource(tmp_path)


def test_nothing_usable_is_refused_even_where_faults_are_skipped(tmp_path):
    write(tmp_path, a_png=None)
    with pytest.raises(ValueError, match=r"has 1 fault: a\.png .*; nothing usable is left"):
        SidecarSource(tmp_path, on_error="skip")


def test_a_folder_without_pictures_or_none_at_all_is_refused(tmp_path):
    write(tmp_path, a_txt="a")
    with pytest.raises(FileNotFoundError, match=f"no pictures in {tmp_path}"):
        SidecarSource(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        SidecarSource(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"a\.txt is a file; expected the folder"):
        SidecarSource(tmp_path / "a.txt")


@pytest.mark.parametrize("extension", ["txt", "", ".png", "./txt"])
def test_an_extension_of_no_text_is_refused(tmp_path, extension):
    with pytest.raises(ValueError, match=r"extension is .*; expected what text files' names end in"):
        SidecarSource(tmp_path, extension=extension)


def test_an_unknown_way_to_treat_errors_is_refused(tmp_path):
    with pytest.raises(ValueError, match="on_error is 'warn'"):
        SidecarSource(tmp_path, on_error="warn")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_called_like_a_picture_is_not_waited_at(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a square")
    os.mkfifo(tmp_path / "z.png")
    (tmp_path / "z.txt").write_text("a pipe")
    os.mkfifo(tmp_path / "a.caption")
    assert SidecarSource(tmp_path).names == ["a.png"]


# --- what training runs leave ---


def write_run(folder):
    """Write what a run leaves: its records, and pictures without captions."""
    write(folder, loss_png=None, previews__a_png=None, checkpoints__step__b_png=None, note_txt="mine")
    (folder / "config.yaml").write_text("steps: 3")
    (folder / "metrics.jsonl").write_text("")


def test_the_folders_of_runs_are_left_out_wherever_they_are(tmp_path):
    write(tmp_path, a_png=None, a_txt="a", sub__b_png=None, sub__b_txt="b")
    for run in ("run", "sub/runs/second"):
        write_run(tmp_path / run)
    source = SidecarSource(tmp_path)
    assert source.names == ["a.png", "sub/b.png"]
    assert (source.faults, source.unpaired) == ((), 0)
    assert source.runs == (str(tmp_path / "run"), str(tmp_path / "sub/runs/second"))


def test_a_folder_that_has_only_one_of_a_runs_files_is_none(tmp_path):
    write(tmp_path, a_png=None, a_txt="a", sub__b_png=None, sub__b_txt="b", sub__config_yaml="mine")
    source = SidecarSource(tmp_path)
    assert source.names == ["a.png", "sub/b.png"] and source.runs == ()


def test_the_folder_that_is_named_is_listed_though_a_run_has_written_there(tmp_path):
    write_run(tmp_path)
    write(tmp_path, loss_txt="a curve", previews__a_txt="a", checkpoints__step__b_txt="b")
    assert len(SidecarSource(tmp_path)) == 3


def test_runs_are_left_out_behind_links_too(tmp_path):
    write(tmp_path / "real", a_png=None, a_txt="a")
    write_run(tmp_path / "real" / "run")
    write_run(tmp_path / "elsewhere")
    (tmp_path / "real" / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    source = SidecarSource(tmp_path / "link")
    assert source.names == ["a.png"] and source.runs == (str(tmp_path / "link/run"),)
