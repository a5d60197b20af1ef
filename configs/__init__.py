"""Configs, one `get_config(arg)` a file."""
