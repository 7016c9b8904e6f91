"""A whole decoder layer as one autograd function that saves its input and nothing else.

    h = x + attention(norm1(x)),  y = h + MLP(norm2(h))          Llama, Mistral, Qwen2, Qwen3

A layer made of parts, checkpointed, holds its normed input, the attention's result, the residual and gradients of each
beside the stage buffers, because no part may touch what another one still reads. Here the order of work is known, so

- the normed input exists a tile of rows at a time (the norm is computed again in every stage, once for its q, k and v; a normed
  copy would be one more u, and the cost is a pass over x a stage);
- h exists a tile of rows at a time;
- the incoming gradient becomes, in place, the gradient of h and then that of x, if nothing else holds it;
- the recompute hands the attention output and its log-sum-exp to the backward, so attention's forward runs twice a step
  (once with `attention_output="host"`), and not a third time;
- dq of a stage takes the place of that stage's attention output.

Forward: attention; then by tiles of rows o_proj, residual, norm, MLP, residual, written over the attention output where
that is as wide as the hidden states (not over x, which others may hold: that would lower no peak). Backward: attention
again; by tiles h again, the MLP's and norm2's backward, added into the gradient; wo's gradient; the stages of attention;
by tiles dx from [dq | dk | dv] and norm1's backward, added into the gradient. docs/layer.md says which buffer lives when.

With `LayerSpec.offload` that order stays, and tensors of full width are on the host meanwhile: x (in the backward), the attention
output, the gradient and dq, from where products and tiles read their rows, two tiles on their way at a time.

Symbols as in `block`; F width of the MLP. Weights' gradients are summed over tiles in fp32.
Source: the order of work is this library's; stages are those of Untied Ulysses, arXiv 2602.21196.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from upipe import block, models, preflight, tiled, workspace
from upipe.apply import block_spec
from upipe.block import BlockSpec, Moved, Norm, Projections, _HostCopy, _Run, _SlabSums, _wait, product_into
from upipe.loss import add_product
from upipe.offload import HostInput, OffloadError, decoder_layers, input_on_host
from upipe.preflight import PreflightError
from upipe.rotary import finish_heads
from upipe.schedule import HeadSchedule
from upipe.tiled import Counts
from upipe.workspace import Buffer

MLP_TOKENS = 4096
PASS_BYTES = 7
"""Bytes of x in a norm's pass, each read and written, in the time that one byte takes between GPUs of a node: 0.8 x 4800 GB/s of an
H200's memory by twice the 272 GB/s measured of its all-to-all."""

SERVED = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class LayerSpec:
    """What a layer computes besides its tensors.

    Args:
        block: the attention; `dx` must be "gemm", and q/k norms, where there are any, run over single heads.
        act: the MLP's activation, differentiable.
        input_eps, post_eps: of the norms before attention and before the MLP.
        mlp_tokens: rows of a tile of the MLP; its backward holds five of [rows, F].
        reuse_grad: write over the incoming gradient where nothing else holds it.
        counts: is told whether that was so.
        offload: "pinned" or "pageable": while attention or the MLP runs, the input (in the backward), the attention output, the
            gradient and dq are in host memory of that kind, and are read and written by tiles of rows. For one row a batch.
        moved: is told the bytes that `offload` copies.
    """

    block: BlockSpec
    act: Callable[[torch.Tensor], torch.Tensor]
    input_eps: float
    post_eps: float
    mlp_tokens: int = MLP_TOKENS
    reuse_grad: bool = True
    counts: Counts = field(default_factory=Counts)
    offload: Literal["none", "pinned", "pageable"] = "none"
    moved: Moved = field(default_factory=Moved)

    def __post_init__(self) -> None:
        _check_offload(self.offload)
        if self.block.dx != "gemm" or self.block.norm_width != "head":
            raise ValueError(
                f"a whole layer takes dx=\"gemm\" and q/k norms over single heads, not dx={self.block.dx!r} and "
                f"norm_width={self.block.norm_width!r}: its dx is written over the incoming gradient and needs no memory either way"
            )
        if isinstance(self.mlp_tokens, bool) or not isinstance(self.mlp_tokens, int) or self.mlp_tokens < 1:
            raise ValueError(f"mlp_tokens={self.mlp_tokens!r} must be a positive number of tokens")


def _check_offload(offload: str) -> None:
    if offload not in ("none", "pinned", "pageable"):
        raise PreflightError(f"offload={offload!r}: use none, pinned or pageable")


@dataclass(frozen=True)
class LayerWeights:
    """The parameters of a layer: weights [out, in], biases [out], norms [D]. `attention` has neither sinks nor wqkv."""

    attention: Projections
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    b_gate: torch.Tensor | None = None
    b_up: torch.Tensor | None = None
    b_down: torch.Tensor | None = None

    def flat(self) -> tuple[torch.Tensor | None, ...]:
        return (*vars(self.attention).values(), *(getattr(self, f.name) for f in fields(self)[1:]))

    @classmethod
    def of(cls, flat) -> LayerWeights:
        cut = len(fields(Projections))
        return cls(Projections(*flat[:cut]), *flat[cut:])

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(Projections)] + [f.name for f in fields(cls)[1:]]


class _Call:
    """One checkpointed call of a layer: what its first forward left on the host, and how many layers it ran."""

    def __init__(self) -> None:
        self.copies: list[_HostCopy] = []
        self.layers = 0


class _Current(threading.local):
    call: _Call | None = None
    first: bool = False


_current = _Current()


