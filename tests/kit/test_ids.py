from __future__ import annotations

import random
import string
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.kit import ids
from forebay.kit.ids import ULID_LENGTH, IdSource, ulid_time_ms

TIME_MS_MAX = 2**48 - 1


class StepClock:
    """Says what it is told."""

    def __init__(self, now_ms: int = 0) -> None:
        self.time_ms = now_ms

    def now_ms(self) -> int:
        return self.time_ms

    def monotonic(self) -> float:
        raise AssertionError("ids are made from wall time")

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("ids do not wait")


class FixedBits(random.Random):
    """Randomness whose every bit is the same."""

    def __init__(self, bit: int) -> None:
        super().__init__(0)
        self._bit = bit

    def getrandbits(self, k: int, /) -> int:
        return (1 << k) - 1 if self._bit else 0


# Worked out on paper: ten letters of five bits for the time, sixteen for the rest. 2**48 - 1 fills 48 of the
# first 50 bits, so its first letter is 7. A fresh random part has its top bit unset, so full ones start with
# F (01111). 1_469_918_176_385 is the example of the ULID specification.
VECTORS = [
    (0, 0, "0000000000" + "0000000000000000"),
    (1, 0, "0000000001" + "0000000000000000"),
    (31, 0, "000000000Z" + "0000000000000000"),
    (32, 0, "0000000010" + "0000000000000000"),
    (1_469_918_176_385, 0, "01ARYZ6S41" + "0000000000000000"),
    (TIME_MS_MAX, 0, "7ZZZZZZZZZ" + "0000000000000000"),
    (TIME_MS_MAX, 1, "7ZZZZZZZZZ" + "FZZZZZZZZZZZZZZZ"),
    (0, 1, "0000000000" + "FZZZZZZZZZZZZZZZ"),
]


@pytest.mark.parametrize(("time_ms", "bit", "text"), VECTORS)
def test_text_form_matches_vectors_worked_out_by_hand(time_ms: int, bit: int, text: str) -> None:
    assert IdSource(StepClock(time_ms), FixedBits(bit)).ulid() == text
    assert ulid_time_ms(text) == time_ms


def test_counting_up_carries_through_the_letters() -> None:
    source = IdSource(StepClock(0), FixedBits(0))
    made = [source.ulid() for _ in range(34)]
    assert made[1] == "0" * 25 + "1"
    assert made[31] == "0" * 25 + "Z"
    assert made[32] == "0" * 24 + "10"


@given(st.lists(st.integers(-(2**40), 2**50), min_size=1, max_size=50), st.integers())
def test_strictly_increasing_whatever_the_clock_does(times_ms: list[int], seed: int) -> None:
    clock = StepClock()
    source = IdSource(clock, random.Random(seed))
    made = []
    for clock.time_ms in times_ms:
        made.append(source.ulid())
    assert made == sorted(set(made))
    highest = 0
    for time_ms, ulid in zip(times_ms, made, strict=True):
        highest = min(max(highest, time_ms, 0), TIME_MS_MAX)
        assert ulid_time_ms(ulid) == highest


def test_after_a_leap_forward_and_back_ids_stay_in_order_at_the_highest_time_seen() -> None:
    clock = StepClock(5_000)
    source = IdSource(clock, random.Random(1))
    first = source.ulid()
    clock.time_ms = 9_000_000
    leapt = source.ulid()
    clock.time_ms = 5_001
    back = source.ulid()
    clock.time_ms = 9_000_001
    caught_up = source.ulid()
    assert first < leapt < back < caught_up
    assert [ulid_time_ms(ulid) for ulid in (first, leapt, back, caught_up)] == [
        5_000,
        9_000_000,
        9_000_000,
        9_000_001,
    ]


def test_end_of_the_random_range_carries_into_the_time_and_stays_in_order() -> None:
    source = IdSource(StepClock(7), FixedBits(0))
    source.ulid()
    source._last = (7 << 80) | (1 << 80) - 1
    last_of_seven = ids._text(source._last)
    carried = source.ulid()
    assert last_of_seven == "0000000007" + "Z" * 16
    assert carried == "0000000008" + "0" * 16
    assert carried > last_of_seven


def test_after_the_very_last_ulid_comes_an_error_not_a_wrong_id() -> None:
    source = IdSource(StepClock(TIME_MS_MAX), FixedBits(1))
    source._last = (1 << 128) - 2
    assert source.ulid() == "7" + "Z" * 25
    for _ in range(2):
        with pytest.raises(UsageError, match="no higher ULID") as caught:
            source.ulid()
        assert "clock" in caught.value.hint


