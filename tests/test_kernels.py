"""Every attention kernel that runs on a CPU against the definition, forward and backward, with unwritten memory poisoned;
kernels of packages that are not here against stand-ins with the packages' parameter lists; the choice of a kernel."""

import importlib
import itertools
import json
import resource
import sys
from pathlib import Path

import pytest
import torch

from tests.plain import assert_close
from upipe import kernels, reference
from upipe.kernels import Case

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


def slice_of_wider(t):
    """t's values in a slice [:, :, 1:-2] of the heads of a [S, B, heads, d] buffer, transposed, and that buffer."""
    B, S, heads, d = t.shape
    whole = torch.full((S, B, heads + 3, d), torch.nan, dtype=t.dtype)
    part = whole[:, :, 1:-2].transpose(0, 1)
    part.copy_(t)
    return part, whole


@pytest.mark.parametrize("offsets", [None, ((0, 8, 21), (0, 21))], ids=["dense", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_slices_of_larger_tensors(name, offsets):
    """The block hands a kernel some heads of a [S, B, heads, d] buffer, transposed, and buffers of that kind for results.
    The same values as from contiguous tensors, nothing written beside them, with dq in its own memory and in out's."""
    q, k, v, grad = inputs(2, 21, 4, 2, 8, torch.float32)
    check(name, *(slice_of_wider(t)[0] for t in (q, k, v, grad)), 0.3, offsets, TOLERANCE[torch.float32])
    kernel = kernel_of(name, q)
    want, want_lse = kernel.forward(q, k, v, 0.3, offsets)
    want_grads = kernel.backward(grad, q, k, v, want, want_lse, 0.3, offsets)
    views = [slice_of_wider(t)[0] for t in (q, k, v)]
    out, wider_out = slice_of_wider(torch.zeros_like(q))
    got, lse = kernel.forward(*views, 0.3, offsets, out=out)
    assert got is out and torch.equal(out, want) and torch.equal(lse, want_lse)
    wider_lse = torch.full((2, 7, 30), torch.nan)
    wider_lse[:, 1:5, 4:25] = lse
    for over_out in (False, kernel.dq_over_out):
        dq, dk, dv = (slice_of_wider(torch.zeros_like(t)) for t in (q, k, v))
        dq = (out, wider_out) if over_out else dq
        buffers = dict(zip(("dq", "dk", "dv"), (part for part, _ in (dq, dk, dv))))
        grads = kernel.backward(slice_of_wider(grad)[0], *views, out, wider_lse[:, 1:5, 4:25], 0.3, offsets, **buffers)
        for which, result, expected in zip(buffers, grads, want_grads):
            assert result is buffers[which] and torch.equal(result, expected), which
        for part, whole in (dq, dk, dv):
            assert whole.isnan().sum() == whole[:, :, :3].numel() and not part.isnan().any()
    assert over_out, "dq over out was not tried"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_buffers_of_every_dtype(name, dtype):
    q, k, v, grad = inputs(1, 600, 4, 1, 8, dtype)
    kernel = kernel_of(name, q)
    want, lse = kernel.forward(q, k, v, 0.3)
    want_grads = kernel.backward(grad, q, k, v, want, lse, 0.3)
    out = torch.empty_like(q)
    kernel.forward(q, k, v, 0.3, out=out)
    assert torch.equal(out, want)
    got = kernel.backward(grad, q, k, v, out, lse, 0.3, dq=out, dk=torch.empty_like(k), dv=torch.empty_like(v))
    assert got[0] is out and all(torch.equal(a, b) for a, b in zip(got, want_grads))


@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_of_another_shape_or_dtype_is_refused(name):
    """copy_ would broadcast it or round to it."""
    q, k, v, grad = inputs(1, 6, 2, 1, 8, torch.float32)
    kernel = kernel_of(name, q)
    with pytest.raises(ValueError, match=r"buffer out is .*\[1, 6, 1, 8\].*must be .*\[1, 6, 2, 8\]"):
        kernel.forward(q, k, v, 0.3, out=torch.empty_like(k))
    out, lse = kernel.forward(q, k, v, 0.3)
    with pytest.raises(ValueError, match="buffer dv is .*float64.*must be .*float32"):
        kernel.backward(grad, q, k, v, out, lse, 0.3, dv=v.double())


def test_determinism_asked_for_with_warnings_only_is_given():
    """torch's flash backward takes it for no request, so it runs under the strict setting, which is then as it was."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(KeyError), kernels._deterministic_if_asked():
        assert not torch.is_deterministic_algorithms_warn_only_enabled() and torch.are_deterministic_algorithms_enabled()
        raise KeyError
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    with kernels._deterministic_if_asked():
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", NAMES)
def test_two_backward_passes_give_the_same_bits(name):
    """Both kernels say that they repeat, on a CPU without being asked; two threads share the work here."""
    torch.use_deterministic_algorithms(False)
    q, k, v, grad = inputs(2, 530, 4, 2, 8, torch.float32)
    kernel, threads = kernel_of(name, q), torch.get_num_threads()
    assert kernel.deterministic in ("always", "on request")
    torch.set_num_threads(2)
    try:
        out, lse = kernel.forward(q, k, v, 0.3)
        runs = [kernel.backward(grad, q, k, v, out, lse, 0.3) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


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


# Kernels of packages

SIGNATURES = {
    # flash-attn-4 4.0.0b36
    "flash_attn.cute.interface": {
        "_flash_attn_fwd": (
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, "
            "causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, "
            "tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, "
            "_arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, "
            "lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, "
            "gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None, "
            "disable_scheduler_metadata=False, gather_bwd_recompute_p=False"
        ),
        "_flash_attn_bwd": (
            "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
            "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, "
            "num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, "
            "AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, "
            "seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, "
            "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, "
            "block_sparse_tensors=None, dlse=None, learnable_sink=None"
        ),
    },
    # Dao-AILab/flash-attention, hopper/flash_attn_interface.py, commit 01afd16
    "flash_attn_interface": {
        "_flash_attn_forward": (
            "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
            "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
            "page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, "
            "seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
            "window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
            "scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0"
        ),
        "_flash_attn_backward": (
            "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, "
            "window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0"
        ),
    },
    # flash-attn 2.8.3.post2
    "flash_attn.flash_attn_interface": {
        "_flash_attn_forward": (
            "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
            "return_softmax"
        ),
        "_flash_attn_backward": (
            "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, "
            "window_size_right, softcap, alibi_slopes, deterministic, rng_state=None"
        ),
    },
}
MODULES = {"fa4": "flash_attn.cute.interface", "fa3": "flash_attn_interface", "fa2": "flash_attn.flash_attn_interface"}
PACKAGED = {kernel.name: kernel for kernel in kernels.KERNELS if kernel.name in MODULES}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name) puts a module with the parameter lists of that kernel's package on the path; its functions compute by
    the definition. Returns the list of calls they get: (name of the function, its arguments)."""
    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
            del sys.modules[name]

    def install(name):
        module = MODULES[name]
        path = tmp_path / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.parents:
            if tmp_path in parent.parents:
                (parent / "__init__.py").touch()
        path.write_text("calls = []\n" + "".join(
            f"def {function}({parameters}):\n    calls.append(({function!r}, locals()))\n    return answer(*calls[-1])\n"
            for function, parameters in SIGNATURES[module].items()
        ))
        importlib.invalidate_caches()
        forget()
        made = importlib.import_module(module)
        made.answer = answer
        return made.calls

    forget()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    forget()


def answer(function, given):
    """What the functions of the packages return, by the definition, in the packages' shapes; asserts what they require."""
    q, k, v = given["q"], given["k"], given["v"]
    is_fa4, is_fa2 = function.endswith(("fwd", "bwd")), "dropout_p" in given
    varlen = given.get("cu_seqlens_q") is not None
    assert q.dim() == (3 if varlen else 4) and all(t.stride(-1) == 1 for t in (q, k, v))
    offsets = None
    if varlen:
        starts = given["cu_seqlens_q"]
        assert starts.dtype == torch.int32 and torch.equal(starts, given["cu_seqlens_k"])
        assert given["max_seqlen_q"] == given["max_seqlen_k"] == int(starts.diff().max())
        offsets, (q, k, v) = (tuple(starts.tolist()),), (t[None] for t in (q, k, v))
    causal = given["is_causal" if "is_causal" in given else "causal"]
    left, right = given["window_size_left"], given["window_size_right"]
    free = None if is_fa4 else -1
    assert (causal, left, right) == (True, free, free) or (not causal and left >= 0 and right == 0)
    window = None if causal else left + 1
    if is_fa2:
        assert given["dropout_p"] == 0.0 and given["alibi_slopes"] is None and not given.get("return_softmax")
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = reference.attention(*wide, given["softmax_scale"], offsets, window, given["softcap"] or None)
    if function in ("_flash_attn_fwd", "_flash_attn_forward"):
        out, lse = out.detach().to(q.dtype), lse.detach().float()
        if varlen:
            out, lse = out[0], lse[0]
        if given.get("out") is not None:
            out = given["out"].copy_(out)
        return (out, lse, None, None, None) if is_fa4 else (out, lse, None, None)
    grad, stats = given["dout"], given["lse" if is_fa4 else "softmax_lse"]
    assert stats.is_contiguous() and stats.shape == (lse[0] if varlen else lse).shape
    out.backward((grad[None] if varlen else grad).double())
    done = []
    for name, source, like in zip(("dq", "dk", "dv"), wide, (given["q"], given["k"], given["v"])):
        assert is_fa4 or given[name] is not None, "the package's function returns no gradients"
        buffer = torch.empty_like(like) if given[name] is None else given[name]
        assert buffer.shape == like.shape and buffer.stride(-1) == 1
        done.append(buffer.copy_(source.grad[0] if varlen else source.grad))
    return tuple(done) if is_fa4 else None


@pytest.mark.parametrize("window,softcap", [(None, None), (5, None), (None, 2.0)])
@pytest.mark.parametrize("name", MODULES)
def test_packages_are_called_by_their_parameter_lists(install, name, window, softcap):
    calls = install(name)
    q, k, v, grad = inputs(2, 20, 4, 2, 8, torch.float32)
    kernel, options = PACKAGED[name], {"window": window, "softcap": softcap}
    torch.use_deterministic_algorithms(window is None)
    views = [slice_of_wider(t)[0] for t in (q, k, v)]
    given = slice_of_wider(torch.zeros_like(q))[0]
    out, lse = kernel.forward(*views, 0.3, **options, out=given)
    assert out is given
    buffers = {name: slice_of_wider(torch.zeros_like(t))[0] for name, t in zip(("dq", "dk", "dv"), (q, k, v))}
    wider_lse = torch.full((2, 7, 24), torch.nan)
    wider_lse[:, 1:5, 2:22] = lse
    grads = kernel.backward(grad, *views, out, wider_lse[:, 1:5, 2:22], 0.3, **options, **buffers)
    assert all(got is buffer for got, buffer in zip(grads, buffers.values()))
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    want, want_lse = reference.attention(*wide, 0.3, None, window, softcap)
    want.backward(grad.double())
    for which, a, b in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), (want, want_lse, *(t.grad for t in wide))):
        assert_close(which, a, b, 1e-6)
    (_, forward), (_, backward) = calls
    assert backward["deterministic"] == (window is None)
    assert kernel.writes_gradients and all(backward[name].data_ptr() == t.data_ptr() for name, t in buffers.items())
    if name == "fa4":
        assert forward["return_lse"] and forward["out"] is given


