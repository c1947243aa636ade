"""The random numbers of a draw: fixed by seed, number and purpose, and independent from draw to draw."""

import pickle

import pytest
import torch

from mmpreproj.core.draws import Draw, _mix_32, generator_of, hashed

MASK = 2**64 - 1


def split_mix(state):
    """Return the first number of SplitMix64 from a state, as in Vigna's splitmix64.c."""
    bits = (state + 0x9E3779B97F4A7C15) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


# Draw


def test_a_draw_is_its_picture_and_number_and_goes_through_processes():
    draw = pickle.loads(pickle.dumps(Draw(index=4, number=2**40)))
    assert (draw.index, draw.number) == (4, 2**40)
    assert draw == Draw(4, 2**40) != Draw(4, 2**40 + 1)


# hashed


def test_hashes_are_those_of_split_mix_one_part_after_another():
    assert hashed(0) == split_mix(0) == 0xE220A8397B1DCDAF  # the first number of Vigna's program from 0
    assert hashed(5, 2**63, 9) == split_mix(split_mix(split_mix(5) ^ 2**63) ^ 9)
    assert len({hashed(5, 9), hashed(9, 5), hashed(5), hashed(5, 9, 0)}) == 4


# generator_of


def test_seeds_are_mixed_as_murmur_hash_does():
    """MurmurHash3 of an empty text is the mixture of its seed; those of 1 and 2**32 - 1 are well known."""
    assert [_mix_32(bits) for bits in (0, 1, 2**32 - 1)] == [0, 0x514E28B7, 0x81F16F39]


def test_the_seed_of_a_draw_does_not_change_with_the_libraries():
    for seed, number, purpose in ((0, 0, 0), (7, 123_456, 1), (2**63, 2**40 + 3, 18)):
        key = split_mix(split_mix(split_mix(split_mix(seed) ^ 2) ^ number // 2**28) ^ purpose // 16)
        low = number % 2**28 * 16 + purpose % 16
        expected = _mix_32(_mix_32(low) ^ key // 2**32) ^ key % 2**32
        assert generator_of(seed, number, purpose).initial_seed() == expected


def test_numbers_are_drawn_on_the_cpu_and_leave_the_global_ones_alone():
    state = torch.get_rng_state()
    generator = generator_of(0, 0)
    torch.randn(3, generator=generator)
    assert generator.device.type == "cpu"
    assert torch.equal(torch.get_rng_state(), state)


def test_a_draws_numbers_depend_on_its_seed_number_and_purpose_alone():
    first = torch.randn(8, generator=generator_of(5, 9, 1))
    torch.randn(100)
    assert torch.equal(torch.randn(8, generator=generator_of(5, 9, 1)), first)
    for other in ((6, 9, 1), (5, 10, 1), (5, 9, 2), (9, 5, 1), (1, 9, 5), (5, 1, 9)):
        assert not torch.equal(torch.randn(8, generator=generator_of(*other)), first)


@pytest.mark.parametrize("start", [0, 2**28 - 5000, 2**40])
def test_no_seed_is_shared_by_draws_and_purposes_of_a_run(start):
    numbers = range(start, start + (5000 if start else 10_000))
    seeds = {generator_of(11, number, purpose).initial_seed() for number in numbers for purpose in range(4)}
    assert len(seeds) == 4 * len(numbers)
    assert max(seeds) < 2**32  # torch would drop what is above without a word


@pytest.mark.parametrize(
    "beyond", [(11, 2**28, 0), (11, 2**32, 0), (11, 0, 16), (11 + 2**32, 0, 0), (2**63 + 11, 0, 0)]
)
def test_bits_that_do_not_fit_into_the_counter_count_too(beyond):
    assert generator_of(*beyond).initial_seed() != generator_of(11, 0, 0).initial_seed()


def test_neighbouring_streams_are_uncorrelated_and_standard_normal():
    """Correlations of 4,000 pairs have a standard deviation of 1 / √4000; the largest of 500 stays below 5 of them."""
    streams = torch.stack(
        [torch.randn(4000, generator=generator_of(seed, n, p)) for seed in (0, 1) for n in range(4) for p in range(4)]
    )  # [32, 4000]
    correlations = torch.corrcoef(streams).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / 4000**0.5
    assert streams.mean(dim=1).abs().max() < 5 / 4000**0.5


def test_the_first_numbers_of_successive_draws_are_uncorrelated_and_standard_normal():
    """Across draws, where a poor hash would show: a flip or a timestep is the first number of its stream."""
    firsts = torch.stack(
        [torch.cat([torch.rand(1, generator=generator_of(0, n, p)) for n in range(4000)]) for p in range(3)]
    )  # [3, 4000], uniform
    lagged = torch.cat([firsts[:, :-2], firsts[:, 1:-1], firsts[:, 2:]])  # [9, 3998]
    correlations = torch.corrcoef(lagged).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / 3998**0.5
    assert (firsts.mean(dim=1) - 0.5).abs().max() < 5 * (1 / 12 / 4000) ** 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 0), "seed is -1; expected a whole number from 0"),
        ((0, -1, 0), "number is -1; expected a whole number from 0"),
        ((0, 0, -1), "purpose is -1; expected a whole number from 0"),
        ((0, 1.0, 0), r"number is 1\.0; expected a whole number from 0"),
        ((2**64, 0, 0), r"seed is 18446744073709551616; expected a whole number from 0 to 2\*\*64 - 1"),
    ],
)
def test_numbers_that_are_not_of_64_bits_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        generator_of(*arguments)
