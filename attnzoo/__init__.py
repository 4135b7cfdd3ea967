"""attnzoo: attention with softmax and its alternatives behind one call.

>>> import torch, attnzoo
>>> q, k, v = torch.randn(3, 1, 4, 32, 16).unbind()
>>> attnzoo.attention(q, k, v, variant="ssmax", is_causal=True).shape
torch.Size([1, 4, 32, 16])
"""

from attnzoo import losses, nn
from attnzoo.core.activation import Activation
from attnzoo.core.call import Call
from attnzoo.core.distance import Distance
from attnzoo.core.forms import FromStatistics, Linear, NoForm, Pairwise, Shares, Statistics
from attnzoo.core.plugins import Plugin, load_plugin
from attnzoo.core.registry import get_variant, list_variants, register_variant
from attnzoo.core.variant import REQUIRED, Param, Projection, Variant
from attnzoo.functional.attention import attention, attention_weights
from attnzoo.functional.attention_received import attention_received
from attnzoo.functional.explain import Plan, explain
from attnzoo.functional.linear_attention import LinearState, linear_attention
from attnzoo.functional.probabilities import probabilities
from attnzoo.functional.topk import TopK, topk_probabilities
from attnzoo.functional.use_backend import use_backend
from attnzoo.functional.varlen import varlen_attention
from attnzoo.integrations.sdpa import replace_sdpa
from attnzoo.losses.probabilities import linear_topk

__version__ = "0.1.0"

__all__ = [
    "REQUIRED",
    "Activation",
    "Call",
    "Distance",
    "FromStatistics",
    "Linear",
    "LinearState",
    "NoForm",
    "Pairwise",
    "Param",
    "Plan",
    "Plugin",
    "Projection",
    "Shares",
    "Statistics",
    "TopK",
    "Variant",
    "attention",
    "attention_received",
    "attention_weights",
    "explain",
    "get_variant",
    "linear_attention",
    "linear_topk",
    "list_variants",
    "load_plugin",
    "losses",
    "nn",
    "probabilities",
    "register_variant",
    "replace_sdpa",
    "topk_probabilities",
    "use_backend",
    "varlen_attention",
]
