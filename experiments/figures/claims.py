"""docs/claims.md: published claims beside what records say. `python -m experiments.figures readme` makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import points
from experiments.figures import multinode, results, widths
from experiments.figures.memory import lever
from experiments.figures.style import KERNELS, METHODS, MODELS
from experiments.figures.values import Sources, grouped, markdown, model_of, number, our_method, pick
from upipe.records import format_tokens

CLAIMS = points.ROOT / "docs" / "claims.md"
HEAD = """# Claims, and what our records say

Made by `python -m experiments.figures readme` from `paper_figures/reported.csv` and `experiments/results`. "Its own numbers" are
*reported*. What is *measured* is from two H200s; "not measured" means that no record of ours speaks to it.
"""


def published(sources: Sources, **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in sources.published if all(row[name] == value for name, value in wanted.items())]


def value(sources: Sources, **wanted: Any) -> float:
    """The one published value that this names."""
    (row,) = published(sources, **wanted)
    return row["value"]


def longest(sources: Sources, model: str) -> dict[str, int]:
    """Longest length of each method in Table 3 that has a number."""
    rows = [row for row in published(sources, figure="table3", model=model) if row["value"] is not None]
    return {method: max(row["tokens"] for row in same) for method, same in grouped(rows, lambda r: r["method"]).items()}


def _table3_ratios(sources: Sources, model: str) -> str:
    cells = {(r["method"], r["tokens"]): r["value"] for r in published(sources, figure="table3", model=model)}
    both = sorted(t for (method, t), v in cells.items() if method == "ulysses" and v is not None and cells.get(("upipe", t)) is not None)
    ratios = ", ".join(f"{cells['upipe', tokens] / cells['ulysses', tokens]:.3f}" for tokens in both)
    return f"{MODELS[model]} {ratios} of Ulysses' ({format_tokens(both[0])} to {format_tokens(both[-1])})"


def five_million(sources: Sources) -> tuple[str, str]:
    speed = value(sources, figure="table3", model="llama3-8b", method="upipe", tokens=5 * 2**20)
    own = f"{speed:g} tokens/s/GPU at 5M; 6M is not in the table"
    said = []
    for stack, name in (("paper", "the paper's set-up"), ("ours", "this stack")):
        found = results.predictions(sources, stack)
        fits = [tokens for tokens, record in found.items() if record["outcome"] == "ok"]
        if 5 * 2**20 in found and fits:
            speed = found[5 * 2**20]["tokens_per_s_per_gpu"] if 5 * 2**20 in fits else None
            at = "does not fit 5M" if speed is None else f"fits 5M at {number(speed)} tokens/s/GPU"
            said.append(f"*predicted*: {name} {at}, and of the lengths tried up to {format_tokens(max(fits))}")
    return own, "; ".join([*said, "not measured (8 GPUs)"])


def quarter_longer(sources: Sources) -> tuple[str, str]:
    words, none = [], []
    for model in ("llama3-8b", "qwen3-32b"):
        found = longest(sources, model)
        best = max(tokens for method, tokens in found.items() if method != "upipe")
        names = "/".join(METHODS[our_method(m)][0] for m, tokens in found.items() if tokens == best and m != "upipe")
        gain = results.percent(found["upipe"], best)
        lengths = {name: format_tokens(found[name]) for name in ("upipe", "ulysses")}
        words.append(f"{MODELS[model]}: UPipe {lengths['upipe']}, {names} {format_tokens(best)} ({gain}), Ulysses {lengths['ulysses']}")
        none += [MODELS[model]] if found["upipe"] <= best else []
    return "; ".join(words), f"Not measured. Its own table shows no gain for {', '.join(none)}" if none else "Not measured"


def as_fast(sources: Sources) -> tuple[str, str]:
    own = "; ".join(_table3_ratios(sources, model) for model in ("llama3-8b", "qwen3-32b"))
    said = [
        f"{MODELS.get(speed.model, speed.model)}, {speed.layers} layers, {format_tokens(speed.tokens)}, {speed.setting}: {ratio.value:.3f}"
        for speed, ratio, _ in results.whole_models(sources) if ratio is not None
    ]
    blocks = [
        f"{format_tokens(record['tokens'])} {KERNELS.get(record['kernel'], record['kernel'])} {1 / record['over_ulysses']:.3f}"
        for record, _ in results.blocks(sources)
        if record["attention_output"] == "device" and record["overlap"] and model_of(record["model"]) == "llama3-8b"
    ]
    return own, f"*measured*, whole models: {'; '.join(said) or 'none'}. Block, output on device: {', '.join(blocks) or 'none'}"


def seven_eighths(sources: Sources) -> tuple[str, str]:
    ours, alst = (results.figure1(sources, method, "peak_attention") for method in ("upipe", "alst"))
    whole = [sum(r["value"] for r in published(sources, figure="figure1", method=method)) for method in ("upipe", "alst")]
    own = (
        "87.5 % = 1 − 8/64: U over Qwen3-32B's query heads, as if each had its own k and v (MHA width). With its 8 kv heads q, k "
        "and v of a stage are 24 of 80 heads wide, 70 % less. Figure 1 (Llama3-8B): attention "
        f"{alst:g} to {ours:g} GiB, {results.percent(ours, alst)}; the whole peak {whole[1]:.1f} to {whole[0]:.1f}, "
        f"{results.percent(*whole)}"
    )
    said = []
    for record, base in results.blocks(sources):
        if record["attention_output"] == "device" and record["overlap"]:
            off = results.percent(record["peak_units"], base["peak_units"])
            model, kernel = MODELS.get(model_of(record["model"]), record["model"]), KERNELS.get(record["kernel"], record["kernel"])
            said.append(f"{model} {format_tokens(record['tokens'])} {kernel} {off}")
    return own, f"*measured*, peak above a block's inputs against Ulysses', U = P = 2: {'; '.join(said) or 'none'}"


def _ladder(sources: Sources, preset: str) -> list[dict[str, Any]]:
    """Measured records of a ladder, of levers of which some length trained."""
    measured = [r for r in sources.records if r["provenance"] == "measured"]
    return [r for r in measured if r.get("preset") == preset and r.get("longest_tokens") and r["gpus"]]


def eightfold(sources: Sources) -> tuple[str, str]:
    bars = [results.figure1(sources, f"fsdp{more}", "peak_attention") for more in ("", "+ulysses", "+ulysses+checkpoint")]
    own = f"Figure 1, attention: {' → '.join(f'{bar:g}' for bar in bars)} GiB, {bars[0] / bars[1]:.2f}× and {bars[1] / bars[2]:.2f}×"
    ladder = _ladder(sources, "figure1")
    more = {True: "", False: " or more (the search was cut off)"}
    said = ", ".join(f"{lever(r)} {format_tokens(r['longest_tokens'])}{more[r['search_complete']]}" for r in ladder)
    how = "8 is the number of GPUs (Ulysses) and a matter of what a layer saves (checkpointing), not a constant. "
    return own, how + (f"*measured*, longest length in {ladder[0]['cap_gib']:g} GiB on two GPUs: {said}" if said else "Not measured")


def chunk_size(sources: Sources) -> tuple[str, str]:
    found = pick(widths.rows(sources), metric="step_time over widest")
    words = []
    groups = grouped(found, lambda r: (r.model, r.kernel or "", r.tokens, r.setting.split(", ", 1)[1]))
    for (model, kernel, tokens, setting), same in sorted(groups.items()):
        first = min(same, key=lambda row: row.width)
        widest = max(row.width for row in same)
        where = f"{MODELS.get(model, model)} {setting}, {format_tokens(tokens)}, {KERNELS.get(kernel, kernel)}"
        words.append(f"{where}: U = {first.width} takes {first.value:.3f} of U = {widest}")
    return "larger U is faster; the ablation's numbers (U of 4 to 32, 512K) were not published", f"*measured*: {'; '.join(words) or 'none'}"


def two_nodes(sources: Sources) -> tuple[str, str]:
    peak = value(sources, figure="figure5-multinode", method="upipe-8u2r", metric="peak", tokens=8 * 2**20)
    ratios = [row["value"] for row in published(sources, metric="throughput_ratio")]
    own = f"{peak:g} GiB at 8M, where USP is out of memory; throughput {min(ratios):.3f} to {max(ratios):.3f} of USP's (read off the plots)"
    ours = [r for r in multinode.two_nodes(sources) if r["method"] == "upipe"]
    said = "; ".join(f"*{r['provenance']}* {format_tokens(r['tokens'])}: {_ended(r)}" for r in ours)
    return own, said or "Not measured, not predicted"


def _ended(record: dict[str, Any]) -> str:
    return f"{record['peak_gib']:.1f} GiB" if record["outcome"] == "ok" and record["peak_gib"] is not None else record["outcome"]


def trl(sources: Sources) -> tuple[str, str]:
    times = {row["gpus"]: row["value"] for row in published(sources, figure="cp-scaling")}
    one = value(sources, source="trl-1m-guide", figure="example", metric="step_time")
    levers = {row["method"]: row["value"] for row in published(sources, figure="levers", metric="max_tokens")}
    plain, chunked, offload = (levers[name] for name in ("plain-loss", "chunked-loss", "chunked-loss+offload"))
    own = (
        f"Qwen3-8B at 1M on 8 H100s: {one:g} s a step; from 2 GPUs to 4 and 8: {times['2'] / times['4']:.2f}× and "
        f"{times['2'] / times['8']:.2f}×; longest on one GPU: loss in chunks {chunked / plain:g}×, offload another {offload / chunked:g}×"
    )
    ladder = _ladder(sources, "trl")
    said = ", ".join(f"{r['rung']} {format_tokens(r['longest_tokens'])}" for r in ladder)
    return own, f"*measured*, longest length by lever: {said}" if said else "Not measured"


def glm(sources: Sources) -> tuple[str, str]:
    def step(method: str) -> float:
        return value(sources, figure="ablation", method=method, metric="step_time")

    def peak(method: str) -> float:
        return value(sources, figure="ablation", method=method, metric="peak", tokens=2**18)

    bare = step("no-offload")
    own = (
        f"256K: sharing the indexer {step('indexer-replicated'):g} to {step('indexer-sharded'):g} s; offload {peak('no-offload'):g} to "
        f"{peak('offload'):g} GiB for {results.percent(step('offload-pinned'), bare)} time pinned, "
        f"{results.percent(step('offload-pageable'), bare)} pageable"
    )
    measured = [r for r in sources.records if r["provenance"] == "measured"]
    ours = [r for r in measured if str(r["model"]).lower().startswith("glm") and r["gpus"] and r["outcome"] == "ok"]
    if ours:
        return own, f"*measured*: {len(ours)} runs, in paper_figures/glm.md"
    return own, "Not measured; memory without each fix is *predicted* in paper_figures/glm.md"


ROWS = (
    ("Untied Ulysses: 5M tokens of Llama3-8B on one node of 8 H100s", five_million),
    ("Untied Ulysses: contexts 25 % longer than the best baseline's, at 8B and 32B", quarter_longer),
    ("Untied Ulysses: matches Ulysses' throughput", as_fast),
    ("Untied Ulysses: 87.5 % less memory for attention's intermediate tensors (32B)", seven_eighths),
    ("Untied Ulysses, Figure 1: about 8× from Ulysses, about 8× from checkpointing", eightfold),
    ("Untied Ulysses: smaller chunks (U) trade speed for memory", chunk_size),
    ("Untied Ulysses: 8M tokens on two nodes (8u2r)", two_nodes),
    ("TRL's guide: 1M tokens; near-linear context parallelism; chunked loss and offload", trl),
    ("SkyRL's GLM guide: sharded indexer, offload pinned against pageable", glm),
)


def render(sources: Sources) -> str:
    lines = [["claim", "its own numbers", "ours"]]
    for claim, says in ROWS:
        lines.append([claim, *says(sources)])
    return f"{HEAD}\n{markdown(lines)}"


def write(sources: Sources, path: Path = CLAIMS) -> None:
    path.write_text(render(sources), encoding="utf-8")
