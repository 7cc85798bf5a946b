"""The table of docs/protocol.md, `Phase` and the main loop say the same; what README claims is so."""

import ast
import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest

from coordinator.phases.table import run_iteration
from coordinator.protocol.phase import ActsIn, Phase, phases_of
from rollout.tasks.task_set import load_tasks
from tests.coordinator.test_imports import FLOORS
from tests.rollout.rewards.scoring import scored
from tests.user_code import forget

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()
PROTOCOL = (REPOSITORY / "docs" / "protocol.md").read_text()
GPUS = (REPOSITORY / "docs" / "gpus.md").read_text()
PACKAGES = ("coordinator", "trainer", "rollout")


def table() -> list[list[str]]:
    """The cells of the protocol table's phases."""
    phases = re.findall(r"^\| (\d+) \| (.+) \|$", PROTOCOL, re.MULTILINE)
    return [[number, *cells.split(" | ")] for number, cells in phases]


def steps() -> list[str]:
    """The phase of each `step(...)` line of the main loop, in order."""
    body = ast.parse(inspect.getsource(run_iteration))
    calls = [
        node for node in ast.walk(body) if isinstance(node, ast.Call) and ast.unparse(node.func) == "step"
    ]
    return [ast.unparse(call.args[0]).removeprefix("Phase.") for call in calls]


def test_table_phases_and_main_loop_agree() -> None:
    assert [(int(number), name) for number, name, *_ in table()] == [(p.value, p.label) for p in Phase]
    assert steps() == [phase.name for phase in Phase]


def test_workers_act_where_the_table_says_so() -> None:
    for (number, _name, _master, workers), phase in zip(table(), Phase, strict=True):
        waits = workers in {"wait", "read it"}
        assert phase.by is (ActsIn.MASTER if waits else ActsIn.ALL), f"phase {number}: {workers}"


def test_rows_of_each_rl_phase_are_those_of_the_page() -> None:
    assert "`--rl-phase rollout` runs phases 0-6 and 13, `update` phases 0 and 7-13, `both` all" in PROTOCOL
    assert phases_of("both") == {*range(14)}
    assert phases_of("rollout") == {*range(7), 13} and phases_of("update") == {0, *range(7, 14)}
    assert phases_of("eval") == {0, 5, 6, 13}


def commands() -> list[str]:
    """Every `run ...` line of an indented block, continuation lines joined."""
    text = README.replace("\\\n", " ")
    return [re.sub(r"\s+#.*", "", line).strip() for line in re.findall(r"^    (run .+)$", text, re.MULTILINE)]


def test_readme_names_the_three_node_example() -> None:
    assert [c for c in commands() if "/shared/exp1" in c][:3] == [
        "run --master --num-nodes 3 --rank-weights 2,1,1 --log-path /shared/exp1",
        "run --worker 1 --log-path /shared/exp1",
        "run --worker 2 --log-path /shared/exp1",
    ]


def test_extras_of_the_page_are_those_of_the_project() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = GPUS[GPUS.index("## Optional packages") :]
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE)
    assert sorted(re.findall(r"\w+", " ".join(cells))) == sorted(extras)


def test_readme_is_read_in_one_sitting() -> None:
    assert len(README.splitlines()) < 150


def test_readme_shows_rooms_and_no_file_of_them() -> None:
    """So a new file, or one that moves, needs no edit of the README."""
    assert re.findall(rf"\b(?:{'|'.join(PACKAGES)})/\w[\w/.]*", README) == []


def rooms_in_readme(package: str) -> list[str]:
    """Top floor first."""
    (cells,) = re.findall(rf"^\| `{package}/` \| [^|]+ \| ([^|]+) \|$", README, re.MULTILINE)
    return re.findall(r"`(\w+)`", cells)


def floors(package: str) -> dict[str, int]:
    """Of each room, by CONTRIBUTING's table."""
    table = CONTRIBUTING[CONTRIBUTING.index(f"`{package}/` ") :].partition("\n\n")[2].partition("\n\n")[0]
    return {name: int(floor) for floor, name in re.findall(r"^\| (\d) \| `(\w+)` \|", table, re.MULTILINE)}


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_of_the_pages_are_the_folders_of_the_packages(package: str) -> None:
    folders = {path.parent.name for path in (REPOSITORY / package).glob("*/__init__.py")}
    assert set(rooms_in_readme(package)) == set(floors(package)) == folders


@pytest.mark.parametrize("package", PACKAGES)
def test_floors_of_the_page_are_those_that_hold(package: str) -> None:
    """A room that has floors of its own, as `console` has, stands on the page where the lowest of them is."""
    rows = {room: row for row, rooms in enumerate(FLOORS) for room in rooms}
    assert len(rows) == sum(map(len, FLOORS)), "a room is on two floors"
    page = floors(package)
    row_of = {
        room: rows.get(name := f"{package}.{room}")
        or max(row for inner, row in rows.items() if inner.startswith(f"{name}."))
        for room in page
    }
    from_below = sorted(set(row_of.values()), reverse=True)
    assert page == {room: 1 + from_below.index(row) for room, row in row_of.items()}


@pytest.mark.parametrize("package", PACKAGES)
def test_readme_names_the_rooms_from_the_highest_floor_down(package: str) -> None:
    order = [floors(package)[room] for room in rooms_in_readme(package)]
    assert order == sorted(order, reverse=True)


def test_reward_and_tasks_of_the_readme_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file as README shows it, found by name from the current directory."""
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE))
    name = blocks["python"].partition("\n")[0].removeprefix("# ")
    (tmp_path / name).write_text(blocks["python"])
    (tmp_path / "tasks.jsonl").write_text(blocks["json"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    forget(monkeypatch)
    monkeypatch.setitem(sys.modules, name.removesuffix(".py"), sys)  # so that what comes there goes again
    del sys.modules[name.removesuffix(".py")]
    (command,) = [command for command in commands() if "--reward" in command]
    assert "--tasks tasks.jsonl" in command
    (reward,) = re.findall(r"--reward (\S+)", command)
    for task in load_tasks("tasks.jsonl", seed=0, split="train").tasks:
        assert scored(reward, "27 + 58 = 85.", **task).reward == 1.0
        assert scored(reward, "none", **task).reward == 0.0


def test_picture_of_the_readme_is_small() -> None:
    assert (REPOSITORY / "docs" / "report.png").stat().st_size < 150_000
