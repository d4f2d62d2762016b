"""The OTAP exporter: requests become batches of Arrow tables, and a stream per signal takes them.

A batch is there when its status says so. A stream that ends leaves those without a status in doubt; they are
sent again, through the next stream. Codes in a status mean the same as for OTLP.

**One that is too large** for the other side ends the stream, and nobody says which of several it was. To
refuse them all would cost data of others, so from then on batches go one at a time until it has shown itself.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Final

import grpc
import grpc.aio

from forebay.dataflow._grpc_exporter import TOO_LARGE, GrpcExporter
from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._otap import METHODS, Batch, BatchStatus, encode
from forebay.dataflow._parcels import Refused
from forebay.dataflow._settings import OtapExporterSettings
from forebay.dataflow._signals import Signal, parse
from forebay.errors import ForebayError, OutcomeUnknown, Unavailable

__all__ = ["OtapExporter"]

_STATUS_CODES: Final = {int(each.value[0]): each for each in grpc.StatusCode}


class OtapExporter(GrpcExporter):
    """Sends parcels to a server of OTAP."""

    def __init__(self, name: str, settings: OtapExporterSettings, metrics: DataflowMetrics) -> None:
        super().__init__(name, settings, metrics)
        self._codec = settings.payload_compression
        self._streams: dict[str, _Stream] = {}
        self._schema_ids = itertools.count()
        self._turns = {each: asyncio.Lock() for each in METHODS}
        self.careful: set[str] = set()
        """Signals of which one batch was too large, and it is not known which."""

    def open(self) -> None:
        """Streams are opened when there is something to send."""
        self._streams = {}

    async def stop(self) -> None:
        """End the streams, close the channel."""
        for stream in self._streams.values():
            await stream.close()
        await super().stop()

    async def send(self, signal: Signal, data: bytes) -> None:
        """Send one request; return when all of its batches are there."""
        # Encoding takes a while, and receivers should not wait for it.
        batches = await asyncio.to_thread(self._encode, signal, data)
        for batch in batches:
            if signal.name in self.careful:
                async with self._turns[signal.name]:
                    await self._stream(signal).send(batch)
            else:
                await self._stream(signal).send(batch)

    def _stream(self, signal: Signal) -> _Stream:
        stream = self._streams.get(signal.name)
        if stream is None or stream.is_over:
            stream = self._streams[signal.name] = _Stream(self, signal)
        return stream

    def _encode(self, signal: Signal, data: bytes) -> list[Batch]:
        schema_id = str(next(self._schema_ids))
        return list(encode(signal.name, parse(signal, data), self._codec, schema_id))


class _Stream:
    """One gRPC stream: batches go out, statuses come back in any order."""

    def __init__(self, exporter: OtapExporter, signal: Signal) -> None:
        self.is_over = False
        """Whether it takes no more batches."""
        self._exporter = exporter
        self._signal = signal
        service, method = METHODS[signal.name]
        self._call: Any = exporter.channel.stream_stream(f"/{service}/{method}")(
            metadata=exporter.settings.headers or None, compression=exporter.compression
        )
        self._waiting: dict[int, asyncio.Future[BatchStatus]] = {}
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    async def send(self, batch: Batch) -> None:
        """Send a batch and wait for its status."""
        timeout_s = self._exporter.settings.timeout_ms / 1000
        batch.batch_id = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                async with self._turn:
                    # Until there is a connection, nothing can have arrived.
                    await self._call.wait_for_connection()
                    self._waiting[batch.batch_id] = answer
                    await self._call.write(batch.SerializeToString())
                status = await answer
        except TimeoutError:
            # A stream that is stuck stays so; the next batch begins a new one.
            was_sent = batch.batch_id in self._waiting
            await self.close()
            raise self._cut_short(was_sent, f"no status in {timeout_s:g} s") from None
        except asyncio.CancelledError:
            # gRPC tells it to everybody in a call that was cancelled, and the task that hears it would end.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._cut_short(batch.batch_id in self._waiting, "the stream was given up") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise await self._lost(error, was_sent=batch.batch_id in self._waiting) from None
        finally:
            self._waiting.pop(batch.batch_id, None)
        if status.status_code:
            code = _STATUS_CODES.get(status.status_code, grpc.StatusCode.UNKNOWN)
            raise self._exporter.failure(self._signal, code, status.status_message)

    async def close(self) -> None:
        """End; those who wait for a status do not get one."""
        self.is_over = True
        self._call.cancel()
        self._reader.cancel()
        await asyncio.wait({self._reader})

    async def _read(self) -> None:
        problem: ForebayError | None = None
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                status = BatchStatus.FromString(data)
                answer = self._waiting.pop(status.batch_id, None)
                if answer is not None and not answer.done():
                    answer.set_result(status)
        except Exception as error:
            problem = await self._lost(error, was_sent=True)
        finally:
            self.is_over = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(problem or self._doubt("the stream ended"))

    async def _lost(self, error: Exception, *, was_sent: bool) -> ForebayError:
        self.is_over = True
        if isinstance(error, grpc.aio.AioRpcError):
            code, details = error.code(), error.details() or ""
        elif self._call.done():
            code, details = await self._call.code(), await self._call.details() or ""
        else:
            return self._doubt(str(error))
        failure = self._exporter.failure(self._signal, code, details)
        if not was_sent:
            return failure
        if isinstance(failure, Refused) and any(each in details for each in TOO_LARGE):
            if len(self._waiting) == 1:
                self._exporter.careful.discard(self._signal.name)
                return failure
            self._exporter.careful.add(self._signal.name)
        return self._doubt(failure.message)

    def _cut_short(self, was_sent: bool, reason: str) -> ForebayError:
        return (
            self._doubt(reason) if was_sent else Unavailable(f"{reason}; not sent", hint="it is tried again")
        )

    def _doubt(self, reason: str) -> OutcomeUnknown:
        return OutcomeUnknown(f"export of {self._signal.name}", reason=reason, hint="it is tried again")
