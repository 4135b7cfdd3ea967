"""Runs torch.library.opcheck on the operators of `attnzoo.backends.operator`."""

from __future__ import annotations

from typing import Any

import torch

from attnzoo.backends.operator import Operator


def opcheck(operator: Operator, **operands: Any) -> None:
    torch.library.opcheck(operator.overload, tuple(operator.keyed(operator.flat(**operands))))
