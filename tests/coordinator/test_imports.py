"""Rooms on floors, no circle among rooms or files; and the coordinator never imports torch."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("coordinator", "rollout", "trainer")
HEAVY = {"torch", "transformers", "vllm"}
FLOORS = (
    {"coordinator.cli"},
    {"coordinator.main", "coordinator.console.commands"},
    {"coordinator.console.plan", "coordinator.console.server"},
    {"coordinator.console.doctor", "coordinator.console.report"},
    {"coordinator.console.views"},
    {"coordinator.phases"},
    {"coordinator.keeping"},
    {"coordinator.node"},
    {"coordinator.start", "coordinator.collector"},
    {"coordinator.machine"},
    {"coordinator.journal", "coordinator.protocol"},
    {"coordinator.directory"},
    {"coordinator.settings"},
    {"trainer.__main__"},
    {"trainer.job"},
    {"trainer.checkpoint", "trainer.update"},
    {"trainer.model"},
    {"trainer.batch"},
    {"trainer.peers", "trainer.progress", "trainer.resume", "trainer.statistics"},
    {"trainer.documents", "trainer.memory"},
    {"trainer.settings"},
    {"trainer.loss_settings"},
    {"trainer.algorithms", "trainer.source_settings"},
    {"trainer.choices"},
    {"rollout.collect"},
    {"rollout.group_maker"},
    {"rollout.slots", "rollout.engine_places", "rollout.finished_groups"},
    {"rollout.environments", "rollout.rewards", "rollout.engines.embedded"},
    {"rollout.tasks", "rollout.engines", "rollout.evaluation", "rollout.part_file", "rollout.quota"}
    | {"rollout.eval_settings"},
    {"rollout.processes", "rollout.sandbox", "rollout.storage", "rollout.trajectory", "rollout.settings"},
    {"rollout.loaded_code"},
    {"rollout.plugins", "rollout.settings_tree", "rollout.stuck_user_code", "rollout.tally"},
    {"rollout.counter_rng", "rollout.environment_variables", "rollout.origin", "rollout.pictures"}
    | {"rollout.module_search", "rollout.hub_reach"},
)
"""The rooms of the house, from the top floor down. A file beside the folders of its package is a room too."""
MAY_IMPORT = {room: set().union(*FLOORS[floor + 1 :]) for floor, rooms in enumerate(FLOORS) for room in rooms}
"""A room uses the rooms below it, and nothing else."""


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))
}


def imported_by(module: str, *, at_import: bool = False) -> set[str]:
    """Every module that `module` names in an import; `at_import`: only those outside of functions, and not
    for a type checker alone.
    """
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(SOURCES[module].read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not (at_import and (is_typing or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))):
            pending.extend(ast.iter_child_nodes(node))
    return found


def room_of(module: str) -> str | None:
    """The room that a module is in; None for what only holds rooms: a package, `coordinator.console`."""
    parts = module.split(".")
    if module not in MAY_IMPORT and any(room.startswith(f"{module}.") for room in MAY_IMPORT):
        return None
    longest = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
    return next((name for name in longest if name in MAY_IMPORT), module)


def test_the_packages_were_found() -> None:
    assert {"coordinator.cli", "rollout.trajectory", "trainer.__main__", "coordinator"} <= SOURCES.keys()


def test_every_file_is_in_a_room_and_every_room_has_files() -> None:
    assert {room_of(module) for module in SOURCES} - {None} == MAY_IMPORT.keys()


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_room_uses_only_the_rooms_below_it(room: str) -> None:
    for module in SOURCES:
        if room_of(module) == room:
            used = {room_of(name) for name in imported_by(module) & SOURCES.keys()} - {None, room}
            assert used <= MAY_IMPORT[room], f"{module} uses {used - MAY_IMPORT[room]}, which is not below it"


def test_parts_of_a_node_do_not_know_the_node() -> None:
    for module in SOURCES:
        if room_of(module) == "coordinator.node" and module != "coordinator.node.node":
            assert "coordinator.node.node" not in imported_by(module), module


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


def test_what_run_local_imports_before_it_has_others_import_is_light() -> None:
    script = "import sys, coordinator.cli, coordinator.machine.children; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    late = HEAVY | {"numpy", "aiohttp", "coordinator.node", "coordinator.console.views"}
    late.add("rollout.engines.client")
    assert not late & set(loaded.stdout.split())


def test_command_line_itself_imports_almost_nothing() -> None:
    found, pending = set[str](), ["coordinator.cli"]
    while pending:
        new = imported_by(pending.pop(), at_import=True) & SOURCES.keys() - found
        found |= new
        pending += new
    parsing = {name for name in SOURCES if name.startswith("coordinator.console.commands.parse")}
    words = {f"coordinator.console.commands.{name}" for name in ("arguments", "names")}
    assert found == {"coordinator.console.commands", *words, *parsing}
