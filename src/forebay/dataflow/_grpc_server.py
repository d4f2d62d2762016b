"""A gRPC server on one address, and how it refuses.

gRPC's own limit of calls (`maximum_concurrent_rpcs`) is not used: it refuses without a `RetryInfo`, and
clients of OTLP take RESOURCE_EXHAUSTED without one for final. The receivers count their calls themselves,
before they read from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from forebay.dataflow._intake import RETRY_AFTER_S, Refusal
from forebay.dataflow._settings import Address, Tls
from forebay.errors import Unavailable

__all__ = ["CODES", "listen", "refuse"]

CODES: Final = {
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
}
"""By the reason of a refusal."""


async def listen(
    handlers: Sequence[grpc.GenericRpcHandler],
    address: Address,
    tls: Tls | None,
    options: Sequence[tuple[str, Any]],
) -> tuple[grpc.aio.Server, Address]:
    """Start a server; return it, and where it listens. Raises `Unavailable` where the address is taken."""
    server = grpc.aio.server(options=[*options, ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(tuple(handlers))
    try:
        if tls is None:
            port = server.add_insecure_port(str(address))
        else:
            credentials = await asyncio.to_thread(_credentials, tls)
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        await server.stop(None)
        raise Unavailable(f"cannot listen on {address}", hint="is the address in use?") from error
    await server.start()
    return server, Address(address.host, port)


async def refuse(context: grpc.aio.ServicerContext[bytes, bytes], refusal: Refusal) -> None:
    """End a call; say when to try again where that may help."""
    code = CODES[refusal.reason]
    message = refusal.message.encode("ascii", "replace").decode()
    trailing: tuple[tuple[str, Any], ...] = ()
    if refusal.may_retry:
        status = Status(code=code.value[0], message=message)
        status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER_S)))
        trailing = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(code, message, trailing)


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    pair = (tls.key_file.read_bytes(), tls.cert_file.read_bytes())
    roots = tls.client_ca_file.read_bytes() if tls.client_ca_file else None
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)
