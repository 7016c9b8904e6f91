"""Inputs that went wrong in other projects, by id: each is right here, or refused with what would work.

`pytest -k T17` runs one id. fp32, 1e-5 against the plain model, unless a test says otherwise.
"""

import copy
import json

import deepspeed
import pytest
import torch
import torch.distributed as dist
from transformers import DynamicCache

import upipe
from tests.plain import CLASSES, VOCAB, assert_close, batch_of, plain_logits, plain_step, relative_error, shifted, tiny_model
from tests.sharded import assert_equal_to_plain, check_tiny, compare, ds_config, gathered, gradients, parameters, sharded, window
from upipe.schedule import HeadSchedule


def ids_of(rows, length, seed=7):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


# heads and ranks


@pytest.mark.parametrize("heads_per_stage", [None, 14, 28])
def test_T11_28_query_heads_on_7_kv_heads(worlds, heads_per_stage):
    worlds(2).run(check_tiny, kind="qwen2", heads=28, kv_heads=7, sp_size=2, heads_per_stage=heads_per_stage, stage=1)


@pytest.mark.slow
def test_T12_40_query_heads_on_16_ranks(worlds):
    """40/16 leaves a ragged last stage: ranks of 3 and of 2 heads."""
    schedule = HeadSchedule(40, 8, 16)
    assert {len([e for row in schedule.table for e in row[rank].q_heads]) for rank in range(16)} >= {2, 3}
    world = worlds(16)
    world.run(check_tiny, kind="llama", heads=40, kv_heads=8, sp_size=16, model={"layers": 1})
    world.close()


@pytest.mark.parametrize("sp, stage", [(4, 2), pytest.param(8, 3, marks=pytest.mark.slow)])
def test_T13_fewer_kv_heads_than_ranks(worlds, sp, stage):
    """2 kv heads on more ranks: their gradients are the sums over the replicas."""
    assert HeadSchedule(8, 2, sp).replicated
    worlds(sp).run(check_tiny, kind="qwen2", heads=8, kv_heads=2, sp_size=sp, stage=stage)


def cache_is_refused():
    model = tiny_model("llama", 8, 1)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=4))
    ids = ids_of(1, 4)
    for run in (lambda: model.generate(ids, max_new_tokens=2),
                lambda: model(input_ids=ids, past_key_values=DynamicCache())):
        with pytest.raises(upipe.PreflightError, match="cache.*remove\\(\\)"):
            run()
    handle.remove()
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 6)


def test_T14_one_kv_head(worlds):
    worlds(4).run(check_tiny, kind="llama", heads=8, kv_heads=1, sp_size=4, stage=1)
    worlds(4).run(cache_is_refused)


@pytest.mark.slow
def test_T15_three_heads_a_rank(worlds):
    worlds(8).run(check_tiny, kind="llama", heads=24, kv_heads=8, sp_size=8, stage=2)


@pytest.mark.parametrize("heads, kv_heads, sp", [
    (7, 7, 4), (30, 30, 4), (20, 5, 2), (20, 5, 4), (5, 5, 2), (5, 5, 4),
    *(pytest.param(20, kv_heads, 8, marks=pytest.mark.slow) for kv_heads in (20, 5)),
])
def test_T16_heads_that_do_not_divide(worlds, heads, kv_heads, sp):
    worlds(sp).run(check_tiny, kind="qwen3", heads=heads, kv_heads=kv_heads, sp_size=sp, stage=1, model={"layers": 1})


# sequences


@pytest.mark.parametrize("tokens, sp, stage", [(2999, 4, 3), pytest.param(8423, 8, 1, marks=pytest.mark.slow)])
def test_T17_lengths_that_do_not_divide(worlds, tokens, sp, stage):
    """Padded inside, equal to unpadded: the plain model sees the sequence as it is."""
    ids = ids_of(1, tokens)
    data = [[{"input_ids": ids, "labels": ids}]]
    plain = plain_step(tiny_model("llama", 4, 2, attn="sdpa", layers=1, head_dim=4), data)
    worlds(sp).run(check_tiny, timeout=240, kind="llama", heads=4, kv_heads=2, sp_size=sp, data=data, plain=plain, attn="sdpa",
                   stage=stage, model={"layers": 1, "head_dim": 4})


