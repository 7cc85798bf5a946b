"""Tasks of environment servers of the library OpenEnv: their first observations, by seed.

    --tasks openenv:URL,PARAMETER=VALUE,... --environment openenv:URL

URL may be several, joined by commas: copies of a server.
"""

import asyncio
import functools
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rollout.pictures import image_url
from rollout.tasks.openenv_client import OpenEnvSession, ServerFault, excerpt, schema_of
from rollout.tasks.parameters import SIZE, parse
from rollout.tasks.pictures import png
from rollout.tasks.text_gym import LOAD_TIMEOUT_S, STEP_TIMEOUT, Content, content_with, limit_of, seeds_of

SOURCE = "openenv:"
SCHEMA_TIMEOUT_S = 30.0
"""How long a server may take to say what its actions are."""
BUSY_S = 60.0
"""How long the start waits for a session of a server that has no more of them."""
AT_ONCE = 8
"""Sessions that the start opens at each server at the same time."""
RESET = "reset."
"""How parameters begin that are arguments of `reset`."""
JOIN = "+"
"""Joins the fields of an observation that the model reads, or sees."""


def openenv_tasks(text: str, *, seed: int, split: Literal["train", "eval"]) -> list[dict[str, Any]]:
    """Return the tasks of `URL,PARAMETER=VALUE,...`. Seeds follow from the run's. Raises ValueError with the
    reason, in one line.
    """
    name, parameters = parse(text)
    limit_s, seeds = limit_of(parameters), seeds_of(parameters, f"openenv/{seed}", split)
    arguments = {
        key.removeprefix(RESET): parameters.pop(key) for key in [*parameters] if key.startswith(RESET)
    }
    action, observation = parameters.pop("action", None), parameters.pop("observation", None)
    if parameters:
        raise ValueError(
            f"{next(iter(parameters))}: there is action, observation, {RESET}ARGUMENT, {SIZE} and "
            f"{STEP_TIMEOUT}"
        )
    schema = schema_at(name)
    spec = {
        "name": name,
        "action": _action(schema, action),
        "observation": _observation(schema, observation),
        "reset": arguments,
        STEP_TIMEOUT: limit_s,
    }
    observations = _observations(json.dumps(spec), tuple(seeds.values()))
    return [
        {
            "id": f"{name}/{number}",
            "source": name,
            "seed": task_seed,
            "messages": [{"role": "user", "content": content}],
            "openenv": spec,
        }
        for (number, task_seed), content in zip(seeds.items(), observations, strict=True)
    ]


def urls_of(name: str) -> list[str]:
    """Return the URLs of the servers. ValueError if they are none."""
    urls = [url.rstrip("/") for url in name.split(",")]
    for url in urls:
        try:
            parts = urllib.parse.urlsplit(url)
            fits = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 80)
        except ValueError:  # of the port
            fits = False
        if not fits or "@" in url or parts.query:
            raise ValueError(f"{url!r} is not a URL of a server, such as http://127.0.0.1:8000")
    return urls


def rotated(urls: Sequence[str], number: int) -> list[str]:
    """Return the URLs in the order in which episode `number` tries them."""
    first = number % len(urls)
    return [*urls[first:], *urls[:first]]


@functools.cache  # each iteration asks; a server that is gone for a moment must not end the run
def schema_at(name: str) -> dict[str, Any]:
    """Return the schemas of the servers, which must be there, and the same. Raises ValueError."""

    async def ask() -> list[dict[str, Any]]:
        return await asyncio.gather(*(schema_of(url, SCHEMA_TIMEOUT_S) for url in urls))

    urls = urls_of(name)
    first, *other_schemas = asyncio.run(ask())
    for url, other in zip(urls[1:], other_schemas, strict=True):
        if other != first:
            raise ServerFault(f"{url} has other actions or observations than {urls[0]}; give copies of one")
    return first


