"""README, `Phase` and the main loop say the same; every command of README is one that runs."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

from coordinator.protocol.phases import By, Phase, rows_of
from coordinator.rows.table import run_iteration
from trainer.algorithms import PRESETS

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()


def table() -> list[list[str]]:
    """The cells of the protocol table's rows."""
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", README, re.MULTILINE)
    return [[number, *cells.split(" | ")] for number, cells in rows]


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
        assert phase.by is (By.MASTER if waits else By.ALL), f"row {number}: {workers}"


def test_rows_of_each_rl_phase_are_those_of_the_page() -> None:
    assert "`--rl-phase rollout` runs rows 0-6 and 13, `update` rows 0 and 7-13, `both` all" in README
    assert rows_of("both") == {*range(14)}
    assert rows_of("rollout") == {*range(7), 13} and rows_of("update") == {0, *range(7, 14)}
    assert rows_of("eval") == {0, 5, 6, 13}


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


def test_extras_of_the_readme_are_those_of_the_project() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    block = README[README.index("## Extras") :].partition("\n\nThe programs")[0]
    assert set(extras) == set(re.findall(r"`(\w+)`", block))


def test_presets_of_the_readme_are_those_that_there_are() -> None:
    (sentence,) = re.findall(r"`trainer.algorithm` is (.+?): each", README.replace("\n", " "))
    assert re.findall(r"`([\w+]+)`", sentence) == list(PRESETS)
