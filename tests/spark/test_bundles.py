"""Bundles of what is read as a whole: in order, each once, as many as were asked for."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from forebay.spark._bundles import TASK_BYTES, bundles


@given(sizes=st.lists(st.integers(0, TASK_BYTES * 2), max_size=60), least=st.integers(1, 80))
def test_there_are_as_many_bundles_as_were_asked_for(sizes: list[int], least: int) -> None:
    found = list(bundles(range(len(sizes)), sizes, least))
    assert [each for bundle in found for each in bundle] == list(range(len(sizes)))
    assert all(found) and len(found) >= min(least, len(sizes))


def test_a_small_number_asked_for_makes_no_large_bundles() -> None:
    sizes: Sequence[int] = [TASK_BYTES // 4] * 40
    assert len(list(bundles(sizes, sizes, 2))) == len(list(bundles(sizes, sizes, None))) == 10
