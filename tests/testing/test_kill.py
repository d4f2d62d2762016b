"""The kill harness, tried on small children that live in this file."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.testing._servers import guard
from forebay.testing._servers.kill_child import read_reports
from forebay.testing.kill import (
    Child,
    ChildFailed,
    Crash,
    Report,
    after_call,
    at,
    before_call,
    kill_repeatedly,
)

# -- children


def count_forever(report: Report, path: str) -> None:
    """Appends numbers to a file, with a promise after each, going on where the last life stopped."""
    done = Path(path).read_text().split() if Path(path).exists() else []
    with Path(path).open("a") as sink:
        report.mark("ready")
        for number in itertools.count(len(done)):
            report.attempt(number)
            sink.write(f"{number}\n")
            sink.flush()
            report.ack(number)
            report.mark("wrote")


def promise_too_early(report: Report, path: str) -> None:
    """The bug that the harness exists to find: the promise comes before the write."""
    report.mark("ready")
    report.ack(0)
    report.crash_point("promised")
    Path(path).write_text("0\n")


def three_steps(report: Report) -> None:
    for number in range(3):
        report.crash_point("step")
        report.ack(number)


def replace_twice(report: Report, path: str) -> None:
    for number in range(2):
        fresh = Path(f"{path}.new")
        fresh.write_text(str(number))
        os.replace(fresh, path)  # noqa: PTH105
        report.ack(number)


class Steps:
    @classmethod
    async def one(cls, report: Report, number: int) -> None:
        await asyncio.sleep(0)
        report.ack(number)


async def steps_in_a_loop(report: Report, count: int) -> None:
    for number in range(count):
        await Steps.one(report, number)


def fail(report: Report) -> None:
    report.mark("ready")
    raise RuntimeError("out of luck")


def end_quietly(report: Report) -> None:
    report.mark("ready")


def start_a_child_and_wait(report: Report) -> None:
    child = Child(count_forever, arguments={"path": os.devnull})
    child.start()
    child.wait_for("wrote")
    report.ack(child.pid)
    report.mark("ready")
    signal.pause()


# -- claims


def test_promises_survive_the_kill(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    with Child(count_forever, arguments={"path": str(path)}) as child:
        child.wait_for("wrote", count=20)
        child.kill()
        assert child.pid is None
    survivors = [int(line) for line in path.read_text().split()]
    assert len(child.acknowledged) >= 20
    assert set(child.acknowledged) <= set(survivors) <= set(child.attempted)


def test_next_life_goes_on_with_the_reports_of_the_last(tmp_path: Path) -> None:
    with Child(count_forever, arguments={"path": str(tmp_path / "n")}) as child:
        child.wait_for("wrote", count=3)
        child.kill()
        before = child.acknowledged
        child.start()
        child.wait_for("wrote", count=3)
        child.restart()
        assert child.acknowledged[: len(before)] == before
        assert len(child.acknowledged) >= len(before) + 3
        assert child.acknowledged == sorted(set(child.acknowledged))


def test_broken_promise_is_found(tmp_path: Path) -> None:
    path = tmp_path / "n"
    with Child(promise_too_early, arguments={"path": str(path)}, crash=at("promised")) as child:
        child.wait_for_crash()
    assert child.acknowledged == [0]
    assert not path.exists()


@pytest.mark.parametrize(("hit", "done"), [(1, []), (3, [0, 1])])
def test_child_dies_at_the_pass_asked_for(hit: int, done: list[int]) -> None:
    with Child(three_steps, crash=at("step", hit)) as child:
        child.wait_for_crash()
    assert child.acknowledged == done


def test_unarmed_points_do_nothing() -> None:
    with Child(three_steps, crash=at("another")) as child:
        assert child.wait() == 0
        with pytest.raises(ChildFailed, match="not at its crash point"):
            child.wait_for_crash()
    assert child.acknowledged == [0, 1, 2]


@pytest.mark.parametrize(
    ("crash", "content", "leftover", "done"),
    [
        (before_call("os:replace"), None, True, []),
        (after_call("os:replace"), "0", False, []),
        (before_call("os:replace", 2), "0", True, [0]),
        (after_call("os:replace", 2), "1", False, [0]),
    ],
)
def test_death_around_a_call_needs_no_help(
    tmp_path: Path, crash: Crash, content: str | None, leftover: bool, done: list[int]
) -> None:
    path = tmp_path / "file"
    with Child(replace_twice, arguments={"path": str(path)}, crash=crash) as child:
        child.wait_for_crash()
    assert (path.read_text() if path.exists() else None) == content
    assert Path(f"{path}.new").exists() == leftover
    assert child.acknowledged == done


def test_coroutines_die_after_they_were_awaited() -> None:
    crash = after_call(f"{__name__}:Steps.one", hit=2)
    with Child(steps_in_a_loop, arguments={"count": 5}, crash=crash) as child:
        child.wait_for_crash()
    assert child.acknowledged == [0, 1]


def test_paused_child_does_nothing_until_resumed(tmp_path: Path) -> None:
    with Child(count_forever, arguments={"path": str(tmp_path / "n")}) as child:
        child.wait_for("wrote")
        child.pause()
        assert child.pid is not None
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        written = len(child.acknowledged)
        assert len(child.acknowledged) == written
        child.resume()
        child.wait_for("wrote", count=written + 5)
        child.pause()  # Closing must work on a stopped process too.


def test_failing_child_shows_its_traceback() -> None:
    with Child(fail) as child, pytest.raises(ChildFailed, match="out of luck") as caught:
        child.wait_for("never")
    assert "0 of 1 times" in caught.value.message


def test_missing_marker_ends_in_an_error_not_in_a_hang(tmp_path: Path) -> None:
    with Child(count_forever, arguments={"path": str(tmp_path / "n")}) as child:
        child.wait_for("ready")
        with pytest.raises(ChildFailed, match="'never' 0 of 1"):
            child.wait_for("never", timeout_s=0.05)
        with pytest.raises(ChildFailed, match="still runs"):
            child.wait(timeout_s=0.05)
        with pytest.raises(ChildFailed, match="running already"):
            child.start()


def test_dead_child_cannot_be_signalled() -> None:
    with Child(end_quietly) as child:
        child.wait()
        with pytest.raises(ChildFailed, match="not running"):
            child.pause()


def test_repeated_kills_lose_no_promise(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    seen: list[int] = []

    def look(_: Child) -> None:
        seen.append(len(path.read_text().split()))

    run = kill_repeatedly(
        count_forever,
        arguments={"path": str(path)},
        randomness=random.Random(3),
        lives=4,
        delay_ms_max=20,
        between=look,
    )
    assert (run.lives, run.kills, len(seen)) == (4, 4, 4)
    assert seen == sorted(seen)
    survivors = [int(line) for line in path.read_text().split()]
    assert set(run.acknowledged) <= set(survivors) <= set(run.attempted)


def test_lives_that_end_by_themselves_are_not_counted_as_kills() -> None:
    run = kill_repeatedly(end_quietly, randomness=random.Random(1), lives=2, ready=None, delay_ms_max=10**7)
    assert (run.lives, run.kills) == (2, 0)


def test_repeated_kills_report_a_child_that_fails() -> None:
    with pytest.raises(ChildFailed, match="out of luck"):
        kill_repeatedly(fail, randomness=random.Random(1), lives=3, delay_ms_max=10**7)


def test_half_a_report_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "reports"
    Report(path).ack("first")
    with path.open("ab") as torn:
        torn.write(b'["acknowledged", "sec')
    Report(path).ack("third")
    assert read_reports(path, "acknowledged") == ["first", "third"]
    assert read_reports(tmp_path / "none", "acknowledged") == []


def test_grandchild_dies_with_its_parent(tmp_path: Path) -> None:
    with Child(start_a_child_and_wait, environment={"TMPDIR": str(tmp_path)}) as child:
        child.wait_for("ready")
        [grandchild] = child.acknowledged
        descriptor = os.pidfd_open(grandchild)
        child.kill()
        # A pidfd becomes readable when its process has ended: here by the hand of the guard.
        ended, _, _ = select.select([descriptor], [], [], 60)
        os.close(descriptor)
    assert ended == [descriptor]


def test_guard_kills_and_removes_what_it_still_holds(tmp_path: Path) -> None:
    kept, removed, plain = tmp_path / "kept", tmp_path / "removed", tmp_path / "socket"
    kept.mkdir()
    (removed / "deep").mkdir(parents=True)
    plain.touch()
    sleepers = [subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) for _ in range(2)]
    news: list[dict[str, object]] = [
        {"watch": sleepers[0].pid, "leftovers": [str(kept)]},
        {"watch": sleepers[1].pid, "leftovers": [str(removed), str(plain)]},
        {"forget": sleepers[0].pid},
    ]
    lines = b"".join(json.dumps(each).encode() + b"\n" for each in news)
    command = [sys.executable, "-I", "-S", guard.__file__]
    subprocess.run(command, input=lines, check=True, timeout=60)
    assert sleepers[1].wait() == -signal.SIGKILL
    assert sleepers[0].poll() is None
    sleepers[0].kill()
    sleepers[0].wait()
    assert (kept.exists(), removed.exists(), plain.exists()) == (True, False, False)
