"""The setting that a person meant."""

import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.settings.loading import build, parse_override, parse_value, refuse_unknown
from coordinator.settings.setting_names import known_keys, takes
from coordinator.settings.suggestions import (
    ALIASES,
    ANSWERS,
    BY_VALUE,
    COUNTED,
    LEFT_OUT,
    meant_each,
    near_setting,
)
from coordinator.settings.tree import SettingsError

KNOWN = known_keys()
ROOT = Path(__file__).parents[3]


def test_other_names_are_of_settings_and_are_no_settings_themselves() -> None:
    assert {name for name in ALIASES.values() if not name.startswith("engine.args.")} <= set(KNOWN)
    leaves = {name.rpartition(".")[2] for name in KNOWN}
    assert not ALIASES.keys() & leaves, "never looked up: the setting of that name comes first"
    assert not ANSWERS.keys() & {*leaves, *ALIASES}, "one answer for one name"


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("lr", "trainer.learning_rate"),
        ("trainer.lr", "trainer.learning_rate"),
        ("warmup_ratio", "trainer.warmup_steps"),
        ("eval_strategy", "eval.interval"),
        ("learning-rate", "trainer.learning_rate"),
        ("LearningRate", "trainer.learning_rate"),
        ("batch_size", "trainer.global_batch_size"),
        ("max_new_tokens", "rollout.max_tokens"),
        ("num_generations", "rollout.samples_per_task"),
        ("trainer.project_name", "metrics.project"),
        ("trainer.learning_rat", "trainer.learning_rate"),
        ("actor_rollout_ref.model.path", "model"),
        ("trainer.lora.r", "trainer.lora.rank"),
        ("peft_config.r", "trainer.lora.rank"),
        ("temperature", "rollout.temperature"),
        ("--temprature", "rollout.temperature"),
        ("rollot.seed", "rollout.seed"),
        ("++trainer.seed", "rollout.seed"),
        ("iterations:", "iterations"),
        ("trainr", "trainer"),
        ("algorithm.adv_estimator", "trainer.algorithm"),
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_task"),
        ("actor_rollout_ref.rollout.top_k", "rollout.top_k"),
        ("min_p", "rollout.min_p"),
        ("--system-prompt", "rollout.system_prompt"),
        ("data.max_prompt_length", "rollout.max_prompt_tokens"),
        ("data.train_batch_size", "rollout.tasks_per_iteration"),
        ("num_iterations", "trainer.passes"),
        ("actor.ppo_epochs", "trainer.passes"),
        ("ckpt.interval", "checkpoints.keep_every"),
        ("data_seed", "rollout.seed"),
        ("actor_rollout_ref.actor.clip_ratio_c", "trainer.dual_clip"),
        ("num_machines", "cluster.num_nodes"),
        ("zero_optimization.stage", "trainer.layout"),
        ("model.seq_len", "trainer.max_tokens_per_microbatch"),
        ("--pretrain", "model"),
        ("entropy_coeff", "trainer.entropy_bonus"),
        ("vllm_gpu_memory_utilization", "engine.args.gpu_memory_utilization"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "eval.temperature"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "eval.samples_per_task"),
        ("algorithm.filter_groups.enable", "rollout.dynamic_sampling"),
        ("orchestrator.sampling.temperature", "rollout.temperature"),
        ("orchestrator.eval.rollouts_per_example", "eval.samples_per_task"),
        ("--eval_n_samples_per_prompt", "eval.samples_per_task"),
        ("--rollout.batch_size", "rollout.tasks_per_iteration"),
        ("--train.batch_size", "trainer.global_batch_size"),
        ("--ring_attn_size", "trainer.context_parallel"),
        ("--max_samples", "tasks"),
        ("learn_rate", "trainer.learning_rate"),
        ("actor.fsdp_config.fsdp_size", "trainer.layout"),
        ("actor.megatron.tensor_model_parallel_size", "trainer.tensor_parallel_size"),
        ("actor.optim.warmup_style", "trainer.schedule"),
        ("vllm_importance_sampling_cap", "trainer.engine_correction_cap"),
        ("num_generations_eval", "eval.samples_per_task"),
        ("train_batch_size", "trainer.global_batch_size"),
        ("rollout_batch_size", "rollout.tasks_per_iteration"),
        ("n_samples_per_prompt", "rollout.samples_per_task"),
        ("eval.steps", "eval.interval"),
        ("eval.dataset", "eval_tasks"),
        ("eval.n_samples_per_prompt", "eval.samples_per_task"),
        ("ckpt.max_num", "checkpoints.keep_last"),
        ("ds.tensor_parallel_size", "trainer.tensor_parallel_size"),
        ("actor.router_replay.mode", "trainer.routing_replay"),
        ("actor.optim.clip_grad", "trainer.clip_norm"),
        ("algo.advantage.is_correction_threshold", "trainer.engine_correction_cap"),
        ("use_adaptive_entropy", "trainer.entropy_target"),
        ("ddp_timeout", "trainer.collective_timeout_s"),
        ("fp16", "trainer.compute_dtype"),
        ("rloo_k", "rollout.samples_per_task"),
        ("actor_rollout_ref.rollout.dtype", "engine.args.dtype"),
        ("dtype", "trainer.compute_dtype and engine.args.dtype"),
        ("max_staleness", "cluster.max_async_level"),
        ("eval_split", "eval_tasks"),
    ],
)
def test_setting_is_found_by_the_names_of_the_field_and_by_its_spelling(typed: str, found: str) -> None:
    assert near_setting(typed, KNOWN).partition(" (")[0] == f"did you mean {found}?"


