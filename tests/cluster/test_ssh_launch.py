"""`run launch` over ssh: a real sshd on loopback addresses, which are as many hosts."""

import getpass
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from coordinator.console.commands import launch as launch_module
from coordinator.console.commands.launch_ssh import launch_ssh
from tests.bash import READY_TO_WAIT, WAIT
from tests.cluster.launchers import Launcher, text, until
from tests.ports import unused_port

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
CHROOT = Path("/run/sshd")
"""An empty directory that sshd wants to see if root starts it; Debian's service makes it at every boot."""


def unavailable() -> str | None:
    """Why there is no sshd for these tests, if so."""
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "needs sshd, ssh and ssh-keygen (Debian: openssh-server, openssh-client)"
    if not sys.platform.startswith("linux"):
        return "needs loopback addresses beside 127.0.0.1"
    return None


pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command of a client that an sshd of our own lets in, on all HOSTS; all its files are temporary."""
    place = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / key)]
        subprocess.run(command, check=True, timeout=30)
    port = unused_port()
    config = [
        f"Port {port}",
        *(f"ListenAddress {host}" for host in HOSTS),
        f"HostKey {place}/host",
        f"AuthorizedKeysFile {place}/user.pub",
        *("PidFile none", "StrictModes no", "UsePAM no", "PasswordAuthentication no", "PermitRootLogin yes"),
    ]
    (place / "config").write_text("\n".join(config) + "\n")
    public = (place / "host.pub").read_text()
    (place / "known_hosts").write_text("".join(f"[{host}]:{port} {public}" for host in HOSTS))
    if os.getuid() == 0:
        CHROOT.mkdir(mode=0o755, exist_ok=True)
    server = subprocess.Popen(
        [str(SSHD), "-D", "-f", str(place / "config"), "-E", str(place / "log")], start_new_session=True
    )
    client = ["ssh", "-F", "none", "-p", str(port), "-i", str(place / "user"), "-l", getpass.getuser()]
    client += ["-o", f"UserKnownHostsFile={place}/known_hosts", "-o", "StrictHostKeyChecking=yes"]
    try:
        until(lambda: "Server listening" in text(place / "log"), lambda: "no sshd: " + text(place / "log"))
        yield shlex.join(client)
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def launch(ssh: str, tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """Starts launchers; whatever is left of them at the end fails the test."""
    started: list[Launcher] = []

    def start(hosts: str, *words: str) -> Launcher:
        started.append(Launcher(tmp_path, f"said-{len(started)}", "--hosts", hosts, "--ssh", ssh, *words))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()
        launcher.check_nothing_is_left(30.0)


SETTINGS = (
    *("--rl-phase", "rollout", "--rollout-split", "train-only"),
    *("rollout.tasks_per_iteration=6", "rollout.samples_per_task=2", "rollout.max_tokens=4"),
    *("cluster.beat_s=0.3", "cluster.node_timeout_s=15"),
)
"""Settings of a run that takes seconds."""


def test_interrupt_ends_all_nodes_and_the_same_command_resumes(
    launch: Callable[..., Launcher], engine_url: str, random_model: Path
) -> None:
    words = (",".join(HOSTS), *SETTINGS, "--engine-url", engine_url, "--model", str(random_model))
    first = launch(*words)
    first.until(lambda: len(first.metrics()) > 1)
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130, first.said
    first.check_nothing_is_left()
    for rank, host in enumerate(HOSTS):
        assert f"[rank {rank}] 3 nodes take part (cluster epoch 2)" in first.said, first.said
        assert f"[rank {rank}, {host}]" not in first.said, "the nodes' lines say themselves whose they are"
    assert "rank 0 (" in first.said and "was interrupted by SIGINT" in first.said

    done = len(first.metrics())
    second = launch(*words, "--iterations", str(done + 1))
    assert second.wait() == 0, second.said
    second.check_nothing_is_left()
    assert [line["iteration"] for line in second.metrics()] == list(range(1, done + 2))


WAITS = f"#!/bin/bash\n{READY_TO_WAIT}echo \"$1 runs as $$\"; trap 'echo got TERM; exit 130' TERM\n{WAIT}"


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    """A program in place of `run`: it says that it runs, and ends at SIGTERM."""
    program = tmp_path / "waits"
    program.write_text(WAITS)
    program.chmod(0o755)
    return program


def test_nothing_outlives_a_launcher_that_is_killed(launch: Callable[..., Launcher], waiting: Path) -> None:
    launcher = launch(",".join(HOSTS), "--run", str(waiting))
    launcher.until(lambda: launcher.said.count(" runs as ") == 3)
    assert "[rank 0, 127.0.0.1] --master runs as" in launcher.said
    assert launcher.said.count("] --worker runs as") == 2
    launcher.process.kill()
    launcher.process.wait()
    launcher.check_nothing_is_left()


def test_node_whose_ssh_is_killed_ends(launch: Callable[..., Launcher], waiting: Path) -> None:
    launcher = launch("127.0.0.1,127.0.0.2", "--run", str(waiting))
    launcher.until(lambda: launcher.said.count(" runs as ") == 2)
    pid = int(re.findall(r"--worker runs as (\d+)", launcher.said)[0])
    (client,) = [
        process
        for process in psutil.Process(launcher.process.pid).children()
        if HOSTS[1] in process.cmdline()
    ]
    client.kill()
    until(lambda: not psutil.pid_exists(pid), lambda: launcher.said)
    launcher.until(lambda: "rank 1, 127.0.0.2: was killed, or the connection is lost" in launcher.said)
    assert launcher.process.poll() is None, "the others may hold for it"
    launcher.process.send_signal(signal.SIGINT)
    launcher.until(lambda: "interrupted: " in launcher.said)  # two at once may be one to a busy process
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 3, launcher.said


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For `run launch` in this process: it takes over signals; the options are not what is tested."""
    monkeypatch.setattr(launch_module, "_understood", lambda *_: "")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("here")
def test_host_that_does_not_answer_is_named_and_no_node_is_started(
    ssh: str, waiting: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = "127.0.0.1,127.0.0.4,127.0.0.2"
    assert launch_ssh(hosts, tmp_path / "run", [], ssh, str(waiting)) == 3
    said = capfd.readouterr()
    refused, *rest = said.err.splitlines()
    assert re.fullmatch(
        r"run: rank 1, 127\.0\.0\.4: ssh: connect to host 127\.0\.0\.4 port \d+: Connection refused", refused
    )
    assert (rest, said.out) == (["run: no node was started"], "")


@pytest.mark.usefixtures("here")
def test_stranger_is_not_let_in_and_nobody_is_asked(
    ssh: str, waiting: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = shlex.split(ssh)[shlex.split(ssh).index("-i") + 1]
    stranger = ssh.replace(f"-i {key}", f"-i {key}.absent -o IdentitiesOnly=yes")
    assert launch_ssh("127.0.0.1", tmp_path / "run", [], stranger, str(waiting)) == 3
    said = capfd.readouterr()
    assert "Permission denied (publickey" in said.err and said.out == ""
