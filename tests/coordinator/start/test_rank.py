"""Which rank a process is: options first, then what schedulers say, then the only node of a run."""

import pytest

from coordinator.settings.tree import SettingsError
from coordinator.start.rank import RANK_VARIABLES, nodes_from, resolve_rank

HERE = {"node-a", "10.0.0.1"}


def rank(*, master: bool = False, worker: str | None = None, num_nodes: int = 3, **environment: str) -> int:
    return resolve_rank(master, worker, num_nodes, environment, HERE)


def refusal(
    *, master: bool = False, worker: str | None = None, num_nodes: int = 3, **environment: str
) -> str:
    with pytest.raises(SettingsError) as caught:
        rank(master=master, worker=worker, num_nodes=num_nodes, **environment)
    return str(caught.value)


def test_options_say_the_rank() -> None:
    assert rank(master=True) == 0
    assert rank(worker="2") == 2


def test_options_win_over_the_environment() -> None:
    assert rank(master=True, RANK="2", MASTER_ADDR="elsewhere") == 0
    assert rank(worker="1", RANK="2", MASTER_ADDR="10.0.0.1") == 1


@pytest.mark.parametrize("variable", RANK_VARIABLES)
def test_each_variable_of_a_scheduler_says_the_rank(variable: str) -> None:
    assert resolve_rank(False, None, 3, {variable: "0"}, HERE) == 0
    assert resolve_rank(False, None, 3, {variable: "2"}, HERE) == 2


def test_variables_that_agree_say_the_rank() -> None:
    assert rank(RANK="", NODE_RANK="1", SLURM_NODEID="1") == 1
    assert rank(RANK="0", SLURM_NODEID="0", WORLD_SIZE="16", SLURM_NNODES="2") == 0
    assert rank(RANK="0", SLURM_NODEID="0", WORLD_SIZE="1", SLURM_NNODES="2(x2)") == 0


def test_numbers_left_over_from_another_launcher_are_refused_with_both_values() -> None:
    """sbatch passes on the submitter's environment: RANK=0 of a notebook would make every node the master."""
    text = refusal(RANK="0", SLURM_NODEID="1")
    assert text.startswith("RANK=0 and SLURM_NODEID=1 name different ranks") and "unset" in text
    assert "JOB_COMPLETION_INDEX=2" in refusal(NODE_RANK="0", JOB_COMPLETION_INDEX="2")
    text = refusal(RANK="0", SLURM_NODEID="0", WORLD_SIZE="1", SLURM_NNODES="2")
    assert text.startswith("WORLD_SIZE=1 and SLURM_NNODES=2 name different numbers of nodes")
    assert rank(worker="1", RANK="0", SLURM_NODEID="1") == 1


@pytest.mark.parametrize("address", sorted(HERE))
def test_master_addr_that_names_this_host_makes_the_master(address: str) -> None:
    assert rank(MASTER_ADDR=address) == 0


def test_only_node_of_a_run_is_the_master() -> None:
    assert rank(num_nodes=1) == 0


def test_run_of_several_nodes_needs_a_role() -> None:
    text = refusal()
    assert "no role in a run of 3 nodes" in text
    assert "--master" in text and "--worker RANK" in text
    assert all(variable in text for variable in RANK_VARIABLES)


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_master_addr_of_another_host_gives_no_role_and_is_named(num_nodes: int) -> None:
    assert "MASTER_ADDR=10.0.0.9 is not this host" in refusal(num_nodes=num_nodes, MASTER_ADDR="10.0.0.9")


def test_both_roles_exclude_each_other() -> None:
    assert refusal(master=True, worker="1") == "--master and --worker 1 exclude each other; give one of them"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0", "rank 0 is the master"),
        ("-1", "outside the range"),
        ("x", "not a rank"),
        ("", "not a rank"),
        ("1.5", "not a rank"),
    ],
)
def test_worker_option_that_is_no_rank_is_refused(text: str, reason: str) -> None:
    refused = refusal(worker=text)
    assert refused.startswith(f"--worker {text}") and reason in refused


@pytest.mark.parametrize(("text", "reason"), [("-1", "outside the range"), ("first", "not a rank")])
def test_variable_that_is_no_rank_is_named(text: str, reason: str) -> None:
    refused = refusal(SLURM_NODEID=text)
    assert refused.startswith(f"SLURM_NODEID {text}") and reason in refused


@pytest.mark.parametrize(
    ("text", "nodes"), [("4", 4), ("1", 1), ("0", None), ("", None), ("two", None), ("-2", None)]
)
def test_number_of_nodes_comes_from_slurm_where_it_says_one(text: str, nodes: int | None) -> None:
    assert nodes_from({"SLURM_NNODES": text}) == nodes
    assert nodes_from({}) is None
