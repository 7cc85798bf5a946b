"""Choose the kind of engine of a node, or of a whole run."""

import sys

from rollout.engines.kinds import embedded, vllm
from rollout.engines.kinds.by_url import ByUrl
from rollout.engines.kinds.embedded import Embedded
from rollout.engines.kinds.kind import EngineKind
from rollout.engines.kinds.vllm import Vllm
from rollout.engines.kinds.vllm_installed import has_vllm
from rollout.settings import EngineSettings

KINDS = {"vllm": Vllm, "torch": Embedded}
"""By the setting engine.kind."""
PACKAGES = vllm.PACKAGES
"""Distributions whose versions are noted."""
VARIABLES = vllm.VARIABLES | embedded.VARIABLES
"""Environment variables that an engine is started with, whatever the user sets."""


def engine_kind(settings: EngineSettings, gpus: int, python: str = sys.executable) -> EngineKind:
    """Return the engine of a node with this number of GPUs, which this Python runs."""
    if settings.url is not None:
        return ByUrl(settings, gpus, python)
    if settings.kind != "auto":
        return KINDS[settings.kind](settings, gpus, python)
    return (Vllm if gpus and has_vllm(python) else Embedded)(settings, gpus, python)


def any_kind(settings: EngineSettings) -> EngineKind:
    """Return an engine of the run, on whatever node: vLLM if it may be that, as it alone takes arguments."""
    if settings.kind == "auto" and settings.url is None:
        return Vllm(settings, 0)
    return engine_kind(settings, 0)
