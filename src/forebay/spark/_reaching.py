"""Whether anybody answers where a session is to be, asked before Spark is.

Spark asks long and says nothing meanwhile: a client of Spark Connect goes on for ten minutes and more, and a
driver looks for its master for more than one, to end with a page of Java that does not name it.
"""

from __future__ import annotations

import socket
from typing import Final

from forebay.errors import Unavailable

__all__ = ["check_connect_server", "check_masters"]

ANSWER_S: Final = 20.0
"""Seconds in which somebody is to answer."""
STANDALONE: Final = "spark://"


def check_connect_server(url: str) -> None:
    """Raise `Unavailable` where no server of Spark Connect answers. What is no address is left to Spark."""
    try:
        import grpc
        from pyspark.errors import PySparkException
        from pyspark.sql.connect.client import DefaultChannelBuilder
    except ImportError:
        return  # Spark says what is missing.
    try:
        builder = DefaultChannelBuilder(url)
        channel = builder.toChannel()
    except (PySparkException, ValueError):
        return
    try:
        grpc.channel_ready_future(channel).result(timeout=ANSWER_S)
    except grpc.FutureTimeoutError:
        raise Unavailable(
            f"no server of Spark Connect answers at {builder.endpoint} within {ANSWER_S:g} s",
            hint="spark_remote or SPARK_REMOTE names it: is it there, and does it use TLS as the URL says?",
        ) from None
    finally:
        channel.close()


def check_masters(url: str) -> None:
    """Raise `Unavailable` where none of the masters of `spark://host:port,...` answers."""
    if not url.startswith(STANDALONE):
        return
    problems = []
    for address in url.removeprefix(STANDALONE).split(","):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            return  # Spark says what is wrong with it.
        try:
            with socket.create_connection((host.strip("[]"), int(port)), ANSWER_S):
                return
        except (OSError, OverflowError) as error:
            problems.append(f"{address}: {getattr(error, 'strerror', None) or error}")
    raise Unavailable(
        f"no Spark master answers at {'; '.join(problems)}",
        hint="spark_master or --master names it: is it there, and may this machine reach it?",
    )