def no_positions(sp):
    """Loader batches without position_ids, and a sharded model called without them: positions are global."""
    check_tiny("llama", 8, 2, sp, sequence="even")
    model, plain = tiny_model("llama", 8, 2), tiny_model("llama", 8, 2)
    ids = ids_of(2, 24)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=sp))
    local = ids.chunk(sp, dim=1)[handle.sp_rank]
    with torch.no_grad():
        got = gathered(model(input_ids=local).logits, handle.sp_group)
        assert_close("logits", got, plain_logits(plain, {"input_ids": ids}))
    handle.remove()


@pytest.mark.parametrize("sp", [1, 2, 4])
def test_T19_batches_without_position_ids(worlds, sp):
    worlds(4).run(no_positions, sp=sp)


def masked_batch(mask, mask_labels=True):
    mask = torch.tensor(mask)
    ids = ids_of(*mask.shape)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100) if mask_labels else ids}


def mask_is_refused(mask, says, mask_labels=True):
    handle = upipe.apply(tiny_model("llama", 4, 2), upipe.UPipeConfig(sp_size=2))
    with pytest.raises(upipe.PreflightError, match=says):
        list(handle.shard([masked_batch(mask, mask_labels)]))
    handle.remove()


@pytest.mark.parametrize("mask", [[[0, 1, 1, 1], [1, 1, 1, 1]], [[1, 0, 1, 1]], [[1, 1, 1, 1], [1, 0, 0, 1]]], ids=str)
def test_T20_left_and_interior_padding_are_refused(worlds, mask):
    row = next(i for i, r in enumerate(mask) if 0 in r)
    worlds(2).run(mask_is_refused, mask=mask, says=f"attention_mask row {row}.*right")


@pytest.mark.parametrize("mask", [[[1, 1, 0, 0], [1, 1, 1, 1]], [[0, 0, 0, 0], [1, 1, 1, 1]]], ids=str)
def test_T20_right_padding_and_empty_rows_are_exact(worlds, mask):
    worlds(2).run(check_tiny, kind="llama", heads=4, kv_heads=2, sp_size=2, data=[[masked_batch(mask)]])


def test_T20_labels_on_padding_are_refused(worlds):
    worlds(2).run(mask_is_refused, mask=[[1, 1, 0, 0]], says="row 0.*labels.*-100", mask_labels=False)


def batch_with_labels(valid, length=12, seed=3):
    """One row whose targets are valid in the places `valid` only."""
    ids = ids_of(1, length, seed)
    targets = torch.full_like(ids, -100)
    places = torch.tensor(sorted(valid), dtype=torch.long)
    targets[:, places] = ids_of(1, length, seed + 1)[:, places]
    return {"input_ids": ids, "shift_labels": targets}


