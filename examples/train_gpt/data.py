"""The data: text cut into tokens, with some documents held out.

One file has the tokens, the tokenizer and the number of bytes of every token. With these numbers
a loss in nats per token can be converted to bits per byte, for any vocabulary.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError as error:
    raise SystemExit(f"{error}; this program needs: pip install 'zeroshard[examples]'") from error

END = "<|end|>"  # ends a document, and has no bytes
HELD_OUT = 20  # one document of this many is held out
NOT_CODE = {"site-packages", "dist-packages", "encodings", "pydoc_data", "test", "tests"}


@dataclass(frozen=True)
class Corpus:
    tokenizer: Tokenizer
    token_nbytes: Tensor  # [V] int64: the number of bytes of each token
    train: Windows
    held_out: Windows


class Windows(Dataset[Tensor]):
    """Consecutive windows of ``context + 1`` tokens: the inputs, and the targets one later."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, i: int) -> Tensor:
        return self.tokens[i * self.context : (i + 1) * self.context + 1].long()


def load_corpus(
    text: Path | None,
    *,
    vocab: int,
    context: int,
    cache: Path,
    tell: Callable[[str], None] = lambda _: None,
) -> Corpus:
    """Read ``text`` (default: Python's standard library), or the file in ``cache`` that has its tokens.

    Ranks may call this at the same time: all read the file of the rank that is the first to finish.
    ``tell`` gets a line before each part that takes seconds.
    """
    documents = dict(split_file(text) if text else standard_library())
    key = hashlib.sha256(repr((vocab, HELD_OUT, sorted(documents.items()))).encode()).hexdigest()
    file = cache / f"tokens-{key[:16]}.npz"
    if not file.exists():
        write_once(file, encode(documents, vocab, tell))
    with np.load(file) as saved:
        tokenizer = Tokenizer.from_str(saved["tokenizer"].item())
        train, held_out = (torch.from_numpy(saved[name]) for name in ("train", "held_out"))
    pieces = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    token_nbytes = torch.tensor([0 if piece == END else len(piece) for piece in pieces])
    return Corpus(tokenizer, token_nbytes, Windows(train, context), Windows(held_out, context))


def load_by_turns(text: Path | None, *, rank: int, vocab: int, context: int, cache: Path) -> Corpus:
    """Load the corpus on every rank. Collective.

    Rank 0 makes the tokens, on all cores; then the other ranks read its file.
    """
    load = partial(load_corpus, text, vocab=vocab, context=context, cache=cache)
    if rank == 0:
        load(tell=partial(print, flush=True))
    dist.barrier()
    return load()


def encode(
    documents: dict[str, str], vocab: int, tell: Callable[[str], None]
) -> dict[str, np.ndarray]:
    """Learn a byte-pair vocabulary from the training documents and encode both parts."""
    by_hash = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out = set(by_hash[: max(1, len(by_hash) // HELD_OUT)])
    parts = {
        "train": [text for name, text in documents.items() if name not in held_out],
        "held_out": [text for name, text in documents.items() if name in held_out],
    }
    tokenizer = Tokenizer(models.BPE())
    # Byte level: every text can be encoded, and one letter of a token is one byte of text.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = sum(map(len, documents.values())) / 1e6
    tell(f"learning a vocabulary of {vocab} pieces from {size:.1f} million characters")
    tokenizer.train_from_iterator(
        parts["train"],
        trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    end = tokenizer.token_to_id(END)
    arrays = {"tokenizer": np.array(tokenizer.to_str())}
    for part, texts in parts.items():
        tell(f"{part.replace('_', ' ')}: {len(texts)} documents become tokens")
        ids = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts)]
        arrays[part] = np.concatenate([np.array(row, dtype=np.int32) for row in ids])
    return arrays


def standard_library() -> Iterator[tuple[str, str]]:
    """Name and text of every source file of the running Python's library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_CODE.isdisjoint(name.parts):
            yield name.as_posix(), path.read_text(encoding="utf-8", errors="replace")


def split_file(path: Path, characters: int = 16384) -> Iterator[tuple[str, str]]:
    """One file as numbered documents, so that a part of it can be held out."""
    text = path.read_text(encoding="utf-8", errors="replace")
    for start in range(0, len(text), characters):
        yield str(start), text[start : start + characters]


def write_once(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write the arrays to ``file``, completely or not at all. A file that is there is kept."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        draft = Path(scratch, file.name)
        np.savez(draft, **arrays)  # type: ignore[arg-type]
        try:
            os.link(draft, file)
        except FileExistsError:
            return
