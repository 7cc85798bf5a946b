"""Settings of other trainers that say one thing together, and what is typed here for all of them."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from coordinator.settings.values_elsewhere import BY_VALUE, COUNTED, VALUES
from trainer.settings import TrainerSettings

Values = Mapping[str, Any]
"""Values by the last part of their names, and by the last two."""
_APART = ("ref", "critic", "reward_model", "reward", "eval")
"""Sections whose settings do not go with those of others."""

_DATA = ("dataset_name", "dataset", "train_dataset", "prompt_data", "prompt_dataset")
_CONFIG = ("dataset_config", "dataset_configs")
_SPLIT = ("dataset_train_split", "dataset_split", "prompt_split", "data_split")
_EVAL_DATA, _EVAL_SPLIT = ("eval_dataset",), ("dataset_test_split", "eval_split")
_BETAS = ("adam_beta1", "adam_beta2"), ("beta1", "beta2")
_OFFLOADS = (
    *("param_offload", "optimizer_offload", "grad_offload", "adam_offload"),
    *("offload_optimizer_device", "offload_param_device"),
)
_ADAPTERS, _RANKS = ("use_peft", "use_lora"), ("lora_r", "lora_rank")
_ALPHAS = ("lora_alpha", "lora.alpha")
_HOST, _PORT = ("vllm_server_host",), ("vllm_server_port",)
_IN_LOSS, _IN_REWARD = ("use_kl_loss", "kl.use_loss"), ("use_kl_in_reward",)
_OF_LOSS, _OF_REWARD = (
    ("kl_loss_coef", "beta", "kl_weight", "kl_beta"),
    ("kl_ctrl.kl_coef", "kl_coef", "kl_penalty_coef", "kl.init_coef", "init_kl_coef"),
)
_ESTIMATORS = ("kl_loss_type", "kl_estimator", "kl.estimator"), ("kl_penalty", "kl_estimator", "kl.estimator")
_REWARD = ("custom_reward_function.path", "custom_reward_function.name", "remote_rm_url", "remote_url")
_ALONE = {
    "kl_ctrl.kl_coef",
    "use_kl_in_reward",
    *(name for names in (*_ESTIMATORS, _REWARD) for name in names),
}
"""Names of which one is enough; of betas too."""
_CUTS = ("max_samples", "train_max_samples")
_OVERLONG = (
    *(
        "overlong_buffer.enable",
        "overlong_buffer.len",
        "overlong_buffer.penalty_factor",
        "overlong_buffer.log",
    ),
    *("overlong_buffer_cfg.enable", "overlong_buffer_cfg.len", "overlong_buffer_cfg.penalty_factor"),
    *("overlong_buffer_cfg.log", "overlong_buffer_len", "overlong_penalty_factor"),
)
_LONGEST = (
    *("max_response_length", "max_new_tokens", "generate_max_len", "rollout.max_tokens"),
    *("max_completion_length", "response_length"),
)
_ADVANTAGES = ("adv_estimator", "advantage_estimator", "advantage.estimator")
_LOSSES = ("loss_mode", "policy_loss_type", "loss_type")
_OF_PAIRS = ("sigmoid", "hinge", "ipo", "robust", "dpo", "kto", "apo_zero", "apo_down", "apo_zero_unpaired")
"""Losses whose `beta` is that of pairs, or labels."""
_PRESETS = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "geo_mean": "gmpo", "dppo_tv": "dppo"}
"""The preset of a loss of theirs with the advantage of GRPO."""
_BATCHES = ("gen_batch_size", "train_batch_size")
_GPUS = ("n_gpus_per_node", "actor_num_gpus_per_node", "num_gpus_per_node")
_NODES = ("nnodes", "actor_num_nodes", "num_nodes")
_CORRECTS = (
    *("is_correction_enable", "vllm_enable_is_correction", "enable_vllm_is_correction"),
    "vllm_importance_sampling_correction",
)
_CORRECTIONS = ("is_correction_type", "vllm_is_correction_type", "vllm_importance_sampling_mode")
_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
ADVANTAGES = "which needs trainer.advantage=centred, leave_one_out or whitened (grpo has none of them)"
"""What KL in the reward goes with."""
OFF = "set trainer.kl=off, which it is unless trainer.algorithm=grpo sets it to k3 with 0.04"


def joint_answer(typed: str, values: Mapping[str, Any]) -> str | None:
    """Return what is typed here for a setting of theirs and for those that go with it; None if none of those
    was given. `values`: the values of all settings that were given, by name.
    """
    if not (names_of_typed := _names(typed)):
        return None
    by_part = {name: value for key, value in values.items() for name in _names(key)}
    for names, partners, answer in _ANSWERS:
        least = 1 if answer is _betas or {*names_of_typed} & _ALONE else 2
        is_one = any(name in names for name in names_of_typed)
        is_given = sum(name in by_part for name in {*names, *partners}) >= least
        if is_one and is_given and (text := answer(by_part)):
            return text
    return None


def _names(typed: str) -> tuple[str, ...]:
    """Return the last part of a name and its last two parts; nothing in a section that is answered apart."""
    parts = typed.lstrip("-+~").replace("-", "_").lower().split(".")
    is_apart = {*parts[:-1]} & {*_APART} and not re.search("overlong|remote|custom", typed)
    return () if is_apart else (parts[-1], ".".join(parts[-2:]))[: len(parts)]


def _first(values: Values, names: tuple[str, ...]) -> Any:
    """Return the first value of these that says something."""
    return next((values[name] for name in names if values.get(name) not in (None, "")), None)


def _data_set(values: Values, setting: str = "tasks") -> str | None:
    """Return the answer with a data set of the Hub; None for a file, which has no configuration."""
    is_eval = setting == "eval_tasks"
    name = _first(values, (*_EVAL_DATA, *_DATA) if is_eval else _DATA)
    if not isinstance(name, str) or name.count("/") != 1 or name.startswith((".", "/")):
        return None
    config, cut = _first(values, _CONFIG), None if is_eval else _first(values, _CUTS)
    if not (split := _first(values, _EVAL_SPLIT if is_eval else _SPLIT)) and (config or cut):
        split = "test" if is_eval else "train"
    if type(cut) is int and cut > 0 and "[" not in str(split):
        split = f"{split}[:{cut}]"
    return f"did you mean {setting}={':'.join(str(part) for part in ('hf', name, config, split) if part)}?"


def _betas(values: Values) -> str | None:
    usual = TrainerSettings.model_fields["betas"].default
    typed = [_first(values, names) for names in zip(*_BETAS, strict=True)]
    pair = [value if isinstance(value, int | float) else usual[place] for place, value in enumerate(typed)]
    note = f" ({pair[1]:g} is the default here, 0.999 that of TRL and verl)" if typed[1] is None else ""
    return f"did you mean trainer.betas={pair[0]:g},{pair[1]:g}?{note}"


def _offload(values: Values) -> str | None:
    if any(values.get(name) in (True, "cpu") for name in _OFFLOADS):
        return "did you mean trainer.cpu_offload=true?"
    return "leave it out: nothing is offloaded by default"


def _adapters(values: Values) -> str | None:
    rank = _first(values, _RANKS)
    is_on = _first(values, _ADAPTERS) is not False
    return f"did you mean trainer.lora.rank={rank}?" if is_on else "leave it out: there is no adapter"


def _rank_stabilised(values: Values) -> str | None:
    """Return the alpha with which alpha / rank, the scale here, is alpha / sqrt(rank)."""
    rank, alpha = _first(values, (*_RANKS, "r", "lora.rank")), _first(values, _ALPHAS)
    if values.get("use_rslora") is not True or not type(rank) is type(alpha) is int or rank < 1:
        return None
    return f"did you mean trainer.lora.alpha={alpha * rank**0.5:g}? ({alpha} x sqrt({rank}))"


def _overlong(values: Values) -> str | None:
    if any(values.get(name) is False for name in _OVERLONG if name.endswith(".enable")):
        return "did you mean trainer.overlong=keep?"
    length = _first(values, tuple(name for name in _OVERLONG if name.endswith("len")))
    longest = _first(values, _LONGEST)
    if not type(length) is type(longest) is int or longest < 1:
        return None
    share = f"trainer.overlong=penalise trainer.overlong_buffer={length / longest:.3g}"
    factor = _first(values, tuple(name for name in _OVERLONG if name.endswith("factor")))
    note = "" if factor in (None, 1) else f"; the factor is 1 here, not {factor}"
    return f"did you mean {share}? ({length} of {longest} tokens{note})"


def _limit(values: Values) -> str | None:
    """Return the limit of dynamic sampling in times the tasks of an iteration: theirs counts batches."""
    numbers = [values.get(name) for name in ("max_num_gen_batches", *_BATCHES)]
    count, generated, trained = (number if type(number) is int else 0 for number in numbers)
    if min(count, generated, trained) < 1:
        return None
    limit = f"{count * generated / trained:g}"
    return f"did you mean rollout.dynamic_limit={limit}? ({count} x {generated} / {trained} tasks)"


def _pairs(values: Values) -> str | None:
    is_of_pairs = {str(values.get(name)) for name in ("trainer.algorithm", "loss_type")} & {*_OF_PAIRS}
    return f"did you mean trainer.pair_beta={values['beta']}?" if is_of_pairs else None


def _algorithm(values: Values) -> str | None:
    preset = _PRESETS.get(str(_first(values, _LOSSES)))
    is_of_groups = _first(values, _ADVANTAGES) in ("grpo", "group_norm")
    return f"did you mean trainer.algorithm={preset}?" if is_of_groups and preset else None


def _cispo(values: Values) -> str | None:
    """Return the bound of CISPO's weight: TRL's is that itself, verl's has no lower one from 1 on."""
    if _first(values, _LOSSES) != "cispo":
        return None
    high, low = values.get("epsilon_high"), values.get("clip_ratio_low")
    if values.get("loss_type") == "cispo" and isinstance(high, int | float):
        return f"did you mean trainer.clip_high={high - 1:g}? (1 + ours is theirs; epsilon does nothing)"
    return "did you mean trainer.clip_low=1? (no bound)" if isinstance(low, int | float) and low > 1 else None


