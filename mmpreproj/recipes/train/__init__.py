"""A training run, from its configuration to what it leaves on disk."""

from mmpreproj.recipes.train.run import TrainingRun, run_training

__all__ = ["TrainingRun", "run_training"]
