"""noisy: softmax of logits with normal noise, in training.

Formula:
    w_ij = exp(z_ij + σ ε_ij) / Σ_l exp(z_il + σ ε_il), ε ~ N(0, 1) independent

Effect: Where two keys have nearly equal logits, noise decides which gets more weight, so training
sees both, and the model learns larger leads. A module in evaluation mode is a softmax module. std
can also fall to 0 in training; this schedule was not measured here.

Source: after Noisy Softmax, Chen, Deng & Du 2017, arXiv:1708.03769, which adds noise to the
target's logit of an output layer.

Notes: A call adds noise whenever std > 0; std = 0 is exactly softmax, on every backend. Modules
pass std = 0 in evaluation mode. `nn.ParameterSchedule` anneals it. The noise is drawn from torch's
generator, so ``torch.manual_seed`` repeats it. Like dropout masks, it differs by backend.
"""

import torch
from torch import Tensor

from attnzoo.core.activations import EXP
from attnzoo.core.call import Call
from attnzoo.core.forms import Form, Pairwise
from attnzoo.core.variant import Param, Variant


def weights(q: Tensor, k: Tensor, call: Call, std: float) -> Tensor:
    s = call.scores(q, k) + call.bias
    return call.softmax(s + std * torch.randn_like(s) if std else s)


def forms(call: Call, std: float) -> tuple[Form, ...]:
    return () if std else (Pairwise(EXP, "sum"),)


VARIANT = Variant(
    name="noisy",
    formula="softmax(z + σε)",
    use="Train with noise on the logits (std 1 in our runs). In evaluation mode it is softmax.",
    paper="after Chen et al. 2017, arXiv:1708.03769",
    aliases=("noisy softmax", "gaussian noise"),
    weights=weights,
    forms=forms,
    params=(
        Param(
            "std",
            kind="float",
            doc="standard deviation of the noise",
            check=lambda x: 0 <= x <= 1e30,
            allowed="from 0 to 1e30",
            in_eval=0.0,
        ),
    ),
    identity={"std": 0.0},
    example=lambda length: {"std": 1.0},
)
