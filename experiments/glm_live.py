"""Bytes a token that a KDA layer and a hyper-connection of GLM-5.3-Flash take, counted on the meta device, real code in bf16.

    python -m experiments.glm_live

KDA: the peak of a forward and backward beyond the input and the parameters (one rank; the torch kernel), by heads run together:
slopes between two lengths, so parameters' gradients and tiles are out of it. Hyper-connection: what one site keeps between forward
and backward beyond its streams, and its peak in backward, by recompute. See `upipe.live`.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection, Glm5NextTextLinearAttention

from upipe.glm.hyper import collapse, expand
from upipe.glm.kda import KDAConfig, linear_attention
from upipe.live import LiveStorages
from upipe.offload import apply_checkpointing


def kda_bytes(group: int, heads: int, head_dim: int, hidden: int, tokens: tuple[int, int], tile: int = 8192) -> float:
    """Bytes a token at the peak with `group` heads at a time."""

    def peak(S: int) -> int:
        config = Glm5NextTextConfig(hidden_size=hidden, linear_num_heads=heads, linear_head_dim=head_dim)
        with torch.device("meta"):
            module = Glm5NextTextLinearAttention(config, 0).to(torch.bfloat16)
            x = torch.empty(1, S, hidden, dtype=torch.bfloat16, requires_grad=True)
        live = LiveStorages()
        live.know(x, *module.parameters())
        with live:
            linear_attention(module, x, config=KDAConfig(heads_per_group=group, tile_tokens=tile)).sum().backward()
        return live.peak

    short, long = tokens
    return (peak(long) - peak(short)) / (long - short)


class Site(nn.Module):
    """A hyper-connection around nothing: the layer gives back what it reads."""

    def __init__(self, connection: nn.Module, recompute: str, tile: int) -> None:
        super().__init__()
        self.connection, self.recompute, self.tile = connection, recompute, tile

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        post, comb, y = collapse(self.connection, streams, self.recompute, self.tile)
        return expand(streams, y, post, comb)


def site_bytes(recompute: str, hidden: int, tokens: tuple[int, int], tile: int) -> tuple[float, float]:
    """Bytes a token that one site keeps between forward and backward, and at its peak from there. recompute: none, selective, full."""

    def count(L: int) -> tuple[int, int]:
        with torch.device("meta"):
            connection = Glm5NextTextHyperConnection(Glm5NextTextConfig(hidden_size=hidden))
            X = torch.empty(1, L, connection.hc_mult, hidden, dtype=torch.bfloat16, requires_grad=True)
        site = Site(connection, "selective" if recompute == "full" else recompute, tile)
        live = LiveStorages()
        live.know(X, *connection.parameters())
        if recompute == "full":
            apply_checkpointing(nn.Sequential(site), layers=[site])
        with live:
            out = site(X)
            between = live.now - out.nbytes
            live.start()
            out.sum().backward()
        return between, live.peak

    short, long = tokens
    return tuple((b - a) / (long - short) for a, b in zip(count(short), count(long)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16, 64], metavar="U", help="heads together (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(f"hidden {options.hidden}, {options.heads} KDA heads of 128, bytes a token in bf16")
    for group in options.groups:
        print(
            f"KDA, {group:>2} heads together: {kda_bytes(group, options.heads, 128, options.hidden, (1024, 1536), 512):>10.0f} at the peak"
        )
    for recompute in ("none", "selective", "full"):
        kept, peak = site_bytes(recompute, options.hidden, (16384, 32768), 2048)
        print(f"hyper-connection, recompute {recompute:<9}: {kept:>10.0f} kept {peak:>10.0f} at the peak")
    return 0


if __name__ == "__main__":
    sys.exit(main())
