"""Pure algorithms: advantages, losses, KL and entropy control, metrics, alarms. Some modules need no torch."""
