"""Harbor's task directories: read, written, and run in boxes."""
