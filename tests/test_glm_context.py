"""The whole model over ranks: rows split zigzag against the same model on one rank, both kinds of attention, dense layers and experts,
packed documents, selections exactly, shared rows of the indexer, recompute, under DeepSpeed; chunks and tiles that do not divide."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import upipe
from tests.glm import SPARSE, randomise, relative, tiny_config
from tests.sharded import ds_config
from upipe.comm import SequenceParallelGroups
from upipe.glm import Glm5NextForCausalLM, GlmRuntime, GlmSettings, TokenLayout, TokenSplit, selection_contexts
from upipe.glm import indexer as indexing
from upipe.glm.kda import KDAConfig
from upipe.glm.model import LEAVES
from upipe.glm.moe import MoEConfig
from upipe.loss import global_loss, gradient_scale
from upipe.offload import apply_checkpointing
from upipe.preflight import PreflightError

TOKENS = 96
SMALL = GlmSettings(
    gather_bytes=5 * 4 * 19 * 16, score_bytes=7 * 4 * 32 * 24, loss_tile_tokens=11, kda=KDAConfig(heads_per_group=3, tile_tokens=7),
    moe=MoEConfig(13), hyper_tile_tokens=17,
)
PACKED = ((0, 1, 30, 37, TOKENS), (0, 50, 52, 71, TOKENS))


def positions_of(documents):
    return torch.stack([torch.cat([torch.arange(b - a) for a, b in zip(row, row[1:])]) for row in documents])


def batch_of(packed):
    ids = torch.randint(0, 61, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    labels[:, 40:44] = -100
    return ids, positions_of(PACKED if packed else ((0, TOKENS),)), labels


def run(model, runtime, batch, checkpointed=False):
    """Loss over all tokens, logits and selections of all tokens in order, and gradients summed over the ranks."""
    model.use(runtime)
    model.zero_grad()
    chosen = []
    indexers = [module for module in model.modules() if isinstance(module, indexing.PooledIndexer)]
    hooks = [indexer.register_forward_hook(lambda _, __, pools: chosen.append(pools)) for indexer in indexers]
    ids, positions, labels = (runtime.split.take(t) for t in batch)
    logits = model(ids, positions).logits
    for hook in hooks:
        hook.remove()
    handle = apply_checkpointing(model, contexts=selection_contexts) if checkpointed else None
    loss = model(ids, positions, shift_labels=labels).loss
    loss.backward()
    if handle is not None:
        handle.remove()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    whole = runtime.split.gathered(logits.detach())
    chosen = [runtime.split.gathered(pools) for pools in chosen]
    loss = loss.detach().clone()
    if runtime.split.size > 1:
        for t in (loss, *grads.values()):
            dist.all_reduce(t, group=runtime.split.group)
    return {"loss": loss, "logits": whole, **grads}, chosen


def hybrid(layers=2, seed=0):
    """Linear and sparse attention, dense MLPs and experts; with 2 layers one of each, otherwise every fourth is sparse. The same values
    in every process."""
    kinds = {"layer_types": ["linear_attention", SPARSE]} if layers == 2 else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return randomise(Glm5NextForCausalLM(tiny_config(layers, mlp_layer_types=["dense", "sparse"] * (layers // 2), **kinds)), seed)


def assert_same(got, expected, exact, gradients=1e-5):
    """exact: results in fp64, each within 1e-10. In fp32 loss and logits within 1e-5; the gradient as a whole and of each parameter within
    `gradients`."""
    assert set(got) == set(expected)
    errors = {name: relative(got[name], want) for name, want in expected.items()}
    if exact:
        assert max(errors.values()) <= 1e-10, errors
        return
    grads = [name for name in expected if name not in ("loss", "logits")]
    joined = [torch.cat([side[name].flatten() for name in grads]) for side in (got, expected)]
    assert relative(*joined) <= gradients and max(errors.values()) <= gradients, (relative(*joined), errors)
    assert all(errors[name] <= 1e-5 for name in errors if name not in grads), errors


def check(splits, packings=(False, True), model=None, gradients=1e-5):
    """On every rank: each split's loss, logits and gradients against one rank's, and the last one's with recompute."""
    model = model or hybrid()
    exact = model.dtype == torch.float64
    for packed in packings:
        batch = batch_of(packed)
        expected, pools = run(model, GlmRuntime(SMALL), batch)
        for split, same_tokens in splits:
            got, chosen = run(model, GlmRuntime(SMALL, split, same_tokens), batch)
            assert len(chosen) == len(pools) and all(torch.equal(a, b) for a, b in zip(chosen, pools))
            assert_same(got, expected, exact, gradients)
        again, _ = run(model, GlmRuntime(SMALL, split, same_tokens), batch, checkpointed=True)
        assert all(torch.equal(again[name], got[name]) for name in got)


