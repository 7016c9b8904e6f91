"""What the attention block holds, counted on the meta device; targets in units of one hidden-state shard."""

import pytest
import torch

from experiments import live as command
from experiments.live import SHAPES, slope
from experiments.stack_methods import ZeroAttention, named_kernel
from upipe.kernels import CudnnAttention
from upipe.live import LiveStorages, SimulatedAttention
from upipe.methods import core

LLAMA = SHAPES["llama3_8b"]
LOWEST = {"overlap": False, "dx": "bf16", "attention_output": "host"}


def test_a_count_by_hand():
    """Views and in-place results add nothing; what dies is taken off; the caller's own tensors are never counted."""
    mine = torch.empty(10, device="meta")
    live = LiveStorages()
    live.know(mine)
    with live:
        a = mine * 2
        b = a[2:].add_(1)
        c = torch.cat((a, b))
        del a
        assert live.now == 40 + 72
        del b
        assert live.now == 72
        d = c * 1
    assert live.now == 144 and live.peak == 144
    del c, d
    assert live.now == 0


@pytest.mark.parametrize("overlap, most", [(False, 4.5), (True, 5.6)])
def test_eight_ranks(overlap, most):
    """At P = 8 a stage buffer is 0.25u: Llama3-8B, default kernel of the machine, U = 8."""
    per_unit, constant, table = slope(ranks=8, overlap=overlap, **LLAMA)
    assert per_unit <= most and constant <= 0.7, table


@pytest.mark.parametrize("kernel", ["fa4", "cudnn"])
@pytest.mark.parametrize("modes, most", [({}, 2.6), ({"attention_output": "host"}, 2.6), (LOWEST, 2.0)], ids=["device", "host", "lowest"])
def test_two_ranks(kernel, modes, most):
    per_unit, constant, table = slope(ranks=2, kernel=kernel, **LLAMA, **modes)
    assert per_unit <= most and constant <= 0.3, table


def test_the_table_adds_up():
    _, _, table = slope(ranks=8, **SHAPES["qwen3_32b"])
    peak, _ = command.block_peak(131072, ranks=8, **SHAPES["qwen3_32b"])
    assert table.total() == peak
    assert all(size > 0 for size in table.values())


def test_command(capsys):
    assert command.main(["--model", "qwen3_32b", "--ranks", "8"]) == 0
    out = capsys.readouterr().out
    assert "q" in out.split() and "in all" in out
    assert command.main(["--ranks", "8", "--heads-per-stage", "3"]) == 2
    assert "use one of" in capsys.readouterr().err


@pytest.fixture
def unwritten_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["cudnn", "fa4"])
def test_a_stand_in_writes_the_buffers_it_is_handed(name, unwritten_is_nan):
    """Whoever hands buffers over looks at nothing else: gradients of an attention that answers zeros are zeros, not what lay there."""
    q, k, v = (torch.randn(1, 8, heads, 128, requires_grad=True) for heads in (4, 2, 2))
    core.local_attention(q, k, v, ZeroAttention(named_kernel(name)), 0.1).sum().backward()
    for t in (q, k, v):
        assert torch.equal(t.grad, torch.zeros_like(t))


def test_a_kernel_of_few_heads_at_a_time():
    """cuDNN over more elements than its backward is right for: buffers, packed gradient and result of one call, what it holds, and
    what the call before answered; all heads at once hold four times as much."""
    few = CudnnAttention()
    few.most = 2 * 1024 * 128
    q, k, v, out, grad = (torch.empty(1, 1024, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (8, 4, 4, 8, 8))
    lse = torch.empty(1, 8, 1024, device="meta")
    head = 1024 * 128 * 2
    peaks = []
    for kernel in (few, CudnnAttention()):
        live = LiveStorages()
        live.know(q, k, v, out, grad, lse)
        with live:
            SimulatedAttention(kernel).backward(grad, q, k, v, out, lse, 1.0)
        peaks.append(live.peak)
    assert peaks == [(8 + 4 + 4) * head + (2 + 2) * head + few.backward_bytes(1024, 2, 1, 128) + 4 * head,
                     few.backward_bytes(1024, 8, 4, 128)]
    assert few.heads_at_once(1, 1024, 8, 4, 128) == 2 and few.heads_at_once(1, 1024, 2, 2, 128) is None
    with pytest.raises(ValueError, match="use fa4"):
        few.heads_at_once(1, 4096, 2, 2, 128)
