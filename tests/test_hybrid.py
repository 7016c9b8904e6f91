"""Ring x Ulysses x data through the product: sharded equals plain Hugging Face in logits, loss and every gradient, fp32, 1e-5.

Real gloo ranks. The default cases cover every pair of values of every two factors, in a world of 4 (ring 2 alone leaves two
data-parallel groups); `slow` adds cases of the whole product, eight ranks, and an odd Ulysses degree.
"""

import pytest
import torch
import torch.distributed as dist

import upipe
from tests import training
from tests.pairwise import every_value, further, pairwise
from tests.plain import SEQUENCES, assert_close, batch_of, data_of, plain_step, tiny_model
from tests.sharded import OWN_CHECKPOINTING, assert_equal_to_plain, sharded
from tests.test_exactness_grid import stage_width
from tests.test_zoo import ZOO, zoo_model
from upipe import UPipeConfig, loss, preflight, zigzag
from upipe.attention import UPipeAttentionHF
from upipe.loader import ShardedLoader
from upipe.preflight import PreflightError

TOLERANCE = 1e-5
FACTORS = {
    "model": ("llama", "qwen2", "qwen3"),
    "heads": ((8, 8), (8, 2), (8, 1), (6, 2), (5, 5)),
    "mesh": ((2, 2), (2, 1), (4, 1)),
    "width": ("smallest", "largest"),
    "zero": (0, 1, 2, 3),
    "accumulation": (1, 2),
    "sequence": SEQUENCES,
    "checkpointing": (None, "non-reentrant", *OWN_CHECKPOINTING),
}


def name_of(case):
    (heads, kv_heads), (ring, ulysses) = case["heads"], case["mesh"]
    return (f"{case['model']}-{heads}h{kv_heads}kv-ring{ring}-ulysses{ulysses}-{case['width']}-zero{case['zero']}-"
            f"acc{case['accumulation']}-{case['sequence']}-{case['checkpointing'] or 'stored'}")


def check(case):
    """One case, on every rank of the world."""
    (heads, kv_heads), (ring, ulysses) = case["heads"], case["mesh"]

    def model():
        return tiny_model(case["model"], heads, kv_heads, seed=heads + kv_heads, tied=case["model"] == "qwen2")

    data = data_of(case["sequence"], dist.get_world_size() // (ring * ulysses), case["accumulation"])
    plain = plain_step(model(), data)
    with sharded(model(), ring * ulysses, stage=case["zero"], heads_per_stage=stage_width(case["width"], heads, ulysses),
                 accumulation=case["accumulation"], checkpointing=case["checkpointing"], ring_degree=ring) as (handle, engine):
        assert_equal_to_plain(handle, engine, plain, data, TOLERANCE)
        (kernel,) = handle._sharding.kernels.values()
        assert str(kernel).endswith(f"on a ring of {ring}") and dist.get_world_size(handle.mpu.ulysses_group) == ulysses
        assert {schedule.ranks for schedule in handle._sharding.schedules.values()} == {ulysses}


CASES = pairwise(FACTORS)


@pytest.mark.parametrize("case", every_value(CASES), ids=name_of)
def test_hybrid_grid(worlds, case):
    worlds(4).run(check, case=case)


@pytest.mark.slow
@pytest.mark.parametrize("case", further(FACTORS | {"checkpointing": (*FACTORS["checkpointing"], "reentrant")}, 80, CASES, seed=6),
                         ids=name_of)
def test_hybrid_grid_sample(worlds, case):
    worlds(4).run(check, case=case)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, mesh, heads, zero, sequence, checkpointing", [
    (8, (2, 4), (8, 2), 3, "packed", "fused layers, host"),
    (8, (4, 2), (28, 7), 2, "odd", "non-reentrant"),
    (8, (2, 2), (8, 1), 1, "batch2", None),
    (6, (2, 3), (6, 2), 3, "odd", "fused layers"),
    (6, (2, 3), (5, 5), 0, "packed", None),
])
def test_larger_meshes(worlds, ranks, mesh, heads, zero, sequence, checkpointing):
    """With three Ulysses ranks one of them has tokens of both runs."""
    worlds(ranks).run(check, timeout=240, case={
        "model": "llama", "heads": heads, "mesh": mesh, "width": "smallest", "zero": zero, "accumulation": 2, "sequence": sequence,
        "checkpointing": checkpointing,
    })


