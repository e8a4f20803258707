"""The reward daemon: math verifier, sandboxed code executor, worker pools."""
