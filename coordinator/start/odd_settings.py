"""Settings that a start warns of: each does something else than it seems to, or nothing at all."""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from coordinator.settings.tree import RunSettings
from coordinator.start.eval_tasks import SECTION
from coordinator.start.refusals_of_models import ENDLESS
from rollout.settings import PROGRAMS, WRITTEN, RolloutSettings
from trainer.settings import TrainerSettings

CLIPS = ("ppo", "dual", "cispo", "geometric", "divergence")
"""Values of trainer.clip that have bounds."""
WORKS_WITH = {
    "trainer.kl_coefficient": ("trainer.kl", ("k3", "k1", "k2")),
    "trainer.kl_in": ("trainer.kl", ("k3", "k1", "k2")),
    "trainer.kl_to": ("trainer.kl", ("k3", "k1", "k2")),
    "trainer.pair_beta": ("trainer.advantage", ("pair", "label")),
    "trainer.undesirable_weight": ("trainer.advantage", ("label",)),
    "trainer.turn_discount": ("trainer.credit", ("turn", "state")),
    "trainer.state_weight": ("trainer.credit", ("state",)),
    "trainer.clip_low": ("trainer.clip", CLIPS),
    "trainer.clip_high": ("trainer.clip", CLIPS),
    "trainer.dual_clip": ("trainer.clip", ("dual",)),
    "trainer.engine_correction_cap": ("trainer.engine_correction", ("truncated", "masked")),
    "trainer.overlong_buffer": ("trainer.overlong", ("penalise",)),
    "rollout.thinking_tokens": ("rollout.environment", ("single_turn",)),
    "rollout.dynamic_limit": ("rollout.dynamic_sampling", (True,)),
}
"""Settings that are read only with certain values of another; the first of them is advised."""

RATE = "trainer.learning_rate"
RATES = {RATE, "trainer.warmup_steps", "trainer.schedule"}
"""Who gives one of these means a certain learning rate."""
OF_VLLM = ("engine.args.", "engine.tensor_parallel_size")
OF_EMBEDDED = ("engine.dtype", "engine.max_batch")
"""Settings that one kind of engine alone reads."""
_LORA = "trainer.lora."
FASTEST = 0.1
"""A learning rate above this spoils any model in a step; somebody means another sign of the exponent."""
LARGEST_BOUND = 10
"""A bound of the ratio from here on is hardly ever met; somebody means a percentage."""
SHARE = "gpu_memory_utilization"
GREEDY_BELOW = 1e-5
"""Engines take a temperature below this for 0."""
NARROWS = ("top_p", "top_k", "min_p")
"""Settings that leave out tokens, whose probability the engine divides among the others: the trainer does
not."""


def odd_settings(settings: RunSettings, overrides: Mapping[str, Any], has_end: bool = True) -> Iterator[str]:
    """Yield a line for each setting that hardly anybody means as it stands. `overrides`: the typed ones;
    `has_end`: whether the model has a token that ends a sequence.
    """
    for key, (other, values) in WORKS_WITH.items():
        if key in overrides:
            yield from _unread(key, overrides[key], other, attrgetter(other)(settings), values)
    for name, source in settings.trainer.sources.items():
        section, trainer = f"trainer.sources.{name}", settings.trainer.of_source(name)
        for field, typed in source.model_dump(exclude_none=True).items():
            if works_with := WORKS_WITH.get(f"trainer.{field}"):
                other = works_with[0].removeprefix("trainer.")
                value = getattr(trainer, other)
                yield from _unread(f"{section}.{field}", typed, f"{section}.{other}", value, works_with[1])
    if shares := [key for key in overrides if f"{key}.".startswith("rollout.ratio.")]:
        sampling = settings.rollout.task_sampling
        yield from _unread(shares[0], overrides[shares[0]], "rollout.task_sampling", sampling, ("ratio",))
    yield from _of_learning(settings, overrides)
    if settings.rl_phase != "rollout" and overrides.keys() & RATES:  # a trial of a few steps asks for none
        yield from _warm_up(settings)
    if settings.trainer.lora.rank == 0 and (
        keys := [key for key in overrides if key.startswith(_LORA) and key != f"{_LORA}rank"]
    ):
        yield f"{keys[0]}={overrides[keys[0]]} does nothing without adapters; give {_LORA}rank=16 as well"
    rollout = settings.rollout
    written = {"preference": 2}.get(rollout.environment, 1)  # samples that a task has
    if rollout.environment in WRITTEN and rollout.samples_per_task != written:
        yield (
            f"rollout.samples_per_task={rollout.samples_per_task} does nothing with rollout.environment="
            f"{rollout.environment}: a task has its own; leave it out"
        )
    is_alone = rollout.environment in WRITTEN and settings.evaluation_tasks is None
    if (is_alone or rollout.environment.startswith(PROGRAMS)) and not settings.eval.sets:
        for key in overrides:
            if f"{key}.".startswith(("rollout.reward.", "rollout.rewards.")):
                yield f"{key} does nothing with rollout.environment={rollout.environment}: it has its own"
    yield from _of_other_engines(settings, overrides)
    if (rate := settings.trainer.learning_rate) > FASTEST:
        yield f"trainer.learning_rate={rate:g} spoils any model; most are trained with 1e-6 to 1e-3"
    for name in ("clip_low", "clip_high"):
        bound, clip = getattr(settings.trainer, name), settings.trainer.clip
        if bound >= LARGEST_BOUND and clip in CLIPS:
            yield f"trainer.{name}={bound:g} with trainer.clip={clip} clips next to nothing; most are below 5"
    for key, value in settings.engine.args.items():
        if key.replace("-", "_") == SHARE and isinstance(value, int | float) and value > 1:
            yield f"engine.args.{key}={value}: it is a part of the GPU's memory, e.g. 0.8"
    sets = {f"{SECTION}{name}": eval_set for name, eval_set in settings.eval_sets.items()}
    for section, sampling in {"rollout": settings.rollout, "eval": settings.eval, **sets}.items():
        count, greedy = sampling.samples_per_task or 1, _greedy(sampling.temperature, sampling.top_k)
        if count > 1 and greedy:
            follows = "nothing can be learnt from them" if section == "rollout" else "pass@k is pass@1"
            yield f"{section}.{greedy}: all {count} samples of a task are the same, so {follows}"
    if not has_end and not settings.rollout.stop and settings.rl_phase != "update":
        yield (
            f"--model {settings.model}: {ENDLESS}: every sample goes on to "
            f"rollout.max_tokens={settings.rollout.max_tokens}; give its config.json an eos_token_id, or set "
            "rollout.stop"
        )
    if settings.rl_phase != "rollout":
        for name in NARROWS:
            value = getattr(settings.rollout, name)
            if value != RolloutSettings.model_fields[name].default:
                corrected = settings.trainer.engine_correction != "off"
                follows = "the correction weighs tokens less" if corrected else "steps are biased"
                yield (
                    f"rollout.{name}={value:g}: the engine's logprobs differ from the trainer's, so "
                    f"{follows}; leave it out, and lower rollout.temperature for tamer samples"
                )


