"""How many ways to cheat do the monitors see, and whom do they accuse?"""
