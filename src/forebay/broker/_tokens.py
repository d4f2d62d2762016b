"""Tokens: who may do what, kept where every broker of a deployment sees it.

    broker-tokens/{token_id}    {token_id, name, digest, prefix, actions, created_at_ms, expires_at_ms}

A token is `fb_{token_id}_{secret}`. The secret has 256 random bits and is never stored: the record holds its
SHA-256. A slow hash (scrypt) protects secrets that people choose, by making each guess dear; nobody guesses
256 bits, and a broker checks thousands of tokens per second. The id finds the record, the digest is compared
in constant time.

A token allows its actions on topics whose names begin with its prefix; the empty prefix is every topic, and
what belongs to no topic at all (metrics, all groups). It ends with `expires_at_ms` or with its record.

A broker keeps the whole table in memory and reads it again where a request comes and the table is older than
`refresh_ms`; a revocation has taken effect everywhere by then. Requests that come meanwhile wait for the same
reading: anybody can send them, so they must not cost the coordinator one each. Where the coordinator cannot
be reached the table is believed for `STALE_S` more, and asked for every `refresh_ms`; then nobody is let in.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Final

import msgspec

from forebay.broker._errors import Unauthenticated
from forebay.broker._routes import Access, Action
from forebay.coordination import Coordinator, children
from forebay.errors import AccessDenied, ForebayError, NotFound, Unavailable, UsageError
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT

__all__ = ["TokenAccess", "TokenRecord", "TokenTable", "Tokens"]

DIRECTORY: Final = "broker-tokens"
SECRET_BYTES: Final = 32
TOKENS_MAX: Final = 10_000
"""Tokens of one deployment."""
NAME_CHARS_MAX: Final = 100
"""Longest name of a token."""
STALE_S: Final = 60.0
"""Seconds for which tokens are believed that could not be read again."""


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A token as it is stored: everything but its secret."""

    token_id: str
    name: str
    digest: str
    """SHA-256 of the secret, hexadecimal."""
    prefix: str
    """Topics whose names begin so; empty: all."""
    actions: list[Action]
    created_at_ms: int
    expires_at_ms: int | None = None


class TokenAccess(Access):
    """What one token allows."""

    def __init__(self, record: TokenRecord, table: TokenTable) -> None:
        self._record = record
        self._table = table

    def allows(self, action: Action, topic: str | None) -> bool:
        """Whether it allows this."""
        record = self._record
        if action not in record.actions:
            return False
        return topic.startswith(record.prefix) if topic is not None else not record.prefix

    def check(self, action: Action, topic: str | None) -> None:
        """Raise `AccessDenied` where it does not."""
        if not self.allows(action, topic):
            where = "outside of topics" if topic is None else f"on topic {topic!r}"
            raise AccessDenied(
                f"this token does not allow {action.value} {where}",
                hint="forebay tokens issue makes one that does",
            )

    async def renew(self) -> None:
        """Read the table again, if it is too old."""
        await self._table.refresh()

    @property
    def valid(self) -> bool:
        """Whether the token is still in the table and has not expired."""
        return self._table.holds(self._record)


