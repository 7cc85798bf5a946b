"""Lessons of earlier rollouts for the next one: what a group of a task costs, and how fast each rank is.

All of it is expectation: it decides who makes a group and when, never what is in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.directory import published
from coordinator.directory.file_names import parse_iteration_name
from coordinator.directory.layout import Kind, RunDir

LOOKS_BACK = 50
"""How many manifests a master reads when it starts."""
MOST = 100_000
"""How many tasks' costs are remembered, those that were seen last."""


class History:
    """What the manifests of one kind say, each read once by this process."""

    def __init__(self, run_dir: RunDir, kind: Kind) -> None:
        self._run_dir = run_dir
        self._kind: Kind = kind
        self._paces: dict[str, Sequence[float]] = {}
        self._costs: dict[int, float] = {}
        self._usual: float | None = None
        self._has_looked = False

    def costs(self, iteration: int, order: Sequence[int]) -> dict[int, float]:
        """Return the expected cost of each slot of `iteration`; slot k is task `order[k]`. A task that is
        new is taken for one of the last iteration's average. Empty: nothing is known.
        """
        known, usual = self.known_costs(iteration, order), self._usual
        return {} if usual is None else {slot: known.get(slot, usual) for slot in range(len(order))}

    def known_costs(self, iteration: int, order: Sequence[int]) -> dict[int, float]:
        """Return the costs of those slots whose task an earlier iteration has made."""
        self._look(iteration)
        return {slot: self._costs[task] for slot, task in enumerate(order) if task in self._costs}

    def paces(self, iteration: int) -> dict[str, Sequence[float]]:
        """Return the paces known at the start of `iteration`: by rank, as the manifests have them."""
        self._look(iteration)
        return self._paces

    def add(self, iteration: int, order: Sequence[int], manifest: Mapping[str, Any]) -> None:
        """Take in what the manifest of an iteration says."""
        self._look(iteration)
        if "costs" not in manifest:
            return  # an earlier version has written it, which measured in tokens
        costs: dict[str, float] = manifest["costs"]
        self._paces = manifest.get("paces") or self._paces  # each has all that is known
        for slot, cost in costs.items():
            if int(slot) < len(order):
                task = order[int(slot)]
                self._costs.pop(task, None)
                self._costs[task] = cost
        while len(self._costs) > MOST:
            del self._costs[next(iter(self._costs))]
        if costs:
            self._usual = sum(costs.values()) / len(costs)

    def _look(self, before: int) -> None:
        """Read what other masters have published of the iterations before, when this one asks first."""
        if self._has_looked:
            return
        self._has_looked = True
        listed = map(parse_iteration_name, published.names(self._run_dir.trajectories(self._kind, 0).parent))
        older = sorted(number for number in listed if number is not None and number < before)
        for number in older[-LOOKS_BACK:]:
            manifest = published.read_manifest(self._run_dir, self._kind, number)
            if manifest is not None:
                self.add(number, self._order(number, manifest), manifest)

    def _order(self, iteration: int, manifest: Mapping[str, Any]) -> Sequence[int]:
        if self._kind == "eval":
            return range(manifest["slots"])
        opened = published.read_json(self._run_dir.iteration_json(iteration)) or {}
        return opened.get("tasks", [])
