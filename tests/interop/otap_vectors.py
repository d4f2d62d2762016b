"""Writes `tests/dataflow/data/otap` anew: `FOREBAY_OTAP_PEER=build python -m tests.interop.otap_vectors`."""

from __future__ import annotations

from pathlib import Path

import zstandard
from tests.dataflow.otap_samples import random_request, sample
from tests.interop.otap_peer import join_frames, peer, run

PLACE = Path(__file__).resolve().parents[1] / "dataflow" / "data" / "otap"
WORDS = (3, 40, 400, 4_000)


def main() -> None:
    """Two streams of each signal: samples, and random ones whose dictionaries outgrow their keys."""
    binary = peer()
    assert binary is not None, "the program is not built"
    for signal in ("traces", "logs", "metrics"):
        samples = [sample(signal, number) for number in range(3)]
        randoms = [random_request(signal, seed, 25, words) for seed, words in enumerate(WORDS)]
        for name, messages, codec in (("samples", samples, "zstd"), ("random", randoms, "none")):
            requests = [each.SerializeToString() for each in messages]
            batches = run(binary, "encode", signal, codec, requests=requests)
            pairs = [part for pair in zip(requests, batches, strict=True) for part in pair]
            packed = zstandard.ZstdCompressor(19).compress(join_frames(pairs))
            (PLACE / f"{signal}-{name}.zst").write_bytes(packed)


if __name__ == "__main__":
    main()
