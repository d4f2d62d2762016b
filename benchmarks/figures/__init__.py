"""What is measured: a module per part of the house. Importing this package registers them, in this order."""

from benchmarks.figures import (  # noqa: I001 - the order of the table: promises first
    local_cas,
    embedded,
    oxia_tenant,
    log_commit,
    log_compact,
    log_append,
    buffer_contention,
    buffer_codec,
    buffer_local,
    buffer_peer,
    log_read,
    stream,
    simulation,
    local_files,
    buckets,
    batching,
    memory,
)
from benchmarks.figures._suite import suite

__all__ = [
    "batching",
    "buckets",
    "buffer_codec",
    "buffer_contention",
    "buffer_local",
    "buffer_peer",
    "embedded",
    "local_cas",
    "local_files",
    "log_append",
    "log_commit",
    "log_compact",
    "log_read",
    "memory",
    "oxia_tenant",
    "simulation",
    "stream",
    "suite",
]
