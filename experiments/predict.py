"""Predictions of `upipe plan` beside published and measured numbers, as records with provenance "predicted".

    python -m experiments.predict                        # the tables; nothing is written
    python -m experiments.predict --results experiments/results     # and records in predict.jsonl
    python -m experiments.predict --configs out          # the YAMLs of the longest contexts

Published: Llama3-8B on 8 x H100-80GB with 1.9 TiB of host memory, 128K to 10M tokens, for the paper's own set-up on this
code (`memory.preset: paper`) and for this library's stack (`upipe plan --fit`), beside Table 3 of arXiv 2602.21196; longest
contexts. Measured: every point of block.jsonl and of llama3_8b_4layers-2gpu.jsonl beside what is predicted of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from experiments import points
from experiments.live import block_peak
from experiments.table import REPORTED, read_reported
from upipe import plan, records
from upipe.config import ConfigError, from_mapping
from upipe.environment import environment
from upipe.plan import GIB, Machine, Prediction, rates
from upipe.records import Record, format_tokens, parse_tokens
from upipe.trainer import RunConfig

RESULTS = points.ROOT / "experiments" / "results"
LENGTHS = ("128K", "256K", "512K", "1M", "2M", "3M", "4M", "5M", "6M", "7M", "8M", "9M", "10M")
PAPER_HOST_GIB = 1945.0
PAPER = ("memory.preset=paper",)


def record_of(prediction: Prediction, point: str, made_with: dict[str, Any], **extra: Any) -> Record:
    """A prediction as a record. peak_gib is without the margin, reserved_gib with it; states_gib parameters, gradients, optimizer."""
    run, machine = prediction.run, prediction.machine
    fits, left = prediction.fits, prediction.headroom
    states = sum(prediction.device.get(name, 0.0) for name in ("parameters", "gradients", "optimizer"))
    on_host = prediction.host["layer inputs"] + prediction.host["attention outputs"]
    pageable = run.memory.offload == "pageable"
    return Record(
        experiment="predict", provenance="predicted", method="upipe", model=run.model.preset, layers=prediction.layers,
        tokens=prediction.tokens, sp=run.upipe.ulysses_degree, ring=run.upipe.ring_degree,
        dp=machine.world // run.upipe.sp_size, zero=run.train.zero_stage,
        heads_per_stage=run.upipe.ulysses_degree, kernel=prediction.kernel, attention_output=run.upipe.attention_output,
        attention_output_host_layers=prediction.attention_layers if run.upipe.attention_output == "host" else None,
        keep_layers_on_gpu=prediction.layers - prediction.pairs - prediction.sent_layers, store_every=run.memory.store_every,
        overlap=run.upipe.overlap,
        offload="none" if not prediction.sent_layers else "pageable" if pageable else "pinned",
        dx={"gemm": "slabs", "bf16": "bfloat16"}[run.upipe.dx], tile_tokens=run.memory.mlp_tokens, dtype="bfloat16",
        outcome="ok" if fits else f"oom_{prediction.limit}",
        reason=None if fits else f"{-left[prediction.limit]:.1f} GiB of {prediction.limit} memory are lacking",
        time_s=prediction.time_s, tokens_per_s_per_gpu=prediction.tokens_per_s_per_gpu,
        peak_gib=prediction.device_gib - prediction.device["margin"], states_gib=states, reserved_gib=prediction.device_gib,
        host_pinned_gib=None if pageable else on_host, host_pageable_gib=on_host if pageable else None,
        extra={"point": point, "scope": "model", "fits": fits, "limit": prediction.limit, "pairs": prediction.pairs,
               "device": prediction.device, "host": prediction.host, "time": prediction.time, "from": prediction.provenance(),
               "settings": plan._plain({"upipe": vars(run.upipe), "memory": vars(run.memory)})} | extra,
    ).updated(made_with | {"gpu": machine.gpu.name, "gpus": machine.world, "host_gib": machine.host_gib})  # fmt: skip


def published(model: str = "llama3-8b") -> dict[int, str]:
    """Table 3's row of UPipe: tokens -> tokens/s/GPU, or "oom"."""
    rows = [r for r in read_reported(REPORTED) if r["source"] == "untied-ulysses" and r["figure"] == "table3"]
    return {
        r["tokens"]: "oom" if r["value"] is None else f"{r['value']:g}" for r in rows if r["model"] == model and r["method"] == "upipe"
    }


