"""Code corpora, packing and the resumable input stream."""
