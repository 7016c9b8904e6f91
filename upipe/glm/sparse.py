"""Sparse multi-head latent attention over selected tokens, absorbed, and the module that replaces transformers' dense one.

Symbols: B rows, S tokens of a row, L local tokens, c queries of a chunk, H heads, n and v their q/k and value dims
(`qk_nope_head_dim`, `v_head_dim`), C channels of a latent (`kv_lora_rank`), R of a query's latent (`q_lora_rank`), W tokens
listed for a query.

transformers expands a latent z_j into every head's key U_h z_j and value V_h z_j (`kv_b_proj`). Here U_h moves to the query
and V_h to the output (DeepSeek-V2, arXiv 2405.04434, section 2.1.2), so that one gathered row of C channels is key and value
of all heads:

    s_tj = (U_h^T q_th) . z_j / sqrt(n)        o_th = V_h sum over j of softmax_j(s_tj) z_j

Everything from a query's latent to the output projection is one autograd function over chunks of queries. It saves the
queries' latents, this rank's key latents and the selection; gathered rows, scores, heads' queries and outputs exist for a
chunk, in forward and in backward.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention

from upipe import preflight
from upipe.glm.config import GlmSettings
from upipe.glm.context import TokenLayout, TokenSplit
from upipe.glm.indexer import expanded, kept_or
from upipe.glm.moe import ExpertLoad
from upipe.loss import add_product, wide_dtype
from upipe.preflight import PreflightError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """What a kernel is asked to take: heads, latent channels, listed tokens a query, keys of a row, dtype, device type."""

    heads: int
    channels: int
    width: int
    keys: int
    dtype: torch.dtype
    device: str


class GatherKernel:
    """Attention of a chunk's queries over gathered rows, in fp32 (fp64): the definition, in torch. Takes every shape."""

    name = "gather"

    def declines(self, case: Case) -> str | None:
        """Why a shape is not taken, or None."""
        return None

    def chunk(self, case: Case, settings: GlmSettings) -> int:
        """Queries at a time: their gathered rows take at most `gather_bytes`."""
        return max(1, settings.gather_bytes // (4 * case.width * max(case.channels, case.heads)))

    def rows(self, keys: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the queries multiply, [c or 1, W, C], and which of it each sees, [c, 1, W]."""
        return keys[tokens.clamp(min=0)].to(wide_dtype(keys.dtype)), (tokens >= 0)[:, None]

    def attend(self, q: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        """q [c, H, C], keys [S, C], tokens [c, W] int64 with -1 -> [c, H, C] in q's dtype."""
        rows, seen = self.rows(keys, tokens)
        return (self._weights(q, rows, seen, scale) @ rows).to(q.dtype)

    def gradients(
        self, q: torch.Tensor, keys: torch.Tensor, tokens: torch.Tensor, scale: float, grad: torch.Tensor, dkeys: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output again, and the gradient of q. The keys' is added to dkeys, [S, C] fp32 (fp64), where it is given."""
        rows, seen = self.rows(keys, tokens)
        weights = self._weights(q, rows, seen, scale)
        out = weights @ rows
        grad = grad.to(rows.dtype)
        ds = grad @ rows.transpose(1, 2)
        ds = ds.sub_((grad * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
        if dkeys is not None:
            self._add(dkeys, tokens, ds, q.to(rows.dtype))
            self._add(dkeys, tokens, weights, grad)
        return out.to(q.dtype), (ds @ rows).to(q.dtype)

    def _weights(self, q, rows, seen, scale):
        scores = (q.to(rows.dtype) @ rows.transpose(1, 2)).mul_(scale)
        return scores.masked_fill_(~seen, float("-inf")).softmax(-1)

    def _add(self, dkeys: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> None:
        """Add to each listed key the x [c, H, C] of its queries and heads by weights [c, H, W]."""
        # Unlisted places have a weight of zero.
        dkeys.index_add_(0, tokens.clamp(min=0).flatten(), (weights.transpose(1, 2) @ x).flatten(0, 1))


class DenseKernel(GatherKernel):
    """Over all keys of the row under a mask: as many products as without a selection, and [c, H, S] scores."""

    name = "dense"

    def chunk(self, case: Case, settings: GlmSettings) -> int:
        return max(1, settings.gather_bytes // (4 * case.keys * case.heads))

    def rows(self, keys, tokens):
        seen = torch.zeros(len(tokens), len(keys) + 1, dtype=torch.bool, device=keys.device)
        seen.scatter_(1, tokens.where(tokens >= 0, len(keys)), True)
        return keys.to(wide_dtype(keys.dtype))[None], seen[:, None, :-1]

    def _add(self, dkeys, tokens, weights, x):
        dkeys.addmm_(weights.flatten(0, 1).t(), x.flatten(0, 1))


KERNELS: dict[str, GatherKernel] = {"gather": GatherKernel()}
"""Sparse kernels by name, the one to prefer first."""


def check_kernel_name(name: str) -> None:
    """Raises PreflightError where there is no such kernel."""
    if name != "auto" and name not in KERNELS:
        raise PreflightError(f"kernel={name!r}: use auto, {', '.join(KERNELS)}")


def choose(settings: GlmSettings, case: Case) -> tuple[GatherKernel, str]:
    """The kernel that runs a shape, and a line on it.

    Raises:
        PreflightError: there is no kernel of that name; or each declines and dense attention is not allowed.
    """
    check_kernel_name(settings.kernel)
    asked = KERNELS if settings.kernel == "auto" else {settings.kernel: KERNELS[settings.kernel]}
    reasons = []
    for kernel in asked.values():
        why = kernel.declines(case)
        if why is None:
            return kernel, f"sparse, kernel {kernel.name}"
        reasons.append(f"{kernel.name} declines it ({why})")
    if not settings.allow_dense:
        raise PreflightError(
            f"no sparse kernel takes {case}: {'; '.join(reasons)}. Use kernel=auto or gather, or allow_dense=True for dense attention "
            f"over all {case.keys} keys"
        )
    return DenseKernel(), f"DENSE over {case.keys} keys: {'; '.join(reasons)}"


@dataclass
class GlmRuntime:
    """What the replaced modules of one model share.

    Args:
        settings: how it computes.
        split: who holds which tokens.
        same_tokens: group of ranks that hold the same tokens as this one, to share the indexer's queries; None: no others.
        load: told which experts tokens chose; None: nobody is.
        ran: layer kind -> what ran, filled in and logged once.
    """

    settings: GlmSettings = field(default_factory=GlmSettings)
    split: TokenSplit = field(default_factory=TokenSplit)
    same_tokens: object = None
    load: ExpertLoad | None = None
    ran: dict[str, str] = field(default_factory=dict)

    def __deepcopy__(self, memo):
        return self

    def note(self, kind: str, what: str) -> None:
        """Log what a kind of layer runs, the first time and where it changes."""
        if self.ran.get(kind) != what:
            self.ran[kind] = what
            if self.split.rank == 0:
                logger.info("%s: %s", kind, what)


@dataclass(frozen=True)
class _Call:
    """What one call of the function is besides tensors. B, k: rows, tokens of a pool."""

    layout: TokenLayout
    kernel: GatherKernel
    chunk: int
    heads: int
    scale: float
    k: int

    def chunks(self, pools: torch.Tensor):
        """Row, queries, and the tokens they list, chunk by chunk."""
        places = self.layout.places.to(pools.device)
        for row in range(pools.shape[0]):
            begins = self.layout.begins(row).to(pools.device)
            for begin in range(0, pools.shape[1], self.chunk):
                part = slice(begin, begin + self.chunk)
                yield row, part, expanded(pools[row, part], places[part], begins[part], self.k)

    def split(self, w_kv: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """U [H, n, C] and V [H, v, C]."""
        heads = w_kv.view(self.heads, -1, w_kv.shape[1])
        return heads[:, :n], heads[:, n:]


class _SparseMLA(torch.autograd.Function):
    """q_latent [B, L, R], latent [B, L, C], pools [B, L, K] int32; w_q [H n, R], w_kv [H (n + v), C], w_o [hidden, H v]."""

    @staticmethod
    def forward(ctx, call: _Call, pools, q_latent, latent, w_q, w_kv, w_o):
        n = w_q.shape[0] // call.heads
        U, V = call.split(w_kv, n)
        keys = call.layout.split.gathered(latent)
        out = q_latent.new_empty(*q_latent.shape[:2], w_o.shape[0])
        for row, part, tokens in call.chunks(pools):
            q = (q_latent[row, part] @ w_q.t()).unflatten(1, (call.heads, n))
            mixed = call.kernel.attend(torch.einsum("thn,hnc->thc", q, U), keys[row], tokens, call.scale)
            out[row, part] = torch.einsum("thc,hvc->thv", mixed, V).flatten(1) @ w_o.t()
        ctx.call = call
        ctx.save_for_backward(pools, q_latent, latent, w_q, w_kv, w_o)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        call: _Call = ctx.call
        pools, q_latent, latent, w_q, w_kv, w_o = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        n = w_q.shape[0] // call.heads
        U, V = call.split(w_kv, n)
        wide = wide_dtype(latent.dtype)
        keys = call.layout.split.gathered(latent)
        dq_latent = torch.empty_like(q_latent) if needed[0] else None
        dkeys = torch.zeros(keys.shape, dtype=wide, device=keys.device) if needed[1] else None
        dw_q, dw_kv, dw_o = (
            torch.zeros(w.shape, dtype=wide, device=w.device) if need else None for w, need in zip((w_q, w_kv, w_o), needed[2:])
        )
        for row, part, tokens in call.chunks(pools):
            x, g = q_latent[row, part], grad[row, part]
            q = (x @ w_q.t()).unflatten(1, (call.heads, n))
            absorbed = torch.einsum("thn,hnc->thc", q, U)
            dheads = (g @ w_o).unflatten(1, (call.heads, -1))
            dmixed = torch.einsum("thv,hvc->thc", dheads, V)
            mixed, dabsorbed = call.kernel.gradients(absorbed, keys[row], tokens, call.scale, dmixed, None if dkeys is None else dkeys[row])
            dq = torch.einsum("thc,hnc->thn", dabsorbed, U).flatten(1)
            if dw_o is not None:
                add_product(dw_o, g, torch.einsum("thc,hvc->thv", mixed, V).flatten(1))
            if dw_kv is not None:
                dU, dV = call.split(dw_kv, n)
                dU += torch.einsum("thn,thc->hnc", q.to(wide), dabsorbed.to(wide))
                dV += torch.einsum("thv,thc->hvc", dheads.to(wide), mixed.to(wide))
            if dw_q is not None:
                add_product(dw_q, dq, x)
            if dq_latent is not None:
                torch.mm(dq, w_q, out=dq_latent[row, part])
        dlatent = None if dkeys is None else call.layout.split.reduced(dkeys).to(latent.dtype)
        grads = [None if d is None else d.to(w.dtype) for d, w in ((dw_q, w_q), (dw_kv, w_kv), (dw_o, w_o))]
        return None, None, dq_latent, dlatent, *grads


LINEAR = dict.fromkeys(("q_b_proj", "kv_b_proj", "o_proj"), nn.Linear)
"""Submodules whose weights are used without calling them."""


class SparseAttention(Glm5NextTextAttention):
    """`Glm5NextTextAttention` over the selected tokens alone; its parameters, under its names. `runtime` is set where a model's
    modules are replaced."""

    runtime: GlmRuntime

    def forward(self, hidden_states: torch.Tensor, layout: TokenLayout, prev_topk_indices: torch.Tensor | None = None):
        """[B, L, hidden] -> [B, L, hidden], None, and the pools for a next layer that shares them ([B, L, K] int32) or None.

        prev_topk_indices: the pools of the layer before, where `indexer_types` has this one share them.

        Raises:
            PreflightError: see `choose`; projections that are not plain linear layers; autocast.
            ValueError: a sharing layer without pools to share.
        """
        preflight.check_autocast(hidden_states.device.type)
        preflight.check_plain(self, LINEAR, biases=("o_proj",))
        settings = self.runtime.settings
        q_latent = self.q_a_layernorm(self.q_a_proj(hidden_states))
        if self.indexer is not None:
            pools = kept_or(lambda: self.indexer(hidden_states, q_latent, layout, settings.score_bytes, self.runtime.same_tokens))
        elif prev_topk_indices is None:
            raise ValueError(f"layer {self.layer_idx} shares the selection of the layer before, which has none: see indexer_types")
        else:
            pools = prev_topk_indices
        k = self.config.index_kpool
        latent = self.kv_a_layernorm(self.kv_a_proj_with_mqa(hidden_states))
        case = Case(self.num_heads, self.kv_lora_rank, pools.shape[2] * k + k - 1, layout.tokens, latent.dtype, latent.device.type)
        kernel, what = choose(settings, case)
        self.runtime.note(self.config.layer_types[self.layer_idx], what)
        call = _Call(layout, kernel, kernel.chunk(case, settings), self.num_heads, self.scaling, k)
        weights = self.q_b_proj.weight, self.kv_b_proj.weight, self.o_proj.weight
        out = _SparseMLA.apply(call, pools, q_latent, latent, *weights)
        out = out if self.o_proj.bias is None else out + self.o_proj.bias
        return out, None, pools if self.next_skip_topk else None
