"""`open_store`: which URL opens what, and what is said of those that open nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay.storage
from forebay.errors import ForebayError, InvalidUrl
from forebay.storage import BucketStore, LocalStore, MemoryStore, open_store
from forebay.storage._bucket._url import parse_bucket_url


def test_every_public_name_can_be_imported() -> None:
    assert sorted(forebay.storage.__all__) == forebay.storage.__all__
    for name in forebay.storage.__all__:
        assert hasattr(forebay.storage, name), name


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "FILE://{}"])
async def test_paths_and_file_urls_open_a_directory(tmp_path: Path, form: str) -> None:
    async with open_store(form.format(tmp_path / "a%20b" if "://" in form else tmp_path / "a b")) as store:
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / "a b"
        assert not store.root.exists()


async def test_path_objects_and_relative_paths_open_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("data", "./data", Path("data")):
        async with open_store(url) as store:
            assert store.url == str(tmp_path / "data")


async def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in ("~/data", Path("~/data")):
        async with open_store(url) as store:
            assert store.url == str(tmp_path / "data")


async def test_memory_opens_memory() -> None:
    assert isinstance(open_store("memory://"), MemoryStore)
    assert open_store("memory://name").url == "memory://name"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "empty"),
        ("ftp://host/x", "unknown store scheme 'ftp'"),
        ("c://x", "unknown store scheme 'c'"),
        ("file://other/path", "another machine"),
        ("file://", "not a file URL"),
        ("file:///x?option=1", "not a file URL"),
        ("memory://name?option=1", "no options"),
        ("s3://", "not a bucket URL"),
        ("s3:///key", "not a bucket URL"),
        ("s3://bucket#part", "not a bucket URL"),
        ("s3://user:word@bucket/x", "only a bucket name"),
        ("s3://host:9000/x", "only a bucket name"),
        ("s3://bucket/x?endpont=http://h", "unknown option 'endpont'"),
        ("s3://bucket/x?region=a&region=b", "given twice"),
        ("s3://bucket/x?region=", "empty"),
        ("s3://bucket/x?endpoint=127.0.0.1:8333", "is no URL"),
        ("s3://bucket/x?anonymous=maybe", "neither true nor false"),
        ("s3://bucket/a//b", "cannot be used"),
        ("s3://bucket/a/../b", "cannot be used"),
        ("s3://bucket/" + "x" * 121, "longer than"),
        ("gs://bucket/x?region=a", "unknown option 'region'"),
        ("s3:/bucket/x", "neither a URL nor a plain path"),
        ("memory:name", "neither a URL nor a plain path"),
        ("file:x", "neither a URL nor a plain path"),
        ("a\0b", "is no path"),
        ("file:///a%00b", "is no path"),
    ],
)
def test_a_url_that_opens_nothing_says_why(url: str, words: str) -> None:
    with pytest.raises(InvalidUrl) as refused:
        open_store(url)
    assert words in refused.value.message
    assert refused.value.hint
    assert "\n" not in refused.value.message


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(InvalidUrl) as refused:
        open_store("hdfs://x")
    for scheme in ("memory://", "file://", "s3://", "gs://", "az://"):
        assert scheme in refused.value.hint


def test_secrets_are_never_shown() -> None:
    options = "access_key_id=AKIA&secret_access_key=hush&session_token=tell-no-one"
    store = open_store(f"s3://bucket/a/b?endpoint=http://127.0.0.1:1&region=here&{options}")
    assert store.url == "s3://bucket/a/b?endpoint=http://127.0.0.1:1&region=here"
    wrong = [
        f"s3://bucket/x?{options}&typo=1",
        f"s3://u:hush@bucket/x?{options}",
        f"s3://bucket/x?{options}&region=",
    ]
    for url in wrong:
        with pytest.raises(ForebayError) as refused:
            open_store(url)
        for secret in ("AKIA", "hush", "tell-no-one"):
            assert secret not in f"{refused.value} {refused.value.hint}"


def test_an_endpoint_from_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_bucket_url("s3://bucket/p").endpoint == ""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert parse_bucket_url("s3://bucket/p").endpoint == "http://127.0.0.1:1"
    assert parse_bucket_url("s3://bucket/p?endpoint=https://h").endpoint == "https://h"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://bucket/p/q/",
        "gs://bucket/p?anonymous=true&endpoint=http://127.0.0.1:1",
        "az://container/p?account_name=name&account_key=a2V5",
    ],
)
def test_buckets_open_without_a_network(url: str) -> None:
    assert isinstance(open_store(url), BucketStore)


def test_an_azure_url_without_an_account_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidUrl, match="Account must be specified"):
        open_store("az://container/p")
