"""Answers of the planner that no compiler gives: meshes and many replicas."""
