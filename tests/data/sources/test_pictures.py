import io
import pickle

import numpy as np
import pytest
from bad_pictures_kit import GOOD, png_chunk, png_of_size
from PIL import Image

from mmpreproj.data.sources.pictures import (
    PictureSource,
    UnreadablePictureError,
    decode,
    picture_size,
    read_file,
    to_rgb,
)

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
ORIENTATION = 0x0112


class Paths(PictureSource):
    """The smallest source: a list of picture files."""

    def __init__(self, paths):
        self.names = [path.name for path in paths]
        self.captions = ["" for _ in paths]
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def read(self, index):
        return read_file(self.paths[index], self.names[index])


def write_colours(folder, count):
    """Write one flat picture an index, red = 10 * index."""
    paths = [folder / f"{index}.png" for index in range(count)]
    for index, path in enumerate(paths):
        Image.new("RGB", (9, 9), (10 * index, 0, 0)).save(path)
    return paths


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


# to_rgb


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "CMYK", "RGBA", "LA", "YCbCr", "HSV", "1"])
def test_every_mode_becomes_rgb_with_its_grey_kept(mode):
    level = 255 if mode == "1" else 128
    grey = Image.new("RGB", (5, 4), (level,) * 3)
    image = grey.quantize(2) if mode == "P" else grey.convert(mode)  # convert("P") dithers
    rgb = to_rgb(image)
    assert (rgb.mode, rgb.size) == ("RGB", (5, 4))
    assert np.abs(np.asarray(rgb).astype(int) - level).max() <= 2


def test_exif_rotation_is_applied():
    image = Image.new("RGB", (6, 2), RED)
    image.paste(BLUE, (0, 0, 3, 2))
    image.getexif()[ORIENTATION] = 6  # to be turned a quarter clockwise
    upright = to_rgb(image)
    assert upright.size == (2, 6)
    assert upright.getpixel((0, 0)) == BLUE
    assert upright.getpixel((0, 5)) == RED


@pytest.mark.parametrize("background", [WHITE, GREEN])
def test_transparent_pixels_show_the_background(background):
    image = Image.new("RGBA", (2, 1), (*RED, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    rgb = to_rgb(image, background)
    assert rgb.getpixel((0, 0)) == RED
    assert rgb.getpixel((1, 0)) == background


def test_half_transparent_grey_is_mixed_with_the_background():
    rgb = to_rgb(Image.new("LA", (1, 1), (0, 128)))
    assert rgb.getpixel((0, 0)) == (127, 127, 127)


@pytest.mark.parametrize(("mode", "transparent"), [("P", 0), ("L", 7), ("RGB", (1, 2, 3)), ("I;16", 300)])
def test_a_transparent_colour_of_a_png_shows_the_background(tmp_path, mode, transparent):
    image = Image.new(mode, (2, 1), transparent)
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 0, 0])
    image.putpixel((1, 0), {"P": 1, "L": 9, "RGB": RED, "I;16": 0}[mode])
    image.save(tmp_path / "a.png", transparency=transparent)
    with Image.open(tmp_path / "a.png") as read:
        rgb = to_rgb(read, BLUE)
    assert rgb.getpixel((0, 0)) == BLUE
    assert rgb.getpixel((1, 0)) == {"P": RED, "L": (9, 9, 9), "RGB": RED, "I;16": (0, 0, 0)}[mode]


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_sixteen_bit_grey_is_scaled_not_clipped(mode):
    image = Image.new(mode, (3, 1))
    for column, level in enumerate([0, 128 * 257, 65535]):
        image.putpixel((column, 0), level)
    assert [to_rgb(image).getpixel((column, 0))[0] for column in range(3)] == [0, 128, 255]


def test_a_sixteen_bit_png_keeps_its_ramp_through_the_file(tmp_path):
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)[None]
    Image.fromarray(ramp).save(tmp_path / "a.png")
    rgb = np.asarray(decode((tmp_path / "a.png").read_bytes(), "a.png"))
    assert (rgb[0, :, 0] == np.arange(256)).all()


def test_the_first_frame_of_an_animation_is_taken(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, GREEN, BLUE)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "a.gif") as animation:
        animation.seek(2)
        assert to_rgb(animation).getpixel((0, 0)) == RED


@pytest.mark.parametrize(("mode", "value", "message"), [("F", 0.5, "floating-point"), ("I", 70000, "0 to 65535")])
def test_modes_without_a_known_range_are_refused(mode, value, message):
    with pytest.raises(ValueError, match=message):
        to_rgb(Image.new(mode, (2, 2), value))


# decode


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"this is not a picture", "no picture format that Pillow knows; it begins with b'this is not a pi'"),
        (png_of_size(30000, 30000), "DecompressionBombError"),
        (encoded(Image.new("F", (2, 2)), "TIFF"), "floating-point"),
    ],
    ids=["zero bytes", "text", "decompression bomb", "float"],
)
@pytest.mark.parametrize("function", [decode, picture_size])
def test_a_file_that_is_no_picture_is_unreadable_with_the_reason(function, data, reason):
    with pytest.raises(UnreadablePictureError, match=f"a.png.*{reason}") as caught:
        function(data, "a.png")
    assert caught.value.name == "a.png"
    assert reason in caught.value.reason


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_a_truncated_file_is_unreadable(kind):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    with pytest.raises(UnreadablePictureError, match="a is damaged"):
        decode(data[: len(data) // 2], "a is damaged")


def test_the_background_is_seen_through_a_transparent_file():
    data = encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 0)), "PNG")
    assert decode(data, "a").getpixel((0, 0)) == WHITE
    assert decode(data, "a", background=GREEN).getpixel((0, 0)) == GREEN


def test_a_file_deleted_meanwhile_is_unreadable(tmp_path):
    with pytest.raises(UnreadablePictureError, match=r"gone\.png.*FileNotFoundError: No such file"):
        read_file(tmp_path / "gone.png", "gone.png")


def test_a_source_opens_what_it_reads_and_has_no_faults_unless_it_says_so(tmp_path):
    source = Paths(write_colours(tmp_path, 3))
    assert source.open(2).getpixel((0, 0)) == (20, 0, 0)
    assert list(source.faults) == []


# picture_size


@pytest.mark.parametrize("kind", GOOD)
def test_the_size_from_the_header_is_that_of_the_decoded_picture(kind):
    data = GOOD[kind][1](Image.new("RGB", (24, 20), RED))
    assert picture_size(data, kind) == decode(data, kind).size[::-1] == (20, 24)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_the_size_is_upright_in_every_format_that_can_be_turned(kind, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encoded(Image.new("RGB", (64, 32)), kind, exif=exif)
    assert picture_size(data, "a") == decode(data, "a").size[::-1]
    assert picture_size(data, "a") == ((32, 64) if orientation < 5 else (64, 32))


def test_the_size_of_a_png_heeds_a_rotation_noted_after_the_pixels():
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    plain = encoded(Image.new("RGB", (6, 2)), "PNG")
    data = plain[:-12] + png_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[-12:]
    assert decode(data, "a").size == (2, 6)
    assert picture_size(data, "a") == (6, 2)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_size_is_read_without_decoding(kind):
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    damaged = data[:200] + bytes(len(data) - 200)
    assert picture_size(damaged, "a") == (48, 64)


def test_the_error_survives_pickling_between_processes():
    error = pickle.loads(pickle.dumps(UnreadablePictureError("a.png", "broken")))
    assert (error.name, error.reason) == ("a.png", "broken")
