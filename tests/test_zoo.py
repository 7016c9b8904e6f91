"""The model zoo: every served architecture, sharded, equals plain Hugging Face in double precision at 1e-5."""

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.pairwise import every_value, further, pairwise
from tests.plain import SEQUENCES, data_of, plain_step, randomise
from tests.sharded import assert_equal_to_plain, sharded
from upipe import models

VOCAB = 61
# Name -> configuration class prefix and what makes the architecture different. Windows are shorter than a shard times two
# and longer than one, so that they cross shard borders.
ZOO = {
    "mistral": ("Mistral", {"sliding_window": 6, "head_dim": 8}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2-windows": ("Qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-windows": ("Qwen3", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1, "head_dim": 6}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 10, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0,
                          "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20,
                          "layer_types": ["sliding_attention", "full_attention"]}),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {"sliding_window": 6, "partial_rotary_factor": 0.5}),
    "phi3-full": ("Phi3", {"sliding_window": None}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2,
                           "layer_types": ["sliding_attention", "full_attention"]}),
    "llama-biased": ("Llama", {"attention_bias": True}),
}
HEADS = ((8, 2), (6, 2), (4, 1), (5, 5), (3, 3))
FACTORS = {
    "model": tuple(ZOO),
    "heads": HEADS,
    "sp": (1, 2, 4),
    "zero": (0, 2, 3),
    "accumulation": (1, 2),
    "sequence": SEQUENCES,
    "checkpointing": (None, "non-reentrant"),
}


def zoo_model(name, heads, kv_heads, dtype=torch.float32):
    """A plain model of the zoo, the same in every process."""
    prefix, special = ZOO[name]
    values = dict(vocab_size=VOCAB, hidden_size=heads * 8, intermediate_size=24, num_hidden_layers=2, num_attention_heads=heads,
                  num_key_value_heads=kv_heads, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    suffix = "TextConfig" if prefix == "Gemma3" else "Config"
    config = getattr(transformers, prefix + suffix)(**{**values, **special})
    config._attn_implementation = "eager"
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # the grouped matmul takes no doubles
    torch.manual_seed(0)
    return randomise(getattr(transformers, f"{prefix}ForCausalLM")(config), seed=3).to(dtype)


def check(model, heads, sp, zero, accumulation, sequence, checkpointing):
    data = data_of(sequence, dist.get_world_size() // sp, accumulation)
    plain = plain_step(zoo_model(model, *heads, dtype=torch.float64), data)
    plain.grads = {n: g.float() for n, g in plain.grads.items()}
    sharded_model = zoo_model(model, *heads)
    assert models.of_attention(type(sharded_model.model.layers[0].self_attn)) is not None
    with sharded(sharded_model, sp, stage=zero, accumulation=accumulation, checkpointing=checkpointing) as (handle, engine):
        assert_equal_to_plain(handle, engine, plain, data, 1e-5, logits=False)


def name_of(case):
    return "-".join(str(v).replace(" ", "") for v in case.values())


CASES = pairwise({**FACTORS, "zero": (0, 3)})


@pytest.mark.parametrize("case", every_value(CASES), ids=name_of)
def test_zoo(worlds, case):
    worlds(4).run(check, **case)


@pytest.mark.slow
@pytest.mark.parametrize("case", further(FACTORS, 80, CASES, seed=2), ids=name_of)
def test_zoo_sample(worlds, case):
    worlds(4).run(check, **case)


def row_of(documents, seed=5):
    """One row of documents of these lengths, one after the other, positions restarting."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(n) for n in documents])[None]
    ids = torch.randint(3, VOCAB, positions.shape, generator=g)
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def check_row(model, heads, sp, documents, zero=0):
    data = [[row_of(documents, seed=5 + dp)] for dp in range(dist.get_world_size() // sp)]
    plain = plain_step(zoo_model(model, *heads, dtype=torch.float64), data)
    plain.grads = {n: g.float() for n, g in plain.grads.items()}
    with sharded(zoo_model(model, *heads), sp, stage=zero) as (handle, engine):
        assert_equal_to_plain(handle, engine, plain, data, 1e-5, logits=False)


@pytest.mark.parametrize("model, sp", [
    ("mistral", 4), pytest.param("llama-biased", 2, marks=pytest.mark.slow), pytest.param("mistral", 2, marks=pytest.mark.slow),
    pytest.param("llama-biased", 4, marks=pytest.mark.slow),
])
def test_T18_packed_documents_that_divide_by_nothing(worlds, model, sp):
    worlds(4).run(check_row, model=model, heads=(4, 2), sp=sp, documents=(137, 2041, 89))


@pytest.mark.parametrize("model,what", [("mistral", "window"), ("gemma2", "softcap and scale"), ("gemma3", "scale")])
def test_T33_window_between_shard_and_sequence_softcap_and_scale(worlds, model, what):
    # Windows of 5 or 6 tokens over shards of 4: longer than a shard, shorter than the sequence of 16.
    worlds(4).run(check_row, model=model, heads=(4, 2), sp=4, documents=(16,))


@pytest.mark.parametrize("sp", [2, 4])
def test_T34_attention_sinks_go_with_their_heads(worlds, sp):
    worlds(4).run(check_row, model="gpt_oss", heads=(6, 2), sp=sp, documents=(11, 8))


def test_every_served_architecture_is_here():
    assert {a.prefix for a in models.ARCHITECTURES} <= {prefix for prefix, _ in ZOO.values()} | {"Qwen2", "Qwen3"}


def _refused(name, match, **values):
    import upipe

    model = zoo_model(name, 4, 2)
    for key, value in values.items():
        setattr(model.config, key, value)
    with pytest.raises(upipe.PreflightError, match=match):
        upipe.apply(model, upipe.UPipeConfig(sp_size=1))


@pytest.mark.parametrize("name,match,values", [
    ("qwen3_moe", "output_router_logits", {"output_router_logits": True}),
    ("gemma3", "use_bidirectional_attention", {"use_bidirectional_attention": True}),
])
def test_what_is_not_causal_or_local_is_refused(worlds, name, match, values):
    worlds(1).run(_refused, name=name, match=match, **values)
