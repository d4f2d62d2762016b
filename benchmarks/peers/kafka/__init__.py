"""Apache Kafka on one node, with its own performance tool and Spark's own connector.

The jars come by Maven into the cache; everything is on loopback.
"""

from benchmarks.peers.kafka.connector import LARGE_FETCHES, Connector, connector_jars
from benchmarks.peers.kafka.server import KafkaServer, Performance, kafka_jars

__all__ = ["LARGE_FETCHES", "Connector", "KafkaServer", "Performance", "connector_jars", "kafka_jars"]
