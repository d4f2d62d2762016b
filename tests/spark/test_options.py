"""Options that all engines have, and what is said where one of them is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

import forebay
from forebay.errors import UsageError
from forebay.spark import ForebaySource
from forebay.spark._buffer_source import BUFFER_SCHEMA
from forebay.spark._columns import LOG_SCHEMA
from forebay.spark._options import Options
from forebay.spark._stream_source import STREAM_SCHEMA

SCHEMAS = {
    "log": LOG_SCHEMA,
    "buffer": BUFFER_SCHEMA,
    "stream": STREAM_SCHEMA,
    "quiver": StructType().add("n", "long"),
}


@pytest.mark.parametrize(
    "given",
    [{"path": "s3:/bucket/data"}, {"path": "file:/data"}, {"path": "data", "coordinator": "oxia:host:6648"}],
)
def test_half_a_url_is_no_directory_of_that_name(given: dict[str, str]) -> None:
    """Rows went to the disk of this machine."""
    *_, option = given
    with pytest.raises(UsageError, match=f"{option} is '.*', neither a URL nor a plain path"):
        _ = Options(given).deployment


@pytest.mark.parametrize("given", [{"path": "memory://x"}, {"path": "data", "coordinator": "memory://"}])
def test_what_each_process_has_for_itself_is_refused(given: dict[str, str]) -> None:
    """A write into it was done, and nothing was there."""
    with pytest.raises(UsageError, match="which every process has for itself"):
        _ = Options(given).deployment


def test_a_directory_is_the_one_that_connect_opens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert Options({"path": "~/data"}).deployment.path == str(tmp_path / "home" / "data")
    assert Options({"path": "data", "coordinator": "data"}).deployment.coordinator == str(tmp_path / "data")
    assert Options({"path": "./s3:"}).deployment.path == str(tmp_path / "s3:")


@pytest.mark.parametrize("engine", ["log", "buffer", "stream", "quiver"])
def test_a_checkpoint_of_another_engine_is_told_as_such(tmp_path: Path, engine: str) -> None:
    positions: dict[str, dict[str, Any]] = {
        "log": {"t": {"0": 5}},
        "buffer": {"sequence": 5},
        "stream": {"offset": 5},
        "quiver": {"edge": "1-5"},
    }
    given = {"path": str(tmp_path), "engine": engine}
    if engine in ("log", "stream"):
        given["subscribe"] = "t"
    with forebay.connect(tmp_path):
        pass
    reader = ForebaySource(given).streamReader(SCHEMAS[engine])
    for other in positions.keys() - {engine}:
        with pytest.raises(UsageError, match=f"is not one of the engine '{engine}'") as caught:
            reader.latestOffset(positions[other], ReadAllAvailable())
        assert any("new checkpoint" in note for note in caught.value.__notes__)
        with pytest.raises(UsageError, match=f"is not one of the engine '{engine}'"):
            reader.partitions(positions[other], positions[other])


@pytest.mark.parametrize("engine", ["log", "buffer", "stream"])
def test_a_stream_over_a_misspelt_path_shows_what_to_do(tmp_path: Path, engine: str) -> None:
    """With `availableNow` the end is asked for before the beginning."""
    given = {"path": str(tmp_path / "typo"), "engine": engine, "subscribe": "t"}
    if engine == "buffer":
        del given["subscribe"]
    source = ForebaySource(given)
    reader = source.streamReader(source.schema())
    for ask in ("prepareForTriggerAvailableNow", "initialOffset", "reportLatestOffset"):
        with pytest.raises(UsageError, match="there is no directory") as caught:
            getattr(reader, ask)()
        assert any("the option path" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("manifest", "/ingest/manifest"),
        ("manifest", "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch"),
        ("prefix", "../ingest"),
        ("prefix", ""),
    ],
)
def test_a_wrong_place_of_a_queue_is_told_by_the_name_of_its_option(
    tmp_path: Path, option: str, value: str
) -> None:
    source = ForebaySource({"path": str(tmp_path), "engine": "buffer", option: value})
    for ask in (
        lambda: source.reader(BUFFER_SCHEMA),
        lambda: source.streamReader(BUFFER_SCHEMA),
        lambda: source.writer(StructType().add("value", "binary"), overwrite=False),
    ):
        with pytest.raises(UsageError, match=rf"^{option} '{value}'") as caught:
            ask()
        assert caught.value.hint


@pytest.mark.parametrize("coordinator", ["", "sqlite://{}/other.db", "{}"])
def test_reading_a_directory_of_something_else_makes_nothing_in_it(tmp_path: Path, coordinator: str) -> None:
    (tmp_path / "photo").touch()
    given = {"path": str(tmp_path), "subscribe": "t"}
    if coordinator:
        given["coordinator"] = coordinator.format(tmp_path)
    source = ForebaySource(given)
    for ask in (
        lambda: source.reader(LOG_SCHEMA).partitions(),
        lambda: source.streamReader(LOG_SCHEMA).initialOffset(),
    ):
        with pytest.raises(UsageError, match="holds no deployment") as caught:
            ask()
        assert any("topics create" in note for note in caught.value.__notes__)
    assert [each.name for each in tmp_path.iterdir()] == ["photo"]
