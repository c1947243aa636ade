"""Encoder outputs on disk: each computed once, found by what it was computed from, kept whatever comes after."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from encoding_kit import ENCODING, SQUARE, LetterEncoder, Pictures, encode, noise, png, shade, spell, torn
from PIL import Image

from mmpreproj.data.buckets import Size
from mmpreproj.data.caching import Encoding, Share, encode_pictures
from mmpreproj.data.samples import look_at_pictures, plan_samples
from mmpreproj.data.sources.pictures import SkippedPicture, UnreadablePictureError
from mmpreproj.data.store import TensorStore

TWO_SIZES = ((Size(8, 8),), (Size(16, 16),))


def levels(encoder):
    """Read back the grey levels of the pictures that an encoder was given."""
    return sorted(round(float((pixels.mean() + 1) * 127.5)) for pixels in encoder.pictures)


def shades(*values, captions=None):
    return Pictures({f"{index}.png": shade(value) for index, value in enumerate(values)}, captions)


def level_of(item):
    return float((item["latents"].mean() + 1) * 127.5)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def prepared(source, folder, buckets=SQUARE):
    """Look at pictures, and open a store."""
    return plan_samples(look_at_pictures(source), buckets, names=source.names), TensorStore(folder)


# --- what is encoded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_every_picture_and_every_distinct_caption_is_encoded_once(tmp_path, batch_size):
    encoder = LetterEncoder()
    encode(shades(0, 50, 100, 150, 200, captions=["a", "b", "a", "c", "b"]), tmp_path, encoder, batch_size=batch_size)
    assert levels(encoder) == [0, 50, 100, 150, 200]
    assert sorted(encoder.prompts) == ["", "a", "b", "c"]
    assert max(map(len, encoder.batches)) == min(batch_size, 5)


def test_each_picture_comes_with_the_embeddings_of_its_caption(tmp_path):
    pictures = encode(shades(0, 51, 102, 153, 204, captions=list("abacb")), tmp_path, batch_size=2)
    assert pictures.captions == tuple("abacb") and len(pictures) == 5
    assert len(pictures.text.keys) == 3
    for index, (value, caption) in enumerate(zip([0, 51, 102, 153, 204], "abacb", strict=True)):
        item = pictures[index]
        assert spell(item["tokens"]) == caption
        assert level_of(item) == pytest.approx(value, abs=1)
        assert torch.equal(item["pooled"], item["tokens"].sum(dim=0))
        assert int(item["mask"].sum()) == 1


def test_the_empty_prompt_is_encoded_for_captions_that_are_dropped(tmp_path):
    empty = encode(shades(0), tmp_path).empty
    assert spell(empty.tokens) == ""
    assert empty.tokens.shape == (1, 12, 1) and empty.pooled.shape == (1, 1) and empty.mask.shape == (1, 12)


def test_more_captions_are_encoded_too_and_found_by_their_key(tmp_path):
    encoder = LetterEncoder()
    encode(shades(0, captions=["a rose"]), tmp_path, encoder, more_captions=["a rose", "a tulip"])
    assert encoder.prompts == ["", "a rose", "a tulip"]
    assert spell(TensorStore(tmp_path)[ENCODING.text_key("a tulip")]["tokens"]) == "a tulip"


def test_a_picture_is_encoded_at_each_of_its_sizes_and_batches_have_one_size(tmp_path):
    encoder = LetterEncoder()
    pictures = encode(shades(0, 100, 200), tmp_path, encoder, buckets=TWO_SIZES)
    assert [pixels.shape[-1] for pixels in encoder.batches] == [8, 16]
    assert pictures.groups == (Size(8, 8), Size(16, 16)) * 3
    assert pictures.places == (0, 0, 1, 1, 2, 2)
    assert [pictures[index]["latents"].shape[-1] for index in range(6)] == [4, 8] * 3


def test_what_the_encoder_gives_is_stored_in_its_own_dtype(tmp_path):
    pictures = encode(shades(0), tmp_path)
    mean, deviation = pictures.latents.read(0)
    assert mean.dtype == deviation.dtype == torch.bfloat16
    assert pictures[0]["latents"].dtype == torch.float32


def test_no_gradients_are_recorded(tmp_path):
    weight = torch.ones((), requires_grad=True)

    class Learned(LetterEncoder):
        def encode_prompt(self, prompt, **settings):
            tokens, _, pooled, _ = super().encode_prompt(prompt, **settings)
            assert not (tokens * weight).requires_grad
            return tokens, None, pooled, None

    def posterior(pixels):
        assert not (pixels * weight).requires_grad
        return pixels, None

    encode(shades(0), tmp_path, Learned(posterior=posterior))


def test_progress_counts_every_picture_and_caption_to_the_end(tmp_path):
    calls = []
    source = Pictures({"a": shade(0), "torn": torn(), "b": shade(1), "copy of a": shade(0)}, ["a", "x", "b", "a"])
    settings = {"batch_size": 2, "skipped": [], "on_progress": lambda *call: calls.append(call)}
    encode(source, tmp_path, **settings)
    assert [call for call in calls if call[0] == "pictures"] == [
        ("pictures", done, 4)
        for done in (1, 3, 4, 4)  # the copy is done as soon as its twin is known
    ]
    assert [call for call in calls if call[0] == "captions"] == [("captions", done, 3) for done in (0, 2, 3, 3)]
    calls.clear()
    encode(Pictures({"a": shade(0)}), tmp_path, on_progress=lambda *call: calls.append(call))
    assert calls[0] == ("pictures", 1, 1) and calls[-1] == ("captions", 2, 2)


# --- what is found again ---------------------------------------------------------------------------------------------


def test_a_second_run_encodes_nothing_and_reads_the_same(tmp_path):
    source, again = shades(0, 100, 200), LetterEncoder()
    first = encode(source, tmp_path, buckets=TWO_SIZES)
    second = encode(source, tmp_path, again, buckets=TWO_SIZES)
    assert not again.pictures and not again.prompts
    assert all(same(first[index], second[index]) for index in range(6))


CHANGES = {
    "nothing": (ENCODING, 0, 0),
    "vae": (dataclasses.replace(ENCODING, vae="another"), 3, 0),
    "text": (dataclasses.replace(ENCODING, text="another"), 0, 4),
    "length": (dataclasses.replace(ENCODING, max_sequence_length=11), 0, 4),
    "background": (dataclasses.replace(ENCODING, background=(255, 255, 254)), 3, 0),
    "flip": (dataclasses.replace(ENCODING, flip=0.5), 3, 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_how_is_encoded_encodes_anew_what_depends_on_it_alone(tmp_path, change):
    source, again = Pictures({name: noise(seed) for seed, name in enumerate("abc")}), LetterEncoder()
    encode(source, tmp_path)
    encoding, pictures, prompts = CHANGES[change]
    encode(source, tmp_path, again, encoding=encoding)
    assert (len(again.pictures), len(again.prompts)) == (pictures, prompts)


def test_another_size_encodes_the_pictures_anew_and_not_the_captions(tmp_path):
    source, again = shades(0, 100), LetterEncoder()
    encode(source, tmp_path)
    encode(source, tmp_path, again, buckets=TWO_SIZES)
    assert [tuple(pixels.shape) for pixels in again.batches] == [(2, 3, 16, 16)] and not again.prompts


def test_other_bytes_of_one_picture_encode_that_one_anew(tmp_path):
    encode(shades(0, 100, 200), tmp_path)
    again = LetterEncoder()
    changed = encode(Pictures({"0.png": shade(0), "1.png": shade(101), "2.png": shade(200)}), tmp_path, again)
    assert levels(again) == [101] and not again.prompts
    assert level_of(changed[1]) == pytest.approx(101, abs=1)


def test_another_caption_encodes_that_one_anew(tmp_path):
    encode(shades(0, 100, captions=["a", "b"]), tmp_path)
    again = LetterEncoder()
    encode(shades(0, 100, captions=["a", "c"]), tmp_path, again)
    assert again.prompts == ["c"] and not again.pictures


def test_the_share_of_mirrored_draws_and_the_seed_encode_nothing_anew(tmp_path):
    source, again = shades(0, 100), LetterEncoder()
    encode(source, tmp_path, encoding=dataclasses.replace(ENCODING, flip=0.2), seed=1)
    encode(source, tmp_path, again, encoding=dataclasses.replace(ENCODING, flip=0.9), seed=2)
    assert not again.pictures and not again.prompts


def test_turning_flips_on_encodes_the_mirrored_pictures_alone(tmp_path):
    source, upright, mirrored = Pictures({"a": noise(0), "b": noise(1)}), LetterEncoder(), LetterEncoder()
    encode(source, tmp_path, upright)
    encode(source, tmp_path, mirrored, encoding=dataclasses.replace(ENCODING, flip=0.5))
    for before, after in zip(upright.pictures, mirrored.pictures, strict=True):
        assert torch.equal(before.flip(-1), after) and not torch.equal(before, after)


def test_a_copy_under_another_name_is_not_encoded_again(tmp_path):
    encoder, again = LetterEncoder(), LetterEncoder()
    both = encode(Pictures({"a": shade(9), "b": shade(90), "a again": shade(9)}), tmp_path, encoder)
    assert levels(encoder) == [9, 90]
    assert torch.equal(both[0]["latents"], both[2]["latents"]) and both.captions == ("a", "b", "a again")
    encode(Pictures({"moved": shade(90)}), tmp_path, again)
    assert not again.pictures


def test_transparent_pixels_show_the_background(tmp_path):
    source = Pictures({"clear": png(Image.new("RGBA", (8, 8), (0, 0, 0, 0)))})
    encoder = LetterEncoder()
    encode(source, tmp_path, encoder, encoding=dataclasses.replace(ENCODING, background=(40, 40, 40)))
    encode(source, tmp_path, encoder)
    assert levels(encoder) == [40, 255]


@pytest.mark.parametrize("flip", [-0.1, 1.01, float("nan")])
def test_a_share_of_mirrored_draws_that_is_none_is_refused(flip):
    with pytest.raises(ValueError, match=r"flip is .*; expected the share of draws that are mirrored, from 0 to 1"):
        Encoding(vae="a", text="b", flip=flip)


# --- what cannot be read ---------------------------------------------------------------------------------------------


def test_pictures_that_cannot_be_decoded_are_left_out_and_listed_and_captions_stay_with_their_pictures(tmp_path):
    source = Pictures(
        {"0": shade(0), "1": torn(1), "2": shade(100), "3": torn(3), "4": shade(200)},
        ["black", "torn", "grey", "ripped", "white"],
    )
    skipped = [SkippedPicture("earlier", "known")]
    encoder = LetterEncoder()
    pictures = encode(source, tmp_path, encoder, batch_size=2, skipped=skipped, buckets=TWO_SIZES)
    assert pictures.places == (0, 0, 2, 2, 4, 4)
    assert [spell(pictures[index]["tokens"]) for index in (0, 2, 4)] == ["black", "grey", "white"]
    assert [level_of(pictures[index]) for index in (1, 3, 5)] == pytest.approx([0, 100, 200], abs=1)
    assert [one.name for one in pictures.skipped] == ["1", "3"]
    assert all("truncated" in one.reason for one in pictures.skipped)
    assert skipped == [SkippedPicture("earlier", "known"), *pictures.skipped]
    assert "ripped" not in encoder.prompts


def test_without_a_list_the_first_that_cannot_be_decoded_raises_and_what_came_before_is_kept(tmp_path):
    source, again = Pictures({"0": shade(0), "1": shade(1), "torn": torn(), "3": shade(3)}), LetterEncoder()
    with pytest.raises(UnreadablePictureError, match=r"cannot read the picture 'torn': .*truncated"):
        encode(source, tmp_path, batch_size=2)
    encode(source, tmp_path, again, skipped=[])
    assert levels(again) == [3]


def test_every_copy_of_a_picture_that_cannot_be_decoded_is_listed(tmp_path):
    source = Pictures({"torn": torn(), "a": shade(0), "torn again": torn()})
    pictures = encode(source, tmp_path, skipped=[])
    assert pictures.captions == ("a",) and len(pictures[0]["latents"]) == 2
    assert [one.name for one in pictures.skipped] == ["torn", "torn again"]


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (shade(77), "has changed since it was looked at"),
        (torn(), "has changed since it was looked at"),
        (None, "gone"),
    ],
    ids=["another", "torn", "gone"],
)
def test_a_picture_that_changes_after_the_look_is_a_fault_and_not_stored(tmp_path, after, reason):
    source = shades(0, 100, 200)
    samples, store = prepared(source, tmp_path)
    source.files["1.png"] = after
    encoder = LetterEncoder()
    pictures = encode_pictures(encoder, source, samples, encoding=ENCODING, store=store, skipped=[])
    assert pictures.places == (0, 2) and levels(encoder) == [0, 200]
    assert [one.name for one in pictures.skipped] == ["1.png"] and reason in pictures.skipped[0].reason
    with pytest.raises(UnreadablePictureError, match=f"'1.png': .*{reason}"):
        encode_pictures(encoder, source, samples, encoding=ENCODING, store=store)
    again = LetterEncoder()
    encode(shades(0, 100, 200), tmp_path, again)
    assert levels(again) == [100]


def test_a_picture_whose_file_changed_is_read_from_its_copy(tmp_path):
    source = Pictures({"a": shade(50), "copy": shade(50)})
    samples, store = prepared(source, tmp_path)
    source.files["a"] = torn()
    pictures = encode_pictures(LetterEncoder(), source, samples, encoding=ENCODING, store=store, skipped=[])
    assert pictures.places == (0, 1) and not pictures.skipped
    assert level_of(pictures[0]) == level_of(pictures[1]) == pytest.approx(50, abs=1)


def test_what_is_stored_needs_its_file_no_more(tmp_path):
    source = shades(0, 100)
    samples, store = prepared(source, tmp_path)
    encode_pictures(LetterEncoder(), source, samples, encoding=ENCODING, store=store)
    source.files["1.png"] = None
    assert len(encode_pictures(LetterEncoder(), source, samples, encoding=ENCODING, store=store)) == 2


def test_a_source_without_one_picture_that_can_be_decoded_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none of the 2 pictures could be read; the first: a: .*truncated.*; b: "):
        encode(Pictures({"a": torn(1), "b": torn(2)}), tmp_path, skipped=[], buckets=TWO_SIZES)
    with pytest.raises(ValueError, match="there are no pictures to encode"):
        encode(Pictures({}), tmp_path)


# --- what is not finite, and what is interrupted ---------------------------------------------------------------------


def worse_from(threshold, **where):
    """Make an encoder's posterior spoil pictures from a brightness on."""

    def posterior(pixels):
        mean, bad = pixels[:, :2], pixels.mean(dim=(1, 2, 3)) * 127.5 + 127.5 > threshold
        deviation = torch.ones_like(mean)
        for name, value in where.items():
            (mean if name == "mean" else deviation)[bad, 0, 0, 0] = value
        return mean, deviation

    return posterior


