"""The training configuration: one YAML file, checked before anything is loaded."""

from mmpreproj.training.config.data import DataConfig, SourceConfig
from mmpreproj.training.config.file import find_config, parse_config, read_config, write_config
from mmpreproj.training.config.model import LoraSettings, ScratchModel
from mmpreproj.training.config.noise import FlowConfig, PointTraining
from mmpreproj.training.config.optimisation import EmaConfig, GroupRates, OptimizerConfig
from mmpreproj.training.config.run import TrainConfig
from mmpreproj.training.config.section import ConfigError, Section
from mmpreproj.training.config.watching import ValidationConfig

__all__ = [
    "ConfigError",
    "DataConfig",
    "EmaConfig",
    "FlowConfig",
    "GroupRates",
    "LoraSettings",
    "OptimizerConfig",
    "PointTraining",
    "ScratchModel",
    "Section",
    "SourceConfig",
    "TrainConfig",
    "ValidationConfig",
    "find_config",
    "parse_config",
    "read_config",
    "write_config",
]
