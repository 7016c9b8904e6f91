"""Small GLM-5.3-Flash modules of transformers, their values and gradients: the side that `upipe.glm` is compared with."""

import torch
import torch.distributed as dist
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from tests.plain import assert_close
from upipe.glm import GlmRuntime, GlmSettings, TokenSplit
from upipe.glm.model import replace_modules


def tiny_glm(**more):
    """A text configuration: 8 KDA heads of 8, 8 experts of which 2 are chosen."""
    values = dict(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, v_head_dim=16, linear_num_heads=8, linear_head_dim=8, index_n_heads=32,
        index_head_dim=8, index_topk=16, index_kpool=4, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    return Glm5NextTextConfig(**{**values, **more})


def make(name, seed=0, **config):
    """transformers' Glm5NextText<name> of the tiny configuration with sizeable random values, the same in every process."""
    cls = getattr(glm, f"Glm5NextText{name}")
    config = tiny_glm(**config)
    module = cls(config, 0) if name in ("LinearAttention", "DecoderLayer") else cls(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in sorted([*module.named_parameters(), *module.named_buffers()]):
            spread = p.shape[-1] ** -0.5 if p.dim() >= 2 and "conv1d" not in key else 0.5
            p.copy_(torch.randn(p.shape, generator=generator) * spread)
    return module


def random(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def passes(module, x, function, weights):
    """Outputs, dx and every parameter's gradient of sum(outputs * weights)."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    outs = function(x)
    outs = outs if isinstance(outs, tuple) else (outs,)
    sum((out * w).sum() for out, w in zip(outs, weights)).backward()
    got = {f"output {i}": out.detach() for i, out in enumerate(outs)} | {"dx": x.grad}
    return got | {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_all_close(got, expected, tolerance):
    assert got.keys() == expected.keys() and expected
    for name in expected:
        assert_close(name, got[name], expected[name], tolerance)


def assert_all_equal(got, expected):
    assert got.keys() == expected.keys() and expected
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def split_of(ulysses):
    """Of all ranks, so many Ulysses ranks in each of a ring."""
    return TokenSplit.of(dist.group.WORLD, ulysses)


def replaced(module, **settings):
    """transformers' module, and those in it, with the classes of `replacements`; the settings' defaults changed."""
    runtime = GlmRuntime(GlmSettings(**settings))
    replace_modules(module, runtime)
    return module


def summed(grads):
    """Parameters' gradients summed over all ranks."""
    for grad in grads.values():
        dist.all_reduce(grad)
    return grads
