"""Configurations from YAML and back, with every fault named: file, field, value and the way out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_origin

import yaml
from pydantic import Tag, ValidationError
from yaml.reader import ReaderError

import mmpreproj
from mmpreproj.training.config.run import TrainConfig
from mmpreproj.training.config.section import LARGEST, ConfigError, Section, parts_of

Config = TypeVar("Config", bound=Section)
OVERRIDE = "key=value, such as optimizer.learning_rate=2e-3"
COMMANDS = {"data": "train", "texts": "probe"}  # by the key that a file for it alone must have
SHARED = {"model", "output", "adapter", "lora", "optimizer"}  # keys that files for both may have
KINDS = {list: "a list", bool: "true or false", int: "a number", float: "a number"}
YAML_HINTS = {  # what is often behind a fault that PyYAML names by its grammar
    "'\\t' that cannot start": "; YAML takes spaces, not tabs",
    "mapping values are not allowed": "; look for a missing colon in the line above, or an indentation that is off",
    "found another document": "; leave out the line ---",
}
PLAIN_FAULTS = {  # by pydantic's type of fault
    "missing": "missing; it must be given",
    "tuple_type": "give a list, such as [a, b]",
    "path_type": "give a path as text",
    "int_parsing_size": f"too large; give a number below {LARGEST}",
}


def read_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    kind: type[Config] = TrainConfig,  # type: ignore[assignment]
) -> Config:
    """Read and check a configuration.

    Args:
        path: a YAML file, or the name of one that is shipped with the package, e.g. `sd3_medium_probe`.
        overrides: `key=value` pairs with dotted keys, e.g. `optimizer.learning_rate=2e-3` or `data.mix.0.repeats=2`,
            which counts entries of lists from 0; values are YAML.
        kind: what it configures; training by default.

    Raises:
        FileNotFoundError: if there is no such file.
        ConfigError: if it is not YAML, is for another command, or a key or value is not valid; every fault is listed.
    """
    asked, path = path, find_config(path, kind=kind)
    values = _read(path)
    if not isinstance(values, dict):
        found = "nothing" if values is None else KINDS.get(type(values), "text")
        needed = [name for name, field in kind.model_fields.items() if field.is_required()]
        least = f"{', '.join(needed[:-1])} and {needed[-1]}"
        raise ConfigError(f"{path} should hold key: value lines, {least} at least; found {found}")
    key = _foreign_key(values, kind)
    if key is not None:
        command = f"mmpreproj {COMMANDS[key]} {os.fspath(asked)}"
        raise ConfigError(f"{os.fspath(asked)} has {key!r}, so it is for another command; run {command}")
    for override in overrides:
        _apply_override(values, override)
    return parse_config(values, origin=str(path), kind=kind)


def find_config(path: str | os.PathLike[str], *, kind: type[Section] = TrainConfig) -> Path:
    """Find a configuration file: as it is named, else among those shipped (`configs/` of the package or checkout).

    Raises:
        FileNotFoundError: if there is none; those shipped of this kind are listed.
    """
    path = Path(path)
    if path.is_file():
        return path
    package = Path(mmpreproj.__file__).parent
    shipped = {file.stem: file for place in (package.parent, package) for file in (place / "configs").glob("*.yaml")}
    if path.stem in shipped and path.parent in (Path(), Path("configs")):
        return shipped[path.stem]
    fitting = [name for name, file in sorted(shipped.items()) if _foreign_key(_read(file), kind) is None]
    raise FileNotFoundError(f"there is no configuration file {path}; shipped with mmpreproj are {', '.join(fitting)}")


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8 (byte {error.start + 1}); save it as UTF-8") from error
    return _load(text, what=str(path))


def _foreign_key(values: Mapping[Any, Any], kind: type[Section]) -> str | None:
    """Find the key by which a file is for another command; None if any key shows that it is for this one."""
    known = set(kind.model_fields)
    if known & (set(values) - SHARED):
        return None
    return next((key for key in COMMANDS if key in values and key not in known), None)


def parse_config(
    values: Mapping[str, Any],
    *,
    origin: str,
    kind: type[Config] = TrainConfig,  # type: ignore[assignment]
) -> Config:
    """Check plain values as `read_config` does; `origin` is what errors call them."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = "\n".join(f"  {line}" for line in _explain(error.errors(include_url=False), kind))
        raise ConfigError(f"{origin} cannot be used:\n{faults}") from None


