"""Mixture of experts over a sequence in chunks, experts whole on every rank or dealt out over an expert-parallel group.

The result is transformers' `Glm5NextTextMoE`: no token is dropped. Every chunk is one autograd function that keeps its
tokens and the chosen experts of each (k integers), and runs again in backward: neither scores, weights nor expert
activations outlive it, and nothing is stored on a module. Backward takes the experts chosen in forward.

With E/P experts on each of P ranks, ranks gather a chunk's tokens, each runs its own experts on those of them that chose
them, and the ranks' sums go back to the tokens' rank (`combine`). Every chunk is a collective, so all ranks must run the same
number: what the rank with most tokens needs (`agree`). Ranks with fewer run smaller or empty chunks, padded for the gather.

T tokens of a rank, D hidden, E experts, k chosen a token, F expert width, P ranks of the expert group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad, silu
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextMoE

from upipe import preflight
from upipe.glm.kda import sum_scatter
from upipe.glm.replay import check_positive, rounded
from upipe.loss import wide_dtype
from upipe.preflight import PreflightError

if TYPE_CHECKING:
    from upipe.glm.sparse import GlmRuntime

MOE_CHUNK_TOKENS = 8192


@dataclass(frozen=True)
class MoEConfig:
    """How a MoE layer runs.

    Args:
        chunk_tokens: at most so many tokens of a rank at a time.
        group: expert-parallel group, over which `shard_experts` has dealt out the experts; None: all experts are here, and
            no rank waits for another.
        fp32_grads: sum the weights' gradients over chunks in fp32 and round once. False: in the weights' dtype.
        recompute: False: autograd keeps every chunk's intermediate results. Same bits in fp32.
    """

    chunk_tokens: int = MOE_CHUNK_TOKENS
    group: Any = None
    fp32_grads: bool = True
    recompute: bool = True

    def __post_init__(self) -> None:
        check_positive("chunk_tokens", self.chunk_tokens)

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


@dataclass
class ExpertLoad:
    """Tokens that chose each expert, by layer, since the last `reset`: integers, added up by forward passes in training mode.

    Recomputed forwards are not counted again. Tokens that pad a row are counted.
    """

    counts: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, layer: int, chosen: torch.Tensor, experts: int) -> None:
        """chosen: [T, k] expert ids."""
        count = torch.bincount(chosen.detach().flatten(), minlength=experts)
        self.counts[layer] = self.counts[layer] + count if layer in self.counts else count

    def total(self, group=None) -> dict[int, torch.Tensor]:
        """[E] counts of each layer, summed over a group's ranks (a collective; every rank must hold the same layers)."""
        totals = {layer: count.clone() for layer, count in sorted(self.counts.items())}
        if group is not None:
            for count in totals.values():
                dist.all_reduce(count, group=group)
        return totals

    def report(self, ranks: int = 1, group=None) -> str:
        """A line a layer: the busiest and the idlest expert, and with several `ranks` the busiest of so many equal shares of the
        experts, as multiples of the mean, and experts no token chose.

        Raises:
            ValueError: ranks that do not divide the experts.
        """
        lines = []
        for layer, count in self.total(group).items():
            if len(count) % ranks:
                raise ValueError(f"ranks={ranks} does not divide {len(count)} experts")
            shares = count.view(ranks, -1).sum(1).double()
            mean, share = count.double().mean().clamp(min=1e-9), shares.mean().clamp(min=1e-9)
            lines.append(
                f"layer {layer}: {int(count.sum())} choices; busiest expert {int(count.argmax())} has "
                f"{float(count.max() / mean):.2f}x the mean, idlest {float(count.min() / mean):.2f}x, {int((count == 0).sum())} unused"
                + (f"; busiest of {ranks} ranks {float(shares.max() / share):.2f}x" if ranks > 1 else "")
            )
        return "\n".join(lines)

    def reset(self) -> None:
        self.counts.clear()


