"""Packing and the resumable input stream."""
