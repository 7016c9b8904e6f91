"""Predictions of `upipe plan` beside published numbers, as records with provenance "predicted".

    python -m experiments.predict                        # the tables; nothing is written
    python -m experiments.predict --results experiments/results     # and records in predict.jsonl
    python -m experiments.predict --configs out          # the YAMLs of the longest contexts

Set-ups: every published set-up that the planner knows, see `experiments.published`. Published: Llama3-8B on 8 x H100-80GB with 1.9 TiB
of host memory, 128K to 10M tokens, for the paper's own set-up on this code (`memory.preset: paper`) and for this library's stack
(`upipe plan --fit`), beside Table 3 of arXiv 2602.21196; longest contexts. Beside what was measured: `experiments.accuracy`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from experiments import points
from experiments import published as setups
from experiments.runs import command_line, exit_status, made_by
from experiments.table import REPORTED, read_reported
from upipe import plan, records
from upipe.config import ConfigError
from upipe.plan import Machine, Prediction
from upipe.records import Record, parse_tokens

RESULTS = points.ROOT / "experiments" / "results"
LENGTHS = ("128K", "256K", "512K", "1M", "2M", "3M", "4M", "5M", "6M", "7M", "8M", "9M", "10M")
PAPER_HOST_GIB = setups.HOST_GIB
PAPER = ("memory.preset=paper",)
PARTS = ("published", "longest", "setups")


def record_of(prediction: Prediction, point: str, made_with: dict[str, Any], **extra: Any) -> Record:
    """A prediction as a record. peak_gib is without the margin, reserved_gib with it; states_gib parameters, gradients, optimizer."""
    run, machine = prediction.run, prediction.machine
    (ring, ulysses), ours = plan.degrees(run), run.method.name == "upipe"
    fits, left = prediction.fits, prediction.headroom
    states = sum(prediction.device.get(name, 0.0) for name in ("parameters", "gradients", "optimizer"))
    on_host = prediction.step_host_gib
    pageable = run.memory.offload == "pageable"
    return Record(
        experiment="predict", provenance="predicted", method=run.method.name, model=run.model.preset, layers=prediction.layers,
        tokens=prediction.tokens, sp=ulysses, ring=ring,
        dp=machine.world // run.upipe.sp_size, zero=run.train.zero_stage,
        heads_per_stage=ulysses if ours else None, kernel=prediction.kernel, attention_output=run.upipe.attention_output,
        attention_output_host_layers=prediction.attention_layers if run.upipe.attention_output == "host" else None,
        keep_layers_on_gpu=prediction.layers - prediction.pairs - prediction.sent_layers, store_every=run.memory.store_every,
        overlap=run.upipe.overlap if ours else None,
        offload="none" if not prediction.sent_layers else "pageable" if pageable else "pinned",
        dx={"gemm": "slabs", "bf16": "bfloat16"}[run.upipe.dx] if ours else None, tile_tokens=run.memory.mlp_tokens, dtype="bfloat16",
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
    words += ["working tensors on the host"] if memory.offload_within_layer else []
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
        found = plan.max_tokens(model, machine, [f"upipe.sp_size={machine.world}", "upipe.ring_degree=1"], fitting=True)
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


def aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--results", metavar="DIR", help="append records to DIR/predict.jsonl")
    parser.add_argument("--configs", type=Path, metavar="DIR", help="write the YAMLs of the longest contexts")
    parser.add_argument("--commit", metavar="SHA", help="names the code where there is no repository; SHA-dirty if changed")
    options = parser.parse_args(arguments)

    def body() -> int:
        made_with = made_by(command_line("experiments.predict", arguments).strip(), options.commit, "predict")
        kept: list[Record] = []
        if "published" in options.only:
            found, text = against_published(made_with)
            kept += found
            print(f"Llama3-8B, 8 x H100-80GB, host {PAPER_HOST_GIB:g} GiB; tokens/s/GPU (device GiB of 77)\n{text}\n")
        if "longest" in options.only:
            found, text = longest(made_with, options.configs)
            kept += found
            print(f"Longest context\n{text}\n")
        if "setups" in options.only:
            found = setups.cases()
            kept += [record_of(case.prediction, case.name, made_with, **setups.extra(case)) for case in found]
            print(f"Published set-ups, host {PAPER_HOST_GIB:g} GiB a node\n{aligned(setups.rows(found))}\n\n{setups.summary(found)}")
        for record in kept if options.results else ():
            records.append(record, options.results)
        return 0

    return exit_status("experiments.predict", body)


if __name__ == "__main__":
    sys.exit(main())
