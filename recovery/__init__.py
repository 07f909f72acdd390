"""The core: what is captured, how it is ordered, published and restored. No engine, no file, no clock.

Owns: the public names of the core.
Does not know: vLLM, Arrow, disks; those live in `vllm_hooks` and `storage_backends`.
"""
