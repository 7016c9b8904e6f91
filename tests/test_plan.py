"""The planner's rules by hand, its predictions beside measured points, and `upipe plan`."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

from experiments import predict as experiment
from upipe import plan, records, simulate
from upipe.cli import main
from upipe.config import ConfigError, load
from upipe.optimize import deepspeed_config
from upipe.plan import GIB, Machine, fit, max_tokens, predict, request, save_config, state_bytes
from upipe.simulate import is_current
from upipe.trainer import RunConfig

ROOT = Path(__file__).resolve().parent.parent
FUSED = ["memory.fused_layers=true", "memory.offload=pinned", "upipe.attention_output=device"]
EIGHT = Machine.parse("8xH100-80GB")


def at(tokens, *words, machine=EIGHT, model="llama3-8b"):
    return predict(request(model, tokens, machine.world, [*FUSED, *words]), machine)


def test_machines():
    machine = Machine.parse("8xh100", nodes=2, host_gib=512)
    assert (machine.gpu.name, machine.world, machine.host_gib) == ("H100-80GB", 16, 512)
    assert Machine.parse("L40S").world == 1
    for text, hint in (("8xH1000", "H100-80GB"), ("banana", "kinds: H200"), ("0xH200", "kinds"), ("8xA100", "A100-80GB or A100-40GB")):
        with pytest.raises(ConfigError, match=hint):
            Machine.parse(text)
    with pytest.raises(ConfigError, match="positive"):
        Machine.parse("8xH200", nodes=0)


@pytest.mark.parametrize("stage, expected", [(0, (2, 2, 12)), (1, (2, 2, 1.5)), (2, (2, 0.25, 1.5)), (3, (0.25, 0.25, 1.5))])
def test_states_by_stage(stage, expected):
    """Bytes a parameter on eight ranks; fp32 gradients are twice as much, an optimizer on the host nothing."""
    run = request("llama3-8b", 2**17, 8, [f"train.zero_stage={stage}"])
    assert state_bytes(run, 1000, 8) == dict(zip(("parameters", "gradients", "optimizer"), (1000 * n for n in expected)))
    wide = request("llama3-8b", 2**17, 8, [f"train.zero_stage={max(stage, 1)}", "train.gradient_dtype=fp32"])
    assert state_bytes(wide, 1000, 8)["gradients"] == 2 * 1000 * 2 // (8 if stage >= 2 else 1)
    if stage:
        on_host = request("llama3-8b", 2**17, 8, [f"train.zero_stage={stage}", "memory.optimizer=cpu"])
        assert state_bytes(on_host, 1000, 8)["optimizer"] == 0


def test_inputs_on_host_and_device():
    """At 1M tokens on eight ranks u is 1 GiB: a layer more on the device is one u there and eight less on the host."""
    one, three = at(2**20), at(2**20, "memory.keep_layers_on_gpu=3")
    assert one.host["layer inputs"] == 31 * 8 and three.host["layer inputs"] == 29 * 8
    assert one.device["saved inputs"] == 1 and three.device["saved inputs"] == 3
    assert one.device["prefetched input"] == 1
    assert one.phases["backward"] - at(2**20, "memory.prefetch=false").phases["backward"] == pytest.approx(1 + plan.MARGIN_SHARE)
    output = at(2**20, "upipe.attention_output=host")
    assert output.host["attention outputs"] == 32 * 8 * (1 + 32 * 4 / 8192)
    assert output.host_gib - one.host_gib == pytest.approx(output.host["attention outputs"])


def test_the_host_is_what_a_run_itself_would_say():
    """The same layer inputs and attention outputs as `memory.make_plan`, which the trainer refuses by."""
    found = at(2**20, "upipe.attention_output=host")
    _, sizes, _ = plan.described(found.run)
    mine = plan.make_plan(
        found.run, 2**20, sizes, world=8, local_ranks=8, device_bytes=int(79.6 * GIB), host_bytes=2**50
    )  # fmt: skip
    assert 8 * mine.host_bytes / GIB == found.host["layer inputs"] + found.host["attention outputs"]


def test_an_optimizer_on_the_host():
    device, host = at(2**20), at(2**20, "memory.optimizer=cpu")
    parameters = 8_030_261_248
    assert device.device["optimizer"] == pytest.approx(12 * parameters / 8 / GIB, rel=1e-6)
    assert host.device["optimizer"] == 0 and host.host["optimizer"] == pytest.approx(16 * parameters / GIB, rel=1e-6)
    assert host.time["optimizer"] > device.time["optimizer"]


def test_buffers_follow_the_deepspeed_configuration():
    found = at(2**20)
    zero = deepspeed_config(found.run.train, found.run.memory, cuda=True, layer_parameters=218_112_000)["zero_optimization"]
    assert found.device["buckets"] == pytest.approx(2 * 2 * zero["reduce_bucket_size"] / GIB, rel=1e-6)
    assert found.device["gathered"] == pytest.approx(
        2 * (zero["stage3_max_live_parameters"] + zero["stage3_prefetch_bucket_size"]) / GIB, rel=1e-6
    )
    more = at(2**20, "memory.reduce_bucket_parameters=500000000")
    assert more.device["buckets"] == pytest.approx(2e9 / GIB)


@pytest.mark.parametrize("words", [FUSED, ["memory.preset=paper"], ["memory.preset=fastest"], ["memory.preset=lowest_memory"]])
def test_more_tokens_never_take_less(words):
    found = [predict(request("llama3-8b", n, 8, words), EIGHT) for n in (2**15, 2**17, 2**20, 3 * 2**20, 5 * 2**20, 2**23)]
    for a, b in zip(found, found[1:]):
        assert a.time_s < b.time_s
        assert a.host_gib <= b.host_gib or b.run.memory.offload != a.run.memory.offload
        assert all(a.phases[phase] <= b.phases[phase] + 1e-6 for phase in a.phases) or a.sent_layers < b.sent_layers


def test_more_ranks_take_less_of_each():
    eight, two = at(2**20), at(2**20, "upipe.sp_size=2")
    assert eight.device_gib < two.device_gib
    assert eight.host["layer inputs"] * 4 == two.host["layer inputs"]


def test_time_follows_the_flops():
    """Attention is quadratic, products are linear; attention output on the host runs attention's forward once."""
    one, two = at(2**20), at(2**21)
    assert two.time["attention, forward"] == pytest.approx(4 * one.time["attention, forward"], rel=0.01)
    assert two.time["products"] == pytest.approx(2 * one.time["products"], rel=1e-6)
    once = at(2**20, "upipe.attention_output=host")
    assert one.time["attention, forward"] == pytest.approx(2 * once.time["attention, forward"])
    # 2 forwards of 2 S^2 H d / 8 each at the measured 656 TFLOP/s, of 32 layers.
    assert one.time["attention, forward"] == pytest.approx(32 * 2 * 2 * 2**40 * 32 * 128 / 8 / 656e12)
    slow = at(2**20, machine=Machine.parse("8xA100-80GB"))
    assert slow.time_s > 2 * one.time_s and slow.kernel == "flash"


