"""Is style learnt beside correctness, when rules judge it?"""
