"""How does a run's state reach files, and how does it come back?"""