def route(
    x: torch.Tensor, weight: torch.Tensor, router: nn.Module, bias: torch.Tensor, choose: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """scores [T, E] fp32 of tokens [T, D], and the chosen experts [T, k] (choose=False: None), as `Glm5NextTextTopkRouter`
    chooses them. The selection bias and the expert groups take part in the choice alone."""
    wide = wide_dtype(x.dtype)
    scores = linear(x.to(wide), weight.to(wide)).sigmoid()
    if not choose:
        return scores, None
    choice = scores.detach() + bias
    if router.num_group > 1:
        grouped = choice.view(-1, router.num_group, router.num_experts // router.num_group)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(router.topk_group, dim=-1, sorted=False).indices
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best, True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    return scores, choice.topk(router.top_k, dim=-1, sorted=False).indices


def token_weights(scores: torch.Tensor, chosen: torch.Tensor, router: nn.Module) -> torch.Tensor:
    """[T, k] weights of the chosen experts."""
    weights = scores.gather(1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


def _clamped(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def run_experts(x, chosen, weights, gate_up, down, limit: float, first: int = 0) -> torch.Tensor:
    """Weighted sum of the experts that each token chose among those given; 0 where it chose none of them.

    Tokens are sorted by expert, so that each expert is two products over its own tokens. Summed in fp32, rounded once.

    Args:
        x: [T, D]. chosen: [T, k] ids. weights: [T, k]. gate_up: e matrices [2F, D]. down: e matrices [D, F].
        first: id of the first expert given.

    Returns:
        [T, D], x's dtype, in any case a function of x and the weights.
    """
    flat = chosen.flatten() - first
    order = flat.argsort(stable=True)
    counts = expert_counts(flat, len(gate_up))
    at, wide = counts[0], wide_dtype(x.dtype)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert, count in enumerate(counts[1:-1]):
        if count == 0 and expert > 0:
            continue
        picks = order[at : at + count]
        at += count
        tokens = picks // chosen.shape[1]
        gate, up = linear(x.index_select(0, tokens), gate_up[expert]).chunk(2, -1)
        made = linear(_clamped(gate, up, limit), down[expert]).to(wide) * weights.flatten().index_select(0, picks)[:, None]
        out.index_add_(0, tokens, made)
    return out.to(x.dtype)


def expert_counts(flat: torch.Tensor, experts: int) -> list[int]:
    """Choices before, of each of, and after `experts` experts, of ids counted from the first of them."""
    return torch.bincount(flat.clamp(-1, experts) + 1, minlength=experts + 2).tolist()


def nvls_possible(environment: Mapping[str, str] | None = None) -> bool:
    """Whether NCCL may reduce inside the switch (NVLS), whose rounding differs.

    It may unless NCCL_NVLS_ENABLE=0, or NCCL_ALGO leaves it out, as "ring,tree" and "^nvls" do; by function too, the one for
    reduce-scatter counting, else the one without a function: "reducescatter:ring;allreduce:nvls".
    """
    environment = os.environ if environment is None else environment
    if environment.get("NCCL_NVLS_ENABLE", "").strip() == "0":
        return False
    asked = environment.get("NCCL_ALGO", "").lower().replace(" ", "")
    by_function = {function: names for function, _, names in (part.rpartition(":") for part in asked.split(";"))}
    names = by_function.get("reducescatter", by_function.get("", ""))
    if not names:
        return True
    listed = any(name.startswith("nvls") for name in names.removeprefix("^").split(","))
    return listed != names.startswith("^")


def combine_dtype(dtype: torch.dtype, ranks: int, nvls: bool) -> torch.dtype:
    """What ranks' shares are added in: in their own dtype for exactly two ranks without NVLS, where one addition rounded once
    is the fp32 sum rounded; in fp32 otherwise."""
    return dtype if ranks == 2 and not nvls else wide_dtype(dtype)


def combine(shares: torch.Tensor, group) -> torch.Tensor:
    """[P, n, D] this rank's share in each rank's tokens -> [n, D] the sum of all ranks' shares in this rank's tokens."""
    P = shares.shape[0]
    if P == 1:
        return shares[0]
    nvls = dist.get_backend(group) == "nccl" and nvls_possible()
    if combine_dtype(shares.dtype, P, nvls) != shares.dtype:
        return sum_scatter(shares, group)
    out = torch.empty_like(shares[0])
    dist.reduce_scatter_tensor(out, shares.contiguous().view(-1, *shares.shape[2:]), group=group)
    return out


class _Dispatch(torch.autograd.Function):
    """x [n, D], weights [n, k] -> those of all ranks, [P*n, D] and [P*n, k]; backward adds up their gradients. One function, so
    that every rank's backward runs its collectives in one order."""

    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        return tuple(_gathered(t, group) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        ranks = dist.get_world_size(ctx.group)
        return None, *(combine(grad.unflatten(0, (ranks, -1)), ctx.group) for grad in grads)


class _Combine(torch.autograd.Function):
    """[P*n, D] -> [n, D]: `combine`; backward gathers."""

    @staticmethod
    def forward(ctx, shares, group):
        ctx.group = group
        return combine(shares.unflatten(0, (dist.get_world_size(group), -1)), group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _gathered(grad, ctx.group), None


def _gathered(x: torch.Tensor, group) -> torch.Tensor:
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _padded(x: torch.Tensor, missing: int, value: float) -> torch.Tensor:
    return pad(x, (0, 0, 0, missing), value=value) if missing else x


def agree(number: int, group, device) -> int:
    """The largest of the ranks' numbers."""
    if group is None:
        return number
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return int(largest)


def chunks(tokens: int, number: int) -> list[slice]:
    """A rank's tokens in `number` chunks whose sizes differ by one at most; some are empty where there are fewer tokens."""
    cuts = [tokens * i // number for i in range(number + 1)]
    return [slice(a, b) for a, b in zip(cuts, cuts[1:])]


PARAMETERS = (
    "gate.weight", "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight", "shared_experts.down_proj.weight",
    "experts.gate_up_proj", "experts.down_proj",
)  # fmt: skip
"""Of transformers' module, in the order in which they are passed on; the experts' last."""
DENSE = 4
LINEAR = dict.fromkeys((f"shared_experts.{name}_proj" for name in ("gate", "up", "down")), nn.Linear)
"""Submodules whose weights are used without calling them."""


@dataclass(frozen=True)
class _Spec:
    router: nn.Module
    bias: torch.Tensor
    limit: float
    config: MoEConfig
    parts: list[slice]
    rows: int
    load: ExpertLoad | None
    layer: int

    def chunk(self, x, chosen, weight, shared_gate, shared_up, shared_down, *experts):
        """One chunk, differentiable: x [t, D], chosen [t, k] or None to choose -> out [t, D], chosen."""
        scores, picked = route(x, weight, self.router, self.bias, chosen is None)
        chosen = picked if chosen is None else chosen
        weights = token_weights(scores, chosen, self.router)
        gate_up, down = experts[: len(experts) // 2], experts[len(experts) // 2 :]
        group = self.config.group
        if self.config.ranks == 1:
            out = run_experts(x, chosen, weights, gate_up, down, self.limit)
        else:
            missing = self.rows - x.shape[0]
            everyone, all_weights = _Dispatch.apply(group, _padded(x, missing, 0.0), _padded(weights, missing, 0.0))
            all_chosen = _gathered(_padded(chosen.to(torch.int32), missing, -1), group).long()
            first = dist.get_rank(group) * len(gate_up)
            shares = run_experts(everyone, all_chosen, all_weights, gate_up, down, self.limit, first)
            out = _Combine.apply(shares, group)[: x.shape[0]]
        shared = linear(_clamped(linear(x, shared_gate), linear(x, shared_up), self.limit), shared_down)
        return out + shared, chosen

    def run(self, x, dense, experts):
        """A chunk of a forward, told to the load report."""
        out, chosen = self.chunk(x, None, *dense, *experts)
        # A graph task runs: this is a recompute of a checkpointed layer.
        if self.load is not None and torch._C._current_graph_task_id() == -1:
            self.load.add(self.layer, chosen, self.router.num_experts)
        return out, chosen


def _one_by_one(parameters) -> list[torch.Tensor]:
    """Every expert's two matrices by themselves: the gradient of one touches no other's memory."""
    gate_up, down = parameters[DENSE:]
    return [*gate_up.unbind(0), *down.unbind(0)]


class _ChunkedMoE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: _Spec, x, *parameters):
        out, picked = torch.empty_like(x), []
        experts = _one_by_one(parameters)
        for part in spec.parts:
            out[part], chosen = spec.run(x[part], parameters[:DENSE], experts)
            picked.append(chosen.to(torch.int32))
        ctx.spec = spec
        ctx.save_for_backward(x, torch.cat(picked), *parameters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        spec: _Spec = ctx.spec
        x, picked, *parameters = ctx.saved_tensors
        several = len(spec.parts) > 1 and spec.config.fp32_grads
        sums = [torch.zeros_like(p, dtype=wide_dtype(p.dtype) if several else p.dtype) for p in parameters]
        into = [*sums[:DENSE], *_one_by_one(sums)]
        dx = torch.empty_like(x)
        for part in reversed(spec.parts):
            leaves = [t.detach().requires_grad_() for t in (x[part], *parameters[:DENSE], *_one_by_one(parameters))]
            with torch.enable_grad():
                out, _ = spec.chunk(leaves[0], picked[part].long(), *leaves[1:])
            dx[part], *got = torch.autograd.grad(out, leaves, grad[part], allow_unused=True)
            del out, leaves
            for total, share in zip(into, got):
                if share is not None:
                    total += share
            del got
        del into, total
        return None, dx, *rounded(sums, parameters, ctx.needs_input_grad[2:])


def mixture_of_experts(
    module: nn.Module, x: torch.Tensor, config: MoEConfig | None = None, load: ExpertLoad | None = None, layer: int = 0
) -> torch.Tensor:
    """`Glm5NextTextMoE` of local tokens, in chunks.

    Args:
        module: transformers' module, whose parameters are used and whose forward is not. Under ZeRO-3 they must be gathered;
            with an expert group its experts are this rank's (`shard_experts`).
        x: [..., D]. Ranks of an expert group may have different numbers of tokens.
        load: is told which experts tokens chose; layer: under which number.

    Returns:
        Like x. Gradients of the router and the shared expert are this rank's tokens' share; with an expert group those of an
        expert are of all tokens of the group's ranks.

    Raises:
        PreflightError: experts that are not the ones the group leaves this rank; a projection that is no plain linear layer.
    """
    config = config or MoEConfig()
    preflight.check_plain(module, LINEAR)
    here, experts = module.experts.gate_up_proj.shape[0], module.gate.num_experts
    if here * config.ranks != experts:
        raise PreflightError(
            f"{here} experts here and an expert group of {config.ranks} ranks make {here * config.ranks}, the router knows {experts}: "
            "call shard_experts(module, group) first, or give no group"
        )
    rows = x.reshape(-1, x.shape[-1])
    T = rows.shape[0]
    most = agree(T, config.group, x.device)
    number = max(1, -(-most // config.chunk_tokens))
    bias, limit = module.gate.e_score_correction_bias, module.experts.swiglu_limit
    spec = _Spec(module.gate, bias, limit, config, chunks(T, number), -(-most // number), load, layer)
    parameters = [module.get_parameter(name) for name in PARAMETERS]
    if config.recompute:
        return _ChunkedMoE.apply(spec, rows, *parameters).view(x.shape)
    outs = [spec.run(rows[part], parameters[:DENSE], _one_by_one(parameters))[0] for part in spec.parts]
    return torch.cat(outs).view(x.shape)


@torch.no_grad()
def shard_experts(module: nn.Module, group) -> None:
    """Leave this rank its E/P experts of transformers' `Glm5NextTextMoE`, in place: rank r of the group has [r*E/P, (r+1)*E/P).

    Their gradients are whole in the group: add them up over the groups' replicas alone. DeepSpeed and DDP, which would average
    those of different experts, are refused (`preflight.check_experts`).

    Raises:
        PreflightError: experts that the ranks do not divide.
    """
    experts, ranks, rank = module.gate.num_experts, dist.get_world_size(group), dist.get_rank(group)
    if experts % ranks:
        works = [n for n in range(1, experts + 1) if experts % n == 0]
        raise PreflightError(f"{experts} experts on {ranks} ranks: dealt out evenly; use {', '.join(map(str, works))} ranks")
    mine = slice(rank * experts // ranks, (rank + 1) * experts // ranks)
    for name in ("gate_up_proj", "down_proj"):
        whole = getattr(module.experts, name)
        if whole.shape[0] != experts:
            raise PreflightError(f"{name} has {whole.shape[0]} of {experts} experts: they were dealt out already")
        part = nn.Parameter(whole[mine].clone(), requires_grad=whole.requires_grad)
        part.expert_ranks = ranks
        setattr(module.experts, name, part)


class MixtureOfExperts(Glm5NextTextMoE):
    """`Glm5NextTextMoE` in chunks; its parameters, under its names. `runtime` is set where a model's modules are replaced.

    Attributes:
        layer: under which number choices are told to the runtime's load report.
    """

    runtime: GlmRuntime
    layer: int = 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, L, D] -> [B, L, D]: `mixture_of_experts`."""
        load = self.runtime.load if self.training else None
        return mixture_of_experts(self, hidden_states, self.runtime.settings.moe, load, self.layer)
