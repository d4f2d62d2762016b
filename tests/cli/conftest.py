from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.cli import run
from forebay.storage import open_store

SECONDS_MAX = 120


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run of the command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        [line] = self.out.splitlines()
        return json.loads(line)

    @property
    def documents(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> dict[str, str]:
        """The error of `--output json`."""
        found: dict[str, str] = json.loads(self.err)["error"]
        return found


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests must not reach the command."""
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def forebay(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command inside this process."""

    def call(*words: object) -> Ran:
        capsys.readouterr()
        code = run([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture
def forebay_process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run the command as a process of its own, in a directory of its own."""

    def call(
        *words: object, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "forebay.cli", *map(str, words)],
            capture_output=True,
            cwd=tmp_path,
            env={**os.environ, **(environment or {})},
            timeout=SECONDS_MAX,
            check=False,
        )

    return call


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A local store with a few objects in it."""
    directory = tmp_path / "filled"

    async def fill() -> None:
        async with open_store(str(directory)) as store:
            await store.put("a/one", b"1")
            await store.put("a/two", b"x" * 2048)
            await store.put("b/three", bytes(range(256)))

    asyncio.run(fill())
    return directory