@pytest.mark.parametrize("where", [{"mean": float("nan")}, {"mean": float("-inf")}, {"deviation": float("nan")}])
def test_latents_that_are_not_finite_are_refused_nothing_of_their_batch_is_kept_and_all_before_it(tmp_path, where):
    source = shades(0, 20, 40, 220, 60, 80)
    with pytest.raises(ValueError, match=r"NaN or infinite latents for 1 of 2 pictures.*fp32 or bf16"):
        encode(source, tmp_path, LetterEncoder(posterior=worse_from(200, **where)), batch_size=2)
    again = LetterEncoder()
    encode(source, tmp_path, again)
    assert levels(again) == [40, 60, 80, 220]


def test_of_a_batch_whose_mirrored_latents_alone_are_not_finite_nothing_is_kept(tmp_path):
    left_is_dark = Image.new("RGB", (8, 8), (255, 255, 255))
    left_is_dark.paste((0, 0, 0), (0, 0, 4, 8))

    def posterior(pixels):
        return pixels.log1p() if float(pixels[0, 0, 0, 0]) > 0 else pixels, None  # log of 0 at the dark pixels

    source = Pictures({"a": png(left_is_dark)})
    with pytest.raises(ValueError, match="NaN or infinite latents for 1 of 1 pictures"):
        encode(source, tmp_path, LetterEncoder(posterior=posterior), encoding=dataclasses.replace(ENCODING, flip=0.5))
    assert len(TensorStore(tmp_path)) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("out of memory")])
