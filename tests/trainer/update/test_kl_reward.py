"""KL in the reward: the exact gradient where every answer can be written out, and the whole training step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.trajectory import Group
from tests.models import make_model
from trainer.batch.batch import Batch
from trainer.batch.building import ReplayedGroups, build_batch
from trainer.batch.packing import Bundle, Microbatch, fill
from trainer.model.learner import ALONE, Learner, build_learner
from trainer.settings import TrainerSettings
from trainer.update.kl_reward import with_kl_in_reward
from trainer.update.loss import Totals, TrainedTokens, kl_estimate, policy_loss
from trainer.update.step import train

CPU = torch.device("cpu")
TOKENS = 6
ANSWERS = list(product((0, 1), repeat=TOKENS))
"""Every answer of a policy with two tokens."""
BETA = 0.3


def logprobs(logits: Tensor, answer: Sequence[int]) -> Tensor:
    """(TOKENS,) of an answer; the policy is a table of logits by place and by the token before."""
    before = [0, *answer[:-1]]
    return torch.stack([torch.log_softmax(logits[t, before[t]], -1)[answer[t]] for t in range(TOKENS)])


def reward(answer: Sequence[int]) -> float:
    return float(answer[0] == answer[-1]) + 0.5 * sum(answer)


def one_answer() -> tuple[Batch, Microbatch]:
    """A batch of one sequence, whose advantage is put in later."""
    nothing = np.zeros(1, np.float32)
    batch: Any = Batch(
        token_ids=np.zeros(TOKENS + 1, np.int32),
        loss_mask=np.array([0] + [1] * TOKENS, np.uint8),
        logprobs=np.zeros(TOKENS + 1, np.float32),
        offsets=np.array([0, TOKENS + 1]),
        advantages=nothing,
        rewards=nothing,
        slots=np.zeros(1, np.int32),
        groups=np.zeros(1, np.int32),
        temperatures=np.ones(1, np.float32),
        ages=np.zeros(TOKENS + 1, np.int32),
        **{"counts": None, "manifest_sha256": "", "policy": "", "seed": 0},
    )
    return batch, fill(batch, [[Bundle([0], TOKENS)]])


def gradients(kl_in: str) -> tuple[Tensor, Tensor]:
    """Of the mean loss over all answers by their probabilities, and of the mean of reward - BETA x KL."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, 2, 2, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(TOKENS, 2, 2, generator=generator, dtype=torch.float64)
    settings = TrainerSettings.model_validate(
        {"kl": "k1", "kl_in": kl_in, "kl_coefficient": BETA, "aggregation": "constant", "clip": "none"}
    )
    batch, microbatch = one_answer()
    loss = objective = torch.zeros((), dtype=torch.float64)
    for answer in ANSWERS:
        own, base = logprobs(logits, answer), logprobs(reference, answer)
        probability = own.sum().exp()
        advantages = torch.full((TOKENS,), reward(answer), dtype=torch.float64)
        if kl_in == "token_reward":
            kl = kl_estimate((own - base).detach(), "k1").numpy()
            ((changed,),) = with_kl_in_reward(batch, [[microbatch]], [[kl]], settings, ALONE)
            advantages = advantages + torch.from_numpy(changed.advantages)
        places, totals = torch.zeros(TOKENS, dtype=torch.int64), Totals(TOKENS, 1, 1)
        of_answer, _ = policy_loss(
            TrainedTokens(own, own, own.detach(), base, advantages, places), totals, settings
        )
        loss = loss + probability.detach() * of_answer
        objective = objective + probability * (reward(answer) - BETA * (own - base).sum())
    return tuple(
        torch.autograd.grad(value, logits, retain_graph=True)[0].flatten() for value in (-loss, objective)
    )  # type: ignore


def test_kl_in_the_reward_of_each_token_has_the_gradient_of_reward_minus_kl() -> None:
    found, exact = gradients("token_reward")
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


