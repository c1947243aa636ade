import pickle
import struct
import weakref
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from mmpreproj.data.pictures import (
    PictureSource,
    SkippedPicture,
    UnreadablePictureError,
    open_picture,
    picture_transform,
    read_pictures,
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

    def open(self, index):
        return open_picture(str(self.paths[index]), self.names[index])


def write_colours(folder, count):
    """Write one flat picture an index, red = 10 * index."""
    paths = [folder / f"{index}.png" for index in range(count)]
    for index, path in enumerate(paths):
        Image.new("RGB", (9, 9), (10 * index, 0, 0)).save(path)
    return paths


def huge_png():
    """Return a PNG of 70 bytes whose header claims 30000 x 30000 pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


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
    rgb = np.asarray(open_picture(str(tmp_path / "a.png"), "a.png"))
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


# open_picture


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty or in no picture format"),
        (b"this is not a picture", "empty or in no picture format"),
        (huge_png(), "DecompressionBombError"),
    ],
    ids=["zero bytes", "text", "decompression bomb"],
)
def test_a_file_that_is_no_picture_is_unreadable_with_the_reason(tmp_path, content, reason):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UnreadablePictureError, match=f"a.png.*{reason}") as caught:
        open_picture(str(tmp_path / "a.png"), "a.png")
    assert caught.value.name == "a.png"
    assert reason in caught.value.reason


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp"])
def test_a_truncated_file_is_unreadable(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UnreadablePictureError, match="a is damaged"):
        open_picture(str(path), "a is damaged")


def test_a_file_deleted_meanwhile_is_unreadable(tmp_path):
    with pytest.raises(UnreadablePictureError, match="FileNotFoundError"):
        open_picture(str(tmp_path / "gone.png"), "gone.png")


def test_the_error_survives_pickling_between_processes():
    error = pickle.loads(pickle.dumps(UnreadablePictureError("a.png", "broken")))
    assert (error.name, error.reason) == ("a.png", "broken")


# picture_transform


def test_the_transform_gives_a_square_from_minus_one_to_one():
    image = Image.new("RGB", (40, 30), (0, 255, 51))
    pixels = picture_transform(16)(image)  # [3, 16, 16]
    assert (pixels.shape, pixels.dtype) == ((3, 16, 16), torch.float32)
    expected = torch.tensor([-1.0, 1.0, -0.6])
    torch.testing.assert_close(pixels, expected[:, None, None].expand(3, 16, 16))


@pytest.mark.parametrize("size", [(96, 64), (64, 96)])
def test_the_transform_agrees_with_resizing_then_cropping(size):
    columns, rows = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    image = Image.fromarray(np.stack([columns, rows, 255 - columns], axis=-1).astype(np.uint8))
    oracle = v2.Compose(
        [v2.PILToTensor(), v2.Resize(32, v2.InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(32)]
    )
    expected = oracle(image).float() / 127.5 - 1
    assert (picture_transform(32)(image) - expected).abs().max() < 0.02


def test_the_centre_is_kept_and_the_sides_are_cropped():
    image = Image.new("RGB", (30, 10), RED)
    image.paste(BLUE, (10, 0, 20, 10))
    torch.testing.assert_close(
        picture_transform(10)(image), torch.tensor([-1.0, -1.0, 1.0])[:, None, None].expand(3, 10, 10)
    )


def test_downscaling_is_antialiased():
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, 3::8] = 255  # an eighth is white; four-point sampling would see more than half
    interior = picture_transform(8)(Image.fromarray(stripes))[..., 2:-2]  # [3, 8, 4]
    assert (interior - (2 / 8 - 1)).abs().max() < 0.05


def test_a_very_long_strip_costs_no_more_than_its_square():
    strip = Image.new("RGB", (50000, 1), RED)
    assert picture_transform(256)(strip).shape == (3, 256, 256)


@pytest.mark.parametrize("resolution", [0, -8, 16.0, True])
def test_a_bad_resolution_is_refused(resolution):
    with pytest.raises(ValueError, match=r"resolution is .* positive whole number of pixels"):
        picture_transform(resolution)


def test_an_unknown_crop_is_refused():
    with pytest.raises(ValueError, match="'center'"):
        picture_transform(8, crop="random")


# read_pictures


def test_batches_hold_every_picture_once_in_order(tmp_path):
    batches = list(read_pictures(Paths(write_colours(tmp_path, 5)), 4, batch_size=2))
    assert [indices for indices, _ in batches] == [[0, 1], [2, 3], [4]]
    pixels = torch.cat([pixels for _, pixels in batches])  # [5, 3, 4, 4]
    torch.testing.assert_close(pixels[:, 0, 0, 0], torch.arange(5) * 10 / 127.5 - 1)


def test_unreadable_pictures_are_noted_and_the_rest_keep_their_indices(tmp_path):
    paths = write_colours(tmp_path, 5)
    paths[1].write_bytes(b"")
    paths[4].write_text("text")
    skipped: list[SkippedPicture] = []
    batches = list(read_pictures(Paths(paths), 4, batch_size=2, skipped=skipped))
    assert [indices for indices, _ in batches] == [[0, 2], [3]]
    torch.testing.assert_close(batches[0][1][1, 0, 0, 0], torch.tensor(20 / 127.5 - 1))
    assert [picture.name for picture in skipped] == ["1.png", "4.png"]
    assert all("no picture format" in picture.reason for picture in skipped)


def test_without_a_list_an_unreadable_picture_raises(tmp_path):
    paths = write_colours(tmp_path, 3)
    paths[2].write_bytes(b"")
    with pytest.raises(UnreadablePictureError, match=r"2\.png"):
        list(read_pictures(Paths(paths), 4))


def test_if_nothing_is_readable_the_first_few_are_named_with_their_reasons(tmp_path):
    paths = write_colours(tmp_path, 5)
    for path in paths:
        path.write_bytes(b"")
    skipped: list[SkippedPicture] = []
    with pytest.raises(ValueError, match=r"none of the 5 pictures .*0\.png: the file is empty.*2\.png") as caught:
        list(read_pictures(Paths(paths), 4, skipped=skipped))
    assert "3.png" not in str(caught.value)
    assert len(skipped) == 5


def test_no_more_than_a_batch_is_held(tmp_path):
    alive: list[weakref.ref] = []
    for _, pixels in read_pictures(Paths(write_colours(tmp_path, 9)), 4, batch_size=3):
        assert sum(ref() is not None for ref in alive) <= 1
        alive.append(weakref.ref(pixels))
    assert len(alive) == 3


def test_pictures_are_opened_only_as_the_batches_are_asked_for(tmp_path):
    paths = write_colours(tmp_path, 4)
    batches = read_pictures(Paths(paths), 4, batch_size=2)
    next(batches)
    paths[2].unlink()
    with pytest.raises(UnreadablePictureError, match=r"2\.png"):
        next(batches)


def test_bad_arguments_are_refused_at_the_call(tmp_path):
    source = Paths(write_colours(tmp_path, 1))
    with pytest.raises(ValueError, match="batch_size is 0"):
        read_pictures(source, 4, batch_size=0)
    with pytest.raises(ValueError, match="resolution is 0"):
        read_pictures(source, 0)
    with pytest.raises(ValueError, match="no pictures"):
        read_pictures(Paths([]), 4)
