"""Live memory of one sparse attention layer of GLM-5.3-Flash at its published width, counted on the meta device.

    python -m experiments.live_glm --ranks 1 8 --local-tokens 16K 32K

The real code runs on tensors without values; collectives are stood in for by what they allocate. For each number of ranks:
the peak of the forward and of the backward in bytes a local token (from two lengths) and the constant, and what makes up the
peak. Counted: everything but the layer's input, the incoming gradient and the weights; the weights' gradients are counted.
"""

from __future__ import annotations

import argparse
from collections import Counter
from unittest import mock

import torch
from torch.autograd.graph import get_gradient_edge
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention

from experiments.glm_ablation import SilentSplit
from upipe import preflight
from upipe.glm import GlmRuntime, GlmSettings, TokenLayout, preset
from upipe.glm.model import replace_modules
from upipe.live import LiveStorages
from upipe.records import format_tokens, parse_tokens


def peaks(ranks: int, local: int, settings: GlmSettings) -> dict[str, tuple[int, Counter[str]]]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--local-tokens", type=parse_tokens, nargs=2, default=[16384, 32768], metavar="TOKENS")
    parser.add_argument("--gather-mib", type=int, default=256, help="settings.gather_bytes")
    parser.add_argument("--score-mib", type=int, default=2048, help="settings.score_bytes")
    args = parser.parse_args()
    settings = GlmSettings(gather_bytes=args.gather_mib << 20, score_bytes=args.score_mib << 20)
    short, long = args.local_tokens
    for ranks in args.ranks:
        first, second = (peaks(ranks, tokens, settings) for tokens in (short, long))
        for phase, (peak, parts) in second.items():
            slope = (peak - first[phase][0]) / (long - short)
            constant = (peak - slope * long) / 2**30
            print(f"P={ranks} {phase}: {slope:.0f} B a local token + {constant:.2f} GiB; {peak / 2**30:.2f} GiB at {format_tokens(long)}")
            for line, size in parts.most_common(12):
                print(f"    {size / 2**30:7.3f} GiB  {line}")


if __name__ == "__main__":
    main()
