"""Trajectories: samples of token ids with their rewards, and the groups that they form."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNFINISHED = "unfinished"
"""The finish_reason of a sample that a later iteration goes on with (rollout.segment_tokens)."""


@dataclass(frozen=True)
class Turn:
    """What one side says in a conversation, for people to read."""

    role: str
    """Role as in chat messages: `assistant` for the model; `environment`: a text appended as it is."""
    text: str
    begin: int | None = None
    end: int | None = None
    """End of its tokens, token_ids[begin:end], if the model has generated it for this sample."""
    finish_reason: str | None = None
    """Why a generated turn ended: `stop`, or `length` if it was cut."""
    reward: float | None = None
    """The reward that a generated turn alone has earned, if its environment says so."""
    state: str | None = None
    """A name of the state that a generated turn was said in, if its environment gives one."""


@dataclass(frozen=True)
class Span:
    """The tokens [begin:end] of a sample, which one iteration has generated."""

    begin: int
    end: int
    iteration: int
    policy_iteration: int
    """The iteration whose training made the policy that they were sampled by."""


@dataclass(frozen=True)
class Picture:
    """The tokens [begin:end] of a sample stand for a picture, whose file's name is its digest."""

    digest: str
    begin: int
    end: int


@dataclass
class Sample:
    """One trajectory: the prompt's tokens, then what was generated (and, over several turns, observed)."""

    token_ids: NDArray[np.int32]
    """(T,), prompt included."""
    loss_mask: NDArray[np.uint8]
    """(T,): 1 for tokens that are trained, i.e. generated (the end-of-sequence token too); 0 for prompt and
    observations.
    """
    logprobs: NDArray[np.float32]
    """(T,), natural log, of each token in the distribution that it was sampled from; 0 where not trained.
    NaN: a trained token that nothing has sampled, in demonstrations only.
    """
    finish_reason: str
    """`stop` (it ended by itself), `length` (it was cut), or UNFINISHED."""
    text: str
    """The completion."""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """What the environment and the reward have measured, by name."""
    turns: list[Turn] = field(default_factory=list)
    """The conversation after the group's prompt; empty if that is `text` alone. A conversation that an
    environment has opened with another prompt begins with that one.
    """
    spans: list[Span] = field(default_factory=list)
    """Which iterations have generated it, in order, if several may have; empty: the one that its part is of.
    """
    index: int = 0
    """Where it has spans: its number among the samples that its group was asked for, which its draws follow
    from.
    """
    teacher_logprobs: NDArray[np.float32] | None = None
    """(T,), natural log, of each token by the teacher (rollout.teacher); 0 where not trained."""
    routes: NDArray[np.int16] | None = None
    """(T, layers x experts of a token), the experts that each token was routed to (trainer.routing_replay);
    -1 where nobody knows, as of the last token."""
    feedback: str | None = None
    """What its environment says of it to rollout.teacher=self:feedback; not stored."""
    pictures: list[Picture] = field(default_factory=list)
    """Pictures that it shows, in order."""
    fault: str | None = None
    """Why its environment gives it up; such a sample counts as lost."""

    @property
    def generated_turns(self) -> list[Turn]:
        """The turns that the model has generated."""
        return [turn for turn in self.turns if turn.begin is not None]

    def reward_turns(self, rewards: Sequence[float | None], states: Sequence[str | None] = ()) -> None:
        """Say what each generated turn has earned (trainer.credit=turn); None: nothing of its own. A sample
        without a reward gets their sum. `states` (trainer.credit=state): a name of the state of each; None:
        one that cannot come again. Raises ValueError unless there is one for each.
        """
        count = len(self.generated_turns)
        for name, of_turns in (("rewards", rewards), ("states", states or rewards)):
            if len(of_turns) != count:
                raise ValueError(
                    f"{len(of_turns)} {name} for {count} generated turns: give one for each, or None"
                )
        values = [None if reward is None else float(reward) for reward in rewards]
        pairs = iter(zip(values, states or [None] * count, strict=True))
        for place, turn in enumerate(self.turns):
            if turn.begin is not None:
                reward, state = next(pairs)
                self.turns[place] = replace(turn, reward=reward, state=state)
        if self.reward is None:
            self.reward = sum(reward for reward in rewards if reward is not None)

    def leave_out(self, numbers: Collection[int]) -> None:
        """Leave these of the generated turns, numbered from 0, out of the loss."""
        turns = self.generated_turns
        if wrong := [number for number in numbers if not 0 <= number < len(turns)]:
            raise ValueError(f"there is no turn {wrong[0]} to leave out: {len(turns)} are generated, from 0")
        for number in numbers:
            self.loss_mask[turns[number].begin : turns[number].end] = 0
            self.logprobs[turns[number].begin : turns[number].end] = 0


