"""Refuse settings that do not go together; each rule raises ValueError, in one line that says what to do."""

from collections.abc import Callable

from coordinator.settings.fields import SettingFields
from rollout.settings import GENERATED, JOIN, NAME, PROGRAMS, SELF, TINY, WRITTEN
from trainer.loss_settings import ALONE


def _columns_are_of_data(settings: SettingFields) -> None:
    for key, columns, option, source in (
        ("columns", settings.columns, "--tasks", settings.tasks),
        ("eval.columns", settings.eval.columns, "--eval-tasks", settings.evaluation_tasks),
    ):
        if columns and (source is None or source.startswith(GENERATED)):
            raise ValueError(
                f"{key}.{next(iter(columns))} names a column of data, but {option} is "
                f"{source or 'not given'}, which has none; give {option} FILE, or leave it out"
            )


def _sets_have_names(settings: SettingFields) -> None:
    for name, eval_set in settings.eval.sets.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"eval.sets.{name}: name a set with letters, digits, _ and - only")
        if eval_set.columns and eval_set.tasks.startswith(GENERATED):
            raise ValueError(
                f"eval.sets.{name}.columns.{next(iter(eval_set.columns))} names a column of data, but "
                f"eval.sets.{name}.tasks is {eval_set.tasks}, which has none; leave it out"
            )
    best_by = settings.checkpoints.best_by
    if best_by is not None and best_by not in settings.eval.sets:
        names = ", ".join(settings.eval.sets) or "none"
        raise ValueError(f"checkpoints.best_by={best_by} is not among eval.sets ({names}); name one")


def _split_fits(settings: SettingFields) -> None:
    if settings.rollout_split and settings.rl_phase == "update":
        raise ValueError(
            f"--rollout-split {settings.rollout_split} needs a rollout, but --rl-phase is update; "
            "leave one of them out"
        )
    half = f"--rl-phase {settings.rl_phase}" if settings.rl_phase != "both" else ""
    half = f"--rollout-split {settings.rollout_split}" if settings.rollout_split else half
    if settings.cluster.place and half:
        raise ValueError(f"{half} does one part of each iteration, but --place has all; leave one out")
    if settings.rollout_split == "eval-only" and settings.rl_phase != "rollout":
        raise ValueError("--rollout-split eval-only makes nothing to train on; add --rl-phase rollout")


def _schedule_has_an_end(settings: SettingFields) -> None:
    if settings.trainer.schedule != "constant" and settings.iterations is None:
        raise ValueError(
            f"trainer.schedule={settings.trainer.schedule} ends with the run, but the run has no end: give "
            "--iterations, or leave it out"
        )


def _delta_is_of_a_whole_model(settings: SettingFields) -> None:
    if settings.checkpoints.delta and settings.trainer.lora.rank:
        raise ValueError(
            f"checkpoints.delta=true with trainer.lora.rank={settings.trainer.lora.rank}: a checkpoint holds "
            "only the adapter, which is small; leave one of them out"
        )


def _replay_window_is_kept(settings: SettingFields) -> None:
    keep_last, window = settings.trajectories.keep_last, settings.trainer.replay_window
    if keep_last is not None and keep_last < window:
        raise ValueError(
            f"trajectories.keep_last={keep_last} is less than trainer.replay_window={window}: a batch needs "
            f"trajectories of {window} iterations; give at least {window}, or leave it out"
        )


def _older_samples_are_corrected(settings: SettingFields) -> None:
    level, segment, trainer = (
        settings.cluster.max_async_level,
        settings.rollout.segment_tokens,
        settings.trainer,
    )
    option = f"--max-async-level {level}" if level else f"rollout.segment_tokens={segment}"
    if (level or segment) and not all(each.corrects_for_age for each in trainer.of_all_sources):
        raise ValueError(
            f"{option} trains on samples of older policies, for which trainer."
            "engine_correction=off does not correct; use truncated or masked, or leave one of them out"
        )


def _segments_can_go_on(settings: SettingFields) -> None:
    rollout = settings.rollout
    if rollout.segment_tokens is None:
        return
    for is_given, other, reason in (
        (rollout.environment != "single_turn", f"rollout.environment={rollout.environment}",
         "only a single turn can go on in another iteration"),
        (rollout.stop, "rollout.stop", "a stop string that is cut in two would not be seen"),
        (rollout.over_sample > 1, f"rollout.over_sample={rollout.over_sample:g}",
         "what was begun would be thrown away"),
        (rollout.dynamic_sampling, "rollout.dynamic_sampling=true",
         "an iteration would wait for the rewards of unfinished groups"),
    ):  # fmt: skip
        if is_given:
            raise ValueError(
                f"rollout.segment_tokens={rollout.segment_tokens} with {other}: {reason}; leave one of "
                "them out"
            )