def all_masked(sp, stage, accumulation=1):
    """No valid label anywhere: loss and gradients are zero and finite, the step changes nothing and breaks nothing."""
    model = tiny_model("llama", 4, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with sharded(model, sp, stage=stage, accumulation=accumulation) as (handle, engine):
        losses = []
        for batch in handle.shard([batch_with_labels(())] * accumulation, accumulation=accumulation):
            loss = handle.loss(engine, batch)
            assert loss.requires_grad and loss.grad_fn is not None
            losses.append(loss.item())
            engine.backward(loss)
            if len(losses) == accumulation:
                for name, grad in gradients(engine).items():
                    assert float(grad.abs().max()) == 0.0, name
            engine.step()
        assert losses == [0.0] * accumulation
        for name, value in parameters(engine).items():
            assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_T21_a_rank_without_valid_labels(worlds, stage):
    """sp 2 x dp 2: in one group rank 1 has no valid label, in the other rank 0; all others' gradients are right."""
    data = [[batch_with_labels((0, 2, 5))], [batch_with_labels((7, 8, 9, 10), seed=5)]]
    worlds(4).run(check_tiny, kind="llama", heads=4, kv_heads=2, sp_size=2, data=data, stage=stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_T21_a_data_parallel_rank_without_valid_labels(worlds, stage):
    data = [[batch_with_labels((1, 4))], [batch_with_labels(())]]
    worlds(4).run(check_tiny, kind="llama", heads=4, kv_heads=2, sp_size=2, data=data, stage=stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_T21_no_valid_label_on_any_rank(worlds, stage):
    worlds(4).run(all_masked, sp=2, stage=stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_T22_a_masked_micro_batch_beside_a_valid_one(worlds, stage):
    """The masked one is a zero loss with a graph; the window's gradient is that of the valid ones alone."""
    masked, valid = batch_with_labels(()), batch_with_labels((1, 3, 8))
    for micro in ([masked, valid], [valid, masked]):
        worlds(4).run(check_tiny, kind="llama", heads=4, kv_heads=2, sp_size=4, data=[micro], stage=stage)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_T22_a_window_of_masked_micro_batches(worlds, stage):
    worlds(4).run(all_masked, sp=4, stage=stage, accumulation=2)


def shift_labels_win(sp):
    both = batch_with_labels((1, 3, 8))
    both["labels"] = both["input_ids"]
    data = [[both]]
    loss, _ = compare(lambda: tiny_model("llama", 4, 2), data, sp)
    only_labels = plain_step(tiny_model("llama", 4, 2), [[{"input_ids": both["input_ids"], "labels": both["labels"]}]])
    assert abs(loss - only_labels.loss) > 1e-3


def test_T23_shift_labels_win_over_labels(worlds):
    worlds(2).run(shift_labels_win, sp=2)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_T24_as_few_tokens_as_there_are_ranks(worlds, length):
    """One token a rank, and fewer tokens than ranks: some hold padding alone."""
    ids = ids_of(2, length)
    data = [[{"input_ids": ids, "shift_labels": ids.roll(1, 1)}]]
    worlds(4).run(check_tiny, kind="qwen2", heads=4, kv_heads=2, sp_size=4, data=data)


# models


@pytest.mark.parametrize("hidden, heads, kv_heads, head_dim", [(640, 4, 1, 256), (128, 64, 8, 4), (40, 4, 2, 16)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_T31_head_dim_that_hidden_size_does_not_give(worlds, kind, hidden, heads, kv_heads, head_dim):
    model = {"hidden": hidden, "head_dim": head_dim, "layers": 1}
    worlds(2).run(check_tiny, kind=kind, heads=heads, kv_heads=kv_heads, sp_size=2, model=model)


def null_head_dim(folder):
    def make():
        return CLASSES["llama"][1].from_pretrained(folder, attn_implementation="eager")

    assert make().model.layers[0].self_attn.q_proj.out_features == make().config.hidden_size == 32
    compare(make, [[batch_of("odd", 1)]], 2)


def test_T31_null_head_dim_in_a_configuration_file(worlds, tmp_path):
    tiny_model("llama", 4, 2).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "head_dim": None}))
    worlds(2).run(null_head_dim, folder=str(tmp_path))


def bias_counts(sp):
    """Gradients of the biases are compared like all others; and the biases do change the outcome."""
    data = [[batch_of("odd", 1)]]
    _, grads = compare(lambda: tiny_model("qwen2", 8, 2), data, sp)
    names = [n for n in grads if n.endswith("_proj.bias")]
    assert len(names) == 6 and all(float(grads[n].norm()) > 1e-6 for n in names)
    without = tiny_model("qwen2", 8, 2)
    with torch.no_grad():
        for name, p in without.named_parameters():
            if name.endswith("_proj.bias"):
                p.zero_()
    assert relative_error(plain_logits(without, data[0][0]), plain_logits(tiny_model("qwen2", 8, 2), data[0][0])) > 1e-2


@pytest.mark.parametrize("sp", [1, 2, 4])
def test_T32_projection_biases(worlds, sp):
    worlds(sp).run(bias_counts, sp=sp)


def test_T32_llama_with_attention_bias(worlds):
    """Llama's attention_bias gives the output projection a bias too."""
    worlds(2).run(check_tiny, kind="llama", heads=8, kv_heads=2, sp_size=2, stage=3, model={"attention_bias": True})


def dropout_is_refused(kind):
    model = tiny_model(kind, 4, 2, attention_dropout=0.1)
    classes = [type(m) for m in model.modules()]
    with pytest.raises(upipe.PreflightError, match="attention_dropout=0.1.*0.0"):
        upipe.apply(model, upipe.UPipeConfig(sp_size=2))
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_T35_attention_dropout_is_refused(worlds, kind):
    worlds(2).run(dropout_is_refused, kind=kind)


def tied(sp, stage):
    compare(lambda: tiny_model("llama", 8, 2, tied=True), [[batch_of("odd", 1)]], sp, stage=stage)


def tied_from_file(folder, sp, stage):
    """from_pretrained builds on the meta device and the file has no lm_head: it must be tied again, and count once."""
    def make():
        model = CLASSES["llama"][1].from_pretrained(folder, attn_implementation="eager")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return model

    _, grads = compare(make, [[batch_of("odd", 1)]], sp, stage=stage)
    assert "lm_head.weight" not in grads


def tied_on_meta(sp, stage):
    """Put on a model without storage, which gets its weights afterwards."""
    source = tiny_model("llama", 8, 2, tied=True)
    data = [[batch_of("odd", 1)]]
    plain = plain_step(source, data)
    with torch.device("meta"):
        model = CLASSES["llama"][1](copy.deepcopy(source.config))
    config = ds_config(stage)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=sp), ds_config=config)
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.model.rotary_emb = copy.deepcopy(source.model.rotary_emb)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config,
                                      mpu=handle.mpu)
    assert_equal_to_plain(handle, engine, plain, data)
    engine.destroy()
    handle.remove()


