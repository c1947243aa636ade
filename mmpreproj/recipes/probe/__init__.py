"""`mmpreproj probe`: arms on a frozen causal language model, trained, evaluated and compared."""

from mmpreproj.recipes.probe.report import write_report
from mmpreproj.recipes.probe.run import Study, run_study

__all__ = ["Study", "run_study", "write_report"]
