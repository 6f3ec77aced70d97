"""Notices that ranks no longer work together, and says why on every rank."""
