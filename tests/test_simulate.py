"""The simulation of a layer's and the loss's memory: against counts by hand, the counting experiments and the kept results."""

import dataclasses
import json

import pytest
import torch

from experiments import live_layer
from experiments.live import SHAPES
from upipe import block, layer, preflight, simulate
from upipe.build import ModelConfig, hf_config
from upipe.config import ConfigError
from upipe.methods.config import MethodConfig, host_bytes
from upipe.preflight import PreflightError
from upipe.simulate import Case, Peaks, cached, kept_cases, shape_of

GIB = 2**30
TILES = {"mlp_tokens": 8192, "norm_tokens": 8192, "loss_tokens": 2048}
SMALL = ModelConfig(hidden_size=256, layers=2, heads=8, kv_heads=4, intermediate_size=512, vocab_size=1000)


def shape(preset):
    return shape_of(hf_config(ModelConfig(preset=preset)))


def line(case, phase, lengths=(262144, 393216)):
    """Slope in u and constant in GiB."""
    peaks = simulate.simulate(case, lengths)
    slope = peaks.slope(phase)
    return slope / (2 * json.loads(case.shape)["hidden_size"]), (getattr(peaks, phase)[-1] - slope * lengths[-1]) / GIB


def test_lines_between_and_beyond_the_lengths():
    peaks = Peaks((10, 20, 40), (5, 15, 75), (1, 1, 1), (0, 0, 0), (0, 0, 0))
    assert [peaks.at("forward", n) for n in (1, 10, 15, 20, 30, 40, 80)] == [5, 5, 10, 15, 45, 75, 195]
    assert peaks.at("loss", 1000) == 1 and peaks.slope("forward") == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_a_fused_layer_is_what_the_counting_experiment_finds(overlap):
    """The whole patched model against `layer.decoder_layer` called by hand with its tensors; 1 %."""
    case = Case(shape("llama3-8b"), 8, "fa4", overlap=overlap, fused=True, mlp_tokens=4096)
    found = simulate.simulate(case, (65536,))
    counted = live_layer.layer_peaks(65536, 8, **SHAPES["llama3_8b"], width=14336, overlap=overlap)
    assert found.backward[0] == pytest.approx(counted["backward"][0], rel=0.01)
    # This one has positions.
    assert -8 * 65536 - 1024 < counted["first forward"][0] - found.forward[0] <= 0


@pytest.mark.parametrize(
    "preset, settings, units, constant",
    [
        ("llama3-8b", {"fused": True, "overlap": False}, 6.34, 0.36),
        ("llama3-8b", {}, 8.34, 0.03),
        ("qwen3-32b", {"fused": True, "overlap": False}, 6.28, 0.81),
    ],
)
def test_layers_at_eight_ranks(preset, settings, units, constant):
    """Regression: docs/layer.md's numbers, and 8.33 u of the memory study for modules (its dO a stage at a time, dx in bf16)."""
    found, const = line(Case(shape(preset), 8, "fa4", **TILES | settings), "backward")
    assert found == pytest.approx(units, rel=0.01) and const == pytest.approx(constant, abs=0.02)


