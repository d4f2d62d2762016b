from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.cli import doctor
from forebay.cli._deployment import Deployment
from forebay.cli.doctor import check as check_module
from forebay.cli.doctor import disk, servers, software
from forebay.cli.doctor.check import Check, Probe, Status, examine

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def short_measurements_and_long_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are for users who wait; a busy machine that runs tests may take longer."""
    monkeypatch.setattr(disk, "MEASURE_ROUNDS_MAX", 2)
    monkeypatch.setattr(check_module, "PROBE_SECONDS_MAX", 120.0)
    monkeypatch.setattr(servers, "ANSWER_SECONDS_MAX", 60.0)


@pytest.fixture
def silent_server() -> Iterator[int]:
    """A port where somebody listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_findings_as_json_have_the_promised_form(forebay: Run, tmp_path: Path) -> None:
    ran = forebay("doctor", "--data", tmp_path, "-o", "json")
    assert ran.code == 0
    assert ran.document.keys() == {"ok", "checks"}
    assert ran.document["ok"] is True
    for check in ran.document["checks"]:
        assert check.keys() == {"name", "status", "detail", "hint"}
        assert check["status"] in {"ok", "warn", "missing", "failed"}
        assert check["hint"] or check["status"] == "ok"


def test_findings_as_text_have_a_line_per_check_and_a_remedy_for_what_is_missing(
    forebay: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "_installed", lambda name: name != "pyspark")
    ran = forebay("doctor", "--data", tmp_path)
    assert ran.code == 0
    assert "pip install 'forebay[spark]'" in ran.out
    for name in (
        "forebay",
        "python",
        "weed",
        "oxia",
        "go",
        "java",
        "pyspark",
        "space",
        "clock",
        "open files",
    ):
        assert name in ran.out


def test_doctor_leaves_nothing_behind_and_creates_no_data_directory(forebay: Run, tmp_path: Path) -> None:
    assert forebay("doctor", "--data", tmp_path / "not" / "yet").code == 0
    assert list(tmp_path.iterdir()) == []


def test_missing_library_is_a_failure_and_missing_extra_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_installed", lambda name: name not in ("obstore", "pyspark"))
    checks = by_name(software.python_packages())
    assert checks["libraries"].status is Status.FAILED
    assert "obstore" in checks["libraries"].detail
    assert checks["extra spark"].status is Status.MISSING
    assert checks["extra spark"].hint == "pip install 'forebay[spark]'"


def test_old_python_and_old_sqlite_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = by_name(software.python_packages())
    assert checks["python"].status is checks["sqlite"].status is Status.OK
    monkeypatch.setattr(software, "PYTHON_OLDEST", (9, 0))
    monkeypatch.setattr(software, "SQLITE_OLDEST", (9, 0, 0))
    checks = by_name(software.python_packages())
    assert checks["python"].status is checks["sqlite"].status is Status.FAILED


def test_every_extra_of_the_package_is_examined() -> None:
    names = {check.name for check in software.python_packages()}
    assert {f"extra {extra}" for extra in ("spark", "broker", "otel", "oxia", "dev")} <= names


@pytest.mark.parametrize(
    ("line", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ("no version here", None),
    ],
)
def test_java_versions_are_understood(line: str, major: int | None) -> None:
    assert software.java_major(line) == major


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ('openjdk version "17.0.1"', Status.OK),
        ('java version "1.8.0_392"', Status.WARN),
        ("gibberish", Status.WARN),
        (None, Status.MISSING),
    ],
)
def test_old_java_is_a_warning_that_names_the_version_needed(
    line: str | None, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: program)
    monkeypatch.setattr(software, "_first_line", lambda command: line)
    check = software._java()
    assert check.status is status
    assert status is Status.OK or "17" in check.hint


def test_programs_that_are_nowhere_are_missing_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setattr(software, "_find", lambda program, elsewhere: None)
    checks = by_name(software.programs())
    assert checks["go"].status is checks["java"].status is Status.MISSING
    assert all(check.status is not Status.FAILED for check in checks.values())


def test_program_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "PROGRAM_SECONDS_MAX", 0.1)
    assert software._first_line(["tail", "-f", "/dev/null"]) is None
    assert software._first_line([str(tmp_path / "nothing")]) is None


def test_announcement_of_the_jvm_is_not_its_version() -> None:
    script = "echo 'Picked up JAVA_TOOL_OPTIONS: -Xmx1g' >&2; echo 'openjdk version \"17\"' >&2"
    assert software._first_line(["sh", "-c", script]) == 'openjdk version "17"'


def test_place_where_nobody_may_write_is_a_failure_if_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refused)
    [named] = disk.examine_disk(tmp_path, named=True)
    [current] = disk.examine_disk(tmp_path, named=False)
    assert (named.status, current.status) == (Status.FAILED, Status.WARN)
    assert "Permission denied" in named.detail
    assert "--data DIR" in named.hint


