"""Rewards and environments that the settings name, loaded."""

from dataclasses import dataclass

from coordinator.settings.tree import SettingsError
from rollout.environments.environment import Environment, EnvironmentSettingError, resolve_environment
from rollout.origin import Code
from rollout.plugins import code_of, sources
from rollout.rewards.builtin import Reward, RewardSettingError, resolve_reward

OURS = ("coordinator", "rollout", "trainer")
"""Packages whose modules every process has alike."""


@dataclass(frozen=True)
class Functions:
    """A reward and an environment, loaded."""

    reward: Reward
    environment: Environment
    environment_code: Code

    def codes(self, section: str = "rollout") -> dict[str, Code]:
        """Return what lies behind the names, by setting."""
        return {f"{section}.reward": self.reward.code, f"{section}.environment": self.environment_code}

    def sources(self) -> dict[str, tuple[str, str]]:
        """Return file and text of the user's modules as this process has read them, by module."""
        of_environment = sources(self.environment_code.name, self.environment)
        return {
            module: source
            for module, source in {**self.reward.sources(), **of_environment}.items()
            if module.partition(".")[0] not in OURS
        }


def load_functions(reward: str, environment: str, section: str = "") -> Functions:
    """Load what the two settings name; SettingsError says what is wrong with which. `section`: where the
    settings are, if they are not those of `rollout`.
    """
    options = (
        ("--reward ", "--environment ") if not section else (f"{section}.reward=", f"{section}.environment=")
    )
    try:
        scored_by, played = resolve_reward(reward), resolve_environment(environment)
    except RewardSettingError as error:
        raise SettingsError(f"{options[0]}{reward}: {error}") from None
    except EnvironmentSettingError as error:
        raise SettingsError(f"{options[1]}{environment}: {error}") from None
    return Functions(scored_by, played, code_of(environment, played))
