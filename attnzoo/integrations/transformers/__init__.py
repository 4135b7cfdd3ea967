"""Hugging Face models with attnzoo's attention: convert, train, save, load and revert.

>>> import torch, transformers
>>> from attnzoo.integrations.transformers import convert
>>> config = transformers.LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64,
...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
>>> model = convert(transformers.LlamaForCausalLM(config), "ssmax")
>>> model.model.layers[0].self_attn.attnzoo
Attention('ssmax', num_heads=4, s=0.168 (learned), b=0.0)
>>> model(torch.zeros(1, 5, dtype=torch.long)).logits.shape
torch.Size([1, 5, 99])
"""

from importlib import metadata
from importlib.util import find_spec

_OLDEST = (5, 17)  # as in the extras of pyproject.toml
if find_spec("transformers") is None:
    raise ImportError(
        "attnzoo.integrations.transformers needs transformers: run pip install -e '.[hf]' in the "
        "clone of attnzoo"
    )
_installed = metadata.version("transformers")
if tuple(map(int, _installed.split(".")[:2])) < _OLDEST:
    raise ImportError(
        f"attnzoo.integrations.transformers needs transformers {'.'.join(map(str, _OLDEST))} or "
        f"later, got {_installed}: run pip install -e '.[hf]' in the clone of attnzoo"
    )

from attnzoo.integrations.transformers.checkpoint import (  # noqa: E402
    from_config,
    from_pretrained,
    register,
)
from attnzoo.integrations.transformers.convert import convert, revert  # noqa: E402
from attnzoo.integrations.transformers.output_head import (  # noqa: E402
    VariantLogitsProcessor,
)
from attnzoo.integrations.transformers.training import TrainerMixin  # noqa: E402

__all__ = [
    "TrainerMixin",
    "VariantLogitsProcessor",
    "convert",
    "from_config",
    "from_pretrained",
    "revert",
]

register()
