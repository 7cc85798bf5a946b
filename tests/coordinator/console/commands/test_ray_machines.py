"""What is asked of the machines of a Ray cluster."""

import pytest

from coordinator.console.commands.ray_machines import Machine, bundles, parse_asked
from coordinator.settings.tree import SettingsError

THERE = [Machine("head", 0, 8), Machine("a", 8, 64), Machine("b", 4, 32), Machine("c", 8, 96)]


def test_nodes_take_whole_machines_the_largest_first() -> None:
    assert bundles(THERE, parse_asked(3, None, None), "auto") == [
        {"GPU": 8, "CPU": 96},
        {"GPU": 8, "CPU": 64},
        {"GPU": 4, "CPU": 32},
    ]


def test_nodes_that_ask_for_less_leave_large_machines_to_the_others() -> None:
    assert bundles(THERE, parse_asked(3, "4,8,8", "16"), "auto") == [
        {"GPU": 4, "CPU": 16},
        {"GPU": 8, "CPU": 16},
        {"GPU": 8, "CPU": 16},
    ]
    assert bundles(THERE, parse_asked(2, "0", None), "auto") == [{"CPU": 8}, {"CPU": 32}]


def test_head_without_cpus_is_no_machine() -> None:
    with pytest.raises(SettingsError, match="has 0 machines with CPUs"):
        bundles([Machine("head", 0, 0)], parse_asked(1, None, None), "auto")


@pytest.mark.parametrize(
    ("nodes", "gpus", "cpus", "expected"),
    [
        (5, None, None, "has 4 machines with CPUs: head (0 GPUs, 8 CPUs), a (8 GPUs, 64 CPUs), "),
        (
            3,
            "8",
            None,
            "rank 2 asks for 8 GPUs and 0 CPUs, and no machine of the Ray cluster at auto has them",
        ),
        (1, None, "128", "rank 0 asks for 0 GPUs and 128 CPUs"),
        (2, "8,8,8", None, "--gpus-per-node 8,8,8: give a number from 0, or one for each of 2 nodes"),
        (2, "-1", None, "--gpus-per-node -1"),
        (2, None, "0", "--cpus-per-node 0: give a number from 1"),
    ],
)
def test_what_is_missing_is_named(nodes: int, gpus: str | None, cpus: str | None, expected: str) -> None:
    with pytest.raises(SettingsError) as refused:
        bundles(THERE, parse_asked(nodes, gpus, cpus), "auto")
    assert expected in str(refused.value) and "\n" not in str(refused.value)
