"""Metrics, progress lines, MFU and the HTML report of a run; host only."""
