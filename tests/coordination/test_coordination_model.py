"""Memory and SQLite beside a plain dict: any sequence of operations gives the same answers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from forebay.coordination import (
    ABSENT,
    ANY,
    Coordinator,
    Delete,
    DeleteRange,
    MemoryCoordinator,
    Operation,
    Put,
    Record,
    Session,
    SqliteCoordinator,
    When,
    children,
)
from forebay.errors import PreconditionFailed, SessionExpired

T = TypeVar("T")
DIRECTORIES = ["a", "a/b", "a0"]
VERSION_NEVER_REACHED = 1_000_000
NAMES = ["0", "1", "b", "é"]
keys = st.builds("{}/{}".format, st.sampled_from(DIRECTORIES), st.sampled_from(NAMES))
choices = st.sampled_from(["any", "absent", "right", "wrong"])
values = st.binary(max_size=4)


class Model(RuleBasedStateMachine):
    """The dict holds value, owner and, per tenant, the version it gave out."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.tenants: list[Coordinator] = []
        self.records: dict[str, tuple[bytes, int | None, list[int]]] = {}
        self.sessions: list[list[Session]] = []
        self.ended: set[int] = set()
        self.last = [-1, -1, -1]

    def run_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def on_all(self, call: Any) -> list[Any]:
        async def gather() -> list[Any]:
            calls: list[Awaitable[Any]] = [call(index, tenant) for index, tenant in enumerate(self.tenants)]
            return [await each for each in calls]

        return self.run_on_loop(gather())

    @initialize()
    def open(self) -> None:
        self.tenants = [
            MemoryCoordinator(),
            MemoryCoordinator(shards=3),
            SqliteCoordinator(Path(self.directory.name) / "c.db"),
        ]

    def teardown(self) -> None:
        self.on_all(lambda index, tenant: tenant.close())
        self.loop.close()
        self.directory.cleanup()

    @rule()
    def open_session(self) -> None:
        if len(self.sessions) < 3:
            self.sessions.append(self.on_all(lambda index, tenant: tenant.open_session(300_000)))

    @rule(which=st.integers(0, 2))
    def close_session(self, which: int) -> None:
        if which >= len(self.sessions):
            return
        self.on_all(lambda index, tenant: self.sessions[which][index].close())
        self.ended.add(which)
        self.records = {key: record for key, record in self.records.items() if record[1] != which}

    @rule(
        puts=st.lists(st.tuples(keys, values, choices, st.none() | st.integers(0, 2)), max_size=4),
        deletes=st.lists(st.tuples(keys, choices), max_size=2),
        ranges=st.lists(
            st.tuples(st.sampled_from(DIRECTORIES), st.sampled_from(NAMES), st.sampled_from(NAMES)),
            max_size=1,
        ),
    )
    def write(self, puts: Any, deletes: Any, ranges: Any) -> None:
        before = dict(self.records)
        puts = [
            (*put[:3], put[3] if put[3] is not None and put[3] < len(self.sessions) else None) for put in puts
        ]

        def operations(index: int) -> list[Operation]:
            # Given backwards, so that only the rule of `write` puts the kinds in order.
            made: list[Operation] = [
                DeleteRange(f"{name}/{low}", f"{name}/{high}") for name, low, high in ranges
            ]
            made += [Delete(key, self._when(before, key, choice, index)) for key, choice in deletes]
            for key, value, choice, which in puts:
                session = None if which is None else self.sessions[which][index]
                made.append(Put(key, value, self._when(before, key, choice, index), session))
            return made

        answers = self.on_all(lambda index, tenant: tenant.write(operations(index)))
        for position, put in enumerate(puts, len(ranges) + len(deletes)):
            self._expect_put(put, before, [answer[position] for answer in answers])
        for position, (key, choice) in enumerate(deletes, len(ranges)):
            self._expect_delete(key, choice, before, [answer[position] for answer in answers])
        for name, low, high in ranges:
            for key in [key for key in self.records if f"{name}/{low}" <= key < f"{name}/{high}"]:
                if key.rpartition("/")[0] == name:
                    del self.records[key]

    def _when(self, before: Any, key: str, choice: str, index: int) -> When:
        if choice == "any":
            return ANY
        if choice == "absent":
            return ABSENT
        known = before[key][2][index] if key in before and choice == "right" else VERSION_NEVER_REACHED
        return int(known)

    def _holds(self, key: str, choice: str, before: Any) -> bool:
        current, known = self.records.get(key), before.get(key)
        if choice == "absent":
            return current is None
        if choice == "right":
            return current is not None and known is not None and current[2] == known[2]
        return choice == "any"

    def _expect_put(self, put: Any, before: Any, results: list[Any]) -> None:
        key, value, choice, which = put
        if which is not None and which in self.ended:
            assert all(isinstance(result.error, SessionExpired) for result in results)
        elif not self._holds(key, choice, before):
            assert all(isinstance(result.error, PreconditionFailed) for result in results)
        else:
            versions = [result.unwrap() for result in results]
            assert all(new > old for new, old in zip(versions, self.last, strict=True))
            self.last = versions
            self.records[key] = (value, which, versions)

    def _expect_delete(self, key: str, choice: str, before: Any, results: list[Any]) -> None:
        if self._holds(key, choice, before):
            assert all(result.error is None for result in results)
            self.records.pop(key, None)
        else:
            assert all(isinstance(result.error, PreconditionFailed) for result in results)

    def _record(self, key: str | None, index: int) -> Record | None:
        if key is None:
            return None
        value, which, versions = self.records[key]
        owner = None if which is None else self.sessions[which][index].id
        return Record(key, value, versions[index], owner)

    @rule(key=keys)
    def look(self, key: str) -> None:
        name = key.rpartition("/")[0]
        leaves = sorted(other for other in self.records if other.rpartition("/")[0] == name)
        expected = {
            "get": key if key in leaves else None,
            "ceiling": min((other for other in leaves if other >= key), default=None),
            "higher": min((other for other in leaves if other > key), default=None),
            "floor": max((other for other in leaves if other <= key), default=None),
            "lower": max((other for other in leaves if other < key), default=None),
        }
        for method, found in expected.items():
            answers = self.on_all(lambda index, tenant, method=method: getattr(tenant, method)(key))
            assert answers == [self._record(found, index) for index in range(3)], method

    @rule(name=st.sampled_from(DIRECTORIES), limit=st.integers(1, 5))
    def scan(self, name: str, limit: int) -> None:
        leaves = sorted(other for other in self.records if other.rpartition("/")[0] == name)[:limit]
        answers = self.on_all(lambda index, tenant: tenant.range_scan(*children(name), limit=limit))
        assert answers == [[self._record(key, index) for key in leaves] for index in range(3)]


Model.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
test_tenants_agree_with_a_dict = Model.TestCase
