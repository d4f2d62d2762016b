"""OTAP, the OpenTelemetry Arrow protocol: telemetry as normalized Arrow tables, and OTLP messages.

    tables of one batch      traces: spans; their attributes; events, links, and attributes of those
                             logs: log records, their attributes
                             metrics: metrics, data points of four kinds, exemplars, attributes of all
                             all of them: attributes of resources and of scopes
    a table                  an Arrow IPC stream of its own, from batch to batch, with its dictionaries
    a row's owner            its `parent_id` is the `id` of a row of the table above

What travels on in the dataflow is OTLP (see `_parcels`), so a batch is decoded into OTLP requests when it
comes in and encoded from them when it goes out. Rejected: tables in Quiver and from there on. Every exporter
would have to know both forms, and only OTAP to OTAP would gain.
"""

from forebay.dataflow._otap._decode import decode
from forebay.dataflow._otap._encode import encode
from forebay.dataflow._otap._payloads import METHODS
from forebay.dataflow._otap._streams import PayloadStreams
from forebay.dataflow._otap.otap_pb2 import Batch, BatchStatus

__all__ = ["METHODS", "Batch", "BatchStatus", "PayloadStreams", "decode", "encode"]
