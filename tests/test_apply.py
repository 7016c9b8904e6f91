"""What a handle keeps between steps does not go stale."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.plain import assert_close, plain_step, tiny_model
from tests.sharded import gathered
from tests.world import RankFailure


def _positions_changed_in_place():
    import upipe

    model = tiny_model("llama", 4, 2)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=dist.get_world_size()))
    L = 6
    part = slice(handle.sp_rank * L, handle.sp_rank * L + L)
    ids = (torch.arange(2 * L)[None] * 7 % 50)[:, part]
    one = torch.arange(2 * L)[None]
    packed = torch.cat([torch.arange(5), torch.arange(2 * L - 5)])[None]

    def logits(positions):
        with torch.no_grad():
            return gathered(model(input_ids=ids, position_ids=positions).logits, handle.sp_group)

    want_one, want_packed = logits(one[:, part].clone()), logits(packed[:, part].clone())
    assert not torch.allclose(want_one, want_packed, atol=1e-3)
    buffer = one[:, part].clone()
    first = logits(buffer)
    buffer.copy_(packed[:, part])
    second = logits(buffer)
    handle.remove()
    return torch.equal(first, want_one) and torch.equal(second, want_packed)


def test_a_buffer_of_positions_may_be_reused(worlds):
    assert all(worlds(2).run(_positions_changed_in_place))


def _one_batch(handle):
    ids = torch.arange(12)[None] % 50
    (batch,) = handle.shard([{"input_ids": ids, "labels": ids}])
    return batch


def _loss_of_what_is_not_sharded_here():
    import upipe
    from upipe import PreflightError, UPipeConfig

    model, other = tiny_model("llama", 4, 2), tiny_model("llama", 4, 2)
    handle = upipe.apply(model, UPipeConfig(sp_size=2))
    batch = _one_batch(handle)
    begun = iter(handle.shard([{"input_ids": torch.arange(12)[None], "labels": torch.arange(12)[None]}] * 2))
    next(begun)
    with pytest.raises(PreflightError, match="another model"):
        handle.loss(other, batch)
    twin = copy.deepcopy(model)
    handle.remove()
    with pytest.raises(PreflightError, match="handle was removed"):
        handle.loss(model, batch)
    for ask in (
        lambda: handle.shard([]), lambda: handle.adapt([]), lambda: handle.positions(6), lambda: handle.gather(batch["input_ids"]),
        lambda: next(begun),
    ):
        with pytest.raises(PreflightError, match="^this handle was removed: call upipe.apply again$"):
            ask()
    with pytest.raises(PreflightError, match="copy of a model"):
        twin(input_ids=batch["input_ids"])
    again = upipe.apply(twin, UPipeConfig(sp_size=1))
    with pytest.raises(PreflightError, match="sharded for sp_size=2, this handle has 1"):
        again.loss(twin, batch)
    again.remove()
    assert type(twin) is type(model) and type(twin.model) is type(other.model)

    handle = upipe.apply(model, UPipeConfig(sp_size=2, shard_eval=False))
    batch = _one_batch(handle)
    model.eval()
    with pytest.raises(PreflightError, match="eval mode and shard_eval=False"):
        handle.loss(model, batch)
    model.train()
    model.model.layers[0].eval()
    with pytest.raises(PreflightError, match="1 attention layers are in eval mode"):
        handle.loss(model, batch)
    handle.remove()


def test_a_loss_that_would_not_be_the_sharded_model_s_is_refused(worlds):
    worlds(2).run(_loss_of_what_is_not_sharded_here)


def _what_apply_would_ignore():
    import upipe
    from upipe import PreflightError, UPipeConfig

    for arguments, says in (((tiny_model("llama", 4, 2), 2), "UPipeConfig"), (("gpt2",), "a str")):
        with pytest.raises(PreflightError, match=says):
            upipe.apply(*arguments)
    model = tiny_model("llama", 4, 2)
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(PreflightError, match="layers.1.self_attn.q_proj has forward hooks.*put them on the whole LlamaAttention"):
        upipe.apply(model, UPipeConfig())
    with pytest.raises(PreflightError, match="fa4.*cannot run"):
        upipe.apply(tiny_model("llama", 4, 2), UPipeConfig(kernel="fa4"))
    model = tiny_model("llama", 4, 2)
    handle = upipe.apply(model, UPipeConfig())
    ids = torch.arange(6)[None]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PreflightError, match="autocast"):
        model(input_ids=ids)
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    handle.remove()
    plain = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(hidden) == len(plain) == 3
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(hidden, plain))


def test_nothing_is_ignored_silently(worlds):
    worlds(1).run(_what_apply_would_ignore)


def _uneven_shards():
    import upipe

    model = tiny_model("llama", 4, 2)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2))
    tokens = 7 - handle.sp_rank
    with pytest.raises(upipe.PreflightError, match=r"\[\[1, 7\], \[1, 6\]\].*handle.shard"):
        model(input_ids=torch.ones(1, tokens, dtype=torch.long))
    handle.remove()


def test_uneven_shards_are_refused(worlds):
    worlds(2).run(_uneven_shards)


def _a_step_that_fails(where, who):
    """The second call of the attention kernel's forward or backward raises on these ranks, and is caught there; then on they go."""
    import upipe
    from upipe import PreflightError, UPipeConfig, kernels

    model = tiny_model("llama", 8, 2)
    handle = upipe.apply(model, UPipeConfig(sp_size=2, kernel="reference"))
    ids = torch.arange(12)[None] % 50
    batches = iter(handle.shard([{"input_ids": ids, "labels": ids}] * 2))
    batch, calls, plain = next(batches), [0], getattr(kernels.ReferenceAttention, where)

    def failing(self, *args, **more):
        calls[0] += 1
        if calls[0] == 2 and dist.get_rank() in who:
            raise torch.OutOfMemoryError("made up")
        return plain(self, *args, **more)

    setattr(kernels.ReferenceAttention, where, failing)
    try:
        handle.loss(model, batch).backward()
        raise AssertionError("other ranks went on without this one")
    except torch.OutOfMemoryError:
        pass
    finally:
        setattr(kernels.ReferenceAttention, where, plain)
    why = "OutOfMemoryError: made up" if where == "forward" else "its backward did not end"
    for ask in (lambda: handle.loss(model, batch), lambda: next(batches), lambda: handle.gather(batch["input_ids"])):
        with pytest.raises(PreflightError, match=f"the last step failed on this rank .{why}.*the other 1 ranks.*apply again") as told:
            ask()
        assert "\n" not in str(told.value)
    if len(who) == 1:
        handle.loss(model, batch)
    if where == "forward":
        with pytest.raises(PreflightError, match="the last step failed"):
            model(input_ids=batch["input_ids"])
    handle.remove()
    model.zero_grad()
    again = upipe.apply(model, UPipeConfig(sp_size=2, kernel="reference"))
    (batch,) = again.shard([{"input_ids": ids, "labels": ids}])
    again.loss(model, batch).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
    again.remove()
    return grads


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_a_step_that_failed_inside_attention(worlds, where):
    """Where all ranks failed and caught it, none goes on as it is, and put on again the model trains, from the same workspace."""
    found = worlds(2).run(_a_step_that_fails, where=where, who=(0, 1))[0]
    ids = torch.arange(12)[None] % 50
    plain = plain_step(tiny_model("llama", 8, 2), [[{"input_ids": ids, "labels": ids}]])
    for name, expected in plain.grads.items():
        assert_close(name, found[name], expected)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_failed_alone_is_told_so_by_the_next_step(worlds, where):
    """It does not meet the exchange in which the other still waits with one of its own: that one's numbers would be taken for it."""
    with pytest.raises(RankFailure, match=r"ranks \[1\] of 2 failed(.|\n)*the last step failed on this rank"):
        worlds(2).run(_a_step_that_fails, where=where, who=(1,))


