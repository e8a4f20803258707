"""From verl-style configuration to ours: every known key is mapped, left out with the reason, or refused with it."""
