"""Every route of the broker, with its handler."""

from __future__ import annotations

from forebay.broker._admin_groups import GroupHandlers
from forebay.broker._admin_topics import TopicHandlers
from forebay.broker._chores import ChoreHandlers
from forebay.broker._consume import Consume
from forebay.broker._cost import cost_routes
from forebay.broker._engines import Engines
from forebay.broker._objects import object_routes
from forebay.broker._produce import Produce
from forebay.broker._routes import Action, Query, Route
from forebay.broker._status import Status
from forebay.broker._tail import Tail
from forebay.formats import http_messages as m
from forebay.formats.http_messages import ARROW, JSON, MSGPACK, PATHS, SSE

__all__ = ["routes"]

_INTEGER = {"type": "integer", "minimum": 0, "maximum": 1 << 62}
_PARTITION = {"type": "integer", "minimum": 0, "maximum": 99_999}


def routes(engines: Engines, status: Status) -> list[Route]:
    """The table, without the document and the console, which are made from it or lie beside it."""
    return [
        *_status(status),
        *_records(engines),
        *_topics(engines),
        *object_routes(engines),
        *_groups(engines),
        *_chores(engines),
        *cost_routes(engines),
    ]


def _status(status: Status) -> list[Route]:
    return [
        Route(
            "GET",
            PATHS.HEALTH,
            status.health,
            "The process answers.",
            open=True,
            gives={JSON: m.HealthResponse},
        ),
        Route(
            "GET",
            PATHS.READY,
            status.ready,
            "Requests can be served.",
            open=True,
            gives={JSON: m.ReadyResponse},
            statuses=(503,),
        ),
        Route(
            "GET",
            PATHS.METRICS,
            status.metrics_json,
            "Every metric, as JSON.",
            action=Action.MONITOR,
            gives={JSON: None},
        ),
        Route(
            "GET",
            PATHS.METRICS_PROMETHEUS,
            status.metrics_prometheus,
            "Every metric, as Prometheus reads them.",
            action=Action.MONITOR,
            gives={"text/plain": None},
        ),
    ]


def _records(engines: Engines) -> list[Route]:
    in_arrow = "Arrow bodies only."
    return [
        Route(
            "POST",
            PATHS.PRODUCE,
            None,
            "Append records. 200: all batches succeeded; 503: all met back-pressure; 409: other ends.",
            role="write",
            takes={JSON: m.ProduceRequest, MSGPACK: m.ProduceRequestPacked, ARROW: None},
            gives={JSON: m.ProduceResponse, MSGPACK: m.ProduceResponse},
            queries=(
                Query("topic", in_arrow),
                Query("partition", in_arrow, schema=_PARTITION),
                Query("producer_id", in_arrow),
                Query("sequence", in_arrow, schema=_INTEGER),
                Query("epoch", in_arrow, schema=_INTEGER),
            ),
            statuses=(409, 503),
            begin=Produce(engines),
        ),
        Route(
            "POST",
            PATHS.CONSUME,
            Consume(engines),
            "Read records, waiting at the end for at most max_wait_ms. 409: a partition failed.",
            role="read",
            takes={JSON: m.ConsumeRequest, MSGPACK: m.ConsumeRequest},
            gives={JSON: m.ConsumeResponse, MSGPACK: m.ConsumeResponsePacked, ARROW: None},
            statuses=(409, 429),
        ),
        Route(
            "GET",
            PATHS.TAIL,
            Tail(engines),
            "Records as server-sent events, each a TailEvent whose id is its offset.",
            role="read",
            gives={SSE: m.TailEvent},
            queries=(
                Query("topic", "The topic.", required=True),
                Query("partition", "The partition; 0 if left out.", schema=_PARTITION),
                Query("from", "earliest, latest (if left out), an offset, or -N for the last N records."),
            ),
            statuses=(429,),
        ),
    ]


