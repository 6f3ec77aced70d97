"""Writes the state of a run to files and reads it back, at any world size, stage and set of units."""