class Tokens:
    """Issues, lists and revokes."""

    def __init__(self, coordinator: Coordinator, *, clock: Clock) -> None:
        self._coordinator = coordinator
        self._clock = clock

    async def issue(
        self, name: str, *, actions: Sequence[Action], prefix: str = "", expires_in_ms: int | None = None
    ) -> tuple[TokenRecord, str]:
        """Make a token; the record, and the token itself, which nobody can tell later."""
        if not actions:
            raise UsageError("a token that allows nothing", hint=f"name one of: {', '.join(Action)}")
        if not 1 <= len(name) <= NAME_CHARS_MAX or not name.isprintable():
            raise UsageError(
                f"token name {name[:NAME_CHARS_MAX]!r}", hint=f"1 to {NAME_CHARS_MAX} characters"
            )
        if expires_in_ms is not None and expires_in_ms < 1:
            raise UsageError(f"an expiry in {expires_in_ms} ms", hint="it lies ahead")
        if len(await self.list()) >= TOKENS_MAX:
            raise UsageError(f"TOKENS_MAX: there are {TOKENS_MAX:,} tokens", hint="revoke some")
        now_ms = self._clock.now_ms()
        # Not from the ids of the engines: those are unique, these must be secret.
        token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(SECRET_BYTES)
        record = TokenRecord(
            token_id=token_id,
            name=name,
            digest=_digest(secret),
            prefix=prefix,
            actions=sorted(set(actions)),
            created_at_ms=now_ms,
            expires_at_ms=None if expires_in_ms is None else now_ms + expires_in_ms,
        )
        await self._coordinator.put(
            f"{DIRECTORY}/{token_id}", msgspec.json.encode(record), ABSENT, partition_key=DIRECTORY
        )
        return record, f"fb_{token_id}_{secret}"

    async def revoke(self, token_id: str) -> TokenRecord:
        """Remove a token; raises `NotFound`."""
        for record in await self.list():
            if record.token_id == token_id:
                await self._coordinator.delete(f"{DIRECTORY}/{token_id}", partition_key=DIRECTORY)
                return record
        raise NotFound(token_id[:100], hint="forebay tokens list shows the ids")

    async def list(self) -> list[TokenRecord]:
        """Every token, oldest first. (Last in the class: its name hides the builtin from annotations.)"""
        scan = self._coordinator.scan_all(*children(DIRECTORY), partition_key=DIRECTORY)
        found = [msgspec.json.decode(record.value, type=TokenRecord) async for record in scan]
        return sorted(found, key=lambda record: (record.created_at_ms, record.token_id))


class TokenTable:
    """The tokens as a broker sees them."""

    def __init__(self, tokens: Tokens, *, clock: Clock, refresh_ms: int) -> None:
        self._tokens = tokens
        self._clock = clock
        self._refresh_s = refresh_ms / 1000
        self._records: dict[str, TokenRecord] = {}
        self._read_at = float("-inf")
        self._tried_at = float("-inf")
        """When it was last read, or believed since it could not be."""
        self._reading: asyncio.Task[None] | None = None

    @property
    def fresh(self) -> bool:
        """Whether the table need not be read again now."""
        return self._clock.monotonic() - self._tried_at < self._refresh_s

    def access(self, token: str) -> TokenAccess:
        """What the token allows by the table as it was last read; raises `Unauthenticated`."""
        kind, _, rest = token.partition("_")
        token_id, _, secret = rest.partition("_")
        record = self._records.get(token_id) if kind == "fb" else None
        # The same work whether or not there is such a token.
        digest = record.digest if record is not None else _NOBODY
        right = hmac.compare_digest(_digest(secret), digest)
        if record is None or not right or self._expired(record):
            raise Unauthenticated("this token is unknown, revoked or expired")
        return TokenAccess(record, self)

    def holds(self, record: TokenRecord) -> bool:
        """Whether the record is still there and has not expired."""
        return self._records.get(record.token_id) == record and not self._expired(record)

    async def refresh(self) -> None:
        """Read the table again, if it is too old and nobody does so already."""
        if self.fresh:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read(), name="forebay tokens")
        # Whoever leaves must not end it for the others.
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        asked_at = self._clock.monotonic()
        try:
            records = await self._tokens.list()
        except ForebayError as error:
            if asked_at - self._read_at > self._refresh_s + STALE_S:
                raise Unavailable(
                    "the tokens cannot be read", hint="check that the coordinator can be reached"
                ) from error
            self._tried_at = self._clock.monotonic()
            return
        self._records = {record.token_id: record for record in records}
        self._read_at = self._tried_at = asked_at

    def _expired(self, record: TokenRecord) -> bool:
        return record.expires_at_ms is not None and self._clock.now_ms() >= record.expires_at_ms


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


_NOBODY: Final = _digest("")
