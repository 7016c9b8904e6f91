"""Rotation and RMS norm by hand against the definitions, forward and backward."""

import pytest
import torch

from tests.plain import assert_close
from upipe import reference
from upipe.rotary import rms_norm, rms_norm_backward, rotate

SHAPES = [(7, 3, 8, 8), (63, 1, 6, 6), (5, 28, 4, 4), (9, 2, 12, 4), (1, 5, 80, 80)]      # rows, heads, d, R
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3}


def angles(rows, R, factor=1.0, seed=0):
    """cos, sin [rows, 1, R] as Hugging Face makes them: the angle of dim i again at dim i + R/2."""
    g = torch.Generator().manual_seed(seed)
    half = torch.rand(rows, 1, R // 2, generator=g, dtype=torch.float64) * 20 - 10
    angle = torch.cat((half, half), -1)
    return angle.cos() * factor, angle.sin() * factor


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def defined(x, cos, sin):
    """The reference wants [B, S, h, d] and [B, S, R]."""
    return reference.rotate(x[None], cos[:, 0][None], sin[:, 0][None])[0]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows, heads, d, R", SHAPES)
def test_rotate_is_the_definition(rows, heads, d, R, dtype):
    x = random(rows, heads, d).to(dtype)
    cos, sin = angles(rows, R)
    got = rotate(x, cos.to(dtype), sin.to(dtype))
    assert got.dtype == dtype and got.data_ptr() != x.data_ptr()
    assert_close("rotated", got, defined(x.double(), cos.to(dtype).double(), sin.to(dtype).double()), TOLERANCE[dtype])


@pytest.mark.parametrize("factor", [1.0, 1.2])
@pytest.mark.parametrize("rows, heads, d, R", SHAPES)
def test_inverse_rotation_is_the_backward(rows, heads, d, R, factor):
    x = random(rows, heads, d).requires_grad_()
    grad = random(rows, heads, d, seed=2)
    cos, sin = angles(rows, R, factor)
    defined(x, cos, sin).backward(grad)
    assert_close("gradient", rotate(grad, cos, sin, inverse=True), x.grad, 1e-12)


def test_backward_does_not_assume_the_two_halves_are_equal():
    """M-RoPE-like tables give the two halves of a pair different angles; the transpose must follow."""
    x = random(6, 2, 8).requires_grad_()
    grad = random(6, 2, 8, seed=2)
    cos, sin = random(6, 1, 8, seed=3), random(6, 1, 8, seed=4)
    defined(x, cos, sin).backward(grad)
    assert_close("rotated", rotate(x.detach(), cos, sin), defined(x.detach(), cos, sin), 1e-12)
    assert_close("gradient", rotate(grad, cos, sin, inverse=True), x.grad, 1e-12)


def test_rotation_turns_the_way_hugging_face_turns():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    cos, sin = angles(9, 8)
    q, k = random(9, 3, 8), random(9, 2, 8, seed=5)
    want_q, want_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[:, 0][None], sin[:, 0][None])
    assert_close("q", rotate(q, cos, sin), want_q[0].transpose(0, 1), 1e-12)
    assert_close("k", rotate(k, cos, sin), want_k[0].transpose(0, 1), 1e-12)


def test_dims_beyond_the_rotated_ones_pass_through():
    x = random(4, 2, 10)
    cos, sin = angles(4, 6)
    assert torch.equal(rotate(x, cos, sin)[..., 6:], x[..., 6:])
    assert torch.equal(rotate(x, cos, sin, inverse=True)[..., 6:], x[..., 6:])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows, heads, d", [(7, 3, 8), (63, 1, 6), (1, 28, 5)])
def test_rms_norm_is_the_definition(rows, heads, d, dtype):
    x, weight = random(rows, heads, d).to(dtype), random(d, seed=2).to(dtype)
    got = rms_norm(x, weight, 1e-3)
    assert got.dtype == dtype
    assert_close("normed", got, reference.rms_norm(x.double(), weight.double(), 1e-3), TOLERANCE[dtype])


@pytest.mark.parametrize("rows, heads, d", [(7, 3, 8), (63, 1, 6), (1, 28, 5)])
def test_rms_norm_backward_is_the_backward(rows, heads, d):
    x, weight = random(rows, heads, d).requires_grad_(), random(d, seed=2).requires_grad_()
    grad = random(rows, heads, d, seed=3)
    reference.rms_norm(x, weight, 1e-3).backward(grad)
    grad_x, grad_weight = rms_norm_backward(grad, x.detach(), weight.detach(), 1e-3)
    assert_close("x", grad_x, x.grad, 1e-12)
    assert_close("weight", grad_weight, weight.grad, 1e-12)


def test_rms_norm_backward_sums_bf16_in_fp32():
    x, weight = random(4096, 1, 8).bfloat16(), random(8, seed=2).bfloat16()
    grad = (1 + 0.1 * random(4096, 1, 8, seed=3)).bfloat16()
    wide = [t.double().requires_grad_() for t in (x, weight)]
    reference.rms_norm(*wide, 1e-3).backward(grad.double())
    grad_x, grad_weight = rms_norm_backward(grad, x, weight, 1e-3)
    assert grad_x.dtype == torch.bfloat16 and grad_weight.dtype == torch.float32
    assert_close("x", grad_x, wide[0].grad, TOLERANCE[torch.bfloat16])
    assert_close("weight", grad_weight, wide[1].grad, 1e-5)
