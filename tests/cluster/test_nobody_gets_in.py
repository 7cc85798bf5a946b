"""What a running cluster offers to others: sockets, file modes, names, words that a shell might take up."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.directory.file_names import Record, parse_claim_name, parse_protocol_name
from coordinator.directory.layout import RunDir
from coordinator.protocol.records import EpochRecord
from rollout.storage import files
from tests.cluster.cluster import FAST, Cluster
from tests.cluster.conftest import SEPARATE
from tests.cluster.intruder import NOBODY, gets_in, offered_by, spools
from tests.netns import Host, Hosts, unavailable

LISTENERS = """
import json, socket, time
import psutil
before, told = set(), set()
while True:
    now = set()
    for c in psutil.net_connections("inet"):
        if c.pid and (c.status == psutil.CONN_LISTEN or (c.type == socket.SOCK_DGRAM and not c.raddr)):
            try:
                words = psutil.Process(c.pid).cmdline()
            except psutil.NoSuchProcess:
                continue
            module = words[words.index("-m") + 1] if "-m" in words else " ".join(words)
            now.add((module, c.laddr.ip, c.laddr.port, c.type == socket.SOCK_DGRAM))
    for found in (now & before) - told:
        told.add(found)
        print(json.dumps(found), flush=True)
    before = now
    time.sleep(0.4)
"""
"""Prints the sockets of a network namespace that take what comes: module of the process, address, port, UDP.
They must have been seen twice: a process that is just being started still holds its parent's.
"""

UMASK = ("/bin/sh", "-c", 'umask 022 && exec "$@"', "sh")
"""Runs its arguments as a shell that lets everybody read."""

WORDS = 'it\'s "so" $(touch was_here) `touch was_here`; touch was_here & [a]* | #'
"""A user's text, harmless wherever nobody takes it for a command."""


class Listeners:
    """The sockets that were seen listening on a host."""

    def __init__(self, host: Host, log: Path) -> None:
        self.host = host
        self._log = log

    def found(self) -> list[tuple[str, str, int, bool]]:
        """Module of the process, address, port, whether UDP."""
        return [tuple(json.loads(line)) for line in self._log.read_text().splitlines()]

    def of(self, module: str) -> list[str]:
        """The addresses that processes of `python -m MODULE` were seen listening on, one for each port."""
        return [address for program, address, _port, _udp in self.found() if program == module]


@contextmanager
def listeners(hosts: Hosts, logs: Path) -> Iterator[list[Listeners]]:
    """Note what listens on each host for as long as the block lasts."""
    watchers: list[subprocess.Popen[bytes]] = []
    found: list[Listeners] = []
    try:
        for host in hosts:
            log = logs / f"listeners_{host.name}"
            with open(log, "wb") as file:
                watchers.append(subprocess.Popen(host.argv([sys.executable, "-c", LISTENERS]), stdout=file))
            found.append(Listeners(host, log))
        yield found
        assert all(watcher.poll() is None for watcher in watchers)
    finally:
        for watcher in watchers:
            watcher.kill()
            watcher.wait()


def check_modes(root: Path) -> int:
    """Fail on what others could read, the group write or anybody execute; the number of files. Some may be on
    their way.
    """
    count = 0
    for path in [root, *root.rglob("*")]:
        try:
            mode, is_dir = path.stat().st_mode & 0o7777, path.is_dir()
        except FileNotFoundError:
            continue
        assert mode in ({0o750} if is_dir else {0o640, 0o600}), f"{path} has mode {mode:o}"
        count += not is_dir
    return count


def is_known(path: Path, root: Path) -> bool:
    """Whether a file is one of those that the tree of docs/protocol.md names."""
    name = files.published_name(path.name)
    if path.parent == RunDir(root).claims:
        return parse_claim_name(name) is not None
    if path.parent in RunDir(root).protocol:
        return parse_protocol_name(path.name) is not None
    if path.name == "LATEST":
        return True
    return path.suffix in {".safetensors", ".json", ".jsonl", ".jinja", ".txt", ".log", ".png"}


