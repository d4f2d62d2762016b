"""Several destinations of one giver: what becomes of a parcel that not all of them take."""

from __future__ import annotations

import pytest
from tests.dataflow.otlp_kit import logs
from tests.dataflow.test_dataflow_receivers import FakeSink

from forebay.dataflow._dispatch import Broadcast
from forebay.dataflow._parcels import Parcel, Refused
from forebay.errors import Backpressure, LimitExceeded, OutcomeUnknown, Unavailable


async def test_refusal_of_one_destination_does_not_hide_that_another_may_still_take_it() -> None:
    refuses, is_down = FakeSink(), FakeSink()
    refuses.problem, is_down.problem = Refused("never"), Unavailable("later")
    for sinks in ((refuses, is_down), (is_down, refuses)):
        with pytest.raises(Unavailable):
            await Broadcast(sinks).take(Parcel("logs", (b"",), 1, 0))
    with pytest.raises(Refused):
        await Broadcast((refuses, FakeSink())).take(Parcel("logs", (b"",), 1, 0))


@pytest.mark.parametrize("problem", [Backpressure("full"), Unavailable("down"), OutcomeUnknown("export")])
async def test_a_destination_that_is_full_costs_the_others_one_copy_and_not_one_for_each_attempt(
    problem: Exception,
) -> None:
    full, good = FakeSink(), FakeSink()
    full.problem = problem
    everybody = Broadcast((good, full))
    for _ in range(5):
        with pytest.raises(type(problem)):
            await everybody.take(Parcel("logs", (logs("again"),), 1, 0))
    assert good.names == ["again"]
    full.problem = None
    for name in ("again", "next"):
        await everybody.take(Parcel("logs", (logs(name),), 1, 0))
    assert (good.names, full.names) == (["again", "again", "next"], ["again", "next"])


async def test_what_one_refuses_for_good_is_for_the_others_as_soon_as_they_can() -> None:
    refuses, is_down = FakeSink(), FakeSink()
    refuses.problem, is_down.problem = LimitExceeded("size", limit=1, actual=2), Unavailable("later")
    everybody = Broadcast((refuses, is_down))
    with pytest.raises(Unavailable):
        await everybody.take(Parcel("logs", (logs("a"),), 1, 0))
    is_down.problem = None
    with pytest.raises(LimitExceeded):
        await everybody.take(Parcel("logs", (logs("a"),), 1, 0))
    assert is_down.names == ["a"]
