"""Tasks to trajectories.

Knows engines, environments and rewards; knows nothing of nodes or the shared directory. To read: `slots`,
`collect` (as many groups at once as the engine should see), `group_maker` (one group), `trajectory`.

Users import from here what an environment needs: `from rollout import Policy, Sample`. A name is loaded when
it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.engines.answers import RequestRefused
    from rollout.engines.completion import Completion
    from rollout.environments.environment import serve, single_turn
    from rollout.environments.policy import Episode, Policy
    from rollout.environments.python_tool import PYTHON_TOOL, run_python
    from rollout.environments.tool_server import ToolServer, tool_server
    from rollout.environments.turns import sample_of
    from rollout.origin import Sampling
    from rollout.tasks.task_set import Task
    from rollout.trajectory import Sample

__all__ = [
    "PYTHON_TOOL",
    "Completion",
    "Episode",
    "Policy",
    "RequestRefused",
    "Sample",
    "Sampling",
    "Task",
    "ToolServer",
    "run_python",
    "sample_of",
    "serve",
    "single_turn",
    "tool_server",
]

_PLACES = {
    "PYTHON_TOOL": "rollout.environments.python_tool",
    "Completion": "rollout.engines.completion",
    "Episode": "rollout.environments.policy",
    "Policy": "rollout.environments.policy",
    "RequestRefused": "rollout.engines.answers",
    "Sample": "rollout.trajectory",
    "Sampling": "rollout.origin",
    "Task": "rollout.tasks.task_set",
    "ToolServer": "rollout.environments.tool_server",
    "run_python": "rollout.environments.python_tool",
    "sample_of": "rollout.environments.turns",
    "serve": "rollout.environments.environment",
    "single_turn": "rollout.environments.environment",
    "tool_server": "rollout.environments.tool_server",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
