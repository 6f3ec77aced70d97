"""Starts a training program on all its ranks.

A thin layer on the agent of torch elastic, and on ``srun`` under SLURM. Importing it does not import
torch.
"""
