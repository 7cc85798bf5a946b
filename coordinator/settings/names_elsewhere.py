"""Names of settings in other trainers (TRL, verl, OpenRLHF, prime-rl), and what they are here.

A name is the last part of theirs, or the last two parts where one alone says too little.
"""

from collections.abc import Mapping

_NAMES = {
    "trainer.learning_rate": "lr lr_rate actor_learning_rate actor_lr",
    "trainer.schedule": "lr_scheduler_type lr_scheduler warmup_style scheduler.type scheduler",
    "trainer.weight_decay": "l2",
    "trainer.warmup_steps": (
        "num_warmup_steps warmup_ratio lr_warmup_steps_ratio lr_warmup_ratio lr_warmup_steps"
    ),
    "eval.interval": (
        "eval_strategy eval_steps eval_every test_freq val_before_train do_eval eval.steps eval_on_start "
        "skip_first_step"
    ),
    "checkpoints.keep_every": "save_strategy save_steps keep_interval ckpt.interval save_freq",
    "trainer.optimizer": "optim optim.type optimizer.type optimizer.name",
    "trainer.betas": "optimizer_betas adam_betas adam_beta1 adam_beta2 beta1 beta2",
    "trainer.eps": "adam_epsilon",
    "trainer.clip_norm": "max_grad_norm grad_clip max_norm gradient_clipping clip_grad",
    "trainer.global_batch_size": (
        "batch_size train_batch_size ppo_mini_batch_size gradient_accumulation_steps train.batch_size "
        "data.batch_size num_mini_batches accumulate_grad_batches"
    ),
    "trainer.max_tokens_per_microbatch": (
        "per_device_train_batch_size micro_batch_size micro_train_batch_size train_max_tokens_per_gpu "
        "max_tokens_per_gpu seq_len ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
        "ppo_micro_batch_size log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_max_token_len_per_gpu rollout_max_tokens_per_gpu"
    ),
    "trainer.activation_checkpointing": (
        "gradient_checkpointing enable_gradient_checkpointing gradient_checkpointing_enable ac.freq ac"
    ),
    "trainer.compile": "use_torch_compile torch_compile",
    "trainer.clip_low": (
        "epsilon clip_range clip_ratio clip_ratio_low eps_clip eps_clip_low_high clip_eps clip_epsilon "
        "cliprange"
    ),
    "trainer.clip_high": "epsilon_high clip_ratio_high eps_high clip_eps_high",
    "trainer.algorithm": (
        "loss_type algo adv_estimator advantage_estimator advantage.estimator loss.type advantage.type "
        "algo.type"
    ),
    "trainer.lora.rank": "lora_r use_peft use_lora peft_config r lora_rank",
    "trainer.lora.alpha": "lora_alpha",
    "trainer.lora.targets": "target_modules lora_target_modules",
    "trainer.lora.base_dtype": "load_in_4bit",
    "engine.tensor_parallel_size": "tp tensor_model_parallel_size vllm_tensor_parallel_size",
    "trainer.tensor_parallel_size": (
        "megatron.tensor_model_parallel_size model.tp ds.tensor_parallel_size ds_tensor_parallel_size"
    ),
    "rollout.max_tokens": (
        "response_length max_new_tokens max_completion_length max_response_length generate_max_len "
        "max_completion_tokens"
    ),
    "rollout.max_prompt_tokens": "prompt_length max_prompt_length prompt_max_len filter_overlong_prompts",
    "rollout.samples_per_task": (
        "num_generations num_return_sequences group_size n n_samples_per_prompt rollouts_per_example "
        "rollouts_per_prompt rollout_n rloo_k n_rollouts num_rollouts n_samples num_samples "
        "samples_per_prompt num_samples_per_prompt num_samples_per_task"
    ),
    "rollout.tasks_per_iteration": (
        "rollout_batch_size prompts_per_step data.train_batch_size generation_batch_size "
        "steps_per_generation rollout.batch_size"
    ),
    "rollout.temperature": "temp",
    "rollout.stop": "stop_strings generation_kwargs.stop",
    "rollout.reward": "reward_fn reward_funcs",
    "rollout.environment": "env",
    "iterations": "steps max_steps total_steps total_training_steps",
    "eval_tasks": "eval_dataset val_files dataset_test_split eval.dataset eval.split eval_split",
    "tasks": (
        "dataset train_dataset dataset_name train_files prompt_data dataset_config dataset_configs "
        "dataset_split dataset_train_split max_samples train_max_samples prompt_dataset prompt_split "
        "data_split data.name"
    ),
    "model": "model_name model.path pretrain model_name_or_path model.name sft_model_path",
    "checkpoints.keep_last": (
        "save_total_limit max_actor_ckpt_to_keep max_ckpt_num ckpt.max_num remove_previous_ckpt_in_save"
    ),
    "cluster.max_async_level": (
        "async_queue_size async_train async_enable async_level max_staleness staleness"
    ),
    "metrics.sinks": "report_to logger wandb",
    "cluster.num_nodes": "nnodes nodes actor_num_nodes num_machines",
    "cluster.expect_gpus": "gpus num_gpus n_gpus_per_node actor_num_gpus_per_node",
    "trainer.aggregation": "loss_agg_mode use_token_level_loss",
    "trainer.freeze_vision": "freeze_vision_tower freeze_multi_modal_projector freeze_vision_encoder",
    "trainer.advantage": (
        "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm multi_objective_aggregation "
        "no_std_norm whiten_rewards normalize_advantages"
    ),
    "trainer.ratio": "importance_sampling_level policy_loss_type loss_mode ratio_type",
    "trainer.engine_correction": (
        "vllm_importance_sampling_correction rollout_correction enable_vllm_is_correction "
        "vllm_is_correction_type vllm_enable_is_correction use_icepop vllm_importance_sampling_mode "
        "rollout_is rollout_rs is_correction_enable is_correction_type"
    ),
    "trainer.overlong": "mask_truncated_completions stop_properly_penalty_coef missing_eos_penalty",
    "trainer.cpu_offload": (
        "param_offload optimizer_offload fsdp_cpu_offload adam_offload fsdp_offload_params "
        "offload_optimizer_device offload_param_device offload_policy grad_offload "
        "cpu_offload_optimizer optim_cpu_offload"
    ),
    "rollout.chat_template": (
        "chat_template_kwargs apply_chat_template_kwargs enable_thinking reasoning_effort"
    ),
    "rollout.dynamic_sampling": (
        "filter_groups dynamic_filtering filter_groups.enable "
        "online_difficulty_filtering dynamic_filtering_enable"
    ),
    "rollout.over_sample": "oversampling_factor over_sample_rate",
    "trainer.passes": "num_iterations ppo_epochs max_epochs num_ppo_epochs",
    "trainer.entropy_bonus": "entropy_coef entropy_coeff entropy_loss_coef",
    "trainer.entropy_step": "entropy_coef_delta",
    "engine.kind": "use_vllm rollout.name",
    "trainer.compute_dtype": (
        "torch_dtype bf16 param_dtype mixed_precision model_dtype trainer.dtype fsdp_config.dtype fp16 "
        "precision"
    ),
    "trainer.layout": (
        "strategy fsdp deepspeed zero_optimization.stage distributed_type sharding_strategy "
        "fsdp_sharding_strategy fsdp_size dp_replicate zpg fsdp_config"
    ),
    "trainer.processes_per_node": "num_processes",
    "rollout.seed": "data.seed data_seed data_loader_seed",
    "trainer.dual_clip": "clip_ratio_c",
    "metrics.project": "project_name wandb_project wandb.project",
    "engine.args.gpu_memory_utilization": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "trainer.context_parallel": (
        "ulysses_sequence_parallel_size context_parallel_size ring_attn_size cp sp_size"
    ),
    "eval.max_tasks": "val_max_samples eval.num_examples num_examples",
    "engine.url": "client.base_url vllm_server_base_url vllm_server_host vllm_server_port",
    "engine.args.max_model_len": "vllm_max_model_length max_model_len",
    "rollout.concurrency": "max_inflight_rollouts max_inflight",
    "eval.temperature": (
        "val_kwargs.temperature val_kwargs.do_sample eval.sampling.temperature "
        "orchestrator.eval.sampling.temperature"
    ),
    "eval.top_p": "val_kwargs.top_p eval.sampling.top_p orchestrator.eval.sampling.top_p",
    "eval.max_tokens": (
        "eval.sampling.max_tokens orchestrator.eval.sampling.max_tokens "
        "eval.sampling.max_completion_tokens orchestrator.eval.sampling.max_completion_tokens"
    ),
    "rollout.teacher": ("teacher_model.model.name orchestrator.teacher_model.model.name teacher.base_url"),
    "eval.top_k": "val_kwargs.top_k",
    "eval.samples_per_task": (
        "val_kwargs.n eval_n_samples_per_prompt eval.rollouts_per_example num_generations_eval "
        "eval.n_samples_per_prompt"
    ),
    "rollout.dynamic_limit": "max_num_gen_batches",
    "trainer.engine_correction_cap": (
        "vllm_is_truncated_threshold vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
        "rollout_is_threshold tis_imp_ratio_cap is_correction_threshold rollout_rs_threshold"
    ),
    "trainer.undesirable_weight": "desirable_weight",
    "trainer.pair_beta": "dpo_beta kto_beta model.beta",
    "checkpoints.best_by": "metric_for_best_model best_metric_key",
    "checkpoints.keep_best": "load_best_model_at_end",
    "metrics.samples": "log_extras.samples",
    "trainer.routing_replay": "router_replay.mode enable_rollout_routing_replay enable_router_replay",
    "rollout.segment_tokens": "partial_rollout_enable partial_rollout",
    "engine.deterministic": "full_determinism full_determinism_enable",
    "trainer.share_prompts": "use_prefix_grouper",
    "rollout.tool_parser": "tool_call_parser multi_turn.format",
    "rollout.reasoning_end": "reasoning_parser",
    "engine.start_timeout_s": "vllm_server_timeout",
    "trainer.entropy_target": "use_adaptive_entropy",
    "trainer.keep_flat_groups": "filter_zero_advantages",
    "trainer.collective_timeout_s": "ddp_timeout nccl_timeout dist_timeout_seconds",
    "engine.args.dtype": "rollout.dtype inference.model.dtype",
}
"""Their names of each setting."""


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each name in a table of names by text."""
    return {name: text for text, names in table.items() for name in names.split()}


ALIASES = by_name(_NAMES)
"""By their name: the setting here."""
