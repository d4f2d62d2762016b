from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._shard import Shard, ShardMap, key_hash


@pytest.mark.parametrize(("key", "value"), [("foo", 125730186), ("bar", 2687685474)])
def test_hash_is_the_one_of_the_servers_other_clients(key: str, value: int) -> None:
    assert key_hash(key) == value


def four() -> ShardMap:
    step = 2**30
    return ShardMap([Shard(n, f"host-{n}:1", n * step, (n + 1) * step - 1) for n in (2, 0, 3, 1)])


def test_keys_go_to_the_shard_whose_range_holds_their_hash() -> None:
    assert four().of("foo") == 125730186 // 2**30
    assert four().of("bar") == 2687685474 // 2**30


@given(st.text(max_size=30, alphabet=st.characters(codec="utf-8")))
def test_every_key_has_exactly_one_shard(key: str) -> None:
    assert four().of(key) == key_hash(key) // 2**30


def test_leader_is_known_by_shard() -> None:
    assert four().leader(2) == "host-2:1"
    assert four().leader(9) is None


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(0, 10)],
        [(1, 2**32 - 1)],
        [(0, 10), (12, 2**32 - 1)],
        [(0, 10), (10, 2**32 - 1)],
        [(0, 2**32 - 1), (0, 2**32 - 1)],
    ],
)
def test_map_with_a_hole_or_an_overlap_is_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="shard"):
        ShardMap([Shard(n, "h:1", first, last) for n, (first, last) in enumerate(ranges)])


def test_sequence_puts_and_secondary_indexes_cannot_be_expressed() -> None:
    """A malformed one of either kind kills a server, so our messages do not have the fields (7 and 8)."""
    assert sorted(field.number for field in pb.PutRequest.DESCRIPTOR.fields) == [1, 2, 3, 4, 5, 6]
    assert "secondary_index_name" not in pb.RangeRequest.DESCRIPTOR.fields_by_name
