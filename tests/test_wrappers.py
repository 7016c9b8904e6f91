"""UPipe without DeepSpeed's engine: DistributedDataParallel, fully_shard (FSDP2), and q/k/v handed over."""

import pytest
import torch
import torch.distributed as dist

from tests.plain import assert_close, plain_step, tiny_model
from tests.sharded import ds_config, gradients
from upipe import reference

SP, ACCUMULATION = 2, 2


def _data(world, rows=2, tokens=21):
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 60, (world // SP, ACCUMULATION, rows, tokens), generator=g)
    labels = ids.clone()
    for dp in range(ids.shape[0]):
        labels[dp, 0, 0, : 3 + 5 * dp] = -100
    return ids, labels


def _reference(model, ids, labels):
    total, count = 0.0, int((labels[..., 1:] != -100).sum())
    for row, target in zip(ids.flatten(0, 2), labels.flatten(0, 2)):
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, target[1:], ignore_index=-100, reduction="sum")
    (total / count).backward()
    return float(total) / count, {name: p.grad.clone() for name, p in model.named_parameters()}


def _wrap(kind, model):
    from torch.distributed.fsdp import fully_shard

    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=kind == "fsdp2")
    return fully_shard(model)


def _train_step(kind, checkpointing, model_kind, heads, kv_heads, ring_degree=1):
    import upipe

    world = dist.get_world_size()
    ids, labels = _data(world)
    loss, grads = _reference(tiny_model(model_kind, heads, kv_heads), ids, labels)
    model = tiny_model(model_kind, heads, kv_heads)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=SP, ring_degree=ring_degree))
    wrapped = _wrap(kind, model)
    micro = [{"input_ids": i, "labels": t} for i, t in zip(ids[handle.dp_rank], labels[handle.dp_rank])]
    total = 0.0
    for batch in handle.shard(micro, accumulation=ACCUMULATION):
        value = handle.loss(wrapped, batch)
        (value / ACCUMULATION).backward()
        total += float(value.detach()) / ACCUMULATION
    assert abs(total - loss) <= 1e-5 * abs(loss), (total, loss)
    for name, p in model.named_parameters():
        got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        assert_close(name, got, grads[name], 1e-5)
    handle.remove()


@pytest.mark.parametrize("model_kind,heads,kv_heads", [("qwen3", 6, 2), ("qwen2", 5, 5)])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2-kept"])
def test_gradients_are_the_unsharded_models(worlds, kind, checkpointing, model_kind, heads, kv_heads):
    worlds(4).run(_train_step, kind=kind, checkpointing=checkpointing, model_kind=model_kind, heads=heads, kv_heads=kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradients_on_a_ring(worlds, kind):
    worlds(4).run(_train_step, kind=kind, checkpointing=True, model_kind="qwen3", heads=6, kv_heads=2, ring_degree=2)


def _shard_single_projections():
    from torch.distributed.fsdp import fully_shard

    import upipe

    model = tiny_model("llama", 4, 2)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2))
    for layer in model.model.layers:
        fully_shard(layer.self_attn.q_proj)
    with pytest.raises(upipe.PreflightError, match="each decoder layer"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    handle.remove()


def _group_too_small():
    import upipe

    model = tiny_model("llama", 4, 2)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=handle.sp_group)
    (batch,) = handle.shard([{"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.ones(1, 4, dtype=torch.long)}])
    with pytest.raises(upipe.PreflightError, match="over 2 ranks"):
        handle.loss(wrapped, batch)
    handle.remove()


def test_wrong_wrapping_is_refused(worlds):
    worlds(4).run(_shard_single_projections)
    worlds(4).run(_group_too_small)


def _of_shared_mlp(kind, offload):
    import deepspeed

    import upipe
    from upipe.offload import CheckpointConfig, apply_checkpointing

    def model_of():
        model = tiny_model("llama", 4, 2)
        model.model.layers[1].mlp = model.model.layers[0].mlp
        return model

    ids, model = torch.arange(12)[None] % 50, model_of()
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2))
    parts = [handle, *([apply_checkpointing(model, CheckpointConfig(offload))] if offload else [])]
    (batch,) = handle.shard([{"input_ids": ids, "labels": ids}])
    if kind == "ddp":
        engine = torch.nn.parallel.DistributedDataParallel(model)
    else:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=ds_config(kind), mpu=handle.mpu
        )
    if offload is not None and kind in ("ddp", 2, 3):
        with pytest.raises(upipe.PreflightError, match=r"mlp.gate_proj.weight of .*layers.1 is that of .*layers.0 too.*non-reentrant"):
            handle.loss(engine, batch)
    else:
        loss = handle.loss(engine, batch)
        loss.backward() if kind == "ddp" else engine.backward(loss)
        plain = plain_step(model_of(), [[{"input_ids": ids, "labels": ids}]])
        got = gradients(engine) if kind != "ddp" else {name: p.grad for name, p in model.named_parameters()}
        for name, expected in plain.grads.items():
            assert_close(name, got[name], expected)
    if kind != "ddp":
        engine.destroy()
    for part in reversed(parts):
        part.remove()


