"""The command against real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forebay.cli.doctor import servers
from forebay.cli.doctor.check import Status
from forebay.storage import open_store

if TYPE_CHECKING:
    from forebay.testing.servers import OxiaServer, SeaweedServer

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer than a user wants to wait."""
    monkeypatch.setattr(servers, "ANSWER_SECONDS_MAX", 60.0)


def test_bucket_is_listed_read_and_found_by_the_doctor(seaweed: SeaweedServer, forebay: Run) -> None:
    url = seaweed.url("cli/looking")

    async def fill() -> None:
        async with open_store(url) as store:
            await store.put("a/one", b"first")
            await store.put("a/two", b"second")

    asyncio.run(fill())
    listed = forebay("store", "ls", url, "-o", "json").documents
    assert [(each["key"], each["size"]) for each in listed] == [("a/one", 5), ("a/two", 6)]
    assert forebay("store", "stat", url, "a/two", "-o", "json").document == listed[1]
    assert forebay("store", "cat", url, "a/two", "--range", "1:3").out == "eco"
    missing = forebay("store", "cat", url, "a/three", "-o", "json")
    assert (missing.code, missing.error["type"]) == (1, "NotFound")
    check = servers.answers("store", url)
    assert check.status is Status.OK, check.detail


def test_secrets_of_a_url_are_never_shown(
    seaweed: SeaweedServer, forebay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = "not-the-key-of-anybody"
    url = f"s3://bucket/x?endpoint={seaweed.endpoint}&access_key_id=someone&secret_access_key={wrong}"
    for words in (("store", "ls", url), ("doctor", "--store", url), ("store", "ls", url, "-o", "json")):
        ran = forebay(*words)
        assert ran.code == 1
        assert wrong not in ran.out + ran.err


def test_oxia_is_found_by_the_doctor(oxia: OxiaServer) -> None:
    check = servers.answers("coordinator", oxia.url())
    assert check.status is Status.OK, check.detail


def test_server_that_is_not_there_fails_with_a_hint() -> None:
    check = servers.answers("coordinator", "oxia://127.0.0.1:1/default?timeout_ms=200")
    assert check.status is Status.FAILED
    assert check.hint
