"""The indexer and sparse attention on one rank: selections row by row and values against transformers' dense modules, for
chunks that do not divide and packed documents; ties; what is refused; memory."""

import copy
import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.models.glm5_next import modeling_glm5_next as hf

from tests.glm import SPARSE, hf_selection, randomise, relative, tiny_config, tokens_of
from upipe.glm import GlmRuntime, GlmSettings, TokenLayout, TokenSplit, selection_contexts, sparse
from upipe.glm import indexer as indexing
from upipe.glm.context import check_int32
from upipe.glm.model import replace_modules
from upipe.preflight import PreflightError

TOKENS = 93
STARTS = (0, 2, 40, 41, TOKENS)      # two documents shorter than a pool


def attention(**settings):
    """transformers' attention, its copy with ours in its place, and an input; index_topk is 16 of 93 tokens."""
    config = tiny_config()
    config._attn_implementation = "eager"
    plain = randomise(hf.Glm5NextTextAttention(config, 3))
    ours = copy.deepcopy(plain)
    replace_modules(ours, GlmRuntime(GlmSettings(**settings)))
    x = torch.randn(2, TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(1))
    return plain, ours, x


def positions(starts):
    return torch.cat([torch.arange(b - a) for a, b in zip(starts, starts[1:])])[None]


def layout_of(starts=None):
    return TokenLayout(TokenSplit(), None if starts is None else positions(starts), TOKENS)


