"""A kind of engine: what the rest of the code asks of it, before and after a server is started.

The places of a further one:

- a file beside this with its class, and its name in EngineSettings.kind
- choice.py: KINDS; `any_kind`, where a run may have it on some nodes only; PACKAGES and VARIABLES, if there
  are packages whose versions are noted, or variables that it is started with whatever the user sets
- its server, which answers EngineClient. If EngineAdmin does not fit its calls, `admin` returns another one.
  EngineAdmin reads vLLM's configuration: without it `can_prove` is False, and `facts` has defaults
- coordinator/start/odd_settings.py and refusals_of_tasks.py, where a start warns of a kind, or refuses it
- tests/engines/engines.py: its KINDS are what all tests of engines are run with
- the table of engines in docs/gpus.md
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import EngineFacts
from rollout.engines.model_dir import PathLike
from rollout.settings import EngineSettings

SOCKET_BYTES = 100
"""Longest path of a Unix socket; systems take 104 to 108 bytes."""
OWN_SOCKETS_BYTES = 37
"""What an engine adds at most to the directory of `socket` for sockets between its own processes (vLLM)."""


class ServerSettingError(ValueError):
    """No server can be started with these settings on this machine; one line says what to do."""


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started, and its properties."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict[str, str])
    """Variables beside the environment that it inherits."""
    on_gpu: bool = False
    """Whether it holds GPU memory, which sleeping frees."""
    replicas: int = 1
    """How many copies of the model it holds, each with its own weights."""


class EngineKind:
    """The engine of a node with this number of GPUs, which this Python would run."""

    name: str
    """What people read: its name, and why it is taken."""
    dtype: tuple[str, str] = "", ""
    """What chooses its number type, and that type; empty if it is not known."""
    proves: bool | None = None
    """Whether it can prove its weights (EngineAdmin.prove); None: it must be asked."""
    uses_transformers = False
    """Whether it loads model and tokenizer by transformers, so that it cannot use what those cannot load."""
    repeats_samples = False
    """Whether the same policy, task and seed give the same samples to the bit, whatever else it computes."""
    has_other_template = False
    """Whether it may write messages with another chat template than the model's."""
    why_no_routes = "only engines that nodes start are asked for their routes; leave it out"
    """Why it does not say which experts a token was routed to; empty: it does."""

    def __init__(self, settings: EngineSettings, gpus: int, python: str = sys.executable) -> None:
        self.settings = settings
        self.gpus = gpus
        self.python = python

    def check_arguments(self) -> None:
        """Raise ServerSettingError for arguments that it can be given on no machine."""

    def check(self) -> None:
        """Raise ServerSettingError unless it can be had with these settings on this machine."""

    def check_model(self, name: str, model_dir: Path, parameters: int, lora_targets: str | None) -> None:
        """Raise ServerSettingError if it cannot serve the model `name`, or adapters of `lora_targets` in it,
        or if nobody would have chosen it for so many parameters.
        """

    def check_pictures(self, most: int) -> None:
        """Raise ServerSettingError if it cannot serve a model that sees, or take `most` pictures at once."""

    def context(self, model_dir: Path) -> int | None:
        """Return the longest sequence that it takes, in tokens; None where that is not certain.
        ServerSettingError if it would compute positions otherwise than the trainer.
        """
        return None

    def refusal(self, model_dir: Path) -> str | None:
        """Return why its program would not start with its arguments and this model; None if it would, or
        cannot be asked. It may take half a minute, and loads no weights.
        """
        return None

    def replica_gpus(self, model_dir: Path, gpu_bytes: float | None) -> int:
        """Return how many GPUs one copy of the model takes, if each has that much memory; 0 for none."""
        return 0

    def command(
        self, model_dir: PathLike, socket: PathLike, lora_rank: int = 0, gpu_bytes: float | None = None
    ) -> ServerCommand:
        """Return a server of `model_dir` that listens on a Unix socket.

        `socket`: its path, in a directory that no other user can enter, because every client can load
        weights. It must not exist yet, and may have SOCKET_BYTES, its directory OWN_SOCKETS_BYTES less.
        `lora_rank`: the largest rank of the adapters that it will load, 0 for no adapters. `gpu_bytes`: the
        memory of the smallest GPU, if it is known.
        """
        raise NotImplementedError

    def admin(self, url: str) -> EngineAdmin:
        """Return the administration of its server at `url`."""
        return EngineAdmin(url)

    def facts(self, admin: EngineAdmin, server: ServerCommand | None) -> EngineFacts:
        """Return the facts of its server, which answers; `server`: as it was started here."""
        return admin.facts()