def cell(found: Prediction) -> str:
    if found.fits:
        return f"{found.tokens_per_s_per_gpu:.4g} ({found.device_gib:.1f} GiB)"
    return f"{found.limit} OOM (device {found.device_gib:.1f}, host {found.host_gib:.0f})"


def against_published(made_with: dict[str, Any]) -> tuple[list[Record], str]:
    machine, table = Machine.parse("8xH100-80GB", host_gib=PAPER_HOST_GIB), published()
    rows, kept = [["tokens", "published UPipe", "paper's set-up, predicted", "our stack, predicted", "settings"]], []
    for text in LENGTHS:
        tokens = parse_tokens(text)
        paper = plan.predict(plan.request("llama3-8b", tokens, machine.world, PAPER), machine)
        ours = plan.fit("llama3-8b", tokens, machine, ["upipe.sp_size=8"]) or plan.least("llama3-8b", tokens, machine)
        kept += [record_of(paper, f"paper-{text}", made_with, stack="paper"), record_of(ours, f"ours-{text}", made_with, stack="ours")]
        rows.append([text, table.get(tokens, "–"), cell(paper), cell(ours), settings_of(ours)])
    return kept, aligned(rows)


def settings_of(found: Prediction) -> str:
    memory, upipe = found.run.memory, found.run.upipe
    words = ["fused" if memory.fused_layers else "modules", f"outputs of {found.attention_layers} layers on the host"]
    words += [f"{found.pairs} pairs"] if found.pairs else []
    words += [] if upipe.overlap else ["no overlap"]
    words += [] if memory.prefetch else ["no prefetch"]
    words += ["Adam on the host"] if memory.optimizer == "cpu" else []
    return ", ".join([*words, f"{found.sent_layers} inputs on the host"])


def longest(made_with: dict[str, Any], configs: Path | None) -> tuple[list[Record], str]:
    """Longest contexts of one node; two nodes are 16 Ulysses ranks."""
    cases = [
        ("llama3-8b", "8xH100-80GB", 1, PAPER_HOST_GIB), ("llama3-8b", "8xH100-80GB", 1, 2048.0),
        ("qwen3-32b-paper", "8xH100-80GB", 2, PAPER_HOST_GIB), ("llama3-8b", "8xH200", 1, PAPER_HOST_GIB),
    ]  # fmt: skip
    rows, kept = [["model", "machine", "longest", "device GiB", "host GiB", "ends first", "settings"]], []
    for model, gpus, nodes, host_gib in cases:
        machine = Machine.parse(gpus, nodes, host_gib)
        found = plan.max_tokens(model, machine, [f"upipe.sp_size={machine.world}"], fitting=True)
        if found is None:
            raise ConfigError(f"{model} on {machine}: not even {plan.GRAIN} tokens fit")
        name = f"longest-{model}-{nodes}x{gpus}-{host_gib:g}"
        kept.append(record_of(found, name, made_with))
        rows.append([
            model, str(machine), f"{found.tokens / 2**20:.2f}M", f"{found.device_gib:.1f}", f"{found.host_gib:.0f}", found.limit,
            settings_of(found),
        ])  # fmt: skip
        if configs is not None:
            configs.mkdir(parents=True, exist_ok=True)
            plan.save_config(found, configs / f"{name}.yaml")
    return kept, aligned(rows)


