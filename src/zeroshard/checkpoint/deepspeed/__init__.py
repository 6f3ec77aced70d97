"""Reads checkpoints that DeepSpeed wrote, without DeepSpeed."""
