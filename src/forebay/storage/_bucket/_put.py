"""Writes, and what became of them when the reply was lost.

A client that repeats a conditional put on its own is told of a refusal that its own first try caused. So
these puts go out through a client that never repeats, every write carries a token of its own as object
metadata, and after anything but a clear answer we look:

    our token lies there                    done
    the expected version still lies there   open: the same put is sent again; at most one copy can win
    something else                          refused, if every try so far was answered by a refusal;
                                            else unknown: it may have been ours, overwritten since

A 412 to a first try is a clear answer. A 409 is a refusal that leaves the key open (AWS sends it while
another conditional write is under way). Where a store does not keep metadata, equal content counts as ours:
the contract asks for unique bodies in conditional writes. So it does for a body that came from a source:
streamed, it has no token, see `_upload`.

One case stays: a create whose reply was lost and whose object somebody deleted before we looked is sent again
and takes effect twice. Nothing that lies in the bucket tells it from a create that never arrived.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from forebay.errors import ForebayError, NotFound, OutcomeUnknown, PreconditionFailed
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT, ANY
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy
from forebay.storage._api import ObjectStore, StoredObject, When
from forebay.storage._bucket._failure import CLIENT_ERRORS, Failure, NotThisWay, UploadFailed
from forebay.storage._bucket._patience import Patience
from forebay.storage._bucket._upload import Upload, can_stream
from forebay.storage._bucket._url import BucketUrl, Clients
from forebay.storage._source import PIECE_BYTES, Held, Room, Source, pieces_of, whole

__all__ = ["TOKEN_ATTRIBUTE", "Writer"]

T = TypeVar("T")

TOKEN_ATTRIBUTE = "forebaytoken"
"""Metadata name of the token. Azure takes letters and digits only."""
MULTIPART_BYTES = 8 * 1024 * 1024
"""From this size on an unconditional put goes up in parts of this size. S3 takes parts from 5 MiB on."""
STREAMED_BYTES_MIN = 4 * 1024 * 1024
"""From this size on a source is sent piece by piece; a smaller body is held in memory."""
UPLOADS_MAX = 64
"""Sources that a store sends piece by piece at once; more wait their turn."""
SOURCE_BYTES_MAX = 128 * 1024 * 1024
"""Bytes that a store holds of sources which it cannot send piece by piece. A longer one is held alone."""


class _Verdict(enum.Enum):
    OPEN = enum.auto()
    MOVED = enum.auto()


class _OtherWay(Exception):
    """Nothing was stored, and the client may do better with the body in memory."""


class Writer:
    """Sends the writes of one bucket and settles them."""

    def __init__(
        self,
        url: BucketUrl,
        clients: Clients,
        policy: RetryPolicy,
        clock: Clock,
        ids: IdSource,
        randomness: random.Random,
        read_back: Callable[[str, bool], Awaitable[tuple[StoredObject, str | None]]],
        reads: ObjectStore,
    ) -> None:
        self._url = url
        self._clients = clients
        self._policy = policy
        self._clock = clock
        self._ids = ids
        self._random = randomness
        self._read_back = read_back
        """Version, token and, if asked for, data of what lies under a key; one attempt."""
        self._reads = reads
        self._room = Room(SOURCE_BYTES_MAX)
        self._threads: ThreadPoolExecutor | None = None
        self._minds: bool | None = None
        """Whether conditions of streamed puts hold; None where it is not known yet."""

    async def put(self, key: str, data: bytes, when: When) -> str:
        """Store `data` if `when` holds; the new version."""
        token = self._ids.token()
        if when is not ANY:
            return await self._put_conditionally(
                key,
                when,
                lambda: self._send(key, data, token, self._mode(when)),
                lambda: self._look(key, data, when, token),
            )
        if len(data) > MULTIPART_BYTES:
            return await self._put_in_parts(key, data, token)
        return await self.repeat("writing", key, lambda: self._send(key, data, token, "overwrite"))

    async def put_source(self, key: str, source: Source, when: When) -> str:
        """Store what `source` gives if `when` holds; the new version."""
        if source.size < STREAMED_BYTES_MIN or not can_stream(self._url):
            return await self._put_held(key, source, when)
        if when is not ANY and not await self._minds_conditions(key):
            return await self._put_held(key, source, when)

        def send() -> Awaitable[str]:
            return self._upload(key, source, when)

        try:
            if when is ANY:
                return await self.repeat("writing", key, send)
            return await self._put_conditionally(
                key, when, send, lambda: self._look_for_content(key, source, when)
            )
        except _OtherWay:
            return await self._put_held(key, source, when)

    async def _minds_conditions(self, key: str) -> bool:
        """Whether this server minds the condition beside a signed URL, which does not cover it; asked once.

        One that left it out would overwrite. So an object of no meaning is put beside the key, and put again
        on the condition that it is not there.
        """
        if self._minds is not None:
            return self._minds
        probe = f"{key}.probe-{self._ids.token()}"
        try:
            await self.put(probe, b"probe", ANY)
            await self._upload(probe, Held(b"probe again"), ABSENT)
            self._minds = False
        except UploadFailed as error:
            if error.failure.is_refusal:
                self._minds = True
        except ForebayError:
            return False
        with suppress(ForebayError):
            await self.repeat("deleting", probe, lambda: self._clients.once.delete_async(probe))
        return bool(self._minds)

    async def _put_held(self, key: str, source: Source, when: When) -> str:
        async with self._room.hold(source.size):
            return await self.put(key, await asyncio.to_thread(whole, key, source), when)

    async def _upload(self, key: str, source: Source, when: When) -> str:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(UPLOADS_MAX, thread_name_prefix="forebay-upload")
        upload = Upload(self._clients.once, key, source, when)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, upload.run)
        except asyncio.CancelledError:
            upload.stop()
            raise

    def close(self) -> None:
        """Let go of the threads once they are done."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def _put_conditionally(
        self,
        key: str,
        when: When,
        send: Callable[[], Awaitable[str]],
        look: Callable[[], Awaitable[str | _Verdict]],
    ) -> str:
        patience = Patience(self._policy, self._clock, self._random)
        doubtful = False
        while True:
            try:
                return await send()
            except CLIENT_ERRORS as error:
                failure = Failure.of(error)
            except ForebayError as error:
                raise self._source_failed(key, error, doubtful) from error
            self._raise_clear_answer(key, when, failure, doubtful)
            if not failure.never_sent:
                doubtful = doubtful or not (failure.is_conflict or failure.is_refusal)
                verdict = await look()
                if isinstance(verdict, str):
                    return verdict
                if verdict is _Verdict.MOVED:
                    raise self._moved(key, when, failure, doubtful) from failure.error
            if not await patience.another():
                raise self._given_up("writing", key, failure, doubtful) from failure.error

    def _raise_clear_answer(self, key: str, when: When, failure: Failure, doubtful: bool) -> None:
        """Raise where there is nothing to look for, and trying again would change nothing."""
        if failure.is_refusal and not doubtful:
            raise PreconditionFailed(key, expected=when) from failure.error
        if isinstance(failure.error, NotThisWay) and not doubtful:
            raise _OtherWay from failure.error
        if failure.is_certain and not failure.is_refusal and not failure.is_conflict:
            raise self._given_up("writing", key, failure, doubtful) from failure.error

    async def _look_for_content(self, key: str, source: Source, when: When) -> str | _Verdict:
        """`_look` for what bears no token: whoever put these very bytes there, they are there."""
        try:
            found, token = await self._read_back(key, False)
            if found.version != when and token is None and await self._holds(key, found.version, source):
                return found.version
        except NotFound:
            return _Verdict.OPEN if when is ABSENT else _Verdict.MOVED
        except ForebayError:
            return _Verdict.OPEN
        return _Verdict.OPEN if found.version == when else _Verdict.MOVED

    async def _holds(self, key: str, version: str, source: Source) -> bool:
        """Whether exactly the bytes of `source` lie under `key`, compared piece by piece."""
        if (await self._reads.head(key)).size != source.size:
            return False
        pieces, at = pieces_of(key, source), 0
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                for first in range(0, len(piece), PIECE_BYTES):
                    part = memoryview(piece)[first : first + PIECE_BYTES]
                    if await self._reads.get_range(key, at, len(part)) != part:
                        return False
                    at += len(part)
        finally:
            await asyncio.to_thread(pieces.close)
        return (await self._reads.head(key)).version == version

    async def _look(self, key: str, data: bytes, when: When, token: str) -> str | _Verdict:
        """Our version if our write lies there, else what that means."""
        try:
            found, found_token = await self._read_back(key, False)
            if found_token is None:
                found, found_token = await self._read_back(key, True)
                if found_token is None and found.data == data:
                    return found.version
        except NotFound:
            return _Verdict.OPEN if when is ABSENT else _Verdict.MOVED
        except ForebayError:
            return _Verdict.OPEN  # Nothing was seen. Sending the same put again is safe and tells more.
        if found_token == token:
            return found.version
        return _Verdict.OPEN if found.version == when else _Verdict.MOVED

    async def repeat(self, operation: str, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Send a write that may be sent twice without harm until it is answered or the policy ends."""
        patience = Patience(self._policy, self._clock, self._random)
        doubtful = False
        while True:
            try:
                return await request()
            except CLIENT_ERRORS as error:
                failure = Failure.of(error)
            except ForebayError as error:
                raise self._source_failed(key, error, doubtful) from error
            if isinstance(failure.error, NotThisWay):
                raise _OtherWay from failure.error
            doubtful = doubtful or not (failure.never_sent or failure.is_certain)
            if failure.is_certain or not await patience.another():
                raise self._given_up(operation, key, failure, doubtful) from failure.error

    async def _put_in_parts(self, key: str, data: bytes, token: str) -> str:
        """The client repeats single parts by itself; whole uploads are not repeated."""
        try:
            result = await self._clients.patient.put_async(
                key,
                data,
                attributes={TOKEN_ATTRIBUTE: token},
                use_multipart=True,
                chunk_size=MULTIPART_BYTES,
            )
        except CLIENT_ERRORS as error:
            failure = Failure.of(error)
            # A repeated completion of an upload that is complete is answered by 404.
            doubtful = failure.status not in (400, 401, 403) and not failure.is_missing_bucket
            raise self._given_up("writing", key, failure, doubtful) from error
        return self._version(dict(result))

    async def _send(self, key: str, data: bytes, token: str, mode: Any) -> str:
        attributes = {TOKEN_ATTRIBUTE: token}
        result = await self._clients.once.put_async(
            key, data, attributes=attributes, mode=mode, use_multipart=False
        )
        return self._version(dict(result))

    def _mode(self, when: When) -> Any:
        if when is ABSENT:
            return "create"
        return {"version" if self._url.versions_are_generations else "e_tag": when}

    def _version(self, result: dict[str, Any]) -> str:
        return str(result["version" if self._url.versions_are_generations else "e_tag"])

    def _writing(self, key: str) -> str:
        return f"writing {key!r} in {self._url.shown}"

    def _source_failed(self, key: str, error: ForebayError, doubtful: bool) -> ForebayError:
        """A source failed now; it may not have when it was sent before."""
        return OutcomeUnknown(self._writing(key), reason=error.message) if doubtful else error

    def _moved(self, key: str, when: When, failure: Failure, doubtful: bool) -> ForebayError:
        if not doubtful:
            return PreconditionFailed(key, expected=when)
        return OutcomeUnknown(
            self._writing(key),
            reason=f"{_said(failure)}, and by now another write lies there",
            hint="read it and look for what you wrote, or for what was built on it",
        )

    def _given_up(self, operation: str, key: str, failure: Failure, doubtful: bool) -> ForebayError:
        if not doubtful:
            return failure.explained(operation, key, self._url.shown)
        return OutcomeUnknown(f"{operation} {key!r} in {self._url.shown}", reason=_said(failure))


def _said(failure: Failure) -> str:
    if failure.status is None:
        return "the reply was lost"
    return f"the server answered {failure.status} {failure.code}".rstrip()
