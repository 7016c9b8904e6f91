"""Kimi delta attention (KDA) of a sequence whose tokens are on P ranks, by heads: every rank runs its H/P heads over all tokens.

The delta rule (`delta`) runs over a sequence in order, so tokens have to come together on a rank; heads do not mix before the
output projection. Two ways to bring tokens together, chosen by what they send (`choose_exchange`):

    gather      all-gather the hidden state [L, D]; each rank projects all tokens to its own heads
    all_to_all  project the local tokens to all heads; all-to-all the projections, 5*H*d + H wide

Then, a group of heads at a time (the peak is a group's): order of the sequence restored by one copy of the group's narrow
projections (`TokenSplit.natural`), short convolution, the delta rule, gated norm, all-to-all back to the tokens, and those
heads' columns of the output projection. Kept for backward: the local hidden state. Backward gathers it again, replays group
by group, and adds up the shares that ranks have in a token's gradient (`sum_scatter`).

Every parameter is given whole and its gradient is this rank's share: the sum over the ranks is the unsharded gradient.

B batch, S tokens, L local tokens, P ranks, D hidden, H heads, d head dim, n heads of a group on a rank.
Source: Kimi Linear, arXiv 2510.26692; transformers `Glm5NextTextLinearAttention`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention

from upipe import preflight
from upipe.comm import exchange
from upipe.glm.context import TokenSplit
from upipe.glm.conv import short_convolution
from upipe.glm.delta import KDAKernel, select_kernel
from upipe.glm.replay import by_rows, check_positive, rounded, tiles
from upipe.kernels import Offsets
from upipe.loss import wide_dtype
from upipe.preflight import PreflightError

if TYPE_CHECKING:
    from upipe.glm.context import TokenLayout
    from upipe.glm.sparse import GlmRuntime

TILE_TOKENS = 8192


def choose_exchange(ranks: int, hidden: int, heads: int, head_dim: int) -> Literal["gather", "all_to_all"]:
    """Which sends less: a rank sends its tokens' hidden state to the P-1 others, or 1/P of their projections to each.

    Wide projections make gathering the cheaper one below (5*H*d + H) / D ranks: 10.02 at the published shape.
    """
    return "gather" if ranks * hidden <= 5 * heads * head_dim + heads else "all_to_all"


def all_to_all(x: torch.Tensor, group) -> torch.Tensor:
    """[P, ...] piece r to rank r -> [P, ...] piece r from rank r; differentiable."""
    return x if x.shape[0] == 1 else _AllToAll.apply(x, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _swapped(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _swapped(grad, ctx.group), None


def _swapped(x: torch.Tensor, group) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    sizes = [x[0].numel()] * x.shape[0]
    exchange(x.view(-1), out.view(-1), sizes, sizes, group)
    return out


def sum_scatter(shares: torch.Tensor, group) -> torch.Tensor:
    """[P, ...] this rank's share in each rank's tensor -> the sum of all ranks' shares in this rank's, summed in fp32 in rank
    order and rounded once; half of what an fp32 reduce-scatter of the same shares sends."""
    return shares[0] if shares.shape[0] == 1 else _swapped(shares, group).sum(0, dtype=wide_dtype(shares.dtype)).to(shares.dtype)


@dataclass(frozen=True)
class KDAConfig:
    """How a sharded KDA layer runs.

    Args:
        exchange: "gather", "all_to_all", or "auto" (`choose_exchange`).
        heads_per_group: heads that a rank runs together; the last group may have fewer.
        kernel: "auto", "torch" or "fla" (`select_kernel`).
        tile_tokens: tokens of the convolution's and the norm's fp32 copies.
    """

    exchange: Literal["auto", "gather", "all_to_all"] = "auto"
    heads_per_group: int = 8
    kernel: str = "auto"
    tile_tokens: int = TILE_TOKENS

    def __post_init__(self) -> None:
        if self.exchange not in ("auto", "gather", "all_to_all"):
            raise ValueError(f"exchange={self.exchange!r}: use auto, gather or all_to_all")
        for name in ("heads_per_group", "tile_tokens"):
            check_positive(name, getattr(self, name))

    def exchange_for(self, ranks: int, hidden: int, heads: int, head_dim: int) -> Literal["gather", "all_to_all"]:
        """What is exchanged for a layer of this shape."""
        return choose_exchange(ranks, hidden, heads, head_dim) if self.exchange == "auto" else self.exchange


PARAMETERS = (
    "q_proj.weight", "k_proj.weight", "v_proj.weight", "forget_gate.f_b_proj.weight", "g_b_proj.weight", "b_proj.weight",
    "conv1d.weight", "forget_gate.A_log", "forget_gate.dt_bias", "o_proj.weight",
    "forget_gate.f_a_proj.weight", "g_a_proj.weight", "o_norm.weight",
)  # fmt: skip
"""Of transformers' module, in the order in which they are passed on: six projections to heads; by head; shared by heads."""
SUBMODULES: dict[str, type] = {
    name.removesuffix(".weight"): nn.Conv1d if "conv1d" in name else nn.Linear for name in PARAMETERS if "proj" in name or "conv1d" in name
}
"""Submodules whose weights are used without calling them."""


