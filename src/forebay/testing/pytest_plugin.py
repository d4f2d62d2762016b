"""The pytest side of the real servers: fixtures `seaweed` and `oxia`, and the marks their tests need.

A server is dear to start and cheap to share, so each fixture lives as long as the session. Under xdist every
worker is a session of its own; the plugin therefore puts all users of one server into one `xdist_group`,
which `--dist loadgroup` keeps on one worker. It also adds the marker `integration`, so that
`-m "not integration"` leaves them out, and builds what must be built before the first test runs: a cold build
of Oxia takes minutes, and no test's timeout should pay for it.

A test that reaches a server by another way than naming the fixture (`request.getfixturevalue`, one parameter
of a suite) says so with the mark `real_server("oxia")`, for example in `pytest.param(..., marks=...)`.

Where a server cannot be had, its tests skip and give the reason. With `CI=true` in the environment they fail
instead: a machine that claims to check everything must not pass by skipping.

pytest imports this module in every run of every project that has Forebay installed, so it imports nothing
heavy: the servers themselves are imported where they are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from forebay.testing.servers import OxiaServer, SeaweedServer, ServerUnavailable

__all__ = [
    "cannot_be_had",
    "oxia",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "seaweed",
]

SERVERS = ("seaweed", "oxia")
"""Fixture names. A test that uses several goes into the group of the first, whose server starts slower."""


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known, also to projects that are strict about them."""
    config.addinivalue_line("markers", "integration: needs a real server")
    config.addinivalue_line("markers", "real_server(name): uses the server fixture of this name indirectly")
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): tests that share a worker")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the users of real servers. First of all hooks: selection and grouping look at the marks."""
    for item in items:
        used = _servers_of(item)
        if used:
            item.add_marker(pytest.mark.integration)
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(used[0]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Build Oxia before the first test's clock runs, if a test that was selected needs it."""
    if session.config.option.collectonly or not any("oxia" in _servers_of(item) for item in session.items):
        return
    from forebay.testing.servers import ServerUnavailable, oxia_binary

    try:
        oxia_binary()
    except ServerUnavailable:
        return  # The fixture meets the same error and reports it test by test.


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """A running SeaweedFS: S3 with conditional puts, credentials checked."""
    from forebay.testing.servers import SeaweedServer, ServerUnavailable

    try:
        server = SeaweedServer()
    except ServerUnavailable as error:
        cannot_be_had(error)
    with server:
        yield server


@pytest.fixture(scope="session")
def oxia() -> Iterator[OxiaServer]:
    """A running Oxia with one shard."""
    from forebay.testing.servers import OxiaServer, ServerUnavailable

    try:
        server = OxiaServer()
    except ServerUnavailable as error:
        cannot_be_had(error)
    with server:
        yield server


def _servers_of(item: pytest.Item) -> list[str]:
    named = {mark.args[0] for mark in item.iter_markers("real_server") if mark.args}
    fixtures = getattr(item, "fixturenames", ())
    return [name for name in SERVERS if name in named or name in fixtures]


def cannot_be_had(error: ServerUnavailable) -> NoReturn:
    """Skip the test and say why; with `CI=true` fail it, for there the servers must run."""
    reason = f"{error.message} ({error.hint})"
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI=true, and {reason}", pytrace=False)
    pytest.skip(reason)
