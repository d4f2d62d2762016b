"""The file format of the shared tail cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import FormatError
from forebay.formats import tail_file
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.tail_file import TailHeader


def file_of(records: list[bytes]) -> bytes:
    header = TailHeader(topic="orders", partition=3, start_offset=7, msg_count=len(records), time_ms=9)
    return tail_file.encode(header, BytesBatch.of(records))


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=20))
def test_what_goes_in_comes_out(records: list[bytes]) -> None:
    header, batch = tail_file.decode(file_of(records))
    assert batch.records() == records
    assert (header.topic, header.partition, header.start_offset, header.time_ms) == ("orders", 3, 7, 9)


GOLDEN = bytes.fromhex(
    "465443314b0000007b22746f706963223a226f7264657273222c22706172746974696f6e223a332c2273746172745f6f6666736574"
    "223a372c226d73675f636f756e74223a312c2274696d655f6d73223a397d464242310000000001000000050000000100000061b6"
    "5c89611005ab38"
)


def test_a_file_of_today_is_read_tomorrow() -> None:
    assert file_of([b"a"]) == GOLDEN
    assert tail_file.decode(GOLDEN)[1].records() == [b"a"]


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    data = file_of([b"alpha", b"beta"])
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises(FormatError):
            tail_file.decode(bytes(damaged))
        with pytest.raises(FormatError):
            tail_file.decode(data[:place])


@given(st.binary(max_size=200))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    with pytest.raises(FormatError):
        tail_file.decode(data)
    with pytest.raises(FormatError):
        tail_file.decode(b"FTC1" + data)
