"""The page of a run: what its workdir holds, as one HTML file."""
