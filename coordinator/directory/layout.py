"""Build every path of a run directory, and say what is in it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from coordinator.directory.file_names import Beat, Flag, ProfileRequest, Record
from coordinator.settings.placement import Crew

FORMAT = 5
"""Version of this layout (not of the batch's file, which is trainer.batch's). A directory of another version
is refused: raise it when this version cannot go on with a run of before, or an older one would spoil a new
run; a file more, or a key with a default, is no new version."""

MASTER = 0
"""The master's rank."""

GUESTS = 1000
"""The rank of the first guest: a machine that is in no epoch, and makes groups when it likes."""

REMOVED = ".removed_"
"""Prefix of a checkpoint's name while it is being removed."""

GROUPS = "groups.jsonl"
"""The name of the file beside a manifest that holds its groups, for people."""

ROLLOUT_TIMES = "rollout_times.json"
"""The name of the file beside a manifest in which the rollout crew says how long it took."""

Kind = Literal["train", "eval"]


@dataclass(frozen=True)
class RunDir:
    """The directory of a run:

    <log-path>/
      run.json                    run id, format version, what may not change; made once
      protocol/placement.json     which devices generate and which train; devices/rank_0001.json: how many
                                  a machine has (both only where devices are placed)
      protocol/main/              small immutable files, by who writes them (two crews: rollout/, train/):
        master/                     all that a worker lists while it waits, however many workers there are
          e0002.epoch.json            epoch record: kind, master, settings, members
          e0002.r0000.n3.b000123      heartbeat 123 of incarnation 3 of the master
          e0002.i000005.p07.r0000.ok  flag: phase 7 is over (.ok.json: with a document; or .failed, .lost ...)
          profile.r0001.3f9c0a1b      `run profile` asks rank 1; it is there while that command waits
        workers/                    heartbeats and flags of the others, which the master lists
        claims/                     who makes which chunk of a rollout (directory.claims)
          e0002.i000005.p02.c000017
        guests/r1000.json           the name of the guest that has this rank; made once
      base_model/                 builtin:tiny, made by the master
      images/<sha256>             the pictures that samples show
      train_trajectories/iteration_000005/
        iteration.json              slots, sampling, reward, environment, policy; made once
        r0001.e0002.part0003.safetensors
        manifest.json               the parts that count; made once
        groups.jsonl                their groups, for people
        rollout_times.json          how long the rollout crew took, for the metrics line (two crews)
      eval_trajectories/iteration_000005/    the same, without iteration.json
      batches/iteration_000005/   batch.safetensors, batch.json; trained.json: how it was trained, where no
                                  trainer state was saved with the checkpoint
      checkpoints/iteration_000005/          Hugging Face files, trainer_state/, result.json
      checkpoints/LATEST          for people; the protocol lists
      trainer_states/iteration_000004.e0002/ those saved in the background (trainer.save_interval)
      metrics.jsonl   events/rank_0001.jsonl   logs/rank_0001/*.log (two crews: rollout_0001, train_0001)
    """

    root: Path
    crew: Crew = "main"
    machines: tuple[int, ...] = ()
    """The machine of each rank of the crew, as in --worker; empty: the same number."""

    def machine(self, rank: int) -> int:
        """Return the machine of a rank: what a person types after --worker."""
        return self.machines[rank] if rank < len(self.machines) else rank

    def rank(self, machine: int) -> int:
        """Return the rank of a machine, which is in the crew."""
        return self.machines.index(machine) if self.machines else machine

    def name(self, rank: int) -> str:
        """Return the name of a node for people: `rank 2`, or `train rank 2` where there are two crews."""
        return self.names([rank])

    def names(self, ranks: Iterable[int]) -> str:
        """Return the name of several nodes for people: `ranks 1, 2`, or `train ranks 2, 3`."""
        listed = sorted(self.machine(rank) for rank in ranks)
        crew = "" if self.crew == "main" else f"{self.crew} "
        kind = "guest" if listed and listed[0] >= GUESTS else f"{crew}rank"
        return f"{kind}{'s' if len(listed) != 1 else ''} {', '.join(map(str, listed))}"

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @cached_property  # it is asked for at each look
    def master(self) -> Path:
        return self.root / "protocol" / self.crew / "master"

    @cached_property  # it is asked for at each look
    def workers(self) -> Path:
        return self.root / "protocol" / self.crew / "workers"

    @property
    def protocol(self) -> tuple[Path, Path]:
        """The directories in which nodes say where they are and what they have done."""
        return self.workers, self.master

    @property
    def claims(self) -> Path:
        return self.root / "protocol" / self.crew / "claims"

    @property
    def guests(self) -> Path:
        return self.root / "protocol" / self.crew / "guests"

    def protocol_of(self, rank: int) -> Path:
        """Return the directory in which a rank writes its heartbeats and flags."""
        return self.master if rank == MASTER else self.workers

    def entry(self, entry: Beat | Flag | Record) -> Path:
        """Return the file that an entry of protocol/ names."""
        rank = MASTER if isinstance(entry, Record) else entry.rank
        return self.protocol_of(rank) / entry.name

    @property
    def base_model(self) -> Path:
        return self.root / "base_model"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def latest(self) -> Path:
        return self.checkpoints / "LATEST"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    def trajectories(self, kind: Kind, iteration: int) -> Path:
        return self.root / f"{kind}_trajectories" / f"iteration_{iteration:06d}"

    def iteration_json(self, iteration: int) -> Path:
        return self.trajectories("train", iteration) / "iteration.json"

    def manifest(self, kind: Kind, iteration: int) -> Path:
        return self.trajectories(kind, iteration) / "manifest.json"

    def groups(self, kind: Kind, iteration: int) -> Path:
        return self.trajectories(kind, iteration) / GROUPS

    def rollout_times(self, iteration: int) -> Path:
        return self.trajectories("train", iteration) / ROLLOUT_TIMES

    def batch(self, iteration: int) -> Path:
        return self.root / "batches" / f"iteration_{iteration:06d}"

    def trained(self, iteration: int) -> Path:
        return self.batch(iteration) / "trained.json"

    def checkpoint(self, iteration: int) -> Path:
        return self.checkpoints / f"iteration_{iteration:06d}"

    def staging(self, iteration: int, epoch: int) -> Path:
        return self.checkpoints / f".iteration_{iteration:06d}.e{epoch:04d}"

    @property
    def trainer_states(self) -> Path:
        return self.root / "trainer_states"

    def trainer_state(self, iteration: int, epoch: int) -> Path:
        return self.trainer_states / f"iteration_{iteration:06d}.e{epoch:04d}"

    def removed(self, iteration: int, epoch: int) -> Path:
        return self.checkpoints / f"{REMOVED}iteration_{iteration:06d}.e{epoch:04d}"

    def logs(self, rank: int) -> Path:
        return self.root / "logs" / self._node(rank)

    def profile(self, request: ProfileRequest, iteration: int) -> Path:
        """Return where the profile of an iteration is: `.json.gz` the trace, `.txt` what it shows."""
        return self.logs(request.rank) / f"profile.i{iteration:06d}.{request.token}"

    def events(self, rank: int) -> Path:
        return self.root / "events" / f"{self._node(rank)}.jsonl"

    def rank_of(self, name: str) -> int | None:
        """Return the rank whose logs and events have a name: `rank_0001`. None for any other name, and for a
        machine that is not in the crew.
        """
        number = name.rpartition("_")[2]
        if not (number.isascii() and number.isdecimal()):
            return None
        is_guest = int(number) >= GUESTS
        ranks = range(len(self.machines)) if self.machines and not is_guest else [int(number)]
        return next((rank for rank in ranks if self._node(rank) == name), None)

    def _node(self, rank: int) -> str:
        return f"{'rank' if self.crew == 'main' else self.crew}_{self.machine(rank):04d}"

    @property
    def fixed_directories(self) -> tuple[Path, ...]:
        """The directories that the master makes before it announces itself."""
        names = (
            "train_trajectories",
            "eval_trajectories",
            "batches",
            "checkpoints",
            "trainer_states",
            "events",
            "logs",
        )
        return (*(self.root / name for name in names), *self.protocol, self.claims)
