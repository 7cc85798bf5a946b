"""Settings of the batch and of the loss. Importing this never imports torch."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from rollout.settings_tree import Mark, Settings
from trainer.algorithms import PRESETS
from trainer.choices import Advantage, Aggregation, Clip, ClipBound, Correction, Estimate, Overlong, Ratio
from trainer.source_settings import SourceSettings, by_source

_CRITICS = (
    "take grpo, which compares the samples of a task, with the same clipping: no value model is trained"
)
ELSEWHERE = {
    **dict.fromkeys(("ppo", "gae", "vapo"), _CRITICS),
    **dict.fromkeys(("reinforce_plus_plus", "reinforce_plus_plus_baseline"), "take reinforce++"),
    "bnpo": "take trainer.algorithm=grpo trainer.aggregation=token",
    "remax": "take rloo, which compares with the other samples in place of a greedy one",
    "opo": "take rloo, which compares with the mean of the other samples, whatever their lengths",
    **dict.fromkeys(("gpg", "grpo_passk", "grpo_vectorized"), "take grpo, which is nearest"),
    "rloo_vectorized": "take rloo, which is the same",
    **dict.fromkeys(("optimal_token_baseline", "tir_optimal_token_baseline"), "take rloo, which is nearest"),
    **dict.fromkeys(("luspo", "vespo"), "take gspo, which is nearest"),
}
"""What to do in place of an algorithm of other trainers."""
BY_TURN = ("centred", "standardised", "leave_one_out", "whitened")
"""Values of `advantage` that compare rewards of any size, so also those from a turn on."""
ALONE = ("one", "zero", "label")
"""Values of `advantage` that compare nothing within a group."""


class LossSettings(Settings):
    """How advantages are made of rewards, and what the loss makes of them."""

    algorithm: str = "default"
    """A preset: it sets the settings below, down to `replay_power`, unless you give them yourself."""
    advantage: Annotated[Advantage, Mark.SHAPES_BATCH] = "centred"
    """How a reward r becomes an advantage. centred: r - mean of its group; standardised: that over the
    group's standard deviation; leave_one_out: r - mean of the others; success: r - mean over the mean
    (rewards from 0 up); whitened: centred, then over the tokens of the batch; decoupled: the weighted sum of
    several rewards, each standardised in its group, then in the batch; one, zero: that for every sample;
    pair: only a group's best and worst samples are trained on; label: 1 for a reward above 0, else -1"""
    credit: Annotated[Literal["sample", "turn", "state"], Mark.SHAPES_BATCH] = "sample"
    """What a group compares. sample: the samples' rewards; turn: each turn's reward and those of later turns
    (its return); state: a sample's advantage, plus `state_weight` x that of the turn's return among the
    group's turns in the same state (GiGPO, arXiv 2505.10978)."""
    state_weight: Annotated[float, Field(gt=0), Mark.SHAPES_BATCH] = 1.0
    """With credit=state: how much the comparison within a state counts; the whole sample counts 1."""
    turn_discount: Annotated[float, Field(ge=0, le=1), Mark.SHAPES_BATCH] = 1.0
    """The weight of the next turn's return in a turn's; 0: a turn has only its own reward."""
    pair_beta: Annotated[float, Field(gt=0)] = 0.1
    """With advantage=pair or label: how much of a distance from the base model it takes to prefer the better
    sample (beta of DPO and KTO)."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """With advantage=label: what a bad sample's loss weighs; a good one's weighs 1 (KTO)."""
    ratio: Ratio = "token"
    """The policy's probability of what was sampled over that before the update: of each token, or one for the
    whole sequence, the geometric mean over its tokens (GSPO)."""
    clip: Clip = "ppo"
    """What limits the ratio. ppo: PPO's clip; dual: that with a floor (`dual_clip`); cispo: CISPO's clip;
    soft: SAPO's gate; geometric: GMPO's mean of clipped ratios; divergence: DPPO's bounds of the probability;
    none: nothing; likelihood: there is no ratio, A log pi."""
    clip_low: ClipBound = 0.2
    """How far below 1 the ratio may go; see `clip_high`."""
    clip_high: ClipBound = 0.28
    """The ratio is clipped to [1 - clip_low, 1 + clip_high] (DAPO, arXiv 2503.14476); with clip=geometric its
    logarithm to [-clip_low, clip_high]. With clip=divergence no
    gradient leads a token's probability further than that below or above the engine's."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """With clip=dual: no term with a negative advantage is below dual_clip x advantage (arXiv 1912.09729)."""
    aggregation: Aggregation = "token"
    """How the losses of tokens become one. token: their mean over an optimizer step; sequence, sum: mean over
    sequences of the mean, or the sum, over their tokens; constant: the sum over all, divided by sequences x
    rollout.max_tokens."""
    engine_correction: Correction = "truncated"
    """Weigh each token by w, its probability in the trainer before the update over that in the engine, whose
    numerics differ. off: 1; truncated: min(w, cap); masked: w, but 0 above the cap or below its inverse."""
    engine_correction_cap: Annotated[float, Field(gt=0)] = 2.0
    """The cap of `engine_correction`."""
    engine_sequence_cap: Annotated[float, Field(gt=1)] | None = None
    """Leave out a whole sequence whose geometric mean of w lies above this or below its inverse, e.g. 1.01;
    null: none."""
    kl: Annotated[Estimate, Mark.SHAPES_BATCH] = "off"
    """How KL(policy || `kl_to`) is estimated (joschu.net/blog/kl-approx), which holds the policy near it;
    off: no KL. Usual are k3 in the loss and k1 in the reward."""
    kl_to: Annotated[Literal["base", "teacher"], Mark.SHAPES_BATCH] = "base"
    """The reference of `kl`: the base model, or rollout.teacher."""
    kl_in: Annotated[Literal["loss", "token_reward", "reward"], Mark.SHAPES_BATCH] = "loss"
    """Where `kl` goes. loss: added to the loss of each token (GRPO); token_reward: subtracted from each
    token's reward, and so from the advantages up to it (PPO); reward: its sum, subtracted from the sample's
    reward (RLOO)."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.001
    """The weight of the KL term."""
    entropy_bonus: Annotated[float, Field(ge=0), Mark.SHAPES_BATCH] = 0.0
    """How strongly the loss rewards the policy's mean entropy, which keeps it exploring (A3C, arXiv
    1602.01783), e.g. 0.001; 0: not at all."""
    entropy_target: Annotated[Annotated[float, Field(gt=0)] | None, Mark.SHAPES_BATCH] = None
    """Adapt `entropy_bonus`, which it begins with: after a step whose entropy is at or below this it rises by
    `entropy_step`; else it falls, and the next step has none (Skywork-OR1, arXiv 2505.22312). null: fixed."""
    entropy_step: Annotated[float, Field(gt=0)] = 0.005
    """By how much `entropy_target` changes the bonus after a step."""
    keep_flat_groups: Annotated[bool, Mark.SHAPES_BATCH] = False
    """Count groups whose samples all have the same reward in the mean that `aggregation` takes, and with them
    other samples that are not trained on (`overlong`, `reward_threshold`). They are computed only where `kl`,
    `entropy_bonus` or whitening gives them a gradient."""
    overlong: Annotated[Overlong, Mark.SHAPES_BATCH] = "keep"
    """Samples close to rollout.max_tokens. keep: as they are; penalise: the reward falls by up to 1 over the
    last `overlong_buffer` tokens (DAPO); drop: samples that were cut are not trained on."""
    overlong_buffer: Annotated[float, Field(gt=0, le=1), Mark.SHAPES_BATCH] = 0.2
    """With overlong=penalise: over which last part of rollout.max_tokens the penalty grows, a fraction."""
    reward_threshold: Annotated[float | None, Mark.SHAPES_BATCH] = None
    """Train only on samples with this reward or more; null: on all."""
    sources: Annotated[dict[str, SourceSettings], BeforeValidator(by_source)] = Field(default={})
    """What differs for tasks of a source: see `trainer.sources.NAME`."""
    max_off_policy_steps: Annotated[Annotated[int, Field(ge=0)] | None, Mark.SHAPES_BATCH] = None
    """Do not train on tokens of a policy that is more iterations old than this; null: train on all."""
    replay_window: Annotated[int, Field(ge=1), Mark.SHAPES_BATCH] = 1
    """Draw a batch from the groups of this many iterations, this one included; 1: on-policy."""
    replay_power: Annotated[float, Field(ge=0), Mark.SHAPES_BATCH] = 1.0
    """Groups of the window's p-th iteration, 0 the oldest, are drawn with the weight (p + 1)^replay_power."""

    def of_source(self, name: str) -> Self:
        """Return the settings for the samples of a source."""
        source = self.sources.get(name)
        if source is None:
            return self.model_copy(update={"sources": {}})
        overrides = {
            key: value for key, value in source.model_dump(exclude={"weight"}).items() if value is not None
        }
        if source.algorithm is not None:
            defaults = {
                key: LossSettings.model_fields[key].default
                for key in SourceSettings.model_fields
                if key not in ("weight", "algorithm")
            }
            preset = {key: value for key, value in PRESETS[source.algorithm]().items() if key in defaults}
            overrides = {**defaults, **preset, **overrides}
        return self.model_copy(update={"sources": {}, "kl_in": "loss", **overrides})

    @property
    def of_all_sources(self) -> list[Self]:
        """The settings for the samples of each source, first of those that have none of their own."""
        return [self.of_source(""), *map(self.of_source, self.sources)]

    @property
    def reference(self) -> Literal["base", "teacher"] | None:
        """What KL compares the policy with, in the samples of any source; None: with nothing."""
        return next((each.kl_to for each in self.of_all_sources if each.kl != "off"), None)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with the model that the run started from."""
        return self.reference == "base" or self.weighs_samples

    @property
    def corrects_for_age(self) -> bool:
        """Whether the loss allows for samples of an older policy."""
        return self.engine_correction != "off" or self.clip == "likelihood"

    @property
    def weighs_samples(self) -> bool:
        """Whether each step weighs its samples by how far the policy has come from the base model."""
        return self.advantage in ("pair", "label")

    @property
    def teaches_flat_groups(self) -> bool:
        """Whether the loss has a gradient where all advantages are 0, in the samples of any source."""
        return self.reference is not None or self.rewards_entropy

    @property
    def rewards_entropy(self) -> bool:
        """Whether the loss may have an entropy bonus."""
        return self.entropy_bonus > 0 or self.entropy_target is not None

    def refuse_clip_bounds(self) -> None:
        """Raise ValueError for a bound that cuts nothing off, or everything. Not a rule of the settings
        themselves: runs of before, whose records must be read, may have one.
        """
        bounds = {"clip_low": {"ppo", "dual", "cispo", "divergence"}, "clip_high": {"divergence"}}
        for name, clips in bounds.items():
            bound = getattr(self, name)
            if bound > 1 and self.clip in clips:
                quantity = "probability" if self.clip == "divergence" else "ratio"
                move, fraction = "falls" if name == "clip_low" else "rises", bound / 100
                advice = f"give {fraction:g} for {bound:g} %" if fraction < 1 else "give a fraction, e.g. 0.2"
                advice = "" if self.clip == "cispo" else f"{advice}, or "
                raise ValueError(
                    f"trainer.{name}={bound:g} with trainer.clip={self.clip}: no {quantity} {move} by more "
                    f"than 1, so nothing is cut off; {advice or 'give '}1 for no bound"
                )
        cap, correction = self.engine_correction_cap, self.engine_correction
        if correction != "off" and (cap < 1 or (cap == 1 and correction == "masked")):
            falls = "is cut to that" if correction == "truncated" else "becomes 0"
            raise ValueError(
                f"trainer.engine_correction_cap={cap:g} with trainer.engine_correction={correction}: weights "
                f"are about 1, so that of nearly every token {falls}; give more than 1, e.g. 2"
            )

    @model_validator(mode="after")
    def _loss_fits(self) -> Self:
        if self.advantage == "pair" and self.keep_flat_groups:
            raise ValueError(
                "trainer.keep_flat_groups=true with trainer.advantage=pair: a group of equal rewards has no "
                "pair; leave one of them out"
            )
        if self.weighs_samples and self.rewards_entropy:
            name = "entropy_bonus" if self.entropy_bonus else "entropy_target"
            raise ValueError(
                f"trainer.{name}={getattr(self, name):g} with trainer.advantage={self.advantage}: its "
                "answers are compared, and not explored; leave one of them out"
            )
        if self.credit != "sample" and self.advantage not in BY_TURN:
            raise ValueError(
                f"trainer.credit={self.credit} with trainer.advantage={self.advantage}: that is of whole "
                f"samples; use {', '.join(BY_TURN)}, or leave trainer.credit out"
            )
        if self.advantage == "success" and self.overlong == "penalise":
            raise ValueError(
                "trainer.overlong=penalise with trainer.advantage=success: a penalty makes rewards "
                "negative, and success divides by their mean; use trainer.overlong=drop or another advantage"
            )
        if self.advantage == "decoupled" and self.overlong == "penalise":
            raise ValueError(
                "trainer.overlong=penalise with trainer.advantage=decoupled: the penalty is none of the "
                "rewards that are standardised; use trainer.overlong=drop, or make it one of them"
            )
        scaled = {"standardised", "success", "decoupled", "one", "pair", "label"}
        if self.kl != "off" and self.kl_in != "loss" and self.advantage in scaled:
            raise ValueError(
                f"trainer.kl_in={self.kl_in} with trainer.advantage={self.advantage}: KL is taken from "
                "rewards that keep their scale; use centred, leave_one_out or whitened, or trainer.kl_in=loss"
            )
        in_loss = self.kl == "off" or self.kl_in == "loss"
        if self.sources and (self.weighs_samples or not in_loss):
            setting = f"advantage={self.advantage}" if self.weighs_samples else f"kl_in={self.kl_in}"
            raise ValueError(
                f"trainer.sources.{min(self.sources)} with trainer.{setting}: that is computed in the "
                "training, which knows no sources; leave one of them out"
            )
        for name, source in self.sources.items():
            try:
                _refuse_unknown(source.algorithm or "default")
                of_source = self.of_source(name)
                type(self).model_validate(of_source.model_dump())
                if of_source.weighs_samples:
                    raise ValueError(
                        f"trainer.advantage={of_source.advantage} compares the samples of a step with each "
                        "other, which may be of any source; give it to all, as trainer.algorithm"
                    )
            except (ValidationError, ValueError) as error:
                reason = (
                    error.errors()[0].get("ctx", {}).get("error", error)
                    if isinstance(error, ValidationError)
                    else error
                )
                raise ValueError(f"trainer.sources.{name}: {reason}") from None
        compared = {each.kl_to for each in self.of_all_sources if each.kl != "off"}
        if len(compared) > 1:
            raise ValueError(
                "trainer.sources: KL to the base model for some and to the teacher for others; give all with "
                "KL the same trainer.kl_to"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _take_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        name = values.get("algorithm", "default")
        _refuse_unknown(name)
        return {**PRESETS[name](), **values}


def _refuse_unknown(algorithm: Any) -> None:
    """Raise ValueError for the name of no preset."""
    if isinstance(algorithm, str) and algorithm in PRESETS:
        return
    word = str(algorithm).lower()
    near = difflib.get_close_matches(word, PRESETS, n=1, cutoff=0.7)
    advice = f"did you mean {near[0]}? There" if near else "there"
    advice = f"{ELSEWHERE[word]}; there" if word in ELSEWHERE else advice
    raise ValueError(f"trainer.algorithm={algorithm}: {advice} is {', '.join(PRESETS)}")
