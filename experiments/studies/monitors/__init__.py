"""Which cheats do the monitors find, and what do they flag wrongly?"""
