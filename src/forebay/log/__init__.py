"""Leaderless topics and partitions."""

__all__: list[str] = []
