"""UPipe inside DeepSpeed: code written for its Ulysses class, the mpu, gradient norms, ZeRO-3 liveness, precision,
checkpoints, and several models in one process.

The first part checks what DeepSpeed's own Ulysses tests check (tests/unit/ulysses_alst/test_ulysses_sp_hf.py there),
by the ratio of gradients: their absolute tolerance lets a factor of 2 through.
"""

import glob
import os
import sys
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.utils import groups
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import upipe
from tests.plain import assert_close, batch_of, data_of, plain_logits, plain_step, relative_error, tiny_model
from tests.sharded import assert_equal_to_plain, check_tiny, ds_config, gathered, gradients, parameters, sharded, window
from tests.world import World
from upipe.attention import UPipeAttentionHF

INPUT_IDS = torch.tensor([[1, 10, 10, 10, 2, 2], [1, 20, 20, 20, 2, 2]])
POSITIONS = torch.arange(6).expand(2, 6)


# code written for DeepSpeed's class


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama in a folder, to be named by its path."""
    path = tmp_path_factory.mktemp("tiny-llama")
    tiny_model("llama", 8, 2).save_pretrained(path)
    return str(path)


def loader():
    """One sample a batch, as DeepSpeed's adapter takes them."""
    for ids, positions in zip(INPUT_IDS, POSITIONS):
        yield {"input_ids": ids[None], "position_ids": positions[None].clone(), "labels": ids[None].clone()}


class Repeatable:
    def __iter__(self):
        return loader()

    def __len__(self):
        return len(INPUT_IDS)


def register(cls, model, **options):
    values = dict(model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=dist.get_world_size(),
                  micro_batch_size=1, seq_length=64, seq_length_is_variable=True)
    return cls.register_with_transformers(**{**values, **options})


def engine_of(model, stage, mpu):
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=ds_config(stage),
                                      mpu=mpu)
    return engine


def tutorial_loss(engine, batch, sp_group):
    """The loss of DeepSpeed's tutorial: differentiable all-gather of the ranks' means, weighted by their valid tokens."""
    logits = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    loss = engine.module.loss_function(logits=logits, labels=None, shift_labels=batch["shift_labels"],
                                       vocab_size=engine.module.config.vocab_size)
    good = (batch["shift_labels"] != -100).sum()
    losses = torch.distributed.nn.functional.all_gather(loss, group=sp_group)
    counts = torch.distributed.nn.functional.all_gather(good, group=sp_group)
    return sum(a * n for a, n in zip(losses, counts)) / sum(counts)


def by_tutorial(cls, folder, stage):
    """DeepSpeed's recipe word for word with either class. Returns the first batch, the loss and the gradients."""
    mpu = register(cls, folder)
    engine = engine_of(AutoModelForCausalLM.from_pretrained(folder), stage, mpu)
    sp_group = groups._get_sequence_parallel_group()
    assert groups._get_sequence_parallel_world_size() == dist.get_world_size()
    adapter = UlyssesSPDataLoaderAdapter(Repeatable(), sp_rank=groups._get_sequence_parallel_rank(), sp_group=sp_group,
                                         sp_world_size=dist.get_world_size(), device=engine.device)
    batch = next(iter(adapter))
    loss = tutorial_loss(engine, batch, sp_group)
    engine.backward(loss)
    grads = gradients(engine)
    engine.destroy()
    if cls is UPipeAttentionHF:
        mpu.remove()
    return batch, loss.item(), grads


