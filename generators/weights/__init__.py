"""Receiving side of a weight update."""
