"""Losses and gradients in 16 bits and fp32 on a GPU agree with fp64."""

from __future__ import annotations

import pytest
import torch

from helpers.losses_on_devices import CASES, DTYPES, check_losses

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_agree_with_fp64(case: str, dtype: torch.dtype, device: str) -> None:
    check_losses(case, dtype, device)
