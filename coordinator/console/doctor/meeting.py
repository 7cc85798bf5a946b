"""The meeting of the nodes of `run doctor --peers N`: through files, in a directory beside those of the run.

    <log-path>/doctor/
      0f3da7c1.work/                  only for rank 0
      5d0c41f2.open                   rank 0 holds session 5d0c41f2
      5d0c41f2.r0001.9a07b3e8.hello   a process of rank 1 has come, and describes itself
      5d0c41f2.s0004                  step 4 of rank 0: what all nodes do now
      5d0c41f2.s0004.r0001            rank 1 has done step 4: its answer
      5d0c41f2.r0001.work/            only for rank 1
      5d0c41f2.claim017               a name that all nodes try to create at once

The first step lists the members by the tokens of their hellos. So no node takes part in a session that died
long ago, even if a stale listing shows it. Files are whole and written once; rank 0 removes them at the end.
"""

import contextlib
import errno
import json
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.directory import published
from coordinator.directory.layout import MASTER
from coordinator.journal.events import versions
from coordinator.machine import network
from coordinator.machine.gpus import count_gpus
from coordinator.protocol.fresh_listing import FreshListing
from coordinator.start.wait_for_master import patience
from rollout.storage import files

STEP_S = 240.0
"""How long a step may take: a listing may be 60 s old on the way there and on the way back."""
PAUSE_S = 0.001
"""The shortest pause between two looks; the measured delays must not be that of the looking."""
WORK = ".work"
"""The end of the name of a directory for one process."""


class DoctorError(RuntimeError):
    """The nodes did not meet; the text says who is missing, and what to type where."""


@dataclass(frozen=True)
class Answer:
    """What a rank did at a step, and when this node saw it, by its monotonic and its wall clock."""

    result: dict[str, Any]
    seen_s: float
    seen_at: float


def doctor_directory(root: Path) -> Path:
    """Return the directory in which all doctors of a run directory work."""
    return root / "doctor"


def whoami() -> dict[str, Any]:
    """Describe this node: token, host, addresses, versions, number of GPUs."""
    return {
        "token": secrets.token_hex(4),
        "host": socket.gethostname(),
        "peer": network.this_peer().to_dict(),
        "versions": versions(),
        "gpus": count_gpus(),
    }


def say(path: Path, document: Mapping[str, Any]) -> None:
    """Publish a document of the meeting."""
    files.publish(path, json.dumps(document).encode(), durable=False)


def hear(path: Path) -> dict[str, Any] | None:
    """Read a document that a listing has shown; None while it cannot be read whole."""
    try:
        return json.loads(files.read(path, fleeting=True))
    except (FileNotFoundError, ValueError):
        return None


class Host:
    """Rank 0's side: opens a session, admits workers, and lets all nodes do the same steps."""

    def __init__(self, directory: Path, nodes: int) -> None:
        self._directory = directory
        self.listings = FreshListing(MASTER)
        self._session = secrets.token_hex(4)
        self._expected = set(range(1, nodes))
        self._step = 0
        self.members: dict[int, dict[str, Any]] = {MASTER: whoami()}
        """By rank, how each node that came describes itself."""
        self.lost: dict[int, str] = {}
        """By rank, the step that a node did not answer."""
        say(directory / f"{self._session}.open", {})

    def absent(self) -> set[int]:
        """Look for nodes that have come; return the ranks that have not."""
        for name in self.listings.names(self._directory):
            rank = _rank_of_hello(name, self._session)
            if rank in self._expected and (member := hear(self._directory / name)):
                self.members[rank] = member
        return self._expected - self.members.keys()

    def gather(self, limit_s: float) -> set[int]:
        """Wait until all have come, at most `limit_s`, and begin; return the ranks that are missing."""
        for _ in patience(limit_s, PAUSE_S):
            if not self.absent():
                break
        self._begin("members", {"members": {rank: member["token"] for rank, member in self.members.items()}})
        return self._expected - self.members.keys()

    def step(
        self, do: str, arguments: Mapping[str, Any] | None = None, meanwhile: Callable[[], Any] = lambda: None
    ) -> dict[int, Answer]:
        """Let all members do `do`, and this node `own()` meanwhile; return the answers.

        A rank that does not answer within `STEP_S` is `lost`, and no later step waits for it.
        """
        self._begin(do, arguments or {})
        meanwhile()
        answers: dict[int, Answer] = {}
        awaited = self.members.keys() - {MASTER}
        for _ in patience(STEP_S, PAUSE_S):
            names = self.listings.names(self._directory)
            for rank in awaited - answers.keys():
                name = f"{self._session}.s{self._step:04d}.r{rank:04d}"
                if name in names and (content := hear(self._directory / name)) is not None:
                    answers[rank] = Answer(content, time.monotonic(), time.time())
            if awaited == answers.keys():
                break
        for rank in awaited - answers.keys():
            self.lost[rank] = do
            del self.members[rank]
        return answers

    def close(self) -> None:
        """Remove the files of the session; a node that still waits in it sees that it is over."""
        for name in published.names(self._directory):
            if name.startswith((f"{self._session}.", f".{self._session}.")):
                files.remove_any(self._directory / name)

    def claim_path(self, number: int) -> str:
        """Return a path that all members create at once."""
        return str(self._directory / f"{self._session}.claim{number:03d}")

    def _begin(self, do: str, arguments: Mapping[str, Any]) -> None:
        self._step += 1
        say(self._directory / f"{self._session}.s{self._step:04d}", {"do": do, **arguments})
        self.listings.forget()