def test_an_interrupted_encoding_keeps_what_was_computed(tmp_path, error):
    def stop_after(count):
        def before(done):
            if done >= count:
                raise error

        return before

    source, again = shades(0, 20, 40, 60, 80, captions=list("abcde")), LetterEncoder()
    with pytest.raises(error if isinstance(error, type) else RuntimeError):
        encode(source, tmp_path, LetterEncoder(before=stop_after(4)), batch_size=2)
    with pytest.raises(error if isinstance(error, type) else RuntimeError):
        encode(source, tmp_path, LetterEncoder(before=stop_after(2)), batch_size=2)  # one picture, then two captions
    encode(source, tmp_path, again, batch_size=2)
    assert not again.pictures
    assert again.prompts == ["b", "c", "d", "e"]


# --- several processes -----------------------------------------------------------------------------------------------


def encode_in_two(make_source, folder, *, buckets=SQUARE, encoding=ENCODING):
    """Encode as two processes do, each with its source, its store and its encoder."""
    barrier, encoders = threading.Barrier(2, timeout=30), [LetterEncoder(), LetterEncoder()]

    def run(rank):
        source, skipped = make_source(), []
        samples, store = prepared(source, folder, buckets)
        share = Share(rank, 2, lambda: barrier.wait() and None)
        settings = {"encoding": encoding, "store": store, "share": share, "batch_size": 2, "skipped": skipped}
        try:
            return encode_pictures(encoders[rank], source, samples, **settings), skipped
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        return encoders, list(pool.map(run, range(2)))


