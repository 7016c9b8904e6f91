"""The UPipe attention block: one autograd function from hidden states to the output projection.

Symbols: B batch, L local tokens, N = L*B rows, S = P*L tokens, P ranks, D hidden size, H query heads, K kv heads,
d head dim, w query heads a stage on one rank, u = N*D elements. Rows are ordered token first, (l, b), so that what the
all-to-all delivers, [P, N, heads, d], already is [S, B, heads, d]: no transposes around the exchange.

Forward, for each stage of the head schedule: one product gives the stage's query heads of every rank (and the kv heads
that arrive in it), [N, heads of all ranks, d], bias included; q/k norm and rotation are one pass that writes them in the
all-to-all's order; all-to-all from rows to heads; attention over the whole sequence; all-to-all back, into the attention
output [N, H, d]. Last, the output projection, in tiles of rows: over the attention output's own memory where that need
not survive (the first forward of a checkpointed call).
Saved: the input, the attention output, the log-sum-exp [B, heads of this rank, S]. q, k and v are never saved.

Backward, for each stage: q (k, v) and dO from products again, exchanged with the stage's attention output; the kernel's
backward; dq is sent back into the place that the stage's attention output has left. dk and dv are summed in fp32 while
their kv head is on a rank and sent back when it leaves. At the end, in tiles of rows: dx as one product of [dq | dk | dv]
with the stacked weights (fp32 accumulation inside it), written over dq. So beside its inputs a backward holds one
attention output, dk and dv of the rows, and stage buffers; `dx="bf16"` adds each stage's share to dx in bf16 instead,
and holds dx and stage buffers.

What is in flight: every all-to-all is asynchronous. Stage s+1 is prepared before the kernel of stage s starts, each
exchange under the next product and the last one under the kernel; what stage s sends back travels under the products for
stage s+2. Everything else runs on the caller's stream: products beside an attention kernel only slow it.

Source: Untied Ulysses, arXiv 2602.21196 sections 3 and 4.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from upipe import host, workspace
from upipe.comm import exchange
from upipe.kernels import Kernel, Offsets
from upipe.preflight import check_one_dtype
from upipe.rotary import finish_heads, unfinish_heads
from upipe.schedule import HeadSchedule
from upipe.workspace import Buffer

ROW_TILE = 8192
"""Rows of a tile of the output projection and of dx: large enough for the products' full speed on an H200."""


@dataclass
class Moved:
    """Bytes that went to the host, and that came back."""

    to_host: int = 0
    to_device: int = 0