def _of_learning(settings: RunSettings, overrides: Mapping[str, Any]) -> Iterator[str]:
    trainer = settings.trainer
    losses = [trainer, *map(trainer.of_source, trainer.sources)]
    if trainer.kl != "off" and not any(loss.kl_coefficient for loss in losses):
        yield (
            f"trainer.kl={trainer.kl} with trainer.kl_coefficient=0: KL is measured (kl_reference), and "
            "holds nothing back; give a coefficient, e.g. 0.04, or trainer.kl=off"
        )
    usual = TrainerSettings.model_fields["learning_rate"].default
    is_default = RATE not in overrides and trainer.learning_rate == usual  # builtin:tiny has another one
    if trainer.lora.rank and settings.rl_phase != "rollout" and is_default:
        yield f"{RATE}={usual:g} is for whole models; adapters learn with about {10 * usual:g}"


def _unread(key: str, typed: Any, other: str, actual: Any, values: tuple[Any, ...]) -> Iterator[str]:
    if actual not in values:
        first = f"{other}={str(values[0]).lower()}"
        yield f"{key}={typed} does nothing with {other}={str(actual).lower()}; give {first} as well"


def _of_other_engines(settings: RunSettings, overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each typed setting that the engine of this run never reads."""
    engine = settings.engine
    unread, with_engine, reader = (), "", ""
    if engine.url is not None:
        unread = (*OF_VLLM, *OF_EMBEDDED, "engine.sleep")
        with_engine, reader = f"--engine-url {engine.url}", "set it there"
    elif engine.kind == "torch":
        unread, with_engine, reader = OF_VLLM, "--engine torch", "it is for vLLM"
    elif engine.kind == "vllm":
        unread, with_engine, reader = OF_EMBEDDED, "--engine vllm", "it is for the embedded engine"
    for key in overrides:
        if key.startswith(unread):
            yield f"{key} does nothing with {with_engine}; {reader}"


def _greedy(temperature: float | None, top_k: int | None) -> str:
    """Return the setting, without its section, by which only the likeliest token is sampled; else nothing."""
    if temperature is not None and temperature < GREEDY_BELOW:
        return f"temperature={temperature:g}"
    return "top_k=1" if top_k == 1 else ""


def _warm_up(settings: RunSettings) -> Iterator[str]:
    trainer, steps = settings.trainer, settings.optimizer_steps
    if steps is not None and steps < trainer.warmup_steps:
        rate = trainer.learning_rate * steps / trainer.warmup_steps
        yield (
            f"trainer.warmup_steps={trainer.warmup_steps}: {settings.iterations} iterations are {steps} "
            f"optimizer steps, so the learning rate ends at {rate:.2g} and never comes to "
            f"{trainer.learning_rate:g}; give fewer"
        )
