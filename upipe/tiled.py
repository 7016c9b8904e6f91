"""MLP, norms and loss a tile of tokens at a time, as plain functions and on Hugging Face models.

The wide activations of an MLP, the fp32 copies of a norm and the logits of the loss exist for one tile only, in forward
and in backward. Every weight is an input of one autograd function that returns its whole gradient, so each weight gets
one accumulation a backward, which is what ZeRO 0 to 3, DDP and FSDP2 count on. No collective happens inside a tile: ranks
may have different lengths and numbers of tiles.

In a pre-norm layer the incoming gradient of the MLP is the residual's too, so the MLP makes a new one; the norm below it
and the norm after the last layer write over theirs. In post-norm layers (Gemma, OLMo-2) it is the other way round.

Symbols: N rows (tokens of the batch), D hidden size, F width of the MLP. In place of DeepSpeed's TiledMLP and
TiledFusedLogitsLoss (deepspeed/runtime/sequence_parallel/ulysses_sp.py), whose hooks fire once a tile.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from upipe import loss, models, preflight
from upipe.loss import LOSS_TILE_TOKENS, LossTerms, add_product, wide_dtype
from upipe.preflight import PreflightError
from upipe.rotary import unfinish_heads

MLP_TILE_TOKENS = 8192
NORM_TILE_TOKENS = 8192


@dataclass(frozen=True)
class TilingConfig:
    """What `apply_tiling` tiles. None in place of a number of tokens leaves that part as it is.

    Args:
        mlp_tokens, norm_tokens, loss_tokens: tokens a tile (of all rows of the batch together).
        fp32_grads: sum weight gradients of bf16 models over tiles in fp32.
        reuse_grad: write the gradient of an MLP's or norm's input over the incoming gradient where nothing else holds it.
        z_loss, label_smoothing: terms of the loss, see `loss.LossTerms`. The softcap is the model's own.
        loss_implementation: "tiled" or "liger", see `loss.tiled_loss_sum`.
    """

    mlp_tokens: int | None = MLP_TILE_TOKENS
    norm_tokens: int | None = NORM_TILE_TOKENS
    loss_tokens: int | None = LOSS_TILE_TOKENS
    fp32_grads: bool = True
    reuse_grad: bool = True
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    loss_implementation: str = "tiled"


@dataclass
class Counts:
    """Backward passes that wrote over the incoming gradient, and those that had to make a new tensor."""

    reused: int = 0
    copied: int = 0


def tiled_mlp(
    x: torch.Tensor,
    mlp: nn.Module,
    tile_tokens: int = MLP_TILE_TOKENS,
    fp32_grads: bool = True,
    reuse_grad: bool = False,
    counts: Counts | None = None,
) -> torch.Tensor:
    """mlp(x), computed and differentiated in tiles of rows; nothing but x is kept for backward.

    Forward holds the output and a tile's activations. Backward computes them again; it holds the gradient of x, a tile,
    and the sums of the weights' gradients.

    Args:
        x: [..., D], in the weights' dtype. One that is not contiguous is copied.
        mlp: gate, up and down projections as the served architectures have them (also fused, as in Phi-3), with any
            activation and with biases or without.
        tile_tokens: rows at a time; may be one, and may be more than there are.
        fp32_grads: sum the weights' gradients over tiles in fp32 and round once (4 bytes a weight while backward runs).
            False: in the weights' dtype, rounded at every tile.
        reuse_grad: write the gradient of x over the incoming one where this function is its only owner. In a pre-norm
            layer the residual holds it too, and a new tensor is made.
        counts: is told which of the two happened.

    Returns:
        [..., width of the down projection], in x's dtype.

    Raises:
        PreflightError: a mixture of experts, another module, projections that are not plain torch.nn.Linear; autocast.
        TypeError: x and a weight differ in dtype.
    """
    gated = _gated(mlp)
    _check(x, tile_tokens, {f"{name}.{key}": p for name, key, p in gated.named})
    spec = _Spec.of(tile_tokens, fp32_grads, reuse_grad, counts)
    return _TiledMLP.apply(spec, gated.inner, x, *(p for _, _, p in gated.named))


def tiled_norm(
    x: torch.Tensor,
    norm: nn.Module,
    tile_tokens: int = NORM_TILE_TOKENS,
    reuse_grad: bool = False,
    counts: Counts | None = None,
) -> torch.Tensor:
    """norm(x) for an RMS norm of a served architecture, in tiles of rows; nothing but x is kept for backward.

    The values are the module's own, bit for bit on a CPU, since each tile goes through its forward. Backward is in fp32
    (fp64), in tiles; the weight's gradient is summed in fp32.

    Args:
        x: [..., D], any float dtype.
        norm: LlamaRMSNorm and its like; Gemma's, which multiplies by 1 + weight.
        tile_tokens: rows at a time.
        reuse_grad, counts: as in `tiled_mlp`. The gradient that comes from an MLP or attention block is owned alone.

    Raises:
        PreflightError: another kind of norm; autocast.
    """
    base, architecture, part = _known(norm)
    if part != "norm":
        raise PreflightError(f"{type(norm).__name__} is not an RMS norm that can be tiled: {_served('norm')} are")
    _check(x, tile_tokens, {})
    offset = 1.0 if architecture.prefix.startswith("Gemma") else 0.0
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    spec = _Spec.of(tile_tokens, True, reuse_grad, counts)
    return _TiledNorm.apply(spec, functools.partial(base.forward, norm), eps, offset, x, norm.weight)


class _Spec(NamedTuple):
    tile_tokens: int
    fp32_grads: bool
    reuse_grad: bool
    counts: Counts

    @classmethod
    def of(cls, tile_tokens: int, fp32_grads: bool, reuse_grad: bool, counts: Counts | None) -> _Spec:
        if reuse_grad and torch.is_grad_enabled():
            _sole_holders()     # seen once, before any backward that compares with it
        return cls(tile_tokens, fp32_grads, reuse_grad, Counts() if counts is None else counts)

    def tiles(self, rows: int):
        for start in range(0, rows, self.tile_tokens):
            yield slice(start, min(start + self.tile_tokens, rows))

    def input_grad(self, grad: torch.Tensor, x: torch.Tensor, sole: bool) -> torch.Tensor:
        """Where the gradient of x goes: the incoming one's memory, or new memory."""
        if self.reuse_grad and sole and grad.shape == x.shape and grad.dtype == x.dtype and grad.is_contiguous():
            self.counts.reused += 1
            # A view would keep its base: who is given it next could not free the memory, and would count it as another's.
            return torch.ops.aten._unsafe_view(grad, grad.shape) if grad._is_view() else grad
        self.counts.copied += 1
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class _TiledMLP(torch.autograd.Function):
    """x: [..., D]; params: weight and bias (or None) of each projection, the down projection's last."""

    @staticmethod
    def forward(ctx, spec, inner, x, *params):
        *ins, (w_down, b_down) = zip(params[::2], params[1::2])
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(*x.shape[:-1], w_down.shape[0], dtype=x.dtype, device=x.device)
        flat = out.view(-1, w_down.shape[0])
        for part in spec.tiles(rows.shape[0]):
            wide = inner([linear(rows[part], w, b) for w, b in ins])
            if b_down is None:
                torch.mm(wide, w_down.t(), out=flat[part])
            else:
                torch.addmm(b_down, wide, w_down.t(), out=flat[part])
            del wide
        ctx.spec, ctx.inner = spec, inner
        ctx.save_for_backward(x, *params)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        sole = ctx.spec.reuse_grad and _holders(grad) in _sole_holders()
        spec, needed = ctx.spec, ctx.needs_input_grad[2:]
        x, *params = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        *ins, (w_down, _) = zip(params[::2], params[1::2])
        dx = spec.input_grad(grad, x, sole) if needed[0] else None
        dx_rows = None if dx is None else dx.view(-1, dx.shape[-1])
        grads = grad.reshape(-1, w_down.shape[0])
        # One tile is one product, rounded once at its end: fp32 sums would add nothing.
        in_fp32 = spec.fp32_grads and rows.shape[0] > spec.tile_tokens
        sums = [
            torch.zeros(p.shape, dtype=wide_dtype(p.dtype) if in_fp32 else p.dtype, device=p.device) if need else None
            for p, need in zip(params, needed[1:])
        ]
        for part in spec.tiles(rows.shape[0]):
            tile, g = rows[part], grads[part]
            into = [linear(tile, w, b).requires_grad_() for w, b in ins]
            with torch.enable_grad():
                wide = ctx.inner(into)
            _add_weight_grads(sums[-2:], g, wide.detach())
            d_into = torch.autograd.grad(wide, into, torch.mm(g, w_down))
            del wide, into
            for i, ((w, _), d) in enumerate(zip(ins, d_into)):
                _add_weight_grads(sums[2 * i : 2 * i + 2], d, tile)
                # g has been read: its memory may be dx's.
                if dx_rows is not None:
                    torch.mm(d, w, out=dx_rows[part]) if i == 0 else dx_rows[part].addmm_(d, w)
            del d_into
        for i, (total, p) in enumerate(zip(sums, params)):
            sums[i] = None if total is None else total.to(p.dtype)
            del total
        return None, None, dx, *sums


