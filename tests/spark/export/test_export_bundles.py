"""Which spans a task of an export gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.spark.export._exporter import _bundled
from forebay.spark.export._facts import Span

MIB = 1024 * 1024


@given(
    sizes=st.lists(st.integers(0, 100 * MIB), max_size=60),
    size=st.integers(1, 64 * MIB),
    slots=st.integers(1, 9),
)
def test_every_span_is_in_one_task_in_order_and_tasks_keep_to_their_size(
    sizes: list[int], size: int, slots: int
) -> None:
    spans = [Span("t:0", number, number + 1, each) for number, each in enumerate(sizes)]
    bundles = _bundled(spans, size, slots)
    assert [span for bundle in bundles for span in bundle] == spans
    for bundle in bundles:
        assert bundle
        assert sum(span.bytes for span in bundle) <= size or len([1 for span in bundle if span.bytes]) == 1


@pytest.mark.parametrize("count", [50, 55, 111, 112, 113, 200])
def test_tasks_are_alike(count: int) -> None:
    spans = [Span("t:0", number, number + 1, 4 * MIB) for number in range(count)]
    sizes = [sum(span.bytes for span in bundle) for bundle in _bundled(spans, 64 * MIB)]
    assert max(sizes) - min(sizes) <= 4 * MIB
    assert len(sizes) <= -(-count * 4 // 60)


@pytest.mark.parametrize("shares", [2, 4, 6])
def test_a_share_and_a_span_give_as_many_tasks_as_shares(shares: int) -> None:
    spans = [Span("t:0", number, number + 1, 4 * MIB) for number in range(37)]
    share = -(-37 * 4 * MIB // shares)
    assert len(_bundled(spans, share + 4 * MIB)) == shares


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [111, 200, 400])
def test_every_slot_gets_as_many_tasks_unless_there_are_hardly_any(slots: int, count: int) -> None:
    spans = [Span("t:0", number, number + 1, 4 * MIB) for number in range(count)]
    bundles = _bundled(spans, 64 * MIB, slots)
    assert len(bundles) % slots == 0 or len(bundles) < slots
    assert len(_bundled(spans[:10], 64 * MIB, slots)) == 1
