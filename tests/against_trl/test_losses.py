"""Our losses and TRL's, each by its own code, on one batch: equal in value and gradient; `make test-trl`.

TRL's trainers score the samples, compute advantages and corrections, shuffle and cut into steps, and compute
the loss; ours goes from the groups through the batch and the steps of `train`. Only the models are left out:
log probabilities come from tables, and the gradients are those of the table. What differs on purpose is named
here, each by a test:

- a deviation gets 1e-4 added by TRL, 1e-6 by us;
- the KL term of GRPO is weighed by the ratio in TRL (`use_bias_correction_kl`), which its paper does not;
- `dapo` and `cispo` divide a step by the mean of the steps' tokens in TRL, by its own tokens here, as `bnpo`;
- RLOO has the ratio of whole sequences in TRL, of tokens here, where it is for batches of several steps; its
  divisor has the longest answer as a factor here;
- where GSPO is corrected for the engine by token, a token's weight is that of its own gradient here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset  # type: ignore[import-not-found]
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import (  # type: ignore[import-not-found]
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer  # type: ignore[import-not-found]
from trl.experimental.sdpo.loss_utils import (  # type: ignore[import-not-found]
    compute_sampled_token_self_distillation_loss,
)

from rollout.trajectory import Group, Sample
from tests.models import EOS, make_model
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.batch.packing import Microbatch
from trainer.model.arrangement import Arrangement
from trainer.model.learner import ALONE
from trainer.settings import TrainerSettings
from trainer.statistics import SUMS
from trainer.update.step import train

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

GROUPS, SAMPLES, LONGEST = 5, 4, 6
ROWS = GROUPS * SAMPLES
REWARDS = [[1, 0, 0.25, 0], [1, 1, 1, 1], [0, 2, 0.5, 0.5], [0, 0, 0, 0], [1, 0, 1, 0.75]]
"""Two groups are flat."""
WEIGHTS = {"right": 1.0, "long": -0.25}
"""The weights of two rewards: those above, and the lengths of the answers."""
LENGTHS = [2 + (3 * row) % (LONGEST - 1) for row in range(ROWS)]
TRUNCATED = {row for row in range(ROWS) if LENGTHS[row] == LONGEST}
assert TRUNCATED
FIRST = 10
"""The first token of row r is FIRST + r, by which a table is looked up; the last one of its prompt too."""
SHIFT = 0.2
"""Shift of the policy's log probabilities behind the prompt of another row."""


def table(seed: int, spread: float, around: Tensor | None = None) -> Tensor:
    """(ROWS, LONGEST) log probabilities, which float32 holds exactly."""
    noise = torch.randn(ROWS, LONGEST, generator=torch.Generator().manual_seed(seed)) * spread
    return (-0.5 - noise.abs() if around is None else around.float() + noise).double()


OLD = table(0, 1.0)
NEW = table(1, 0.3, OLD)
ENGINE = table(2, 0.6, OLD)
REFERENCE = table(3, 0.5, OLD)
TEACHER = table(4, 1.0)


def moved(steps: int = 0) -> Tensor:
    """The policy after so many steps."""
    return (NEW if steps else OLD).clone().requires_grad_()


def completion(row: int) -> list[int]:
    return [FIRST + row, *[3] * (LENGTHS[row] - 2), 3 if row in TRUNCATED else EOS]


# ---- TRL


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=0, hidden=16)