def test_file_system_without_attributes_is_a_failure_where_data_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "setxattr", unsupported)
    check = by_name(disk.examine_disk(tmp_path, named=True))["user attributes"]
    assert check.status is Status.FAILED
    assert "ext4" in check.hint


def test_little_space_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FREE_BYTES_LOW", 1 << 62)
    assert by_name(disk.examine_disk(tmp_path, named=True))["space"].status is Status.WARN


@pytest.mark.parametrize(("rate", "status"), [(5, Status.WARN), (1_000, Status.OK), (90_000, Status.WARN)])
def test_sync_rate_that_is_slow_or_too_good_to_be_true_is_a_warning(rate: float, status: Status) -> None:
    assert disk._judge("sync", rate, "puts").status is status


def test_measurement_ends_after_its_rounds() -> None:
    calls: list[int] = []
    assert disk._rate(lambda: calls.append(1)) > 0
    assert len(calls) <= disk.MEASURE_ROUNDS_MAX


def test_clock_before_the_installation_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    check = disk._clock(tmp_path)
    assert (check.status, "NTP" in check.hint) == (Status.WARN, True)


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 4096))
    assert doctor._open_files().hint == "ulimit -n 4096 before starting a server"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert doctor._open_files().status is Status.OK


def test_store_that_answers_is_ok(forebay: Run, filled: Path) -> None:
    check = servers.answers("store", str(filled))
    assert (check.status, "answers" in check.detail) == (Status.OK, True)


def test_store_of_a_wrong_url_fails_with_the_stores_own_hint() -> None:
    check = servers.answers("store", "ftp://somewhere")
    assert check.status is Status.FAILED
    assert "ftp" in check.detail
    assert "s3://" in check.hint


def test_named_server_that_does_not_answer_fails_the_doctor(
    forebay: Run, silent_server: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(servers, "ANSWER_SECONDS_MAX", 1.5)
    monkeypatch.chdir(tmp_path)
    url = f"s3://bucket/x?endpoint=http://127.0.0.1:{silent_server}"
    ran = forebay("doctor", "--store", url, "-o", "json")
    assert (ran.code, ran.document["ok"]) == (1, False)
    [store] = [check for check in ran.document["checks"] if check["name"] == "store"]
    assert store["status"] == "failed"


def test_data_directory_is_asked_only_for_what_it_holds(filled: Path, tmp_path: Path) -> None:
    empty = Deployment(data=tmp_path / "empty")
    assert doctor._named_servers(empty) == (None, None)
    (filled / ".forebay").mkdir(exist_ok=True)
    deployment = Deployment(data=filled)
    assert doctor._named_servers(deployment) == (str(filled), None)
    (filled / ".forebay" / "coordination.db").touch()
    assert doctor._named_servers(deployment) == (str(filled), deployment.coordinator_url)


def test_probe_that_hangs_is_reported_and_does_not_hold_the_others() -> None:
    release = threading.Event()

    def hang() -> list[Check]:
        release.wait()
        return []

    try:
        fine = Probe("fine", lambda: [Check("fine", Status.OK, "yes")])
        checks = examine([fine, Probe("stuck", hang)], seconds_max=1.5)
    finally:
        release.set()
    assert [(check.name, check.status) for check in checks] == [("fine", Status.OK), ("stuck", Status.WARN)]
    assert "no answer" in checks[1].detail


def test_probe_that_breaks_is_a_warning_with_the_reason() -> None:
    def broken() -> list[Check]:
        raise RuntimeError("odd machine")

    [check] = examine([Probe("broken", broken)])
    assert check.status is Status.WARN
    assert "odd machine" in check.detail


def test_question_that_cannot_be_asked_is_a_failure_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crashed(*args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, stdout="", stderr="first\nlast words\n")

    monkeypatch.setattr(subprocess, "run", crashed)
    check = servers.answers("coordinator", "memory://")
    assert check.status is Status.FAILED
    assert "last words" in check.detail


def test_coordinator_of_a_data_directory_is_asked(forebay: Run, tmp_path: Path) -> None:
    async def fill() -> None:
        async with Deployment(data=tmp_path).open_coordinator() as coordinator:
            await coordinator.put("some/key", b"value")

    asyncio.run(fill())
    check = servers.answers("coordinator", str(tmp_path))
    assert check.status is Status.OK, check.detail
    (tmp_path / ".forebay" / "coordination.db").write_bytes(
        b"this is no database, and it is long enough " * 40
    )
    ran = forebay("doctor", "--data", tmp_path, "-o", "json")
    [broken] = [check for check in ran.document["checks"] if check["name"] == "coordinator"]
    assert (ran.code, broken["status"]) == (1, "failed")
    assert broken["hint"]
