"""Builds a corpus of code: sources, licences, filters, tokenizer training."""