def test_a_value_that_counts_something_else_here_is_answered_with_what_it_counts() -> None:
    assert near_setting("actor.ppo_mini_batch_size", KNOWN) == (
        "did you mean trainer.global_batch_size? (in samples: theirs x rollout.samples_per_task)"
    )
    assert near_setting("--warmup-ratio", KNOWN).endswith(
        "(in optimizer steps: theirs x all steps of the run, which follow from --iterations)"
    )
    given: dict[str, Any] = {"actor.ppo_mini_batch_size": 256, "n": 5}
    assert near_setting("actor.ppo_mini_batch_size", KNOWN, given).endswith(": 256 x 5 = 1280)")
    given = {"generation_batch_size": 64, "rollout.samples_per_task": 16}
    assert near_setting("generation_batch_size", KNOWN, given).endswith(": 64 / 16 = 4)")
    assert near_setting("generation_batch_size", KNOWN, {"generation_batch_size": 64, "n": 0}).endswith(
        "/ 8 = 8)"
    )
    assert near_setting("actor.kl_loss_coef", KNOWN, {"actor.kl_loss_coef": 0.001}) == (
        "set both trainer.kl=k3 and trainer.kl_coefficient=0.001"
    )
    for name, value in (("use_kl_in_reward", False), ("beta", 0.0)):
        off = "set trainer.kl=off, which it is unless trainer.algorithm=grpo sets it to k3 with 0.04"
        assert near_setting(name, KNOWN, {name: value}) == off
    for name, value, ours in (
        ("top_k", -1, "rollout.top_k=0"),
        ("strategy", "FSDP2", "trainer.layout=sharded"),
    ):
        assert near_setting(name, KNOWN, {name: value}) == f"did you mean {ours}?"
    for algorithm, ours in (("dpo", "trainer.pair_beta"), ("grpo", "trainer.kl=k3")):
        assert ours in near_setting("beta", KNOWN, {"beta": 0.1, "trainer.algorithm": algorithm})
    leaves = {name.rpartition(".")[2] for name in KNOWN}
    assert {*ALIASES, *leaves} >= set(COUNTED), "a note on a name that is answered with no setting"


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("beta", "trainer.kl=k3 and trainer.kl_coefficient"),
        ("actor_rollout_ref.rollout.mode", "nothing here needs it"),
        ("algorithm.use_kl_loss", "trainer.kl=k3 and trainer.kl_coefficient"),
        ("reward_weights", "--reward math=1"),
        ("trainer.total_epochs", "give --iterations"),
        ("trainer.experiment_name", "--log-path; leave it out"),
        ("critic.optim.lr", "there is no critic"),
        ("easy_threshold", "rollout.task_sampling=curriculum"),
        ("loss.kl_tau", "trainer.engine_correction corrects"),
        ("ld_alpha", "the loss of a pair is DPO's"),
        ("load_in_8bit", "trainer.lora.base_dtype=nf4"),
        ("loss.token_mask_high", "trainer.engine_correction=masked"),
        ("actor_rollout_ref.actor.kl_loss_type", "trainer.kl=k3"),
        ("data.truncation", "no prompt is cut"),
        ("--resume", "the same command again resumes a run"),
        ("custom_reward_function.path", "--reward my_rewards.py:score"),
        ("custom_reward_function.overlong_buffer.len", "trainer.overlong=penalise"),
        ("algorithm.kl_ctrl.kl_coef", "trainer.kl_in=token_reward"),
        ("orchestrator.env", "both --tasks verifiers:NAME and --environment verifiers:NAME"),
        ("orchestrator.eval.env", "--eval-tasks verifiers:NAME"),
        ("orchestrator.wandb.log_extras.interval", "metrics.jsonl"),
        ("--num_episodes", "give --iterations"),
        ("--micro_rollout_batch_size", "rollout.concurrency"),
        ("per_device_eval_batch_size", "rollout.concurrency"),
        ("hub_strategy", "run export"),
        ("--ref_num_nodes", "the reference has no nodes"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload", "the reference has no nodes, no layout and"),
        ("--reward_num_gpus_per_node", "no nodes of the run"),
        ("--critic_num_nodes", "there is no critic"),
        ("--dynamic_filtering_reward_range", "rollout.dynamic_sampling=true leaves out groups"),
        ("sync_ref_model", "the reference stays the model that the run started from; leave it out"),
        ("repetition_penalty", "by the policy's own probabilities, on which it is trained; leave it out"),
        ("top_entropy_quantile", "all tokens of a sample are trained on"),
        ("actor.megatron.pipeline_model_parallel_size", "no pipeline and no expert parallelism"),
        ("actor_rollout_ref.model.trust_remote_code", "code of a model is never run"),
        ("rollout.do_sample", "samples are always drawn"),
        ("--machine_rank", "--worker RANK"),
        ("delta", "set trainer.clip=dual and trainer.dual_clip"),
        ("actor_rollout_ref.rollout.data_parallel_size", "engine.tensor_parallel_size leaves"),
        ("model.ep", "no pipeline and no expert parallelism"),
        ("algo.kl.target", "trainer.kl_coefficient stays as it is"),
        ("algo.kl.use_loss", "trainer.kl=k3 and trainer.kl_coefficient"),
        ("logger.wandb.group", "--log-path; leave it out"),
        ("ckpt.output_dir", "--log-path DIR"),
        ("rollout.max_num_seqs", "set engine.args.max_num_seqs=VALUE, an argument of vLLM"),
        ("train.colocate_all", "--place rollout=0-5"),
        ("actor.optim.min_lr_ratio", "falls to 0 at the end of the run"),
        ("sapo_temperature_neg", "trainer.clip=soft"),
        ("data.prompt_probs", "rollout.ratio.SOURCE=SHARE"),
        ("actor_rollout_ref.actor._target_", "nothing here needs it"),
        ("model_init_kwargs", "config.json"),
        ("vllm_importance_sampling_clip_min", "the inverse of its cap"),
        ("entropy_coef_max", "has no bounds"),
        ("critic.model.fsdp_config.dtype", "there is no critic"),
        ("reward_model.model.path", "--reward http://HOST:PORT/score"),
        ("n_epochs", "give --iterations"),
        ("max_seq_len", "no sample is cut"),
        ("ptx_coef", "trainer.algorithm=sft goes before"),
        ("wandb_entity", "metrics.sinks=wandb"),
        ("packing_strategy", "rows are packed"),
        ("--deepspeed_enable_sleep", "engine.sleep says how"),
        ("rollout.free_cache_engine", "engine.sleep says how"),
        ("reward.launch_reward_fn_async", "leave it out"),
        ("multi_turn.max_assistant_turns", "turns belong to the environment"),
        ("trainer.model.compile.fullgraph", "trainer.compile=true"),
        ("orchestrator.log.level", "run logs shows it"),
        ("trainer.model.impl", "those of transformers"),
    ],
)
def test_what_has_no_setting_is_answered_with_what_to_do(typed: str, advice: str) -> None:
    assert advice in near_setting(typed, KNOWN) and "did you mean" not in near_setting(typed, KNOWN)


