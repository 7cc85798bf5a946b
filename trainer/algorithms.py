"""The named algorithms: each is a choice of the settings of the batch and its loss. Torch-free.

A preset is a function that returns settings of `trainer` by name, and its name in PRESETS is what
`trainer.algorithm` takes. Settings that are given themselves win over a preset's, a preset's over the
defaults of TrainerSettings. All but rft, sft, dpo, kto and distill have the truncated correction for the
engine (arXiv 2402.03300 and its successors assume one that samples with the trainer's own numerics).
"""

from collections.abc import Callable
from typing import Any


def default() -> dict[str, Any]:
    """What we would start with: A = r - mean (Dr. GRPO), clip 0.2 / 0.28 and token mean (DAPO), no KL, flat
    groups left out, truncated correction for the engine.
    """
    return {}


def grpo() -> dict[str, Any]:
    """Group relative policy optimization: Shao et al. 2024, arXiv 2402.03300.

    A = (r - mean) / std, mean over sequences of the mean over tokens, 0.04 k3 to the base model. Flat groups
    stay: the KL term holds them.
    """
    return {
        "advantage": "standardised",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "sequence",
        "kl": "k3",
        "kl_coefficient": 0.04,
        "keep_flat_groups": True,
    }


def dr_grpo() -> dict[str, Any]:
    """GRPO done right: Liu et al. 2025, arXiv 2503.20783.

    A = r - mean, and a sum over tokens divided by a constant: neither the deviation of a group nor the length
    of an answer weighs in. The constant counts all samples, those of flat groups too.
    """
    return {
        "advantage": "centred",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "constant",
        "keep_flat_groups": True,
    }


def dapo() -> dict[str, Any]:
    """Decoupled clip and dynamic sampling: Yu et al. 2025, arXiv 2503.14476.

    GRPO without KL, clipped higher above than below, token mean, flat groups left out, and the soft penalty
    of overlong answers (4,096 of 20,480 tokens). Its replacement of flat groups by further ones is
    `rollout.dynamic_sampling`.
    """
    return {
        "advantage": "standardised",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token",
        "overlong": "penalise",
        "overlong_buffer": 0.2,
    }


def gspo() -> dict[str, Any]:
    """Group sequence policy optimization: Zheng et al. 2025, arXiv 2507.18071.

    One ratio for a sequence, clipped within 3e-4 below and 4e-4 above (section 5.1). The mean is over all
    samples.
    """
    return {
        "advantage": "standardised",
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence",
        "keep_flat_groups": True,
    }


def cispo() -> dict[str, Any]:
    """Clipped importance-sampling weights: MiniMax-M1 2025, arXiv 2506.13585.

    The ratio is a weight without gradient, so no token loses its gradient. It has no lower bound; the upper
    one is tuned in the paper and not said, and 5 is what TRL recommends. Flat groups do not count: it takes
    over DAPO's dynamic sampling, which replaces them.
    """
    return {
        "advantage": "standardised",
        "clip": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "aggregation": "token",
    }


def sapo() -> dict[str, Any]:
    """Soft adaptive policy optimization: Gao et al. 2025, arXiv 2511.20347.

    GRPO with a smooth gate in place of the clip, and no KL: a token far from the old policy counts less and
    less instead of not at all.
    """
    return {
        "advantage": "standardised",
        "clip": "soft",
        "aggregation": "sequence",
        "keep_flat_groups": True,
    }


def gmpo() -> dict[str, Any]:
    """Geometric-mean policy optimization: Zhao et al. 2025, arXiv 2507.20673.

    The geometric mean of a sequence's ratios, each clipped to e^-0.4 to e^0.4: one token with an
    absurd ratio does not carry the others away.
    """
    return {
        "advantage": "standardised",
        "clip": "geometric",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "aggregation": "sequence",
        "keep_flat_groups": True,
    }


def dppo() -> dict[str, Any]:
    """Divergence proximal policy optimization: Qi et al. 2026, arXiv 2602.04879, with total variation.

    Dr. GRPO, as its authors' recipe has it, where a token is left out once its probability is more than 0.15
    from the engine's and the advantage leads on: a rare token may move by a large ratio, a likely one may
    not.
    """
    return {
        "advantage": "centred",
        "clip": "divergence",
        "clip_low": 0.15,
        "clip_high": 0.15,
        "aggregation": "constant",
        "keep_flat_groups": True,
    }


