"""Memory of GLM-5.3-Flash at its published width and 1M tokens, with each of its fixes turned off in turn, without a device.

    python -m experiments.glm_ablation                                    # the table
    python -m experiments.glm_ablation --results experiments/results      # and records, which `python -m experiments.figures glm` draws

Whole decoder layers of the real code run on tensors without values (`upipe.live`), as a checkpointed layer's backward runs them:
forward again, then backward. Counted is what a rank of P that share a sequence holds beside the layer's input, its gradient and its
weights; weights' gradients are counted, in bf16 (`moe.fp32_grads: false`). Long shards are read off a line through 16K and 24K local
tokens, which fill every tile; what grows with the square of the length runs at its own length. Stood in for:

- collectives, by what they allocate;
- fla's kernel of the delta rule, by what its saved tensors and fp32 intermediates come to (`FLA_SAVED`, `FLA_WORK`): calculated, no run;
- the router's choice: 16 of the 288 experts get all the tokens, in equal shares;
- 2 Sinkhorn steps for 20 but where they are kept: they are what takes the time here, and a tile's are 0.02 GiB.

`basis` in a record: simulated (as above), or calculated from counts of bytes. Prediction of the published set-up: `setup`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from torch.autograd.graph import get_gradient_edge
from transformers.models.glm5_next import modeling_glm5_next as plain

from experiments.runs import command_line, exit_status, made_by
from experiments.table import REPORTED, read_reported
from upipe import preflight, records
from upipe.glm import GlmRuntime, GlmSettings, TokenLayout, TokenSplit, kda, moe, preset, sparse
from upipe.glm.delta import KDAKernel
from upipe.glm.kda import KDAConfig
from upipe.glm.model import DecoderLayer, replace_modules
from upipe.glm.moe import MoEConfig
from upipe.glm.sparse import DenseKernel
from upipe.live import LiveStorages
from upipe.records import Record, format_tokens, parse_tokens

GIB = 2**30
KINDS = {"KDA + dense MLP": 0, "sparse attention + MoE": 3, "KDA + MoE": 4}
COUNTS = {"KDA + dense MLP": 3, "sparse attention + MoE": 11, "KDA + MoE": 31}
LINE = (16384, 24576)
FLA_SAVED, FLA_WORK = 1300, 5500  # bytes a token and head of 128: kept for backward; held by the backward besides
EXPERTS_CHOSEN = 16
ALL = 1 << 60
BASE = GlmSettings(gather_bytes=1 << 29, kda=KDAConfig(heads_per_group=2, tile_tokens=65536), moe=MoEConfig(fp32_grads=False))
"""As configs/glm_1m.yaml has it."""
COARSE = replace(BASE, hyper_tile_tokens=ALL, moe=replace(BASE.moe, chunk_tokens=ALL))
"""For peaks of TiB, beside which the rest is nothing: in fewer steps."""


class SilentSplit(TokenSplit):
    """A split that allocates what its collectives do, and sends nothing."""

    def all_gather(self, local: torch.Tensor) -> torch.Tensor:
        return local[None] if self.size == 1 else local.new_empty(self.size, *local.shape)

    def reduced(self, whole: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return whole
        parts = self.ranked(whole).flatten(0, 1)
        return parts.new_empty(whole.shape[0], whole.shape[1] // self.size, *whole.shape[2:])


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, f, beta, a_log, dt_bias):
        rows = q.shape[0] * q.shape[1] * q.shape[2]
        ctx.save_for_backward(q, k, v, f, beta, a_log, dt_bias, q.new_empty(FLA_SAVED * rows, dtype=torch.uint8))
        return torch.empty_like(v)

    @staticmethod
    def backward(ctx, grad):
        q = ctx.saved_tensors[0]
        work = q.new_empty(FLA_WORK * q.shape[0] * q.shape[1] * q.shape[2], dtype=torch.uint8)
        grads = tuple(torch.empty_like(t) for t in ctx.saved_tensors[:7])
        del work
        return grads


class SimulatedFla(KDAKernel):
    """Allocates what fla's kernel is calculated to, and computes nothing."""

    def declines(self, device, lower_bound):
        return None

    def __call__(self, q, k, v, f, beta, a_log, dt_bias, lower_bound, offsets):
        return _Delta.apply(q, k, v, f, beta, a_log, dt_bias)


