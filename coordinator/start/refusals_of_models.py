"""Refuse before the start a model, or settings for it, that certainly cannot work: each in one line."""

import asyncio
import logging
import shlex
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.settings import loading
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.eval_tasks import SECTION
from rollout.engines.kinds.kind import EngineKind
from rollout.engines.model_dir import is_adapter
from rollout.engines.model_facts import (
    DEQUANTISED,
    attention_heads,
    count_experts,
    quantisation,
    recurrent_layers,
    vocabulary_size,
)
from rollout.engines.special_tokens import SpecialTokens, read_special_tokens
from rollout.environments.self_teacher import SelfTeacher
from rollout.rewards.parts import parts_of, rewards_of_sources
from rollout.rewards.served import SERVED, ServedReward
from rollout.rewards.teacher import Teacher
from rollout.settings import WRITTEN
from rollout.storage import files

log = logging.getLogger(__name__)

ENDLESS = "neither its tokenizer nor its configuration names a token that ends a sequence"


def refuse_run(option: str, directory: Path, takes_adapters: bool) -> None:
    """Raise SettingsError if a directory that should be a model's is that of a run, or of its checkpoints."""
    path = directory.absolute()
    for run_dir in (RunDir(path), RunDir(path.parent)):
        if path in (run_dir.root, run_dir.checkpoints) and files.exists(run_dir.run_json):
            newest = next(reversed(published.checkpoints(run_dir)), None)
            advice = "it has no checkpoint yet"
            if newest and is_adapter(run_dir.checkpoint(newest)) and not takes_adapters:
                advice = f"its newest checkpoint {_is_adapter(run_dir.checkpoint(newest))}"
            elif newest:
                advice = f"give its newest checkpoint, {run_dir.checkpoint(newest)}"
            raise SettingsError(f"{option} {directory}: is of a run, and no model; {advice}")


def refuse_adapter(model: str, directory: Path) -> None:
    """Raise SettingsError if the directory of --model holds an adapter."""
    if is_adapter(directory):
        raise SettingsError(f"--model {model}: {_is_adapter(directory)}")


def _is_adapter(directory: Path) -> str:
    """Return that the model in a directory is an adapter, and how a model is made of it."""
    path = directory.absolute()
    run_dir = RunDir(path.parent.parent)
    merge = f"python -m trainer.checkpoint.merge {shlex.quote(str(path))} DIR (or peft's merge_and_unload)"
    for number in published.checkpoints(run_dir) if files.exists(run_dir.run_json) else ():
        if path == run_dir.checkpoint(number):
            root = shlex.quote(str(run_dir.root))
            merge = f"run export --merge --iteration {number} --log-path {root} -o DIR"
    return f"is an adapter; first add it to its base model: {merge}; then give --model DIR"


def refuse_wrong_teacher(settings: RunSettings) -> None:
    """Raise SettingsError if a teacher is no server's address, or needs a key that is not set here."""
    for setting, name in _teacher_servers(settings).items():
        try:
            Teacher(name)
        except ValueError as error:
            raise SettingsError(f"{setting}={name}: {error}") from None


def _teacher_servers(settings: RunSettings) -> dict[str, str]:
    """Return the names of the teachers that are servers, by the setting."""
    rollout = settings.rollout
    servers = {f"rollout.teachers.{source}": name for source, name in rollout.teachers.items()}
    if rollout.teacher is not None and SelfTeacher.from_settings(rollout) is None:
        servers["rollout.teacher"] = rollout.teacher
    return servers


def warn_of_reward_servers(settings: RunSettings) -> None:
    """Warn of rewards whose server, as it is now, would score no sample: it may be started, or be mended,
    before the first one.
    """

    async def look(name: str, max_tokens: int) -> str | None:
        reward = ServedReward(name)
        try:
            return await reward.problem(max_tokens)
        finally:
            await reward.close()

    rollout, sets = settings.rollout, settings.eval_sets.items()
    rewards = {"--reward ": (rollout.reward, rollout.max_tokens)}
    rewards |= {f"rollout.rewards.{name}=": (text, None) for name, text in rollout.rewards.items()}
    rewards |= {f"{SECTION}{name}.reward=": (str(each.reward), each.max_tokens) for name, each in sets}
    for option, (text, max_tokens) in rewards.items():
        for part in chain.from_iterable(map(parts_of, rewards_of_sources(text).all())):
            is_served = part.name.startswith(SERVED)
            if is_served and (problem := asyncio.run(look(part.name, max_tokens or rollout.max_tokens))):
                log.warning("%s%s: %s: as it is now, samples are lost", option, part.name, problem)


def room_at_teacher(settings: RunSettings, model_dir: Path) -> dict[str, int]:
    """Return how many tokens the teacher of all tasks reads, by its name, if there is one and it says so.
    SettingsError if a teacher lacks tokens that any sample may have, or has no room for a prompt before
    `rollout.max_tokens`.
    """
    rollout, servers = settings.rollout, _teacher_servers(settings)
    if not servers or settings.rollout_split == "eval-only":
        return {}
    known, rows = read_special_tokens(model_dir), vocabulary_size(model_dir)
    tokens = [known.words - 1, *known.end_ids]  # one that was added for padding, say, is in no sample
    largest = max(token for token in tokens if rows is None or token < rows)

    async def look(name: str) -> int | None:
        teacher = Teacher(name)
        try:
            return await teacher.longest(max(0, largest))
        finally:
            await teacher.close()

    room: dict[str, int] = {}
    for setting, name in servers.items():
        try:
            longest = asyncio.run(look(name))
        except ValueError as error:
            raise SettingsError(f"{setting}={name}: {error}") from None
        if longest is None:
            continue
        if rollout.environment not in WRITTEN and rollout.max_tokens >= longest:
            raise SettingsError(
                f"rollout.max_tokens={rollout.max_tokens} leaves no room for a prompt: {setting}={name} "
                f"reads {longest} tokens of a sample; give less, by the length of the longest prompt"
            )
        if setting == "rollout.teacher" and not rollout.teachers:  # else it does not read all tasks
            room[f"{setting}={name}"] = longest
    return room