def test_advantage_of_theirs_is_answered_with_the_algorithm_that_has_it() -> None:
    for theirs, ours in {"group_norm": "grpo trainer.aggregation=token", "reinforce": "reinforce++"}.items():
        text = near_setting("advantage_estimator", KNOWN, {"advantage_estimator": theirs})
        assert text.startswith(f"did you mean trainer.algorithm={ours}?")


def test_number_for_delta_is_the_bound_of_trl_and_a_truth_the_setting_of_checkpoints() -> None:
    assert near_setting("delta", KNOWN, {"delta": 4.0}) == "set trainer.clip=dual and trainer.dual_clip=4.0"
    assert near_setting("delta", KNOWN, {"delta": True}) == "did you mean checkpoints.delta=true?"


def test_samples_of_a_microbatch_are_answered_with_tokens_and_those_of_a_step() -> None:
    for name in (
        "ppo_micro_batch_size_per_gpu",
        "log_prob_micro_batch_size_per_gpu",
        "micro_train_batch_size",
    ):
        assert near_setting(name, KNOWN) == (
            "did you mean trainer.max_tokens_per_microbatch? (in tokens, for memory alone: theirs, in "
            "samples, needs no equal)"
        )
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        text = near_setting(name, KNOWN)
        assert "trainer.global_batch_size" in text and "x processes)" in text
    assert near_setting("data.train_batch_size", KNOWN).endswith("tasks_per_iteration? (in tasks)")
    assert "with rollout_rs=geometric trainer.engine_seq" in near_setting("rollout_rs_threshold", KNOWN)
    text = near_setting("vllm_importance_sampling_clip_max", KNOWN)
    assert "the cap of a token's weight. TRL's default" in text and "trainer.engine_sequence_cap" in text


