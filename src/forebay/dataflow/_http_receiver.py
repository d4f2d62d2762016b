"""OTLP over HTTP: POST to /v1/traces, /v1/metrics and /v1/logs, protobuf or JSON, plain or compressed.

An error is answered with `google.rpc.Status` in the encoding of the request, as the specification asks.

Protobuf is parsed where it arrives, in some ten milliseconds for the largest request. JSON takes a hundred
times as long, so a body of some size is decoded in a thread: one thread, because the objects that it becomes
are many times as large as the body, and under the bounds of the intake while it waits.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from forebay.dataflow._http import Answer, HttpServer, Request
from forebay.dataflow._intake import RETRY_AFTER_S, STOP_GRACE_S, Intake, Refusal
from forebay.dataflow._otlp_json import message_from_json
from forebay.dataflow._settings import Address, OtlpReceiverSettings, Tls
from forebay.dataflow._signals import SIGNALS, Signal, check_count

__all__ = ["HttpReceiver", "inflate"]

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
ASIDE_BYTES_MIN: Final = 16 * 1024
"""JSON from this size on is decoded in a thread."""
MEMBERS_MAX: Final = 1_024
"""Most gzip streams in one body, one after the other."""
_PIECE_BYTES: Final = 64 * 1024
_STATUSES: Final = {"invalid": 400, "full": 429, "unavailable": 503}
_CODES: Final = {400: 3, 404: 5, 405: 12, 413: 3, 415: 3, 429: 8, 431: 3, 503: 14}
_PATHS: Final = {signal.http_path.encode(): signal for signal in SIGNALS.values()}
_WINDOWS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class _Wrong(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message


class HttpReceiver:
    """One listener."""

    def __init__(self, settings: OtlpReceiverSettings, intake: Intake) -> None:
        assert settings.http is not None
        self._settings = settings
        self._intake = intake
        self._decoder = ThreadPoolExecutor(1, "forebay-json")
        self._server = HttpServer(
            settings.http,
            self._handle,
            body_bytes_max=settings.request_bytes_max,
            tls=_context(settings.tls) if settings.tls else None,
            refuse=_refuse,
        )

    @property
    def address(self) -> Address:
        """Where it listens; with a real port after the start."""
        return self._server.address

    async def start(self) -> None:
        """Listen."""
        await self._server.start()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Take nothing more; let what is under way end."""
        await self._server.stop(grace_s)
        self._decoder.shutdown(wait=False)

    async def _handle(self, request: Request) -> Answer:
        kind = _kind(request)
        answer_kind = JSON if kind == JSON else PROTOBUF
        try:
            await self._receive(request, kind)
        except Refusal as refusal:
            return _refuse(request, _STATUSES[refusal.reason], refusal.message)
        except _Wrong as wrong:
            allow = (("allow", "POST"),) if wrong.status == 405 else ()
            return _error(wrong.status, wrong.message, answer_kind, allow)
        return Answer(200, b"{}" if answer_kind == JSON else b"", answer_kind)

    async def _receive(self, request: Request, kind: str) -> None:
        signal = _PATHS.get(request.target.partition(b"?")[0])
        if signal is None:
            raise _Wrong(404, "there is /v1/traces, /v1/metrics and /v1/logs")
        if request.method != "POST":
            raise _Wrong(405, "use POST")
        if kind not in (PROTOBUF, JSON):
            raise _Wrong(415, f"send {PROTOBUF} or {JSON}")
        body = self._body(request)
        await self._intake.receive(signal, body, self._from_json if kind == JSON else None)

    async def _from_json(self, signal: Signal, body: bytes) -> tuple[bytes, int]:
        if len(body) < ASIDE_BYTES_MIN:
            return _request_of(signal, body)
        return await asyncio.get_running_loop().run_in_executor(self._decoder, _request_of, signal, body)

    def _body(self, request: Request) -> bytes:
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("identity", ""):
            return bytes(request.body)
        if encoding not in _WINDOWS:
            raise _Wrong(415, f"the encoding {encoding[:40]!r} is not known: gzip or deflate")
        return inflate(bytes(request.body), _WINDOWS[encoding], self._settings.request_bytes_max)


def _request_of(signal: Signal, body: bytes) -> tuple[bytes, int]:
    message = message_from_json(signal, body)
    request = message.SerializeToString()
    return request, check_count(signal, message, len(request))


def inflate(data: bytes, window: int, size_max: int) -> bytes:
    """Decompress up to `size_max` bytes; never makes more than one byte above that."""
    parts: list[bytes] = []
    left = size_max + 1
    rest = memoryview(data)
    for _ in range(MEMBERS_MAX):
        if not rest:
            break
        decoder = zlib.decompressobj(window)
        # In pieces, because the decoder copies what comes after the end of its stream.
        while not decoder.eof:
            piece = rest[:_PIECE_BYTES]
            if not piece:
                raise _Wrong(400, "the compressed body ends too early")
            try:
                part = decoder.decompress(piece, left)
            except zlib.error as error:
                raise _Wrong(400, f"the body cannot be decompressed: {error}") from error
            parts.append(part)
            left -= len(part)
            if left <= 0:
                raise _Wrong(413, f"the body has more than {size_max:,} bytes")
            rest = rest[len(piece) - len(decoder.unused_data) :]
    if rest:
        raise _Wrong(400, f"the body has more than {MEMBERS_MAX:,} compressed streams")
    return b"".join(parts)


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _refuse(request: Request, status: int, message: str) -> Answer:
    wait = (("retry-after", str(RETRY_AFTER_S)),) if status in (429, 503) else ()
    return _error(status, message, JSON if _kind(request) == JSON else PROTOBUF, wait)


def _error(status: int, message: str, kind: str, headers: tuple[tuple[str, str], ...]) -> Answer:
    if kind == JSON:
        body = json.dumps({"code": _CODES[status], "message": message}).encode()
    else:
        body = Status(code=_CODES[status], message=message).SerializeToString()
    return Answer(status, body, kind, headers)


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tls.cert_file, tls.key_file)
    if tls.client_ca_file is not None:
        context.load_verify_locations(tls.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
