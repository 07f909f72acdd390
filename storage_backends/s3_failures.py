"""What a request to S3 that did not succeed means.

Owns: telling the kinds of failure apart by status, code and exception, and the error of our tree for each.
Does not know: which request is repeated how often (s3_retry.py), how requests are made.

Invariants:
1. A kind is read off the server's answer behind s3fs's exception (`__cause__`), not off the exception that s3fs made.
2. Only what certainly did not reach the server, or was refused by it, counts as not done; all else may have been done.
3. What is not a failure of a request is no failure here: a program error stays what it is.
4. Every error names the request, the object, the server, what it answered, and what to do next.
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

from recovery.errors import (
    ConfigError,
    CredentialsRefused,
    NoStore,
    ObjectMissing,
    OutcomeUnknown,
    RecoveryError,
    StoreFull,
    StoreUnavailable,
)


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
    REFUSED = "not allowed"
    SKEWED = "the clocks differ"
    REGION = "another region"
    FULL = "no room"
    CONFIG = "cannot be asked like this"
    OTHER = "another refusal"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for, for messages: `PutObject`, `s3://bucket/prefix/key`."""

    operation: str
    url: str
    bucket: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.url}"


_CODES: Mapping[Kind, frozenset[str]] = {
    Kind.EXISTS: frozenset({"PreconditionFailed"}),
    Kind.CONFLICT: frozenset({"ConditionalRequestConflict", "OperationAborted"}),
    Kind.MISSING: frozenset({"NoSuchKey", "NotFound"}),
    Kind.NO_BUCKET: frozenset({"NoSuchBucket"}),
    Kind.NO_RANGE: frozenset({"InvalidRange"}),
    Kind.NOT_IMPLEMENTED: frozenset({"NotImplemented"}),
    Kind.BUSY: frozenset(
        "SlowDown SlowDownRead SlowDownWrite ServiceUnavailable Throttling ThrottlingException ThrottledException "
        "TooManyRequests TooManyRequestsException RequestLimitExceeded RequestThrottled RequestThrottledException "
        "RequestTimeout Busy ServerBusy".split()
    ),
    Kind.GARBLED: frozenset(
        "BadDigest IncompleteBody XAmzContentSHA256Mismatch XAmzContentChecksumMismatch InvalidDigest".split()
    ),
    Kind.EXPIRED: frozenset(
        "ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken InvalidAccessKeyId".split()
    ),
    Kind.REFUSED: frozenset(
        "AccessDenied AllAccessDisabled AccountProblem SignatureDoesNotMatch InvalidSecurity NotSignedUp "
        "UnauthorizedAccess AuthFailure MissingAuthenticationToken".split()
    ),
    Kind.SKEWED: frozenset({"RequestTimeTooSkewed"}),
    Kind.REGION: frozenset(
        "PermanentRedirect TemporaryRedirect Redirect AuthorizationHeaderMalformed "
        "IllegalLocationConstraintException".split()
    ),
    Kind.FULL: frozenset(
        "InsufficientStorage QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded EntityTooLarge".split()
    ),
}
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
            return Failure(kind=Kind.REFUSED, answer=_first_line(error), cause=error, code="NoCredentials")
        case boto.BotoCoreError():
            return Failure(kind=Kind.CONFIG, answer=_first_line(error), cause=error)
    return None


def _answered(error: boto.ClientError) -> Failure:
    said: Mapping[str, Any] = error.response.get("Error", {})
    about: Mapping[str, Any] = error.response.get("ResponseMetadata", {})
    headers: Mapping[str, str] = about.get("HTTPHeaders", {})
    code, status = str(said.get("Code", "")), int(about.get("HTTPStatusCode", 0))
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status) or (Kind.LOST if status >= 500 else Kind.OTHER)
    if kind is Kind.CONFLICT and code not in _CODES[Kind.CONFLICT] and not (code in ("", "409")):
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


_ACTIONS = {"PutObject": "s3:PutObject", "GetObject": "s3:GetObject", "HeadObject": "s3:GetObject"}
_ACTIONS |= {"ListObjectsV2": "s3:ListBucket", "DeleteObject": "s3:DeleteObject"}