def _add_weight_grads(sums, grad: torch.Tensor, x: torch.Tensor) -> None:
    """Add the gradients of a projection's weight and bias over a tile. grad: [T, out], x: [T, in]."""
    weight, bias = sums
    if weight is not None:
        add_product(weight, grad, x)
    if bias is not None:
        bias += grad.sum(0, dtype=bias.dtype)


class _TiledNorm(torch.autograd.Function):
    """x: [..., D], weight: [D]; plain: the module's own forward."""

    @staticmethod
    def forward(ctx, spec, plain, eps, offset, x, weight):
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(x.shape, dtype=plain(rows[:0]).dtype, device=x.device)
        flat = out.view(-1, x.shape[-1])
        for part in spec.tiles(rows.shape[0]):
            flat[part] = plain(rows[part])
        ctx.spec, ctx.eps, ctx.offset = spec, eps, offset
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        sole = ctx.spec.reuse_grad and _holders(grad) in _sole_holders()
        spec = ctx.spec
        x, weight = ctx.saved_tensors
        rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        dx = spec.input_grad(grad, x, sole)
        dx_rows = dx.view(-1, x.shape[-1])
        wide = wide_dtype(x.dtype)
        factor = weight.to(wide) + ctx.offset
        total = torch.zeros_like(factor)
        for part in spec.tiles(rows.shape[0]):
            norm_backward(grads[part], rows[part], factor, ctx.eps, dx_rows[part], total)
        return None, None, None, None, dx, total.to(weight.dtype)