def test_the_paper_s_own_numbers():
    """Its set-up on this code at 1M to 4M: throughput within 15 % of Table 3, and 5M fits."""
    table = experiment.published()
    for tokens in (2**20, 2**21, 3 * 2**20, 2**22):
        found = predict(request("llama3-8b", tokens, 8, ["memory.preset=paper", "upipe.attention_output=device"]), EIGHT)
        assert found.fits and found.tokens_per_s_per_gpu == pytest.approx(float(table[tokens]), rel=0.15)
    assert at(5 * 2**20).fits


def test_longest():
    """The longest that fits fits, and a step more does not; the host ends it at about 7.6M with every input stored."""
    words = [*FUSED, "upipe.overlap=false", "memory.prefetch=false"]
    found = max_tokens("llama3-8b", EIGHT, words)
    assert found.fits and not at(found.tokens + plan.GRAIN, *words[3:]).fits
    assert 7.4 < found.tokens / 2**20 < 7.8 and found.limit == "host" and found.headroom["device"] > 8
    # One stored input for two layers: then the device ends it.
    paired = max_tokens("llama3-8b", EIGHT, [*words, "memory.store_every=2"])
    assert 9 < paired.tokens / 2**20 < 9.5 and paired.limit == "device"
    assert max_tokens("qwen3-32b", Machine.parse("8xA100-40GB"), words) is None


