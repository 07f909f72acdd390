"""For those who write or test a back end: conformance classes and stores that fail on purpose.

Owns: what every store and every segment codec has to pass (conformance.py), every staging (stagings.py), fault
injection (faults.py), deaths at every store call (kills.py), mangled bytes (mutations.py).
Does not know: any particular back end. Needs the extra `test`.
"""
