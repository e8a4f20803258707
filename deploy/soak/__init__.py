"""`slipstream soak`: the real roles under random faults, and the judgement afterwards."""
