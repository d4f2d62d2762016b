from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import typer.main

from forebay.cli._deployment import COORDINATION_FILE, Deployment, deployment_options
from forebay.cli._options import CommandGroup
from forebay.cli._settings import OutputForm, Settings
from forebay.errors import UsageError


def invoke(function: Callable[..., Any], *words: str) -> None:
    """Run `function` as a command of its own."""
    app = CommandGroup(help="A group.")
    app.command("it")(function)
    typer.main.get_command(app).main(["it", *words], prog_name="test", standalone_mode=False)


@pytest.fixture
def seen() -> list[Deployment]:
    return []


@pytest.fixture
def command(seen: list[Deployment]) -> Callable[..., Any]:
    @deployment_options
    def it(deployment: Deployment, name: Annotated[str, typer.Argument()] = "") -> None:
        seen.append(deployment)

    return it


def test_data_directory_is_store_and_coordinator(command: Callable[..., Any], seen: list[Deployment]) -> None:
    invoke(command, "--data", "some/where")
    [deployment] = seen
    assert deployment.store_url == deployment.coordinator_url == str(Path("some/where").absolute())


@pytest.mark.parametrize("name", ["plain", "with space", "100%", "what?", "a#b", "s3:"])
async def test_data_directory_of_any_name_holds_store_and_coordinator(tmp_path: Path, name: str) -> None:
    deployment = Deployment(data=tmp_path / name / "x")
    async with deployment.open_store() as store, deployment.open_coordinator() as coordinator:
        await store.put("key", b"object")
        await coordinator.put("key", b"record")
    assert (tmp_path / name / "x" / "key").read_bytes() == b"object"
    assert (tmp_path / name / "x" / COORDINATION_FILE).is_file()


async def test_named_urls_are_opened() -> None:
    deployment = Deployment(store="memory://deployment", coordinator="memory://deployment")
    async with deployment.open_store() as store, deployment.open_coordinator() as coordinator:
        assert (store.url, coordinator.url) == ("memory://deployment", "memory://deployment")


def test_store_and_coordinator_are_taken_as_given(
    command: Callable[..., Any], seen: list[Deployment]
) -> None:
    invoke(command, "--store", "s3://bucket/x", "--coordinator", "oxia://host:1/ns", "name")
    [deployment] = seen
    assert (deployment.store_url, deployment.coordinator_url) == ("s3://bucket/x", "oxia://host:1/ns")


def test_environment_is_used_where_the_command_line_is_silent(
    command: Callable[..., Any], seen: list[Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_STORE", "memory://store")
    monkeypatch.setenv("FOREBAY_COORDINATOR", "memory://keys")
    invoke(command)
    assert seen == [Deployment(store="memory://store", coordinator="memory://keys")]


def test_command_line_silences_the_whole_environment(
    command: Callable[..., Any], seen: list[Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_STORE", "memory://store")
    monkeypatch.setenv("FOREBAY_COORDINATOR", "memory://keys")
    invoke(command, "--data", "here")
    invoke(command, "--store", "memory://other")
    assert seen == [Deployment(data=Path("here")), Deployment(store="memory://other")]


def test_data_excludes_the_others_and_the_message_names_them() -> None:
    with pytest.raises(UsageError, match="--data and --store"):
        Deployment.choose({"data": "x", "store": "y", "coordinator": None}, {})
    with pytest.raises(UsageError, match="FOREBAY_DATA and FOREBAY_COORDINATOR"):
        Deployment.choose({}, {"FOREBAY_DATA": "x", "FOREBAY_COORDINATOR": "y"})


def test_empty_values_count_as_not_given() -> None:
    assert Deployment.choose({"data": "", "store": None}, {"FOREBAY_DATA": ""}) == Deployment()


def test_nothing_named_is_said_when_it_is_needed_and_not_before() -> None:
    deployment = Deployment.choose({}, {})
    for attribute in ("store_url", "coordinator_url"):
        with pytest.raises(UsageError) as caught:
            getattr(deployment, attribute)
        assert "--data DIR" in caught.value.hint


def test_function_keeps_its_own_signature() -> None:
    def plain(number: int = 3) -> int:
        return number

    app = CommandGroup(help="A group.")
    assert app.command("plain")(plain) is plain
    assert plain() == 3
    assert list(inspect.signature(plain).parameters) == ["number"]


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        ([], {}, Settings()),
        (["x", "--output", "json"], {}, Settings(output=OutputForm.JSON)),
        (["x", "-ojson"], {}, Settings(output=OutputForm.JSON)),
        (["x", "-o"], {}, Settings()),
        (["x", "--", "--output=json", "--debug"], {}, Settings()),
        (["x"], {"NO_COLOR": "1"}, Settings(color=False)),
        (["x"], {"NO_COLOR": ""}, Settings()),
        (["x", "--no-color"], {}, Settings(color=False)),
        (["x"], {"FOREBAY_DEBUG": "1"}, Settings(debug=True)),
        (["x"], {"FOREBAY_DEBUG": "0"}, Settings()),
        (["x", "--debug"], {}, Settings(debug=True)),
    ],
)
def test_a_glance_at_the_words_finds_the_settings(
    words: list[str], environment: dict[str, str], expected: Settings
) -> None:
    assert Settings.glance(words, environment) == expected


def test_later_settings_go_over_earlier_ones_only_where_given() -> None:
    first = Settings(output=OutputForm.JSON, color=False)
    assert first.merged(None, None, None) == first
    assert first.merged(OutputForm.TEXT, True, True) == Settings(OutputForm.TEXT, True, True)