def test_k1_in_the_loss_is_something_else() -> None:
    found, exact = gradients("loss")
    assert torch.nn.functional.cosine_similarity(found, exact, dim=0) < 0.99


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy and the reference."""
    directory = tmp_path_factory.mktemp("models")
    return make_model(directory / "model", seed=0), make_model(directory / "reference", seed=1)


def sequence_kl(batch: Batch, learner: Learner) -> np.ndarray:
    """(S,) the sum over the tokens of each sequence of log pi - log pi_reference."""
    sums = []
    for k, tokens in enumerate(batch.input_tokens.tolist()):
        alone = fill(batch, [[Bundle([k], tokens)]])
        own, base = learner.logprobs(alone)[0], learner.reference_logprobs(alone)
        sums.append(float((own.detach() - base).sum()))
    return np.array(sums)


def test_rloo_takes_the_kl_of_a_whole_answer_from_its_reward_before_the_baseline(
    models: tuple[Path, Path], group: Callable[..., Group]
) -> None:
    rng = np.random.default_rng(0)
    groups = [group(slot, [0.0, 1.0, 0.5, 1.0], rng) for slot in range(6)]
    groups[0] = group(0, [1.0, 1.0, 1.0, 1.0], rng)  # flat, but for its KL
    older = [group(slot, [0.0, 1.0, 0.5, 1.0], rng) for slot in range(6)]  # with the same slots
    for sample in (sample for each in (*groups, *older) for sample in each.samples):
        sample.token_ids %= 48
    settings = TrainerSettings(
        algorithm="rloo", kl="k1", kl_coefficient=0.2, learning_rate=1e-3, global_batch_size=8
    )
    about: dict[str, Any] = {"manifest_sha256": "", "policy": "", "temperature": 1.0, "seed": 0}
    batch = build_batch(groups, settings=settings, older=[ReplayedGroups(older)], **about)
    assert len(batch) == 24

    updated = []
    for by_hand in (False, True):
        learner = build_learner(models[0], CPU, settings)
        learner.load_reference(models[1], settings)
        mine, trained = settings, batch
        if by_hand:
            rewards = batch.rewards - 0.2 * sequence_kl(batch, learner)
            advantages = np.zeros(len(batch), np.float32)
            for k, number in enumerate(batch.groups.tolist()):
                others = [j for j in np.flatnonzero(batch.groups == number).tolist() if j != k]
                advantages[k] = rewards[k] - rewards[others].mean()
            mine, trained = settings.model_copy(update={"kl": "off"}), replace(batch, advantages=advantages)
        stats = train(learner, trained, mine, max_tokens=24, report=lambda line: None)
        assert len(stats) == 3
        updated.append(torch.cat([value.detach().flatten() for value in learner.parameters.values()]))
    torch.testing.assert_close(updated[0], updated[1], rtol=0, atol=1e-5)


def test_whitening_comes_after_the_kl_and_over_all_steps(
    models: tuple[Path, Path], group: Callable[..., Group]
) -> None:
    rng = np.random.default_rng(0)
    groups = [group(slot, [0.0, 1.0, 0.5, 1.0], rng) for slot in range(4)]
    settings = TrainerSettings(
        algorithm="reinforce++", kl="k1", kl_in="token_reward", kl_coefficient=0.2, global_batch_size=8
    )
    about: dict[str, Any] = {"manifest_sha256": "", "policy": "", "temperature": 1.0, "seed": 0}
    batch = build_batch(groups, settings=settings, **about)
    assert sorted(set(np.round(batch.advantages, 3).tolist())) == [-0.625, -0.125, 0.375], "not whitened yet"
    plans = [
        [fill(batch, [[Bundle([k], int(batch.input_tokens[k]))] for k in step])]
        for step in (range(8), range(8, 16))
    ]
    kl = [[rng.normal(size=len(m.targets)) for m in plan] for plan in plans]
    changed = with_kl_in_reward(batch, plans, kl, settings, ALONE)
    expected = []
    for plan, own in zip(plans, kl, strict=True):
        (m,), (k,) = plan, own
        for s in range(8):
            mine = np.flatnonzero(m.sequences == s)
            expected += [m.advantages[t] - 0.2 * k[t : mine[-1] + 1].sum() for t in mine]
    values = np.array(expected)
    found = np.concatenate([m.advantages for plan in changed for m in plan])
    assert found == pytest.approx((values - values.mean()) / values.std(), rel=1e-5)