def test_fit():
    """The fastest that fits; sequence parallelism only as far as needed; what is given stays."""
    short, long = fit("llama3-8b", 2**16, EIGHT), fit("llama3-8b", 7 * 2**20, EIGHT)
    assert short.fits and long.fits and short.run.upipe.sp_size < long.run.upipe.sp_size == 8
    assert fit("llama3-8b", 2**20, EIGHT).attention_layers == 32 and 0 < long.attention_layers < 32
    given = fit("llama3-8b", 2**20, EIGHT, ["upipe.attention_output=device", "upipe.sp_size=8"])
    assert given.run.upipe.attention_output == "device" and given.run.upipe.sp_size == 8
    assert fit("llama3-8b", 16 * 2**20, EIGHT) is None
    # 7.6M was the end where every layer's input is stored.
    eight, ten = (fit("llama3-8b", n * 2**20, EIGHT, ["upipe.sp_size=8"]) for n in (8, 10))
    assert eight.fits and eight.pairs == 16 and eight.run.memory.optimizer == "device"
    assert ten.fits and ten.pairs > 0 and ten.run.memory.optimizer == "cpu"


def test_fit_over_nodes_searches_rings():
    """Ulysses across nodes, and inside of them x a ring: the faster of the two; what is given stays; one node has no ring."""
    assert [plan.ring_degrees(*case) for case in ((8, 8), (2, 8), (16, 8), (32, 8), (24, 8), (6, 4))] == [
        [1], [1], [1, 2], [1, 4], [1, 3], [1, 3]]
    nodes = dataclasses.replace(EIGHT, nodes=2)
    tried = [(p.run.upipe.sp_size, p.run.upipe.ring_degree) for p in plan._candidates("llama3-8b", 2**22, nodes, [])]
    assert set(tried) >= {(16, 1), (16, 2), (8, 1)} and {ring for sp, ring in tried if sp <= 8} == {1}
    given = [p.run.upipe.ring_degree for p in plan._candidates("llama3-8b", 2**22, nodes, ["upipe.sp_size=16", "upipe.ring_degree=2"])]
    assert set(given) == {2}
    # At 4M tokens both fit, and are as fast; at 15M, with a layer's working tensors on the device, a ring alone does.
    always = ["upipe.sp_size=16", "memory.offload_within_layer=false"]
    short, long = (
        [fit("llama3-8b", tokens, nodes, [*always, *words]) for words in ([], ["upipe.ring_degree=1"], ["upipe.ring_degree=2"])]
        for tokens in (2**22, 15 * 2**20)
    )
    assert short[0].tokens_per_s_per_gpu >= 0.99 * max(each.tokens_per_s_per_gpu for each in short)
    assert [each and each.run.upipe.ring_degree for each in short] == [1, 1, 2]
    assert [each and each.run.upipe.ring_degree for each in long] == [2, None, 2] and long[0].kept
    assert fit("llama3-8b", 2**20, EIGHT).run.upipe.ring_degree == 1
    # Heads that 8 ranks take and 16 do not: the ring is tried all the same.
    with mock.patch.object(plan, "predict", _no_wide_ulysses(plan.predict)):
        assert {p.run.upipe.ring_degree for p in plan._candidates("llama3-8b", 2**22, nodes, ["upipe.sp_size=16"])} == {2}
        with pytest.raises(ConfigError, match="too wide"):
            list(plan._candidates("llama3-8b", 2**22, nodes, ["upipe.sp_size=16", "upipe.ring_degree=1"]))


def _no_wide_ulysses(predict):
    def refusing(run, machine, **more):
        if run.upipe.ulysses_degree > 8:
            raise ConfigError("too wide")
        return predict(run, machine, **more)

    return refusing