def test_threads_never_share_an_id_and_each_sees_its_own_in_order() -> None:
    source = IdSource(StepClock(1), random.Random(3))
    threads, each = 8, 500
    together = threading.Barrier(threads)

    def make() -> list[str]:
        together.wait()
        return [source.ulid() for _ in range(each)]

    with ThreadPoolExecutor(threads) as pool:
        made = [future.result() for future in [pool.submit(make) for _ in range(threads)]]
    assert all(own == sorted(own) for own in made)
    assert len({ulid for own in made for ulid in own}) == threads * each


def test_two_sources_of_the_same_seed_and_clock_repeat_each_other() -> None:
    one, two = (IdSource(StepClock(4), random.Random(9)) for _ in range(2))
    assert [one.ulid(), one.token(), one.ulid()] == [two.ulid(), two.token(), two.ulid()]


def test_two_sources_of_the_system_do_not_repeat_each_other() -> None:
    one, two = IdSource(StepClock(4)), IdSource(StepClock(4))
    assert {one.ulid(), one.token()}.isdisjoint({two.ulid(), two.token()})


# In a process of its own: the one that runs the tests has threads and servers that do not like to be forked.
FORK = """
import os, random, signal
from forebay.kit.ids import IdSource

class Clock:
    def now_ms(self): return 4

source = IdSource(Clock(), random.SystemRandom())
print(source.ulid(), flush=True)
source._lock.acquire()  # as if another thread were inside at the moment of the fork
child = os.fork()
if child == 0:
    signal.alarm(60)
    print(source.ulid(), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], flush=True)
source._lock.release()
print(source.ulid(), flush=True)
"""


def test_a_forked_child_neither_hangs_nor_repeats_its_parent_in_the_same_millisecond() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=True
    )
    before, from_child, status, from_parent = done.stdout.splitlines()
    assert status == "0"
    assert from_child != from_parent
    assert len(from_child) == ULID_LENGTH
    assert min(from_child, from_parent) > before


def test_tokens_are_32_hexadecimal_digits_and_differ() -> None:
    source = IdSource(StepClock(0), random.Random(5))
    tokens = {source.token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(len(token) == 32 and set(token) <= set(string.hexdigits.lower()) for token in tokens)


# RFC 4122, section 4.1: the digit after the second dash is the version, the one after the third 8, 9, a or b.
@pytest.mark.parametrize(
    ("bit", "text"),
    [(0, "00000000-0000-4000-8000-000000000000"), (1, "ffffffff-ffff-4fff-bfff-ffffffffffff")],
)
def test_uuid_text_matches_vectors_worked_out_by_hand(bit: int, text: str) -> None:
    assert IdSource(StepClock(0), FixedBits(bit)).uuid() == text


@given(st.integers())
def test_uuids_are_random_ones_that_the_standard_library_reads_back(seed: int) -> None:
    source = IdSource(StepClock(0), random.Random(seed))
    made = [uuid.UUID(source.uuid()) for _ in range(20)]
    assert all(one.version == 4 and one.variant == uuid.RFC_4122 for one in made)
    assert len(set(made)) == 20


def test_uuids_are_written_as_the_standard_library_writes_them_and_follow_the_seed() -> None:
    one, two = (IdSource(StepClock(4), random.Random(9)) for _ in range(2))
    text = one.uuid()
    assert text == str(uuid.UUID(text)) == two.uuid()


def test_reading_the_time_accepts_both_cases() -> None:
    assert ulid_time_ms("01aryz6s41tsv4rrffq69g5fav") == ulid_time_ms("01ARYZ6S41TSV4RRFFQ69G5FAV")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0" * 25,
        "0" * 27,
        "8" + "0" * 25,
        "Z" * 26,
        "z" * 26,
        *["0" * 9 + letter + "0" * 16 for letter in "ILOUilou-_ "],
        *["0" * 25 + letter for letter in "ILOUilou\n"],
        "\N{ARABIC-INDIC DIGIT ZERO}" * 26,  # Arabic digits, which int() would take
        "0" * 25 + "\N{LATIN SMALL LETTER SHARP S}",  # upper() makes it SS
        "0" * 25 + "\N{LATIN SMALL LETTER LONG S}",  # upper() makes it S
        "0" * 25 + "\N{FULLWIDTH DIGIT ONE}",
        "/" + "0" * 25,
        "\ud800" + "0" * 25,
    ],
)
def test_what_is_no_ulid_has_no_time(text: str) -> None:
    with pytest.raises(UsageError, match="is not a ULID") as caught:
        ulid_time_ms(text)
    assert isinstance(caught.value, ValueError)
    assert caught.value.hint


@given(st.integers(0, 2**128 - 1), st.integers(0, 2**128 - 1))
def test_every_value_is_read_back_and_sorts_like_its_text(value: int, other: int) -> None:
    text = ids._text(value)
    assert len(text) == ULID_LENGTH
    assert ulid_time_ms(text) == value >> 80
    assert (text < ids._text(other)) == (value < other)