@pytest.mark.parametrize(
    ("typed", "value", "expected"),
    [
        ("reward_model.reward_manager", "dapo", "set trainer.overlong=penalise, and trainer.overlong_buffer"),
        (
            "reward_model.overlong_buffer.len",
            4096,
            "set trainer.overlong=penalise; trainer.overlong_buffer is",
        ),
        ("reward_model.overlong_buffer.enable", False, "did you mean trainer.overlong=keep?"),
        ("reward_model.enable", False, "leave it out: it is off"),
        ("trainer.scheduler.type", "cosine", "did you mean trainer.schedule=cosine?"),
        ("trainer.loss.type", "dapo", "did you mean trainer.algorithm=dapo?"),
        ("n_rollouts", 8, "did you mean rollout.samples_per_task=8?"),
        ("policy_loss.loss_mode", "gspo", "did you mean trainer.algorithm=gspo?"),
        ("multi_turn.format", "hermes", "did you mean rollout.tool_parser=hermes?"),
        ("rollout_correction.rollout_rs", None, "leave it out: null sets nothing"),
        ("rollout_correction.rollout_is", None, "did you mean trainer.engine_correction=off?"),
        ("rollout.load_format", "dummy", "the engine reads its weights from the run directory; leave it out"),
        ("rollout.name", "sglang", "there is no SGLang; did you mean engine.kind=vllm?"),
        ("trainer.loss.ratio_type", "token", "did you mean trainer.ratio=token?"),
        ("orchestrator.client.base_url", "http://h:8/v1", "did you mean engine.url=http://h:8?"),
        ("inference.parallel.dp", 4, "the GPUs that engine.tensor_parallel_size leaves hold"),
        ("inference.server.port", 8000, "the engine has no port; a server of your own: --engine-url"),
        ("orchestrator.num_train_workers", 4, "the trainer has a process for each GPU of the nodes"),
        ("trainer.loss.adv_tau", 1.0, "a sample's advantage counts as trainer.advantage makes it"),
        ("global_profiler.tool", "nsys", "run profile says where the time goes"),
        ("use_lora", False, "leave it out: it is off"),
        ("scale_rewards", False, "did you mean trainer.advantage=centred?"),
        ("adv_estimator", "gae", "take grpo, which compares"),
        ("data.train_batch_size", 128, "did you mean rollout.tasks_per_iteration=128? (in tasks)"),
        ("ppo_mini_batch_size", 128, "did you mean trainer.global_batch_size=1024? (in samples"),
        ("report_to", "mlflow", "did you mean metrics.sinks=mlflow?"),
        ("trainer.logger", ["console", "wandb"], "did you mean metrics.sinks=wandb?"),
        ("epsilon", 0.2, "did you mean trainer.clip_low=0.2 trainer.clip_high=0.2?"),
        ("eps_clip_low_high", [0.2, 0.3], "did you mean trainer.clip_low=0.2 trainer.clip_high=0.3?"),
        (
            "eps_clip_low_high",
            0.2,
            "did you mean trainer.clip_low? (the second of theirs is trainer.clip_high)",
        ),
        (
            "vllm_is_truncated_threshold",
            [0.5, 5.0],
            "did you mean trainer.engine_correction_cap=5? (the highest",
        ),
        ("vllm_is_truncated_threshold", 0.5, "did you mean trainer.engine_correction_cap? (the highest"),
        ("clip_ratio_c", 3.0, "did you mean trainer.clip=dual trainer.dual_clip=3?"),
        ("enable_thinking", False, "did you mean rollout.chat_template.enable_thinking=false?"),
        ("dataset_name", "openai/gsm8k", "did you mean tasks=hf:openai/gsm8k?"),
        ("reward_funcs", "accuracy", "did you mean rollout.reward?"),
        ("lr", -2, "did you mean trainer.learning_rate?"),
        ("custom_reward_function.path", "my.py", "did you mean --reward my.py:compute_score?"),
        ("reward.remote_url", "r.py", "did you mean --reward r.py:reward_func?"),
        ("reward.remote_url", "http://h:5000/get", "did you mean --reward http://h:5000/get?"),
        ("data.prompt_key", "question", "name the column of the data: columns.messages=question"),
        ("data.image_key", "images", "leave it out: images is what it is called here"),
        ("output_dir", "out/a b", "give the directory of a run as --log-path 'out/a b'"),
        ("rollout.enforce_eager", False, "set engine.args.enforce_eager=false, an argument of vLLM"),
        ("generation_kwargs.stop", ["a"], """did you mean 'rollout.stop=["a"]'?"""),
        ("chat_template_kwargs.level", 2, "did you mean rollout.chat_template.level=2?"),
        ("max_async_level", 2, "did you mean cluster.max_async_level=2? (with two crews: --place"),
        ("save_total_limit", 1, "did you mean checkpoints.keep_last=2?"),
        ("scale_rewards", "batch", "did you mean trainer.advantage=whitened? (which is nearest"),
        ("kl_loss_type", "abs", "set both trainer.kl=k2 and"),
        ("--actor.dual_clip", 3, "did you mean trainer.clip=dual trainer.dual_clip=3?"),
        (
            "adv_estimator",
            "grpo",
            "did you mean trainer.algorithm=grpo trainer.aggregation=token trainer.",
        ),
        (
            "loss_type",
            "dr_grpo",
            "did you mean trainer.algorithm=dr_grpo? (for TRL's default, add",
        ),
        ("reward_manager", "naive", "leave it out: rewards are given for each sample"),
        ("qat.group_size", 16, "there is none of that; leave it out"),
        ("sandbox_fusion.url", "http://h:1", "the built-in reward code runs programs in a jail"),
        ("dro_beta", 0.1, "there is no such loss"),
        ("ref.num_nodes", 1, "the reference has no nodes"),
        ("critic.model.enable_gradient_checkpointing", True, "there is no critic"),
        ("model.beta", 0.1, "did you mean trainer.pair_beta=0.1?"),
        ("dtype", "bfloat16", "did you mean trainer.compute_dtype=bfloat16 engine.args.dtype=bfloat16?"),
        ("kl_loss_type", "low_var_kl+", "set both trainer.kl=k2 and"),
        ("algo.type", "max_rl", "did you mean trainer.algorithm=maxrl?"),
        ("model.ac.freq", 1, "did you mean trainer.activation_checkpointing=true?"),
        ("lora_target_modules", ["q_proj,", "v_proj"], "did you mean trainer.lora.targets=q_proj,v_proj?"),
        ("optim.optimizer", "AdamW", "did you mean trainer.optimizer=adamw?"),
        ("actor.rollout_n", "${rollout.n}", "leave it out: ${rollout.n} stands for another setting"),
        ("warmup_steps", 0.1, "did you mean trainer.warmup_steps? (in optimizer steps: theirs x"),
        (
            "orchestrator.train.source",
            [{"name": "a", "env": {"taskset": {"id": "gsm8k"}}}],
            "give both --tasks verifiers:gsm8k and --environment verifiers:gsm8k",
        ),
        ("lr_warmup_steps", -1, "leave it out: -1 sets nothing"),
        ("bf16", True, "leave it out: layers compute in bfloat16 on a GPU"),
        (
            "gradient_checkpointing",
            True,
            "leave it out: trainer.activation_checkpointing=true is the default",
        ),
        ("gradient_checkpointing", False, "did you mean trainer.activation_checkpointing=false?"),
        ("optim", "adamw_8bit", "did you mean trainer.optimizer=adamw? (none has 8 bits"),
        ("optim", "lion", "did you mean trainer.optimizer? (there is no lion, but adamw, muon)"),
        ("adv_estimator", "opo", "take rloo, which compares"),
        ("adv_estimator", "xyzzy", "did you mean trainer.algorithm? (there is no xyzzy, but default, grpo"),
        ("policy_loss.loss_mode", "clip_cov", "there is none of its kind; trainer.entropy_target"),
        ("train_files", ["d/a.parquet", "d/b.parquet"], "did you mean tasks? (several files are given as a "),
        ("train_files", "[d/a.parquet,d/b.parquet]", "did you mean tasks? (several files are given as a pat"),
        ("train_files", "[d/a.parquet]", "did you mean tasks=d/a.parquet?"),
        ("adam_beta1", 0.8, "did you mean trainer.betas=0.8,0.95?"),
        ("stop_strings", ["a", "b"], """did you mean 'rollout.stop=["a","b"]'?"""),
        ("trainer.loss.type", "default", "leave it out: trainer.algorithm=default is another one"),
        ("logpath", "/x", "give the directory of a run as --log-path /x"),
        ("max_model_lenn", 9, "did you mean engine.args.max_model_len=9?"),
        ("rollout_func", "a:b", "what makes a sample is an environment: --environment my_agent.py:FUNCTION"),
        ("generation_kwargs", "x", "give each by its own name: rollout.top_p"),
        ("generation_kwargs.foo", 1, "run --dry-run shows all settings"),
        ("filter_groups.max_num_gen_batches", 0, "there is always a limit: set rollout.dynamic_limit=100"),
        ("data.custom_cls.path", "d.py", "write the tasks into a file"),
        (
            "orchestrator.env.0.id",
            "gsm8k",
            "give both --tasks verifiers:gsm8k and --environment verifiers:gsm8k",
        ),
        ("orchestrator.eval.env.0.id", "gsm8k", "give --eval-tasks verifiers:gsm8k"),
        ("hydra.searchpath", ["a"], "nothing here needs it; leave it out"),
        (
            "rollout.agent.num_workers",
            8,
            "the engine makes its batches by itself; rollout.concurrency limits",
        ),
        ("adam_beta1", 0.9, "did you mean trainer.betas=0.9,0.95? (0.95 is the default here, 0.999 that of"),
        ("vllm_importance_sampling_cap", 3.0, "did you mean trainer.engine_correction_cap=3? (the cap of a"),
        ("reward", "math", "did you mean rollout.reward=math?"),
        ("rollout_is", "sequence", "there is no weight of a sequence; trainer.engine_sequence_cap=1.01"),
        ("val_before_train", True, "leave it out: the policy before training is evaluated"),
        ("val_before_train", False, "the policy before training is evaluated with every evaluation; eval."),
        ("data.filter_overlong_prompts", True, "leave it out: rollout.max_prompt_tokens leaves out"),
    ],
)
def test_value_of_theirs_is_answered_with_what_can_be_pasted(typed: str, value: Any, expected: str) -> None:
    assert near_setting(typed, KNOWN, {typed: value}).startswith(expected)


