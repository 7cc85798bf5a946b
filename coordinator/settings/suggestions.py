"""Find the setting that a person meant: by what other trainers call it, by its last part, by its spelling."""

import difflib
from collections.abc import Sequence

ALIASES = {
    "lr": "trainer.learning_rate",
    "lr_scheduler_type": "trainer.schedule",
    "lr_scheduler": "trainer.schedule",
    "num_warmup_steps": "trainer.warmup_steps",
    "optimizer_betas": "trainer.betas",
    "adam_epsilon": "trainer.eps",
    "max_grad_norm": "trainer.clip_norm",
    "grad_clip": "trainer.clip_norm",
    "batch_size": "trainer.global_batch_size",
    "train_batch_size": "trainer.global_batch_size",
    "ppo_mini_batch_size": "trainer.global_batch_size",
    "per_device_train_batch_size": "trainer.max_tokens_per_microbatch",
    "micro_batch_size": "trainer.max_tokens_per_microbatch",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "use_torch_compile": "trainer.compile",
    "torch_compile": "trainer.compile",
    "epsilon": "trainer.clip_low",
    "epsilon_high": "trainer.clip_high",
    "clip_range": "trainer.clip_low",
    "loss_type": "trainer.algorithm",
    "algo": "trainer.algorithm",
    "lora_r": "trainer.lora.rank",
    "lora_rank": "trainer.lora.rank",
    "lora_alpha": "trainer.lora.alpha",
    "target_modules": "trainer.lora.targets",
    "tp": "engine.tensor_parallel_size",
    "max_new_tokens": "rollout.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "prompt_max_len": "rollout.max_prompt_tokens",
    "filter_overlong_prompts": "rollout.max_prompt_tokens",
    "num_generations": "rollout.samples_per_task",
    "num_return_sequences": "rollout.samples_per_task",
    "group_size": "rollout.samples_per_task",
    "rollout_batch_size": "rollout.tasks_per_iteration",
    "prompts_per_step": "rollout.tasks_per_iteration",
    "temp": "rollout.temperature",
    "stop_strings": "rollout.stop",
    "reward_fn": "rollout.reward",
    "reward_funcs": "rollout.reward",
    "env": "rollout.environment",
    "epochs": "iterations",
    "num_epochs": "iterations",
    "num_train_epochs": "iterations",
    "steps": "iterations",
    "max_steps": "iterations",
    "total_steps": "iterations",
    "eval_steps": "eval.interval",
    "eval_every": "eval.interval",
    "eval_dataset": "eval_tasks",
    "dataset": "tasks",
    "train_dataset": "tasks",
    "dataset_name": "tasks",
    "model_name": "model",
    "model_name_or_path": "model",
    "save_steps": "checkpoints.keep_every",
    "save_total_limit": "checkpoints.keep_last",
    "report_to": "metrics.sinks",
    "nnodes": "cluster.num_nodes",
    "nodes": "cluster.num_nodes",
    "gpus": "cluster.expect_gpus",
    "num_gpus": "cluster.expect_gpus",
    "n_gpus_per_node": "cluster.expect_gpus",
    "adv_estimator": "trainer.algorithm",
    "advantage_estimator": "trainer.algorithm",
    "loss_agg_mode": "trainer.aggregation",
    "scale_rewards": "trainer.advantage",
    "norm_adv_by_std_in_grpo": "trainer.advantage",
    "importance_sampling_level": "trainer.ratio",
    "policy_loss_type": "trainer.ratio",
    "clip_ratio": "trainer.clip_low",
    "clip_ratio_low": "trainer.clip_low",
    "clip_ratio_high": "trainer.clip_high",
    "mask_truncated_completions": "trainer.overlong",
    "ppo_micro_batch_size_per_gpu": "trainer.max_tokens_per_microbatch",
    "ppo_max_token_len_per_gpu": "trainer.max_tokens_per_microbatch",
    "gradient_accumulation_steps": "trainer.global_batch_size",
    "param_offload": "trainer.cpu_offload",
    "optimizer_offload": "trainer.cpu_offload",
    "actor_learning_rate": "trainer.learning_rate",
    "n": "rollout.samples_per_task",
    "n_samples_per_prompt": "rollout.samples_per_task",
    "rollouts_per_example": "rollout.samples_per_task",
    "generate_max_len": "rollout.max_tokens",
    "chat_template_kwargs": "rollout.chat_template",
    "apply_chat_template_kwargs": "rollout.chat_template",
    "filter_groups": "rollout.dynamic_sampling",
    "dynamic_filtering": "rollout.dynamic_sampling",
    "data.train_batch_size": "rollout.tasks_per_iteration",
    "train_files": "tasks",
    "prompt_data": "tasks",
    "val_files": "eval_tasks",
    "test_freq": "eval.interval",
    "val_before_train": "eval.interval",
    "num_iterations": "trainer.passes",
    "ppo_epochs": "trainer.passes",
    "max_epochs": "trainer.passes",
    "entropy_coef": "trainer.entropy_bonus",
    "entropy_coeff": "trainer.entropy_bonus",
    "save_freq": "checkpoints.keep_every",
    "total_epochs": "iterations",
    "total_training_steps": "iterations",
    "logger": "metrics.sinks",
    "use_wandb": "metrics.sinks",
    "use_vllm": "engine.kind",
    "gpu_memory_utilization": "engine.args.gpu_memory_utilization",
    "vllm_gpu_memory_utilization": "engine.args.gpu_memory_utilization",
    "tensor_model_parallel_size": "engine.tensor_parallel_size",
    "vllm_tensor_parallel_size": "engine.tensor_parallel_size",
}
"""Settings by the names that TRL, verl and their like give to them."""
_KL = "set both trainer.kl=k3 and trainer.kl_coefficient"
ANSWERS = {
    "beta": _KL,
    "use_kl_loss": _KL,
    "kl_coef": _KL,
    "kl_loss_coef": _KL,
    "init_kl_coef": _KL,
    "kl_tau": _KL,
    "reward_weights": "write each weight behind its reward: --reward math=1 --reward my_rewards:form=0.5",
    "logging_steps": "every iteration is written to metrics.jsonl; run status --watch shows it",
}
"""What to do in place of a setting of theirs that is none here, or two."""
NEAR = 0.6
"""How alike two spellings must be, from 0 to 1."""
SHORT, SHORT_NEAR = 5, 0.75
"""Of words with up to so many letters more must be the same: nobody means `gpus` with `bogus`."""
SHOWN = 4
"""So many settings of a section are named."""


