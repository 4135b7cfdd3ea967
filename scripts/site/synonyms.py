"""Words that readers search for, as index entries of the sections that answer them.

The search of the site shows an index entry above pages that only contain the word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sphinx.errors import ExtensionError

import attnzoo

# For each page the words of its sections, by heading
SYNONYMS: dict[str, dict[str, tuple[str, ...]]] = {
    "backends": {
        "Backends": ("flash", "flash attention", "FlashAttention", "Triton", "kernels"),
        "With PyTorch's other features": ("torch.compile", "autocast", "CUDA graphs"),
    },
    "choosing": {"In short": ("recommendation", "comparison")},
    "decoding": {"Two caches": ("KV cache", "key-value cache", "generation", "inference")},
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
        "Bounded logits": ("QK-clip", "MuonClip"),
        "Details of converted models": ("LoRA", "PEFT", "adapter", "tensor parallel"),
        "FSDP": ("FSDP2", "sharding"),
        "Hugging Face models": ("transformers", "Trainer"),
        "Models that call torch's function": ("timm", "nanoGPT", "scaled_dot_product_attention"),
        "PyTorch's attention layers": ("torch.nn.MultiheadAttention",),
        "Your own module": ("differential transformer", "gated attention", "LASER"),
    },
}  # fmt: skip


def directive(words: Iterable[str]) -> str:
    """An index directive in MyST. The search lists main entries, marked by !, first."""
    return "```{index} " + ", ".join(f"! {word}" for word in words) + "\n```\n"


def of_variant(variant: attnzoo.Variant) -> str:
    """The directive with what papers call the variant."""
    return directive(variant.aliases) if variant.aliases else ""


def indexed(docname: str, text: str) -> str:
    """The page with the entries of `SYNONYMS` before its headings."""
    for heading, words in SYNONYMS.get(docname, {}).items():
        line = re.compile(rf"^#+ {re.escape(heading)}$", re.MULTILINE)
        if len(line.findall(text)) != 1:
            raise ExtensionError(f"SYNONYMS: {docname} must have one heading {heading!r}")
        text = line.sub(f"{directive(words)}\n\\g<0>", text)
    return text


def on_read(app: Any, docname: str, source: list[str]) -> None:
    source[0] = indexed(docname, source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", on_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
