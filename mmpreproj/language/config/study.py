"""The configuration of a study of arms on a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from mmpreproj.language.config.naming import TaskName, TextName, check_task_name, collision
from mmpreproj.language.config.parts import LanguageLora, LanguageOptimizer, LanguageTraining, Model
from mmpreproj.language.config.several import Rates, Seeds, Several, one_or_more, some_and_none_twice
from mmpreproj.language.config.text import TextSource
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.training.config.model import Adapter
from mmpreproj.training.config.section import Names, Place, Section

ArmName = Literal[
    "base", "lora", "lora_matched", "pre_projection", "skip", "pre_projection+skip", "pre_projection+skip+lora"
]
BASE: ArmName = "base"
TaskKind = Literal["last_word", "multiple_choice"]
Arms = Annotated[tuple[ArmName, ...], BeforeValidator(one_or_more), AfterValidator(some_and_none_twice), Several]


class TaskFile(Section):
    """A task in a local file; see `mmpreproj.language.evaluation.tasks.read_task`.

    Attributes:
        file: one JSON object a line.
        name: by which results are told apart, of letters, digits, _, - and . ; None for the file's, without its end.
        kind: `last_word` or `multiple_choice`; None to tell by the fields.
        prompt_suffix: put after each prompt; None for that of the kind.
    """

    also_called: ClassVar[Mapping[str, str]] = {"path": "file", "data_files": "file", "limit": "evaluation.limit"}

    file: Place
    name: TaskName | None = None
    kind: TaskKind | None = None
    prompt_suffix: str | None = None

    @model_validator(mode="after")
    def _has_a_name(self) -> TaskFile:
        if self.name is None:
            check_task_name(self.file.stem)
        return self

    @property
    def called(self) -> str:
        """The task's name in results."""
        return self.name or self.file.stem


class EvaluationConfig(Section):
    """What every arm is measured by.

    Attributes:
        length: tokens that a window of the sliding perplexity reads.
        stride: tokens from one window to the next.
        validation_tokens: as many are scored to choose learning rates; None for all.
        test_tokens: as many are scored for the table; None for all.
        tasks: local files.
        lm_eval: tasks of lm-eval by name, e.g. `lambada_openai`, `hellaswag`, `arc_easy`.
        limit: items of each task, evenly spaced through a file; None for all.
        batch_size: windows, or continuations, at once.
        resamples: of the bootstrap.
    """

    also_called: ClassVar[Mapping[str, str]] = {"max_length": "length", "num_samples": "limit"}

    length: int = Field(default=512, ge=2)
    stride: int = Field(default=256, ge=1)
    validation_tokens: int | None = Field(default=None, ge=2)
    test_tokens: int | None = Field(default=None, ge=2)
    tasks: tuple[TaskFile, ...] = ()
    lm_eval: Names = ()
    limit: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=8, ge=1)
    resamples: int = Field(default=10_000, ge=100, le=1_000_000)

    @field_validator("lm_eval")
    @classmethod
    def _named_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(name.strip() for name in names):
            raise ValueError("one of them is empty; remove it")
        return some_and_none_twice(names) if names else names

    @model_validator(mode="after")
    def _stride_within_length(self) -> EvaluationConfig:
        if self.stride > self.length:
            raise ValueError(f"stride {self.stride} would leave tokens out between windows of length {self.length}")
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> EvaluationConfig:
        names = [task.called for task in self.tasks] + list(self.lm_eval)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two tasks are called {twice[0]!r}; give one of them, in tasks, another name")
        return self


class StudyConfig(Section):
    """Arms that are trained on the same text with the same steps and seeds, and compared.

    Attributes:
        model: the language model, whose weights stay as they are.
        output: folder for everything that the study writes; a study that finds its trials there goes on.
        texts: by name, of letters, digits, _ and -; each is a study of its own, with its own training, validation and
            test text.
        arms: what is compared: `base`; `lora`, PEFT's default; `lora_matched`, with as many parameters as
            `pre_projection+skip`; and the parts of the adapter, alone, together, and beside LoRA.
        seeds: of starting weights and of the order of blocks.
        learning_rates: from which each arm takes the one with the lowest validation perplexity at the first seed.
        arm_learning_rates: other ones for some arms, equally many.
        adapter: settings of pre-projection and skip; which of the two there is, is the arm's.
        lora: settings of LoRA.
        training: how every arm is trained.
        optimizer: the updates; its rate is the trial's.
        evaluation: what every arm is measured by.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "output_dir": "output",
        "text": "texts",
        "data": "texts",
        "seed": "seeds",
        "learning_rate": "learning_rates",
        "lr": "learning_rates",
        "steps": "training.steps",
        "batch_size": "training.batch_size",
        "tasks": "evaluation.tasks",
    }

    model: Model
    output: Place
    texts: Annotated[dict[TextName, TextSource], Field(json_schema_extra={"minProperties": 1})]
    arms: Arms = (
        "base",
        "lora",
        "lora_matched",
        "pre_projection",
        "skip",
        "pre_projection+skip",
        "pre_projection+skip+lora",
    )
    seeds: Seeds = (0, 1, 2)
    learning_rates: Rates = (3e-4, 1e-3, 3e-3)
    arm_learning_rates: dict[ArmName, Rates] = Field(default_factory=dict)
    adapter: Adapter = Field(default_factory=PreProjConfig)
    lora: LanguageLora = Field(default_factory=LanguageLora)
    training: LanguageTraining = Field(default_factory=LanguageTraining)
    optimizer: LanguageOptimizer = Field(default_factory=LanguageOptimizer)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    @field_validator("texts", mode="before")
    @classmethod
    def _each_has_a_name(cls, value: object) -> object:
        settings = {*TextSource.model_fields, *TextSource.also_called}
        for key, part in value.items() if isinstance(value, Mapping) else ():
            if key in settings and not isinstance(part, (Mapping, TextSource)):
                raise ValueError(
                    "each text has a name, under which its settings are, such as {mine: {files: docs/*.txt}}"
                )
        return value

    @field_validator("texts")
    @classmethod
    def _in_folders_of_their_own(cls, value: dict[str, TextSource]) -> dict[str, TextSource]:
        if not value:
            raise ValueError("is empty; give one at least")
        alike = collision(value)
        if alike:
            raise ValueError(
                f"{alike[0]!r} and {alike[1]!r} differ in case alone, and share a folder on some disks; rename one"
            )
        return value

    @model_validator(mode="after")
    def _equal_effort(self) -> StudyConfig:
        for arm, rates in self.arm_learning_rates.items():
            if arm == BASE:
                raise ValueError(f"arm_learning_rates.{arm}: the base does not train; leave it out")
            if len(rates) != len(self.learning_rates):
                raise ValueError(
                    f"arm_learning_rates.{arm}: {len(rates)} rates, and the other arms choose from "
                    f"{len(self.learning_rates)}; give equally many, so that no arm is tuned with more effort"
                )
        return self

    @model_validator(mode="after")
    def _adapter_has_content_alone(self) -> StudyConfig:
        if self.adapter.needs_processor or self.adapter.points is not None:
            raise ValueError("adapter: positions, mask_padding and points are for multimodal models; leave them out")
        if not (self.adapter.pre_projection and self.adapter.skip):
            raise ValueError("adapter: whether there is pre_projection or skip is the arm's to say; leave both out")
        return self

    def rates_of(self, arm: ArmName) -> tuple[float, ...]:
        """List the learning rates that an arm chooses from."""
        return self.arm_learning_rates.get(arm, self.learning_rates)

    @property
    def records(self) -> Path:
        """The folder of what each trial has left."""
        return self.output / "trials"
