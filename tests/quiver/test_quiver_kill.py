"""Real processes, killed at every named point and at random: what is durable comes out, and what was
acknowledged stays away."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.quiver import DirectoryInUse, Quiver

ROOT = Path(__file__).resolve().parent.parent.parent


async def kill(path: Path, seed: int, kills: int, timeout_s: float, *more: str) -> None:
    def work() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "tests.quiver.crash_nursery", str(path), str(seed), str(kills), *more]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)

    ran = await asyncio.to_thread(work)
    assert ran.returncode == 0, ran.stderr[-2_000:]
    found = json.loads(ran.stdout)
    assert found["problems"] == []
    assert found["missed"] == []
    assert found["points"] > 50
    assert found["killed"] >= kills
    assert found["durable"] > kills


@pytest.mark.timeout(600)
async def test_killed_at_every_named_point_and_at_random_loses_and_repeats_nothing(tmp_path: Path) -> None:
    await kill(tmp_path / "q", 11, 100, 500)


@pytest.mark.timeout(600)
async def test_killed_while_segments_are_held_loses_and_repeats_nothing(tmp_path: Path) -> None:
    await kill(tmp_path / "q", 12, 100, 500, "held")


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), ("held",)], ids=["written", "held"])
@pytest.mark.parametrize("seed", range(1, 5))
async def test_killed_a_thousand_times_loses_and_repeats_nothing(
    tmp_path: Path, seed: int, more: tuple[str, ...]
) -> None:
    await kill(tmp_path / "q", seed, 250, 3_600, *more)


async def test_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    words = (
        "import asyncio, sys\nfrom forebay.quiver import Quiver\n"
        "async def main():\n    async with Quiver(sys.argv[1]):\n"
        "        print('open', flush=True)\n        await asyncio.Event().wait()\nasyncio.run(main())"
    )
    path = tmp_path / "q"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", words, str(path), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"open\n"
        with pytest.raises(DirectoryInUse):
            await Quiver(path).open()
    finally:
        child.kill()
        await child.wait()
    async with Quiver(path) as quiver:
        assert quiver.report.is_clean
