"""What the attention block holds, counted on the meta device; targets in units of one hidden-state shard."""

import pytest
import torch

from experiments import live as command
from experiments.live import SHAPES, slope
from upipe.live import LiveStorages

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
