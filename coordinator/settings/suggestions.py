"""Find the setting that a person meant: by what other trainers call it, by its last part, by its spelling."""

import difflib
from collections.abc import Mapping, Sequence

ALIASES = {
    "lr": "trainer.learning_rate",
    "lr_rate": "trainer.learning_rate",
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
    "fsdp_cpu_offload": "trainer.cpu_offload",
    "adam_offload": "trainer.cpu_offload",
    "ring_attn_size": "trainer.context_parallel",
    "do_eval": "eval.interval",
    "dataset_config": "tasks",
    "dataset_configs": "tasks",
    "dataset_split": "tasks",
    "dataset_train_split": "tasks",
    "dataset_test_split": "eval_tasks",
    "max_samples": "tasks",
    "train_max_samples": "tasks",
    "val_max_samples": "eval.max_tasks",
    "generation_batch_size": "rollout.tasks_per_iteration",
    "steps_per_generation": "rollout.tasks_per_iteration",
    "train.batch_size": "trainer.global_batch_size",
    "rollout.batch_size": "rollout.tasks_per_iteration",
    "lora_target_modules": "trainer.lora.targets",
    "vllm_server_base_url": "engine.url",
    "max_num_batched_tokens": "engine.args.max_num_batched_tokens",
    "max_num_seqs": "engine.args.max_num_seqs",
    "max_model_len": "engine.args.max_model_len",
    "enable_chunked_prefill": "engine.args.enable_chunked_prefill",
    "vllm_enable_sleep": "engine.sleep",
    "deepspeed_enable_sleep": "engine.sleep",
    "fsdp2_enable_sleep": "engine.sleep",
    "max_inflight_rollouts": "rollout.concurrency",
    "val_kwargs.temperature": "eval.temperature",
    "val_kwargs.top_p": "eval.top_p",
    "val_kwargs.top_k": "eval.top_k",
    "val_kwargs.n": "eval.samples_per_task",
    "val_kwargs.do_sample": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.samples_per_task",
    "eval.rollouts_per_example": "eval.samples_per_task",
    "eval.num_examples": "eval.max_tasks",
    "filter_groups.enable": "rollout.dynamic_sampling",
    "dynamic_filtering_reward_range": "rollout.dynamic_sampling",
    "max_num_gen_batches": "rollout.dynamic_limit",
    "use_token_level_loss": "trainer.aggregation",
    "stop_properly_penalty_coef": "trainer.overlong",
    "lr_warmup_steps": "trainer.warmup_steps",
    "ppo_micro_batch_size": "trainer.max_tokens_per_microbatch",
    "log_prob_micro_batch_size": "trainer.max_tokens_per_microbatch",
    "log_prob_micro_batch_size_per_gpu": "trainer.max_tokens_per_microbatch",
    "log_prob_max_token_len_per_gpu": "trainer.max_tokens_per_microbatch",
    "rollout_max_tokens_per_gpu": "trainer.max_tokens_per_microbatch",
    "eps_clip": "trainer.clip_low",
    "eps_clip_low_high": "trainer.clip_low",
    "vllm_is_correction_type": "trainer.engine_correction",
    "vllm_enable_is_correction": "trainer.engine_correction",
    "use_icepop": "trainer.engine_correction",
    "vllm_is_truncated_threshold": "trainer.engine_correction_cap",
    "entropy_loss_coef": "trainer.entropy_bonus",
    "async_train": "cluster.max_async_level",
    "advantage.estimator": "trainer.algorithm",
    "param_dtype": "trainer.compute_dtype",
    "enable_gradient_checkpointing": "trainer.activation_checkpointing",
    "gradient_checkpointing_enable": "trainer.activation_checkpointing",
    "ac.freq": "trainer.activation_checkpointing",
    "max_completion_tokens": "rollout.max_tokens",
    "prompt_dataset": "tasks",
    "ref_num_nodes": "cluster.num_nodes",
    "actor_num_nodes": "cluster.num_nodes",
    "actor_num_gpus_per_node": "cluster.expect_gpus",
    "model.name": "model",
    "wandb.project": "metrics.project",
    "wandb.key": "metrics.sinks",
    "log_extras.samples": "metrics.samples",
}
"""Settings by the names that TRL, verl and their like give to them; or by the last two parts of those."""
_STEPS = "in optimizer steps, not as a ratio"
_TOKENS = "in tokens, not in samples"
_STANDARDISED = "standardised if it divides by the deviation, centred if not"
_SPLIT = "as hf:NAME:CONFIG:SPLIT"
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
    "ppo_micro_batch_size": _TOKENS,
    "log_prob_micro_batch_size": _TOKENS,
    "log_prob_micro_batch_size_per_gpu": _TOKENS,
    "batch_size": "in samples; rollout.tasks_per_iteration is that / rollout.samples_per_task",
    "train.batch_size": "in samples",
    "rollout.batch_size": "in tasks",
    "generation_batch_size": "theirs / rollout.samples_per_task",
    "steps_per_generation": "theirs x the samples of a step / rollout.samples_per_task",
    "dataset_config": _SPLIT,
    "dataset_configs": _SPLIT,
    "dataset_split": _SPLIT,
    "dataset_train_split": _SPLIT,
    "dataset_test_split": _SPLIT,
    "max_samples": "cut the split: hf:NAME:CONFIG:train[:1000]",
    "train_max_samples": "cut the split: hf:NAME:CONFIG:train[:1000]",
    "do_eval": "in iterations, 0 for false",
    "val_kwargs.do_sample": "0 for false",
    "use_token_level_loss": "token for true, sequence for false",
    "stop_properly_penalty_coef": "keep, penalise or drop",
    "max_num_gen_batches": "times rollout.tasks_per_iteration",
    "eps_clip": "and the same for trainer.clip_high",
    "eps_clip_low_high": "the second of theirs is trainer.clip_high",
    "vllm_is_correction_type": "truncated for tis, masked for icepop",
    "vllm_enable_is_correction": "truncated for true, off for false",
    "use_icepop": "masked for true",
    "vllm_is_truncated_threshold": "the highest weight; the lowest is its inverse",
    "async_train": "1 for true, 0 for false",
    "wandb.key": "wandb; it reads WANDB_API_KEY",
    "actor_num_gpus_per_node": "of all nodes together, or one number for each",
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
_KL_WHERE = f"{_KL}; for KL in the reward, k1 and trainer.kl_in=token_reward"
_CRITIC = "there is no critic; trainer.advantage says what a reward is compared with"
_EPOCHS = "give --iterations: an epoch is the number of tasks / rollout.tasks_per_iteration"
_HUB = "run export writes a directory for the Hub"
_PLACE = "a run is known by its directory: --log-path DIR"
_RESUME = "the same command again resumes a run"
_RAY = "no Ray is needed; on machines of a Ray cluster: run launch --ray ADDRESS --num-nodes N"
_DEVICES = "all devices generate and train in turns; --place rollout=0-5 --place train=6,7 makes two crews"
_ENGINE = "the engine shares the GPUs; a server of your own: --engine-url http://HOST:PORT"
_PACKED = "rows are packed without padding where the model can do that"
_MICROBATCHES = "microbatches always have trainer.max_tokens_per_microbatch tokens"
_SAMPLES = "every sample is kept: run samples shows them"
_TOOLS = "tools belong to the environment: --environment my_tools.py:FUNCTION (docs/environments.md)"
_LOGGED = "every iteration is written to metrics.jsonl; run status --watch shows it"
_BATCHED = "the engine makes its batches by itself; rollout.concurrency limits them"
_FUNCTION = "name file and function: --reward my_rewards.py:score"
_SERVED = "--reward my_rewards.py:score, or a server: --reward http://HOST:PORT/score"
_OVERLONG = (
    "set trainer.overlong=penalise; trainer.overlong_buffer is theirs / rollout.max_tokens, the factor 1"
)
_VERIFIERS = "give both --tasks verifiers:NAME and --environment verifiers:NAME, with ,PARAMETER=VALUE"
_COLUMN = "name the column of the data: columns.messages=COLUMN"
ANSWERS = {
    "ray_init": _RAY,
    "ray_kwargs": _RAY,
    "beta": _KL,
    "use_kl_loss": _KL,
    "kl_coef": _KL_WHERE,
    "kl_loss_coef": _KL,
    "init_kl_coef": _KL_WHERE,
    "kl_tau": _KL,
    "kl.init_coef": _KL_WHERE,
    "use_kl_in_reward": "set trainer.kl=k1, trainer.kl_coefficient and trainer.kl_in=token_reward",
    "critic": _CRITIC,
    "critic_warmup": _CRITIC,
    "gamma": _CRITIC,
    "lam": _CRITIC,
    "epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_episodes": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "total_epochs": _EPOCHS,
    "output_dir": _PLACE,
    "default_local_dir": _PLACE,
    "run_name": _PLACE,
    "wandb.name": _PLACE,
    "overwrite_output_dir": _PLACE,
    "experiment_name": _PLACE,
    "kl_loss_type": _KL,
    "kl_penalty": _KL,
    "truncation": "no prompt is cut; rollout.max_prompt_tokens leaves out the longer ones",
    "use_remove_padding": _PACKED,
    "resume": _RESUME,
    "load_checkpoint": _RESUME,
    "resume_mode": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "log_completions": _SAMPLES,
    "prompt_key": _COLUMN,
    "input_key": _COLUMN,
    "dataset_text_field": _COLUMN,
    "label_key": "name the column of the data: columns.answer=COLUMN",
    "kl_estimator": _KL,
    "save_path": _PLACE,
    "ckpt_path": _PLACE,
    "rollout_data_dir": _SAMPLES,
    "remote_rm_url": _SERVED,
    "remote_url": _SERVED,
    "multi_turn": _TOOLS,
    "tools": _TOOLS,
    "tool_config_path": _TOOLS,
    "agent_func_path": _TOOLS,
    "agent": _TOOLS,
    "max_assistant_turns": _TOOLS,
    "max_tool_calling_iterations": _TOOLS,
    "inference_gpu_ids": _DEVICES,
    "trainer_gpu_ids": _DEVICES,
    "num_infer_gpus": _DEVICES,
    "num_train_gpus": _DEVICES,
    "colocate_all_models": _DEVICES,
    "vllm_num_engines": _DEVICES,
    "vllm_mode": _ENGINE,
    "vllm_device": _ENGINE,
    "enforce_eager": "an argument of vLLM is given as engine.args.enforce_eager=true",
    "zero_stage": "ZeRO 3 is trainer.layout=sharded; offloading is trainer.cpu_offload=true",
    "packing": _PACKED,
    "packing_samples": _PACKED,
    "use_dynamic_bsz": _MICROBATCHES,
    "use_dynamic_batch": _MICROBATCHES,
    "log_prob_use_dynamic_bsz": _MICROBATCHES,
    "apply_chat_template": "`messages` get the template; a text in `prompt` with columns.messages=prompt",
    "custom_reward_function": _FUNCTION,
    "reward_manager": _FUNCTION,
    "normalize_enable": "trainer.advantage compares rewards within their group",
    "reward_model": "a reward model is a server: --reward http://HOST:PORT/score",
    "reward_weights": "write each weight behind its reward: --reward math=1 --reward my_rewards:form=0.5",
    "logging_steps": _LOGGED,
    "logging_strategy": _LOGGED,
    "logging_first_step": _LOGGED,
    "log_extras.interval": _LOGGED,
    "per_device_eval_batch_size": _BATCHED,
    "micro_rollout_batch_size": _BATCHED,
    "rollout.micro_batch_size": _BATCHED,
    "gen_batch_size": "rollout.dynamic_sampling=true generates further tasks until there are enough",
    "filter_groups.metric": "rollout.dynamic_sampling=true looks at the reward",
    "overlong_buffer.enable": _OVERLONG,
    "overlong_buffer.len": _OVERLONG,
    "overlong_buffer.penalty_factor": _OVERLONG,
    "overlong_buffer_len": _OVERLONG,
    "overlong_penalty_factor": _OVERLONG,
    "overlong_buffer_cfg": _OVERLONG,
    "orchestrator.env": _VERIFIERS,
    "train.env": _VERIFIERS,
    "eval.env": "give --eval-tasks verifiers:NAME, with ,PARAMETER=VALUE",
    "max_len": "theirs is both together: rollout.max_prompt_tokens and rollout.max_tokens",
    "shuffle": "tasks are always shuffled, by rollout.seed",
    "save_hf_ckpt": "every checkpoint is a directory of Hugging Face's",
    "model_revision": "fetch the revision, and give its directory as --model DIR",
    "enable_lora": "an adapter is trained where trainer.lora.rank is set",
    "vllm_sync_backend": "the engine reads its weights from the run directory",
}
"""What to do in place of a setting of theirs that is none here, or two."""
NEAR, NEARER = 0.75, 0.85
"""How alike two spellings must be, from 0 to 1, with up to two letters more or less, and with more: nobody
means `gpus` with `bogus`, or `batch_size` with `gen_batch_size`.
"""
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
    return ALIASES.get(word) or ALIASES.get(_pair(word)) or next(by_leaf, None) or ALIASES.get(leaf)


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
        for near in difflib.get_close_matches(part, spellings, n=3, cutoff=NEAR):
            likeness = difflib.SequenceMatcher(None, near, part).ratio()
            if abs(len(near) - len(part)) <= 2 or likeness >= NEARER or near.startswith(part):
                return spellings[near]
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
    word = _plain(typed)
    note = COUNTED.get(_pair(word)) or COUNTED.get(word.rpartition(".")[2])
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
    if _pair(word) in ALIASES:  # closer than what holds for its whole section
        return None
    parts = (_pair(word), *reversed(word.split(".")))
    return next((ANSWERS[part] for part in parts if part in ANSWERS), None)


def _pair(word: str) -> str:
    """Return the last two parts of a dotted name, which say more than the last one alone; else the name."""
    return ".".join(word.split(".")[-2:])


def _plain(typed: str) -> str:
    return typed.strip().lstrip("-").replace("-", "_").lower()
