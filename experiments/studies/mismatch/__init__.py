"""How far do sampler and trainer differ, with and without replay?"""
