"""Modules that own the learned parameters of variants, and caches for decoding."""

from attnzoo.nn.adaptive_softmax import AdaptiveSoftmax
from attnzoo.nn.attention import Attention
from attnzoo.nn.cache import Cache, KVCache, StateCache
from attnzoo.nn.decoding import attend
from attnzoo.nn.mixture_output import MixtureOutput
from attnzoo.nn.multihead import MultiheadAttention
from attnzoo.nn.optimizer import parameter_groups
from attnzoo.nn.output_layer import OutputLayer, TargetLoss
from attnzoo.nn.qk_clip import QKClip, qk_clip_
from attnzoo.nn.relative_bias import RelativeBias
from attnzoo.nn.replacing import replace
from attnzoo.nn.schedule import ParameterSchedule
from attnzoo.nn.taylor import Taylor
from attnzoo.nn.transformer import Transformer
from attnzoo.nn.wrappers import (
    WRAPPERS,
    XSA,
    Differential,
    DifferentialV2,
    Laser,
    MixtureAttention,
    OutputGate,
    QASSMax,
    Wrapper,
    host_attention,
)

__all__ = [
    "WRAPPERS",
    "XSA",
    "AdaptiveSoftmax",
    "Attention",
    "Cache",
    "Differential",
    "DifferentialV2",
    "KVCache",
    "Laser",
    "MixtureAttention",
    "MixtureOutput",
    "MultiheadAttention",
    "OutputGate",
    "OutputLayer",
    "ParameterSchedule",
    "QASSMax",
    "QKClip",
    "RelativeBias",
    "StateCache",
    "TargetLoss",
    "Taylor",
    "Transformer",
    "Wrapper",
    "attend",
    "host_attention",
    "parameter_groups",
    "qk_clip_",
    "replace",
]
