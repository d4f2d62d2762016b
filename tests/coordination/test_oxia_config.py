from __future__ import annotations

import asyncio

import pytest

from forebay.coordination._oxia import OxiaConfig, OxiaCoordinator, open_oxia
from forebay.coordination._oxia._config import parse_url
from forebay.errors import InvalidUrl


def test_url_gives_address_namespace_and_options() -> None:
    assert parse_url("oxia://h:1234/ns?timeout_ms=500&tls=true&requests_in_flight=3") == OxiaConfig(
        "h:1234", "ns", timeout_ms=500, tls=True, requests_in_flight=3
    )


@pytest.mark.parametrize("url", ["oxia://host", "oxia://host/", "oxia://host:6648/default"])
def test_port_and_namespace_have_defaults(url: str) -> None:
    assert parse_url(url) == OxiaConfig("host:6648")


def test_ipv6_address_keeps_its_brackets() -> None:
    assert parse_url("oxia://[::1]:7000").address == "[::1]:7000"


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("http://host:1", "oxia://"),
        ("oxia://", "names no server"),
        ("oxia:///ns", "names no server"),
        ("oxia://host:0", "names no server"),
        ("oxia://host:seventy", "port"),
        ("oxia://host:70000", "port"),
        ("oxia://user:secret@host", "password"),
        ("oxia://host/a/b", "a/b"),
        ("oxia://host/%0a", "namespace"),
        ("oxia://host/ns#part", "part"),
        ("oxia://host?timeout=5", "'timeout'"),
        ("oxia://host?timeout_ms=", "timeout_ms"),
        ("oxia://host?timeout_ms=-1", "timeout_ms"),
        ("oxia://host?timeout_ms=0", "timeout_ms=0"),
        ("oxia://host?timeout_ms=99999999999999999999999999", "timeout_ms"),
        ("oxia://host?timeout_ms=50&timeout_ms=60", "twice"),
        ("oxia://host?tls=yes", "tls"),
        ("oxia://host?requests_in_flight=0", "requests_in_flight"),
    ],
)
def test_wrong_url_is_refused_and_the_culprit_named(url: str, names: str) -> None:
    with pytest.raises(InvalidUrl) as raised:
        open_oxia(url)
    assert names in raised.value.message
    assert raised.value.hint
    assert "secret" not in raised.value.message


def test_opening_needs_no_event_loop_and_no_server() -> None:
    coordinator = open_oxia("oxia://127.0.0.1:1")
    assert isinstance(coordinator, OxiaCoordinator)
    assert coordinator.url == "oxia://127.0.0.1:1"
    asyncio.run(coordinator.close())
