from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.cli import store as store_module
from forebay.errors import PreconditionFailed
from forebay.storage import open_store

Run = Callable[..., Any]
RunProcess = Callable[..., subprocess.CompletedProcess[bytes]]


def test_ls_prints_every_key_in_order(forebay: Run, filled: Path) -> None:
    ran = forebay("store", "ls", filled)
    assert ran.code == 0
    assert [line.split()[-1] for line in ran.out.splitlines()] == ["a/one", "a/two", "b/three"]
    assert "2.00 KiB" in ran.out


def test_ls_streams_one_json_document_per_key(forebay: Run, filled: Path) -> None:
    documents = forebay("store", "ls", filled, "-o", "json").documents
    assert [(each["key"], each["size"]) for each in documents] == [
        ("a/one", 1),
        ("a/two", 2048),
        ("b/three", 256),
    ]
    assert all(each["version"] and each["last_modified_ms"] > 0 for each in documents)


def test_ls_takes_a_prefix_and_a_limit(forebay: Run, filled: Path) -> None:
    assert [each["key"] for each in forebay("-o", "json", "store", "ls", filled, "a/t").documents] == [
        "a/two"
    ]
    for limit in (0, 1, 2, 3, 9):
        ran = forebay("store", "ls", filled, "--limit", limit)
        assert len(ran.out.splitlines()) == min(limit, 3)


def test_ls_long_shows_versions_and_bytes_shows_exact_sizes(forebay: Run, filled: Path) -> None:
    [_, two, _] = forebay("store", "ls", filled, "-o", "json").documents
    line = forebay("store", "ls", filled, "a/two", "--long", "--bytes").out
    assert two["version"] in line
    assert " 2048 " in line
    assert two["version"] not in forebay("store", "ls", filled, "a/two").out


def test_ls_of_an_empty_store_prints_nothing(forebay: Run) -> None:
    ran = forebay("store", "ls", "memory://")
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_cat_is_byte_for_byte(forebay_process: RunProcess, filled: Path) -> None:
    done = forebay_process("store", "cat", filled, "b/three")
    assert (done.returncode, done.stdout, done.stderr) == (0, bytes(range(256)), b"")


def test_cat_of_a_range_is_that_range(forebay_process: RunProcess, filled: Path) -> None:
    assert forebay_process("store", "cat", filled, "b/three", "--range", "10:3").stdout == bytes([10, 11, 12])


def test_cat_as_json_is_one_document_with_base64(forebay: Run, filled: Path) -> None:
    document = forebay("store", "cat", filled, "b/three", "-o", "json").document
    assert base64.b64decode(document["data"]) == bytes(range(256))
    assert document["size"] == 256
    part = forebay("store", "cat", filled, "b/three", "--range", "0:2", "-o", "json").document
    assert base64.b64decode(part["data"]) == b"\0\1"


def test_cat_in_pieces_gives_the_same_bytes(
    forebay: Run, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "WHOLE_BYTES_MAX", 100)
    document = forebay("store", "cat", filled, "b/three", "-o", "json").document
    assert base64.b64decode(document["data"]) == bytes(range(256))


async def test_cat_in_pieces_notices_that_the_object_was_replaced(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "WHOLE_BYTES_MAX", 100)
    async with open_store(str(filled)) as store:
        info = await store.head("b/three")
        pieces = store_module._pieces(store, info, 0, info.size, whole=True)
        await anext(pieces)
        await store.put("b/three", bytes(256))
        with pytest.raises(PreconditionFailed):
            async for _ in pieces:
                pass


def test_stat_tells_size_version_and_time(forebay: Run, filled: Path) -> None:
    document = forebay("store", "stat", filled, "a/two", "-o", "json").document
    assert document.keys() == {"key", "size", "version", "last_modified_ms"}
    text = forebay("store", "stat", filled, "a/two").out
    assert "2,048 bytes (2.00 KiB)" in text
    assert document["version"] in text


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (("cat", "STORE", "a/none"), 1, "NotFound"),
        (("stat", "STORE", "a/none"), 1, "NotFound"),
        (("cat", "STORE", "../etc/passwd"), 2, "InvalidKey"),
        (("ls", "STORE", "a/../b"), 2, "InvalidKey"),
        (("ls", "ftp://somewhere"), 2, "InvalidUrl"),
        (("ls", "STORE", "--limit", "-1"), 2, "UsageError"),
        (("cat", "STORE", "a/one", "--range", "1"), 2, "UsageError"),
        (("cat", "STORE", "a/one", "--range", "-1:2"), 2, "UsageError"),
        (("cat", "STORE", "a/one", "--range", "a:b"), 2, "UsageError"),
    ],
)
def test_mistakes_end_with_their_code_and_a_hint(
    forebay: Run, filled: Path, words: tuple[str, ...], code: int, kind: str
) -> None:
    named = [str(filled) if word == "STORE" else word for word in words]
    ran = forebay("store", *named, "-o", "json")
    assert (ran.code, ran.out, ran.error["type"]) == (code, "", kind)
    assert ran.error["hint"]
    text = forebay("store", *named)
    assert [line.split(":")[0] for line in text.err.splitlines()] == ["error", "hint"]


def test_range_past_the_end_is_an_error(forebay: Run, filled: Path) -> None:
    ran = forebay("store", "cat", filled, "a/one", "--range", "0:2")
    assert ran.code in (1, 2)
    assert ran.err.startswith("error: ")


def test_key_with_letters_of_any_language_is_listed(forebay_process: RunProcess, tmp_path: Path) -> None:
    async def fill() -> None:
        async with open_store(str(tmp_path / "letters")) as store:
            await store.put("grün/日本", b"1")

    asyncio.run(fill())
    for environment in (
        {"LC_ALL": "C.UTF-8"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    ):
        done = forebay_process("store", "ls", "letters", environment=environment)
        assert (done.returncode, done.stderr) == (0, b"")
