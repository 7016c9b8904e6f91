"""What DeepSpeed's own FPDT attention does, on which `method: fpdt` is this library's form and not a wrapper of it: with its two
calls of flash-attn 2 replaced it is exact on the device where chunks divide the length and every rank has a kv head; it takes
nothing else, and its form with offload needs a GPU."""

import types

import pytest
import torch
import torch.distributed as dist
from packaging import version

from tests.plain import relative_error
from upipe import reference
from upipe.kernels import ReferenceAttention
from upipe.methods.layouts import Chunked
from upipe.ring import FullReferenceAttention


def layer(heads, kv_heads, chunk, w, bias, wo):
    from deepspeed.sequence.fpdt_layer import FPDT_Attention

    described = types.SimpleNamespace(kv_channels=8, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=16,
                                      attention_dropout=0.0)
    return FPDT_Attention(described, w, bias, wo, torch.zeros(16), dist.group.WORLD, gather_idx=1, chunk_size=chunk,
                          enable_offloading=False)


def errors(heads, kv_heads, chunks):
    """-> relative errors of output and gradients in fp32 on 16 tokens a rank, or the message of what DeepSpeed raises."""
    from deepspeed.sequence import fpdt_layer

    def forward(q, k, v, dropout, scale, causal, **more):
        out, lse = (ReferenceAttention() if causal else FullReferenceAttention()).forward(q, k, v, scale)
        return out, lse, None, None

    def backward(grad, q, k, v, out, lse, dq, dk, dv, dropout, scale, causal, *more, **rest):
        kernel = ReferenceAttention() if causal else FullReferenceAttention()
        kernel.backward(grad, q, k, v, out, lse, scale, dq=dq, dk=dk, dv=dv)

    P, rank = dist.get_world_size(), dist.get_rank()
    S, d, g = 16 * P, 8, torch.Generator().manual_seed(0)
    x, grad, w, bias, wo = (torch.randn(*shape, generator=g) / part for *shape, part in (
        (1, S, 16, 1), (1, S, 16, 1), ((heads + 2 * kv_heads) * d, 16, 4), ((heads + 2 * kv_heads) * d, 4), (16, heads * d, 8)))
    angles = torch.arange(S)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).repeat(2)
    own = torch.cat([torch.arange(p.start, p.stop) for p in Chunked(P, S // chunks).pieces(S, rank)])
    leaves = [t.clone().requires_grad_() for t in (x[:, own].transpose(0, 1), w, bias, wo)]
    names = ("_flash_attn_forward", "_flash_attn_backward", "flash_attn_version")
    before = {name: vars(fpdt_layer).get(name) for name in names}
    try:
        for name, value in zip(names, (forward, backward, version.parse("2.7.4"))):
            setattr(fpdt_layer, name, value)
        rope = angles.cos()[:, None, None], angles.sin()[:, None, None]
        y, _ = layer(heads, kv_heads, S // chunks, *leaves[1:])(leaves[0], None, None, rope, cpu_offloading=False)
        y.backward(grad[:, own].transpose(0, 1))
    except AssertionError as error:
        return str(error)
    finally:
        for name, value in before.items():
            setattr(fpdt_layer, name, value)
    for leaf in leaves[1:]:
        dist.all_reduce(leaf.grad)
    plain = [t.clone().requires_grad_() for t in (x, w, bias, wo)]
    rows = [heads * d, kv_heads * d, kv_heads * d]
    want = reference.attention_block(plain[0], *plain[1].split(rows), plain[3], angles.cos()[None], angles.sin()[None], d, d**-0.5,
                                     *plain[2].split(rows))
    want.backward(grad)
    found = {"y": relative_error(y.transpose(0, 1), want[:, own])}
    found["dx"] = relative_error(leaves[0].grad.transpose(0, 1), plain[0].grad[:, own])
    return found | {name: relative_error(a.grad, b.grad) for name, a, b in zip(("dw", "dbias", "dwo"), leaves[1:], plain[1:])}


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_exact_on_the_device_with_our_kernel_in_place_of_its(worlds, heads, chunks):
    for found in worlds(2).run(errors, heads=heads[0], kv_heads=heads[1], chunks=chunks):
        assert max(found.values()) < 1e-5, found


@pytest.mark.slow
def test_it_wants_a_kv_head_a_rank(worlds):
    for found in worlds(2).run(errors, heads=4, kv_heads=1, chunks=2):
        assert "Number of key-value heads (1) must be at least the sequence parallel size (2)" in found


def built():
    with pytest.raises(ImportError, match="requires flash-attn"):
        layer(4, 4, 8, *(torch.zeros(1),) * 3)


@pytest.mark.slow
def test_it_wants_flash_attn_2(worlds):
    try:
        import flash_attn.flash_attn_interface  # noqa: F401
    except ImportError:
        worlds(1).run(built)
    else:
        pytest.skip("flash-attn 2 is installed")
