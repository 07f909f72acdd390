"""The command `snapshot-inspect`: what is in a store, what a restore would take, and whether it is sound.

Into a store that is there nothing is written but by `forget`, `prune` and `repair` with `--apply`, and the scratch
objects of `doctor --probe`; `import` makes one. Arrow is loaded only by verbs that read a ledger.

    cli         arguments, errors, exit codes; grammar names the verb that was meant, interrupt ends in one line,
                completion makes scripts for shells out of its parser
    verbs       from arguments to documents; job_verbs those that look from the side of a job

    places      from an address to a store, or to the stores of a folder (parents)
    survey      the log: slots, snapshots, ids as people type them; ahead asks for several slots at a time
    newest      what a restore would take, by the log alone (statements, unpublished) or checked
    calls       the calls of one snapshot and their tokens; tokenizer makes text of them
    verify      everything that a snapshot needs: lineages, segments, collected, leftovers, findings and verdict are its
                parts; rescore compares logprobs with those of an engine
    explain     whether it can be restored here, field by field
    plan        what a restore would do, call by call
    diff        two snapshots beside each other
    stats       where the bytes are
    holds       who held the store
    report      the life of a job (timeline estimates its times), page makes it a file for a browser
    doctor      whether a place does what a store needs; probe asks it with scratch objects

    export      one snapshot as one file (new_file), or as JSON lines (json_lines); importing makes a store of a file
    carrying    what both have in common: the records of a snapshot (live_records) written anew, into another store
    repair      a damaged newest snapshot published again with what is left (soundness), told by repair_report
    forgetting  snapshots that no restore considers any more
    pruning     what nothing needs, deleted
    writing     what the verbs that write to a store have in common; without --apply they run on an overlay

    documents   all of this as JSON (docs/schemas/): call_documents those about calls, arrays the numbers in them
    views       the documents as facts and rows; texts makes one line of a value
    render      facts and rows on a terminal or in a pipe
    progress    how far a long read is, on stderr
"""
