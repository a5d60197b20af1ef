"""Muon: the transform, its plan over a mesh, and Newton-Schulz."""