@pytest.mark.parametrize("name", MODULES)
def test_packages_get_copies_of_what_is_not_aligned(install, name):
    """Rows of 6 fp32 numbers start at multiples of 24 bytes. FlashAttention-4 copies its inputs itself, not its outputs."""
    calls = install(name)
    q, k, v, grad = inputs(1, 20, 2, 2, 6, torch.float32)
    views = [slice_of_wider(t)[0] for t in (q, k, v)]
    kernel = PACKAGED[name]
    out, lse = kernel.forward(*views, 0.3, out=slice_of_wider(torch.zeros_like(q))[0])
    buffers = {name: slice_of_wider(torch.zeros_like(t))[0] for name, t in zip(("dq", "dk", "dv"), (q, k, v))}
    grads = kernel.backward(grad, *views, out, lse, 0.3, **buffers)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    want, _ = reference.attention(*wide, 0.3)
    want.backward(grad.double())
    for which, a, b in zip(("out", "dq", "dk", "dv"), (out, *grads), (want, *(t.grad for t in wide))):
        assert_close(which, a, b, 1e-6)
    (_, forward), (_, backward) = calls
    assert all(got is buffer for got, buffer in zip(grads, buffers.values()))
    assert not any(backward[name] is not None and backward[name].data_ptr() == t.data_ptr() for name, t in buffers.items())
    assert forward.get("out") is None
    if name != "fa4":
        assert all(given["q"].is_contiguous() for given in (forward, backward))


