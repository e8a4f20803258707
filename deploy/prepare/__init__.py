"""What a run needs before it starts: a model folder and data files."""
