"""Batches of the claiming queue: the draft's JSON, read strictly."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LimitExceeded, UsageError
from forebay.formats import Corrupt, ingest_batch

entries = st.lists(st.binary(max_size=50), max_size=20)


def test_a_batch_is_a_json_array_of_padded_standard_base64() -> None:
    data = ingest_batch.encode([b"<timestamp>", b"\xff\xfe\xfd", b""])
    assert json.loads(data) == ["PHRpbWVzdGFtcD4=", "//79", ""]


@given(entries)
def test_what_is_encoded_comes_back_in_order(values: list[bytes]) -> None:
    assert ingest_batch.decode(ingest_batch.encode(values)) == values


@given(entries)
def test_the_size_is_known_before_encoding(values: list[bytes]) -> None:
    assert ingest_batch.encoded_bytes(values) == len(ingest_batch.encode(values))


@given(entries)
def test_a_batch_of_another_json_writer_is_read(values: list[bytes]) -> None:
    foreign = json.dumps([base64.b64encode(value).decode() for value in values], indent=2).encode()
    assert ingest_batch.decode(foreign) == values


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[",
        b'["YWI="',
        b'["YWI="] x',
        b'["YWI"]',
        b'["YW I="]',
        b'["-_=="]',
        b"[1]",
        b"[null]",
        b'{"pending":[]}',
        b'"YWI="',
        b"null",
        b'["\xff"]',
        b"[" * 100_000,
    ],
)
def test_anything_else_is_refused_with_its_name(data: bytes) -> None:
    with pytest.raises(Corrupt, match=r"ingest/x\.json"):
        ingest_batch.decode(data, name="ingest/x.json")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        values = ingest_batch.decode(data)
    except Corrupt as error:
        assert 0 <= error.position <= len(data)
    else:
        assert ingest_batch.decode(ingest_batch.encode(values)) == values


@given(entries, st.data())
def test_a_batch_cut_short_is_never_taken_for_a_shorter_one(values: list[bytes], data: st.DataObject) -> None:
    whole = ingest_batch.encode(values)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(Corrupt):
        ingest_batch.decode(whole[:cut])


def test_the_place_of_the_damage_is_told() -> None:
    with pytest.raises(Corrupt) as caught:
        ingest_batch.decode(b'["YWI="] x')
    assert caught.value.position in (9, 10)


def test_a_batch_over_the_limit_is_not_decoded() -> None:
    with pytest.raises(LimitExceeded):
        ingest_batch.decode(b'["YWI="]', bytes_max=7)


def test_entries_must_be_bytes() -> None:
    with pytest.raises(UsageError):
        ingest_batch.encode([object()])  # type: ignore[list-item]


@pytest.mark.parametrize("entry", ["text", None, 7, True, 1.5, [b"x"], {}])
def test_json_that_is_not_bytes_is_not_written(entry: object) -> None:
    with pytest.raises(UsageError):
        ingest_batch.encode([b"x", entry])  # type: ignore[list-item]