@dataclass(frozen=True)
class _Spec:
    split: TokenSplit
    offsets: Offsets | None
    gather: bool
    kernel: KDAKernel
    heads: int
    head_dim: int
    config: KDAConfig
    lower_bound: float | None
    eps: float

    @property
    def groups(self) -> list[slice]:
        """Heads of a rank's H/P."""
        return tiles(self.heads // self.split.size, self.config.heads_per_group)

    def parts(self, parameters, heads: slice) -> list[torch.Tensor]:
        """Views of the parameters (or of their gradients) that a group uses: ranks' heads first, [P or 1, n, ...]."""
        P, d, r = self.split.size, self.head_dim, self.split.rank
        own = slice(r, r + 1)
        here = own if self.gather else slice(None)
        *wide, wb, conv, a_log, dt_bias, wo = parameters[:10]
        return [
            *(w.view(P, -1, d, w.shape[1])[here, heads] for w in wide), wb.view(P, -1, 1, wb.shape[1])[here, heads],
            conv.view(3, P, -1, d, conv.shape[-1])[:, r, heads], a_log.view(P, -1)[r, heads], dt_bias.view(P, -1, d)[r, heads],
            wo.view(wo.shape[0], P, -1, d)[:, :, heads], *parameters[10:],
        ]  # fmt: skip


def _group(spec: _Spec, x: torch.Tensor, wq, wk, wv, wf, wg, wb, conv, a_log, dt_bias, fa, ga, norm) -> torch.Tensor:
    """A group's heads of all ranks for the local tokens, [B, L, P, n, d], from the hidden states [P or 1, B, L, D]."""
    split, (n, d) = spec.split, wq.shape[1:3]
    # Destinations first: one, this rank, of all tokens; or all, of the local tokens.
    low = {3: linear(x, fa), 4: linear(x, ga)}
    narrow = []
    for i, w in enumerate((wq, wk, wv, wf, wg, wb)):
        source = low.get(i, x)
        made = linear(source, w.reshape(-1, w.shape[-1]))  # [P or 1, B, L, destinations * n * d]
        narrow.append(made if spec.gather else made[0].view(*made.shape[1:3], split.size, -1).permute(2, 0, 1, 3))
    widths = [t.shape[-1] for t in narrow]
    narrow = torch.cat(narrow, -1)
    if not spec.gather:
        narrow = all_to_all(narrow, split.group)
    narrow = split.natural(narrow)
    *qkv, f, gate, beta = narrow.split(widths, -1)
    tile = spec.config.tile_tokens
    q, k, v = (short_convolution(t, w.reshape(n * d, -1), spec.offsets, tile).unflatten(-1, (n, d)) for t, w in zip(qkv, conv))
    o = spec.kernel(q, k, v, f.unflatten(-1, (n, d)), torch.sigmoid(beta), a_log, dt_bias.reshape(-1), spec.lower_bound, spec.offsets)
    rows = o.flatten(0, 1), gate.unflatten(-1, (n, d)).flatten(0, 1)
    (o,) = by_rows(functools.partial(_gated_norm, spec.eps), tile, rows, (norm,))
    o = split.ranked(o.view(*narrow.shape[:2], n, d))
    return all_to_all(o, split.group).permute(1, 2, 0, 3, 4)


def _gated_norm(eps: float, o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    """`Glm5NextTextRMSNormGated`."""
    wide = wide_dtype(o.dtype)
    y = o.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return ((weight.to(wide) * y * torch.sigmoid(gate.to(wide))).to(o.dtype),)


OUT = 9  # the output projection among the parameters


class _ShardedKDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: _Spec, x, *parameters):
        ctx.spec = spec
        ctx.save_for_backward(x, *parameters)
        everything = spec.split.all_gather(x) if spec.gather else x[None]
        y = None
        for heads in spec.groups:
            parts = spec.parts(parameters, heads)
            wo = parts.pop(OUT)
            y = _added(y, linear(_group(spec, everything, *parts).flatten(2), wo.flatten(1)), spec)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        spec: _Spec = ctx.spec
        x, *parameters = ctx.saved_tensors
        dy_rows = dy.flatten(0, 1)
        everything = (spec.split.all_gather(x) if spec.gather else x[None]).detach()
        # By head: each row is one group's, so nothing is summed. What all heads share is summed in fp32 over the groups.
        sums = [torch.zeros_like(p, dtype=wide_dtype(p.dtype) if i > OUT else p.dtype) for i, p in enumerate(parameters)]
        d_all = None
        for heads in spec.groups:
            leaves = [t.detach().requires_grad_() for t in (everything, *spec.parts(parameters, heads))]
            wo = leaves.pop(OUT + 1).detach()
            with torch.enable_grad():
                o = _group(spec, *leaves)
            into = spec.parts(sums, heads)
            into.pop(OUT).copy_((dy_rows.t() @ o.detach().flatten(2).flatten(0, 1)).view(wo.shape))
            d_o = (dy_rows @ wo.flatten(1)).view(o.shape)
            d_x, *got = torch.autograd.grad(o, leaves, d_o)
            del o, d_o, leaves
            d_all = _added(d_all, d_x, spec)
            for total, grad in zip(into, got):
                total += grad
            del d_x, got
        d_all = d_all.to(x.dtype)
        dx = sum_scatter(d_all, spec.split.group) if spec.gather else d_all[0]
        return None, dx, *rounded(sums, parameters, ctx.needs_input_grad[2:])


def _added(total: torch.Tensor | None, share: torch.Tensor, spec: _Spec) -> torch.Tensor:
    """The sum over groups: in fp32 where there are several, rounded once at the end."""
    if total is not None:
        return total.add_(share)
    return share.to(wide_dtype(share.dtype)) if len(spec.groups) > 1 else share


def linear_attention(
    module: nn.Module, x: torch.Tensor, split: TokenSplit | None = None, offsets: Offsets | None = None, config: KDAConfig | None = None
) -> torch.Tensor:
    """`Glm5NextTextLinearAttention` of local tokens, over the whole sequence of all ranks.

    Args:
        module: transformers' module, whose parameters are used and whose forward is not. Under ZeRO-3 they must be gathered.
        x: [B, L, D], this rank's tokens as `split` has them; the same B and L on every rank.
        split: default: one rank.
        offsets: document boundaries of each row in the order of the whole (padded) sequence, or one for all rows; None: a row
            is a document.

    Returns:
        [B, L, D].

    Raises:
        PreflightError: heads that the ranks do not divide; a kernel that cannot run; projections that are no plain linear layers;
            autocast.
    """
    if x.device.type != "meta":
        preflight.check_autocast(x.device.type)
    preflight.check_plain(module, SUBMODULES)
    split, config = split or TokenSplit(), config or KDAConfig()
    H, d = module.num_heads, module.head_dim
    check_heads(H, split.size)
    if offsets is not None and len(offsets) < x.shape[0]:
        offsets = offsets * x.shape[0]
    lower_bound = module.forget_gate.safe_gate_lower_bound
    kernel = select_kernel(config.kernel, _device(x), lower_bound)
    gather = config.exchange_for(split.size, x.shape[-1], H, d) == "gather"
    spec = _Spec(split, offsets, gather, kernel, H, d, config, lower_bound, module.o_norm.variance_epsilon)
    return _ShardedKDA.apply(spec, x, *(module.get_parameter(name) for name in PARAMETERS))


def check_heads(heads: int, ranks: int) -> None:
    """KDA heads are dealt out whole, the same number to every rank."""
    if heads % ranks:
        works = [n for n in range(1, heads + 1) if heads % n == 0]
        raise PreflightError(
            f"linear_num_heads={heads} on {ranks} ranks: KDA heads are dealt out evenly; use {', '.join(map(str, works))} ranks"
        )


def _device(x: torch.Tensor) -> str:
    return "cpu" if x.device.type == "meta" else x.device.type


class KimiDeltaAttention(Glm5NextTextLinearAttention):
    """`Glm5NextTextLinearAttention` over the ranks of a layout; its parameters, under its names. `runtime` is set where a model's
    modules are replaced."""

    runtime: GlmRuntime

    def forward(self, hidden_states: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """[B, L, D] -> [B, L, D]: `linear_attention`."""
        split, config, lower_bound = layout.split, self.runtime.settings.kda, self.forget_gate.safe_gate_lower_bound
        H, kernel = self.num_heads, select_kernel(config.kernel, _device(hidden_states), lower_bound).name
        over = ""
        if split.size > 1:
            over = f" over {split.size} ranks by {config.exchange_for(split.size, hidden_states.shape[-1], H, self.head_dim)}"
        heads = min(config.heads_per_group, H // split.size)
        self.runtime.note("linear_attention", f"KDA, kernel {kernel}, {heads} heads of a rank at a time{over}")
        return linear_attention(self, hidden_states, split, layout.documents, config)
