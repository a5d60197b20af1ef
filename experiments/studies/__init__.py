"""One folder a question: README, results, and how the one became the other."""
