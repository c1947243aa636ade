"""A data set with every kind of bad picture and caption among good ones: trained on, and reported exactly."""

from itertools import islice

import pytest
from bad_pictures_kit import TOO_SMALL, write_bad_folder

from mmpreproj.data.sources.pictures import UnreadablePictureError
from mmpreproj.training.batches import BucketBatches

GOOD = 200


def unwrapped(text):
    """Take out the ends of lines, which a console puts where it is full, and all blanks with them."""
    return "".join(text.split())


@pytest.fixture
def bad(tmp_path):
    """A folder of 200 good pictures and the faults among them, by name, with a word of each reason."""
    folder = tmp_path / "bad"
    return folder, write_bad_folder(folder, good=GOOD)


def test_a_run_trains_to_its_end_on_the_good_ones_and_lists_exactly_the_bad_ones(run, make_config, bad):
    folder, expected = bad
    assert len(expected) >= 20
    config = make_config(steps=6, batch_size=40, evaluate_every=0, data={"folder": folder, "held_out": 8})
    done, screen = run(config)

    reasons = {one.name: one.reason for one in done.skipped}
    assert reasons.keys() == expected.keys() and len(done.skipped) == len(expected), "each once"
    assert all(word in reasons[name] for name, word in expected.items())
    assert "it is too small: 1 × 1 pixels" in reasons[TOO_SMALL]

    said = [f"{len(expected)} pictures could not be used and left out:"]
    said += [f"  {one.name}: {one.reason}" for one in done.skipped]
    assert unwrapped(screen).endswith(unwrapped("".join(said))), "the last that is said"

    captions = {f"picture good/{path.name}" for path in (folder / "good").iterdir()}
    assert len(captions) == GOOD and set(done.pictures.captions) == captions
    assert sum(done.counts) == GOOD and done.counts[1] >= 8 and done.history[-1].step == 6
    trained = done.inputs.trained
    batches = BucketBatches(trained.groups, batch_size=40, seed=0)
    drawn = {draw.index for batch in islice(batches, 6) for draw in batch}
    assert drawn == set(range(done.counts[0])), "six batches of forty go through all of them"


def test_with_on_error_raise_a_run_ends_at_once_and_costs_no_earlier_results(run, make_config, bad, tmp_path):
    folder, expected = bad
    earlier = make_config(steps=1)
    run(earlier)
    before = {path: path.read_bytes() for path in earlier.output.rglob("*") if path.is_file()}
    rows = sum(name.startswith("metadata") for name in expected)
    settings = {"model": str(tmp_path / "nowhere"), "data": {"folder": folder, "on_error": "raise"}}
    with pytest.raises(ValueError, match=rf"bad has {rows} faults: metadata\.jsonl, line \d+ \("):
        run(make_config(**settings), overwrite=True)

    lines = (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    faulty = {int(name.rpartition(" ")[2]) for name in expected if name.startswith("metadata")}
    kept = [line for number, line in enumerate(lines, start=1) if number not in faulty]
    (folder / "metadata.jsonl").write_text("\n".join(kept))
    with pytest.raises(UnreadablePictureError, match=r"cannot read the picture 'zero_bytes\.png': the file is empty"):
        run(make_config(data=settings["data"]), overwrite=True)
    assert {path: path.read_bytes() for path in earlier.output.rglob("*") if path.is_file()} == before
