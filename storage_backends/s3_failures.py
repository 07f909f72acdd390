"""What a request to S3 that did not succeed means.

Owns: telling the kinds of failure apart by status, code and exception.
Does not know: which request is repeated how often (s3_retry.py), what the caller of a verb gets (s3_errors.py).

Invariants:
1. A kind is read off the server's answer behind s3fs's exception (`__cause__`), not off the exception that s3fs made.
2. Only what certainly did not reach the server, or was refused by it, counts as not done; all else may have been done.
3. What is not a failure of a request is no failure here: a program error stays what it is.
"""

from __future__ import annotations

import email.utils
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from botocore import exceptions as boto


class Kind(enum.Enum):
    """What came of a request."""

    EXISTS = "the condition of a create does not hold"
    CONFLICT = "another conditional request is being done"
    MISSING = "no such object"
    NO_BUCKET = "no such bucket"
    NO_RANGE = "the range begins behind the object's end"
    NOT_IMPLEMENTED = "the server does not know what was asked"
    BUSY = "slow down"
    GARBLED = "the server did not get what was sent"
    LOST = "no answer"
    UNREACHABLE = "not sent"
    EXPIRED = "credentials out of date"
    NO_CREDENTIALS = "none were found"
    REFUSED = "not allowed"
    SKEWED = "the clocks differ"
    REGION = "another region"
    FULL = "no room"
    CONFIG = "cannot be asked like this"
    OTHER = "another refusal"


FILES = "AWS's files"
"""`code` where they cannot be read, or lack the profile that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One request that did not succeed. `answer`: what the server said, or why there is no answer."""

    kind: Kind
    answer: str
    cause: BaseException
    code: str = ""
    retry_after_s: float = 0.0
    region: str = ""
    ahead_s: float | None = None
    """By how much the local clock is ahead of the server's."""


_CODES = {
    Kind.EXISTS: ["PreconditionFailed"],
    Kind.CONFLICT: ["ConditionalRequestConflict", "OperationAborted"],
    Kind.MISSING: ["NoSuchKey", "NotFound"],
    Kind.NO_BUCKET: ["NoSuchBucket"],
    Kind.NO_RANGE: ["InvalidRange"],
    Kind.NOT_IMPLEMENTED: ["NotImplemented"],
    Kind.BUSY: [
        "SlowDown", "SlowDownRead", "SlowDownWrite", "ServiceUnavailable", "Throttling", "ThrottlingException",
        "ThrottledException", "TooManyRequests", "TooManyRequestsException", "RequestLimitExceeded", "RequestThrottled",
        "RequestThrottledException", "RequestTimeout", "Busy", "ServerBusy",
    ],
    Kind.GARBLED: [
        "BadDigest", "IncompleteBody", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch",
    ],
    Kind.EXPIRED: [
        "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId",
    ],
    Kind.REFUSED: [
        "AccessDenied", "AllAccessDisabled", "AccountProblem", "SignatureDoesNotMatch", "InvalidSecurity",
        "NotSignedUp", "UnauthorizedAccess", "AuthFailure", "MissingAuthenticationToken",
    ],
    Kind.SKEWED: ["RequestTimeTooSkewed"],
    Kind.REGION: [
        "PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
    ],
    Kind.FULL: [
        "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "EntityTooLarge",
    ],
}  # fmt: skip
_BY_CODE = {code: kind for kind, codes in _CODES.items() for code in codes}
_BY_STATUS = {
    301: Kind.REGION, 302: Kind.REGION, 307: Kind.REGION, 308: Kind.REGION, 401: Kind.REFUSED, 403: Kind.REFUSED,
    404: Kind.MISSING, 408: Kind.BUSY, 409: Kind.CONFLICT, 412: Kind.EXISTS, 416: Kind.NO_RANGE, 429: Kind.BUSY,
    500: Kind.LOST, 501: Kind.NOT_IMPLEMENTED, 502: Kind.LOST, 503: Kind.BUSY, 504: Kind.LOST, 507: Kind.FULL,
}  # fmt: skip