def _reasoning_has_an_end(settings: SettingFields) -> None:
    rollout = settings.rollout
    if rollout.thinking_tokens is None:
        return
    for is_given, other, reason in (
        (rollout.reasoning_end is None, "without rollout.reasoning_end",
         "nothing says how reasoning ends; add e.g. rollout.reasoning_end='</think>'"),
        (rollout.environment != "single_turn", f"with rollout.environment={rollout.environment}",
         "it is for single_turn; leave one of them out"),
        (rollout.segment_tokens is not None, f"with rollout.segment_tokens={rollout.segment_tokens}",
         "a sample that is cut goes on in the next iteration; leave one of them out"),
        (rollout.thinking_tokens >= rollout.max_tokens, f"with rollout.max_tokens={rollout.max_tokens}",
         "nothing is left for the answer; give fewer"),
    ):  # fmt: skip
        if is_given:
            raise ValueError(f"rollout.thinking_tokens={rollout.thinking_tokens} {other}: {reason}")
    sets = {f"eval.sets.{name}.max_tokens": eval_set for name, eval_set in settings.eval_sets.items()}
    longest = {
        name: eval_set.max_tokens for name, eval_set in sets.items() if eval_set.environment == "single_turn"
    }
    for name, most in {"eval.max_tokens": settings.eval.max_tokens, **longest}.items():
        if most is not None and most <= rollout.thinking_tokens:
            raise ValueError(
                f"rollout.thinking_tokens={rollout.thinking_tokens} with {name}={most}: nothing is left "
                "for the answer; give fewer, or raise the other"
            )


def _prompts_can_be_changed(settings: SettingFields) -> None:
    rollout, sets = settings.rollout, settings.eval_sets
    environments = {f"eval.sets.{name}.environment": str(sets[name].environment) for name in sets}
    for name, environment in {"rollout.environment": rollout.environment, **environments}.items():
        if rollout.system_prompt is not None and environment.startswith(PROGRAMS):
            raise ValueError(
                f"rollout.system_prompt with {name}={environment}: that program writes its messages "
                "itself; leave one of them out"
            )
    if rollout.max_prompt_tokens is not None and settings.model == TINY:
        raise ValueError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} with --model {TINY}: its tokenizer "
            "is not made yet when a run starts; leave one of them out"
        )


def _groups_have_advantages(settings: SettingFields) -> None:
    compares = any(each.advantage not in ALONE for each in settings.trainer.of_all_sources)
    alone = settings.rollout.samples_per_task < 2 and compares
    if settings.rl_phase == "both" and alone:
        raise ValueError(
            f"rollout.samples_per_task={settings.rollout.samples_per_task}: a group of one has no "
            "advantage, so nothing would be learnt; give at least 2, or --rl-phase rollout"
        )


def _rewards_are_several(settings: SettingFields) -> None:
    reward, environment = settings.rollout.reward, settings.rollout.environment
    gives_its_own = environment in WRITTEN or environment.startswith(PROGRAMS)
    is_decoupled = any(each.advantage == "decoupled" for each in settings.trainer.of_all_sources)
    if is_decoupled and settings.rollout.rewards:
        name = next(iter(settings.rollout.rewards))
        raise ValueError(
            f"trainer.advantage=decoupled with rollout.rewards.{name}: it standardises each of the same "
            "rewards; leave one of them out"
        )
    if is_decoupled and (gives_its_own or JOIN not in reward):
        where = f"environment={environment}" if gives_its_own else f"reward={reward}"
        raise ValueError(
            f"trainer.advantage=decoupled with rollout.{where}: there are not several rewards to "
            'standardise; give some, e.g. --reward "math=1 + length=0.1", or leave it out'
        )


def _written_answers_are_not_sampled(settings: SettingFields) -> None:
    environment, trainer = settings.rollout.environment, settings.trainer
    if environment not in WRITTEN:
        return
    preset = {"demonstration": "sft", "preference": "dpo", "labelled": "kto"}[environment]
    if settings.rollout.temperature != 1:
        raise ValueError(
            f"rollout.temperature={settings.rollout.temperature:g}: what rollout.environment={environment} "
            "gives is not sampled, and its likelihood is trained at temperature 1; leave it out"
        )
    sampled = [
        each
        for each in trainer.of_all_sources
        if each.clip != "likelihood" or each.engine_correction != "off"
    ]
    if sampled:
        trainer = sampled[0]
        raise ValueError(
            f"rollout.environment={environment} has no logprobs of an engine, which trainer.algorithm="
            f"{trainer.algorithm} needs (trainer.clip={trainer.clip}, "
            f"trainer.engine_correction={trainer.engine_correction}); add trainer.algorithm={preset}"
        )
    everything = [
        each for each in trainer.of_all_sources if each.advantage == "one" and each.reward_threshold is None
    ]
    if environment != "demonstration" and everything:
        trainer = everything[0]
        raise ValueError(
            f"rollout.environment={environment} with trainer.algorithm={trainer.algorithm} would train on "
            f"the bad answers too; add trainer.algorithm={preset}, or trainer.reward_threshold=1"
        )
    comparing = [each for each in trainer.of_all_sources if each.advantage not in ALONE]
    if environment == "labelled" and comparing:
        trainer = comparing[0]
        raise ValueError(
            f"rollout.environment=labelled has one answer a task, and trainer.advantage={trainer.advantage} "
            "compares several; add trainer.algorithm=kto"
        )


