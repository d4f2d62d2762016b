"""Handing a range to the disk: a hint that changes nothing, and whose errors are told."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any

import pytest

from forebay.kit import disk_writes


@pytest.mark.parametrize("function", [disk_writes.begin_write_out, disk_writes.write_out])
@pytest.mark.parametrize("is_there", [True, False])
def test_the_bytes_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Any, is_there: bool
) -> None:
    if not is_there:
        monkeypatch.setattr(disk_writes, "_sync_file_range", None)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        file.write(bytes(range(256)) * 1_000)
        function(file.fileno(), 1_000, 200_000)
        function(file.fileno(), 10_000_000, 1)
    assert (tmp_path / "file").read_bytes() == bytes(range(256)) * 1_000


@pytest.mark.parametrize(
    ("number", "is_told"),
    [(errno.EIO, True), (errno.ENOSPC, True), (errno.EDQUOT, True), (errno.ESPIPE, False)],
)
def test_only_waiting_tells_of_a_disk_that_fails(
    monkeypatch: pytest.MonkeyPatch, number: int, is_told: bool
) -> None:
    def fail(*arguments: int) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(disk_writes, "_sync_file_range", fail)
    disk_writes.begin_write_out(0, 0, 1)
    if not is_told:
        disk_writes.write_out(0, 0, 1)
        return
    with pytest.raises(OSError, match=r"\[Errno") as told:
        disk_writes.write_out(0, 0, 1)
    assert told.value.errno == number
