"""`forebay stream`: from a broker's files into a bucket and back, on the command line."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.stream.shared import BLOOM, EMPTY, ONE, VARY, delivered, osiris_files

from forebay.errors import Unavailable
from forebay.stream import StreamReader


@pytest.fixture
def run(forebay: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    def call(*words: object, code: int = 0) -> Any:
        ran = forebay("stream", *words, "--store", tmp_path / "bucket", "--output", "json")
        assert ran.code == code, ran.err
        return ran

    return call


@pytest.fixture
def tiered(run: Callable[..., Any]) -> Callable[..., Any]:
    run("tier", osiris_files() / VARY, "--once", "--fragment", "10000", "--branching", "4")
    return run


def hashes(documents: list[Any]) -> list[tuple[int, int, str]]:
    rows = [(each["offset"], base64.b64decode(each["data"])) for each in documents]
    return [(offset, len(data), hashlib.sha256(data).hexdigest()[:16]) for offset, data in rows]


@pytest.mark.parametrize("name", [VARY, "vary", "__vary"])
def test_what_was_tiered_is_read_back_record_for_record(tiered: Callable[..., Any], name: str) -> None:
    documents = tiered("read", name, "--from", "first").documents
    assert list(documents[0]) == ["offset", "timestamp", "data"]
    assert hashes(documents) == delivered("vary")


def test_a_directory_of_streams_is_tiered_at_once(run: Callable[..., Any]) -> None:
    reports = run("tier", osiris_files(), "--once").documents
    assert sorted(each["stream"] for each in reports) == sorted([VARY, ONE, EMPTY, BLOOM])
    assert all(each["lag"]["bytes"] == 0 and each["error"] is None for each in reports)
    assert sorted(each["stream"] for each in run("ls").documents) == sorted([VARY, ONE, EMPTY, BLOOM])
    assert hashes(run("read", "one", "--from", "first").documents) == delivered("one")
    assert run("read", "empty", "--from", "first").out == ""
    again = run("tier", osiris_files(), "--once").documents
    assert all(each["progress"]["fragments"] == each["progress"]["roots"] == 0 for each in again)


def test_resolve_answers_as_the_live_broker_did(tiered: Callable[..., Any]) -> None:
    probes = json.loads((osiris_files() / "offset_spec_probes.json").read_text())
    chosen = [probe for probe in probes if probe["stream"] == "vary"]
    specs = [
        probe["spec"] if probe["spec"] in ("first", "last", "next") else f"{probe['spec']}:{probe['value']}"
        for probe in chosen
    ]
    answers = tiered("resolve", "vary", *specs).documents
    assert [answer["spec"] for answer in answers] == specs
    for probe, answer in zip(chosen, answers, strict=True):
        expected = probe["result"] or [None, None, None]
        assert [answer["chunk_offset"], answer["records"], answer["timestamp"]] == expected, probe


def test_reading_from_an_offset_inside_of_a_chunk_begins_with_that_record(tiered: Callable[..., Any]) -> None:
    offsets = [each["offset"] for each in tiered("read", "vary", "--from", "offset:150", "-n", "3").documents]
    assert offsets == [150, 151, 152]


def test_stats_and_verify_tell_what_is_there(tiered: Callable[..., Any], tmp_path: Path) -> None:
    facts = tiered("stats", "vary").document
    assert (facts["first_offset"], facts["next_offset"], facts["epoch"]) == (0, 2487, 2)
    report = tiered("verify", "vary").document
    assert report["ok"]
    assert (report["records"], report["chunks"], report["orphans"]) == (2487, 181, [])
    fragment = sorted((tmp_path / "bucket" / "rabbitmq" / "stream" / VARY / "data").iterdir())[3]
    damaged = bytearray(fragment.read_bytes())
    damaged[200] ^= 1
    fragment.write_bytes(damaged)
    broken = tiered("verify", "vary", code=1)
    assert "checksum" in broken.document["problems"][0]


def test_restore_gives_the_same_files_back(tiered: Callable[..., Any], tmp_path: Path) -> None:
    report = tiered("restore", "vary", tmp_path / "again").document
    assert (report["next_offset"], report["segments"]) == (2487, 4)
    original = osiris_files() / VARY
    names = sorted(path.name for path in original.iterdir())
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (original / name).read_bytes()
    assert tiered("restore", "vary", tmp_path / "again", code=2).error["type"] == "UsageError"


def test_filters_leave_out_chunks_that_cannot_match(run: Callable[..., Any]) -> None:
    run("tier", osiris_files() / BLOOM, "--once")
    everything = run("read", BLOOM).documents
    some = run("read", BLOOM, "--filter", "orders").documents
    assert 0 < len(some) < len(everything) / 2
    kept = {each["offset"] for each in some}
    for each in everything:
        chunk, _, value = base64.b64decode(each["data"]).split(b" ")[0].split(b"/")[:3]
        if value == b"orders" and int(chunk) % 5 in (1, 4):  # All its records have that one value.
            assert each["offset"] in kept


def test_wrong_words_are_explained(run: Callable[..., Any], tmp_path: Path) -> None:
    assert run("read", "nobody", code=1).error["type"] == "StreamMissing"
    assert "offset:N" in run("read", "nobody", "--from", "offset", code=2).error["hint"]
    assert run("tier", tmp_path / "nowhere", "--once", code=2).error["type"] == "UsageError"


def test_an_embedded_coordinator_keeps_the_record(forebay: Callable[..., Any], tmp_path: Path) -> None:
    data = tmp_path / "data"
    words = ("--data", data, "--output", "json")
    assert forebay("stream", "tier", osiris_files() / VARY, "--once", *words).code == 0
    ran = forebay("stream", "read", "vary", *words)
    assert hashes(ran.documents) == delivered("vary")
    # The bucket's copy of the record is enough to read, and never enough to write.
    alone = ("--store", data, "--output", "json")
    assert hashes(forebay("stream", "read", "vary", *alone).documents) == delivered("vary")
    refused = forebay("stream", "tier", osiris_files() / VARY, "--once", *alone)
    assert refused.code == 1
    assert "coordinator" in refused.error["message"]


def test_stats_show_the_lag_of_a_local_directory_and_its_alarms(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    some = tmp_path / "some"
    some.mkdir()
    for path in sorted((osiris_files() / VARY).iterdir())[:4]:
        (some / path.name).write_bytes(path.read_bytes())
    some = some.rename(tmp_path / VARY)
    run("tier", some, "--once")
    assert run("stats", "vary", "--local", some).document["lag"]["bytes"] == 0
    whole = osiris_files() / VARY
    lag = run("stats", "vary", "--local", whole, "--alarm-bytes", "1GiB", "--alarm-age", "9000d").document[
        "lag"
    ]
    assert (lag["bytes"] > 300_000, lag["records"] > 1000, lag["alarms"]) == (True, True, [])
    alarms = run("stats", "vary", "--local", whole, "--alarm-bytes", "1kB", "--alarm-age", "1s").document[
        "lag"
    ]
    assert len(alarms["alarms"]) == 2


def test_orphans_are_listed_and_deleted_only_when_told_so(tiered: Callable[..., Any], tmp_path: Path) -> None:
    orphan = tmp_path / "bucket" / "rabbitmq" / "stream" / VARY / "data" / f"{1:020d}.fragment"
    orphan.write_bytes(b"x")
    assert tiered("collect", "vary").document["orphans"] == []  # It is young.
    found = tiered("collect", "vary", "--grace", "0s").document
    assert (len(found["orphans"]), found["removed"]) == (1, 0)
    assert tiered("collect", "vary", "--grace", "0s", "--delete").document["removed"] == 1
    assert not orphan.exists()
    assert tiered("verify", "vary").document["ok"]


def test_a_deleted_stream_is_gone_for_good(tiered: Callable[..., Any]) -> None:
    assert tiered("delete", "vary", "--yes").document == {"stream": VARY, "deleted": True}
    assert tiered("read", "vary", code=1).error["type"] == "StreamDeleted"
    assert tiered("tier", osiris_files() / VARY, "--once", code=1).error["type"] == "StreamDeleted"


def test_repair_cuts_back_to_what_the_local_directory_proves(run: Callable[..., Any], tmp_path: Path) -> None:
    from tests.stream.logs import write_log

    log, other = tmp_path / "__s_1700000000000000000", tmp_path / "other"
    write_log(log, 10)
    for path in log.iterdir():
        other.mkdir(exist_ok=True)
        (other / path.name).write_bytes(path.read_bytes())
    write_log(log, 5, tag="lost")
    run("tier", log, "--once", "--fragment", "1")
    write_log(other, 20, epoch=2)
    assert run("repair", "s", other).document["next_offset"] > 0
    renamed = other.rename(tmp_path / "new")
    (tmp_path / "broker").mkdir()
    log.rename(tmp_path / "old")
    kept = renamed.rename(tmp_path / "broker" / log.name)
    run("tier", kept, "--once")
    data = [base64.b64decode(each["data"]) for each in run("read", "s").documents]
    assert data == [f"r{number}".encode() for number in range(len(data))]
    assert run("verify", "s").document["ok"]


def test_an_absolute_offset_that_is_not_there_is_refused(tiered: Callable[..., Any]) -> None:
    assert tiered("resolve", "vary", "abs:150").document["chunk_offset"] <= 150
    assert tiered("resolve", "vary", "abs:99999", code=1).error["type"] == "OffsetOutOfRange"


def copy_of(stream: str, where: Path) -> Path:
    """A stream of the real broker under another name."""
    shutil.copytree(osiris_files() / stream, where)
    where.chmod(0o755)
    return where


def test_a_name_that_two_streams_have_is_asked_for_in_full(run: Callable[..., Any], tmp_path: Path) -> None:
    """A broker gives a stream that is made again under its name another id."""
    later = VARY[:-1] + "9"
    copy_of(VARY, tmp_path / "streams" / VARY)
    copy_of(ONE, tmp_path / "streams" / later)
    run("tier", tmp_path / "streams", "--once")
    refused = run("read", "vary", code=2)
    assert VARY in refused.err
    assert later in refused.err
    run("delete", VARY, "--yes")
    assert hashes(run("read", "vary").documents) == delivered("one")


@pytest.mark.parametrize("name", ["my.stream", "my_stream"])
def test_a_directory_of_any_name_can_be_tiered(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(copy_of(ONE, tmp_path / "my.stream"))
    run("tier", ".", "--once")
    assert hashes(run("read", name).documents) == delivered("one")


def test_long_names_are_ids_and_one_too_long_for_a_store_fails_alone(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    for letters in (233, 218):
        copy_of(ONE, tmp_path / "streams" / f"__{'n' * letters}_1794776874866716458")
    reports = run("tier", tmp_path / "streams", "--once", code=2).documents
    assert [each["error"] is None for each in reports] == [True, False]
    assert hashes(run("read", "n" * 218).documents) == delivered("one")


def test_two_directories_never_become_one_stream(run: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("a.b", "a_b"):
        copy_of(ONE, tmp_path / "streams" / name)
    assert "same stream" in run("tier", tmp_path / "streams", "--once", code=2).err


def test_a_directory_without_streams_is_told(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    assert "no segment files" in run("tier", tmp_path / "nothing", "--once").err


@pytest.mark.parametrize("follow", [True, False])
def test_a_follower_outlasts_an_outage_and_repeats_nothing(
    tiered: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, follow: bool
) -> None:
    chunks = StreamReader.chunks
    outages = [3, 5]

    async def failing(self: StreamReader, *words: Any, **named: Any) -> AsyncIterator[Any]:
        left = outages.pop() if outages else None
        async for chunk in chunks(self, *words, **named):
            if left == 0:
                raise Unavailable("the bucket is away")
            left = None if left is None else left - 1
            yield chunk

    monkeypatch.setattr(StreamReader, "chunks", failing)
    monkeypatch.setattr("forebay.cli.stream.OUTAGE_PAUSE_S", 0)
    if not follow:
        assert "away" in tiered("read", "vary", code=1).err
        return
    ran = tiered("read", "vary", "--follow", "-n", len(delivered("vary")))
    assert hashes(ran.documents) == delivered("vary")
    assert ran.err.count("away") == 2
