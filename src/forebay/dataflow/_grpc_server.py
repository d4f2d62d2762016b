"""A gRPC server on one address."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from forebay.dataflow._settings import Address, Tls
from forebay.errors import Unavailable

__all__ = ["listen"]


async def listen(
    handlers: Sequence[grpc.GenericRpcHandler],
    address: Address,
    tls: Tls | None,
    options: Sequence[tuple[str, Any]],
    calls_max: int,
) -> tuple[grpc.aio.Server, Address]:
    """Start a server; return it, and where it listens. Raises `Unavailable` where the address is taken."""
    server = grpc.aio.server(options=[*options, ("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=calls_max)
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


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    pair = (tls.key_file.read_bytes(), tls.cert_file.read_bytes())
    roots = tls.client_ca_file.read_bytes() if tls.client_ca_file else None
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)