def block_points() -> list[dict[str, Any]]:
    """Measured attention blocks of this library beside the simulated peak and predicted attention time, as dicts."""
    found = []
    for r in records.load(RESULTS / "block.jsonl"):
        if r["method"] != "upipe" or r["outcome"] != "ok":
            continue
        modes = {"attention_output": r["attention_output"], "overlap": r["overlap"], "dx": {"slabs": "gemm"}.get(r["dx"], "bf16")}
        shape = {"heads": r["heads"], "kv_heads": r["kv_heads"], "head_dim": r["head_dim"], "hidden": r["hidden_size"]}
        peak, _ = block_peak(r["tokens"] // r["sp"], r["sp"], kernel=r["kernel"], heads_per_stage=r["heads_per_stage"], **shape, **modes)
        found.append({"point": r["point"], "record": r, "measured_gib": r["peak_above_inputs_gib"], "predicted_gib": peak / GIB})
    return found


def model_points() -> list[dict[str, Any]]:
    """Measured whole models beside predictions."""
    found = []
    for r in records.load(RESULTS / "llama3_8b_4layers-2gpu.jsonl"):
        if r["outcome"] != "ok":
            continue
        settings = r["settings"]
        run = from_mapping(RunConfig, {
            "model": settings["model"], "train": settings["train"], "upipe": settings["upipe"] | {"kernel": r["kernel"]},
            # DeepSpeed's defaults, which that run had.
            "memory": {"reduce_bucket_parameters": 500_000_000, "prefetch_parameters": 50_000_000},
            "data": {"path": str(points.ROOT / "configs" / "books" / "persuasion.txt"), "tokens": r["tokens"]},
        })  # fmt: skip
        machine = Machine.parse(f"{r['gpus']}xH200", host_gib=r["host_gib"])
        prediction = plan.predict(run, machine)
        found.append({"record": r, "prediction": prediction, "measured_gib": r["peak_gib"],
                      "predicted_gib": prediction.device_gib - prediction.device["margin"]})  # fmt: skip
    return found


def block_time(record: dict[str, Any]) -> float:
    """Predicted seconds of a checkpointed attention block: attention kernels, products, exchanges that nothing hides."""
    machine = Machine.parse(f"{record['gpus']}xH200")
    S, sp, D = record["tokens"], record["sp"], record["hidden_size"]
    H, K, d = record["heads"], record["kv_heads"], record["head_dim"]
    twice = record["attention_output"] == "device"
    flops = 2 * S * S * d * H / sp
    attention = flops * (1 + twice) / plan._tflops(record["kernel"], "forward", S, machine)
    attention += 2.5 * flops / plan._tflops(record["kernel"], "backward", S, machine)
    products = 2 * S / sp * D * d * ((2 * H + 2 * K) * (3 + twice) + H + 2 * K) / rates()["gemm"]
    sent = S / sp * d * 2 * (sp - 1) / sp * ((2 * H + 2 * K) * (1 + twice) + 4 * H + 4 * K) / machine.gpu.link_gb_s * 1e3
    return (attention + products + sent * (rates()["exposed_exchange"] if record["overlap"] else 1.0)) / 1e12


def against_measured() -> str:
    rows = [["point", "GiB measured", "predicted", "off", "s measured", "predicted", "off"]]
    for p in block_points():
        r, seconds = p["record"], block_time(p["record"])
        rows.append([f"block {p['point']}", *compared(p["measured_gib"], p["predicted_gib"]), *compared(r["time_s"], seconds)])
    for p in model_points():
        r, prediction = p["record"], p["prediction"]
        name = f"{r['model']}, {r['layers']} layers, {format_tokens(r['tokens'])}, untiled"
        rows.append([name, *compared(p["measured_gib"], p["predicted_gib"]), *compared(r["time_s"], prediction.time_s)])
        states = sum(prediction.device[k] for k in ("parameters", "gradients", "optimizer", "buckets"))
        rows.append([f"{name}: states and buckets", *compared(r["states_gib"], states), "", "", ""])
    return aligned(rows)


def compared(measured: float, predicted: float) -> list[str]:
    return [f"{measured:.3f}", f"{predicted:.3f}", f"{100 * (predicted / measured - 1):+.1f} %"]


def aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["published", "longest", "measured"], nargs="+", default=["published", "longest", "measured"])
    parser.add_argument("--results", metavar="DIR", help="append records to DIR/predict.jsonl")
    parser.add_argument("--configs", type=Path, metavar="DIR", help="write the YAMLs of the longest contexts")
    parser.add_argument("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    options = parser.parse_args(arguments)
    words = " ".join(sys.argv[1:] if arguments is None else arguments)
    try:
        made_with = environment(f"python -m experiments.predict {words}".strip(), options.commit)
        made_with["run_id"] = made_with["date"].replace("-", "").replace(":", "") + "-predict"
        kept: list[Record] = []
        if "published" in options.only:
            found, text = against_published(made_with)
            kept += found
            print(f"Llama3-8B, 8 x H100-80GB, host {PAPER_HOST_GIB:g} GiB; tokens/s/GPU (device GiB of 77)\n{text}\n")
        if "longest" in options.only:
            found, text = longest(made_with, options.configs)
            kept += found
            print(f"Longest context\n{text}\n")
        if "measured" in options.only:
            print(f"Beside what was measured, 2 x H200\n{against_measured()}")
        for record in kept if options.results else ():
            records.append(record, options.results)
    except (ConfigError, records.RecordError) as error:
        print(f"experiments.predict: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