def check_length(tokens, mesh):
    """A packed row whose documents end anywhere, of any length; one document of less than six tokens."""
    g, cuts = torch.Generator().manual_seed(tokens), () if tokens < 6 else (tokens // 3, tokens // 3 + 1, tokens - tokens // 4)
    lengths = [b - a for a, b in zip((0, *cuts), (*cuts, tokens)) if b > a]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.randint(3, 61, positions.shape, generator=g)
    data = [[{"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}]]
    plain = plain_step(tiny_model("llama", 4, 2), data)
    with sharded(tiny_model("llama", 4, 2), mesh[0] * mesh[1], ring_degree=mesh[0]) as (handle, engine):
        assert_equal_to_plain(handle, engine, plain, data, TOLERANCE)


@pytest.mark.parametrize("tokens, mesh", [(3, (2, 2)), (31, (2, 2)), (10, (4, 1)), pytest.param(2049, (2, 2), marks=pytest.mark.slow)])
def test_documents_of_any_length(worlds, tokens, mesh):
    worlds(4).run(check_length, tokens=tokens, mesh=mesh)


# Other architectures


def check_zoo(name, values, heads):
    """One whose layers all see everything."""
    ZOO["whole"] = ZOO[name][0], ZOO[name][1] | {"layer_types": ["full_attention"] * 2} | values
    try:
        data = [[batch_of("packed", seed=3)]]
        plain = plain_step(zoo_model("whole", *heads, dtype=torch.float64), data)
        plain.grads = {n: g.float() for n, g in plain.grads.items()}
        with sharded(zoo_model("whole", *heads), 4, stage=3, ring_degree=2) as (handle, engine):
            assert_equal_to_plain(handle, engine, plain, data, TOLERANCE, logits=False)
    finally:
        del ZOO["whole"]


@pytest.mark.parametrize("name, heads", [("gpt_oss", (6, 2)), ("gemma2", (4, 1)), ("olmo2", (5, 5))])
@pytest.mark.slow
def test_sinks_softcap_and_norms_over_all_heads(worlds, name, heads):
    worlds(4).run(check_zoo, name=name, values={}, heads=heads)


# Refusals


def refused():
    def says(match, model=None, **config):
        groups = len(dist.distributed_c10d._world.pg_map)
        with pytest.raises(PreflightError, match=match):
            upipe.apply(model or tiny_model("llama", 4, 2), UPipeConfig(**config))
        assert len(dist.distributed_c10d._world.pg_map) == groups

    says(r"ring_degree=3 does not divide sp_size=4: use one of \[1, 2, 4\]", sp_size=4, ring_degree=3)
    says("ring_degree=0 must be a positive integer", sp_size=4, ring_degree=0)
    says("ring_degree=True must be", sp_size=4, ring_degree=True)
    says("heads_per_stage=3.*on 2 ranks: use one of 2, 4",
         sp_size=4, ring_degree=2, heads_per_stage=3)
    says("fa2.*flash", sp_size=4, ring_degree=2, kernel="fa2")
    for name in ("mistral", "gemma3", "gpt_oss"):
        says("ring_degree=2 with a sliding window.*ring_degree=1", zoo_model(name, 4, 2), sp_size=4, ring_degree=2)
    for node, ring, works in ((2, 1, None), (2, 2, None), (3, 2, r"\[1, 4\]"), (1, 2, r"\[1, 4\]"), (2, 4, None)):
        if works is None:
            preflight.check_groups(4, ring, node)
            continue
        with pytest.raises(PreflightError, match=f"Ulysses groups of 2 ranks.*cross nodes of {node}: use ring_degree one of {works}"):
            preflight.check_groups(4, ring, node)

    # Shards that are not a ring's
    handle = upipe.apply(tiny_model("llama", 4, 2), UPipeConfig(sp_size=4, ring_degree=4))
    ids = torch.ones(1, 6, dtype=torch.long)
    first = 6 * dist.get_rank()
    with pytest.raises(PreflightError, match="jump to 6 at token 3.*zigzag"):
        handle.model(input_ids=ids, position_ids=torch.arange(first, first + 6)[None])
    with pytest.raises(PreflightError, match="shards of 5 tokens on ring_degree=4.*two equal runs"):
        handle.model(input_ids=ids[:, :5])
    (batch,) = handle.shard([batch_of("odd", 0)])
    with pytest.raises(PreflightError, match="sharded for ring_degree=2, this handle has 4"):
        handle.loss(handle.model, batch | {"ring_degree": 2})
    with pytest.raises(PreflightError, match="no shard has 5 tokens with sp_size=4 .ring 4 x Ulysses 1.: the next have 6"):
        handle.positions(5)
    with pytest.raises(PreflightError, match=r"given shards of \[\[1, 6\], \[2, 6\], \[1, 6\], \[2, 6\]\] rows and tokens"):
        handle.model(input_ids=ids.expand(1 + dist.get_rank() % 2, -1))
    # Without positions they are the ring's own.
    want = [i for part in zigzag.shards(24, 4, 1, dist.get_rank(), 0) for i in part]
    with torch.no_grad():
        assert torch.equal(handle.model(input_ids=ids).logits, handle.model(input_ids=ids, position_ids=torch.tensor([want])).logits)
    handle.remove()


def test_bad_meshes_and_shards_are_refused_by_name(worlds):
    worlds(4).run(refused)


def what_a_ring_of_one_makes():
    made = []
    plain = dist.new_group

    def new_group(ranks, **options):
        made.append(tuple(ranks))
        return plain(ranks, **options)

    dist.new_group = new_group
    try:
        handle = upipe.apply(tiny_model("llama", 4, 2), UPipeConfig(sp_size=2))
    finally:
        dist.new_group = plain
    (batch,) = handle.shard([batch_of("odd", 0)])
    with torch.no_grad():
        handle.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    (kernel,) = handle._sharding.kernels.values()
    same = handle.mpu.ulysses_group is handle.mpu.sp_group and handle.mpu.ring_group is None
    handle.remove()
    return made, type(kernel).__name__, same


def test_a_ring_of_one_costs_nothing(worlds):
    """No group, no kernel around the kernel."""
    for made, kernel, same in worlds(4).run(what_a_ring_of_one_makes):
        assert made == [(0, 1), (2, 3), (0,), (1,), (2,), (3,)] and kernel == "TorchFlashAttention" and same


# Other entries


def registered(folder):
    """By path, before any model exists; gradients summed over ranks by hand."""
    from transformers import AutoModelForCausalLM

    mpu = UPipeAttentionHF.register_with_transformers(folder, "sdpa", 4, 1, ring_degree=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    data = [[batch_of("packed", 1)]]
    (batch,) = ShardedLoader(data[0], mpu, torch.device("cpu"))
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    value = loss.global_loss(loss.token_loss_sum(logits, batch["shift_labels"]), batch["num_valid"], 1, 1.0)
    value.backward()
    (kernel,) = model.model.layers[0].self_attn._upipe.kernels.values()
    assert str(kernel).endswith("on a ring of 2")
    mpu.remove()
    plain = plain_step(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), data)
    assert abs(float(value) - plain.loss) <= TOLERANCE * plain.loss
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad)
        assert_close(name, p.grad, plain.grads[name], TOLERANCE)


def test_registered_with_transformers(worlds, tmp_path):
    tiny_model("llama", 4, 2).save_pretrained(tmp_path)
    worlds(4).run(registered, folder=str(tmp_path))


@pytest.mark.parametrize("mesh", [(2, 2), pytest.param((4, 1), marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_training_run(worlds, tmp_path, mesh):
    """Losses of the run on one rank; what it says of itself; the self-check."""
    ring, ulysses = mesh
    changes = {"train__steps": 4, "train__accumulation": 1}
    alone = worlds(1).run(training.train, config=training.mapping(
        tmp_path, upipe__sp_size=1, train__run_dir=str(tmp_path / "alone"), **changes))[0]
    config = training.mapping(tmp_path, upipe__sp_size=4, upipe__ring_degree=ring, **changes)
    together = worlds(4).run(training.train, config=config)
    for result in together:
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5) and result["step_tokens"] == alone["step_tokens"]
    assert f"ranks   4 = sp 4 (ring {ring} x Ulysses {ulysses}) x dp 1" in together[0]["text"]
    assert f"ring_degree: {ring}" in (tmp_path / "run" / "config.yaml").read_text()
    config["train"]["overwrite"] = True
    assert all(passed for passed, _ in worlds(4).run(training.checked, config=config))
