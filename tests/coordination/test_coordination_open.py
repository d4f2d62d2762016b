"""From URLs to coordinators, and what is said about URLs that lead nowhere."""

from __future__ import annotations

import asyncio
import builtins
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from forebay.coordination import ABSENT, MemoryCoordinator, SqliteCoordinator, is_there, open_coordinator
from forebay.errors import (
    AccessDenied,
    InvalidUrl,
    PreconditionFailed,
    StorageDamaged,
    Unsupported,
)


async def test_unnamed_memory_is_fresh() -> None:
    async with open_coordinator("memory://") as first, open_coordinator("memory://") as second:
        await first.put("d/a", b"")
        assert await second.get("d/a") is None
        assert isinstance(first, MemoryCoordinator) and first.url == "memory://"


async def test_named_memory_is_shared_and_outlives_a_client(request: pytest.FixtureRequest) -> None:
    url = f"memory://{request.node.name}"
    async with open_coordinator(url) as first, open_coordinator(url) as second:
        assert first.url == url
        session = await first.open_session()
        await first.put("d/a", b"", session=session)
        await first.put("d/b", b"")
        assert await second.get("d/a") is not None
        await first.close()
        assert await second.list("d/", "d//") == ["d/b"]


async def test_named_memory_wakes_watches_of_other_threads(request: pytest.FixtureRequest) -> None:
    url = f"memory://{request.node.name}"
    async with open_coordinator(url) as here, here.watch("d") as watch:

        async def elsewhere() -> None:
            async with open_coordinator(url) as there:
                await there.put("d/a", b"")

        thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        thread.start()
        await watch.changed()
        await asyncio.to_thread(thread.join)
        assert await here.get("d/a") is not None


async def test_sqlite_urls_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_coordinator(f"sqlite://{tmp_path}/c%20d.db") as coordinator:
        assert isinstance(coordinator, SqliteCoordinator) and coordinator.path == tmp_path / "c d.db"
        await coordinator.put("d/a", b"", ABSENT)
    async with open_coordinator("sqlite:///./c d.db") as relative:
        with pytest.raises(PreconditionFailed):
            await relative.put("d/a", b"", ABSENT)


@pytest.mark.parametrize("form", ["text", "path"])
async def test_directory_holds_its_database(tmp_path: Path, form: str) -> None:
    directory = tmp_path / "new" / "data"
    async with open_coordinator(str(directory) if form == "text" else directory) as coordinator:
        await coordinator.put("d/a", b"")
    assert (directory / ".forebay" / "coordination.db").is_file()
    async with open_coordinator(directory) as again:
        assert await again.get("d/a") is not None


async def test_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    async with open_coordinator("~/data"):
        assert (tmp_path / "data" / ".forebay" / "coordination.db").is_file()


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises((StorageDamaged, AccessDenied)) as caught:
        open_coordinator(path)
    assert caught.value.hint
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "etcd://host",
        "memory://a/b",
        "sqlite://",
        "sqlite:///",
        "sqlite://relative.db",
        "sqlite:///some/dir/",
        "sqlite:///some/file.db?mode=ro",
        "SQLITE:///x.db",
        "sqlite:///a%00b",
        "oxia:host:6648",
        "oxia:/host:6648",
        "sqlite:x.db",
        "memory:name",
    ],
)
def test_urls_that_cannot_be_understood_are_refused_in_one_line(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidUrl) as caught:
        open_coordinator(url)
    assert caught.value.hint and "\n" not in caught.value.message + caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(InvalidUrl) as caught:
        open_coordinator("zookeeper://host:2181")
    for scheme in ("memory://", "sqlite:///", "oxia://"):
        assert scheme in caught.value.hint


def test_missing_extra_names_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("forebay.coordination._oxia"):
            monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without_grpc(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "grpc":
            raise ModuleNotFoundError("No module named 'grpc'", name="grpc")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_grpc)
    with pytest.raises(Unsupported) as caught:
        open_coordinator("oxia://127.0.0.1:6648/default")
    assert "forebay[oxia]" in caught.value.hint


def test_who_only_reads_learns_that_nothing_is_there_and_makes_nothing(tmp_path: Path) -> None:
    urls: list[str | Path] = [f"sqlite://{tmp_path}/c%20d.db", str(tmp_path / "data"), tmp_path / "data"]
    assert [is_there(each) for each in urls] == [False] * 3
    assert not list(tmp_path.iterdir())
    for each in urls:
        asyncio.run(open_coordinator(each).close())
    assert [is_there(each) for each in urls] == [True] * 3
    assert is_there("memory://") and is_there("oxia://host:6648/default")
