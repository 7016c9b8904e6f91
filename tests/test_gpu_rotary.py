"""Triton's kernels on a GPU: against plain torch on the same GPU, on buffers beyond 2^31 elements, and their speed."""

import pytest
import torch

from tests.test_rotary import INTO_FP32, PARTS, ROUNDED, TRITON_CASES, angles, computed_chain, error, name_of
from upipe.rotary import choose_backend, finish_heads, unfinish_heads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("case", TRITON_CASES, ids=name_of)
def test_triton_is_plain_torch(case):
    tolerance = ROUNDED[getattr(torch, case["dtype"])]
    results = computed_chain(case, "triton", "cuda"), computed_chain(case, "torch", "cuda")
    for part, got, want, allowed in zip(PARTS, *results, (tolerance, tolerance, 3e-6)):
        assert want is None or error(got, want) <= allowed, part


def test_auto_is_triton():
    x = torch.ones(3, 1, 8, device="cuda")
    assert choose_backend("auto", x) == choose_backend("auto", x.bfloat16()) == "triton"
    assert choose_backend("auto", x.double()) == "torch"


def test_weight_gradient_has_the_same_bits_every_time():
    case = {**INTO_FP32, "dtype": "bfloat16", "rows": 200_000}          # several blocks of rows a program
    first, *rest = (computed_chain(case, "triton", "cuda")[2] for _ in range(3))
    assert all(torch.equal(first, other) for other in rest)
    assert error(first, computed_chain(case, "torch", "cuda")[2]) < 1e-5


def large(rows, heads, d, dtype=torch.bfloat16):
    """x [rows, heads, d] made on the GPU, cos and sin of `rows` positions."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < rows * heads * d * 2 * 1.2:
        pytest.skip(f"{rows} x {heads} x {d} elements do not fit on this GPU")
    torch.manual_seed(0)
    cos, sin = (t.to("cuda", dtype) for t in angles(rows, d))
    return torch.empty(rows, heads, d, dtype=dtype, device="cuda").normal_(), cos, sin


@pytest.mark.parametrize("norm", [False, True])
def test_buffer_beyond_32_bits(norm):
    """655,360 rows x 32 heads x 128: 2.7e9 elements, in place, with no memory beside the buffer."""
    rows = 655_360
    x, cos, sin = large(rows, 32, 128)
    weight = torch.rand(128, device="cuda") + 0.5 if norm else None
    more = {"weight": weight, "eps": 1e-6}
    probes = [slice(0, 512), slice(2**31 // 4096 - 256, 2**31 // 4096 + 256), slice(rows - 512, rows)]
    raw = [x[p].clone() for p in probes]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    finish_heads(x, cos, sin, backend="triton", **more)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    for p, part in zip(probes, raw):
        assert error(x[p], finish_heads(part.clone(), cos[p], sin[p], backend="torch", **more)) < ROUNDED[torch.bfloat16]
    grads = [x[p].clone() for p in probes]
    if not norm:
        unfinish_heads(x, cos, sin, backend="triton")
        wants = [unfinish_heads(g, cos[p], sin[p], backend="torch") for p, g in zip(probes, grads)]
    else:                                                   # raw is the finished buffer itself: any values do
        unfinish_heads(x, cos, sin, raw=x, backend="triton", **more)
        wants = [unfinish_heads(g, cos[p], sin[p], raw=g.clone(), backend="torch", **more) for p, g in zip(probes, grads)]
    for p, want in zip(probes, wants):
        assert error(x[p], want) < ROUNDED[torch.bfloat16]


def test_rows_further_apart_than_32_bits():
    far = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    for strides, rows in (((2**30 + 256, 64, 1), 3), ((64, 2**31 + 256, 1), 2)):
        x = far.as_strided((rows, 2, 64), strides)
        cos, sin = (t.to("cuda", torch.float32) for t in angles(rows, 64))
        for function in (finish_heads, unfinish_heads):
            x.normal_()
            want = function(x.contiguous(), cos, sin, backend="triton")
            assert torch.equal(function(x, cos, sin, backend="triton"), want)


def microseconds(function, backend, repeats=50):
    for _ in range(5):
        function(backend)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20_000_000)                           # launches queue up behind it: the GPU's time, not Python's
    start.record()
    for _ in range(repeats):
        function(backend)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / repeats


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_speed(heads, capsys):
    """In place on 131,072 rows x 128 in bf16: faster than plain torch, and the bytes a second it comes to."""
    rows, d = 131_072, 128
    x, cos, sin = large(rows, heads, d)
    weight, weight_grad = torch.ones(d, device="cuda"), torch.zeros(d, device="cuda")
    norm = {"weight": weight, "eps": 1e-6}
    raw = x.clone()
    calls = {                                               # passes over x
        "rotation": (2, lambda b: finish_heads(x, cos, sin, backend=b)),
        "norm, rotation": (2, lambda b: finish_heads(x, cos, sin, backend=b, **norm)),
        "backward of rotation": (2, lambda b: unfinish_heads(x, cos, sin, backend=b)),
        "backward of all": (3, lambda b: unfinish_heads(x, cos, sin, raw=raw, weight_grad=weight_grad, backend=b, **norm)),
    }
    for name, (passes, call) in calls.items():
        triton, torch_ = microseconds(call, "triton"), microseconds(call, "torch", 3)
        moved = passes * x.nbytes + cos.nbytes + sin.nbytes
        with capsys.disabled():
            print(f"\n{rows} x {heads} x {d}, {name}: Triton {triton:.1f} us, {moved / triton / 1e6:.2f} TB/s; "
                  f"plain torch {torch_:.0f} us")
        assert triton < torch_


@pytest.mark.parametrize("d", [2048, 4096, 5120, 8192, 16384])
def test_norm_of_a_layer(d, capsys):
    """8192 rows as wide as the hidden states, in bf16: forward without memory of its own, backward with at most 8 MiB; faster than
    plain torch, and beside `torch.nn.functional.rms_norm`."""
    x, _, _ = large(8192, 1, d)
    out, grad, weight_grad = torch.empty_like(x), torch.randn_like(x), torch.zeros(d, device="cuda")
    norm = {"weight": torch.rand(d, device="cuda", dtype=torch.bfloat16) + 0.5, "eps": 1e-6}
    calls = {
        "norm": (2, 0, lambda b: finish_heads(x, None, None, out=out, backend=b, **norm)),
        "backward": (3, 2**23, lambda b: unfinish_heads(grad, None, None, raw=x, weight_grad=weight_grad, backend=b, **norm)),
    }
    for name, (passes, most, call) in calls.items():
        call("triton")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call("triton")
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= most + 2**17
        triton, plain = microseconds(call, "triton"), microseconds(call, "torch", 3)
        with capsys.disabled():
            print(f"\n8192 x {d}, {name}: Triton {triton:.1f} us, {passes * x.nbytes / triton / 1e6:.2f} TB/s; plain torch {plain:.0f} us")
        assert triton < plain
    fused = microseconds(lambda _: torch.nn.functional.rms_norm(x, (d,), norm["weight"], 1e-6), "")
    with capsys.disabled():
        print(f"torch.nn.functional.rms_norm {fused:.1f} us")