def on_two_ranks():
    check([(TokenSplit.of(None, ulysses=2), None), (TokenSplit.of(None), None)], model=hybrid().double())
    check([(TokenSplit.of(None), None)], packings=(True,))
    check([(TokenSplit(), dist.group.WORLD)], packings=(True,))


def four_rank_splits():
    pairs = [[dist.new_group(ranks) for ranks in both] for both in (((0, 1), (2, 3)), ((0, 2), (1, 3)))]
    rank = dist.get_rank()
    halves = TokenSplit.of(pairs[0][rank // 2]), pairs[1][rank % 2]
    return [halves, (TokenSplit.of(None, ulysses=2), None), (TokenSplit.of(None), None)]


def on_four_ranks():
    check(four_rank_splits(), packings=(True,), model=hybrid().double())


def eight_layers_on_four_ranks():
    check(four_rank_splits(), model=hybrid(8).double())
    check(four_rank_splits(), model=hybrid(8), gradients=1e-4)


def short_rows():
    """As few tokens as ranks can share, documents of one token, other rows than a rank has queries: selections and values."""
    model, ranks = hybrid().double(), dist.get_world_size()
    everyone = [(TokenSplit.of(None), None), (TokenSplit.of(None, ulysses=ranks), None), (TokenSplit(), dist.group.WORLD)]
    for starts in ((0, 2 * ranks), tuple(range(2 * ranks + 1)), (0, 1, 2, 3, 5, 9, 40)):
        ids = torch.randint(0, 61, (2, starts[-1]), generator=torch.Generator().manual_seed(1))
        batch = ids, positions_of((starts,)), ids.roll(-1, 1)
        expected, pools = run(model, GlmRuntime(SMALL), batch)
        for split, same_tokens in everyone:
            got, chosen = run(model, GlmRuntime(SMALL, split, same_tokens), batch)
            assert all(torch.equal(a, b) for a, b in zip(chosen, pools))
            # A query of one key has no gradient but rounding's.
            assert all(relative(got[n], e) <= 1e-10 or (got[n] - e).norm() <= 1e-10 for n, e in expected.items())


def shards_in_another_order():
    ids, n = batch_of(False)[0], TOKENS // dist.get_world_size()
    mine = slice(dist.get_rank() * n, (dist.get_rank() + 1) * n)
    model = hybrid()
    model.use(GlmRuntime(SMALL, TokenSplit.of(None)))
    with pytest.raises(PreflightError, match="position_ids of row 0 jump to 48 at token 24, where a run of the ring begins"):
        model(ids[:, mine], torch.arange(TOKENS)[None, mine])


def uneven_shards():
    with pytest.raises(ValueError, match="were given shards of .*all must be alike"):
        TokenLayout(TokenSplit.of(None), torch.arange(4 + 2 * dist.get_rank())[None])


@pytest.mark.slow
def test_two_ranks_equal_one(worlds):
    worlds(2).run(on_two_ranks, timeout=600.0)


def test_four_ranks_equal_one(worlds):
    worlds(4).run(on_four_ranks)


@pytest.mark.slow
def test_eight_layers_on_four_ranks_equal_one(worlds):
    worlds(4).run(eight_layers_on_four_ranks, timeout=900.0)


def under_deepspeed(stage):
    """One step of two ranks that share rows, under DeepSpeed, against one rank's gradients of the mean token loss."""
    model = hybrid()
    batch = batch_of(True)
    expected, _ = run(model, GlmRuntime(SMALL), batch)
    valid = (batch[2] != -100).sum()
    groups = SequenceParallelGroups(2)
    split = TokenSplit.of(groups.sp_group)
    model.use(GlmRuntime(SMALL, split))
    model.zero_grad()
    set_z3_leaf_modules(model, list(LEAVES))
    apply_checkpointing(model, contexts=selection_contexts)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=0.0), config=ds_config(stage), mpu=groups)
    engine.train()
    for _ in range(2):      # the second step runs on ZeRO-3's trace of the first
        ids, positions, labels = (split.take(t) for t in batch)
        loss = global_loss(engine(ids, positions, shift_labels=labels).loss, valid, 1, gradient_scale(engine), groups.sp_group)
        engine.backward(loss)
        grads = {n: safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad}
        engine.step()
        grads["loss"] = loss.detach() * valid
        frozen = [name for name in grads if name not in expected]
        assert not any(grads.pop(name).any() for name in frozen)
        assert_same({n: g if n == "loss" else g * valid for n, g in grads.items()}, {n: expected[n] for n in grads}, exact=False)
    engine.destroy()
    groups.destroy()


