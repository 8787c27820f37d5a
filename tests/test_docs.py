"""The documents say what is true: their code runs, their commands exist, their names resolve."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON_BLOCKS = [
    pytest.param(block, id=f"{name}-{i}")
    for name in ("README.md", "ARCHITECTURE.md")
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S))
]


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_every_python_block_of_the_documents_runs(block):
    exec(compile(block, "README", "exec"), {})


def test_the_embed_example_is_short_enough_to_read():
    block = PYTHON_BLOCKS[0].values[0]
    assert len([line for line in block.splitlines() if line.strip()]) <= 24


def test_every_make_target_of_the_readme_exists():
    named = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.M))
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    assert named
    assert named <= targets


def test_every_file_of_the_architecture_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folder = ""
    for row in re.findall(r"^\| (`.*?) \|", text, re.M):
        for path in re.findall(r"`([\w/]+(?:\.py|/))`", row):
            folder = path.rsplit("/", 1)[0] if "/" in path else folder
            full = path if "/" in path else f"{folder}/{path}"
            assert (ROOT / full).exists(), full


@pytest.mark.parametrize("package", ["alloc", "radix", "replay"])
def test_every_public_name_exists_and_is_documented(package):
    module = importlib.import_module(package)
    for name in module.__all__ if hasattr(module, "__all__") else []:
        value = getattr(module, name)
        documented = callable(value) or isinstance(value, type)
        assert not documented or value.__doc__, name


@pytest.mark.parametrize("package", ["alloc", "radix", "replay"])
def test_every_doctest_of_a_host_only_module_holds(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name.endswith(("tensors", "__main__")) or ".kernels" in name:
            continue
        failed, _ = doctest.testmod(importlib.import_module(name))
        assert failed == 0, name


def test_no_source_file_is_longer_than_500_lines():
    for package in ("alloc", "radix", "scratch", "tiers", "replay"):
        for path in (ROOT / package).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 500, path