def test_whole_configuration_is_answered_with_what_changes_something() -> None:
    values: dict[str, Any] = {f"critic.a{n}": n for n in range(100)}
    values |= {"lr": 1e-6, "actor.ppo_epochs": 2, "rollout.n": 5, "trainer.logger": ["console"]}
    lines = meant_each(list(values), KNOWN, values).splitlines()
    assert lines == [
        "104 unknown settings; those that change something here:",
        "  actor.ppo_epochs: did you mean trainer.passes=2?",
        "  rollout.n: did you mean rollout.samples_per_task=5?",
        "  the other 102: leave them out; they say what holds here anyway, or have no equal",
        f"  {LEFT_OUT}",
    ]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (  # verl, examples/grpo_trainer/run_qwen3-8b.sh
            "algorithm.adv_estimator=grpo data.train_batch_size=1024 data.max_response_length=1024 "
            "a.actor.ppo_mini_batch_size=256 a.actor.use_kl_loss=True a.actor.kl_loss_coef=0.001 "
            "a.actor.kl_loss_type=low_var_kl a.rollout.n=5 algorithm.use_kl_in_reward=False "
            "a.ref.fsdp_config.param_offload=True trainer.n_gpus_per_node=8 trainer.nnodes=1",
            {"advantage": "standardised", "clip": "dual", "kl": "k3", "kl_coefficient": 0.001}
            | {"global_batch_size": 1280},
        ),
        (  # OpenRLHF, examples/scripts/train_dapo_ray_hybrid_engine.sh
            "algo.kl.init_coef=1e-3 algo.kl.use_loss=True algo.kl.estimator=k3 train.batch_size=128 "
            "algo.advantage.estimator=group_norm algo.dynamic_filtering_enable=True ref.num_nodes=1 "
            "actor.eps_clip_low_high=[0.2,0.27] algo.advantage.is_correction_enable=True",
            {"advantage": "standardised", "aggregation": "token", "kl": "k3", "keep_flat_groups": False}
            | {"clip_low": 0.2, "clip_high": 0.27, "engine_correction": "truncated"},
        ),
    ],
)
def test_answers_to_a_published_example_are_a_run_when_they_are_pasted(
    theirs: str, ours: dict[str, Any]
) -> None:
    values = dict(parse_override(word) for word in theirs.split())
    answers = [near_setting(name, KNOWN, values).partition(" (")[0] for name in values]
    pasted = dict(
        parse_override(word)
        for text in answers
        if text.startswith(("did you mean", "set both"))
        for word in re.findall(r"[a-z_]+(?:\.\w+)+=[^\s?]+", text)
    )
    trainer = build({"model": "any/model", **pasted}).trainer
    assert {name: getattr(trainer, name) for name in ours} == ours