def equal(first, second):
    names = ("captions", "groups", "times", "flip", "seed", "skipped", "places")
    return (
        all(getattr(first, name) == getattr(second, name) for name in names)
        and first.latents.identity() == second.latents.identity()
        and all(same(first[index], second[index]) for index in range(len(first)))
    )


def test_two_processes_encode_each_its_share_once_and_end_with_the_same(tmp_path):
    encoders, ((first, _), (second, _)) = encode_in_two(lambda: shades(*range(0, 90, 10)), tmp_path)
    assert sorted(levels(encoders[0]) + levels(encoders[1])) == list(range(0, 90, 10))
    assert {len(encoder.pictures) for encoder in encoders} == {4, 5}
    assert len(encoders[0].prompts) == len(encoders[1].prompts) == 5
    assert not set(encoders[0].prompts) & set(encoders[1].prompts)
    assert equal(first, second) and len(first) == 9
    alone = encode(shades(*range(0, 90, 10)), tmp_path / "alone")
    assert equal(first, alone)


def test_each_process_has_its_part_of_every_size(tmp_path):
    encoders, _ = encode_in_two(lambda: shades(*range(0, 80, 10)), tmp_path, buckets=TWO_SIZES)
    for encoder in encoders:
        assert sorted(pixels.shape[-1] for pixels in encoder.pictures) == [8] * 4 + [16] * 4