def norm_backward(grad, x, weight, eps: float, out, total: torch.Tensor | None) -> torch.Tensor:
    """Backward of an RMS norm of [T, D], one kernel on a GPU: -> the gradient of its input x, in `out`, which may be grad itself.
    total: [D] fp32 (fp64), to which the weight's gradient is added; None: that is not needed."""
    grad, x = (t.contiguous()[:, None] for t in (grad, x))
    unfinish_heads(grad, None, None, out=out[:, None], raw=x, weight=weight, eps=eps, weight_grad=total)
    return out


def _holders(grad: torch.Tensor) -> tuple[int, ...]:
    """How many hold a gradient: Python references to it, references to the tensor, tensors on its memory; for a view,
    those of its base as well.

    The numbers mean nothing by themselves: they are compared with those of gradients that have one owner, seen at the same
    place (`_sole_holders`).
    """
    holders = sys.getrefcount(grad), grad._use_count(), torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    base = grad._base
    return holders if base is None else (*holders, sys.getrefcount(base), base._use_count())


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.seen.append(_holders(grad))
        return grad, None


@functools.cache
def _sole_holders() -> frozenset[tuple[int, ...]]:
    """`_holders` of gradients that nothing but the backward they are given to holds, in this torch: a new tensor, and a
    view of a new tensor."""
    seen: list = []
    with torch.enable_grad():
        x = torch.ones(1, 2, requires_grad=True)
        # Negation saves no tensor: inside activation checkpointing saved tensors are counted.
        _Probe.apply(x, seen).neg().sum().backward()
        _Probe.apply(x, seen).view(2).neg().sum().backward()
    return frozenset(seen)


class _Gated(NamedTuple):
    """An MLP taken apart: `inner` from the projections of x to what the down projection takes; its parameters in order."""

    inner: object
    named: list[tuple[str, str, torch.Tensor | None]]