def _rank_of_hello(name: str, session: str) -> int | None:
    """Return the rank of a hello of `session`; None for another file."""
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != session or parts[3] != "hello":
        return None
    return int(parts[1][1:]) if parts[1][1:].isdecimal() else None


class DoctorGuest:
    """A worker's side: says hello to every open session, and follows the one that admits it."""

    def __init__(self, root: Path, rank: int) -> None:
        self._root = root
        self._directory = doctor_directory(root)
        self._rank = rank
        self.listings = FreshListing(rank)
        self._me = whoami()
        self._came_s = time.monotonic()
        self._session = ""
        self._step = 1

    @property
    def token(self) -> str:
        """Names this process."""
        return self._me["token"]

    def join(self, limit_s: float, first: str) -> None:
        """Wait for rank 0, and until it admits this node; `first` is what to type on rank 0.

        DoctorError after `limit_s` without rank 0, or when it goes on without this node.
        """
        greeted: set[str] = set()
        for _ in patience(limit_s + STEP_S, PAUSE_S):
            names = self._names()
            greeted |= {self._greet(session) for session in _open_sessions(names) - greeted}
            for session in greeted:
                begun = self._hear_listed(f"{session}.s0001", names)
                if begun and begun["members"].get(str(self._rank)) == self._me["token"]:
                    self._session = session
                    return
            if not greeted and time.monotonic() > self._came_s + limit_s:
                break
        raise DoctorError(
            f"rank 0 has not admitted rank {self._rank}; on the first node type: {first} (if it runs there, "
            f"{self._root} is not the same directory on both nodes, or listings are outdated for longer)"
        )

    def steps(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each step's name and arguments; `answer` it before the next. DoctorError if rank 0 is
        gone."""
        while True:
            self._step += 1
            for _ in patience(2 * STEP_S, PAUSE_S):
                names = self._names()
                step = self._hear_listed(f"{self._session}.s{self._step:04d}", names)
                if step is not None:
                    break
                if self._session not in _open_sessions(names):
                    raise DoctorError("rank 0 has ended its doctor; see its terminal")
            else:
                raise DoctorError(f"rank 0 has said nothing for {2 * STEP_S:.0f} s; see its terminal")
            yield step.pop("do"), step

    def work_directory(self) -> Path:
        """Return a directory only for this process; rank 0 removes it if this process is killed."""
        return self._directory / f"{self._session}.r{self._rank:04d}{WORK}"

    def answer(self, result: Mapping[str, Any]) -> None:
        """Say what this node has done at the step."""
        say(self._directory / f"{self._session}.s{self._step:04d}.r{self._rank:04d}", result)
        self.listings.forget()

    def _greet(self, session: str) -> str:
        name = f"{session}.r{self._rank:04d}.{self._me['token']}.hello"
        try:
            say(self._directory / name, self._me)
        except files.SharedFsError as error:
            if error.errno != errno.ENOENT:  # else the session had ended before
                raise
        return session

    def _hear_listed(self, name: str, names: Collection[str]) -> dict[str, Any] | None:
        return hear(self._directory / name) if name in names else None

    def _names(self) -> Collection[str]:
        """List the doctors' directory; nothing while it does not exist."""
        try:
            if self._session or self._directory.name in files.listing(self._root):
                return self.listings.names(self._directory)
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError):
                files.listing(self._root.parent)  # else "no such directory" may stay cached
        return ()


def _open_sessions(names: Collection[str]) -> set[str]:
    return {name.removesuffix(".open") for name in names if name.endswith(".open")}
