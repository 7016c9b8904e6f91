"""Checkpointing with offload against no checkpointing, bit for bit: real copies, real ranks, reuse, and what is refused."""

import gc
import logging
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from tests.pairwise import half
from tests.plain import assert_close, data_of, plain_step, tiny_model
from tests.sharded import assert_equal_to_plain, ds_config, sharded
from upipe import PreflightError, host
from upipe.config import ConfigError, from_mapping
from upipe.offload import CheckpointConfig, OffloadError, apply_checkpointing, decoder_layers
from upipe.outcomes import classify
from upipe.tiled import TilingConfig, apply_tiling

MODES = ["none", "pinned", "pageable"]
LAYERS, HIDDEN = 4, 32


def config(offload, **more):
    """Chunks of 1 MiB; keeps nothing on the device, so that every layer is sent."""
    return CheckpointConfig(**{"offload": offload, "keep_layers_on_gpu": 0, "staging_mib": 1, "staging_chunks": 2, **more})


def model_of(kind="llama", layers=LAYERS, **more):
    return tiny_model(kind, 4, 2, **{"layers": layers, "hidden": HIDDEN, **more}).train()


def ids_of(rows=2, tokens=21, seed=0):
    return torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def loss_of(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, expected):
    assert got.keys() == expected.keys() and expected
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


@contextmanager
def checkpointed(model, cfg, **more):
    handle = apply_checkpointing(model, cfg, **more)
    try:
        yield handle
    finally:
        handle.remove()


# bit-equal, bytes, reuse


