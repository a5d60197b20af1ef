"""Numbers of few bits: their grids, and formats of blocks with scales."""