def few_experts(flat: torch.Tensor, experts: int) -> list[int]:
    """`moe.expert_counts` without values."""
    each, left = divmod(flat.numel(), EXPERTS_CHOSEN)
    return [0, *(each + (i < left) for i in range(EXPERTS_CHOSEN)), *[0] * (experts - EXPERTS_CHOSEN + 1)]


@dataclass(frozen=True)
class Fix:
    """One fix, and what the model is without it.

    Args:
        without: what runs in its place, in words.
        settings: without it. patches: functions that stand in.
        kinds: of layers that it concerns. square: what is held then grows with the square of the length.
        reported: rows of reported.csv (method) with the fix off and on, and their metric.
    """

    name: str
    without: str
    settings: GlmSettings = BASE
    patches: Callable[[], list] = list
    kinds: tuple[str, ...] = tuple(KINDS)
    square: bool = False
    reported: tuple[tuple[str, ...], str] = field(default=((), "peak"))


def _leak() -> list:
    """A dispatcher that keeps every chunk's weights, as if on the module: with them the graph of the chunk's replay stays."""
    kept, real = [], moe.token_weights

    def keeping(*args):
        kept.append(real(*args))
        return kept[-1]

    return [mock.patch.object(moe, "token_weights", keeping)]


_SPARSE, _KDA = ("sparse attention + MoE",), ("KDA + dense MLP", "KDA + MoE")
FIXES = (
    Fix("sparse attention", "dense over all keys under a mask", replace(COARSE, gather_bytes=ALL, score_bytes=1 << 40),
        lambda: [mock.patch.dict(sparse.KERNELS, {"gather": DenseKernel()})], _SPARSE, True,
        (("dense-fallback", "sparse-kernel"), "peak")),
    Fix("indexer in chunks", "all queries' scores at once", replace(COARSE, score_bytes=ALL, gather_bytes=1 << 35), list, _SPARSE, True,
        (("indexer-unchunked", "indexer-chunked"), "peak_indexer")),
    Fix("KDA heads in groups", "all heads of a rank at once", replace(BASE, kda=replace(BASE.kda, heads_per_group=64)), list, _KDA),
    Fix("KDA gathers the hidden state", "projections are exchanged", replace(BASE, kda=replace(BASE.kda, exchange="all_to_all")),
        list, _KDA, False, (("kda-a2a", "kda-gather-hidden"), "step_time")),
    Fix("mHC recomputed", "its fp32 copies and Sinkhorn steps are kept", replace(BASE, hyper_recompute="none"), list, ("KDA + dense MLP",),
        False, (("mhc-fp32-saved", "mhc-cast-recomputed"), "peak")),
    Fix("experts in chunks", "all tokens at once", replace(BASE, moe=replace(BASE.moe, chunk_tokens=ALL)), list, ("KDA + MoE",), False,
        (("", "books-moe-chunked"), "peak")),
    Fix("no router state kept", "each chunk's weights are kept", BASE, _leak, ("KDA + MoE",), False, (("router-leak", ""), "peak_saved")),
)  # fmt: skip


@dataclass(frozen=True)
class Peak:
    """Bytes of a layer on a rank: kept between forward and backward beside input and output; the peak of forward and backward; left
    after it beside gradients."""

    kept: float
    peak: float
    left: float

    def along(self, other: Peak, scale: float) -> Peak:
        """On the line through this and the other, so many times as far."""
        pairs = zip((self.kept, self.peak, self.left), (other.kept, other.peak, other.left))
        return Peak(*(a + (b - a) * scale for a, b in pairs))


