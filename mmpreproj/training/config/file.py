"""Configurations from YAML and back, with every fault named: file, field, value and the way out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import yaml
from pydantic import Tag, ValidationError

import mmpreproj
from mmpreproj.training.config.run import TrainConfig
from mmpreproj.training.config.section import ConfigError, Section, parts_of


def read_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainConfig:
    """Read and check a training configuration.

    Args:
        path: a YAML file, or the name of one that is shipped with the package, e.g. `sd3_medium_probe`.
        overrides: `key=value` pairs with dotted keys, e.g. `optimizer.learning_rate=2e-3` or `data.mix.0.repeats=2`,
            which counts entries of lists from 0; values are YAML.

    Raises:
        FileNotFoundError: if there is no such file.
        ConfigError: if it is not YAML, or a key or value is not valid; every fault is listed.
    """
    path = find_config(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    values = _load(text, what=str(path))
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
        faults = "\n".join(f"  {line}" for line in _explain(error.errors(include_url=False)))
        raise ConfigError(f"{origin} cannot be used:\n{faults}") from None


def write_config(config: TrainConfig, path: Path) -> None:
    """Write a configuration as YAML that `read_config` reads back to an equal one."""
    path.write_text(yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False), encoding="utf-8")


def _load(text: str, *, what: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    # PyYAML lets Python's own errors through, as of the month in 2026-13-01 or the tag in `!!int x`.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid YAML: {error}") from error


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"an override is written key=value, such as optimizer.learning_rate=2e-3; got {override!r}")
    value = _load(text, what=f"the value of the override {override!r}")
    *parents, last = key.split(".")
    target: Any = values
    for parent in parents:
        slot = _slot(target, parent, override)
        child = target[slot] if isinstance(target, list) else target.get(slot)
        # Copied, since YAML's aliases may put one object in several places.
        target[slot] = dict(child) if isinstance(child, Mapping) else list(child) if isinstance(child, list) else {}
        target = target[slot]
    target[_slot(target, last, override)] = value


def _slot(target: Any, part: str, override: str) -> Any:
    """Find what a part of a dotted key is: an index where it reaches into a list, else itself."""
    if not isinstance(target, list):
        return part
    if part not in [str(index) for index in range(len(target))]:
        raise ConfigError(
            f"the override {override!r} asks for entry {part!r} of a list of {len(target)}, counted from 0; to add "
            "one, give the whole list in brackets"
        )
    return int(part)


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that `2e-3` is a number, as it is in YAML 1.2, and that a key twice is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise yaml.MarkedYAMLError(problem=f"the key {twice[0]!r} is there twice", problem_mark=node.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    """Puts text that `_Loader` would take for a number in quotes."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


class _Place(NamedTuple):
    """Where a fault is: its keys, the section they were looked up in last, and the section that should be there."""

    keys: tuple[str, ...]
    holder: type[Section]
    section: type[Section] | None


def _explain(faults: Sequence[Any]) -> list[str]:
    """Put faults into lines; those of the branches of one union become one."""
    lines: dict[tuple[str, str], list[str]] = {}
    for fault in faults:
        place = _find(fault["loc"])
        says_enough = fault["type"] in ("extra_forbidden", "missing") or not place.keys
        got = "" if says_enough else f" (got {_shorten(repr(fault['input']))})"
        lines.setdefault((".".join(place.keys), got), []).append(_describe(fault, place))
    return [(f"{where}: " if where else "") + _either(texts) + got for (where, got), texts in lines.items()]


def _either(texts: Sequence[str]) -> str:
    return " or ".join([texts[0], *(text.removeprefix("Input should be ") for text in texts[1:])])


def _describe(fault: Any, place: _Place) -> str:
    if fault["type"] == "extra_forbidden":
        known = list(place.holder.model_fields)
        alias = place.holder.also_called.get(place.keys[-1])
        nearest = [alias] if alias else get_close_matches(place.keys[-1], known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"keys here: {', '.join(known)}"
        return f"unknown key; {hint}"
    if fault["type"] == "missing":
        return "missing; it must be given"
    if fault["type"] == "tuple_type":
        return "give a list, such as [a, b]"
    if fault["type"] in ("model_type", "dataclass_type", "dict_type"):
        keys = f"; keys here: {', '.join(place.section.model_fields)}" if place.section else ""
        return f"give settings, such as {{key: value}}, or {{}} for the defaults{keys}"
    return str(fault["msg"]).removeprefix("Value error, ")


def _find(location: Sequence[str | int]) -> _Place:
    """Follow a fault's location through the sections; names of a union's branches in it are no keys."""
    keys: list[str] = []
    holder: type[Section] = TrainConfig
    section: type[Section] | None = TrainConfig
    branches: set[Any] = set()
    free = 0  # keys that may be any, in a mapping that is no section
    for part in location:
        if part in branches:
            branches = set()
        elif isinstance(part, int):
            keys.append(str(part))
        elif section is not None:
            keys.append(part)
            holder, field = section, section.model_fields.get(part)
            inside = list(parts_of(field.annotation)) if field else []
            section = next((kind for kind in inside if isinstance(kind, type) and issubclass(kind, Section)), None)
            branches = {kind.tag for kind in inside if isinstance(kind, Tag)}
            free = sum(get_origin(kind) is dict for kind in inside)
        elif free:
            keys.append(part)
            free -= 1
    return _Place(tuple(keys), holder, section)


def _shorten(text: str, *, most: int = 120) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
