"""Whole runs with real brokers and real generator processes, and the files they leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from forebay.errors import UsageError
from forebay.loadtest import Kill, Run, Scenario, Stack, load_scenario
from forebay.loadtest._brokers import BrokerRun
from forebay.loadtest._report import SHARES, line_chart
from forebay.loadtest._summary import memory_growth

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.timeout(280)
async def test_two_brokers_of_which_one_is_killed_lose_and_repeat_nothing(tmp_path: Path) -> None:
    scenario = Scenario(
        name="dies",
        duration_s=3.0,
        brokers=2,
        partitions=3,
        streams=4,
        record_bytes=200,
        records_per_request=20,
        rate_bytes_per_s=100_000,
        sample_s=0.5,
        serve_options=["--batch-max-delay-ms", "5"],
        kills=[Kill(broker=2, at_s=1.0)],
        give_up_s=60.0,
    )
    run = Run(scenario, tmp_path)
    summary = await run.run()
    account = summary["reconciliation"]
    assert account["exact"], account["differences"]
    assert account["records_acked"] == account["records_meant"] > 0
    assert account["records_in_log"] == account["records_acked"]
    assert summary["killed"] == ["broker-2"]
    assert summary["remaps"] > 0
    for line in (run.directory / "remap-events.jsonl").read_text().splitlines():
        assert json.loads(line)["to"] == "broker-1"
    names = {path.name for path in run.directory.iterdir()}
    assert names >= {
        "resolved-config.json",
        "stack.json",
        "routing-manifest.json",
        "client-samples.jsonl",
        "client-30s.jsonl",
        "broker-samples.jsonl",
        "metrics-30s.jsonl",
        "client-summary.json",
        "remap-events.jsonl",
        "summary.json",
        "report.html",
        "ledger-0.arrow",
    }
    kept = json.loads((run.directory / "summary.json").read_text())
    assert kept["client"]["cpu_share"] > 0
    assert kept["artifacts"] and all(kept["artifacts"].values())
    assert kept["broker_totals"]["broker-1"]["store"] and kept["broker_totals"]["broker-1"]["billing"]
    stack = json.loads((run.directory / "stack.json").read_text())
    assert [each["name"] for each in stack["brokers"]] == ["broker-1", "broker-2"]
    assert all(each["port"] and each["pid"] for each in stack["brokers"])
    assert stack["environment"]["packages"]["pyarrow"]
    [*_, last] = (run.directory / "metrics-30s.jsonl").read_text().splitlines()
    assert json.loads(last)["host"]["load_average"]
    told = [json.loads(line) for line in (run.directory / "client-30s.jsonl").read_text().splitlines()]
    assert sum(each["acked_records"] for each in told) == account["records_acked"]
    page = (run.directory / "report.html").read_text()
    assert "Reconciliation exact" in page
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.timeout(280)
def test_a_stack_serves_several_runs_and_is_ended_by_its_directory_alone(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_text(
        """
        duration_s = 1.0
        peak_share = 0.2
        peak_s = 1.0
        partitions = 2
        streams = 2
        records_per_request = 20
        sample_s = 0.2
        serve_options = ["--batch-max-delay-ms", "5"]
        """
    )
    up = bench("up", str(path), "--results", str(tmp_path / "runs"))
    run = up["run"]
    try:
        assert [each["healthy"] for each in bench("status", run)["brokers"]] == [True]
        for _ in range(2):
            summary = bench("run", run)
            account = summary["reconciliation"]
            # What brokers counted before, also while the peak was measured, is none of this run's.
            assert account["exact"] and account["broker_difference"] == 0, account
            assert account["records_acked"] > 0
            share = summary["scenario"]["rate_bytes_per_s"] / summary["peak"]["bytes_per_s"]
            assert share == pytest.approx(0.2, rel=0.01)
    finally:
        ended = bench("down", run)
    assert [each["healthy"] for each in ended["brokers"]] == [False]
    with pytest.raises(subprocess.CalledProcessError):
        bench("status", run)


async def test_a_dead_broker_keeps_nobody_waiting_for_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    broker = BrokerRun("broker-1", "http://127.0.0.1:1", process, process.pid)
    monkeypatch.setattr("forebay.loadtest._brokers.Client", pytest.fail)
    assert await broker.sample() == {"broker": "broker-1", "alive": False}


async def test_only_the_broker_that_was_meant_is_ended(tmp_path: Path) -> None:
    """The id in `stack.json` may belong to somebody else by now: to this test, for example."""
    (tmp_path / "resolved-config.json").write_text(json.dumps(Scenario(name="x").resolved()))
    told = {"brokers": [{"name": "broker-1", "url": "http://127.0.0.1:1", "pid": os.getpid()}]}
    (tmp_path / "stack.json").write_text(json.dumps(told))
    await Stack.found(tmp_path).down()
    with pytest.raises(UsageError):
        Stack.found(tmp_path / "elsewhere")


def test_growth_is_what_comes_after_a_broker_has_settled() -> None:
    mib = 1 << 20
    rising = [
        {"broker": "a", "t_s": float(t), "rss_bytes": (100 + (t if t < 20 else 20)) * mib} for t in range(100)
    ]
    leaking = [{"broker": "b", "t_s": float(t), "rss_bytes": (100 + t) * mib} for t in range(100)]
    found = memory_growth([*rising, *leaking], 100.0)
    assert (found["a"]["grew"], found["a"]["growth_bytes"]) == (False, 0)
    assert found["b"]["grew"] and found["b"]["growth_bytes"] == pytest.approx(50 * mib, rel=0.02)


def bench(*words: str) -> dict[str, Any]:
    """The command, in JSON."""
    command = [sys.executable, "-m", "forebay.cli", "bench", *words, "--output", "json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "loadtest").glob("*.toml")), ids=lambda path: path.stem)
def test_scenarios_of_the_repository_are_valid(path: Path) -> None:
    assert load_scenario(path).name == path.stem


def test_settings_are_checked_and_changed_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text("duration_s = 5\n")
    changed = load_scenario(path, {"partitions": "9", "selection": "least_inflight"})
    assert (changed.name, changed.duration_s, changed.partitions) == ("one", 5.0, 9)
    assert changed.selection == "least_inflight"
    for text in (
        "peak_share = 2",
        "peak_share = 0.5\nrate_bytes_per_s = 5",
        "duration = 5",
        "partitions = 0",
        'body = "xml"',
        "duration_s = ",
        'streams = "x"',
    ):
        path.write_text(text)
        with pytest.raises(UsageError):
            load_scenario(path)
    with pytest.raises(UsageError):
        load_scenario(tmp_path / "missing.toml")
    with pytest.raises(UsageError):
        Scenario(name="x", brokers=1, kills=[Kill(broker=2, at_s=0)])


def test_charts_are_well_formed_and_stay_inside_their_frame() -> None:
    chart = ElementTree.fromstring(line_chart([("a<b", [(0, 1), (5, 123)]), ("c", [(0, 0)])], "ms"))
    assert len(chart.findall("polyline")) == 2
    for line in chart.findall("polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 860 and 0 <= y <= 260
    assert line_chart([], "ms") == "<p>No samples.</p>"
    marked = ElementTree.fromstring(line_chart([("a", [(0, 1), (3, 2)])], "ms", SHARES))
    assert {"0 %", "99 %", "99.9 %"} <= {each.text for each in marked.findall("text")}
