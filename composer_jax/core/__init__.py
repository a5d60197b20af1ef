"""Records, notation, files and trees that every other package may use."""
