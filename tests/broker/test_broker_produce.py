"""Waiting for appends: one timer for all requests, one answer for each, whatever is told when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from forebay._connect import Parts
from forebay.broker import BrokerConfig
from forebay.broker._engines import Engines
from forebay.broker._http import Response
from forebay.broker._produce import Produce, _Patience, _Waiting
from forebay.coordination import MemoryCoordinator
from forebay.errors import OutcomeUnknown
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.log import AppendGroup, AppendResult, Fenced
from forebay.storage import MemoryStore


class Asked:
    """A request with some groups, and the answers it was given."""

    def __init__(self, produce: Produce, groups: int = 1) -> None:
        self.answers: list[Response] = []
        self.answered = asyncio.Event()
        appends = [AppendGroup.of("t", number, [b"a"]) for number in range(groups)]
        self.waiting = _Waiting(produce, appends, self.reply, packed=False)
        self.tells = self.waiting.tells()

    def reply(self, response: Response) -> None:
        self.answers.append(response)
        self.answered.set()

    def outcomes(self) -> list[Any]:
        [answer] = self.answers
        return [result.get("error_type", "ok") for result in msgspec.json.decode(answer.body)["results"]]


@asynccontextmanager
async def produce() -> AsyncIterator[Produce]:
    clock = SystemClock()
    ids = IdSource(clock)
    parts = Parts(
        MemoryStore(clock, ids), MemoryCoordinator(), clock, ids, random.Random(1), MetricsRegistry()
    )
    engines = Engines(parts, BrokerConfig())
    yield Produce(engines)
    await engines.close()


def done(partition: int = 0) -> AppendResult:
    return AppendResult("t", partition, 1, 1, 1)


async def test_late_requests_become_unknown_one_after_the_other_and_the_rest_keep_their_answers() -> None:
    async with produce() as handler:
        patience = _Patience(0.02)
        late, answered, later = Asked(handler, 2), Asked(handler), Asked(handler)
        for asked in (late, answered):
            patience.limit(asked.waiting)
        answered.tells[0](done())
        late.tells[1](done(1))
        await late.answered.wait()
        assert late.outcomes() == ["OutcomeUnknown", "ok"]
        assert answered.outcomes() == ["ok"]
        patience.limit(later.waiting)
        await later.answered.wait()
        assert later.outcomes() == ["OutcomeUnknown"]
        assert not patience._line
        assert patience._timer is None


async def test_answered_requests_do_not_pile_up() -> None:
    async with produce() as handler:
        patience = _Patience(60)
        for _ in range(100):
            asked = Asked(handler)
            patience.limit(asked.waiting)
            asked.tells[0](done())
        assert len(patience._line) == 1


async def test_answered_requests_hold_no_records_while_they_stand_in_line() -> None:
    async with produce() as handler:
        asked = Asked(handler)
        assert asked.waiting._groups
        asked.tells[0](done())
        assert not asked.waiting._groups


async def test_what_is_told_after_the_answer_changes_nothing() -> None:
    async with produce() as handler:
        asked = Asked(handler, 2)
        asked.tells[1](done(1))
        asked.waiting.end(OutcomeUnknown("append", reason="late"))
        asked.tells[0](done())
        assert asked.outcomes() == ["OutcomeUnknown", "ok"]


async def test_every_group_has_its_own_end_and_a_strange_error_is_an_unknown_outcome() -> None:
    async with produce() as handler:
        asked = Asked(handler, 3)
        asked.tells[2](RuntimeError("odd"))
        asked.tells[0](Fenced("t/0", state="fenced", epoch=2))
        assert not asked.answers
        asked.tells[1](done(1))
        assert asked.outcomes() == ["Fenced", "ok", "OutcomeUnknown"]
        assert asked.answers[0].status == 409
