"""Apache Kafka on one node, with its own performance tool: jars by Maven into the cache, all on loopback."""

from benchmarks.peers.kafka.server import KafkaServer, Performance, kafka_jars

__all__ = ["KafkaServer", "Performance", "kafka_jars"]
