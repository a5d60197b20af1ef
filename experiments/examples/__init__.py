"""Short programs that show one use of the library each."""
