"""The examples in deploy/ speak of metrics, options and paths that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.broker.bed import serving

from forebay.cli._app import load

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_WORDS = {
    "sum", "by", "rate", "max", "histogram_quantile", "up", "le", "instance", "group", "topic", "outcome",
    "status", "operation", "path", "job", "ok", "duplicate", "produce", "unknown", "backpressure", "forebay",
    "m",
}  # fmt: skip


def expressions() -> list[str]:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    found = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    board = json.loads((DEPLOY / "grafana" / "forebay.json").read_text())
    return found + [target["expr"] for panel in board["panels"] for target in panel["targets"]]


async def test_every_metric_of_dashboard_and_alerts_exists() -> None:
    async with serving() as (_, client):
        await client.produce("t", 0, ["a"])
        await client.consume("t", 0, 1)
        place = {"topic": "t", "partition": 0, "offset": 1}
        await client.post("/groups/g/offsets", {"offsets": [place]})
        page = (await client.get("/metrics/prometheus")).body.decode()
    known: set[str] = set()
    for family in text_string_to_metric_families(page):
        known |= {family.name, f"{family.name}_total", f"{family.name}_bucket"}
    named = set()
    for text in expressions():
        plain = re.sub(r"\$__rate_interval|\[[^\]]*\]|\"[^\"]*\"", "", text)
        named |= set(re.findall(r"[a-z][a-z_]+", plain)) - _WORDS
    assert named
    assert named - known == set()


def test_every_option_of_the_examples_exists() -> None:
    options = {name for each in load("serve").params for name in each.opts}
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".json"]
    named = {
        word
        for text in texts
        for line in text.splitlines()
        if not line.lstrip().startswith("#") and "tokens issue" not in line
        for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)
    }
    assert named - options == set()


def test_compose_and_chart_values_are_yaml() -> None:
    composition = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    assert {"broker-1", "broker-2"} <= set(composition["services"])
    assert all(
        port.startswith("127.0.0.1:") for each in composition["services"].values() for port in each["ports"]
    )
    mounted = [
        (DEPLOY / "compose" / volume.split(":")[0]).resolve()
        for each in composition["services"].values()
        for volume in each.get("volumes", ())
        if volume.startswith(".")
    ]
    assert mounted and all(path.exists() for path in mounted)
    values = yaml.safe_load((DEPLOY / "helm" / "forebay" / "values.yaml").read_text())
    assert values["replicas"] == 2