def test_two_processes_leave_out_the_same_pictures_whoever_met_them(tmp_path):
    def make_source():
        good, bad = {str(level): shade(level) for level in range(0, 80, 10)}, {f"torn {n}": torn(n) for n in range(4)}
        names = [*list(good)[:3], *list(bad)[:3], *list(good)[3:], *list(bad)[3:]]
        return Pictures({name: (good | bad)[name] for name in names} | {"torn 0 again": torn(0)})

    encoders, ((first, skipped), (second, other)) = encode_in_two(make_source, tmp_path)
    assert sorted(levels(encoders[0]) + levels(encoders[1])) == list(range(0, 80, 10))
    assert equal(first, second) and len(first) == 8
    assert [one.name for one in skipped] == ["torn 0", "torn 1", "torn 2", "torn 3", "torn 0 again"]
    assert skipped == other == list(first.skipped)


def test_a_process_that_starts_when_another_has_written_already_does_its_own_share_all_the_same(tmp_path):
    source, waits = shades(*range(0, 80, 10)), [threading.Event(), threading.Event()]
    encoders = [LetterEncoder(), LetterEncoder()]
    barrier = threading.Barrier(2, timeout=30)

    def run(rank):
        if rank == 1:
            assert waits[0].wait(30)
        samples, store = prepared(source, tmp_path)

        def wait():
            waits[rank].set()
            barrier.wait()

        share = Share(rank, 2, wait)
        return encode_pictures(encoders[rank], source, samples, encoding=ENCODING, store=store, share=share)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert len(encoders[0].pictures) == len(encoders[1].pictures) == 4
    assert equal(first, second)


def test_a_share_that_another_process_left_out_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="another process has not encoded its share of the pictures"):
        encode(shades(0, 100), tmp_path, share=Share(0, 2, lambda: None))
    encode(shades(0, 100), tmp_path)
    with pytest.raises(RuntimeError, match="another process has not encoded its share of the captions"):
        encode(shades(0, 100, captions=["x", "y"]), tmp_path, share=Share(0, 2, lambda: None))
