"""What a file of Forebay is, and what it says of itself.

Every format but three begins with letters of its own; JSON is told apart by its fields, and the two binary
formats of the buffer, which have no letters, are tried last. Everything that carries a checksum is compared
with it: an answer means that the file is sound, or says which part is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay.errors import FormatError, UsageError

if TYPE_CHECKING:
    from forebay.formats.buffer_batch import Batch
    from forebay.formats.buffer_manifest import Manifest

__all__ = ["Found", "batch_or_manifest", "recognize"]


@dataclass(frozen=True, slots=True)
class Found:
    """What was recognized."""

    kind: str
    facts: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The parts it consists of, all with the same fields."""
    rows_name: str = "parts"

    @property
    def document(self) -> dict[str, Any]:
        """The whole as JSON."""
        rows = {self.rows_name: self.rows} if self.rows else {}
        return {"kind": self.kind, **self.facts, **rows}


def recognize(data: bytes, name: str) -> Found:
    """Raises `Corrupt` where the bytes are none of ours, or damaged; `name` is for the message."""
    for magic, look in _MAGICS.items():
        if data.startswith(magic):
            return look(data)
    if data.lstrip()[:1] in (b"{", b"["):
        return _json(data, name)
    return _buffer(data, name)


def _shared_blob(data: bytes) -> Found:
    from crc32c import crc32c

    from forebay.formats import bytes_batch, shared_blob

    header = shared_blob.decode(data)
    rows = []
    for part in header.partitions:
        body = memoryview(data)[part.body_offset : part.body_offset + part.body_length]
        problem = ""
        if part.crc32c is not None and crc32c(body) != part.crc32c:
            problem = "its checksum does not match"
        elif part.encoding == bytes_batch.ENCODING:
            try:
                records = len(bytes_batch.decode(body))
                problem = "" if records == part.msg_count else f"{records} records"
            except FormatError as error:
                problem = error.message
        rows.append(
            {
                "topic": part.topic,
                "partition": part.partition,
                "records": part.msg_count,
                "offset": part.body_offset,
                "bytes": part.body_length,
                "problem": problem,
            }
        )
    facts = {"version": header.version, "created_at_ms": header.created_at_ms, "bytes": len(data)}
    return Found("shared blob", facts, rows, "partitions")


def _batch_facts(batch: Any) -> dict[str, Any]:
    columns = [name for name in ("keys", "timestamps_ms", "headers") if getattr(batch, name) is not None]
    return {"records": len(batch), "columns": ["values", *columns]}


def _bytes_batch(data: bytes) -> Found:
    from forebay.formats import bytes_batch

    return Found("bytes batch", {**_batch_facts(bytes_batch.decode(data)), "bytes": len(data)})


def _tail_file(data: bytes) -> Found:
    import msgspec

    from forebay.formats import tail_file

    header, batch = tail_file.decode(data)
    return Found("tail cache file", {**msgspec.to_builtins(header), **_batch_facts(batch)})


def _chunks(data: bytes | memoryview, start: int, end: int | None = None) -> tuple[dict[str, Any], int]:
    """What lies in a run of chunks, each compared with its checksum, and where the last whole one ends."""
    from forebay.formats import osiris_chunk

    walk = osiris_chunk.walk(data, start, end)
    for position in walk.positions.tolist():
        osiris_chunk.decode(data, position)
    headers = walk.headers
    if not len(headers):
        return {"chunks": 0, "records": 0}, walk.end
    first, last = headers[0], headers[-1]
    facts = {
        "chunks": len(headers),
        "records": int(headers["records"].sum()),
        "first_offset": int(first["chunk_id"]),
        "next_offset": int(last["chunk_id"]) + int(last["records"]),
        "first_timestamp": int(first["timestamp"]),
        "last_timestamp": int(last["timestamp"]),
        "epochs": sorted({int(epoch) for epoch in headers["epoch"]}),
    }
    return facts, walk.end


