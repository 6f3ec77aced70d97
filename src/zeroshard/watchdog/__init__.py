"""Notices that ranks no longer work together, and reports the cause on every rank."""
