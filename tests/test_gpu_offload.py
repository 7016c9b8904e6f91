"""Offload on a GPU: copies beside computation on any stream, in memory that is reused, bit for bit as without; and host memory
pinned at its exact size."""

import time

import psutil
import pytest
import torch
from torch import nn

from upipe import host
from upipe.offload import CheckpointConfig, apply_checkpointing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

LAYERS, WIDTH, TOKENS = 6, 1024, 8192
DELAY = 20_000_000  # cycles, about 10 ms: a copy that does not wait for computation reads too early


class Layer(nn.Module):
    """A residual layer of deterministic kernels. It computes late, and writes NaN over memory that was let go."""

    def __init__(self, width=WIDTH, delay=0):
        super().__init__()
        self.up, self.down, self.delay = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), delay

    def forward(self, hidden_states):
        if self.delay:
            torch.cuda._sleep(self.delay)
            torch.full_like(hidden_states, float("nan"))
        return hidden_states + self.down(torch.tanh(self.up(hidden_states)))


class Stack(nn.Module):
    def __init__(self, delay=0, width=WIDTH, layers=LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, delay) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def stack(**more):
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Stack(**more).to(torch.bfloat16).train()


def config(offload, **more):
    return CheckpointConfig(**{"offload": offload, "staging_mib": 4, "staging_chunks": 2, "keep_layers_on_gpu": 0, **more})


def inputs(step, tokens=TOKENS, width=WIDTH):
    g = torch.Generator(device="cuda").manual_seed(step)
    return torch.randn(1, tokens, width, generator=g, device="cuda", dtype=torch.bfloat16)


def train(model, stream, steps=5, transpose=False):
    """Losses and final weights of some SGD steps whose computation is on `stream`."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(steps):
            torch.cuda._sleep(DELAY)
            x = inputs(step).requires_grad_()
            y = model(x.transpose(1, 2).contiguous().transpose(1, 2) if transpose else x)
            loss = y.float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step(), optimizer.zero_grad()
    stream.synchronize()
    return torch.stack(losses).tolist(), {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a[0] == b[0] and all(torch.equal(a[1][name], b[1][name]) for name in b[1])


@pytest.fixture(scope="module")
def expected():
    """The plain model's numbers, which are the same when computed again. For the input that is not contiguous, those of
    checkpointing without offload: without a graph torch may choose another matmul for it."""
    results = {False: train(stack(), torch.cuda.Stream())}
    assert same(train(stack(), torch.cuda.Stream()), results[False])
    model = stack()
    apply_checkpointing(model, config("none"), layers=list(model.layers))
    results[True] = train(model, torch.cuda.Stream(), transpose=True)
    return results


@pytest.mark.parametrize("transpose", [False, True], ids=["contiguous", "non-contiguous"])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("offload", ["none", "pinned", "pageable"])
def test_five_steps_on_another_stream(expected, offload, prefetch, transpose):
    """T42: compute on a stream that is not the default, slabs reused, input not contiguous: bitwise as without offload."""
    model = stack(delay=DELAY)
    handle = apply_checkpointing(model, config(offload, prefetch=prefetch), layers=list(model.layers))
    assert same(train(model, torch.cuda.Stream(), transpose=transpose), expected[transpose])
    report = handle.end_step()
    assert report.bytes_to_host == report.bytes_to_device == (0 if offload == "none" else 5 * LAYERS * TOKENS * WIDTH * 2)
    assert report.waiting == 0 and report.gradients_shared == 0
    handle.remove()


@pytest.mark.parametrize("pairs", [2, LAYERS // 2])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("offload", ["none", "pinned", "pageable"])
def test_one_stored_input_for_two_layers(expected, offload, prefetch, pairs):
    """A slab that is fetched twice, the memory of the first time let go between: bitwise as without."""
    model = stack(delay=DELAY)
    handle = apply_checkpointing(model, config(offload, prefetch=prefetch, pairs=pairs), layers=list(model.layers))
    assert same(train(model, torch.cuda.Stream()), expected[False])
    report, sent = handle.end_step(), 0 if offload == "none" else 5 * TOKENS * WIDTH * 2
    assert (report.bytes_to_host, report.bytes_to_device) == ((LAYERS - pairs) * sent, LAYERS * sent)
    assert report.waiting == 0 and report.paired_calls == 5 * pairs
    handle.remove()


@pytest.mark.parametrize("offload", ["pinned", "pageable"])
def test_the_stream_changes_between_steps(expected, offload):
    """The stream is asked for at every call: one model, the default stream, another, a third."""
    model = stack(delay=DELAY)
    handle = apply_checkpointing(model, config(offload), layers=list(model.layers))
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        model.load_state_dict(stack().state_dict())
        assert same(train(model, stream), expected[False])
    handle.remove()


@pytest.mark.parametrize("offload", ["pinned", "pageable"])
@pytest.mark.parametrize("broken", ["_mark_compute", "_compute_waits"])
def test_a_missing_wait_would_show(expected, offload, broken, monkeypatch):
    """The control: copies that do not wait for computation, or computation that does not wait for copies, give other numbers."""
    monkeypatch.setattr(host, broken, lambda *args: None)
    if broken == "_compute_waits":
        # Copies are made late: behind a pause at the start of each, and after each chunk.
        entered, mark = host._Lane.entered, host._Lane.mark

        def pause(lane):
            with torch.cuda.stream(lane.stream):
                torch.cuda._sleep(4 * DELAY)

        monkeypatch.setattr(host._Lane, "entered", lambda lane: (pause(lane), entered(lane))[1])
        monkeypatch.setattr(host._Lane, "mark", lambda lane, **kw: (mark(lane, **kw), pause(lane))[0])
    model = stack(delay=DELAY)
    handle = apply_checkpointing(model, config(offload), layers=list(model.layers))
    assert not same(train(model, torch.cuda.Stream()), expected[False])
    torch.cuda.synchronize()
    handle.remove()


@pytest.mark.parametrize("offload", ["pinned", "pageable"])
def test_abandoned_passes(offload):
    """A forward whose backward never comes, its last input fetched already: its memory is not used while copies run."""
    model = stack(delay=DELAY)
    a, b = inputs(1), inputs(2, tokens=TOKENS // 2)

    def gradients(x):
        model.zero_grad()
        model(x).float().square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients(b)
    handle = apply_checkpointing(model, config(offload), layers=list(model.layers))
    for _ in range(3):
        model.zero_grad()
        abandoned, kept = model(a).float().square().mean(), model(b).float().square().mean()
        kept.backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain))
        del abandoned
        assert all(torch.equal(x, y) for x, y in zip(gradients(b), plain))
    assert handle.end_step().waiting == 0
    handle.remove()


def test_pinned_memory_has_exactly_the_size_asked_for():
    """2.25 GiB stay 2.25, where torch's allocator takes 4; and they go back."""
    pool, process, size = host.HostPool(), psutil.Process(), 9 << 28
    torch.zeros(1, device="cuda")
    before = process.memory_info().rss
    tensor = pool.take((9, 2**28), torch.uint8)
    grown = process.memory_info().rss - before
    assert tensor.is_pinned() and pool.pinned_bytes == pool.held_bytes == size
    assert size - 2**20 <= grown <= size + 2**26, grown
    pool.give(tensor)
    assert pool.take((size,), torch.uint8).data_ptr() == tensor.data_ptr()
    pool.give(tensor, keep=False)
    assert pool.pinned_bytes == 0
    del tensor
    assert process.memory_info().rss - before < 2**26
    print(f"{size / 2**30} GiB asked, {grown / 2**30:.4f} GiB resident")


