"""Batches of the stateless buffer: encoding against a plain join, decoding against a plain loop.

The join copies the same records into one object and nothing else; no encoder can be faster. The loop is what
anybody would write: read a length, slice, append.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, Figure, Variants, at_least
from benchmarks.harness.timing import variant
from forebay.formats import buffer_batch, record_block
from forebay.formats._packer import load_packer

__all__ = ["buffer_codec"]

SMALL = (1_000, 320)
LARGE = (100_000, 100)
_LENGTH = struct.Struct("<I")


def _records(count: int, size: int) -> list[bytes]:
    draw = random.Random(count)
    return [draw.randbytes(size) for _ in range(count)]


def _loop(data: bytes, count: int) -> list[bytes]:
    found, place = [], 0
    for _ in range(count):
        [length] = _LENGTH.unpack_from(data, place)
        place += 4
        found.append(data[place : place + length])
        place += length
    return found


def _once(work: Callable[[], object]) -> Callable[[], int]:
    def step() -> int:
        work()
        return 1

    return step


@suite.benchmark(
    "buffer-codec",
    "Encoding a batch costs at most two joins of its records; decoding to Arrow is far from a loop.",
    Figure("encode 1000 x 320 B against join", of="encode small", against="join small", target=at_least(0.5)),
    Figure("encode 100k x 100 B against join", of="encode large", against="join large", target=at_least(0.5)),
    Figure("without a compiled packer, 1000 x 320 B", of="plain small", against="join small"),
    Figure("without a compiled packer, 100k x 100 B", of="plain large", against="join large"),
    Figure("decode 100k x 100 B to Arrow against loop", of="decode", against="loop", target=at_least(5)),
    Figure("decode 100k x 100 B to list against loop", of="decode to list", against="loop"),
)
def buffer_codec(bench: Bench) -> Iterator[Variants]:
    """The same records on all sides. Whether the compiled packer is there is said aloud."""
    small, large = _records(*SMALL), _records(*LARGE)
    encoded = buffer_batch.encode(large)
    block = encoded[: -buffer_batch.FOOTER_BYTES]
    footer = encoded[-buffer_batch.FOOTER_BYTES :]
    bench.say("compiled packer: " + ("yes" if load_packer() else "none (install fastparquet)"))
    yield {
        "join small": variant(_once(lambda: b"".join(small)), "batches/s"),
        "encode small": variant(_once(lambda: buffer_batch.encode(small)), "batches/s"),
        "plain small": variant(
            _once(lambda: record_block._join(record_block._as_bytes(small), footer)), "batches/s"
        ),
        "join large": variant(_once(lambda: b"".join(large)), "batches/s"),
        "encode large": variant(_once(lambda: buffer_batch.encode(large)), "batches/s"),
        "plain large": variant(
            _once(lambda: record_block._join(record_block._as_bytes(large), footer)), "batches/s"
        ),
        "loop": variant(_once(lambda: _loop(block, len(large))), "batches/s"),
        "decode": variant(_once(lambda: buffer_batch.decode(encoded).to_arrow()), "batches/s"),
        "decode to list": variant(_once(lambda: list(buffer_batch.decode(encoded))), "batches/s"),
    }