@pytest.mark.parametrize("offload", [None, "none", "pinned"])
@pytest.mark.parametrize("kind", ["ddp", 1, 2, 3])
def test_T27_an_mlp_of_two_layers_is_exact_or_refused(worlds, kind, offload):
    """Layers of `upipe.offload` have a backward each, so its gradient comes twice, where DDP and ZeRO 2 and 3 take it once."""
    worlds(2).run(_of_shared_mlp, kind=kind, offload=offload)


def _handed_over(heads, kv_heads, width, batch_first, seed=0):
    from upipe.attention import UPipeDistributedAttention

    P, rank, B, L, d = dist.get_world_size(), dist.get_rank(), 2, 5, 4
    g = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn(B, P * L, n, d, generator=g, dtype=torch.float64) for n in (heads, kv_heads, kv_heads, heads)
    )
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    want, _ = reference.attention(*whole, 0.4)
    want.backward(grad)

    def local_attention(q, k, v):
        if batch_first:
            return reference.attention(q, k, v, 0.4)[0]
        return reference.attention(*(t.transpose(0, 1) for t in (q, k, v)), 0.4)[0].transpose(0, 1)

    part = slice(rank * L, rank * L + L)
    mine = [(t[:, part] if batch_first else t[:, part].transpose(0, 1)).clone().requires_grad_() for t in (q, k, v)]
    attention = UPipeDistributedAttention(local_attention, dist.group.WORLD, heads_per_stage=width)
    out = attention(*mine, 0 if batch_first else 1)
    out.backward(grad[:, part] if batch_first else grad[:, part].transpose(0, 1))
    for name, got, right in zip(("out", "dq", "dk", "dv"), (out, *(t.grad for t in mine)), (want, *(t.grad for t in whole))):
        assert_close(name, got if batch_first else got.transpose(0, 1), right[:, part], 1e-12)


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch-first", "tokens-first"])
@pytest.mark.parametrize("ranks,heads,kv_heads,width", [
    (2, 8, 2, 4), (4, 6, 2, None), (4, 7, 7, 8), (4, 5, 5, None), (4, 3, 3, 4), (1, 4, 2, 2)])
def test_q_k_v_handed_over(worlds, ranks, heads, kv_heads, width, batch_first):
    worlds(ranks).run(_handed_over, heads=heads, kv_heads=kv_heads, width=width, batch_first=batch_first)


def _handed_over_wrongly():
    from upipe import PreflightError
    from upipe.attention import UPipeDistributedAttention

    q, k = torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 2, 8)
    attention = UPipeDistributedAttention(lambda q, k, v: (q, None), dist.group.WORLD)
    for arguments, says in (((q, k, k[:, :, :1]), "key and value alike"), ((q[0], k, k), "4-D"), ((q, k, k), "returned tuple")):
        with pytest.raises(PreflightError, match=says):
            attention(*arguments, 0)


def test_q_k_v_that_do_not_fit_are_refused(worlds):
    worlds(1).run(_handed_over_wrongly)
