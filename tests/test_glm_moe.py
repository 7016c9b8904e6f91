"""The mixture of experts in chunks against transformers', with experts whole and dealt out over ranks that have different numbers
of tokens; what it keeps; how ranks' shares are added; the load report."""


import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.glm_modules import assert_all_close, assert_all_equal, make, passes, random, replaced, summed
from tests.world import RankFailure, RankTimeout
from upipe import preflight
from upipe.glm import moe
from upipe.glm.moe import (
    ExpertLoad,
    MoEConfig,
    combine,
    combine_dtype,
    mixture_of_experts,
    nvls_possible,
    route,
    shard_experts,
)
from upipe.live import LiveStorages
from upipe.offload import apply_checkpointing
from upipe.preflight import PreflightError


@pytest.mark.parametrize("groups", [{}, {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}], ids=["plain", "grouped"])
def test_it_is_that_of_transformers_and_recompute_changes_no_bit(groups):
    module, x, w = make("MoE", **groups), random(2, 35, 32) * 3, random(2, 35, 32, seed=2)
    expected = passes(module, x, module, (w,))
    for tokens in (1, 16, 70, 1000):
        configs = [MoEConfig(tokens, recompute=recompute) for recompute in (True, False)]
        got = [passes(module, x, lambda t, config=config: mixture_of_experts(module, t, config), (w,)) for config in configs]
        assert_all_close(got[0], expected, 1e-5)
        assert_all_equal(*got)


TOKENS = {2: [(35, 35), (3, 40)], 4: [(40, 0, 7, 23)]}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def over_ranks(counts, chunk_tokens, same_number=True):
    """On every rank: its own tokens through its own experts, against all tokens through all experts on one rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if not same_number:
        moe.agree = lambda number, group, device: number
    x, w = random(sum(counts), 32) * 3, random(sum(counts), 32, seed=2)
    whole = make("MoE")
    expected = passes(whole, x, lambda t: mixture_of_experts(whole, t), (w,))
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    module = make("MoE")
    shard_experts(module, dist.group.WORLD)
    config = MoEConfig(chunk_tokens, dist.group.WORLD)
    got = passes(module, x[mine], lambda t: mixture_of_experts(module, t, config), (w[mine],))
    got |= summed({name: grad for name, grad in got.items() if name not in (*EXPERTS, "output 0", "dx")})
    held = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    expected |= {name: expected[name][held] for name in EXPERTS} | {name: expected[name][mine] for name in ("output 0", "dx")}
    if not counts[rank]:
        assert got.pop("output 0").shape == expected.pop("output 0").shape and got.pop("dx").shape == expected.pop("dx").shape
    assert_all_close(got, expected, 1e-5)
    with pytest.raises(PreflightError, match="experts.gate_up_proj and 1 more are experts dealt out.*ZeRO-3"):
        preflight.check_experts(module)
    preflight.check_experts(whole)
    with pytest.raises(PreflightError, match="dealt out already"):
        shard_experts(module, dist.group.WORLD)
    with pytest.raises(PreflightError, match="experts here.*the router knows 8"):
        mixture_of_experts(module, x)


@pytest.mark.parametrize("ranks", TOKENS)
def test_experts_over_ranks(worlds, ranks):
    for counts in TOKENS[ranks]:
        for chunk_tokens in (9, 1000):
            worlds(ranks).run(over_ranks, counts=counts, chunk_tokens=chunk_tokens)


def test_without_the_agreed_number_of_chunks_ranks_wait_for_ever(worlds):
    with pytest.raises((RankFailure, RankTimeout)):
        worlds(2).run(over_ranks, timeout=6.0, counts=(3, 40), chunk_tokens=9, same_number=False)


def steps(module, x, times=3, chunk_tokens=16):
    """Bytes alive beyond the output between forward and backward, and beyond gradients after it, of each step."""
    live = LiveStorages("cpu")
    live.know(x, *module.parameters(), *module.buffers())
    found = []
    with live:
        for _ in range(times):
            out = mixture_of_experts(module, x, MoEConfig(chunk_tokens))
            between = live.now - out.nbytes
            out.sum().backward()
            del out
            module.zero_grad()
            x.grad = None
            found.append((between, live.now))
    return found


def test_no_router_state_outlives_the_forward(monkeypatch):
    """Of all that a forward makes only k int32 a token live until backward, and nothing after it."""
    module, x = make("MoE"), random(70, 32).requires_grad_()
    chosen = 70 * 2 * 4
    assert steps(module, x) == [(chosen, 0)] * 3
    stale, real = [], moe.token_weights

    def leaking(scores, picked, router):  # as a dispatcher that keeps its probabilities
        stale.append(real(scores, picked, router))
        return stale[-1]

    monkeypatch.setattr(moe, "token_weights", leaking)
    found = steps(module, x)
    assert all(after > 0 for _, after in found) and found[-1][1] > found[0][1]


def shares(ranks, elements, seed=0):
    """[ranks, n] bf16 shares of one rank over five decades."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (torch.rand(elements, generator=generator) * 5 - 2.5)
    return (torch.randn(elements, generator=generator) * scale).bfloat16().view(ranks, -1, 64)


