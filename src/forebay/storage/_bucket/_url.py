"""A bucket's address: which client to make, and what of the address may be shown.

    s3://bucket/prefix?endpoint=http://127.0.0.1:8333&region=eu-central-1
    gs://bucket/prefix
    az://container/prefix?account_name=...

Credentials come from the usual environment variables, which obstore reads itself. They may stand in the
query too, for tests; they are cut out of the address that messages show. An option that is not known is
refused by name, so that a misspelt one is not silently without effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from forebay.errors import InvalidKey, InvalidUrl
from forebay.kit.retry import RetryPolicy
from forebay.storage._api import validate_key

__all__ = ["BucketUrl", "Client", "Clients", "parse_bucket_url"]

Client: TypeAlias = S3Store | GCSStore | AzureStore

REQUEST_TIMEOUT_S = 60
"""Seconds that one request may take with its body."""
CONNECT_TIMEOUT_S = 5
"""Seconds until a connection must stand."""
PREFIX_BYTES_MAX = 120
"""Longest prefix in a URL: with the longest key it stays under the 1,024 bytes of S3."""


@dataclass(frozen=True, slots=True)
class _Scheme:
    make: Callable[..., Client]
    options: frozenset[str]
    secrets: frozenset[str]
    endpoint_option: str
    endpoint_variables: tuple[str, ...]
    versions_are_generations: bool = False


_S3_SECRETS = frozenset({"access_key_id", "secret_access_key", "session_token"})
_GS_SECRETS = frozenset({"service_account_key"})
_AZ_SECRETS = frozenset({"account_key", "sas_key"})
_SCHEMES = {
    "s3": _Scheme(
        S3Store,
        frozenset({"endpoint", "region", "anonymous"}) | _S3_SECRETS,
        _S3_SECRETS,
        "endpoint",
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    ),
    "gs": _Scheme(
        GCSStore,
        frozenset({"endpoint", "service_account", "anonymous"}) | _GS_SECRETS,
        _GS_SECRETS,
        "base_url",
        ("GOOGLE_BASE_URL",),
        versions_are_generations=True,
    ),
    "az": _Scheme(
        AzureStore,
        frozenset({"endpoint", "account_name", "anonymous"}) | _AZ_SECRETS,
        _AZ_SECRETS,
        "endpoint",
        ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    ),
}


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """An address, taken apart."""

    scheme: str
    bucket: str
    prefix: str
    options: Mapping[str, str]
    shown: str
    """The address without secrets."""
    endpoint: str
    """Where requests go, or empty for the provider's own address."""
    lists_in_order: bool
    """Whether listings may be passed on as they come: the providers' own services sort them by bytes."""

    @property
    def versions_are_generations(self) -> bool:
        """Google checks a generation number where the others check the ETag."""
        return _SCHEMES[self.scheme].versions_are_generations

    def clients(self, policy: RetryPolicy) -> Clients:
        """The two clients of this bucket."""
        return Clients(self._client(RetryPolicy(attempts_max=1)), self._client(policy))

    def _client(self, retries: RetryPolicy) -> Client:
        scheme = _SCHEMES[self.scheme]
        settings: dict[str, Any] = {
            name: value for name, value in self.options.items() if name not in ("endpoint", "anonymous")
        }
        if "endpoint" in self.options:
            settings[scheme.endpoint_option] = self.options["endpoint"]
        if self.options.get("anonymous") == "true":
            settings["skip_signature"] = True
        if self.scheme == "s3":
            settings["virtual_hosted_style_request"] = False
            if "region" not in settings and not _first_variable(("AWS_REGION", "AWS_DEFAULT_REGION")):
                settings["region"] = "us-east-1"
        try:
            return scheme.make(
                self.bucket,
                prefix=self.prefix or None,
                client_options={
                    "allow_http": self.endpoint.startswith("http://"),
                    "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                    "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
                },
                retry_config=_retry_config(retries),
                **settings,
            )
        except (BaseError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidUrl(
                f"{self.shown}: {reason}", hint="check the options and the environment"
            ) from error


@dataclass(frozen=True, slots=True)
class Clients:
    """Two doors to one bucket."""

    once: Client
    """Sends every request once: whoever must know what became of a request uses this one."""
    patient: Client
    """Repeats requests by itself, for uploads in parts and listings in pages."""


def parse_bucket_url(url: str) -> BucketUrl:
    """Take `url` apart. Raises `InvalidUrl`."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    # What follows never shows the query: it may hold a secret even where it is malformed.
    plain = f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in parts.netloc or ":" in parts.netloc:
        raise InvalidUrl(
            f"{plain}: only a bucket name may follow {scheme}://", hint=f"use {_example(scheme)}"
        )
    if not parts.netloc or parts.fragment:
        raise InvalidUrl(f"{plain}: not a bucket URL", hint=f"use {_example(scheme)}")
    options = _options(plain, scheme, parts.query)
    known = _SCHEMES[scheme]
    endpoint = options.get("endpoint") or _first_variable(known.endpoint_variables)
    if "endpoint" in options and not endpoint.startswith(("http://", "https://")):
        raise InvalidUrl(
            f"{plain}: endpoint {endpoint!r} is no URL", hint="begin it with http:// or https://"
        )
    public = {name: value for name, value in options.items() if name not in known.secrets}
    shown = plain + (f"?{urlencode(public, safe='/:', quote_via=quote)}" if public else "")
    return BucketUrl(scheme, parts.netloc, _prefix(plain, parts.path), options, shown, endpoint, not endpoint)


def _options(plain: str, scheme: str, query: str) -> dict[str, str]:
    known = _SCHEMES[scheme].options
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            listed = ", ".join(sorted(known))
            raise InvalidUrl(f"{plain}: unknown option {name!r}", hint=f"{scheme}:// knows {listed}")
        if name in options or not value:
            raise InvalidUrl(f"{plain}: option {name!r} is empty or given twice", hint="give it one value")
        options[name] = value
    if options.get("anonymous", "true") not in ("true", "false"):
        raise InvalidUrl(f"{plain}: option 'anonymous' is neither true nor false", hint="use anonymous=true")
    return options


def _prefix(plain: str, path: str) -> str:
    prefix = path.strip("/")
    if not prefix:
        return ""
    try:
        validate_key(prefix)
    except InvalidKey as error:
        raise InvalidUrl(f"{plain}: the prefix cannot be used: {error.reason}", hint=error.hint) from None
    if len(prefix.encode()) > PREFIX_BYTES_MAX:
        raise InvalidUrl(f"{plain}: the prefix is longer than {PREFIX_BYTES_MAX} bytes", hint="shorten it")
    return prefix


def _retry_config(policy: RetryPolicy) -> Any:
    return {
        "max_retries": policy.attempts_max - 1,
        "retry_timeout": timedelta(milliseconds=policy.deadline_ms),
        "backoff": {
            "init_backoff": timedelta(milliseconds=policy.base_ms),
            "max_backoff": timedelta(milliseconds=policy.cap_ms),
            "base": 2,
        },
    }


def _first_variable(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _example(scheme: str) -> str:
    return f"{scheme}://{'container' if scheme == 'az' else 'bucket'}/prefix"
