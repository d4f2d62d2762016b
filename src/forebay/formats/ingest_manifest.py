"""The two manifests of the claiming queue, JSON both.

    producer manifest   {"pending": ["ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.json", ...]}

    consumer manifest   {"claimed": {"ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.json": 1719400000000, ...},
                         "done":    ["ingest/01J5T4RBYW52MKD8FR0JAN7G9C.json", ...]}

`pending` is in the order of ingestion and grows at its end. A value of `claimed` is the last heartbeat of
the claim in milliseconds since the Unix epoch; the order of its keys means nothing. `done` holds what was
processed and not yet removed from both.

Keys that we do not know are ignored, and are gone after our next write: the draft's own programs do the same,
so nothing may depend on them. A key that the draft names must be there. An object of zero bytes is damaged,
not empty.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from forebay.errors import LimitExceeded
from forebay.formats._errors import Corrupt
from forebay.formats.ingest_batch import json_problem

__all__ = [
    "CLAIM_MS_MAX",
    "MANIFEST_BYTES_MAX",
    "ConsumerManifest",
    "ProducerManifest",
    "consumer_name",
    "decode_consumer",
    "decode_producer",
    "encode",
]

MANIFEST_BYTES_MAX: Final = 1 << 30
"""Largest manifest that is decoded."""
CLAIM_MS_MAX: Final = (1 << 62) - 1
"""Highest heartbeat. Above it there would be no room for the next one in a signed 64-bit number."""

_ClaimMs = Annotated[int, msgspec.Meta(ge=0, le=CLAIM_MS_MAX)]


class ProducerManifest(msgspec.Struct, frozen=True):
    """What waits, in order."""

    pending: list[str]
    """Locations. One may come twice: a writer of other origin repeated itself."""


class ConsumerManifest(msgspec.Struct, frozen=True):
    """Who is at work on what, and what is finished."""

    claimed: dict[str, _ClaimMs]
    """Last heartbeat by location, in milliseconds since the Unix epoch."""
    done: list[str]
    """Processed locations that were not cleaned up yet."""


M = TypeVar("M", ProducerManifest, ConsumerManifest)

encode = msgspec.json.Encoder().encode
"""The bytes of either manifest."""
_producer = msgspec.json.Decoder(ProducerManifest)
_consumer = msgspec.json.Decoder(ConsumerManifest)


def decode_producer(data: bytes, *, name: str = "producer manifest") -> ProducerManifest:
    """The producer manifest. Raises `Corrupt` or `LimitExceeded`; `name` says of which object."""
    return _decode(_producer, data, name)


def decode_consumer(data: bytes, *, name: str = "consumer manifest") -> ConsumerManifest:
    """The consumer manifest. Raises `Corrupt` or `LimitExceeded`; `name` says of which object."""
    return _decode(_consumer, data, name)


def _decode(decoder: msgspec.json.Decoder[M], data: bytes, name: str) -> M:
    if len(data) > MANIFEST_BYTES_MAX:
        raise LimitExceeded("MANIFEST_BYTES_MAX", limit=MANIFEST_BYTES_MAX, actual=len(data), hint=name)
    if not data:
        raise Corrupt(name, 0, "it has no bytes; an empty manifest is written as JSON too")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise json_problem(name, error) from error


def consumer_name(manifest_path: str) -> str:
    """Where the consumer manifest lies: `consumer` before the extension, or at the end where there is none.

    Only the last part of the path has an extension: `v1.2/manifest` becomes `v1.2/manifest.consumer`.
    """
    head, slash, name = manifest_path.rpartition("/")
    stem, dot, extension = name.rpartition(".")
    derived = f"{stem}.consumer.{extension}" if dot and stem else f"{name}.consumer"
    return f"{head}{slash}{derived}"
