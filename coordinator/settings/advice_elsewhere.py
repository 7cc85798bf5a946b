"""Names of settings in other trainers that are no setting here, or two: what to do in place of each.

A name is as in `names_elsewhere`. The value that was typed takes the place of what stands in braces; that of
`{NAME}` is the last part of the name, that of `{ENVIRONMENT}` the first `id` in the value.
"""

from coordinator.settings.names_elsewhere import by_name

_INSTEAD = {
    "no Ray is needed; on a Ray cluster: run launch --ray ADDRESS --num-nodes N": "ray_init ray_kwargs",
    "set both trainer.kl=k3 and trainer.kl_coefficient": (
        "beta use_kl_loss kl_loss_coef kl_loss_type kl_penalty kl_estimator kl.estimator kl.use_loss "
        "use_kl_estimator_k3 kl_weight kl_penalty_coef kl_beta"
    ),
    (
        "set both trainer.kl=k3 and trainer.kl_coefficient; for KL in the reward, k1 and "
        "trainer.kl_in=token_reward"
    ): "kl_coef init_kl_coef kl.init_coef",
    "set trainer.kl=k1, trainer.kl_coefficient and trainer.kl_in=token_reward": "use_kl_in_reward",
    "set trainer.lora.alpha to theirs x sqrt(trainer.lora.rank)": "use_rslora",
    "there is no critic; trainer.advantage says what a reward is compared with": (
        "critic critic_warmup gamma lam lambd value_clip critic_pretrain critic_learning_rate "
        "critic_num_nodes critic_num_gpus_per_node freezing_actor_steps max_critic_ckpt_to_keep vf_coef "
        "cliprange_value"
    ),
    "give --iterations: an epoch is the number of tasks / rollout.tasks_per_iteration": (
        "epochs num_epochs num_episodes num_train_epochs total_epochs total_episodes episodes n_epochs "
        "num_iters num_train_steps"
    ),
    "a file of settings is given as --config FILE": "config config_file",
    "give the directory of a run as --log-path {DIR}": (
        "log_path logpath output_dir default_local_dir save_path ckpt_path checkpoint_dir save_dir"
    ),
    "a run is known by its directory, --log-path; leave it out": (
        "run_name wandb.name overwrite_output_dir experiment_name log_dir logging_dir "
        "wandb_run_name wandb_group default_hdfs_dir wandb.group ckpt.path wandb_name"
    ),
    "no prompt is cut; rollout.max_prompt_tokens leaves out the longer ones": "truncation truncation_mode",
    "rows are packed without padding where the model can do that": (
        "use_remove_padding packing packing_samples padding_free group_by_length packing_strategy "
        "train_sampling_strategy eval_packing"
    ),
    "the same command again resumes a run": (
        "resume load_checkpoint resume_mode resume_from_checkpoint resume_from_path resume_step "
        "load_enable resume_ckpt"
    ),
    "run export writes a directory for the Hub": (
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_token hub_always_push hub_revision"
    ),
    "every sample is kept: run samples shows them": (
        "log_completions rollout_data_dir num_completions_to_print validation_data_dir "
        "log_val_generations log_multimodal log_unique_prompts log_completions_hub_repo"
    ),
    "name the column of the data: columns.messages={COLUMN}": (
        "prompt_key input_key dataset_text_field formatting_func"
    ),
    "name the column of the data: columns.answer={COLUMN}": "label_key output_key response_key",
    "name the column of the data: columns.images={COLUMN}": "image_key",
    "name the column of the data: columns.source={COLUMN}": "reward_fn_key",
    "name the column of the data: columns.chosen={COLUMN}": "chosen_key",
    "name the column of the data: columns.rejected={COLUMN}": "rejected_key",
    "--reward my_rewards.py:score, or a server: --reward http://HOST:PORT/score": "remote_rm_url remote_url",
    "tools belong to the environment: --environment my_tools.py:FUNCTION (docs/environments.md)": (
        "multi_turn tools tool_config_path agent"
    ),
    "give --environment {my_agent.py}:FUNCTION (docs/environments.md)": "agent_func_path",
    "what makes a sample is an environment: --environment my_agent.py:FUNCTION (docs/environments.md)": (
        "rollout_func environment_factory"
    ),
    "write the tasks into a file: --tasks tasks.jsonl, whose fields docs/tasks.md lists": "custom_cls",
    "turns belong to the environment: --environment my_tools.py:FUNCTION (docs/environments.md)": (
        "max_assistant_turns max_tool_calling_iterations max_turns max_user_turns max_steps_per_episode"
    ),
    "the engine leaves the GPU to the trainer by itself; engine.sleep says how": (
        "free_cache_engine vllm_enable_sleep vllm_enable_sleep_mode deepspeed_enable_sleep "
        "fsdp2_enable_sleep enable_sleep_mode enable_sleep"
    ),
    "trainer.compile=true compiles the layers, and has no other choice": (
        "compile.fullgraph compile.dynamic compile.mode compile.backend fullgraph"
    ),
    "a node's log is written whole; run logs shows it": (
        "log.level log_level log_level_replica log.vf_level log.file logging_level verbosity"
    ),
    "the layers are those of transformers; leave it out": "model.impl",
    "all devices generate and train in turns; --place rollout=0-5 --place train=6,7 makes two crews": (
        "inference_gpu_ids trainer_gpu_ids num_infer_gpus num_train_gpus colocate_all_models "
        "vllm_num_engines colocate_all colocate_actor_ref colocate_critic_reward num_engines "
        "num_train_nodes num_infer_nodes num_infer_replicas"
    ),
    "the engine shares the GPUs; a server of your own: --engine-url http://HOST:PORT": (
        "vllm_mode vllm_device"
    ),
    "set engine.args.{NAME}={VALUE}, an argument of vLLM": (
        "enforce_eager engine_kwargs cudagraph_capture_sizes scheduling_policy "
        "enable_expert_parallel all2all_backend enable_eplb kv_cache_dtype swap_space quantization "
        "max_num_batched_tokens max_num_seqs enable_prefix_caching enable_chunked_prefill"
    ),
    "an argument of vLLM is given as engine.args.NAME=VALUE": "vllm_model_impl fp8 kv_cache_offload",
    "ZeRO 3 is trainer.layout=sharded; offloading is trainer.cpu_offload=true": "zero_stage",
    "microbatches always have trainer.max_tokens_per_microbatch tokens": (
        "use_dynamic_bsz use_dynamic_batch log_prob_use_dynamic_bsz dynamic_batch_enable"
    ),
    "`messages` get the template; a string in `prompt` with columns.messages=prompt": (
        "apply_chat_template input_template"
    ),
    "a reward of yours is --reward my_rewards.py:score": (
        "custom_reward_function reward_manager reward_manager.name"
    ),
    "trainer.advantage compares rewards within their group; leave it out": (
        "normalize_enable normalize_reward"
    ),
    "a reward model is a server: --reward http://HOST:PORT/score": (
        "reward_model reward_pretrain reward_model_path reward.model_name_or_path reward_model_name_or_path"
    ),
    "write each weight after its reward: --reward math=1 --reward my_rewards:form=0.5": "reward_weights",
    "every iteration is written to metrics.jsonl; run status --watch shows it": (
        "logging_steps logging_strategy logging_first_step log_extras.interval"
    ),
    "the engine makes its batches by itself; rollout.concurrency limits them": (
        "per_device_eval_batch_size micro_rollout_batch_size rollout.micro_batch_size val_batch_size "
        "vllm_generate_batch_size local_rollout_forward_batch_size agent.num_workers"
    ),
    "rollout.dynamic_sampling=true generates further tasks until there are enough": "gen_batch_size",
    "rollout.dynamic_sampling=true looks at the reward": "filter_groups.metric",
    "set trainer.overlong=penalise; trainer.overlong_buffer is theirs / rollout.max_tokens, the factor 1": (
        "overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor overlong_buffer_len "
        "overlong_penalty_factor overlong_buffer_cfg overlong_buffer_cfg.enable overlong_buffer_cfg.len "
        "overlong_buffer_cfg.penalty_factor"
    ),
    (
        "give both --tasks verifiers:{ENVIRONMENT} and --environment verifiers:{ENVIRONMENT}, with "
        ",PARAMETER=VALUE"
    ): "orchestrator.env train.env train.source",
    "give --eval-tasks verifiers:{ENVIRONMENT}, with ,PARAMETER=VALUE": "eval.env eval.source",
    "theirs is both together: rollout.max_prompt_tokens and rollout.max_tokens": "max_len",
    "no sample is cut: rollout.max_prompt_tokens and rollout.max_tokens are how long its parts may be": (
        "max_length max_seq_length max_seq_len seq_length orchestrator.seq_len"
    ),
    "tasks are always shuffled, by rollout.seed": "shuffle shuffle_dataset validation_shuffle",
    "every checkpoint is a directory of Hugging Face's": (
        "save_hf_ckpt save_safetensors zero3_save_16bit_model save_contents save_hf"
    ),
    "trainer.save_interval says how often the optimizer's state is saved": (
        "save_only_model disable_ds_ckpt disable_ds"
    ),
    "the reference has no nodes, no layout and no offloading of its own; leave it out": (
        "ref ref_num_nodes ref_num_gpus_per_node"
    ),
    "a judge or reward model has no nodes of the run: --reward http://HOST:PORT/score; leave it out": (
        "reward_num_nodes reward_num_gpus_per_node reward.num_nodes reward.num_gpus_per_node"
    ),
    "rollout.dynamic_sampling=true leaves out groups whose rewards are all the same, whatever they are": (
        "dynamic_filtering_reward_range dynamic_filtering_range"
    ),
    "the reference stays the model that the run started from; leave it out": (
        "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha ref_model reference_model ref_model_path"
    ),
    "samples are drawn by the policy's own probabilities, on which it is trained; leave it out": (
        "repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size length_penalty "
        "vllm_structured_outputs_regex vllm_guided_decoding_regex"
    ),
    "samples are always drawn; rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p say how": (
        "do_sample"
    ),
    "all tokens of a sample are trained on; leave it out": (
        "top_entropy_quantile clip_cov_ratio kl_cov_ratio clip_cov_lb clip_cov_ub ppo_kl_coef"
    ),
    "of a written conversation its last answer alone is trained on": (
        "completion_only_loss assistant_only_loss"
    ),
    "an adapter has trainer.lora.rank, trainer.lora.alpha and trainer.lora.targets alone; leave it out": (
        "lora_dropout use_dora modules_to_save lora_task_type exclude_modules lora.dropout "
        "lora_modules_to_save lora_target_parameters"
    ),
    "code of a model is never run; take one that transformers has": "trust_remote_code external_lib",
    "trainer.kl_coefficient stays as it is; leave it out": (
        "kl_ctrl.type target_kl kl_target horizon kl_horizon kl.target"
    ),
    "there is no pipeline and no expert parallelism: trainer.layout=sharded, trainer.tensor_parallel_size": (
        "pipeline_model_parallel_size expert_model_parallel_size expert_parallel_size "
        "expert_tensor_parallel_size ep pp"
    ),
    "the machines meet in the directory --log-path, and each is given its rank: --worker RANK": (
        "machine_rank local_rank main_process_ip main_process_port master_port rdzv_backend same_network"
    ),
    "fetch the revision, and give its directory as --model DIR": "model_revision",
    "trainer.lora.rank says that there is an adapter": "enable_lora max_lora_rank max_loras max_cpu_loras",
    "the engine reads its weights from the run directory; leave it out": (
        "vllm_sync_backend sync_backend sync_with_ray weight_broadcast update_weights_bucket_megabytes "
        "rollout_transport load_format"
    ),
    "nothing here needs it; leave it out": (
        "remove_unused_columns dataloader_num_workers balance_batch calculate_log_probs rollout.mode "
        "trainer.device dataloader_drop_last average_tokens_across_devices pad_to_multiple_of "
        "disable_dropout ds3_gather_for_generation use_liger use_liger_kernel use_liger_loss "
        "attn_implementation flash_attn use_fused_kernels filter_overlong_prompts_workers "
        "return_raw_chat hybrid_engine use_shm entropy_checkpointing forward_prefetch "
        "reshard_after_forward wrap_policy.min_num_params weights.interval fsdp_auto_wrap_policy "
        "fsdp_backward_prefetch fsdp_transformer_layer_cls_to_wrap fsdp_version fsdp_state_dict_type "
        "fsdp_reshard_after_forward fsdp_use_orig_params fsdp_sync_module_states "
        "fsdp_cpu_ram_efficient_loading zero3_init_flag compute_environment downcast_bf16 "
        "auto_find_batch_size torch_empty_cache_steps disable_tqdm model.attn precompute_ref_log_probs "
        "_target_ deepcompile overlap_comm gradient_checkpointing_reentrant "
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs disable_fast_tokenizer "
        "use_universal_ckpt ring_attn_head_stride experts_implementation reward.offload "
        "use_orig_params entropy_from_logits_with_chunking forward_only calculate_entropy load_contents "
        "async_save del_local_ckpt_after_load ray_wait_register_center_timeout use_legacy_worker_impl "
        "disable_log_stats multi_stage_wake_up skip_tokenizer_init layered_summon return_raw_input_ids "
        "return_full_prompt return_multi_modal_inputs cache_implementation use_transformers_paged "
        "use_transformers_continuous_batching vllm_group_port streaming dataset_streaming "
        "dataset_num_proc preprocessing_num_workers bf16_full_eval fp16_full_eval tf32 matmul_precision "
        "reduce_dtype buffer_dtype grad_accum_dtype optimization_dtype save_on_each_node "
        "log_on_each_node torch_compile_backend torch_compile_mode do_train dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor ddp_find_unused_parameters "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend use_cache liger_kernel_config "
        "logging_nan_inf_filter include_num_input_tokens_seen skip_memory_metrics prediction_loss_only "
        "max_workers use_flash_attention sync_interval weight_sync_interval image_patch_size "
        "max_images_per_prompt task_type debug deepspeed_multinode_launcher main_training_function "
        "tpu_env tpu_use_cluster tpu_use_sudo enable_cpu_affinity renderer.name initial_inflight "
        "fused_lm_head_token_chunk_size fsdp_config.seed max_resp_len rollout_correction.loss_type "
        "deployment.type transfer_queue trackio_space_id use_ms launch_reward_fn_async reward.num_workers "
        "reward_manager.num_workers defaults hydra"
    ),
    "the built-in reward code runs programs in a jail of its own; leave it out": "sandbox_fusion",
    "on Slurm nodes start with srun (docs/clusters.md)": "slurm",
    "run profile says where the time goes; leave it out": (
        "profiler global_profiler profile profile_steps npu_profile"
    ),
    "a sample's advantage counts as trainer.advantage makes it; leave it out": (
        "adv_tau teacher_tau length_weighted_mean"
    ),
    "the engine has no port; a server of your own: --engine-url http://HOST:PORT": (
        "server.port server.host inference.server"
    ),
    "the trainer has a process for each GPU of the nodes; leave it out": "num_train_workers",
    "the trainer computes the old policy's logprobs by itself; leave it out": (
        "bypass_mode use_rollout_log_probs"
    ),
    "logits always become float32 before logprobs are taken; leave it out": (
        "cast_lm_head_to_fp32 fp32_lm_head"
    ),
    "a teacher is a server: rollout.teacher=http://HOST:PORT/v1": "teacher.name",
    "run eval scores a checkpoint, or --model, alone": "val_only",
    "rollout.task_sampling=curriculum prefers tasks that are sometimes solved": (
        "easy_threshold hard_threshold easy_fraction hard_fraction"
    ),
    "the loss of a pair is DPO's with trainer.pair_beta alone; leave it out": (
        "rpo_alpha ld_alpha label_smoothing label_smoothing_factor loss_weights use_weighting "
        "discopop_tau f_divergence_type"
    ),
    "4 bits are trainer.lora.base_dtype=nf4; there are no 8": (
        "load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage bnb_4bit_compute_dtype"
    ),
    "there is none of that; leave it out": (
        "aux_loss_coef router_aux_loss_coef output_router_logits moe_aux_loss_coeff neftune_noise_alpha mtp "
        "enable_ema ema_beta qat greater_is_better use_bias_correction_kl"
    ),
    "set trainer.engine_correction=masked and trainer.engine_correction_cap, or engine_sequence_cap": (
        "token_mask_high token_mask_low geo_mask_high geo_mask_low sequence_mask_high sequence_mask_low"
    ),
    "trainer.engine_correction corrects for what engine and trainer differ in; leave it out": "kl_tau",
    "metrics.sinks=wandb; it reads WANDB_API_KEY, WANDB_ENTITY and WANDB_MODE": (
        "use_wandb wandb.key wandb_api_key wandb_entity wandb.entity wandb_org wandb.org wandb_mode"
    ),
    "the GPUs that engine.tensor_parallel_size leaves hold further replicas; leave it out": (
        "data_parallel_size dp"
    ),
    "checkpoints.keep_last counts them; leave it out": "max_mem max_ckpt_mem",
    "set rollout.task_sampling=ratio, and a share for each source: rollout.ratio.SOURCE=SHARE": (
        "prompt_probs prompt_data_probs"
    ),
    "metrics.sinks=tensorboard writes into the run directory": "tensorboard_dir use_tensorboard",
    "a learning rate falls to 0 at the end of the run, by trainer.schedule; leave it out": (
        "min_lr min_lr_ratio lr_min_ratio num_cycles lr_scheduler_kwargs decay_steps learning_rate_min"
    ),
    "an optimizer has trainer.betas, trainer.eps and trainer.weight_decay alone; leave it out": (
        "optimizer_impl override_optimizer_config optim_args momentum nesterov"
    ),
    "trainer.clip=soft has the temperatures of SAPO's paper; leave it out": (
        "tau_pos tau_neg sapo_temperature_pos sapo_temperature_neg"
    ),
    "there is no such loss; trainer.clip says what there is": (
        "dro_beta vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
    ),
    "trainer.aggregation=constant divides by rollout.max_tokens; leave it out": "loss_scale_factor",
    "a sample ends where the model ends it; leave it out": (
        "ignore_eos eos_token stop_token stop_token_id stop_token_ids eos_token_id"
    ),
    "tokenizer and configuration are those in the directory of --model; leave it out": (
        "tokenizer tokenizer_path tokenizer_name_or_path hf_config_path pad_token tokenizer_name"
    ),
    "write it into config.json in the directory of --model": "override_config model_init_kwargs rope_scaling",
    "put it into the directory of --model as chat_template.jinja": "custom_chat_template chat_template_path",
    "a task may show pictures, and no videos": "video_key",
    "trainer.entropy_bonus has no bounds; leave it out": "entropy_coef_min entropy_coef_max",
    "trainer.engine_sequence_cap leaves out sequences that went too far": "off_policy_mask_threshold",
    "trainer.engine_correction=masked leaves out weights below the inverse of its cap": (
        "vllm_importance_sampling_clip_min"
    ),
    "a step has trainer.global_batch_size samples, however long they are": "token_batch_size",
    "set trainer.clip=divergence, trainer.clip_low and trainer.clip_high": "dppo_mask_low dppo_mask_high",
    "layers are computed again: trainer.activation_checkpointing=true": (
        "activation_offloading ac_offloading enable_activation_offload activation_offload"
    ),
    "a machine without GPUs trains on its CPU; CUDA_VISIBLE_DEVICES= hides them": "use_cpu",
    "a reward counts as its function returns it; leave it out": "reward_clip_range",
    "a run with trainer.algorithm=sft goes before; no other loss is added": (
        "ptx_coef ptx_path pretrain_data pretrain_split"
    ),
    "it is an option: --dry-run": "dry_run",
}


ANSWERS = by_name(_INSTEAD)
"""What to do, by their name."""
