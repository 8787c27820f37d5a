"""What importing the packages loads, what they promise to export, and what they keep private."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["alloc", "radix", "scratch", "tiers", "replay"]
HOST_ONLY = ["alloc", "radix", "tiers", "replay"]


def run(script: str) -> str:
    """Run a script in a process of its own; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module of the library with its syntax tree."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name, ast.parse(path.read_text())


@pytest.mark.parametrize("package", HOST_ONLY)
def test_importing_a_host_package_loads_no_torch(package):
    """Not even where torch is installed."""
    assert run(f"import sys, {package}; print('torch' in sys.modules)") == "False\n"


def test_no_module_of_the_tree_loads_torch():
    """Nor any of the modules below ``radix``, but for one that makes tensors, if there is one."""
    names = [
        info.name
        for info in pkgutil.walk_packages([str(ROOT / "radix")], "radix.")
        if info.name != "radix.tensors"
    ]
    script = f"import sys, importlib\nfor n in {names}: importlib.import_module(n)\n"
    assert run(script + "print('torch' in sys.modules)") == "False\n"


def test_the_command_line_loads_no_torch():
    """``rotaradix --help`` answers at once."""
    script = (
        "import sys\nfrom replay.cli import main\nsys.argv = ['rotaradix', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('torch' in sys.modules)"
    )
    out = run(script)
    assert "Usage" in out
    assert out.endswith("False\n")


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_that_a_package_names_can_be_imported(package):
    """``__all__`` has no name twice, and no name that is not there."""
    if package in ("scratch", "tiers"):
        pytest.importorskip("torch")
    module = importlib.import_module(package)
    names = list(getattr(module, "__all__", []))
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name)] == []
    assert [name for name in names if name.startswith("_")] == []


def test_no_module_imports_an_underscore_name_of_another():
    """What starts with an underscore belongs to its file."""
    found = [
        f"{name}:{node.lineno} imports {alias.name}"
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert found == []


def test_no_module_reads_an_underscore_name_of_another_module():
    """Not through the module object either."""
    found = []
    for name, tree in sources():
        modules = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if not alias.name[0].isupper()
        }
        found += [
            f"{name}:{node.lineno} reads {node.value.id}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ]
    assert found == []


def test_alloc_imports_nothing_of_ours_and_the_siblings_not_each_other():
    """Arrows point one way."""
    banned = {
        "alloc": {"radix", "scratch", "tiers", "replay"},
        "radix": {"scratch", "tiers", "replay"},
        "scratch": {"radix", "tiers", "replay"},
        "tiers": {"replay"},
        "replay": set[str](),
    }
    found = []
    for name, tree in sources():
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            roots = {imported.split(".")[0] for imported in names}
            found += [f"{name} imports {r}" for r in roots & banned[name.split(".")[0]]]
    assert found == []