@pytest.mark.parametrize("words, change", [
    pytest.param(["memory.preset=none"], "memory.loss_tokens", marks=pytest.mark.slow),  # both are simulated anew
    pytest.param(
        ["memory.preset=paper", "memory.offload=none", "memory.keep_layers_on_gpu=auto"], "memory.offload=pinned", marks=pytest.mark.slow
    ),
    (["memory.preset=paper", "memory.offload=pinned", "memory.keep_layers_on_gpu=2"], "memory.fused_layers=true"),
    ([*FUSED, "memory.keep_layers_on_gpu=20"], "upipe.overlap=false"),
])  # fmt: skip
def test_advice(words, change):
    found = predict(request("llama3-8b", 6 * 2**20, 8, words), EIGHT)
    assert not found.fits and found.limit == "device" and found.headroom["device"] < 0
    assert change in found.advice()
    followed = predict(request("llama3-8b", 6 * 2**20, 8, [*words, *found.advice().split()]), EIGHT)
    assert followed.device_gib < found.device_gib - 1


def test_advice_for_the_host():
    all_of_them = ["upipe.attention_output=host", "upipe.attention_output_layers=null"]
    found = at(6 * 2**20, *all_of_them)
    assert found.limit == "host" and found.headroom["host"] < 0 and found.advice() == "upipe.attention_output_layers=auto"
    assert at(6 * 2**20, *all_of_them[:1], found.advice()).fits
    least = ["upipe.overlap=false", "memory.prefetch=false"]
    found = at(2**23, *least)
    assert found.advice() == "memory.store_every=2 memory.pairs=2" and at(2**23, *least, *found.advice().split()).fits
    small = Machine.parse("8xH100-80GB", host_gib=1000)
    assert "more host memory" in at(2**23, *least, "memory.store_every=2", machine=small).advice()


def test_attention_outputs_of_some_layers_and_pairs():
    """At 8M a layer's input is 64 GiB a node, its attention output 65: as many as 1945 less 60 leave room for."""
    words = ["upipe.overlap=false", "memory.prefetch=false", "upipe.attention_output=host"]
    found = at(2**23, *words, "memory.store_every=2")
    assert (found.pairs, found.sent_layers, found.attention_layers) == (16, 16, 13)
    assert found.host["layer inputs"] == 16 * 64 and found.host["attention outputs"] == 13 * 65 and found.headroom["host"] < 65
    none, some = (at(2**23, *words, "memory.store_every=2", f"upipe.attention_output_layers={n}") for n in (0, 5))
    # A first layer of a pair runs attention forward three times, or once.
    for fewer, outputs in ((some, 5), (found, 13)):
        assert fewer.time["attention, forward"] / none.time["attention, forward"] == pytest.approx((80 - 2 * outputs) / 80)
    single = at(2**23, *words[:2])
    assert none.time["attention, forward"] == pytest.approx(80 / 64 * single.time["attention, forward"])
    assert none.time["products"] > single.time["products"] and none.device_gib == single.device_gib
    # A pair whose input stays: the second layer's is beside it.
    kept = at(2**20, "memory.store_every=2", "memory.keep_layers_on_gpu=1", "memory.prefetch=false")
    assert kept.device["saved inputs"] == 2 and kept.sent_layers == 15
    assert plan.with_pairs(at(2**20)) and len(plan.with_pairs(at(2**20))) == 1
    with pytest.raises(ConfigError, match="attention_output_layers=33 of 32"):
        at(2**20, "upipe.attention_output=host", "upipe.attention_output_layers=33")


@pytest.mark.parametrize("preset", ["paper", "fastest", "lowest_memory"])
def test_a_saved_configuration_is_the_run(tmp_path, preset):
    found = predict(request("llama3-8b", 2**20, 8, [f"memory.preset={preset}"]), EIGHT)
    save_config(found, tmp_path / "run.yaml")
    again = load(RunConfig, tmp_path / "run.yaml")
    assert again == found.run and again.data.tokens == 2**20
    assert predict(again, EIGHT).device_gib == found.device_gib
    with pytest.raises(ConfigError, match="--save-config"):
        save_config(found, tmp_path / "no" / "run.yaml")


