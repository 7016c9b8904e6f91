"""What a whole decoder layer holds, counted tensor by tensor without a GPU, its input and the incoming gradient included.

    python -m experiments.live_layer                     # both presets at 2 and 8 ranks, and what lives at each peak
    python -m experiments.live_layer --model qwen3_32b --ranks 8 --preset lowest_memory

Forward and backward of `layer.decoder_layer` as they run under `offload.Checkpointing`, on the meta device, with the
attention kernel's own memory as it was measured; see `upipe.live`. Counted are the input, the incoming gradient, cos and
sin, and every weight's gradient; not counted are the weights. Slope and constant come from two lengths; a phase whose peak
is a different moment at either has none of its own. u = local tokens x hidden size x 2 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import linecache
import re
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch

from experiments.live import SHAPES, without_a_device
from upipe import host, kernels, layer, memory
from upipe.block import BlockSpec, Projections
from upipe.layer import MLP_TOKENS, LayerSpec, LayerWeights, _LayerRun, _LayerSums, _OffloadedRun, decoder_layer, layer_contexts
from upipe.live import LiveStorages, SimulatedAttention
from upipe.offload import HostInput, giving
from upipe.records import format_tokens, parse_tokens
from upipe.schedule import HeadSchedule
from upipe.simulate import After

WIDTHS = {"llama3_8b": 14336, "qwen3_32b": 25600}
PRESETS = {
    name: {"overlap": memory.PRESETS[name]["upipe"]["overlap"], "mlp_tokens": memory.PRESETS[name]["memory"]["mlp_tokens"]}
    for name in ("lowest_memory", "fastest")
}
PRESETS["offload_within_layer"] = PRESETS["lowest_memory"] | {"offload": "pinned"}
"""What of a preset of `upipe.memory` a layer's peak depends on; the last is "lowest_memory" with that setting."""


class Phases:
    """Peaks of the phases of a layer, and of the whole: `peaks[phase]` is (bytes, Counter of what lived then)."""

    def __init__(self, live: LiveStorages) -> None:
        self.live = live
        self.peaks: dict[str, tuple[int, Counter[str]]] = {}

    def close(self, *names: str) -> None:
        """What lived since the last call belongs to these."""
        for name in names:
            if self.live.peak > self.peaks.get(name, (0,))[0]:
                self.peaks[name] = self.live.peak, self.live.at_peak
        self.live.start()

    def of(self, owner: type, method: str, name: str):
        """A patch under which a method is a phase of the backward."""
        plain = getattr(owner, method)

        def recorded(*args):
            self.close("backward")
            result = plain(*args)
            self.close("backward", name)
            return result

        return mock.patch.object(owner, method, recorded)


