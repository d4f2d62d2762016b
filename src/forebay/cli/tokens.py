"""`forebay tokens`: who may use a broker, and for what.

Tokens are kept in the coordinator, hashed. A token is shown once, when it is issued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._deployment import Deployment, deployment_options
from forebay.cli._log_parts import open_log
from forebay.cli._options import CommandGroup
from forebay.cli._run import wait_for
from forebay.errors import UsageError
from forebay.kit.limits import parse_duration_ms

if TYPE_CHECKING:
    from forebay.broker import Action, TokenRecord

__all__ = ["app"]

app = CommandGroup(help="Issue, list and revoke the tokens of brokers.")


@app.command("issue")
@deployment_options
def issue(
    deployment: Deployment,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the token is for.")],
    can: Annotated[
        list[str],
        typer.Option("--can", metavar="ACTION", help="read, append, admin or monitor. Repeat for several."),
    ],
    prefix: Annotated[
        str, typer.Option("--topic-prefix", metavar="PREFIX", help="Only topics whose names begin so.")
    ] = "",
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="TIME", help="For how long, as in 30d.", show_default=False),
    ] = None,
) -> None:
    """Make a token and print it. It cannot be shown again."""
    actions = _actions(can)
    expires_in_ms = None if expires is None else parse_duration_ms(expires)

    async def work() -> tuple[TokenRecord, str]:
        async with open_log(deployment, create=True) as parts:
            from forebay.broker import Tokens

            tokens = Tokens(parts.coordinator, clock=parts.clock)
            return await tokens.issue(name, actions=actions, prefix=prefix, expires_in_ms=expires_in_ms)

    record, token = wait_for(work())
    if out.is_json():
        out.document({**_shown(record), "token": token})
    else:
        out.line(token)


@app.command("list")
@deployment_options
def list_tokens(deployment: Deployment) -> None:
    """Every token, without its secret. JSON: a line per token."""

    async def work() -> list[TokenRecord]:
        async with open_log(deployment) as parts:
            from forebay.broker import Tokens

            return await Tokens(parts.coordinator, clock=parts.clock).list()

    found = wait_for(work())
    if out.is_json():
        for record in found:
            out.document(_shown(record))
        return
    rows = [
        [
            record.token_id,
            record.name,
            ",".join(record.actions),
            f"{record.prefix}*",
            out.time_text(record.created_at_ms),
            "never" if record.expires_at_ms is None else out.time_text(record.expires_at_ms),
        ]
        for record in found
    ]
    out.table(["id", "name", "can", "topics", "issued", "expires"], rows)


@app.command("revoke")
@deployment_options
def revoke(
    deployment: Deployment,
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the token, as `list` shows it.")],
) -> None:
    """Make a token worthless. Brokers that run learn of it within seconds."""

    async def work() -> TokenRecord:
        async with open_log(deployment) as parts:
            from forebay.broker import Tokens

            return await Tokens(parts.coordinator, clock=parts.clock).revoke(token_id)

    record = wait_for(work())
    if out.is_json():
        out.document({"token_id": record.token_id, "name": record.name, "revoked": True})
    else:
        out.line(f"{record.token_id} ({record.name}) revoked")


def _actions(words: list[str]) -> list[Action]:
    from forebay.broker import Action

    try:
        return [Action(word) for word in words]
    except ValueError:
        raise UsageError(f"--can {' '.join(words)}", hint=f"one of: {', '.join(Action)}") from None


def _shown(record: TokenRecord) -> dict[str, Any]:
    return {
        "token_id": record.token_id,
        "name": record.name,
        "actions": list(record.actions),
        "topic_prefix": record.prefix,
        "created_at_ms": record.created_at_ms,
        "expires_at_ms": record.expires_at_ms,
    }
