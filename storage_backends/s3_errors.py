"""The error of our tree for a request to S3 that did not succeed, in words that say what to do.

Owns: which class each kind of failure becomes, its message and its hint.
Does not know: how a failure was told (s3_failures.py), what was tried before (s3_retry.py).

Invariants:
1. Every message names the request, the object, the server and what it answered; a refusal also names whose credentials
   were used and which permission is missing.
2. No message holds a secret: of credentials only the access key's id and where it was found.
3. A create of which one try may have been done is OutcomeUnknown, whatever its last try met.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from recovery.errors import (
    ConfigError,
    CredentialsRefused,
    NoStore,
    NotFoundOrRefused,
    ObjectMissing,
    OutcomeUnknown,
    RecoveryError,
    StoreFull,
    StoreUnavailable,
)
from storage_backends.s3_failures import FILES, Failure, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for, for messages: `PutObject`, `s3://bucket/prefix/key`."""

    operation: str
    url: str
    bucket: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.url}"


_ACTIONS = {"PutObject": "s3:PutObject", "GetObject": "s3:GetObject", "HeadObject": "s3:GetObject"}
_ACTIONS |= {"ListObjectsV2": "s3:ListBucket", "DeleteObject": "s3:DeleteObject"}


def error_of(
    failure: Failure,
    request: Request,
    *,
    endpoint: str,
    region: str,
    who: str,
    tries: int,
    maybe_done: bool,
    worked: bool,
) -> RecoveryError:
    """The error that the caller of a verb gets.

    `maybe_done`: a create that may have been done in one of the tries. `worked`: some request was answered before, so
    that what is wrong with the credentials now is not how the store was set up.
    """
    often = f" ({tries} times)" if tries > 1 else ""
    said = f"{request}: {endpoint} answered {failure.answer}{often}"
    if maybe_done:
        what = f"{request} may or may not have been done, {endpoint}{often}: {failure.answer}"
        return OutcomeUnknown(what, hint="read the object back before deciding")
    match failure.kind:
        case Kind.MISSING if request.operation in ("GetObject", "HeadObject"):
            hint = "`snapshot-inspect verify` shows what else is missing"
            return ObjectMissing(f"{request.url} does not exist", hint=hint)
        case Kind.NO_BUCKET | Kind.MISSING:
            hint = "make the bucket, or check its name and AWS_ENDPOINT_URL"
            return NoStore(f"there is no store at {request.url}: {endpoint} has no bucket {request.bucket}", hint=hint)
        case Kind.NO_CREDENTIALS if failure.code == FILES and not worked:
            return ConfigError(f"{request}: {failure.answer}", hint=_CHECK)
        case Kind.NO_CREDENTIALS:
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or run where a role is given"
            again = "write them anew where they come from: a running job goes on by itself, else run it again"
            return CredentialsRefused(f"{request}: {failure.answer}", hint=again if worked else hint)
        case Kind.REFUSED | Kind.EXPIRED:
            return _refused(failure, request, said, who, worked)
        case Kind.SKEWED:
            hint = "set this machine's clock (see `timedatectl`); nothing in a store depends on it"
            return StoreUnavailable(f"{said}: {_clock(failure.ahead_s)}", hint=hint)
        case Kind.REGION:
            where = f"the bucket is in {failure.region}, the request" if failure.region else "the request"
            hint = f"set AWS_REGION={failure.region}" if failure.region else _FIND_REGION.format(request.bucket)
            return ConfigError(f"{said}: {where} was made for region {region}", hint=hint)
        case Kind.FULL:
            return StoreFull(said, hint="make room in the bucket or raise its quota; what was published is intact")
        case Kind.CONFIG:
            plain = "WRONG_VERSION_NUMBER" in failure.answer
            hint = "the server seems to speak plain HTTP: write its endpoint as http://host:port" if plain else _CHECK
            return ConfigError(f"{request}: {failure.answer}", hint=hint)
        case Kind.UNREACHABLE:
            own = "AWS itself was asked, since no endpoint is set: set AWS_ENDPOINT_URL if the bucket is elsewhere"
            hint = own if _is_aws(endpoint) else "check that the server runs, and AWS_ENDPOINT_URL"
            return StoreUnavailable(f"{request}: cannot reach {endpoint}{often}: {failure.answer}", hint=hint)
        case Kind.LOST:
            return StoreUnavailable(f"{request}: no answer from {endpoint}{often}: {failure.answer}", hint=_WAIT)
        case Kind.BUSY | Kind.CONFLICT | Kind.GARBLED:
            return StoreUnavailable(said, hint=_WAIT)
        case _:
            return StoreUnavailable(said, hint="see what the server's documentation says of this code")


def _is_aws(endpoint: str) -> bool:
    return (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))


_CHECK = "check AWS_ENDPOINT_URL (http://host:port or https://host), AWS's own files, and docs/s3.md"
_WAIT = "wait for the server, or look at its state; the same call may be made again"
_FIND_REGION = "set AWS_REGION to what `aws s3api get-bucket-location --bucket {}` says"


def _refused(failure: Failure, request: Request, said: str, who: str, worked: bool) -> CredentialsRefused:
    action = _ACTIONS.get(request.operation, request.operation)
    if failure.kind is Kind.EXPIRED:
        renew = "renew the credentials where they come from: a running job goes on by itself, else run it again"
        hint = renew if worked else "check key and secret as they are given, or renew them where they come from"
        return CredentialsRefused(f"{said}, for {who}: they are out of date or unknown", hint=hint)
    if request.operation in ("GetObject", "HeadObject") and failure.code in ("AccessDenied", "403"):
        hint = f"allow {action}, and s3:ListBucket on the bucket: without it S3 does not tell the two apart"
        return NotFoundOrRefused(f"{said}, for {who}: not found or no permission", hint=hint)
    hint = f"allow {action} for this bucket and prefix (docs/s3.md has the policy), or use other credentials"
    return CredentialsRefused(f"{said}, for {who}", hint=hint)


def _clock(ahead_s: float | None) -> str:
    if ahead_s is None:
        return "this machine's clock and the server's differ"
    return f"this machine's clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s >= 0 else 'behind'} the server's"
