"""Real torchrun jobs over gloo, driven through the spool as a node drives them."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollout.storage.hashing import checksums
from tests.faultfs import FaultFs, unavailable
from tests.ports import unused_port
from tests.trainer.training_jobs import JOB_TIMEOUT_S, Node, group_members, result_of
from trainer.batch.batch import Batch
from trainer.documents import DamagedDocument, TrainRequest
from trainer.job import launch
from trainer.model.learner import build_learner
from trainer.settings import TrainerSettings
from trainer.update.step import train

StartNode = Callable[..., Node]
MakeRequest = Callable[..., TrainRequest]


def weights(request: TrainRequest) -> dict[str, torch.Tensor]:
    return load_file(Path(request.staging_dir) / "model.safetensors")


def ask(nodes: list[Node], number: int, request: TrainRequest) -> None:
    for node in nodes:
        launch.submit(node.spool, number, request)
    for node in nodes:
        node.wait_outcome(number)


def test_update_is_the_same_for_any_split_kept_alive_or_relaunched(
    start_node: StartNode, make_request: MakeRequest, batch: Batch, base_dir: Path
) -> None:
    alone = build_learner(base_dir, torch.device("cpu"), TrainerSettings())
    first = make_request(batch, rank_weights=(1, 1, 1))
    stats = train(alone, batch, first.settings, max_tokens=first.max_tokens, report=lambda line: None)
    assert len(stats) == 3

    # One job of one node, three ranks, kept alive over three requests.
    node = start_node(3)
    ask([node], 1, first)
    done, total = launch.progress(node.spool, 1)
    assert done == total > 2 + 2 * len(stats), (
        "passes through the model, one without gradients but for a step"
    )
    kept_alive = make_request(batch, base=Path(first.staging_dir), rank_weights=(1, 1, 1))
    ask([node], 2, kept_alive)
    uneven = make_request(batch, rank_weights=(2, 1, 1))
    ask([node], 5, uneven)  # goes back to the base; numbers may skip
    for request in (first, uneven):
        for name, tensor in weights(request).items():
            torch.testing.assert_close(tensor, alone.parameters[name].detach(), rtol=0, atol=1e-5)
        assert result_of(request).metrics["loss"] == pytest.approx(
            sum(s.loss * s.trained_tokens for s in stats) / batch.loss_mask.sum(), abs=1e-5
        )
        assert 0 < result_of(request).metrics["checkpoint_seconds"] < 60
    assert node.output().count("step 1/3 | loss ") == 3
    assert {line.split(" ")[0] for line in node.output().split("\n")} == {"", "step", "[trainer]"}
    assert node.output().count("rows hold several sequences") == node.output().count("[trainer]") == 2
    assert len(node.groups()) == 3
    node.kill()

    # The second phase again, in a job launched for it over two nodes with as many ranks.
    port = unused_port()
    nodes = [start_node(2, port, 2, 0), start_node(1, port, 2, 1)]
    relaunched = make_request(batch, base=Path(first.staging_dir), rank_weights=(1, 1, 1))
    for node in nodes:
        (node.spool / "copy").mkdir()
        copying = relaunched.model_copy(update={"ahead": True, "copy_dir": str(node.spool / "copy")})
        launch.submit(node.spool, 1, copying)
    for node in nodes:
        node.wait_outcome(1)
        model = {name: facts for name, facts in result_of(relaunched).files.items() if "/" not in name}
        assert launch.copied(node.spool, 1, node.processes) == model == checksums(node.spool / "copy")
    assert result_of(relaunched).policy == result_of(kept_alive).policy
    assert result_of(relaunched).optimizer_step == 6

    # A rank that fails takes the job with it: the second node does not see the batch.
    broken = make_request(batch, rank_weights=(1, 1, 1))
    missing = broken.model_copy(update={"batch_file": "/nonexistent/batch.safetensors"})
    launch.submit(nodes[0].spool, 2, broken)
    launch.submit(nodes[1].spool, 2, missing)
    assert nodes[1].agent.wait(JOB_TIMEOUT_S) != 0
    assert nodes[0].agent.wait(JOB_TIMEOUT_S) != 0
    with pytest.raises(
        launch.TrainerFailed, match=r"local rank 0: Traceback[^$]*/nonexistent/batch.safetensors"
    ):
        launch.outcome(nodes[1].spool, 2, 1)
    assert not list(Path(broken.staging_dir).iterdir())
    assert not any(group_members(group) for node in nodes for group in node.groups())


def test_two_ranks_of_a_node_share_each_sequence(
    start_node: StartNode, make_request: MakeRequest, batch: Batch, base_dir: Path, settings: TrainerSettings
) -> None:
    alone = build_learner(base_dir, torch.device("cpu"), settings)
    stats = train(alone, batch, settings, max_tokens=32, report=lambda line: None)
    node = start_node(2)
    shared = settings.model_copy(update={"context_parallel": 2})
    request = make_request(batch, rank_weights=(1, 1)).model_copy(update={"settings": shared})
    ask([node], 1, request)
    for name, tensor in weights(request).items():
        torch.testing.assert_close(tensor, alone.parameters[name].detach(), rtol=0, atol=1e-5)
    loss = sum(s.loss * s.trained_tokens for s in stats) / batch.loss_mask.sum()
    assert result_of(request).metrics["loss"] == pytest.approx(loss, abs=1e-6)


def test_only_the_first_rank_of_a_node_is_profiled_and_only_where_a_step_is_taken(
    start_node: StartNode, make_request: MakeRequest, batch: Batch, tmp_path: Path
) -> None:
    still = replace(batch, advantages=np.zeros_like(batch.advantages))
    node, place = start_node(2), tmp_path / "profile.i000001.0badcafe"
    for number, sequences in enumerate([still, batch], start=1):
        request = make_request(sequences, rank_weights=(1, 1))
        ask([node], number, request.model_copy(update={"profile": f"{place}.{number}"}))
    made = {path.name.removeprefix(place.name): path.read_bytes() for path in tmp_path.glob(f"{place.name}*")}
    assert sorted(made) == [".1.txt", ".2.json.gz", ".2.txt"]
    assert b"took no step: no group had an advantage" in made[".1.txt"] and b"aten::" in made[".2.txt"]


def test_spool_does_not_grow_with_the_number_of_requests(
    tmp_path: Path, make_request: MakeRequest, batch: Batch
) -> None:
    (spool := tmp_path / "spool").mkdir()
    request, sizes = make_request(batch), list[int]()
    for number in range(1, 1002):
        launch.submit(spool, number, request)
        launch.report_progress(spool, number, 1, 2)
        for local_rank in range(2):
            launch.report_copied(spool, number, local_rank, {})
            launch.report_done(spool, number, local_rank)
        assert launch.outcome(spool, number, 2) == "done"
        sizes.append(len(os.listdir(spool)))
    assert set(sizes) == {6}
    assert launch.next_request(spool, 1000)[0] == 1001


def test_request_that_the_ranks_do_not_share_is_refused_by_all(
    start_node: StartNode, make_request: MakeRequest, batch: Batch
) -> None:
    port = unused_port()
    nodes = [start_node(1, port, 2, 0), start_node(1, port, 2, 1)]
    request = make_request(batch, rank_weights=(1, 1))
    launch.submit(nodes[0].spool, 1, request)
    launch.submit(nodes[1].spool, 1, request.model_copy(update={"iteration": 7}))
    for node in nodes:
        assert node.agent.wait(JOB_TIMEOUT_S) != 0
        with pytest.raises(launch.TrainerFailed, match="asked for different phases"):
            launch.outcome(node.spool, 1, 1)


def test_no_process_is_left_when_the_agent_is_killed_and_the_named_groups_too(start_node: StartNode) -> None:
    node = start_node(2)
    groups = node.wait_groups(2)
    assert all(group_members(group) for group in groups)
    os.kill(node.agent.pid, signal.SIGKILL)
    node.agent.wait(JOB_TIMEOUT_S)
    for group in groups:
        if group_members(group):
            os.killpg(group, signal.SIGKILL)
    wait_until(lambda: not any(group_members(group) for group in groups))


def test_job_that_its_node_ends_says_so_in_one_line(start_node: StartNode) -> None:
    node = start_node(1)
    node.wait_groups(1)
    wait_until(lambda: catches(node.agent.pid, signal.SIGTERM))
    os.kill(node.agent.pid, signal.SIGTERM)
    assert node.agent.wait(JOB_TIMEOUT_S) == 128 + signal.SIGTERM
    assert node.output().splitlines()[-1:] == ["[trainer] its node has ended the job (SIGTERM)"]
    assert "Traceback" not in node.output() and "closing signal" not in node.output()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def is_told(spool: Path) -> bool:
    """Whether a rank has said why it failed; a temporary has no content yet."""
    return any(name.startswith("failed_") and not name.endswith(".tmp") for name in os.listdir(spool))


PATIENCE_S = 10.0
"""Two ranks that import torch on busy cores may come seconds apart."""


@pytest.fixture
def hanging_staging(start_node: StartNode, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Make a staging directory on a mount that hangs; it ends before the nodes, whose ranks can die then."""
    with contextlib.ExitStack() as mounts:

        def make() -> str:
            if reason := unavailable():
                pytest.skip(reason)
            shared = mounts.enter_context(FaultFs(tmp_path / "fs", 1))
            (shared.backing / "staging").mkdir()
            shared.freeze()
            return str(shared[0].path / "staging")

        yield make


