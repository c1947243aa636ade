"""Sizes of buckets, which of them a picture goes to, and what becomes of it there."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2

from mmpreproj.data.buckets import (
    BucketReport,
    Size,
    bucket_sizes,
    enlargement,
    fit,
    kept_share,
    nearest_bucket,
    report_buckets,
)

PROPERTY = settings(deadline=None, derandomize=True, database=None, max_examples=60)
SIZES = st.builds(Size, st.integers(1, 3000), st.integers(1, 3000))
SMALL = st.builds(Size, st.integers(1, 60), st.integers(1, 60))
STEPS = st.tuples(st.integers(1, 70), st.sampled_from([1, 4, 8, 16, 64]))  # sides of the square in steps, and the step
RATIOS = st.sampled_from([1.0, 1.3, 1.5, 16 / 9, 2.0, 3.0])
MIXED = bucket_sizes(32, multiple=4) + bucket_sizes(64, multiple=16)


def noise(height, width, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def ramps(height, width):
    """Red is the column and green the row, from 0 at the first to 1 at the last, so that scales can be read off."""
    pixels = np.zeros((height, width, 3))
    pixels[..., 0] = np.linspace(0, 255, width)
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return Image.fromarray(pixels.round().astype(np.uint8))


def slow_share(size, bucket):
    """Resize to cover, crop, and measure what is seen of the picture, in exact fractions."""
    scale = max(Fraction(bucket.height, size.height), Fraction(bucket.width, size.width))
    return Fraction(bucket.height * bucket.width) / (scale * size.height * scale * size.width)


# bucket_sizes


@PROPERTY
@given(steps=STEPS, max_ratio=RATIOS)
def test_buckets_are_multiples_within_the_ratio_and_a_step_of_the_area(steps, max_ratio):
    resolution, multiple = steps[0] * steps[1], steps[1]
    sizes = bucket_sizes(resolution, multiple=multiple, max_ratio=max_ratio)
    assert Size(resolution, resolution) in sizes
    for height, width in sizes:
        assert height % multiple == width % multiple == 0
        assert max(height, width) <= max_ratio * min(height, width)
        assert abs(height * width - resolution**2) < multiple * min(height, width)


@PROPERTY
@given(steps=STEPS, max_ratio=RATIOS)
def test_buckets_are_turned_over_too_each_once_from_wide_to_tall(steps, max_ratio):
    sizes = bucket_sizes(steps[0] * steps[1], multiple=steps[1], max_ratio=max_ratio)
    assert {Size(width, height) for height, width in sizes} == set(sizes)
    shapes = [height / width for height, width in sizes]
    assert all(first < second for first, second in pairwise(shapes))


@PROPERTY
@given(steps=STEPS, max_ratio=RATIOS)
def test_no_other_longer_side_within_the_ratio_comes_nearer_to_the_area(steps, max_ratio):
    side, multiple = steps
    for size in bucket_sizes(side * multiple, multiple=multiple, max_ratio=max_ratio):
        short, long = sorted(length // multiple for length in size)
        others = range(short, math.floor(max_ratio * short) + 1)
        assert abs(short * long - side**2) == min(abs(short * other - side**2) for other in others)


@PROPERTY
@given(steps=STEPS, max_ratio=RATIOS, room=st.integers(0, 300))
def test_no_side_passes_the_longest_and_what_fits_stays(steps, max_ratio, room):
    resolution, multiple = steps[0] * steps[1], steps[1]
    whole = bucket_sizes(resolution, multiple=multiple, max_ratio=max_ratio)
    sizes = bucket_sizes(resolution, multiple=multiple, max_ratio=max_ratio, largest=resolution + room)
    assert all(max(size) <= resolution + room for size in sizes)
    assert all(max(size) <= max_ratio * min(size) for size in sizes)
    assert {size for size in whole if max(size) <= resolution + room} <= set(sizes)
    assert all(height * width < resolution**2 for height, width in set(sizes) - set(whole))


def test_a_model_whose_positions_end_at_the_square_gets_shorter_buckets_alone():
    sizes = bucket_sizes(32, multiple=4, largest=32)
    assert sizes == ((16, 32), (20, 32), (24, 32), (28, 32), (32, 32), (32, 28), (32, 24), (32, 20), (32, 16))


def test_buckets_of_small_pictures():
    assert bucket_sizes(32, multiple=4) == ((24, 44), (28, 36), (32, 32), (36, 28), (44, 24))


def test_a_ratio_of_one_is_the_square_mode():
    assert bucket_sizes(64, multiple=16, max_ratio=1.0, largest=64) == (Size(64, 64),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resolution": 500}, "resolution is 500; expected a multiple of 16: the nearest are 496 and 512"),
        ({"resolution": 5}, "resolution is 5; expected a multiple of 16: the nearest are 16$"),
        ({"resolution": 0}, "resolution is 0; expected a positive whole number of pixels"),
        ({"resolution": 32.0}, r"resolution is 32\.0; expected a positive whole number"),
        ({"multiple": 0}, "multiple is 0; expected a positive whole number"),
        ({"multiple": True}, "multiple is True; expected a positive whole number"),
        ({"max_ratio": 0.5}, r"max_ratio is 0\.5; expected a number of at least 1"),
        ({"max_ratio": math.inf}, "max_ratio is inf; expected a number of at least 1"),
        ({"max_ratio": math.nan}, "max_ratio is nan; expected a number of at least 1"),
        (
            {"largest": 48},
            "resolution is 64, but the longest side that the model takes is 48 pixels; choose a smaller",
        ),
        ({"largest": math.nan}, "the longest side that the model takes is nan pixels"),
    ],
)
def test_buckets_that_cannot_be_made_are_refused(arguments, message):
    arguments = {"resolution": 64, "multiple": 16, **arguments}
    with pytest.raises(ValueError, match=message):
        bucket_sizes(arguments.pop("resolution"), **arguments)


# kept_share, enlargement, nearest_bucket


@PROPERTY
@given(size=SIZES, bucket=SIZES)
def test_the_share_is_what_covering_and_cropping_keeps(size, bucket):
    assert kept_share(size, bucket) == float(slow_share(size, bucket))


@PROPERTY
@given(size=SIZES, bucket=SIZES)
def test_enlarged_so_much_a_picture_covers_its_bucket_and_no_more(size, bucket):
    factor = enlargement(size, bucket)
    over = size.height * factor / bucket.height, size.width * factor / bucket.width
    assert min(over) == pytest.approx(1)
    assert max(over) == pytest.approx(1 / kept_share(size, bucket))


@PROPERTY
@given(size=SIZES)
def test_no_bucket_keeps_more_than_the_nearest_and_of_equals_it_is_the_largest(size):
    nearest = nearest_bucket(size, MIXED)
    best = max(slow_share(size, bucket) for bucket in MIXED)
    assert slow_share(size, nearest) == best
    assert math.prod(nearest) == max(math.prod(bucket) for bucket in MIXED if slow_share(size, bucket) == best)


@PROPERTY
@given(size=SIZES, order=st.permutations(MIXED))
def test_the_nearest_bucket_does_not_depend_on_their_order(size, order):
    assert nearest_bucket(size, order) == nearest_bucket(size, MIXED)


@PROPERTY
@given(size=SMALL, factor=st.integers(2, 50))
def test_the_nearest_bucket_depends_on_the_shape_alone(size, factor):
    assert nearest_bucket(Size(factor * size.height, factor * size.width), MIXED) == nearest_bucket(size, MIXED)


def test_of_several_resolutions_the_better_shape_wins_though_its_bucket_is_larger():
    """By |h·W - w·H| the small square would win, with 200 against 640, for all that it crops more."""
    assert nearest_bucket(Size(100, 120), (Size(10, 10), Size(48, 64))) == Size(48, 64)


def test_without_buckets_there_is_no_nearest():
    with pytest.raises(ValueError, match="there are no buckets; expected at least one size"):
        nearest_bucket(Size(4, 4), ())


# fit


@pytest.mark.parametrize("size", [(40, 40), (40, 57), (57, 40), (7, 7), (9, 4), (1, 30), (33, 32)])
@pytest.mark.parametrize("side", [8, 32])
def test_in_a_square_bucket_a_picture_is_its_largest_centred_square_resized(size, side):
    image = noise(*size)
    oracle = v2.Compose(
        [
            v2.CenterCrop(min(size)),
            v2.PILToTensor(),
            v2.Resize((side, side), interpolation=v2.InterpolationMode.BICUBIC, antialias=True),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5]),
        ]
    )
    assert torch.equal(fit(image, Size(side, side)), oracle(image))


@pytest.mark.parametrize("size", [(96, 64), (64, 96)])
def test_fitting_agrees_with_resizing_then_cropping(size):
    columns, rows = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    image = Image.fromarray(np.stack([columns, rows, 255 - columns], axis=-1).astype(np.uint8))
    oracle = v2.Compose(
        [v2.PILToTensor(), v2.Resize(32, v2.InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(32)]
    )
    assert (fit(image, Size(32, 32)) - (oracle(image).float() / 127.5 - 1)).abs().max() < 0.02


def test_the_centre_is_kept_and_the_sides_are_cropped():
    image = Image.new("RGB", (30, 10), "red")
    image.paste("blue", (10, 0, 20, 10))
    blue = torch.tensor([-1.0, -1.0, 1.0])[:, None, None].expand(3, 10, 10)
    torch.testing.assert_close(fit(image, Size(10, 10)), blue)


def test_downscaling_is_antialiased():
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, 3::8] = 255  # an eighth is white; four-point sampling would see more than half
    interior = fit(Image.fromarray(stripes), Size(8, 8))[..., 2:-2]  # [3, 8, 4]
    assert (interior - (2 / 8 - 1)).abs().max() < 0.05


def test_a_very_long_strip_costs_no_more_than_its_square():
    assert fit(Image.new("RGB", (50000, 1), "red"), Size(256, 256)).shape == (3, 256, 256)


@PROPERTY
@given(size=SMALL, bucket=SMALL)
def test_a_fitted_picture_has_the_buckets_size_and_range(size, bucket):
    pixels = fit(noise(*size), bucket)
    assert (pixels.shape, pixels.dtype) == ((3, *bucket), torch.float32)
    assert pixels.abs().max() <= 1


@pytest.mark.parametrize("bucket", [Size(24, 44), Size(44, 24), Size(32, 32)])
@pytest.mark.parametrize("size", [(200, 240), (240, 200), (400, 90), (90, 400), (25, 30)])
def test_nothing_is_squashed_and_the_centre_is_kept(size, bucket):
    """The slopes of the ramps, in pixels of the picture a pixel of the bucket, are one scale, the covering one."""
    pixels = (fit(ramps(*size), bucket) + 1) / 2  # [3, h, w]
    rows, columns = pixels[1, :, bucket.width // 2], pixels[0, bucket.height // 2]
    for seen, length in ((rows, size[0]), (columns, size[1])):
        inner = seen[4:-4] * (length - 1)  # bicubic bends at the edges
        slope = (inner[-1] - inner[0]) / (len(inner) - 1)
        tolerance = 1 / min(bucket) + 2 * length / 255 / (len(inner) - 1)  # a pixel of the crop, a level of colour
        assert slope.item() == pytest.approx(1 / enlargement(Size(*size), bucket), abs=tolerance)
        assert inner.mean().item() == pytest.approx((length - 1) / 2, abs=0.6 + length / 255)


def test_a_picture_of_the_buckets_size_is_unchanged():
    image = noise(24, 44)
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(fit(image, Size(24, 44)), expected, rtol=0, atol=1e-6)


@PROPERTY
@given(size=SMALL, bucket=SMALL)
def test_mirrored_is_the_same_tensor_with_left_and_right_swapped(size, bucket):
    image = noise(*size)
    assert torch.equal(fit(image, bucket, mirrored=True), fit(image, bucket).flip(-1))


class LargestTensor(TorchDispatchMode):
    """Watches what torch computes, and keeps the most numbers that one result held."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("size", [(1, 50_000), (50_000, 1)])
