"""The part of S3 that Forebay uses, as a function from request to response over a dict. No sockets here.

What is left out answers 501 rather than something plausible: multipart uploads, versions, copies, access
lists. Where S3 and its imitators differ, this follows AWS: `If-Match` on a missing key is 404, listings are
in byte order, the ETag is the MD5 of the body.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from forebay.kit.clock import Clock

__all__ = ["Request", "Response", "S3Objects", "StoredBody"]

LIST_KEYS_MAX = 1000
DELETE_KEYS_MAX = 1000
META = "x-amz-meta-"


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request. Header names are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def bucket(self) -> str:
        """First part of the path."""
        return unquote(urlsplit(self.target).path.lstrip("/").partition("/")[0])

    @property
    def key(self) -> str:
        """The rest of the path; empty for the bucket itself."""
        return unquote(urlsplit(self.target).path.lstrip("/").partition("/")[2])

    @property
    def query(self) -> dict[str, str]:
        """The parameters after the question mark."""
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    @property
    def kind(self) -> str:
        """GET, HEAD, PUT, DELETE for objects; LIST, BULK_DELETE, BUCKET for the bucket; OTHER."""
        if self.key:
            return self.method if self.method in {"GET", "HEAD", "PUT", "DELETE"} else "OTHER"
        if self.method == "GET":
            return "LIST"
        if self.method == "POST" and "delete" in self.query:
            return "BULK_DELETE"
        return "BUCKET" if self.method in {"PUT", "HEAD"} else "OTHER"


@dataclass(frozen=True, slots=True)
class Response:
    """One HTTP response; its length header is added on the way out."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredBody:
    """An object as one PUT left it."""

    data: bytes
    metadata: dict[str, str]
    modified_ms: int

    @property
    def etag(self) -> str:
        """Quoted, as it goes over the wire."""
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