def error_of(
    failure: Failure, request: Request, *, endpoint: str, region: str, who: str, tries: int, maybe_done: bool
) -> RecoveryError:
    """The error that the caller of a verb gets. `maybe_done`: a create that may have been done in one of the tries."""
    often = f" ({tries} times)" if tries > 1 else ""
    said = f"{request}: {endpoint} answered {failure.answer}{often}"
    match failure.kind:
        case Kind.MISSING if request.operation in ("GetObject", "HeadObject"):
            return ObjectMissing(f"{request.url} does not exist", hint="`snapshot-inspect verify` shows what else is missing")
        case Kind.NO_BUCKET | Kind.MISSING:
            hint = "make the bucket, or check its name and AWS_ENDPOINT_URL"
            return NoStore(f"there is no store at {request.url}: {endpoint} has no bucket {request.bucket}", hint=hint)
        case Kind.REFUSED | Kind.EXPIRED:
            return _refused(failure, request, said, who)
        case Kind.SKEWED:
            return StoreUnavailable(f"{said}; {_clock(failure.ahead_s)}", hint="set this machine's clock (`timedatectl`)")
        case Kind.REGION:
            where = f"the bucket is in {failure.region}, the request" if failure.region else "the request"
            hint = f"set AWS_REGION={failure.region}" if failure.region else _FIND_REGION.format(request.bucket)
            return ConfigError(f"{said}: {where} was made for region {region}", hint=hint)
        case Kind.FULL:
            return StoreFull(said, hint="make room in the bucket or raise its quota; what was published is intact")
        case Kind.CONFIG:
            return ConfigError(f"{request}: {failure.answer}", hint="check the endpoint, AWS's own files and docs/s3.md")
        case Kind.UNREACHABLE:
            hint = "check that the server runs, and AWS_ENDPOINT_URL"
            return StoreUnavailable(f"{request}: cannot reach {endpoint}{often}: {failure.answer}", hint=hint)
        case _ if maybe_done:
            hint = "read the object back before deciding"
            what = f"got no answer from {endpoint}" if failure.kind is Kind.LOST else f"{endpoint} answered"
            return OutcomeUnknown(f"{request} may or may not have been done: {what}{often}: {failure.answer}", hint=hint)
        case Kind.LOST:
            return StoreUnavailable(f"{request}: no answer from {endpoint}{often}: {failure.answer}", hint=_WAIT)
        case Kind.BUSY | Kind.CONFLICT | Kind.GARBLED:
            return StoreUnavailable(said, hint=_WAIT)
        case _:
            return StoreUnavailable(said, hint="see what the server's documentation says of this code")


_WAIT = "wait for the server, or look at its state; the same call may be made again"
_FIND_REGION = "set AWS_REGION to what `aws s3api get-bucket-location --bucket {}` says"


def _refused(failure: Failure, request: Request, said: str, who: str) -> CredentialsRefused:
    action = _ACTIONS.get(request.operation, request.operation)
    if failure.code == "NoCredentials":
        hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or run where a role is given"
        return CredentialsRefused(f"{request}: {failure.answer}", hint=hint)
    if failure.kind is Kind.EXPIRED:
        hint = "renew the credentials where they come from, then run the same command again"
        return CredentialsRefused(f"{said}, for {who}: they are out of date or unknown", hint=hint)
    if request.operation in ("GetObject", "HeadObject") and failure.code in ("AccessDenied", "403"):
        hint = f"allow {action}, and s3:ListBucket on the bucket: without it S3 does not tell the two apart"
        return CredentialsRefused(f"{said}, for {who}: not found or no permission", hint=hint)
    hint = f"allow {action} for this bucket and prefix (docs/s3.md has the policy), or use other credentials"
    return CredentialsRefused(f"{said}, for {who}", hint=hint)


def _clock(ahead_s: float | None) -> str:
    if ahead_s is None:
        return "this machine's clock and the server's differ"
    return f"this machine's clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s >= 0 else 'behind'} the server's"