def test_a_strip_is_cropped_before_it_is_resized(size):
    strip = noise(*size)
    with LargestTensor() as largest:
        pixels = fit(strip, Size(24, 44))
    assert pixels.shape == (3, 24, 44)
    assert largest.numbers == pixels.numel()


def test_a_picture_that_is_not_rgb_is_refused():
    with pytest.raises(ValueError, match="the picture's mode is RGBA; expected RGB, which to_rgb makes of any"):
        fit(Image.new("RGBA", (4, 4)), Size(4, 4))


# reports


def test_a_report_counts_pictures_and_what_is_cropped():
    square, wide = Size(32, 32), Size(24, 44)
    sizes = [(Size(32, 32), square), (Size(10, 20), square), (Size(24, 44), wide), (Size(32, 24), square)]
    assert report_buckets(sizes) == [
        BucketReport(wide, 1, 0.0, 0.0),
        BucketReport(square, 3, pytest.approx(0.25), 0.5),
    ]


def test_a_line_names_the_width_first_and_the_crops_in_percent():
    assignments = [(Size(100, 100), Size(24, 44))] + [(Size(24, 44), Size(24, 44))] * 3 + [(Size(8, 8), Size(4, 4))]
    assert [str(report) for report in report_buckets(iter(assignments))] == [
        "44 × 24: 4 pictures, cropped 11 % on average, 45 % at most",
        "4 × 4: 1 picture, cropped 0 % on average, 0 % at most",
    ]


def test_without_pictures_nothing_is_reported():
    assert report_buckets([]) == []