def write_config(config: Section, path: Path) -> None:
    """Write a configuration as YAML that `read_config` reads back to an equal one."""
    path.write_text(yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False), encoding="utf-8")


def _load(text: str, *, what: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    # PyYAML lets Python's own errors through, as of the month in 2026-13-01 or the tag in `!!int x`.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid YAML: {_fault_of(error)}") from error


def _fault_of(error: Exception) -> str:
    """Say what PyYAML found, where, and what is often the cause."""
    if isinstance(error, ReaderError):
        return f"the character {chr(error.character)!r} (place {error.position + 1}) is not allowed; remove it"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    problem, mark = str(error.problem or error.context), error.problem_mark
    hint = next((hint for words, hint in YAML_HINTS.items() if words in problem), "")
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1}){hint}\n{mark.get_snippet()}"


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"an override is written {OVERRIDE}; got {override!r}")
    value = _load(text, what=f"the value of the override {override!r}")
    parts = key.split(".")
    target: Any = values
    for place in range(len(parts) - 1):
        slot = _slot(target, parts, place, override)
        child = target[slot] if isinstance(target, list) else target.get(slot)
        # Copied, since YAML's aliases may put one object in several places.
        target[slot] = dict(child) if isinstance(child, Mapping) else list(child) if isinstance(child, list) else {}
        target = target[slot]
    target[_slot(target, parts, len(parts) - 1, override)] = value


def _slot(target: Any, parts: Sequence[str], place: int, override: str) -> Any:
    """Find what a part of a dotted key is: an index where it reaches into a list, else itself."""
    part = parts[place]
    if not isinstance(target, list):
        if not part:
            raise ConfigError(f"an override is written {OVERRIDE}; a part of the key is empty in {override!r}")
        if place and part.isdecimal() and part not in target:
            above, entry = ".".join(parts[:place]), override.partition("=")[2]
            for inner in reversed(parts[place + 1 :]):
                entry = f"{{{inner}: {entry}}}"
            raise ConfigError(
                f"the override {override!r} asks for entry {part} of {above}, but the file has no list there; give "
                f"the whole list, such as '{above}=[{entry}]'"
            )
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
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Puts text that `_Loader` would take for a number in quotes."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


class _Place(NamedTuple):
    """Where a fault is: its keys, the section they were looked up in last, the section that should be there, and
    whether that is under a name of one's own."""

    keys: tuple[str, ...]
    holder: type[Section]
    section: type[Section] | None
    named: bool


def _explain(faults: Sequence[Any], kind: type[Section]) -> list[str]:
    """Put faults into lines; those of the branches of one union become one."""
    lines: dict[tuple[str, str], list[str]] = {}
    for fault in faults:
        place = _find(fault["loc"], kind)
        says_enough = fault["type"] in ("extra_forbidden", "missing") or not place.keys
        shown = "null, or nothing after the colon" if fault["input"] is None else _shorten(repr(fault["input"]))
        got = "" if says_enough else f" (got {shown})"
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
    if fault["type"] in PLAIN_FAULTS:
        return PLAIN_FAULTS[fault["type"]]
    if fault["type"] in ("model_type", "dataclass_type", "dict_type"):
        keys = f"; keys here: {', '.join(place.section.model_fields)}" if place.section else ""
        if keys and place.named:
            named = "give settings under a name, such as {name: {key: value}}"
            return named + keys.replace("keys here", "keys of one")
        return f"give settings, such as {{key: value}}, or {{}} for the defaults{keys}"
    return str(fault["msg"]).removeprefix("Value error, ")


def _find(location: Sequence[str | int], kind: type[Section]) -> _Place:
    """Follow a fault's location through the sections; names of a union's branches in it are no keys."""
    keys: list[str] = []
    holder: type[Section] = kind
    section: type[Section] | None = kind
    branches: set[Any] = set()
    free = 0  # keys that may be any, in a mapping that is no section
    named = False  # whether the part before was such a key
    for part in location:
        if part == "[key]" and named:
            continue  # the fault is in the name itself
        named = free > 0
        if free:
            keys.append(str(part))
            free -= 1
        elif part in branches:
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
    return _Place(tuple(keys), holder, section, free > 0)


def _shorten(text: str, *, most: int = 120) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
