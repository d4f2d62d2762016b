"""One object from a source to an S3 server, piece by piece.

The client library wants the body of a conditional put whole and in memory; its uploads in parts take an
iterator, but no condition. So a large body goes out by a request of our own: the client signs its URL, with
whatever credentials it has found, and the standard library sends it. One request, the condition with it, and
no more than a piece in memory.

A signed URL carries no further `x-amz` header, so the object bears no token, and nothing is sent this way
where the environment asks for such headers, for a proxy, or for no signature: `can_stream` says so. Over
plain HTTP nobody vouches for the body either; there its MD5 goes ahead of it, at the cost of a second read.

Until the last byte has left, the server has nothing that it could store: a source that fails ends the
connection by a reset. From then on the outcome is the server's to tell.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import http.client
import os
import re
import socket
import ssl
import struct
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import SplitResult, urlsplit

from obstore import sign

from forebay.errors import ForebayError
from forebay.kit.conditions import ABSENT
from forebay.storage._api import When
from forebay.storage._bucket._failure import Answered, Failure, NotThisWay, Refused, UploadFailed
from forebay.storage._bucket._url import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, BucketUrl, Client
from forebay.storage._source import Source, pieces_of

__all__ = ["Upload", "can_stream"]

SIGNED_FOR = timedelta(minutes=15)
"""How long a signed URL may be used: it is made for each try."""
ANSWER_BYTES_MAX = 64 * 1024
"""What is read of an answer; errors are a few lines."""
EARLY_ANSWER_S = 2.0
"""How long an answer is waited for when the server has stopped listening, in seconds."""
_MORE_HEADERS = re.compile(r"AWS_(SERVER_SIDE_ENCRYPTION|SSE_.*|S3_EXPRESS|SKIP_SIGNATURE)", re.IGNORECASE)
"""Settings of the client that a signed URL cannot carry."""


def can_stream(url: BucketUrl) -> bool:
    """Whether a request of our own does the same as one of the client's."""
    if url.scheme != "s3" or url.options.get("anonymous") == "true":
        return False
    if any(value and _MORE_HEADERS.fullmatch(name) for name, value in os.environ.items()):
        return False
    scheme = "http" if url.endpoint.startswith("http://") else "https"
    host = urlsplit(url.endpoint).netloc or "amazonaws.com"
    return scheme not in urllib.request.getproxies() or bool(urllib.request.proxy_bypass(host))


class Upload:
    """One try to put one object. It runs in a thread and can be stopped from another."""

    def __init__(self, client: Client, key: str, source: Source, when: When) -> None:
        self._client = client
        self._key = key
        self._source = source
        self._headers = _conditions(when)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._stopped = False

    def stop(self) -> None:
        """Give it up: nobody waits for it any more."""
        with self._lock:
            self._stopped = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> str:
        """Send it; the ETag. Raises `UploadFailed`, or what the source raises."""
        url = self._signed()
        connected = False
        try:
            if url.scheme == "http":
                self._headers["Content-MD5"] = self._digest()
            with self._connected(url.scheme, url.netloc) as connection:
                connected = True
                self._send(connection, f"{url.path}?{url.query}")
                answer = _answer(connection)
        except ForebayError:
            raise
        except ssl.SSLCertVerificationError as error:
            # The client trusts certificates by rules of its own: it may go on where we cannot.
            raise UploadFailed(Failure.answered(NotThisWay(str(error)))) from error
        except Exception as error:
            raise UploadFailed(Failure.unanswered(error, never_sent=not connected)) from error
        return self._judged(answer)

    def _signed(self) -> SplitResult:
        try:
            return urlsplit(sign(self._client, "PUT", self._key, SIGNED_FOR))
        except Exception as error:
            raise UploadFailed(Failure.answered(NotThisWay(str(error)))) from error

    def _judged(self, answer: _Answer) -> str:
        if answer.status == 200 and answer.etag:
            return answer.etag
        said = f"{answer.status} {answer.code}"
        # AWS answers 404 to If-Match on a key that is not there.
        if answer.status == 412 or (answer.status == 404 and "If-Match" in self._headers):
            raise UploadFailed(Failure.answered(Refused(said), answer.status, answer.code))
        failure = Failure.answered(Answered(said), answer.status, answer.code)
        if 300 <= answer.status < 400 or (failure.is_certain and not failure.is_conflict):
            failure = Failure.answered(NotThisWay(said), answer.status, answer.code)
        raise UploadFailed(failure)

    def _check_wanted(self) -> None:
        if self._stopped:
            raise ConnectionAbortedError("given up")

    def _digest(self) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        for piece in pieces_of(self._key, self._source):
            digest.update(piece)
            self._check_wanted()
        return base64.b64encode(digest.digest()).decode()

    @contextmanager
    def _connected(self, scheme: str, netloc: str) -> Iterator[http.client.HTTPConnection]:
        connection = (
            http.client.HTTPSConnection(netloc, timeout=CONNECT_TIMEOUT_S, context=_trust())
            if scheme == "https"
            else http.client.HTTPConnection(netloc, timeout=CONNECT_TIMEOUT_S)
        )
        connection.connect()
        try:
            with self._lock:
                self._socket = connection.sock
            self._check_wanted()
            connection.sock.settimeout(REQUEST_TIMEOUT_S)
            yield connection
        except BaseException:
            # A reset, not an orderly end: nobody may take what has arrived for all there is.
            with suppress(OSError, AttributeError):
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise
        finally:
            with self._lock:
                self._socket = None
            connection.close()

    def _send(self, connection: http.client.HTTPConnection, target: str) -> None:
        connection.putrequest("PUT", target, skip_accept_encoding=True)
        connection.putheader("Content-Length", str(self._source.size))
        for name, value in self._headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        for piece in pieces_of(self._key, self._source):
            try:
                connection.send(piece)
            except (BrokenPipeError, ConnectionResetError):
                # Servers that refuse do not always listen to the end. What they said may still be there.
                connection.sock.settimeout(EARLY_ANSWER_S)
                return


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    etag: str
    code: str


def _answer(connection: http.client.HTTPConnection) -> _Answer:
    response = connection.getresponse()
    text = response.read(ANSWER_BYTES_MAX).decode("utf-8", "replace")
    return _Answer(response.status, response.getheader("ETag") or "", Failure.code_in(text))


def _conditions(when: When) -> dict[str, str]:
    if isinstance(when, str):
        return {"If-Match": when}
    return {"If-None-Match": "*"} if when is ABSENT else {}


@functools.cache
def _trust() -> ssl.SSLContext:
    return ssl.create_default_context()
