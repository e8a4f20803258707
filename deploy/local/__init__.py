"""The local supervisor: all roles on this machine, each its own process."""
