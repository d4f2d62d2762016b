"""The rules of one partition's numbers, without any network."""

from __future__ import annotations

import itertools

from forebay.client._lane import Batch, Lane, Part
from forebay.client._receipts import Delivered
from forebay.formats.bytes_batch import BytesBatch


def lane() -> Lane:
    names = itertools.count()
    return Lane("t", 0, lambda: f"id-{next(names)}")


def fill(each: Lane, count: int, told: list[Delivered] | None = None) -> None:
    for number in range(count):
        tell = (lambda _: None) if told is None else told.append
        each.add(Part(BytesBatch.of([b"%d" % number]), 10, tell, deadline=5.0))
    each.due = True


def take(each: Lane, in_flight_max: int = 5) -> Batch | None:
    return each.take(1, in_flight_max)


def taken(each: Lane) -> Batch:
    batch = take(each)
    assert batch is not None
    batch.attempts += 1
    return batch


def test_nothing_is_sent_so_far_ahead_that_an_untold_number_could_be_forgotten() -> None:
    each = lane()
    fill(each, 20)
    slow = taken(each)
    for _ in range(4):
        batch = taken(each)
        each.in_flight.discard(batch)
    # Only one is under way, and still nothing may follow: five numbers are out.
    assert each.in_flight == {slow}
    assert take(each) is None
    each.in_flight.discard(slow)
    assert taken(each).sequence == 5


def test_what_comes_back_goes_out_again_first_and_in_order() -> None:
    each = lane()
    fill(each, 5)
    first, second, third = taken(each), taken(each), taken(each)
    each.put_back(third)
    each.put_back(first)
    each.put_back(second)
    assert [batch.sequence for batch in each.again] == [0, 1, 2]
    assert taken(each) is first
    # One at a time, while something is being repeated.
    assert take(each) is None


def test_a_hole_is_left_under_a_new_id_and_only_certain_batches_are_numbered_again() -> None:
    each = lane()
    fill(each, 4)
    gone, certain, lost = taken(each), taken(each), taken(each)
    each.give_up(gone)
    lost.lost = "no answer"
    assert take(each) is None, "nothing goes out before all that is under way is answered"
    each.put_back(certain)
    each.put_back(lost)
    batch = taken(each)
    assert batch is certain
    assert (batch.producer_id, batch.sequence) == ("id-1", 0)
    assert (lost.producer_id, lost.sequence) == ("id-0", 2)


def test_a_repetition_sends_the_same_bytes() -> None:
    each = lane()
    fill(each, 1)
    batch = taken(each)
    assert batch.encoded(1) == batch.encoded(2)


def test_parts_that_waited_too_long_are_taken_out_from_the_front() -> None:
    each = lane()
    fill(each, 2)
    each.add(Part(BytesBatch.of([b"young"]), 10, lambda _: None, deadline=50.0))
    assert len(each.expired(now=6.0)) == 2
    assert each.waiting_bytes == 10