def _topics(engines: Engines) -> list[Route]:
    on = TopicHandlers(engines)
    return [
        Route("GET", PATHS.TOPICS, on.list_all, "The topics.", gives={JSON: m.TopicList}),
        Route(
            "POST",
            PATHS.TOPICS,
            on.create,
            "Create a topic.",
            takes={JSON: m.TopicCreate},
            gives={JSON: m.TopicView},
            success=201,
            statuses=(409,),
        ),
        Route(
            "GET",
            PATHS.TOPIC,
            on.describe,
            "A topic, and where its partitions begin and end.",
            action=Action.READ,
            gives={JSON: m.TopicView},
        ),
        Route(
            "PATCH",
            PATHS.TOPIC,
            on.alter,
            "Add partitions, or replace the settings.",
            action=Action.ADMIN,
            takes={JSON: m.TopicAlter},
            gives={JSON: m.TopicView},
        ),
        Route(
            "DELETE",
            PATHS.TOPIC,
            on.delete,
            "Remove a topic with its records.",
            action=Action.ADMIN,
            gives={JSON: m.Deleted},
        ),
        Route(
            "GET",
            PATHS.OFFSETS,
            on.offsets,
            "Where a partition begins and ends.",
            action=Action.READ,
            gives={JSON: m.OffsetsView},
            queries=(Query("time_ms", "Also the first offset from then on, as `at`.", schema=_INTEGER),),
        ),
        Route(
            "GET",
            PATHS.EXPLAIN,
            on.explain,
            "Where a record is stored.",
            action=Action.READ,
            gives={JSON: m.ExplainResponse},
            queries=(Query("offset", "The record.", required=True, schema=_INTEGER),),
        ),
        Route(
            "POST",
            PATHS.TRIM,
            on.trim,
            "Remove every record below an offset.",
            action=Action.ADMIN,
            takes={JSON: m.TrimRequest},
            gives={JSON: m.TrimView},
        ),
        Route(
            "GET",
            PATHS.FENCE,
            on.fence_state,
            "Whether a partition takes appends.",
            action=Action.READ,
            gives={JSON: m.FenceView},
        ),
        Route(
            "POST",
            PATHS.FENCE,
            on.fence,
            "Refuse all appends, under a new epoch.",
            action=Action.ADMIN,
            takes={JSON: m.FenceRequest},
            gives={JSON: m.FenceView},
        ),
        Route(
            "POST",
            PATHS.UNFENCE,
            on.unfence,
            "Take appends again.",
            action=Action.ADMIN,
            takes={JSON: m.UnfenceRequest},
            gives={JSON: m.FenceView},
        ),
    ]


def _groups(engines: Engines) -> list[Route]:
    on = GroupHandlers(engines)
    return [
        Route(
            "GET", PATHS.GROUPS, on.list_all, "The groups.", action=Action.MONITOR, gives={JSON: m.GroupList}
        ),
        Route(
            "GET",
            PATHS.GROUP,
            on.describe,
            "Members of a group and its lag.",
            gives={JSON: m.GroupView},
        ),
        Route(
            "DELETE",
            PATHS.GROUP,
            on.delete,
            "Forget a group and what it committed.",
            action=Action.ADMIN,
            gives={JSON: m.Deleted},
            queries=(Query("force", "true: also while members are alive."),),
        ),
        Route(
            "POST",
            PATHS.GROUP_OFFSETS,
            on.commit,
            "Commit offsets from outside of the group.",
            takes={JSON: m.CommitRequest},
            gives={JSON: m.CommitRequest},
        ),
        Route(
            "POST",
            PATHS.GROUP_RESET,
            on.reset,
            "Move a group to another place.",
            takes={JSON: m.ResetRequest},
            gives={JSON: m.ResetResponse},
        ),
    ]


def _chores(engines: Engines) -> list[Route]:
    on = ChoreHandlers(engines)
    return [
        Route(
            "GET",
            PATHS.COMPACTION,
            on.states,
            "How far the partitions of a topic are compacted.",
            gives={JSON: m.CompactionStates},
            queries=(Query("topic", "The topic.", required=True),),
        ),
        Route(
            "POST",
            PATHS.COMPACTION,
            on.compact,
            "One pass of compaction over a topic or a partition.",
            takes={JSON: m.CompactionRequest},
            gives={JSON: m.CompactionResponse},
        ),
        Route(
            "POST",
            PATHS.RETENTION,
            on.retain,
            "One pass of retention.",
            takes={JSON: m.RetentionRequest},
            gives={JSON: m.RetentionResponse},
        ),
    ]