def bf16_is_fp32(elements, seed):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = torch.stack([shares(ranks, elements, seed + r) for r in range(ranks)])
    exact = everyone[:, rank].sum(0, dtype=torch.float32).bfloat16()
    assert combine_dtype(torch.bfloat16, ranks, nvls=False) == (torch.bfloat16 if ranks == 2 else torch.float32)
    assert torch.equal(combine(everyone[rank], dist.group.WORLD), exact)
    narrow = everyone[0, rank].clone()
    for share in everyone[1:, rank]:
        narrow += share
    assert torch.equal(narrow, exact) == (ranks == 2)  # why more than two ranks add in fp32


@pytest.mark.parametrize("ranks", [2, 4])
def test_combining_is_the_fp32_sum_rounded(worlds, ranks):
    worlds(ranks).run(bf16_is_fp32, elements=2**18, seed=0)


@pytest.mark.slow
def test_combining_two_ranks_in_bf16_is_the_fp32_sum_of_64m_elements(worlds):
    for part in range(16):
        worlds(2).run(bf16_is_fp32, elements=2**23, seed=10 * part)  # 2**22 of them on each rank


@pytest.mark.parametrize("environment, possible", [
    ({}, True), ({"NCCL_NVLS_ENABLE": "0"}, False), ({"NCCL_NVLS_ENABLE": "1"}, True), ({"NCCL_ALGO": "Ring"}, False),
    ({"NCCL_ALGO": "^NVLS"}, False), ({"NCCL_ALGO": "^Ring"}, True), ({"NCCL_ALGO": "Ring,NVLSTree"}, True),
    ({"NCCL_ALGO": "allreduce:nvls"}, True), ({"NCCL_ALGO": "reducescatter:ring;allreduce:nvls"}, False),
    ({"NCCL_ALGO": "ring;reducescatter:nvls"}, True), ({"NCCL_ALGO": "allreduce:nvls;ring"}, False),
])  # fmt: skip
def test_nvls(environment, possible):
    assert nvls_possible(environment) == possible
    assert combine_dtype(torch.bfloat16, 2, possible) == (torch.float32 if possible else torch.bfloat16)


class Layer(nn.Module):
    def __init__(self, load):
        super().__init__()
        self.mlp, self.load = replaced(make("MoE"), moe=MoEConfig(16)), load
        self.mlp.runtime.load, self.mlp.layer = load, 3

    def forward(self, x):
        return x + self.mlp(x)


def test_load_of_each_expert():
    """Counted once a token and layer, also where a checkpointed layer runs twice; the choice is transformers'."""
    layer = Layer(ExpertLoad())
    x = random(1, 70, 32) * 3
    expected = layer.mlp.gate(x)[2].flatten().bincount(minlength=8)
    handle = apply_checkpointing(nn.Sequential(layer), layers=[layer])
    for _ in range(2):
        layer(x).sum().backward()
    handle.remove()
    counts = layer.load.total()
    assert list(counts) == [3] and torch.equal(counts[3], 2 * expected)
    text, busiest = layer.load.report(ranks=4), int(expected.argmax())
    assert f"layer 3: 280 choices; busiest expert {busiest} has {8 * int(expected.max()) / 140:.2f}x the mean" in text and "4 ranks" in text
    assert "ranks" not in layer.load.report()
    with pytest.raises(ValueError, match="ranks=3 does not divide 8 experts"):
        layer.load.report(ranks=3)
    layer.load.reset()
    layer.eval()(x)
    assert layer.load.report() == ""


def uneven_experts_are_refused():
    with pytest.raises(PreflightError, match="6 experts on 4 ranks.*use 1, 2, 3, 6 ranks"):
        shard_experts(make("MoE", n_routed_experts=6), dist.group.WORLD)


def test_refusals(worlds):
    worlds(4).run(uneven_experts_are_refused)
    for bad in (0, True, 1.5):
        with pytest.raises(ValueError, match=f"chunk_tokens={bad}"):
            MoEConfig(bad)


def test_the_choice_is_not_differentiated():
    module = make("MoE")
    scores, chosen = route(random(5, 32), module.gate.weight, module.gate, module.gate.e_score_correction_bias)
    assert scores.requires_grad and not chosen.dtype.is_floating_point
