"""Every attention kernel that runs on a CPU against the definition, forward and backward, with unwritten memory poisoned."""

import resource

import pytest
import torch

from tests.plain import assert_close
from upipe import kernels, reference

TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-6, torch.bfloat16: 1.5e-2}
NAMES = ("flash", "reference")
#         B, S, h, n, d
SHAPES = [(1, 1, 1, 1, 8), (1, 63, 4, 2, 8), (2, 100, 3, 1, 6), (1, 33, 5, 5, 80), (2, 17, 8, 1, 7), (1, 1100, 2, 1, 16),
          (1, 257, 28, 7, 4)]


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty gives NaN, so an output that is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def kernel_of(name, q):
    return kernels.select(name, kernels.Case.of(q))


def inputs(B, S, h, n, d, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v, grad = (torch.randn(B, S, heads, d, generator=g, dtype=torch.float64).to(dtype) for heads in (h, n, n, h))
    return q * 2, k, v, grad


def check(name, q, k, v, grad, scale, offsets, tolerance):
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want, want_lse = reference.attention(*wide, scale, offsets)
    want.backward(grad.double())
    kernel = kernel_of(name, q)
    out, lse = kernel.forward(q, k, v, scale, offsets)
    assert out.dtype == q.dtype and out.shape == q.shape
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert_close("out", out, want, tolerance)
    assert_close("log-sum-exp", lse, want_lse, tolerance, zero_tolerance=tolerance)
    got = kernel.backward(grad, q, k, v, out, lse, scale, offsets)
    for which, g, t in zip("qkv", got, wide):
        assert g.dtype == q.dtype
        scale_of = max(1.0, float(grad.double().norm()))
        if float(t.grad.norm()) < 1e-9 * scale_of:
            assert float(g.double().abs().max()) < 1e-2 * scale_of * tolerance, f"gradient of {which} should vanish"
        else:
            assert_close(f"gradient of {which}", g, t.grad, tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernel_is_the_definition(name, shape, dtype):
    check(name, *inputs(*shape, dtype), 0.3, None, TOLERANCE[dtype])


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_see_their_own_document_only(name):
    q, k, v, grad = inputs(2, 50, 4, 2, 8, torch.float32)
    check(name, q, k, v, grad, 0.3, ((0, 13, 14, 37, 50), (0, 50)), TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", NAMES)
def test_a_document_s_output_does_not_depend_on_the_others(name):
    q, k, v, grad = inputs(1, 40, 2, 1, 8, torch.float32)
    kernel = kernel_of(name, q)
    out, _ = kernel.forward(q, k, v, 0.3, ((0, 11, 40),))
    alone, _ = kernel.forward(q[:, 11:], k[:, 11:], v[:, 11:], 0.3, None)
    assert_close("second document", out[:, 11:], alone, 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_slices_of_larger_tensors(name):
    """The block hands a kernel some heads of a [S, B, heads, d] buffer, transposed."""
    q, k, v, grad = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in inputs(2, 21, 6, 3, 8, torch.float32))
    check(name, q[:, :, 2:4], k[:, :, 1:2], v[:, :, 1:2], grad[:, :, 2:4].contiguous(), 0.3, None, TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_do_not_overflow(name):
    """Scores of several hundred: the softmax is all but one-hot, q's and k's gradients all but nothing, nothing is NaN."""
    q, k, v, grad = inputs(1, 30, 2, 2, 8, torch.float32)
    q, k = q * 40, k * 5
    want, want_lse = reference.attention(q.double(), k.double(), v.double().requires_grad_(), 1.0)
    kernel = kernel_of(name, q)
    out, lse = kernel.forward(q, k, v, 1.0)
    assert float(lse.max()) > 200
    assert_close("out", out, want, 1e-4)
    assert_close("log-sum-exp", lse, want_lse, 1e-6)
    assert all(g.isfinite().all() for g in kernel.backward(grad, q, k, v, out, lse, 1.0))


def peak_growth(name, tokens):
    """MiB by which the process's peak grows over one forward and backward."""
    q, k, v, grad = inputs(1, tokens, 2, 1, 16, torch.float32)
    kernel = kernel_of(name, q)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out, lse = kernel.forward(q, k, v, 0.25)
    kernel.backward(grad, q, k, v, out, lse, 0.25)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_not_quadratic_at_8k_tokens(worlds, name):
    """Less than one copy of the scores of 2 heads over 8192 tokens, where a plain backward holds three."""
    assert worlds(1).run(peak_growth, name=name, tokens=8192)[0] < 2 * 8192**2 * 4 / 2**20


def test_auto_takes_the_fastest_that_can():
    q = torch.zeros(1, 4, 1, 8)
    assert kernel_of("auto", q).name == "flash"


def test_unknown_kernel_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'fastest'.*auto.*flash.*reference"):
        kernel_of("fastest", torch.zeros(1, 4, 1, 8))


@pytest.mark.parametrize("name", ["fa4", "cudnn"])
def test_gpu_kernels_are_refused_on_a_cpu_with_what_works(name):
    with pytest.raises(ValueError, match=f"{name}.*float32.*head_dim 8.*cpu.*flash, reference"):
        kernel_of(name, torch.zeros(1, 4, 1, 8))


@pytest.mark.parametrize("S,window,softcap,offsets", [
    (1300, 600, None, None), (1100, 1, None, None), (900, 5000, 3.0, None), (700, None, 2.0, None),
    (1200, 130, 4.0, ((0, 513, 1025, 1200),)),
])
def test_windows_and_softcap(S, window, softcap, offsets):
    """Across the borders of the reference kernel's chunks of 512 queries."""
    q, k, v, grad = inputs(1, S, 4, 2, 8, torch.float64)
    wide = [t.clone().requires_grad_() for t in (q, k, v)]
    want, want_lse = reference.attention(*wide, 0.5, offsets, window, softcap)
    want.backward(grad)
    kernel = kernels.select("auto", kernels.Case.of(q, window=window is not None, softcap=softcap is not None))
    assert kernel.name == "reference"
    out, lse = kernel.forward(q, k, v, 0.5, offsets, window, softcap)
    assert_close("out", out, want, 1e-11)
    assert_close("log-sum-exp", lse, want_lse, 1e-11)
    for which, got, t in zip("qkv", kernel.backward(grad, q, k, v, out, lse, 0.5, offsets, window, softcap), wide):
        if float(t.grad.norm()) > 1e-9:
            assert_close(f"gradient of {which}", got, t.grad, 1e-10)
        else:
            assert float(got.abs().max()) < 1e-9
