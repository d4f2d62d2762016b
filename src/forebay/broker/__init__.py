"""The HTTP door to the log: produce, consume, tail, administer."""

from forebay.broker._broker import Broker
from forebay.broker._collector import calm_collector
from forebay.broker._config import BrokerConfig, Role
from forebay.broker._limits import HttpLimits
from forebay.broker._open_files import connections_that_fit
from forebay.broker._routes import Action
from forebay.broker._service_door import ServiceDoor
from forebay.broker._tls import self_signed, server_tls
from forebay.broker._tokens import TokenRecord, Tokens

__all__ = [
    "Action",
    "Broker",
    "BrokerConfig",
    "HttpLimits",
    "Role",
    "ServiceDoor",
    "TokenRecord",
    "Tokens",
    "calm_collector",
    "connections_that_fit",
    "self_signed",
    "server_tls",
]