EXACT = {"float32", "float", "float64"}
"""Number types that change no weight of a checkpoint."""


def refuse_two_precisions(settings: RunSettings, engine: EngineKind) -> None:
    """Raise SettingsError if the engine of this node would round the weights in another way than training."""
    name, computed = engine.dtype
    if settings.rl_phase != "both" or not computed or settings.cluster.place:
        return
    if computed == "auto":
        raise SettingsError(
            f"{name}=auto: leave {name} out, or name the type: {name}=bfloat16 trainer.compute_dtype=bfloat16"
        )
    trained, saved = settings.trainer.rounded_to(engine.gpus > 0), settings.trainer.save_dtype
    served = {computed, trained if saved == "auto" else saved} - EXACT
    if served != {trained} - EXACT:
        other = (
            ""
            if engine.gpus or computed != "bfloat16"
            else ", or give trainer.compute_dtype=bfloat16 (or trainer.save_dtype=bfloat16)"
        )
        engines = " and ".join(sorted(served)) or "float32"
        raise SettingsError(
            f"{name}={computed} with trainer.save_dtype={saved}: the engine would compute with weights in "
            f"{engines}, and training with weights in {trained}, so the one would miss updates of the other; "
            f"leave {name} out{other}"
        )


def refuse_unrecorded(settings: RunSettings, engine: EngineKind, model_dir: Path | None) -> None:
    """Raise SettingsError if there are no routes to replay: the model has no experts, or the engine of this
    node does not record them.
    """
    if not settings.trainer.routing_replay:
        return
    if model_dir is None or not count_experts(model_dir)[0]:
        reason = f"--model {settings.model} has no experts; leave it out"
    elif settings.rl_phase != "update" and engine.why_no_routes:
        reason = engine.why_no_routes
    else:
        return
    raise SettingsError(f"trainer.routing_replay: {reason}")


def refuse_quantised(settings: RunSettings, model_dir: Path) -> None:
    """Raise SettingsError if the model's weights are quantised: they cannot be trained."""
    if (method := quantisation(model_dir)) is None:
        return
    makes = f" (python -m trainer.checkpoint.dequantise {model_dir} OUT)" if method in DEQUANTISED else ""
    raise SettingsError(
        f"--model {settings.model}: its weights are quantised ({method}), and a run trains and serves them "
        f"as numbers of 16 or 32 bits; give the model that it was made of, or a dequantised copy{makes}"
    )


def refuse_undivided(settings: RunSettings, model_dir: Path) -> None:
    """Raise SettingsError if the model's configuration says that ranks cannot share its sequences. What it
    does not say, training finds out by trying.
    """
    size = settings.trainer.context_parallel
    if size == 1:
        return
    (heads, _), kinds = attention_heads(model_dir), recurrent_layers(model_dir)
    if kinds or heads % size:
        reason = f"layers of the kind {', '.join(kinds)}" if kinds else f"{heads} attention heads"
        advice = "give 1" if kinds else "give a number that divides them"
        raise SettingsError(
            f"trainer.context_parallel={size}: --model {settings.model} has {reason}, which ranks cannot "
            f"share; {advice}"
        )


def has_end(settings: RunSettings, special_tokens: SpecialTokens) -> bool:
    """Return whether a token can end what the model says. SettingsError if demonstrations need one."""
    if special_tokens.end_ids or special_tokens.stop_ids(settings.rollout.stop):
        return True
    if settings.rollout.environment in WRITTEN:
        raise SettingsError(
            f"--model {settings.model}: {ENDLESS}, so an answer to train on would have no end; give its "
            "config.json an eos_token_id"
        )
    return False


def fit_max_tokens(settings: RunSettings, overrides: Mapping[str, Any], context: int | None) -> RunSettings:
    """Return the settings with a default of rollout.max_tokens that leaves room for a prompt in the model's
    context (tokens; None: not known). SettingsError for a number that was given and leaves none.
    """
    if context is None or settings.rl_phase == "update" or settings.rollout.environment in WRITTEN:
        return settings
    most = context - 1
    for key, max_tokens in (
        ("rollout.max_tokens", settings.rollout.max_tokens),
        ("eval.max_tokens", settings.eval.max_tokens),
        *(
            (f"{SECTION}{name}.max_tokens", eval_set.max_tokens)
            for name, eval_set in settings.eval.sets.items()
        ),
    ):
        is_given = key in overrides or key.startswith(SECTION)
        if is_given and max_tokens is not None and max_tokens > most:
            raise SettingsError(
                f"{key}={max_tokens} leaves no room for a prompt: --model {settings.model} has a context of "
                f"{context} tokens; give less, by the length of the longest prompt"
            )
    if settings.rollout.max_tokens <= most:
        return settings
    return loading.overlay(settings, {"rollout.max_tokens": most})
