"""The package keeps its floors: a module imports only from floors below, or from its own package."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mmpreproj

ROOT = Path(mmpreproj.__file__).parent
FLOORS = {
    "core": 0,
    "files": 0,
    "patching": 1,
    "points": 2,
    "data": 3,
    "pipelines": 4,
    "training": 4,
    "language": 5,
    "recipes": 6,
    "cli": 7,
    "__main__": 8,
}
CORE_MAY_IMPORT = sys.stdlib_module_names | {"torch", "mmpreproj"}
HEAVY = ["torch", "diffusers", "transformers", "accelerate", "numpy", "safetensors", "huggingface_hub", "pydantic"]


def part_of(path: Path, root: Path) -> str:
    """Name the part of the package that a file belongs to: `core`, `patching`, `cli`, …"""
    return path.relative_to(root).with_suffix("").parts[0]


def imported_modules(path: Path, root: Path) -> Iterator[str]:
    """List what a file imports, inside functions too, as absolute dotted names; `from a import b` gives `a.b`."""
    package = ["mmpreproj", *path.relative_to(root).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*prefix, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def home_of(dotted: str) -> list[str]:
    """Name the parts that an import reaches: those behind a name of the package itself are its lazy re-exports."""
    _, *rest = dotted.split(".")
    if not rest or rest[0] == "*":
        return sorted({home.split(".")[0] for home in mmpreproj._HOMES.values()})
    if rest[0] == "__version__":
        return []
    return [mmpreproj._HOMES.get(rest[0], rest[0]).split(".")[0]]


def violations(root: Path) -> list[str]:
    """List every import that reaches sideways or up, and every part that no floor is named for."""
    found = []
    for path in sorted(root.rglob("*.py")):
        part, where = part_of(path, root), path.relative_to(root)
        if part == "__init__":  # re-exports lazily
            continue
        if part not in FLOORS:
            found.append(f"{where}: give {part!r} a floor")
            continue
        for name in imported_modules(path, root):
            top = name.split(".")[0]
            if part == "core" and top not in CORE_MAY_IMPORT:
                found.append(f"{where} imports {name}; core imports torch alone")
            if top == "mmpreproj":
                found += [
                    f"{where} imports {name}; floor {FLOORS[part]} may not reach {home!r}"
                    for home in home_of(name)
                    if home != part and FLOORS.get(home, 99) >= FLOORS[part]
                ]
    return found


def test_modules_import_only_from_floors_below():
    found = violations(ROOT)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source", "reported"),
    [
        ("core/a.py", "import torch\nfrom mmpreproj.core.b import c\nimport math", 0),
        ("core/a.py", "import numpy as np", 1),
        ("core/a.py", "def f():\n    from einops import rearrange", 1),
        ("core/a.py", "from mmpreproj.patching.config import PreProjConfig", 1),
        ("core/a.py", "from mmpreproj import PreProjConfig", 1),
        ("core/a.py", "from ..patching import config", 1),
        ("core/a.py", "from . import b", 0),
        ("patching/a.py", "from mmpreproj.data.sources.folder import b", 1),
        ("patching/a.py", "from mmpreproj import __version__\nfrom mmpreproj.core.flow import velocity", 0),
        ("patching/deep/a.py", "from ...core import flow\nfrom .. import config", 0),
        ("patching/deep/a.py", "from ...training import loop", 1),
        ("training/a.py", "import mmpreproj\nfrom mmpreproj import data, patch", 0),
        ("training/a.py", "from mmpreproj.pipelines import sd3", 1),
        ("training/a.py", "import mmpreproj.recipes.run", 1),
        ("recipes/a.py", "from mmpreproj.pipelines import sd3\nfrom mmpreproj.training import loop", 0),
        ("recipes/a.py", "from mmpreproj import cli", 1),
        ("cli.py", "from mmpreproj.recipes import run\nimport mmpreproj", 0),
        ("cli.py", "from mmpreproj.nowhere import x", 1),
        ("novel/a.py", "", 1),
        ("__init__.py", "from mmpreproj.cli import main", 0),
    ],
)
def test_the_walk_sees_what_breaks_the_rule(tmp_path: Path, file: str, source: str, reported: int):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(source)
    assert len(violations(tmp_path)) == reported


def fresh_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_imports_nothing_heavy():
    code = f"import sys, mmpreproj; dir(mmpreproj); print([n for n in {HEAVY} if n in sys.modules])"
    assert fresh_python(code) == "[]"


def test_every_public_name_resolves():
    for name in mmpreproj.__all__:
        assert getattr(mmpreproj, name) is not None
    assert set(mmpreproj._HOMES) | {"__version__"} == set(mmpreproj.__all__)
    assert dir(mmpreproj) == sorted(mmpreproj.__all__)
    with pytest.raises(AttributeError, match="module 'mmpreproj' has no attribute 'pach'"):
        _ = mmpreproj.pach
