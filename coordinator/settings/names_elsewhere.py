"""Names of settings in other trainers (TRL, verl, OpenRLHF, prime-rl), and what they are here.

A name is the last part of theirs, or the last two parts where one alone says too little.
"""

from collections.abc import Mapping

_NAMES = {
    "trainer.learning_rate": "lr lr_rate actor_learning_rate actor_lr",
    "trainer.schedule": "lr_scheduler_type lr_scheduler",
    "trainer.warmup_steps": (
        "num_warmup_steps warmup_ratio lr_warmup_steps_ratio lr_warmup_ratio lr_warmup_steps"
    ),
    "eval.interval": "eval_strategy eval_steps eval_every test_freq val_before_train do_eval",
    "checkpoints.keep_every": "save_strategy save_steps keep_interval ckpt.interval save_freq",
    "trainer.optimizer": "optim",
    "trainer.betas": "optimizer_betas adam_betas",
    "trainer.eps": "adam_epsilon",
    "trainer.clip_norm": "max_grad_norm grad_clip max_norm",
    "trainer.global_batch_size": (
        "batch_size train_batch_size ppo_mini_batch_size gradient_accumulation_steps train.batch_size"
    ),
    "trainer.max_tokens_per_microbatch": (
        "per_device_train_batch_size micro_batch_size micro_train_batch_size train_max_tokens_per_gpu "
        "seq_len ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu ppo_micro_batch_size "
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu "
        "rollout_max_tokens_per_gpu"
    ),
    "trainer.activation_checkpointing": (
        "gradient_checkpointing enable_gradient_checkpointing gradient_checkpointing_enable ac.freq"
    ),
    "trainer.compile": "use_torch_compile torch_compile",
    "trainer.clip_low": "epsilon clip_range clip_ratio clip_ratio_low eps_clip eps_clip_low_high",
    "trainer.clip_high": "epsilon_high clip_ratio_high",
    "trainer.algorithm": "loss_type algo adv_estimator advantage_estimator advantage.estimator",
    "trainer.lora.rank": "lora_r use_peft peft_config r lora_rank",
    "trainer.lora.alpha": "lora_alpha",
    "trainer.lora.targets": "target_modules lora_target_modules",
    "trainer.lora.base_dtype": "load_in_4bit",
    "engine.tensor_parallel_size": "tp tensor_model_parallel_size vllm_tensor_parallel_size",
    "rollout.max_tokens": (
        "max_new_tokens max_completion_length max_response_length generate_max_len max_completion_tokens"
    ),
    "rollout.max_prompt_tokens": "max_prompt_length prompt_max_len filter_overlong_prompts",
    "rollout.samples_per_task": (
        "num_generations num_return_sequences group_size n n_samples_per_prompt rollouts_per_example "
        "rollouts_per_prompt"
    ),
    "rollout.tasks_per_iteration": (
        "rollout_batch_size prompts_per_step data.train_batch_size generation_batch_size "
        "steps_per_generation rollout.batch_size"
    ),
    "rollout.temperature": "temp",
    "rollout.stop": "stop_strings",
    "rollout.reward": "reward_fn reward_funcs",
    "rollout.environment": "env",
    "iterations": "steps max_steps total_steps total_training_steps",
    "eval_tasks": "eval_dataset val_files dataset_test_split",
    "tasks": (
        "dataset train_dataset dataset_name train_files prompt_data dataset_config dataset_configs "
        "dataset_split dataset_train_split max_samples train_max_samples prompt_dataset"
    ),
    "model": "model_name actor_rollout_ref.model.path pretrain model_name_or_path model.name",
    "checkpoints.keep_last": "save_total_limit max_actor_ckpt_to_keep max_ckpt_num",
    "cluster.max_async_level": "async_queue_size async_train",
    "metrics.sinks": "report_to logger use_wandb wandb wandb.key",
    "cluster.num_nodes": "nnodes nodes ref_num_nodes actor_num_nodes num_machines",
    "cluster.expect_gpus": "gpus num_gpus n_gpus_per_node actor_num_gpus_per_node",
    "trainer.aggregation": "loss_agg_mode use_token_level_loss",
    "trainer.freeze_vision": "freeze_vision_tower freeze_multi_modal_projector freeze_vision_encoder",
    "trainer.advantage": (
        "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm multi_objective_aggregation"
    ),
    "trainer.ratio": "importance_sampling_level policy_loss_type loss_mode",
    "trainer.engine_correction": (
        "vllm_importance_sampling_correction rollout_correction enable_vllm_is_correction "
        "vllm_is_correction_type vllm_enable_is_correction use_icepop"
    ),
    "trainer.overlong": "mask_truncated_completions stop_properly_penalty_coef",
    "trainer.cpu_offload": "param_offload optimizer_offload fsdp_cpu_offload adam_offload",
    "rollout.chat_template": "chat_template_kwargs apply_chat_template_kwargs enable_thinking",
    "rollout.dynamic_sampling": (
        "filter_groups dynamic_filtering filter_groups.enable dynamic_filtering_reward_range"
    ),
    "trainer.passes": "num_iterations ppo_epochs max_epochs",
    "trainer.entropy_bonus": "entropy_coef entropy_coeff entropy_loss_coef",
    "trainer.entropy_step": "entropy_coef_delta",
    "engine.kind": "use_vllm actor_rollout_ref.rollout.name",
    "trainer.compute_dtype": "torch_dtype bf16 param_dtype mixed_precision model_dtype",
    "trainer.layout": "strategy fsdp deepspeed zero_optimization.stage",
    "trainer.processes_per_node": "num_processes",
    "rollout.seed": "data_seed",
    "trainer.dual_clip": "clip_ratio_c",
    "metrics.project": "project_name wandb_project wandb.project",
    "engine.args.gpu_memory_utilization": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "trainer.context_parallel": "ulysses_sequence_parallel_size context_parallel_size ring_attn_size",
    "eval.max_tasks": "val_max_samples eval.num_examples",
    "engine.url": "vllm_server_base_url",
    "engine.args.max_num_batched_tokens": "max_num_batched_tokens",
    "engine.args.max_num_seqs": "max_num_seqs",
    "engine.args.max_model_len": "max_model_len",
    "engine.args.enable_chunked_prefill": "enable_chunked_prefill",
    "engine.sleep": "vllm_enable_sleep deepspeed_enable_sleep fsdp2_enable_sleep free_cache_engine",
    "rollout.concurrency": "max_inflight_rollouts",
    "eval.temperature": "val_kwargs.temperature val_kwargs.do_sample",
    "eval.top_p": "val_kwargs.top_p",
    "eval.top_k": "val_kwargs.top_k",
    "eval.samples_per_task": "val_kwargs.n eval_n_samples_per_prompt eval.rollouts_per_example",
    "rollout.dynamic_limit": "max_num_gen_batches",
    "trainer.engine_correction_cap": "vllm_is_truncated_threshold",
    "metrics.samples": "log_extras.samples",
}
"""Their names of each setting."""
_NOTES = {
    "in optimizer steps: theirs x all steps of the run, which follow from --iterations": (
        "warmup_ratio lr_warmup_steps_ratio lr_warmup_ratio"
    ),
    "in samples: theirs x rollout.samples_per_task": "ppo_mini_batch_size",
    "the samples of a step: theirs x those of a microbatch x processes": "gradient_accumulation_steps",
    "in tokens, not in samples": (
        "per_device_train_batch_size micro_batch_size micro_train_batch_size ppo_micro_batch_size_per_gpu "
        "ppo_micro_batch_size log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu"
    ),
    "in samples; rollout.tasks_per_iteration is that / rollout.samples_per_task": "batch_size",
    "in samples": "train.batch_size",
    "in tasks": "rollout.batch_size",
    "theirs / rollout.samples_per_task": "generation_batch_size",
    "theirs x the samples of a step / rollout.samples_per_task": "steps_per_generation",
    "as hf:NAME:CONFIG:SPLIT": (
        "dataset_config dataset_configs dataset_split dataset_train_split dataset_test_split"
    ),
    "cut the split: hf:NAME:CONFIG:train[:1000]": "max_samples train_max_samples",
    "in iterations, 0 for false": "do_eval",
    "0 for false": "val_kwargs.do_sample",
    "token for true, sequence for false": "use_token_level_loss",
    "keep, penalise or drop": "stop_properly_penalty_coef",
    "times rollout.tasks_per_iteration": "max_num_gen_batches",
    "and the same for trainer.clip_high": "eps_clip clip_ratio clip_range",
    "the second of theirs is trainer.clip_high": "eps_clip_low_high",
    "truncated for tis, masked for icepop": "vllm_is_correction_type",
    "truncated for true, off for false": (
        "vllm_enable_is_correction vllm_importance_sampling_correction enable_vllm_is_correction"
    ),
    "masked for true": "use_icepop",
    "the highest weight; the lowest is its inverse": "vllm_is_truncated_threshold",
    "1 for true, 0 for false": "async_train",
    "wandb; it reads WANDB_API_KEY": "wandb.key",
    "of all nodes together, or one number for each": "actor_num_gpus_per_node n_gpus_per_node",
    "in iterations, each of which may have several optimizer steps": "max_steps",
    "in iterations": "eval_strategy save_strategy eval_steps save_steps save_freq keep_interval",
    "the policy before training is evaluated wherever eval.interval is set": "val_before_train",
    "which preset; its parts are trainer.ratio, trainer.aggregation and trainer.advantage": "loss_type",
    "token, sequence, sum, constant for token-mean, seq-mean-token-mean, -sum, -sum-norm": "loss_agg_mode",
    "standardised if it divides by the deviation, centred if not": (
        "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm"
    ),
    "decoupled for normalize_then_sum": "multi_objective_aggregation",
    "token or sequence": "importance_sampling_level",
    "sequence for gspo, token for vanilla": "loss_mode",
    "sequence for gspo, token for ppo": "policy_loss_type",
    "and the same for trainer.clip_high where they give one alone": "epsilon",
    "truncated, masked or off": "rollout_correction",
    "drop for true, keep for false": "mask_truncated_completions",
    "vllm for true": "use_vllm",
    "bfloat16 for true": "bf16",
    "bfloat16 for bf16": "mixed_precision model_dtype",
    "a number for true": "use_peft",
    "nf4 for true": "load_in_4bit",
    "sharded for fsdp and fsdp2": "strategy",
    "sharded": "fsdp",
    "sharded for ZeRO 3, else replicated": "deepspeed zero_optimization.stage",
    "of one node; theirs are of all": "num_processes",
    "the one seed of a run": "data_seed",
    "with trainer.clip=dual": "clip_ratio_c",
    "as rollout.chat_template.enable_thinking=VALUE": "enable_thinking",
}
"""What the value is here, for names whose value is another one."""
BY_SAMPLES = {"ppo_mini_batch_size": "x", "generation_batch_size": "/"}
"""How a number of theirs becomes ours with `rollout.samples_per_task`."""
_INSTEAD = {
    "no Ray is needed; on machines of a Ray cluster: run launch --ray ADDRESS --num-nodes N": (
        "ray_init ray_kwargs"
    ),
    "set both trainer.kl=k3 and trainer.kl_coefficient": (
        "beta use_kl_loss kl_loss_coef kl_tau kl_loss_type kl_penalty kl_estimator"
    ),
    (
        "set both trainer.kl=k3 and trainer.kl_coefficient; for KL in the reward, k1 and "
        "trainer.kl_in=token_reward"
    ): "kl_coef init_kl_coef kl.init_coef",
    "set trainer.kl=k1, trainer.kl_coefficient and trainer.kl_in=token_reward": "use_kl_in_reward",
    "there is no critic; trainer.advantage says what a reward is compared with": (
        "critic critic_warmup gamma lam"
    ),
    "give --iterations: an epoch is the number of tasks / rollout.tasks_per_iteration": (
        "epochs num_epochs num_episodes num_train_epochs total_epochs"
    ),
    "a file of settings is given as --config FILE": "config config_file",
    "a run is known by its directory: --log-path DIR": (
        "output_dir default_local_dir run_name wandb.name overwrite_output_dir experiment_name save_path "
        "ckpt_path log_path log_dir"
    ),
    "no prompt is cut; rollout.max_prompt_tokens leaves out the longer ones": "truncation",
    "rows are packed without padding where the model can do that": (
        "use_remove_padding packing packing_samples"
    ),
    "the same command again resumes a run": "resume load_checkpoint resume_mode resume_from_checkpoint",
    "run export writes a directory for the Hub": "push_to_hub hub_model_id hub_strategy",
    "every sample is kept: run samples shows them": "log_completions rollout_data_dir",
    "name the column of the data: columns.messages=COLUMN": "prompt_key input_key dataset_text_field",
    "name the column of the data: columns.answer=COLUMN": "label_key",
    "--reward my_rewards.py:score, or a server: --reward http://HOST:PORT/score": "remote_rm_url remote_url",
    "tools belong to the environment: --environment my_tools.py:FUNCTION (docs/environments.md)": (
        "multi_turn tools tool_config_path agent_func_path agent max_assistant_turns "
        "max_tool_calling_iterations"
    ),
    "all devices generate and train in turns; --place rollout=0-5 --place train=6,7 makes two crews": (
        "inference_gpu_ids trainer_gpu_ids num_infer_gpus num_train_gpus colocate_all_models vllm_num_engines"
    ),
    "the engine shares the GPUs; a server of your own: --engine-url http://HOST:PORT": (
        "vllm_mode vllm_device"
    ),
    "an argument of vLLM is given as engine.args.enforce_eager=true": "enforce_eager",
    "ZeRO 3 is trainer.layout=sharded; offloading is trainer.cpu_offload=true": "zero_stage",
    "microbatches always have trainer.max_tokens_per_microbatch tokens": (
        "use_dynamic_bsz use_dynamic_batch log_prob_use_dynamic_bsz"
    ),
    "`messages` get the template; a text in `prompt` with columns.messages=prompt": "apply_chat_template",
    "name file and function: --reward my_rewards.py:score": "custom_reward_function reward_manager",
    "trainer.advantage compares rewards within their group": "normalize_enable",
    "a reward model is a server: --reward http://HOST:PORT/score": "reward_model",
    "write each weight behind its reward: --reward math=1 --reward my_rewards:form=0.5": "reward_weights",
    "every iteration is written to metrics.jsonl; run status --watch shows it": (
        "logging_steps logging_strategy logging_first_step log_extras.interval"
    ),
    "the engine makes its batches by itself; rollout.concurrency limits them": (
        "per_device_eval_batch_size micro_rollout_batch_size rollout.micro_batch_size"
    ),
    "rollout.dynamic_sampling=true generates further tasks until there are enough": "gen_batch_size",
    "rollout.dynamic_sampling=true looks at the reward": "filter_groups.metric",
    "set trainer.overlong=penalise; trainer.overlong_buffer is theirs / rollout.max_tokens, the factor 1": (
        "overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor overlong_buffer_len "
        "overlong_penalty_factor overlong_buffer_cfg"
    ),
    "give both --tasks verifiers:NAME and --environment verifiers:NAME, with ,PARAMETER=VALUE": (
        "orchestrator.env train.env"
    ),
    "give --eval-tasks verifiers:NAME, with ,PARAMETER=VALUE": "eval.env",
    "theirs is both together: rollout.max_prompt_tokens and rollout.max_tokens": "max_len",
    "tasks are always shuffled, by rollout.seed": "shuffle",
    "every checkpoint is a directory of Hugging Face's": "save_hf_ckpt",
    "fetch the revision, and give its directory as --model DIR": "model_revision",
    "an adapter is trained where trainer.lora.rank is set": "enable_lora",
    "the engine reads its weights from the run directory": "vllm_sync_backend",
    "nothing here needs it; leave it out": (
        "remove_unused_columns dataloader_num_workers ddp_timeout balance_batch calculate_log_probs "
        "rollout.mode trainer.device"
    ),
    "run eval scores a checkpoint, or --model, alone": "val_only",
}
"""What to do in place of a setting of theirs that is none here, or two."""


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: text for text, names in table.items() for name in names.split()}


ALIASES, COUNTED, ANSWERS = map(_by_name, (_NAMES, _NOTES, _INSTEAD))
"""By their name: the setting here, what its value is here, what to do instead."""