def is_pickle(data: bytes) -> bool:
    """Whether data begins so. safetensors has the length of its header first, of any value, and then JSON."""
    return data[:2] == b"PK" or (data[:1] == b"\x80" and data[8:9] != b"{")


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@SEPARATE
def test_nodes_find_each_other_listen_to_their_peers_alone_and_keep_their_files_to_themselves(
    cluster: Cluster, tmp_path: Path
) -> None:
    with Hosts(2, decoy=True) as hosts, listeners(hosts, tmp_path) as seen:
        arguments = (*FAST, "--num-nodes", "2", "--rank-weights", "2,1")
        arguments += ("--iterations", "200", "--eval-interval", "1")
        for rank, host in enumerate(hosts):
            cluster.start(rank, *(() if rank else arguments), prefix=host.argv(UMASK))
        cluster.until(lambda: cluster.metrics(), "the first iteration", 240)
        assert check_modes(cluster.root) > 20
        # A watcher of a busy machine misses some iterations' trainers.
        cluster.until(
            lambda: seen[0].of("trainer.job.agent") and all(mine.of("trainer") for mine in seen),
            "the ranks of a training job",
            240,
        )
        cluster.kill(0, signal.SIGINT)
        assert cluster.wait() == [130, 130], cluster.everything_said()
        assert cluster.metrics()[0]["loss"] is not None
        record = EpochRecord.model_validate_json(cluster.run_dir.entry(Record(2)).read_bytes())
        assert [member.address for member in record.members.values()] == [host.address for host in hosts]

        for rank, host in enumerate(hosts):
            mine = seen[rank]
            assert mine.of("rollout.engines.embedded.server") == []
            assert set(mine.of("trainer.job.agent")) == ({host.address} if rank == 0 else set())
            assert set(mine.of("trainer")) == {host.address}, "gloo"
            others = {"trainer.job.agent", "trainer"}
            assert [line for line in mine.found() if line[0] not in others] == []
            assert not any(udp for *_, udp in mine.found())

    check_modes(cluster.root)
    written = [path for path in cluster.root.rglob("*") if path.is_file()]
    assert [path for path in written if not is_known(path, cluster.root)] == []
    # A pickle of protocol 2 or later, or a zip of them, as torch.save writes it.
    assert [path for path in written if is_pickle(path.read_bytes())] == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_machine_gets_into_no_socket_and_no_file(cache: Path, tmp_path: Path) -> None:
    place = Path(tempfile.mkdtemp(prefix="flagpost-open-"))
    place.chmod(0o755)  # pytest's own directories keep others out
    cluster = Cluster(place / "run", cache, tmp_path, separate=True)
    try:
        cluster.start(0, *FAST, "--iterations", "50", prefix=UMASK)
        cluster.until(lambda: cluster.metrics(), "the first iteration", 240)
        pid = cluster.nodes[0].pid
        files, sockets, ports = offered_by([pid], [cluster.root, *spools(pid)])
        assert len(files) > 20 and any("engine-1.sock" in path for path in sockets)
        assert gets_in(NOBODY, (files, sockets, ports)) == []
        assert {*sockets} <= {*map(str, gets_in(0, ([], sockets, [])))}, "the try itself works"
        cluster.kill(0, signal.SIGINT)
        assert cluster.wait() == [130], cluster.everything_said()
    finally:
        cluster.close()
        shutil.rmtree(place)


def test_users_text_reaches_no_shell_and_the_printed_command_is_quoted(
    tmp_path: Path, cache: Path, random_model: Path
) -> None:
    model = tmp_path / f"model {WORDS}"
    shutil.copytree(random_model, model)
    tasks = tmp_path / f"tasks {WORDS}.jsonl"
    prompts = [f"{number}+1= {WORDS} $(touch {tmp_path}/was_here)" for number in range(8)]
    tasks.write_text("".join(json.dumps({"prompt": text, "answer": WORDS}) + "\n" for text in prompts))
    cluster = Cluster(tmp_path / f"run {WORDS}", cache, tmp_path)
    try:
        arguments = (*FAST, "--model", str(model), "--tasks", str(tasks), "rollout.max_tokens=8")
        arguments += ("--num-nodes", "2", "--iterations", "2", "cluster.node_timeout_s=4")
        cluster.start(0, *arguments)
        cluster.start(1)
        cluster.until(lambda: cluster.metrics(), "the first iteration", 240)
        cluster.kill(1)
        cluster.nodes[1].wait()
        cluster.until(lambda: "run --worker 1 " in cluster.output(0), "the command that brings it back", 60)
        (line, *_) = [line for line in cluster.output(0).splitlines() if "run --worker 1 " in line]
        command = shlex.split("run --worker 1 " + line.partition("run --worker 1 ")[2])
        assert command[:5] == ["run", "--worker", "1", "--log-path", str(cluster.root)]
        cluster.start(1)
        assert cluster.wait() == [0, 0], cluster.everything_said()
        assert len(cluster.metrics()) == 2
    finally:
        cluster.close()
    assert not [*tmp_path.rglob("was_here*"), *Path.cwd().glob("was_here*")]
