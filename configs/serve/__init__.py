"""Configs of the server: its engine's shapes, and what bounds requests."""