def command(capsys, *words):
    status = main(["plan", *words])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_json(capsys, tmp_path):
    status, out, _ = command(
        capsys, "--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "5M", "--json", "--plot", str(tmp_path / "bars.png"),
        "--save-config", str(tmp_path / "run.yaml"), *FUSED,
    )  # fmt: skip
    values = json.loads(out)
    assert status == 0 and values["fits"] is True and values["tokens"] == 5 * 2**20 and values["max_tokens"] is None
    assert values["limit"] in ("device", "host") and values["time_s"] > 0
    for memory in ("device", "host"):
        part = values[memory]
        assert part["gib"] == pytest.approx(sum(part["components"].values()))
        assert part["headroom_gib"] == pytest.approx(part["usable_gib"] - part["gib"])
    assert values["device"]["phases"][values["device"]["phase"]] == pytest.approx(values["device"]["gib"])
    assert values["time_s"] == pytest.approx(sum(values["time"].values()))
    assert (tmp_path / "bars.png").stat().st_size > 5000
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["data"]["tokens"] == 5 * 2**20
    status, out, _ = command(capsys, "--model", "llama3-8b", "--gpus", "8xH100-80GB", "--max-tokens", "--json", *FUSED)
    values = json.loads(out)
    assert status == 0 and values["max_tokens"] == values["tokens"] > 6 * 2**20


def test_text_and_status(capsys):
    status, out, _ = command(capsys, "--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "12M", *FUSED)
    assert status == 1 and "does not fit" in out and "to go further:" in out and "simulated with the real code" in out
    status, out, _ = command(capsys, "--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "14M", "--fit")
    assert status == 1 and "does not fit" in out


@pytest.mark.parametrize("words, told", [
    (["--model", "lama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1M"], "did you mean llama3-8b"),
    (["--model", "nobody/nothing", "--gpus", "8xH100-80GB", "--tokens", "1M"], "llama3-8b"),
    (["--model", "llama3-8b", "--gpus", "8xH999", "--tokens", "1M"], "kinds: H200-141GB"),
    (["--model", "llama3-8b", "--gpus", "64xH100-80GB", "--tokens", "1M", "upipe.heads_per_stage=7"], "heads_per_stage"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1M", "upipe.sp_size=3"], "use one of 1, 2, 4, 8"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1M", "memory.offlod=pinned"], "did you mean 'offload'"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1M", "upipe.kernel=fa9"], "fa4"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB"], "--max-tokens"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1M", "--host-gib", "nan"], "positive numbers"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1M", "--host-gib", "inf"], "positive numbers"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1"], "at least 2"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "17M"], "more than 16M"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1M", "data.tokens=2M"], "leave data.tokens"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--max-tokens", "data.tokens=64K"], "leave data.tokens"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1M", "model.preset=qwen3-8b"], "given by --model"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1M", "train.dtype=fp32"], "use bf16"),
    (["--model", "/no/such/folder", "--gpus", "8xH100-80GB", "--tokens", "1M"], "neither a preset, a folder"),
    (["--model", "llama3-8b", "--gpus", "8xH100-80GB", "--tokens", "1M", "--plot", "/no/such/folder/x.png"], "No such file"),
])  # fmt: skip
def test_errors_are_one_line(capsys, words, told):
    status, out, err = command(capsys, *words)
    assert status == 2 and out == "" and told in err and err.count("\n") == 1, err


def saved(folder, cls, **changes):
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512,
             "vocab_size": 1000, "head_dim": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # fmt: skip
    cls(**shape | changes).save_pretrained(folder)
    return str(folder)


def test_models_that_are_not_served(tmp_path, capsys):
    from transformers import CohereConfig, GPT2Config

    for name, cls in (("gpt2", GPT2Config), ("cohere", CohereConfig)):
        cls().save_pretrained(tmp_path / name)
        status, out, err = command(capsys, "--model", str(tmp_path / name), "--gpus", "8xH200", "--tokens", "64K")
        assert status == 2 and out == "" and f"type '{name}' is not served; types: llama, " in err and err.count("\n") == 1


def test_what_to_change_where_states_alone_do_not_fit():
    """Nothing that makes a step smaller helps then."""
    one, words = Machine.parse("1xH100-80GB"), ["memory.preset=paper"]
    found = predict(request("llama3-8b", 2**15, 1, words), one)
    assert not found.fits and found.advice() == "memory.optimizer=cpu"
    followed = predict(request("llama3-8b", 2**15, 1, [*words, found.advice()]), one)
    assert followed.fits and followed.device_gib < found.device_gib - 80
    found = predict(request("qwen3-32b", 2**15, 8, ["memory.preset=paper", "train.zero_stage=0"]), EIGHT)
    assert found.advice() == "train.zero_stage=3"