def _gpus(values: Values) -> str | None:
    numbers = _first(values, _GPUS), _first(values, _NODES)
    is_known = all(type(number) is int for number in numbers)
    return f"did you mean cluster.expect_gpus={numbers[0] * numbers[1]}?" if is_known else None


def _step(values: Values) -> str | None:
    def count_of(name: str, usual: int) -> int:
        value = values.get(name)
        return value if type(value) is int and value > 0 else usual

    per_device, steps = count_of(_STEP[0], 8), count_of(_STEP[1], 1)
    tasks = per_device * count_of(_STEP[2], steps) / count_of("num_generations", 8)
    text = f"set trainer.global_batch_size to {per_device * steps} x processes"
    is_sampled = any(name in values for name in (_STEP[2], "num_generations", "max_completion_length"))
    return f"{text}, and rollout.tasks_per_iteration to {tasks:g} x processes" if is_sampled else text


def _correction(values: Values) -> str | None:
    word = "off" if _first(values, _CORRECTS) is False else _first(values, _CORRECTIONS)
    correction = VALUES.get(f"engine_correction={word}", word == "off" and "engine_correction=off")
    of_sequences = next((text for name in _CORRECTIONS if (text := BY_VALUE.get(f"{name}={word}"))), None)
    return f"did you mean trainer.{correction}?" if correction else of_sequences