@pytest.mark.parametrize("hangs_in", ["starting", "training", "writing"])
def test_rank_that_hangs_is_a_lost_peer_of_the_others_in_time(
    start_node: StartNode,
    make_request: MakeRequest,
    batch: Batch,
    hanging_staging: Callable[[], str],
    hangs_in: str,
) -> None:
    port = unused_port()
    nodes = [start_node(1, port, 2, place, collective_timeout_s=PATIENCE_S) for place in range(2)]
    hanging, waiting = nodes
    (group,) = hanging.wait_groups(1)
    request = make_request(batch, rank_weights=(1, 1))
    if hangs_in == "writing":
        request = request.model_copy(update={"staging_dir": hanging_staging()})
    if hangs_in == "training":  # long enough to stop it there
        settings = request.settings.model_copy(update={"global_batch_size": 1})
        request = request.model_copy(update={"settings": settings})
    if hangs_in == "starting":
        os.killpg(group, signal.SIGSTOP)
    for node in nodes:
        launch.submit(node.spool, 1, request)
    if hangs_in == "training":
        wait_until(lambda: launch.progress(hanging.spool, 1)[0] > 2, JOB_TIMEOUT_S)
        os.killpg(group, signal.SIGSTOP)
    if hangs_in == "writing":
        wait_until(lambda: launch.progress(waiting.spool, 1)[0] > 2, JOB_TIMEOUT_S)
    if hangs_in == "starting":
        waiting.wait_groups(1)

    # gloo's limit, and time to import torch where that comes before it
    wait_until(lambda: is_told(waiting.spool), 10 * PATIENCE_S)
    with pytest.raises(launch.TrainerFailed, match=r"PeerLost: a peer is lost: .*10000 ?ms"):
        launch.outcome(waiting.spool, 1, 1)
    assert waiting.agent.wait(JOB_TIMEOUT_S) != 0
    assert launch.outcome(hanging.spool, 1, 1) is None, "it hangs, and only its node can end it"
    assert hanging.agent.poll() is None
    done, total = launch.progress(hanging.spool, 1)
    assert done < total or hangs_in == "starting"


