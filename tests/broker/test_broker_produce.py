"""Waiting for appends: one timer for all requests, and nobody's cancellation is another's answer."""

from __future__ import annotations

import asyncio

import pytest

from forebay.broker._produce import _answer, _Patience
from forebay.errors import OutcomeUnknown
from forebay.log import AppendResult

DONE = AppendResult("t", 0, 1, 1, 1)


def _ticket() -> asyncio.Future[AppendResult]:
    return asyncio.get_running_loop().create_future()


async def test_tickets_that_are_late_become_unknown_one_after_the_other_and_the_rest_keep_their_answers() -> (
    None
):
    patience = _Patience(0.02)
    late, answered, later = _ticket(), _ticket(), _ticket()
    patience.limit([late, answered])
    answered.set_result(DONE)
    assert isinstance(await _answer(late), OutcomeUnknown)
    assert await _answer(answered) == DONE
    patience.limit([later])
    assert isinstance(await _answer(later), OutcomeUnknown)
    assert not patience._line
    assert patience._timer is None


async def test_answered_tickets_do_not_pile_up() -> None:
    patience = _Patience(60)
    for _ in range(100):
        ticket = _ticket()
        patience.limit([ticket])
        ticket.set_result(DONE)
    assert len(patience._line) == 1


async def test_cancelled_request_is_cancelled_and_a_cancelled_append_is_an_unknown_outcome() -> None:
    ticket = _ticket()
    request = asyncio.get_running_loop().create_task(_answer(ticket))
    await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    ticket = _ticket()
    ticket.cancel()
    assert isinstance(await _answer(ticket), OutcomeUnknown)
