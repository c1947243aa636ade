"""The training configuration: one YAML file, checked before anything is loaded."""

from mmpreproj.training.config.data import DataConfig
from mmpreproj.training.config.file import find_config, parse_config, read_config, write_config
from mmpreproj.training.config.model import ScratchModel
from mmpreproj.training.config.noise import FlowConfig, PointTraining
from mmpreproj.training.config.optimisation import OptimizerConfig
from mmpreproj.training.config.run import TrainConfig
from mmpreproj.training.config.section import ConfigError, Section

__all__ = [
    "ConfigError",
    "DataConfig",
    "FlowConfig",
    "OptimizerConfig",
    "PointTraining",
    "ScratchModel",
    "Section",
    "TrainConfig",
    "find_config",
    "parse_config",
    "read_config",
    "write_config",
]
