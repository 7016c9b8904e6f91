"""Where the fp32 rounding of small gradients of GLM-5.3-Flash comes from: one rank, a small model, every change against fp64.

    python -m experiments.glm_rounding --layers 8

Gradients of a hyper-connection's scale and base and of A_log are sums over all tokens that cancel. Three kinds of rows tell their own
rounding from that of what they are sums of:

- fp32: all of the model;
- fp32 with fp64 parts: the delta rule, the gate's decay and its sums over tokens; the mapping of the hyper-connections and its sums;
- fp64 with one kind of intermediate result, and its gradient, rounded to fp32 once: all sums are fp64, so this is what no way of summing
  can mend.

Errors are relative in the 2-norm; of a kind of parameter the largest. Nothing is recorded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch

from upipe.glm import Glm5NextForCausalLM, delta, hyper, kda, preset

KINDS = ("_hc.scale", "_hc.base", "A_log")
TOKENS = 96


def model_of(layers: int, seed: int) -> Glm5NextForCausalLM:
    """Every fourth layer sparse, every second of experts, with sizeable values in all parameters."""
    mlps = ["dense", "sparse"] * layers
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Glm5NextForCausalLM(preset("glm-tiny", num_hidden_layers=layers, mlp_layer_types=mlps[:layers], index_topk=16))
        for p in model.parameters():
            noise = torch.randn_like(p)
            p.copy_(p + 0.3 * noise if p.ndim == 1 else noise / p.shape[-1] ** 0.5)
    return model


def gradients(model: Glm5NextForCausalLM) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def errors(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Kind of parameter -> its largest error; and of all others, and of the gradient as a whole."""
    found = {kind: 0.0 for kind in (*KINDS, "others")}
    for name, want in exact.items():
        kind = next((k for k in KINDS if name.endswith(k)), "others")
        found[kind] = max(found[kind], float((got[name] - want).norm() / want.norm()))
    joined = [torch.cat([side[name].flatten() for name in exact]) for side in (got, exact)]
    return found | {"whole": float((joined[0] - joined[1]).norm() / joined[1].norm())}


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.float().double()

    @staticmethod
    def backward(ctx, grad):
        return grad.float().double()


def rounded(function: Callable) -> Callable:
    """Its floating-point results, and their gradients, rounded to fp32."""

    def call(*args):
        out = function(*args)
        return tuple(map(_Rounded.apply, out)) if isinstance(out, tuple) else _Rounded.apply(out)

    return call


def in_fp64(function: Callable) -> Callable:
    """Computed in fp64 from fp32, and its sums over tokens with it."""

    def call(*args):
        out = function(*(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args))
        return tuple(t.float() for t in out) if isinstance(out, tuple) else out.float()

    return call


def mapping_in_fp64(collapse: Callable) -> Callable:
    """`hyper.collapse` of fp64 streams and parameters; post and comb stay fp64."""

    def call(connection, streams, *settings):
        wide = {name: getattr(connection, name).double() for name in ("fn", "base", "scale")}
        others = {name: getattr(connection, name) for name in ("hc_mult", "hc_eps", "hc_sinkhorn_iters", "input_norm")}
        stand_in = SimpleNamespace(**wide, **others)
        post, comb, y = collapse(stand_in, streams.double(), *settings)
        return post, comb, y.float()

    return call


def rows(layers: int, seed: int) -> dict[str, dict[str, float]]:
    """Row -> `errors`."""
    narrow, wide = model_of(layers, seed), model_of(layers, seed).double()
    exact = gradients(wide)

    def patched(module, name, change):
        return mock.patch.object(module, name, change(getattr(module, name)))

    cases = {
        "fp32": (narrow, []),
        "fp32, fp64 delta rule, gate and its sums": (narrow, [(delta, "chunk_kda", in_fp64), (delta, "log_decay", in_fp64)]),
        "fp32, fp64 mappings of hyper-connections and their sums": (narrow, [(hyper, "collapse", mapping_in_fp64)]),
        "fp64, KDA's projections rounded": (wide, [(kda, "linear", rounded)]),
        "fp64, KDA's convolutions rounded": (wide, [(kda, "short_convolution", rounded)]),
        "fp64, what sites read and write with rounded": (wide, [(hyper, "collapse", rounded)]),
        "fp64, streams rounded": (wide, [(hyper, "expand", rounded)]),
    }
    found = {}
    for name, (model, changes) in cases.items():
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(patched(*change))
            found[name] = errors(gradients(model), exact)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for layers in options.layers:
        print(f"{layers} layers, {TOKENS} tokens: error against fp64")
        for name, found in rows(layers, options.seed).items():
            print(f"  {name:<58}" + "".join(f" {kind.removeprefix('_hc.')} {error:.1e}" for kind, error in found.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
