"""Trainers of many processes: launchers, supervisors, gangs."""
