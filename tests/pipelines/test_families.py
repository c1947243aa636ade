"""The stock pipeline of each row of the table generates with a patched model."""

import inspect
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from family_models import ROWS, make_config, shake
from family_pipelines import NO_PIPELINE, RECIPES, STEPS, FamilyPipeline, draw, make_pipeline
from torch import Tensor, nn

import mmpreproj
from mmpreproj.patching.lookup import patched_attentions


@pytest.fixture(params=RECIPES)
def row(request: pytest.FixtureRequest) -> str:
    """A row of the table that has a pipeline, by its model class."""
    return request.param


def make_patched(row: str) -> FamilyPipeline:
    """Build a row's pipeline, its model with an adapter of which each term matters."""
    made = make_pipeline(row)
    mmpreproj.patch(made.model, make_config(row))
    shake(made.model)
    return made


def test_every_row_has_a_pipeline_or_a_reason_for_none():
    assert set(RECIPES) | set(NO_PIPELINE) == set(ROWS)
    assert not set(RECIPES) & set(NO_PIPELINE)
    assert all(NO_PIPELINE.values())


def test_the_pipeline_is_a_stock_one_and_names_the_classes_of_model_and_vae(row):
    made = make_pipeline(row)
    assert type(made.pipeline).__module__.startswith("diffusers.pipelines.")
    wanted = inspect.signature(type(made.pipeline).__init__).parameters
    assert type(made.model).__name__ == row
    for component in (made.component, "vae"):
        assert type(getattr(made.pipeline, component)).__name__ in str(wanted[component].annotation), component


def test_guidance_is_refused_where_a_pipeline_takes_none():
    with pytest.raises(ValueError, match=r"Flux2Pipeline takes no classifier-free guidance; .* guided=False"):
        make_pipeline("Flux2Transformer2DModel", guided=True)


def test_two_pipelines_of_one_seed_are_the_same_and_of_another_are_not(row):
    first, again, other = (draw(make_pipeline(row, seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("output_type", ["latent", "np"])
def test_zero_init_leaves_what_the_pipeline_makes_bit_for_bit(row, output_type):
    made = make_pipeline(row)
    base = draw(made, output_type=output_type)
    assert base.isfinite().all() and base.std() > 0
    if output_type == "np":
        assert base.shape[-3:] == (made.call.get("height", 1024), made.call.get("width", 1024), 3)
    mmpreproj.patch(made.model, make_config(row, init="zero"))
    assert torch.equal(draw(made, output_type=output_type), base)


def test_an_adapter_changes_what_the_pipeline_makes_until_it_is_taken_off(row):
    made = make_pipeline(row)
    base = draw(made)
    mmpreproj.patch(made.model, make_config(row))
    shake(made.model)
    changed = draw(made)
    assert changed.isfinite().all()
    assert (changed - base).norm() > 0.01 * base.norm()
    mmpreproj.unpatch(made.model)
    assert torch.equal(draw(made), base)


def test_a_saved_adapter_makes_the_same_in_another_pipeline(row, tmp_path):
    made, fresh = make_patched(row), make_pipeline(row)
    mmpreproj.save(made.model, tmp_path)
    mmpreproj.load(fresh.model, tmp_path)
    assert torch.equal(draw(fresh), draw(made))


def count_prompts(made: FamilyPipeline) -> Counter[str]:
    """Run a pipeline and count the prompts that each patched attention was shown, by its path."""
    seen: Counter[str] = Counter()

    def count(path: str) -> Callable[..., None]:
        def hook(attention: nn.Module, args: tuple, output: Tensor | tuple[Tensor | None, ...]) -> None:
            seen[path] += len(output if isinstance(output, Tensor) else output[0])

        return hook

    for path, attention in patched_attentions(made.model):
        attention.register_forward_hook(count(path))
    draw(made)
    return seen


def test_the_pipeline_runs_every_patched_attention_once_a_step(row):
    made = make_patched(row)
    assert count_prompts(made) == {site.path: STEPS for site in mmpreproj.report(made.model).sites}


@pytest.mark.parametrize("row", [row for row, recipe in RECIPES.items() if recipe.guidance is not None])
def test_with_guidance_it_runs_for_both_prompts_and_zero_init_stays_the_base(row):
    made = make_pipeline(row, guided=True)
    base = draw(made)
    assert not torch.equal(base, draw(make_pipeline(row)))
    mmpreproj.patch(made.model, make_config(row, init="zero"))
    assert torch.equal(draw(made), base)
    assert count_prompts(made) == {
        site.path: STEPS * RECIPES[row].passes for site in mmpreproj.report(made.model).sites
    }