def understand(error: BaseException) -> Failure | None:
    """The failure that `error` stands for; None if it is none (invariant 3)."""
    behind = error.__cause__
    if isinstance(behind, boto.ClientError):
        return _answered(behind)
    match error:
        case boto.ClientError():
            return _answered(error)
        case ValueError() if str(error).startswith("Invalid endpoint: "):  # botocore has no class for it
            return Failure(kind=Kind.CONFIG, answer=_first_line(error), cause=error)
        case boto.SSLError() | boto.InvalidProxiesConfigError():
            return Failure(kind=Kind.CONFIG, answer=_first_line(error), cause=error)
        case boto.ConnectTimeoutError() | boto.ProxyConnectionError():
            return Failure(kind=Kind.UNREACHABLE, answer=_first_line(error), cause=error)
        case boto.EndpointConnectionError():
            inner = error.kwargs.get("error")
            sent = not isinstance(inner, aiohttp.ClientConnectorError)
            kind = Kind.LOST if sent else Kind.UNREACHABLE
            return Failure(kind=kind, answer=_first_line(inner or error), cause=error)
        case boto.HTTPClientError() | boto.ResponseStreamingError() | boto.IncompleteReadError():
            return Failure(kind=Kind.LOST, answer=_first_line(error.kwargs.get("error") or error), cause=error)
        case aiohttp.ClientError() | ConnectionError() | TimeoutError():
            return Failure(kind=Kind.LOST, answer=_first_line(error), cause=error)
        case (
            boto.NoCredentialsError()
            | boto.PartialCredentialsError()
            | boto.CredentialRetrievalError()
            | boto.MetadataRetrievalError()
            | boto.TokenRetrievalError()
            | boto.SSOError()
        ):
            return Failure(kind=Kind.NO_CREDENTIALS, answer=_first_line(error), cause=error)
        case boto.ConfigParseError() | boto.ProfileNotFound():
            return Failure(kind=Kind.NO_CREDENTIALS, answer=_first_line(error), cause=error, code=FILES)
        case RecursionError():  # botocore asks for the bucket's region for ever, of a server that only redirects
            return Failure(kind=Kind.REGION, answer="a redirect that names no region", cause=error)
        case boto.BotoCoreError():
            return Failure(kind=Kind.CONFIG, answer=_first_line(error), cause=error)
    return None


def _answered(error: boto.ClientError) -> Failure:
    said: Mapping[str, Any] = error.response.get("Error", {})
    about: Mapping[str, Any] = error.response.get("ResponseMetadata", {})
    headers: Mapping[str, str] = about.get("HTTPHeaders", {})
    code, status = str(said.get("Code", "")), int(about.get("HTTPStatusCode", 0))
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status) or (Kind.LOST if status >= 500 else Kind.OTHER)
    if kind is Kind.CONFLICT and code not in (*_CODES[Kind.CONFLICT], "", "409"):
        kind = Kind.OTHER  # a server's own conflict, such as a folder in the place of an object, does not pass
    message = str(said.get("Message", "")).strip().rstrip(".")
    words = [str(status), code if code != str(status) else "", f"({message:.200})" if message else ""]
    return Failure(
        kind=kind,
        answer=" ".join(filter(None, words)),
        cause=error,
        code=code,
        retry_after_s=_seconds(headers.get("retry-after", "")),
        region=headers.get("x-amz-bucket-region") or str(said.get("Region", "")),
        ahead_s=_ahead(said, headers) if kind is Kind.SKEWED else None,
    )


def _first_line(error: Any) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _ahead(said: Mapping[str, Any], headers: Mapping[str, str]) -> float | None:
    """Local time minus the server's, in seconds: of the request, if the server says so, else of now."""
    try:
        server = datetime.fromisoformat(said["ServerTime"])
        local = datetime.strptime(said["RequestTime"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except (KeyError, TypeError, ValueError):
        try:
            server, local = email.utils.parsedate_to_datetime(headers["date"]), datetime.now(UTC)
        except (KeyError, TypeError, ValueError):
            return None
    server = server if server.tzinfo else server.replace(tzinfo=UTC)
    return (local - server).total_seconds()
