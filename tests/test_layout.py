"""The layout rules that linters do not check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "data", "launch", "model")
DISTRIBUTED = ("attention_control", "checkpoint", "distributed", "engine", "optim", "preflight_checks")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def may_know_ranks(path: Path) -> bool:
    """Whether a module may use process groups: some packages of launch/."""
    top, *rest = path.relative_to(ROOT).parts
    return top == "launch" and rest[0] in DISTRIBUTED


@pytest.mark.parametrize("path", [path for path in SOURCES if not may_know_ranks(path)], ids=names)
def test_only_the_distributed_packages_of_launch_import_torch_distributed(path: Path) -> None:
    assert not [name for name in imported_modules(path) if name.startswith("torch.distributed")]
    assert "torch.distributed" not in path.read_text()  # nor as an attribute of torch


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_nothing_happens_at_import(path: Path) -> None:
    """Modules define things; the only call allowed at top level makes a constant, a logger or a class."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in ast.parse(path.read_text()).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_main = isinstance(node, ast.If) and ast.unparse(node.test) in (
            "__name__ == '__main__'",
            "TYPE_CHECKING",
        )
        is_registration = isinstance(node, ast.Expr) and ast.unparse(node).startswith("_Loader.add_")
        assert isinstance(node, allowed) or is_docstring or is_main or is_registration, ast.unparse(node)


def test_the_entry_is_a_table_of_contents() -> None:
    source = (ROOT / "train.py").read_text()
    assert len(source.splitlines()) <= 150
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def test_every_package_is_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'"([\w.]+)"', re.search(r"^packages = \[(.*?)\]", text, re.M | re.S)[1]))  # type: ignore[index]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES if path.name == "__init__.py"}
    assert listed == found


def test_every_package_of_launch_has_a_purpose_and_a_layer() -> None:
    """A docstring says what a package holds; the layers contract says what it may import."""
    packages = sorted(path.parent for path in (ROOT / "launch").glob("*/__init__.py"))
    assert {package.name for package in packages} >= {"engine", "training", "checkpoint"}
    for package in packages:
        assert ast.get_docstring(ast.parse((package / "__init__.py").read_text())), f"{package} has no docstring"
    contract = (ROOT / "pyproject.toml").read_text().split('containers = ["launch"]')[1].split("[[")[0]
    assert "exhaustive = true" in contract  # import-linter checks that nothing else is missing
    layers = re.findall(r"\w+", contract[contract.index("layers = [") :])
    assert {package.name for package in packages} <= set(layers)


def test_every_package_of_tests_launch_mirrors_one_of_launch() -> None:
    folders = [path for path in (ROOT / "tests/launch").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert {path.name for path in folders} - {"helpers"} <= {path.name for path in (ROOT / "launch").iterdir()}


def test_every_module_and_its_public_functions_have_docstrings() -> None:
    missing = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            missing.append(names(path))
        for node in tree.body:
            is_public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if is_public and not ast.get_docstring(node):
                missing.append(f"{names(path)}:{node.name}")
    assert missing == []


def test_files_named_in_the_documents_exist() -> None:
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