def values(module, x, call):
    """Output, and gradients of the input and of every parameter that has one, for a fixed loss."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = call(x)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return {"out": out, "x": x.grad, **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}


def plain_call(plain, starts=None):
    bounds = starts or (0, TOKENS)

    def call(x):
        parts = [x[:, a:b] for a, b in zip(bounds, bounds[1:])]
        return torch.cat([plain(part, torch.ones(part.shape[:2], dtype=torch.bool))[0] for part in parts], 1)

    return call


def assert_alike(got, expected, tolerance=1e-5):
    assert set(got) == set(expected)
    for name in expected:
        assert relative(got[name], expected[name]) <= tolerance, (name, relative(got[name], expected[name]))


@pytest.mark.parametrize("starts", [None, STARTS])
def test_attention_equals_transformers(starts):
    plain, ours, x = attention()
    expected = values(plain, x, plain_call(plain, starts))
    for gather_bytes in (1 << 28, 7 * 4 * 19 * 16, 1):       # all queries at once, 7 of 93, one
        ours.runtime.settings = GlmSettings(gather_bytes=gather_bytes)
        assert_alike(values(ours, x, lambda x: ours(x, layout=layout_of(starts))[0]), expected)
    assert not any(name.startswith("indexer") for name in expected)


@pytest.mark.parametrize("starts", [None, STARTS])
@pytest.mark.parametrize("score_bytes", [1 << 31, 7 * 4 * 32 * 23, 1])
def test_selection_equals_transformers_row_by_row(starts, score_bytes):
    plain, ours, x = attention()
    q_resid = torch.randn(2, TOKENS, 24, generator=torch.Generator().manual_seed(3))
    layout = layout_of(starts)
    pools = ours.indexer(x, q_resid, layout, score_bytes)
    assert pools.dtype == torch.int32
    expected = hf_selection(plain.indexer, x, q_resid, starts)
    for b in range(2):
        assert tokens_of(pools[b], layout.places, layout.begins(b), 4) == expected[b]
        listed = indexing.expanded(pools[b], layout.places, layout.begins(b), 4)
        assert [sorted(t for t in row if t >= 0) for row in listed.tolist()] == [sorted(row) for row in expected[b]]
    if starts is None:
        assert any(len(row) < place + 1 for place, row in enumerate(expected[0])), "nothing was left out: the test sees no selection"


def test_selection_of_pools_of_other_sizes():
    for k, topk in ((1, 8), (3, 12), (16, 32)):
        plain = randomise(hf.Glm5NextTextIndexer(tiny_config(index_kpool=k, index_topk=topk), 3))
        ours = copy.deepcopy(plain)
        replace_modules(ours, GlmRuntime())
        x, q_resid = torch.randn(1, TOKENS, 64), torch.randn(1, TOKENS, 24)
        layout = layout_of()
        pools = ours(x, q_resid, layout, 1 << 31)
        assert tokens_of(pools[0], layout.places, layout.begins(0), k) == hf_selection(plain, x, q_resid)[0]


@pytest.mark.slow
def test_at_the_published_selection():
    """2,048 tokens a query out of 2,700."""
    config = tiny_config(index_topk=2048)
    config._attn_implementation = "eager"
    plain = randomise(hf.Glm5NextTextAttention(config, 3))
    ours = copy.deepcopy(plain)
    replace_modules(ours, GlmRuntime(GlmSettings(gather_bytes=1 << 25, score_bytes=1 << 25)))
    tokens = 2700
    x = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(1))
    layout = TokenLayout(TokenSplit(), None, tokens)
    mask = torch.ones(1, tokens, dtype=torch.bool)
    q_resid = torch.randn(1, tokens, 24, generator=torch.Generator().manual_seed(3))
    pools = ours.indexer(x, q_resid, layout, 1 << 25)
    expected = hf_selection(plain.indexer, x, q_resid)[0]
    assert tokens_of(pools[0], layout.places, layout.begins(0), 4) == expected
    assert max(map(len, expected)) == 2051
    assert_alike(values(ours, x, lambda x: ours(x, layout=layout)[0]), values(plain, x, lambda x: plain(x, mask)[0]))


def test_of_equal_scores_the_earlier_pool_is_taken():
    scores = torch.tensor([[0.0, 2.0, -0.0, 2.0, 0.0, 9.0], [-1.0, -1.0, -3.0, -1.0, -2.0, 9.0], [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]])
    low, high = torch.tensor([0, 0, 1]), torch.tensor([5, 5, 3])
    best = indexing.best_pools(scores, low, high, 3)
    assert best.tolist() == [[0, 1, 3], [0, 1, 3], [1, 2, -1]]
    g = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (50, 40), generator=g).float()
    high = torch.randint(0, 41, (50,), generator=g)
    best = indexing.best_pools(scores, torch.zeros_like(high), high, 12)
    for row, end, got in zip(scores.tolist(), high.tolist(), best.tolist()):
        wanted = sorted(sorted(range(end), key=lambda p: (-row[p], p))[:12])
        assert got == wanted + [-1] * (12 - len(wanted))


def test_gate_scores_must_be_of_the_same_tokens_as_keys():
    with pytest.raises(ValueError, match=r"index keys \(8, 4\) and gate scores \(4, 4\)"):
        indexing.pooled_keys(torch.zeros(8, 4), torch.zeros(4, 4), torch.zeros(2, 4), torch.tensor([0, 2]))


class Tokens(TokenSplit):
    """A split whose row is as long as told, without tensors of that length."""

    def check(self, local):
        return local


def test_more_tokens_than_int32_counts_are_refused():
    check_int32(2**31 - 1)
    assert TokenLayout(Tokens(), None, 2**31 - 1).tokens == 2**31 - 1
    with pytest.raises(PreflightError, match="a row of 2147483648 tokens: .* at most 2147483647"):
        TokenLayout(Tokens(), None, 2**31)


class Declining(sparse.GatherKernel):
    name = "declining"

    def declines(self, case):
        return f"{case.width} tokens a query"


def test_a_declined_shape_is_an_error_unless_dense_is_allowed(monkeypatch, caplog):
    monkeypatch.setattr(sparse, "KERNELS", {"declining": Declining()})
    plain, ours, x = attention()
    with pytest.raises(PreflightError, match="no sparse kernel takes.*declining declines it .19 tokens a query.*allow_dense=True"):
        ours(x, layout=layout_of())
    ours.runtime.settings = GlmSettings(allow_dense=True, gather_bytes=7 * 4 * TOKENS * 4)
    with caplog.at_level(logging.INFO, "upipe"):
        got = values(ours, x, lambda x: ours(x, layout=layout_of())[0])
        ours(x, layout=layout_of())
    assert_alike(got, values(plain, x, plain_call(plain)))
    lines = [r.getMessage() for r in caplog.records]
    assert lines == [f"{SPARSE}: DENSE over {TOKENS} keys: declining declines it (19 tokens a query)"]
    with pytest.raises(PreflightError, match="kernel='flash': use auto, declining"):
        sparse.choose(GlmSettings(kernel="flash"), None)


def test_what_is_refused():
    _, ours, x = attention()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PreflightError, match="autocast"):
        ours(x, layout=layout_of())
    ours.o_proj = torch.nn.Sequential(ours.o_proj)
    with pytest.raises(PreflightError, match="o_proj of a SparseAttention is a Sequential, not a plain Linear"):
        ours(x, layout=layout_of())
    with pytest.raises(ValueError, match="gather_bytes=0 must be a positive integer"):
        GlmSettings(gather_bytes=0)
    with pytest.raises(PreflightError, match="pad rows to a multiple of 4 tokens"):
        TokenLayout(TokenSplit(None, 2, 1, 0), None, 3)


@pytest.mark.parametrize("contexts", [True, False])
def test_recompute_is_bit_equal_and_keeps_the_selection(monkeypatch, contexts):
    _, ours, x = attention(gather_bytes=7 * 4 * 19 * 16)
    expected = values(ours, x, lambda x: ours(x, layout=layout_of())[0])
    calls = []
    select = indexing.select
    monkeypatch.setattr(indexing, "select", lambda *a: calls.append(1) or select(*a))
    extra = {"context_fn": selection_contexts} if contexts else {}

    def twice(x):
        both = [checkpoint(lambda x, f=f: ours(f * x, layout=layout_of())[0], x, use_reentrant=False, **extra) for f in (1.0, 0.5)]
        return both[0] + 0 * both[1]

    got = values(ours, x, twice)
    # Two checkpointed calls of two rows, and the recompute of each again where its selection was not kept.
    assert len(calls) == (4 if contexts else 8)
    assert set(got) == set(expected) and all(torch.equal(got[name], expected[name]) for name in got)


class Largest(TorchDispatchMode):
    """The most elements of any tensor made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return out


