"""Where a store on S3 lies and how it is reached.

Owns: the grammar of `s3://bucket/prefix`, the options with their defaults and checks, and the arguments that s3fs is
given for them.
Does not know: requests, errors of a server, what a store holds.

Invariants:
1. Bucket and prefix are taken literally: nothing is percent-decoded, and `?`, `#`, `+` and spaces are characters.
2. No component of a prefix is empty, `.` or `..`, no server takes one for another, and a prefix leaves room for every
   key (S3 allows 1024 bytes).
3. What is given here wins over the FSSPEC configuration, which wins over AWS_* variables and AWS's own files.
4. s3fs and botocore never repeat a request by themselves (s3_retry.py does; the HTTP library may, once, where a
   connection broke), and nothing is listed from a cache.
5. A secret is in no message and no repr.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from recovery.errors import ConfigError

Addressing = Literal["auto", "path", "virtual"]

KEY_BYTES_MAX = 1024
PREFIX_BYTES_MAX = 768

_BUCKET = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{1,254}")
_NOT_IN_PREFIX = re.compile(r"[\x00-\x1f\x7f\\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How a bucket is reached. Everything has a default; docs/s3.md says where the defaults come from.

    Args:
        endpoint_url: the server, `https://host[:port]`; None: AWS_ENDPOINT_URL, then AWS itself.
        region: None: AWS_REGION, then AWS_DEFAULT_REGION, then the profile's.
        addressing: where the bucket's name goes: in the path, in the host's name (`virtual`), or `auto`: in the path
            for a given endpoint and in the host's name for AWS.
        profile: a profile of AWS's own configuration files.
        key, secret, token: credentials; they cannot be renewed, so leave them out where something else has them.
        connect_timeout_s, read_timeout_s: of one request; a large upload is given more.
        retry_for_s: how long one call is repeated while the server is busy or answers are lost.
        max_connections: at the same time, per process.
        exclusive: this process promises to be the only writer, for a server without conditional create. No fencing.
    """

    endpoint_url: str | None = None
    region: str | None = None
    addressing: Addressing = "auto"
    profile: str | None = None
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    retry_for_s: float = 20.0
    max_connections: int = 64
    exclusive: bool = False

    def __post_init__(self) -> None:
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)
        if self.addressing not in get_args(Addressing):
            raise ConfigError(f"addressing: found {self.addressing!r}", hint="use auto, path or virtual")
        if (self.key is None) != (self.secret is None) or (self.token is not None and self.key is None):
            raise ConfigError("key, secret and token: some of them are missing", hint="give key and secret, or neither")
        for name in ("connect_timeout_s", "read_timeout_s", "retry_for_s", "max_connections"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: found {getattr(self, name)!r}", hint="use a number above 0")
        if not isinstance(self.exclusive, bool):
            raise ConfigError(f"exclusive: found {self.exclusive!r}", hint="use True or False")


def check_options(given: Mapping[str, Any]) -> S3Options:
    """Options by name. Raises ConfigError with the nearest name for one that there is not."""
    known = [each.name for each in fields(S3Options)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ConfigError(f"a store on S3 has no option {name!r}", hint=hint)
    return S3Options(**given)


def parse_address(url: str) -> tuple[str, str]:
    """Bucket and prefix of `s3://bucket/prefix`; the prefix has no slash at its end."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not bucket:
        raise ConfigError(f"{url}: a bucket's name is missing", hint="write s3://bucket/prefix")
    check_bucket(bucket)
    return bucket, check_root(prefix.rstrip("/") if prefix.strip("/") else "")


def check_bucket(bucket: str) -> str:
    if bucket.startswith("arn:"):
        raise ConfigError(f"{bucket}: a bucket is named by its name, not its ARN", hint="use an access point's alias")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"{bucket!r:.200} is no name of a bucket", hint="write s3://bucket/prefix")
    if bucket.endswith("--x-s3"):
        raise ConfigError(f"{bucket} is a directory bucket", hint="use a general purpose bucket")
    return bucket


def check_root(prefix: str) -> str:
    """`prefix` if it may be a store's root in a bucket."""
    try:
        nbytes = len(prefix.encode("utf-8"))
    except UnicodeEncodeError:
        raise ConfigError(f"{prefix!r:.200} is not text that a bucket can have in a name") from None
    if _NOT_IN_PREFIX.search(prefix):
        hint = "name another prefix; some servers take a backslash for a slash"
        raise ConfigError(f"{prefix!r:.200} has a control character or a backslash in it", hint=hint)
    if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        hint = "no part between slashes may be empty, `.` or `..`"
        raise ConfigError(f"{prefix!r:.200} cannot be a store's prefix in a bucket", hint=hint)
    if nbytes > PREFIX_BYTES_MAX:
        raise ConfigError(f"a prefix of {nbytes} bytes is too long", hint=f"use at most {PREFIX_BYTES_MAX}")
    return prefix


def filesystem_arguments(options: S3Options, configured: Mapping[str, Any]) -> dict[str, Any]:
    """What `S3FileSystem` is made with. `configured`: what fsspec's own configuration says of s3."""
    client = dict(configured.get("client_kwargs") or {})
    config = dict(configured.get("config_kwargs") or {})
    arguments = {**configured, "client_kwargs": client, "config_kwargs": config}
    region = options.region or client.get("region_name")
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region:
        client["region_name"] = region
    if options.endpoint_url:
        arguments["endpoint_url"] = options.endpoint_url
    if options.profile:
        arguments["profile"] = options.profile
    if options.key is not None:
        arguments |= {"key": options.key, "secret": options.secret, "token": options.token}
    if options.addressing != "auto":
        config["s3"] = {**(config.get("s3") or {}), "addressing_style": options.addressing}
    config |= {
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.read_timeout_s,
        "max_pool_connections": options.max_connections,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        # Every PUT carries a crc32c of our own, and what is read is checked above: nothing more is needed or computed.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    return arguments | {"asynchronous": True, "skip_instance_cache": True, "use_listings_cache": False}


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ConfigError(
            f"endpoint_url: {url!r:.200} is no server's address", hint="write http://host:port or https://host"
        )