def _whole_decoder_runs_again(use_reentrant):
    import upipe
    from upipe.offload import apply_checkpointing

    model, found = tiny_model("llama", 8, 2), []
    ids = torch.arange(12)[None] % 50
    for own in (False, True):
        handle = upipe.apply(model, upipe.UPipeConfig(sp_size=2))
        parts, plain = [handle, *([apply_checkpointing(model)] if own else [])], model.model.forward

        def forward(input_ids, plain=plain, **kwargs):
            kwargs["inputs_embeds"] = embeds = model.model.embed_tokens(input_ids)
            hidden = checkpoint(lambda x: plain(**kwargs | {"inputs_embeds": x})[0], embeds, use_reentrant=use_reentrant)
            return BaseModelOutputWithPast(hidden)

        (batch,) = handle.shard([{"input_ids": ids, "labels": ids}])
        model.model.forward = forward
        handle.loss(model, batch).backward()
        del model.model.forward
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        for grad in grads.values():
            dist.all_reduce(grad)
        found.append(grads)
        model.zero_grad()
        for part in reversed(parts):
            part.remove()
    return found


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_decoder_that_is_checkpointed_as_a_whole_runs_again_in_its_backward(worlds, use_reentrant):
    """That is no step after one that failed in its backward; with layers checkpointed by themselves too, and without."""
    ids = torch.arange(12)[None] % 50
    plain = plain_step(tiny_model("llama", 8, 2), [[{"input_ids": ids, "labels": ids}]])
    for grads in worlds(2).run(_whole_decoder_runs_again, use_reentrant=use_reentrant)[0]:
        for name, expected in plain.grads.items():
            assert_close(name, grads[name], expected)