def layer_contexts():
    """Two context managers for one call of a checkpointed function that is one decoder layer: for its first forward, and
    for the recomputed one.

    With them the recomputed forward computes nothing, because the layer's backward makes again all that it needs: what it
    returns is NaN and must not be used. Under `block.peeking` it does compute its result. They are `block.checkpoint_contexts` as
    well, for layers that were left alone: `apply_checkpointing(model, contexts=layer_contexts)`.
    """
    call, inner = _Call(), block.checkpoint_contexts()

    @contextmanager
    def during(first: bool, context):
        before = _current.call, _current.first
        _current.call, _current.first = call, first
        try:
            with context:
                yield
        finally:
            _current.call, _current.first = before

    return block.Reusable(lambda: during(True, inner[0])), block.Reusable(lambda: during(False, inner[1]))


def decoder_layer(x: torch.Tensor, weights: LayerWeights, cos: torch.Tensor, sin: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """A pre-norm decoder layer of a sequence sharded over `spec.block.group`.

    Args:
        x: [B, L, D], this rank's tokens. It is saved, and must not be changed before backward.
        weights: parameters in x's dtype, the same on every rank. Under ZeRO-3 pass the Parameters themselves.
        cos, sin: [B or 1, L, R] of this rank's positions.

    Returns:
        [B, L, D]. Gradients of the parameters are this rank's share: summed over the group they are the whole. With B = 1
        and an incoming gradient that nothing else holds, x's gradient is in its memory; otherwise in a copy of it
        (`spec.counts`). With `spec.offload` that memory is let go, or else kept beside.

    Raises:
        TypeError: x and a weight differ in dtype.
        ValueError: parameters of another kind of layer; `spec.offload` with B > 1.
        RuntimeError: a forward that is recomputed without `layer_contexts`.
    """
    flat = weights.flat()
    for name, w in zip(LayerWeights.names(), flat):
        if w is not None and w.dtype != x.dtype:
            raise TypeError(
                f"hidden states are {x.dtype} but {name} is {w.dtype}: cast the model to one dtype (autocast is not supported)"
            )
    for name in ("sinks", "wqkv"):
        if getattr(weights.attention, name) is not None:
            raise ValueError(f"{name} is given: a whole layer takes separate q, k and v projections without sinks")
    if spec.offload != "none" and x.shape[0] > 1:
        raise ValueError(
            f"offload={spec.offload!r} within a layer with {x.shape[0]} rows a batch: its slabs hold one row; use micro-batches of one, "
            'or offload="none"'
        )
    call, graph = _current.call, torch.is_grad_enabled()
    if call is None and graph and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "this is a recomputed forward of a layer that saves only its input anyway: it would run attention a third time. "
            "Checkpoint with contexts=upipe.layer.layer_contexts, or do not checkpoint it"
        )
    if call is not None and _current.first:
        call.layers += 1
        if call.layers > 1:
            raise RuntimeError("layer_contexts are for checkpointed calls of one layer: this one has more. Checkpoint each by itself")
    if graph and spec.reuse_grad:
        tiled._sole_holders()     # seen once, before any backward that compares with it
    return _DecoderLayer.apply(spec, call, _current.first, graph, cos, sin, x, *flat)


class _DecoderLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, call, first, graph, cos, sin, x, *flat):
        to_host = spec.block.attention_output == "host"
        copy = source = None
        if call is not None and not first and not block._checkpoint.peek:
            copy = call.copies.pop(0) if to_host and call.copies else None
            y = x.new_full((1,), torch.nan).expand(x.shape)
            source = input_on_host() if spec.offload != "none" else None
        else:
            run = _run_of(spec, spec.block.forward_schedule, LayerWeights.of(flat), x, cos, sin)
            peeked = call is not None and not first
            left = call.copies[0] if peeked and to_host and call.copies else None
            with run.space.call(forward=left is None):
                if peeked:
                    out = run.attention_output(left, log_sum_exp=False)[0]
                else:
                    copy = _HostCopy(run, moved=run.moved) if to_host and (graph or first) else None
                    out = run.first_output(copy)
                y = run.of_rows(run.finish_forward(out))
            run.close()
            if first and copy is not None:
                call.copies.append(copy)
                copy = None
        ctx.spec, ctx.copy, ctx.source = spec, copy, source
        ctx.save_for_backward(cos, sin, x, *flat)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        sole = ctx.spec.reuse_grad and tiled._holders(grad) in tiled._sole_holders()
        cos, sin, x, *flat = ctx.saved_tensors
        spec, weights = ctx.spec, LayerWeights.of(flat)
        with workspace.of(x.device).call(forward=False):
            # None left: a second backward of one graph, or nothing was to be kept.
            copy = ctx.copy if ctx.copy is not None and not ctx.copy.freed else None
            if spec.offload == "none":
                out, lse = _LayerRun(spec, spec.block.forward_schedule, weights, x, cos, sin).attention_output(copy)
                if copy is not None:
                    copy.free()
                run = _LayerRun(spec, spec.block.schedule, weights, x, cos, sin)
                dx = run.own(grad, sole)
            else:
                run = _OffloadedRun(spec, spec.block.schedule, weights, x, cos, sin, ctx.source)
                run.own(grad, sole)
                out, lse = run.attention_output(copy)
            grads = run.backward_in_place(out, lse, ctx.needs_input_grad[7:])
            run.close()
        if spec.offload != "none":
            dx = run.dx
            if copy is not None:
                copy.free()
        elif dx is None:
            dx = run.from_rows(run.gy)
        return *[None] * 6, dx if ctx.needs_input_grad[6] else None, *grads


