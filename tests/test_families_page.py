"""docs/families.md tells what the table says, and what came of the tests that there are."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from family_models import ROWS

DOCS = Path(__file__).parents[1] / "docs"
AGAIN = "run python docs/make_families.py"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location("make_families", DOCS / "make_families.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["make_families"] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads((DOCS / "families.json").read_text(encoding="utf-8"))


def test_the_page_is_that_of_the_table(page, results):
    assert (DOCS / "families.md").read_text(encoding="utf-8") == page.render(results), AGAIN


def test_every_row_has_passed_the_tests_of_every_property(page, results):
    assert list(results["rows"]) == list(ROWS), AGAIN
    titles = [one.title for one in page.PROPERTIES]
    for row, found in results["rows"].items():
        assert list(found) == titles, AGAIN
        for title, told in found.items():
            assert re.match(r"[1-9]\d*", told), f"{row}: {title} is {told}; {AGAIN}"


def test_every_test_that_the_page_names_is_there(page):
    there = set()
    for file in page.TEST_FILES:
        text = (page.ROOT / file).read_text(encoding="utf-8")
        there |= {file, *re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    assert {test for one in page.PROPERTIES for test in one.tests} <= there
    assert all(one.is_shown_by(f"{test}::test_x[a]") for one in page.PROPERTIES for test in one.tests if ".py" in test)


def test_outcomes_are_summed_by_row_and_property(page):
    tests = "tests/patching/test_families.py::"
    outcomes = {
        f"{tests}test_zero_init_is_the_base_bit_for_bit[FluxTransformer2DModel-block]": "passed",
        f"{tests}test_zero_init_is_the_base_bit_for_bit[FluxTransformer2DModel with guidance-block]": "passed",
        f"{tests}test_zero_init_is_the_base_bit_for_bit[Flux2Transformer2DModel-block]": "passed",
        f"{tests}test_save_and_load_into_a_fresh_base[FluxTransformer2DModel]": "skipped: no disk",
    }
    family = next(one for one in page.MULTIMODAL if one.model_class == "FluxTransformer2DModel")
    found = page._summary(family, outcomes)
    assert (found["start"], found["save, load"], found["gate"]) == ("2", "no disk", "not tested")
