"""Formats of the remote tier: the given examples, round trips, and what a decoder must refuse."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest

from forebay.errors import FormatError, LimitExceeded, UsageError
from forebay.formats import Corrupt, UnsupportedEncoding, osiris_chunk, osiris_file, stream_fragment
from forebay.formats import stream_manifest as manifest


def segment_of(chunks: int, first: int = 100) -> tuple[bytes, Any]:
    """Chunks and their index records, as they would stand in a segment file from byte 8 on."""
    pieces, rows, at, chunk_id = [], [], 8, first
    for number in range(chunks):
        records = [b"x" * number] * (number + 1)
        chunk = osiris_chunk.encode(records, chunk_id=chunk_id, timestamp=1000 + number, epoch=3)
        pieces.append(chunk)
        rows.append((chunk_id, 1000 + number, 3, at, 0))
        at += len(chunk)
        chunk_id += len(records)
    return b"".join(pieces), np.array(rows, osiris_file.INDEX_DTYPE)


def fragment_of(chunks: int = 4) -> bytes:
    data, index = segment_of(chunks)
    return stream_fragment.encode(
        data, index, next_offset=200, sequence=2, chunks_before=9, segment_position=8
    )


def root_of(entries: Any, **changes: Any) -> manifest.Root:
    row = {"first_offset": int(entries["offset"][0]), "next_offset": 1 << 40, "first_timestamp": 1000}
    row |= {"first_last_timestamp": 1500, "total_bytes": 123456, "entries": entries}
    return manifest.Root(**row | changes)


def test_a_fragment_is_laid_out_as_specified() -> None:
    data, _ = segment_of(4)
    size = len(data)
    fragment = fragment_of()
    assert len(fragment) == 8 + size + 8 + 20 * 4 + 54 == stream_fragment.object_bytes(size, 4)
    assert fragment[:8] == b"OSIL\0\0\0\1"
    assert fragment[8 : 8 + size] == data
    assert fragment[8 + size : 16 + size] == b"OSII\0\0\0\1"
    trailer = fragment[-54:]
    numbers = [(0, 8), (8, 8), (16, 8), (24, 8), (32, 2), (34, 4), (38, 4), (42, 4), (46, 4), (50, 4)]
    found = [int.from_bytes(trailer[at : at + length], "big") for at, length in numbers]
    assert found == [100, 200, 1000, 1003, 2, size, 9, 8, 16 + size, 80]


def test_a_fragment_from_the_middle_of_a_segment_counts_positions_from_its_own_start() -> None:
    data, index = segment_of(5)
    start = int(index["position"][2])
    part = stream_fragment.encode(
        data[start - 8 :], index[2:], next_offset=115, sequence=1, chunks_before=2, segment_position=start
    )
    decoded = stream_fragment.decode(part)
    assert decoded.chunks["position"][0] == 8
    assert decoded.trailer.segment_position == start
    for record in decoded.chunks:
        header = osiris_chunk.decode(part, int(record["position"])).header
        assert header.chunk_id == record["chunk_id"]
    assert bytes(decoded.data) == data[start - 8 :]


def test_the_tail_is_enough_for_the_trailer_and_the_last_chunk() -> None:
    fragment = fragment_of()
    tail = fragment[-stream_fragment.TAIL_BYTES :]
    trailer = stream_fragment.decode_trailer(tail, len(fragment))
    last = np.frombuffer(tail[:20], stream_fragment.INDEX_DTYPE)[0]
    assert osiris_chunk.decode(fragment, int(last["position"])).header.chunk_id == 106
    assert trailer.chunks == 4


# First and next offset, sizes and places; the numbers between them inform people and decide nothing.
@pytest.mark.parametrize("at", [0, 4, -54, -20, -8, -4, -1, -57])
def test_a_fragment_damaged_where_it_is_steered_by_is_refused(at: int) -> None:
    fragment = bytearray(fragment_of())
    fragment[at] ^= 0x41
    with pytest.raises(FormatError):
        stream_fragment.decode(fragment)


def test_fragments_of_every_length_but_their_own_are_refused() -> None:
    fragment = fragment_of()
    for cut in range(len(fragment)):
        with pytest.raises(Corrupt):
            stream_fragment.decode(fragment[:cut])
    with pytest.raises(UsageError):
        stream_fragment.encode(
            b"", segment_of(0)[1], next_offset=1, sequence=0, chunks_before=0, segment_position=8
        )


def test_the_given_examples_of_entries_and_headers() -> None:
    entry = manifest.fragment_entries([(300, 5000, 6000, True, 4096)])
    assert entry.tobytes().hex() == "000000000000012c00000000000013880000000000001770200000001000"
    children = manifest.fragment_entries([(0, 1000, 1500, False, 1), (9, 2000, 4000, False, 1)])
    assert manifest.group_entry(manifest.KILO_GROUP, children, 0x2A).tobytes().hex().endswith("80000000002a")
    root = root_of(children, next_offset=400)
    assert manifest.encode_root(root)[:49].hex().endswith("00000000000001e240")
    assert manifest.uid_text(0x2A) == "00000000002a"


def test_roots_and_groups_come_back() -> None:
    rows = [
        (7 * number, 10 * number, 10 * number + 9, number % 3 == 0, 1 + number << 30) for number in range(50)
    ]
    entries = manifest.fragment_entries(rows)
    assert manifest.sizes_of(entries).tolist() == [row[4] for row in rows]
    assert set(manifest.kinds_of(entries)) == {manifest.FRAGMENT}
    group = manifest.encode_group(manifest.GROUP, entries)
    assert len(group) == 33 + 50 * 30
    assert (manifest.decode_group(group, manifest.GROUP) == entries).all()
    uid = manifest.make_uid(group, 0x1234)
    assert uid < 1 << 46
    parent = manifest.group_entry(manifest.GROUP, entries, uid)
    assert manifest.uids_of(parent).tolist() == [uid]
    assert (parent["offset"][0], parent["first_ts"][0], parent["last_ts"][0]) == (0, 0, 499)
    root = root_of(manifest.join_entries(parent, manifest.fragment_entries([(400, 500, 501, True, 5)])))
    again = manifest.decode_root(manifest.encode_root(root))
    assert again[:5] == root[:5]
    assert (again.entries == root.entries).all()


def test_an_empty_root_has_no_entries() -> None:
    root = manifest.Root(0, 0, -1, -1, 0, manifest.fragment_entries([]))
    data = manifest.encode_root(root)
    assert len(data) == 49
    assert len(manifest.decode_root(data).entries) == 0


def test_the_uid_finds_damage_in_any_byte() -> None:
    group = bytearray(manifest.encode_group(1, manifest.fragment_entries([(0, 1, 2, True, 3)])))
    uid = manifest.make_uid(group, 1)
    manifest.check_uid(group, uid, "group")
    for at in range(len(group)):
        group[at] ^= 1
        with pytest.raises(Corrupt):
            manifest.check_uid(group, uid, "group")
        group[at] ^= 1


def test_what_no_manifest_may_hold_is_refused() -> None:
    entries = manifest.fragment_entries([(5, 1, 2, True, 3), (9, 1, 2, True, 3)])
    good = manifest.encode_root(root_of(entries))
    for at, value, error in [
        (0, 0x00, Corrupt),
        (7, 2, UnsupportedEncoding),
        (15, 6, Corrupt),  # first offset beyond the first entry
        (16, 0x80, Corrupt),  # next offset beyond every offset
        (40, 0x80, Corrupt),  # reserved bits
        (49 + 30 + 7, 5, Corrupt),  # second entry at the offset of the first
        (49 + 30 + 24, 0x40, Corrupt),  # a group behind a fragment
    ]:
        bad = bytearray(good)
        bad[at] = value
        with pytest.raises(error):
            manifest.decode_root(bad)
    for cut in range(len(good)):
        if cut not in (49, 79):
            with pytest.raises(Corrupt):
                manifest.decode_root(good[:cut])
    group = manifest.encode_group(manifest.GROUP, entries)
    with pytest.raises(Corrupt):
        manifest.decode_group(group, manifest.KILO_GROUP)
    with pytest.raises(Corrupt):
        manifest.decode_group(group[:33], manifest.GROUP)
    with pytest.raises(UsageError):
        manifest.encode_group(manifest.KILO_GROUP, entries)
    with pytest.raises(UsageError):
        manifest.group_entry(1, entries, 1 << 46)
    with pytest.raises(UsageError):
        manifest.fragment_entries([(0, 0, 0, False, 1 << 45)])
    with pytest.raises(LimitExceeded):
        manifest.encode_root(root_of(entries, total_bytes=1 << 70))


@pytest.mark.parametrize("seed", range(20))
def test_mutated_objects_never_do_worse_than_a_format_error(seed: int) -> None:
    draw = random.Random(seed)
    entries = manifest.fragment_entries([(5, 1, 2, True, 3), (9, 1, 2, True, 3)])
    root, group = manifest.encode_root(root_of(entries)), manifest.encode_group(1, entries)
    readers: list[tuple[bytes, Any]] = [
        (root, manifest.decode_root),
        (group, lambda data: manifest.decode_group(data, 1)),
        (fragment_of(), stream_fragment.decode),
    ]
    for good, read in readers:
        for _ in range(20):
            data = bytearray(good)
            for _ in range(draw.randint(1, 5)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            with contextlib.suppress(FormatError):
                read(data[: draw.randint(1, len(data))] if draw.random() < 0.3 else data)
