"""Three packages, one direction, no circle; and the coordinator never imports torch."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("coordinator", "rollout", "trainer")
HEAVY = {"torch", "transformers", "vllm"}
MAY_IMPORT = {
    "rollout": {"rollout"},
    "trainer": {"trainer", "rollout"},
    "coordinator": {"coordinator", "trainer", "rollout"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))
}


def imported_by(module: str, *, at_import: bool = False) -> set[str]:
    """Every module that `module` names in an import; `at_import`: only those outside of functions."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(SOURCES[module].read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        if not (at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            pending.extend(ast.iter_child_nodes(node))
    return found


def test_the_packages_were_found() -> None:
    assert {"coordinator.cli", "rollout.trajectory", "trainer.__main__", "coordinator"} <= SOURCES.keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_in_one_direction(package: str) -> None:
    for module in SOURCES:
        if module.partition(".")[0] == package:
            packages = {name.partition(".")[0] for name in imported_by(module)} & set(PACKAGES)
            assert packages <= MAY_IMPORT[package], f"{module} imports {packages - MAY_IMPORT[package]}"


def test_no_module_imports_itself_through_others() -> None:
    sorter = TopologicalSorter(
        {module: imported_by(module) & SOURCES.keys() - {module} for module in SOURCES}
    )
    sorter.prepare()  # CycleError names the circle


def test_coordinator_names_nothing_heavy() -> None:
    for module in SOURCES:
        if module.partition(".")[0] == "coordinator":
            assert not {name.partition(".")[0] for name in imported_by(module)} & HEAVY, module


def test_everything_that_the_coordinator_imports_is_free_of_torch() -> None:
    modules = sorted(name for name in SOURCES if name.partition(".")[0] == "coordinator")
    script = f"import sys, {', '.join(modules)}; print(*sorted({HEAVY!r} & sys.modules.keys()))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (loaded.returncode, loaded.stdout) == (0, "\n"), loaded.stderr + loaded.stdout


@pytest.mark.parametrize(
    "module", ["rollout.settings", "trainer.settings", "trainer.job.launch", "trainer.documents"]
)
def test_what_settings_need_loads_neither_torch_nor_the_coordinator(module: str) -> None:
    script = f"import sys, {module}; print(*sorted({HEAVY | {'coordinator'}!r} & sys.modules.keys()))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (loaded.returncode, loaded.stdout) == (0, "\n"), loaded.stderr + loaded.stdout


def test_command_line_itself_imports_almost_nothing() -> None:
    own = {name for name in imported_by("coordinator.cli", at_import=True) if name in SOURCES}
    assert own == {"coordinator.commands.parse"}
    assert not {name for name in imported_by("coordinator.commands.parse", at_import=True) if name in SOURCES}
