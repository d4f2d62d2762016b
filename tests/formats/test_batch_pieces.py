"""Opening many batches at once says what opening each by itself says."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError
from forebay.formats import bytes_batch
from forebay.formats.batch_pieces import open_pieces
from forebay.formats.bytes_batch import _masked
from forebay.formats.bytes_batch_join import join
from forebay.formats.bytes_batch_piece import Piece, open_piece

RECORDS = st.lists(st.binary(max_size=12), min_size=1, max_size=6)


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    records = draw(RECORDS)
    count = len(records)
    columns: dict[str, Any] = {}
    if draw(st.booleans()):
        columns["timestamps_ms"] = list(range(count))
    if draw(st.integers(0, 4)) == 0:
        columns["keys"] = [None if number % 2 else b"key" for number in range(count)]
    if draw(st.integers(0, 4)) == 0:
        columns["headers"] = [[("name", b"value")]] * count
    return bytes_batch.encode(records, codec=draw(st.sampled_from(["none", "none", "zstd"])), **columns)


def told(piece: Piece) -> list[Any]:
    sections = [piece.value_lengths, piece.values, piece.key_lengths, piece.keys, piece.times, piece.frame]
    return [piece.count, *(None if each is None else bytes(each) for each in sections), piece.headers]


@given(st.lists(batches(), max_size=8))
def test_pieces_are_the_same_as_opened_one_by_one(group: list[bytes]) -> None:
    together, alone = open_pieces(group), [open_piece(data) for data in group]
    assert [told(piece) for piece in together] == [told(piece) for piece in alone]
    if group:
        assert join([(piece, 7) for piece in together]) == join([(piece, 7) for piece in alone])


@given(st.lists(batches(), min_size=1, max_size=5), st.data())
def test_a_flipped_bit_anywhere_is_told_as_by_opening_one_by_one(
    group: list[bytes], data: st.DataObject
) -> None:
    which = data.draw(st.integers(0, len(group) - 1))
    damaged = bytearray(group[which])
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError) as alone:
        open_piece(bytes(damaged))
    with pytest.raises(FormatError) as among:
        open_pieces([*group[:which], bytes(damaged), *group[which + 1 :]])
    assert str(among.value) == str(alone.value)


@given(batches(), st.integers(0, 40))
def test_a_batch_cut_short_is_refused(whole: bytes, kept: int) -> None:
    with pytest.raises(FormatError):
        open_pieces([whole[: min(kept, len(whole) - 1)]])


def forged(sound: bytes, at: int, number: int) -> bytes:
    """One number of a batch changed, under a checksum that is right."""
    changed = sound[:at] + struct.pack("<I", number) + sound[at + 4 : -4]
    return changed + struct.pack("<I", _masked(crc32c(changed)))


@pytest.mark.parametrize("wrong", [0, 2, 4, 0xFFFF_FFFF])
def test_lengths_that_do_not_add_up_under_a_right_checksum_are_refused(wrong: int) -> None:
    sound = bytes_batch.encode([b"abc", b"def"])
    with pytest.raises(FormatError, match="add up"):
        open_pieces([sound, forged(sound, 16, wrong), sound])


@pytest.mark.parametrize(("at", "wrong"), [(4, 1 << 16), (4, 0x100), (8, 0), (8, 1 << 31), (12, 3)])
def test_a_prefix_that_cannot_be_is_refused(at: int, wrong: int) -> None:
    sound = bytes_batch.encode([b"abc", b"def"])
    with pytest.raises(FormatError):
        open_pieces([sound, forged(sound, at, wrong)])
