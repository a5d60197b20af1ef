"""Targeted textual feedback: a hinted teacher on faulty turns."""