@dataclass
class Group:
    """The samples of one slot. A tombstone (a slot that is given up for good) has none, and says why."""

    slot: int
    task_id: str
    prompt: str
    """The prompt as people read it."""
    samples: list[Sample]
    given_up: str | None = None
    failed: list[str] = field(default_factory=list)
    """The reason of each sample that is missing, because its reward raised or it was unfit."""

    @property
    def is_unfinished(self) -> bool:
        """Whether the next iteration goes on with some of its samples. None has a reward then."""
        return any(sample.finish_reason == UNFINISHED for sample in self.samples)


def largest(name: str) -> float:
    """Return how large the reward, or a metric, of a sample may be: below that, no mean overflows, and no
    gradient's square.
    """
    return 1e15 if name == "reward" else 1e30


def unfit(
    sample: Sample,
    *,
    demonstrated: bool,
    unfinished: bool = False,
    context: int | None = None,
    vocabulary: int | None = None,
) -> str | None:
    """Return why the sample can be neither trained nor stored; None if it can, and then its arrays are arrays
    and its numbers floats. `demonstrated`: the logprobs of trained tokens may be NaN. `unfinished`: another
    iteration may go on with it. `context`, `vocabulary`: how many positions and tokens the model has at most.
    """
    if sample.fault is not None:
        return sample.fault
    try:
        ids, mask = np.asarray(sample.token_ids), np.asarray(sample.loss_mask)
        logprobs = np.asarray(sample.logprobs, dtype=np.float32)
    except (TypeError, ValueError) as error:
        return f"its token_ids, loss_mask and logprobs do not consist of numbers: {error}"
    if not isinstance(sample.metrics, dict):
        return f"its metrics are {sample.metrics!r:.60}, expected numbers by name"
    for name, value in {"reward": sample.reward, **sample.metrics}.items():
        if not _is_number(value) and (name != "reward" or value is not None):
            metric = name if name == "reward" else f"metric {name!r}"
            return f"its {metric} is {value!r:.60}, expected a number"
    sample.reward = None if sample.reward is None else float(sample.reward)
    sample.metrics = {str(name): float(value) for name, value in sample.metrics.items()}
    sample.token_ids, sample.loss_mask, sample.logprobs = ids, mask, logprobs
    shapes = {ids.shape, mask.shape, logprobs.shape}
    if shapes != {(ids.size,)}:
        return f"its token_ids, loss_mask and logprobs have the shapes {sorted(shapes)}"
    if ids.size and (ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= 2**31):
        return f"its token_ids are not token ids: {ids.dtype} from {ids.min()} to {ids.max()}"
    if context is not None and ids.size > context:
        return f"it has {ids.size} tokens, and beyond {context} the model has no positions"
    if ids.size and vocabulary is not None and ids.max() >= vocabulary:
        return f"it has the token {ids.max()}, and the model knows {vocabulary}"
    if not ((mask == 0) | (mask == 1)).all():  # np.isin takes ten times as long
        return "its loss_mask has values other than 0 and 1"
    if mask.size and mask[0]:
        return "its first token is trained, but no logit scores that"
    if not (fine := np.isfinite(logprobs)).all():
        broken = ~(fine | (mask.astype(bool) & np.isnan(logprobs) & demonstrated))
        if broken.any():
            place = int(broken.argmax())
            return f"the logprob of its token {place} is {logprobs[place]}"
    for name, value in {"reward": sample.reward or 0.0, **sample.metrics}.items():
        if not abs(value) <= largest(name):  # nor is nan
            return f"its {name} is {value}, expected a finite number up to {largest(name):g}"
    if not isinstance(sample.text, str):
        return f"its text is {type(sample.text).__name__}"
    if sample.finish_reason not in ("stop", "length", *([UNFINISHED] if unfinished else [])):
        return f"its finish_reason is {sample.finish_reason!r}, neither stop nor length"
    at = 0
    for picture in sample.pictures:
        if not at <= picture.begin < picture.end <= ids.size or mask[picture.begin : picture.end].any():
            return f"its picture {picture.digest} is not before what it has generated, or lies over another"
        at = picture.end
    if not isinstance(sample.turns, list) or not all(isinstance(turn, Turn) for turn in sample.turns):
        return "its turns are not a list of Turn"
    for turn in sample.turns:
        reward = 0.0 if turn.reward is None else turn.reward
        if not isinstance(reward, int | float) or not abs(reward) <= largest("reward"):
            return f"the reward of a turn is {reward}, expected a finite number up to {largest('reward'):g}"
        if not isinstance(turn.state, str | None):
            return f"the state of a turn is {turn.state!r:.60}, expected a string that names it"
    return None


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def group_length(group: Group) -> int:
    """Return how many tokens the longest sample of a group has generated."""
    return max((int(sample.loss_mask.sum()) for sample in group.samples), default=0)


