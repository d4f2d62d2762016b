"""Oxia by one plain call per operation, as the client of the specification makes them.

The published Python client sends every put and every get as a call of its own; the streaming write call that
our tenant uses is not open to it. This does the same with as little work as possible: messages without
checks, one channel, no deadlines, one shard. It is faster than that client, so it makes a strict baseline.
"""

from __future__ import annotations

import grpc.aio

from forebay.coordination import Record
from forebay.coordination._api import When
from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._channels import SERVICE
from forebay.kit.conditions import ABSENT, ANY, Condition

__all__ = ["UnaryOxia"]

_SHARD = 0


class UnaryOxia:
    """Gets and conditional puts, each a call."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._write = self._channel.unary_unary(
            f"/{SERVICE}/Write",
            request_serializer=pb.WriteRequest.SerializeToString,
            response_deserializer=pb.WriteResponse.FromString,
        )
        self._read = self._channel.unary_stream(
            f"/{SERVICE}/Read",
            request_serializer=pb.ReadRequest.SerializeToString,
            response_deserializer=pb.ReadResponse.FromString,
        )

    async def get(self, key: str, *, partition_key: str | None = None) -> Record | None:
        """The record of a key."""
        get = pb.GetRequest(key=key, include_value=True)
        async for response in self._read(pb.ReadRequest(shard=_SHARD, gets=[get])):
            [found] = response.gets
            return Record(key, found.value, found.version.version_id) if found.status == pb.OK else None
        return None

    async def put(self, key: str, value: bytes, when: When = ANY, *, partition_key: str | None = None) -> int:
        """Write one key; an expectation that does not hold is an error of the benchmark."""
        put = pb.PutRequest(key=key, value=value, partition_key=partition_key)
        if when is ABSENT:
            put.expected_version_id = -1
        elif not isinstance(when, Condition):
            put.expected_version_id = when
        response = await self._write(pb.WriteRequest(shard=_SHARD, puts=[put]))
        assert response.puts[0].status == pb.OK, response
        return int(response.puts[0].version.version_id)

    async def close(self) -> None:
        """Let go of the channel."""
        await self._channel.close()