def switched_by_one_name(folder, stage):
    """The recipe's numbers with UPipeAttentionHF are those with DeepSpeed's class, and right up to DeepSpeed's own scale."""
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(folder)(input_ids=INPUT_IDS).logits
    batch, loss, grads = by_tutorial(UPipeAttentionHF, folder, stage)
    rank = dist.get_rank()
    assert set(batch) == {"input_ids", "position_ids", "shift_labels"}
    assert torch.equal(batch["input_ids"], torch.tensor([[[1, 10, 10]], [[10, 2, 2]]])[rank])
    assert torch.equal(batch["position_ids"], torch.tensor([[[0, 1, 2]], [[3, 4, 5]]])[rank])
    assert torch.equal(batch["shift_labels"], torch.tensor([[[10, 10, 10]], [[2, 2, -100]]])[rank])

    with torch.no_grad():
        after = AutoModelForCausalLM.from_pretrained(folder)(input_ids=INPUT_IDS).logits
    assert torch.equal(before, after), "a model made after remove() must be plain"

    plain = plain_step(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), [[next(iter(loader()))]])
    assert abs(loss - plain.loss) <= 1e-5 * plain.loss
    scale = 1 if stage == 3 else dist.get_world_size()
    for name, expected in plain.grads.items():
        assert_close(f"gradient of {name} over {scale}", grads[name] / scale, expected, 1e-4)

    _, stock_loss, stock = by_tutorial(UlyssesSPAttentionHF, folder, stage)
    assert abs(loss - stock_loss) <= 1e-6 * stock_loss
    for name, expected in stock.items():
        assert_close(f"gradient of {name} and DeepSpeed's own", grads[name], expected, 1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_switching_from_deepspeed_s_class_by_one_name(folder, stage):
    """DeepSpeed's class makes groups and patches that it never takes back: the world is not used again."""
    world = World(2)
    try:
        world.run(switched_by_one_name, folder=folder, stage=stage)
    finally:
        world.close()


def class_wide_with_our_loss(folder, stage):
    """Registered by path, before any model exists; with the library's loss the gradient is the plain one in every stage."""
    from upipe import loss as upipe_loss

    mpu = register(UPipeAttentionHF, folder)
    engine = engine_of(AutoModelForCausalLM.from_pretrained(folder), stage, mpu)
    batch = next(iter(UlyssesSPDataLoaderAdapter(Repeatable(), sp_rank=mpu.get_sequence_parallel_rank(),
                                                 sp_group=mpu.get_sequence_parallel_group(), sp_world_size=dist.get_world_size(),
                                                 device=engine.device)))
    logits = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    valid = (batch["shift_labels"] != -100).sum()
    dist.all_reduce(valid)
    loss = upipe_loss.global_loss(upipe_loss.token_loss_sum(logits, batch["shift_labels"]), valid, 1,
                                  upipe_loss.gradient_scale(engine))
    engine.backward(loss)
    grads = gradients(engine)
    engine.destroy()
    mpu.remove()
    plain = plain_step(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), [[next(iter(loader()))]])
    assert abs(loss.item() - plain.loss) <= 1e-5 * plain.loss
    for name, expected in plain.grads.items():
        ratio = float((grads[name] * expected).sum() / expected.square().sum())
        assert abs(ratio - 1) < 1e-4, f"{name}: {ratio} times the plain gradient"
        assert_close(f"gradient of {name}", grads[name], expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_registered_by_path_before_the_model_exists(worlds, folder, stage):
    worlds(2).run(class_wide_with_our_loss, folder=folder, stage=stage)


def registered_on_an_object(folder):
    """With a model object that model alone is patched."""
    model, other = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    mpu = register(UPipeAttentionHF, model)
    assert type(other.model.layers[0].self_attn) is not type(model.model.layers[0].self_attn)
    local = INPUT_IDS.chunk(2, dim=1)[dist.get_rank()]
    with torch.no_grad():
        expected = other(input_ids=INPUT_IDS).logits
        assert_close("logits", gathered(model(input_ids=local).logits, mpu.get_sequence_parallel_group()), expected)
        mpu.remove()
        assert torch.equal(model(input_ids=INPUT_IDS).logits, expected)


def test_registered_on_a_model_object(worlds, folder):
    worlds(2).run(registered_on_an_object, folder=folder)


class OnlyConfig:
    """Like PEFT's wrapper for DeepSpeed: no PreTrainedModel, but it has a config."""

    def __init__(self, config):
        self.config = config


def registered_on_a_config(folder):
    mpu = register(UPipeAttentionHF, OnlyConfig(AutoConfig.from_pretrained(folder)))
    assert mpu.get_sequence_parallel_group() is not None
    assert mpu.get_sequence_parallel_world_size() == 2
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder)
        got = gathered(model(input_ids=INPUT_IDS.chunk(2, dim=1)[dist.get_rank()]).logits, mpu.get_sequence_parallel_group())
        mpu.remove()
        assert_close("logits", got, AutoModelForCausalLM.from_pretrained(folder)(input_ids=INPUT_IDS).logits)


