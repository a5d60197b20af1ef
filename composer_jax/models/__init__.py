"""The one decoder that samples and trains, in small modules."""