class S3Objects:
    """One bucket. Not thread-safe: the caller holds a lock over `answer`."""

    def __init__(self, bucket: str, clock: Clock) -> None:
        self.bucket = bucket
        self.objects: dict[str, StoredBody] = {}
        self._clock = clock

    def put(self, key: str, data: bytes, metadata: dict[str, str] | None = None) -> StoredBody:
        """Store without any condition."""
        stored = StoredBody(data, metadata or {}, self._clock.now_ms())
        self.objects[key] = stored
        return stored

    def answer(self, request: Request) -> Response:
        """Do what the request asks, and say so."""
        if request.bucket != self.bucket:
            return refusal(404, "NoSuchBucket", request.bucket)
        unknown = {"uploads", "uploadId", "versionId", "acl", "tagging"} & request.query.keys()
        if unknown or "x-amz-copy-source" in request.headers:
            return refusal(501, "NotImplemented", request.target)
        actions: dict[str, Callable[[Request], Response]] = {
            "GET": self._get,
            "HEAD": self._get,
            "PUT": self._put,
            "DELETE": self._delete,
            "LIST": self._list,
            "BULK_DELETE": self._bulk_delete,
            "BUCKET": lambda _: Response(200),
        }
        action = actions.get(request.kind)
        return action(request) if action else refusal(501, "NotImplemented", request.method)

    def _put(self, request: Request) -> Response:
        current = self.objects.get(request.key)
        expected = request.headers.get("if-match")
        if expected is not None and current is None:
            return refusal(404, "NoSuchKey", request.key)
        if expected is not None and current is not None and not _matches(expected, current.etag):
            return refusal(412, "PreconditionFailed", "If-Match")
        if "if-none-match" in request.headers and current is not None:
            return refusal(412, "PreconditionFailed", "If-None-Match")
        digest = base64.b64encode(hashlib.md5(request.body, usedforsecurity=False).digest()).decode()
        if request.headers.get("content-md5", digest) != digest:
            return refusal(400, "BadDigest", request.key)
        metadata = {name: value for name, value in request.headers.items() if name.startswith(META)}
        return Response(200, headers={"ETag": self.put(request.key, request.body, metadata).etag})

    def _get(self, request: Request) -> Response:
        stored = self.objects.get(request.key)
        if stored is None:
            return refusal(404, "NoSuchKey", request.key)
        headers = {
            "ETag": stored.etag,
            "Last-Modified": formatdate(stored.modified_ms / 1000, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            **stored.metadata,
        }
        if _matches(request.headers.get("if-none-match", ""), stored.etag):
            return Response(304, headers=headers)
        if not _matches(request.headers.get("if-match", "*"), stored.etag):
            return refusal(412, "PreconditionFailed", "If-Match")
        if "range" in request.headers:
            return _part(stored.data, request.headers["range"], headers)
        return Response(200, stored.data, headers)

    def _delete(self, request: Request) -> Response:
        self.objects.pop(request.key, None)
        return Response(204)

    def _bulk_delete(self, request: Request) -> Response:
        tree = ElementTree.fromstring(request.body)
        keys = [element.text or "" for element in tree.iter() if element.tag.rpartition("}")[2] == "Key"]
        if len(keys) > DELETE_KEYS_MAX:
            return refusal(400, "MalformedXML", f"more than {DELETE_KEYS_MAX} keys")
        for key in keys:
            self.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return _xml(f"<DeleteResult>{deleted}</DeleteResult>")

    def _list(self, request: Request) -> Response:
        query = request.query
        if query.get("list-type") != "2":
            return refusal(501, "NotImplemented", "only version 2 of list")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        entries = _grouped(sorted(self.objects, key=str.encode), prefix, delimiter)
        entries = [entry for entry in entries if entry.encode() > after.encode()]
        limit = min(int(query.get("max-keys", LIST_KEYS_MAX)), LIST_KEYS_MAX)
        page, rest = entries[:limit], entries[limit:]
        name = quote if query.get("encoding-type") == "url" else escape
        body = "".join(self._entry(entry, name(entry)) for entry in page)
        if rest and page:
            body += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        body += f"<IsTruncated>{'true' if rest else 'false'}</IsTruncated><KeyCount>{len(page)}</KeyCount>"
        encoding = "<EncodingType>url</EncodingType>" if name is quote else ""
        return _xml(
            f"<ListBucketResult><Name>{self.bucket}</Name><Prefix>{name(prefix)}</Prefix>"
            f"<MaxKeys>{limit}</MaxKeys>{encoding}{body}</ListBucketResult>"
        )

    def _entry(self, entry: str, name: str) -> str:
        stored = self.objects.get(entry)
        if stored is None:
            return f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
        return (
            f"<Contents><Key>{name}</Key><LastModified>{_iso(stored.modified_ms)}</LastModified>"
            f"<ETag>{escape(stored.etag)}</ETag><Size>{len(stored.data)}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )


def refusal(status: int, code: str, detail: str) -> Response:
    """An error as S3 writes it."""
    text = f"<Error><Code>{code}</Code><Message>{escape(detail)}</Message><RequestId>0</RequestId></Error>"
    return _xml(text, status)


def _xml(text: str, status: int = 200) -> Response:
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Response(status, body, {"Content-Type": "application/xml"})


def _matches(condition: str, etag: str) -> bool:
    return condition == "*" or etag in [part.strip() for part in condition.split(",")]


def _part(data: bytes, header: str, headers: dict[str, str]) -> Response:
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if found is None or not any(found.groups()):
        return refusal(501, "NotImplemented", header)
    first, last = found.groups()
    if first:
        start, end = int(first), min(int(last) + 1 if last else len(data), len(data))
    else:
        start, end = max(len(data) - int(last), 0), len(data)
    if start >= end:
        return refusal(416, "InvalidRange", header)
    return Response(
        206, data[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
    )


def _grouped(keys: list[str], prefix: str, delimiter: str) -> list[str]:
    """Keys under the prefix; those that go on beyond a delimiter are folded into their common prefix."""
    result: dict[str, None] = {}
    for key in keys:
        if key.startswith(prefix):
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            result[prefix + head + found if found else key] = None
    return list(result)


def _iso(time_ms: int) -> str:
    moment = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{time_ms % 1000:03d}Z"