def tied_under_zero_init(sp):
    """Built partitioned, by deepspeed.zero.Init."""
    source = tiny_model("llama", 8, 2, tied=True, pad_token_id=None)
    data = [[batch_of("odd", 1)]]
    plain = plain_step(source, data)
    config = ds_config(3)
    with deepspeed.zero.Init(config_dict_or_path={**config, "train_batch_size": 1, "sequence_parallel_size": sp}):
        model = CLASSES["llama"][1](copy.deepcopy(source.config))
    values = dict(source.named_parameters())
    for name, p in model.named_parameters():
        with deepspeed.zero.GatheredParameters(p, modifier_rank=0):
            p.data.copy_(values[name].data)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with sharded(model, sp, stage=3) as (handle, engine):
        assert_equal_to_plain(handle, engine, plain, data)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_T40_tied_embeddings_count_once(worlds, stage):
    worlds(2).run(tied, sp=2, stage=stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_T40_tied_embeddings_from_a_file(worlds, tmp_path, stage):
    tiny_model("llama", 8, 2, tied=True).save_pretrained(tmp_path)
    worlds(2).run(tied_from_file, folder=str(tmp_path), sp=2, stage=stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_T40_meta_device(worlds, stage):
    worlds(2).run(tied_on_meta, sp=2, stage=stage)


def test_T40_zero_init(worlds):
    worlds(2).run(tied_under_zero_init, sp=2)


# loss and data


def one_big_batch(sp, stage, accumulation=8):
    """The reference is Hugging Face's own mean loss of all rows as one batch."""
    length = 13
    ids = ids_of(accumulation, length)
    labels = ids.clone()
    for row in range(accumulation):
        labels[row, length - 1 - row:] = -100
    big = tiny_model("qwen2", 8, 2)
    expected = big(input_ids=ids, labels=labels, use_cache=False).loss
    expected.backward()
    micro = [{"input_ids": ids[i: i + 1], "labels": labels[i: i + 1]} for i in range(accumulation)]
    assert len({int((shifted(b) != -100).sum()) for b in micro}) == accumulation
    with sharded(tiny_model("qwen2", 8, 2), sp, stage=stage, accumulation=accumulation) as (handle, engine):
        loss, grads = window(handle, engine, micro)
    assert abs(loss - expected.item()) <= 1e-5 * expected.item()
    for name, p in big.named_parameters():
        assert_close(f"gradient of {name}", grads[name], p.grad)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_T36_eight_uneven_micro_batches_are_one_big_batch(worlds, stage):
    worlds(4).run(one_big_batch, sp=4, stage=stage)


def rank_samples(dp_ranks, sp):
    """samples[rank]: what DeepSpeed's contract gives a rank, its own sample; every sample different."""
    return [{"input_ids": ids_of(1, 9, seed=50 + rank), "labels": ids_of(1, 9, seed=50 + rank)} for rank in range(dp_ranks * sp)]


def own_samples_are_refused(sp):
    samples = rank_samples(dist.get_world_size() // sp, sp)
    handle = upipe.apply(tiny_model("llama", 4, 2), upipe.UPipeConfig(sp_size=sp))
    with pytest.raises(upipe.PreflightError, match="different batches.*handle.adapt"):
        list(handle.shard([samples[dist.get_rank()]]))
    handle.remove()


def adapted_samples_train_once(sp, stage):
    """Each rank's one sample: `sp` micro-batches a group, every sample of every rank exactly once, gradients exact."""
    dp = dist.get_world_size() // sp
    samples = rank_samples(dp, sp)
    data = [[samples[d * sp + i] for i in range(sp)] for d in range(dp)]
    plain = plain_step(tiny_model("llama", 4, 2), data)
    with sharded(tiny_model("llama", 4, 2), sp, stage=stage, accumulation=sp) as (handle, engine):
        loader = handle.adapt([samples[dist.get_rank()]])
        seen = [gathered(b["input_ids"], handle.sp_group)[:, :9] for b in handle.shard(loader, accumulation=sp)]
        assert len(seen) == sp
        for got, sample in zip(seen, data[handle.dp_rank]):
            assert torch.equal(got, sample["input_ids"])
        losses = []
        for batch in handle.shard(loader, accumulation=sp):
            loss = handle.loss(engine, batch)
            losses.append(loss.item())
            engine.backward(loss)
            if len(losses) == sp:
                grads = gradients(engine)
            engine.step()
        assert abs(sum(losses) / sp - plain.loss) <= 1e-5 * plain.loss
        for name, expected in plain.grads.items():
            assert_close(f"gradient of {name}", grads[name], expected)


@pytest.mark.parametrize("ranks, sp", [pytest.param(8, 8, marks=pytest.mark.slow), (4, 2)])
def test_T37_a_sample_a_rank_is_refused_by_shard(worlds, ranks, sp):
    worlds(ranks).run(own_samples_are_refused, sp=sp)


@pytest.mark.parametrize("ranks, sp, stage", [pytest.param(8, 8, 3, marks=pytest.mark.slow), (4, 2, 0), (4, 4, 2)])
def test_T37_adapted_samples_train_once_each(worlds, ranks, sp, stage):
    worlds(ranks).run(adapted_samples_train_once, sp=sp, stage=stage)


def step_in_stage_0(sp, bf16, dtype_tolerance):
    """The optimizer step runs and moves every parameter by lr times the plain gradient."""
    data = [[batch_of("odd", 1)]] * (dist.get_world_size() // sp)
    plain_model = tiny_model("qwen3", 8, 2)
    plain = plain_step(plain_model, data)
    model = tiny_model("qwen3", 8, 2)
    if bf16:
        model = model.bfloat16()
    with sharded(model, sp, lr=1.0, config=ds_config(0, bf16=bf16)) as (handle, engine):
        (batch,) = handle.shard(data[handle.dp_rank])
        loss = handle.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        after = {name: p.detach().float() for name, p in engine.module.named_parameters()}
    assert abs(loss.item() - plain.loss) <= dtype_tolerance * plain.loss
    moved, wanted = [], []
    for name, p in plain_model.named_parameters():
        start = p.detach().bfloat16().float() if bf16 else p.detach()
        moved.append((start - after[name]).flatten())
        wanted.append(plain.grads[name].flatten())
        assert after[name].isfinite().all(), name
    ratio = float(torch.cat(moved) @ torch.cat(wanted) / (torch.cat(wanted) @ torch.cat(wanted)))
    assert abs(ratio - 1) < dtype_tolerance, f"the step is {ratio} times the gradient"
    assert_close("step", torch.cat(moved), torch.cat(wanted), 5 * dtype_tolerance)


@pytest.mark.parametrize("sp", [2, 4])
def test_T38_stage_0_steps_in_fp32(worlds, sp):
    worlds(4).run(step_in_stage_0, sp=sp, bf16=False, dtype_tolerance=1e-5)


@pytest.mark.parametrize("sp", [2, 4])
def test_T38_stage_0_steps_in_bf16(worlds, sp):
    """bf16 keeps 8 bits of the weights and of every operation: the step is right to a few percent."""
    worlds(4).run(step_in_stage_0, sp=sp, bf16=True, dtype_tolerance=2e-2)


# autograd


def small_block():
    """A function of float64 inputs that runs the attention block on one rank, and inputs for it."""
    from upipe.block import BlockSpec, Projections, attention_block
    from upipe.kernels import Case, select

    g = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    heads, kv_heads, dim, hidden, tokens = 3, 1, 4, 5, 6
    angle = torch.rand(1, tokens, dim // 2, generator=g, dtype=torch.float64) * 6
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    names = ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "q_norm", "k_norm")
    shapes = ((heads * dim, hidden), (kv_heads * dim, hidden), (kv_heads * dim, hidden), (hidden, heads * dim), (heads * dim,),
              (kv_heads * dim,), (kv_heads * dim,), (hidden,), (dim,), (dim,))
    spec = BlockSpec(HeadSchedule(heads, kv_heads, 1), rank=0, group=None, head_dim=dim, scale=0.5, norm_eps=1e-3,
                     kernel=select("auto", Case("cpu", (0, 0), torch.float64, dim)), offsets=((0, 4, 6), (0, 6)))
    inputs = [random(2, tokens, hidden), *(random(*shape) for shape in shapes)]

    def block(x, *weights):
        return attention_block(x, Projections(**dict(zip(names, weights))), cos, sin, spec)

    return block, [t.requires_grad_() for t in inputs]


def test_T47_gradcheck():
    block, inputs = small_block()
    assert torch.autograd.gradcheck(block, inputs)


def test_T47_norm_in_place_after_the_block_in_anomaly_mode():
    """What follows the block may write into its output; what came before may be written once it has run backward."""
    block, inputs = small_block()

    def after(y, in_place):
        scale = y.detach().square().mean(-1, keepdim=True).add(1e-3).rsqrt()
        if in_place:
            return y.mul_(scale).add_(1.0).square()
        return (y * scale + 1.0).square()

    def grads(in_place):
        for t in inputs:
            t.grad = None
        after(block(*inputs), in_place).sum().backward()
        return [t.grad.clone() for t in inputs]

    expected = grads(in_place=False)
    with torch.autograd.set_detect_anomaly(True):
        got = grads(in_place=True)
    for i, (a, b) in enumerate(zip(got, expected)):
        assert_close(f"input {i}", a, b, 1e-12)


def test_T47_an_input_changed_in_place_is_noticed():
    """The input is saved for backward: writing over it must raise, not give wrong gradients."""
    block, inputs = small_block()
    x = inputs[0] * 1.0
    y = block(x, *inputs[1:])
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def in_place_layers(sp):
    """A whole model whose layers scale the attention output in place, in anomaly mode, sharded and plain."""
    def make():
        model = tiny_model("llama", 4, 2)
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda module, args, out: (out[0].mul_(0.5).add_(0.1), *out[1:]))
        return model

    with torch.autograd.set_detect_anomaly(True):
        compare(make, [[batch_of("odd", 1)]], sp)


@pytest.mark.parametrize("sp", [1, 2])
def test_T47_a_model_that_writes_into_the_attention_output(worlds, sp):
    worlds(sp).run(in_place_layers, sp=sp)
