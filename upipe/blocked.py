"""Causal attention in blocks of the sequence inside one process: a kernel made of a kernel's shorter calls.

Shapes as in `kernels`; C tokens of a block, the last one shorter where C does not divide S.

A query block sees its own keys in one causal call and each earlier block in one call without a mask (`ring.full_of`). Over a long
sequence these may be faster than one causal call: the keys of a block stay in the GPU's cache. What is summed, and in which order:

Forward, for each query block: its calls' results merge by log-sum-exp in fp32 (`ring.merge_`), then go to the output. Held beside a
call's own: B*C*h*d fp32 numbers.
Backward, for one kv head and its g query heads at a time: every call gets the output and log-sum-exp over all keys. With g > 1 query
blocks are the outer loop: dq of one block is summed in fp32, and dk and dv of the kv head over the whole sequence, 2*B*S*d fp32
numbers. With g = 1 key blocks are: dk and dv of one block, and dq of the head over the whole sequence, B*S*d fp32 numbers. The other
order would hold g/2 times, or twice, as much. A query block's part of `out` is read by its own calls only, so dq may be written over it.

Both are those of the single call up to rounding. Windows are left to the single call, as are packed rows of many documents that a
kernel takes in one call; other packed rows go document by document, each in blocks where it is longer than one.

Sources: merging and a backward of part of the keys see `ring`; blocks of the sequence as in FPDT (arXiv 2408.16978), here without a
host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from upipe import kernel_blocks, ring
from upipe.kernels import Case, Kernel, Mask
from upipe.records import format_tokens

Tokens = int | Literal["none", "auto"]
"""Tokens of a block; the single call; or as `kernel_blocks` has it measured."""


class BlockedAttention(Kernel):
    """A kernel that runs long causal calls in blocks. Attributes as of the kernel it wraps.

    Args:
        kernel: runs each call.
        forward, backward: tokens of a block, as `Tokens` says; calls that are not longer stay single.
        gpu, name: of the GPU (None on the CPU) and of the kernel in the table that "auto" reads; name None: the kernel's own.

    Raises:
        ValueError: a kernel without such calls; a block of no tokens.
    """

    def __init__(self, kernel: Kernel, forward: Tokens, backward: Tokens, gpu: str | None = None, name: str | None = None) -> None:
        check_tokens(forward, backward)
        self.kernel, self.full = kernel, ring.full_of(kernel)
        self.tokens: dict[str, Tokens] = {"forward": forward, "backward": backward}
        self.gpu, self.measured_as = gpu, kernel.name if name is None else name
        self.name, self.untested, self.deterministic = kernel.name, kernel.untested, kernel.deterministic
        self.writes_gradients, self.dq_over_out = kernel.writes_gradients, kernel.dq_over_out
        self._chosen: dict[tuple, int | None] = {}

    def __str__(self) -> str:
        return f"{self.kernel}{in_words(*self.tokens.values())}{self._choices()}"

    def _choices(self) -> str:
        """What "auto" has come to so far."""
        found = {
            f"{direction} of {format_tokens(tokens)} {'single' if size is None else 'in blocks of ' + format_tokens(size)}"
            for (direction, tokens, *_), size in self._chosen.items()
        }
        return f" ({', '.join(sorted(found))})" if found else ""

    def declines(self, case: Case) -> str | None:
        return self.kernel.declines(case)

    def without_mask(self) -> Kernel:
        """Its calls without a causal mask, which are not cut (`ring.full_of`)."""
        return self.full

    def size(self, direction: str, q: torch.Tensor, k: torch.Tensor) -> int | None:
        """Tokens of a block for a causal call of q and k; None for the single call."""
        size, S = self.tokens[direction], q.shape[1]
        if size == "none":
            return None
        if size == "auto":
            key = direction, S, q.shape[2], k.shape[2], q.shape[3]
            if key not in self._chosen:
                self._chosen[key] = kernel_blocks.choose(*key, self.gpu, self.measured_as)[0]
            size = self._chosen[key]
        return size if size is not None and size < S else None

    def _runs(self, offsets):
        return self.kernel._runs(offsets)

    def _forward(self, q, k, v, scale, mask: Mask, out):
        if mask.documents is not None:
            return self.kernel._forward(q, k, v, scale, mask, out)
        size = None if mask.window is not None else self.size("forward", q, k)
        if size is None:
            return self.kernel.forward(q, k, v, scale, None, mask.window, mask.softcap, out=out)
        out = torch.empty_like(q) if out is None else out
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=_wide(q))
        for mine, earlier in _pairs(q.shape[1], size):
            result = out[:, mine]
            _, part_lse = self.kernel.forward(q[:, mine], k[:, mine], v[:, mine], scale, softcap=mask.softcap, out=result)
            total = result.to(part_lse.dtype) if earlier else result
            for keys in earlier:
                got = self.full.forward(q[:, mine], k[:, keys], v[:, keys], scale, softcap=mask.softcap)
                ring.merge_(total, part_lse, *got)
                del got
            if total is not result:
                result.copy_(total)
            lse[:, :, mine] = part_lse
            del total
        return out, lse

    def _backward(self, grad, q, k, v, out, lse, scale, mask: Mask, dq, dk, dv):
        if mask.documents is not None:
            return self.kernel._backward(grad, q, k, v, out, lse, scale, mask, dq, dk, dv)
        size = None if mask.window is not None else self.size("backward", q, k)
        if size is None:
            return self.kernel.backward(grad, q, k, v, out, lse, scale, None, mask.window, mask.softcap, dq=dq, dk=dk, dv=dv)
        grads = tuple(torch.empty_like(like) if buffer is None else buffer for buffer, like in zip((dq, dk, dv), (q, k, v)))
        group, blocks = q.shape[2] // k.shape[2], list(_pairs(q.shape[1], size))
        for kv in range(k.shape[2]):
            heads, own = slice(kv * group, (kv + 1) * group), slice(kv, kv + 1)

            def pair(mine: slice, keys: slice, heads=heads, own=own):
                kernel = self.kernel if mine == keys else self.full
                return kernel.backward(
                    grad[:, mine, heads], q[:, mine, heads], k[:, keys, own], v[:, keys, own], out[:, mine, heads], lse[:, heads, mine],
                    scale, softcap=mask.softcap,
                )

            targets = [t[:, :, part] for t, part in zip(grads, (heads, own, own))]
            (_by_queries if group > 1 else _by_keys)(pair, blocks, targets)
        return grads


def _by_queries(pair, blocks, targets) -> None:
    """Query blocks outside: dk and dv are summed over the whole sequence. pair(queries, keys) -> dq, dk, dv of one call."""
    whole = [_zeros(t) for t in targets[1:]]
    for mine, earlier in blocks:
        block: list = [None]
        for keys in (*earlier, mine):
            _add(pair(mine, keys), block, whole, keys)
        targets[0][:, mine] = block[0]
    for target, total in zip(targets[1:], whole):
        target.copy_(total)


def _by_keys(pair, blocks, targets) -> None:
    """Key blocks outside: dq is summed over the whole sequence."""
    whole = [_zeros(targets[0])]
    for index, (keys, _) in enumerate(blocks):
        block: list = [None, None]
        for mine, _ in blocks[index:]:
            dq, *shares = pair(mine, keys)
            _add([*shares, dq], block, whole, mine)
            del dq, shares
        for target in targets[1:]:
            target[:, keys] = block.pop(0)
    # Only now, as it may lie over the output.
    targets[0].copy_(whole[0])


def _add(shares, block: list, whole: list[torch.Tensor], part: slice) -> None:
    """Add one call's gradients: the first to the sums of a block, the others to a part of those of the whole sequence."""
    for i, share in enumerate(shares[: len(block)]):
        block[i] = share.to(whole[0].dtype) if block[i] is None else block[i].add_(share)
    for total, share in zip(whole, shares[len(block) :]):
        total[:, part] += share


