"""A training run checked in seconds, without weights and without training."""

from mmpreproj.recipes.dry_run.run import dry_run, show_dry_run

__all__ = ["dry_run", "show_dry_run"]
