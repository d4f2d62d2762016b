"""Every checker is tested from both sides: injected bugs must be found, clean histories must pass."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.testing import CHECKERS, History, Status, check
from forebay.testing.checkers import (
    StreamView,
    check_duplicated,
    check_fenced,
    check_lost,
    check_monotonic_reads,
    check_offsets,
    check_phantom,
    check_producer_order,
    check_reordered,
    check_stale,
    check_unknown,
)
from forebay.testing.history import Call


@dataclass
class Log:
    """A correct log with concurrent callers: what a history without bugs comes from."""

    draw: random.Random
    history: History = field(default_factory=History)
    values: list[str] = field(default_factory=list)
    open: list[tuple[Call, str]] = field(default_factory=list)
    epoch: int = 1
    made: int = 0

    def begin(self, kind: str) -> None:
        actor = f"a{self.draw.randrange(4)}"
        if kind == "append":
            values = [f"v{self.made + index}" for index in range(self.draw.randint(1, 3))]
            self.made += len(values)
            self.open.append((self.history.append("s", values, epoch=self.epoch, actor=actor), ""))
        else:
            self.open.append((self.history.read("s", actor=actor), ""))

    def end(self, index: int) -> None:
        """Take effect at this moment and answer, lose the answer, or fail."""
        call, _ = self.open.pop(index % len(self.open))
        fate = self.draw.random()
        if call.kind == "read":
            start = self.draw.randint(0, len(self.values))
            call.ok(offset=start, values=self.values[start:], tail=len(self.values))
        elif fate < 0.1:
            call.failed()
        elif fate < 0.15:
            call.unknown()
        else:
            offset = len(self.values)
            self.values.extend(str(value) for value in call.values)
            if fate < 0.25:
                call.unknown()
            else:
                call.ok(offset=offset)

    def fence(self) -> None:
        """Nobody of the old epoch is on the way any more when the fence is set."""
        while self.open:
            self.end(0)
        self.epoch += 1
        with self.history.fence("s", self.epoch, actor="master") as call:
            call.ok(offset=len(self.values))

    def finish(self) -> History:
        while self.open:
            self.end(0)
        self.history.final("s", self.values)
        return self.history


def clean(seed: int, steps: int = 60) -> History:
    log = Log(random.Random(seed))
    for _ in range(steps):
        act = log.draw.random()
        if act < 0.45:
            log.begin("append")
        elif act < 0.6:
            log.begin("read")
        elif act < 0.63:
            log.fence()
        elif log.open:
            log.end(log.draw.randrange(100))
    return log.finish()


def ok_appends(history: History) -> list[Call]:
    return [call for call in history.calls if call.kind == "append" and call.status is Status.OK]


def kinds(history: History) -> set[str]:
    return {problem.kind for problem in check(history)}


@given(st.integers(0, 2**32), st.integers(0, 120))
def test_clean_histories_pass(seed: int, steps: int) -> None:
    history = clean(seed, steps)
    assert check(history) == []
    assert check(history, [check_monotonic_reads]) == check(history, [check_monotonic_reads])


# Bugs. Each takes a clean history and breaks it in one way; it says whether there was something to break.


def lose_an_acknowledged_append(history: History, draw: random.Random) -> bool:
    victims = ok_appends(history)
    if not victims:
        return False
    gone = draw.choice(victims[-1].values)
    final = [value for value in history.finals["s"].values if value != gone]
    history.final("s", final)
    return True


def duplicate_an_acknowledged_append(history: History, draw: random.Random) -> bool:
    victims = ok_appends(history)
    if not victims:
        return False
    history.final("s", [*history.finals["s"].values, draw.choice(victims).values[0]])
    return True


def apply_an_unknown_append_twice(history: History, draw: random.Random) -> bool:
    present = set(history.finals["s"].values)
    victims = [
        call
        for call in history.calls
        if call.kind == "append" and call.status is Status.UNKNOWN and call.values[0] in present
    ]
    if not victims:
        return False
    history.final("s", [*history.finals["s"].values, *draw.choice(victims).values])
    return True


def tear_an_unknown_append(history: History, draw: random.Random) -> bool:
    call = history.append("s", ["torn-1", "torn-2"])
    call.unknown()
    history.final("s", [*history.finals["s"].values, "torn-1"])
    return True


def resurrect_a_failed_append(history: History, draw: random.Random) -> bool:
    failed = [call for call in history.calls if call.kind == "append" and call.status is Status.FAILED]
    if not failed:
        return False
    history.final("s", [*history.finals["s"].values, *draw.choice(failed).values])
    return True


def invent_a_value(history: History, draw: random.Random) -> bool:
    history.final("s", [*history.finals["s"].values, "never sent"])
    return True


def read_an_invented_value(history: History, draw: random.Random) -> bool:
    with history.read("s", actor="r") as call:
        values = [*history.finals["s"].values, "never sent"]
        call.ok(offset=0, values=values, tail=len(values))
    return True


def read_from_the_future(history: History, draw: random.Random) -> bool:
    end = len(history.finals["s"].values)
    with history.read("s", actor="r") as read:
        read.ok(offset=end, values=["next"], tail=end + 1)
    with history.append("s", ["next"], epoch=99) as call:
        call.ok(offset=end)
    history.final("s", [*history.finals["s"].values, "next"])
    return True


def swap_two_offsets(history: History, draw: random.Random) -> bool:
    victims = ok_appends(history)
    if len(victims) < 2:
        return False
    one, two = draw.sample(victims, 2)
    one.offset, two.offset = two.offset, one.offset
    return True


def swap_two_values_in_the_log(history: History, draw: random.Random) -> bool:
    victims = ok_appends(history)
    if len(victims) < 2:
        return False
    values = list(history.finals["s"].values)
    one, two = (values.index(call.values[0]) for call in draw.sample(victims, 2))
    values[one], values[two] = values[two], values[one]
    history.final("s", values)
    return True


def swap_two_values_of_a_read(history: History, draw: random.Random) -> bool:
    reads = [call for call in history.calls if call.kind == "read" and len(call.values) > 1]
    if not reads:
        return False
    read = draw.choice(reads)
    values = list(read.values)
    values[0], values[1] = values[1], values[0]
    read.values = tuple(values)
    return True


def skip_a_value_in_a_read(history: History, draw: random.Random) -> bool:
    reads = [call for call in history.calls if call.kind == "read" and len(call.values) > 1]
    if not reads:
        return False
    read = draw.choice(reads)
    read.values = read.values[1:]
    return True


def give_an_offset_twice(history: History, draw: random.Random) -> bool:
    victims = ok_appends(history)
    if len(victims) < 2:
        return False
    one, two = draw.sample(victims, 2)
    one.offset = two.offset
    return True


def leave_a_gap(history: History, draw: random.Random) -> bool:
    values = history.finals["s"].values
    if len(values) < 2:
        return False
    cut = draw.randrange(1, len(values))
    offsets = [index + (index >= cut) for index in range(len(values))]
    history.final("s", values, offsets=offsets)
    return True


def read_the_tail_one_short(history: History, draw: random.Random) -> bool:
    victims = ok_appends(history)
    if not victims:
        return False
    acked = max(call.offset + len(call.values) for call in victims if call.offset is not None)
    with history.read("s", actor="r") as call:
        call.ok(offset=0, values=history.finals["s"].values[: acked - 1], tail=acked - 1)
    return True


def read_a_stale_prefix(history: History, draw: random.Random) -> bool:
    victims = ok_appends(history)
    if not victims:
        return False
    acked = max(call.offset + len(call.values) for call in victims if call.offset is not None)
    tail = draw.randrange(acked)
    with history.read("s", actor="r") as call:
        call.ok(offset=0, values=history.finals["s"].values[:tail], tail=tail)
    return True


def see_a_tail_that_never_was(history: History, draw: random.Random) -> bool:
    with history.read("s", actor="r") as call:
        call.ok(offset=0, values=(), tail=len(history.finals["s"].values) + 1)
    return True


def _append_behind(history: History, epoch: int) -> Call:
    end = len(history.finals["s"].values)
    call = history.append("s", [f"zombie {end}"], epoch=epoch, actor="zombie")
    history.final("s", [*history.finals["s"].values, *call.values])
    return call


def append_after_the_fence(history: History, draw: random.Random) -> bool:
    history.fence("s", 50).ok()
    _append_behind(history, 49).ok(offset=len(history.finals["s"].values) - 1)
    return True


def append_of_unknown_outcome_after_the_fence(history: History, draw: random.Random) -> bool:
    history.fence("s", 50).ok()
    _append_behind(history, 49).unknown()
    return True


def append_slips_behind_the_fence_while_under_way(history: History, draw: random.Random) -> bool:
    end = len(history.finals["s"].values)
    call = _append_behind(history, 49)
    history.fence("s", 50).ok(offset=end)
    call.ok(offset=end)
    return True


def ack_after_the_fence(history: History, draw: random.Random) -> bool:
    history.fence("s", 50).ok()
    history.ack("s", 1, epoch=49).ok()
    return True


def grant_a_lower_epoch_after_the_fence(history: History, draw: random.Random) -> bool:
    history.fence("s", 50).ok()
    history.fence("s", 49).ok()
    return True


def ack_backwards(history: History, draw: random.Random) -> bool:
    history.ack("s", 5, group="g").ok()
    history.ack("s", 3, group="g").ok()
    return True


Bug = Callable[[History, random.Random], bool]
BUGS: list[tuple[Bug, set[str]]] = [
    (lose_an_acknowledged_append, {"lost"}),
    (duplicate_an_acknowledged_append, {"duplicated"}),
    (apply_an_unknown_append_twice, {"unknown"}),
    (tear_an_unknown_append, {"unknown"}),
    (resurrect_a_failed_append, {"phantom"}),
    (invent_a_value, {"phantom"}),
    (read_an_invented_value, {"phantom"}),
    (read_from_the_future, {"phantom"}),
    (swap_two_offsets, {"reordered"}),
    (swap_two_values_in_the_log, {"reordered"}),
    (swap_two_values_of_a_read, {"reordered"}),
    (skip_a_value_in_a_read, {"reordered"}),
    (give_an_offset_twice, {"overlap"}),
    (leave_a_gap, {"gap"}),
    (read_the_tail_one_short, {"stale"}),
    (read_a_stale_prefix, {"stale"}),
    (see_a_tail_that_never_was, {"phantom"}),
    (append_after_the_fence, {"fenced"}),
    (append_of_unknown_outcome_after_the_fence, {"fenced"}),
    (append_slips_behind_the_fence_while_under_way, {"fenced"}),
    (ack_after_the_fence, {"fenced"}),
    (grant_a_lower_epoch_after_the_fence, {"fenced"}),
    (ack_backwards, {"ack"}),
]


@pytest.mark.parametrize(("bug", "expected"), BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_injected_bug_is_found(bug: Bug, expected: set[str]) -> None:
    tried = 0
    for seed in range(60):
        history = clean(seed)
        if bug(history, random.Random(seed)):
            tried += 1
            assert expected <= kinds(history), f"{bug.__name__} was missed with seed {seed}"
    assert tried >= 20


def test_every_checker_is_needed_for_some_bug() -> None:
    """With any one checker left out, one of the bugs goes unnoticed by its name."""
    for left_out in CHECKERS:
        rest = [checker for checker in CHECKERS if checker is not left_out]
        assert any(
            bug(history := clean(seed), random.Random(seed))
            and not expected <= {problem.kind for problem in check(history, rest)}
            for bug, expected in BUGS
            for seed in range(10)
        ), f"{left_out.__name__} finds nothing that the others do not"


# What is not a bug.


def append(history: History, value: str, offset: int | None = None) -> Call:
    call = history.append("s", [value])
    if offset is not None:
        call.ok(offset=offset)
    return call


def test_unknown_append_may_be_there_or_not_and_at_any_later_place() -> None:
    for final in (["a", "b"], ["a", "u", "b"], ["a", "b", "u"]):
        history = History()
        append(history, "a", 0)
        append(history, "u").unknown()
        append(history, "b", final.index("b"))
        history.final("s", final)
        assert check(history) == []


def test_unknown_append_may_not_lie_before_what_was_acknowledged_earlier() -> None:
    history = History()
    append(history, "a", 1)
    append(history, "u").unknown()
    history.final("s", ["u", "a"])
    assert kinds(history) == {"reordered"}


def test_trimmed_values_are_not_lost() -> None:
    history = History()
    for number in range(5):
        append(history, f"v{number}", number)
    history.final("s", ["v3", "v4"], start=3)
    assert check(history) == []
    history.final("s", ["v3", "v4"], start=1, offsets=[3, 4])
    assert kinds(history) == {"lost", "gap"}


def test_rest_of_a_batch_that_was_trimmed_in_part_can_be_lost() -> None:
    history = History()
    history.append("s", ["a", "b", "c", "d"]).ok(offset=0)
    history.final("s", ["c", "d"], start=2)
    assert check(history) == []
    history.final("s", ["c"], start=2)
    assert kinds(history) == {"lost"}


def test_stream_that_does_not_begin_at_its_start_has_a_gap() -> None:
    history = History()
    append(history, "a", 3)
    history.final("s", ["a"], start=0, offsets=[3])
    assert kinds(history) == {"gap"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [(["a", "b"], set()), (["b", "a"], {"reordered"}), (["a", "a"], {"reordered"}), (["a", "u"], {"lost"})],
)
def test_read_that_does_not_say_where_is_judged_by_its_values(values: list[str], expected: set[str]) -> None:
    history = History()
    append(history, "a", 0)
    append(history, "b", 1)
    history.append("s", ["u"]).unknown()
    history.read("s").ok(values=values)
    history.final("s", ["a", "b"])
    assert kinds(history) == expected


def test_appends_under_way_at_the_fence_may_be_acknowledged_after_it() -> None:
    history = History()
    call = history.append("s", ["a"], epoch=1)
    history.fence("s", 2).ok(offset=1)
    call.ok(offset=0)
    history.final("s", ["a"])
    assert check(history) == []


def test_reads_without_a_tail_may_lag() -> None:
    history = History()
    append(history, "a", 0)
    append(history, "b", 1)
    with history.read("s") as read:
        read.ok(offset=0, values=["a"])
    history.final("s", ["a", "b"])
    assert check(history) == []


def test_monotonic_reads_judge_each_reader_by_itself() -> None:
    def history(second_reader: str) -> History:
        history = History()
        append(history, "a", 0)
        for actor, tail in (("r1", 1), (second_reader, 0)):
            with history.read("s", actor=actor) as read:
                read.ok(offset=0, values=["a"][:tail], tail=tail)
        history.final("s", ["a"])
        return history

    assert check(history("r2"), [check_monotonic_reads]) == []
    assert [problem.kind for problem in check(history("r1"), [check_monotonic_reads])] == ["stale"]
    assert kinds(history("r2")) == {"stale"}


def test_producer_order_is_judged_by_calls_not_by_returns() -> None:
    history = History()
    first = history.append("s", ["a"], actor="p")
    second = history.append("s", ["b"], actor="p")
    second.ok(offset=0)
    first.ok(offset=1)
    history.final("s", ["b", "a"])
    assert check(history) == []
    assert [problem.kind for problem in check(history, [check_producer_order])] == ["reordered"]


def test_streams_are_judged_apart() -> None:
    history = History()
    for stream in ("s", "t"):
        history.append(stream, ["same value"]).ok(offset=0)
        history.final(stream, ["same value"])
    assert check(history) == []


def test_history_without_a_final_read_is_refused() -> None:
    history = History()
    append(history, "a", 0)
    with pytest.raises(ValueError, match="no final content of 's'"):
        check(history)


def test_values_sent_twice_are_refused() -> None:
    history = History()
    append(history, "a", 0)
    append(history, "a", 1)
    history.final("s", ["a", "a"])
    with pytest.raises(ValueError, match="make values unique"):
        check(history)


def test_problem_shows_its_evidence() -> None:
    history = History()
    append(history, "a", 0)
    history.final("s", [])
    [problem] = check(history)
    assert str(problem).startswith(
        "lost: 'a' was acknowledged and is not in 's'\n    <test append s ['a'] at 0: ok"
    )


def test_single_checkers_look_for_one_thing_only() -> None:
    history = History()
    append(history, "a", 0)
    history.final("s", ["b"])
    view = StreamView(history, "s")
    found = {checker.__name__ for checker in CHECKERS if checker(view)}
    assert found == {check_lost.__name__, check_phantom.__name__}
    clean_view = StreamView(clean(1), "s")
    for checker in (
        check_duplicated,
        check_unknown,
        check_reordered,
        check_stale,
        check_offsets,
        check_fenced,
    ):
        assert checker(clean_view) == []


def test_long_histories_are_judged_without_quadratic_work() -> None:
    """Fifty thousand calls; a quadratic checker would not end before the time limit of the suite."""
    history = History()
    values = [f"v{number}" for number in range(40_000)]
    for offset, value in enumerate(values):
        append(history, value, offset)
        if offset % 4 == 0:
            history.read("s").ok(offset=offset, values=[value], tail=offset + 1)
    history.final("s", values)
    assert len(history.calls) == 50_000
    assert check(history) == []
    next(call for call in reversed(history.calls) if call.kind == "read").tail = 7
    assert kinds(history) == {"stale"}
