"""Consumer groups for plain code: the same calls as `forebay.log.Groups`, on the loop of a bay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self

import pyarrow as pa

from forebay import log
from forebay._connect import Position, time_ms
from forebay._loop_thread import LoopThread
from forebay.log import GroupDescription, GroupOffset, GroupReset, TopicPartition
from forebay.log._group_consumer import StartAt

__all__ = ["Consumer", "Groups"]


class Consumer:
    """A member of a group that reads. A context manager, for one thread at a time."""

    def __init__(self, thread: LoopThread, consumer: log.GroupConsumer) -> None:
        self._thread = thread
        self._consumer = consumer

    @property
    def member_id(self) -> str:
        """How the group calls it."""
        return self._consumer.member.member_id

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """Next offset to be handed out, by partition."""
        return self._consumer.positions

    def poll(self, *, timeout_s: float = 1.0, max_bytes: int | None = None) -> list[pa.RecordBatch]:
        """Records of any of its partitions, as Arrow; empty where none came within the timeout."""
        batches = self._thread.run(self._consumer.poll(timeout_s=timeout_s, max_bytes=max_bytes))
        return [batch.to_arrow() for batch in batches]

    def commit(self) -> None:
        """Commit everything that was handed out; raises `GenerationFenced` for what is no longer ours."""
        self._thread.run(self._consumer.commit())

    def close(self) -> None:
        """Leave the group, so that others take over at once."""
        self._thread.run(self._consumer.member.close())

    def __enter__(self) -> Self:
        self._thread.run(self._consumer.member.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Groups:
    """Lists, describes, commits, resets and deletes groups, and makes consumers."""

    def __init__(self, thread: LoopThread, groups: log.Groups) -> None:
        self._thread = thread
        self._groups = groups

    def consumer(
        self, group: str, topics: Iterable[str], *, name: str = "member", start_at: StartAt = "earliest"
    ) -> Consumer:
        """A consumer: `with bay.groups.consumer("billing", ["orders"]) as consumer: ...`"""

        async def make() -> log.GroupConsumer:
            return self._groups.consumer(group, topics, name=name, start_at=start_at)

        return Consumer(self._thread, self._thread.run(make()))

    def committed(self, group: str) -> dict[TopicPartition, GroupOffset]:
        """What was committed, by partition."""
        return self._thread.run(self._groups.committed(group))

    def commit(self, group: str, offsets: Mapping[TopicPartition, int], *, generation: int = 0) -> None:
        """Commit from outside the group, fenced by a generation."""
        self._thread.run(self._groups.commit(group, offsets, generation=generation))

    def describe(self, group: str) -> GroupDescription:
        """Members and lag."""
        return self._thread.run(self._groups.describe(group))

    def reset(
        self,
        group: str,
        partitions: Sequence[TopicPartition] | None = None,
        *,
        to: Position,
        dry_run: bool = False,
        force: bool = False,
    ) -> list[GroupReset]:
        """Move a group to one end, an offset or a time; with `dry_run` only say what would change."""
        work = (
            self._groups.reset(group, partitions, to_time_ms=time_ms(to), dry_run=dry_run, force=force)
            if isinstance(to, datetime)
            else self._groups.reset(group, partitions, to=to, dry_run=dry_run, force=force)
        )
        return self._thread.run(work)

    def delete(self, group: str, *, force: bool = False) -> None:
        """Forget a group and its offsets."""
        self._thread.run(self._groups.delete(group, force=force))

    def list(self) -> list[str]:
        """Every group, by name. (Last in the class: its name hides the builtin from annotations.)"""
        return self._thread.run(self._groups.list())
