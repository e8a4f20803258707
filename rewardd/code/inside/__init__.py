"""What runs on the far side of the fork server.

These modules import the standard library only and nothing of `rewardd`: the fork server is a bare interpreter
(`python -I -S`) that loads this folder as the top-level package `inside`. The trusted parent imports `inside.values`
too, so that both ends share one encoding.
"""