def _pairs(S: int, size: int) -> Iterator[tuple[slice, list[slice]]]:
    """Each block, and those before it."""
    blocks = [slice(start, min(start + size, S)) for start in range(0, S, size)]
    for i, block in enumerate(blocks):
        yield block, blocks[:i]


def _zeros(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.shape, dtype=_wide(t), device=t.device)


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def check_tokens(*tokens: Tokens) -> None:
    """Raises ValueError for what `Tokens` does not name."""
    for value in tokens:
        if value not in ("none", "auto") and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"blocks of {value!r} tokens: use none, auto or a positive number such as 64K (65536)")


def in_words(forward: Tokens, backward: Tokens) -> str:
    """What follows a kernel's name: " in blocks of 64K", or nothing."""
    def words(value: Tokens) -> str:
        return "blocks as measured" if value == "auto" else f"blocks of {format_tokens(value)}"

    if forward == backward:
        return "" if forward == "none" else f" in {words(forward)}"
    parts = [f"{name} in {words(value)}" for name, value in (("forward", forward), ("backward", backward)) if value != "none"]
    return ", " + ", ".join(parts)


def in_blocks(kernel: Kernel, forward: Tokens, backward: Tokens, gpu: str | None = None, name: str | None = None) -> Kernel:
    """`BlockedAttention`, or the kernel itself where both are "none"; "auto" is, where nothing of the GPU and kernel was measured."""
    check_tokens(forward, backward)
    forward, backward = kernel_blocks.settled((forward, backward), gpu, kernel.name if name is None else name)
    return kernel if forward == backward == "none" else BlockedAttention(kernel, forward, backward, gpu, name)