def _segment(data: bytes) -> Found:
    """A segment of a stream, or a fragment of one, which ends with an index and a trailer."""
    from forebay.formats import osiris_file, stream_fragment

    try:
        fragment = stream_fragment.decode(data)
    except FormatError:
        osiris_file.check_segment_header(data)
        facts, end = _chunks(data, osiris_file.FILE_HEADER_BYTES)
        return Found("stream segment", {**facts, "bytes": len(data), "incomplete_bytes": len(data) - end})
    facts, _ = _chunks(fragment.data, 0)
    return Found(
        "stream fragment", {**facts, "bytes": len(data), "number_in_segment": fragment.trailer.sequence}
    )


def _index(data: bytes) -> Found:
    from forebay.formats import osiris_file

    records = osiris_file.decode_index(data)
    osiris_file.check_index(records)
    offsets = [int(records["chunk_id"][at]) for at in (0, -1)] if len(records) else [None, None]
    return Found(
        "stream index", {"chunks": len(records), "first_offset": offsets[0], "last_chunk": offsets[1]}
    )


def _entry_rows(entries: Any) -> list[dict[str, Any]]:
    from forebay.formats import stream_manifest as manifest

    names = {
        manifest.FRAGMENT: "fragment",
        manifest.GROUP: "group",
        manifest.KILO_GROUP: "kilo-group",
        manifest.MEGA_GROUP: "mega-group",
    }
    columns = zip(
        manifest.kinds_of(entries).tolist(),
        entries["offset"].tolist(),
        entries["first_ts"].tolist(),
        entries["last_ts"].tolist(),
        manifest.sizes_of(entries).tolist(),
        manifest.uids_of(entries).tolist(),
        strict=True,
    )
    return [
        {
            "kind": names[kind],
            "offset": offset,
            "first_timestamp": first,
            "last_timestamp": last,
            "bytes": size if kind == manifest.FRAGMENT else None,
            "uid": None if kind == manifest.FRAGMENT else manifest.uid_text(uid),
        }
        for kind, offset, first, last, size, uid in columns
    ]


def _root(data: bytes) -> Found:
    from forebay.formats import stream_manifest

    root = stream_manifest.decode_root(data)
    facts = {
        "first_offset": root.first_offset,
        "next_offset": root.next_offset,
        "first_timestamp": root.first_timestamp,
        "total_bytes": root.total_bytes,
    }
    return Found("stream manifest root", facts, _entry_rows(root.entries), "entries")


def _group(kind: int, name: str) -> Callable[[bytes], Found]:
    def look(data: bytes) -> Found:
        from forebay.formats import stream_manifest

        entries = stream_manifest.decode_group(data, kind)
        facts = {"count": len(entries)}
        return Found(f"stream manifest {name}", facts, _entry_rows(entries), "entries")

    return look


def _filters(data: bytes) -> Found:
    from forebay.formats import stream_filters

    found = stream_filters.decode(data)
    return Found("stream filters", {"chunks": len(found.chunks), "first_offset": found.first_offset})


def _quiver_log(kind: str) -> Callable[[bytes], Found]:
    def look(data: bytes) -> Found:
        from forebay.formats import quiver_frame

        header = quiver_frame.decode_file_header(data, data[:8])
        frames, damaged, torn = 0, 0, 0
        sequences: list[int] = []
        for each in quiver_frame.scan(data, header):
            if isinstance(each, quiver_frame.Frame):
                frames += 1
                sequences = [sequences[0] if sequences else each.sequence, each.sequence]
            elif each.is_tail:
                torn += each.length
            else:
                damaged += each.length
        facts = {"generation": header.generation, "frames": frames, "sequences": sequences}
        return Found(kind, {**facts, "damaged_bytes": damaged, "torn_bytes": torn, "bytes": len(data)})

    return look


def _checkpoint(data: bytes) -> Found:
    import msgspec

    from forebay.formats import quiver_ack

    return Found("quiver checkpoint", msgspec.to_builtins(quiver_ack.decode_checkpoint(data)))