def layer_peaks(
    local_tokens: int, ranks: int, heads: int, kv_heads: int, head_dim: int, hidden: int, width: int, norm: bool = False,
    kernel: str = "fa4", heads_per_stage: int | None = None, mlp_tokens: int = MLP_TOKENS, offload: str = "none", **modes,
) -> dict[str, tuple[int, Counter[str]]]:  # fmt: skip
    """Peak bytes of one layer in bf16, and what lives then: of the "first forward", of the "backward" with the recompute,
    and of the phases of that one. offload: of `layer.LayerSpec`; with it the input is on the host in the backward. modes: those of
    `block.BlockSpec`.

    Raises:
        RuntimeError: the backward did not have the incoming gradient to itself.
    """
    chosen = next(k for k in kernels.KERNELS if k.name == kernel)
    schedule = HeadSchedule(heads, kv_heads, ranks, heads_per_stage)
    block = BlockSpec(schedule, rank=0, group=None, kernel=SimulatedAttention(chosen), head_dim=head_dim, scale=1.0, **modes)
    spec = LayerSpec(block, torch.nn.functional.silu, 1e-6, 1e-6, mlp_tokens, offload=offload)
    run = _LayerRun if offload == "none" else _OffloadedRun

    def parameter(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    q, kv, norms = heads * head_dim, kv_heads * head_dim, ("q_norm", "k_norm") if norm else ()
    attention = Projections(
        parameter(q, hidden), parameter(kv, hidden), parameter(kv, hidden), parameter(hidden, q), **{n: parameter(head_dim) for n in norms}
    )
    mlp = parameter(width, hidden), parameter(width, hidden), parameter(hidden, width)
    weights = LayerWeights(attention, parameter(hidden), parameter(hidden), *mlp)
    live = LiveStorages()
    live.know(*(w for w in weights.flat() if w is not None))
    phases = Phases(live)
    patches = [
        phases.of(run, "attention_output", "recompute"),
        phases.of(_LayerRun, "_mlp_backward", "MLP"),
        phases.of(_LayerRun, "_walk_back", "stages"),
        phases.of(_LayerSums, "finish", "row tiles"),
    ]
    with contextlib.ExitStack() as stack:
        for context in (without_a_device(), live, *patches):
            stack.enter_context(context)
        x = torch.empty(1, local_tokens, hidden, dtype=torch.bfloat16, device="meta")
        cos, sin = (torch.empty(1, local_tokens, head_dim, dtype=torch.bfloat16, device="meta") for _ in range(2))
        first, again = layer_contexts()
        with first, torch.no_grad():
            y = decoder_layer(x, weights, cos, sin, spec)
        phases.close("first forward")
        del y
        given = None
        if offload != "none":
            given, x = HostInput(host.pool().take(x.shape, x.dtype)), x.new_empty(1).expand(x.shape)
            stack.callback(host.pool().give, given.tensor, keep=False)
        x = x.detach().requires_grad_()
        with again, giving(given):
            y = decoder_layer(x, weights, cos, sin, spec)
        end = After.apply(y)
        del y
        live.start()
        end.backward()
        phases.close("backward")
    if spec.counts.reused != 1:
        raise RuntimeError(f"the incoming gradient was copied: {spec.counts}")
    return {name: phases.peaks[name] for name in ("first forward", "recompute", "MLP", "stages", "row tiles", "backward")}


def slopes(lengths: tuple[int, int] = (65536, 131072), **case) -> dict[str, tuple[float, float, Counter[str]]]:
    """Of each phase: slope in u, constant in GiB, and what lives at the peak of the longer length, in bytes."""
    low, high = (layer_peaks(length, **case) for length in lengths)
    result = {}
    for phase in low:
        per_token = (high[phase][0] - low[phase][0]) / (lengths[1] - lengths[0])
        result[phase] = per_token / (2 * case["hidden"]), (low[phase][0] - per_token * lengths[0]) / 2**30, high[phase][1]
    return result


def source_of(place: str) -> str:
    """A line of this package, "file.py:12 function", with its text."""
    found = re.match(r"(\w+\.py):(\d+) ", place)
    if not found:
        return place
    folder = Path(__file__).parent if found[1] == Path(__file__).name else Path(layer.__file__).parent
    return f"{place}: {linecache.getline(str(folder / found[1]), int(found[2])).strip()}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WIDTHS, default="llama3_8b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--preset", choices=PRESETS, nargs="+", default=list(PRESETS))
    parser.add_argument("--heads-per-stage", type=int, default=None, metavar="U")
    parser.add_argument("--kernel", choices=["fa4", "cudnn"], default="fa4")
    parser.add_argument("--local-tokens", nargs=2, default=["64K", "128K"], metavar="L", help="two lengths (default: %(default)s)")
    parser.add_argument("--attention-output", choices=["device", "host"], default="device")
    parser.add_argument("--mlp-tokens", type=int, help="default: the preset's")
    parser.add_argument("--tables", nargs="*", default=["backward"], metavar="PHASE", help="phases to list tensor by tensor")
    options = parser.parse_args(arguments)
    shape = SHAPES[options.model] | {"width": WIDTHS[options.model]}
    try:
        lengths = tuple(parse_tokens(text) for text in options.local_tokens)
        unit = 2 * shape["hidden"] * lengths[1]
        for preset in options.preset:
            for ranks in options.ranks:
                modes = PRESETS[preset] | ({} if options.mlp_tokens is None else {"mlp_tokens": options.mlp_tokens})
                found = slopes(
                    lengths, ranks=ranks, kernel=options.kernel, heads_per_stage=options.heads_per_stage,
                    attention_output=options.attention_output, **modes, **shape,
                )  # fmt: skip
                print(f"\n{options.model}, {preset}, {ranks} ranks, {options.kernel}; 1 u = {unit / 2**30:.3f} GiB at "
                      f"{format_tokens(lengths[1])} local tokens")
                for phase, (per_unit, constant, table) in found.items():
                    print(f"  {phase}: {per_unit:.3f} u + {constant:.3f} GiB")
                    if phase in options.tables:
                        for name, size in [*((n, s) for n, s in table.most_common() if s > 4096), ("in all", table.total())]:
                            print(f"    {size / unit:>6.3f} u {size / 2**30:>7.3f} GiB  {source_of(name)[:110]}")
    except ValueError as error:
        print(f"experiments.live_layer: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
