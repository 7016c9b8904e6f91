"""docs/claims.md: published claims beside what records say. `python -m experiments.figures readme` makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import points
from experiments.figures import multinode, results, widths
from experiments.figures import trl as guide
from experiments.figures.memory import lever
from experiments.figures.style import KERNELS, METHODS, MODELS
from experiments.figures.throughput import PUBLISHED
from experiments.figures.values import Sources, grouped, markdown, model_of, number, our_method, pick
from upipe.records import format_tokens

CLAIMS = points.ROOT / "docs" / "claims.md"
HEAD = """# Claims, and what our records say

Made by `python -m experiments.figures readme` from `paper_figures/reported.csv` and `experiments/results`. "Its own numbers" are
*reported*. What is *measured* is from this library's records (most GPUs of a kind: {machines}); "not measured" means that none of
them speaks to it.
"""


def _model(name: str) -> str:
    """A model's name, of reported.csv's."""
    return MODELS.get(name, guide.NAMES.get(name, name))


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
    ours = [r for r in results.at_published_size(sources, "llama3-8b") if r["method"] == "upipe"]
    for where, same in grouped(ours, _where).items():
        for name, mine in grouped(same, results.named).items():
            said.append(f"*measured* on {where}, {name}: {_lengths_told(mine)}")
    gpus, layers, _ = PUBLISHED["llama3-8b"]
    return own, "; ".join(said if ours else [*said, f"not measured (no record of {layers} layers on {gpus} GPUs)"])


def _where(record: dict[str, Any]) -> str:
    return results.machine(record["gpus"], record["gpu"])


def _lengths_told(found: list[dict[str, Any]]) -> str:
    """The longest length that trained, with its throughput, and the shortest above it that did not, with how it ended."""
    trained = {r["tokens"]: r for r in found if r["outcome"] == "ok"}
    longest_ok = max(trained, default=0)
    failed = {r["tokens"]: r["outcome"] for r in found if r["tokens"] > longest_ok}
    words = []
    if trained:
        speed = trained[longest_ok]["tokens_per_s_per_gpu"]
        words.append(f"trains {format_tokens(longest_ok)}" + (f" at {number(speed)} tokens/s/GPU" if speed is not None else ""))
    if failed:
        words.append(f"{format_tokens(min(failed))} ended in {failed[min(failed)]}")
    return ", ".join(words)


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
    ours = [text for model in ("llama3-8b", "qwen3-32b") for text in _longest_measured(sources, model)]
    said = f"*measured*, longest length that trained: {'; '.join(ours)}" if ours else "Not measured (no record of the published sizes)"
    return "; ".join(words), said + (f". Its own table shows no gain for {', '.join(none)}" if none else "")


def _longest_measured(sources: Sources, model: str) -> list[str]:
    """Of each machine the longest length of every method that trained in the published size, and UPipe's gain over the best other."""
    found = []
    for where, same in grouped(results.at_published_size(sources, model), _where).items():
        trained = [r for r in same if r["outcome"] == "ok"]
        best = {method: max(r["tokens"] for r in mine) for method, mine in grouped(trained, lambda r: r["method"]).items()}
        others = [tokens for method, tokens in best.items() if method != "upipe"]
        gain = f" ({results.percent(best['upipe'], max(others))})" if "upipe" in best and others else ""
        lengths = ", ".join(f"{METHODS[method][0]} {format_tokens(tokens)}" for method, tokens in best.items())
        found += [f"{MODELS[model]} on {where}: {lengths}{gain}"] if best else []
    return found


def as_fast(sources: Sources) -> tuple[str, str]:
    own = "; ".join(_table3_ratios(sources, model) for model in ("llama3-8b", "qwen3-32b"))
    models, blocks = [], []
    ratios = [(speed, ratio) for speed, ratio, _ in results.whole_models(sources) if ratio is not None]
    for where, same in grouped(ratios, lambda pair: results.machine(pair[0].gpus, pair[0].gpu)).items():
        said = [f"{_model(s.model)}, {s.layers} layers, {format_tokens(s.tokens)}, {s.setting}: {ratio.value:.3f}" for s, ratio in same]
        models.append(f"{where}: {'; '.join(said)}")
    mine = [record for record, _ in _plain_blocks(sources) if model_of(record["model"]) == "llama3-8b"]
    for where, same in grouped(mine, _where).items():
        said = [f"{format_tokens(r['tokens'])} {KERNELS.get(r['kernel'], r['kernel'])} {1 / r['over_ulysses']:.3f}" for r in same]
        blocks.append(f"{where}: {', '.join(said)}")
    return own, f"*measured*, whole models, {'. '.join(models) or 'none'}. Block, output on device, {'. '.join(blocks) or 'none'}"


