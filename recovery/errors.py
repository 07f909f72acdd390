"""The one tree of errors, split by what a person does next.

Owns: the classes of the errors a person may see, their exit codes and hints. (Program errors are where they arise.)
Does not know: who raises it, how it is printed (the command lines do that), any library's own errors.

    RecoveryError                       never raised itself
    ├── ConfigError              2      mend the config or the command, run again
    ├── InputError               3      mend the named line or request, run again
    ├── Retry                           nothing is decided; the same call may be made again
    │   ├── StoreUnavailable    20      wait for the back end, or mend the endpoint
    │   ├── StoreFull           20      make room; what was published is intact
    │   └── OutcomeUnknown      20      a commit may or may not have landed: read the log before deciding
    ├── SnapshotAbandoned        1      this snapshot is given up, the last one stands, the job goes on
    ├── Stop                            this process must not go on
    │   ├── Fenced              11      a newer coordinator owns the store
    │   ├── Locked              11      another run on this machine holds the output
    │   ├── EngineDead           1      the engine is gone; run the same command again
    │   ├── CaptureDisagrees     1      what was captured is not what the engine delivered
    │   └── ProgramError         1      a bug of this program; what was stored is intact
    ├── Damaged                  1      bytes are not what was written: `snapshot-inspect verify`
    │   ├── ObjectMissing        1
    │   └── DigestMismatch       1
    └── CannotRestore                   there is no way on from this store as it is
        ├── NoStore             10
        ├── CredentialsRefused  12
        │   └── NotFoundOrRefused 12    the store does not say which: allow listing, or check the name
        ├── FormatNotUnderstood 13
        ├── NothingPublished    14
        ├── ParticipantFailed    1      an agent or tool did not take its state up: mend it, run again
        └── FingerprintMismatch 15

Invariants:
1. A message names the object it is about; `hint` says what to type or do next.
2. Abstract classes (RecoveryError, Retry, Stop, CannotRestore) refuse to be instantiated.
3. An expected outcome (a key that exists, a race that is lost) is a value, not one of these.
"""

from __future__ import annotations

from typing import ClassVar


class RecoveryError(Exception):
    """Base of every error this project raises on purpose.

    Args:
        message: what happened, to which object.
        hint: what the reader does next, as a command where there is one.
    """

    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = ""
    abstract: ClassVar[bool] = True

    def __init__(self, message: str, *, hint: str = "") -> None:
        if type(self).__dict__.get("abstract", False):
            raise TypeError(f"{type(self).__name__} is abstract; raise one of its leaves")
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(RecoveryError):
    """The configuration or the command line cannot be used."""

    exit_code = 2


class InputError(RecoveryError):
    """One line or one request of the user's input cannot be used."""

    exit_code = 3


class Retry(RecoveryError):
    """Nothing was decided; the same call may be made again."""

    abstract = True


class StoreUnavailable(Retry):
    """The back end did not answer, or refused for now."""

    exit_code = 20


class StoreFull(Retry):
    """No room for the object (disk full, quota)."""

    exit_code = 20


class OutcomeUnknown(Retry):
    """A conditional create was sent and its outcome could not be learned."""

    exit_code = 20


class SnapshotAbandoned(RecoveryError):
    """One snapshot attempt was given up; the previous snapshot stands."""


class Stop(RecoveryError):
    """This process must not go on."""

    abstract = True


class Fenced(Stop):
    """A coordinator with a higher epoch owns the store."""

    exit_code = 11


class Locked(Stop):
    """Another run on this machine holds the output."""

    exit_code = 11


class EngineDead(Stop):
    """The engine process is gone; what was captured is kept."""


class CaptureDisagrees(Stop):
    """Two ways of capturing one call gave different tokens: nothing more of it may be trusted."""


class ProgramError(Stop):
    """Something that cannot happen did, in a thread whose traceback nobody would see."""


class Damaged(RecoveryError):
    """Stored bytes or records are not what was written."""

    default_hint = "look what else is damaged: snapshot-inspect verify --read-data STORE"


class ObjectMissing(Damaged):
    """An object that should be in the store is not."""


class DigestMismatch(Damaged):
    """An object's bytes or a chunk's content do not match the recorded sum."""


class CannotRestore(RecoveryError):
    """There is no way on from this store as it is."""

    abstract = True


class NoStore(CannotRestore):
    """There is no store at the given place."""

    exit_code = 10


class CredentialsRefused(CannotRestore):
    """The store refused the credentials or the permission."""

    exit_code = 12


class NotFoundOrRefused(CredentialsRefused):
    """There is no such object, or it may not be read: the store does not tell the two apart (S3 without listing)."""


class FormatNotUnderstood(CannotRestore):
    """The store was written in a format, or requires a feature, that this version does not know."""

    exit_code = 13


class NothingPublished(CannotRestore):
    """The store has no snapshot (that could be used)."""

    exit_code = 14


class ParticipantFailed(CannotRestore):
    """A participant did not take up the state that the store has of it."""


class FingerprintMismatch(CannotRestore):
    """The snapshot belongs to another model, tokenizer, template or prompt file."""

    exit_code = 15