def _async(values: Values) -> str | None:
    level = _first(values, ("async_queue_size",)) or 1
    is_off = _first(values, ("async_train", "async_enable")) is False
    return None if is_off else f"did you mean cluster.max_async_level={level}? ({COUNTED['async_train']})"


def _reward(values: Values) -> str | None:
    path, url = _first(values, _REWARD[:1]), _first(values, _REWARD[2:])
    name = _first(values, _REWARD[1:2]) or "compute_score" if path else "reward_func"
    is_server = str(url).startswith("http")
    return f"did you mean --reward {path or url}{'' if is_server else f':{name}'}?" if path or url else None


def _url(values: Values) -> str | None:
    return f"did you mean engine.url=http://{_first(values, _HOST)}:{_first(values, _PORT)}?"


def _kl(values: Values) -> str | None:
    in_loss, in_reward = _first(values, _IN_LOSS), _first(values, _IN_REWARD)
    is_reward = in_reward is True or (in_loss is None and bool({"init_kl_coef", "kl.init_coef"} & {*values}))
    of_place = (_OF_REWARD, _OF_LOSS) if is_reward else (_OF_LOSS, _OF_REWARD)
    numbers = [
        values[name] for name in (*of_place[0], *of_place[1]) if type(values.get(name)) in (int, float)
    ]
    if in_reward is in_loss is None and "kl_ctrl.kl_coef" in values and not {*_OF_LOSS} & {*values}:
        number = f"={values['kl_ctrl.kl_coef']}"
        return (
            "leave it out: verl ignores it without use_kl_in_reward=True; with that, set trainer.kl=k1, "
            f"trainer.kl_coefficient{number} and trainer.kl_in=token_reward, {ADVANTAGES}"
        )
    is_off = False in (in_loss, in_reward) and True not in (in_loss, in_reward) and not is_reward
    if is_off or (numbers and not any(numbers)):
        return OFF
    word = _first(values, (*_ESTIMATORS[is_reward], *_ESTIMATORS[not is_reward]))
    typed = "" if word is None else str(word).lower()
    estimate = typed if typed in ("k1", "k2", "k3") else VALUES.get(f"kl={typed}", "").partition("=")[2]
    kl = f"trainer.kl={estimate or ('k1' if is_reward else 'k3')}"
    coefficient = "trainer.kl_coefficient" + next((f"={number:g}" for number in numbers if number), "")
    if is_reward:
        return f"set {kl}, {coefficient} and trainer.kl_in=token_reward, {ADVANTAGES}"
    return f"set both {kl} and {coefficient}"


