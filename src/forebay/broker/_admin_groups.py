"""Consumer groups over HTTP: look, commit, reset, forget.

A group belongs to no topic. Who may read a topic may commit offsets of it; who may administer a topic may
reset groups on it; all that concerns a group as a whole takes a token for every topic.
"""

from __future__ import annotations

from forebay.broker._bodies import json_response, read
from forebay.broker._engines import Engines
from forebay.broker._errors import BadRequest
from forebay.broker._http import Response
from forebay.broker._routes import Action, Call
from forebay.errors import AccessDenied, ForebayError
from forebay.formats.http_messages import (
    CommitRequest,
    Deleted,
    GroupList,
    GroupMemberView,
    GroupPartition,
    GroupView,
    ResetRequest,
    ResetResponse,
    ResetResult,
)
from forebay.log import GroupLag, TopicPartition

__all__ = ["GroupHandlers"]


class GroupHandlers:
    """One method per route."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    async def list_all(self, call: Call) -> Response:
        """Their names."""
        return json_response(GroupList(await self._engines.groups.list()))

    async def describe(self, call: Call) -> Response:
        """Members, and the lag in those topics that the caller may read or monitor."""
        found = await self._engines.groups.describe(call.params["group"])
        kept = [each for each in found.partitions if _sees(call, each.topic)]
        topics = {topic for each in found.members for topic in each.topics if _sees(call, topic)}
        if not kept and not topics and not _sees(call, None):
            raise AccessDenied(
                "this token sees no topic of the group", hint="forebay tokens issue makes one that does"
            )
        return json_response(
            GroupView(
                group=found.group,
                generation=found.generation,
                members=[
                    GroupMemberView(
                        member_id=each.member_id,
                        topics=[topic for topic in each.topics if topic in topics],
                        joined_at_ms=each.joined_at_ms,
                    )
                    for each in found.members
                ],
                partitions=[_lag(each) for each in kept],
                lag_records=sum(each.records for each in kept),
                lag_seconds=max((each.seconds for each in kept), default=0.0),
                problems=[_problem(call, error) for error in found.damaged],
            )
        )

    async def commit(self, call: Call) -> Response:
        """All partitions, or the error of the first that was refused; see `Groups.commit`."""
        message = read(call.request, CommitRequest)
        for each in message.offsets:
            call.access.check(Action.READ, each.topic)
        offsets = {TopicPartition(each.topic, each.partition): each.offset for each in message.offsets}
        await self._engines.groups.commit(call.params["group"], offsets, generation=message.generation)
        return json_response(message)

    async def reset(self, call: Call) -> Response:
        """In the partitions named, or all the group knows."""
        message = read(call.request, ResetRequest)
        if (message.to is None) == (message.to_time_ms is None):
            raise BadRequest("a reset goes to one place", hint="send either `to` or `to_time_ms`")
        if message.topic is None and message.partition is not None:
            raise BadRequest("a partition without its topic", hint="name the topic as well")
        call.access.check(Action.ADMIN, message.topic)
        plan = await self._engines.groups.reset(
            call.params["group"],
            await self._places(message),
            to=message.to,
            to_time_ms=message.to_time_ms,
            dry_run=message.dry_run,
            force=message.force,
        )
        results = [
            ResetResult(topic=each.topic, partition=each.partition, before=each.before, after=each.after)
            for each in plan
        ]
        return json_response(ResetResponse(results, message.dry_run))

    async def _places(self, message: ResetRequest) -> list[TopicPartition] | None:
        if message.topic is None:
            return None
        topic = await self._engines.catalog.describe(message.topic)
        if message.partition is not None:
            topic.check_partition(message.partition)
            return [TopicPartition(message.topic, message.partition)]
        return [TopicPartition(message.topic, number) for number in range(topic.partitions)]

    async def delete(self, call: Call) -> Response:
        """And its offsets."""
        force = call.request.query.get("force", "false")
        if force not in ("true", "false"):
            raise BadRequest(f"force is {force[:20]!r}", hint="true or false")
        group = call.params["group"]
        await self._engines.groups.delete(group, force=force == "true")
        return json_response(Deleted(group, True))


def _sees(call: Call, topic: str | None) -> bool:
    return any(call.access.allows(action, topic) for action in (Action.READ, Action.ADMIN, Action.MONITOR))


def _problem(call: Call, error: ForebayError) -> str:
    # The text may name a topic.
    return error.message if _sees(call, None) else "something of this group cannot be read"


def _lag(found: GroupLag) -> GroupPartition:
    return GroupPartition(
        topic=found.topic,
        partition=found.partition,
        committed=found.committed,
        earliest=found.earliest,
        next=found.next,
        lag_records=found.records,
        lag_seconds=found.seconds,
        owner=found.owner,
        generation=found.generation,
    )
