"""Messages of Arrow streams are measured before anybody reads them."""

from __future__ import annotations

import io
from contextlib import suppress

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.formats.arrow_messages import DICTIONARY, RECORDS, SCHEMA, message_facts

SIZE = 1 << 20


def stream(codec: str | None, words: int = 3) -> bytes:
    """A schema, then batches of one row; the dictionary grows by a word each time."""
    schema = pa.schema([("word", pa.dictionary(pa.uint8(), pa.string())), ("data", pa.binary())])
    out = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=codec, emit_dictionary_deltas=True)
    with pa.ipc.new_stream(out, schema, options=options) as writer:
        for number in range(words):
            values = pa.array([f"{each}" * 1_000 for each in range(number + 1)])
            column = pa.DictionaryArray.from_arrays(pa.array([number], pa.uint8()), values)
            writer.write_batch(pa.record_batch([column, pa.array([bytes(SIZE)])], schema=schema))
    return out.getvalue()


@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_sizes_are_those_before_compression(codec: str | None) -> None:
    facts = list(message_facts(stream(codec)))
    assert [each.kind for each in facts] == [SCHEMA, *[DICTIONARY, RECORDS] * 3]
    records = [each.size for each in facts if each.kind == RECORDS]
    assert all(SIZE <= each < SIZE + 1_000 for each in records)
    dictionaries = [each for each in facts if each.kind == DICTIONARY]
    assert all(1_000 <= each.size < 1_200 for each in dictionaries)
    assert [each.is_delta for each in dictionaries] == [False, True, True]
    assert len({each.dictionary for each in dictionaries}) == 1


def test_messages_without_their_schema_are_measured_too() -> None:
    """Later parts of a stream that comes in pieces."""
    whole = stream("zstd")
    reader = pa.ipc.MessageReader.open_stream(whole)
    reader.read_next_message()
    later = reader.read_next_message().serialize()
    [facts] = message_facts(bytes(later))
    assert facts.kind == DICTIONARY


@given(st.data())
def test_damaged_messages_are_measured_or_refused(data: st.DataObject) -> None:
    whole = bytearray(stream("zstd", words=2))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(ValueError, pa.ArrowException, OSError):
        assert all(each.size >= 0 for each in message_facts(bytes(whole)))


@given(st.binary(max_size=200))
def test_any_bytes_are_measured_or_refused(data: bytes) -> None:
    with suppress(ValueError, pa.ArrowException, OSError):
        list(message_facts(data))
