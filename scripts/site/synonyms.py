"""Words that readers search for, as index entries of the sections that answer them.

The search of the site shows an index entry above pages that only contain the word.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

import attnzoo

# For each page the words of its sections, by heading
SYNONYMS: dict[str, dict[str, tuple[str, ...]]] = {
    "backends": {
        "Backends": ("flash", "flash attention", "FlashAttention", "Triton", "kernels"),
        "With PyTorch's other features": ("torch.compile", "autocast", "CUDA graphs"),
    },
    "choosing": {"In short": ("recommendation", "comparison")},
    "decoding": {
        "Two caches": ("KV cache", "key-value cache", "generation", "inference"),
        "A paged cache": ("paged attention", "block table", "pages"),
    },
    "distributed": {
        "Choose a method": ("ring attention", "context parallel", "sequence parallel", "torchrun")
    },
    "evals": {"First run": ("length generalization", "length extrapolation")},
    "losses": {
        "The losses": ("cross entropy", "fused linear cross entropy", "Fenchel-Young"),
        "Mixtures and adaptive softmax": ("adaptive softmax", "mixture of softmaxes"),
    },
    "masks-and-positions": {
        "Grouped heads": ("GQA", "MQA", "grouped-query attention", "multi-query attention"),
        "Position encodings": ("RoPE", "rotary", "ALiBi", "relative position bias"),
        "Segments": ("packed sequences", "packing", "document mask", "varlen"),
        "Windows": ("sliding window", "local attention", "SWA"),
    },
    "models": {
        "Hugging Face models": ("transformers", "Trainer"),
        "Models that call torch's function": ("timm", "nanoGPT", "scaled_dot_product_attention"),
        "PyTorch's attention layers": ("torch.nn.MultiheadAttention",),
        "Wrappers": ("differential transformer", "gated attention", "LASER"),
    },
    "peft": {
        "FSDP": ("FSDP2", "sharding"),
        "PEFT": ("LoRA", "adapter"),
        "Tensor parallelism": ("tensor parallel",),
    },
    "recipes": {"QK-clip": ("MuonClip", "bounded logits")},
}  # fmt: skip


def words_of(docname: str) -> dict[str, tuple[str, ...]]:
    """The words of a page by heading; those of a variant's page are what papers call it."""
    folder, _, name = docname.rpartition("/")
    if folder == "variants" and name in attnzoo.list_variants():
        return {name: attnzoo.get_variant(name).aliases}
    return SYNONYMS.get(docname, {})


class Synonyms(SphinxTransform):
    """Adds the entries, whose target is the section: the search shows its text."""

    # Before Sphinx collects index entries and before it replaces quotes in headings
    default_priority = 500

    def apply(self, **options: Any) -> None:
        missing = dict(words_of(self.env.docname))
        of_page: list[tuple[str, str, str]] = []
        for section in self.document.findall(nodes.section):
            words = missing.pop(section[0].astext(), ())
            # The search lists main entries first.
            entries = [("single", word, section["ids"][0], "main", None) for word in words]
            if entries:
                section.insert(1, addnodes.index(entries=entries))
            of_page += [(word, target, main) for _, word, target, main, _ in entries]
        self.env.metadata[self.env.docname]["synonyms"] = of_page
        if missing:
            headings = ", ".join(map(repr, missing))
            raise ExtensionError(f"SYNONYMS: {self.env.docname} has no heading {headings}")


def restore(app: Any, env: Any) -> None:
    """Give the search the words of all pages. Sphinx adds only those of the pages it writes."""
    for name, metadata in env.metadata.items():
        env._search_index_index_entries[name] = metadata.get("synonyms", [])


def setup(app: Any) -> dict[str, Any]:
    app.add_transform(Synonyms)
    app.connect("env-check-consistency", restore)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "env_version": 1}
