"""Measurements of this project: `make bench`, or `python -m bench VERB --help`. How, and what they cannot support:
docs/benchmarks.md.

    corpus      tokens of natural text and modelled logprobs
    jobs        a job without an engine, on the product's own parts; counted is the store that it is measured through
    measuring   paired, repeated, interleaved; medians and spread
    report      tables, the JSON document, the bounds
    plot        scaling laws as pictures
    everything  all verbs, one after the other
    engines     engines in processes of their own, and engine_process, what runs there
    full_copies what is done today: everything, again each time
    cut, capture_*, snapshot, kills*, exact   the figures of those verbs
    store_*     the figures of `bench store`, one module each
    scale_*     those of `bench scale`; simulated are its workers, prices what a bucket asks
"""
