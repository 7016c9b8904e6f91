"""Markov models of a token stream, to hold a trained model's loss against: what counts of short contexts alone predict.

The model of order k gives token x after the context c of k tokens, of which s is the last k-1, the probability

    p_k(x | c) = (n(c x) + A p_{k-1}(x | s)) / (n(c) + A),        p_{-1} = 1 / A

with counts n of the training stream and A different tokens: add-one smoothing at order 0, and the shorter context as prior.
"""

from __future__ import annotations

import numpy as np

from upipe.config import ConfigError
from upipe.data import ChunkDataset

MOST_COUNTS = 2**26


def markov_losses(train: np.ndarray, held: ChunkDataset, orders: int, rows: int | None = None) -> dict[str, float]:
    """Mean loss in nats a token of the uniform model and of orders 0 to `orders`, on the tokens that a model is evaluated on: all
    but the first of each row.

    Args:
        train: 1-D integer tokens.
        held: rows of held-out tokens, one stream cut into chunks; rows: of which the first so many, None for all. Contexts reach
            over the beginning of a row into the one before, where the model's do not.

    Raises:
        ConfigError: so many different tokens that counts of that order are more than MOST_COUNTS.
    """
    stream = held.stream[: (len(held) if rows is None else min(rows, len(held))) * held.tokens]
    tokens, codes = np.unique(np.concatenate([train, stream]), return_inverse=True)
    A = len(tokens)
    if A ** (orders + 1) > MOST_COUNTS:
        raise ConfigError(f"data.markov_orders={orders} of {A} different tokens: use a smaller order")
    train, stream = np.split(codes.astype(np.int64), [len(train)])
    places = np.arange(len(stream))
    scored = places[(places % held.tokens > 0) & (places >= orders)]
    probability = np.full(len(scored), 1 / A)
    losses = {"uniform": float(np.log(A))}
    for k in range(orders + 1):
        counts = np.bincount(_grams(train, k, A), minlength=A ** (k + 1))
        gram = _grams(stream, k, A)[scored - k]
        context = counts.reshape(-1, A).sum(1)[gram // A]
        probability = (counts[gram] + A * probability) / (context + A)
        losses[f"order {k}"] = float(-np.log(probability).mean())
    return losses


def _grams(codes: np.ndarray, k: int, A: int) -> np.ndarray:
    """[N - k] each token with the k before it as one number in base A, the token its last digit."""
    length = max(0, len(codes) - k)
    number = np.zeros(length, dtype=np.int64)
    for i in range(k + 1):
        number = number * A + codes[i : i + length]
    return number
