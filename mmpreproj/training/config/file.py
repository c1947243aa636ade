"""Configurations from YAML and back, with every fault named: file, field, value and the way out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

import mmpreproj
from mmpreproj.training.config.run import TrainConfig
from mmpreproj.training.config.section import ConfigError, Section


def read_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainConfig:
    """Read and check a training configuration.

    Args:
        path: a YAML file, or the name of one that is shipped with the package, e.g. `sd3_medium_probe`.
        overrides: `key=value` pairs with dotted keys, e.g. `optimizer.learning_rate=2e-3`; values are YAML.

    Raises:
        FileNotFoundError: if there is no such file.
        ConfigError: if it is not YAML, or a key or value is not valid; every fault is listed.
    """
    path = find_config(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} should hold key: value lines; found {type(values).__name__}")
    for override in overrides:
        _apply_override(values, override)
    return parse_config(values, origin=str(path))


def find_config(path: str | os.PathLike[str]) -> Path:
    """Find a configuration file: as it is named, else among those shipped (`configs/` of the package or checkout).

    Raises:
        FileNotFoundError: if there is none; those shipped are listed.
    """
    path = Path(path)
    if path.is_file():
        return path
    package = Path(mmpreproj.__file__).parent
    shipped = {file.stem: file for place in (package.parent, package) for file in (place / "configs").glob("*.yaml")}
    if path.stem in shipped and path.parent in (Path(), Path("configs")):
        return shipped[path.stem]
    raise FileNotFoundError(
        f"there is no configuration file {path}; shipped with mmpreproj are {', '.join(sorted(shipped))}"
    )


def parse_config(values: Mapping[str, Any], *, origin: str) -> TrainConfig:
    """Check plain values as `read_config` does; `origin` is what errors call them."""
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        faults = "\n".join(f"  {_explain(fault)}" for fault in error.errors())
        raise ConfigError(f"{origin} cannot be used:\n{faults}") from None


def write_config(config: TrainConfig, path: Path) -> None:
    """Write a configuration as YAML that `read_config` reads back to an equal one."""
    path.write_text(yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False), encoding="utf-8")


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"an override is written key=value, such as optimizer.learning_rate=2e-3; got {override!r}")
    *parents, last = key.split(".")
    target = values
    for parent in parents:
        child = target.get(parent)
        target[parent] = child = dict(child) if isinstance(child, Mapping) else {}
        target = child
    try:
        target[last] = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of the override {override!r} is not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that `2e-3` is a number, as it is in YAML 1.2."""


class _Dumper(yaml.SafeDumper):
    """Puts text that `_Loader` would take for a number in quotes."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def _explain(fault: Any) -> str:
    location = [str(part) for part in fault["loc"] if part not in ("name", "sizes") or fault["loc"][0] != "model"]
    if fault["type"] == "extra_forbidden":
        section = _section_at(location[:-1])
        known = list(section.model_fields)
        alias = section.also_called.get(location[-1])
        nearest = [alias] if alias else get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"keys here: {', '.join(known)}"
        return f"{'.'.join(location)}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"{'.'.join(location)}: missing; it must be given"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{'.'.join(location)}: {message} (got {fault['input']!r})" if location else message


def _section_at(location: list[str]) -> type[Section]:
    section: type[Section] = TrainConfig
    for part in location:
        section = next(kind for kind in _classes(section.model_fields[part].annotation) if issubclass(kind, Section))
    return section


def _classes(annotation: Any) -> list[type]:
    """List the classes in an annotation such as `Annotated[str, …] | Annotated[ScratchModel, …]`."""
    if isinstance(annotation, type):
        return [annotation]
    return [found for part in get_args(annotation) for found in _classes(part)]