def test_no_tensor_grows_with_the_square_of_the_length():
    largest = []
    for tokens in (512, 1024):
        _, ours, _ = attention(gather_bytes=1 << 14, score_bytes=1 << 14)
        x = torch.randn(1, tokens, 64, requires_grad=True)
        with Largest() as seen:
            ours(x, layout=TokenLayout(TokenSplit(), None, tokens))[0].sum().backward()
        largest.append(seen.elements)
    # Index queries are the widest: 32 heads of 8 channels a token.
    assert largest == [512 * 256, 1024 * 256]


def test_a_sharing_layer_takes_the_selection_of_the_one_before():
    config = tiny_config(every_layer_indexed=True, indexer_types=["full", "shared"] * 4)
    config._attn_implementation = "eager"
    plain = [randomise(hf.Glm5NextTextAttention(config, i), i) for i in (2, 3)]
    ours = copy.deepcopy(plain)
    for module in ours:
        replace_modules(module, GlmRuntime())
    x = torch.randn(1, TOKENS, 64)
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    expected = plain[1](x, mask, prev_topk_indices=plain[0](x, mask)[2])[0]
    pools = ours[0](x, layout=layout_of())[2]
    assert relative(ours[1](x, layout=layout_of(), prev_topk_indices=pools)[0], expected) <= 1e-5
    with pytest.raises(ValueError, match="layer 3 shares the selection"):
        ours[1](x, layout=layout_of())
