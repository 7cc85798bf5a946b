"""Tasks of environments that are written for the library `verifiers` (extra `verifiers`, its version 0.4).

    --tasks verifiers:NAME,PARAMETER=VALUE,... --environment verifiers:NAME

NAME is an installed package that has a Taskset. A PARAMETER is a dotted name of the environment's own config,
as behind `--env.` in the library: taskset.split=train, agent.max_turns=4. Rows are read in another process.
"""

import contextlib
import copy
import functools
import importlib.machinery
import importlib.util
import json
import logging
import re
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rollout.module_search import search_here
from rollout.processes.killable_process import CallFailed, CallLost
from rollout.processes.killable_rewards import missing
from rollout.processes.pool import ProcessPool, log_as
from rollout.tasks.parameters import HELD_OUT, SIZE, is_held_out, parse

log = logging.getLogger(__name__)

SOURCE = "verifiers:"
LOAD_TIMEOUT_S = 1800.0
"""How long a data set may take to load; it may be fetched from a hub."""
CHAT = "flagpost_chat"
"""The harness of an agent that brings none: it asks for replies, with the environment's tools at hand."""
MOST_TURNS = 100
"""Replies that it asks for without a word of the environment; the budget of tokens ends most earlier."""
NOTHING_SAID = "(the environment begins)"

ENGINE_TIMEOUT_S = 30.0
"""How long an engine for containers may take to say its version."""

_LIBRARY = {"library": "verifiers", "extra": "verifiers"}


def verifiers_tasks(text: str, *, split: Literal["train", "eval"]) -> list[dict[str, Any]]:
    """Return the tasks of `NAME,PARAMETER=VALUE,...` in the order of its data set. If its config has the
    field `taskset.split`, evaluation takes `test` unless it is given; else one task in HELD_OUT is
    evaluation's. Raises ValueError with the reason, in one line.
    """
    name, parameters = parse(text)
    if reason := why_missing(name):
        raise ValueError(reason)
    rows, has_splits = _loaded(name, json.dumps(parameters, sort_keys=True), split)
    tasks = [
        _task(name, parameters, number, row)
        for number, row in enumerate(rows)
        if has_splits or is_held_out(row["key"]) == (split == "eval")
    ]
    if not tasks:
        hint = f" (one row in {HELD_OUT} is for evaluation; eval.interval=0 needs none)"
        raise ValueError(
            f"{name} gives no {split} task out of {len(rows)} rows; take another split or size"
            f"{hint if split == 'eval' and not has_splits else ''}"
        )
    return tasks


def module_of(name: str) -> str:
    """Return the module of an environment, as the library finds it: `owner/my-env@1.0` is `my_env`."""
    return name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def why_missing(name: str) -> str | None:
    """Return why the environment cannot be used here; None if its package and the library are installed."""
    if reason := missing(**_LIBRARY):
        return reason
    module = module_of(name)
    if not re.fullmatch(r"\w+", module):
        return f"{name!r} is not of the form NAME,PARAMETER=VALUE"
    library = importlib.util.find_spec("verifiers")  # it is not imported: that takes seconds
    inside = [f"{place}/v1/tasksets" for place in (library and library.submodule_search_locations) or ()]
    search_here()
    if importlib.machinery.PathFinder.find_spec(module, inside) or importlib.util.find_spec(module):
        return None
    return (
        f"there is no module {module} in {sys.prefix}, on PYTHONPATH or in {Path.cwd()}; install the "
        f"environment {name}, or put {module}.py there, on every node"
    )


@functools.lru_cache(maxsize=8)
def _loaded(name: str, parameters: str, split: str) -> tuple[list[dict[str, Any]], bool]:
    try:
        with contextlib.closing(ProcessPool(f"{__name__}:make_loader", size=1, say=log_as(name))) as pool:
            rows, has_splits = pool.call(name, json.loads(parameters), split, deadline_s=LOAD_TIMEOUT_S)
    except CallFailed as error:
        raise ValueError(" ".join(str(error).removeprefix("ValueError: ").split())) from None
    except CallLost as error:
        raise ValueError(f"{name} could not be loaded: {error}") from None
    return rows, has_splits


def _task(name: str, parameters: dict[str, Any], number: int, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"{name}/{number}",
        "source": name,
        "messages": row["messages"],
        "verifiers": {"name": name, "config": parameters, "data": row["data"]},
    }


# ---- in the processes


def make_loader() -> Callable[[str, dict[str, Any], str], Any]:
    """Make (name, parameters, split) -> the rows, and whether the environment has splits itself."""

    def load(name: str, parameters: dict[str, Any], split: str) -> Any:
        from verifiers import v1 as vf

        try:
            has_splits = "split" in vf.taskset_config_type(name).model_fields
        except (ImportError, AttributeError, TypeError) as error:
            raise ValueError(why_no_taskset(name, error)) from None
        if has_splits and split == "eval":
            parameters = {"taskset.split": "test", **parameters}
        config = config_of(name, parameters)
        _refuse_agents(config, parameters)
        taskset = vf.load_taskset(config.taskset)
        if SIZE in parameters:
            taskset = taskset.take(parameters[SIZE])
        elif not taskset.bounded:
            raise ValueError(f"the tasks of {name} never end; give {SIZE}=NUMBER")
        return [_row(task) for task in taskset], has_splits

    return load


