from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LimitExceeded, UsageError
from forebay.formats import Corrupt, UnsupportedEncoding, quiver_ack, quiver_wal
from forebay.formats.quiver_ack import Checkpoint, Dropped, Finalized, Floor, Outcome, Register
from forebay.formats.quiver_frame import (
    ACK_MAGIC,
    FILE_HEADER_BYTES,
    WAL_MAGIC,
    Damage,
    FileHeader,
    Frame,
    decode_file_header,
    encode_file_header,
    encode_frame,
    scan,
)

HEADER = FileHeader(WAL_MAGIC, 7, 100)


def log(bodies: list[bytes], *, generation: int = 7, first: int = 100) -> tuple[bytes, list[int]]:
    """A file with these bodies, and where each frame begins."""
    data, starts = encode_file_header(HEADER), []
    for number, body in enumerate(bodies):
        before, behind = encode_frame(1, generation, first + number, 5_000 + number, len(body), [body])
        starts.append(len(data))
        data += before + body + behind
    return data, starts


def frames(data: bytes) -> list[Frame]:
    return [each for each in scan(data, HEADER) if isinstance(each, Frame)]


def damages(data: bytes) -> list[Damage]:
    return [each for each in scan(data, HEADER) if isinstance(each, Damage)]


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_frames_come_back_as_they_were_written(bodies: list[bytes]) -> None:
    data, starts = log(bodies)
    found = list(scan(data, decode_file_header(data, WAL_MAGIC)))
    assert [bytes(each.body) for each in found if isinstance(each, Frame)] == bodies
    assert [each.offset for each in found] == starts
    assert [each.sequence for each in found if isinstance(each, Frame)] == list(range(100, 100 + len(bodies)))


@pytest.mark.parametrize("victim", range(10))
def test_flipped_bit_costs_the_frame_it_lies_in_and_no_other(victim: int) -> None:
    bodies = [bytes([65 + number]) * (30 + number) for number in range(10)]
    data, starts = log(bodies)
    ends = [*starts[1:], len(data)]
    for position in range(starts[victim], ends[victim]):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        found = frames(bytes(damaged))
        survivors = [body for number, body in enumerate(bodies) if number != victim]
        # Flags and reserved bytes are under the checksum as well, so every position counts.
        assert [bytes(each.body) for each in found] == survivors
        [bad] = damages(bytes(damaged))
        assert (bad.offset, bad.length) == (starts[victim], ends[victim] - starts[victim])
        assert bad.is_tail == (victim == 9)


def test_every_cut_is_a_torn_tail_behind_the_whole_frames() -> None:
    data, starts = log([b"alpha", b"beta", b"gamma"])
    for cut in range(FILE_HEADER_BYTES, len(data)):
        whole = sum(end <= cut for end in [*starts[1:], len(data)])
        assert len(frames(data[:cut])) == whole
        assert all(each.is_tail for each in damages(data[:cut]))


def test_zeros_are_no_frames() -> None:
    data, _ = log([b"one"])
    assert len(frames(data + bytes(8192))) == 1
    assert damages(data + bytes(8192)) == [Damage(len(data), 8192, is_tail=True)]


def test_frame_of_another_generation_or_with_a_lower_sequence_is_stale() -> None:
    data, _ = log([b"one", b"two"])
    stale, _ = log([b"old"], generation=6, first=500)
    lower, _ = log([b"low"], first=100)
    assert len(frames(data + stale[FILE_HEADER_BYTES:])) == 2
    assert len(frames(data + lower[FILE_HEADER_BYTES:])) == 2


