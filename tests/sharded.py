"""The sharded side of every comparison, on the ranks of a world: upipe under DeepSpeed, and what is read off it."""

from contextlib import contextmanager

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

import upipe
from tests.plain import assert_close, data_of, plain_step, tiny_model
from upipe.block import checkpoint_contexts
from upipe.layer import FusedLayersConfig, apply_fused_layers, layer_contexts
from upipe.methods import apply_method
from upipe.offload import CheckpointConfig, apply_checkpointing

OWN_CHECKPOINTING = ("attention output on the host", "fused layers", "fused layers, host")


def ds_config(stage, accumulation=1, clip=0.0, bf16=False, **zero):
    """A DeepSpeed configuration; `zero` adds to zero_optimization."""
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation, "gradient_clipping": clip,
              "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
              "zero_optimization": {"stage": stage, **zero}}
    if stage == 3:
        config["zero_optimization"].setdefault("stage3_param_persistence_threshold", 0)
    if bf16:
        config["bf16"] = {"enabled": True}
    return config


@contextmanager
def sharded(model, sp_size, stage=0, heads_per_stage=None, accumulation=1, checkpointing=None, lr=0.1, config=None, kernel="auto",
            ring_degree=1, method="upipe", **settings):
    """(handle, engine) of a plain model, taken down at the end. checkpointing: None, "non-reentrant" or "reentrant"; or the
    library's own, with the "attention output on the host", "fused layers" or "fused layers, host". settings: others of UPipeConfig."""
    config = config or ds_config(stage, accumulation)
    own, output = checkpointing in OWN_CHECKPOINTING, "host" if "host" in (checkpointing or "") else "device"
    handle = apply_method(model, method, upipe.UPipeConfig(sp_size=sp_size, heads_per_stage=heads_per_stage, kernel=kernel,
                                                           ring_degree=ring_degree, attention_output=output, **settings), ds_config=config)
    parts = [handle]
    if own and "fused" in checkpointing:
        parts.append(apply_fused_layers(model, handle, FusedLayersConfig(mlp_tokens=4)))
    if own:
        contexts = layer_contexts if len(parts) == 2 else checkpoint_contexts
        parts.append(apply_checkpointing(model, CheckpointConfig("none"), contexts=contexts))
    elif checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), config=config,
                                      mpu=handle.mpu)
    engine.train()
    yield handle, engine
    engine.destroy()
    for part in reversed(parts):
        part.remove()


def gradients(engine):
    """Every parameter's whole gradient, on every rank; to be read after the last backward of a window, before step."""
    grads = {}
    for name, p in engine.module.named_parameters():
        grad = safe_get_full_grad(p)
        assert grad is not None, f"{name} has no gradient"
        grads[name] = grad.detach().clone()
    return grads


def parameters(engine):
    """Every parameter's whole fp32 value, on every rank."""
    values = {}
    for name, p in engine.module.named_parameters():
        value = safe_get_full_fp32_param(p) if engine.zero_optimization_stage() > 0 else p
        values[name] = value.detach().clone()
    return values


def gathered(local, group, dim=1):
    """The shards of a group's ranks put together along `dim`."""
    if dist.get_world_size(group) == 1:
        return local
    shards = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, local.contiguous(), group=group)
    return torch.cat(shards, dim)


def sharded_logits(handle, engine, batch):
    """[B, S padded, V] logits of the sequence-parallel group's batch, from a forward without gradients."""
    with torch.no_grad():
        local = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return handle.gather(local)


def window(handle, engine, batches, accumulation=None, step=False):
    """Forward and backward over one accumulation window. Returns (mean of the losses, gradients).

    step: let the optimizer step at the end of the window; the gradients are read before it.
    """
    losses, grads = [], None
    accumulation = accumulation or len(batches)
    for i, batch in enumerate(handle.shard(batches, accumulation=accumulation)):
        loss = handle.loss(engine, batch)
        losses.append(loss.item())
        engine.backward(loss)
        last = i + 1 == accumulation
        if last:
            grads = gradients(engine)
        if step or not last:
            engine.step()
    assert len(losses) == accumulation
    return sum(losses) / len(losses), grads


def assert_equal_to_plain(handle, engine, plain, data, tolerance=1e-5, logits=True, step=False):
    """Loss, logits and every gradient of one window of `data[dp rank][micro-batch]` against `plain`."""
    mine = data[handle.dp_rank]
    if logits:
        for micro, batch in enumerate(handle.shard(mine, accumulation=len(mine))):
            got = sharded_logits(handle, engine, batch)
            expected = plain.logits[handle.dp_rank][micro]
            real = mine[micro].get("attention_mask")
            real = torch.ones(expected.shape[:2], dtype=torch.bool) if real is None else real.bool()
            assert_close(f"logits of micro-batch {micro}", got[:, : expected.shape[1]][real], expected[real], tolerance)
    loss, grads = window(handle, engine, mine, step=step)
    assert abs(loss - plain.loss) <= tolerance * abs(plain.loss), f"loss {loss} and plain {plain.loss}"
    assert set(grads) == set(plain.grads)
    for name, expected in plain.grads.items():
        assert_close(f"gradient of {name}", grads[name], expected, tolerance)
    return loss, grads


def compare(make_model, data, sp_size, plain=None, tolerance=1e-5, logits=True, **options):
    """A whole case: `make_model()` plain and sharded on `data[dp rank][micro-batch]`, equal within the tolerance.

    plain: the plain side where it was computed before. Returns (loss, gradients).
    """
    plain = plain or plain_step(make_model(), data)
    with sharded(make_model(), sp_size, accumulation=len(data[0]), **options) as (handle, engine):
        return assert_equal_to_plain(handle, engine, plain, data, tolerance, logits=logits)


def check_tiny(kind, heads, kv_heads, sp_size, sequence="odd", accumulation=1, data=None, plain=None, attn="eager", model=None,
               **options):
    """`compare` of a tiny model, on every rank of a world. model: more of its configuration."""
    data = data or data_of(sequence, dist.get_world_size() // sp_size, accumulation)
    compare(lambda: tiny_model(kind, heads, kv_heads, attn=attn, **(model or {})), data, sp_size, plain, **options)
