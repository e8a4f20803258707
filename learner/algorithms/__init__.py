"""Pure algorithms: advantages, losses, KL and entropy control."""