def test_bytes_of_an_earlier_life_are_neither_torn_nor_damaged() -> None:
    old, new = FileHeader(WAL_MAGIC, 3, 1), FileHeader(WAL_MAGIC, 9, 40, is_reused=True)

    def joined(generation: int, numbers: range, body: bytes) -> bytes:
        pairs = [encode_frame(1, generation, number, 0, len(body), [body]) for number in numbers]
        return b"".join(before + body + behind for before, behind in pairs)

    stale, frames = joined(3, range(1, 30), bytes(100)), joined(9, range(40, 43), b"new")
    data = bytearray(encode_file_header(old) + stale)
    data[: len(encode_file_header(new))] = encode_file_header(new)
    data[FILE_HEADER_BYTES : FILE_HEADER_BYTES + len(frames)] = frames
    assert decode_file_header(bytes(data), WAL_MAGIC) == new
    found = list(scan(bytes(data), new))
    assert [each.sequence for each in found if isinstance(each, Frame)] == [40, 41, 42]
    assert len(found) == 3
    # A header of this life without its body is a write that was cut short.
    end = FILE_HEADER_BYTES + len(frames)
    data[end : end + 40] = encode_frame(1, 9, 43, 0, 60, [bytes(60)])[0]
    assert list(scan(bytes(data), new))[3:] == [Damage(end, 104, is_tail=True)]


def test_frame_inside_a_payload_does_not_fool_the_scanner() -> None:
    inner, _ = log([b"inner"], first=50)
    data, starts = log([b"first", inner[FILE_HEADER_BYTES:], b"last"])
    damaged = bytearray(data)
    damaged[starts[1] + 8] ^= 0xFF
    assert [bytes(each.body) for each in frames(bytes(damaged))] == [b"first", b"last"]


@given(st.integers(0, 2**32))
def test_scan_of_scrambled_logs_never_fails_and_never_invents(seed: int) -> None:
    rng = random.Random(seed)
    bodies = [rng.randbytes(rng.randrange(60)) for _ in range(8)]
    data = bytearray(log(bodies)[0])
    for _ in range(rng.randrange(1, 10)):
        at = rng.randrange(FILE_HEADER_BYTES, len(data))
        match rng.randrange(3):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randrange(50)]
            case _:
                data[at:at] = rng.randbytes(rng.randrange(50))
        if len(data) <= FILE_HEADER_BYTES:
            break
    position = FILE_HEADER_BYTES
    for each in scan(bytes(data), HEADER):
        assert each.offset == position
        position = each.end if isinstance(each, Frame) else each.offset + each.length
        assert not isinstance(each, Frame) or bytes(each.body) in bodies
    assert position == max(len(data), FILE_HEADER_BYTES)


def test_damaged_or_foreign_file_headers_are_refused() -> None:
    data = encode_file_header(HEADER)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 4
        with pytest.raises(Corrupt):
            decode_file_header(bytes(damaged), WAL_MAGIC)
    with pytest.raises(Corrupt):
        decode_file_header(data, ACK_MAGIC)
    with pytest.raises(Corrupt):
        decode_file_header(data[:-1], WAL_MAGIC)


def test_body_over_the_limit_is_refused_by_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.formats.quiver_frame.BODY_BYTES_MAX", 10)
    with pytest.raises(LimitExceeded):
        encode_frame(1, 1, 1, 0, 11, [b"x" * 11])


BATCH = pa.record_batch(
    {"n": pa.array([1, 2, None]), "word": pa.array(["a", "b", "a"]).dictionary_encode()},
    schema=pa.schema(
        [("n", pa.int64()), ("word", pa.dictionary(pa.int32(), pa.string()))], metadata={"k": "v"}
    ),
)


@pytest.mark.parametrize("codec", quiver_wal.CODECS)
def test_wal_entry_keeps_batch_schema_dictionaries_and_context(codec: str) -> None:
    body = quiver_wal.encode(BATCH, "logs", {"tenant": "a"}, codec)
    entry = quiver_wal.decode(body)
    assert entry.batch.equals(BATCH, check_metadata=True)
    assert entry.batch.schema.equals(BATCH.schema, check_metadata=True)
    assert (entry.signal, entry.context) == ("logs", {"tenant": "a"})
    assert entry.fingerprint == quiver_wal.fingerprint(BATCH.schema)