def _teacher_is_asked(settings: SettingFields) -> None:
    rollout, trainer, level = settings.rollout, settings.trainer, settings.cluster.max_async_level
    if any(each.kl == "off" and each.advantage == "zero" for each in trainer.of_all_sources):
        raise ValueError(
            "trainer.advantage=zero with trainer.kl=off learns nothing; leave one of them out, or give "
            "trainer.kl=k1"
        )
    if rollout.teachers and rollout.teacher is None:
        source, name = next(iter(rollout.teachers.items()))
        raise ValueError(
            f"rollout.teachers.{source}={name}: tasks of other sources need one, too; give rollout.teacher"
        )
    begins_itself = rollout.environment in WRITTEN or rollout.environment.startswith(PROGRAMS)
    if begins_itself and (rollout.teacher or "").startswith(SELF):
        raise ValueError(
            f"rollout.teacher={rollout.teacher}: in rollout.environment={rollout.environment} no prompt "
            "is a task's own, so there is no place for its hint; leave one of them out"
        )
    if trainer.reference != "teacher":
        return
    is_k1 = any(each.kl == "k1" for each in trainer.of_all_sources)
    if rollout.environment in WRITTEN and trainer.kl_in == "loss" and is_k1:
        raise ValueError(
            f"trainer.kl=k1 is for samples of the policy, and rollout.environment={rollout.environment} "
            "has written ones; leave one of them out"
        )
    if rollout.teacher is None and settings.rl_phase == "both":
        raise ValueError(
            "trainer.kl_to=teacher needs a teacher; give rollout.teacher=http://HOST:PORT/v1, a server "
            "whose model has the same tokenizer, or self:FIELD"
        )
    if rollout.temperature != 1:
        raise ValueError(
            f"rollout.temperature={rollout.temperature:g}: the teacher's logprobs are of temperature 1, "
            "and cannot be compared with the policy's; leave it out"
        )
    if (level or rollout.segment_tokens or trainer.replay_window > 1) and trainer.kl_in == "loss":
        raise ValueError(
            "trainer.kl_to=teacher with samples of older policies, for whose age trainer.kl_in=loss does "
            "not correct; add trainer.kl_in=token_reward, trainer.clip=ppo and "
            "trainer.engine_correction=truncated"
        )


def _routes_are_recorded(settings: SettingFields) -> None:
    trainer, environment = settings.trainer, settings.rollout.environment
    for is_given, other, reason in (
        (environment in WRITTEN, f"rollout.environment={environment}", "no engine has routed its samples"),
        (trainer.context_parallel > 1, f"trainer.context_parallel={trainer.context_parallel}",
         "ranks share a sequence's tokens, and each needs all of their routes"),
        (trainer.compile, "trainer.compile=true", "routers are not watched in compiled layers"),
    ):  # fmt: skip
        if trainer.routing_replay and is_given:
            raise ValueError(f"trainer.routing_replay with {other}: {reason}; leave one of them out")


def _flat_groups_count(settings: SettingFields) -> None:
    trainers = settings.trainer.of_all_sources
    replaces = settings.rollout.dynamic_sampling
    if replaces and any(trainer.advantage in ALONE for trainer in trainers):
        raise ValueError(
            f"rollout.dynamic_sampling replaces groups of equal rewards, which trainer.algorithm="
            f"{settings.trainer.algorithm} learns from; leave one of them out"
        )
    if replaces and any(trainer.keep_flat_groups for trainer in trainers):
        raise ValueError(
            "rollout.dynamic_sampling replaces groups of equal rewards, which trainer.algorithm="
            f"{settings.trainer.algorithm} would count beside those that replace them; add "
            "trainer.keep_flat_groups=false, or leave rollout.dynamic_sampling out"
        )


def _groups_vary(settings: SettingFields) -> None:
    if settings.rollout.dynamic_sampling and settings.rollout.samples_per_task < 2:
        raise ValueError(
            f"rollout.samples_per_task={settings.rollout.samples_per_task}: a group of one never varies, so "
            "rollout.dynamic_sampling would replace every group; give at least 2"
        )


RULES: tuple[Callable[[SettingFields], None], ...] = (
    _columns_are_of_data,
    _sets_have_names,
    _split_fits,
    _schedule_has_an_end,
    _delta_is_of_a_whole_model,
    _replay_window_is_kept,
    _older_samples_are_corrected,
    _segments_can_go_on,
    _reasoning_has_an_end,
    _prompts_can_be_changed,
    _groups_have_advantages,
    _rewards_are_several,
    _written_answers_are_not_sampled,
    _teacher_is_asked,
    _routes_are_recorded,
    _flat_groups_count,
    _groups_vary,
)