def _gated(mlp: nn.Module) -> _Gated:
    """Projections and activation of an MLP. Under ZeRO-3 call it inside the module's forward, which gathers them."""
    _, _, part = _known(mlp)
    if part == "experts":
        raise PreflightError(f"{type(mlp).__name__} is a mixture of experts: tiling is for dense MLPs; leave it as it is")
    if part != "mlp":
        raise PreflightError(f"{type(mlp).__name__} is not an MLP that can be tiled: {_served('mlp')} are")
    names = _linear_names(mlp)
    named = []
    for name in names:
        projection = getattr(mlp, name)
        _check_linear(f"{type(mlp).__name__}.{name}", projection)
        named += [(name, key, getattr(projection, key)) for key in ("weight", "bias")]
    return _Gated(functools.partial(_fused if len(names) == 2 else _split, _activation(mlp)), named)


def _linear_names(mlp: nn.Module) -> tuple[str, ...]:
    return ("gate_up_proj", "down_proj") if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj", "down_proj")


def _activation(mlp: nn.Module):
    """The activation as a function. Its forward, not its call: ZeRO-3's hooks on it would run, and fetch, once a tile."""
    act = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    if isinstance(act, nn.Module) and next(act.parameters(), None) is not None:
        raise PreflightError(f"{type(mlp).__name__}'s activation {type(act).__name__} has parameters: it is not served")
    return act.forward if isinstance(act, nn.Module) else act


def _split(act, into: list[torch.Tensor]) -> torch.Tensor:
    gate, up = into
    return act(gate) * up


def _fused(act, into: list[torch.Tensor]) -> torch.Tensor:
    gate, up = into[0].chunk(2, dim=-1)
    return up * act(gate)


def _check_linear(name: str, projection: nn.Module) -> None:
    if isinstance(projection, FSDPModule) or isinstance(getattr(projection, "weight", None), DTensor):
        raise PreflightError(
            f"{name}.weight is a shard: call apply_tiling first, then fully_shard on each decoder layer (and the model), not on "
            "single projections, whose own forward never runs"
        )
    if type(projection) is not nn.Linear:
        raise PreflightError(
            f"{name} is a {type(projection).__module__}.{type(projection).__qualname__}, not a plain torch.nn.Linear: its weight "
            "alone does not say what it computes (adapter, quantised or tensor-parallel layer). Merge or remove it first"
        )


def _check(x: torch.Tensor, tile_tokens: int, params: dict[str, torch.Tensor | None]) -> None:
    _check_tokens("tile_tokens", tile_tokens)
    preflight.check_autocast(x.device.type)
    for name, p in params.items():
        if p is not None and p.dtype != x.dtype:
            raise TypeError(f"hidden states are {x.dtype} but {name} is {p.dtype}: cast the model to one dtype")


def _check_tokens(name: str, tokens) -> None:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise PreflightError(f"{name}={tokens!r} must be a positive number of tokens")


PARTS = {"MLP": "mlp", "RMSNorm": "norm", "ForCausalLM": "lm", "SparseMoeBlock": "experts"}


def _known(module: nn.Module) -> tuple[type, models.Architecture | None, str | None]:
    """A module's own class under what was put on it, its architecture, and which part of a model it is.

    A subclass of a served class may compute something else: only what this library and fully_shard made is looked through.
    """
    own = next(c for c in type(module).__mro__ if "_tiling" not in vars(c) and not issubclass(c, FSDPModule))
    architecture = next((a for a in models.ARCHITECTURES if a.module_name == own.__module__), None)
    if architecture is None or not own.__name__.startswith(architecture.prefix):
        return own, None, None
    part = PARTS.get(own.__name__.removeprefix(architecture.prefix))
    # GPT-OSS calls its mixture of experts an MLP.
    return own, architecture, "experts" if part == "mlp" and hasattr(module, "experts") else part


def _served(part: str) -> str:
    suffix = next(s for s, p in PARTS.items() if p == part)
    names = [a.prefix + suffix for a in models.ARCHITECTURES if not (part == "mlp" and a.name == "gpt_oss")]
    return ", ".join(names)


