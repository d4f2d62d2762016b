"""The two JSON manifests of the claiming queue."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.formats import Corrupt, ingest_manifest
from forebay.formats.ingest_manifest import CLAIM_MS_MAX, ConsumerManifest, ProducerManifest

names = st.text(max_size=30)


def test_the_producer_manifest_is_the_drafts() -> None:
    data = ingest_manifest.encode(ProducerManifest(["data/A.batch", "data/B.batch"]))
    assert json.loads(data) == {"pending": ["data/A.batch", "data/B.batch"]}


def test_the_consumer_manifest_is_the_drafts() -> None:
    data = ingest_manifest.encode(ConsumerManifest({"data/A.batch": 1719400000000}, ["data/B.batch"]))
    assert json.loads(data) == {"claimed": {"data/A.batch": 1719400000000}, "done": ["data/B.batch"]}


@given(st.lists(names))
def test_producer_manifests_come_back(pending: list[str]) -> None:
    manifest = ProducerManifest(pending)
    assert ingest_manifest.decode_producer(ingest_manifest.encode(manifest)) == manifest


@given(st.dictionaries(names, st.integers(0, CLAIM_MS_MAX)), st.lists(names))
def test_consumer_manifests_come_back(claimed: dict[str, int], done: list[str]) -> None:
    manifest = ConsumerManifest(claimed, done)
    assert ingest_manifest.decode_consumer(ingest_manifest.encode(manifest)) == manifest


def test_unknown_keys_and_whitespace_are_accepted() -> None:
    data = b' {"future": {"x": [1]}, "pending": ["a"] }\n'
    assert ingest_manifest.decode_producer(data).pending == ["a"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"pending": null}',
        b'{"pending": [1]}',
        b'{"pending": ["a"]',
        b"\xff",
        b"{" * 9999,
    ],
)
def test_a_malformed_producer_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt, match="q/manifest"):
        ingest_manifest.decode_producer(data, name="q/manifest")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"pending": []}',
        b'{"claimed": {}}',
        b'{"done": []}',
        b'{"claimed": [], "done": []}',
        b'{"claimed": {"a": "x"}, "done": []}',
        b'{"claimed": {"a": -1}, "done": []}',
        b'{"claimed": {"a": 1.5}, "done": []}',
        b'{"claimed": {"a": 9223372036854775807}, "done": []}',
        b'{"claimed": {"a": 1}, "done": [2]}',
    ],
)
def test_a_malformed_consumer_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        ingest_manifest.decode_consumer(data)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_decoded_or_refused(data: bytes) -> None:
    for decode in (ingest_manifest.decode_producer, ingest_manifest.decode_consumer):
        try:
            decode(data)
        except Corrupt as error:
            assert 0 <= error.position <= len(data)


@pytest.mark.parametrize(
    ("path", "derived"),
    [
        ("ingest/manifest.json", "ingest/manifest.consumer.json"),
        ("ingest/manifest", "ingest/manifest.consumer"),
        ("v1.2/manifest", "v1.2/manifest.consumer"),
        ("manifest.json", "manifest.consumer.json"),
        ("a.b.json", "a.b.consumer.json"),
        ("q/.hidden", "q/.hidden.consumer"),
        ("manifest", "manifest.consumer"),
    ],
)
def test_the_consumer_manifest_lies_beside_its_producer_manifest(path: str, derived: str) -> None:
    assert ingest_manifest.consumer_name(path) == derived