@pytest.mark.parametrize("offload", MODES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_twenty_steps_are_those_without_checkpointing(kind, offload):
    """Loss and every weight, bit for bit; exactly one slab a sent layer, and exactly layers x L x D x itemsize moved."""
    plain, ours = model_of(kind), model_of(kind)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (plain, ours)]
    held = set()
    with checkpointed(ours, config(offload)) as handle:
        for step in range(20):
            losses = []
            for m in (plain, ours):
                loss = loss_of(m, ids_of(seed=step))
                loss.backward()
                losses.append(loss.item())
            assert losses[0] == losses[1]
            assert_same(gradients(ours), gradients(plain))
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()
            report = handle.end_step()
            sent = 0 if offload == "none" else LAYERS * 2 * 21 * HIDDEN * 4
            assert report.bytes_to_host == report.bytes_to_device == sent
            assert report.layer_calls == LAYERS and report.kept_calls == (LAYERS if offload == "none" else 0)
            assert report.waiting == 0 and report.gradients_shared == 0 and report.offload == offload
            held.add((report.host_bytes, report.pinned_bytes))
        if offload != "none":
            assert [slab.nbytes for slab in handle._store._slabs] == [2 * 21 * HIDDEN * 4] * LAYERS
        assert len(held) == 1 and f"{LAYERS} layer calls" in handle.report()
    assert_same(dict(ours.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("kept", [0, 1, 3, LAYERS, LAYERS + 5, "auto"])
def test_the_last_layers_stay_on_the_device(kept):
    model = model_of()
    with checkpointed(model, config("pinned", keep_layers_on_gpu=kept)) as handle:
        loss_of(model, ids_of()).backward()
        n = min(LAYERS, 1 if kept == "auto" else kept)
        report = handle.end_step()
        assert report.kept_calls == n and report.bytes_to_host == (LAYERS - n) * 2 * 21 * HIDDEN * 4


@pytest.mark.parametrize("offload", ["pinned", "pageable"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_any_order_of_passes(offload, prefetch):
    """Different lengths, two forwards before their backwards in either order, both in one, an abandoned forward, evaluation
    between forward and backward, accumulation: always the plain gradients, and no slab is lost."""
    model = model_of()
    a, b, c = ids_of(tokens=9, seed=1), ids_of(tokens=30, seed=2), ids_of(rows=1, tokens=5, seed=3)

    def one(ids):
        model.zero_grad()
        loss_of(model, ids).backward()
        return gradients(model)

    alone = {name: one(ids) for name, ids in (("a", a), ("b", b), ("c", c))}
    with torch.no_grad():
        evaluated = loss_of(model, c)

    def summed(*names):
        """Accumulated in this order, as autograd adds."""
        total = {name: g.clone() for name, g in alone[names[0]].items()}
        for other in names[1:]:
            total = {name: total[name] + alone[other][name] for name in total}
        return total

    with checkpointed(model, config(offload, prefetch=prefetch)) as handle:
        for _ in range(3):
            assert_same(one(b), alone["b"])
            model.zero_grad()
            first, second = loss_of(model, a), loss_of(model, b)
            first.backward(), second.backward()
            assert_same(gradients(model), summed("a", "b"))
            model.zero_grad()
            first, second = loss_of(model, a), loss_of(model, b)
            second.backward()
            with torch.no_grad():
                assert torch.equal(loss_of(model, c), evaluated)
            first.backward()
            assert_same(gradients(model), summed("b", "a"))
            model.zero_grad()
            (loss_of(model, a) + loss_of(model, c)).backward()
            got, expected = gradients(model), summed("c", "a")
            assert all(torch.allclose(got[name], expected[name], rtol=1e-5, atol=1e-7) for name in expected)
            model.zero_grad()
            abandoned, kept = loss_of(model, a), loss_of(model, b)
            del abandoned
            kept.backward()
            assert_same(gradients(model), alone["b"])
            for ids in (a, b, c):
                (loss_of(model, ids) / 3).backward()
            assert handle.end_step().waiting == 0
        assert len(handle._store._slabs) == len(handle._store._free) <= 3 * LAYERS


@pytest.mark.parametrize("offload", ["pinned", "pageable"])
def test_a_slab_holds_nothing_that_is_needed_when_it_is_given_back(offload, monkeypatch):
    """Every slab is filled with NaN when it is given back, and when it is made; nothing shows."""
    model = model_of()
    loss_of(model, ids_of()).backward()
    expected = gradients(model)
    poisoned = []
    receive, slab_of = host.HostStore.receive, host.HostStore._slab

    def poison(slab):
        poisoned.append(slab)
        slab.memory[: slab.nbytes // 4 * 4].view(torch.float32).fill_(float("nan"))

    def receiving(store, saved):
        slab, x = saved.slab, receive(store, saved)
        poison(slab)
        return x

    def taking(store, nbytes):
        slab = slab_of(store, nbytes)
        poison(slab)
        return slab

    monkeypatch.setattr(host.HostStore, "receive", receiving)
    monkeypatch.setattr(host.HostStore, "_slab", taking)
    with checkpointed(model, config(offload)) as handle:
        for _ in range(3):
            model.zero_grad()
            loss_of(model, ids_of()).backward()
            assert_same(gradients(model), expected)
            handle.end_step()
    assert len(poisoned) == 3 * 2 * LAYERS


def test_the_poison_would_show(monkeypatch):
    """The control of the test above: poison before the input is read, and gradients are NaN."""
    fetch = host.HostStore._fetch

    def poisoned(store, saved):
        saved.slab.memory.view(torch.float32).fill_(float("nan"))
        fetch(store, saved)

    monkeypatch.setattr(host.HostStore, "_fetch", poisoned)
    model = model_of()
    with checkpointed(model, config("pinned")):
        loss_of(model, ids_of()).backward()
        assert any(g.isnan().any() for g in gradients(model).values())


def test_pageable_copies_go_through_the_ring_in_chunks():
    """An input of several chunks and a rest, more than the ring holds."""
    layer = Toy(width=512)
    x = torch.randn(1, 2100, 512, requires_grad=True)
    expected = run(layer, x)
    with checkpointed(nn.Module(), config("pageable"), layers=[layer]) as handle:
        for _ in range(2):
            assert_same(run(layer, x), expected)
        report = handle.end_step()
        nbytes = 2100 * 512 * 4
        assert 4 * 2**20 < nbytes == report.bytes_to_host // 2 == report.bytes_to_device // 2
        assert report.pinned_bytes == 4 * 2**20 and report.host_bytes == report.pinned_bytes + nbytes


# layers of other kinds


class Toy(nn.Module):
    """A residual layer; `returns` says in what form."""

    def __init__(self, width=16, returns="tensor", dropout=0.0):
        super().__init__()
        self.linear, self.dropout, self.returns = nn.Linear(width, width), nn.Dropout(dropout), returns
        self.calls = 0

    def forward(self, hidden_states, scale=1.0, **kwargs):
        self.calls += 1
        y = hidden_states + self.dropout(torch.tanh(self.linear(hidden_states))) * scale
        if self.returns == "tuple":
            return (y,)
        if self.returns == "mixed":
            return y, None, y.square().mean(), torch.arange(3)
        return y


def run(layer, x, keyword=False):
    """Gradients of x and of the layer, and the output."""
    layer.zero_grad()
    x.grad = None
    y = layer(hidden_states=x, scale=0.5) if keyword else layer(x, scale=0.5)
    outputs = y if isinstance(y, tuple) else (y,)
    loss = sum((o * (i + 1)).sin().sum() for i, o in enumerate(outputs) if o is not None and o.is_floating_point())
    loss.backward()
    return {"y": outputs[0].detach().clone(), "x": x.grad, **gradients(layer)}


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("returns", ["tensor", "tuple", "mixed"])
@pytest.mark.parametrize("offload", MODES)
def test_forms_of_call_and_return(offload, returns, keyword):
    layer = Toy(returns=returns)
    x = torch.randn(2, 5, 16, requires_grad=True)
    expected = run(layer, x, keyword)
    with checkpointed(nn.Module(), config(offload), layers=[layer]):
        assert_same(run(layer, x, keyword), expected)
        layer.calls = 0
        run(layer, x, keyword)
        assert layer.calls == 2
        y = layer(x)
        if returns == "mixed":
            assert y[1] is None and torch.equal(y[3], torch.arange(3)) and not y[3].requires_grad
            y[2].backward()  # the first output alone has no gradient then


@pytest.mark.parametrize("offload", MODES)
@pytest.mark.parametrize("make", [
    lambda t: t.transpose(1, 2), lambda t: t[:, :, ::2], lambda t: t[:, 1:4].transpose(1, 2), lambda t: t.permute(2, 1, 0),
    lambda t: t[:1, :, :1].expand(3, -1, 4), lambda t: t[:, :0].transpose(1, 2), lambda t: t[1:2]],
    ids=["transposed", "strided", "narrowed", "permuted", "expanded", "empty", "offset"])
def test_a_non_contiguous_input(make, offload):
    """T42: the saved tensor is not contiguous. Values are right; where it fills its memory its strides come back too."""
    base = torch.randn(3, 6, 8)
    x = make(base).detach().requires_grad_()
    layer = Toy(width=x.shape[-1])
    expected, seen = run(layer, x), []
    with checkpointed(nn.Module(), config(offload), layers=[layer]):
        plain = layer.linear.forward
        layer.linear.forward = lambda t: (seen.append(t.stride()), plain(t))[1]
        assert_same(run(layer, x), expected)
    if x.numel() and torch.empty_like(x).stride() == x.stride():
        assert seen == [x.stride()] * 2


@pytest.mark.parametrize("offload", MODES)
def test_frozen_inputs_and_layers(offload):
    """Parameters get their gradients though the first input carries none; wholly frozen layers are not run twice."""
    model = model_of()
    model.model.embed_tokens.requires_grad_(False)
    frozen = decoder_layers(model)[0].requires_grad_(False)
    loss_of(model, ids_of()).backward()
    expected = gradients(model)
    assert not any("layers.0." in name or "embed" in name for name in expected)
    model.zero_grad()
    with checkpointed(model, config(offload)) as handle:
        loss_of(model, ids_of()).backward()
        assert_same(gradients(model), expected)
        assert handle.end_step().layer_calls == LAYERS - 1
        frozen.requires_grad_(True)
        model.zero_grad()
        loss_of(model, ids_of()).backward()
        assert any("layers.0." in name for name in gradients(model))


@pytest.mark.parametrize("preserve,equal", [("auto", True), (True, True), (False, False)])
def test_dropout_is_replayed(preserve, equal):
    layer, x = Toy(dropout=0.5), torch.randn(2, 8, 16, requires_grad=True)
    torch.manual_seed(3)
    expected = run(layer, x)
    after = torch.rand(3)
    with checkpointed(nn.Module(), config("pinned", preserve_rng=preserve), layers=[layer]):
        torch.manual_seed(3)
        got = run(layer, x)
        if equal:
            assert_same(got, expected)
            assert torch.equal(torch.rand(3), after)
        else:
            assert not torch.equal(got["x"], expected["x"])


def test_autocast_is_replayed():
    layer, x = Toy(), torch.randn(2, 8, 16, requires_grad=True)

    def step():
        layer.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        y.float().square().sum().backward()
        return {"x": x.grad, **gradients(layer)}

    expected = step()
    with checkpointed(nn.Module(), config("pinned"), layers=[layer]):
        assert_same(step(), expected)


def test_evaluation_is_not_checkpointed():
    model = model_of()
    with checkpointed(model, config("pinned")) as handle:
        with torch.no_grad():
            loss_of(model, ids_of())
        model.eval()
        loss_of(model, ids_of()).backward()
        model.train()
        assert handle._counts["layer_calls"] == 0 and handle._store is None


@pytest.mark.parametrize("offload", MODES)
def test_contexts_go_around_the_first_forward_and_the_recompute(offload):
    log = []

    @contextmanager
    def named(kind, n):
        log.append((kind, n, torch.is_grad_enabled()))
        yield
        log.append(("end " + kind, n, torch.is_grad_enabled()))

    pairs = []

    def contexts():
        pairs.append(None)
        return named("first", len(pairs)), named("again", len(pairs))

    model = model_of(layers=2)
    with checkpointed(model, config(offload), contexts=contexts):
        loss_of(model, ids_of()).backward()
    assert log == [("first", 1, False), ("end first", 1, False), ("first", 2, False), ("end first", 2, False),
                   ("again", 2, True), ("end again", 2, True), ("again", 1, True), ("end again", 1, True)]


@pytest.mark.parametrize("offload", MODES)
def test_other_arguments_are_the_same_objects(offload):
    """cos, sin and mask of the recompute are those of the first forward, not copies; and they are let go afterwards."""
    model = model_of(layers=2)
    seen = []
    for layer in decoder_layers(model):
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((kwargs["attention_mask"], *kwargs["position_embeddings"])),
            with_kwargs=True)
    with checkpointed(model, config(offload)):
        loss = loss_of(model, ids_of())
        loss.backward()
        assert len(seen) == 4 and all(a is b for row in seen[1:] for a, b in zip(row, seen[0]))
        held = [weakref.ref(t) for t in seen[0]]
        seen.clear()
        gc.collect()
        assert [ref() for ref in held] == [None] * 3, "the loss keeps the mask or the angles alive"
        del loss


class Pages(bytearray):
    """Memory whose end can be seen."""


def test_the_incoming_gradient_is_freed_or_kept_by_who_needs_it():
    """The layer's backward is the only holder of its output's gradient, which goes when it was used; unless somebody else
    holds it, who then finds it unchanged."""
    life = {}

    class Above(torch.autograd.Function):
        """Makes the gradient, in memory whose end is seen."""

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            memory = Pages(g.numel() * 4)
            storage = torch.frombuffer(memory, dtype=torch.float32).untyped_storage()
            life["memory"] = weakref.ref(memory)
            return torch.empty(0).set_(storage, 0, g.shape).copy_(g * 2)

    class Below(torch.autograd.Function):
        """Stands at the bottom of the layer: looks whether the gradient from above is still there."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            life["alive"] = life["memory"]() is not None
            return g

    class Layer(Toy):
        def forward(self, hidden_states):
            return torch.tanh(self.linear(Below.apply(hidden_states)))

    layer = Layer()
    x = torch.randn(1, 8, 16, requires_grad=True)
    grads = {}

    def step(name, hook=None):
        layer.zero_grad()
        x.grad = None
        y = layer(x)
        if hook is not None:
            y.register_hook(hook)
        Above.apply(y).sin().sum().backward()
        grads[name] = {"x": x.grad, **gradients(layer)}
        return life["alive"]

    assert step("plain") is False
    held = []
    with checkpointed(nn.Module(), config("none"), layers=[layer]) as handle:
        assert step("ours") is False
        assert handle.end_step().gradients_shared == 0
        assert step("held", held.append) is True
        assert step("viewed", lambda g: held.append(g.view(-1))) is True
        assert handle.end_step().gradients_shared == 2
    for name in ("ours", "held", "viewed"):
        assert_same(grads[name], grads["plain"])
    assert held[0].shape == (1, 8, 16) and torch.equal(held[0].view(-1), held[1]) and float(held[0].abs().sum()) > 0


def test_retained_gradients_are_right():
    model = model_of(layers=2)
    layer = decoder_layers(model)[0]

    def step():
        kept = []
        hook = layer.register_forward_hook(lambda module, args, out: (out.retain_grad(), kept.append(out))[0])
        loss_of(model, ids_of()).backward()
        hook.remove()
        return kept[0].grad

    expected = step()
    with checkpointed(model, config("pinned")):
        assert torch.equal(step(), expected)


def test_a_layer_may_write_over_its_input_where_it_asks():
    class InPlace(Toy):
        def forward(self, hidden_states):
            y = self.linear(hidden_states)
            if self._checkpointing.input_overwritable():
                assert not torch.is_grad_enabled()
                return hidden_states.add_(y)
            return hidden_states + y

    layer, other = InPlace(), Toy()
    x = torch.randn(1, 4, 16)
    y = x + other.linear(x)
    expected = (y + layer.linear(y)).detach()
    for offload in ("pinned", "pageable"):
        with checkpointed(nn.Module(), config(offload), layers=[layer]):
            hidden = x + other.linear(x)
            out = layer(hidden)
            assert torch.equal(out, expected)
            assert out.data_ptr() == hidden.data_ptr() and torch.equal(hidden, expected)
            out.sum().backward()
        layer.zero_grad(), other.zero_grad()
    with checkpointed(nn.Module(), config("none"), layers=[layer]):
        hidden = x + other.linear(x)
        assert layer(hidden).data_ptr() != hidden.data_ptr()


@pytest.mark.parametrize("offload", MODES)
def test_writing_over_the_input_without_asking_is_an_error(offload):
    class InPlace(Toy):
        def forward(self, hidden_states):
            return hidden_states.add_(1.0) * self.linear.weight.sum()

    layer = InPlace()
    with checkpointed(nn.Module(), config(offload), layers=[layer]):
        hidden = torch.randn(1, 4, 16, requires_grad=True) * 1.0
        with pytest.raises(RuntimeError, match="in.?place"):
            layer(hidden).sum().backward()


# failures


def failing_above(monkeypatch, limit):
    monkeypatch.setattr(host, "_register", lambda address, nbytes: "out of memory (2)" if nbytes > limit else None)


def test_pinning_fails_and_says_so(monkeypatch):
    """T41: without a fallback the error, told apart from the device's by its outcome."""
    failing_above(monkeypatch, 0)
    model = model_of()
    with checkpointed(model, config("pinned")):
        with pytest.raises(host.PinnedHostMemoryError, match="pinned host memory") as caught:
            loss_of(model, ids_of())
        assert classify(caught.value)[0] == "oom_pinned"


def test_pinning_fails_and_falls_back_as_asked(monkeypatch, caplog):
    """T41: with pinned_fallback what was pinned stays so, the rest is pageable, announced once, and numbers are the same."""
    model = model_of(hidden=256)
    tokens = 300
    loss_of(model, ids_of(1, tokens)).backward()
    expected = gradients(model)
    allowed = iter([True, True])
    monkeypatch.setattr(host, "_register",
                        lambda address, nbytes: None if nbytes == 2**20 or next(allowed, False) else "out of memory (2)")
    host.pool().clear()
    with caplog.at_level(logging.WARNING), checkpointed(model, config("pinned", pinned_fallback=True)) as handle:
        for _ in range(3):
            model.zero_grad()
            loss_of(model, ids_of(1, tokens)).backward()
            assert_same(gradients(model), expected)
            report = handle.end_step()
        assert report.offload == "pageable" and "pinned host memory ran out" in handle.report()
        assert [slab.pinned for slab in handle._store._slabs] == [True, True, False, False]
    said = [r.message for r in caplog.records if "pinned host memory" in r.message]
    assert len(said) == 1 and "falling back to pageable" in said[0]


@pytest.mark.parametrize("trained", [(f"layers.{LAYERS - 1}.",), ("lm_head",)])
def test_where_only_what_is_kept_is_trained_nothing_is_moved(trained):
    model = model_of()
    for name, p in model.named_parameters():
        p.requires_grad_(any(part in name for part in trained))
    loss_of(model, ids_of()).backward()
    expected = gradients(model)
    with checkpointed(model, config("pinned", keep_layers_on_gpu="auto")) as handle:
        model.zero_grad()
        loss_of(model, ids_of()).backward()
        assert_same(gradients(model), expected)
        report = handle.end_step()
        assert report.bytes_to_host == 0 and report.layer_calls == ("layers" in trained[0])
        model.eval()
        loss_of(model, ids_of()).backward()
        with pytest.raises(OffloadError, match="moved nothing"):
            handle.end_step()


def test_offload_that_moves_nothing_is_an_error():
    model = model_of()
    with checkpointed(model, config("pinned", keep_layers_on_gpu="auto")) as handle:
        model.eval()
        loss_of(model, ids_of()).backward()
        with pytest.raises(OffloadError, match=f"moved nothing .* {LAYERS - 1} of {LAYERS} layers"):
            handle.end_step()
        model.train()
        loss_of(model, ids_of()).backward()
        assert handle.end_step().bytes_to_host > 0
        with pytest.raises(OffloadError, match="0 layer calls"):
            handle.end_step()
    for cfg in (config("pinned", keep_layers_on_gpu=LAYERS), config("none")):
        with checkpointed(model, cfg) as handle:
            loss_of(model, ids_of()).backward()
            assert handle.end_step().bytes_to_host == 0


def test_an_error_in_a_layer_loses_no_slab():
    model = model_of()
    layers = decoder_layers(model)
    with checkpointed(model, config("pageable")) as handle:
        def broken(*args):
            raise ZeroDivisionError

        hook = layers[2].mlp.register_forward_pre_hook(broken)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                loss_of(model, ids_of())
            gc.collect()
        hook.remove()
        loss_of(model, ids_of()).backward()
        assert handle.end_step().waiting == 0
        assert len(handle._store._slabs) == len(handle._store._free) == LAYERS


def test_an_error_in_the_copying_thread_is_raised(monkeypatch):
    model = model_of()

    def broken(lane, source, slab, ready):
        raise ZeroDivisionError("in the thread")

    monkeypatch.setattr(host._Lane, "to_host", broken)
    apply_checkpointing(model, config("pageable"))
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        loss_of(model, ids_of()).backward()


# on and off, refusals


def test_removal_leaves_nothing(caplog):
    host.pool().clear()
    before = host.pool().held_bytes
    model = model_of()
    classes = [type(m) for m in model.modules()]
    state = [set(vars(m)) for m in model.modules()]
    handle = apply_checkpointing(model, config("pageable"))
    loss = loss_of(model, ids_of())
    names = {type(layer).__name__ for layer in decoder_layers(model)}
    assert names == {"LlamaDecoderLayer"} and host.pool().held_bytes > before
    handle.remove()
    assert "wait for a backward" in caplog.text
    loss.backward()
    del loss
    gc.collect()
    handle.remove()
    assert host.pool().held_bytes == before
    assert [type(m) for m in model.modules()] == classes and [set(vars(m)) for m in model.modules()] == state


def test_what_is_refused():
    model = model_of()
    with checkpointed(model, config("pinned")):
        with pytest.raises(PreflightError, match="already"):
            apply_checkpointing(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with pytest.raises(PreflightError, match="transformers' own checkpointing is on too"):
            loss_of(model, ids_of()).backward()
        model.gradient_checkpointing_disable()
        with pytest.raises(PreflightError, match="use_cache=False"):
            model(input_ids=ids_of(), use_cache=True)
        with pytest.raises(RuntimeError, match="call loss.backward"):
            torch.autograd.grad(loss_of(model, ids_of()), list(model.parameters()))
        loss = loss_of(model, ids_of())
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second backward"):
            loss.backward()
        layer = decoder_layers(model)[0]
        with pytest.raises(PreflightError, match="second tensor that requires a gradient"):
            layer(torch.randn(1, 4, HIDDEN), position_embeddings=(torch.randn(4, requires_grad=True),))
        with pytest.raises(PreflightError, match="without hidden states"):
            layer(attention_mask=None)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(PreflightError, match="transformers' own checkpointing is on"):
        apply_checkpointing(model)
    model.gradient_checkpointing_disable()
    layer = decoder_layers(model)[0]
    layer.forward = layer.forward
    with pytest.raises(PreflightError, match="set on the instance"):
        apply_checkpointing(model)
    model = model_of()
    model.model.layers[2] = model.model.layers[0]
    with pytest.raises(PreflightError, match="layer 2 is layer 0 once more"):
        apply_checkpointing(model)
    with pytest.raises(PreflightError, match="no list `layers`"):
        apply_checkpointing(nn.Linear(2, 2))


@pytest.mark.parametrize("values,says", [
    (dict(offload="cpu"), "'pinned', 'pageable'"), (dict(keep_layers_on_gpu=-1), "0 or more, or auto"),
    (dict(keep_layers_on_gpu="all"), "keep_layers_on_gpu='all'"), (dict(staging_chunks=1), "2 chunks"),
    (dict(preserve_rng="yes"), "preserve_rng"), (dict(offlaod="none"), "offload")])
def test_configurations_are_checked(values, says):
    with pytest.raises(ConfigError, match=says):
        from_mapping(CheckpointConfig, values)
    good = from_mapping(CheckpointConfig, dict(offload="pageable", keep_layers_on_gpu=2, pinned_fallback=True))
    assert good == CheckpointConfig("pageable", 2, True)


@pytest.mark.parametrize("values", [
    dict(keep_layers_on_gpu=1.5), dict(keep_layers_on_gpu="2"), dict(keep_layers_on_gpu=True), dict(keep_layers_on_gpu=None),
    dict(staging_mib=1.5), dict(staging_mib=-1), dict(staging_chunks=2.0), dict(pairs=1.0)])
def test_numbers_that_are_not_whole_are_refused_by_name(values):
    """Also where no file of settings is read, whose types are checked there."""
    (name,) = values
    with pytest.raises(ValueError, match=f"^{name}={values[name]!r}"):
        CheckpointConfig("pageable", **values)


# real ranks


def _deepspeed(kind, stage, accumulation, offload, prefetch=True):
    data = data_of("odd", dist.get_world_size() // 2, accumulation)
    plain = plain_step(tiny_model(kind, 4, 2, layers=3), data)
    model = tiny_model(kind, 4, 2, layers=3)
    handle = apply_checkpointing(model, config(offload, prefetch=prefetch, keep_layers_on_gpu="auto"), contexts=_block_contexts())
    with sharded(model, 2, stage, accumulation=accumulation) as (upipe_handle, engine):
        # Twice: DeepSpeed records ZeRO-3's order of modules in the first window and relies on it in the next.
        assert_equal_to_plain(upipe_handle, engine, plain, data, logits=False)
        report = handle.end_step()
        assert report.layer_calls == 3 * accumulation and report.waiting == 0 and report.gradients_shared == 0
        L = [-(-batch["input_ids"].shape[1] // 2) for batch in data[upipe_handle.dp_rank]]
        sent, width = (0 if offload == "none" else 2), model.config.hidden_size
        assert report.bytes_to_host == report.bytes_to_device == sent * sum(L) * width * 4
    handle.remove()


def _block_contexts():
    from upipe import block

    return block.checkpoint_contexts


@pytest.mark.parametrize("kind,stage,accumulation,offload", [
    ("llama", 0, 1, "pinned"), ("llama", 1, 3, "pageable"), ("qwen3", 2, 1, "pageable"), ("qwen3", 2, 3, "pinned"),
    ("llama", 3, 1, "pageable"), ("qwen3", 3, 3, "pinned"), ("qwen3", 3, 1, "none"), ("llama", 0, 3, "none")])
def test_deepspeed(worlds, kind, stage, accumulation, offload):
    worlds(2).run(_deepspeed, kind=kind, stage=stage, accumulation=accumulation, offload=offload)


@pytest.mark.slow
@pytest.mark.parametrize("kind, stage, accumulation, offload", half(
    kind=("llama", "qwen3"), stage=(0, 1, 2, 3), accumulation=(1, 3), offload=tuple(MODES),
))
def test_deepspeed_grid(worlds, kind, stage, accumulation, offload):
    worlds(4).run(_deepspeed, kind=kind, stage=stage, accumulation=accumulation, offload=offload, prefetch=accumulation == 1)


def parameters(engine, frozen):
    """Every trained parameter's whole fp32 value, on every rank."""
    found = [(name, p) for name, p in engine.module.named_parameters() if frozen is None or frozen not in name]
    return {name: safe_get_full_fp32_param(p).detach().clone() for name, p in found}


def _training(stage, offload, frozen):
    """Four optimizer steps of a window of 2 with and without checkpointing: the same losses and weights; with a frozen
    embedding the first layer's parameters are trained all the same."""
    outcomes = []
    for checkpoint in (False, True):
        model = tiny_model("llama", 4, 2, layers=3)
        if frozen:
            model.model.embed_tokens.requires_grad_(False)
        handle = apply_checkpointing(model, config(offload)) if checkpoint else None
        cfg = ds_config(stage, accumulation=2)
        with sharded(model, 2, config=cfg) as (upipe_handle, engine):
            losses = []
            (data,) = data_of("even", 1, 8)
            for batch in upipe_handle.shard(data, accumulation=2):
                loss = upipe_handle.loss(engine, batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            outcomes.append((losses, parameters(engine, frozen="embed_tokens" if frozen else None)))
        if handle is not None:
            assert handle.end_step().layer_calls == 3 * 8
            handle.remove()
    (plain_losses, plain_weights), (losses, weights) = outcomes
    assert losses == plain_losses and losses[-1] != losses[0]
    for name, value in plain_weights.items():
        assert torch.equal(weights[name], value), name
    start = dict(tiny_model("llama", 4, 2, layers=3).named_parameters())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(weights[name], start[name])


@pytest.mark.parametrize("stage,offload,frozen", [(1, "pinned", True), (3, "pageable", True),
                                                  pytest.param(3, "pinned", False, marks=pytest.mark.slow)])
def test_training_under_deepspeed(worlds, stage, offload, frozen):
    worlds(2).run(_training, stage=stage, offload=offload, frozen=frozen)


def _wrapped(wrapper, offload, kind, order="ours first"):
    """Three steps of DDP or FSDP2 against one process on all data; parameter hooks fire once a backward."""
    from torch.distributed.fsdp import fully_shard

    world, rank = dist.get_world_size(), dist.get_rank()
    plain, model = tiny_model(kind, 4, 2, layers=3).train(), tiny_model(kind, 4, 2, layers=3).train()
    handle = apply_checkpointing(model, config(offload)) if order == "ours first" else None
    if wrapper == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer, reshard_after_forward=wrapper == "fsdp2")
        wrapped = fully_shard(model)
    if handle is None:
        handle = apply_checkpointing(model, config(offload))
    fired = {}
    for name, p in model.named_parameters():
        fired[name] = 0

        def hook(p, name=name):
            fired[name] += 1

        p.register_post_accumulate_grad_hook(hook)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        batches = [ids_of(seed=10 * step + r) for r in range(world)]
        for ids in batches:
            (loss_of(plain, ids) / world).backward()
        loss_of(wrapped, batches[rank]).backward()
        expected = dict(plain.named_parameters())
        for name, p in model.named_parameters():
            got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            assert_close(f"step {step}, {name}", got, expected[name].grad, 1e-5)
        report = handle.end_step()
        assert report.layer_calls == 3 and report.waiting == 0
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    if wrapper == "ddp":
        assert set(fired.values()) == {3}, fired
    return report.gradients_shared


@pytest.mark.parametrize("wrapper,offload,kind,order", [
    ("ddp", "pinned", "llama", "ours first"), ("ddp", "pageable", "qwen3", "ours first"),
    ("fsdp2", "pinned", "qwen3", "ours first"), ("fsdp2", "pageable", "llama", "ours first"),
    ("fsdp2-kept", "none", "llama", "ours first"), ("fsdp2", "pinned", "llama", "ours last")])
def test_ddp_and_fsdp2(worlds, wrapper, offload, kind, order):
    assert worlds(2).run(_wrapped, wrapper=wrapper, offload=offload, kind=kind, order=order) == [0, 0]


@pytest.mark.parametrize("parts", [{}, {"loss_tokens": None}, {"mlp_tokens": None}])
def test_tiles_leave_no_gradient_that_something_else_holds(parts):
    """The tiled norm after the last layer writes over a view that the loss made: the layer must be able to free it all the same."""
    model = model_of()
    tiling = apply_tiling(model, TilingConfig(**{"mlp_tokens": 5, "norm_tokens": 3, "loss_tokens": 4, **parts}))
    ids = ids_of()
    labels = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]

    def loss():
        return model(input_ids=ids, shift_labels=labels, use_cache=False).loss if tiling.has_loss else loss_of(model, ids)

    loss().backward()
    expected = gradients(model)
    reused = tiling.norm_counts.reused
    with checkpointed(model, config("pinned")) as handle:
        model.zero_grad()
        loss().backward()
        assert_same(gradients(model), expected)
        assert handle.end_step().gradients_shared == 0 and tiling.norm_counts.reused > reused > 0
