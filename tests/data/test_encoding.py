"""Encoder outputs as samples: draws of a posterior, mirrored or not, each with its caption, alike in every process."""

import dataclasses
import itertools
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from encoding_kit import ENCODING, LetterEncoder, Pictures, encode, noise, spell
from store_kit import key

from mmpreproj.core.draws import Draw
from mmpreproj.data.buckets import Size
from mmpreproj.data.encoding import EncodedPictures, LatentsInMemory, encode_captions
from mmpreproj.data.sources.pictures import SkippedPicture
from mmpreproj.data.store import TensorStore
from mmpreproj.pipelines.latents import encode_posterior
from mmpreproj.training.batches import BucketBatches, make_loader

DRAWS = 400
FLIPPED = dataclasses.replace(ENCODING, flip=1.0)


def three(captions=("a", "b", "c")):
    return Pictures({name: noise(seed) for seed, name in enumerate("abc")}, captions)


@pytest.fixture
def vae():
    """A tiny VAE whose deviations differ from place to place."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        vae = AutoencoderKL(
            block_out_channels=(8,), norm_num_groups=4, latent_channels=4, scaling_factor=1.5, shift_factor=0.06
        )
        torch.nn.init.normal_(vae.quant_conv.weight)
    return vae.requires_grad_(False).eval()


def with_vae(vae):
    return LetterEncoder(posterior=lambda pixels: encode_posterior(vae, pixels))


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


# --- draws -----------------------------------------------------------------------------------------------------------


def test_draws_have_the_mean_and_the_deviation_of_the_vaes_posterior(tmp_path, vae):
    encoder = with_vae(vae)
    pictures = encode(three(), tmp_path, encoder)
    draws = torch.stack([pictures[Draw(1, number)]["latents"] for number in range(DRAWS)])  # [n, C, h, w]
    posterior = vae.encode(encoder.pictures[1][None]).latent_dist
    mean, deviation = (posterior.mean[0] - 0.06) * 1.5, posterior.std[0] * 1.5
    assert deviation.max() > 1.5 * deviation.min()
    scores = (draws.mean(dim=0) - mean) / deviation * math.sqrt(DRAWS)
    assert scores.abs().max() < 5 and 0.8 < scores.std() < 1.2
    ratio = draws.std(dim=0) / deviation
    assert (ratio - 1).abs().max() < 5 / math.sqrt(2 * DRAWS)
    assert abs(float(ratio.mean()) - 1) < 0.02


@pytest.mark.parametrize("encoding", [ENCODING, FLIPPED], ids=["upright", "mirrored"])
def test_an_index_gives_the_mean_of_the_upright_picture(tmp_path, vae, encoding):
    encoder = with_vae(vae)
    pictures = encode(three(), tmp_path, encoder, encoding=encoding)
    for index in range(3):
        mean = (vae.encode(encoder.pictures[index][None]).latent_dist.mean[0] - 0.06) * 1.5
        torch.testing.assert_close(pictures[index]["latents"], mean)
        assert "draw" not in pictures[index]


def test_a_draw_depends_on_the_seed_and_its_number_alone(tmp_path):
    pictures = encode(three(), tmp_path)
    first = pictures[Draw(0, 7)]
    torch.manual_seed(99)
    _ = pictures[Draw(1, 8)], torch.rand(3)
    assert same(pictures[Draw(0, 7)], first)
    assert int(first["draw"]) == 7
    assert not torch.equal(pictures[Draw(0, 8)]["latents"], first["latents"])
    assert not torch.equal(dataclasses.replace(pictures, seed=1)[Draw(0, 7)]["latents"], first["latents"])


def test_drawing_leaves_the_global_random_numbers_alone(tmp_path):
    pictures, before = encode(three(), tmp_path), torch.get_rng_state()
    _ = pictures[Draw(0, 7)]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["tiny", "pixels"])
def test_without_a_posterior_every_draw_is_the_encoding(tmp_path, kind):
    tiny = AutoencoderTiny(
        encoder_block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        num_encoder_blocks=(1,),
        num_decoder_blocks=(1,),
        latent_channels=4,
    ).eval()
    encoder = with_vae(tiny) if kind == "tiny" else LetterEncoder(posterior=lambda pixels: (pixels, None))
    pictures = encode(three(), tmp_path, encoder)
    assert pictures.latents.read(0)[1] is None
    for number in range(3):
        assert torch.equal(pictures[Draw(2, number)]["latents"], pictures[2]["latents"])
    with torch.no_grad():
        expected = tiny.encode(encoder.pictures[2][None]).latents[0] if kind == "tiny" else encoder.pictures[2]
    torch.testing.assert_close(pictures[2]["latents"], expected)


@pytest.mark.parametrize("flip", [0.0, 0.25, 0.5, 1.0])
def test_draws_are_encodings_of_the_mirrored_picture_at_the_share_asked_for(tmp_path, flip):
    encoder = LetterEncoder(posterior=lambda pixels: (pixels, None))
    pictures = encode(three(), tmp_path, encoder, encoding=dataclasses.replace(ENCODING, flip=flip))
    upright, mirrored, found = pictures[0]["latents"], pictures[0]["latents"].flip(-1), 0
    assert not torch.equal(upright, mirrored)
    for number in range(DRAWS):
        latents = pictures[Draw(0, number)]["latents"]
        found += torch.equal(latents, mirrored)
        assert torch.equal(latents, mirrored) or torch.equal(latents, upright)
    assert abs(found / DRAWS - flip) <= 4 * math.sqrt(flip * (1 - flip) / DRAWS)


def test_mirrored_draws_have_the_posterior_of_the_mirrored_picture(tmp_path, vae):
    encoder = with_vae(vae)
    pictures = encode(three(), tmp_path, encoder, encoding=FLIPPED)
    posterior = vae.encode(encoder.pictures[0][None].flip(-1)).latent_dist
    mean, deviation = (posterior.mean[0] - 0.06) * 1.5, posterior.std[0] * 1.5
    draws = torch.stack([pictures[Draw(0, number)]["latents"] for number in range(DRAWS)])
    assert ((draws.mean(dim=0) - mean) / deviation).abs().max() * math.sqrt(DRAWS) < 5


def test_latents_in_memory_have_no_mirrored_ones():
    latents = LatentsInMemory(torch.zeros(2, 4, 8, 8))
    with pytest.raises(ValueError, match="not computed of mirrored pictures; set flip to 0"):
        latents.read(0, mirrored=True)


def test_latents_are_told_apart_by_what_is_in_them(tmp_path):
    pictures = encode(three(), tmp_path, encoding=FLIPPED)
    assert len(set(pictures.latents.identity())) == 3
    assert list(encode(three(), tmp_path / "anew").latents.identity()) == list(pictures.latents.identity())
    values = torch.randn(3, 4, 8, 8)
    first, second = LatentsInMemory(values).identity(), LatentsInMemory(values.roll(1, 0)).identity()
    assert len(set(first)) == 3 and list(second) == [first[2], first[0], first[1]]


# --- parts and additions ---------------------------------------------------------------------------------------------


def test_a_subset_keeps_all_that_belongs_to_a_picture_together_in_the_order_asked_for(tmp_path):
    sizes = ((Size(8, 8),), (Size(16, 16),))
    pictures = encode(three(), tmp_path, buckets=sizes, encoding=dataclasses.replace(ENCODING, flip=0.5))
    pictures = dataclasses.replace(pictures, times=tuple(float(index) for index in range(6)))
    pictures = pictures.with_clouds(torch.randn(6, 5, 3), torch.arange(6) % 2 == 0)
    chosen = [5, 0, 2]
    some = pictures.subset(chosen)
    assert isinstance(some, EncodedPictures) and len(some) == len(some.latents) == 3
    for place, index in enumerate(chosen):
        for number in range(4):
            assert same(some[Draw(place, number)], pictures[Draw(index, number)])
        for name in ("captions", "groups", "times", "places"):
            assert getattr(some, name)[place] == getattr(pictures, name)[index]
        assert some.latents.identity()[place] == pictures.latents.identity()[index]
    assert len(pictures.subset([])) == 0
    assert pictures.subset([]).groups == ()


def test_a_subset_of_what_has_no_groups_times_and_clouds_has_none(tmp_path):
    pictures = dataclasses.replace(encode(three(), tmp_path), groups=(), places=())
    some = pictures.subset([1])
    assert (some.groups, some.times, some.places, some.clouds, some.has_cloud) == ((), (), (), None, None)
    assert spell(some[0]["tokens"]) == "b"


def test_a_subset_of_latents_in_memory_is_of_the_same_values(tmp_path):
    values = torch.randn(4, 2, 4, 4)
    some = LatentsInMemory(values).subset([3, 1])
    assert len(some) == 2 and torch.equal(some.values, values[[3, 1]])
    assert len(some.subset([])) == 0


def test_clouds_come_with_their_pictures(tmp_path):
    clouds, has_cloud = torch.randn(3, 5, 3), torch.tensor([True, False, True])
    fault = SkippedPicture("b.npy", "it is torn")
    pictures = encode(three(), tmp_path)
    assert "cloud" not in pictures[0]
    pictures = pictures.with_clouds(clouds, has_cloud, skipped=[fault])
    for item in (1, Draw(1, 9)):
        assert torch.equal(pictures[item]["cloud"], clouds[1]) and not pictures[item]["has_cloud"]
    assert pictures.skipped_clouds == (fault,)


@pytest.mark.parametrize(("clouds", "flags"), [(2, [3]), (3, [2]), (3, [3, 1])])
def test_clouds_or_flags_that_are_not_one_a_picture_are_refused(tmp_path, clouds, flags):
    with pytest.raises(ValueError, match=rf"{clouds} clouds and \[.*\] flags for 3 pictures"):
        encode(three(), tmp_path).with_clouds(torch.zeros(clouds, 5, 3), torch.ones(*flags, dtype=torch.bool))


# --- captions --------------------------------------------------------------------------------------------------------


def test_captions_alone_keep_their_order():
    text = encode_captions(LetterEncoder(), ["red", "a rose", ""])
    assert [spell(row) for row in text.tokens] == ["red", "a rose", ""]
    assert text.pooled.shape == (3, 1)
    assert text.mask.sum(dim=1).tolist() == [3, 6, 0]
    assert torch.equal(text.read(1)["tokens"], text.tokens[1])


def test_captions_are_encoded_as_for_generation_without_guidance():
    encoder = LetterEncoder()
    encode_captions(encoder, ["red"], max_sequence_length=77)
    (settings,) = encoder.settings
    assert settings["max_sequence_length"] == 77
    assert settings["do_classifier_free_guidance"] is False


@pytest.mark.parametrize("part", ["tokens", "pooled"])
def test_embeddings_that_are_not_finite_are_refused(part):
    class Overflowing(LetterEncoder):
        def encode_prompt(self, prompt, **settings):
            tokens, _, pooled, _ = super().encode_prompt(prompt, **settings)
            (tokens if part == "tokens" else pooled)[1].fill_(float("inf"))
            return tokens, None, pooled, None

    with pytest.raises(ValueError, match=r"embeddings for 1 of 3 captions, such as 'rose'; .* fp32 or bf16"):
        encode_captions(Overflowing(), ["red", "rose", ""])


# --- in other processes ----------------------------------------------------------------------------------------------


def test_encoded_pictures_can_be_pickled(tmp_path):
    pictures = encode(three(), tmp_path, encoding=FLIPPED)
    copy = pickle.loads(pickle.dumps(pictures))
    assert all(same(copy[Draw(index, 3)], pictures[Draw(index, 3)]) for index in range(3))
    assert copy.captions == pictures.captions and copy.groups == pictures.groups


def test_batches_are_the_same_with_and_without_loader_processes(tmp_path):
    sizes = ((Size(8, 8),), (Size(16, 16),))
    pictures = encode(three(), tmp_path, buckets=sizes, encoding=dataclasses.replace(ENCODING, flip=0.5))
    pictures = pictures.with_clouds(torch.randn(6, 5, 3), torch.arange(6) % 2 == 0)

    def load(workers):
        batches = BucketBatches(pictures.groups, batch_size=2, seed=3)
        return list(itertools.islice(make_loader(pictures, batches, workers=workers), 8))

    alone, with_others = load(0), load(2)
    assert all(same(first, second) for first, second in zip(alone, with_others, strict=True))
    assert {batch["latents"].shape[-1] for batch in alone} == {4, 8}
    assert torch.cat([batch["draw"] for batch in alone]).tolist() == list(range(16))


# Each item takes 8 kB, so that 18,000 more, if they stayed in memory, would take 144 MB. Writing is left to another
# process: what it takes for a moment is not given back.
READ_ALL = """
import sys
import torch
from store_kit import key
from mmpreproj.core.draws import Draw
from mmpreproj.data.encoding import EncodedPictures, StoredLatents, StoredTexts, TextEmbeddings
from mmpreproj.data.store import TensorStore

