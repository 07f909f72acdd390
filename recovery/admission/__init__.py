"""Admission of a fully asynchronous rollout: its machines, and FullyAsyncRollout, which drives them."""

from recovery.admission.holds import HoldKind as HoldKind
from recovery.admission.rollout import FullyAsyncRollout as FullyAsyncRollout
