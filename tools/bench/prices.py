"""What a bucket would ask for: requests and storage at list price.

Owns: the prices, and how the verbs of a store become requests.
Does not know: what was asked of the store.

S3 Standard in us-east-1, as listed: writes and lists 0.005 $ per 1,000, reads 0.0004 $ per 1,000, deletions free,
0.023 $ per GB and month. A listing is one request for each 1,000 names. What leaves the region is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping

PER_WRITE, PER_READ, PER_GB_MONTH = 0.005 / 1000, 0.0004 / 1000, 0.023


def dollars(calls: Mapping[str, int]) -> float:
    """List price of these requests, by verb."""
    written = sum(calls.get(verb, 0) for verb in ("put_new", "put", "list"))
    return written * PER_WRITE + calls.get("get", 0) * PER_READ


def dollars_a_month(nbytes: float) -> float:
    """List price of so many bytes that lie there."""
    return nbytes / 1e9 * PER_GB_MONTH
