"""Packing of sequences into micro-batches under a hard token cap."""
