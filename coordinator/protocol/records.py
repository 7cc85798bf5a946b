"""Epoch records: who takes part in an epoch, under which settings, and how a number is claimed.

A record is claimed by creating the next number exclusively and reading back one's own token. The highest
record that parses is the current one. Everything in protocol/ carries its epoch, so nothing that an older
process still writes is taken for the living run's.
"""

import errno
import json
import logging
import secrets
import socket
import time
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from coordinator.directory import published
from coordinator.directory.file_names import Flag, Record
from coordinator.directory.layout import MASTER, RunDir
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.snapshot import parse
from rollout.origin import Code
from rollout.storage import files, once
from rollout.storage.retry import CACHED_S, SharedFsError

log = logging.getLogger(__name__)

LOOK_S = 0.5


class Member(BaseModel):
    """A node as an epoch record lists it."""

    model_config = ConfigDict(frozen=True)

    incarnation: int
    host: str
    address: str
    """Where its peers reach it."""
    processes: int
    """Training processes on it: its GPUs, or one."""
    weight: float
    """Its share of the training tokens, and of the groups where nodes do not claim them."""
    gpu_bytes: float | None = None
    """The memory of its smallest GPU, if it says so."""
    host_bytes: float = 0.0
    """The memory of its machine."""


class GivenSettings(BaseModel):
    """What the starts of a run were given so far, the last one counting: settings that stay as they are."""

    model_config = ConfigDict(frozen=True)

    host: str
    """The master's host at the last start: what says something of one machine says it of this one."""
    settings: dict[str, Any]
    """By dotted name, as it was typed; a setting that nobody gave is not in it."""


class EpochRecord(BaseModel):
    """The content of `eNNNN.epoch.json`."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    kind: Literal["lobby", "full", "finished", "moved"]
    """`moved`: the devices of the run are placed anew, and its nodes are in other crews now."""
    token: str
    """Made by the claimant: a process that reads its own token back has won."""
    run_id: str
    master_incarnation: int
    master_host: str
    settings: dict[str, Any]
    """The run's settings; a crew goes by them as RunSettings.of_crew says."""
    given: GivenSettings | None = None
    inputs: dict[str, Code] = {}
    """What the master has loaded behind the names of settings, by setting: all nodes must have the same."""
    members: dict[int, Member]


def new_token() -> str:
    """Return a token that no other claimant has."""
    return secrets.token_hex(8)


def claim(run_dir: RunDir, record: EpochRecord) -> bool:
    """Return whether `record` is now the newest; False if somebody else's is that of its epoch, or of a later
    one.

    Old records are removed: a process that was suspended could otherwise win a number that is long over.
    """
    if not once.create_once(run_dir.entry(Record(record.epoch)), record.model_dump_json().encode()):
        return False
    return max(parse(files.listing(run_dir.master)).records, default=0) <= record.epoch


def claim_stopped(run_dir: RunDir, run_id: str, newest: EpochRecord | None, number: int, text: str) -> bool:
    """Claim epoch `number`, which has no nodes, and say there that the run is stopped; `text` says why. It
    has the settings of `newest`. Returns False if somebody else has claimed it.
    """
    host = socket.gethostname()
    record = EpochRecord(
        epoch=number,
        kind="lobby",
        token=new_token(),
        run_id=run_id,
        master_incarnation=0,  # no process has it, so the old master is superseded
        master_host=host,
        settings=newest.settings if newest else {},
        given=newest.given if newest else None,
        members={},
    )
    if not claim(run_dir, record):
        return False
    flag = Flag(number, 0, 0, MASTER, "stopped")
    files.publish(run_dir.entry(flag), json.dumps({"text": text, "host": host}).encode())
    return True


def move_away(run_dir: RunDir) -> None:
    """Tell the nodes of a crew that the devices of the run are placed anew, if there ever were any. Raises
    SharedFsError if a number stays taken that no listing shows.
    """
    until_s = time.monotonic() + CACHED_S
    while newest := Records(run_dir).newest(parse(published.names(run_dir.master)).records):
        if newest.kind == "moved":
            return
        now: dict[str, Any] = {"epoch": newest.epoch + 1, "kind": "moved", "token": new_token()}
        if claim(run_dir, newest.model_copy(update={**now, "members": {}})):
            return
        if time.monotonic() > until_s:
            text = "this number is taken, and no listing shows by whom; run doctor there says what is wrong"
            error = FileExistsError(errno.EEXIST, text)
            raise SharedFsError("create", run_dir.entry(Record(newest.epoch + 1)), error, CACHED_S)
        log.info("epoch %d is taken: looking again", newest.epoch + 1)
        time.sleep(LOOK_S)


class Records:
    """Epoch records as read; they are immutable, so each is read once.

    Of a directory in which another run was begun, under nodes that still work for the one before, only the
    records of `run_id` count.
    """

    def __init__(self, run_dir: RunDir, run_id: str | None = None) -> None:
        self._run_dir = run_dir
        self._run_id = run_id
        self._known: dict[int, EpochRecord] = {}
        self.is_replaced = False
        """Whether another run is in the directory now."""

    def newest(self, numbers: Iterable[int], wait: bool = True) -> EpochRecord | None:
        """Return the highest of `numbers` whose record parses; an unreadable one is skipped. Raises Ended if
        run.json says that another run is there now.

        `wait=False`, for the thread that beats: one that is listed but denied is skipped too, until the next
        look.
        """
        for number in sorted(numbers, reverse=True):
            record = self._known.get(number) or self._read(number, wait)
            if record is not None and self._run_id not in {None, record.run_id}:
                self._refuse_other_run()
            elif record is not None:
                return record
        return None

    def _read(self, number: int, wait: bool) -> EpochRecord | None:
        try:
            data = files.read(self._run_dir.entry(Record(number)), fleeting=not wait)
            record = EpochRecord.model_validate_json(data)
        except (FileNotFoundError, ValidationError):
            return None
        self._known[number] = record
        return record

    def _refuse_other_run(self) -> None:
        run_id = (published.read_json(self._run_dir.run_json) or {}).get("run_id")
        self.is_replaced = run_id not in {None, self._run_id}
        if self.is_replaced:
            text = (
                f"{self._run_dir.root} is of another run now ({run_id}; this node works for {self._run_id})"
            )
            cure = "its directory was moved or removed: give its new place as --log-path"
            raise NodeEnded(Exit.FAILED, f"{text}: {cure}")