torch.set_num_threads(1)

def read_all(count):
    store = TensorStore(f"{sys.argv[1]}/{count}")
    keys = tuple(key(number) for number in range(count))
    empty = TextEmbeddings(torch.zeros(1, 4, 8), torch.zeros(1, 8), torch.ones(1, 4) > 0)
    captions = tuple(f"caption {number}" for number in range(count))
    latents, text = StoredLatents(store, (keys,)), StoredTexts(store, (key(-1),))
    pictures = EncodedPictures(latents, captions, text, torch.zeros(count).long(), empty)
    for number in range(count):
        assert pictures[Draw(number, number)]["latents"].shape == (16, 8, 8)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) / 1024

few, many = read_all(2000), read_all(20000)
print(many - few)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process holds")
def test_ten_times_as_many_samples_take_hardly_more_memory(tmp_path):
    mean, deviation = torch.randn(16, 8, 8), torch.rand(16, 8, 8)
    for count in (2000, 20000):
        with TensorStore(tmp_path / str(count)).writer() as writer:
            writer.add(key(-1), {"tokens": torch.zeros(4, 8), "pooled": torch.zeros(8), "mask": torch.ones(4) > 0})
            for number in range(count):
                writer.add(key(number), {"mean": mean, "deviation": deviation})
    command = [sys.executable, "-c", READ_ALL, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 15, f"{ended.stdout} MB more"
