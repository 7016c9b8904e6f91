"""Every refusal comes before the first step, names the values and what would work, and changes nothing."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import upipe
from tests.plain import batch_of, tiny_model
from tests.sharded import ds_config, sharded
from upipe.apply import UPipeConfig


class OtherLinear(nn.Linear):
    """A projection whose weight alone does not say what it computes."""


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=61))


def with_other_linear():
    model = tiny_model("llama", 4, 2)
    model.model.layers[1].self_attn.k_proj.__class__ = OtherLinear
    return model


def llama(**config):
    return tiny_model("llama", 4, 2, **config)


MODELS = {
    "size that does not divide": (llama, {}, {"sp_size": 3}, "sp_size=3.*4 processes.*1, 2, 4"),
    "size beyond the world": (llama, {}, {"sp_size": 8}, "sp_size=8.*4 processes.*1, 2, 4"),
    "size of nothing": (llama, {}, {"sp_size": 0}, "sp_size=0"),
    "size that is no number": (llama, {}, {"sp_size": "2"}, "sp_size='2'"),
    "width that is no multiple": (llama, {}, {"sp_size": 2, "heads_per_stage": 3}, "heads_per_stage=3.*4 query heads.*2 ranks.*2, 4"),
    "width beyond the heads": (llama, {}, {"sp_size": 4, "heads_per_stage": 8}, "heads_per_stage=8.*use one of 4"),
    "mode that is no mode": (llama, {}, {"shard_eval": "no"}, "shard_eval='no': use one of .True, False."),
    "unknown kernel": (llama, {}, {"kernel": "fastest"}, "kernel='fastest'.*flash.*reference"),
    "unknown architecture": (gpt2, {}, {}, "GPT2LMHeadModel.*GPT2Attention.*LlamaAttention"),
    "other projection": (with_other_linear, {}, {}, "layers.1.self_attn.k_proj.*OtherLinear.*torch.nn.Linear"),
    "dynamic rotation": (llama, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, {},
                         "rope_type='dynamic'.*default, linear, llama3 or yarn"),
}


def applying_is_refused(case):
    make, model_config, config, says = MODELS[case]
    model = make(**model_config)
    classes = [type(m) for m in model.modules()]
    groups = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(upipe.PreflightError, match=says):
        upipe.apply(model, UPipeConfig(**config))
    assert [type(m) for m in model.modules()] == classes
    assert len(dist.distributed_c10d._world.pg_map) == groups


@pytest.mark.parametrize("case", MODELS)
def test_apply_refuses(worlds, case):
    worlds(4).run(applying_is_refused, case=case)


def applying_twice_is_refused():
    model = llama()
    handle = upipe.apply(model, UPipeConfig(sp_size=2))
    with pytest.raises(upipe.PreflightError, match="already.*remove"):
        upipe.apply(model, UPipeConfig(sp_size=2))
    handle.remove()
    upipe.apply(model, UPipeConfig(sp_size=4)).remove()


def test_apply_refuses_a_model_twice(worlds):
    worlds(4).run(applying_twice_is_refused)


ENGINES = {
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, True, "torch_autocast.*bf16 or fp32"),
    "without the mpu": ({}, False, "sequence-parallel size 1.*2.*mpu=handle.mpu"),
    "predivided gradients": ({"gradient_predivide_factor": 2.0}, True, "gradient_predivide_factor=2.0.*1.0"),
    "accumulation the loader does not know": ({"gradient_accumulation_steps": 2}, True, "accumulation=1.*accumulates 2"),
}


def engine_is_refused(case):
    more, with_mpu, says = ENGINES[case]
    model = llama()
    handle = upipe.apply(model, UPipeConfig(sp_size=2))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                                      config={**ds_config(1), **more}, mpu=handle.mpu if with_mpu else None)
    (batch,) = handle.shard([batch_of("odd", handle.dp_rank)])
    with pytest.raises(upipe.PreflightError, match=says):
        handle.loss(engine, batch)
    engine.destroy()
    handle.remove()


@pytest.mark.parametrize("case", ENGINES)
def test_loss_refuses_an_engine(worlds, case):
    worlds(4).run(engine_is_refused, case=case)


def half_precision_is_refused():
    model = llama().half()
    handle = upipe.apply(model, UPipeConfig(sp_size=2))
    (batch,) = handle.shard([batch_of("odd", handle.dp_rank)])
    with pytest.raises(upipe.PreflightError, match="fp16.*bf16 or fp32"):
        handle.loss(model, batch)
    handle.remove()


def test_fp16_is_refused(worlds):
    worlds(4).run(half_precision_is_refused)


def batches_are_refused():
    handle = upipe.apply(llama(), UPipeConfig(sp_size=2))
    ids = torch.zeros(1, 8, dtype=torch.long)
    for batch, says in (
        ({"input_ids": ids}, "labels"),
        ({"labels": ids}, "input_ids"),
        ({"input_ids": ids, "labels": ids, "cu_seq_lens_q": ids}, "cu_seq_lens_q.*position_ids"),
        ({"input_ids": ids[0], "labels": ids[0]}, r"\(8,\).*batch, tokens"),
        ({"input_ids": ids[:, :0], "labels": ids[:, :0]}, r"\(1, 0\)"),
        ({"input_ids": ids, "labels": ids[:, :7]}, r"labels.*\(1, 7\).*\(1, 8\)"),
        ({"input_ids": ids, "labels": ids, "position_ids": torch.zeros(2, 8, dtype=torch.long)}, r"position_ids.*\(2, 8\).*\(1, 8\)"),
        ({"input_ids": ids, "labels": None}, "needs input_ids and labels"),
        ({"input_ids": ids[:0], "labels": ids[:0]}, r"\(0, 8\).*at least one row"),
        ({"input_ids": [[1, 2], [3]], "labels": ids}, "input_ids is no tensor"),
        ({"input_ids": ids + 0.5, "labels": ids}, "input_ids is float32.*whole numbers"),
        ({"input_ids": ids, "labels": ids, "position_ids": ids * 0.5}, "position_ids is float32"),
        ({"input_ids": ids + 61, "labels": ids}, "input_ids row 0 has 61 at token 0.*0 to 60"),
        ({"input_ids": ids, "labels": ids - 1}, "shift_labels row 0 has -1 at token 0"),
        ((ids, ids), "a batch is a tuple"),
    ):
        with pytest.raises(upipe.PreflightError, match=says):
            list(handle.shard([batch]))
    small = ids.to(torch.uint8)
    (local,) = handle.shard([{"input_ids": small, "labels": small.numpy()}])
    assert local["shift_labels"][0, -1] == (-100 if handle.sp_rank == 1 else 0)
    for accumulation in (0, -1, 1.5):
        with pytest.raises(upipe.PreflightError, match=f"accumulation={accumulation}"):
            handle.shard([], accumulation=accumulation)
    with pytest.raises(upipe.PreflightError, match="num_valid.*handle.shard"):
        handle.loss(handle.model, {"input_ids": ids, "position_ids": ids, "shift_labels": ids, "accumulation": 1})
    handle.remove()


def test_shard_refuses_batches(worlds):
    worlds(4).run(batches_are_refused)


def one_rank_s_bad_batch_stops_all():
    """A batch that one data-parallel rank refuses must not leave the others waiting."""
    handle = upipe.apply(llama(), UPipeConfig(sp_size=2))
    ids = torch.zeros(1, 8, dtype=torch.long)
    good, bad = {"input_ids": ids, "labels": ids}, {"input_ids": ids}

    def unreadable():
        yield good
        if handle.dp_rank == 1:
            raise OSError("the disk is gone")
        yield good

    with pytest.raises(OSError if handle.dp_rank == 1 else upipe.PreflightError, match="disk|rank 2"):
        list(handle.shard(unreadable()))
    with pytest.raises(OSError if handle.dp_rank == 1 else upipe.PreflightError, match="disk|rank"):
        list(handle.shard(handle.adapt(unreadable())))
    says = "labels" if handle.dp_rank == 1 else "rank 2 has no batch to give"
    with pytest.raises(upipe.PreflightError, match=says):
        list(handle.shard([bad if handle.dp_rank == 1 else good]))
    handle.remove()


def test_a_batch_refused_on_one_rank_stops_every_rank(worlds):
    worlds(4).run(one_rank_s_bad_batch_stops_all, timeout=60)


def inputs_of_the_model_are_refused():
    model = llama()
    handle = upipe.apply(model, UPipeConfig(sp_size=2))
    ids = torch.zeros(2, 8, dtype=torch.long)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 4:] = 0
    for more, says in (
        ({"attention_mask": mask}, r"attention_mask \(2, 8\).*labels of -100.*position_ids"),
        ({"attention_mask": torch.zeros(2, 1, 8, 8)}, r"attention_mask \(2, 1, 8, 8\)"),
        ({"output_attentions": True}, "output_attentions=True"),
    ):
        with pytest.raises(upipe.PreflightError, match=says):
            model(input_ids=ids, **more)
    with torch.no_grad():      # a mask of ones says nothing
        assert torch.equal(model(input_ids=ids, attention_mask=torch.ones(2, 8)).logits, model(input_ids=ids).logits)
    handle.remove()


def test_a_sharded_model_refuses_what_it_would_ignore(worlds):
    worlds(4).run(inputs_of_the_model_are_refused)


def reported():
    model = llama(layers=3)
    config = ds_config(3, stage3_max_live_parameters=10**6)
    with sharded(model, 2, config=config, heads_per_stage=4) as (handle, engine):
        (batch,) = handle.shard([batch_of("odd", handle.dp_rank)])
        engine.backward(handle.loss(engine, batch))
        layer = sum(p.ds_numel for p in engine.module.model.layers[0].parameters())
        return handle.report(), layer


def test_report_says_what_was_done(worlds):
    text, layer = worlds(4).run(reported)[0]
    for part in ("LlamaForCausalLM", "3 attention layers", "sequence parallel 2 x data parallel 2", "4 query / 2 kv heads",
                 "attention kernel: flash", "all of 3 layers" if 10**6 >= 3 * layer else f"{10**6 / layer:.1f} of 3 layers",
                 f"{layer} a layer"):
        assert part in text, f"{part!r} is not in\n{text}"
