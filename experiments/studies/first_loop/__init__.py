"""Does RL improve a small coding agent beyond its demonstrations?"""
