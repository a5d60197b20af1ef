"""The mains: flags and configs in, one call out."""