def why_no_taskset(name: str, error: Exception) -> str:
    """Return why the library finds no Taskset in a package that is there. `error`: of the library."""
    lacking, module = getattr(error.__cause__, "name", None), module_of(name)
    if lacking and lacking != module:
        return f"{name} cannot be imported: {error.__cause__}; install what it needs, on every node"
    if hasattr(sys.modules.get(module), "load_environment"):
        return (
            f"{name} is made for an older version of verifiers: it has load_environment and no Taskset; "
            "install its version for 0.4, or rewrite it as a Taskset: docs/environments.md#verifiers"
        )
    return f"{type(error).__name__}: {error}"


def _row(task: Any) -> dict[str, Any]:
    from verifiers.v1.types import content_text

    data = task.data
    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    for message in data.prompt if isinstance(data.prompt, list) else ():
        parts = [] if isinstance(message.content, str | None) else message.content
        shows = any(part.type == "image_url" for part in parts)
        content = [part.model_dump() for part in parts] if shows else content_text(message.content)
        messages.append({"role": message.role, "content": content})
    messages = messages or [{"role": "user", "content": NOTHING_SAID}]
    return {"key": task.key, "data": data.model_dump(mode="json"), "messages": messages}


def config_of(name: str, parameters: Mapping[str, Any]) -> Any:
    """Return the environment's config with the parameters. An agent that neither the environment nor a
    parameter gives a harness gets CHAT; one that would run in the sandbox of a provider runs on this machine.
    ValueError, in one line, for a wrong parameter.
    """
    from pydantic import ValidationError
    from verifiers import v1 as vf

    sys.modules.setdefault(CHAT, _chat_module())
    tree: dict[str, Any] = {"taskset": {"id": name}}
    for key, value in parameters.items():
        *parents, leaf = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"{key}: {parent} is not a table")
        if key != SIZE:
            # `agent.harness.id=null` is read as JSON, but a harness has that name.
            place[leaf] = "null" if leaf == "id" and value is None else value
    kind = vf.env_config_type(name, str(tree.get("id", "")))
    for role, declared in kind.model_fields.items():
        if isinstance(declared.default, vf.AgentConfig):
            agent = tree.setdefault(role, {})
            if declared.default.harness is None and vf.default_harness_id(name) == "bash":
                agent.setdefault("harness", {"id": CHAT})
            if isinstance(declared.default.runtime, vf.PrimeConfig):
                agent.setdefault("runtime", {"type": "subprocess"})
    try:
        return vf.resolve_env_config(copy.deepcopy(tree))  # it writes into what it gets
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']} (got {first['input']!r:.100})") from None


def _refuse_agents(config: Any, parameters: Mapping[str, Any]) -> None:
    """Refuse an agent that runs what the model writes as the user of the node, unless it is asked for, and
    one that needs an engine for containers where there is none.
    """
    from verifiers import v1 as vf

    for role, agent in config:
        if not isinstance(agent, vf.AgentConfig):
            continue
        if agent.runtime.type in ("docker", "podman") and (reason := _why_no_engine(agent.runtime.type)):
            raise ValueError(f"its {role} runs in {agent.runtime.type}, which does not work here: {reason}")
        if f"{role}.runtime.type" in parameters:
            continue
        harness = agent.harness or config.agent_harnesses()[role]
        if agent.runtime.type == "subprocess" and vf.load_harness(harness).EXECUTES_CODE:
            raise ValueError(
                f"its {role} runs what the model writes (harness {harness.id}); give "
                f"{role}.runtime.type=docker, or {role}.harness.id={CHAT} for one without tools of its own"
            )


def _why_no_engine(engine: str) -> str | None:
    """Return why `docker` or `podman` cannot start a container here; None if it may."""
    try:
        done = subprocess.run(
            [engine, "version"],
            capture_output=True,
            text=True,
            timeout=ENGINE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return f"there is no program {engine}"
    except subprocess.TimeoutExpired:
        return f"`{engine} version` does not answer within {ENGINE_TIMEOUT_S:g} s"
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else None


def _chat_module() -> types.ModuleType:
    """Return a module that the library finds as the harness CHAT. It is made here, as the library imports
    harnesses by a name without dots.
    """
    from openai import AsyncOpenAI
    from verifiers import v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    class Chat(vf.Harness[vf.HarnessConfig]):
        """Asks for the reply to the messages, and makes its calls, in the environment's own process."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            turns = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
            messages += [message_to_wire(message) for message in turns]
            places = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            async with (
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client,
                contextlib.AsyncExitStack() as stack,
            ):
                tools, known, servers = await connect_mcp(places, stack)
                more: dict[str, Any] = {"tools": tools} if tools else {}
                for _ in range(MOST_TURNS):
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **more)
                    said_now = answer.choices[0].message
                    messages.append(said_now.model_dump(exclude_none=True))
                    for call in said_now.tool_calls or ():
                        name, arguments = call.function.name, json.loads(call.function.arguments)
                        result = await call_mcp(servers, known, name, arguments)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                    if not said_now.tool_calls:
                        break
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module = types.ModuleType(CHAT)
    module.__dict__.update(Chat=Chat, __all__=["Chat"])
    return module
