"""Queue manifests: the bytes of the specification, operations that copy, a decoder that trusts nothing."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.formats.opendata_vectors import vectors_folder

from forebay.errors import FormatError, LimitExceeded, UsageError
from forebay.formats import buffer_manifest
from forebay.formats.buffer_manifest import (
    EMPTY,
    CorruptManifest,
    Entry,
    Manifest,
    Metadata,
    NewEntry,
    TooLarge,
    UnsupportedVersion,
    append,
    bump_epoch,
    decode,
    dequeue,
    encode,
)

ITEMS = st.lists(
    st.builds(
        Metadata,
        st.integers(0, 2**32 - 1),
        st.integers(-(2**63), 2**63 - 1),
        st.binary(max_size=8),
    ),
    max_size=4,
).map(lambda items: tuple(sorted(items, key=lambda item: item.start_index)))
NEW = st.builds(
    NewEntry, st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), ITEMS, st.binary(max_size=9)
)


def entry_bytes(sequence: int, location: bytes = b"a", items: bytes = bytes(4), tail: bytes = b"") -> bytes:
    body = struct.pack("<QH", sequence, len(location)) + location + items + tail
    return struct.pack("<I", len(body)) + body


def item_bytes(start: int, time_ms: int = 1, payload: bytes = b"") -> bytes:
    return struct.pack("<IqI", start, time_ms, len(payload)) + payload


def manifest_bytes(
    *entries: bytes, count: int | None = None, following: int | None = None, **footer: int
) -> bytes:
    number = len(entries) if count is None else count
    last = number if following is None else following
    return b"".join(entries) + struct.pack(
        "<IQQH", number, last, footer.get("epoch", 0), footer.get("version", 1)
    )


def counted(*items: bytes, count: int | None = None) -> bytes:
    return struct.pack("<I", len(items) if count is None else count) + b"".join(items)


def example(count: int = 5, *, first: int = 0, even: bool = False) -> Manifest:
    draw = random.Random(7)
    manifest = decode(manifest_bytes(count=0, following=first, epoch=3))
    size = 4 if even else 9
    return append(
        manifest,
        [
            NewEntry(
                f"ingest/{index:06}",
                (Metadata(0, index, draw.randbytes(4 if even else draw.randrange(size))),),
            )
            for index in range(count)
        ],
    )


# -- bytes


def test_the_layout_is_the_one_in_the_specification() -> None:
    manifest = append(EMPTY, [NewEntry("ab", (Metadata(0, -1, b"xyz"),))])
    entry = struct.pack("<IQH2sIIqI3s", 35, 0, 2, b"ab", 1, 0, -1, 3, b"xyz")
    assert manifest.data == entry + struct.pack("<IQQH", 1, 1, 0, 1)
    assert EMPTY.data == bytes(20) + b"\x01\0"


def test_operations_give_the_bytes_of_the_rust_implementation() -> None:
    manifest = EMPTY
    steps = json.loads((vectors_folder() / "manifest_ops.json").read_text())
    assert len(steps) == 3
    for step in steps:
        enqueued = step["op"].get("enqueue")
        if enqueued:
            items = [Metadata(start, time, bytes.fromhex(data)) for start, time, data in enqueued["metadata"]]
            manifest = append(manifest, [NewEntry(enqueued["location"], tuple(items))])
        else:
            manifest = bump_epoch(manifest)
        assert manifest.data.hex() == step["manifest_hex"]


@given(st.lists(NEW, max_size=6), st.integers(0, 2**40), st.integers(0, 2**64 - 1))
def test_what_was_encoded_is_decoded(new: list[NewEntry], first: int, epoch: int) -> None:
    entries = [
        Entry(first + index, item.location, item.metadata, item.tail) for index, item in enumerate(new)
    ]
    # A tail that happens to begin like our own extension would have to be well-formed; see test_entry_tail.
    entries = [entry for entry in entries if not entry.tail.startswith(b"FBX1")]
    entries = [Entry(first + i, e.location, e.metadata, e.tail) for i, e in enumerate(entries)]
    data = encode(entries, next_sequence=first + len(entries), epoch=epoch)
    manifest = decode(data)
    assert list(manifest.entries) == entries
    assert (manifest.version, manifest.epoch, manifest.next_sequence) == (1, epoch, first + len(entries))
    assert manifest.first_sequence == first


@given(st.lists(NEW, max_size=6), st.lists(NEW, max_size=4), st.integers(-1, 12))
def test_operations_agree_with_encoding_from_scratch(
    new: list[NewEntry], more: list[NewEntry], through: int
) -> None:
    manifest = append(append(EMPTY, new), more)
    entries = list(manifest.entries)
    assert manifest.data == encode(entries, next_sequence=len(entries))
    kept = [entry for entry in entries if entry.sequence > through]
    shorter = dequeue(manifest, through)
    assert shorter.data == encode(kept, next_sequence=len(entries))
    assert list(shorter.entries) == kept
    assert bump_epoch(shorter).data == encode(kept, next_sequence=len(entries), epoch=1)
    assert decode(shorter.data, deep=False)._offsets == shorter._offsets


def test_bytes_that_we_do_not_know_survive_append_and_dequeue() -> None:
    strange = entry_bytes(1, tail=b"from a newer writer")
    manifest = decode(manifest_bytes(entry_bytes(0), strange))
    changed = bump_epoch(dequeue(append(manifest, [NewEntry("b")]), 0))
    assert changed.data.startswith(strange)
    assert changed.entries[0].tail == b"from a newer writer"
    assert changed.entries[0].extension() is None


def test_dequeue_of_nothing_is_the_same_manifest() -> None:
    manifest = example(3, first=10)
    assert dequeue(manifest, 9) is manifest
    emptied = dequeue(manifest, 99)
    assert (len(emptied), emptied.next_sequence, emptied.epoch) == (0, 13, 3)
    assert dequeue(emptied, 99) is emptied


def test_the_epoch_wraps_around_the_value_that_means_none() -> None:
    def after(epoch: int) -> int:
        return bump_epoch(decode(manifest_bytes(epoch=epoch))).epoch

    assert (after(0), after(2**64 - 3), after(2**64 - 2), after(2**64 - 1)) == (1, 2**64 - 2, 0, 0)


def test_metadata_of_a_record_is_the_last_item_that_starts_before_it() -> None:
    entry = Entry(0, "a", (Metadata(2, 1, b"x"), Metadata(5, 2, b"y"), Metadata(5, 3, b"z")))
    found = [entry.metadata_of(index) for index in (0, 1, 2, 4, 5, 9)]
    assert [item and item.payload for item in found] == [None, None, b"x", b"x", b"z", b"z"]


def test_entries_are_found_by_sequence() -> None:
    manifest = example(5, first=7)
    found = manifest.entry(9)
    assert found is not None and found.sequence == 9
    assert manifest.entry(6) is None and manifest.entry(12) is None
    assert [entry.sequence for entry in manifest.entries[1:3]] == [8, 9]
    assert manifest.entries[-1].sequence == 11


# -- what a writer refuses


def test_writers_refuse_what_the_format_cannot_hold() -> None:
    full = decode(manifest_bytes(following=2**64 - 1))
    cases: list[tuple[Manifest, NewEntry, type[Exception]]] = [
        (EMPTY, NewEntry(""), UsageError),
        (EMPTY, NewEntry("x" * 65_536), LimitExceeded),
        (EMPTY, NewEntry("x", (Metadata(3, 0), Metadata(2, 0))), UsageError),
        (full, NewEntry("x"), LimitExceeded),
    ]
    for manifest, entry, kind in cases:
        with pytest.raises(kind):
            append(manifest, [entry])


def test_a_manifest_is_encoded_only_from_contiguous_sequences() -> None:
    for entries, following in (([Entry(0, "a"), Entry(2, "b")], None), ([Entry(0, "a")], 5)):
        with pytest.raises(UsageError):
            encode(entries, next_sequence=following)


# -- what the decoder refuses


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "at least 22"),
        (bytes(21), "at least 22"),
        (manifest_bytes(entry_bytes(0), entry_bytes(1), count=1, following=1), "after the last of 1"),
        (manifest_bytes(entry_bytes(0), count=2), "cannot fit|are left"),
        (manifest_bytes(entry_bytes(0, b"x" * 40), count=2), "entry 1 of 2"),
        (manifest_bytes(struct.pack("<IQHI", 99, 0, 0, 0)), "99 bytes"),
        (manifest_bytes(struct.pack("<IQHI", 13, 0, 0, 0)), "13 bytes"),
        (manifest_bytes(struct.pack("<IQHI", 14, 0, 5, 0)), "location of 5 bytes"),
        (manifest_bytes(entry_bytes(0, b"\xff\xfe")), "not UTF-8"),
        (manifest_bytes(entry_bytes(0, items=counted(count=2**32 - 1)), entry_bytes(1)), "cannot fit"),
        (manifest_bytes(entry_bytes(0, items=counted(item_bytes(0), count=2)), entry_bytes(1)), "cannot fit"),
        (
            manifest_bytes(entry_bytes(0, items=counted(struct.pack("<IqI", 0, 0, 9))), entry_bytes(1)),
            "payload of 9 bytes, 0 are left",
        ),
        (
            manifest_bytes(entry_bytes(0, items=counted(item_bytes(0, 1, b"x" * 16), count=2))),
            "item 1 passes|payload",
        ),
        (manifest_bytes(entry_bytes(0), entry_bytes(2), following=2), "sequence 2, expected 1"),
        (manifest_bytes(entry_bytes(1), entry_bytes(0), following=2), "sequence 1, expected 0"),
        (manifest_bytes(entry_bytes(3), entry_bytes(3), following=5), "sequence 3, expected 4"),
        (manifest_bytes(entry_bytes(0), following=5), "sequence 0, expected 4"),
        (manifest_bytes(entry_bytes(0), following=0), "1 entries before sequence 0"),
        (
            manifest_bytes(entry_bytes(0, items=counted(item_bytes(4), item_bytes(3)))),
            "start index 3 after 4",
        ),
        (manifest_bytes(entry_bytes(0, tail=b"FBX1")), "tail of entry 0"),
        (manifest_bytes(count=2**32 - 1, following=2**40), "cannot fit"),
    ],
)
def test_malformed_manifests_are_refused_with_place_and_reason(data: bytes, reason: str) -> None:
    with pytest.raises(CorruptManifest, match=reason) as caught:
        decode(data, name="ingest/manifest")
    assert caught.value.what == "ingest/manifest" and 0 <= caught.value.position <= len(data)


def test_an_unknown_version_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersion, match="version 2, expected 1"):
        decode(manifest_bytes(version=2))


def test_a_manifest_over_the_limit_is_refused() -> None:
    with pytest.raises(TooLarge, match="manifest_bytes_max"):
        decode(example().data, manifest_bytes_max=40)


@pytest.mark.parametrize(
    "data",
    [
        manifest_bytes(),
        manifest_bytes(following=2**64 - 1, epoch=9),
        manifest_bytes(entry_bytes(0, b"")),
        manifest_bytes(entry_bytes(0, items=counted(item_bytes(5), item_bytes(5, -(2**63))))),
        manifest_bytes(entry_bytes(0, tail=b"anything")),
        manifest_bytes(entry_bytes(0, b"same"), entry_bytes(1, b"same")),
    ],
    ids=[
        "bare footer",
        "high numbers",
        "empty location",
        "equal starts, early time",
        "tail",
        "same location",
    ],
)
def test_odd_but_sound_manifests_are_accepted_and_kept(data: bytes) -> None:
    manifest = decode(data)
    assert encode(list(manifest.entries), next_sequence=manifest.next_sequence, epoch=manifest.epoch) == data


def test_a_shallow_look_leaves_damage_inside_an_entry_to_whoever_opens_it() -> None:
    data = manifest_bytes(entry_bytes(0), entry_bytes(1, b"\xff"))
    manifest = decode(data, deep=False)
    assert manifest.entries[0].location == "a"
    with pytest.raises(CorruptManifest, match="entry 1"):
        manifest.entry_at(1)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("count", [3, 200])
def test_the_chain_is_followed_however_entries_look(count: int, even: bool) -> None:
    manifest = example(count, first=4, even=even)
    assert decode(manifest.data, deep=False)._offsets == manifest._offsets
    for place in (0, 4, len(manifest.data) // 2):
        damaged = bytearray(manifest.data)
        damaged[place] ^= 0x55
        assert _verdict(bytes(damaged)) == _verdict(bytes(damaged), known=manifest)


@given(st.integers(-1, 40), st.integers(0, 6), st.data())
def test_a_known_manifest_changes_the_work_and_not_the_verdict(
    through: int, more: int, data: st.DataObject
) -> None:
    known = example(30, even=data.draw(st.booleans()))
    current = append(dequeue(known, through), [NewEntry(f"new/{index}") for index in range(more)])
    changed = bytearray(current.data)
    if data.draw(st.booleans()):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    assert _verdict(bytes(changed)) == _verdict(bytes(changed), known=known)


def _verdict(data: bytes, known: Manifest | None = None) -> Any:
    try:
        return decode(data, deep=False, known=known)._offsets
    except FormatError as error:
        return str(error)


@given(st.data())
def test_mutations_never_do_anything_but_decode_or_raise(data: st.DataObject) -> None:
    stored = bytearray(example(4).data)
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(stored)))
    for mutated in (bytes(stored), bytes(stored[cut:])):
        try:
            manifest = decode(mutated)
        except FormatError:
            continue
        entries = list(manifest.entries)
        assert encode(entries, next_sequence=manifest.next_sequence, epoch=manifest.epoch) == mutated


def test_appending_looks_at_no_entry() -> None:
    manifest = decode(manifest_bytes(entry_bytes(0, b"\xff")), deep=False)
    assert append(manifest, [NewEntry("b")]).next_sequence == 2


def test_manifests_compare_by_their_bytes() -> None:
    assert example(2) == example(2) and example(2) != example(3)
    assert "5 entries" in repr(example())
    assert buffer_manifest.encoded_entry_bytes(NewEntry("ab")) == len(entry_bytes(0, b"ab"))