WRITTEN = {
    SFTTrainer: {"text": "1+1=2"},
    DPOTrainer: {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    KTOTrainer: {"prompt": "1+1=", "completion": "2", "label": True},
}
"""By trainer that generates nothing, a row of its data."""


def make_trainer(cls: Any, config: Any, model_dir: Path, out: Path, **settings: Any) -> Any:
    rows: list[dict[str, Any]] = [{"prompt": "1+1=", "reward": 0.0}]
    rewards = {
        "right": lambda completions, reward, **_: reward,
        "long": lambda completions, tokens, **_: tokens,
    }
    names = WEIGHTS if "reward_weights" in settings else ["right"]
    more: dict[str, Any] = {"reward_funcs": [rewards[name] for name in names]}
    if cls in WRITTEN:
        rows, more = [WRITTEN[cls]], {}
    quiet = {
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "activation_checkpointing": False,
    }
    return cls(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        args=config(output_dir=str(out), **quiet, **settings),
        train_dataset=Dataset.from_list(rows * ROWS),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        **more,
    )


@dataclass
class Found:
    """What one side has found, step by step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    """(ROWS, LONGEST) each."""
    order: list[int] = field(default_factory=list)
    """The rows of all steps."""
    shown: list[float] = field(default_factory=list)
    """The losses that a user sees, where those of the gradients are another's."""
    bonuses: list[float | None] = field(default_factory=list)


@pytest.fixture
def trl(model_dir: Path, tmp_path: Path) -> Callable[..., Found]:
    """Let TRL's trainer take the steps of the batch."""

    def run(steps: int, cls: Any = GRPOTrainer, engine: str | None = None, **settings: Any) -> Found:
        config = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig, GMPOTrainer: GMPOConfig}[cls]
        trainer = make_trainer(
            cls, config, model_dir, tmp_path,
            per_device_train_batch_size=ROWS // steps, steps_per_generation=steps,
            num_generations=SAMPLES, num_iterations=2, max_completion_length=LONGEST, **settings,
        )  # fmt: skip
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        policy = moved()

        def logprobs(
            model: Any, input_ids: Tensor, _mask: Any, logits_to_keep: int, *_: Any, **__: Any
        ) -> Any:
            rows = input_ids[:, -logits_to_keep] - FIRST
            which = REFERENCE if model is trainer.ref_model else policy if torch.is_grad_enabled() else OLD
            values = which[rows, :logits_to_keep]
            return values, values.square(), None

        def generate(prompts: list[Any]) -> tuple[Any, ...]:
            ids = [completion(row) for row in range(ROWS)]
            texts = [""] * ROWS
            if cls is RLOOTrainer:
                return [[3, 4]] * ROWS, ids, texts
            sampled = [ENGINE[row, : LENGTHS[row]].tolist() for row in range(ROWS)] if engine else None
            return [[3, 4]] * ROWS, ids, None, texts, sampled, {}, None, None

        trainer._get_per_token_logps_and_entropies = logprobs
        trainer._generate = generate
        if engine:
            trainer.use_vllm = True
            trainer.vllm_importance_sampling_mode = engine
            trainer.vllm_importance_sampling_clip_min = 0.5 if engine == "token_mask" else None
            trainer.vllm_importance_sampling_clip_max = 2.0
        rewards = [reward for of_group in REWARDS for reward in of_group]
        inputs = [
            {"prompt": "1+1=", "reward": float(reward), "tokens": float(tokens)}
            for reward, tokens in zip(rewards, LENGTHS, strict=True)
        ]
        found = Found()
        for step in range(steps):
            trainer._step = step
            of_step = trainer._prepare_inputs(inputs)
            found.order += (of_step["completion_ids"][:, 0] - FIRST).tolist()
            loss = trainer.compute_loss(trainer.model, of_step)
            found.losses.append(loss.item())
            found.gradients += torch.autograd.grad(loss, policy)
            policy = moved(1)
        return found

    return run


# ---- ours