def test_a_failed_registration_leaves_no_error_behind():
    """T41, with CUDA's own refusal: a range is registered twice. The message is CUDA's, and the next kernel runs."""
    pool = host.HostPool()
    tensor = pool.take((2**20,), torch.uint8)
    why = host._register(tensor.data_ptr(), 2**20)
    assert why is not None and "already" in why
    assert float(torch.ones(4, device="cuda").sum()) == 4.0
    torch.cuda.synchronize()
    pool.give(tensor, keep=False)


def test_copies_run_beside_computation():
    """Step times with no offload, pinned and pageable, and the time of the copies by themselves; printed, and pinned copies
    mostly hidden."""
    tokens, width, layers = 65536, 4096, 6
    times = {}
    for offload in ("none", "pinned", "pageable"):
        model = stack(width=width, layers=layers)
        cfg = CheckpointConfig(offload=offload, keep_layers_on_gpu="auto")
        handle = apply_checkpointing(model, cfg, layers=list(model.layers))
        x = inputs(0, tokens, width)
        for step in range(5):
            if step == 2:
                torch.cuda.synchronize()
                started = time.perf_counter()
            model(x).sum().backward()
        torch.cuda.synchronize()
        times[offload] = (time.perf_counter() - started) / 3
        handle.remove()
        del model, handle
    u = tokens * width * 2
    slab, there = host.pool().take((u,), torch.uint8), torch.empty(u, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(layers - 1):
        slab.copy_(there, non_blocking=True)
        there.copy_(slab, non_blocking=True)
    torch.cuda.synchronize()
    copies = time.perf_counter() - started
    host.pool().give(slab, keep=False)
    told = ", ".join(f"{name} {1e3 * t:.1f} ms" for name, t in times.items())
    print(f"{layers} layers of {tokens} x {width}: {told}; the copies alone {1e3 * copies:.1f} ms")
    assert times["pinned"] - times["none"] < 0.5 * copies
