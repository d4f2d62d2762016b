"""Any sequence of operations on memory and on local files does what it would do on a dictionary."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from forebay.errors import NotFound, PreconditionFailed
from forebay.storage import ABSENT, ANY, InvalidRange, KeyConflict, LocalStore, MemoryStore, ObjectStore

T = TypeVar("T")

# Few names, so that keys meet each other as directories and in the order of `-`, `/` and letters.
PARTS = st.sampled_from(["a", "b", "a-b", "a.b", "ä"])
KEYS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
PREFIXES = st.sampled_from(["", "a", "a/", "a-", "a/b", "ä/a", "b/b/"])
BODIES = st.binary(max_size=12)


class StoreAgainstDict(RuleBasedStateMachine):
    """`model` is what the store must hold: data and version by key."""

    versions: Bundle[tuple[str, str]] = Bundle("versions")
    store: ObjectStore

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.model: dict[str, tuple[bytes, str]] = {}
        self.used: set[str] = set()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    def conflicts(self, key: str) -> bool:
        return any(other.startswith(f"{key}/") or key.startswith(f"{other}/") for other in self.model)

    def written(self, key: str, data: bytes, version: str) -> tuple[str, str]:
        assert version not in self.used, "a version belongs to one write"
        self.used.add(version)
        self.model[key] = (data, version)
        return key, version

    @rule(target=versions, key=KEYS, data=BODIES, when=st.sampled_from([ANY, ABSENT]))
    def put(self, key: str, data: bytes, when: Any) -> tuple[str, str]:
        try:
            version = self.run(self.store.put(key, data, when))
        except KeyConflict:
            assert self.conflicts(key)
            return key, "none"
        except PreconditionFailed:
            assert when is ABSENT
            assert key in self.model
            return key, "none"
        assert not self.conflicts(key)
        assert when is ANY or key not in self.model
        return self.written(key, data, version)

    @rule(target=versions, known=consumes(versions), data=BODIES)
    def put_if_version(self, known: tuple[str, str], data: bytes) -> tuple[str, str]:
        key, version = known
        holds = self.model.get(key, (b"", None))[1] == version
        try:
            new = self.run(self.store.put(key, data, version))
        except PreconditionFailed:
            assert not holds
            return known
        assert holds
        return self.written(key, data, new)

    @rule(keys=st.lists(KEYS, max_size=3))
    def delete(self, keys: list[str]) -> None:
        results = self.run(self.store.delete(keys))
        assert [(result.key, result.error) for result in results] == [(key, None) for key in keys]
        for key in keys:
            self.model.pop(key, None)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        try:
            found = self.run(self.store.get(key))
        except NotFound:
            assert key not in self.model
            return
        assert (found.data, found.version) == self.model[key]
        assert self.run(self.store.get_if_changed(key, found.version)) is None

    @rule(key=KEYS, start=st.integers(0, 13), length=st.integers(0, 13))
    def get_range(self, key: str, start: int, length: int) -> None:
        data = self.model.get(key, (None, ""))[0]
        try:
            found = self.run(self.store.get_range(key, start, length))
        except NotFound:
            assert data is None
        except InvalidRange:
            assert data is not None
            assert start + length > len(data)
        else:
            assert data is not None
            assert found == data[start : start + length]
            assert len(found) == length

    @rule(prefix=PREFIXES, after=st.one_of(st.just(""), KEYS), page_keys=st.integers(1, 4))
    def list(self, prefix: str, after: str, page_keys: int) -> None:
        pages = self.run(self.collect(prefix, after, page_keys))
        assert all(len(page) == page_keys for page in pages[:-1])
        expected = sorted(key for key in self.model if key.startswith(prefix) and key > after)
        found = [info for page in pages for info in page]
        assert [info.key for info in found] == expected
        assert [(info.size, info.version) for info in found] == [
            (len(self.model[key][0]), self.model[key][1]) for key in expected
        ]

    async def collect(self, prefix: str, after: str, page_keys: int) -> Any:
        return [page async for page in self.store.list_pages(prefix, after=after, page_keys=page_keys)]

    def teardown(self) -> None:
        self.run(self.store.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


class MemoryAgainstDict(StoreAgainstDict):
    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()


class LocalAgainstDict(StoreAgainstDict):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="forebay-model-")
        self.store = LocalStore(self.directory)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.directory)


MemoryAgainstDict.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
LocalAgainstDict.TestCase.settings = settings(max_examples=15, stateful_step_count=25)
TestMemoryAgainstDict = MemoryAgainstDict.TestCase
TestLocalAgainstDict = LocalAgainstDict.TestCase