def test_progress_is_the_newest_line_that_is_whole(tmp_path: Path) -> None:
    assert launch.progress(tmp_path, 1) == (0, 0)
    launch.report_progress(tmp_path, 1, 0, 12)
    launch.report_progress(tmp_path, 1, 9, 12)
    with (tmp_path / "progress_000001").open("a") as stream:
        stream.write("1")  # of 10 12
        stream.flush()
        assert launch.progress(tmp_path, 1) == (9, 12)


def test_job_says_who_did_not_come(start_node: StartNode) -> None:
    node = start_node(1, unused_port(), 3, 0, ranks=(0, 2, 5), start_timeout_s=1.0)
    assert node.agent.wait(JOB_TIMEOUT_S) != 0
    assert "rank 2, rank 5 did not come to the training job" in node.output().splitlines()[-1]
    port = unused_port()
    node = start_node(1, port, 2, 1, start_timeout_s=1.0)
    assert node.agent.wait(JOB_TIMEOUT_S) != 0
    assert f"rank 0 did not open 127.0.0.1:{port} for training" in node.output().splitlines()[-1]


def test_job_says_that_its_port_was_taken_meanwhile(start_node: StartNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        node = start_node(1, port)
        assert node.agent.wait(JOB_TIMEOUT_S) != 0
        assert f"cannot listen on 127.0.0.1:{port} for training" in node.output().splitlines()[-1]


WATCHED = """
import sys, threading
from pathlib import Path
from trainer.job import launch
launch.watch(Path(sys.argv[1]))
print(flush=True)
threading.Event().wait(60)
"""


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    path = tmp_path / "spool"
    (path / "pgid").mkdir(parents=True)
    return path


def test_trainer_exits_when_the_spool_vanishes(spool: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WATCHED, spool], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        (spool / "pgid").rmdir()
        spool.rmdir()
        assert trainer.wait(60) == 1


def test_trainer_exits_when_torchrun_is_gone(spool: Path) -> None:
    agent_code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True).wait()"
    trainer = [
        "/bin/sh",
        "-c",
        launch.LAUNCHER,
        str(spool / "pgid"),
        sys.executable,
        "-c",
        WATCHED,
        str(spool),
    ]
    command = [sys.executable, "-c", agent_code, *trainer]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        (group,) = [int(name) for name in os.listdir(spool / "pgid")]
        assert group_members(group)
        agent.kill()
        wait_until(lambda: not group_members(group))


