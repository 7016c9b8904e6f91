"""Gradients of methods beside the unsharded model's: the sums, the rules, and the command on a toy over two ranks."""

import contextlib
import io
import json
from unittest import mock

import pytest
import torch

from experiments import gradients
from experiments.gradients import PLAIN, TRUTH, Sums, compare
from tests.test_stack_bench import named
from upipe import kernels, records


def test_sums_are_those_of_whole_tensors(monkeypatch):
    monkeypatch.setattr(gradients, "CHUNK", 7)
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(5, 11, generator=generator)
    a = (b + 0.1 * torch.randn(5, 11, generator=generator)).bfloat16()
    got, x, y = Sums.of(a, b), a.double().flatten(), b.double().flatten()
    assert got.error == pytest.approx(((x - y).norm() / y.norm()).item(), rel=1e-12)
    assert got.cosine == pytest.approx(torch.cosine_similarity(x, y, dim=0).item(), rel=1e-12)
    assert got.norm_off == pytest.approx(abs(x.norm() / y.norm() - 1).item(), rel=1e-9)
    both = got + Sums.of(2 * b, b)
    assert both.b == pytest.approx(2 * got.b) and both.off == pytest.approx(got.off + got.b)
    zero = torch.zeros(3)
    assert (Sums.of(zero, zero).error, Sums.of(zero + 1, zero).error) == (0.0, float("inf"))


def made_up(off, names=("w.weight", "v.weight"), length=4096):
    """Gradients under TRUTH, PLAIN (1 % off) and each name of `off`, tensors off by so much, each in a direction of its own."""
    generator = torch.Generator().manual_seed(0)
    truth = {name: torch.randn(length, generator=generator) for name in names}

    def moved(by):
        found = {}
        for name, grad in truth.items():
            noise = torch.randn(length, generator=generator)
            found[name] = grad + (by.get(name, 0.0) if isinstance(by, dict) else by) * noise * (grad.norm() / noise.norm())
        return found

    return {TRUTH: truth, PLAIN: moved(0.01)}, {name: moved(by) for name, by in off.items()}


def verdicts(found):
    return {(c.name, c.against, c.tokens): c.broken() for c in found}


def test_rules():
    reference, methods = made_up({"a": 0.008, "b": {"w.weight": 0.016, "v.weight": 0.001}})
    cpu = torch.device("cpu")
    got = verdicts(compare({64: methods}, reference, 64, cpu))
    assert set(got) == {(PLAIN, TRUTH, 64), ("a", TRUTH, 64), ("b", TRUTH, 64), ("b", "a", 64)}
    assert got[PLAIN, TRUTH, 64] == got["a", TRUTH, 64] == []
    for key in (("b", TRUTH, 64), ("b", "a", 64)):
        (problem,) = got[key]
        assert "1 of 2 tensors" in problem and "w.weight" in problem
    # The reference's errors bound another length too, and are of one length alone.
    longer = verdicts(compare({64: methods, 128: methods}, reference, 64, cpu))
    assert longer["b", "a", 128] == longer["b", "a", 64] and len(longer) == 5
    # Without a reference whole gradients alone are held to something.
    assert verdicts(compare({64: methods}, {}, None, cpu)) == {("b", "a", 64): []}
    scaled = {"a": methods["a"], "b": {name: 1.02 * grad for name, grad in methods["a"].items()}}
    (problem,) = verdicts(compare({64: scaled}, {}, None, cpu))["b", "a", 64]
    assert "norm" in problem and "2.00%" in problem
    turned = made_up({"a": 0.0, "b": 0.06})[1]
    (problem,) = verdicts(compare({64: turned}, {}, None, cpu))["b", "a", 64]
    assert problem.startswith("cosine 0.998") and "0.999" in problem


def test_numbers_that_are_none_break_the_rules_and_can_be_recorded():
    reference, methods = made_up({"a": 0.001, "b": 0.001})
    methods["b"]["v.weight"][5] = float("nan")
    found = compare({64: methods}, reference, 64, torch.device("cpu"))
    broken = [c for c in found if c.name == "b"]
    assert len(broken) == 2
    assert [len(c.broken()) for c in broken] == [1, 3]
    for c in broken:
        fields = json.loads(json.dumps(c.fields(), allow_nan=False))
        assert not fields["passed"] and fields["worst"][0] == {
            "tensor": "v.weight", "error": None, "plain_error": pytest.approx(0.01, rel=0.1), "ratio": None, "cosine": None,
            "norm_off": None,
        }
        assert "BROKEN" in gradients.table([fields | {"tokens": 64}])
    del methods["b"]["w.weight"]
    with pytest.raises(ValueError, match="w.weight"):
        compare({64: methods}, reference, 64, torch.device("cpu"))


TOY = ("--model", "toy", "--layers", "2", "--kernel", "reference", "--reference", "64")