def test_registered_on_an_object_that_only_has_a_config(worlds, folder):
    worlds(2).run(registered_on_a_config, folder=folder)


def disabled_in_eval(folder, by_name):
    """In eval a whole sequence goes through the plain model, on every rank; in training it is sharded."""
    with torch.no_grad():
        baseline = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=INPUT_IDS, position_ids=POSITIONS).logits
        model = None if by_name else AutoModelForCausalLM.from_pretrained(folder)
        mpu = register(UPipeAttentionHF, folder if by_name else model, disable_in_eval=True)
        model = model or AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(model.eval()(input_ids=INPUT_IDS, position_ids=POSITIONS).logits, baseline)
        assert model.generate(INPUT_IDS, max_new_tokens=2, do_sample=False).shape == (2, 8)
        local = INPUT_IDS.chunk(2, dim=1)[dist.get_rank()]
        got = gathered(model.train()(input_ids=local).logits, mpu.get_sequence_parallel_group())
        assert_close("logits in training", got, baseline)
        mpu.remove()


@pytest.mark.parametrize("by_name", [True, False], ids=["by path", "by object"])
def test_disable_in_eval(worlds, folder, by_name):
    worlds(2).run(disabled_in_eval, folder=folder, by_name=by_name)


def sharded_in_eval(folder):
    """Without disable_in_eval the same shards give the same logits in eval."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        baseline = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=INPUT_IDS).logits
        mpu = register(UPipeAttentionHF, model)
        got = model.eval()(input_ids=INPUT_IDS.chunk(2, dim=1)[dist.get_rank()]).logits
        assert_close("logits", gathered(got, mpu.get_sequence_parallel_group()), baseline)
    mpu.remove()


def test_eval_on_shards(worlds, folder):
    worlds(2).run(sharded_in_eval, folder=folder)


def mismatch_is_refused(folder):
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "sdpa"
    for _ in range(2):      # a refusal leaves nothing behind that a second try would trip over
        with pytest.raises(ValueError, match="does not match model config attn_implementation"):
            register(UPipeAttentionHF, OnlyConfig(config), core_attn_implementation="flash_attention_2")
    register(UPipeAttentionHF, OnlyConfig(config)).remove()


def test_attention_implementation_that_the_model_does_not_have(worlds, folder):
    worlds(2).run(mismatch_is_refused, folder=folder)


def functions_are_untouched(folder):
    """No process-global attention function is replaced, also for a kernel named as on the hub."""
    before = {key: ALL_ATTENTION_FUNCTIONS[key] for key in ALL_ATTENTION_FUNCTIONS.valid_keys()}
    for name in ("sdpa", "kernels-community/flash-attn2"):
        mpu = register(UPipeAttentionHF, folder, core_attn_implementation=name)
        assert mpu is not None
        assert {key: ALL_ATTENTION_FUNCTIONS[key] for key in ALL_ATTENTION_FUNCTIONS.valid_keys()} == before
        mpu.remove()


def test_global_attention_functions_stay(worlds, folder):
    worlds(2).run(functions_are_untouched, folder=folder)


def one_rank_is_nothing(folder):
    assert register(UPipeAttentionHF, folder, sequence_parallel_size=1) is None


def test_sequence_parallel_size_1_returns_none_as_deepspeed_does(worlds, folder):
    worlds(2).run(one_rank_is_nothing, folder=folder)


# several models, several sizes


def several_models():
    """Two sharded models of different head counts and sizes at once, beside a plain one that nothing touches."""
    data = {sp: data_of("odd", dist.get_world_size() // sp, 1) for sp in (1, 2, 4)}
    bystander = tiny_model("llama", 8, 2)
    classes = [type(m) for m in bystander.modules()]
    with torch.no_grad():
        before = plain_logits(bystander, batch_of("odd", 1))
    make = {2: lambda: tiny_model("llama", 6, 2), 4: lambda: tiny_model("llama", 8, 1)}
    plain = {sp: plain_step(make[sp](), data[sp]) for sp in make}
    with sharded(make[2](), 2, stage=1) as (handle_2, engine_2), sharded(make[4](), 4, stage=1) as (handle_4, engine_4):
        with torch.no_grad():
            assert torch.equal(plain_logits(bystander, batch_of("odd", 1)), before)
        for handle, engine, sp in ((handle_2, engine_2, 2), (handle_4, engine_4, 4), (handle_2, engine_2, 2)):
            assert (handle.sp_size, handle.dp_size) == (sp, 4 // sp)
            assert (handle.sp_rank, handle.dp_rank) == (dist.get_rank() % sp, dist.get_rank() // sp)
            batch, = handle.shard(data[sp][handle.dp_rank])
            loss = handle.loss(engine, batch)
            assert abs(loss.item() - plain[sp].loss) <= 1e-5 * plain[sp].loss
    assert [type(m) for m in bystander.modules()] == classes
    with torch.no_grad():
        assert torch.equal(plain_logits(bystander, batch_of("odd", 1)), before)


def test_several_models_at_once(worlds):
    worlds(4).run(several_models)


def one_model_several_sizes():
    """Put on and taken off again, each time with another size; then plain, bit for bit, in class and attributes."""
    model, twin = tiny_model("qwen3", 8, 2), tiny_model("qwen3", 8, 2)
    for sp in (2, 4, 1, 2):
        data = data_of("odd", dist.get_world_size() // sp, 1)
        model.zero_grad()
        with sharded(model, sp, stage=0) as (handle, engine):
            assert_equal_to_plain(handle, engine, plain_step(twin, data), data)
        assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    fresh = tiny_model("qwen3", 8, 2)
    handle = upipe.apply(fresh, upipe.UPipeConfig(sp_size=2))
    assert list(fresh.state_dict()) == list(twin.state_dict())
    handle.remove()
    with torch.no_grad():
        assert torch.equal(plain_logits(fresh, batch_of("odd", 1)), plain_logits(twin, batch_of("odd", 1)))
    generated = fresh.generate(INPUT_IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, twin.generate(INPUT_IDS, max_new_tokens=3, do_sample=False))


def test_one_model_with_several_sizes_one_after_another(worlds):
    worlds(4).run(one_model_several_sizes)


def groups_go(times):
    """Groups are made by apply and destroyed by remove."""
    def count():
        return len(dist.distributed_c10d._world.pg_map)

    start = count()
    for _ in range(times):
        handle = upipe.apply(tiny_model("llama", 4, 2), upipe.UPipeConfig(sp_size=2))
        assert count() > start
        handle.remove()
        assert count() == start
    assert groups.mpu is None


def test_removing_gives_the_groups_back(worlds):
    worlds(4).run(groups_go, times=3)


# the mpu: norms, clipping, checkpoints


def model_parallel_group_is_this_rank(sp):
    handle = upipe.apply(tiny_model("llama", 4, 2), upipe.UPipeConfig(sp_size=sp))
    mpu = handle.mpu
    assert dist.get_process_group_ranks(mpu.get_model_parallel_group()) == [dist.get_rank()]
    assert (mpu.get_model_parallel_world_size(), mpu.get_model_parallel_rank()) == (1, 0)
    assert (mpu.get_sequence_parallel_world_size(), mpu.get_sequence_parallel_rank()) == (sp, dist.get_rank() % sp)
    first = dist.get_rank() // sp * sp
    assert dist.get_process_group_ranks(mpu.get_sequence_parallel_group()) == list(range(first, first + sp))
    assert dist.get_process_group_ranks(mpu.get_sequence_data_parallel_group()) == list(range(dist.get_world_size()))
    handle.remove()


@pytest.mark.parametrize("sp", [1, 2, 4])
def test_the_model_parallel_group_holds_one_rank(worlds, sp):
    worlds(4).run(model_parallel_group_is_this_rank, sp=sp)


def norm_and_clipping(stage, sp, clip_factor, lr=0.5):
    """The engine's norm is the plain norm; a step is lr times the plain gradient, scaled down where the norm is over the clip."""
    data = data_of("odd", dist.get_world_size() // sp, 2)
    plain = plain_step(tiny_model("qwen2", 8, 2), data)
    clip = plain.norm * clip_factor
    model = tiny_model("qwen2", 8, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with sharded(model, sp, lr=lr, config=ds_config(stage, 2, clip=clip)) as (handle, engine):
        window(handle, engine, data[handle.dp_rank], step=True)
        norm = engine.get_global_grad_norm()
        after = parameters(engine)
    if stage > 0:      # with stage 0 in fp32 DeepSpeed clips but keeps no norm
        assert abs(float(norm) - plain.norm) <= 1e-5 * plain.norm, f"norm {norm} and plain {plain.norm}"
    factor = min(1.0, clip_factor)
    for name, grad in plain.grads.items():
        # fp32 parameters of size ~1 hold the step only to 1e-7 of themselves
        rounding = 1e-6 * float(before[name].norm()) / float((lr * factor * grad).norm())
        assert_close(f"step of {name}", before[name] - after[name], lr * factor * grad, 1e-4 + rounding)


@pytest.mark.parametrize("clip_factor", [0.25, 4.0], ids=["clipped", "below the clip"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_norm_and_clipping(worlds, stage, clip_factor):
    worlds(4).run(norm_and_clipping, stage=stage, sp=2, clip_factor=clip_factor)


def saved(folder, stage, sp, steps=2):
    """Train a little, save, train one step more. Returns parameters at the save and the loss after it."""
    data = data_of("odd", dist.get_world_size() // sp, 1)
    model = tiny_model("llama", 8, 2)
    config = ds_config(stage)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=sp), ds_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=handle.mpu)
    for _ in range(steps):
        window(handle, engine, data[handle.dp_rank], step=True)
    engine.save_checkpoint(folder, tag="kept")
    values = {name: p.clone() for name, p in parameters(engine).items()}
    loss, _ = window(handle, engine, data[handle.dp_rank], step=True)
    after = parameters(engine)
    engine.destroy()
    handle.remove()
    return values, loss, after


def loaded(folder, stage, sp, values, loss, after, mine=None, universal=False):
    """Load into a model of other weights: same parameters, same next step. mine: this rank's data, if not the usual."""
    model = tiny_model("llama", 8, 2, seed=99)
    config = ds_config(stage)
    if universal:
        config["checkpoint"] = {"load_universal": True}
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=sp), ds_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=handle.mpu)
    path, _ = engine.load_checkpoint(folder, tag="universal" if universal else "kept")
    assert path is not None
    for name, p in parameters(engine).items():
        assert torch.equal(p, values[name]), name
    mine = mine or data_of("odd", handle.dp_size, 1)[handle.dp_rank]
    got, _ = window(handle, engine, mine, step=True)
    assert abs(got - loss) <= 1e-5 * loss, f"loss {got} and, without the break, {loss}"
    for name, p in parameters(engine).items():
        assert_close(f"{name} one step on", p, after[name], 1e-4)
    engine.destroy()
    handle.remove()


def saved_and_loaded(folder, stage, save_sp, load_sp):
    """One group saved; where the size loaded at is smaller every data-parallel rank gets that group's batch again."""
    values, loss, after = saved(folder, stage, save_sp)
    mine = data_of("odd", dist.get_world_size() // save_sp, 1)[0] if save_sp != load_sp else None
    loaded(folder, stage, load_sp, values, loss, after, mine)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("save_sp, load_sp", [(2, 2), (2, 1)])
def test_checkpoint_saved_at_one_size_and_loaded_at_another(worlds, tmp_path, stage, save_sp, load_sp):
    worlds(2).run(saved_and_loaded, folder=str(tmp_path), stage=stage, save_sp=save_sp, load_sp=load_sp)


def to_universal(folder):
    """DeepSpeed's own conversion of the checkpoint `kept` into `universal`."""
    from deepspeed.checkpoint import ds_to_universal

    line = ["ds_to_universal", "--input_folder", os.path.join(folder, "kept"), "--output_folder", os.path.join(folder, "universal"),
            "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    with mock.patch.object(sys, "argv", line):
        ds_to_universal.main(ds_to_universal.parse_arguments())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_universal_checkpoint_from_two_ranks_to_four(worlds, tmp_path, stage):
    """Saved at sp 2 of 2 ranks. The metadata must call nothing tensor-parallel, or the conversion fails; then sp 4 of 4."""
    folder = str(tmp_path)
    values, loss, after = worlds(2).run(saved, folder=folder, stage=stage, sp=2)[0]
    state = torch.load(sorted(glob.glob(f"{folder}/kept/*model_states.pt"))[0], weights_only=False)
    assert state["checkpoint_parallel_dimensions"] == {"pp_degree": 1, "tp_degree": 1}
    worlds(1).run(to_universal, folder=folder)
    worlds(4).run(loaded, folder=folder, stage=stage, sp=4, values=values, loss=loss, after=after, universal=True)


# ZeRO-3: what is gathered when


def liveness(checkpointing, kind, steps=4, layers=4):
    """The sets of layers whose q, k or v are gathered at once, sampled after every fetch and in every kernel call.

    Returns for each step and each of forward and backward: the largest number of layers, and of q/k/v weights.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    from upipe import kernels

    sp = dist.get_world_size()
    model = tiny_model(kind, 8, 2, layers=layers)
    config = ds_config(3, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
    watched, now, peaks = [], {}, []

    def sample():
        live = [(layer, name) for layer, name, p in watched if p.ds_status == ZeroParamStatus.AVAILABLE]
        peak = peaks[-1].setdefault(now["phase"], [0, 0, 0])
        peak[0] = max(peak[0], len({layer for layer, _ in live}))
        peak[1] = max(peak[1], len(live))
        peak[2] += 1

    def sampled(function, phase=None):
        def call(*args, **kwargs):
            if phase is not None:
                now["phase"] = phase
            sample()
            result = function(*args, **kwargs)
            sample()
            return result
        return call

    fetch = PartitionedParameterCoordinator.fetch_sub_module
    kernel = type(kernels.select("auto", kernels.Case("cpu", (0, 0), torch.float32, 8)))
    originals = {name: getattr(kernel, name) for name in ("forward", "backward")}
    with sharded(model, sp, config=config, checkpointing=checkpointing) as (handle, engine):
        for i, layer in enumerate(engine.module.model.layers):
            for name, p in layer.self_attn.named_parameters():
                if name.split(".")[0] in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"):
                    watched.append((i, name, p))
        PartitionedParameterCoordinator.fetch_sub_module = sampled(fetch)
        for name, function in originals.items():
            setattr(kernel, name, sampled(function))
        try:
            data = data_of("odd", 1, 1)[0]
            for _ in range(steps):
                peaks.append({})
                (batch,) = handle.shard(data)
                now["phase"] = "forward"
                loss = handle.loss(engine, batch)
                now["phase"] = "backward"
                engine.backward(loss)
                sample()
                engine.step()
                now["phase"] = "after"
                sample()
        finally:
            PartitionedParameterCoordinator.fetch_sub_module = fetch
            for name, function in originals.items():
                setattr(kernel, name, function)
    return peaks, len(watched) // layers


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("checkpointing", [None, "non-reentrant", "reentrant"])
@pytest.mark.slow
def test_zero_3_gathers_this_layer_s_q_k_v_only(worlds, checkpointing, kind):
    """Threshold, reuse and prefetch at 0; steps 1 (which records the trace) to 4."""
    for peaks, a_layer in worlds(2).run(liveness, checkpointing=checkpointing, kind=kind):
        assert len(peaks) == 4
        for step, phases in enumerate(peaks, 1):
            for phase in ("forward", "backward"):
                layers, parameters_live, samples = phases[phase]
                assert samples > 20
                assert layers == 1, f"step {step} {phase}: q/k/v of {layers} layers gathered at once"
                assert parameters_live == a_layer
            assert phases["after"][0] == 0, f"step {step}: something stayed gathered"


# precision, training


def bf16_error(stage, sp):
    """Gradient of a bf16 model, sharded and plain, each against the fp32 plain gradient of the same bf16 weights."""
    data = data_of("odd", dist.get_world_size() // sp, 1)
    exact_model = tiny_model("qwen3", 8, 2).bfloat16().float()
    exact = plain_step(exact_model, data)
    plain = plain_step(tiny_model("qwen3", 8, 2).bfloat16(), data)
    with sharded(tiny_model("qwen3", 8, 2).bfloat16(), sp, config=ds_config(stage, bf16=True)) as (handle, engine):
        loss, grads = window(handle, engine, data[handle.dp_rank], step=True)
        after = parameters(engine)
    assert all(g.isfinite().all() for g in grads.values()) and all(p.isfinite().all() for p in after.values())

    def flat(grads):
        return torch.cat([grads[name].double().flatten() for name in exact.grads])

    error, own = relative_error(flat(grads), flat(exact.grads)), relative_error(flat(plain.grads), flat(exact.grads))
    assert abs(loss - exact.loss) <= 0.01 * exact.loss, f"loss {loss} and in fp32 {exact.loss}"
    assert 1e-4 < own < 0.1
    assert error <= 1.2 * own, f"error {error:.2e} of bf16 sharded, {own:.2e} of bf16 plain"


@pytest.mark.parametrize("sp", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_is_as_near_to_fp32_as_the_plain_model(worlds, stage, sp):
    worlds(4).run(bf16_error, stage=stage, sp=sp)


def training(stage, sp, steps=5):
    """AdamW for a few steps, sharded, and plain with the mean gradient of the same data: same losses."""
    data = data_of("odd", dist.get_world_size() // sp, 1)
    plain_model = tiny_model("llama", 8, 2)
    optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
    expected = []
    for _ in range(steps):
        step = plain_step(plain_model, data)
        expected.append(step.loss)
        for name, p in plain_model.named_parameters():
            p.grad = step.grads[name]
        optimizer.step()
    model = tiny_model("llama", 8, 2)
    config = ds_config(stage)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=sp), ds_config=config)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config,
                                      mpu=handle.mpu)
    got = [window(handle, engine, data[handle.dp_rank], step=True)[0] for _ in range(steps)]
    engine.destroy()
    handle.remove()
    assert expected[-1] < 0.8 * expected[0]
    for i, (a, b) in enumerate(zip(got, expected)):
        assert abs(a - b) <= 1e-4 * b, f"step {i}: loss {a} and plain {b}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_follows_the_plain_model(worlds, stage):
    worlds(4).run(training, stage=stage, sp=2)


def compiled(stage, sp, backend):
    """torch.compile of the model leaves the numbers as they are (the attention itself stays out of the graph)."""
    torch._dynamo.reset()
    data = data_of("odd", dist.get_world_size() // sp, 1)
    plain = plain_step(tiny_model("llama", 8, 2), data)
    config = ds_config(stage)
    model = tiny_model("llama", 8, 2)
    handle = upipe.apply(model, upipe.UPipeConfig(sp_size=sp), ds_config=config)
    model.compile(backend=backend)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config,
                                      mpu=handle.mpu)
    assert_equal_to_plain(handle, engine, plain, data)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    engine.destroy()
    handle.remove()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.slow
def test_compiled_model(worlds, stage):
    worlds(2).run(compiled, stage=stage, sp=2, backend="aot_eager")


def eval_between_steps(stage, sp):
    """The same number in train and eval, and an evaluation between two steps changes nothing."""
    data = data_of("odd", dist.get_world_size() // sp, 1)
    plain = plain_step(tiny_model("llama", 8, 2), data)
    with sharded(tiny_model("llama", 8, 2), sp, stage=stage) as (handle, engine):
        mine = data[handle.dp_rank]
        engine.eval()
        with torch.no_grad():
            (batch,) = handle.shard(mine)
            loss = handle.loss(engine, batch).item()
        assert abs(loss - plain.loss) <= 1e-5 * plain.loss
        engine.train()
        assert_equal_to_plain(handle, engine, plain, data)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("sp", [1, 2, 4])
def test_same_loss_in_train_and_eval(worlds, stage, sp):
    worlds(4).run(eval_between_steps, stage=stage, sp=sp)


@pytest.mark.parametrize("zero", [{"reduce_scatter": False}, {"contiguous_gradients": False}, {"overlap_comm": True},
                                  {"reduce_bucket_size": 500}, {"allgather_bucket_size": 500}], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_settings_do_not_change_the_gradient(worlds, stage, zero):
    """Or are refused by a message that names them: never another gradient."""
    worlds(4).run(setting_is_exact_or_refused, stage=stage, zero=zero)


def setting_is_exact_or_refused(stage, zero, sp=2):
    try:
        check_tiny("llama", 8, 2, sp, config=ds_config(stage, **zero), logits=False)
    except upipe.PreflightError as refusal:
        assert stage == 3 and next(iter(zero)) in str(refusal)
