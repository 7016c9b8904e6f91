"""The UPipe attention block: one autograd function from hidden states to the output projection.

Symbols: B batch, L local tokens, N = L*B rows, S = P*L tokens, P ranks, D hidden size, H query heads, K kv heads,
d head dim. Rows are ordered token first, (l, b), so that what the all-to-all delivers, [P, N, heads, d], already is
[S, B, heads, d]: no transposes around the exchange.

Forward, for each stage of the head schedule: project the local rows to the stage's query heads (and to the kv heads
that arrive in it), bias, q/k norm, rotation; all-to-all from rows to heads; attention over the whole sequence;
all-to-all back into the attention output [N, H, d]. Last, the output projection.
Saved: the input, the attention output, the log-sum-exp [B, heads of this rank, S]. q, k and v are never saved.

Backward, for each stage: make q (k, v) again, dO from the output gradient, exchange them and the attention output,
run the kernel's backward, send dq back; dk and dv are summed in fp32 while their kv head is on a rank and sent back
when it leaves. Rows of dq, dk, dv meet in one buffer [N, (H+2K)*d], from which dx comes as one GEMM (fp32
accumulation inside it) and each weight gradient as one more.

Source: Untied Ulysses, arXiv 2602.21196 sections 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from upipe.comm import all_to_all
from upipe.kernels import Kernel, Offsets
from upipe.rotary import rms_norm, rms_norm_backward, rotate
from upipe.schedule import HeadSchedule


@dataclass(frozen=True)
class BlockSpec:
    """What a block computes besides its tensors.

    Args:
        schedule: head schedule over the P ranks of `group`.
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
    for name, w in vars(weights).items():
        if w is not None and w.dtype != x.dtype:
            raise TypeError(f"hidden states are {x.dtype} but {name} is {w.dtype}: cast the model to one dtype (autocast is not supported)")
    return _AttentionBlock.apply(spec, cos, sin, x, *vars(weights).values())