def test_program_without_a_spool_does_not_start(tmp_path: Path) -> None:
    command = ["/bin/sh", "-c", launch.LAUNCHER, str(tmp_path / "pgid"), "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == ""


def test_outcome_waits_for_every_rank_and_reports_any_failure(spool: Path) -> None:
    launch.report_done(spool, 1, 0)
    assert launch.outcome(spool, 1, 2) is None
    launch.report_done(spool, 1, 1)
    assert launch.outcome(spool, 1, 2) == "done"
    assert launch.outcome(spool, 2, 2) is None
    launch.report_failure(spool, 2, 1, "Traceback: no memory")
    with pytest.raises(launch.TrainerFailed, match="local rank 1: Traceback: no memory") as failed:
        launch.outcome(spool, 2, 2)
    assert not failed.value.comes_again
    launch.report_failure(spool, 2, 0, "Traceback: no such layout", comes_again=True)
    with pytest.raises(launch.TrainerFailed, match="local rank 0: Traceback: no such layout") as failed:
        launch.outcome(spool, 2, 2)
    assert failed.value.comes_again


def test_requests_are_served_in_order_and_once(spool: Path, make_request: MakeRequest, batch: Batch) -> None:
    request = make_request(batch)
    launch.submit(spool, 3, request)
    launch.submit(spool, 2, request)
    (spool / "request_000001.json.tmp").write_bytes(b"{")
    number, data = launch.next_request(spool, 0)
    assert number == 2
    assert TrainRequest.from_json(data) == request
    assert launch.next_request(spool, 2)[0] == 3


@pytest.mark.parametrize(
    "change", [{"rank_weights": []}, {"rank_weights": [1, 0]}, {"max_tokens": 0}, {"more": 1}]
)
def test_request_with_a_bad_value_is_damaged(
    make_request: MakeRequest, batch: Batch, change: dict[str, object]
) -> None:
    document = json.loads(make_request(batch).to_json())
    assert TrainRequest.from_json(json.dumps(document).encode())
    with pytest.raises(DamagedDocument, match="not a TrainRequest"):
        TrainRequest.from_json(json.dumps(document | change).encode())


def test_torch_free_modules_import_neither_torch_nor_transformers() -> None:
    names = ("batch.advantages", "batch.batch", "batch.packing", "job.launch", "documents", "settings")
    code = (
        f"import sys, {', '.join(f'trainer.{name}' for name in names)}; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")
