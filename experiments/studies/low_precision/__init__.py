"""What do experts of few bits cost in learning?"""
