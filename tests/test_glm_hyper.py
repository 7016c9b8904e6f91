"""Hyper-connections: a site and whole layers against transformers', recompute bit for bit and what each kind of it keeps, four
streams as inputs of the offload."""

import pytest
import torch
from torch import nn

from experiments.glm_live import site_bytes
from tests.glm_modules import assert_all_close, assert_all_equal, make, passes, random, replaced
from tests.plain import assert_close
from upipe.glm.hyper import collapse, expand, sinkhorn
from upipe.glm.kda import KDAConfig, linear_attention
from upipe.glm.moe import MoEConfig, mixture_of_experts
from upipe.offload import CheckpointConfig, apply_checkpointing

B, L, N, D = 2, 35, 4, 32
WEIGHTS = random(B, L, N, seed=2), random(B, L, N, N, seed=3), random(B, L, D, seed=4)


@pytest.mark.parametrize("tile", [8, 1000])
def test_a_site_is_that_of_transformers_and_recompute_changes_no_bit(tile):
    connection, X = make("HyperConnection"), random(B, L, N, D)
    expected = passes(connection, X, connection, WEIGHTS)
    got = {mode: passes(connection, X, lambda t, mode=mode: collapse(connection, t, mode, tile), WEIGHTS) for mode in ("none", "selective")}
    assert_all_close(got["none"], expected, 1e-5)
    assert_all_equal(got["selective"], got["none"])
    replaced(connection, hyper_tile_tokens=tile)
    assert_all_equal(passes(connection, X, connection, WEIGHTS), got["none"])


def test_the_mapping_of_bf16_streams_is_fp32():
    connection, X = make("HyperConnection"), random(B, L, N, D).bfloat16()
    post, comb, y = collapse(connection, X)
    wide = collapse(connection, X.float())
    assert y.dtype == torch.bfloat16 and torch.equal(post, wide[0]) and torch.equal(comb, wide[1])
    assert_close("y", y.float(), wide[2], 4e-3)


def test_sinkhorn_makes_doubly_stochastic_matrices():
    comb = sinkhorn(random(50, N, N), 20, 1e-6)
    assert (comb.sum(-2) - 1).abs().max() < 1e-5 and (comb.sum(-1) - 1).abs().max() < 1e-3
    with pytest.raises(ValueError, match="'full'.*none or selective.*upipe.offload"):
        collapse(make("HyperConnection"), random(B, L, N, D), "full")


class Layer(nn.Module):
    """transformers' decoder layer computed by upipe.glm."""

    def __init__(self, layer, recompute):
        super().__init__()
        self.layer, self.recompute = layer, recompute

    def forward(self, streams):
        layer = self.layer
        post, comb, x = collapse(layer.attn_hc, streams, self.recompute, 16)
        x = linear_attention(layer.self_attn, layer.input_layernorm(x), config=KDAConfig(heads_per_group=3))
        streams = expand(streams, x, post, comb)
        post, comb, x = collapse(layer.ffn_hc, streams, self.recompute, 16)
        x = layer.post_attention_layernorm(x)
        x = mixture_of_experts(layer.mlp, x, MoEConfig(16)) if hasattr(layer.mlp, "experts") else layer.mlp(x)
        return expand(streams, x, post, comb)


def layers(recompute="selective"):
    """A dense layer and a MoE layer, the same values at every call."""
    made = [make("DecoderLayer", seed=i, mlp_layer_types=[kind] * 8) for i, kind in enumerate(("dense", "sparse"))]
    return nn.ModuleList(Layer(layer, recompute) for layer in made)


def through(stack, layer=lambda layer, t: layer(t)):
    def run(t):
        for each in stack:
            t = layer(each, t)
        return t

    return run


def test_layers_are_those_of_transformers():
    stack, X, w = layers(), random(B, L, N, D), random(B, L, N, D, seed=2)
    expected = passes(stack, X, through(stack, lambda layer, t: layer.layer(t)[0]), (w,))
    assert_all_close(passes(stack, X, through(stack), (w,)), expected, 1e-5)


@pytest.mark.parametrize("offload", ["none", "pinned", "pageable"])
def test_recompute_none_selective_and_full_are_the_same_bits(offload):
    """Full: only the layers' four streams are kept, and those on the host with an offload."""
    X, w = random(B, L, N, D), random(B, L, N, D, seed=2)
    plain, stack = layers("none"), layers("selective")
    expected = passes(plain, X, through(plain), (w,))
    if offload == "none":
        assert_all_equal(passes(stack, X, through(stack), (w,)), expected)
    config = CheckpointConfig(offload=offload, keep_layers_on_gpu=0, staging_mib=1, staging_chunks=2)
    handle = apply_checkpointing(stack, config, layers=list(stack))
    try:
        assert_all_equal(passes(stack.train(), X, through(stack), (w,)), expected)
        report = handle.end_step()
    finally:
        handle.remove()
    assert report.layer_calls == 2 and report.bytes_to_host == (0 if offload == "none" else 2 * X.nbytes)


def test_what_recompute_keeps():
    """y and comb and post in fp32 (and their bf16 copies) with selective; the 4 D fp32 streams three times and Sinkhorn with none."""
    got = {mode: site_bytes(mode, 64, (256, 512), 64) for mode in ("none", "selective", "full")}
    between = {mode: value[0] for mode, value in got.items()}
    y, maps, stream = 64 * 2, (N + N * N) * (4 + 2), N * 64
    assert between["full"] <= 1
    assert between["selective"] <= y + maps + 1
    assert between["none"] >= between["selective"] + 2 * 4 * stream
    assert got["none"][1] > 2 * got["selective"][1], got
