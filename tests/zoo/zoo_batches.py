"""The batches of the zoo's models. Each function returns the keyword arguments of one forward.

``config``: the model's configuration, None outside Transformers; ``g``: the generator. Letters as in
:mod:`support.edge_case_models`, ``C`` channels and ``S`` pixels a side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor
from zoo_build import IMAGE, TEXT_IMAGE_TOKEN, VOCAB, WIDTH

BATCH, TOKENS, TARGETS = 2, 6, 5
Batch = dict[str, Any]
MakeBatch = Callable[[Any, Generator], Batch]


def ids(g: Generator, tokens: int = TOKENS, end: int = 40) -> Tensor:
    """Ordinary tokens [B, T]."""
    return torch.randint(3, end, (BATCH, tokens), generator=g)


def classes(g: Generator, *shape: int, of: int = 2) -> Tensor:
    return torch.randint(of, (BATCH, *shape), generator=g)


def floats(g: Generator, *shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=g)


# ------------------------------------------------------------------ text


def language(_config: Any, g: Generator) -> Batch:
    """Tokens, and themselves as labels; the end of the first text is padding."""
    x = ids(g)
    mask = torch.ones_like(x)
    mask[0, -2:] = 0
    return {"input_ids": x, "attention_mask": mask, "labels": x}


def unpadded(_config: Any, g: Generator) -> Batch:
    x = ids(g)
    return {"input_ids": x, "labels": x}


def only_ids(_config: Any, g: Generator) -> Batch:
    return {"input_ids": ids(g)}


def translation(_config: Any, g: Generator) -> Batch:
    return {"input_ids": ids(g), "labels": ids(g, TARGETS)}


def translation_of_one_length(_config: Any, g: Generator) -> Batch:
    return {"input_ids": ids(g), "labels": ids(g)}


def token_classes(_config: Any, g: Generator) -> Batch:
    return {"input_ids": ids(g), "labels": classes(g, TOKENS)}


def text_class(_config: Any, g: Generator) -> Batch:
    return {"input_ids": ids(g), "labels": classes(g)}


def span(_config: Any, g: Generator) -> Batch:
    begin, end = classes(g, of=TOKENS), classes(g, of=TOKENS)
    return {"input_ids": ids(g), "start_positions": begin, "end_positions": end}


def layout(config: Any, g: Generator) -> Batch:
    return {**unpadded(config, g), "bbox": torch.arange(4).repeat(BATCH, TOKENS, 1)}


def perceived(_config: Any, g: Generator) -> Batch:
    return {"inputs": ids(g), "labels": ids(g)}


# ------------------------------------------------------------------ images and video


def pixels(size: int = IMAGE, channels: int = 3) -> MakeBatch:
    """Images [B, C, S, S]."""
    return lambda _config, g: {"pixel_values": floats(g, channels, size, size)}


def image_class(size: int = IMAGE) -> MakeBatch:
    return lambda _config, g: {"pixel_values": floats(g, 3, size, size), "labels": classes(g)}


def segmentation(size: int = 32) -> MakeBatch:
    return lambda _config, g: {
        "pixel_values": floats(g, 3, size, size), "labels": classes(g, size, size)
    }  # fmt: skip


def depth_map(_config: Any, g: Generator) -> Batch:
    return {"pixel_values": floats(g, 3, 32, 32), "labels": floats(g, 32, 32).abs() + 0.1}


def video_class(_config: Any, g: Generator) -> Batch:
    return {"pixel_values": floats(g, 2, 3, IMAGE, IMAGE), "labels": classes(g)}


def masked_patches(_config: Any, g: Generator) -> Batch:
    return {"pixel_values": floats(g, 3, IMAGE, IMAGE), "bool_masked_pos": classes(g, 4).bool()}


def colours_class(_config: Any, g: Generator) -> Batch:
    return {"input_ids": ids(g, 16), "labels": classes(g)}


def pointed(_config: Any, g: Generator) -> Batch:
    points = torch.rand(BATCH, 1, 2, 2, generator=g) * IMAGE
    return {"pixel_values": floats(g, 3, IMAGE, IMAGE), "input_points": points,
            "multimask_output": False}  # fmt: skip


def images(size: int = 32) -> MakeBatch:
    """For models that take one positional tensor."""
    return lambda _config, g: {"x": floats(g, 3, size, size)}


def boxes(size: int = 32) -> MakeBatch:
    """What torchvision's detectors take: lists of images and of targets."""

    def make(_config: Any, g: Generator) -> Batch:
        corner = torch.rand(BATCH, 1, 2, generator=g) * size / 2
        return {
            "images": list(torch.rand(BATCH, 3, size, size, generator=g)),
            "targets": [
                {"boxes": torch.cat([at, at + size / 3], 1), "labels": torch.ones(1).long()}
                for at in corner
            ],
        }

    return make


