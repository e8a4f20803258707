"""`slipstream demo`: the main job end to end on whatever this machine has."""
