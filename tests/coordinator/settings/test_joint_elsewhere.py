"""Settings of other trainers that say one thing together."""

from typing import Any

import pytest

from coordinator.settings.setting_names import known_keys
from coordinator.settings.suggestions import LEFT_OUT, meant_each, near_setting

KNOWN = known_keys()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"dataset_name": "openai/gsm8k", "dataset_config": "main"},
            "did you mean tasks=hf:openai/gsm8k:main:train?",
        ),
        (
            {"prompt_data": "openai/gsm8k", "prompt_split": "train[:9]"},
            "did you mean tasks=hf:openai/gsm8k:train[:9]?",
        ),
        ({"adam_beta1": 0.9, "adam_beta2": 0.99}, "did you mean trainer.betas=0.9,0.99?"),
        ({"a.param_offload": True, "a.optimizer_offload": False}, "did you mean trainer.cpu_offload=true?"),
        ({"a.param_offload": False, "a.optimizer_offload": False}, "leave it out: nothing is offloaded"),
        ({"use_peft": True, "lora_r": 16}, "did you mean trainer.lora.rank=16?"),
        ({"vllm_server_host": "h", "vllm_server_port": 8000}, "did you mean engine.url=http://h:8000?"),
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "mse", "use_kl_in_reward": False},
            "set both trainer.kl=k2 and trainer.kl_coefficient=0.01",
        ),
        (
            {"use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.01, "algorithm.kl_penalty": "kl"},
            "set trainer.kl=k1, trainer.kl_coefficient=0.01 and trainer.kl_in=token_reward",
        ),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.001},
            "set trainer.kl=k1, trainer.kl_coefficient=0.001 and trainer.kl_in=token_reward",
        ),
        ({"kl.init_coef": 0.01, "kl.estimator": "k2"}, "set trainer.kl=k2, trainer.kl_coefficient=0.01 and"),
        ({"use_kl_loss": False, "kl_loss_coef": 0.01}, "set trainer.kl=off"),
        ({"use_kl_loss": True, "kl_loss_coef": 0.0}, "set trainer.kl=off"),
        (
            {"a.overlong_buffer.enable": False, "a.overlong_buffer.len": 4096},
            "did you mean trainer.overlong=keep?",
        ),
        (
            {"is_correction_enable": True, "is_correction_type": "icepop"},
            "did you mean trainer.engine_correction=masked?",
        ),
        (
            {"is_correction_enable": False, "is_correction_type": "tis"},
            "did you mean trainer.engine_correction=off?",
        ),
        (
            {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask"},
            "there is no weight of a sequence; trainer.engine_sequence_cap=1.01",
        ),
        ({"async_enable": True, "async_queue_size": 2}, "did you mean cluster.max_async_level=2? (with two"),
        ({"adv_estimator": "grpo", "a.loss_mode": "gspo"}, "did you mean trainer.algorithm=gspo?"),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
            "set trainer.global_batch_size to 16 x processes, and rollout.tasks_per_iteration to 4 x",
        ),
        (
            {"custom_reward_function.path": "my.py", "custom_reward_function.name": "f"},
            "did you mean --reward my.py:f?",
        ),
    ],
)
def test_settings_that_say_one_thing_together_have_one_answer(values: dict[str, Any], expected: str) -> None:
    assert {near_setting(name, KNOWN, values).startswith(expected) for name in values} == {True}
    lines = meant_each(list(values), KNOWN, values).splitlines()
    assert lines[1].startswith(f"  {', '.join(values)}: {expected}") and lines[2:] in ([], [f"  {LEFT_OUT}"])


@pytest.mark.parametrize(
    ("name", "value", "kl"),
    [("kl_estimator", "k2", "k2"), ("kl_loss_type", "mse", "k2"), ("algorithm.kl_penalty", "kl", "k1")],
)
def test_an_estimator_alone_is_answered_with_itself(name: str, value: str, kl: str) -> None:
    assert near_setting(name, KNOWN, {name: value}) == f"set both trainer.kl={kl} and trainer.kl_coefficient"


def test_bounds_of_cispo_are_those_of_its_weight() -> None:
    """TRL's is the weight's highest value; verl's lower one, 10 in its example, cuts nothing off."""
    for values, ours in (
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "trainer.clip_high=4?"),
        ({"loss_mode": "cispo", "clip_ratio_low": 10}, "trainer.clip_low=1?"),
        ({"loss_type": "dapo", "epsilon_high": 0.28}, "trainer.clip_high=0.28?"),
    ):
        assert ours in near_setting(list(values)[1], KNOWN, values)


