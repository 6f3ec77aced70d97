"""The dtypes of a run, its loss scale, and what the hardware computes in 16 bit."""
