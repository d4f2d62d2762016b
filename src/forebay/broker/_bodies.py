"""Reading bodies and writing answers in the form that the headers ask for."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from forebay.broker._errors import BadRequest, HttpRefusal
from forebay.broker._http import Request, Response
from forebay.formats.http_messages import JSON, MSGPACK

__all__ = ["accepted", "decode_json", "given", "integer_query", "json_response", "packed_response", "read"]

Message = TypeVar("Message")
FORM = "application/x-www-form-urlencoded"
_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()
_json_decoders: dict[type, msgspec.json.Decoder[Any]] = {}
_msgpack_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def given(request: Request, *allowed: str) -> str:
    """The content type of the body, one of `allowed`; raises 415.

    No type, or the one that curl puts there by itself, means JSON.
    """
    if not request.has_length:
        raise HttpRefusal(
            411, "LengthRequired", "the request has no body", hint="send Content-Length, or chunks"
        )
    kind = request.content_type or JSON
    if kind == FORM:
        kind = JSON
    if kind not in allowed:
        raise HttpRefusal(
            415,
            "UnsupportedMediaType",
            f"{kind[:100]!r} is not taken here",
            hint=f"send {', '.join(allowed)}",
        )
    if "content-encoding" in request.headers and request.headers["content-encoding"] != "identity":
        raise HttpRefusal(
            415,
            "UnsupportedMediaType",
            "encoded bodies are not taken",
            hint="send it without Content-Encoding",
        )
    return kind


def accepted(request: Request, *offered: str) -> str:
    """The first of `offered` that the client takes; the first of all where it does not say."""
    text = request.headers.get("accept", "")
    if not text:
        return offered[0]
    wanted = {part.partition(";")[0].strip().lower() for part in text.split(",")}
    for kind in offered:
        if kind in wanted:
            return kind
    return offered[0]


def read(request: Request, kind: type[Message]) -> Message:
    """The body as this message, in JSON or msgpack by its content type."""
    if given(request, JSON, MSGPACK) == MSGPACK:
        return decode_msgpack(request.body, kind)
    return decode_json(request.body, kind)


def decode_json(body: bytes | memoryview, kind: type[Message]) -> Message:
    """A message from JSON; raises `BadRequest`."""
    decoder = _json_decoders.get(kind)
    if decoder is None:
        decoder = _json_decoders[kind] = msgspec.json.Decoder(kind)
    try:
        message: Message = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not what it should be: {error}") from None
    return message


def decode_msgpack(body: bytes | memoryview, kind: type[Message]) -> Message:
    """A message from msgpack; raises `BadRequest`."""
    decoder = _msgpack_decoders.get(kind)
    if decoder is None:
        decoder = _msgpack_decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message: Message = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not what it should be: {error}") from None
    return message


def json_response(message: Any, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(status, _json.encode(message), JSON)


def packed_response(message: Any, status: int = 200) -> Response:
    """An answer in msgpack."""
    return Response(status, _msgpack.encode(message), MSGPACK)


def integer_query(request: Request, name: str, *, low: int, high: int) -> int | None:
    """A number of the query string; None where it is not there."""
    text = request.query.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(digits) <= 19 and low <= int(text) <= high:
        return int(text)
    raise BadRequest(f"{name} is {text[:50]!r}", hint=f"a number from {low} to {high}")
