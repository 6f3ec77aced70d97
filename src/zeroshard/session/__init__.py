"""Joins the ranks and connects them: process group, transports, watchdog and recorder of one engine."""
