"""Loaders whose position can be saved, and batches of ranks that do not have equally many."""
