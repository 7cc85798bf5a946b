"""Build and parse the names by which nodes say what is what: heartbeats, flags, claims, records, parts."""

import re
from typing import Literal, NamedTuple, cast

OK, ENTER = "ok", "enter"
"""The kinds of a flag with which a phase is done, and an epoch entered."""
DOCUMENT = ".json"
"""What the kind of these ends in if the flag has a document. Else its file is empty. All others have one."""


class Beat(NamedTuple):
    """A heartbeat's name: beat `counter` of `incarnation` of `rank`, written in `epoch`."""

    epoch: int
    rank: int
    incarnation: int
    counter: int

    @property
    def name(self) -> str:
        return f"e{self.epoch:04d}.r{self.rank:04d}.n{self.incarnation}.b{self.counter:06d}"


class Flag(NamedTuple):
    """A flag's name: what `rank` says of a phase in `epoch`. `enter` has iteration 0 and phase 0."""

    epoch: int
    iteration: int
    phase: int
    rank: int
    kind: str

    @property
    def name(self) -> str:
        return f"e{self.epoch:04d}.i{self.iteration:06d}.p{self.phase:02d}.r{self.rank:04d}.{self.kind}"

    @property
    def is_done(self) -> bool:
        """Whether it says that the rank has done its part of the phase."""
        return self.kind.removesuffix(DOCUMENT) == OK

    @property
    def is_call(self) -> bool:
        """Whether it says anything else than that the phase is done, or the epoch entered."""
        return self.kind.removesuffix(DOCUMENT) not in {OK, ENTER}


ClaimKind = Literal["c", "g", "m", "b"]
"""c: somebody makes a chunk; g: the guest of this rank takes part; m: a guest has made all of a chunk; b: a
chunk that a guest had claimed is back."""


class Claim(NamedTuple):
    """A name in claims/: what somebody says of a chunk of what `phase` (2: training, 6: evaluation)
    generates.
    """

    epoch: int
    iteration: int
    phase: int
    number: int
    kind: ClaimKind = "c"

    @property
    def name(self) -> str:
        return f"e{self.epoch:04d}.i{self.iteration:06d}.p{self.phase:02d}.{self.kind}{self.number:06d}"


class Record(NamedTuple):
    """An epoch record's name."""

    epoch: int

    @property
    def name(self) -> str:
        return f"e{self.epoch:04d}.epoch.json"


class ProfileRequest(NamedTuple):
    """The name of a file by which `run profile` asks a rank for a profile; it is in the master's directory,
    which all nodes list. `token`: 8 hexadecimal digits.
    """

    rank: int
    token: str

    @property
    def name(self) -> str:
        return f"profile.r{self.rank:04d}.{self.token}"

    def is_answer(self, name: str) -> bool:
        """Return whether the file of this name, in the node's logs, says what came of it."""
        return name.startswith("profile.") and name.endswith(f".{self.token}.txt")


_4 = r"(\d{4}|[1-9]\d{4,})"
_6 = r"(\d{6}|[1-9]\d{6,})"
# Each number has only one spelling, so that two names never mean the same.
_BEAT = re.compile(rf"e{_4}\.r{_4}\.n(0|[1-9]\d*)\.b{_6}", re.ASCII)
_FLAG = re.compile(rf"e{_4}\.i{_6}\.p(\d{{2}})\.r{_4}\.([a-z_]+|(?:ok|enter)\.json)", re.ASCII)
_CLAIM = re.compile(rf"e{_4}\.i{_6}\.p(\d{{2}})\.([cgmb]){_6}", re.ASCII)
_RECORD = re.compile(rf"e{_4}\.epoch\.json", re.ASCII)
_PART = re.compile(rf"r{_4}\.e{_4}\.part{_4}\.safetensors", re.ASCII)
_PROFILE = re.compile(rf"profile\.r{_4}\.([0-9a-f]{{8}})", re.ASCII)
_ITERATION = re.compile(rf"iteration_{_6}", re.ASCII)
_STAGING = re.compile(rf"\.iteration_{_6}\.e{_4}", re.ASCII)


def parse_protocol_name(name: str) -> Beat | Flag | Record | None:
    """Parse a name in protocol/. None for any other name (`.nfs*`, temporaries)."""
    if match := _FLAG.fullmatch(name):
        return Flag(int(match[1]), int(match[2]), int(match[3]), int(match[4]), match[5])
    if match := _BEAT.fullmatch(name):
        epoch, rank, incarnation, counter = map(int, match.groups())
        return Beat(epoch, rank, incarnation, counter)
    if match := _RECORD.fullmatch(name):
        return Record(int(match[1]))
    return None


def parse_claim_name(name: str) -> Claim | None:
    """Parse a name in claims/; None for any other name."""
    if (match := _CLAIM.fullmatch(name)) is None:
        return None
    epoch, iteration, phase, kind, number = match.groups()
    return Claim(int(epoch), int(iteration), int(phase), int(number), cast("ClaimKind", kind))


def parse_profile_name(name: str) -> ProfileRequest | None:
    """Parse the name of a request for a profile; None for any other name."""
    match = _PROFILE.fullmatch(name)
    return ProfileRequest(int(match[1]), match[2]) if match else None


class PartName(NamedTuple):
    """A part file's name. Parts are sorted by it, so that a late part of a superseded process comes last."""

    epoch: int
    rank: int
    part: int

    @property
    def name(self) -> str:
        return f"r{self.rank:04d}.e{self.epoch:04d}.part{self.part:04d}.safetensors"


def parse_part_name(name: str) -> PartName | None:
    """Parse the name of a part file; None for any other name."""
    match = _PART.fullmatch(name)
    return PartName(int(match[2]), int(match[1]), int(match[3])) if match else None


def parse_iteration_name(name: str) -> int | None:
    """N of `iteration_N`; None for any other name."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None


def parse_staging_name(name: str) -> tuple[int, int] | None:
    """(iteration, epoch) of a staging directory; None for any other name."""
    match = _STAGING.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def parse_state_name(name: str) -> tuple[int, int] | None:
    """(iteration, epoch) of a directory in trainer_states/; None for any other name."""
    return parse_staging_name(f".{name}")