def _plain_blocks(sources: Sources) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Blocks beside Ulysses, attention output on the device, with overlap."""
    return [pair for pair in results.blocks(sources) if pair[0]["attention_output"] == "device" and pair[0]["overlap"]]


def seven_eighths(sources: Sources) -> tuple[str, str]:
    ours, alst = (results.figure1(sources, method, "peak_attention") for method in ("upipe", "alst"))
    whole = [sum(r["value"] for r in published(sources, figure="figure1", method=method)) for method in ("upipe", "alst")]
    own = (
        "87.5 % = 1 − 8/64: U over Qwen3-32B's query heads, as if each had its own k and v (MHA width). With its 8 kv heads q, k "
        "and v of a stage are 24 of 80 heads wide, 70 % less. Figure 1 (Llama3-8B): attention "
        f"{alst:g} to {ours:g} GiB, {results.percent(ours, alst)}; the whole peak {whole[1]:.1f} to {whole[0]:.1f}, "
        f"{results.percent(*whole)}"
    )
    groups = []
    how = grouped(_plain_blocks(sources), lambda pair: (_where(pair[0]), pair[0]["heads_per_stage"], pair[0]["sp"]))
    for (where, width, ranks), same in how.items():
        said = []
        for record, base in same:
            off = results.percent(record["peak_units"], base["peak_units"])
            kernel = KERNELS.get(record["kernel"], record["kernel"])
            said.append(f"{_model(model_of(record['model']))} {format_tokens(record['tokens'])} {kernel} {off}")
        groups.append(f"U = {width}, P = {ranks} on {where}: {'; '.join(said)}")
    return own, f"*measured*, peak above a block's inputs against Ulysses', {'. '.join(groups) or 'none'}"


def _ladder(sources: Sources, preset: str) -> list[dict[str, Any]]:
    """Measured records of a ladder, of levers of which some length trained."""
    measured = [r for r in sources.records if r["provenance"] == "measured"]
    return [r for r in measured if r.get("preset") == preset and r.get("longest_tokens") and r["gpus"]]


def _rungs(sources: Sources, preset: str) -> str:
    """The longest length of each lever of a ladder, and under which conditions it was searched for."""
    more = {True: "", False: " or more (the search was cut off)"}
    ladders = []
    for (where, conditions), same in grouped(_ladder(sources, preset), lambda r: (_where(r), _conditions(r))).items():
        levers = ", ".join(f"{lever(r)} {format_tokens(r['longest_tokens'])}{more[r['search_complete']]}" for r in same)
        ladders.append(f"*measured*, longest length on {where}, {conditions}: {levers}")
    return "; ".join(ladders)


def _conditions(record: dict[str, Any]) -> str:
    """Of a search: depth, cap, optimizer, and what stood in for attention."""
    optimizer = "no optimizer" if record["optimizer"] == "none" else record["optimizer"]
    kernel = "attention simulated: its memory alone" if record["memory_only"] else "attention computed"
    words = [f"{record['layers']} layers of {_model(model_of(record['model']))}"]
    words += ["states and saved inputs of its other layers counted"] if record.get("others_states_gib") else []
    return ", ".join([*words, f"{record['cap_gib']:g} GiB of a GPU for torch's allocator", optimizer, kernel])


def eightfold(sources: Sources) -> tuple[str, str]:
    bars = [results.figure1(sources, f"fsdp{more}", "peak_attention") for more in ("", "+ulysses", "+ulysses+checkpoint")]
    own = f"Figure 1, attention: {' → '.join(f'{bar:g}' for bar in bars)} GiB, {bars[0] / bars[1]:.2f}× and {bars[1] / bars[2]:.2f}×"
    said = _rungs(sources, "figure1")
    how = "8 is the number of GPUs (Ulysses) and a matter of what a layer saves (checkpointing), not a constant. "
    return own, how + (said or "Not measured")


def chunk_size(sources: Sources) -> tuple[str, str]:
    found = pick(widths.rows(sources), metric="step_time over widest")
    words = []
    groups = grouped(found, lambda r: (results.machine(r.gpus, r.gpu), r.model, r.kernel or "", r.tokens, r.setting.split(", ", 1)[1]))
    for (machine, model, kernel, tokens, setting), same in sorted(groups.items()):
        first = min(same, key=lambda row: row.width)
        widest = max(row.width for row in same)
        where = f"{_model(model)} {setting}, {format_tokens(tokens)}, {KERNELS.get(kernel, kernel)}, {machine}"
        words.append(f"{where}: U = {first.width} takes {first.value:.3f} of U = {widest}")
    return "larger U is faster; the ablation's numbers (U of 4 to 32, 512K) were not published", f"*measured*: {'; '.join(words) or 'none'}"


def two_nodes(sources: Sources) -> tuple[str, str]:
    peak = value(sources, figure="figure5-multinode", method="upipe-8u2r", metric="peak", tokens=8 * 2**20)
    ratios = [row["value"] for row in published(sources, metric="throughput_ratio")]
    own = f"{peak:g} GiB at 8M, where USP is out of memory; throughput {min(ratios):.3f} to {max(ratios):.3f} of USP's (read off the plots)"
    out = {row["tokens"] for row in published(sources, figure="figure5-multinode", method="usp-8u2r") if row["value"] is None}
    said = []
    for (mark, where, tokens), same in grouped(multinode.two_nodes(sources), lambda r: (r["provenance"], _where(r), r["tokens"])).items():
        # Set-ups of the curve, in the order of its legend.
        same = sorted(same, key=lambda r: list(METHODS).index(r["method"]))
        words = []
        for record in same:
            name = METHODS[record["method"]][0] if mark == "predicted" else results.named(record)
            fits = " (fits, where it was published out of memory)"
            unlike = record["method"] == "usp" and record["outcome"] == "ok" and tokens in out
            words.append(f"{name} {_ended(record)}{fits * unlike}")
        machine = "" if mark == "predicted" else f"{where}, "
        said.append(f"*{mark}* {machine}{format_tokens(tokens)}: {', '.join(words)}")
    return own, "; ".join(said) or "Not measured, not predicted"


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
    said = []
    for record in guide.predicted(sources):
        if record["figure"] == "trl-example":
            said.append(f"*predicted* on {_where(record)}, its ring: {number(record['time_s'])} s, {_ended(record)}")
    measured = [r for r in guide.measured(sources, "trl_qwen3_8b_1m") if r["gpus"]]
    groups = grouped(measured, lambda r: (_where(r), model_of(r["model"]), r["layers"], r["tokens"]))
    for (where, model, layers, tokens), same in groups.items():
        steps = ", ".join(f"{results.named(r)} {results.told_step(r)}" for r in same)
        said.append(f"*measured* on {where}, {_model(model)}, {layers} layers, {format_tokens(tokens)}: {steps}")
    curves = [same for same in guide.curves(guide.rows(sources)) if same[0].mark == "measured" and same[0].metric == guide.FASTER]
    for same in curves:
        first, more = same[0], same[1:]
        if more and first.gpu != guide.CPU:
            gains = ", ".join(f"{row.gpus}: {row.value:.2f}×" for row in more)
            what = f"{METHODS[first.method][0]}, {_model(first.model)}, {first.layers} layers, {format_tokens(first.tokens)}"
            said.append(f"*measured*, {what}, from {results.machine(first.gpus, first.gpu)} to {gains}")
    said += [text] if (text := _rungs(sources, "trl")) else []
    return own, "; ".join(said) or "Not measured"


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
    head = HEAD.format(machines=results.machines(sources.every))
    for claim, says in ROWS:
        lines.append([claim, *says(sources)])
    return f"{head}\n{markdown(lines)}"


def write(sources: Sources, path: Path = CLAIMS) -> None:
    path.write_text(render(sources), encoding="utf-8")
