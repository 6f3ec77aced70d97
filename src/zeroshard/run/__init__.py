"""What a run leaves on a host, for its ranks, its launcher and later commands: folder, notes, exits."""
