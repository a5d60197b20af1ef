"""How uneven is routing in runs here?"""