class Table:
    """Stands in for a Learner; its parameters are the table NEW."""

    layout, device, arrangement, optimizer_step = ALONE, torch.device("cpu"), Arrangement(), 0
    entropy_control = None

    def __init__(self) -> None:
        self.policy, self.found = moved(), Found()

    def _of(self, values: Tensor, microbatch: Microbatch, shift: float = 0.0) -> Tensor:
        """(N,) a table's values for the trained tokens, more by `shift` behind the prompt of another row."""
        lengths = np.bincount(microbatch.sequences)
        within = np.concatenate([np.arange(length) for length in lengths])
        first = within == 0
        rows = microbatch.targets[first] - FIRST
        others = microbatch.token_ids.flatten()[microbatch.scored_at[first]] - FIRST != rows
        rows, others = (torch.from_numpy(of_row[microbatch.sequences]) for of_row in (rows, others))
        return values[rows, torch.from_numpy(within)] + shift * others

    def logprobs(self, microbatch: Microbatch, *_: Any) -> tuple[Tensor, Tensor]:
        values = self._of(self.policy if torch.is_grad_enabled() else OLD, microbatch, SHIFT)
        return values, values.square()  # in place of entropies, on both sides

    def reference_logprobs(self, microbatch: Microbatch, *_: Any) -> Tensor:
        return self._of(REFERENCE, microbatch)

    def zero_sums(self) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64)

    def add_up(self) -> tuple[list[float], float]:
        return self.sums.tolist(), 1.0

    def scale_gradients(self, factor: float) -> None:
        pass

    def apply(self, *_: Any) -> float:
        assert self.policy.grad is not None
        self.found.losses.append(float(self.sums[0]))
        self.found.gradients.append(self.policy.grad)
        self.policy = moved(1)
        return 0.0


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Found]:
    """Take the steps of the batch ourselves, in the order that TRL has shuffled its rows to."""

    def run(order: list[int], steps: int, deviation: float = 1e-4, **given: Any) -> Found:
        monkeypatch.setattr("trainer.batch.advantages._EPSILON", deviation)
        monkeypatch.setattr("trainer.batch.building.shuffled", lambda items, _seed: [items[k] for k in order])
        settings = TrainerSettings(
            **{"keep_flat_groups": True, "engine_correction": "off", **given},
            global_batch_size=ROWS // steps,
            max_tokens_per_microbatch=40,
        )
        about: dict[str, Any] = {"manifest_sha256": "", "policy": "", "temperature": 1.0, "seed": 0}
        batch: Batch = build_batch(
            groups(), settings=settings, max_tokens=LONGEST, reward_weights=WEIGHTS, **about
        )
        learner: Any = Table()
        steps_taken = train(learner, batch, settings, max_tokens=LONGEST, report=lambda _: None)
        learner.found.shown = [step.loss for step in steps_taken]
        learner.found.bonuses = [step.entropy_bonus for step in steps_taken]
        return learner.found

    return run


def groups() -> list[Group]:
    return [
        Group(slot, f"{slot}", "", [sample(slot * SAMPLES + j, reward) for j, reward in enumerate(rewards)])
        for slot, rewards in enumerate(REWARDS)
    ]


def sample(row: int, reward: float) -> Sample:
    ids, length = completion(row), LENGTHS[row]
    return Sample(
        token_ids=np.array([3, FIRST + row, *ids], np.int32),
        loss_mask=np.array([0, 0] + [1] * length, np.uint8),
        logprobs=np.concatenate([[0, 0], ENGINE[row, :length].numpy()]).astype(np.float32),
        finish_reason="length" if row in TRUNCATED else "stop",
        text="",
        reward=float(reward),
        teacher_logprobs=np.concatenate([[0, 0], TEACHER[row, :length].numpy()]).astype(np.float32),
        metrics={"right": float(reward), "long": float(length)},
    )


def assert_equal(mine: Found, theirs: Found, steps: int) -> None:
    assert len(mine.losses) == len(theirs.losses) == steps
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-6, abs=1e-7)
    assert max(gradient.abs().max() for gradient in theirs.gradients) > 1e-3
    for own, other in zip(mine.gradients, theirs.gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-8)


# ---- what both have