def _arrow(data: bytes) -> Found:
    """An Arrow file; one of Quiver's has a second footer."""
    import pyarrow as pa

    from forebay.formats import quiver_segment

    try:
        meta = quiver_segment.decode_meta(memoryview(data), len(data))
    except FormatError:
        try:
            with pa.ipc.open_file(pa.py_buffer(data)) as file:
                facts = {"batches": file.num_record_batches, "schema": _columns(file.schema)}
        except pa.ArrowException as error:
            raise _damaged("Arrow file", error) from error
        return Found("Arrow file", facts)
    for part in meta.parts:
        quiver_segment.check_part(memoryview(data), part)
    facts = {
        "segment": meta.segment,
        "signal": meta.signal,
        "rows": meta.rows,
        "batches": len(meta.sources),
        "codec": meta.codec,
        "raw_bytes": meta.raw_bytes,
        "bytes": len(data),
        "ingested_ms": list(meta.ingested_ms),
        "event_ns": meta.event_ns and list(meta.event_ns),
        "schema": _columns(pa.ipc.open_file(pa.py_buffer(data)).schema),
    }
    return Found("quiver segment", facts)


def _parquet(data: bytes) -> Found:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        meta = pq.read_metadata(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise _damaged("Parquet file", error) from error
    facts = {"rows": meta.num_rows, "row_groups": meta.num_row_groups}
    return Found("Parquet file", {**facts, "schema": _columns(meta.schema.to_arrow_schema())})


def _columns(schema: Any) -> dict[str, str]:
    return {column.name: str(column.type) for column in schema}


def _damaged(what: str, error: Exception) -> FormatError:
    from forebay.formats import Corrupt

    return Corrupt(what, 0, str(error))


def _json(data: bytes, name: str) -> Found:
    from forebay.formats import ingest_batch, ingest_manifest

    if data.lstrip()[:1] == b"[":
        entries = ingest_batch.decode(data, name=name)
        return Found("ingest batch", {"records": len(entries), "bytes": sum(map(len, entries))})
    try:
        return Found("ingest manifest", {"pending": ingest_manifest.decode_producer(data, name=name).pending})
    except FormatError:
        claims = ingest_manifest.decode_consumer(data, name=name)
        return Found("ingest consumer manifest", {"claimed": claims.claimed, "done": claims.done})


def batch_or_manifest(data: bytes, name: str) -> Batch | Manifest:
    """A file of the buffer, whichever of the two the bytes are. Raises `Corrupt`."""
    from forebay.formats import Corrupt, buffer_batch, buffer_manifest

    try:
        # Batches first: three records can be the 22 bytes of a manifest without entries, while a manifest is
        # a batch only from epoch 2^32 on.
        return buffer_batch.decode(data, name=name)
    except (FormatError, UsageError) as error:
        no_batch = error
    try:
        return buffer_manifest.decode(data, name=name)
    except (FormatError, UsageError) as error:
        reason = f"neither a manifest ({error.message}) nor a batch ({no_batch.message})"
        raise Corrupt(name, 0, reason) from error


def _buffer(data: bytes, name: str) -> Found:
    from forebay.buffer import manifest_as_json
    from forebay.formats.buffer_batch import Batch

    found = batch_or_manifest(data, name)
    if isinstance(found, Batch):
        return Found("batch", {"compression": found.compression, "records": len(found), "bytes": len(data)})
    facts = manifest_as_json(found)
    rows = [
        {"sequence": entry["sequence"], "location": entry["location"], "calls": len(entry["metadata"])}
        for entry in facts.pop("entries")
    ]
    return Found("manifest", facts, rows, "entries")


_MAGICS: dict[bytes, Callable[[bytes], Found]] = {
    b"LLS1": _shared_blob,
    b"FBB1": _bytes_batch,
    b"FTC1": _tail_file,
    b"OSIL": _segment,
    b"OSII": _index,
    b"OSIR": _root,
    b"OSIG": _group(1, "group"),
    b"OSIK": _group(2, "kilo-group"),
    b"OSIM": _group(3, "mega-group"),
    b"FBFI": _filters,
    b"FBYQWAL\0": _quiver_log("quiver WAL"),
    b"FBYQACK\0": _quiver_log("quiver ack.log"),
    b"FBYQCKP\0": _checkpoint,
    b"ARROW1": _arrow,
    b"PAR1": _parquet,
}
