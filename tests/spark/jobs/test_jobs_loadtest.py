"""Ledgers of load tests, added up."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from forebay.cli import run
from forebay.errors import FormatError, UsageError
from forebay.loadtest._ledger import ACKED, FAILED, UNKNOWN, Ledger
from forebay.spark.jobs import analyse_loadtest

pytestmark = pytest.mark.xdist_group("export")


def ledger(path: Path, count: int) -> None:
    lines = Ledger()
    for number in range(count):
        lines.add(1, number * 10, 10, 0, ACKED, number * 10, 1, number / 10, (number + 1) / 1000)
    lines.add(1, 0, 10, 0, FAILED, -1, 3, 1.0, 5.0)
    lines.add(1, 0, 7, 0, UNKNOWN, -1, 2, 1.0, 9.0)
    lines.save(path)


def test_ledgers_add_up_and_percentiles_are_within_a_percent(tmp_path: Path) -> None:
    for number in range(3):
        ledger(tmp_path / f"ledger-{number}.arrow", 100)
    found = analyse_loadtest([tmp_path]).as_json()
    assert (found["ledgers"], found["requests"], found["retried"]) == (3, 306, 6)
    assert found["records"] == {"acked": 3000, "failed": 30, "unknown": 21}
    assert found["records_per_s"] == 300
    assert found["latency_ms"]["p50"] == pytest.approx(50, rel=0.021)
    assert found["latency_ms"]["p99"] == pytest.approx(99, rel=0.021)
    assert found["latency_ms"]["p100"] == pytest.approx(100, rel=0.021)


def test_a_run_without_a_success_has_no_latency(tmp_path: Path) -> None:
    ledger(tmp_path / "ledger-0.arrow", 0)
    found = analyse_loadtest([tmp_path]).as_json()
    assert found["latency_ms"]["p50"] is None and found["records_per_s"] == 0


def test_what_is_no_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        analyse_loadtest([tmp_path])
    (tmp_path / "ledger-0.arrow").write_bytes(b"torn")
    with pytest.raises(FormatError, match="ledger-0"):
        analyse_loadtest([tmp_path])
    with pa.ipc.new_file(str(tmp_path / "ledger-0.arrow"), pa.schema([("x", pa.int64())])):
        pass
    with pytest.raises(FormatError, match="ledger-0"):
        analyse_loadtest([tmp_path])


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger(tmp_path / "ledger-0.arrow", 10)
    assert run(["spark", "loadtest", str(tmp_path), "--local"]) == 0
    assert "12 requests in 1 ledgers" in capsys.readouterr().out


def test_a_directory_without_a_ledger_beside_others_is_named(tmp_path: Path) -> None:
    """It was passed over, and its figures were missing without a word."""
    ledger(tmp_path / "ledger-0.arrow", 10)
    with pytest.raises(UsageError, match=r"in .*mistyped"):
        analyse_loadtest([tmp_path, tmp_path / "mistyped"])