def generated_tokens(group: Group, iteration: int) -> int:
    """Count the tokens of a group in a part of `iteration` that this iteration has generated."""
    return sum(
        sum(span.end - span.begin for span in sample.spans if span.iteration == iteration)
        if sample.spans
        else int(sample.loss_mask.sum())
        for sample in group.samples
    )


def line_for_people(group: Group, *, rank: int, model_version: str) -> str:
    """Return the group as one line of JSON, without its token arrays."""
    line: dict[str, Any] = {"slot": group.slot, "task_id": group.task_id, "prompt": group.prompt}
    line |= {"samples": [_for_people(sample) for sample in group.samples]}
    line |= {"rank": rank, "model_version": model_version}
    shown = dict.fromkeys(picture.digest for sample in group.samples for picture in sample.pictures)
    line |= {"images": list(shown)} if shown else {}
    line |= {name: value for name in ("given_up", "failed") if (value := getattr(group, name))}
    return json.dumps(line) + "\n"


def _for_people(sample: Sample) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": sample.text,
        "reward": sample.reward,
        "tokens": int(np.count_nonzero(sample.loss_mask)),
        "finish_reason": sample.finish_reason,
    }
    if sample.metrics:
        record["metrics"] = sample.metrics
    if sample.turns:
        record["turns"] = [_turn_for_people(turn, sample.loss_mask) for turn in sample.turns]
    return record


def _turn_for_people(turn: Turn, loss_mask: NDArray[np.uint8]) -> dict[str, Any]:
    """Return a turn, with the number of its tokens and of those that are trained if it is generated."""
    shown: dict[str, Any] = {"role": turn.role, "text": turn.text}
    if turn.begin is not None and turn.end is not None:
        trained = int(np.count_nonzero(loss_mask[turn.begin : turn.end]))
        shown |= {"tokens": turn.end - turn.begin, "trained": trained, "finish_reason": turn.finish_reason}
        shown |= {} if turn.reward is None else {"reward": turn.reward}
    return shown
