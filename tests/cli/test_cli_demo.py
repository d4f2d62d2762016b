from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.demo import journal as journal_module
from forebay.cli.demo import records, steps
from forebay.cli.demo.journal import Journal
from forebay.cli.demo.steps import Stage
from forebay.errors import ForebayError, PreconditionFailed
from forebay.kit.clock import SystemClock
from forebay.storage import ObjectStore, open_store

Run = Callable[..., Any]


@pytest.fixture
async def store() -> AsyncIterator[ObjectStore]:
    async with open_store("memory://") as opened:
        yield opened


@pytest.fixture
async def stage(store: ObjectStore, tmp_path: Path) -> Stage:
    return Stage(store, tmp_path, "demo/run", SystemClock())


def ignore() -> None:
    """Nobody watches the progress."""


def test_demo_verifies_every_record_and_leaves_nothing_behind(
    forebay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = forebay("demo", "-o", "json")
    assert ran.code == 0, ran.err
    document = ran.document
    assert (document["ok"], document["lost"], document["data"]) == (True, 0, None)
    assert [step["name"] for step in document["steps"]] == [step.name for step in steps.STEPS]
    *written, verified = document["steps"]
    assert verified["records"] >= sum(step["records"] for step in written)
    assert list(tmp_path.iterdir()) == []


def test_demo_keeps_the_data_where_asked_and_says_how_to_look(
    forebay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STEPS", steps.STEPS[:1])
    ran = forebay("demo", "--data", tmp_path / "kept", "--keep")
    assert ran.code == 0, ran.err
    assert "Every acknowledged record is there" in ran.out
    words = ran.out.splitlines()[-1].removeprefix("Kept: forebay ").split()
    listed = forebay(*words, "-o", "json").documents
    assert len(listed) == steps.WRITE_BATCHES + 1


def test_demo_in_a_directory_that_was_there_removes_only_its_own(
    forebay: Run, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STEPS", steps.STEPS[:1])
    before = forebay("store", "ls", filled, "-o", "json").out
    assert forebay("demo", "--data", filled).code == 0
    assert forebay("store", "ls", filled, "-o", "json").out == before


def test_demo_that_loses_a_record_says_so_and_fails(
    forebay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(stage: Stage, advance: steps.Advance) -> steps.Outcome:
        outcome = await steps.write(stage, advance)
        entries = await stage.journal().read_head()
        await stage.store.delete([entries[0].key])
        return outcome

    verify = steps.STEPS[-1]
    monkeypatch.setattr(steps, "STEPS", (steps.Step("lose", 1, lose), verify))
    monkeypatch.chdir(tmp_path)
    ran = forebay("demo")
    assert ran.code == 1
    assert f"LOST: {records.BATCH_RECORDS:,}" in ran.out
    assert list(tmp_path.iterdir()) == []


def test_demo_that_breaks_off_cleans_up_too(
    forebay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(stage: Stage, advance: steps.Advance) -> steps.Outcome:
        await steps.write(stage, advance)
        raise ForebayError("broken on purpose")

    monkeypatch.setattr(steps, "STEPS", (steps.Step("broken", 1, broken),))
    monkeypatch.chdir(tmp_path)
    ran = forebay("demo")
    assert (ran.code, ran.err) == (1, "error: broken on purpose\n")
    assert list(tmp_path.iterdir()) == []


async def test_racing_writers_lose_no_append_and_no_append_twice(stage: Stage) -> None:
    await steps.race(stage, ignore)
    entries = await stage.journal().read_head()
    found = [(entry.writer, entry.batch) for entry in entries]
    assert set(found) == stage.acknowledged
    assert len(found) == len(stage.acknowledged) == steps.RACE_WRITERS * steps.RACE_BATCHES


async def test_killed_writers_lose_nothing_they_acknowledged(tmp_path: Path) -> None:
    async with open_store(str(tmp_path)) as store:
        stage = Stage(store, tmp_path, "demo/run", SystemClock())
        outcome = await steps.crash(stage, ignore)
        assert outcome.records >= steps.KILLS * steps.KILL_AFTER_BATCHES * records.BATCH_RECORDS
        entries = await stage.journal().read_head()
        assert stage.acknowledged <= {(entry.writer, entry.batch) for entry in entries}
        assert (await steps.verify(stage, ignore)).lost == 0


@pytest.mark.parametrize("damage", [b"", b"x" * records.RECORD_BYTES * records.BATCH_RECORDS, b"flip"])
async def test_verification_finds_damaged_batches(stage: Stage, damage: bytes) -> None:
    await steps.write(stage, ignore)
    [entry, *_] = await stage.journal().read_head()
    if damage == b"flip":
        data = bytearray((await stage.store.get(entry.key)).data)
        data[1000] ^= 1
        damage = bytes(data)
    await stage.store.put(entry.key, damage)
    lost = (await steps.verify(stage, ignore)).lost
    assert lost == (1 if damage and damage[0:1] != b"x" else records.BATCH_RECORDS)


async def test_verification_finds_batches_that_are_acknowledged_and_not_named(stage: Stage) -> None:
    await steps.write(stage, ignore)
    stage.acknowledged.add(("writer", 10_000))
    assert (await steps.verify(stage, ignore)).lost == records.BATCH_RECORDS


async def test_verification_finds_batches_that_are_named_twice(stage: Stage) -> None:
    journal = stage.journal()
    await journal.append("writer", 0)
    await journal.append("writer", 0)
    stage.acknowledged.add(("writer", 0))
    assert (await steps.verify(stage, ignore)).lost == records.BATCH_RECORDS


async def test_wrong_checksum_counts_even_where_the_records_are_right(stage: Stage) -> None:
    journal = stage.journal()
    await journal.append("writer", 0)
    [entry] = await journal.read_head()
    assert await journal.damaged_records(entry) == 0
    assert await journal.damaged_records(replace(entry, crc=entry.crc ^ 1)) == 1


async def test_append_gives_up_after_its_attempts(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "APPEND_ATTEMPTS_MAX", 3)
    journal = Journal(store, "demo/run")

    async def never(entry: journal_module.Entry) -> bool:
        return False

    monkeypatch.setattr(Journal, "_name", lambda self, entry: never(entry))
    with pytest.raises(PreconditionFailed):
        await journal.append("writer", 0)
    assert journal.counts.conflicts == 3


def test_records_have_their_size_and_know_their_place() -> None:
    batch = records.make_batch("writer", 2)
    assert len(batch) == records.BATCH_RECORDS * records.RECORD_BYTES
    assert batch.startswith(b"writer 000000002000 ")
    assert records.wrong_records("writer", 2, batch) == 0
    assert records.wrong_records("writer", 2, batch + b"more") == 1
    assert records.wrong_records("writer", 2, batch[:-1]) == 1