def content_of(fields: Mapping[str, Any], names: Sequence[str]) -> Content:
    """Return the texts and pictures of an observation. ServerFault for one that is no text, and no picture as
    rows of pixels of three numbers.
    """
    return content_with([_part(name, fields.get(name)) for name in names])


def _part(name: str, value: Any) -> dict[str, Any]:
    try:
        if isinstance(value, list):
            return image_url(png(np.array(value, np.uint8)))
        if isinstance(value, str):
            value.encode()
            return {"type": "text", "text": value}
    except UnicodeEncodeError:
        raise ServerFault(f"the observation's {name} has half a character (UTF-16)") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise ServerFault(f"the observation's {name} is not a picture: {excerpt(error)}") from None
    raise ServerFault(f"the observation's {name} is {excerpt(value)}; it must be a string, or rows of pixels")


def _action(schema: Mapping[str, Any], chosen: str | None) -> str:
    fields = schema["action"]["properties"]
    if {"tool_name", "arguments"} <= fields.keys():
        raise ValueError(
            "its actions are calls of MCP tools; give them to the model in an environment of your own "
            "(docs/environments.md)"
        )
    name = _chosen("action", fields, chosen)
    if more := [field for field in schema["action"].get("required", ()) if field != name]:
        raise ValueError(f"an action needs {more[0]} beside the text in {name}: it cannot be played")
    return name


def _observation(schema: Mapping[str, Any], chosen: str | None) -> list[str]:
    fields = schema["observation"]["properties"]
    return [
        field if field and _is_picture(fields.get(field)) else _chosen("observation", fields, field)
        for field in (chosen.split(JOIN) if chosen else [None])
    ]


def _chosen(role: str, fields: Mapping[str, Any], chosen: str | None) -> str:
    """Return the field that is given, or the only one that is a text."""
    texts = [name for name, field in fields.items() if _is_text(field)]
    if chosen is None and len(texts) == 1:
        return texts[0]
    if chosen in texts:
        return chosen
    wrong = f"{role}={chosen}: " if chosen else ""
    no_texts = [name for name in fields if name not in texts]
    raise ValueError(
        f"{wrong}its {role} has the texts {', '.join(texts) or '(none)'}, and {', '.join(no_texts)}; give "
        f"one of the texts, as {role}=FIELD"
    )


def _is_text(field: Any) -> bool:
    kinds = [kind.get("type") for kind in field.get("anyOf", [field])]
    return "string" in kinds and not {"enum", "const"} & field.keys()


def _is_picture(field: Any) -> bool:
    """Return whether a field is a list of lists of lists."""
    for _ in range(3):
        kinds = [] if field is None else field.get("anyOf", [field])
        field = next((kind.get("items") for kind in kinds if kind.get("type") == "array"), None)
    return field is not None


@functools.lru_cache(maxsize=4)
def _observations(spec: str, seeds: tuple[int, ...]) -> list[Content]:
    """Return the first observation of each seed."""
    return asyncio.run(_observed(json.loads(spec), seeds))


async def _observed(spec: Mapping[str, Any], seeds: Sequence[int]) -> list[Content]:
    urls = urls_of(spec["name"])
    places = asyncio.Semaphore(AT_ONCE * len(urls))

    async def observe(number: int, seed: int) -> Content:
        session = OpenEnvSession(rotated(urls, number), spec[STEP_TIMEOUT], busy_s=BUSY_S)
        async with places, session:
            answer = await session.reset({**spec["reset"], "seed": seed})
        if answer.done:
            raise ValueError(f"{session.url}: the episode with seed {seed} is done before the first action")
        return await asyncio.to_thread(content_of, answer.fields, spec["observation"])

    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            async with asyncio.TaskGroup() as group:
                work = [group.create_task(observe(*each)) for each in enumerate((seeds[0], *seeds))]
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
    except TimeoutError:
        raise ValueError(f"{len(seeds)} first observations take longer than {LOAD_TIMEOUT_S:g} s") from None
    again, *observations = [task.result() for task in work]
    if again != observations[0]:
        raise ValueError("with the same seed, reset says something else the second time")
    return observations