@dataclass
class Tiling:
    """What `apply_tiling` did. Made by it; `remove()` undoes it.

    Attributes:
        mlp_counts, norm_counts: gradients written over the incoming one, and not.
    """

    model: nn.Module
    config: TilingConfig
    mlps: int = 0
    norms: int = 0
    experts: list[str] = field(default_factory=list)
    has_loss: bool = False
    mlp_counts: Counts = field(default_factory=Counts)
    norm_counts: Counts = field(default_factory=Counts)
    _patched: list[nn.Module] = field(default_factory=list, repr=False)

    def __deepcopy__(self, memo):
        return self

    def report(self) -> str:
        """What was tiled and what was left alone, a line each."""
        c = self.config
        lines = [f"Tiling on {type(self.model).__name__}:"]
        if c.mlp_tokens is not None:
            lines.append(f"{self.mlps} MLPs in tiles of {c.mlp_tokens} tokens; gradients in place {_share(self.mlp_counts)}")
            if self.experts:
                lines.append(f"{len(self.experts)} mixtures of experts left as they are ({self.experts[0]}, ...)")
        if c.norm_tokens is not None:
            lines.append(f"{self.norms} norms in tiles of {c.norm_tokens} tokens; gradients in place {_share(self.norm_counts)}")
        if self.has_loss:
            how = f"tiles of {c.loss_tokens} tokens" if c.loss_implementation == "tiled" else "liger's own tiles"
            lines.append(f"loss in {how}, z_loss {c.z_loss}, label_smoothing {c.label_smoothing}")
        return "\n".join(lines)

    def remove(self) -> None:
        """Make the model plain again.

        Raises:
            PreflightError: a patched module was given another class since (fully_shard does that).
        """
        for module in self._patched:
            if "_tiling" not in vars(type(module)):
                raise PreflightError(
                    f"{type(module).__name__} was subclassed after tiling was put on: undo that first (fully_shard cannot be)"
                )
        for module in self._patched:
            module.__class__ = type(module).__mro__[1]
        self._patched = []


def _share(counts: Counts) -> str:
    return f"{counts.reused} times, {counts.copied} times not"


def tiled_loss_of(model: nn.Module) -> Tiling | None:
    """The tiling whose model computes its loss from `shift_labels` itself, or None: the model gives logits."""
    for module in model.modules():
        tiling = getattr(type(module), "_tiling", None)
        if tiling is not None and tiling.has_loss:
            return tiling
    return None


def apply_tiling(model: nn.Module, config: TilingConfig | None = None) -> Tiling:
    """Tile the MLPs, the norms and the loss of a Hugging Face causal LM, in place, instance by instance.

    Call it before `deepspeed.initialize`, DistributedDataParallel or fully_shard; before or after `upipe.apply`. Parameters
    and `state_dict()` stay as they are. Norms inside attention modules and mixtures of experts are left alone.

    With `loss_tokens` the model's forward takes `shift_labels` [B, L] (already shifted, -100 ignored; they win over
    `labels`) and returns no logits but, as `loss`, the sum over this rank's valid tokens: give it to `loss.global_loss`.
    Without shift_labels the forward is the model's own.

    Raises:
        PreflightError: settings or modules that do not fit, before anything is changed, with what would work.
        ImportError: liger-kernel was asked for and is not installed.
    """
    config = TilingConfig() if config is None else config
    preflight.check_arguments(model, config, TilingConfig)
    for name in ("mlp_tokens", "norm_tokens", "loss_tokens"):
        if getattr(config, name) is not None:
            _check_tokens(name, getattr(config, name))
    if any("_tiling" in vars(type(m)) for m in model.modules()):
        raise PreflightError("tiling is on this model already: call remove() on its handle first")
    tiling = Tiling(model, config)
    wanted = {"mlp": config.mlp_tokens, "norm": config.norm_tokens, "lm": config.loss_tokens}
    inside = {id(m) for a in model.modules() if _is_attention(a) for m in a.modules()}
    found: list[tuple[nn.Module, type]] = []
    for name, module in model.named_modules():
        own, _, part = _known(module)
        if part == "experts":
            tiling.experts.append(f"{name}: {own.__name__}")
        if id(module) in inside or wanted.get(part) is None:
            continue
        if part == "mlp":
            for linear_name in _linear_names(module):
                _check_linear(f"{name}.{linear_name}", getattr(module, linear_name))
            for child_name, child in module.named_children():
                _check_hooks(f"{name}.{child_name}", child)
            _activation(module)
        if part == "lm":
            _check_linear("lm_head", module.lm_head)
            loss.check_implementation(config.loss_implementation)
            found.append((module.lm_head, _head_class(tiling, _terms(module, config))))
            found.append((module, _lm_class(type(module), tiling)))
        else:
            found.append((module, _mlp_class(type(module), tiling) if part == "mlp" else _norm_class(type(module), tiling)))
        tiling.mlps += part == "mlp"
        tiling.norms += part == "norm"
        tiling.has_loss |= part == "lm"
    if not found:
        raise PreflightError(
            f"{type(model).__name__} has nothing that {config} tiles: served are {_served('mlp')}, {_served('norm')}, "
            f"{_served('lm')}"
        )
    for module, cls in found:
        module.__class__ = cls
        tiling._patched.append(module)
    return tiling


