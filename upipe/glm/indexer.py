"""The pooled lightning indexer: which pools of tokens each query attends to.

Symbols: B rows, S tokens of a row, L local tokens, H index heads, d index head dim, k tokens of a pool (`index_kpool`), N pools
of a row, K pools selected a query (`index_topk` / k).

    pool key    c_p = sum over slots s of softmax_s(gate[kp + s] + ape[s]) * key[kp + s]              per channel
    score       I(t, p) = sum over heads h of w[t, h] * relu(q[t, h] . c_p / sqrt(d))                  fp32
    selection   the K best pools of t's document that end at or before t; of equal scores the earlier pool

A selected pool is named by its first token's place in the row, int32, -1 where there is none; a row of them is in ascending
order. The tokens after a document's last complete pool before t (fewer than k) always belong to t and are not listed.

Nothing here is differentiated or trained, as in transformers (`Glm5NextTextIndexer.forward` is under no_grad). Queries are
scored in chunks, over the pools that some query of the chunk can see, so that scores take at most `score_bytes`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from upipe import zigzag
from upipe.glm.context import Pools, TokenLayout, TokenSplit

POOLING_TOKENS = 1 << 18  # keys that are pooled at a time


def pooled_keys(keys: torch.Tensor, gates: torch.Tensor, ape: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """One key a pool, rounded as transformers does: softmax in fp32, weights and sum in the keys' dtype.

    Args:
        keys, gates: [S, d], a row's index keys and gate scores, in the row's order.
        ape: [k, d].
        first: [N] int64, each pool's first token.

    Returns:
        [N, d] in the keys' dtype.

    Raises:
        ValueError: keys and gate scores of different tokens.
    """
    if keys.shape != gates.shape:
        raise ValueError(f"index keys {tuple(keys.shape)} and gate scores {tuple(gates.shape)}: both must be of the whole row")
    slots = torch.arange(ape.shape[0], device=keys.device)
    out = keys.new_empty(len(first), keys.shape[1])
    step = max(1, POOLING_TOKENS // len(slots))
    for begin in range(0, len(first), step):
        tokens = first[begin : begin + step, None] + slots
        weights = (gates[tokens].float() + ape.float()).softmax(dim=1)
        out[begin : begin + step] = (weights.to(keys.dtype) * keys[tokens]).sum(dim=1)
    return out


def index_scores(q: torch.Tensor, weights: torch.Tensor, pools: torch.Tensor) -> torch.Tensor:
    """q [c, H, d], weights [c, H] fp32, pools [n, d] -> [c, n] fp32. The one large tensor is [c, H, n] fp32."""
    c, H, d = q.shape
    per_head = (q.reshape(c * H, d).float() @ pools.float().t()).mul_(d**-0.5).relu_().view(c, H, -1)
    return torch.bmm(weights.unsqueeze(1), per_head).squeeze(1)


def best_pools(scores: torch.Tensor, low: torch.Tensor, high: torch.Tensor, width: int) -> torch.Tensor:
    """The best `width` columns of each row among those from low up to high; of equal scores the lower column.

    torch.topk leaves ties open. Scores are made integers of the same order, with the column behind them: no two are equal.

    Args:
        scores: [c, n] fp32. low, high: [c] int64.

    Returns:
        [c, width] int64, ascending, -1 behind the last.
    """
    n = scores.shape[1]
    columns = torch.arange(n, device=scores.device)
    seen = (columns >= low[:, None]) & (columns < high[:, None])
    none = torch.iinfo(torch.int64).min
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = ((ordered.long() << 32) + (n - 1 - columns)).masked_fill_(~seen, none)
    top = keys.topk(min(width, n), dim=1).values
    found = (n - 1 - (top & 0xFFFFFFFF)).masked_fill_(top == none, n).sort(dim=1).values
    found = found.masked_fill(found == n, -1)
    return F.pad(found, (0, width - found.shape[1]), value=-1)


def select(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, pools: Pools, width: int, score_bytes: int, parts: Sequence[range]
) -> torch.Tensor:
    """First tokens of the pools that some local queries of a row select.

    Args:
        q: [L, H, d]; weights: [L, H] fp32, head weights times H**-0.5; keys: [N, d], pooled.
        pools: of the row.
        width: K.
        score_bytes: bound on the [queries, H, pools] fp32 scores of a chunk; one query is the least.
        parts: local queries, in ranges; a chunk never reaches over two of them, which may lie far apart in the row.

    Returns:
        [queries of the parts, width] int32.
    """
    H = q.shape[1]
    chosen = []
    chunk = max(1, score_bytes // (4 * H * max(1, len(pools.first))))
    firsts = pools.first.to(q.device)
    for part in parts:
        for begin in range(part.start, part.stop, chunk):
            queries = slice(begin, min(begin + chunk, part.stop))
            low, high = pools.low[queries], pools.high[queries]
            base, end = int(low.min()), int(high.max())
            if end <= base:
                chosen.append(torch.full((len(low), width), -1, dtype=torch.int32, device=q.device))
                continue
            scores = index_scores(q[queries], weights[queries], keys[base:end])
            columns = best_pools(scores, (low - base).to(q.device), (high - base).to(q.device), width)
            chosen.append(firsts[columns.clamp(min=0) + base].masked_fill(columns < 0, -1).to(torch.int32))
    return torch.cat(chosen) if chosen else q.new_empty(0, width, dtype=torch.int32)


def shared_out(rows: int, width: int, group, work: Callable[[tuple[range, ...]], torch.Tensor]) -> torch.Tensor:
    """`work` on all rows, each rank of a group doing its share of them: for ranks that hold the same tokens.

    Shares are zigzag, since under causal skipping late queries cost more. Collective.

    Args:
        work: ranges of rows -> [their rows, width] int32.
        group: a process group, or None for one rank.

    Returns:
        [rows, width] int32, the same on every rank. Sent as int32: 2 KiB a token at the published 512 pools.
    """
    if group is None or dist.get_world_size(group) == 1:
        return work((range(rows),))
    split = TokenSplit.of(group)
    whole = zigzag.padded_length(rows, split.ring, split.ulysses)
    held = split.held(whole)
    mine = work(tuple(range(min(part.start, rows), min(part.stop, rows)) for part in held))
    # Rows that only pad the shares come back at the end.
    mine = F.pad(mine, (0, 0, 0, whole // split.size - len(mine)), value=-1)
    return split.gathered(mine[None])[0, :rows]


class PooledIndexer(Glm5NextTextIndexer):
    """`Glm5NextTextIndexer` in chunks of queries; its parameters, under its names."""

    @torch.no_grad()
    def forward(self, hidden_states: torch.Tensor, q_resid: torch.Tensor, layout: TokenLayout, score_bytes: int, same_tokens=None):
        """The pools that this rank's queries select.

        Args:
            hidden_states: [B, L, hidden]; q_resid: [B, L, q_lora_rank].
            layout: the batch's tokens and documents. Its ranks are gathered from: keys and gate scores, 2 d channels a token.
            score_bytes: see `select`.
            same_tokens: group of ranks that hold these very tokens, over which queries are shared out; None: this rank alone.

        Returns:
            [B, L, K] int32, K at most index_topk / index_kpool and no more than any document has pools.
        """
        B, L, _ = hidden_states.shape
        k = self.index_kpool
        q = self.wq_b(q_resid).view(B, L, self.n_heads, self.head_dim)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float() * self.n_heads**-0.5
        keys = self.k_norm(self.wk(hidden_states))
        gates = F.linear(hidden_states, self.index_kpool_compress_gate)
        whole = layout.split.gathered(torch.cat((keys, gates), dim=-1))
        keys, gates = whole.split(self.head_dim, dim=-1)
        rows = [layout.pools(b, k) for b in range(B)]
        width = min(self.index_topk // k, max(pools.most for pools in rows))
        runs = _runs(layout)
        chosen = []
        for b, pools in enumerate(rows):
            pooled = pooled_keys(keys[b], gates[b], self.index_kpool_compress_ape, pools.first.to(keys.device))

            def work(parts, b=b, pools=pools, pooled=pooled):
                return select(q[b], weights[b], pooled, pools, width, score_bytes, _cut(parts, runs))

            chosen.append(shared_out(L, width, same_tokens, work))
        return torch.stack(chosen)


def _runs(layout: TokenLayout) -> list[range]:
    """The local tokens in ranges that follow each other in the row."""
    runs, begin = [], 0
    for part in layout.split.held(layout.tokens):
        runs.append(range(begin, begin + len(part)))
        begin += len(part)
    return runs


def _cut(parts: Sequence[range], runs: Sequence[range]) -> list[range]:
    """Ranges, cut where runs end."""
    cut = (range(max(p.start, r.start), min(p.stop, r.stop)) for p in parts for r in runs)
    return [piece for piece in cut if piece]


def expanded(pools: torch.Tensor, places: torch.Tensor, begins: torch.Tensor, k: int) -> torch.Tensor:
    """Selected pools as tokens: each pool's k, then the query's own incomplete pool.

    Args:
        pools: [c, K] int32, first tokens or -1.
        places, begins: [c] int64, each query's place in the row and its document's first.

    Returns:
        [c, K k + k - 1] int64, -1 where there is none: transformers' `topk_indices`, in another order.
    """
    slots = torch.arange(k, device=pools.device)
    tokens = torch.where(pools[..., None] >= 0, pools[..., None] + slots, -1).flatten(1).long()
    count = (places + 1 - begins) % k
    tail = (places + 1 - count)[:, None] + slots[:-1]
    return torch.cat((tokens, tail.masked_fill(slots[:-1] >= count[:, None], -1)), dim=1)


class _Kept(threading.local):
    """Selections of the checkpointed call that runs now on this thread, and whether this is its first forward."""

    pools: list[torch.Tensor] | None = None
    first: bool = False


_kept = _Kept()


def selection_contexts():
    """Two context managers for one call of a checkpointed function, for its first forward and its recompute: the second takes
    the pools that the first selected, K * 4 bytes a token and layer, in place of scoring again.

    `checkpoint(f, x, use_reentrant=False, context_fn=selection_contexts)`, or `apply_checkpointing(model,
    contexts=selection_contexts)`. Without them a recompute selects again, the same pools.
    """
    pools: list[torch.Tensor] = []

    @contextmanager
    def during(first: bool):
        before = _kept.pools, _kept.first
        _kept.pools, _kept.first = pools, first
        try:
            yield
        finally:
            _kept.pools, _kept.first = before

    return during(True), during(False)


def kept_or(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The selection that the first forward of this checkpointed call made, or a new one."""
    if _kept.pools and not _kept.first:
        return _kept.pools.pop(0)
    made = make()
    if _kept.first:
        _kept.pools.append(made)
    return made
