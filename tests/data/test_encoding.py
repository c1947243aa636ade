"""Encoder outputs: computed once, aligned with their captions, refused where they are not finite."""

import pytest
import torch
from PIL import Image

from mmpreproj.data.encoding import EncodedPictures, encode_captions, encode_pictures, split_held_out
from mmpreproj.data.pictures import UnreadablePictureError


class Shades:
    """A source of grey pictures; `None` in place of a shade cannot be read."""

    def __init__(self, shades, captions=None):
        self.shades = shades
        self.names = [f"{index}.png" for index in range(len(shades))]
        self.captions = captions or [f"shade {shade}" for shade in shades]

    def __len__(self):
        return len(self.shades)

    def open(self, index):
        if self.shades[index] is None:
            raise UnreadablePictureError(self.names[index], "it is torn")
        return Image.new("RGB", (10, 8), (self.shades[index],) * 3)


class LetterEncoder:
    """An encoder whose embeddings spell the prompt, and that keeps what it was asked."""

    def __init__(self, scale=1.0):
        self.scale = scale
        self.pictures, self.prompts, self.settings = [], [], []

    def encode_latents(self, pixels, generator=None):
        self.pictures += [float(row) for row in pixels.mean(dim=(1, 2, 3))]
        return pixels[:, :2, ::2, ::2].to(torch.bfloat16) * self.scale

    def encode_prompt(self, prompt, **settings):
        self.prompts.append(list(prompt))
        self.settings.append(settings)
        tokens = torch.tensor([[ord(letter) for letter in text.ljust(12)] for text in prompt]).float()
        return tokens[..., None], None, tokens.sum(dim=1, keepdim=True), None

    def encode_prompt_mask(self, prompt, *, max_sequence_length):
        return torch.tensor([[place < len(text) for place in range(12)] for text in prompt])


def spell(row):
    return "".join(chr(int(code)) for code in row.flatten()).rstrip()


def encode(source, encoder=None, **settings):
    return encode_pictures(encoder or LetterEncoder(), source, resolution=8, **settings)


# --- encoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_every_picture_and_every_distinct_caption_is_encoded_once(batch_size):
    encoder = LetterEncoder()
    encode(Shades([0, 50, 100, 150, 200], ["a", "b", "a", "c", "b"]), encoder, batch_size=batch_size)
    assert len(encoder.pictures) == 5
    assert sorted(prompt for call in encoder.prompts for prompt in call) == ["", "a", "b", "c"]
    assert max(len(call) for call in encoder.prompts) <= batch_size


def test_each_picture_comes_with_the_embeddings_of_its_caption():
    pictures = encode(Shades([0, 51, 102, 153, 204], ["a", "b", "a", "c", "b"]), batch_size=2)
    for index, (shade, caption) in enumerate(zip([0, 51, 102, 153, 204], "abacb", strict=True)):
        item = pictures[index]
        assert spell(item["tokens"]) == caption
        assert float(item["latents"].float().mean()) == pytest.approx(shade / 127.5 - 1, abs=0.01)
        assert torch.equal(item["pooled"], item["tokens"].sum(dim=0))
    assert len(pictures) == 5
    assert len(pictures.text.tokens) == 3


def test_unreadable_pictures_are_left_out_and_listed_and_captions_stay_with_their_pictures():
    pictures = encode(Shades([0, None, 100, None, 200], ["black", "torn", "grey", "ripped", "white"]), batch_size=2)
    assert pictures.captions == ("black", "grey", "white")
    assert [(picture.name, picture.reason) for picture in pictures.skipped] == [
        ("1.png", "it is torn"),
        ("3.png", "it is torn"),
    ]
    assert [spell(pictures[index]["tokens"]) for index in range(3)] == ["black", "grey", "white"]
    assert [float(latents.mean()) for latents in pictures.latents] == sorted(float(x.mean()) for x in pictures.latents)


def test_latents_are_float32_on_the_cpu_whatever_the_encoder_gives():
    pictures = encode(Shades([0, 100]))
    assert (pictures.latents.dtype, pictures.latents.device.type) == (torch.float32, "cpu")
    assert pictures.latents.shape == (2, 2, 4, 4)


def test_the_empty_prompt_is_encoded_for_captions_that_are_dropped():
    empty = encode(Shades([0])).empty
    assert spell(empty.tokens) == ""
    assert empty.tokens.shape == (1, 12, 1)
    assert empty.pooled.shape == (1, 1)


def test_captions_are_encoded_as_for_generation_without_guidance():
    encoder = LetterEncoder()
    encode(Shades([0]), encoder, max_sequence_length=77)
    for settings in encoder.settings:
        assert settings["max_sequence_length"] == 77
        assert settings["do_classifier_free_guidance"] is False


def test_no_gradients_are_recorded():
    class Learned(LetterEncoder):
        weight = torch.ones((), requires_grad=True)

        def encode_latents(self, pixels, generator=None):
            return super().encode_latents(pixels) * self.weight

        def encode_prompt(self, prompt, **settings):
            tokens, _, pooled, _ = super().encode_prompt(prompt, **settings)
            return tokens * self.weight, None, pooled * self.weight, None

    pictures = encode(Shades([0]), Learned())
    assert not any(value.requires_grad for value in (pictures.latents, pictures.text.tokens, pictures.text.pooled))


