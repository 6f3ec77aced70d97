"""Allocation, release and pinning of memory, and its limits."""
