"""Rewards and environments that the settings name. A process of their own loads those of the user and says
what they are, so that a node runs no code of the user's.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.settings.tree import SettingsError
from rollout.environments.environment import EnvironmentSettingError, demonstrates, resolve_environment
from rollout.loaded_code import code_of, load_as_it_was, sources
from rollout.origin import Code
from rollout.processes.killable_process import CallFailed, CallLost
from rollout.processes.pool import ProcessPool
from rollout.rewards.resolve import RewardSettingError, resolve_reward, with_setting

log = logging.getLogger(__name__)

OURS = ("coordinator", "rollout", "trainer")
"""Packages whose modules every process has alike."""
LOAD_TIMEOUT_S = 600.0
"""How long the modules of a reward or an environment may take to be imported."""
Kind = Literal["reward", "environment"]
Description = dict[str, Any]
"""What a name stands for: its `digest`, `sources`, and whether it `demonstrates`; or why it is `refused`."""


@dataclass(frozen=True)
class Functions:
    """What lies behind the names of a reward and an environment."""

    reward: Code
    environment: Code
    demonstrates: bool
    """Whether the environment's samples are given, not generated."""
    sources: Mapping[str, tuple[str, str]]
    """File and text of the user's modules as they were read, by module."""

    def codes(self, section: str = "rollout") -> dict[str, Code]:
        """Return the Code behind each name, by setting."""
        return {f"{section}.reward": self.reward, f"{section}.environment": self.environment}


_loaded: dict[tuple[str, str], Functions] = {}
"""By reward and environment: no module of the user's is read twice, as others may hold on to what it was."""


def load_functions(reward: str, environment: str, section: str = "") -> Functions:
    """Look at what the two settings name; SettingsError says what is wrong with which. `section`: where the
    settings are, if they are not those of `rollout`.
    """
    if (reward, environment) in _loaded:
        return _loaded[reward, environment]
    names: dict[Kind, str] = {"reward": reward, "environment": environment}
    descriptions: dict[Kind, Description] = {}
    pool = None
    if any(":" in name for name in names.values()):
        read = {module: text for functions in _loaded.values() for module, text in functions.sources.items()}
        pool = ProcessPool(f"{__name__}:describer", read, size=1, say=_say)
    try:
        for kind, name in names.items():
            option = f"{section}.{kind}=" if section else f"--{kind} "
            try:
                description = (
                    pool.call(kind, name, deadline_s=LOAD_TIMEOUT_S) if pool else describe(kind, name)
                )
            except (CallFailed, CallLost) as error:
                text = " ".join(str(error).split())
                advice = "what a script does, put below `if __name__ == '__main__':`"
                raise SettingsError(f"{option}{name}: while it is loaded: {text}; {advice}") from None
            if "refused" in description:
                raise SettingsError(with_setting(option, name, description["refused"]))
            descriptions[kind] = description
    finally:
        if pool is not None:
            pool.close()
    codes = {kind: Code(name, descriptions[kind]["digest"]) for kind, name in names.items()}
    texts = {
        module: tuple(text)
        for description in descriptions.values()
        for module, text in description["sources"].items()
    }
    functions = Functions(
        **codes,
        demonstrates=descriptions["environment"]["demonstrates"],
        sources=texts,
    )
    return _loaded.setdefault((reward, environment), functions)


def _say(line: str) -> None:
    log.info("%s", line)


# ---- in the process


def describer(read: dict[str, tuple[str, str]]) -> Callable[[Kind, str], Description]:
    """Make `describe`, for a process that imports modules as they were `read`."""
    load_as_it_was(read)
    return describe


def describe(kind: Kind, name: str) -> Description:
    """Load what a name stands for, and say what it is."""
    try:
        if kind == "reward":
            reward = resolve_reward(name)
            code, texts, is_given = reward.code, reward.sources(), False
        else:
            environment = resolve_environment(name)
            code, texts = code_of(name, environment), sources(name, environment)
            is_given = demonstrates(environment)
    except (RewardSettingError, EnvironmentSettingError) as error:
        return {"refused": str(error)}
    users = {module: text for module, text in texts.items() if module.partition(".")[0] not in OURS}
    return {"digest": code.digest, "sources": users, "demonstrates": is_given}
