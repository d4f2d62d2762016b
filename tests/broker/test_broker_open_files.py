"""Connections get the open files that the store does not need."""

from __future__ import annotations

import resource

import pytest

from forebay.broker._open_files import FILES_KEPT, connections_that_fit

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to", "fit"),
    [
        (1_024, 20_000, 4_096 + FILES_KEPT, 4_096),
        (1_024, INFINITE, 4_096 + FILES_KEPT, 4_096),
        (1_024, 2_048, 2_048, 2_048 - FILES_KEPT),
        (1_024, 1_024, 1_024, 1_024 - FILES_KEPT),
        (100, 100, 100, 50),
        (20_000, 20_000, None, 4_096),
        (INFINITE, INFINITE, None, 4_096),
    ],
)
def test_limit_is_raised_as_far_as_needed_and_allowed(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised_to: int | None, fit: int
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: raised.append(both))
    assert connections_that_fit(4_096) == fit
    assert raised == ([] if raised_to is None else [(raised_to, hard)])


def test_limit_that_may_not_be_raised_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(kind: int, both: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1_024, 65_536))
    monkeypatch.setattr(resource, "setrlimit", forbidden)
    assert connections_that_fit(4_096) == 1_024 - FILES_KEPT