PPO: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
GRPO: dict[str, Any] = {"algorithm": "grpo", "kl": "off"}
THEIR_PPO: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28}
BOTH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo", "epsilon": 0.2}, GRPO),
    "grpo with kl": (
        {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.04, "use_bias_correction_kl": False},
        {"algorithm": "grpo"},
    ),
    "grpo with a floor": ({"loss_type": "grpo", "epsilon": 0.2, "delta": 3.0}, {**GRPO, "clip": "dual"}),
    "bnpo": ({"loss_type": "bnpo", **THEIR_PPO}, {**GRPO, **PPO, "aggregation": "token"}),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "epsilon": 0.2, "scale_rewards": "none"},
        {"algorithm": "dr_grpo"},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"algorithm": "gspo"},
    ),
    "grpo with entropy": (
        {"loss_type": "grpo", "epsilon": 0.2, "entropy_coef": 0.05},
        {**GRPO, "entropy_bonus": 0.05},
    ),
    "sapo": ({"loss_type": "sapo"}, {"algorithm": "sapo"}),
    "gdpo": (
        {
            "loss_type": "grpo",
            "epsilon": 0.2,
            "multi_objective_aggregation": "normalize_then_sum",
            "reward_weights": list(WEIGHTS.values()),
        },
        {"algorithm": "gdpo"},
    ),
}
"""TRL's settings, and ours."""
CORRECTIONS: list[tuple[str | None, str]] = [
    (None, "off"),
    ("token_truncate", "truncated"),
    ("token_mask", "masked"),
]


@pytest.mark.parametrize(("masked", "steps"), [(False, 2), (True, 5)], ids=["all", "truncated left out"])
@pytest.mark.parametrize(("theirs", "correction"), CORRECTIONS)
@pytest.mark.parametrize("name", BOTH)
def test_loss_and_gradient_are_those_of_trl(
    trl: Callable[..., Found],
    ours: Callable[..., Found],
    name: str,
    theirs: str | None,
    correction: str,
    masked: bool,
    steps: int,
) -> None:
    settings, mine = BOTH[name]
    expected = trl(steps, engine=theirs, mask_truncated_completions=masked, **{"beta": 0.0, **settings})
    overlong = "drop" if masked else "keep"
    found = ours(expected.order, steps, **{**mine, "overlong": overlong, "engine_correction": correction})
    if name == "gspo" and theirs:
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)  # the gradient: see above
    else:
        assert_equal(found, expected, steps)


def test_adaptive_entropy_bonus_is_that_of_trl(trl: Callable[..., Found], ours: Callable[..., Found]) -> None:
    """Over steps with entropies on both sides of the target."""
    target = 1.9
    theirs = {"use_adaptive_entropy": True, "entropy_target": target, "entropy_coef_delta": 0.1}
    expected = trl(5, loss_type="grpo", epsilon=0.2, beta=0.0, entropy_coef=0.05, **theirs)
    mine = {"entropy_bonus": 0.05, "entropy_target": target, "entropy_step": 0.1}
    found = ours(expected.order, 5, **{**GRPO, **mine})
    assert_equal(found, expected, 5)
    assert found.bonuses == pytest.approx([0.0, 0.15, 0.0, 0.0, 0.1])


@pytest.mark.parametrize("steps", [1, 2])
def test_gmpo_is_that_of_trl(trl: Callable[..., Found], ours: Callable[..., Found], steps: int) -> None:
    expected = trl(steps, GMPOTrainer, beta=0.0)
    assert_equal(ours(expected.order, steps, algorithm="gmpo"), expected, steps)


@pytest.mark.parametrize("name", ["dapo", "cispo"])
@pytest.mark.parametrize("steps", [1, 2])
def test_dapo_and_cispo_differ_in_the_tokens_that_a_step_is_divided_by(
    trl: Callable[..., Found], ours: Callable[..., Found], name: str, steps: int
) -> None:
    high = {"dapo": {"epsilon": 0.2, "epsilon_high": 0.28}, "cispo": {"epsilon_high": 5.0}}[name]
    expected = trl(steps, loss_type=name, beta=0.0, **high)
    mine = {"dapo": {**GRPO, **PPO, "aggregation": "token"}, "cispo": {"algorithm": "cispo"}}[name]
    found = ours(expected.order, steps, **mine)
    per_step = np.array(LENGTHS)[expected.order].reshape(steps, -1).sum(1)
    factors = (per_step / per_step.mean()).tolist()
    assert (factors == [1.0]) == (steps == 1)
    for k, factor in enumerate(factors):
        found.losses[k] *= factor
        found.gradients[k] *= factor
    assert_equal(found, expected, steps)


