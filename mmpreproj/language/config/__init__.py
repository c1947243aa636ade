"""The configuration of a study: one YAML file, checked before anything is loaded."""

from mmpreproj.language.config.parts import LanguageLora, LanguageModel, LanguageOptimizer, LanguageTraining
from mmpreproj.language.config.study import BASE, ArmName, EvaluationConfig, StudyConfig, TaskFile, TaskKind
from mmpreproj.language.config.text import SplitNames, TextSource

__all__ = [
    "BASE",
    "ArmName",
    "EvaluationConfig",
    "LanguageLora",
    "LanguageModel",
    "LanguageOptimizer",
    "LanguageTraining",
    "SplitNames",
    "StudyConfig",
    "TaskFile",
    "TaskKind",
    "TextSource",
]