_ANSWERS: tuple[tuple[tuple[str, ...], tuple[str, ...], Callable[[Values], str | None]], ...] = (
    ((*_DATA, *_CONFIG, *_SPLIT, *_CUTS), (), _data_set),
    ((*_EVAL_DATA, *_EVAL_SPLIT), (*_DATA, *_CONFIG), partial(_data_set, setting="eval_tasks")),
    ((*_BETAS[0], *_BETAS[1]), (), _betas),
    (_OFFLOADS, (), _offload),
    ((*_ADAPTERS, *_RANKS), (), _adapters),
    ((*_HOST, *_PORT), (), _url),
    (("use_rslora", *_ALPHAS), (*_RANKS, "r", "lora.rank"), _rank_stabilised),
    (("max_num_gen_batches",), _BATCHES, _limit),
    (("beta",), ("trainer.algorithm", "loss_type"), _pairs),
    (_OVERLONG, _LONGEST, _overlong),
    ((*_ADVANTAGES, *_LOSSES), (), _algorithm),
    (("epsilon", "epsilon_high", "clip_ratio_low"), _LOSSES, _cispo),
    (_GPUS, _NODES, _gpus),
    ((*_CORRECTS, *_CORRECTIONS), (), _correction),
    (("async_train", "async_enable", "async_queue_size"), (), _async),
    (_STEP, (), _step),
    (_REWARD, (), _reward),
    ((*_IN_LOSS, *_IN_REWARD, *_OF_LOSS, *_OF_REWARD, *_ESTIMATORS[0], *_ESTIMATORS[1]), (), _kl),
)
"""Names of others; what may stand beside them; the answer where two or more of both are given."""
