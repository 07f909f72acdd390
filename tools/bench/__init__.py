"""Measurements of this project: `make bench-store`, or `python -m bench store --help`. How, and what they cannot
support: docs/benchmarks.md.

    corpus      tokens of natural text and modelled logprobs
    jobs        a job without an engine, on the product's own parts; counted is the store that it is measured through
    measuring   paired, repeated, interleaved; medians and spread
    report      tables, the JSON document, the bounds
    store_*     the figures of `bench store`, one module each
"""