def simulate(kind: str, ranks: int, local: int, settings: GlmSettings = BASE, patches: Callable[[], list] = list) -> Peak:
    """One layer of a kind of KINDS on the last of so many ranks, with `local` tokens on each."""
    config = preset("glm-5.3-flash", hc_sinkhorn_iters=2 if settings.hyper_recompute == "selective" else 20)
    index = KINDS[kind]
    with torch.device("meta"):
        layer = plain.Glm5NextTextDecoderLayer(config, index).to(torch.bfloat16)
        x = torch.empty(1, local, config.hc_mult, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.empty_like(x)
    if layer.block_type != "linear_attention":
        layer.self_attn.indexer.requires_grad_(False)
    split = SilentSplit(None, ranks, 1, ranks - 1)
    replace_modules(layer, GlmRuntime(settings, split))
    assert type(layer) is DecoderLayer
    trained = [p for p in layer.parameters() if p.requires_grad]
    with ExitStack() as stack:
        # torch knows no autocast for meta.
        stack.enter_context(mock.patch.object(preflight, "check_autocast"))
        stack.enter_context(mock.patch.object(kda, "select_kernel", lambda *_: SimulatedFla("fla")))
        stack.enter_context(mock.patch.object(kda, "exchange", lambda *_: None))
        stack.enter_context(mock.patch.object(moe, "expert_counts", few_experts))
        for patch in patches():
            stack.enter_context(patch)
        live = stack.enter_context(LiveStorages(tables=False))
        live.know(x, grad, *layer.parameters(), *layer.buffers())
        layout = TokenLayout(split, None, local)
        out, _ = layer(x, layout=layout)
        kept = live.now - out.nbytes
        edge = get_gradient_edge(out)
        del out
        torch.autograd.backward(edge, grad)
        del edge
        left = live.now - x.grad.nbytes - sum(p.grad.nbytes for p in trained)
        return Peak(kept, live.peak, left)


def at(kind: str, ranks: int, local: int, fix: Fix | None = None) -> Peak:
    """`simulate` at `local` tokens, read off LINE where that is longer."""
    settings, patches, square = (BASE, list, False) if fix is None else (fix.settings, fix.patches, fix.square)
    if square or local <= LINE[1]:
        return simulate(kind, ranks, local, settings, patches)
    short, long = (simulate(kind, ranks, length, settings, patches) for length in LINE)
    return short.along(long, (local - LINE[0]) / (LINE[1] - LINE[0]))


def ablations(tokens: int, ranks: int, log=print) -> list[dict]:
    """A row a layer kind and fix: GiB with all fixes, and without this one."""
    local, rows = tokens // ranks, []
    whole = {kind: at(kind, ranks, local) for kind in KINDS}
    for kind, peak in whole.items():
        rows.append({"fix": "none turned off", "kind": kind, "with": peak.peak, "without": peak.peak, "basis": "simulated"})
    for fix in FIXES:
        for kind in fix.kinds:
            off = at(kind, ranks, local, fix)
            rows.append({"fix": fix.name, "kind": kind, "with": whole[kind].peak, "without": off.peak, "basis": "simulated"})
            if fix.patches is _leak:
                rows.append({"fix": fix.name, "kind": "all 42 MoE layers at the end of the backward", "with": 0.0,
                             "without": 42 * off.left, "basis": "simulated a layer"})  # fmt: skip
                break
        log(f"  {fix.name}", file=sys.stderr)
    config, layers = preset("glm-5.3-flash"), sum(COUNTS.values())
    stream = config.hc_mult * config.hidden_size * 2 * local
    kept = sum(COUNTS[kind] * whole[kind].kept for kind in KINDS) + layers * stream
    width = config.index_topk // config.index_kpool
    rows += [
        {"fix": "full recompute", "kind": "all 45 layers between forward and backward", "with": layers * stream, "without": kept,
         "basis": "simulated a layer"},
        {"fix": "offload", "kind": "inputs of all 45 layers on the device", "with": 2 * stream, "without": layers * stream,
         "basis": "calculated"},
        {"fix": "selection kept as int32 pools", "kind": "11 selections between forward and backward", "with": 11 * 4 * width * local,
         "without": 11 * 8 * (config.index_topk + config.index_kpool - 1) * local, "basis": "calculated"},
    ]  # fmt: skip
    return rows


def setup(tokens: int = 2**20, gpus: int = 64, ranks: int = 16) -> dict[str, float]:
    """GiB a GPU of 64 x B200 by component, in the layout of docs/glm.md: sequences over 16 ranks, everything partitioned over all by
    ZeRO-3, optimizer and layer inputs on the host, layer by layer. Beside what is simulated: weights and gradients by arithmetic."""
    local, config = tokens // ranks, preset("glm-5.3-flash")
    with torch.device("meta"):
        sizes = {kind: sum(p.numel() for p in plain.Glm5NextTextDecoderLayer(config, index).parameters()) for kind, index in KINDS.items()}
    ends = 2 * config.vocab_size * config.hidden_size
    parameters = sum(COUNTS[kind] * sizes[kind] for kind in KINDS) + ends
    stream = config.hc_mult * config.hidden_size * 2 * local
    peaks = {kind: at(kind, ranks, local).peak for kind in KINDS}
    worst = max(peaks, key=lambda kind: peaks[kind] + 2 * sizes[kind])
    parts = {
        "weights, 1/64 in bf16": 2 * parameters / gpus,
        "gradients, 1/64 in bf16": 2 * parameters / gpus,
        "weights of the layer that runs": 2 * sizes[worst],
        f"work of a layer ({worst}), its weights' gradients included": peaks[worst],
        "streams in and out, their gradients, one fetched ahead": 4 * stream,
        "gradients on their way (a bucket of one expert tensor)": 2 * 288 * 2 * config.moe_intermediate_size * config.hidden_size,
        "CUDA context, NCCL and fragments, assumed": 6 * GIB,
    }
    return {name: size / GIB for name, size in parts.items()}


def reported(fix: Fix) -> list[dict]:
    """Published rows of a fix, off first."""
    methods, metric = fix.reported
    rows = read_reported(REPORTED)
    found = [r for r in rows if r["source"] == "skyrl-glm-1m" and r["method"] in methods and r["metric"] == metric]
    return sorted(found, key=lambda r: (r["tokens"], methods.index(r["method"])))


def told(row: dict) -> str:
    return "out of memory" if row["status"] == "oom" else f"{row['value']:g} {row['unit']}"


def table(rows: list[dict]) -> str:
    lines = [f"{'fix':<30} {'layer kind':<44} {'GiB with':>9} {'without':>9}"]
    for r in rows:
        lines.append(f"{r['fix']:<30} {r['kind']:<44} {r['with'] / GIB:>9.2f} {r['without'] / GIB:>9.2f}")
    return "\n".join(lines)


def published() -> str:
    lines = ["published, 64 x B200 (TP8 EP32 CP1/2):"]
    for fix in FIXES:
        for r in reported(fix):
            lines.append(f"  {fix.name:<30} {r['method']:<22} {format_tokens(int(r['tokens'])):>5}  {r['metric']} {told(r)}")
    return "\n".join(lines)


def as_record(row: dict, tokens: int, ranks: int, made_with: dict) -> Record:
    values = {
        "experiment": "glm_ablation", "provenance": "predicted", "method": "upipe", "model": "glm-5.3-flash", "layers": 45,
        "tokens": tokens, "sp": ranks, "ring": 1, "zero": 3, "dtype": "bfloat16", "tile_tokens": BASE.moe.chunk_tokens,
        "peak_gib": row["without"] / GIB, "fix_off": row["fix"], "layer_kind": row["kind"], "with_fix_gib": row["with"] / GIB,
        "basis": row["basis"],
    }  # fmt: skip
    return Record.from_dict(values | made_with | {"gpu": None, "gpus": None, "host_gib": None})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=parse_tokens, default=2**20, help="of a sequence (default: 1M)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64], help="that share a sequence (default: %(default)s)")
    parser.add_argument("--results", metavar="DIR", help="append records to DIR/glm_ablation.jsonl")
    parser.add_argument("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    options = parser.parse_args(arguments)

    def body() -> int:
        made_with = made_by(command_line("experiments.glm_ablation", arguments).strip(), options.commit, "glm")
        found = {}
        for ranks in options.ranks:
            print(f"{format_tokens(options.tokens)} tokens over {ranks} ranks", file=sys.stderr)
            found[ranks] = ablations(options.tokens, ranks)
            print(f"\n{format_tokens(options.tokens)} tokens over {ranks} ranks, {options.tokens // ranks} on each\n{table(found[ranks])}")
            for row in found[ranks] if options.results else ():
                records.append(as_record(row, options.tokens, ranks, made_with), options.results)
        print(f"\n{published()}")
        parts = setup(options.tokens)
        total = sum(parts.values())
        print("\n64 x B200, a sequence over 16 ranks, predicted GiB a GPU; published: 144.5 (TP8 EP32 CP2)")
        for name, size in (*parts.items(), ("total", total)):
            print(f"  {name:<75} {size:8.2f}")
        if options.results:
            row = {"fix": "none turned off", "kind": "model", "with": total * GIB, "without": total * GIB, "basis": "simulated a layer"}
            kept = as_record(row, options.tokens, 16, made_with).updated({"gpus": 64, "gpu": "B200", "dp": 4, "components_gib": parts})
            records.append(kept, options.results)
        return 0

    return exit_status("experiments.glm_ablation", body)


if __name__ == "__main__":
    sys.exit(main())
