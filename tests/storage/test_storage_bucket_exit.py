"""A process that used a bucket ends with its own exit code, whatever the client's threads are doing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.storage._bucket import _rest
from forebay.testing.servers import SeaweedServer

SCRIPT = """
import asyncio, sys
from forebay.errors import NotFound
from forebay.storage import open_store

async def main():
    async with open_store(sys.argv[1]) as store:
        try:
            await store.get("nothing")
        except NotFound:
            pass

asyncio.run(main())
sys.exit(3)
"""


@pytest.mark.integration
def test_a_process_ends_with_its_own_exit_code(seaweed: SeaweedServer) -> None:
    """Without the rest at the end one in ten or so is aborted, the more the busier the machine."""
    command = [sys.executable, "-c", SCRIPT, seaweed.url("exit")]
    for _ in range(4):
        running = [subprocess.Popen(command) for _ in range(6)]
        assert [each.wait(60) for each in running] == [3] * 6


class Turns:
    """A second look finds another state."""

    def __init__(self, task: Path, states: list[str]) -> None:
        self._task = task
        self._states = states
        self.slept = 0

    def sleep(self, _seconds: float) -> None:
        self.slept += 1
        (self._task / "stat").write_text(f"7 (tokio-rt-worker) {self._states.pop(0)} 1 7 7")


def test_the_end_waits_until_every_thread_of_the_client_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("7", ""), ("8", "8 (python) R 1 8 8"), ("9", "9 (tokio-rt-worker) S 1 9 9")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stat").write_text(text)
    turns = Turns(tmp_path / "7", ["R", "D", "S", "R"])
    monkeypatch.setattr("forebay.storage._bucket._rest.time.sleep", turns.sleep)
    _rest.wait_for_rest(tmp_path)
    assert turns.slept == 3


def test_a_system_that_tells_nothing_of_threads_is_given_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("forebay.storage._bucket._rest.time.sleep", waited.append)
    _rest.wait_for_rest(tmp_path / "none")
    assert waited == [_rest.BLIND_S]