def test_table_of_theirs_is_answered_by_what_it_holds() -> None:
    with pytest.raises(SettingsError) as error:
        refuse_unknown({"generation_kwargs": {"stop": "a", "top_k": 20}})
    assert "generation_kwargs.top_k: did you mean rollout.top_k=20?" in str(error.value)


def test_other_values_count_in_what_can_be_pasted() -> None:
    values: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28}
    assert near_setting("epsilon", KNOWN, values) == "did you mean trainer.clip_low=0.2?"
    values = {"overlong_buffer_len": 4096, "max_response_length": 20480}
    assert near_setting("overlong_buffer_len", KNOWN, values) == (
        "did you mean trainer.overlong=penalise trainer.overlong_buffer=0.2? (4096 of 20480 tokens)"
    )


@pytest.mark.parametrize(
    "typed",
    [
        "length_weighted_mean",
        "eos_token",
        "external_lib",
        "remove_previous_ckpt_in_save",
        "bypass_mode",
        "use_lora",
        "label_smoothing_factor",
        "formatting_func",
        "cast_lm_head_to_fp32",
    ],
)
def test_names_that_had_no_answer_have_one(typed: str) -> None:
    assert near_setting(typed, KNOWN) != "run --dry-run shows all settings"


def test_texts_of_values_name_settings_that_take_them() -> None:
    for text in BY_VALUE.values():
        for name, value in re.findall(r"([a-z]+\.[\w.]+)=([\w.]+)", text):
            assert takes(name, parse_value(value)), text