LONG_ROW = tuple(itertools.accumulate([7, 3, 1, 20, 5, 9, 2, 8, 11, 4], initial=0))


@pytest.mark.parametrize("deterministic", [False, True])
def test_fa4_takes_many_documents_in_one_call(install, deterministic):
    """One call for the row of ten documents, two for the row of two; one a document where determinism is asked for."""
    calls = install("fa4")
    torch.use_deterministic_algorithms(deterministic)
    q, k, v, grad = inputs(2, 70, 4, 2, 8, torch.float32)
    offsets = (LONG_ROW, (0, 30, 70))
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    want, want_lse = reference.attention(*wide, 0.3, offsets, 6)
    want.backward(grad.double())
    kernel = PACKAGED["fa4"]
    out, lse = kernel.forward(*(slice_of_wider(t)[0] for t in (q, k, v)), 0.3, offsets, 6)
    grads = kernel.backward(grad, q, k, v, out, lse, 0.3, offsets, 6, dq=out)
    assert grads[0] is out
    for which, a, b in zip(("out", "lse", "dq", "dk", "dv"), (want, lse, *grads), (want, want_lse, *(t.grad for t in wide))):
        assert_close(which, a, b, 1e-6)
    documents = [1] * 12 if deterministic else [10, 1, 1]
    assert [1 if given["cu_seqlens_q"] is None else len(given["cu_seqlens_q"]) - 1 for _, given in calls] == documents * 2


