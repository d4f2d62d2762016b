"""An S3 server inside the test process that fails on demand.

No real server can be asked to commit a write and then lose the reply, and that is the failure that matters
most: the client sends again, is told that its condition does not hold, and the one who made it untrue was the
client itself. This server does it when told to, once, several times, or at random from a seed.

    with S3FaultServer() as s3:
        store = open_store(s3.url("prefix"))
        s3.fail_next("PUT", answer(500, after=True))     # commits, then answers 500
        s3.fail_next("PUT", drop())                      # closes the connection, nothing was done
        s3.fail_next("PUT", overwritten(b"theirs"))      # commits, another writer follows, the reply is lost
        s3.fail_next("GET", truncated(10))               # ten bytes of the body, then the connection is cut

Faults are looked at one request at a time, in the order they were given, so a client that retries by itself
meets the next one with its next try. Requests are counted by kind in `requests`.

It speaks the part of S3 in `_servers/s3_objects.py`. Of the credentials only the access key is checked, and
nothing is durable: it is a fault injector, and SeaweedFS (`forebay.testing.servers`) is the S3 server.
"""

from __future__ import annotations

import collections
import contextlib
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self, TypeAlias
from urllib.parse import quote, urlencode

from forebay.errors import LimitExceeded, UsageError
from forebay.kit.clock import Clock, SystemClock
from forebay.testing._servers.s3_objects import Request, Response, S3Objects, refusal

__all__ = ["ANY_KIND", "Fault", "S3FaultServer", "answer", "drop", "overwritten", "slow", "truncated"]

ANY_KIND = "*"
KINDS = frozenset({"GET", "HEAD", "PUT", "DELETE", "LIST", "BULK_DELETE", "BUCKET", "OTHER", ANY_KIND})
BODY_BYTES_MAX = 256 * 1024 * 1024
CODES = {400: "BadRequest", 403: "AccessDenied", 404: "NoSuchKey", 409: "ConditionalRequestConflict"}
CODES |= {412: "PreconditionFailed", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}

Overwrite: TypeAlias = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one request. The functions of this module make the usual ones."""

    effect: bool = True
    """Whether the request is carried out at all. If it is not, nothing was stored or deleted."""
    status: int | None = None
    """Answer with this status instead of the true one."""
    cut_after_bytes: int | None = None
    """Reset the connection after so many bytes of the answer's body; -1: before the first byte of it all."""
    overwrite: Overwrite | None = None
    """After a PUT took effect: what another writer makes of the body, as a write of its own."""
    delay_ms: int = 0
    """Milliseconds between the effect and the answer."""


def answer(status: int, *, after: bool = False, delay_ms: int = 0) -> Fault:
    """Answer with an error; `after`: although the request was carried out."""
    return Fault(effect=after, status=status, delay_ms=delay_ms)


def drop(*, after: bool = False) -> Fault:
    """Reset the connection without an answer; `after`: although the request was carried out."""
    return Fault(effect=after, cut_after_bytes=-1)


def overwritten(by: bytes | Overwrite, *, status: int | None = None) -> Fault:
    """Carry the PUT out, let another writer replace it, and lose the reply (or answer `status`)."""
    overwrite = by if callable(by) else lambda _: by
    return Fault(overwrite=overwrite, status=status, cut_after_bytes=-1 if status is None else None)


def slow(delay_ms: int) -> Fault:
    """Carry it out and answer truly, but late."""
    return Fault(delay_ms=delay_ms)


def truncated(body_bytes: int) -> Fault:
    """Answer truly, but cut the connection inside the body."""
    return Fault(cut_after_bytes=body_bytes)


@dataclass(slots=True)
class _Scripted:
    kind: str
    key: str | None
    fault: Fault
    left: int