def test_progress_counts_every_picture_and_caption_to_the_end():
    calls = []
    encode(
        Shades([0, None, 100, 150], ["a", "x", "b", "a"]),
        batch_size=2,
        on_progress=lambda stage, done, total: calls.append((stage, done, total)),
    )
    assert [call for call in calls if call[0] == "pictures"] == [("pictures", 3, 4), ("pictures", 4, 4)]
    assert calls[-1] == ("captions", 2, 2)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e39])
def test_latents_that_are_not_finite_are_refused(scale):
    with pytest.raises(ValueError, match=r"NaN or infinite latents for 2 of 2 pictures.*fp32 or bf16"):
        encode(Shades([0, 200]), LetterEncoder(scale))


def test_a_source_without_one_readable_picture_is_refused():
    with pytest.raises(ValueError, match=r"none of the 2 pictures could be read.*it is torn"):
        encode(Shades([None, None]))


def test_captions_alone_keep_their_order():
    text = encode_captions(LetterEncoder(), ["red", "a rose", ""])
    assert [spell(row) for row in text.tokens] == ["red", "a rose", ""]
    assert text.pooled.shape == (3, 1)


def test_a_subset_keeps_pictures_and_captions_together_and_the_order_asked_for():
    pictures = encode(Shades([0, 100, 200], ["a", "b", "c"]))
    some = pictures.subset([2, 0])
    assert isinstance(some, EncodedPictures)
    assert some.captions == ("c", "a")
    assert [spell(some[index]["tokens"]) for index in range(2)] == ["c", "a"]
    assert torch.equal(some.latents, pictures.latents[[2, 0]])
    assert len(pictures.subset([])) == 0


# --- holding out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 7, 19])
def test_the_split_is_disjoint_and_exhaustive(count):
    train, held_out = split_held_out([f"c{i}" for i in range(20)], count)
    assert len(held_out) == count
    assert sorted(train + held_out) == list(range(20))
    assert (train, held_out) == (sorted(train), sorted(held_out))


def test_the_split_depends_on_the_seed_alone():
    captions = [f"c{i}" for i in range(50)]
    torch.manual_seed(1)
    first = split_held_out(captions, 10, seed=3)
    torch.manual_seed(2)
    assert split_held_out(captions, 10, seed=3) == first
    assert split_held_out(captions, 10, seed=4) != first


def test_named_captions_are_always_trained_on_each_time_they_occur():
    captions = ["apple", "pear"] * 10
    for seed in range(5):
        _, held_out = split_held_out(captions, 10, seed=seed, always_train=["apple"])
        assert {captions[index] for index in held_out} == {"pear"}


@pytest.mark.parametrize(("count", "always"), [(4, []), (5, []), (3, ["a", "b"])])
def test_holding_out_too_many_is_refused(count, always):
    with pytest.raises(ValueError, match=f"held_out asks for {count} of 4 pictures"):
        split_held_out(["a", "b", "c", "d"], count, always_train=always)


def test_an_unknown_caption_to_keep_is_named():
    with pytest.raises(ValueError, match="'plum', 'quince'"):
        split_held_out(["apple", "pear"], 1, always_train=["quince", "apple", "plum"])


# --- holding out what belongs together -------------------------------------------------------------------------------


def test_pictures_alike_in_something_are_held_out_together():
    captions = [f"c{place % 7}" for place in range(30)]
    for count in (0, 1, 5, 12):
        train, held_out = split_held_out(captions, count, seed=count, together=[captions])
        assert sorted(train + held_out) == list(range(30))
        assert not {captions[place] for place in train} & {captions[place] for place in held_out}
        assert count <= len(held_out) < count + 5


def test_what_is_connected_through_another_is_one_group_and_none_is_like_nothing():
    captions = ["a", "b", "c", "d", "e", "f"]
    views = ["x", "x", None, None, "y", None]
    rooms = [None, 1, 1, None, None, None]
    groups = [{0, 1, 2}, {3}, {4}, {5}]
    for seed in range(12):
        _, held_out = split_held_out(captions, 1, seed=seed, together=[views, rooms])
        assert set(held_out) in groups


def test_captions_to_keep_hold_their_whole_group():
    captions, shapes = ["a", "b", "c", "d"] * 3, ["x", "x", "y", "z"] * 3
    for seed in range(5):
        _, held_out = split_held_out(captions, 3, seed=seed, always_train=["b"], together=[shapes])
        assert {captions[place] for place in held_out} <= {"c", "d"}


@pytest.mark.parametrize("captions", [["a"] * 4, ["a", "a", "a", "b"]])
def test_groups_that_leave_too_few_are_refused(captions):
    with pytest.raises(ValueError, match=r"held_out asks for 3 of 4 pictures, but those that belong together"):
        split_held_out(captions, 3, always_train=["b"] if "b" in captions else [], together=[captions, ["s"] * 4])