def test_fa4_bounds_the_documents_of_one_call():
    """Each document is padded to whole blocks of up to 128 tokens: at most a quarter of a row of 1,048,576 tokens."""
    torch.use_deterministic_algorithms(False)
    row = tuple(range(0, 2**20 + 1, 4))
    runs = list(PACKAGED["fa4"]._runs((row,)))
    assert all(number == 0 for number, _ in runs) and all(a[-1] == b[0] for (_, a), (_, b) in itertools.pairwise(runs))
    assert tuple(dict.fromkeys(start for _, starts in runs for start in starts)) == row
    assert max(len(starts) - 1 for _, starts in runs) * 128 <= 2**20 // 4


def test_cudnn_leaves_documents_of_one_token_to_the_reference():
    """cuDNN takes no sequence of one token. With out and lse of a softmax with a sink, q and k have a gradient there too."""
    q, k, v, grad = inputs(1, 4, 4, 2, 8, torch.float32)
    offsets, sink = ((0, 1, 2, 3, 4),), 0.7
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    _, want_lse = reference.attention(*wide, 0.3, offsets)
    share = (want_lse - torch.logaddexp(want_lse, torch.tensor(sink, dtype=torch.float64))).exp().transpose(1, 2)[..., None]
    want = wide[2].repeat_interleave(2, dim=2) * share
    want.backward(grad.double())
    kernel = kernels.CudnnAttention()
    out, lse = kernel.forward(q, k, v, 0.3, offsets)
    assert_close("lse", lse, want_lse, 1e-6)
    assert_close("out", out, wide[2].repeat_interleave(2, dim=2), 1e-6)
    lse = torch.logaddexp(lse, torch.tensor(sink))
    grads = kernel.backward(grad, q, k, v, out * share.float(), lse, 0.3, offsets)
    for which, got, t in zip("qkv", grads, wide):
        assert_close(f"gradient of {which}", got, t.grad, 1e-6)


