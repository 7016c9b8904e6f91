"""What the attention block holds, counted tensor by tensor without a GPU: peak above its inputs, and what lives then.

    python -m experiments.live --model qwen3_32b --ranks 8 --kernel fa4

A checkpointed call (forward without gradients, forward again, backward) runs on the meta device, with the attention
kernel's own memory as it was measured; see `upipe.live`. Slope and constant come from two lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from unittest import mock

import torch

from upipe import block, host, kernels, layer, tiled, workspace
from upipe.block import BlockSpec, Projections, attention_block, checkpoint_contexts
from upipe.live import LiveStorages, SimulatedAttention, finish_heads, unfinish_heads
from upipe.records import format_tokens, parse_tokens
from upipe.schedule import HeadSchedule

SHAPES = {
    "llama3_8b": {"heads": 32, "kv_heads": 8, "head_dim": 128, "hidden": 4096, "norm": False},
    "qwen3_32b": {"heads": 64, "kv_heads": 8, "head_dim": 128, "hidden": 5120, "norm": True},
}


class After(torch.autograd.Function):
    """What follows the block: keeps nothing of its result and hands it a gradient, as a residual addition does."""

    @staticmethod
    def forward(ctx, y, grad):
        ctx.grad = grad
        return y.new_empty(())

    @staticmethod
    def backward(ctx, _):
        return ctx.grad, None


class Done:
    """A work that is done."""

    def wait(self):
        pass


def exchange(send, recv, send_sizes, recv_sizes, group, asynchronous=False):
    """An all-to-all between shapes."""
    if sum(send_sizes) != send.numel() or sum(recv_sizes) != recv.numel():
        raise ValueError(f"pieces of {send_sizes} of {send.numel()} elements for {recv_sizes} of {recv.numel()}")
    return Done() if asynchronous else None


@contextlib.contextmanager
def without_a_device():
    """Other ranks and the host's memory are not there: exchanges and host copies do nothing."""
    with (
        mock.patch.object(block, "exchange", exchange),
        mock.patch.object(workspace, "_workspaces", {}),
        mock.patch.multiple(
            block._HostCopy,
            send=lambda self, source: (host.pool().take(source.shape, source.dtype), None),
            write=lambda self, target, source: None,
            fetch=lambda self, target, source: None,
        ),
        # In place and without temporaries, as the Triton kernels are.
        mock.patch.multiple(block, finish_heads=finish_heads, unfinish_heads=unfinish_heads),
        mock.patch.object(layer, "finish_heads", finish_heads),
        mock.patch.object(tiled, "unfinish_heads", unfinish_heads),
    ):
        yield


def block_peak(
    local_tokens: int, ranks: int, heads: int, kv_heads: int, head_dim: int, hidden: int, norm: bool = False, kernel: str = "fa4",
    heads_per_stage: int | None = None, tables: bool = True, **modes,
) -> tuple[int, Counter[str]]:
    """Peak bytes above the inputs (hidden states, output gradient, weights, cos and sin; all bf16) of a checkpointed call,
    and what lived then, where tables are wanted. modes: those of `block.BlockSpec`."""
    chosen = next(k for k in kernels.KERNELS if k.name == kernel)
    schedule = HeadSchedule(heads, kv_heads, ranks, heads_per_stage)
    spec = BlockSpec(schedule, rank=0, group=None, kernel=SimulatedAttention(chosen), head_dim=head_dim, scale=1.0, **modes)
    shapes = {"wq": (heads * head_dim, hidden), "wk": (kv_heads * head_dim, hidden), "wv": (kv_heads * head_dim, hidden),
              "wo": (hidden, heads * head_dim)} | ({"q_norm": (head_dim,), "k_norm": (head_dim,)} if norm else {})
    with torch.device("meta"):
        weights = {name: torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for name, shape in shapes.items()}
        x, grad = (torch.empty(1, local_tokens, hidden, dtype=torch.bfloat16) for _ in range(2))
        cos, sin = (torch.empty(1, local_tokens, head_dim, dtype=torch.bfloat16) for _ in range(2))
    live = LiveStorages(tables=tables)
    live.know(x, grad, cos, sin, *weights.values())
    x.requires_grad_()
    with without_a_device(), live:
        first, again = checkpoint_contexts()
        with first, torch.no_grad():
            attention_block(x, Projections(**weights), cos, sin, spec)
        with again:
            y = attention_block(x, Projections(**weights), cos, sin, spec)
        end = After.apply(y, grad)
        del y
        end.backward()
    return live.peak, live.at_peak


def slope(lengths: tuple[int, int] = (65536, 131072), **case) -> tuple[float, float, Counter[str]]:
    """Slope in units (one local token's hidden state, 2*hidden bytes, times tokens), constant in GiB, and the table of the
    longer length."""
    (low, _), (high, table) = (block_peak(length, **case) for length in lengths)
    unit = 2 * case["hidden"]
    per_token = (high - low) / (lengths[1] - lengths[0])
    return per_token / unit, (low - per_token * lengths[0]) / 2**30, table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama3_8b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--heads-per-stage", type=int, default=None, metavar="U")
    parser.add_argument("--kernel", choices=["fa4", "cudnn"], default="fa4")
    parser.add_argument("--local-tokens", nargs=2, default=["64K", "128K"], metavar="L", help="two lengths (default: %(default)s)")
    parser.add_argument("--attention-output", choices=["device", "host"], default="device")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--dx", choices=["gemm", "bf16"], default="gemm")
    options = parser.parse_args(arguments)
    try:
        lengths = tuple(parse_tokens(text) for text in options.local_tokens)
        per_unit, constant, table = slope(
            lengths, ranks=options.ranks, kernel=options.kernel, heads_per_stage=options.heads_per_stage,
            attention_output=options.attention_output, overlap=not options.no_overlap, dx=options.dx, **SHAPES[options.model],
        )
    except ValueError as error:
        print(f"experiments.live: error: {error}", file=sys.stderr)
        return 2
    unit = 2 * SHAPES[options.model]["hidden"] * lengths[1]
    print(f"{options.model}, {options.ranks} ranks, {options.kernel}: {per_unit:.3f} u + {constant:.3f} GiB; 1 u = {unit} bytes at "
          f"{format_tokens(lengths[1])} local tokens")
    print(f"{'live at the peak':<36} {'bytes':>16} {'u':>7}")
    for name, size in [*table.most_common(), ("in all", table.total())]:
        print(f"{name:<36} {size:>16} {size / unit:>7.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
