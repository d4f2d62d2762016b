"""One protocol, two implementations: ours and the published `otel-arrow-dfe-pdata` crate, in both directions.

Run by `make interop`, and skipped where the crate's program is not built: see `otap_peer`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dataflow.otap_samples import canonical, random_request, sample
from tests.interop import otap_peer

from forebay.dataflow._otap import Batch, PayloadStreams, decode, encode
from forebay.dataflow._signals import SIGNALS, parse

pytestmark = [pytest.mark.interop, pytest.mark.timeout(8_000)]

MOST = 64 << 20
SEEDS = 8


@pytest.fixture(scope="module")
def binary() -> Path:
    found = otap_peer.peer()
    if found is None:
        pytest.skip("the OTAP crate is not built; FOREBAY_OTAP_PEER=build builds it, in some 25 minutes")
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("signal", sorted(SIGNALS))
def test_both_understand_each_other(binary: Path, signal: str, seed: int) -> None:
    messages = [sample(signal, seed), sample(signal, seed + 1)]
    messages += [random_request(signal, seed, (1, 3, 40, 150)[seed % 4], words) for words in (3, 300, 5_000)]
    wanted = [canonical(signal, each) for each in messages]

    codec = ("zstd", "none", "lz4")[seed % 3]
    requests = [each.SerializeToString() for each in messages]
    streams = PayloadStreams(signal, MOST)
    theirs = otap_peer.run(binary, "encode", signal, codec, requests=requests)
    found = [decode(signal, streams.read(Batch.FromString(each)), MOST) for each in theirs]
    assert [canonical(signal, *each) for each in found] == wanted

    ours = [
        batch.SerializeToString()
        for number, each in enumerate(messages)
        for batch in encode(signal, each, codec, str(number))
    ]
    answers = otap_peer.run(binary, "decode", signal, requests=ours)
    assert [canonical(signal, parse(SIGNALS[signal], each)) for each in answers] == wanted
