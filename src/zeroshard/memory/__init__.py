"""How bytes are allocated, freed, pinned and limited."""