def maxrl() -> dict[str, Any]:
    """Maximum likelihood reinforcement learning: Tajwar et al. 2026, arXiv 2602.02710.

    A = (r - mean) / mean, of rewards 0 and 1: a step climbs the mean of log p, the chance of a success, where
    r - mean climbs that of p. An answer is one action, so its tokens are summed; nothing is clipped.
    """
    return {"advantage": "success", "clip": "none", "aggregation": "constant", "keep_flat_groups": True}


def gdpo() -> dict[str, Any]:
    """Group reward-decoupled normalization policy optimization: Liu et al. 2026, arXiv 2601.05242.

    GRPO of several rewards without KL: each is standardised within its group, then they are added up by their
    weights, and the sums are standardised over the batch.
    """
    return {
        "advantage": "decoupled",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "sequence",
        "keep_flat_groups": True,
    }


def rloo() -> dict[str, Any]:
    """REINFORCE leave-one-out: Ahmadian et al. 2024, arXiv 2402.14740.

    A = r - mean of the others; an answer is one action, so its tokens are summed; nothing is clipped, the
    ratio is there for batches of several optimizer steps. Its KL in the reward is `trainer.kl=k1`.
    """
    return {
        "advantage": "leave_one_out",
        "clip": "none",
        "aggregation": "constant",
        "kl_in": "reward",
        "keep_flat_groups": True,
    }


def reinforce_pp() -> dict[str, Any]:
    """REINFORCE++ with baseline: Hu et al. 2025, arXiv 2501.03262.

    A = r - mean of the group, whitened over the tokens of the batch, flat groups included. Its KL loss is
    `trainer.kl=k2`.
    """
    return {
        "advantage": "whitened",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token",
        "keep_flat_groups": True,
    }


def rft() -> dict[str, Any]:
    """Rejection sampling fine-tuning: Yuan et al. 2023, arXiv 2308.01825.

    The negative log-likelihood of the policy's own samples with a reward of 1 or more.
    """
    return {
        "advantage": "one",
        "clip": "likelihood",
        "aggregation": "token",
        "engine_correction": "off",
        "reward_threshold": 1.0,
    }


def sft() -> dict[str, Any]:
    """Supervised fine-tuning on the tasks' answers: Ouyang et al. 2022, arXiv 2203.02155, step 1.

    The negative log-likelihood of demonstrations, which take the place of samples.
    """
    return {"advantage": "one", "clip": "likelihood", "aggregation": "token", "engine_correction": "off"}


def dpo() -> dict[str, Any]:
    """Direct preference optimization: Rafailov et al. 2023, arXiv 2305.18290.

    -log sigmoid(beta (D_better - D_worse)), where D is the log ratio of an answer between the policy and the
    base model; the mean over pairs. The pairs are written in the tasks; of sampled groups they are the best
    and the worst sample.
    """
    return {"advantage": "pair", "clip": "likelihood", "aggregation": "sum", "engine_correction": "off"}


def kto() -> dict[str, Any]:
    """Kahneman-Tversky optimization: Ethayarajh et al. 2024, arXiv 2402.01306.

    1 - sigmoid(+-beta (D - z)), + for a good answer and - for a bad one, where D is its log ratio between the
    policy and the base model, and z the mean log ratio of answers to other prompts, at least 0; the mean over
    answers. Each answer has a label of its own: no pairs are needed.
    """
    return {"advantage": "label", "clip": "likelihood", "aggregation": "sum", "engine_correction": "off"}


def distill() -> dict[str, Any]:
    """On-policy distillation: Agarwal et al. 2024 (GKD), arXiv 2306.13649, with the reverse KL.

    The policy's own samples, and at each of their tokens KL(policy || teacher). Rewards are only measured.
    """
    return {
        "advantage": "zero",
        "clip": "likelihood",
        "aggregation": "token",
        "engine_correction": "off",
        "kl": "k1",
        "kl_to": "teacher",
        "kl_coefficient": 1.0,
    }


PRESETS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": default,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "rloo": rloo,
    "reinforce++": reinforce_pp,
    "rft": rft,
    "sft": sft,
    "dpo": dpo,
    "kto": kto,
    "distill": distill,
}
