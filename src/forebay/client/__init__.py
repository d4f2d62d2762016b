"""Forebay over HTTP: the calls of `forebay.connect`, against a broker.

    from forebay.client import connect

    with connect("http://127.0.0.1:8080") as bay: ...

`forebay.client.aio.connect` is the same for asyncio. Needs the extra `broker`, for its HTTP parser.
"""

from forebay.client._config import ClientConfig, ConsumerConfig, ProducerConfig
from forebay.client._errors import Refused
from forebay.client._places import Position
from forebay.client._reading import OffsetOutOfRange, RecordStream, TopicPartition
from forebay.client._receipts import Delivered, Delivery, PartlyDelivered
from forebay.client._topics import TopicDescription
from forebay.client.sync import Client, Consumer, Groups, Producer, Receipt, Topics, connect

__all__ = [
    "Client",
    "ClientConfig",
    "Consumer",
    "ConsumerConfig",
    "Delivered",
    "Delivery",
    "Groups",
    "OffsetOutOfRange",
    "PartlyDelivered",
    "Position",
    "Producer",
    "ProducerConfig",
    "Receipt",
    "RecordStream",
    "Refused",
    "TopicDescription",
    "TopicPartition",
    "Topics",
    "connect",
]