def test_deviation_has_a_smaller_constant(trl: Callable[..., Found], ours: Callable[..., Found]) -> None:
    expected = trl(2, loss_type="grpo", epsilon=0.2, beta=0.0)
    found = ours(expected.order, 2, deviation=1e-6, **GRPO)
    assert found.losses != pytest.approx(expected.losses, rel=1e-6)
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)


def test_kl_is_weighed_by_the_ratio_in_trl_unless_told_otherwise(
    trl: Callable[..., Found], ours: Callable[..., Found]
) -> None:
    expected = trl(2, loss_type="grpo", epsilon=0.2, beta=0.04)
    found = ours(expected.order, 2, algorithm="grpo")
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6), "the ratio is 1"
    assert found.losses[1] != pytest.approx(expected.losses[1], rel=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rloo_has_the_gradient_of_trl_in_the_first_update_times_a_constant(
    trl: Callable[..., Found], ours: Callable[..., Found], beta: float
) -> None:
    """With KL in the reward too, which flat groups then learn from."""
    expected = trl(1, RLOOTrainer, beta=beta, normalize_advantages=False)
    kl = {"kl": "k1", "kl_coefficient": beta} if beta else {}
    found = ours(expected.order, 1, algorithm="rloo", **kl)
    (own,), (other,) = found.gradients, expected.gradients
    torch.testing.assert_close(own * LONGEST, other, rtol=1e-6, atol=1e-8)
    assert (other[4:8].abs().max() > 1e-3) == bool(beta)


def test_likelihood_is_that_of_trls_supervised_trainer(
    model_dir: Path, tmp_path: Path, ours: Callable[..., Found]
) -> None:
    trainer = make_trainer(SFTTrainer, SFTConfig, model_dir, tmp_path)
    new = moved()
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]

    def model(**_: Any) -> Any:
        metrics = {"entropy": mask * 1.0, "is_top1": mask}
        return SimpleNamespace(log_probs=new * mask, label_mask=mask, **metrics)

    ids = torch.zeros(ROWS, LONGEST, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask.long()}
    loss = trainer.compute_loss(model, inputs)
    expected = Found([loss.item()], list(torch.autograd.grad(loss, new)))
    assert_equal(ours(list(range(ROWS)), 1, algorithm="sft", keep_flat_groups=False), expected, 1)


def test_self_distillation_is_that_of_trls_sdpo_by_sampled_tokens(ours: Callable[..., Found]) -> None:
    """Its value is a surrogate there, so the gradients are compared."""
    policy = moved()

    def logits(logprobs: Tensor) -> Tensor:
        """(ROWS, LONGEST, 2) of a vocabulary of two tokens, of which the first is sampled."""
        return torch.stack([logprobs, torch.log1p(-logprobs.exp())], -1)

    sampled = torch.zeros(ROWS, LONGEST, dtype=torch.int64)
    terms = compute_sampled_token_self_distillation_loss(
        logits(policy), logits(TEACHER), sampled, distillation_alpha=1.0
    )
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(LONGEST) < lengths[:, None]
    theirs = torch.autograd.grad(((terms * mask).sum(1) / lengths).mean(), policy)[0]
    mine = ours(list(range(ROWS)), 1, algorithm="distill", aggregation="sequence", keep_flat_groups=True)
    torch.testing.assert_close(mine.gradients[0], theirs, rtol=1e-6, atol=1e-8)
    assert theirs.abs().max() > 1e-3