def _run(folder, arguments, dtype="bfloat16", scaled=None):
    """-> what was printed, the records. scaled: dq of the attention kernel, times so much under the ring."""
    given = named(gradients.parser, gradients.settle, [*TOY, "--results", folder, *arguments])
    given.dtype, printed = dtype, io.StringIO()
    ring, backward = gradients.Bench.step, kernels.ReferenceAttention.backward

    def step(self, engine, setting, tokens):
        if scaled is not None and setting.name == "ring":
            def wrong(*args, **named):
                dq, *others = backward(*args, **named)
                return dq.mul_(scaled), *others

            kernels.ReferenceAttention.backward = wrong
        try:
            return ring(self, engine, setting, tokens)
        finally:
            kernels.ReferenceAttention.backward = backward

    gradients.Bench.step = step
    try:
        with contextlib.redirect_stdout(printed):
            done = gradients.run(given, "test")
    finally:
        gradients.Bench.step = ring
    return printed.getvalue(), done


def test_gradients_of_two_methods_are_those_of_the_unsharded_model(worlds, tmp_path):
    """In fp32, where nothing but a mistake is larger than 1e-5; at another length than the reference's too."""
    arguments = ["--tokens", "64", "96", "--methods", "ulysses", "upipe:host"]
    (printed, done), (silent, same) = worlds(2).run(_run, folder=str(tmp_path), arguments=arguments, dtype="float32")
    assert silent == "" and same == done == json.loads(json.dumps(records.load(tmp_path / "gradients.jsonl")))
    assert [(r["tokens"], r["method"], r["against"].split(":")[0]) for r in done] == [
        (64, "none", TRUTH), (64, "ulysses", TRUTH), (64, "upipe", TRUTH), (64, "upipe", "ulysses"), (96, "upipe", "ulysses"),
    ]
    for r in done[1:]:
        assert r["passed"] and r["worst"][0]["error"] < 1e-5 and r["tensors"] == 25
        assert r["loss"] == pytest.approx(r["loss_against"], rel=1e-6)
    # bf16 is seen to cost more than that.
    assert 1e-3 < done[0]["error"] < 0.05 and done[0]["worst_ratio"] == done[0]["median_ratio"] == 1.0
    table = gradients.table(done)
    assert printed.rstrip().endswith(table) and len(table.splitlines()) == 1 + len(done)


def test_a_wrong_gradient_is_told_by_name(worlds, tmp_path):
    arguments = ["--tokens", "64", "--methods", "ring", "upipe:host", "upipe:device"]
    printed, done = worlds(2).run(_run, folder=str(tmp_path), arguments=arguments, scaled=1.1)[0]
    got = {(r["setting"].partition(",")[0], r["against"].partition(",")[0]): r for r in done}
    same = got["upipe:device", "upipe:host"]
    assert same["passed"] and same["error"] == 0.0
    for key in (("ring:offload=pinned", TRUTH), ("upipe:host", "ring:offload=pinned")):
        assert not got[key]["passed"] and all("q_" in worst["tensor"] for worst in got[key]["worst"][:2])
        assert got[key]["worst"][0]["ratio"] > 3
    # Of the others, whose numbers are none of 16 alone (a norm of the toy's heads: a draw of luck), none is beyond the bound.
    others = [w for w in got["upipe:host", TRUTH]["worst"] if "q_norm" not in w["tensor"] and "k_norm" not in w["tensor"]]
    assert others and all(w["ratio"] <= gradients.BOUND for w in others)
    assert "BROKEN: ring" in printed


def test_refusals(tmp_path, capsys, monkeypatch):
    for arguments, says in (
        (["--methods", "upipe"], "two or more"), (["--methods", "upipe", "fsdp"], "alst, plain"),
        (["--tokens", "4K"], "--reference 8K is none of --tokens 4K"), (["--reference", "much"], "or none"),
        (["--show", "--results", str(tmp_path)], "no records"),
    ):
        assert gradients.main(arguments) == 2
        assert says in capsys.readouterr().err, arguments
    # 1 where a rule is broken, and not otherwise.
    monkeypatch.setattr(gradients.stack, "code", lambda commit: None)
    monkeypatch.setattr(gradients.upipe, "init_distributed", lambda: None)
    for passed in (True, False):
        monkeypatch.setattr(gradients, "run", lambda options, command, passed=passed: [{"passed": True}, {"passed": passed}])
        assert gradients.main([]) == (0 if passed else 1)


def _too_much():
    given = named(gradients.parser, gradients.settle, ["--kernel", "reference", "--layers", "32", "--tokens", "8K"])
    with mock.patch.object(gradients, "host_gib", lambda: 60.0), pytest.raises(ValueError, match=r"1\d\d GiB of gradients on a host of 60"):
        gradients.run(given, "test")


def test_a_host_that_is_too_small_is_refused(worlds):
    worlds(1).run(_too_much)