def known_as(typed: str, known: Sequence[str]) -> str | None:
    """Return the setting of that name, whatever its section and spelled with - or _, or by another name."""
    word = _plain(typed)
    leaf = word.rpartition(".")[2]
    if word in known:
        return word
    by_leaf = (name for name in known if name.rpartition(".")[2] == leaf)
    return ALIASES.get(word) or next(by_leaf, None) or ALIASES.get(leaf)


def spelled_like(typed: str, known: Sequence[str]) -> str | None:
    """Return the setting, or section, whose name or last part is spelled most like what was typed."""
    word = _plain(typed)
    sections = {name.rpartition(".")[0] for name in known} - {""}
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    spellings = {**ALIASES, **leaves, **{name: name for name in (*known, *sections)}}
    for part in (word, word.rpartition(".")[2]):
        cutoff = NEAR if len(part) > SHORT else SHORT_NEAR
        if near := difflib.get_close_matches(part, spellings, n=1, cutoff=cutoff):
            return spellings[near[0]]
    return None


def meant(typed: str, known: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown setting: `did you mean trainer.learning_rate?`."""
    inside = [name for name in known if name.startswith(f"{_plain(typed)}.")]
    if inside:
        more = ", ..." if len(inside) > SHOWN else ""
        return f"did you mean a setting in it: {', '.join(inside[:SHOWN])}{more}?"
    if instead := answer(typed):
        return instead
    suggestion = known_as(typed, known) or spelled_like(typed, known)
    return f"did you mean {suggestion}?" if suggestion else "run --dry-run shows all settings"


def answer(typed: str) -> str | None:
    """Return what to do in place of a setting of others that is none here; None for another word."""
    return ANSWERS.get(_plain(typed).rpartition(".")[2])


def _plain(typed: str) -> str:
    return typed.strip().lstrip("-").replace("-", "_").lower()
