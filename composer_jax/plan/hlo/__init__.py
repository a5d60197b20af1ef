"""Reads compiled programs: products, collectives and their overlap."""
