"""Calls: a typed request to the broker, its typed answer, errors as exceptions, repeated where that is safe.

A read, and a request that certainly did nothing, is repeated with full jitter. A change whose answer was lost
is not: it is raised as `OutcomeUnknown`, and whoever made it looks before trying again. Appends have their
own way of repeating (`_producer.py`), because the broker recognises them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from forebay.client._address import Address
from forebay.client._config import ClientConfig
from forebay.client._connection import Response
from forebay.client._errors import error_from, error_of_status, is_transient
from forebay.client._pool import Pool
from forebay.errors import ForebayError, NotFound, OutcomeUnknown, UsageError
from forebay.formats.http_messages import JSON, MSGPACK, ErrorBody
from forebay.kit.clock import Clock
from forebay.kit.retry import retry

__all__ = ["Session", "path_of"]

T = TypeVar("T")

_error_body = msgspec.json.Decoder(ErrorBody)


def path_of(template: str, query: Mapping[str, object] | None = None, **names: object) -> str:
    """A path of `PATHS` with its parts filled in, escaped."""
    path = template.format(**{name: quote(str(value), safe="") for name, value in names.items()})
    return f"{path}?{urlencode(query)}" if query else path


class Session:
    """Calls to one broker."""

    def __init__(
        self,
        address: Address,
        *,
        clock: Clock,
        randomness: random.Random,
        config: ClientConfig,
        token: str | None,
    ) -> None:
        if token is not None and not (token.isascii() and token.isprintable()):
            raise UsageError("the token has letters that a header may not have", hint="check where it ends")
        self.pool = Pool(address, clock=clock, config=config, token=token)
        self.clock = clock
        self.randomness = randomness
        self.config = config

    async def get(self, path: str, kind: type[T]) -> T:
        """Read something. Lost answers are asked for again."""
        return await self.call("GET", path, kind, repeatable=True)

    async def call(
        self, method: str, path: str, kind: type[T], message: object = None, *, repeatable: bool = False
    ) -> T:
        """Send a message in JSON; the answer as `kind`. Raises what the broker says went wrong."""
        body = b"" if message is None else msgspec.json.encode(message)

        async def attempt() -> T:
            response = await self.pool.request(
                method, path, body=[body] if body else [], content_type=JSON if body else ""
            )
            if response.status >= 400:
                raise self.error(response, f"{method} {path}")
            return decoded(response, kind, f"{method} {path}")

        def retryable(error: ForebayError) -> bool:
            return is_transient(error) or (repeatable and isinstance(error, OutcomeUnknown))

        return await retry(
            attempt,
            policy=self.config.retry,
            clock=self.clock,
            randomness=self.randomness,
            retryable=retryable,
        )

    def error(self, response: Response, operation: str) -> ForebayError:
        """The error that an answer tells."""
        try:
            told = _error_body.decode(response.body).error
        except msgspec.DecodeError:
            return error_of_status(response.status, response.body[:200].decode(errors="replace"), operation)
        if response.status == 404 and told.type in ("NotFound", "UnknownTopic"):
            error: ForebayError = NotFound(told.message, hint=told.hint)
            error.message = told.message
            error.args = (told.message,)
            return error
        return error_from(
            told.type, told.message, hint=told.hint, operation=operation, status=response.status
        )

    async def close(self) -> None:
        """End the connections."""
        await self.pool.close()


def decoded(response: Response, kind: type[T], operation: str) -> T:
    """The body as a message of this kind, in the form that its header says."""
    packed = response.headers.get("content-type", "").partition(";")[0].strip().lower() == MSGPACK
    try:
        if packed:
            return msgspec.msgpack.decode(response.body, type=kind)
        return msgspec.json.decode(response.body, type=kind)
    except msgspec.DecodeError as error:
        raise strange(operation, error) from None


def strange(operation: str, error: Exception) -> OutcomeUnknown:
    """What to raise for an answer that is not what this client knows: it may have happened."""
    return OutcomeUnknown(
        operation, reason=f"the answer is not a broker's: {error}", hint="check the URL, and the two versions"
    )


def struct_of(kind: type[T], value: Any) -> T:
    """`value`, or anything with the same fields, as a message."""
    return msgspec.convert(value, kind, from_attributes=True)
