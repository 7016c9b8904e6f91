"""Sequence shards: which tokens of a sequence a sequence-parallel rank holds. Pure Python, no torch.

Symbols: S tokens of the sequence, P ranks, L local tokens. Shards are contiguous and of equal length: rank r holds
tokens [r*L, (r+1)*L) of a sequence padded at its end to P*L. Padding carries label -100 and the positions that follow,
so under causal attention no real token sees it.
"""

from __future__ import annotations


def local_length(tokens: int, ranks: int) -> int:
    """L: tokens a rank holds of a sequence of `tokens` tokens, padding included."""
    if tokens < 1 or ranks < 1:
        raise ValueError(f"a sequence of {tokens} tokens on {ranks} ranks: both must be at least 1")
    return -(-tokens // ranks)


def padding(tokens: int, ranks: int) -> int:
    """Tokens to add at the end so that every rank holds the same number."""
    return local_length(tokens, ranks) * ranks - tokens


def shard(tokens: int, ranks: int, rank: int) -> slice:
    """The slice of the padded sequence that `rank` holds."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks} ranks")
    length = local_length(tokens, ranks)
    return slice(rank * length, (rank + 1) * length)