def test_dq_over_out_is_refused_by_a_kernel_that_may_read_out_later(install):
    install("fa2")
    q, k, v, grad = inputs(1, 6, 2, 1, 8, torch.float32)
    out, lse = PACKAGED["fa2"].forward(q, k, v, 0.3)
    with pytest.raises(ValueError, match="fa2.*not run by us.*dq_over_out is False"):
        PACKAGED["fa2"].backward(grad, q, k, v, out, lse, 0.3, dq=out)


def test_backward_bytes():
    """Multiples of tokens*d*2 bytes as measured on an H200 (2.0 and 5.0 for one head); the rest by FlashAttention-4's source, and
    cuDNN's number a query."""
    tokens, d = 2**20, 128
    unit = tokens * d * 2
    fa4, cudnn, flash, plain = kernels.KERNELS[:4]
    assert fa4.backward_bytes(tokens, 1, 1, d) == pytest.approx(2 * unit, rel=0.02)
    assert fa4.backward_bytes(tokens, 8, 8, d) == pytest.approx(16 * unit, rel=0.02)
    assert fa4.backward_bytes(tokens, 8, 2, d) == pytest.approx((16 + 8) * unit, rel=0.02)
    assert cudnn.backward_bytes(tokens, 3, 3, d) == 15 * unit + 4 * 3 * tokens
    assert cudnn.backward_bytes(tokens, 16, 4, d) == 88 * unit + 4 * 16 * tokens
    assert [kernel.backward_bytes(tokens, 4, 1, d) for kernel in (flash, plain)] == [None] * 2


def test_cudnns_backward_holds_what_was_measured():
    """Of each single call of `experiments.kernel_blocks` on an H200, to 1 KiB: the seed that it is called with."""
    path = Path(__file__).parents[1] / "experiments" / "results" / "kernel_blocks.jsonl"
    single = [r for r in map(json.loads, path.read_text().splitlines()) if r["kernel"] == "cudnn" and r["block_tokens"] is None]
    assert {(r["heads"], r["kv_heads"]) for r in single} == {(2, 1), (4, 1), (16, 4)}
    for r in single:
        stated = kernels.CudnnAttention().backward_bytes(r["tokens"], r["heads"], r["kv_heads"], r["head_dim"])
        assert 0 <= r["backward_extra_bytes"] - stated <= 1024, r["point"]


@pytest.mark.parametrize("heads, kv_heads, of_queries, of_keys", [(4, 1, 12, 10), (3, 3, 9, 6)])
def test_cudnns_backward_of_other_keys_than_queries(heads, kv_heads, of_queries, of_keys):
    """By its source. Multiples of d*2 bytes a token: of the queries dq and an fp32 sum of it, of the keys dk and dv, with grouped heads
    of each query head as well; and a number a query."""
    for queries, keys in ((512, 1024), (1024, 512), (1024, 1024)):
        stated = kernels.CudnnAttention().backward_bytes(queries, heads, kv_heads, 128, keys)
        assert stated == (of_queries * queries + of_keys * keys) * 128 * 2 + 4 * heads * queries