class S3FaultServer:
    """The server: a context manager with one bucket, in threads of its own, on a free loopback port."""

    def __init__(
        self, *, bucket: str = "forebay", clock: Clock | None = None, randomness: random.Random | None = None
    ) -> None:
        self.bucket = bucket
        self.access_key = "forebay"
        self.secret_key = "forebay-secret"
        self.requests: collections.Counter[str] = collections.Counter()
        """Requests that arrived, by kind: GET, HEAD, PUT, DELETE, LIST, BULK_DELETE, BUCKET, OTHER."""
        self.faults_met = 0
        """How many requests met a fault."""
        self._state = S3Objects(bucket, clock or SystemClock())
        self._lock = threading.Lock()
        self._script: list[_Scripted] = []
        self._random = randomness or random.Random(0)
        self._rate = 0.0
        self._random_faults: Sequence[tuple[str, Fault]] = ()
        self._server = _HttpServer(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        """The loopback port."""
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        """What S3 clients call the endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def url(self, prefix: str = "") -> str:
        """What `open_store` takes, credentials included."""
        options = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
        }
        return f"s3://{self.bucket}/{quote(prefix)}?{urlencode(options)}"

    def fail_next(self, method: str, fault: Fault, *, key: str | None = None, times: int = 1) -> None:
        """The next `times` requests of this kind (`"*"`: of any), to `key` if given, meet the fault."""
        if method not in KINDS:
            raise UsageError(
                f"{method!r} is no kind of request", hint=f"use one of {', '.join(sorted(KINDS))}"
            )
        with self._lock:
            self._script.append(_Scripted(method, key, fault, times))

    def fail_randomly(self, rate: float, faults: Sequence[tuple[str, Fault]]) -> None:
        """From now on each request meets, with this probability, one of the faults for its kind."""
        with self._lock:
            self._rate, self._random_faults = rate, list(faults)

    def heal(self) -> None:
        """Forget every fault that was asked for."""
        with self._lock:
            self._script.clear()
            self._rate = 0.0

    def put(self, key: str, data: bytes) -> None:
        """Store an object as another writer would."""
        with self._lock:
            self._state.put(key, data)

    def get(self, key: str) -> bytes | None:
        """What is stored under the key, or None."""
        with self._lock:
            stored = self._state.objects.get(key)
            return None if stored is None else stored.data

    def metadata(self, key: str) -> dict[str, str]:
        """The user metadata (`x-amz-meta-...`) of an object that is there."""
        with self._lock:
            return dict(self._state.objects[key].metadata)

    def keys(self) -> list[str]:
        """All keys, in byte order."""
        with self._lock:
            return sorted(self._state.objects, key=str.encode)

    def close(self) -> None:
        """End every connection and thread."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.close_connections()
        self._server.server_close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def handle(self, request: Request) -> tuple[Response, Fault | None]:
        """Carry out one request as its fault allows. Called by the connection threads."""
        with self._lock:
            self.requests[request.kind] += 1
            if not self._is_allowed(request):
                return refusal(403, "InvalidAccessKeyId", "unknown access key"), None
            fault = self._take(request)
            if fault is None:
                return self._state.answer(request), None
            self.faults_met += 1
            response = self._state.answer(request) if fault.effect else refusal(500, "InternalError", "")
            if fault.overwrite is not None and request.kind == "PUT" and response.status == 200:
                self._state.put(request.key, fault.overwrite(request.body))
            if fault.status is not None:
                response = refusal(fault.status, CODES.get(fault.status, "Error"), "as the test asked")
            return response, fault

    def _is_allowed(self, request: Request) -> bool:
        given = re.search(r"Credential=([^/]+)/", request.headers.get("authorization", ""))
        key = given.group(1) if given else request.query.get("X-Amz-Credential", "").partition("/")[0]
        return key == self.access_key

    def _take(self, request: Request) -> Fault | None:
        for scripted in self._script:
            if scripted.kind in (request.kind, ANY_KIND) and scripted.key in (request.key, None):
                scripted.left -= 1
                if scripted.left <= 0:
                    self._script.remove(scripted)
                return scripted.fault
        fitting = [fault for kind, fault in self._random_faults if kind in (request.kind, ANY_KIND)]
        if fitting and self._random.random() < self._rate:
            return self._random.choice(fitting)
        return None


class _HttpServer(ThreadingHTTPServer):
    """Knows its connections, so that closing it ends idle keep-alive connections too."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self, owner: S3FaultServer) -> None:
        self.owner = owner
        self.stopping = threading.Event()
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def opened(self, connection: socket.socket) -> None:
        with self._open_lock:
            self._open.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self._open_lock:
            self._open.discard(connection)

    def close_connections(self) -> None:
        self.stopping.set()
        with self._open_lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is what tests do; it is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # One segment per answer: with the default of none, headers and body would wait for each other.
    wbufsize = -1
    server: _HttpServer

    def setup(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.opened(self.request)
        super().setup()

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        self.server.closed(self.request)

    def log_message(self, *_: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        going_on = super().handle_expect_100()
        self.wfile.flush()  # The client holds its body back until it reads this.
        return going_on

    def _serve(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._read_body(headers)
        if body is None:
            self.close_connection = True  # The client broke off: what has come is no request.
            return
        request = Request(self.command, self.path, headers, body)
        response, fault = self.server.owner.handle(request)
        if fault is not None and fault.delay_ms:
            self.server.stopping.wait(fault.delay_ms / 1000)
        self._send(response, fault.cut_after_bytes if fault is not None else None)

    # The names are http.server's.
    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _serve  # noqa: N815

    def _read_body(self, headers: dict[str, str]) -> bytes | None:
        size = int(headers.get("content-length", 0))
        if size > BODY_BYTES_MAX:
            raise LimitExceeded("request body", limit=BODY_BYTES_MAX, actual=size)
        body = self.rfile.read(size)
        if len(body) < size:
            return None
        if headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            return _without_chunk_frames(body)
        return body

    def _send(self, response: Response, cut_after_bytes: int | None) -> None:
        if cut_after_bytes == -1:
            self._reset()
            return
        self.send_response(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        # A 304 names no length: for a GET that did transfer, it would be that of the object.
        if response.status not in (204, 304):
            self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        body = b"" if self.command == "HEAD" else response.body
        self.wfile.write(body if cut_after_bytes is None else body[:cut_after_bytes])
        self.wfile.flush()
        if cut_after_bytes is not None:
            # An orderly end, not a reset: a reset could overtake the bytes that were promised.
            self.close_connection = True
            self.request.shutdown(socket.SHUT_RDWR)

    def _reset(self) -> None:
        # A linger of zero turns the close into an RST, as a crashed machine's kernel would send.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.request.close()


def _without_chunk_frames(body: bytes) -> bytes:
    """The payload of an `aws-chunked` body: `size;extension CRLF data CRLF`, ended by a chunk of size 0."""
    parts: list[bytes] = []
    position = 0
    while True:
        end_of_line = body.index(b"\r\n", position)
        size = int(body[position:end_of_line].split(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end_of_line + 2 : end_of_line + 2 + size])
        position = end_of_line + 2 + size + 2
