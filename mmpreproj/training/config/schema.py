"""The JSON Schema of a configuration, from which editors complete, explain and check one.

`python -m mmpreproj.training.config.schema configs/train.schema.json` writes the file that the shipped configurations
for trainings name first. It knows keys, types, choices, ranges and defaults; what fields ask of each other
is checked where a configuration is read.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from mmpreproj.training.config.run import TrainConfig
from mmpreproj.training.config.section import Section, parts_of

_POSITIVE = {"exclusiveMinimum": 0}

# What the adapter's settings check in code, which their types do not tell.
_ADAPTER: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "PreProjConfig": {
        "expansion": _POSITIVE,
        "init_std": _POSITIVE,
        "blocks": {
            "anyOf": [
                {"const": "all"},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "uniqueItems": True},
                {
                    "type": "object",
                    "properties": {"last": {"type": "integer", "minimum": 1}},
                    "required": ["last"],
                    "additionalProperties": False,
                },
            ]
        },
    },
    "Positions": {
        "theta": {"exclusiveMinimum": 1},
        "base_size": {"anyOf": [{"type": "integer", "minimum": 2}, {"type": "null"}]},
    },
    "PointPathConfig": {
        "features": {"minimum": 0, "maximum": 1024},
        "frequencies": {"minimum": 0, "maximum": 16},
        "spread": _POSITIVE,
        "shown": {"minimum": 8, "maximum": 2**20},
    },
}


def train_schema() -> dict[str, Any]:
    """Describe a training configuration as JSON Schema, draft 2020-12."""
    return json_schema(TrainConfig, name="train.schema.json", title="Training configuration of mmpreproj")


def json_schema(kind: type[Section], *, name: str, title: str) -> dict[str, Any]:
    """Describe a configuration as JSON Schema, draft 2020-12.

    Args:
        kind: what it configures.
        name: of the schema's file, which is its `$id`.
        title: what it describes.

    Raises:
        KeyError: if a field is not described in the docstring of its class.
    """
    schema = kind.model_json_schema(schema_generator=_InOrder)
    definitions = schema.pop("$defs")
    for part in _kinds(kind):
        _describe(part, schema if part is kind else definitions[part.__name__])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": name,
        **schema,
        "title": title,
        "$defs": definitions,
    }


def _describe(kind: type, node: dict[str, Any]) -> None:
    """Put into the schema of a class of settings what its docstrings and code tell."""
    summary, texts = _documentation(kind)
    settings = getattr(kind, "model_fields", {})
    node["description"] = summary
    for name, value in node["properties"].items():
        written = _as_written(value, settings[name]) if name in settings else value
        node["properties"][name] = {
            "description": texts[name],
            **written,
            **_ADAPTER.get(kind.__name__, {}).get(name, {}),
        }


class _InOrder(GenerateJsonSchema):
    """Keeps fields in the order of their classes, and gives them no titles, which would repeat their names."""

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _kinds(kind: type) -> Iterator[type]:
    """List a class of settings and those that its fields hold."""
    yield kind
    fields = getattr(kind, "model_fields", None)
    hints = get_type_hints(kind) if fields is None else {name: field.annotation for name, field in fields.items()}
    for hint in hints.values():
        for part in parts_of(hint):
            if isinstance(part, type) and (is_dataclass(part) or issubclass(part, Section)):
                yield from _kinds(part)


def _as_written(value: dict[str, Any], field: FieldInfo) -> dict[str, Any]:
    """Add to a field's schema what may be written for it besides, and the default that pydantic does not tell."""
    changed = dict(value)
    if changed.get("type") == "array" and any(isinstance(part, BeforeValidator) for part in field.metadata):
        # One of several may be written without brackets.
        several = {"type": changed.pop("type"), "items": changed.pop("items")}
        changed = {"anyOf": [several["items"], several], **changed}
    if "patternProperties" in changed:
        changed["additionalProperties"] = False
    if "no" in changed.get("enum", ()):
        # YAML 1.1 reads a bare `no` as false, YAML 1.2 as text.
        changed = {key: part for key, part in changed.items() if key != "type"} | {"enum": [*changed["enum"], False]}
    if field.default_factory is not None:
        made = field.get_default(call_default_factory=True)
        changed["default"] = made.model_dump(mode="json", exclude_unset=True) if isinstance(made, Section) else {}
    return changed


def _documentation(kind: type) -> tuple[str, dict[str, str]]:
    """Read the docstring of a class and its parents: what it is, and what each field is, as YAML calls values."""
    texts: dict[str, str] = {}
    for parent in reversed(kind.__mro__):
        texts.update(_fields(inspect.cleandoc(parent.__doc__ or "")) if parent is not object else {})
    summary = re.split(r"\n\n(?=\w+:)", inspect.cleandoc(kind.__doc__ or ""))[0]
    return " ".join(summary.split()), {name: re.sub(r"\bNone\b", "null", text) for name, text in texts.items()}


def _fields(docstring: str) -> dict[str, str]:
    """Read the block `Attributes:` or `Args:` of a docstring in Google's form."""
    block = re.search(r"^(?:Attributes|Args):\n((?:    .*\n?|\n)+)", docstring, flags=re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", block.group(1), flags=re.MULTILINE) if block else []
    return {name: " ".join(text.split()) for name, text in entries}


def write_schema(schema: Mapping[str, Any], path: Path) -> None:
    """Write a schema as a file of JSON."""
    path.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_as_asked(schema: Mapping[str, Any], *, module: str) -> None:
    """Write a schema to the file that the command line names, `python -m MODULE FILE`."""
    if len(sys.argv) != 2:
        sys.exit(f"give the file to write: python -m {module} configs/{schema['$id']}")
    write_schema(schema, Path(sys.argv[1]))


if __name__ == "__main__":
    write_as_asked(train_schema(), module="mmpreproj.training.config.schema")
