"""S3Store: the five verbs over a bucket and a prefix in it, on S3 and what speaks its language.

Owns: which request each verb makes, and what its answer means for the caller.
Does not know: how requests are sent (s3_connection.py), repeated (s3_retry.py), or told apart when they fail
(s3_failures.py); what is stored.

Invariants:
1. Every object is one PUT of all its bytes with their crc32c, so that the server can refuse what arrives changed. No
   multipart upload is ever begun.
2. A create is a PUT with `If-None-Match: *`. EXISTS says that the key exists: an earlier try of the same call may have
   made it (s3_retry.py here, or the HTTP library on a connection that broke). Who must know reads back.
3. A create without a definite answer is OutcomeUnknown; any other verb without one is StoreUnavailable.
4. What is listed comes from the server, never from a cache, and is put in order here: some servers list folder by
   folder.
5. Safe in threads, after fork and in a thread with a running event loop (s3_connection.py).
6. `exclusive` looks before it creates and does not need the server's word. It fences nobody.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from recovery.errors import ConfigError, RecoveryError, StoreUnavailable
from recovery.ports import Listed, Put
from storage_backends.keys import check_key, check_prefix, check_range, is_key
from storage_backends.s3_connection import Client, Connection, S3Counters, Work
from storage_backends.s3_errors import Request, error_of
from storage_backends.s3_failures import Failure, Kind
from storage_backends.s3_options import KEY_BYTES_MAX, check_bucket, check_options, check_root, parse_address
from storage_backends.s3_retry import Done, Failed, Pace, attempt
from storage_backends.sums import crc32c

T = TypeVar("T")
_Listing = list[Listed]
_Names = list[str]

SLOWEST_BYTES_S = 1 << 20
"""A transfer that is slower than this is given up."""

OBJECT_BYTES_MAX = 5 << 30
"""What S3 takes in one PUT at most."""

PAGE_KEYS = 1000
"""What S3 gives in one answer at most."""

_BELOW_SLASH = re.compile(r"[\x00-.]")


class S3Store:
    """An ObjectStore under `prefix` of `bucket`. Options: s3_options.S3Options. No request before the first verb."""

    def __init__(self, bucket: str, prefix: str = "", *, pace: Pace | None = None, **options: Any) -> None:
        self.bucket = check_bucket(bucket)
        self.prefix = check_root(prefix)
        self.options = check_options(options)
        self._pace = pace or Pace()
        self._connection = Connection(self.options)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def endpoint(self) -> str:
        """The server's address; before the first request only as far as it was given."""
        return self._here.endpoint

    @property
    def counters(self) -> S3Counters:
        """What this process's requests cost."""
        return self._connection.here().counters

    def under(self, prefix: str) -> S3Store:
        """The store at another prefix of the same bucket, on the same connections."""
        other = S3Store.__new__(S3Store)
        other.__dict__ |= self.__dict__ | {"prefix": check_root(prefix)}
        return other

    def folders(self) -> _Names:
        """Names right below the root that something lies under: where a parent of many stores has them."""
        found = (item["Prefix"] for page in self._pages("", Delimiter="/") for item in page.get("CommonPrefixes", ()))
        return sorted({name.removeprefix(self._root).rstrip("/") for name in found})

    # ---- the five verbs ----------------------------------------------------------------------------------------

    def put_new(self, key: str, data: bytes) -> Put:
        if self.options.exclusive and self._exists(key):
            return Put.EXISTS
        result = self.try_create(key, data)
        if isinstance(result, Put):
            return result
        if self.options.exclusive and result.failure.kind is Kind.NOT_IMPLEMENTED:
            self._put(key, data, new=True)
            return Put.CREATED
        raise self.error(result, "PutObject", key, maybe_done=result.lost)

    def put(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        where = self._where(key)
        check_range(start, end)
        empty = end is not None and end <= start
        stop = start + 1 if empty else end
        if start or stop is not None:
            where["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"

        async def work(fs: Any) -> bytes:
            answer = await asyncio.wait_for(fs._call_s3("get_object", **where), self._timeout_s())
            try:
                data: bytes = await asyncio.wait_for(answer["Body"].read(), self._timeout_s(answer["ContentLength"]))
            finally:
                answer["Body"].close()
            if "Range" in where and answer["ResponseMetadata"]["HTTPStatusCode"] != 206:
                data = data[start:stop]  # a server may pass over a range and give all
            return data

        result = self._attempt(work, nbytes=OBJECT_BYTES_MAX)  # how many they are is known by the answer
        match result:
            case Done(data):
                return b"" if empty else data
            case Failed(failure=Failure(kind=Kind.NO_RANGE)):
                return b""
        raise self.error(result, "GetObject", key)

    def list(self, prefix: str, after: str = "") -> _Listing:
        check_prefix(prefix)
        begin = _safe_start(after)
        found: set[Listed] = set()
        for page in self._pages(prefix, **({"StartAfter": self._root + begin} if begin else {})):
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._root)
                if key.startswith(prefix) and key > after and is_key(key):
                    found.add(Listed(key, item["Size"]))
        return sorted(found)

    def glance(self) -> tuple[builtins.list[str], bool]:
        """Names below the root, whether they are keys or not: the first PAGE_KEYS, and whether those are all."""
        page = next(self._pages(""))
        names = [item["Key"].removeprefix(self._root) for item in page.get("Contents", ())]
        return names, not page.get("IsTruncated")

    def delete(self, key: str) -> None:
        where = self._where(key)

        async def work(fs: Any) -> None:
            await fs._call_s3("delete_object", **where)

        result = self._attempt(work)
        if isinstance(result, Failed) and result.failure.kind is not Kind.MISSING:
            raise self.error(result, "DeleteObject", key)

    def modified_utc(self, key: str) -> float:
        """When the server says that `key` was written, in whole seconds. Raises ObjectMissing."""
        where = self._where(key)

        async def work(fs: Any) -> float:
            answer = await fs._call_s3("head_object", **where)
            return float(answer["LastModified"].timestamp())

        result = self._attempt(work)
        if isinstance(result, Done):
            return result.value
        raise self.error(result, "HeadObject", key)

    # ---- requests ----------------------------------------------------------------------------------------------

    def try_create(self, key: str, data: bytes) -> Put | Failed:
        """Create on the server's word alone (invariant 2), and how that failed if it did."""
        result = self._send(key, data, IfNoneMatch="*")
        match result:
            case Done():
                return Put.CREATED
            case Failed(failure=Failure(kind=Kind.EXISTS)):
                return Put.EXISTS
        return result

    def _put(self, key: str, data: bytes, *, new: bool = False) -> None:
        result = self._send(key, data)
        if isinstance(result, Failed):
            raise self.error(result, "PutObject", key, maybe_done=new and result.lost)

    def _send(self, key: str, data: bytes, **condition: str) -> Done[None] | Failed:
        where = self._where(key)
        body = bytes(data)
        checksum = base64.b64encode(crc32c(body).to_bytes(4, "big")).decode("ascii")

        async def work(fs: Any) -> None:
            await fs._call_s3("put_object", Body=body, ChecksumCRC32C=checksum, **where, **condition)

        return self._attempt(work, nbytes=len(body))

    def _exists(self, key: str) -> bool:
        where = self._where(key)

        async def work(fs: Any) -> None:
            await fs._call_s3("head_object", **where)

        result = self._attempt(work)
        if isinstance(result, Failed) and result.failure.kind is not Kind.MISSING:
            raise self.error(result, "HeadObject", key)
        return isinstance(result, Done)

    def _pages(self, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        """Every part of the list of what begins with `prefix`."""
        asked: dict[str, Any] = {"Bucket": self.bucket, "Prefix": self._root + prefix, "MaxKeys": PAGE_KEYS, **more}

        async def work(fs: Any) -> dict[str, Any]:
            page: dict[str, Any] = await fs._call_s3("list_objects_v2", **asked)
            return page

        while True:
            result = self._attempt(work)
            if isinstance(result, Failed):
                raise self.error(result, "ListObjectsV2", prefix)
            yield result.value
            if not result.value.get("IsTruncated"):
                return
            token = result.value.get("NextContinuationToken")
            if not token or token == asked.get("ContinuationToken"):
                what = (
                    f"{self._request('ListObjectsV2', prefix)}: {self.endpoint} gives a list in parts, but not the rest"
                )
                raise StoreUnavailable(what, hint="a list that is not whole is of no use; look at the server")
            asked["ContinuationToken"] = token

    # ---- around them -------------------------------------------------------------------------------------------

    @property
    def _here(self) -> Client:
        return self._connection.here()

    @property
    def _root(self) -> str:
        """What every object's name begins with."""
        return f"{self.prefix}/" if self.prefix else ""

    def _where(self, key: str) -> dict[str, Any]:
        """The object's coordinates. Raises ConfigError for what is no key, or is none under this prefix."""
        check_key(key)
        name = self._root + key
        if len(name.encode("utf-8")) > KEY_BYTES_MAX:
            raise ConfigError(f"{name:.200}… is longer than {KEY_BYTES_MAX} bytes", hint="use a shorter prefix")
        return {"Bucket": self.bucket, "Key": name}

    def _timeout_s(self, nbytes: int = 0) -> float:
        """How long one try may take that moves so many bytes."""
        return self.options.connect_timeout_s + self.options.read_timeout_s + nbytes / SLOWEST_BYTES_S

    def _attempt(self, work: Work[T], nbytes: int = 0) -> Done[T] | Failed:
        timeout_s, retry_for_s = self._timeout_s(nbytes), self.options.retry_for_s
        return attempt(self._here, work, timeout_s=timeout_s, retry_for_s=retry_for_s, pace=self._pace)

    def _request(self, operation: str, key: str) -> Request:
        return Request(operation=operation, url=f"{self.url}/{key}".rstrip("/"), bucket=self.bucket)

    def error(self, failed: Failed, operation: str, key: str, *, maybe_done: bool = False) -> RecoveryError:
        """The error of our tree for a request of this store that failed."""
        here, failure = self._here, failed.failure
        error = error_of(
            failure,
            self._request(operation, key),
            endpoint=here.endpoint,
            region=here.region,
            who=here.who() if failure.kind in (Kind.REFUSED, Kind.EXPIRED) else "",
            tries=failed.tries,
            maybe_done=maybe_done,
            worked=here.worked,
        )
        error.__cause__ = failure.cause
        return error


def _safe_start(after: str) -> str:
    """From where a server may begin to list and still give everything above `after`.

    Some servers go folder by folder, where `a/b` comes before `a-b`, and begin behind the folder that has the given
    name. Up to the first character below the slash both orders agree; without the last character no folder that is
    skipped holds what is wanted. What comes too much is left out by the caller.
    """
    match = _BELOW_SLASH.search(after)
    start = after[: match.start()] if match else after
    return start if start.endswith("/") else start[:-1]


def open_s3(url: str, *, create: bool = False, **options: Any) -> S3Store:
    """The store at `s3://bucket/prefix`. With `create` the server is asked whether it keeps two writers apart."""
    bucket, prefix = parse_address(url)
    store = S3Store(bucket, prefix, **options)
    if create and not store.options.exclusive:
        from storage_backends.s3_probe import require_conditional_create

        require_conditional_create(store)
    return store
