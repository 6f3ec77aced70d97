"""Reads checkpoints that DeepSpeed wrote, without DeepSpeed."""

from zeroshard.moved import old_names

__getattr__ = old_names("checkpoint.deepspeed")