# ------------------------------------------------------------------ audio


def wave(samples: int = 400) -> MakeBatch:
    return lambda _config, g: {"input_values": floats(g, samples)}


def spoken(samples: int = 400) -> MakeBatch:
    return lambda _config, g: {"input_values": floats(g, samples), "labels": ids(g, 3, end=30)}


def mono(samples: int = 320) -> MakeBatch:
    return lambda _config, g: {"input_values": floats(g, 1, samples)}


def spectrogram(*shape: int, name: str = "input_features", labels: bool = True) -> MakeBatch:
    def make(_config: Any, g: Generator) -> Batch:
        target = {"labels": ids(g, TARGETS)} if labels else {}
        return {name: floats(g, *shape), **target}

    return make


def sound_class(_config: Any, g: Generator) -> Batch:
    return {"input_values": floats(g, 24, 8), "labels": classes(g)}


def sound_and_text(_config: Any, g: Generator) -> Batch:
    return {"input_ids": ids(g), "input_features": floats(g, 1, 64, 8), "return_loss": True}


def codes(_config: Any, g: Generator) -> Batch:
    """Text, and two codebooks of music for each."""
    music = torch.randint(16, (BATCH * 2, TARGETS), generator=g)
    return {"input_ids": ids(g), "decoder_input_ids": music}


# ------------------------------------------------------------------ several kinds


def image_and_text(size: int = IMAGE, **also: Any) -> MakeBatch:
    return lambda _config, g: {
        "input_ids": ids(g),
        "pixel_values": floats(g, 3, size, size),
        **also,
    }


def pairs(size: int = IMAGE) -> MakeBatch:
    """Images and texts that belong together."""
    return image_and_text(size, return_loss=True)


def caption(config: Any, g: Generator) -> Batch:
    x = ids(g)
    return {"input_ids": x, "labels": x, "pixel_values": floats(g, 3, IMAGE, IMAGE)}


def answer(config: Any, g: Generator) -> Batch:
    return {**image_and_text()(config, g), "labels": torch.rand(BATCH, 2, generator=g)}


def image_in_text(pieces: int, make_image: Callable[[Generator], Batch] | None = None) -> MakeBatch:
    """Text in which ``pieces`` tokens represent the image."""

    def make(_config: Any, g: Generator) -> Batch:
        x = ids(g)
        image = torch.full((BATCH, pieces), TEXT_IMAGE_TOKEN)
        x = torch.cat([x[:, :2], image, x[:, 2:]], 1)
        seen = make_image(g) if make_image else {"pixel_values": floats(g, 3, IMAGE, IMAGE)}
        return {"input_ids": x, "labels": x, **seen}

    return make


def asked_image(g: Generator) -> Batch:
    return {"pixel_values": floats(g, 3, IMAGE, IMAGE), "qformer_input_ids": ids(g, 4)}