@pytest.mark.parametrize("rows", [slice(0, 0), slice(0, 3), slice(1, 2)])
def test_wal_entry_of_plain_columns_is_the_stream_that_arrow_writes(rows: slice) -> None:
    plain = pa.record_batch({"a": [None, [1, 2], []], "b": ["x", None, "z"]})
    part = plain.slice(rows.start, rows.stop - rows.start)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, part.schema) as writer:
        writer.write_batch(part)
    assert quiver_wal.encode(part, "logs").endswith(sink.getvalue().to_pybytes())


def test_wal_entry_of_a_slice_holds_only_the_slice() -> None:
    long = pa.record_batch({"n": pa.array(range(100_000))})
    body = quiver_wal.encode(long.slice(10, 5), "logs")
    assert len(body) < 2_000
    assert quiver_wal.decode(body).batch.column(0).to_pylist() == [10, 11, 12, 13, 14]


@given(st.integers(0, 2**32))
def test_scrambled_wal_entries_are_refused_or_read(seed: int) -> None:
    rng = random.Random(seed)
    body = bytearray(quiver_wal.encode(BATCH, "logs", {"tenant": "a"}))
    for _ in range(rng.randrange(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    cut = bytes(body[: rng.randrange(len(body) + 1)])
    try:
        entry = quiver_wal.decode(cut)
    except Corrupt:
        return
    assert entry.batch.num_rows == BATCH.num_rows


def test_wal_entry_limits_hold_at_the_writer() -> None:
    with pytest.raises(LimitExceeded):
        quiver_wal.encode(BATCH, "s" * 65)
    with pytest.raises(LimitExceeded):
        quiver_wal.encode(BATCH, "s", {"k": "v" * 20_000})


RECORDS = [
    Outcome("a", 3, 9, "ack"),
    Outcome("a.b-c_d", 3, 3, "dropped", "lost", 4),
    Register("x" * 64, 0),
    quiver_ack.Unregister("x"),
    Finalized(4, [(1, 3), (5, 5)]),
    Dropped(9, "size", 100, 2**40),
    quiver_ack.WalDropped(1, 2, "expired"),
    Floor(2**50, 2**60),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_ack_records_come_back_as_they_were_written(record: quiver_ack.Record) -> None:
    assert quiver_ack.decode(quiver_ack.encode(record)) == record


@pytest.mark.parametrize(
    "record",
    [
        Outcome("a", 3, 2, "ack"),
        Outcome("", 3, 3, "ack"),
        Outcome("a", 3, 3, "done"),  # type: ignore[arg-type]
        Register("a/b", 0),
        Finalized(4, [(5, 6), (6, 8)]),
    ],
)
def test_ack_records_that_make_no_sense_are_refused(record: quiver_ack.Record) -> None:
    with pytest.raises(Corrupt):
        quiver_ack.decode(quiver_ack.encode(record))


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_a_record_or_corrupt(data: bytes) -> None:
    try:
        quiver_ack.decode(data)
    except Corrupt:
        return


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65, "é"])
def test_subscriber_names_are_strict(name: str) -> None:
    with pytest.raises(UsageError):
        quiver_ack.check_subscriber(name)


CHECKPOINT = Checkpoint(
    generation=4,
    next_segment=12,
    next_entry=300,
    live=[(3, 4), (9, 11)],
    covered=[(0, 250), (260, 270)],
    subscribers={"a": quiver_ack.SubscriberState(3, [(9, 9)], {"size": 2})},
    losses={"segments.size": 2},
)


def test_checkpoint_comes_back_and_every_flipped_bit_is_seen() -> None:
    data = quiver_ack.encode_checkpoint(CHECKPOINT)
    assert quiver_ack.decode_checkpoint(data) == CHECKPOINT
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(Corrupt):
            quiver_ack.decode_checkpoint(bytes(damaged))
        with pytest.raises(Corrupt):
            quiver_ack.decode_checkpoint(data[:position])


def test_checkpoint_of_a_later_version_says_so() -> None:
    from crc32c import crc32c

    data = bytearray(quiver_ack.encode_checkpoint(CHECKPOINT))
    data[8] = 2
    data[16:20] = crc32c(bytes(data[:16])).to_bytes(4, "little")
    with pytest.raises(UnsupportedEncoding):
        quiver_ack.decode_checkpoint(bytes(data))