@pytest.mark.parametrize("settings, units", [
    ({"fused": True, "overlap": False}, 6.28 + 4 * 0.2),
    pytest.param({"fused": True}, 7.08 + 4 * 0.2, marks=pytest.mark.slow),
    pytest.param({}, 7.69, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.slow
def test_a_ring_of_two(settings, units):
    """Qwen3-32B at eight Ulysses ranks, of which 8.3 u are the target. Beside what it holds without a ring, a fused backward holds four
    stage buffers of P*d/D = 0.2 u at its peak: dk and dv on both ways and dq of the other ring rank's call (`ring.RingAttention`)."""
    case = Case(shape("qwen3-32b"), 8, "fa4", **TILES | settings, ring=2)
    found, _ = line(case, "backward")
    assert found == pytest.approx(units, rel=0.01) and found <= 8.3
    assert case.key.endswith("ring=2") and "ring" not in dataclasses.replace(case, ring=1).key


@pytest.mark.parametrize(
    "method, ranks, ring, units", [("none", 1, 1, 8.83), ("ulysses", 8, 1, 9.58), ("usp", 4, 2, 13.33), ("ring", 1, 8, 15.86)]
)
def test_baselines(method, ranks, ring, units):
    """Regression: slopes of a backward of Llama3-8B in tiles. Beside UPipe's 8.34 u, Ulysses holds all heads' q, k, v, result and their
    gradients at once, and a ring sums in fp32."""
    case = Case(shape("llama3-8b"), ranks, "fa4", **TILES, ring=ring, method=method)
    found, _ = line(case, "backward", (65536, 131072))
    assert found == pytest.approx(units, rel=0.01) and f"method={method}" in case.key


def test_torchs_ring_gathers_keys_and_sums_in_fp32():
    """torch's context_parallel beside this library's ring: k and v of all ranks at once, out of every visit in fp32."""
    text = shape_of(hf_config(SMALL))
    ring, native = (simulate.simulate(Case(text, 1, "cudnn", **TILES, ring=4, method=name), (8192,)) for name in ("ring", "native"))
    gathered = 4 * 8192 * 2 * 4 * 32 * 2
    assert native.forward[0] - gathered > 0 and native.backward[0] > ring.backward[0]


def test_torchs_ring_over_two_ranks():
    """Slope of a backward of Llama3-8B under cuDNN. Four layers on two H200s have one u more, the input that is prefetched (20.85 u from
    128K to 512K, experiments/results/stack.jsonl). The peak is in the second rank's call of half the keys: 1.25 u less than a whole one."""
    found, _ = line(Case(shape("llama3-8b"), 1, "cudnn", **TILES, ring=2, method="native"), "backward", (131072, 262144))
    assert found == pytest.approx(19.85, abs=0.02)


def test_fpdt_keeps_on_the_host_what_the_plan_counts_and_little_on_the_device():
    """Its q, k, v, result, gradient, log-sum-exp and fp32 dq, to the byte."""
    case = Case(shape_of(hf_config(SMALL)), 2, "fa4", method="fpdt", chunk_tokens=4096)
    host = simulate._Host()
    with simulate.without_a_device(case, host):
        model = simulate._model(case)
        handle = simulate.apply_method(model, simulate.MethodConfig("fpdt", chunk_tokens=4096), simulate.UPipeConfig(2))
        assert handle.sp_size == 2
        simulate.apply_checkpointing(model, simulate.CheckpointConfig("none"), contexts=simulate.checkpoint_contexts)
        simulate._layer_peaks(model, 0, case, 16384, host)
    rows, width, kv = 16384, 8 * 32, 4 * 32
    assert host.pool.held == 0
    # One chunk's dq never leaves the device.
    assert host.pool.most == rows * (3 * width * 2 + 2 * kv * 2 + 8 * 4) + (rows - 2048) * width * 4
    assert host.pool.most == host_bytes(MethodConfig("fpdt", chunk_tokens=4096), 2 * rows, 1, 2, 8, 4, 32, 2)
    whole = dataclasses.replace(case, method="ulysses", chunk_tokens=None)
    assert simulate.simulate(case, (16384,)).backward[0] < simulate.simulate(whole, (16384,)).backward[0]


def test_the_tiled_loss_by_hand():
    """Layer input, last hidden states, their norm, its gradient, cos and sin, positions and labels a token; at the peak the head's
    gradient in fp32 and in bf16."""
    wanted = (4 * 2 * 4096 + 2 * 2 * 128 + 16) / 8192
    found, constant = line(Case(shape("llama3-8b"), 8, "fa4", fused=True, overlap=False, **TILES), "loss")
    assert found == pytest.approx(wanted, rel=1e-6)
    head, tile = 128256 * 4096 / GIB, 2048 * 128256 / GIB
    # Whichever is more: rounding the head's gradient, or a tile's logits in fp32 and bf16 beside it.
    assert constant == pytest.approx(max(6 * head, 4 * head + 6 * tile), rel=0.25)


def test_untiled_logits_and_no_checkpointing():
    """Logits in bf16 and their gradient; a layer without checkpointing keeps its wide activations."""
    case = Case(shape_of(hf_config(SMALL)), 2, "fa4", checkpointing="none")
    peaks = simulate.simulate(case, (4096, 8192))
    assert peaks.slope("loss") >= 2 * 2 * 1000
    assert peaks.slope("saved") >= 3 * 2 * 512
    kept = simulate.simulate(dataclasses.replace(case, checkpointing="model"), (4096, 8192))
    assert kept.saved == (0, 0) and kept.slope("loss") < peaks.slope("loss")


def test_attention_output_on_the_host_is_counted_there():
    """H * d bf16 and H fp32 a token, whatever P."""
    text = shape_of(hf_config(SMALL))
    for ranks in (2, 8):
        peaks = simulate.simulate(Case(text, ranks, "fa4", attention_output="host"), (4096,))
        assert peaks.host == 8 * 32 * 2 + 8 * 4
    assert simulate.simulate(Case(text, 2, "fa4"), (4096,)).host == 0


def test_layers_of_several_kinds_are_each_run():
    described = hf_config(SMALL)
    described.layer_types = ["full_attention", "full_attention"]
    assert "layer_types" not in shape_of(described)
    gemma = {"model_type": "gemma3_text", "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 32, "intermediate_size": 256, "vocab_size": 300, "sliding_window": 64}  # fmt: skip
    from transformers import AutoConfig

    text = shape_of(AutoConfig.for_model(**gemma))
    assert len(json.loads(text)["layer_types"]) == 2
    assert simulate.simulate(Case(text, 2, "fa4", **TILES), (4096,)).backward[0] > 0


def test_what_is_kept_is_what_is_simulated_now():
    """One kept case of each model, at its two shortest lengths; 1 %. `python -m upipe.simulate` makes them again."""
    for model in simulate.KEPT:
        case = kept_cases(model)[0]
        kept = cached(case)
        assert kept is not None, case.key
        now = simulate.simulate(case, kept.lengths[:2])
        for phase in ("forward", "loss", "backward"):
            assert getattr(now, phase) == pytest.approx(getattr(kept, phase)[:2], rel=0.01), (model, phase)


def test_keeping_results(tmp_path):
    case, peaks = Case("{}", 2, "fa4"), Peaks((1, 2), (3, 4), (5, 6), (7, 8), (0, 0), 1.5)
    path = tmp_path / "layers.json"
    assert cached(case, path) is None
    simulate.keep({case: peaks}, path)
    simulate.keep({dataclasses.replace(case, ranks=4): peaks}, path)
    assert cached(case, path) == peaks == cached(dataclasses.replace(case, ranks=4), path)
    assert cached(dataclasses.replace(case, dx="bf16"), path) is None and simulate.is_current(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "other"}))
    assert not simulate.is_current(path)
    simulate.keep({case: peaks}, path)
    assert list(json.loads(path.read_text())["cases"]) == [case.key]  # of other code nothing stays


def test_refusals_and_nothing_left_behind():
    plain = block.exchange, preflight.check_groups, layer.finish_heads, torch.is_grad_enabled()
    text = shape_of(hf_config(SMALL))
    with pytest.raises(ConfigError, match="use one of fa4"):
        simulate.simulate(Case(text, 2, "none"), (64,))
    with pytest.raises(ConfigError, match="heads_per_stage"):
        simulate.simulate(Case(text, 2, "fa4", heads_per_stage=3), (64,))
    with pytest.raises((ConfigError, PreflightError), match="dx"):
        simulate.simulate(Case(text, 2, "fa4", fused=True, dx="bf16"), (64,))
    assert plain == (block.exchange, preflight.check_groups, layer.finish_heads, torch.is_grad_enabled())


def test_lines_of_another_method_are_those_of_long_sequences():
    """Ulysses on two ranks with cuDNN: at 64K local tokens the MLP's tiles are highest, from there on attention is."""
    case = Case(shape("llama3-8b"), 2, "cudnn", **TILES, method="ulysses")
    lengths = simulate.lengths_of(case)
    assert lengths[-1] == 262144 and simulate.in_parts(case, 393216) and not simulate.in_parts(case, 262144)
    # In blocks a call is one of a block and one kv head's heads; where "auto" knows of none, one of all.
    assert not simulate.in_parts(dataclasses.replace(case, block_tokens_backward=65536), 393216)
    assert simulate.in_parts(dataclasses.replace(case, block_tokens_backward=2**22), 2**21)
    assert simulate.in_parts(dataclasses.replace(case, block_tokens_backward="auto", gpu="none such"), 393216)
    beyond = simulate.simulate(case, (196608,)).backward[0]
    assert simulate.simulate(case).at("backward", 196608) == pytest.approx(beyond, rel=1e-3)


def test_fpdts_lines_are_those_of_many_chunks():
    """Beyond a few chunks nothing grows but what is as long as the sequence: a line through one and two would be a third too high."""
    case = Case(shape_of(hf_config(SMALL)), 2, "fa4", method="fpdt", chunk_tokens=4096)
    assert simulate.lengths_of(case) == (512, 2048, 4096, 6144, 8192, 12288)
    peaks = simulate.simulate(case)
    assert peaks.at("backward", 20480) == pytest.approx(simulate.simulate(case, (20480,)).backward[0], rel=0.01)


def test_attention_is_counted_by_itself():
    """The MLP's backward is over when attention's begins: of modules in tiles the first is highest under UPipe, the other under Ulysses."""
    ours, ulysses = (
        simulate.simulate(Case(shape("llama3-8b"), 2, "cudnn", **TILES, method=name), (131072,)) for name in ("upipe", "ulysses")
    )
    assert ours.attention[0] < 0.9 * ours.backward[0] and ulysses.attention[0] == ulysses.backward[0]
    assert ours.at("attention", 131072) == ours.attention[0] and Peaks((1,), (1,), (1,), (1,), (0,)).at("attention", 9) == 0
