"""Draw published numbers beside predictions, from the records of `python -m experiments.predict --only setups --results DIR`.

    python paper_figures/predicted.py [RECORDS.jsonl] [OUT.png]

Above: throughput of Table 3 of arXiv 2602.21196 by method, reported (filled) and predicted (hollow); a cross at the bottom is out of
memory, of the published run (left of its length) or of the prediction (right). Below: peak memory on 16 GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from upipe import records  # noqa: E402
from upipe.records import format_tokens  # noqa: E402

COLOURS = {"native": "C0", "ring": "C1", "ulysses": "C2", "fpdt": "C3", "upipe": "C4"}


def latest(path: Path) -> list[dict]:
    """The newest record of every published number that was predicted."""
    found = {(r["point"], r["metric"]): r for r in records.load(path) if "published" in r}
    if not found:
        raise SystemExit(f"{path} has no predictions of published set-ups: run python -m experiments.predict --only setups --results DIR")
    return list(found.values())


def method(record: dict) -> str:
    """The published row's name: on 16 GPUs ours of Ulysses is Ulysses x ring."""
    return record["point"].split("-")[-2]


def throughput(axis, found: list[dict], model: str, title: str) -> None:
    mine = [r for r in found if r["figure"] == "table3" and f"-{model}-" in r["point"]]
    floor = 0.6 * min(value for r in mine for value in (r["published"], r["predicted"]) if value is not None)
    for name, colour in COLOURS.items():
        rows = sorted((r for r in mine if method(r) == name), key=lambda r: r["tokens"])
        for key, style, shift in (("published", {"marker": "o"}, 0.97), ("predicted", {"marker": "o", "mfc": "none", "ls": ":"}, 1.03)):
            fits = [r for r in rows if r[key] is not None]
            label = name if key == "published" else None
            axis.plot([r["tokens"] for r in fits], [r[key] for r in fits], color=colour, label=label, **style)
            lost = [r["tokens"] * shift for r in rows if r[key] is None]
            axis.plot(lost, [floor * (1 + 0.08 * list(COLOURS).index(name))] * len(lost), "x" if key == "published" else "+", color=colour)
    lengths = sorted({r["tokens"] for r in mine})
    axis.set(xscale="log", yscale="log", title=title, ylabel="tokens/s/GPU")
    axis.set_xticks(lengths, [format_tokens(n) for n in lengths], fontsize=8)
    axis.minorticks_off()
    axis.legend(fontsize=8)


def peaks(axis, found: list[dict]) -> None:
    for name in ("ulysses", "upipe"):
        rows = sorted((r for r in found if r["figure"] == "figure5-multinode" and method(r) == name), key=lambda r: r["tokens"])
        known = [r for r in rows if r["metric"] == "peak"]
        axis.plot([r["tokens"] / 2**20 for r in known], [r["published"] for r in known], "o-", color=COLOURS[name], label=f"{name}, 8u2r")
        x, y = [r["tokens"] / 2**20 for r in rows], [r["peak_gib"] for r in rows]
        axis.plot(x, y, "o:", mfc="none", color=COLOURS[name], label=f"{name}, predicted")
    axis.axhline(77, color="black", linestyle="--", linewidth=1)
    axis.set(title="Llama3-8B, 16 x H100", xlabel="M tokens", ylabel="peak, GiB")
    axis.legend(fontsize=8)


def main(arguments: list[str]) -> int:
    path = Path(arguments[0]) if arguments else ROOT / "experiments" / "results" / "predict.jsonl"
    out = Path(arguments[1]) if len(arguments) > 1 else Path(__file__).with_suffix(".png")
    found = latest(path)
    figure, axes = pyplot.subplots(1, 3, figsize=(17, 5))
    throughput(axes[0], found, "llama3-8b", "Llama3-8B, 8 x H100: reported (filled), predicted (hollow)")
    throughput(axes[1], found, "qwen3-32b", "Qwen3-32B, 16 x H100")
    peaks(axes[2], found)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