def test_preferences_are_those_of_trls_dpo(
    model_dir: Path, tmp_path: Path, ours: Callable[..., Found]
) -> None:
    """Of the groups' best and worst samples, in one step."""
    better, worse = [0, 9, 16], [1, 8, 17]
    trainer = make_trainer(DPOTrainer, DPOConfig, model_dir, tmp_path, beta=0.3)
    trainer.precompute_ref_logps = True
    old = OLD.clone().requires_grad_()
    rows = [*better, *worse]
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS)[rows][:, None]

    def model(**_: Any) -> Any:
        zeros = mask * 0.0
        return SimpleNamespace(log_probs=old[rows] * mask, entropy=zeros, is_top1=mask, mean_logits=zeros)

    behind_a_prompt = torch.cat([torch.zeros(len(rows), 1, dtype=torch.long), mask.long()], dim=1)
    reference = (REFERENCE[rows] * mask).sum(1)
    inputs = {
        "input_ids": behind_a_prompt,
        "attention_mask": torch.ones_like(behind_a_prompt),
        "completion_mask": behind_a_prompt,
        "ref_chosen_logps": reference[:3],
        "ref_rejected_logps": reference[3:],
    }
    loss = trainer.compute_loss(model, inputs)
    expected = Found([loss.item()], list(torch.autograd.grad(loss, old)))
    found = ours([2, 0, 1], 1, algorithm="dpo", pair_beta=0.3, keep_flat_groups=False)
    (own,), (other,) = found.gradients, expected.gradients
    torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-8)
    assert other.abs().max() > 1e-2


@pytest.mark.parametrize("shift", [SHIFT, -SHIFT], ids=["far from the base model", "clamped"])
def test_labels_are_those_of_trls_kto(
    model_dir: Path,
    tmp_path: Path,
    ours: Callable[..., Found],
    monkeypatch: pytest.MonkeyPatch,
    shift: float,
) -> None:
    """With answers behind other prompts, whose log ratios have a mean above 0, or below."""
    monkeypatch.setitem(globals(), "SHIFT", shift)
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.5}
    trainer = make_trainer(
        KTOTrainer, KTOConfig, model_dir, tmp_path, beta=0.3, per_device_train_batch_size=ROWS, **weights
    )
    trainer.precompute_ref_logps = True
    labels = [reward > 0 for of_group in REWARDS for reward in of_group]
    answers = [completion(row) for row in range(ROWS)]
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
    reference = (REFERENCE * mask).sum(1).tolist()
    columns = {
        "prompt_ids": [[3, FIRST + row] for row in range(ROWS)],
        "completion_ids": answers,
        "KL_completion_ids": [answers[-1], *answers[:-1]],
        "label": labels,
        "ref_logps": reference,
        "ref_KL_logps": [reference[-1], *reference[:-1]],
    }
    inputs = trainer.data_collator([{name: columns[name][row] for name in columns} for row in range(ROWS)])
    old = OLD.clone().requires_grad_()
    distances: list[float] = []

    def model(input_ids: Tensor, **_: Any) -> Any:
        prompts, rows = input_ids[:, 1] - FIRST, input_ids[:, 2] - FIRST
        values = (old[rows] + SHIFT * (prompts != rows)[:, None]) * mask[rows]
        distances.append(float((values.detach().sum(1) - (REFERENCE * mask).sum(1)[rows]).mean()))
        values = torch.nn.functional.pad(values, (1, 0))[:, : input_ids.shape[1] - 1]
        return SimpleNamespace(log_probs=values, entropy=values, is_top1=values > 0, mean_logits=values)

    model.training = True  # pyright: ignore[reportFunctionMemberAccess]
    loss = trainer.compute_loss(model, inputs)
    expected = Found([loss.item()], list(torch.autograd.grad(loss, old)))
    assert abs(distances[0]) > 0.5 and (distances[0] > 0) == (shift > 0), "of answers behind other prompts"
    mine = {"pair_beta": 0.3, "undesirable_weight": 1.5, "keep_flat_groups": False}
    found = ours(list(range(ROWS)), 1, algorithm="kto", **mine)
    (own,), (other,) = found.gradients, expected.gradients
    torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-8)
    assert other.abs().max() > 1e-3
    assert found.shown == pytest.approx(expected.losses, rel=1e-6)
