"""Tokens, chat messages, tool calls and fill-in-the-middle; host only."""
