"""What is known of pictures before they are decoded, and the sizes that are chosen by it."""

import hashlib
import math

import pytest
from bad_pictures_kit import write_good_pictures
from encoding_kit import Pictures, shade, torn

from mmpreproj.data.buckets import Size, bucket_sizes, enlargement, kept_share
from mmpreproj.data.samples import Look, Sample, look_at_pictures, plan_samples
from mmpreproj.data.sources.pictures import UnreadablePictureError

SMALL, LARGE = bucket_sizes(16, multiple=4), bucket_sizes(32, multiple=4)


def look(place, height, width):
    return Look(place, "0" * 64, Size(height, width))


def plan(*looks, buckets=(SMALL, LARGE), **settings):
    return plan_samples(looks, buckets, names=[f"{place}.png" for place in range(10)], **settings)


# --- looking ---------------------------------------------------------------------------------------------------------


def test_looks_give_the_digest_of_each_file_and_the_size_that_it_is_decoded_to(tmp_path):
    names = write_good_pictures(tmp_path, 14, (24, 20))
    source = Pictures({name: (tmp_path / name).read_bytes() for name in names})
    assert any("turned" in name for name in names)
    for place, found in enumerate(look_at_pictures(source)):
        picture = source.open(place)
        assert found.place == place
        assert found.size == Size(height=picture.height, width=picture.width)
        assert found.digest == hashlib.sha256(source.read(place)).hexdigest()


def test_pictures_that_cannot_be_read_are_listed_and_the_rest_goes_on():
    source = Pictures({"a.png": shade(0), "gone.png": None, "text.png": b"no picture", "b.png": shade(9)})
    skipped = []
    assert [found.place for found in look_at_pictures(source, skipped=skipped)] == [0, 3]
    assert [one.name for one in skipped] == ["gone.png", "text.png"]
    assert skipped[0].reason == "it is gone" and "no picture format" in skipped[1].reason


def test_without_a_list_the_first_that_cannot_be_read_raises():
    with pytest.raises(UnreadablePictureError, match=r"'gone.png': it is gone"):
        look_at_pictures(Pictures({"a.png": shade(0), "gone.png": None, "text.png": b"no picture"}))


def test_looking_decodes_nothing():
    source = Pictures({"torn.png": torn()})
    assert look_at_pictures(source)[0].size == Size(16, 16)
    with pytest.raises(UnreadablePictureError):
        source.open(0)


def test_every_look_is_reported_also_at_what_cannot_be_read():
    done = []
    look_at_pictures(Pictures({"a.png": None, "b.png": shade(0)}), skipped=[], on_look=done.append)
    assert done == [1, 2]


# --- planning --------------------------------------------------------------------------------------------------------


def test_every_picture_gets_the_bucket_that_keeps_most_of_it_at_each_resolution_in_the_order_of_the_source():
    looks = [look(place, 100 + 30 * place, 160) for place in range(6)]
    samples = plan(*looks)
    assert [sample.look for sample in samples] == [one for one in looks for _ in range(2)]
    for place, one in enumerate(looks):
        for sample, buckets in zip(samples[2 * place : 2 * place + 2], (SMALL, LARGE), strict=True):
            assert sample.bucket in buckets
            best = max(kept_share(one.size, bucket) for bucket in buckets)
            assert kept_share(one.size, sample.bucket) == pytest.approx(best)


def test_a_picture_is_trained_at_the_resolutions_that_it_is_large_enough_for():
    samples = plan(look(0, 20, 20), look(1, 40, 40), max_enlargement=1.0)
    assert samples == [
        Sample(look(0, 20, 20), Size(16, 16)),
        Sample(look(1, 40, 40), Size(16, 16)),
        Sample(look(1, 40, 40), Size(32, 32)),
    ]


def test_a_picture_may_be_enlarged_by_exactly_the_most_that_is_allowed():
    small = look(0, 8, 8)
    assert [sample.bucket for sample in plan(small, max_enlargement=2.0)] == [Size(16, 16)]
    assert enlargement(small.size, Size(16, 16)) == 2.0
    skipped = []
    assert plan(small, max_enlargement=math.nextafter(2.0, 0), skipped=skipped) == []
    assert len(skipped) == 1


def test_pictures_too_small_for_all_resolutions_are_listed_with_the_least_enlargement():
    skipped = []
    samples = plan(look(0, 40, 40), look(1, 4, 5), look(2, 50, 50), max_enlargement=1.5, skipped=skipped)
    assert [sample.look.place for sample in samples] == [0, 0, 2, 2]
    (one,) = skipped
    assert one.name == "1.png"
    assert "it is too small: 5 × 4 pixels would be enlarged 4 times to fill" in one.reason
    assert "data.max_enlargement is 1.5" in one.reason


def test_without_a_list_the_first_that_is_too_small_raises():
    with pytest.raises(UnreadablePictureError, match=r"'1.png': it is too small: 4 × 4 pixels"):
        plan(look(0, 40, 40), look(1, 4, 4), max_enlargement=1.5)


def test_unless_told_otherwise_any_picture_is_large_enough():
    assert len(plan(look(0, 1, 1))) == 2
