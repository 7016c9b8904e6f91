"""Bytes that layers of GLM-5.3-Flash take at its published width, counted on the meta device, real code in bf16.

    python -m experiments.glm_live                                          # all three
    python -m experiments.glm_live kda hyper --groups 4 8 16 64
    python -m experiments.glm_live sparse --ranks 1 8 --local-tokens 16K 32K

kda: the peak of a forward and backward of a KDA layer beyond the input and the parameters (one rank; the torch kernel), by heads run
together: slopes between two lengths, so parameters' gradients and tiles are out of it.
hyper: what one hyper-connection keeps between forward and backward beyond its streams, and its peak in backward, by recompute.
sparse: a sparse attention layer; collectives are stood in for by what they allocate. For each number of ranks the peak of the forward
and of the backward in bytes a local token (from two lengths) and the constant, and what makes up the peak. Counted: everything but the
layer's input, the incoming gradient and the weights; the weights' gradients are counted.
See `upipe.live`.
"""


from __future__ import annotations

import argparse
import sys
from collections import Counter
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention, Glm5NextTextHyperConnection, Glm5NextTextLinearAttention

from experiments.glm_ablation import SilentSplit
from upipe import preflight
from upipe.glm import GlmRuntime, GlmSettings, TokenLayout, preset
from upipe.glm.hyper import collapse, expand
from upipe.glm.kda import KDAConfig, linear_attention
from upipe.glm.model import replace_modules
from upipe.live import LiveStorages
from upipe.offload import apply_checkpointing
from upipe.records import format_tokens, parse_tokens

LAYERS = ("kda", "hyper", "sparse")


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


def sparse_peaks(ranks: int, local: int, settings: GlmSettings) -> dict[str, tuple[int, Counter[str]]]:
    """Phase -> (peak in bytes, what it is made of), on the last of the ranks."""
    config = preset("glm-5.3-flash")
    with torch.device("meta"):
        layer = Glm5NextTextAttention(config, 3).to(torch.bfloat16)
        x = torch.empty(1, local, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.empty_like(x)
    layer.indexer.requires_grad_(False)
    split = SilentSplit(None, ranks, 1, ranks - 1)
    replace_modules(layer, GlmRuntime(settings, split))
    found = {}
    with mock.patch.object(preflight, "check_autocast"), LiveStorages() as live:     # torch knows no autocast for meta
        live.know(x, grad, *layer.parameters())
        layout = TokenLayout(split, None, local)
        live.start()
        out = get_gradient_edge(layer(x, layout=layout)[0])     # the result itself is the next sublayer's
        found["forward"] = live.peak, live.at_peak
        live.start()
        torch.autograd.backward(out, grad)
        found["backward"] = live.peak, live.at_peak
    return found


def print_sparse(ranks: list[int], lengths: tuple[int, int], settings: GlmSettings) -> None:
    short, long = lengths
    for P in ranks:
        first, second = (sparse_peaks(P, tokens, settings) for tokens in (short, long))
        for phase, (peak, parts) in second.items():
            slope = (peak - first[phase][0]) / (long - short)
            constant = (peak - slope * long) / 2**30
            print(f"P={P} {phase}: {slope:.0f} B a local token + {constant:.2f} GiB; {peak / 2**30:.2f} GiB at {format_tokens(long)}")
            for line, size in parts.most_common(12):
                print(f"    {size / 2**30:7.3f} GiB  {line}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", metavar="{kda,hyper,sparse}", help="which (default: all)")
    parser.add_argument("--hidden", type=int, default=4096, help="of kda and hyper (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=64, help="of kda (default: %(default)s)")
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16, 64], metavar="U", help="heads together (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8], metavar="P", help="of sparse (default: %(default)s)")
    lengths = {"type": parse_tokens, "nargs": 2, "default": [16384, 32768], "metavar": "L"}
    parser.add_argument("--local-tokens", **lengths, help="of sparse, two of them (default: 16K 32K)")
    parser.add_argument("--gather-mib", type=int, default=256, help="of sparse, settings.gather_bytes (default: %(default)s)")
    parser.add_argument("--score-mib", type=int, default=2048, help="of sparse, settings.score_bytes (default: %(default)s)")
    options = parser.parse_args(arguments)
    wanted = options.layers or LAYERS
    if unknown := set(wanted) - set(LAYERS):
        parser.error(f"{', '.join(sorted(unknown))}: use {', '.join(LAYERS)}")
    if "kda" in wanted:
        print(f"KDA, hidden {options.hidden}, {options.heads} heads of 128, bytes a token in bf16")
        for group in options.groups:
            peak = kda_bytes(group, options.heads, 128, options.hidden, (1024, 1536), 512)
            print(f"    {group:>2} heads together: {peak:>10.0f} at the peak")
    if "hyper" in wanted:
        print(f"hyper-connection, hidden {options.hidden}, bytes a token in bf16")
        for recompute in ("none", "selective", "full"):
            kept, peak = site_bytes(recompute, options.hidden, (16384, 32768), 2048)
            print(f"    recompute {recompute:<9}: {kept:>10.0f} kept {peak:>10.0f} at the peak")
    if "sparse" in wanted:
        settings = GlmSettings(gather_bytes=options.gather_mib << 20, score_bytes=options.score_mib << 20)
        print_sparse(options.ranks, options.local_tokens, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