# The choice

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def installed(monkeypatch):
    """installed("flash-attn-4", ...): those packages are there, no others."""
    def installed(*packages):
        def missing(package, module):
            return None if package in packages else f"{package} is not installed"
        monkeypatch.setattr(kernels, "_missing", missing)
    return installed


def chosen(capability, dtype, head_dim, window=False, softcap=False):
    return kernels.select("auto", Case("cuda", capability, dtype, head_dim, window, softcap)).name


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_gpus_older_than_hopper_get_flash(installed, capability, dtype):
    installed("flash-attn-4", "flash-attn-3", "flash-attn")
    assert {d: chosen(capability, dtype, d) for d in (64, 80, 96, 128, 256)} == {
        64: "flash", 80: "reference", 96: "flash", 128: "flash", 256: "flash"}
    assert chosen(capability, dtype, 128, window=True) == "flash"
    assert chosen(capability, dtype, 128, softcap=True) == "reference"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_hopper_and_blackwell_get_fa4_and_cudnn_without_it(installed, capability, dtype):
    installed("flash-attn-4", "flash-attn-3", "flash-attn")
    assert {d: chosen(capability, dtype, d) for d in (64, 80, 96, 128, 256)} == {
        64: "fa4", 80: "reference", 96: "fa4", 128: "fa4", 256: "fa4"}
    assert chosen(capability, dtype, 128, window=True) == chosen(capability, dtype, 128, softcap=True) == "fa4"
    assert chosen(capability, dtype, 192) == ("fa4" if capability == (9, 0) else "reference")
    assert chosen(capability, dtype, 256, softcap=True) == ("fa4" if capability == (9, 0) else "reference")
    installed()
    assert {d: chosen(capability, dtype, d) for d in (64, 80, 96, 128, 256)} == {
        64: "cudnn", 80: "reference", 96: "cudnn", 128: "cudnn", 256: "cudnn" if capability == (9, 0) else "flash"}
    assert chosen(capability, dtype, 128, window=True) == "flash"
    assert chosen(capability, dtype, 128, softcap=True) == "reference"


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)])
def test_fp32_and_old_gpus_get_the_reference(installed, capability):
    installed("flash-attn-4", "flash-attn-3", "flash-attn")
    assert {chosen(capability, FP32, d, window) for d in (64, 128, 256) for window in (False, True)} == {"reference"}
    bf16 = {(7, 5): "reference", (8, 0): "flash", (9, 0): "fa4", (10, 0): "fa4", (12, 0): "cudnn"}
    assert chosen(capability, BF16, 128) == bf16[capability]


def test_cpus_get_flash_and_with_window_or_softcap_the_reference():
    for dtype in (torch.float64, FP32, BF16):
        assert kernels.select("auto", Case("cpu", (0, 0), dtype, 80)).name == "flash"
        for mask in ({"window": True}, {"softcap": True}):
            assert kernels.select("auto", Case("cpu", (0, 0), dtype, 80, **mask)).name == "reference"


@pytest.mark.parametrize("name,package", [("fa4", "flash-attn-4"), ("fa3", "flash-attn-3"), ("fa2", "flash-attn")])
def test_T45_a_kernel_that_is_missing_or_declines_is_an_error(installed, name, package):
    """Never another kernel silently in its place; the message names what would run."""
    case = Case("cuda", (9, 0), BF16, 128)
    installed()
    why = f"{package} is not installed. These can: auto, cudnn, flash, reference"
    with pytest.raises(ValueError, match=f"kernel='{name}' cannot run bfloat16, head_dim 128, cuda sm_90: {why}$"):
        kernels.select(name, case)
    installed(package)
    assert kernels.select(name, case).name == name
    with pytest.raises(ValueError, match=f"'{name}' cannot run float32.*bfloat16 and float16. These can: auto, reference$"):
        kernels.select(name, Case("cuda", (9, 0), FP32, 128))


