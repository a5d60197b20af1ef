"""Configs of the server: shapes of its engine, and limits of requests."""