RSLORA: dict[str, Any] = {"use_rslora": True, "lora_r": 64, "lora_alpha": 16}


@pytest.mark.parametrize(
    ("typed", "values", "expected"),
    [
        ("beta", {"beta": 0.05, "loss_type": "sigmoid"}, "did you mean trainer.pair_beta=0.05?"),
        ("--beta", {"--beta": 0.05, "trainer.algorithm": "dpo"}, "did you mean trainer.pair_beta=0.05?"),
        (
            "beta",
            {"beta": 0.05, "loss_type": "dapo"},
            "set both trainer.kl=k3 and trainer.kl_coefficient=0.05",
        ),
        ("loss_type", {"beta": 0.05, "loss_type": "ipo"}, "there is no IPO"),
        (
            "overlong_buffer.penalty_factor",
            {"overlong_buffer.len": 40, "overlong_buffer.penalty_factor": 0.5, "max_new_tokens": 80},
            "did you mean trainer.overlong=penalise trainer.overlong_buffer=0.5? (40 of 80 tokens; the fac",
        ),
        (
            "filter_groups.max_num_gen_batches",
            {"filter_groups.max_num_gen_batches": 10, "train_batch_size": 512, "gen_batch_size": 1536},
            "did you mean rollout.dynamic_limit=30? (10 x 1536 / 512 tasks)",
        ),
        ("use_rslora", RSLORA, "did you mean trainer.lora.alpha=128?"),
        ("lora_alpha", RSLORA, "did you mean trainer.lora.alpha=128?"),
        ("lora_alpha", {**RSLORA, "use_rslora": False}, "did you mean trainer.lora.alpha=16?"),
        (
            "algorithm.kl_ctrl.kl_coef",
            {"algorithm.kl_ctrl.kl_coef": 0.001, "algorithm.kl_penalty": "kl"},
            "leave it out: verl ignores it without use_kl_in_reward=True",
        ),
        (
            "use_kl_in_reward",
            {"use_kl_in_reward": True},
            "set trainer.kl=k1, trainer.kl_coefficient and trainer.kl_in=token_reward, which needs",
        ),
    ],
)
def test_setting_is_answered_by_what_stands_beside_it(
    typed: str, values: dict[str, Any], expected: str
) -> None:
    assert near_setting(typed, KNOWN, values).startswith(expected)


def test_number_that_yaml_takes_for_a_text_is_one() -> None:
    assert "trainer.kl_coefficient=0.001" in meant_each(["init_kl_coef"], KNOWN, {"init_kl_coef": "1e-3"})


def test_number_that_goes_with_another_is_computed() -> None:
    values: dict[str, Any] = {
        "n_gpus_per_node": 8,
        "nnodes": 2,
        "orchestrator.batch_size": 128,
        "group_size": 16,
    }
    assert near_setting("n_gpus_per_node", KNOWN, values) == "did you mean cluster.expect_gpus=16?"
    assert near_setting("orchestrator.batch_size", KNOWN, values).startswith(
        "did you mean trainer.global_batch_size=128 rollout.tasks_per_iteration=8? ("
    )
    values = {"data.prompt_dataset": "a/b", "data.max_samples": 20000}
    assert near_setting("data.max_samples", KNOWN, values) == "did you mean tasks=hf:a/b:train[:20000]?"


def test_offloading_of_a_reference_and_the_split_of_an_evaluation_do_not_count_for_the_policy() -> None:
    values = {"actor.param_offload": False, "ref.param_offload": True, "actor.optimizer_offload": False}
    assert near_setting("actor.param_offload", KNOWN, values).startswith("leave it out: nothing")
    assert near_setting("ref.param_offload", KNOWN, values).startswith("the reference has no nodes")
    values = {"dataset_name": "a/b", "dataset_config": "c", "dataset_test_split": "test"}
    assert near_setting("dataset_name", KNOWN, values) == "did you mean tasks=hf:a/b:c:train?"
    assert near_setting("dataset_test_split", KNOWN, values) == "did you mean eval_tasks=hf:a/b:c:test?"
