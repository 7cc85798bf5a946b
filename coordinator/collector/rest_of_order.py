"""What is left of an order when a collector has died: what the next one is asked to make. Pure.

A node orders a share once, and may need several collectors for it. Of slots 0 to 7, say, 0 and 1 are durable
and 2 and 3 were being made when the first one died: the next is asked for 2 to 7. If that dies too, the slots
that were in flight both times are made one at a time, and one that ends a collector alone is given up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from coordinator.collector.order import CollectorFailed, Order
from rollout.collect import ALL_FAILED_MIN, AllGivenUp

PARTS = 1000
"""The parts of the next collector of a phase are numbered from the next multiple of this."""


@dataclass
class OrderProgress:
    """An order, and what is known of it while collectors do it, one after the other if they end."""

    order: Order
    given_out: set[int] = field(default_factory=set[int])
    """Slots that the collector has asked for."""
    begun: set[int] = field(default_factory=set[int])
    """Slots that are being made."""
    alone: int | None = None
    """The one that is being made while no other is."""
    durable: set[int] = field(default_factory=set[int])
    counted: int = 0
    """How many durable groups count."""
    reached: tuple[int, int] = (0, 0)
    """Groups and tokens of this collector."""
    before: tuple[int, int] = (0, 0)
    """Groups and tokens of those that have ended."""
    suspects: set[int] | None = None
    """Slots that were in flight whenever a collector has ended."""
    given_up: dict[int, str] = field(default_factory=dict[int, str])
    deaths: int = 0
    heard: Callable[[], None] = lambda: None
    """Is called for each message."""

    def after_death(self, ending: str) -> None:
        """Take in that a collector has ended. Raises CollectorFailed if no other can do better."""
        self.deaths += 1
        in_flight = set(self.order.in_flight) | self.begun
        if self.alone is not None:
            self.given_up[self.alone] = f"a process ended while it made this group alone: {ending}"
        elif not in_flight and self.deaths > 1:
            raise CollectorFailed(f"the collector {ending}")
        elif self.alone is None:
            self.suspects = in_flight if self.suspects is None else self.suspects & in_flight or in_flight
        if len(self.given_up) >= ALL_FAILED_MIN and not self.durable:
            reason = next(iter(self.given_up.values()))
            raise AllGivenUp(f"all {len(self.given_up)} groups were given up, e.g. as {reason}")
        self.order = self._rest()
        self.before = (self.counted, self.before[1] + self.reached[1])
        self.given_out, self.begun, self.alone = set(), set(), None

    def _rest(self) -> Order:
        """Return the order for what is not durable yet."""
        order = self.order
        certain = set(order.in_flight) | set(order.again)
        done = self.durable | set(self.given_up)
        again = certain | (self.given_out if order.claimed is not None else set[int]())
        tombstones = len(self.given_up) if order.quota.slots == order.quota.needed else 0
        still = sorted(again - done)
        rest_of_order = replace(
            order, in_flight=(), again=still, slots=[slot for slot in order.slots if slot not in done],
            needed=max(0, self._needed - self.counted - tombstones - len(still)),
            given_up={slot: why for slot, why in self.given_up.items() if slot not in self.durable},
            first_part=self._first_part + PARTS * self.deaths,
        )  # fmt: skip
        is_second = self.deaths > 1 and self.suspects is not None
        alone = sorted((self.suspects or set[int]()) - done) if is_second else []
        if order.claimed is None:  # what is made alone is made in any case
            rest_of_order = replace(
                rest_of_order, again=sorted({*still, *alone}),
                slots=[slot for slot in rest_of_order.slots if slot not in alone],
                needed=max(0, rest_of_order.needed - len(set(alone) - set(still))),
            )  # fmt: skip
        return replace(rest_of_order, alone=alone)

    def __post_init__(self) -> None:
        self._first_part = self.order.first_part
        self._needed = self.order.needed + len({*self.order.in_flight, *self.order.again})
