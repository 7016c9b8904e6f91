"""The chunked cross-entropy against torch's, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from tests.plain import assert_close
from upipe import loss
from upipe.loss import token_loss_sum


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=str)
@pytest.mark.parametrize("chunk", [1, 50, 1 << 26], ids=["a-row", "a-few-rows", "whole"])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_cross_entropy(monkeypatch, dtype, tolerance, chunk, ignored):
    monkeypatch.setattr(loss._CrossEntropySum, "CHUNK_ELEMENTS", chunk)
    g = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(2, 11, 13, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    labels = torch.randint(0, 13, (2, 11), generator=g)
    labels[{"none": (slice(0, 0),), "some": (0, slice(3, 9)), "all": (slice(None),)}[ignored]] = -100
    before = logits.detach().clone()
    got = token_loss_sum(logits, labels)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (3 * got).backward()
    assert torch.equal(logits.detach(), before)
    wide = logits.detach().double().requires_grad_()
    want = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    (3 * want).backward()
    assert_close("loss", got, want, max(tolerance, 1e-6) if dtype != torch.float64 else tolerance)
    assert_close("gradient", logits.grad, wide.grad, tolerance)
