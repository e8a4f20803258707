"""The report of a run: curves, tables, TensorBoard events, trajectories."""