class _AttentionBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec, cos, sin, x, *params):
        run = _Run(spec, Projections(*params), x, cos, sin)
        out, lse = run.forward()
        ctx.spec = spec
        ctx.save_for_backward(cos, sin, x, out, lse, *params)
        y = run.from_rows(linear(out.view(run.N, -1), run.w.wo, run.w.bo))
        # With B = 1 it is a view, and autograd forbids writing in place into a view that a Function returns.
        return torch.ops.aten._unsafe_view(y, y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin, x, out, lse, *params = ctx.saved_tensors
        run = _Run(ctx.spec, Projections(*params), x, cos, sin)
        dx, dparams = run.backward(grad, out, lse, ctx.needs_input_grad[3], ctx.needs_input_grad[4:])
        return None, None, None, dx, *dparams


class Norm:
    """RMS norm of each head by itself. weight: [d]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def forward(self, raw: torch.Tensor, heads: range) -> torch.Tensor:
        return rms_norm(raw, self.weight, self.eps)

    def backward(self, grad: torch.Tensor, raw: torch.Tensor, weight_grad: torch.Tensor | None) -> torch.Tensor:
        grad, share = rms_norm_backward(grad, raw, self.weight, self.eps)
        if weight_grad is not None:
            weight_grad += share
        return grad


class FullNorm:
    """RMS norm over all heads of a projection together. weight: [heads, d], inverse: [N, 1, 1], width: heads*d.

    The backward of a row needs all of its heads, so gradients pass through `backward` unchanged and `finish` does them.
    """

    def __init__(self, weight: torch.Tensor, inverse: torch.Tensor, width: int) -> None:
        self.weight, self.inverse, self.width = weight, inverse, width

    def forward(self, raw: torch.Tensor, heads: range) -> torch.Tensor:
        wide = self.inverse.dtype
        return (raw.to(wide) * self.inverse * self.weight[heads.start : heads.stop].to(wide)).to(raw.dtype)

    def backward(self, grad: torch.Tensor, raw: torch.Tensor, weight_grad: torch.Tensor | None) -> torch.Tensor:
        return grad

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


class _Run:
    """One pass over the stages. Lives for one forward or one backward."""

    def __init__(self, spec: BlockSpec, weights: Projections, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        self.spec, self.w, self.sched, self.d = spec, weights, spec.schedule, spec.head_dim
        self.B, self.L, self.D = x.shape
        self.N, self.P = self.B * self.L, spec.schedule.ranks
        self.x = self.to_rows(x)
        self.cos, self.sin = (t.expand(self.B, -1, -1).transpose(0, 1).reshape(self.N, 1, -1) for t in (cos, sin))
        self.wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        H, K = self.sched.heads, self.sched.kv_heads
        self.wq, self.wk, self.wv = weights.wq, weights.wk, weights.wv
        if weights.wqkv is not None:
            self.wq, self.wk, self.wv = weights.wqkv.split((H * self.d, K * self.d, K * self.d))
        self.q_norm = self._norm(weights.q_norm, self.wq, weights.bq, H)
        self.k_norm = self._norm(weights.k_norm, self.wk, weights.bk, K)

    def _norm(self, weight, projection, bias, heads: int) -> Norm | None:
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

    def q_rows(self, heads: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Query heads of the local rows, before the norm and as attention takes them: two of [N, heads, d]."""
        return self._finish(self.project(heads, self.wq, self.w.bq), self.q_norm, heads)

    def k_rows(self, heads: range) -> tuple[torch.Tensor, torch.Tensor]:
        return self._finish(self.project(heads, self.wk, self.w.bk), self.k_norm, heads)

    def _finish(self, raw, norm, heads):
        normed = raw if norm is None else norm.forward(raw, heads)
        return raw, rotate(normed, self.cos, self.sin)

    def v_rows(self, heads: range) -> torch.Tensor:
        return self.project(heads, self.wv, self.w.bv)

    def to_heads(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """All-to-all from rows to heads. pieces[r]: [N, heads of rank r, d] -> [B, S, own heads, d]."""
        mine = pieces[self.spec.rank].shape[1]
        sizes = [p.numel() for p in pieces]
        flat = torch.cat([p.reshape(-1) for p in pieces])
        got = all_to_all(flat, sizes, [self.N * mine * self.d] * self.P, self.spec.group)
        return got.view(self.P * self.L, self.B, mine, self.d).transpose(0, 1)

    def to_owners(self, whole: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """All-to-all from heads to rows. whole: [B, S, own heads, d] -> for each rank r [N, counts[r], d]."""
        flat = whole.transpose(0, 1).reshape(-1)
        sizes = [self.N * n * self.d for n in counts]
        got = all_to_all(flat, [flat.numel() // self.P] * self.P, sizes, self.spec.group)
        return [t.view(self.N, n, self.d) for t, n in zip(got.split(sizes), counts)]

    def receive_kv(self, stage, resident: dict) -> None:
        """Send the kv heads that arrive in this stage; keep this rank's, keyed by kv head."""
        arriving = [entry.kv_arriving for entry in self.sched.table[stage]]
        if not any(arriving):
            return
        k = self.to_heads([self.k_rows(heads)[1] for heads in arriving])
        v = self.to_heads([self.v_rows(heads) for heads in arriving])
        resident[stage] = (k, v, arriving[self.spec.rank].start)

    @staticmethod
    def kv_of(call, resident: dict) -> tuple[torch.Tensor, torch.Tensor]:
        k, v, first = resident[call.arrival]
        part = slice(call.kv_first - first, call.kv_first - first + call.kv_count)
        return k[:, :, part], v[:, :, part]

    def release(self, stage, resident: dict) -> None:
        """Drop arrivals whose last kv head has left."""
        for arrived in [a for a in resident if self.sched.is_over(self.spec.rank, a, stage)]:
            del resident[arrived]

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """-> attention output [N, H, d] of the local rows, log-sum-exp [B, own heads, S]."""
        spec, rank = self.spec, self.spec.rank
        out = self.x.new_empty(self.N, self.sched.heads, self.d)
        own = self.sched.owned[rank]
        lse = self.x.new_empty(self.B, len(own), self.P * self.L, dtype=self.wide)
        resident: dict = {}
        for stage, row in enumerate(self.sched.table):
            self.receive_kv(stage, resident)
            q = self.to_heads([self.q_rows(entry.q_heads)[1] for entry in row])
            head_out = torch.empty_like(q)
            for call, part, own_part in self.calls(stage):
                k, v = self.kv_of(call, resident)
                head_out[:, :, part], lse[:, own_part] = spec.kernel.forward(q[:, :, part], k, v, spec.scale, **spec.mask)
                if self.w.sinks is not None:
                    self._add_sinks(head_out[:, :, part], lse[:, own_part], self.w.sinks[call.q_first : call.q_first + call.q_count])
            for entry, got in zip(row, self.to_owners(head_out, [len(e.q_heads) for e in row])):
                out[:, entry.q_heads.start : entry.q_heads.stop] = got
            self.release(stage, resident)
        return out, lse

    def _add_sinks(self, out, lse, sinks) -> None:
        """Put one more logit a head into the softmax's denominator, in place. out: [B, S, h, d], lse: [B, h, S]."""
        before = lse.clone()
        lse.copy_(torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None]))
        out.copy_(out * (before - lse).exp().transpose(1, 2)[..., None])

    def calls(self, stage):
        """This rank's kernel calls, each with its slice of the stage's heads and of the rank's own heads."""
        entry, own = self.sched.table[stage][self.spec.rank], self.sched.owned[self.spec.rank]
        for call in entry.calls:
            first, own_first = call.q_first - entry.q_heads.start, call.q_first - own.start
            yield call, slice(first, first + call.q_count), slice(own_first, own_first + call.q_count)

    def backward(self, grad, out, lse, need_dx: bool, needs: tuple[bool, ...]):
        """-> dx [B, L, D] or None, gradients of the parameters (None where not needed)."""
        spec, sched, w, d = self.spec, self.sched, self.w, self.d
        gy = self.to_rows(grad)
        H, K = sched.heads, sched.kv_heads
        need = dict(zip(vars(w), needs))
        result = dict.fromkeys(need)
        if need["wo"]:
            result["wo"] = gy.t() @ out.view(self.N, -1)
        if need["bo"]:
            result["bo"] = gy.sum(0, dtype=self.wide).to(gy.dtype)

        joint = gy.new_empty(self.N, H + 2 * K, d)
        dq, dk, dv = joint[:, :H], joint[:, H : H + K], joint[:, H + K :]
        replicas = {"k": {}, "v": {}}
        norm_grads = {name: torch.zeros_like(getattr(w, name), dtype=self.wide) for name in ("q_norm", "k_norm") if need[name]}
        sink_grads = gy.new_zeros(H, dtype=torch.float64) if need["sinks"] else None
        resident: dict = {}
        sums: dict = {}
        for stage, row in enumerate(sched.table):
            self.receive_kv(stage, resident)
            raw, ready = zip(*(self.q_rows(entry.q_heads) for entry in row))
            q = self.to_heads(list(ready))
            heads_grad = self.to_heads([(gy @ w.wo[:, self.rows_of(e.q_heads)]).view(self.N, -1, d) for e in row])
            heads_out = self.to_heads([out[:, e.q_heads.start : e.q_heads.stop] for e in row])
            heads_dq = torch.empty_like(q)
            for call, part, own_part in self.calls(stage):
                k, v = self.kv_of(call, resident)
                heads_dq[:, :, part], call_dk, call_dv = spec.kernel.backward(
                    heads_grad[:, :, part].contiguous(), q[:, :, part], k, v, heads_out[:, :, part].contiguous(),
                    lse[:, own_part].contiguous(), spec.scale, **spec.mask,
                )
                if need["sinks"]:
                    self._sink_gradient(sink_grads, call, heads_grad[:, :, part], heads_out[:, :, part], lse[:, own_part])
                for i in range(call.kv_count):
                    _add(sums, call.kv_first + i, call_dk[:, :, i], call_dv[:, :, i], self.wide)
            for entry, part_raw, got in zip(row, raw, self.to_owners(heads_dq, [len(e.q_heads) for e in row])):
                part = slice(entry.q_heads.start, entry.q_heads.stop)
                dq[:, part] = self._unfinish(got, part_raw, self.q_norm, norm_grads.get("q_norm"))
            self._return_kv(row, sums, dk, dv, replicas)
            self.release(stage, resident)
        self._finish_kv(dk, dv, replicas, norm_grads)
        if isinstance(self.q_norm, FullNorm):
            self.q_norm.finish(dq, lambda heads: self.project(heads, self.wq, w.bq), norm_grads.get("q_norm"))
            self.k_norm.finish(dk, lambda heads: self.project(heads, self.wk, w.bk), norm_grads.get("k_norm"))

        flat = joint.view(self.N, -1)
        spans = {"q": slice(0, H * d), "k": slice(H * d, (H + K) * d), "v": slice((H + K) * d, (H + 2 * K) * d)}
        for name, span in spans.items():
            if need[f"w{name}"]:
                result[f"w{name}"] = flat[:, span].t() @ self.x
            if need[f"b{name}"]:
                result[f"b{name}"] = flat[:, span].sum(0, dtype=self.wide).to(flat.dtype)
        if need["wqkv"]:
            result["wqkv"] = flat.t() @ self.x
        for name, value in (norm_grads | {"sinks": sink_grads}).items():
            if value is not None:
                result[name] = value.to(getattr(w, name).dtype)
        dx = None
        if need_dx:
            dx = self.from_rows(flat @ (w.wqkv if w.wqkv is not None else torch.cat((w.wq, w.wk, w.wv))))
        return dx, tuple(result.values())

    def _unfinish(self, grad, raw, norm, norm_grad):
        """Backward of `_finish`: rotation, then the norm if it is a head's own. grad, raw: [N, heads, d]."""
        grad = rotate(grad, self.cos, self.sin, inverse=True)
        return grad if norm is None else norm.backward(grad, raw, norm_grad)

    def _sink_gradient(self, total, call, grad, out, lse) -> None:
        """A sink's gradient: minus its probability times the row's sum of grad*out. lse has the sink in it. total: [H], in
        fp64, because the rows nearly cancel."""
        heads = slice(call.q_first, call.q_first + call.q_count)
        rows = (grad.double() * out.double()).sum(-1).transpose(1, 2)
        share = (self.w.sinks[heads].double()[None, :, None] - lse.double()).exp()
        total[heads] -= (share * rows).sum((0, 2))

    def _return_kv(self, row, sums, dk, dv, replicas) -> None:
        """Send gradients of the kv heads that leave in this stage to the owners of their rows."""
        leaving = [entry.kv_leaving for entry in row]
        if not any(leaving):
            return
        mine = leaving[self.spec.rank]
        done = [sums.pop(kv) for kv in mine]
        for index, target, name in ((0, dk, "k"), (1, dv, "v")):
            if done:
                whole = torch.stack([pair[index] for pair in done], dim=2).to(dk.dtype)
            else:
                whole = dk.new_empty(self.B, self.P * self.L, 0, self.d)
            for heads, got in zip(leaving, self.to_owners(whole, [len(h) for h in leaving])):
                for i, kv in enumerate(heads):
                    if self.sched.copies(kv) == 1:
                        target[:, kv] = got[:, i]
                    elif kv in replicas[name]:
                        replicas[name][kv] += got[:, i]
                    else:
                        replicas[name][kv] = got[:, i].to(self.wide)

    def _finish_kv(self, dk, dv, replicas, norm_grads) -> None:
        """Write summed replicas down, then undo k's rotation and norm, one kv head at a time."""
        for name, target in (("k", dk), ("v", dv)):
            for kv, total in replicas[name].items():
                target[:, kv] = total.to(target.dtype)
        for kv in range(self.sched.kv_heads):
            raw = self.project(range(kv, kv + 1), self.wk, self.w.bk)
            dk[:, kv : kv + 1] = self._unfinish(dk[:, kv : kv + 1], raw, self.k_norm, norm_grads.get("k_norm"))


def _add(sums: dict, kv: int, dk: torch.Tensor, dv: torch.Tensor, wide: torch.dtype) -> None:
    """Sum [B, S, d] gradients of a kv head in fp32; a single contribution is kept as it came."""
    if kv in sums:
        have_k, have_v = sums[kv]
        sums[kv] = have_k.to(wide).add_(dk), have_v.to(wide).add_(dv)
    else:
        sums[kv] = dk, dv
