"""The command `snapshot-inspect`: what is in a store, what a restore would take, and whether it is sound.

Into a store that is there nothing is written but by `repair --apply` and the scratch objects of `doctor --probe`;
`import` makes one. Arrow is loaded only by verbs that read a ledger.

    places      from an address to a store, or to the stores of a folder
    survey      the log: slots, snapshots, ids as people type them
    ahead       the slots of a long log, several requests at a time
    newest      what a restore would take, by the log alone or checked
    calls       the calls of one snapshot and their tokens
    verify      everything that a snapshot needs: lineages, segments, collected, leftovers are its parts
    explain     whether it can be restored here, field by field
    plan        what a restore would do, call by call
    diff        two snapshots beside each other
    stats       where the bytes are
    holds       who held the store
    report      the life of a job (timeline estimates its times), page makes it a file for a browser
    doctor      whether a place does what a store needs; probe asks it with scratch objects
    export      one snapshot as one file, or as JSON lines (json_lines); importing makes a store of a file
    repair      a damaged newest snapshot published again with what is left (soundness), told by repair_report
    carrying    what both have in common: the records of a snapshot (live_records) written anew, into another store
    documents   all of this as JSON (docs/schemas/)
    views       the documents as facts and rows
    render      facts and rows on a terminal or in a pipe
    progress    how far a long read is, on stderr
    completion  scripts for shells, made from an argument parser
    cli         arguments, errors, exit codes
"""