@dataclass(frozen=True)
class BlockSpec:
    """What a block computes besides its tensors.

    Args:
        schedule: head schedule over the P ranks of `group`, a backward's; a forward's is `forward_schedule`.
        rank: this process's rank in `group`.
        group: process group (None with P = 1).
        kernel: attention kernel.
        head_dim: d.
        scale: factor on q.k before the softmax.
        norm_eps: epsilon of the q/k norms, where there are any.
        norm_width: what a q/k norm takes the mean square over: "head" (each head by itself, weights [d]) or "full" (all
            heads of the projection together, weights [H*d] and [K*d], as in OLMo-2).
        norm_offset: added to the norms' weights (1 in Gemma).
        offsets, window, softcap: see `kernels`.
        attention_output: where the attention output of a checkpointed call is between its first forward and its
            backward. "device": nowhere; the recomputed forward makes it again (two attention forwards a step). "host":
            in host memory, copied while the stages run, from where the recomputed forward takes it (one attention
            forward); gradients are the same bit for bit.
        overlap: prepare the next stage while one runs. False: one stage at a time, the least memory.
        dx: "gemm": from [dq | dk | dv] as one product, the accurate way. "bf16": the sum of the stages' shares in x's
            dtype, about one unit less memory.
        moved: is told the bytes of attention output and log-sum-exp that go to the host and come back.
    """

    schedule: HeadSchedule
    rank: int
    group: object
    kernel: Kernel
    head_dim: int
    scale: float
    norm_eps: float = 0.0
    norm_width: str = "head"
    norm_offset: float = 0.0
    offsets: Offsets | None = None
    window: int | None = None
    softcap: float | None = None
    attention_output: Literal["device", "host"] = "device"
    overlap: bool = True
    dx: Literal["gemm", "bf16"] = "gemm"
    moved: Moved = field(default_factory=Moved, compare=False)

    def __post_init__(self) -> None:
        if self.dx == "bf16" and self.norm_width == "full":
            raise ValueError(
                'dx="bf16" needs the gradient of one head without the others, which a q/k norm over all heads does not give: '
                'use dx="gemm"'
            )

    @property
    def forward_schedule(self) -> HeadSchedule:
        """That of a forward: its stages may be up to four times as wide as a backward's where they need no more memory.

        Fewer, larger exchanges and products, and calls that share kv heads. Each rank has the same heads either way. With
        w heads a stage and n kv heads a forward takes about 4w + 5n stage buffers, a backward 17w and what it keeps of dk
        and dv (counted with `experiments.live`).
        """
        if not self.overlap or self.dx == "bf16":
            return self.schedule
        sched, w = self.schedule, self.schedule.width
        kept = 2 * (-(-sched.kv_heads // sched.ranks) - 1)
        for factor in (4, 2):
            wide = factor * w
            if wide <= sched.max_load and 4 * wide + 5 * -(-wide // sched.group) <= 17 * w + kept:
                return replace(sched, heads_per_stage=wide * sched.ranks)
        return sched

    @property
    def mask(self) -> dict:
        return {"offsets": self.offsets, "window": self.window, "softcap": self.softcap}


@dataclass(frozen=True)
class Projections:
    """The parameters of an attention block, as torch.nn.Linear holds them: weights [out, in], biases [out].

    wq [H*d, D], wk and wv [K*d, D], wo [D, H*d]; or, in place of the first three, wqkv [(H+2K)*d, D] with their rows in
    that order (Phi-3). q_norm and k_norm are weights of RMS norms (see `BlockSpec.norm_width`). sinks [H]: one logit a
    query head that joins the softmax's denominator and attends to nothing (GPT-OSS).
    """

    wq: torch.Tensor | None
    wk: torch.Tensor | None
    wv: torch.Tensor | None
    wo: torch.Tensor
    bq: torch.Tensor | None = None
    bk: torch.Tensor | None = None
    bv: torch.Tensor | None = None
    bo: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    wqkv: torch.Tensor | None = None


class _Checkpoint(threading.local):
    """The checkpointed call that runs now on this thread: what its first forwards left, and which of them this is."""

    calls: list | None = None
    first: bool = False
    peek: bool = False


_checkpoint = _Checkpoint()


class Reusable(AbstractContextManager):
    """A context manager that may be entered again: each time it is a new one from `make`."""

    def __init__(self, make: Callable[[], AbstractContextManager]) -> None:
        self.make = make
        self.entered: list[AbstractContextManager] = []

    def __enter__(self):
        self.entered.append(self.make())
        return self.entered[-1].__enter__()

    def __exit__(self, *error):
        return self.entered.pop().__exit__(*error)


@contextmanager
def peeking():
    """Around the second of `checkpoint_contexts`: a forward for its result alone, before the recomputed one. It takes what an
    `attention_output="host"` left, and leaves it there."""
    before, _checkpoint.peek = _checkpoint.peek, True
    try:
        yield
    finally:
        _checkpoint.peek = before


def checkpoint_contexts():
    """Two context managers for one call of a checkpointed function: for its first forward, and for the recomputed one.

    With them the attention block knows that its first forward need not keep anything on the device, and where the
    recomputed one finds what an `attention_output="host"` left. Give the function itself to torch's checkpointing:
    `checkpoint(f, x, use_reentrant=False, context_fn=checkpoint_contexts)`.
    """
    calls: list[_HostCopy] = []

    @contextmanager
    def during(first: bool):
        before = _checkpoint.calls, _checkpoint.first
        _checkpoint.calls, _checkpoint.first = list(calls) if _checkpoint.peek else calls, first
        try:
            yield
        finally:
            _checkpoint.calls, _checkpoint.first = before

    return Reusable(lambda: during(True)), Reusable(lambda: during(False))


def attention_block(
    x: torch.Tensor, weights: Projections, cos: torch.Tensor, sin: torch.Tensor, spec: BlockSpec
) -> torch.Tensor:
    """Causal self-attention of a sequence sharded over `spec.group`.

    Args:
        x: [B, L, D], this rank's tokens.
        weights: parameters in x's dtype, the same on every rank. Under ZeRO-3 pass the Parameters themselves.
        cos, sin: [B or 1, L, R] of this rank's positions.

    Returns:
        [B, L, D]. Gradients of the parameters are this rank's share: summed over the group they are the whole.

    Raises:
        TypeError: x and a weight differ in dtype.
    """
    check_one_dtype(x.dtype, vars(weights))
    return _AttentionBlock.apply(spec, torch.is_grad_enabled(), cos, sin, x, *vars(weights).values())


class _AttentionBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, graph, cos, sin, x, *params):
        run = _Run(spec, spec.forward_schedule, Projections(*params), x, cos, sin)
        calls, first = _checkpoint.calls, _checkpoint.calls is not None and _checkpoint.first
        to_host = spec.attention_output == "host"
        if to_host and calls is None and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                'attention_output="host": this is a recomputed forward, but its first forward did not know that it would be '
                'recomputed. Checkpoint with context_fn=upipe.block.checkpoint_contexts (use_reentrant=False), or use "device"'
            )
        # With dx="bf16" the backward takes the attention output from the host too; else its place is needed for dq anyway.
        on_host = to_host and spec.dx == "bf16" and (graph or first)
        copy = None
        with run.space.call(forward=True):
            if to_host and calls and not first:
                copy = calls.pop(0)
                y, out, lse = run.rebuild(copy, keep=not on_host and not _checkpoint.peek)
            else:
                copy = _HostCopy(run) if on_host or (to_host and first) else None
                out, lse = run.forward(copy)
                y = run.project_out(out, over=first or on_host or not graph)
        if first:
            if copy is not None:
                calls.append(copy)
            # Checkpointing drops what a first forward saves, and wants the recomputed one to save the same shapes.
            out, lse = (t.new_empty(1).expand(t.shape) for t in (out, lse))
        elif copy is not None and not on_host and not _checkpoint.peek:
            copy.free()
        ctx.spec, ctx.copy, ctx.spent = spec, copy if on_host else None, False
        ctx.save_for_backward(cos, sin, x, *(() if on_host else (out, lse)), *params)
        y = run.from_rows(y)
        # With B = 1 it is a view, and autograd forbids writing in place into a view that a Function returns.
        return torch.ops.aten._unsafe_view(y, y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin, x, *rest = ctx.saved_tensors
        out, lse = (None, None) if ctx.copy is not None else (rest.pop(0), rest.pop(0))
        if out is not None and out.untyped_storage().nbytes() < out.numel() * out.itemsize:
            raise RuntimeError(
                "backward of a first forward under checkpoint_contexts that was not recomputed: they are for checkpointed functions"
            )
        run = _Run(ctx.spec, ctx.spec.schedule, Projections(*rest), x, cos, sin)
        with run.space.call(forward=False):
            copy = None
            if ctx.copy is not None and not ctx.copy.freed:
                copy = ctx.copy
            elif ctx.spent or ctx.copy is not None:
                # A second backward of one graph: the first has used the attention output's memory.
                out, lse = run.forward(None)
            ctx.spent = True
            # Its memory becomes that of dq and dx; autograd need not count that as a change of what was saved.
            out = None if out is None else out.data
            dx, dparams = run.backward(grad, out, lse, copy, ctx.needs_input_grad[4], ctx.needs_input_grad[5:])
        if copy is not None:
            copy.free()
        return None, None, None, None, dx, *dparams


class Norm:
    """RMS norm of each head by itself. weight: [d]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps


class FullNorm:
    """RMS norm over all heads of a projection together. weight: [heads, d], inverse: [N, 1, 1], width: heads*d.

    The backward of a row needs all of its heads, so it is done at the end, by `finish`.
    """

    def __init__(self, weight: torch.Tensor, inverse: torch.Tensor, width: int) -> None:
        self.weight, self.inverse, self.width = weight, inverse, width

    def forward_(self, raw: torch.Tensor, heads: range) -> None:
        """In place. raw: [N, heads, d]."""
        wide = self.inverse.dtype
        raw.copy_(raw.to(wide) * self.inverse * self.weight[heads.start : heads.stop].to(wide))

    def finish(self, grads: torch.Tensor, project, weight_grad: torch.Tensor | None) -> None:
        """Gradients of the normed heads to those of the raw ones, in place. grads: [N, heads, d]; project(heads) -> raw."""
        wide = self.inverse.dtype
        mean = torch.zeros_like(self.inverse)
        for h in range(grads.shape[1]):
            unit = project(range(h, h + 1)).to(wide) * self.inverse
            grad = grads[:, h : h + 1].to(wide)
            if weight_grad is not None:
                weight_grad.view_as(self.weight)[h] += (grad * unit).sum((0, 1))
            mean += (grad * self.weight[h].to(wide) * unit).sum(-1, keepdim=True)
        mean /= self.width
        for h in range(grads.shape[1]):
            unit = project(range(h, h + 1)).to(wide) * self.inverse
            scaled = grads[:, h : h + 1].to(wide) * self.weight[h].to(wide)
            grads[:, h : h + 1] = (self.inverse * (scaled - unit * mean)).to(grads.dtype)


class _HostCopy:
    """Attention output and log-sum-exp of one call in host memory: for each stage what the rows' owner received, pieces
    [N, heads, d] of every rank end to end, and lse [B, own heads, S]. Other tensors of a call lie beside them (`memory`).

    Args:
        pinned: page-locked.
        moved: is told what is copied; None: the block's own.
        keeps_lse: False for slabs of one call, which has it on the device.
    """

    def __init__(self, run: _Run, pinned: bool = True, moved: Moved | None = None, keeps_lse: bool = True) -> None:
        self.device, self.pinned, self.keeps_lse = run.x.device, pinned, keeps_lse
        self.moved, self.what = run.spec.moved if moved is None else moved, host.OUTPUTS if keeps_lse else host.WORKING
        self.others: list[torch.Tensor] = []
        self.stages: list[torch.Tensor] = []
        self.lse: torch.Tensor | None = None
        self.done = None
        self.freed = False
        self.stream = _copy_stream(self.device) if self.device.type == "cuda" else None
        _give_back()

    def send(self, source: torch.Tensor):
        """Copy a device tensor out while the caller's stream goes on. -> host tensor, event of the copy's end (or None)."""
        if source.numel() == 0:
            return torch.empty(source.shape, dtype=source.dtype), None
        target = host.pool().take(source.shape, source.dtype, self.pinned, self.what)
        return target, self.write(target, source)

    def memory(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory of unset values, given back with the rest."""
        self.others.append(host.pool().take(shape, dtype, self.pinned, self.what))
        return self.others[-1]

    def write(self, target: torch.Tensor, source: torch.Tensor):
        """Copy a device tensor over a host tensor, in the order of the copy stream. -> event of the copy's end (or None)."""
        self.moved.to_host += source.nbytes
        return self._copy(target, source)

    def fetch(self, target: torch.Tensor, source: torch.Tensor):
        """Copy back into a device tensor, in the order of the copy stream. -> event to wait for before it is read."""
        self.moved.to_device += source.nbytes
        return self._copy(target, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor):
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            self.done = self.stream.record_event()
        return self.done

    def free(self) -> None:
        """Give the host memory back, once the device has read it."""
        if not self.freed:
            self.freed = True
            for tensor in (*self.stages, self.lse, *self.others):
                if tensor is not None and tensor.numel():
                    _leaving.append((self.done, tensor))
            self.stages, self.lse, self.others = [], None, []
            if self.done is None:
                _give_back()

    def __del__(self) -> None:
        self.free()


_leaving: list = []
"""Host tensors that no call needs any more, each with the event of its last copy."""


def _give_back() -> None:
    while _leaving:
        event, tensor = _leaving.pop()
        if event is not None:
            event.synchronize()
        host.pool().give(tensor)


_copy_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _copy_streams:
        _copy_streams[device] = torch.cuda.Stream(device)
    return _copy_streams[device]


def _wait(event) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class _Transit:
    """Buffers on their way from `send` to `recv`. `arrive` makes the stream wait for them and gives `send` back."""

    def __init__(self, run: _Run, send: Buffer, recv: Buffer, work) -> None:
        self.run, self.send, self.recv, self.work = run, send, recv, work

    def arrive(self) -> Buffer:
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.send is not None and self.send is not self.recv:
            self.run.space.give(self.send)
        self.send = None
        return self.recv


class _Heads(_Transit):
    """On the way from rows to heads: arrives as [B, S, heads, d]."""

    def __init__(self, run, send, recv, work, heads: int) -> None:
        super().__init__(run, send, recv, work)
        self.heads = heads

    def tensor(self) -> torch.Tensor:
        return self.run.as_heads(self.arrive(), self.heads)


class _Run:
    """One pass over the stages. Lives for one forward or one backward.

    keep_output: whether a forward has the attention output on the device, or in its copy alone.
    """

    keep_output = True

    def __init__(
        self, spec: BlockSpec, schedule: HeadSchedule, weights: Projections, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        self.spec, self.w, self.sched, self.d = spec, weights, schedule, spec.head_dim
        self.B, self.L, self.D = x.shape
        self.N, self.P = self.B * self.L, schedule.ranks
        self.dtype = x.dtype
        self.x = self.to_rows(x)
        self.cos, self.sin = (t.expand(self.B, -1, -1).transpose(0, 1).reshape(self.N, 1, -1) for t in (cos, sin))
        self.wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.space = workspace.of(x.device)
        H, K = self.sched.heads, self.sched.kv_heads
        self.wq, self.wk, self.wv = weights.wq, weights.wk, weights.wv
        if weights.wqkv is not None:
            self.wq, self.wk, self.wv = weights.wqkv.split((H * self.d, K * self.d, K * self.d))
        self.q_norm = self._norm(weights.q_norm, self.wq, weights.bq, H)
        self.k_norm = self._norm(weights.k_norm, self.wk, weights.bk, K)
        self.sending: _Transit | None = None

    def _norm(self, weight, projection, bias, heads: int) -> Norm | FullNorm | None:
        if weight is None:
            return None
        weight = weight if self.spec.norm_offset == 0 else weight.to(self.wide) + self.spec.norm_offset
        if self.spec.norm_width == "head":
            return Norm(weight, self.spec.norm_eps)
        squares = sum(
            self.project(range(h, h + 1), projection, bias).to(self.wide).square().sum((1, 2)) for h in range(heads)
        )
        inverse = torch.rsqrt(squares / (heads * self.d) + self.spec.norm_eps)
        return FullNorm(weight.view(heads, self.d), inverse[:, None, None], heads * self.d)

    # Rows, heads, buffers

    def to_rows(self, t: torch.Tensor) -> torch.Tensor:
        """[B, L, c] -> [N, c], token first; a view where B is 1."""
        return t.transpose(0, 1).reshape(self.N, -1)

    def from_rows(self, t: torch.Tensor) -> torch.Tensor:
        """[N, c] -> [B, L, c]."""
        return t.view(self.L, self.B, -1).transpose(0, 1).contiguous()

    def rows_of(self, heads: range) -> slice:
        return slice(heads.start * self.d, heads.stop * self.d)

    def project(self, heads: range, weight, bias) -> torch.Tensor:
        """Local rows times some heads of a projection: [N, heads, d]."""
        part = self.rows_of(heads)
        rows = linear(self.x, weight[part], None if bias is None else bias[part])
        return rows.view(self.N, len(heads), self.d)

    def take(self, role: str, heads: int, dtype: torch.dtype | None = None) -> Buffer:
        """A stage buffer: so many heads of the whole sequence, or so many a rank of the local rows."""
        return self.space.take(self.N * self.P * heads * self.d * (dtype or self.dtype).itemsize, role)

    def as_heads(self, buffer: Buffer, heads: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[B, S, heads, d]."""
        return buffer.view(dtype or self.dtype, self.P * self.L, self.B, heads, self.d).transpose(0, 1)

    def pieces(self, buffer: Buffer, heads: list[range]) -> list[torch.Tensor]:
        """The local rows of each rank's heads, end to end: for each rank [N, its heads, d]."""
        flat = buffer.view(self.dtype, self.N * sum(map(len, heads)) * self.d)
        return [t.view(self.N, len(h), self.d) for t, h in zip(flat.split([self.N * len(h) * self.d for h in heads]), heads)]

    def joined(self, heads: list[range], tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The parts of a weight or bias that belong to every rank's heads of a stage, side by side along `dim`."""
        parts = [tensor.narrow(dim, h.start * self.d, len(h) * self.d) for h in heads if h]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    @property
    def q_slot(self) -> int:
        return self.sched.width

    @property
    def kv_slot(self) -> int:
        return max(len(entry.kv_arriving) for row in self.sched.table for entry in row)

    # From rows to heads

    def product(self, role: str, source: torch.Tensor, weight: torch.Tensor, heads: list[range], slot: int, bias=None, columns=False):
        """source [N, c] times the stage's heads of a weight, plus those of a bias: a buffer of rows [N, heads of all ranks, d]."""
        buffer = self.take(role, slot)
        part = self.joined(heads, weight, 1) if columns else self.joined(heads, weight).t()
        product_into(buffer.view(self.dtype, self.N, part.shape[1]), source, part, None if bias is None else self.joined(heads, bias))
        return buffer

    def to_heads(self, rows: Buffer, heads: list[range], slot: int, norm=None, rotate=False) -> _Heads:
        """Finish rows [N, heads of all ranks, d] and send them to their heads; they arrive in the same buffer."""
        total = sum(map(len, heads))
        source = rows.view(self.dtype, self.N, total, self.d)
        cos, sin = (self.cos, self.sin) if rotate else (None, None)
        options = {"weight": norm.weight, "eps": norm.eps} if isinstance(norm, Norm) else {}
        starts = [sum(map(len, heads[:r])) for r in range(self.P)]
        if isinstance(norm, FullNorm):
            for start, h in zip(starts, heads):
                norm.forward_(source[:, start : start + len(h)], h)
        if self.P == 1:
            if rotate or options:
                finish_heads(source, cos, sin, **options)
            return _Heads(self, rows, rows, None, total)
        send = self.send_buffer(slot)
        if all(len(h) == 1 for h in heads):
            target = send.view(self.dtype, self.P, self.N, self.d).transpose(0, 1)
            finish_heads(source, cos, sin, out=target, **options)
        else:
            for start, h, piece in zip(starts, heads, self.pieces(send, heads)):
                finish_heads(source[:, start : start + len(h)], cos, sin, out=piece, **options)
        return self.ship(send, rows, heads)

    def settle_sending(self) -> None:
        """Wait for the last exchange to heads and give back the buffer that it was sent from."""
        if self.sending is not None:
            self.sending.arrive()
            self.sending = None

    def send_buffer(self, slot: int) -> Buffer:
        """The buffer that the last exchange to heads has left."""
        self.settle_sending()
        return self.take("send", slot)

    def ship(self, send: Buffer, recv: Buffer, heads: list[range]) -> _Heads:
        """Exchange pieces [N, heads of rank r, d], end to end in `send`, for [S, B, own heads, d] in `recv`."""
        mine, unit = len(heads[self.spec.rank]), self.N * self.d
        work = exchange(
            send.view(self.dtype, unit * sum(map(len, heads))), recv.view(self.dtype, unit * mine * self.P),
            [unit * len(h) for h in heads], [unit * mine] * self.P, self.spec.group, asynchronous=self.spec.overlap,
        )
        self.sending = _Heads(self, send, recv, work, mine)
        return self.sending

    def to_rows_of(self, role: str, send: Buffer, heads: list[range], slot: int) -> _Transit:
        """Exchange [S, B, own heads, d] for pieces [N, heads of rank r, d], end to end; `pieces` reads them."""
        if self.P == 1:
            return _Transit(self, send, send, None)
        mine, unit, recv = len(heads[self.spec.rank]), self.N * self.d, self.take(role, slot)
        work = exchange(
            send.view(self.dtype, unit * mine * self.P), recv.view(self.dtype, unit * sum(map(len, heads))),
            [unit * mine] * self.P, [unit * len(h) for h in heads], self.spec.group, asynchronous=self.spec.overlap,
        )
        return _Transit(self, send, recv, work)

    def q_heads(self, stage: int) -> list[range]:
        return [entry.q_heads for entry in self.sched.table[stage]]

    def kv_heads(self, stage: int) -> list[range]:
        """The kv heads that arrive in a stage."""
        return [entry.kv_arriving for entry in self.sched.table[stage]]

    def rows(self, name: str, stage: int) -> Buffer:
        """The local rows' "k", "v" or "q" of a stage, which asks for them in this order."""
        return self.product(name, self.x, *self.projection(name, stage))

    def projection(self, name: str, stage: int) -> tuple[torch.Tensor, list[range], int, torch.Tensor | None]:
        """Weight, heads of the stage, slot and bias of "k", "v" or "q"."""
        if name == "q":
            return self.wq, self.q_heads(stage), self.q_slot, self.w.bq
        weight, bias = (self.wk, self.w.bk) if name == "k" else (self.wv, self.w.bv)
        return weight, self.kv_heads(stage), self.kv_slot, bias

    def send_kv(self, stage: int, resident: dict) -> None:
        """Send the kv heads that arrive in this stage; this rank's are in `resident`, by stage of arrival."""
        heads = self.kv_heads(stage)
        if any(heads):
            k = self.to_heads(self.rows("k", stage), heads, self.kv_slot, self.k_norm, rotate=True)
            v = self.to_heads(self.rows("v", stage), heads, self.kv_slot)
            resident[stage] = k, v, heads[self.spec.rank].start

    def send_q(self, stage: int, meanwhile=None) -> _Heads:
        rows = self.rows("q", stage)
        if meanwhile is not None:
            meanwhile()
        return self.to_heads(rows, self.q_heads(stage), self.q_slot, self.q_norm, rotate=True)

    @staticmethod
    def kv_of(call, resident: dict) -> tuple[torch.Tensor, torch.Tensor]:
        k, v, first = resident[call.arrival]
        part = slice(call.kv_first - first, call.kv_first - first + call.kv_count)
        return k.tensor()[:, :, part], v.tensor()[:, :, part]

    def release(self, stage: int, resident: dict) -> None:
        """Give back the buffers of arrivals whose last kv head has left."""
        for arrived in [a for a in resident if a <= stage and self.sched.is_over(self.spec.rank, a, stage)]:
            for transit in resident.pop(arrived)[:2]:
                self.space.give(transit.arrive())

    def calls(self, stage: int):
        """This rank's kernel calls, each with its slice of the stage's heads and of the rank's own heads."""
        entry, own = self.sched.table[stage][self.spec.rank], self.sched.owned[self.spec.rank]
        for call in entry.calls:
            first, own_first = call.q_first - entry.q_heads.start, call.q_first - own.start
            yield call, slice(first, first + call.q_count), slice(own_first, own_first + call.q_count)

    def walk(self, prepare, compute, finish) -> None:
        """Run the stages. prepare(stage, meanwhile) starts what a stage needs, and may call meanwhile() when the time has come
        to finish the stage before; compute(stage, prepared) runs attention and returns what is on its way back;
        finish(that) puts it in place."""
        last, returning = self.sched.stages - 1, None

        def meanwhile() -> None:
            nonlocal returning
            if returning is not None:
                thing, returning = returning, None
                finish(thing)

        ready = prepare(0, meanwhile)
        for stage in range(last + 1):
            following = prepare(stage + 1, meanwhile) if self.spec.overlap and stage < last else None
            meanwhile()
            returning = compute(stage, ready)
            if not self.spec.overlap:
                meanwhile()
                following = prepare(stage + 1, meanwhile) if stage < last else None
            ready = following
        meanwhile()
        self.settle_sending()

    # Forward

    def forward(self, copy: _HostCopy | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        """-> attention output [N, H, d] of the local rows (None without `keep_output`), log-sum-exp [B, own heads, S]; also into
        `copy`."""
        spec = self.spec
        out = self.x.new_empty(self.N, self.sched.heads, self.d) if self.keep_output else None
        own = self.sched.owned[spec.rank]
        lse = self.x.new_empty(self.B, len(own), self.P * self.L, dtype=self.wide)
        resident: dict = {}
        copying: list = []

        def prepare(stage, meanwhile):
            settle()
            if stage > 1:
                # Long over by now, under a kernel. The first stage's queries travel under the second's products.
                self.settle_sending()
            self.send_kv(stage, resident)
            # The stage before comes home under the product, and leaves its buffers to this one's exchange.
            return self.send_q(stage, meanwhile)

        def compute(stage, q):
            mine = len(self.q_heads(stage)[spec.rank])
            heads_q, sent = q.tensor(), self._own_result(stage, q, resident, lse)
            if sent is None:
                sent = self.take("attention output", self.q_slot)
                attend(stage, heads_q, self.as_heads(sent, mine))
            self.space.give(q.arrive())
            self.release(stage, resident)
            return stage, self.to_rows_of("returned attention output", sent, self.q_heads(stage), self.q_slot)

        def attend(stage, heads_q, heads_out):
            for call, part, own_part in self.calls(stage):
                k, v = self.kv_of(call, resident)
                own_out, own_lse = heads_out[:, :, part], lse[:, own_part]
                _, own_lse[:] = spec.kernel.forward(heads_q[:, :, part], k, v, spec.scale, **spec.mask, out=own_out)
                if self.w.sinks is not None:
                    self._add_sinks(own_out, own_lse, self.w.sinks[call.q_first : call.q_first + call.q_count])

        def finish(returned):
            stage, transit = returned
            buffer, heads = transit.arrive(), self.q_heads(stage)
            for h, piece in zip(heads, self.pieces(buffer, heads)) if out is not None else ():
                finish_heads(piece, None, None, out=out[:, h.start : h.stop])
            settle()
            if copy is None:
                self.space.give(buffer)
            else:
                tensor, event = copy.send(buffer.view(self.dtype, self.N * sum(map(len, heads)) * self.d))
                copy.stages.append(tensor)
                copying.append((event, buffer))

        def settle():
            for event, buffer in copying:
                _wait(event)
                self.space.give(buffer)
            copying.clear()

        self.walk(prepare, compute, finish)
        settle()
        if copy is not None and copy.keeps_lse:
            copy.lse, event = copy.send(lse)
            _wait(event)
        return out, lse

    def _own_result(self, stage: int, q: _Heads, resident: dict, lse: torch.Tensor) -> Buffer | None:
        """Run the stage with a kernel that makes its own output, where that can be sent as it is; None where it cannot."""
        kernel, calls = self.spec.kernel, list(self.calls(stage))
        if kernel.writes_gradients or len(calls) != 1 or self.w.sinks is not None or self.spec.offsets is not None:
            return None
        (_, _, own_part), (k, v) = calls[0], self.kv_of(calls[0][0], resident)
        got, own_lse = kernel.forward(q.tensor(), k, v, self.spec.scale, **self.spec.mask)
        lse[:, own_part] = own_lse
        memory = got.transpose(0, 1)
        memory = memory if memory.is_contiguous() else memory.contiguous()
        return Buffer(memory.view(-1).view(torch.uint8), pooled=False)

    def _add_sinks(self, out, lse, sinks) -> None:
        """Put one more logit a head into the softmax's denominator, in place. out: [B, S, h, d], lse: [B, h, S]."""
        before = lse.clone()
        lse.copy_(torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None]))
        out.copy_(out * (before - lse).exp().transpose(1, 2)[..., None])

    def tiles(self):
        return (slice(i, min(i + ROW_TILE, self.N)) for i in range(0, self.N, ROW_TILE))

    def project_out(self, out: torch.Tensor, over: bool) -> torch.Tensor:
        """y [N, D] of the attention output [N, H, d]. over: write it over the attention output, if it fits."""
        width = self.sched.heads * self.d
        over = over and width >= self.D
        if not over:
            self.space.release_idle()
        y = _front(out, self.N, self.D) if over else out.new_empty(self.N, self.D)
        tile = out.new_empty(min(ROW_TILE, self.N), width) if over else None
        for rows in self.tiles():
            source = out[rows].view(-1, width)
            # Row i of y ends at or before the end of row i of the attention output, which was read by then.
            self._out_tile(tile[: len(source)].copy_(source) if over else source, y[rows])
        return y

    def _out_tile(self, source: torch.Tensor, target: torch.Tensor) -> None:
        product_into(target, source, self.w.wo.t(), self.w.bo)

    def rebuild(self, copy: _HostCopy, keep: bool):
        """y [N, D], attention output [N, H, d] (None unless `keep`) and lse, from a copy in host memory; no attention runs."""
        self.space.release_idle()
        H, width = self.sched.heads, self.sched.heads * self.d
        y = self.x.new_empty(self.N, self.D)
        out = self.x.new_empty(self.N, H, self.d) if keep else None
        lse = torch.empty(copy.lse.shape, dtype=copy.lse.dtype, device=self.x.device) if keep else None
        event = copy.fetch(lse, copy.lse) if keep else None
        size = min(ROW_TILE, self.N)
        landing = [[self.x.new_empty(size * width), None, None] for _ in range(2)]
        rows_tile = None if keep else self.x.new_empty(size, H, self.d)

        def start(slot, rows):
            n, at, parts = rows.stop - rows.start, 0, []
            for stage, whole in enumerate(copy.stages):
                begin = 0
                for h in self.q_heads(stage):
                    count = len(h) * self.d
                    if count:
                        piece = whole[begin + rows.start * count : begin + rows.stop * count]
                        target = slot[0][at : at + n * count]
                        slot[1] = copy.fetch(target, piece)
                        parts.append((h, target.view(n, len(h), self.d)))
                        at += n * count
                    begin += self.N * count
            slot[2] = parts

        tiles = list(self.tiles())
        start(landing[0], tiles[0])
        for i, rows in enumerate(tiles):
            if i + 1 < len(tiles):
                start(landing[(i + 1) % 2], tiles[i + 1])
            _, arrived, parts = landing[i % 2]
            _wait(arrived)
            target = out[rows] if keep else rows_tile[: rows.stop - rows.start]
            for h, piece in parts:
                target[:, h.start : h.stop] = piece
            self._out_tile(target.view(-1, width), y[rows])
        _wait(event)
        return y, out, lse

    # Backward

    def backward(self, grad, out, lse, copy: _HostCopy | None, need_dx: bool, needs: tuple[bool, ...]):
        """-> dx [B, L, D] or None, gradients of the parameters (None where not needed).

        The attention output is `out` [N, H, d], which is overwritten, or else in `copy`."""
        self.gy = self.to_rows(grad)
        self.need = dict(zip(vars(self.w), needs))
        self.result = dict.fromkeys(self.need)
        H, D = self.sched.heads, self.D
        if copy is not None:
            lse = torch.empty(copy.lse.shape, dtype=copy.lse.dtype, device=self.x.device)
            _wait(copy.fetch(lse, copy.lse))
        if self.need["bo"]:
            self.result["bo"] = self.gy.sum(0, dtype=self.wide).to(self.dtype)
        if self.need["wo"]:
            self.result["wo"] = self.x.new_empty(D, H * self.d) if out is None else self.gy.t() @ out.view(self.N, -1)
        for name in ("q_norm", "k_norm"):
            if self.need[name]:
                self.result[name] = torch.zeros_like(getattr(self.w, name), dtype=self.wide)
        if self.need["sinks"]:
            # In fp64: the rows nearly cancel.
            self.result["sinks"] = self.gy.new_zeros(H, dtype=torch.float64)
        sums = _SlabSums(self, out) if self.spec.dx == "gemm" else _RunningSums(self, need_dx)

        self._walk_back(out, lse, copy, sums)
        dx = sums.finish(need_dx)
        for name in ("q_norm", "k_norm", "sinks"):
            if self.result[name] is not None:
                self.result[name] = self.result[name].to(self.dtype)
        return None if dx is None else self.from_rows(dx), tuple(self.result.values())

    def _walk_back(self, out, lse, copy, sums) -> None:
        spec, slot = self.spec, self.q_slot
        resident: dict = {}
        gradients: dict[int, _KvGradients] = {}

        def prepare(stage, meanwhile):
            # What the stage before sends back is put in place after this, between the last exchange and the kernel, which
            # would leave the exchange no processor to start on.
            heads = self.q_heads(stage)
            if self.P == 1:
                o = _Heads(self, b := self.take("attention output", slot), b, None, len(heads[0]))
                self._load_output(stage, b, out, copy)
            else:
                recv, send = self.take("attention output", slot), self.send_buffer(slot)
                self._load_output(stage, send, out, copy)
                o = self.ship(send, recv, heads)
            self.send_kv(stage, resident)
            q = self.send_q(stage)
            grad = self.to_heads(self.product("dO", self.gy, self.w.wo, heads, slot, columns=True), heads, slot)
            return q, grad, o

        def compute(stage, prepared):
            heads = self.q_heads(stage)
            mine = len(heads[spec.rank])
            q, grad, o = (transit.tensor() for transit in prepared)
            over = spec.kernel.dq_over_out
            sent = prepared[2].arrive() if over else self.take("dq", slot)
            dq = self.as_heads(sent, mine)
            for call, part, own_part in self.calls(stage):
                k, v = self.kv_of(call, resident)
                if self.need["sinks"]:
                    self._sink_gradient(call, grad[:, :, part], o[:, :, part], lse[:, own_part])
                held = gradients.setdefault(call.arrival, _KvGradients(self, call.arrival))
                with held.buffers(call) as (dk, dv):
                    self.space.trim()
                    _, dk, dv = spec.kernel.backward(
                        grad[:, :, part], q[:, :, part], k, v, o[:, :, part], lse[:, own_part], spec.scale, **spec.mask,
                        dq=dq[:, :, part], dk=dk, dv=dv,
                    )
                    held.add(call, dk, dv)
            for transit in prepared[: 2 if over else 3]:
                self.space.give(transit.arrive())
            self.release(stage, resident)
            returned = [self.to_rows_of("returned dq", sent, heads, slot)]
            leaving = [entry.kv_leaving for entry in self.sched.table[stage]]
            if any(leaving):
                returned += self._leave(leaving, gradients)
                for arrived in [a for a in gradients if self.sched.is_over(spec.rank, a, stage)]:
                    gradients.pop(arrived).free()
            return stage, leaving, returned

        def finish(returned):
            stage, leaving, transits = returned
            heads = self.q_heads(stage)
            buffer = transits[0].arrive()
            sums.add_q(heads, self.pieces(buffer, heads))
            self.space.give(buffer)
            for name, transit in zip("kv", transits[1:]):
                buffer = transit.arrive()
                if sums.add_kv(name, leaving, self.pieces(buffer, leaving), buffer):
                    self.space.give(buffer)

        self.walk(prepare, compute, finish)

    def _load_output(self, stage, buffer, out, copy) -> None:
        """The stage's attention output as pieces for an all-to-all; from the host also its share of wo's gradient."""
        heads = self.q_heads(stage)
        if copy is None:
            for h, piece in zip(heads, self.pieces(buffer, heads)):
                finish_heads(out[:, h.start : h.stop], None, None, out=piece)
            return
        _wait(copy.fetch(buffer.view(self.dtype, copy.stages[stage].numel()), copy.stages[stage]))
        if self.need["wo"]:
            for h, piece in zip(heads, self.pieces(buffer, heads)):
                if h:
                    self.result["wo"][:, self.rows_of(h)] = self.gy.t() @ piece.reshape(self.N, -1)

    def _sink_gradient(self, call, grad, out, lse) -> None:
        """A sink's gradient: minus its probability times the row's sum of grad*out. lse has the sink in it."""
        heads = slice(call.q_first, call.q_first + call.q_count)
        rows = (grad.double() * out.double()).sum(-1).transpose(1, 2)
        share = (self.w.sinks[heads].double()[None, :, None] - lse.double()).exp()
        self.result["sinks"][heads] -= (share * rows).sum((0, 2))

    def _leave(self, leaving: list[range], gradients: dict) -> list[_Transit]:
        """Send dk and dv of the kv heads that leave to the owners of their rows."""
        mine, slot = leaving[self.spec.rank], self.leave_slot
        transits = []
        for index in range(2):
            send = self.take("dk, dv to send", slot)
            whole = self.as_heads(send, len(mine))
            for i, kv in enumerate(mine):
                held = next(h for h in gradients.values() if kv in h.heads)
                whole[:, :, i] = held.of(kv, index)
            transits.append(self.to_rows_of("dk, dv of the rows", send, leaving, slot))
        return transits

    @property
    def leave_slot(self) -> int:
        return max(len(entry.kv_leaving) for row in self.sched.table for entry in row)

    def unfinish(self, heads, pieces, norm, weight, bias, norm_grad, targets) -> None:
        """Backward of rotation and of a head's own norm, from pieces to targets, each [N, heads of rank r, d]."""
        for h, piece, target in zip(heads, pieces, targets):
            if h and isinstance(norm, Norm):
                raw = self.project(h, weight, bias)
                unfinish_heads(piece, self.cos, self.sin, out=target, raw=raw, weight=norm.weight, eps=norm.eps, weight_grad=norm_grad)
            elif h:
                unfinish_heads(piece, self.cos, self.sin, out=target)


class _KvGradients:
    """dk and dv of the kv heads that arrived on this rank in one stage. Several calls' are summed in fp32; those of a
    call that alone serves all of them are kept as they come."""

    def __init__(self, run: _Run, arrival: int) -> None:
        self.run = run
        self.heads = run.sched.table[arrival][run.spec.rank].kv_arriving
        calls = [c for row in run.sched.table for c in row[run.spec.rank].calls if c.arrival == arrival]
        self.single = len(calls) == 1
        self.dtype = run.dtype if self.single else run.wide
        self.held: list[Buffer] = []
        self.sums: list[torch.Tensor] = []
        self.begun: set[int] = set()

    @contextmanager
    def buffers(self, call):
        """dk and dv for a kernel to write: buffers of the workspace, or None for a kernel that makes its own."""
        run = self.run
        if not run.spec.kernel.writes_gradients:
            yield None, None
            return
        taken = [run.take("dk, dv of a call", call.kv_count) for _ in range(2)]
        yield tuple(run.as_heads(b, call.kv_count) for b in taken)
        if self.single:
            self.held = taken
        else:
            for buffer in taken:
                run.space.give(buffer)

    def add(self, call, dk: torch.Tensor, dv: torch.Tensor) -> None:
        if self.single:
            self.sums = [dk, dv]
            return
        if not self.sums:
            self.held = [self.run.take("dk, dv summed in fp32", len(self.heads), self.dtype) for _ in range(2)]
            self.sums = [self.run.as_heads(b, len(self.heads), self.dtype) for b in self.held]
        for i in range(call.kv_count):
            kv = call.kv_first + i
            for total, share in zip(self.sums, (dk, dv)):
                if kv in self.begun:
                    total[:, :, kv - self.heads.start] += share[:, :, i]
                else:
                    total[:, :, kv - self.heads.start] = share[:, :, i]
            self.begun.add(kv)

    def of(self, kv: int, index: int) -> torch.Tensor:
        """dk (0) or dv (1) of one head: [B, S, d]."""
        return self.sums[index][:, :, kv - self.heads.start]

    def free(self) -> None:
        self.sums = []
        for buffer in self.held:
            self.run.space.give(buffer)
        self.held = []


class _SlabSums:
    """dx="gemm": dq of a stage goes where its attention output was, dk and dv stay in their buffers; products at the end."""

    def __init__(self, run: _Run, out: torch.Tensor) -> None:
        self.run, self.dq = run, out
        self.kv: dict[str, dict[int, list]] = {"k": {}, "v": {}}
        self.slabs: list[Buffer] = []

    def add_q(self, heads, pieces) -> None:
        run = self.run
        targets = [self.dq[:, h.start : h.stop] for h in heads]
        run.unfinish(heads, pieces, run.q_norm, run.wq, run.w.bq, run.result["q_norm"], targets)

    def add_kv(self, name, heads, pieces, buffer) -> bool:
        """-> whether the buffer is free again."""
        run = self.run
        if name == "k":
            run.unfinish(heads, pieces, run.k_norm, run.wk, run.w.bk, run.result["k_norm"], pieces)
        for h, piece in zip(heads, pieces):
            for i, kv in enumerate(h):
                self.kv[name].setdefault(kv, []).append(piece[:, i])
        self.slabs.append(buffer)
        return False

    def finish(self, need_dx: bool) -> torch.Tensor | None:
        run, w, need, result = self.run, self.run.w, self.run.need, self.run.result
        N, H, K, d, D = run.N, run.sched.heads, run.sched.kv_heads, run.d, run.D
        run.space.trim()
        joint = self.dq.new_empty(N, 2 * K, d)
        for name, first in (("k", 0), ("v", K)):
            for kv, parts in self.kv[name].items():
                joint[:, first + kv] = parts[0] if len(parts) == 1 else sum(p.to(run.wide) for p in parts)
            self.kv[name].clear()
        for slab in self.slabs:
            run.space.give(slab)
        run.space.trim()
        if isinstance(run.q_norm, FullNorm):
            run.q_norm.finish(self.dq, lambda heads: run.project(heads, run.wq, w.bq), result["q_norm"])
            run.k_norm.finish(joint[:, :K], lambda heads: run.project(heads, run.wk, w.bk), result["k_norm"])
        dq, joint = self.dq.view(N, H * d), joint.view(N, 2 * K * d)
        spans = {"q": dq, "k": joint[:, : K * d], "v": joint[:, K * d :]}
        for name, span in spans.items():
            if need[f"w{name}"]:
                result[f"w{name}"] = span.t() @ run.x
            if need[f"b{name}"]:
                result[f"b{name}"] = span.sum(0, dtype=run.wide).to(run.dtype)
        if need["wqkv"]:
            result["wqkv"] = run.x.new_empty(w.wqkv.shape)
            torch.mm(dq.t(), run.x, out=result["wqkv"][: H * d])
            torch.mm(joint.t(), run.x, out=result["wqkv"][H * d :])
        if not need_dx:
            return None
        stacked = w.wqkv if w.wqkv is not None else torch.cat((w.wq, w.wk, w.wv))
        dx = _front(self.dq, N, D) if H * d >= D else dq.new_empty(N, D)
        tile = dq.new_empty(min(ROW_TILE, N), (H + 2 * K) * d)
        for rows in run.tiles():
            part = tile[: rows.stop - rows.start]
            part[:, : H * d], part[:, H * d :] = dq[rows], joint[rows]
            # Row i of dx ends at or before the end of row i of dq, which is in the tile by then.
            torch.mm(part, stacked, out=dx[rows])
        return dx


class _RunningSums:
    """dx="bf16": every stage's share is added to dx at once, and no gradient of the rows outlives its stage."""

    def __init__(self, run: _Run, need_dx: bool) -> None:
        self.run = run
        self.dx = run.x.new_zeros(run.N, run.D) if need_dx else None
        self.weights = {"q": (run.wq, "bq"), "k": (run.wk, "bk"), "v": (run.wv, "bv")}
        H, K, d = run.sched.heads, run.sched.kv_heads, run.d
        fused = run.x.new_zeros(run.w.wqkv.shape) if run.need["wqkv"] else None
        self.grads = dict(zip("qkv", fused.split((H * d, K * d, K * d)))) if fused is not None else {}
        run.result["wqkv"] = fused
        for name, (weight, bias) in self.weights.items():
            if run.need[f"w{name}"]:
                self.grads[name] = run.result[f"w{name}"] = torch.zeros_like(weight)
            if run.need[bias]:
                run.result[bias] = run.x.new_zeros(weight.shape[0], dtype=run.wide)

    def add_q(self, heads, pieces) -> None:
        run = self.run
        self._add("q", heads, pieces, run.q_norm, run.w.bq, run.result["q_norm"], run.q_slot)

    def add_kv(self, name, heads, pieces, buffer) -> bool:
        run = self.run
        norm, bias, norm_grad = (run.k_norm, run.w.bk, run.result["k_norm"]) if name == "k" else (None, None, None)
        self._add(name, heads, pieces, norm, bias, norm_grad, run.leave_slot)
        return True

    def _add(self, name, heads, pieces, norm, bias, norm_grad, slot) -> None:
        run, d = self.run, self.run.d
        weight, bias_name = self.weights[name]
        total = sum(map(len, heads))
        buffer = run.take("gradient rows of a stage", slot)
        rows = buffer.view(run.dtype, run.N, total, d)
        starts = [sum(map(len, heads[:r])) for r in range(len(heads))]
        targets = [rows[:, s : s + len(h)] for s, h in zip(starts, heads)]
        if name == "v":
            for piece, target in zip(pieces, targets):
                target.copy_(piece)
        else:
            run.unfinish(heads, pieces, norm, weight, bias, norm_grad, targets)
        flat = rows.view(run.N, total * d)
        if self.dx is not None:
            self.dx.addmm_(flat, run.joined(heads, weight))
        for start, h in zip(starts, heads):
            part = flat[:, start * d : (start + len(h)) * d]
            # More than one rank's where kv heads are replicated: += with another rank's share.
            if h and name in self.grads:
                self.grads[name][run.rows_of(h)] += part.t() @ run.x
            if h and run.need[bias_name]:
                run.result[bias_name][run.rows_of(h)] += part.sum(0, dtype=run.wide)
        run.space.give(buffer)

    def finish(self, need_dx: bool) -> torch.Tensor | None:
        for _, bias in self.weights.values():
            if self.run.result[bias] is not None:
                self.run.result[bias] = self.run.result[bias].to(self.run.dtype)
        return self.dx


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """out [N, c] = a @ b + bias [c], rounded once: added to a product already rounded to bf16, a bias is itself rounded to that
    number's last bit, alike for all rows, and attention's mean over tokens keeps what it takes from independent errors."""
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def _front(memory: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """[rows, width] at the beginning of a larger contiguous tensor's memory."""
    return memory.view(-1)[: rows * width].view(rows, width)
