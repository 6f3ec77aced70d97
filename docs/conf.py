"""Sphinx's configuration. ``make docs`` builds the site into ``build/docs``.

Pages are plain Markdown whose links work where the repository is read, too. Links to files of the
repository outside ``docs/`` become text on the site, which does not have these files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "ZeroShard"
version = release = __version__

extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"
]  # fmt: skip
copybutton_selector = "div:not(.highlight-diff) > div.highlight > pre"
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

highlight_language = "none"  # commands and outputs; other code names its language

html_theme = "furo"
html_title = f"ZeroShard {release}"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["tables.css"]
html_show_sourcelink = False
html_show_copyright = False
html_copy_source = False

REPOSITORY = Path(__file__).parents[1]
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>\.\./[^)#\s]*)(?:#[^)\s]*)?\)")


SEARCHED = {
    "checkpoints": "export, export safetensors, checkpoint, save, load",
    "choose": "stage, zero3, cpu offload, which stage",
    "clusters": "slurm, srun, mpi, ray, torchrun, multi node, hostfile",
    "config": "learning rate, deepspeed config, gradient clipping, batch size, fp16, bf16",
    "fine-tune": "8 gpus, fine-tune, llm, llama, huggingface",
    "fsdp2": "fsdp2, fsdp, fully_shard",
    "gpu": "cuda, nccl",
    "integrations": "accelerate, transformers, trainer, lightning",
    "migrate": "deepspeed, migrate",
    "offload": "offload, nvme, disk",
    "parallel": "tensor parallel, hsdp, mesh",
    "pipeline": "pipeline, pipeline parallel",
    "plan": "out of memory, oom, memory, plan",
    "restart": "resume, restart, preemption, nan, loss scale",
    "sequence": "ulysses, long context, sequence parallel",
    "speed": "speed, benchmark, throughput, how fast",
    "stalls": "hang, stuck, timeout, deadlock",
}
"""What users type into the search, by the page that answers it. Main entries of the index rank first."""


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _answer_searches)
    app.connect("source-read", _leave_out_decisions)
    app.connect("source-read", _name_repository_files)


def _answer_searches(_app: Sphinx, page: str, source: list[str]) -> None:
    """Put the entries of :data:`SEARCHED` behind the title of their page."""
    if page in SEARCHED:
        title, rest = source[0].split("\n", 1)
        entries = SEARCHED[page].replace(", ", "\n  ! single: ")
        index = f"```{{eval-rst}}\n.. index::\n  ! single: {entries}\n```"
        source[0] = f"{title}\n\n{index}\n{rest}"


def _leave_out_decisions(_app: Sphinx, page: str, source: list[str]) -> None:
    """Keep decisions out of the side bar and the search: they are about ZeroShard's own code."""
    if page.startswith("decisions/"):
        source[0] = f"---\norphan: true\nno-search: true\nnosearch: true\n---\n\n{source[0]}"


def _name_repository_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Write ``[train_3d](../examples/train_3d)`` as ``examples/train_3d``, in code."""
    folder = Path(app.env.doc2path(page)).parent

    def shown(link: re.Match[str]) -> str:
        target = (folder / link["path"]).resolve()
        if target.is_relative_to(app.srcdir):
            return link[0]
        path = target.relative_to(REPOSITORY).as_posix()
        return f"`{path}`" if path.endswith(link["text"]) else f"{link['text']} (`{path}`)"

    source[0] = LINK.sub(shown, source[0])
