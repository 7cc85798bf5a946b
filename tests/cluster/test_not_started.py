"""A worker that fails before it is in an epoch: the master, which waits for it, says why it does not come."""

import json
import socket
from pathlib import Path
from typing import Any

from tests.cluster.cluster import FAST, Cluster


def test_worker_that_lacks_a_module_is_named_by_the_master_and_in_the_status(
    cluster: Cluster, engine_url: str, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_rewards.py").write_text("def score(task, completion):\n    return 1.0\n")
    here = ("env", f"PYTHONPATH={tmp_path / 'code'}")
    given = (*FAST, "--rl-phase", "rollout", "--engine-url", engine_url, "--iterations", "1")
    cluster.start(0, *given, "--num-nodes", "2", "rollout.reward=my_rewards:score", prefix=here)
    assert cluster.start(1).wait(120) == 2
    cluster.until(lambda: "could not start" in cluster.output(0), "the master says it", 90)
    (line,) = [line for line in cluster.output(0).splitlines() if "could not start" in line]
    why = f"rank 1 ({socket.gethostname()}) could not start: "
    assert why in line and "No module named 'my_rewards'" in line
    assert line.endswith(f"Then, on that machine: run --worker 1 --log-path {cluster.root}")

    def held() -> dict[str, Any] | None:  # a heartbeat after it was said
        status = json.loads(cluster.command("status", "--json"))
        return status if (status["state"], status["waiting_for"]) == ("holding", [1]) else None

    status = cluster.until(held, "the status says whom it waits for")
    assert [why in node["error"] for node in status["nodes"]] == [False, True]
    assert "No module named 'my_rewards'" in cluster.command("status")

    cluster.start(1, prefix=here)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert not list(cluster.run_dir.workers.glob("*.not_started"))
