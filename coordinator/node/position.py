"""The position of a node in the run, as its heartbeat says."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from coordinator.protocol.phase import Phase
from coordinator.protocol.snapshot import ranks_text
from rollout.engines.token_counts import Generated

ENGINE = "starting the engine"
SLOW_START_S = 30.0
"""From then on it is said why an engine may take long to start."""
GATHERING = "gathering"
"""The state of a master that waits for its workers. Its heartbeats say how long each of them is silent."""
STATES = {
    "starting": "starting",
    GATHERING: "gathering the nodes",
    "pending": "waiting until the master lets this node in",
    "fenced": "waiting for the shared directory",
    "running": "entering the epoch",
}
"""What goes on outside of the phases."""
SPACE_WAIT_S = 10.0
"""Who waits for free space says so more often than this."""
UNITS = {
    Phase.TRAIN_ROLLOUT.label: "tasks",
    Phase.EVAL_ROLLOUT.label: "tasks",
    Phase.TRAINING.label: "parts",
}
"""What the progress of a phase is counted in; other phases count megabytes."""


@dataclass
class _PhaseStay:
    """Where the node is from one `move` to the next, and how far it got there. Moments (`since_s`,
    `reached_s`) are of this node's monotonic clock.
    """

    state: str = "starting"
    iteration: int = 0
    phase: str = ""
    waiting_for: list[int] = field(default_factory=list[int])
    lacking: str = ""
    done: int = 0
    total: int = 0
    tokens: int = 0
    samples: int = 0
    samples_per_task: int = 0
    max_tokens: int = 0
    generated: int = 0
    steps: int = 0
    since_s: float = field(default_factory=lambda: time.monotonic())
    waiting_since_s: float | None = None
    counting_since_s: float | None = None
    reached_s: float = 0.0


class Position:
    """The node's place: written by its main thread, read by any."""

    def __init__(
        self, names: Callable[[Iterable[int]], str] = ranks_text, engine_starts: Callable[[], bool] = bool
    ) -> None:
        """`names`: what a person calls nodes, by rank. `engine_starts`: whether the node's engine is just
        starting, in whatever phase that is.
        """
        self._names, self._engine_starts = names, engine_starts
        self._place = _PhaseStay()
        self._last = 0
        """The iteration that the node was in last: between two epochs it is in none."""
        self._space_wait = ("", -math.inf, -math.inf)
        """What this node said of a full disk; when it began to say so, and when it said so last."""

    def move(
        self, state: str, iteration: int = 0, phase: str = "", waiting_for: list[int] | None = None
    ) -> None:
        """Come to another place; progress and waiting begin anew."""
        self._place = _PhaseStay(state, iteration, phase, waiting_for or [])
        self._last = iteration or self._last

    def end(self, state: str) -> None:
        """Say that the node has ended where it is."""
        self._place.state = state

    def wait_for(self, ranks: list[int]) -> None:
        """Say which ranks are waited for."""
        self._place.waiting_for = ranks

    def wait_for_space(self, text: str) -> None:
        """Say, again and again meanwhile, that the node or one of its children waits on a full disk."""
        now_s, (_, first_s, last_s) = time.monotonic(), self._space_wait
        self._space_wait = (text, first_s if now_s - last_s < SPACE_WAIT_S else now_s, now_s)

    def lack(self, text: str) -> None:
        """Say what the other crew has to publish before this one goes on; an empty text: nothing."""
        self._place.lacking = text

    @property
    def lacking(self) -> str:
        """What the other crew has to publish first."""
        return self._place.lacking

    def begin_to_wait(self) -> float:
        """Count the waiting from now on; returns this moment."""
        now_s = self._place.waiting_since_s = time.monotonic()
        return now_s

    def reach(self, done: int, total: int, tokens: int = 0) -> None:
        """Take in the progress in this phase; `tokens`: how many were generated in it."""
        place = self._place
        place.steps += 1
        place.reached_s = time.monotonic()
        if place.counting_since_s is None or (done == 0 and not place.generated):
            place.counting_since_s = place.reached_s
        place.done, place.total, place.tokens = done, total, tokens

    def expect(self, samples_per_task: int, max_tokens: int) -> None:
        """Say that each completion of the engine is a sample, that a task has so many of them, and that each
        has at most so many tokens.
        """
        self._place.samples_per_task, self._place.max_tokens = samples_per_task, max_tokens

    def generate(self, more: Generated) -> None:
        """Take in what the engine has generated since the last time, for tasks that are not done too."""
        place = self._place
        if more.tokens and place.counting_since_s is not None:
            place.generated += more.tokens
            place.samples += more.completions
            place.steps += 1
            place.reached_s = time.monotonic()

    def step(self) -> None:
        """Say that the phase gets on, also where nothing of what is counted is done."""
        self._place.steps += 1

    def count_bytes(self) -> Callable[[int], None]:
        """Return a function that counts bytes as this phase's progress, in megabytes; for any thread."""
        place, total = self._place, 0

        def count(size: int) -> None:
            nonlocal total
            total += size
            place.done, place.reached_s = total // 10**6, time.monotonic()
            place.total = max(place.total, place.done)

        return count

    @property
    def iteration(self) -> int:
        """The iteration that the node is in; 0 outside of one."""
        return self._place.iteration

    @property
    def phase(self) -> Phase | None:
        """The phase that the node is in."""
        return Phase[self._place.phase.upper()] if self._place.phase else None

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that are waited for."""
        return self._place.waiting_for

    def prefix(self) -> str:
        """Return how log lines begin: ` it 7 train_rollout`, or nothing."""
        place = self._place
        return f" it {place.iteration} {place.phase}" if place.phase else ""

    def where(self) -> str:
        """Return the place in a sentence: ` in training, iteration 7`."""
        place = self._place
        return f" in {place.phase}, iteration {place.iteration}" if place.phase else f" while {place.state}"

    def doing(self) -> tuple[object, str]:
        """Return the present activity: a value that is equal while it is the same, and a line (`37 of 128
        tasks, 40 s so far`).
        """
        description, waits, work = self.describe(), self.waiting_for, self._work()
        phase, unit = description["phase"], UNITS.get(description["phase"])
        doing, seconds = (
            work or phase or STATES.get(description["state"], description["state"]),
            description["row_s"],
        )
        if waits:
            doing, seconds = f"waiting for {self._names(waits)}", description["waiting_s"]
        elif description["waits_for"]:
            doing = f"waiting for {description['waits_for']}"
        seconds = description["work_s"] or seconds
        same = (description["state"], description["iteration"], phase, doing)
        if unit and not work and not waits and description["done"] < description["total"]:
            doing = f"{description['done']} of {description['total']} {unit}"
            if description["samples_total"]:
                doing += f" ({description['samples']} of {description['samples_total']} samples)"
            if description["tokens_per_s"]:
                doing += f", {description['tokens_per_s']:,.0f} tokens/s"
        elif not work and not waits and unit == "tasks" and not description["total"]:
            doing = f"{doing}, no samples finished yet"
        elif work == ENGINE and seconds >= SLOW_START_S:
            doing = f"{doing} (some take minutes; run logs shows what it says)"
        elif not unit and not work and not waits and description["done"]:
            doing = f"{description['done']} MB read"
        is_known = (
            unit and not waits and (description["left_s"] or 0.0) >= 0.5
        )  # before, nothing was timed yet
        left_text = f", about {description['left_s']:.0f} s left" if is_known else ""
        return same, f"{doing}, {seconds:.0f} s so far{left_text}"

    def _space_wait_s(self) -> float:
        """Return for how long the node has waited for space; 0 if it does not."""
        _, first_s, last_s = self._space_wait
        now_s = time.monotonic()
        return max(now_s - first_s, 0.1) if now_s - last_s < SPACE_WAIT_S else 0.0

    def _work(self) -> str:
        """Return the node's present work, if that is not what the phase is for."""
        if self._space_wait_s():
            return self._space_wait[0]
        if self._engine_starts():
            return ENGINE
        starts = self._place.phase == Phase.TRAINING.label and not self._place.total
        return "starting the trainer" if starts else ""

    def describe(self) -> dict[str, Any]:
        """Return the heartbeat's fields about it, with seconds and tokens per second in place of moments.

        `monotonic_s`, this moment, is for readers on this machine.
        """
        now_s, place = time.monotonic(), self._place
        counted_s = place.reached_s - (place.counting_since_s or place.reached_s)
        waits, still_s = bool(place.waiting_for), now_s - place.reached_s
        tokens, samples_total = max(place.tokens, place.generated), place.total * place.samples_per_task
        samples = min(max(place.samples, place.done * place.samples_per_task), samples_total)
        done = place.done / place.total if place.total else 0.0
        if samples_total:
            # Samples of all tasks are generated side by side, and each may be as long as is allowed.
            done = max(done, samples / samples_total, tokens / (samples_total * place.max_tokens))
        return {
            "monotonic_s": round(now_s, 1),
            "state": place.state,
            "iteration": place.iteration or self._last,
            "phase": place.phase,
            "done": place.done,
            "total": place.total,
            "samples": samples,
            "samples_total": samples_total,
            "steps": place.steps,
            "waiting_for": place.waiting_for,
            "waits_for": place.lacking,
            "work": self._work(),
            "work_s": round(self._space_wait_s(), 1),
            "row_s": round(now_s - place.since_s, 1),
            "waiting_s": round(now_s - (place.waiting_since_s or place.since_s), 1) if waits else 0.0,
            "tokens_per_s": round(tokens / counted_s, 1) if tokens and counted_s else None,
            # A training whose other node is gone stands still, and the end does not stay as near.
            "left_s": round(max(0.0, counted_s * (1 / done - 1) - still_s), 1) if done else None,
        }
