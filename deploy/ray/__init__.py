"""All roles of a run as actors of an existing Ray cluster."""