def test_every_name_of_the_page_on_migration_is_answered_with_the_setting_of_its_row() -> None:
    table = (
        (ROOT / "docs/migration.md")
        .read_text()
        .partition("## GRPO, setting by setting")[2]
        .partition("## Data and rewards")[0]
    )
    rows = [re.findall("`([^`]+)`", line) for line in table.splitlines() if line.startswith("| `")]
    for ours in rows:
        settings = [name for name in ours if name in KNOWN]
        for theirs in set(ours) - set(settings):
            assert any(name in near_setting(theirs, KNOWN) for name in settings), theirs
    assert len(rows) > 20


@pytest.mark.parametrize(
    "typed",
    [
        "remote_rm_url",
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length",
        "trainer_gpu_ids",
    ],
)
def test_likeness_of_spelling_does_not_answer_what_has_no_setting(typed: str) -> None:
    assert "--" in near_setting(typed, KNOWN) and "did you mean" not in near_setting(typed, KNOWN)


def test_sections_of_theirs_are_no_likeness() -> None:
    assert near_setting("actor_rollout_ref.model.impl_lib", KNOWN) == "run --dry-run shows all settings"


def test_setting_of_ray_is_answered_with_how_a_ray_cluster_is_used() -> None:
    assert "run launch --ray ADDRESS" in near_setting("ray_init.num_cpus", KNOWN)


def test_section_is_answered_with_what_is_in_it() -> None:
    assert near_setting("trainer.lora", KNOWN).endswith(
        "in it: trainer.lora.rank, trainer.lora.alpha, trainer.lora.targets, trainer.lora.base_dtype?"
    )
    assert near_setting("trainer", KNOWN).endswith(", ...?")


@pytest.mark.parametrize(
    "typed",
    ["xyzzy", "--bogus", "--out", "trainer.balance", "entity", "model.impl_lib", "logit_batch_max"],
)
def test_nothing_is_made_up_for_a_word_like_no_other(typed: str) -> None:
    assert near_setting(typed, KNOWN) == "run --dry-run shows all settings"
