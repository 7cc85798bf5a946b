"""Find the setting that a person meant: by what other trainers call it, by its last part, by its spelling."""

import difflib
from collections.abc import Mapping, Sequence

ALIASES = {
    "lr": "trainer.learning_rate",
    "lr_scheduler_type": "trainer.schedule",
    "lr_scheduler": "trainer.schedule",
    "num_warmup_steps": "trainer.warmup_steps",
    "warmup_ratio": "trainer.warmup_steps",
    "lr_warmup_steps_ratio": "trainer.warmup_steps",
    "lr_warmup_ratio": "trainer.warmup_steps",
    "eval_strategy": "eval.interval",
    "save_strategy": "checkpoints.keep_every",
    "optim": "trainer.optimizer",
    "optimizer_betas": "trainer.betas",
    "adam_betas": "trainer.betas",
    "adam_epsilon": "trainer.eps",
    "max_grad_norm": "trainer.clip_norm",
    "grad_clip": "trainer.clip_norm",
    "max_norm": "trainer.clip_norm",
    "batch_size": "trainer.global_batch_size",
    "train_batch_size": "trainer.global_batch_size",
    "ppo_mini_batch_size": "trainer.global_batch_size",
    "per_device_train_batch_size": "trainer.max_tokens_per_microbatch",
    "micro_batch_size": "trainer.max_tokens_per_microbatch",
    "micro_train_batch_size": "trainer.max_tokens_per_microbatch",
    "train_max_tokens_per_gpu": "trainer.max_tokens_per_microbatch",
    "seq_len": "trainer.max_tokens_per_microbatch",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "use_torch_compile": "trainer.compile",
    "torch_compile": "trainer.compile",
    "epsilon": "trainer.clip_low",
    "epsilon_high": "trainer.clip_high",
    "clip_range": "trainer.clip_low",
    "loss_type": "trainer.algorithm",
    "algo": "trainer.algorithm",
    "lora_r": "trainer.lora.rank",
    "use_peft": "trainer.lora.rank",
    "peft_config": "trainer.lora.rank",
    "r": "trainer.lora.rank",
    "lora_rank": "trainer.lora.rank",
    "lora_alpha": "trainer.lora.alpha",
    "target_modules": "trainer.lora.targets",
    "load_in_4bit": "trainer.lora.base_dtype",
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
    "actor_rollout_ref.model.path": "model",
    "pretrain": "model",
    "model_name_or_path": "model",
    "save_steps": "checkpoints.keep_every",
    "save_total_limit": "checkpoints.keep_last",
    "max_actor_ckpt_to_keep": "checkpoints.keep_last",
    "max_ckpt_num": "checkpoints.keep_last",
    "keep_interval": "checkpoints.keep_every",
    "ckpt.interval": "checkpoints.keep_every",
    "async_queue_size": "cluster.max_async_level",
    "report_to": "metrics.sinks",
    "nnodes": "cluster.num_nodes",
    "nodes": "cluster.num_nodes",
    "gpus": "cluster.expect_gpus",
    "num_gpus": "cluster.expect_gpus",
    "n_gpus_per_node": "cluster.expect_gpus",
    "adv_estimator": "trainer.algorithm",
    "advantage_estimator": "trainer.algorithm",
    "loss_agg_mode": "trainer.aggregation",
    "freeze_vision_tower": "trainer.freeze_vision",
    "freeze_multi_modal_projector": "trainer.freeze_vision",
    "freeze_vision_encoder": "trainer.freeze_vision",
    "scale_rewards": "trainer.advantage",
    "norm_adv_by_std_in_grpo": "trainer.advantage",
    "importance_sampling_level": "trainer.ratio",
    "policy_loss_type": "trainer.ratio",
    "loss_mode": "trainer.ratio",
    "no_advantage_std_norm": "trainer.advantage",
    "multi_objective_aggregation": "trainer.advantage",
    "vllm_importance_sampling_correction": "trainer.engine_correction",
    "rollout_correction": "trainer.engine_correction",
    "enable_vllm_is_correction": "trainer.engine_correction",
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
    "actor_lr": "trainer.learning_rate",
    "n": "rollout.samples_per_task",
    "n_samples_per_prompt": "rollout.samples_per_task",
    "rollouts_per_example": "rollout.samples_per_task",
    "generate_max_len": "rollout.max_tokens",
    "chat_template_kwargs": "rollout.chat_template",
    "apply_chat_template_kwargs": "rollout.chat_template",
    "enable_thinking": "rollout.chat_template",
    "rollouts_per_prompt": "rollout.samples_per_task",
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
    "entropy_coef_delta": "trainer.entropy_step",
    "save_freq": "checkpoints.keep_every",
    "total_training_steps": "iterations",
    "logger": "metrics.sinks",
    "use_wandb": "metrics.sinks",
    "use_vllm": "engine.kind",
    "actor_rollout_ref.rollout.name": "engine.kind",
    "torch_dtype": "trainer.compute_dtype",
    "bf16": "trainer.compute_dtype",
    "strategy": "trainer.layout",
    "fsdp": "trainer.layout",
    "deepspeed": "trainer.layout",
    "project_name": "metrics.project",
    "wandb_project": "metrics.project",
    "gpu_memory_utilization": "engine.args.gpu_memory_utilization",
    "vllm_gpu_memory_utilization": "engine.args.gpu_memory_utilization",
    "tensor_model_parallel_size": "engine.tensor_parallel_size",
    "vllm_tensor_parallel_size": "engine.tensor_parallel_size",
    "ulysses_sequence_parallel_size": "trainer.context_parallel",
    "context_parallel_size": "trainer.context_parallel",
}
"""Settings by the names that TRL, verl and their like give to them."""
_STEPS = "in optimizer steps, not as a ratio"
_TOKENS = "in tokens, not in samples"
_STANDARDISED = "standardised if it divides by the deviation, centred if not"
COUNTED = {
    "warmup_ratio": _STEPS,
    "lr_warmup_steps_ratio": _STEPS,
    "lr_warmup_ratio": _STEPS,
    "ppo_mini_batch_size": "in samples: theirs x rollout.samples_per_task",
    "gradient_accumulation_steps": "the samples of a step: theirs x those of a microbatch x processes",
    "per_device_train_batch_size": _TOKENS,
    "micro_batch_size": _TOKENS,
    "micro_train_batch_size": _TOKENS,
    "ppo_micro_batch_size_per_gpu": _TOKENS,
    "max_steps": "in iterations, each of which may have several optimizer steps",
    "eval_strategy": "in iterations",
    "save_strategy": "in iterations",
    "eval_steps": "in iterations",
    "save_steps": "in iterations",
    "save_freq": "in iterations",
    "keep_interval": "in iterations",
    "val_before_train": "the policy before training is evaluated wherever eval.interval is set",
    "n_gpus_per_node": "of all nodes together, or one number for each",
    "loss_type": "which preset; its parts are trainer.ratio, trainer.aggregation and trainer.advantage",
    "loss_agg_mode": "token, sequence, sum, constant for token-mean, seq-mean-token-mean, -sum, -sum-norm",
    "scale_rewards": _STANDARDISED,
    "norm_adv_by_std_in_grpo": _STANDARDISED,
    "no_advantage_std_norm": _STANDARDISED,
    "multi_objective_aggregation": "decoupled for normalize_then_sum",
    "importance_sampling_level": "token or sequence",
    "loss_mode": "sequence for gspo, token for vanilla",
    "policy_loss_type": "sequence for gspo, token for ppo",
    "clip_ratio": "and the same for trainer.clip_high",
    "clip_range": "and the same for trainer.clip_high",
    "epsilon": "and the same for trainer.clip_high where they give one alone",
    "vllm_importance_sampling_correction": "truncated for true, off for false",
    "rollout_correction": "truncated, masked or off",
    "enable_vllm_is_correction": "truncated for true, off for false",
    "mask_truncated_completions": "drop for true, keep for false",
    "use_vllm": "vllm for true",
    "bf16": "bfloat16 for true",
    "use_peft": "a number for true",
    "load_in_4bit": "nf4 for true",
    "strategy": "sharded for fsdp and fsdp2",
    "fsdp": "sharded",
    "deepspeed": "sharded for ZeRO 3, else replicated",
    "enable_thinking": "as rollout.chat_template.enable_thinking=VALUE",
}
"""What the value is here, where the setting is theirs and the value is not."""
_KL = "set both trainer.kl=k3 and trainer.kl_coefficient"
_CRITIC = "there is no critic; trainer.advantage says what a reward is compared with"
_EPOCHS = "give --iterations: an epoch is the number of tasks / rollout.tasks_per_iteration"
_HUB = "run export writes a directory for the Hub"
_PLACE = "a run is known by its directory: --log-path DIR"
_RESUME = "the same command again resumes a run"
_RAY = "no Ray is needed; on machines of a Ray cluster: run launch --ray ADDRESS --num-nodes N"
_DEVICES = "all devices generate and train in turns; --place rollout=0-5 --place train=6,7 makes two crews"
_PACKED = "rows are packed without padding where the model can do that"
_SAMPLES = "every sample is kept: run samples shows them"
_TOOLS = "tools belong to the environment: --environment my_tools.py:FUNCTION (docs/environments.md)"
_COLUMN = "name the column of the data: columns.messages=COLUMN"
ANSWERS = {
    "ray_init": _RAY,
    "ray_kwargs": _RAY,
    "beta": _KL,
    "use_kl_loss": _KL,
    "kl_coef": _KL,
    "kl_loss_coef": _KL,
    "init_kl_coef": _KL,
    "kl_tau": _KL,
    "use_kl_in_reward": "set trainer.kl=k1, trainer.kl_coefficient and trainer.kl_in=token_reward",
    "critic": _CRITIC,
    "gamma": _CRITIC,
    "lam": _CRITIC,
    "epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "total_epochs": _EPOCHS,
    "output_dir": _PLACE,
    "default_local_dir": _PLACE,
    "run_name": _PLACE,
    "experiment_name": _PLACE,
    "kl_loss_type": _KL,
    "kl_penalty": _KL,
    "truncation": "no prompt is cut; rollout.max_prompt_tokens leaves out the longer ones",
    "use_remove_padding": _PACKED,
    "resume": _RESUME,
    "resume_mode": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "log_completions": _SAMPLES,
    "prompt_key": _COLUMN,
    "input_key": _COLUMN,
    "dataset_text_field": _COLUMN,
    "label_key": "name the column of the data: columns.answer=COLUMN",
    "kl_estimator": _KL,
    "save_path": _PLACE,
    "ckpt_path": _PLACE,
    "rollout_data_dir": _SAMPLES,
    "remote_rm_url": "--reward my_rewards.py:score, or a server: --reward http://HOST:PORT/score",
    "multi_turn": _TOOLS,
    "tools": _TOOLS,
    "tool_config_path": _TOOLS,
    "agent_func_path": _TOOLS,
    "agent": _TOOLS,
    "max_assistant_turns": _TOOLS,
    "max_tool_calling_iterations": _TOOLS,
    "inference_gpu_ids": _DEVICES,
    "trainer_gpu_ids": _DEVICES,
    "colocate_all_models": _DEVICES,
    "vllm_num_engines": _DEVICES,
    "vllm_mode": "the engine shares the GPUs; a server of your own: --engine-url http://HOST:PORT",
    "enforce_eager": "an argument of vLLM is given as engine.args.enforce_eager=true",
    "zero_stage": "ZeRO 3 is trainer.layout=sharded; offloading is trainer.cpu_offload=true",
    "packing": _PACKED,
    "packing_samples": _PACKED,
    "use_dynamic_bsz": "microbatches always have trainer.max_tokens_per_microbatch tokens",
    "apply_chat_template": "tasks with `messages` get the model's chat template, those with `prompt` none",
    "custom_reward_function": "name file and function: --reward my_rewards.py:score",
    "reward_model": "a reward model is a server: --reward http://HOST:PORT/score",
    "reward_weights": "write each weight behind its reward: --reward math=1 --reward my_rewards:form=0.5",
    "logging_steps": "every iteration is written to metrics.jsonl; run status --watch shows it",
}
"""What to do in place of a setting of theirs that is none here, or two."""
NEAR = 0.7
"""How alike two spellings must be, from 0 to 1: nobody means `gpus` with `bogus`."""
SHOWN = 4
"""So many settings of a section are named, and so many unknown ones are answered on one line."""
ALL_SHOWN = "run --dry-run shows all settings"


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
    # Within a section only what follows must be alike: trainer.project_name is not trainer.betas.
    whole = () if word.rpartition(".")[0] in sections else (*known, *sections)
    # Most of a long name of theirs is its sections, which all of them begin with.
    aliases = {name: setting for name, setting in ALIASES.items() if "." not in name}
    spellings = {**aliases, **leaves, **{name: name for name in whole}}
    for part in (word, word.rpartition(".")[2]):
        if near := difflib.get_close_matches(part, spellings, n=1, cutoff=NEAR):
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
    return f"did you mean {suggestion}?{counted(typed)}" if suggestion else ALL_SHOWN