def typed_image(g: Generator) -> Batch:
    types = torch.zeros(BATCH, TOKENS + 4, dtype=torch.long)
    return {"pixel_values": floats(g, 3, IMAGE, IMAGE), "token_type_ids": types}


def one_of_several_images(g: Generator) -> Batch:
    return {"pixel_values": floats(g, 1, 3, IMAGE, IMAGE)}


def patches_in_text(_config: Any, g: Generator) -> Batch:
    """Two images of 4 x 4 patches, of which 2 x 2 become one token."""
    image = torch.full((BATCH, 4), TEXT_IMAGE_TOKEN)
    x = torch.cat([torch.full((BATCH, 1), 46), image, ids(g, 4)], 1)
    return {
        "input_ids": x, "labels": x, "pixel_values": torch.randn(BATCH * 16, 96, generator=g),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        "mm_token_type_ids": (x == TEXT_IMAGE_TOKEN).int(),
    }  # fmt: skip


def image_at_tokens(_config: Any, g: Generator) -> Batch:
    x = ids(g, 7)
    where = torch.tensor([[0, 1, 1, 1, 0, 0, 0]] * BATCH).bool()
    return {"input_ids": x, "labels": x, "pixel_values": floats(g, 3, IMAGE, IMAGE),
            "image_embeds_position_mask": where}  # fmt: skip


def tiled_image(_config: Any, g: Generator) -> Batch:
    x = ids(g)
    one = torch.ones(BATCH, 1, dtype=torch.long)
    return {"input_ids": x, "labels": x, "pixel_values": floats(g, 1, 1, 3, IMAGE, IMAGE),
            "aspect_ratio_ids": one, "aspect_ratio_mask": one[:, None],
            "cross_attention_mask": torch.ones(BATCH, TOKENS, 1, 1).long()}  # fmt: skip


def read_image(_config: Any, g: Generator) -> Batch:
    return {"pixel_values": floats(g, 3, IMAGE, IMAGE), "labels": ids(g, TARGETS)}


def placed_patches(_config: Any, g: Generator) -> Batch:
    place = torch.randint(1, 4, (BATCH, 5, 2), generator=g).float()
    return {
        "flattened_patches": torch.cat([place, floats(g, 5, 12)], -1),
        "labels": ids(g, TARGETS),
    }


def regions(_config: Any, g: Generator) -> Batch:
    x = ids(g)
    place = torch.rand(BATCH, 3, 4, generator=g)
    return {"input_ids": x, "labels": x, "visual_feats": floats(g, 3, WIDTH), "visual_pos": place}


def embedded_regions(_config: Any, g: Generator) -> Batch:
    return {"input_ids": ids(g), "visual_embeds": floats(g, 3, WIDTH)}


def grounded(_config: Any, g: Generator) -> Batch:
    """Detection by a phrase between the special tokens that delimit it."""
    x = torch.tensor([[101, 5, 6, 102]] * BATCH)
    return {"input_ids": x, "pixel_values": floats(g, 3, 32, 32)}


# ------------------------------------------------------------------ time


def channels_over_time(_config: Any, g: Generator) -> Batch:
    return {"past_values": floats(g, 16, 2), "future_values": floats(g, 4, 2)}


def series(_config: Any, g: Generator) -> Batch:
    return {"past_values": floats(g, 12), "past_time_features": floats(g, 12, 1),
            "past_observed_mask": torch.ones(BATCH, 12), "future_values": floats(g, 4),
            "future_time_features": floats(g, 4, 1)}  # fmt: skip


def episode(_config: Any, g: Generator) -> Batch:
    return {"states": floats(g, 4, 5), "actions": floats(g, 4, 2), "rewards": floats(g, 4, 1),
            "returns_to_go": floats(g, 4, 1), "timesteps": torch.arange(4).repeat(BATCH, 1),
            "attention_mask": torch.ones(BATCH, 4)}  # fmt: skip


assert TEXT_IMAGE_TOKEN < VOCAB
