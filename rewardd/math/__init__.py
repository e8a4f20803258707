"""Math verification: which answer counts and whether it equals the reference."""
