"""Lossless codecs of chunks of weights; `coding` is their door."""
