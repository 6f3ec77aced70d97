"""Allocation and release of memory, and its limits."""
