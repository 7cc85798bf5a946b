"""What starts the nodes of a job, and what cannot."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.console.server.launchers import Launcher
from coordinator.settings.tree import SettingsError

LAUNCHED = [
    (Launcher(), "-P -m coordinator.cli local --log-path /jobs/sums --iterations=3"),
    (Launcher("ssh", "a,b"), "-P -m coordinator.cli launch --hosts a,b --log-path /jobs/sums --iterations=3"),
    (
        Launcher("ray", address="ray://x:1"),
        "-P -m coordinator.cli launch --ray ray://x:1 --log-path /jobs/sums --iterations=3",
    ),
]


@pytest.mark.parametrize(("launcher", "expected"), LAUNCHED)
def test_each_launcher_has_a_command(launcher: Launcher, expected: str) -> None:
    command = launcher.command(Path("/jobs/sums"), ["--iterations=3"], Path("out"))
    assert " ".join(command[1:]) == expected and launcher.cancel(Path("/jobs/sums")) == []


def test_number_of_nodes_is_that_of_the_hosts() -> None:
    launcher = Launcher("ssh", "a,b")
    assert launcher.decided == ["--num-nodes", "2"]
    with pytest.raises(SettingsError, match="leave --num-nodes=3 out: the server has a node on each of a,b"):
        launcher.refuse(["--num-nodes=3"])
    Launcher().refuse(["--num-nodes=3"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("docker", ""), "--launcher docker: there is local, ssh, slurm, ray"),
        (("ssh", ""), "--hosts A,B,C go together"),
        (("local", "a"), "--hosts A,B,C go together"),
        (("slurm", "", Path("/no/script")), "/no/script"),
    ],
)
def test_launcher_that_cannot_work_is_refused(given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Launcher(*given)
