"""What every engine needs once: time, identity, retry, batching, limits, metrics, background services."""