def under_wrappers():
    """DistributedDataParallel and fully_shard around a model whose rows are shared, as put on by `upipe.apply`; plain after remove()."""
    ids = batch_of(False)[0]
    plain = hybrid().double()
    plain(ids, labels=ids).loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for wrap in (DistributedDataParallel, lambda model: [fully_shard(part) for part in (*model.model.layers, model)][-1]):
        model = hybrid().double()
        handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2, ring_degree=2))
        wrapped = wrap(model)
        (batch,) = handle.shard([{"input_ids": ids, "labels": ids}])
        handle.loss(wrapped, batch).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert set(grads) == set(expected)
        for name, grad in grads.items():
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            assert relative(grad, expected[name]) <= 1e-10, name
        if isinstance(wrapped, DistributedDataParallel):
            with pytest.raises(PreflightError, match="on this model already"):
                upipe.apply(model, upipe.UPipeConfig(sp_size=2))
            handle.remove()
            assert relative(model(ids).logits, plain(ids).logits) == 0


def test_two_ranks_equal_one_under_wrappers(worlds):
    worlds(2).run(under_wrappers)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_two_ranks_equal_one_under_deepspeed(worlds, stage):
    worlds(2).run(under_deepspeed, stage=stage)


def test_short_rows_and_documents_of_one_token(worlds):
    worlds(2).run(short_rows)


def test_uneven_shards_and_those_of_another_order_are_refused(worlds):
    worlds(2).run(uneven_shards)
    worlds(2).run(shards_in_another_order)


@pytest.mark.parametrize("rows", [1, 5, 8, 13])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_row_is_scored_by_one_rank(rows, ranks, monkeypatch):
    """`shared_out` without processes: the shares of all ranks, put together as `gathered` does."""
    monkeypatch.setattr(indexing.dist, "get_world_size", lambda group: ranks)
    done, shares = [], []

    def work(parts):
        mine = [i for part in parts for i in part]
        done.extend(mine)
        return torch.tensor([[i] for i in mine], dtype=torch.int32).view(-1, 1)

    class Split(TokenSplit):
        def gathered(self, local):
            shares.append(local)
            if self.rank < ranks - 1:
                return local.new_zeros(1, local.shape[1] * ranks, 1)
            whole = local.new_full((1, local.shape[1] * ranks, 1), -2)
            for rank, share in enumerate(shares):
                begin = 0
                for part in self.held(whole.shape[1], rank):
                    whole[:, part.start : part.stop] = share[:, begin : begin + len(part)]
                    begin += len(part)
            return whole

    for rank in range(ranks):
        monkeypatch.setattr(indexing.TokenSplit, "of", lambda group, rank=rank: Split(None, ranks, 1, rank))
        out = indexing.shared_out(rows, 1, "group", work)
    assert sorted(done) == list(range(rows)) and out[:, 0].tolist() == list(range(rows)) and out.dtype == torch.int32