def test_windows_and_experts_in_time(tmp_path):
    """A window of the configuration is every layer's; of a mixture of experts those run that a token goes to."""
    from transformers import MistralConfig, Qwen3MoeConfig

    def time(folder):
        return predict(request(folder, 2**15, 2), Machine.parse("2xH200"), only_here=True).time

    wide, narrow = (
        time(saved(tmp_path / str(window), MistralConfig, sliding_window=window)) for window in (None, 2**12)
    )  # fmt: skip
    assert narrow["attention, backward"] / wide["attention, backward"] == pytest.approx(2**12 / 2**14)
    few, many = (
        time(saved(tmp_path / f"experts{n}", Qwen3MoeConfig, moe_intermediate_size=512, num_experts=16, num_experts_per_tok=n))
        for n in (2, 16)
    )
    assert 3 < many["products"] / few["products"] < 8 and many["attention, backward"] == few["attention, backward"]


@pytest.mark.slow
def test_a_search_for_a_model_whose_layers_cannot_be_fused(tmp_path):
    from transformers import Gemma2Config

    folder, machine = saved(tmp_path / "gemma2", Gemma2Config, sliding_window=4096), Machine.parse("2xH200")
    found = fit(folder, 2**13, machine, ["upipe.sp_size=2"], only_here=True)
    assert found.fits and not found.run.memory.fused_layers and "fused" not in found.advice()
    with pytest.raises(ConfigError, match="no layer to fuse"):
        fit(folder, 2**13, machine, ["memory.fused_layers=true"], only_here=True)
    assert not plan.least(folder, 2**13, machine).run.memory.fused_layers


def test_a_search_leaves_out_candidates_that_go_against_what_is_given():
    found = fit("llama3-8b", 2**16, Machine.parse("2xH200"), ["upipe.dx=bf16", "upipe.sp_size=2"], only_here=True)
    assert found.run.upipe.dx == "bf16" and not found.run.memory.fused_layers
    with pytest.raises(ConfigError, match="heads_per_stage=33"):
        fit("llama3-8b", 2**16, EIGHT, ["upipe.heads_per_stage=33"], only_here=True)


def test_fewer_ranks_are_not_tried_where_more_do_not_fit(monkeypatch):
    """They hold more each; Qwen3-32B on two nodes would be simulated on 4, 2 and 1 ranks for nothing."""
    tried, whole = [], plan.predict
    monkeypatch.setattr(plan, "predict", lambda run, *args, **options: tried.append(run.upipe.sp_size) or whole(run, *args, **options))
    assert fit("llama3-8b", 16 * 2**20, EIGHT) is None
    assert set(tried) == {8}


def test_the_longest_that_is_searched_is_said(capsys, monkeypatch):
    monkeypatch.setattr(plan, "LONGEST", 2**18)
    status, out, _ = command(capsys, "--model", "llama3-8b", "--gpus", "8xH100-80GB", "--max-tokens", *FUSED)
    assert status == 0 and "longest that fits: 262144 tokens, 0.25M, the longest that is searched" in out