def counted(typed: str) -> str:
    """Return what the value of a setting of theirs is here, as the end of a sentence; else nothing."""
    note = COUNTED.get(_plain(typed).rpartition(".")[2])
    return f" ({note})" if note else ""


def meant_each(unknown: Sequence[str], known: Sequence[str]) -> str:
    """Return a sentence about unknown settings; of a configuration of another trainer, a line for each."""
    meanings = {name: meant(name, known) for name in unknown}
    if len(unknown) > SHOWN:
        return listed("settings", meanings)
    others = (f"{name}: {meaning}" for name, meaning in list(meanings.items())[1:])
    return "; ".join([f"unknown setting {unknown[0]}; {meanings[unknown[0]]}", *others])


def listed(kind: str, meanings: Mapping[str, str]) -> str:
    """Return a line for each unknown word of a kind, and a last one for those that are like no other."""
    lines = [f"{name}: {meaning}" for name, meaning in meanings.items() if meaning != ALL_SHOWN]
    if nowhere := [name for name, meaning in meanings.items() if meaning == ALL_SHOWN]:
        lines.append(f"{ALL_SHOWN}, none is like {', '.join(nowhere)}")
    return "\n  ".join([f"{len(meanings)} unknown {kind}; change or remove each of them:", *lines])


def answer(typed: str) -> str | None:
    """Return what to do in place of a setting, or a section, of others that is none here; else None."""
    word = _plain(typed)
    return next((ANSWERS[part] for part in reversed(word.split(".")) if part in ANSWERS), None)


def _plain(typed: str) -> str:
    return typed.strip().lstrip("-").replace("-", "_").lower()
