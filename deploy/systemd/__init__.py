"""systemd units rendered from a run's configuration."""