@pytest.mark.parametrize("name,case,reason", [
    ("fa4", Case("cuda", (9, 0), BF16, 80), "head dims tested right"),
    ("fa4", Case("cuda", (8, 0), BF16, 128), "9.0 or newer"),
    ("fa4", Case("cuda", (12, 0), BF16, 128), "9.0 to 11"),
    ("fa4", Case("cuda", (10, 0), BF16, 192), "values of 128"),
    ("cudnn", Case("cuda", (9, 0), BF16, 128, window=True), "no window"),
    ("cudnn", Case("cuda", (8, 9), BF16, 128), "9.0 or newer"),
    ("cudnn", Case("cuda", (10, 0), BF16, 256), "9.0 only"),
    ("flash", Case("cuda", (9, 0), BF16, 128, softcap=True), "no softcap"),
    ("fa3", Case("cuda", (10, 0), BF16, 128), "capability 9"),
    ("fa2", Case("cuda", (9, 0), BF16, 100), "multiples of 8"),
])
def test_T45_what_a_kernel_does_not_take_is_an_error(installed, name, case, reason):
    installed("flash-attn-4", "flash-attn-3", "flash-attn")
    with pytest.raises(ValueError, match=f"kernel='{name}' cannot run .*{reason}"):
        kernels.select(name, case)


def test_untested_kernels_say_so_and_are_never_chosen(installed, monkeypatch):
    installed("flash-attn-3", "flash-attn")
    untested = {"fa3", "fa2"}
    assert {kernel.name for kernel in kernels.KERNELS if kernel.untested} == untested
    softcap = Case("cuda", (9, 0), BF16, 128, softcap=True)
    assert kernels.select("auto", softcap).name == "reference"
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "KERNELS", kernels.KERNELS[::-1])
        assert kernels.select("auto", softcap).name == "reference"
    said = "fa3 (not run by us on any machine), fa2 (not run by us on any machine)"
    with pytest.raises(ValueError) as refused:
        kernels.select("flash", softcap)
    assert str(refused.value).endswith(f"These can: auto, reference, {said}")
    assert kernels.described() == f"fa4, cudnn, flash, reference, {said}"
    with pytest.raises(ValueError) as unknown:
        kernels.select("fastest", softcap)
    assert said in str(unknown.value)
    rows = [line for line in kernels.__doc__.splitlines() if line.startswith("| ")][1:]
    assert [row.split("|")[1].strip() for row in rows] == list(kernels.names())
    assert {row.split("|")[1].strip() for row in rows if "not run by us on any machine" in row} == untested


def test_what_no_kernel_takes_is_refused_with_every_reason(installed):
    installed()
    with pytest.raises(ValueError, match="no kernel takes int64.*fa4: .*not installed.*reference: it does not take torch.int64"):
        kernels.select("auto", Case("cpu", (0, 0), torch.int64, 64))


def test_fa4_s_package_is_not_taken_for_fa2_s_nor_the_other_way_round(install):
    case = Case("cuda", (9, 0), BF16, 128)
    install("fa4")
    assert kernels.select("fa4", case).name == "fa4"
    with pytest.raises(ValueError, match="the package flash-attn is not installed"):
        kernels.select("fa2", case)
    install("fa2")
    assert kernels.select("fa2", case).name == "fa2"


def test_a_package_that_does_not_import_is_missing_with_its_reason(install, tmp_path):
    case = Case("cuda", (9, 0), BF16, 128)
    install("fa2")
    failures = {"raise ImportError('undefined symbol')": "undefined symbol", "import not_there_at_all": "not_there_at_all"}
    for broken, reason in failures.items():
        (tmp_path / "flash_attn" / "__init__.py").write_text(f"{broken}\n")
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
            del sys.modules[name]
        for name in ("fa4", "fa2"):
            with pytest.raises(ValueError, match=f"kernel='{name}' cannot run .*cannot be imported: .*{reason}"):
                kernels.select(name, case)
        assert kernels.select("auto", case).name == "cudnn"