def test_several_sequences_are_simulated_with_as_many_tokens_in_all(tmp_path, monkeypatch):
    from transformers import LlamaConfig

    folder, asked = saved(tmp_path / "own", LlamaConfig), []
    whole = simulate.simulate

    def short(case, lengths=None):
        asked.append((case.rows, lengths))
        return whole(case, (8192, 16384))

    monkeypatch.setattr(simulate, "simulate", short)
    predict(request(folder, 2**22, 2, ["train.micro_batch_size=4"]), Machine.parse("2xH200"))
    assert asked and all(rows == 4 and lengths == tuple(n // 4 for n in simulate.LENGTHS) for rows, lengths in asked)


def test_a_loss_as_transformers_computes_it():
    """Of whole logits in fp32 three times: log-softmax, its gradient and that of the logits; in this library's once less."""
    from experiments import published

    case = simulate.Case(simulate.shape_of(plan.described(request("llama3-8b", 2**15, 1))[0]), 1, "fa4", checkpointing="model")
    ours = simulate.simulate(case, (4096,)).loss[0]
    with published.transformers_loss():
        theirs = simulate.simulate(case, (4096,)).loss[0]
    logits = 4096 * 128256 * 4
    assert 3.0 < theirs / logits < 3.2 and theirs - ours > 0.9 * logits
    assert simulate.simulate(case, (4096,)).loss[0] == ours


def test_a_ring_of_two_nodes(monkeypatch):
    """Against 16 Ulysses ranks: the same attention, smaller stage buffers, messages that kernels hide but the first."""
    monkeypatch.setattr(simulate, "simulate", functools.partial(simulate.simulate, lengths=(4096, 65536)))
    two, words = Machine.parse("8xH100-80GB", 2, 1945), [*FUSED, "upipe.attention_output=host"]
    ring, wide = (predict(request("llama3-8b", 2**20, 16, [*words, *more]), two, kept=False) for more in (["upipe.ring_degree=2"], []))
    assert "sp 16 (ring 2 x Ulysses 8) x dp 1" in ring.text() and ring.to_json()["ring_degree"] == 2
    for name in ("attention, backward", "products", "ZeRO not hidden"):
        assert ring.time[name] == pytest.approx(wide.time[name], rel=0.05), name
    # 32 layers, 4 calls of one kv head, three quarters of k and v of 2**19 tokens, 128 wide in bf16, at 50 GB/s.
    assert ring.time["ring not hidden"] == pytest.approx(32 * 4 * 2 * 0.75 * 2**19 * 128 * 2 / 50e9) and wide.time["ring not hidden"] == 0
    assert ring.device_gib < wide.device_gib and ring.host_gib == wide.host_gib
    with pytest.raises(ConfigError, match=r"upipe.ring_degree=2 with sp_size=16 makes.* of 8 .*nodes of 4: .*one of \[1, 4, 8, 16\]"):
        predict(request("llama3-8b", 2**20, 16, [*words, "upipe.ring_degree=2"]), Machine.parse("4xH100-80GB", 4, 1945))
    with pytest.raises(ConfigError, match="ring_degree=3 does not divide sp_size=16"):
        predict(request("llama3-8b", 2**20, 16, [*words, "upipe.ring_degree=3"]), two)


def test_a_model_that_is_not_kept(tmp_path, capsys):
    """A folder with a configuration of its own is simulated when asked."""
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, intermediate_size=512, vocab_size=1000
    ).save_pretrained(tmp_path / "own")
    status, out, _ = command(capsys, "--model", str(tmp_path / "own"), "--gpus", "2xH200", "--tokens", "64K", "--json")
    values = json.loads(out)
    assert status == 0 and "(now)" in values["provenance"]["layer and loss"] and 0 < values["device"]["gib"] < 10


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_command_is_quick(nodes):
    """Under 20 s of a processor, from the kept results, with the search over settings; nothing else on standard output."""
    before = os.times()
    words = ["plan", "--model", "llama3-8b", "--gpus", "8xH100-80GB", "--nodes", str(nodes), "--max-tokens", "--fit", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "upipe.cli", *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["max_tokens"] > 7 * 2**20
    assert after.children_user + after.children_system - before.children_user - before.children_system < 20


def test_records(tmp_path, capsys):
    """Predictions are valid records; nothing that only a run has is in them."""
    made_with = {"run_id": "r", "commit": "c", "dirty": None, "versions": {"torch": "x"}, "command": "c", "date": "2026-01-01T00:00:00Z"}
    for tokens in (2**20, 12 * 2**20):
        record = experiment.record_of(at(tokens), "point", made_with)
        assert record.provenance == "predicted" and records.validate(record) == []
    assert record.outcome == "oom_host" or record.outcome == "oom_device"
    machine = dataclasses.replace(EIGHT, nodes=2)
    assert records.validate(experiment.record_of(at(2**20, "upipe.sp_size=8", machine=machine), "point", made_with)) == []
    assert isinstance(is_current(), bool)


@pytest.mark.parametrize("method", ["ulysses", "ring", "usp", "fpdt", "native"])
def test_other_methods(method, monkeypatch):
    """Each is planned with its own code: more device memory than UPipe's modules need but for FPDT, which keeps chunks on the host."""
    monkeypatch.setattr(simulate, "simulate", functools.partial(simulate.simulate, lengths=(16384, 65536)))
    simulate.peaks_of.cache_clear()
    words = ["memory.preset=paper", "train.zero_stage=3"]
    ours, other = (predict(request("llama3-8b", 2**20, 8, [*words, *more]), EIGHT) for more in ([], [f"method={method}"]))
    assert (other.device_gib > ours.device_gib) == (method != "fpdt")
    assert (other.host["attention chunks"] > 0) == (method == "fpdt")
    assert other.time["products"] <= ours.time["products"] and other.to_json()["method"] == method
    assert other.tokens_per_s_per_gpu == pytest.approx(ours.tokens_per_s_per_gpu, rel=0.2)
    assert f"method {method}" in other.text() and (
        method == "fpdt" or "method=upipe" in dataclasses.replace(other, device={"x": 99.0}).text()
    )
    simulate.peaks_of.cache_clear()


def test_a_search_under_another_method(monkeypatch):
    monkeypatch.setattr(simulate, "simulate", functools.partial(simulate.simulate, lengths=(16384, 65536)))
    simulate.peaks_of.cache_clear()
    found = max_tokens("llama3-8b", EIGHT, ["method=ulysses", "upipe.sp_size=8"], fitting=True)
    assert found.run.method.name == "ulysses" and 3 * 2**20 < found.tokens < 8 * 2**20
    with pytest.raises(ConfigError, match="method=ulysses with 32 query and 8 kv heads on 6 ranks.*use 1, 2, 4, 8, 16, 32"):
        predict(request("llama3-8b", 2**20, 6, ["method=ulysses"]), Machine.parse("6xH100-80GB"))
    assert predict(request("llama3-8b", 2**15, 8, ["method=none"]), EIGHT).run.upipe.sp_size == 1
    simulate.peaks_of.cache_clear()


def test_the_embedding_comes_with_the_first_layers_last_weights():
    """DeepSpeed's prefetch: when the second layer's attention goes back, with the first layer's weights and q, k and v in use."""
    run = request("llama3-8b", 2**19, 2, ["method=ulysses", "memory.offload=pinned"])
    found = predict(run, Machine.parse("2xH200"), only_here=True)
    assert found.phase == "backward of attention" and found.phases["backward"] < found.phases[found.phase]
    assert found.device["gathered"] == pytest.approx(2 * (218_112_000 + 4096 * 128 * (32 + 2 * 8) + 128256 * 4096) / GIB)
    # Where the last layers' inputs stay on the device they are gone by then.
    words = ["method=ulysses", "memory.offload=pinned", "memory.keep_layers_on_gpu=8"]
    kept = predict(request("llama3-8b", 2**19, 2, words), Machine.parse("2xH200"), only_here=True)
    assert kept.phase == "backward" and kept.phases["backward of attention"] == pytest.approx(found.phases[found.phase])
    fused = predict(request("llama3-8b", 2**18, 8, ["memory.fused_layers=true"]), EIGHT, only_here=True)
    assert "backward of attention" not in fused.phases


def test_a_kernel_of_few_heads_is_planned_at_its_own_length():
    """cuDNN at 1M tokens on two ranks runs heads in parts: no line from shorter lengths, where it takes all at once, leads there."""
    run = request("llama3-8b", 2**20, 2, ["method=ulysses", "upipe.kernel=cudnn"])
    case = next(iter(plan.cases_of(run, plan.described(run)[2], "cudnn", None).values()))
    found = predict(run, Machine.parse("2xH200"))
    assert simulate.in_parts(case, 2**19) and found.phase == "backward"
    exact = simulate.simulate(case, (2**19,)).backward[0] / GIB
    u = 2**19 * 4096 * 2 / GIB
    assert found.device["work of a layer"] == pytest.approx(exact - u)
    assert simulate.simulate(case).at("backward", 2**19) / GIB > 1.2 * exact
