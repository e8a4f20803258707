"""Commands of `slipstream`, one module per family."""
