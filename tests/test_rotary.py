"""Rotation, RMS norm, and both in place on rows of heads, against the definitions, forward and backward.

Triton's kernels run in its interpreter, which is chosen when triton is first imported: so in a process of their own, once
for all cases. (On a GPU: test_gpu_rotary.py.)
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pairwise import pairwise
from tests.plain import assert_close
from upipe import reference, rotary
from upipe.rotary import choose_backend, finish_heads, rms_norm, rms_norm_backward, rotate, unfinish_heads

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


FACTORS = {
    "dtype": ("float64", "float32", "bfloat16"),
    "d": (8, 64, 80, 96, 128, 256),
    "part": (0, 0.25, 0.5, 1),                              # R / d
    "heads": (1, 2, 5),
    "rows": (1, 37, 130),
    "norm": (None, "same dtype", "wide"),
    "eps": (0.0, 1e-3),
    "where": ("in place", "apart", "heads of wider tensors"),
    "tables": ("own", "expanded", "transposed"),
}
# A layer's own norm: one head as wide as the hidden states.
LAYERS = [
    {"dtype": dtype, "d": d, "part": 0, "heads": 1, "rows": rows, "norm": norm, "eps": 1e-3, "where": where, "tables": "own"}
    for d, dtype, rows, norm, where in (
        (2048, "float32", 37, "wide", "apart"), (4096, "bfloat16", 21, "same dtype", "in place"), (5120, "bfloat16", 9, "wide", "apart"),
        (5120, "float32", 7, "same dtype", "in place"), (12288, "float16", 3, "same dtype", "apart"),
        (16384, "bfloat16", 5, "same dtype", "in place"), (16384, "float32", 3, "wide", "apart"),
    )
]
CASES = pairwise(FACTORS) + LAYERS
TRITON_CASES = pairwise({**FACTORS, "dtype": ("float32", "bfloat16", "float16")}, seed=1) + LAYERS
ROUNDED = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}    # once
PARTS = ("result", "gradient of x", "gradient of weight")


def name_of(case):
    return "-".join(str(v) for v in case.values())


def inputs(case, device="cpu"):
    """x, the gradient of the result, cos, sin, weight of a case; scaled rotation, two halves that differ."""
    dtype, N, h, d = getattr(torch, case["dtype"]), case["rows"], case["heads"], case["d"]
    R = int(case["part"] * d)
    shape = {"own": (N, 1, R), "expanded": (1, 1, R), "transposed": (R, 1, N)}[case["tables"]]
    cos, sin = None, None
    if R:
        cos, sin = ((random(*shape, seed=s) * 0.7).to(device, dtype) for s in (3, 4))
        cos, sin = (t.transpose(0, 2) if case["tables"] == "transposed" else t.expand(N, 1, R) for t in (cos, sin))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight = random(d, seed=6).to(device, wide if case["norm"] == "wide" else dtype) if case["norm"] else None
    return random(N, h, d).to(device, dtype), random(N, h, d, seed=2).to(device, dtype), cos, sin, weight


def chain(x, cos, sin, weight, eps):
    if weight is not None:
        x = reference.rms_norm(x, weight, eps)
    return x if cos is None else reference.rotate(x[None], cos[:, 0][None], sin[:, 0][None])[0]


def defined_chain(case):
    """Result, gradient of x, gradient of the weight (or None), in fp64 by autograd."""
    x, grad, *rest = [None if t is None else t.double() for t in inputs(case)]
    leaves = [x.requires_grad_()] + ([] if rest[2] is None else [rest[2].requires_grad_()])
    out = chain(x, *rest, case["eps"])
    grads = torch.autograd.grad(out, leaves, grad)
    return out.detach(), grads[0], None if rest[2] is None else grads[1]


def placed(t, where):
    """t and where its result is to go, and a check that nothing else was written."""
    if where == "in place":
        return t.clone(), None, lambda: True
    if where == "apart":
        kept = t.clone()
        return kept, torch.full_like(t, float("nan")), lambda: torch.equal(kept, t)
    N, h, d = t.shape
    source, target = t.new_full((N, h + 3, d), 7.0), t.new_full((N, h + 2, d), 9.0)
    source[:, 1 : h + 1] = t
    kept = source.clone()
    return source[:, 1 : h + 1], target[:, 2:], lambda: torch.equal(source, kept) and bool((target[:, :2] == 9).all())


def computed_chain(case, backend, device="cpu"):
    x, grad, cos, sin, weight = inputs(case, device)
    more = {"weight": weight, "eps": case["eps"], "backend": backend}
    here, out, is_clean = placed(x, case["where"])
    result = finish_heads(here, cos, sin, out, **more)
    assert result is (here if out is None else out) and is_clean()
    there, out, is_clean = placed(grad, case["where"])
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight_grad = None if weight is None else torch.ones(x.shape[-1], dtype=wide, device=device)
    grad_x = unfinish_heads(there, cos, sin, out, raw=x, weight_grad=weight_grad, **more)
    assert grad_x is (there if out is None else out) and is_clean()
    return result, grad_x, None if weight is None else weight_grad - 1


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_plain_torch_is_the_definition(case, monkeypatch):
    monkeypatch.setattr(rotary, "CHUNK", 4096)
    tolerance = ROUNDED[getattr(torch, case["dtype"])]
    summed = 1e-12 if case["dtype"] == "float64" else 2e-6  # never rounded to bf16
    results = computed_chain(case, "torch"), defined_chain(case)
    for name, got, want, allowed in zip(PARTS, *results, (tolerance, tolerance, summed)):
        if want is not None:
            assert_close(name, got, want, allowed)


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def in_interpreter():
    """Triton in its interpreter against plain torch; printed as JSON. Its interpreter cuts fp32 down to bf16 where a GPU
    rounds, so results of bf16 inputs are compared as fp32 too."""
    found = {}
    for case in TRITON_CASES:
        pairs = zip(computed_chain(case, "triton"), computed_chain(case, "torch"))
        found[name_of(case)] = [None if want is None else error(got, want) for got, want in pairs]
    for dtype in ("float32", "bfloat16", "float16"):
        x, grad, cos, sin, weight = inputs({**INTO_FP32, "dtype": dtype})
        more = {"weight": weight, "eps": 1e-3}
        new = torch.empty(x.shape)
        found[f"into fp32, {dtype}"] = [
            error(*(finish_heads(x, cos, sin, new.clone(), backend=b, **more) for b in ("triton", "torch"))),
            error(*(unfinish_heads(grad, cos, sin, new.clone(), raw=x, backend=b, **more) for b in ("triton", "torch"))), None]
    rotary.PROGRAMS = 3                                     # each program walks several blocks of rows
    found["same bits"] = True
    for name, case in (("several blocks a program", {**INTO_FP32, "rows": 300}), ("several rows a program", {**LAYERS[0], "rows": 11})):
        sums = [computed_chain(case, b)[2] for b in ("triton", "triton", "torch")]
        found[name] = [None, None, error(sums[0], sums[2])]
        found["same bits"] &= bool(torch.equal(sums[0], sums[1]))
    for shape in ((0, 2, 8), (3, 0, 8)):
        empty(shape, "triton")
    far_offsets("triton")
    print(json.dumps(found))


INTO_FP32 = {"dtype": "float32", "d": 80, "part": 0.5, "heads": 2, "rows": 37, "norm": "wide", "eps": 1e-3,
             "where": "apart", "tables": "own"}
MORE = [f"into fp32, {dtype}" for dtype in ("float32", "bfloat16", "float16")] + [
    "several blocks a program", "several rows a program"]


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton")
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "from tests.test_rotary import in_interpreter; in_interpreter()"], cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*map(name_of, TRITON_CASES), *MORE])
def test_triton_is_plain_torch(interpreted, name):
    tolerance = 6e-3 if name.startswith("bfloat16") else 3e-4 if name.startswith("float16") else 1e-6
    for part, got, allowed in zip(PARTS, interpreted[name], (tolerance, tolerance, 2e-6)):
        assert got is None or got <= allowed, f"{part}: {got} > {allowed}"


def test_triton_sums_in_a_fixed_order(interpreted):
    assert interpreted["same bits"]


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("d, R", [(128, 128), (80, 80), (128, 64), (128, 0), (2048, 0), (4096, 0), (5120, 0), (8192, 0), (16384, 0)])
def test_kernels_compile_for_hopper(tmp_path, monkeypatch, forward, d, R):
    """The interpreter checks no types and makes no code: compile for sm_90 (no GPU needed), 16 bytes a load, all in registers."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from upipe import rotary_triton
    if rotary_triton.INTERPRETED:
        pytest.skip("this process is Triton's interpreter")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = rotary_triton._finish if forward else rotary_triton._unfinish
    x = torch.empty(2, 2, d)
    tiles = rotary_triton._tiles(x, torch.empty(2, 1, R) if R else None, x, changed=True)
    constants = {**tiles, "blocks": 2, "cos_d": 1, "sin_d": 1}
    types = {"eps": "fp32", "weight": "*fp32", "partial": "*fp32"}
    if d > 256:
        types["weight"], constants = "*bf16", constants | {"cos": None, "sin": None}
    types |= dict.fromkeys(("x", "out", "grad", "raw", "cos", "sin"), "*bf16") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    multiples = {(i,): [["tt.divisibility", 16]] for i, (name, kind) in enumerate(signature.items())
                 if name != "rows" and kind[0] in "*i"}
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items() if name in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, signature, constants, multiples), target=GPUTarget("cuda", 90, 32),
                              options={"num_warps": rotary_triton._warps(tiles)})
    assert "ld.global.v4.b32" in compiled.asm["ptx"] and "st.global.v4.b32" in compiled.asm["ptx"]
    assembler = triton.knobs.nvidia.ptxas.path
    (tmp_path / "kernel.ptx").write_text(compiled.asm["ptx"])
    told = subprocess.run([assembler, "-v", "--gpu-name=sm_90a", "-o", tmp_path / "kernel.cubin", tmp_path / "kernel.ptx"],
                          capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in told, told


@pytest.mark.parametrize("d, rows_of_tile", [(64, 16), (128, 8), (2048, 1), (4096, 1), (5120, 1), (16384, 1)])
@pytest.mark.parametrize("rows", [1, 300, 4096, 8192, 10**6])
def test_partial_sums_are_few(rows, d, rows_of_tile):
    """Of a weight's gradient: at most 8 MiB beside a tile, by programs that cover every row and are no more than needed."""
    programs, walked = rotary.sums_of(rows, d, rows_of_tile)
    most = min(4096, 2**23 // (4 * d))
    assert programs <= most and walked & walked - 1 == 0
    assert (programs - 1) * walked * rows_of_tile < rows <= programs * walked * rows_of_tile
    assert walked == 1 or rows > most * walked // 2 * rows_of_tile, "half as many tiles would do"


def empty(shape, backend):
    N, h, d = shape
    x, table, weight_grad = torch.ones(shape), torch.ones(N, 1, d), torch.zeros(d)
    more = {"weight": torch.ones(d), "backend": backend}
    assert finish_heads(x, table, table, **more).shape == shape
    assert unfinish_heads(x, table, table, raw=x, weight_grad=weight_grad, **more).shape == shape
    assert not weight_grad.any()


@pytest.mark.parametrize("shape", [(0, 2, 8), (3, 0, 8)])
def test_empty_ranges(shape):
    empty(shape, "torch")


def far_offsets(backend):
    """Rows, then heads, further apart than 2^31 elements, in memory of which only a few pages are ever touched."""
    far = torch.empty(2**31 + 2**20, dtype=torch.bfloat16)
    for strides in ((2**30 + 256, 64, 1), (64, 2**31 + 256, 1)):
        x = far.as_strided((3 if strides[1] == 64 else 2, 2, 64), strides)
        cos, sin = angles(len(x), 64)
        for function in (finish_heads, unfinish_heads):
            x.copy_(random(*x.shape))
            want = function(x.contiguous(), cos.float(), sin.float(), backend=backend)
            assert torch.equal(function(x, cos.float(), sin.float(), backend=backend), want)


def test_offsets_beyond_32_bits():
    far_offsets("torch")


def test_bf16_is_rounded_once():
    case = {**INTO_FP32, "dtype": "bfloat16", "rows": 300}
    for got, want in zip(computed_chain(case, "torch")[:2], defined_chain(case)[:2]):
        assert (got == want.bfloat16()).double().mean() > 0.999


def test_the_backward_may_write_over_raw():
    x, grad, cos, sin, weight = inputs(INTO_FP32)
    more = {"weight": weight, "eps": 1e-3}
    want = unfinish_heads(grad, cos, sin, torch.empty_like(x), raw=x, **more)
    assert torch.equal(unfinish_heads(grad, cos, sin, x, raw=x, **more), want)


def test_weight_gradient_is_not_needed():
    x, grad, cos, sin, weight = inputs(INTO_FP32)
    weight_grad = torch.zeros_like(weight)
    more = {"raw": x, "weight": weight, "eps": 1e-3}
    with_sum = unfinish_heads(grad.clone(), cos, sin, weight_grad=weight_grad, **more)
    assert weight_grad.any() and torch.equal(unfinish_heads(grad.clone(), cos, sin, **more), with_sum)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned in memory of its own."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, t.numel())
        return result


def test_plain_torch_makes_no_copy_of_the_buffer(monkeypatch):
    monkeypatch.setattr(rotary, "CHUNK", 4096)
    x, grad, cos, sin, weight = inputs({**INTO_FP32, "dtype": "bfloat16", "rows": 3000})
    with Largest() as largest:
        finish_heads(x.clone(), cos, sin, x, weight=weight)
        assert largest.elements == x.numel()                # the clone, so that the count is seen to count
        largest.elements = 0
        finish_heads(x, cos, sin, weight=weight)
        unfinish_heads(grad, cos, sin, raw=x, weight=weight, weight_grad=torch.zeros(80))
    assert 0 < largest.elements <= 4096 < x.numel()


def refuse(error, match, change, function=finish_heads, **more):
    x, grad, cos, sin, weight = inputs(INTO_FP32)
    values = {"cos": cos, "sin": sin, "weight": weight, **more}
    with pytest.raises(error, match=match):
        function(x, **{**values, **change})


@pytest.mark.parametrize("match, change", [
    ("both cos and sin", {"sin": None}),
    ("41 dims", {"cos": torch.ones(37, 1, 41), "sin": torch.ones(37, 1, 41)}),
    ("82 dims", {"cos": torch.ones(37, 1, 82), "sin": torch.ones(37, 1, 82)}),
    (r"sin is \(36, 1, 40\).*\(37, 1, 40\)", {"sin": torch.ones(36, 1, 40)}),
    (r"out is \(37, 1, 80\)", {"out": torch.ones(37, 1, 80)}),
    (r"weight is \(2, 80\)", {"weight": torch.ones(2, 80)}),
    ("out has strides", {"out": torch.ones(37, 2, 160)[..., ::2]}),
    ("unknown backend 'cuda'", {"backend": "cuda"}),
    ("weight is on meta", {"weight": torch.ones(80, device="meta")}),
])
def test_what_does_not_fit_is_refused(match, change):
    refuse(ValueError, match, change)


@pytest.mark.parametrize("match, change", [
    ("needs raw", {}),
    (r"raw is \(37, 2, 8\)", {"raw": torch.ones(37, 2, 8)}),
    ("weight_grad .* weight is None", {"weight": None, "weight_grad": torch.zeros(80)}),
    (r"weight_grad \(8,\)", {"raw": torch.ones(37, 2, 80), "weight_grad": torch.zeros(8)}),
])
def test_what_does_not_fit_the_backward_is_refused(match, change):
    refuse(ValueError, match, change, unfinish_heads)


def test_x_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\[N, h, d\], not \(3, 8\)"):
        finish_heads(torch.ones(3, 8), None, None)


def test_autograd_is_refused_and_no_grad_is_not():
    x, weight = torch.ones(3, 1, 8), torch.ones(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="no_grad"):
        finish_heads(x, None, None, weight=weight)
    with torch.no_grad():
        assert torch.equal(finish_heads(2 * x, None, None, weight=weight), x)


def test_backends(monkeypatch):
    x = torch.ones(3, 1, 8)
    assert choose_backend("auto", x) == choose_backend("torch", x, None) == "torch"
    refuse(TypeError, "float64", {"weight": torch.ones(80, dtype=torch.float64), "backend": "triton"})
    monkeypatch.setitem(sys.modules, "triton", None)
    rotary._triton.cache_clear()
    try:
        refuse(ImportError, "not installed", {"backend": "triton"})
        assert choose_backend("auto", x) == "torch"
    finally:
        rotary._triton.cache_clear()


def test_triton_outside_its_interpreter_refuses_the_cpu():
    pytest.importorskip("triton")
    from upipe import rotary_triton
    if rotary_triton.INTERPRETED:
        pytest.skip("this process is Triton's interpreter")
    refuse(ValueError, "needs GPU tensors, not .*cpu", {"backend": "triton"})
