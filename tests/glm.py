"""Tiny GLM-5.3-Flash models for tests, and transformers' side of every comparison with them."""

import torch
import torch.nn.functional as F
from transformers.models.glm5_next import modeling_glm5_next as hf

from upipe.glm.config import GlmTextConfig

SPARSE = GlmTextConfig(index_kpool=4).layer_types[3]     # "indexed_attention"; transformers 5.17 calls it by another name


def tiny_config(layers=8, every_layer_indexed=False, **changes):
    """Both kinds of attention, dense and sparse MLPs, more index heads than it takes for ties to vanish, 4 pools of 4 tokens."""
    kinds = [SPARSE if every_layer_indexed or i % 4 == 3 else "linear_attention" for i in range(layers)]
    values = dict(
        vocab_size=61, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=16, v_head_dim=12, index_topk=16, index_kpool=4, index_n_heads=32, index_head_dim=8,
        linear_num_heads=4, linear_head_dim=16, layer_types=kinds, pad_token_id=None, use_cache=False)
    return GlmTextConfig(**{**values, **changes})


@torch.no_grad()
def randomise(module, seed=0):
    """Distinct, sizeable values in every parameter: gates are not ones, biases not zero, norms not one."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(module.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith(("A_log", "dt_bias", "base", "scale", "ape")) or (p.ndim == 1 and "norm" not in name):
            p.copy_(p + 0.3 * noise)
        elif p.ndim == 1:
            p.copy_(1.0 + 0.3 * noise)
        else:
            p.copy_(noise / p.shape[-1] ** 0.5)
    return module


def tokens_of(pools, places, begins, k):
    """A row's selected tokens as sets, from first tokens of pools and the rule of the tail. The slow definition."""
    out = []
    for row, place, begin in zip(pools.tolist(), places.tolist(), begins.tolist()):
        seen = {first + i for first in row if first >= 0 for i in range(k)}
        tail = (place + 1 - begin) % k
        out.append(seen | set(range(place + 1 - tail, place + 1)))
    return out


def hf_selection(indexer, hidden, q_resid, starts=None):
    """transformers' selected tokens as sets, [B][S], each document by itself and at its place in the row."""
    rows = []
    for b in range(hidden.shape[0]):
        row, bounds = [], starts or (0, hidden.shape[1])
        for begin, end in zip(bounds, bounds[1:]):
            mask = torch.ones(1, end - begin, dtype=torch.bool)
            found = hf.Glm5NextTextIndexer.forward(indexer, hidden[b : b + 1, begin:end], q_resid[b : b + 1, begin:end], mask, None)
            row += [{begin + j for j in query if j >= 0} for query in found[0].tolist()]
        rows.append(row)
    return rows


def hf_logits(backbone, head, ids, starts=None):
    """Logits of transformers' backbone under a plain head, each document by itself."""
    bounds = starts or (0, ids.shape[1])
    parts = [backbone(input_ids=ids[:, a:b], use_cache=False).last_hidden_state for a, b in zip(bounds, bounds[1:])]
    return F.linear(torch.cat(parts, 1), head)


def relative(a, b):
    """||a - b|| / ||b||; the absolute norm where b is zero."""
    a, b = a.detach().double(), b.detach().double()
    norm = b.norm().item()
    return (a - b).norm().item() / (norm if norm else 1.0)
