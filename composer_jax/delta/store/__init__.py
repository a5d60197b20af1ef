"""Places of write-once objects and one pointer for each run."""
