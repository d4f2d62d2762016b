"""Connections: one gRPC channel per server, and the calls of Oxia's service on it.

The calls are made by name instead of through generated stubs, so that a write request can be handed over as
bytes: a request that carries many callers' operations is the concatenation of their encodings.

Every channel has its own connection (no pool shared with others in the process), comes back quickly after a
restart, notices a peer that stopped answering, and takes any message a server may send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.errors import Closed

__all__ = ["Channels", "Service", "closed_meanwhile", "finish"]

SERVICE = "io.streamnative.oxia.proto.OxiaClient"
"""The old name, served by all versions; 0.14 does not know the new one."""
RECEIVE_BYTES_MAX = 256 * 1024 * 1024
"""Largest message taken. Scans come in messages of 2 MiB or one value, notifications as large as a write."""

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    # Short waits between attempts to connect. "min" is no wait: it is the time one attempt may take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A peer that is silent for 12 seconds is gone. Servers punish pings more often than every 5 seconds.
    ("grpc.keepalive_time_ms", 7_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # Retries are ours, because only we know which calls may be repeated.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]


class Service:
    """The calls of one server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.assignments = channel.unary_stream(
            f"/{SERVICE}/GetShardAssignments",
            request_serializer=pb.AssignmentsRequest.SerializeToString,
            response_deserializer=pb.Assignments.FromString,
        )
        self.write_stream = channel.stream_stream(
            f"/{SERVICE}/WriteStream",
            request_serializer=_as_is,
            response_deserializer=pb.WriteResponse.FromString,
        )
        self.read = channel.unary_stream(
            f"/{SERVICE}/Read",
            request_serializer=pb.ReadRequest.SerializeToString,
            response_deserializer=pb.ReadResponse.FromString,
        )
        self.list = channel.unary_stream(
            f"/{SERVICE}/List",
            request_serializer=pb.RangeRequest.SerializeToString,
            response_deserializer=pb.ListResponse.FromString,
        )
        self.range_scan = channel.unary_stream(
            f"/{SERVICE}/RangeScan",
            request_serializer=pb.RangeRequest.SerializeToString,
            response_deserializer=pb.RangeScanResponse.FromString,
        )
        self.notifications = channel.unary_stream(
            f"/{SERVICE}/GetNotifications",
            request_serializer=pb.NotificationsRequest.SerializeToString,
            response_deserializer=pb.NotificationBatch.FromString,
        )
        self.create_session = channel.unary_unary(
            f"/{SERVICE}/CreateSession",
            request_serializer=pb.CreateSessionRequest.SerializeToString,
            response_deserializer=pb.CreateSessionResponse.FromString,
        )
        self.keep_alive = channel.unary_unary(
            f"/{SERVICE}/KeepAlive",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionResponse.FromString,
        )
        self.close_session = channel.unary_unary(
            f"/{SERVICE}/CloseSession",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionResponse.FromString,
        )


class Channels:
    """The servers talked to so far. Connections are made at the first call."""

    def __init__(self, tls: bool) -> None:
        self._tls = tls
        self._channels: dict[str, tuple[grpc.aio.Channel, Service]] = {}
        self.closed = False

    def at(self, address: str) -> Service:
        """The service at an address."""
        if self.closed:
            raise closed_meanwhile()
        known = self._channels.get(address)
        if known is None:
            channel = self._open(address)
            known = self._channels[address] = channel, Service(channel)
        return known[1]

    async def connect(self, address: str, failed: Callable[[], None]) -> None:
        """Return when there is a connection. `failed` hears of every attempt that did not make one."""
        self.at(address)
        channel, _ = self._channels[address]
        while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                failed()
            await channel.wait_for_state_change(state)

    async def close(self) -> None:
        """Let go of all connections. Calls under way end with an error."""
        self.closed = True
        while self._channels:
            _, (channel, _) = self._channels.popitem()
            await channel.close()

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._tls:
            return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(), options=_OPTIONS)
        return grpc.aio.insecure_channel(address, options=_OPTIONS)


def closed_meanwhile() -> Closed:
    """The error of a call that was under way at the time of the close."""
    return Closed("the coordinator was closed meanwhile", hint="open a new one")


async def finish(call: grpc.aio.Call) -> None:
    """End a call that may still run, and wait until gRPC has let go of it."""
    call.cancel()
    await call.code()


def _as_is(data: bytes) -> bytes:
    return data