class _LayerRun(_Run):
    """One forward or backward of a layer: the attention's stages with the norm inside their products, and the row tiles."""

    def __init__(
        self, spec: LayerSpec, schedule: HeadSchedule, weights: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        self.layer, self.lw = spec, weights
        self.made: dict[str, Buffer] = {}
        super().__init__(spec.block, schedule, weights.attention, x, cos, sin)

    @property
    def moved(self) -> Moved | None:
        return None

    def close(self) -> None:
        """Let go of what the run has on the host."""

    def streamed(self, tiles, *sources):
        """Yield each tile of rows and those rows of every source, [T, ...], which may be written in place; `put` keeps that."""
        for rows in tiles:
            yield rows, *(source[rows] for source in sources)

    def place_of_dx(self) -> torch.Tensor:
        return self.gy

    def put(self, target, rows: slice, tile: torch.Tensor) -> None:
        """Keep what was written in place into some rows: a tile is a view of them."""

    def of_rows(self, y: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [B, L, D], as a Function may return it."""
        y = self.from_rows(y)
        # With B = 1 it is a view, and autograd forbids writing in place into a view that a Function returns.
        return torch.ops.aten._unsafe_view(y, y.shape)

    def normed(self):
        """Yield tiles of rows and norm1(x) of them."""
        for rows, x in self.streamed(self.tiles(), self.x):
            yield rows, _normed(x, self.lw.input_norm, self.layer.input_eps)

    @property
    def one_pass(self) -> bool:
        """Whether k, v and q of a stage come from one pass over x. The exchanges of k and v have no product to run under then: with
        `overlap` only where each takes no longer than the pass that it saves. Alike on all ranks."""
        sent = (self.P - 1) * self.kv_slot * self.d
        return not self.spec.overlap or PASS_BYTES * sent <= self.D

    def rows(self, name: str, stage: int) -> Buffer:
        if name not in self.made:
            joint = self.one_pass and any(self.kv_heads(stage))
            self.made = self.products(("k", "v", "q") if joint else (name,), stage)
        return self.made.pop(name)

    def products(self, names: tuple[str, ...], stage: int) -> dict[str, Buffer]:
        """Rows of "k", "v", "q" of a stage, by one pass over normed tiles of x."""
        made, parts = {}, []
        for name in names:
            weight, heads, slot, bias = self.projection(name, stage)
            part = self.joined(heads, weight).t()
            made[name] = self.take(name, slot)
            target = made[name].view(self.dtype, self.N, part.shape[1])
            parts.append((target, part, None if bias is None else self.joined(heads, bias)))
        for rows, n in self.normed():
            for target, part, bias in parts:
                product_into(target[rows], n, part, bias)
            del n
        return made

    def unfinish(self, heads, pieces, norm, weight, bias, norm_grad, targets) -> None:
        if not isinstance(norm, Norm):
            super().unfinish(heads, pieces, norm, weight, bias, norm_grad, targets)
            return
        # One pass over x for the heads of all ranks.
        weight, bias = self.joined(heads, weight), None if bias is None else self.joined(heads, bias)
        for rows, n in self.normed():
            raw = linear(n, weight, bias).view(len(n), -1, self.d).split([*map(len, heads)], dim=1)
            for h, piece, target, part in zip(heads, pieces, targets, raw):
                if h:
                    block.unfinish_heads(
                        piece[rows], self.cos[rows], self.sin[rows], out=target[rows], raw=part, weight=norm.weight, eps=norm.eps,
                        weight_grad=norm_grad,
                    )  # fmt: skip

    def mlp_tiles(self):
        step = self.layer.mlp_tokens
        return (slice(i, min(i + step, self.N)) for i in range(0, self.N, step))

    def residual(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """h = x + o_proj(attention output) of some rows: x [T, D], out [T, H, d] or [T, H*d]."""
        source, weight = out.view(-1, self.sched.heads * self.d), self.w.wo.t()
        if self.w.bo is None:
            return torch.addmm(x, source, weight)
        return torch.addmm(self.w.bo, source, weight).add_(x)  # the bias first: see block.product_into

    # Forward

    def first_output(self, copy: _HostCopy | None):
        """The attention output of a first forward, also in `copy`."""
        return self.forward(copy)[0]

    def place_of_result(self, out) -> torch.Tensor:
        """Where y [N, D] goes: over the attention output [N, H, d] where that has just the size."""
        return out.view(self.N, self.D) if out[0].numel() == self.D else out.new_empty(self.N, self.D)

    def finish_forward(self, out) -> torch.Tensor:
        """y [N, D] of the attention output."""
        self.space.release_idle()
        w, y = self.lw, self.place_of_result(out)
        for rows, x, part in self.streamed(self.mlp_tiles(), self.x, out):
            h = self.residual(x, part)
            n = _normed(h, w.post_norm, self.layer.post_eps)
            wide = self.layer.act(linear(n, w.gate, w.b_gate))
            wide *= linear(n, w.up, w.b_up)
            torch.addmm(h, wide, w.down.t(), out=y[rows])
            if w.b_down is not None:
                y[rows] += w.b_down
            del h, n, wide
        return y

    def attention_output(self, copy: _HostCopy | None, log_sum_exp: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention output [N, H, d] and log-sum-exp (if that is wanted), computed again, or from the host stage by stage, two on
        their way at a time."""
        if copy is None:
            result = self.forward(None)
            self.space.release_idle()
            return result
        out = self.x.new_empty(self.N, self.sched.heads, self.d)
        lse = torch.empty(copy.lse.shape, dtype=copy.lse.dtype, device=self.x.device) if log_sum_exp else None
        landed = copy.fetch(lse, copy.lse) if log_sum_exp else None
        coming: list = []

        def place():
            heads, buffer, event = coming.pop(0)
            _wait(event)
            for h, piece in zip(heads, self.pieces(buffer, heads)):
                out[:, h.start : h.stop] = piece
            self.space.give(buffer)

        for stage, source in enumerate(copy.stages):
            buffer = self.take("attention output from the host", self.q_slot)
            event = copy.fetch(buffer.view(self.dtype, source.numel()), source)
            coming.append((self.q_heads(stage), buffer, event))
            if len(coming) == 2:
                place()
        while coming:
            place()
        _wait(landed)
        self.space.release_idle()
        return out, lse

    # Backward

    def own(self, grad: torch.Tensor, sole: bool) -> torch.Tensor | None:
        """Make `self.gy` [N, D], to be overwritten: the incoming gradient's memory or a copy. -> the tensor [B, L, D] whose
        memory it is, None where its rows lie in another order (B > 1)."""
        if self.B > 1:
            self.layer.counts.copied += 1
            self.gy = grad.new_empty(self.N, self.D)
            self.gy.view(self.L, self.B, self.D).copy_(grad.transpose(0, 1))
            return None
        if sole and grad.is_contiguous():
            self.layer.counts.reused += 1
        else:
            self.layer.counts.copied += 1
            grad = grad.clone(memory_format=torch.contiguous_format)
        self.gy = grad.view(self.N, self.D)
        return grad

    def backward_in_place(self, out: torch.Tensor, lse: torch.Tensor, needs: tuple[bool, ...]) -> list[torch.Tensor | None]:
        """`self.gy` from y's gradient to x's; `out` is used up. -> gradients of the parameters, None where not needed."""
        self.need = dict(zip(LayerWeights.names(), needs))
        self.result = dict.fromkeys(self.need)
        self._mlp_backward(out)
        # From here on gy is the gradient of h.
        self.output_projection_backward(out)
        for name in ("q_norm", "k_norm"):
            if self.need[name]:
                self.result[name] = torch.zeros_like(getattr(self.w, name), dtype=self.wide)
        sums = self.stage_sums(out)
        self._walk_back(out, lse, None, sums)
        self.space.release_idle()
        sums.finish()
        self.space.release_idle()
        for name in ("q_norm", "k_norm"):
            if self.result[name] is not None:
                self.result[name] = self.result[name].to(self.dtype)
        return list(self.result.values())

    def output_projection_backward(self, out: torch.Tensor) -> None:
        """Gradients of wo and bo, at full width."""
        if self.need["bo"]:
            self.result["bo"] = self.gy.sum(0, dtype=self.wide).to(self.dtype)
        if self.need["wo"]:
            self.result["wo"] = self.gy.t() @ out.view(self.N, -1)

    def stage_sums(self, out) -> _LayerSums:
        return _LayerSums(self, out)

    mlp_sums = ("post_norm", "gate", "up", "down", "b_gate", "b_up", "b_down")

    def mlp_tile_done(self, rows: slice, g: torch.Tensor, out: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
        """g [T, D] is the gradient of h now, out [T, H*d] those rows of the attention output."""

    def _sums(self, *names: str) -> dict[str, torch.Tensor]:
        """fp32 (fp64) sums of the gradients that are needed; `_rounded` puts them into `result`."""
        weights = dict(zip(LayerWeights.names(), self.lw.flat()))
        return {name: torch.zeros(weights[name].shape, dtype=self.wide, device=self.x.device) for name in names if self.need[name]}

    def _rounded(self, sums: dict[str, torch.Tensor]) -> None:
        for name in list(sums):
            self.result[name] = sums.pop(name).to(self.dtype)

    def _mlp_backward(self, out: torch.Tensor) -> None:
        w, spec = self.lw, self.layer
        sums = self._sums(*self.mlp_sums)

        def add(name: str, grad: torch.Tensor, source: torch.Tensor) -> None:
            if name in sums:
                add_product(sums[name], grad, source)
            if f"b_{name}" in sums:
                sums[f"b_{name}"] += grad.sum(0, dtype=self.wide)

        for rows, g, x, part in self.streamed(self.mlp_tiles(), self.gy, self.x, out):
            h = self.residual(x, part)
            n = _normed(h, w.post_norm, spec.post_eps)
            gate, up = linear(n, w.gate, w.b_gate).requires_grad_(), linear(n, w.up, w.b_up)
            with torch.enable_grad():
                act = spec.act(gate)
            add("down", g, act.detach() * up)
            wide = g @ w.down
            d_up = wide * act.detach()
            wide *= up
            del up
            (d_gate,) = torch.autograd.grad(act, gate, wide)
            del act, gate, wide
            add("up", d_up, n)
            add("gate", d_gate, n)
            del n
            dn = d_gate @ w.gate
            dn.addmm_(d_up, w.up)
            del d_up, d_gate
            self._add_norm_backward(g, dn, h, w.post_norm, spec.post_eps, sums.get("post_norm"))
            del h, dn
            self.mlp_tile_done(rows, g, part, sums)
        self._rounded(sums)

    @staticmethod
    def _add_norm_backward(g, dn, source, weight, eps: float, total: torch.Tensor | None) -> None:
        """g += the gradient of a norm's input, in place. g, dn (of its output, which is used up), source (its input): [T, D]."""
        g += tiled.norm_backward(dn, source, weight, eps, dn, total)


def _normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of [T, D], rounded once: one kernel on a GPU."""
    result = rows.new_empty(rows.shape)
    finish_heads(rows.contiguous()[:, None], None, None, out=result[:, None], weight=weight, eps=eps)
    return result


class _LayerSums(_SlabSums):
    """[dq | dk | dv] of all rows; at the end, by tiles, through the projections and norm1 into the gradient."""

    def finish(self) -> None:
        run, lw = self.run, self.run.lw
        H, K, d = run.sched.heads, run.sched.kv_heads, run.d
        columns = {"q": slice(0, H * d), "k": slice(H * d, (H + K) * d), "v": slice((H + K) * d, (H + 2 * K) * d)}
        sums = run._sums("input_norm", "wq", "wk", "wv", "bq", "bk", "bv")
        stacked = torch.cat((run.wq, run.wk, run.wv))
        dx = run.place_of_dx()
        tile = run.x.new_empty(min(block.ROW_TILE, run.N), len(stacked))
        for rows, g, x, q in run.streamed(run.tiles(), run.gy, run.x, self.dq):
            part = tile[: rows.stop - rows.start]
            part[:, columns["q"]] = q.view(-1, H * d)
            for name, slabs in self.kv.items():
                heads = part[:, columns[name]].view(-1, K, d)
                for kv, parts in slabs.items():
                    # Several where a kv head is on several ranks.
                    heads[:, kv] = parts[0][rows] if len(parts) == 1 else sum(p[rows].to(run.wide) for p in parts)
            n = _normed(x, lw.input_norm, run.layer.input_eps)
            for name, span in columns.items():
                if f"w{name}" in sums:
                    add_product(sums[f"w{name}"], part[:, span], n)
                if f"b{name}" in sums:
                    sums[f"b{name}"] += part[:, span].sum(0, dtype=run.wide)
            del n
            run._add_norm_backward(g, part @ stacked, x, lw.input_norm, run.layer.input_eps, sums.get("input_norm"))
            run.put(dx, rows, g)
        for slab in self.slabs:
            run.space.give(slab)
        self.kv.clear()
        self.slabs.clear()
        run._rounded(sums)


class _OnHost:
    """A tensor [N, width] on the host in pieces side by side: [(columns, [N, len(columns)])]."""

    def __init__(self, width: int, pieces: list[tuple[slice, torch.Tensor]]) -> None:
        self.width, self.pieces = width, [(columns, piece) for columns, piece in pieces if columns.stop > columns.start]


class _OffloadedRun(_LayerRun):
    """The same with x (in the backward), the attention output, the gradient and dq on the host, read and written by tiles of rows.

    Every stage of the attention output is a slab of its own, of the width of a backward's stages also in the forward, and dq of a
    stage takes its place there.

    Args:
        source: x on the host, and `x` a tensor of its shape alone; None: `x` has the values.
    """

    keep_output = False
    one_pass = True  # x comes from the host for each
    mlp_sums = (*_LayerRun.mlp_sums, "wo", "bo")

    def __init__(self, spec, schedule, weights, x, cos, sin, source: HostInput | None = None) -> None:
        super().__init__(spec, schedule, weights, x, cos, sin)
        self.slabs = self.new_slabs()
        self.stages: _HostCopy | None = None
        self.source = source
        if source is not None:
            self.rows_of_x = _OnHost(self.D, [(slice(0, self.D), source.tensor.view(self.N, self.D))])
        self.dx: torch.Tensor | None = None

    @property
    def moved(self) -> Moved:
        return self.layer.moved

    def new_slabs(self) -> _HostCopy:
        return _HostCopy(self, self.layer.offload == "pinned", self.layer.moved, keeps_lse=False)

    def close(self) -> None:
        # All copies are on one stream, those of the first forward's slabs too.
        if self.source is not None:
            self.source.done = self.slabs.done
        if self.stages is not None:
            self.stages.done = self.slabs.done
        self.slabs.free()

    # Rows

    def streamed(self, tiles, *sources):
        tiles = list(tiles)
        most = max((rows.stop - rows.start for rows in tiles), default=0)
        sources = [self.rows_of_x if source is self.x and self.source is not None else source for source in sources]
        landing = [[self.landing(most, source) for source in sources] for _ in tiles[:2]]
        coming = self.start(tiles[0], sources, landing[0])
        for i, rows in enumerate(tiles):
            here = coming
            # The buffers that these go to were last read, and written to the host, for the tile before this one.
            coming = self.start(tiles[i + 1], sources, landing[(i + 1) % 2]) if i + 1 < len(tiles) else None
            yield rows, *(self.arrived(rows, source, *landed) for source, landed in zip(sources, here))
            del here
        # What was written to the host must be read before its memory here serves anything else.
        _wait(self.slabs.done)

    def landing(self, rows: int, source) -> torch.Tensor | None:
        return self.x.new_empty(rows * source.width) if isinstance(source, _OnHost) else None

    def start(self, rows: slice, sources, landing) -> list:
        """Bring some rows of every source on their way: ([pieces of [T, columns]], event) of each."""
        found = []
        for source, memory in zip(sources, landing):
            parts, at, event, n = [], 0, None, rows.stop - rows.start
            for columns, piece in source.pieces if memory is not None else ():
                wide = columns.stop - columns.start
                target = memory[at : at + n * wide].view(n, wide)
                event = self.slabs.fetch(target, piece[rows])
                parts.append((columns, target))
                at += n * wide
            found.append((parts, event))
        return found

    def arrived(self, rows: slice, source, parts, event) -> torch.Tensor:
        if not isinstance(source, _OnHost):
            return source[rows]
        _wait(event)
        if len(parts) == 1:
            return parts[0][1]
        tile = parts[0][1].new_empty(rows.stop - rows.start, source.width)
        for columns, part in parts:
            tile[:, columns] = part
        return tile

    def put(self, target, rows: slice, tile: torch.Tensor) -> None:
        if isinstance(target, _OnHost):
            ((_, whole),) = target.pieces
            self.slabs.write(whole[rows], tile)
        else:
            target[rows] = tile

    def product(self, role, source, weight, heads, slot, bias=None, columns=False):
        if source is not self.gy_rows:
            return super().product(role, source, weight, heads, slot, bias, columns)
        buffer = self.take(role, slot)
        part = self.joined(heads, weight, 1) if columns else self.joined(heads, weight).t()
        target = buffer.view(self.dtype, self.N, part.shape[1])
        for rows, g in self.streamed(self.tiles(), source):
            product_into(target[rows], g, part, bias)
        return buffer

    # Forward

    def first_output(self, copy: _HostCopy | None) -> _OnHost:
        """Into `copy`, which outlives the call, or into slabs of the call."""
        self.stages = self.slabs if copy is None else copy
        self.forward(self.stages)
        return self.output_rows()

    def output_rows(self) -> _OnHost:
        """The stages' slabs side by side."""
        pieces = []
        for stage, slab in enumerate(self.stages.stages):
            at = 0
            for h in self.q_heads(stage):
                wide = len(h) * self.d
                pieces.append((self.rows_of(h), slab[at : at + self.N * wide].view(self.N, wide)))
                at += self.N * wide
        return _OnHost(self.sched.heads * self.d, pieces)

    def place_of_result(self, out) -> torch.Tensor:
        return self.x.new_empty(self.N, self.D)

    # Backward

    gy_rows: _OnHost | None = None

    def own(self, grad: torch.Tensor, sole: bool) -> None:
        """The incoming gradient to the host; its memory here is let go where nothing else holds it."""
        slab = self.slabs.memory(self.N, self.D, dtype=self.dtype)
        rows = grad.reshape(self.N, self.D)
        _wait(self.slabs.write(slab, rows))
        del rows
        if sole and not grad._is_view():
            self.layer.counts.reused += 1
            grad.data = grad.new_empty(0)
        else:
            self.layer.counts.copied += 1
        self.gy = self.gy_rows = _OnHost(self.D, [(slice(0, self.D), slab)])

    def place_of_dx(self) -> torch.Tensor:
        self.dx = self.x.new_empty(1, self.L, self.D)
        return self.dx.view(self.N, self.D)

    def attention_output(self, copy: _HostCopy | None, log_sum_exp: bool = True) -> tuple[_OnHost, torch.Tensor | None]:
        """Computed again into slabs of the call, or as it lies in `copy`, whose slabs become the call's."""
        self.stages, lse = copy or self.slabs, None
        if copy is None:
            lse = self.forward(self.slabs)[1]
        elif log_sum_exp:
            lse = torch.empty(copy.lse.shape, dtype=copy.lse.dtype, device=self.x.device)
            _wait(copy.fetch(lse, copy.lse))
        self.space.release_idle()
        return self.output_rows(), lse

    def output_projection_backward(self, out: _OnHost) -> None:
        """Done by the MLP's tiles, while the attention output's rows are here."""

    def mlp_tile_done(self, rows, g, out, sums) -> None:
        if "wo" in sums:
            add_product(sums["wo"], g, out)
        if "bo" in sums:
            sums["bo"] += g.sum(0, dtype=self.wide)
        self.put(self.gy, rows, g)

    def stage_sums(self, out: _OnHost) -> _LayerSums:
        return _OffloadedSums(self, out)

    def _load_output(self, stage, buffer, out, copy) -> None:
        slab = self.stages.stages[stage]
        _wait(self.slabs.fetch(buffer.view(self.dtype, slab.numel()), slab))


class _OffloadedSums(_LayerSums):
    """dq of a stage goes to the host, over the stage's attention output."""

    def __init__(self, run: _OffloadedRun, out: _OnHost) -> None:
        super().__init__(run, out)
        self.places = {columns.start: piece for columns, piece in out.pieces}

    def add_q(self, heads, pieces) -> None:
        run = self.run
        run.unfinish(heads, pieces, run.q_norm, run.wq, run.w.bq, run.result["q_norm"], pieces)
        for h, piece in zip(heads, pieces):
            if h:
                run.slabs.write(self.places[h.start * run.d], piece.view(run.N, -1))
        _wait(run.slabs.done)


def moved_bytes(
    schedule: HeadSchedule, rows: int, hidden: int, head_dim: int, itemsize: int, *, norm: bool, on_host: bool, first_of_pair: bool = False,
) -> Moved:  # fmt: skip
    """What `LayerSpec.offload` copies for one layer in a step, its input on the host in the backward.

    Args:
        rows, hidden, itemsize: N and D of x, bytes an element.
        norm: whether q and k are normed, for which x is read again. on_host: whether the attention output is kept there
            (`attention_output: host`). first_of_pair: whether the forward runs once more for the pair's second layer.
    """
    x, out = rows * hidden * itemsize, rows * schedule.heads * head_dim * itemsize
    lse = 4 * rows * schedule.ranks * len(schedule.owned[0]) * on_host
    stages, leaving = len(schedule.table), sum(any(entry.kv_leaving for entry in row) for row in schedule.table)
    again = stages * (not on_host)
    return Moved(
        # Attention output, once more where it is made again; the gradient, twice; dq.
        to_host=out * (2 + (1 + first_of_pair) * (not on_host)) + 2 * x + lse,
        # x in each walk over the stages and for the norms; the gradient in one; both in the MLP's tiles and in those of rows.
        to_device=x * (again + stages + norm * (stages + leaving) + stages + 4) + out * (4 + first_of_pair) + lse,
    )


def _run_of(spec: LayerSpec, schedule: HeadSchedule, *tensors) -> _LayerRun:
    """A forward's run; an offloaded one has the stages of its backward."""
    return _LayerRun(spec, schedule, *tensors) if spec.offload == "none" else _OffloadedRun(spec, spec.block.schedule, *tensors)


@dataclass(frozen=True)
class FusedLayersConfig:
    """Settings of `apply_fused_layers`.

    Args:
        mlp_tokens, reuse_grad, offload: see `LayerSpec`.
    """

    mlp_tokens: int = MLP_TOKENS
    reuse_grad: bool = True
    offload: Literal["none", "pinned", "pageable"] = "none"


class FusedLayers:
    """Decoder layers that run as one function each. Made by `apply_fused_layers`.

    Attributes:
        layers: how many.
        left: layers that were left alone, a line each with the reason.
        counts: backward passes in the incoming gradient's memory, and those in a copy.
        moved: bytes that `config.offload` copied, since it was put on or `end_step`.
    """

    def __init__(self, model: nn.Module, config: FusedLayersConfig) -> None:
        self.model, self.config = model, config
        self.layers, self.left, self.counts, self.moved = 0, [], Counts(), Moved()
        self._patched: list[nn.Module] = []

    def __deepcopy__(self, memo):
        return self

    def report(self) -> str:
        """What was done, a line each."""
        c = self.counts
        lines = [
            f"{self.layers} decoder layers as one function each, MLP in tiles of {self.config.mlp_tokens} tokens; gradients in "
            f"place {c.reused} times, {c.copied} times in a copy"
        ]
        if self.config.offload != "none":
            lines.append(
                f"working tensors in {self.config.offload} host memory: {self.moved.to_host / 2**30:.2f} GiB to the host since the last "
                f"step, {self.moved.to_device / 2**30:.2f} back"
            )
        return "\n".join(lines + [f"left alone: {line}" for line in self.left])

    def end_step(self) -> Moved:
        """What `config.offload` moved since the last call, and a new count.

        Raises:
            OffloadError: nothing was.
        """
        moved = Moved(self.moved.to_host, self.moved.to_device)
        self.moved.to_host = self.moved.to_device = 0
        if self.config.offload != "none" and 0 in (moved.to_host, moved.to_device):
            raise OffloadError(
                f"offload={self.config.offload} within {self.layers} layers moved {moved.to_host} bytes to the host and {moved.to_device} "
                'back in this step: run forward and backward of the sharded model in train mode, or use offload="none"'
            )
        return moved

    def remove(self) -> None:
        """Make the layers plain again.

        Raises:
            PreflightError: a layer was given another class since (checkpointing, fully_shard).
        """
        for layer in self._patched:
            if "_fused" not in vars(type(layer)):
                raise PreflightError(
                    f"{type(layer).__name__} was subclassed after its layer was made one function: undo that first (remove() of "
                    "checkpointing; fully_shard cannot be)"
                )
        for layer in self._patched:
            layer.__class__ = type(layer).__mro__[1]
        self._patched = []


def apply_fused_layers(model: nn.Module, handle, config: FusedLayersConfig | None = None) -> FusedLayers:
    """Run every pre-norm decoder layer of a sharded model as one function, in place, instance by instance.

    Call it after `upipe.apply` and before `apply_checkpointing`, `deepspeed.initialize`, DistributedDataParallel or
    fully_shard. Parameters and `state_dict()` stay as they are. A fused layer saves only its input, so checkpointing it
    serves to send that input to the host: `apply_checkpointing(model, config, contexts=layer_contexts)`; transformers' own
    checkpointing must be off. Modules inside a fused layer are not called: hooks on them are refused.

    Args:
        model: with UPipe on it.
        handle: what `upipe.apply` returned; its `heads_per_stage`, `kernel`, `attention_output` and `overlap` hold.
        config: settings.

    Returns:
        The handle, with `report()`, `counts` and `remove()`. Layers of other families are in its `left`.

    Raises:
        PreflightError: before anything is changed, naming the values and what would work.
    """
    config = FusedLayersConfig() if config is None else config
    preflight.check_arguments(model, config, FusedLayersConfig)
    tiled._check_tokens("mlp_tokens", config.mlp_tokens)
    _check_offload(config.offload)
    if getattr(handle, "model", None) is not model:
        raise PreflightError("handle is not that of upipe.apply on this model: give what upipe.apply(model, ...) returned")
    if hasattr(handle, "method"):
        raise PreflightError(f"method={handle.method.name}: a fused layer is of method=upipe; leave the layers in parts")
    if handle.config.dx != "gemm":
        raise PreflightError(f'dx={handle.config.dx!r}: a fused layer writes dx over the incoming gradient, use dx="gemm"')
    fused = FusedLayers(model, config)
    found: list[tuple[nn.Module, models.Architecture]] = []
    for i, layer in enumerate(decoder_layers(model)):
        cls = type(layer)
        if hasattr(layer, "_fused"):
            raise PreflightError("the layers of this model are fused already: call remove() on that handle first")
        if hasattr(layer, "_checkpointing"):
            raise PreflightError(f"layer {i} is checkpointed: call apply_fused_layers before apply_checkpointing")
        if getattr(layer, "gradient_checkpointing", False):
            raise PreflightError(_OWN_CHECKPOINTING)
        architecture = _served(cls)
        if architecture is None:
            fused.left.append(f"layer {i}, {cls.__name__}: not one of {', '.join(_class_names())}")
            continue
        _check_parts(f"layer {i}", layer)
        found.append((layer, architecture))
    if config.offload != "none" and fused.left:
        raise PreflightError(
            f"offload={config.offload!r} within layers, of which {len(fused.left)} cannot be fused ({fused.left[0]}) and would read an "
            'input that is not on the device: use offload="none"'
        )
    if not found:
        raise PreflightError(f"{type(model).__name__} has no layer to fuse: {', '.join(_class_names())} are served")
    subclasses: dict[type, type] = {}
    for layer, architecture in found:
        cls = type(layer)
        if cls not in subclasses:
            # It keeps the name of its base, by which transformers and wrapping policies find layers.
            members = {"_fused": fused, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
            subclasses[cls] = type(cls.__name__, (cls,), members | {"forward": _layer_forward(cls.forward, architecture)})
        layer.__class__ = subclasses[cls]
        fused._patched.append(layer)
    fused.layers = len(found)
    return fused


_OWN_CHECKPOINTING = (
    "transformers' own checkpointing is on, under which a fused layer would run attention a third time: call "
    "model.gradient_checkpointing_disable(); a fused layer saves only its input anyway"
)


def _served(cls: type) -> models.Architecture | None:
    """By exact class: a subclass may compute something else."""
    families = (a for a in models.ARCHITECTURES if a.name in SERVED)
    return next((a for a in families if (cls.__module__, cls.__name__) == (a.module_name, f"{a.prefix}DecoderLayer")), None)


def _class_names() -> list[str]:
    return [f"{a.prefix}DecoderLayer" for a in models.ARCHITECTURES if a.name in SERVED]


def _check_parts(name: str, layer: nn.Module) -> None:
    """Parts whose parameters say what they compute, and nothing on them that would not run."""
    if not hasattr(layer.self_attn, "_upipe"):
        raise PreflightError(f"{name}.self_attn is a {type(layer.self_attn).__name__} without UPipe: call upipe.apply first")
    for part in ("input_layernorm", "post_attention_layernorm"):
        if tiled._known(getattr(layer, part))[2] != "norm":
            raise PreflightError(f"{name}.{part} is a {type(getattr(layer, part)).__name__}, not the family's RMS norm")
    tiled._gated(layer.mlp)
    tiled._activation(layer.mlp)
    for part, module in layer.named_modules():
        if module is not layer:
            tiled._check_hooks(f"{name}.{part}", module)


def weights_of(layer: nn.Module, architecture: models.Architecture) -> LayerWeights:
    """The parameters of a Hugging Face decoder layer. Under ZeRO-3 call it inside the layer's forward, which gathers them."""
    named = {(name, key): p for name, key, p in tiled._gated(layer.mlp).named}
    parts = ("gate", "up", "down")
    return LayerWeights(
        architecture.projections(layer.self_attn),
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
        *(named[f"{part}_proj", "weight"] for part in parts),
        *(named[f"{part}_proj", "bias"] for part in parts),
    )


def _layer_forward(plain: Callable, architecture: models.Architecture) -> Callable:
    """`forward` of a fused layer class.

    Args:
        plain: the class's own, for eval without sharding.
    """

    @torch.compiler.disable
    def forward(
        self, hidden_states, attention_mask=None, position_ids=None, cache=None, use_cache=False, position_embeddings=None, **kwargs
    ):
        attention, fused = self.self_attn, self._fused
        sharding = attention._upipe
        if not sharding.active(attention):
            return plain(self, hidden_states, attention_mask, position_ids, cache, use_cache, position_embeddings, **kwargs)
        if cache is not None or kwargs.get("past_key_values") is not None:
            raise PreflightError("a key/value cache (generate, use_cache) does not work on a sharded model: call handle.remove() first")
        if attention_mask is not None and attention_mask.numel() > 1:
            raise PreflightError(
                f"attention_mask {tuple(attention_mask.shape)} reached a fused layer, which masks causally and by document itself: "
                "leave it out"
            )
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            raise PreflightError(_OWN_CHECKPOINTING)
        cos, sin = architecture.angles(position_embeddings)
        spec = LayerSpec(
            block=block_spec(attention, architecture, sharding, hidden_states, position_ids),
            act=tiled._activation(self.mlp),
            input_eps=self.input_layernorm.variance_epsilon,
            post_eps=self.post_attention_layernorm.variance_epsilon,
            mlp_tokens=fused.config.mlp_tokens,
            reuse_grad=fused.config.reuse_grad,
            counts=fused.counts,
            offload=fused.config.offload,
            moved=fused.moved,
        )
        return decoder_layer(hidden_states, weights_of(self, architecture), cos, sin, spec)

    return forward
