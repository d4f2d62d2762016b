"""A port: one giver, one or more destinations, and a rule."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._parcels import Parcel, Refused, Sink
from forebay.errors import ForebayError, FormatError, LimitExceeded, NotDone

__all__ = ["FOR_GOOD", "Broadcast", "Counted", "RoundRobin", "port"]

FOR_GOOD: Final = (FormatError, LimitExceeded, Refused)
"""Of what a sink says, that which it will always say of this parcel."""


class Counted:
    """An exporter that gets its data from a receiver, or takes turns with others: one that is passed by, and
    only it, has failed. For one that is alone behind a store the pump counts."""

    def __init__(self, name: str, sink: Sink, metrics: DataflowMetrics) -> None:
        self._name = name
        self._sink = sink
        self._metrics = metrics

    async def take(self, parcel: Parcel) -> None:
        """Hand it over, and count what came of it."""
        metrics, signal = self._metrics, parcel.signal
        try:
            await self._sink.take(parcel)
        except Refused as error:
            metrics.rejected.labels(self._name, signal).inc(error.items)
            metrics.exported.labels(self._name, signal).inc(parcel.items - error.items)
            raise
        except Exception:
            metrics.failures.labels(self._name).inc()
            raise
        metrics.exported.labels(self._name, signal).inc(parcel.items)


class Broadcast:
    """Everybody gets everything; safe when all of them have it.

    Who did not take the last one is asked before the others, and they get nothing that it does not take: the
    sender tries again, and every attempt would leave them a copy.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._failing: set[Sink] = set()

    async def take(self, parcel: Parcel) -> None:
        """Hand it to all, wait for all, then raise what went wrong: what may pass before what is for good."""
        first = [sink for sink in self._sinks if sink in self._failing]
        others = [sink for sink in self._sinks if sink not in first]
        problems = await self._hand(parcel, first) if first else []
        if all(isinstance(each, FOR_GOOD) for each in problems):
            problems += await self._hand(parcel, others)
        # Whoever hears of a refusal gives up, and the other destination would never get it.
        for problem in sorted(problems, key=lambda each: isinstance(each, FOR_GOOD)):
            raise problem

    async def _hand(self, parcel: Parcel, sinks: Sequence[Sink]) -> list[BaseException]:
        outcomes = await asyncio.gather(*(sink.take(parcel) for sink in sinks), return_exceptions=True)
        for sink, outcome in zip(sinks, outcomes, strict=True):
            if outcome is None or isinstance(outcome, FOR_GOOD):
                self._failing.discard(sink)
            else:
                self._failing.add(sink)
        return [each for each in outcomes if each is not None]


class RoundRobin:
    """They take turns. One that certainly did not take it passes its turn on."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._turn = 0

    async def take(self, parcel: Parcel) -> None:
        """Hand it to the next one that takes it. Raises the last error where nobody does."""
        first, self._turn = self._turn, (self._turn + 1) % len(self._sinks)
        problem: ForebayError | None = None
        for step in range(len(self._sinks)):
            try:
                return await self._sinks[(first + step) % len(self._sinks)].take(parcel)
            except NotDone as error:
                problem = error
        assert problem is not None
        raise problem


def port(sinks: Sequence[Sink], strategy: str) -> Sink:
    """The destinations as one."""
    if len(sinks) == 1:
        return sinks[0]
    return RoundRobin(sinks) if strategy == "round_robin" else Broadcast(sinks)
