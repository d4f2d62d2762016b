"""Whole runs with real brokers and real generator processes, and the files they leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from forebay.errors import UsageError
from forebay.loadtest import Kill, Run, Scenario, load_scenario
from forebay.loadtest._report import line_chart

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
        "broker-samples.jsonl",
        "client-summary.json",
        "summary.json",
        "report.html",
        "ledger-0.arrow",
    }
    assert json.loads((run.directory / "summary.json").read_text())["client"]["cpu_share"] > 0
    page = (run.directory / "report.html").read_text()
    assert "Reconciliation exact" in page
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize("path", sorted((ROOT / "loadtest").glob("*.toml")), ids=lambda path: path.stem)
def test_scenarios_of_the_repository_are_valid(path: Path) -> None:
    assert load_scenario(path).name == path.stem


def test_settings_are_checked_and_changed_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text("duration_s = 5\n")
    changed = load_scenario(path, {"partitions": "9", "selection": "least_inflight"})
    assert (changed.name, changed.duration_s, changed.partitions) == ("one", 5.0, 9)
    assert changed.selection == "least_inflight"
    for text in ("duration = 5", "partitions = 0", 'body = "xml"', "duration_s = ", 'streams = "x"'):
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
