"""Values of settings in other trainers (TRL, verl, OpenRLHF, prime-rl), and what they are here."""

from coordinator.settings.names_elsewhere import by_name

_NOTES = {
    "in optimizer steps: theirs x all steps of the run, which follow from --iterations": (
        "warmup_ratio lr_warmup_steps_ratio lr_warmup_ratio"
    ),
    "in samples: theirs x rollout.samples_per_task": "ppo_mini_batch_size",
    "the samples of a step: theirs x per_device_train_batch_size x processes": (
        "gradient_accumulation_steps accumulate_grad_batches"
    ),
    (
        "in tokens, for memory alone: theirs, in samples, needs no equal; trainer.global_batch_size is "
        "theirs x gradient_accumulation_steps x processes"
    ): "per_device_train_batch_size",
    "in tokens, for memory alone: theirs, in samples, needs no equal": (
        "micro_batch_size micro_train_batch_size ppo_micro_batch_size_per_gpu ppo_micro_batch_size "
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu"
    ),
    "in samples; verl's data.train_batch_size is rollout.tasks_per_iteration": "train_batch_size",
    (
        "the cap of a token's weight. TRL's default leaves out whole sequences: type "
        "trainer.engine_sequence_cap=1.01, say, in its place"
    ): "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
    "of a batch; the length of the run is iterations": "num_iterations",
    "bfloat16; there is no float16": "fp16",
    "what ends it, e.g. </think>": "reasoning_parser",
    "1 + theirs": "over_sample_rate",
    "a number of tokens for true": "partial_rollout_enable partial_rollout",
    "hybrid, which shards within a node": "zpg",
    "in samples; rollout.tasks_per_iteration is that / rollout.samples_per_task": "batch_size",
    "in samples": "train.batch_size data.batch_size",
    "in tasks": "rollout.batch_size rollout_batch_size data.train_batch_size",
    "theirs / rollout.samples_per_task": "generation_batch_size",
    "theirs x per_device_train_batch_size x processes / rollout.samples_per_task": "steps_per_generation",
    "as hf:NAME:CONFIG:SPLIT": (
        "dataset_config dataset_configs dataset_split dataset_train_split dataset_test_split "
        "prompt_split data_split eval.split eval_split"
    ),
    "cut the split: hf:NAME:CONFIG:train[:1000]": "max_samples train_max_samples",
    "in iterations, 0 for false": "do_eval",
    "0 for false": "val_kwargs.do_sample",
    "keep, penalise or drop": "stop_properly_penalty_coef missing_eos_penalty",
    "times rollout.tasks_per_iteration": "max_num_gen_batches",
    "and the same for trainer.clip_high": "eps_clip clip_ratio clip_range clip_eps clip_epsilon cliprange",
    "the second of theirs is trainer.clip_high": "eps_clip_low_high",
    "the highest weight; the lowest is its inverse": "vllm_is_truncated_threshold",
    "with two crews: --place rollout=0-5 --place train=6,7, say": (
        "max_async_level async_train async_enable async_queue_size async_level max_staleness staleness"
    ),
    "tensorboard, wandb, trackio or mlflow": "report_to logger wandb",
    "once for each: a name of ours, or FILE.py:FUNCTION": "reward_funcs reward_fn",
    "of all nodes together, or one number for each": "actor_num_gpus_per_node n_gpus_per_node",
    "in iterations, each of which may have several optimizer steps": "max_steps",
    "in iterations": "eval.steps eval_strategy save_strategy eval_steps save_steps save_freq keep_interval",
    "the policy before training is evaluated wherever it is set": (
        "eval_on_start skip_first_step val_before_train"
    ),
    "which preset; its parts are trainer.ratio, trainer.aggregation and trainer.advantage": "loss_type",
    "token, sequence, sum, constant for token-mean, seq-mean-token-mean, -sum, -sum-norm": "loss_agg_mode",
    "and the same for trainer.clip_high where they give one alone": "epsilon",
    "truncated, masked or off": "rollout_correction",
    "bfloat16 for bf16": "mixed_precision model_dtype",
    "a number for true": "use_peft use_lora use_adaptive_entropy",
    "sharded": "fsdp fsdp_config",
    "sharded for FULL_SHARD, hybrid for HYBRID_SHARD, replicated for NO_SHARD and MULTI_GPU": (
        "distributed_type sharding_strategy fsdp_sharding_strategy"
    ),
    "hybrid, which shards within a node; sharded for -1": "fsdp_size",
    "hybrid, which has a replica on each node; sharded for 1": "dp_replicate",
    "as http://HOST:PORT": "vllm_server_host vllm_server_port client.base_url",
    "a good sample weighs 1: theirs is undesirable_weight / desirable_weight": "desirable_weight",
    "a named set of eval.sets": "metric_for_best_model",
    "sharded for ZeRO 3, else replicated": "deepspeed zero_optimization.stage",
    "of one node; theirs are of all": "num_processes",
    "the one seed of a run": "data_seed data_loader_seed",
    "with trainer.clip=dual": "clip_ratio_c",
    "as rollout.chat_template.enable_thinking=VALUE": "enable_thinking",
    "the samples of an iteration / theirs": "num_mini_batches",
    "as rollout.chat_template.reasoning_effort=VALUE": "reasoning_effort",
    "with rollout_rs=geometric trainer.engine_sequence_cap": "rollout_rs_threshold",
}
"""What the value is here, for names whose value is another one."""
_VALUES = {
    "top_k=0": "top_k=-1",
    "layout=sharded": "layout=fsdp layout=fsdp2 layout=full_shard layout=shard_grad_op layout=zero3",
    "layout=hybrid": "layout=hybrid_shard layout=hybrid_shard_zero2 layout=hsdp",
    "layout=replicated": "layout=no_shard layout=ddp layout=multi_gpu",
    "keep_last=2": "keep_last=1",
    "interval=0": "interval=-1 interval=no interval=false",  # YAML reads `no` as false
    "keep_every=null": "keep_every=-1",
    "schedule=constant": "schedule=constant_with_warmup",
    "schedule=cosine": "schedule=cosine_with_min_lr schedule=cosine_with_restarts",
    "optimizer=adamw": (
        "optimizer=adamw_torch optimizer=adamw_torch_fused optimizer=adam optimizer=adamw_8bit "
        "optimizer=adamw_bnb_8bit optimizer=paged_adamw_8bit optimizer=paged_adamw_32bit"
    ),
    "activation_checkpointing=true": "activation_checkpointing=1",
    "algorithm=maxrl": "algorithm=max_rl",
    "algorithm=distill": "algorithm=opd algorithm=opsd",
    "algorithm=reinforce++": (
        "algorithm=reinforce algorithm=reinforce_baseline algorithm=reinforce_plus_plus "
        "algorithm=reinforce_plus_plus_baseline algorithm=reinforce++-baseline"
    ),
    "aggregation=token": "aggregation=token-mean aggregation=true",
    "aggregation=sequence": "aggregation=seq-mean-token-mean aggregation=false",
    "aggregation=sum": "aggregation=seq-mean-token-sum",
    "aggregation=constant": "aggregation=seq-mean-token-sum-norm",
    "kl=k1": "kl=kl",
    "kl=k2": "kl=mse kl=abs kl=kl+ kl=k1+ kl=k3+ kl=low_var_kl+",
    "kl=k3": "kl=low_var_kl kl=true",
    "kl=off": "kl=none",
    "compute_dtype=bfloat16": (
        "compute_dtype=bf16 compute_dtype=float16 compute_dtype=fp16 compute_dtype=half"
    ),
    "overlong=drop": "overlong=true",
    "overlong=keep": "overlong=false",
    "advantage=centred": "advantage=false advantage=none",
    "advantage=standardised": "advantage=true advantage=group",
    "advantage=decoupled": "advantage=normalize_then_sum",
    "ratio=token": "ratio=token ratio=vanilla ratio=ppo",
    "base_dtype=nf4": "base_dtype=true",
    "base_dtype=auto": "base_dtype=false",
    "cpu_offload=true": "cpu_offload=cpu",
    "keep_best=1": "keep_best=true",
    "keep_best=0": "keep_best=false",
    "routing_replay=true": "routing_replay=r3",
    "engine_correction=truncated": (
        "engine_correction=true engine_correction=tis engine_correction=token engine_correction=truncate "
        "engine_correction=token_truncate"
    ),
    "engine_correction=masked": (
        "engine_correction=icepop engine_correction=mask engine_correction=token_mask"
    ),
    "engine_correction=off": "engine_correction=false",
    "kind=torch": "kind=false kind=hf kind=transformers",
    "kind=vllm": "kind=true kind=sglang kind=trtllm",
}
"""Values of theirs for settings here."""
_BY_VALUE = {
    "did you mean trainer.algorithm=grpo? (its KL is 0.04; for none, TRL's default, add trainer.kl=off)": (
        "loss_type=grpo"
    ),
    (
        "did you mean trainer.algorithm=grpo trainer.aggregation=token trainer.clip=dual? (its KL is 0.04; "
        "for none, add trainer.kl=off)"
    ): "adv_estimator=grpo",
    (
        "did you mean trainer.algorithm=grpo trainer.aggregation=token? (its KL is 0.04; for none, add "
        "trainer.kl=off)"
    ): "advantage_estimator=group_norm advantage.estimator=group_norm",
    "did you mean trainer.algorithm=dr_grpo? (for TRL's default, add trainer.advantage=standardised)": (
        "loss_type=dr_grpo"
    ),
    "leave it out: an advantage is the reward minus the mean of its group by default": "algo.type=grpo",
    "leave it out: prompt is what it is called here": "prompt_key=prompt input_key=prompt",
    "leave it out: rewards are given for each sample by default": (
        "reward_manager=naive reward_manager.name=naive reward_manager=batch reward_manager.name=batch"
    ),
    "did you mean rollout.dynamic_sampling=true trainer.keep_flat_groups=false?": (
        "dynamic_filtering=true dynamic_filtering_enable=true filter_groups.enable=true filter_groups=true"
    ),
    "set eval.temperature, which is 0 by default": "val_kwargs.do_sample=true",
    "leave it out: eval.temperature=0 is the default": "val_kwargs.do_sample=false",
    "did you mean trainer.lora.rank=16? (TRL's, where none is given)": "use_peft=true",
    (
        "did you mean trainer.algorithm=dapo trainer.clip_high=0.2 trainer.overlong=keep "
        "trainer.keep_flat_groups=true? (that is TRL's)"
    ): "loss_type=dapo",
    "did you mean trainer.algorithm=grpo trainer.aggregation=token trainer.kl=off?": "loss_type=bnpo",
    "did you mean trainer.algorithm=dpo?": "loss_type=sigmoid",
    "there is no IPO; nearest is trainer.algorithm=dpo": "loss_type=ipo",
    "there is no such loss of pairs; nearest is trainer.algorithm=dpo": (
        "loss_type=hinge loss_type=robust loss_type=apo_zero loss_type=apo_down"
    ),
    "did you mean trainer.algorithm=gspo?": "loss_mode=gspo policy_loss_type=gspo ratio=gspo",
    "did you mean trainer.clip=soft?": "loss_mode=sapo",
    "there is none of its kind; trainer.entropy_target, too, keeps the policy's entropy": (
        "loss_mode=clip_cov loss_mode=kl_cov loss_mode=clip-cov loss_mode=kl-cov"
    ),
    "leave it out: rollout.max_prompt_tokens leaves out the longer ones": "filter_overlong_prompts=true",
    "leave it out: the loss of a batch is that of trainer.algorithm": "loss_mode=bypass_mode",
    "did you mean trainer.optimizer=adamw? (none has 8 bits; trainer.cpu_offload=true saves memory)": (
        "optim=adamw_8bit optim=adamw_bnb_8bit optim=paged_adamw_8bit optim=lion_8bit optim=ademamix_8bit "
        "optim=paged_lion_8bit optim=rmsprop_bnb_8bit"
    ),
    "there is no weight of a sequence; trainer.engine_sequence_cap=1.01, say, leaves out whole ones": (
        "rollout_is=sequence vllm_importance_sampling_mode=sequence_truncate "
        "vllm_importance_sampling_mode=sequence_mask is_correction_type=seq-mask-tis "
        "vllm_is_correction_type=seq-mask-tis rollout_rs=geometric rollout_rs=sequence"
    ),
    "did you mean trainer.engine_correction=masked? (which leaves out tokens)": "rollout_rs=token",
    "leave it out: trainer.algorithm=default is another one, see docs/algorithms.md": "loss.type=default",
    "leave it out: the policy before training is evaluated wherever eval.interval is set": (
        "val_before_train=true eval_on_start=true skip_first_step=false"
    ),
    "the policy before training is evaluated with every evaluation; eval.interval=0 leaves all of them out": (
        "val_before_train=false eval_on_start=false skip_first_step=true"
    ),
    "did you mean trainer.clip=cispo?": "loss_mode=cispo",
    "did you mean trainer.clip=geometric?": "loss_mode=geo_mean",
    "did you mean trainer.clip=none?": "loss_mode=gpg",
    "did you mean trainer.clip=divergence?": "loss_mode=dppo_tv",
    "did you mean trainer.ratio=sequence? (trainer.algorithm=gspo has its clip, too)": (
        "importance_sampling_level=sequence ratio_type=sequence"
    ),
    "did you mean trainer.advantage=whitened? (which is nearest: it whitens over tokens, not over samples)": (
        "scale_rewards=batch whiten_rewards=true normalize_advantages=true"
    ),
    "did you mean trainer.overlong=keep?": "overlong_buffer.enable=false overlong_buffer_cfg.enable=false",
    "did you mean trainer.advantage=centred?": "no_advantage_std_norm=true no_std_norm=true",
    "did you mean trainer.advantage=standardised?": "no_advantage_std_norm=false no_std_norm=false",
    "set trainer.overlong=penalise, and trainer.overlong_buffer, a fraction of rollout.max_tokens": (
        "reward_manager=dapo reward_manager.name=dapo"
    ),
    "there is no SGLang; did you mean engine.kind=vllm?": "rollout.name=sglang",
    "did you mean trainer.compute_dtype=bfloat16? there is no float16": (
        "fp16=true dtype=float16 torch_dtype=float16 mixed_precision=fp16 model_dtype=fp16"
    ),
    "leave it out: layers compute in bfloat16 on a GPU, in float32 on a CPU": (
        "bf16=true mixed_precision=bf16 torch_dtype=bfloat16 model_dtype=bf16 model_dtype=bfloat16 "
        "dtype=bfloat16 dtype=bf16 dtype=auto dtype=float32 "
        "bf16=false mixed_precision=no torch_dtype=float32 model_dtype=float32 model_dtype=fp32"
    ),
    "did you mean trainer.engine_correction=masked?": "use_icepop=true",
    "did you mean trainer.engine_correction=off?": "rollout_is=null",
    "did you mean trainer.layout=sharded?": "zero_optimization.stage=3 zero_stage=3",
    "did you mean checkpoints.keep_last=2? the newest two stay": "remove_previous_ckpt_in_save=true",
    (
        "did you mean cluster.max_async_level=1? (with two crews: --place rollout=0-5 --place train=6,7, say)"
    ): "async_train=true async_enable=true",
    "leave it out: cluster.max_async_level=0 is the default": "async_train=false async_enable=false",
    "leave it out; terminal and metrics.jsonl always get the metrics": (
        "report_to=none report_to=[] logger=console logger=['console']"
    ),
    "there is always a limit: set rollout.dynamic_limit=100, say": "max_num_gen_batches=0",
    "leave it out": (
        "filter_overlong_prompts=false use_icepop=false whiten_rewards=false normalize_advantages=false "
        "filter_zero_advantages=false save_strategy=no save_strategy=false offload_optimizer_device=none "
        "offload_param_device=none "
        "fp16=false over_sample_rate=0 use_rslora=false router_replay.mode=disabled "
        "multi_objective_aggregation=sum_then_normalize"
    ),
}
"""What to do with a value of theirs for a name of theirs."""
SAME_NUMBER = (
    "in iterations",
    "with two",
    "in samples;",
    "in samples)",
    "in tasks",
    "times",
    "the one",
    "the cap of a token",
    "of a batch;",
    "the highest",
    "in seconds",
)
"""How a note begins that leaves the value as it is."""
BY_SAMPLES = {"ppo_mini_batch_size": "x", "generation_batch_size": "/", "batch_size": "/"}
"""How a number of theirs becomes ours with `rollout.samples_per_task`."""


COUNTED, VALUES, BY_VALUE = map(by_name, (_NOTES, _VALUES, _BY_VALUE))
"""By their name: what its value is here; by their value: ours; by both: what is typed here."""
