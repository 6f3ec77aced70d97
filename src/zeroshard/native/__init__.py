"""Arithmetic that is compiled where a C++ compiler is there, and never needed."""