def _is_attention(module: nn.Module) -> bool:
    return any(models.of_attention(c) is not None for c in type(module).__mro__)


def _check_hooks(name: str, projection: nn.Module) -> None:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(projection, kind) for kind in kinds) or "forward" in vars(projection):
        raise PreflightError(f"{name} has hooks or a forward of its own: it is used without being called, so they would not run")


def _terms(model: nn.Module, config: TilingConfig) -> LossTerms:
    try:
        return LossTerms(getattr(model.config, "final_logit_softcapping", None), config.z_loss, config.label_smoothing)
    except ValueError as error:
        raise PreflightError(str(error)) from None


def _by_position(base: type):
    """`__call__` that hands the hidden states over by position: ZeRO-3's hooks see positional tensors only."""
    call = base.__call__

    def __call__(self, *args, **kwargs):
        for name in ("x", "hidden_states"):
            if name in kwargs:
                args = (kwargs.pop(name), *args)
        return call(self, *args, **kwargs)

    return __call__


def _mlp_class(base: type, tiling: Tiling) -> type:
    @torch.compiler.disable
    def forward(self, x):
        c = tiling.config
        return tiled_mlp(x, self, c.mlp_tokens, c.fp32_grads, c.reuse_grad, tiling.mlp_counts)

    return _subclass(f"Tiled{base.__name__}", base, tiling, __call__=_by_position(base), forward=forward)


def _norm_class(base: type, tiling: Tiling) -> type:
    @torch.compiler.disable
    def forward(self, x):
        return tiled_norm(x, self, tiling.config.norm_tokens, tiling.config.reuse_grad, tiling.norm_counts)

    return _subclass(f"Tiled{base.__name__}", base, tiling, __call__=_by_position(base), forward=forward)


def _head_class(tiling: Tiling, terms: LossTerms) -> type:
    @torch.compiler.disable
    def forward(self, hidden, shift_labels=None):
        if shift_labels is None:
            return linear(hidden, self.weight, self.bias)
        preflight.check_autocast(hidden.device.type)
        c = tiling.config
        return loss.tiled_loss_sum(
            hidden, self.weight, shift_labels, self.bias, terms, c.loss_tokens, c.fp32_grads, implementation=c.loss_implementation
        )

    return _subclass("TiledLossHead", nn.Linear, tiling, forward=forward)


def _lm_class(base: type, tiling: Tiling) -> type:
    """The causal LM's class keeps its name: transformers writes it into saved configurations."""
    plain = base.forward
    names = list(inspect.signature(plain).parameters)[1:]

    def forward(self, *args, shift_labels=None, **kwargs):
        if shift_labels is None:
            return plain(self, *args, **kwargs)
        kwargs.update(zip(names, args))
        keep, items = kwargs.pop("logits_to_keep", 0), kwargs.pop("num_items_in_batch", None)
        if isinstance(keep, torch.Tensor) or keep or items is not None:
            raise PreflightError("with shift_labels the loss is a sum over tokens: leave logits_to_keep and num_items_in_batch out")
        kwargs.pop("labels", None)
        kwargs.pop("return_dict", None)
        outputs = self.model(**kwargs)
        return _output(self.lm_head(outputs.last_hidden_state, shift_labels), outputs)

    return _subclass(base.__name__, base, tiling, __qualname__=base.__qualname__, forward=forward)


def _output(value: torch.Tensor, outputs):
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(loss=value, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


def _subclass(name: str, base: type, tiling: Tiling, **members) -> type:
    return type(name, (base,), {"_tiling": tiling, "__module__": base.__module__, **members})
