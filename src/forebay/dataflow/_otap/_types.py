"""Types of columns, as the protocol has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

import pyarrow as pa

from forebay.dataflow._otap._payloads import PayloadType
from forebay.dataflow._otap._table import Table

__all__ = [
    "BOOL",
    "DURATION",
    "F64",
    "I32",
    "I64",
    "SPAN_ID",
    "TEXT",
    "TIME",
    "TRACE_ID",
    "U8",
    "U16",
    "U32",
    "U64",
    "U64_MASK",
    "Tables",
]

U8: Final = pa.uint8()
U16: Final = pa.uint16()
U32: Final = pa.uint32()
U64: Final = pa.uint64()
I32: Final = pa.int32()
I64: Final = pa.int64()
F64: Final = pa.float64()
BOOL: Final = pa.bool_()
TEXT: Final = pa.string()
TIME: Final = pa.timestamp("ns")
DURATION: Final = pa.duration("ns")
TRACE_ID: Final = pa.binary(16)
SPAN_ID: Final = pa.binary(8)
U64_MASK: Final = (1 << 64) - 1

Tables: TypeAlias = Mapping[PayloadType, Table]
