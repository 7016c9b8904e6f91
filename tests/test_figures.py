"""Figures, results and claims are what records and published numbers say, each value under its own mark."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Annotation
from PIL import Image

from experiments import figures, points
from experiments.figures import __main__ as command
from experiments.figures import breakdown, claims, multinode, notebooks, planner, results, throughput, trl, values
from experiments.table import supersedes
from upipe import parts, profiling, records

ROOT = Path(__file__).resolve().parent.parent
TABLE3 = {128: 2281.05, 5120: 98.25}


@pytest.fixture(scope="module")
def sources():
    return figures.load()


@pytest.fixture
def folder(tmp_path):
    """A copy of the records that a test may change."""
    for path in values.RESULTS.glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    return tmp_path


def changed(sources, experiment, **wanted):
    """A copy of the last record of an experiment with these values."""
    found = [r for r in sources.every if r["experiment"] == experiment and all(r.get(k) == v for k, v in wanted.items())]
    return json.loads(json.dumps(found[-1]))


def test_what_is_committed_is_what_the_command_makes(sources):
    hint = "run python -m experiments.figures all"
    readme = results.README.read_text(encoding="utf-8")
    assert results.replaced(readme, results.render(sources)) == readme, hint
    assert claims.render(sources) == claims.CLAIMS.read_text(encoding="utf-8"), hint
    for name, family in figures.FAMILIES.items():
        assert figures.to_csv(family.rows(sources)) == (figures.FOLDER / f"{name}.csv").read_text(encoding="utf-8"), hint
        for path in (figures.FOLDER / f"{name}.png", figures.FOLDER / f"{name}.pdf", notebooks.FOLDER / f"{name}.ipynb"):
            assert path.stat().st_size > 2000, path


def test_every_picture_is_a_figure_s_and_the_notebooks_show_the_same():
    """A picture that no command draws is none of the records'; a notebook that was not run again has another figure's size."""
    assert {path.stem for path in figures.FOLDER.glob("*.p[nd][gf]")} == set(figures.FAMILIES)
    for folder in (figures.FOLDER, notebooks.FOLDER):
        assert {path.stem for path in folder.glob("*.png")} == set(figures.FAMILIES)
    for name in figures.FAMILIES:
        sizes = [Image.open(folder / f"{name}.png").size for folder in (figures.FOLDER, notebooks.FOLDER)]
        assert sizes[0] == sizes[1], f"{name}: run python -m experiments.figures notebooks"


@pytest.mark.parametrize("name", list(figures.FAMILIES))
def test_a_notebook_says_and_shows_what_its_figure_does(sources, name):
    """Its title, caption and table are those of now."""
    hint = "run python -m experiments.figures notebooks"
    cells = json.loads((notebooks.FOLDER / f"{name}.ipynb").read_text())["cells"]
    text = "".join(cells[0]["source"])
    assert notebooks.captioned(name, text) == text, hint
    (table,) = [output["data"]["text/markdown"] for output in cells[-1]["outputs"]]
    assert "".join(table) == figures.to_markdown(figures.FAMILIES[name].rows(sources)), hint


def test_an_old_caption_is_not_that_of_the_figure():
    old = "# A title\n\nWhat it showed.\n\nMore of it.\n\nIts marks."
    family = figures.FAMILIES["trl"]
    assert notebooks.captioned("trl", old) == f"# {family.title}\n\n{family.about}\n\nMore of it.\n\nIts marks."
    first = notebooks.new("trl")["cells"][0]["source"]
    assert notebooks.captioned("trl", first) == first and first.count("\n\n") == 2


@pytest.mark.parametrize("name", ["breakdown", "multinode", "planner", "trl"])
def test_no_text_is_cut_off_at_the_edge(sources, name):
    """Titles, names of axes and legends, which are what a layout may push out of the picture; ticks out of view are not drawn."""
    drawn = figures.FAMILIES[name].draw(figures.FAMILIES[name].rows(sources))
    with figures.style.look():
        drawn.canvas.draw()
    texts = [text for axis in drawn.axes for text in (axis._left_title, axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts)]
    texts += [text for legend in (*drawn.legends, *filter(None, (axis.get_legend() for axis in drawn.axes))) for text in legend.get_texts()]
    edges = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    inside = drawn.bbox.padded(1)
    out = [text for text, box in edges if not (inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1))]
    figures.style.close(drawn)
    assert len(edges) > 5 and not out


def test_every_group_of_the_planner_s_figure_has_a_look_of_its_own(sources):
    """Marker, colour and fill, the same in all panels; measured and reported stand in panels of their own."""
    drawn = figures.FAMILIES["planner"].draw(planner.rows(sources))
    looks, marks = {}, []
    for axis in drawn.axes:
        lines = [line for line in axis.lines if not line.get_label().startswith("_")]
        for line in lines:
            looks.setdefault(line.get_label(), set()).add((line.get_marker(), line.get_color(), line.get_markerfacecolor()))
        marks.append({line.get_label().rsplit(", ", 1)[1] for line in lines})
    figures.style.close(drawn)
    assert all(len(mark) == 1 for mark in marks) and {"measured", "reported"} == set.union(*marks)
    assert len(set.union(*looks.values())) == sum(map(len, looks.values())) == len(looks) > 10


def test_panels_of_the_u_ablation_share_the_scale_of_time_and_say_what_a_peak_is_above(sources):
    rows = figures.FAMILIES["u-ablation"].rows(sources)
    drawn = figures.FAMILIES["u-ablation"].draw(rows)
    with figures.style.look():
        drawn.canvas.draw()
    top, bottom = drawn.axes[: len(drawn.axes) // 2], drawn.axes[len(drawn.axes) // 2 :]
    (low, high), *others = [axis.get_ylim() for axis in top]
    ratios = [row.value for row in values.pick(rows, metric="step_time over widest")]
    assert len(top) > 2 and set(others) == {(low, high)} and low < min(ratios) and max(ratios) < high
    for axis, under in zip(top, bottom):
        block = "attention block" in axis.get_title(loc="left")
        assert ("above the block's inputs" if block else "above the model's states") in under.get_ylabel()
    figures.style.close(drawn)


@pytest.mark.parametrize("name, metric", [("memory-ladder", "peak"), ("glm", "peak"), ("glm", "memory of the part named")])
def test_bars_of_the_three_marks_never_look_alike(sources, name, metric):
    """The same rows under each mark: every bar has its mark's hatch and edge, and no other's."""
    rows = values.pick(figures.FAMILIES[name].rows(sources), metric=lambda m: m.startswith(metric))
    for mark in values.MARKS:
        drawn = figures.FAMILIES[name].draw([dataclasses.replace(row, mark=mark) for row in rows])
        bars = [bar for axis in drawn.axes for container in axis.containers for bar in container]
        looks = {(bar.get_hatch() or "", bar.get_linestyle()) for bar in bars}
        wide = [bar for bar in bars if bar.get_width()]
        figures.style.close(drawn)
        assert looks == {(figures.style.HATCH[mark], "--" if mark == "predicted" else "-")} and len(wide) > 5, mark
        # A hatch has the colour of the edge.
        assert mark == "measured" or not any(bar.get_edgecolor() == bar.get_facecolor() for bar in wide)


def test_every_error_of_the_planner_is_a_point_inside_its_panel_and_none_hides_another(sources):
    found = planner.errors(planner.rows(sources))
    drawn = figures.FAMILIES["planner"].draw(planner.rows(sources))
    shown = []
    for axis in drawn.axes:
        (low, high), (left, right) = axis.get_ylim(), axis.get_xlim()
        here = [(x, y) for line in axis.lines if not line.get_label().startswith("_") for x, y in zip(*line.get_data())]
        assert all(left < x < right and low < y < high for x, y in here) and len({x for x, _ in here}) == len(here)
        shown += [round(y, 6) for _, y in here]
    figures.style.close(drawn)
    assert sorted(shown) == sorted(round(error, 6) for _, error in found)


def test_an_error_of_throughput_is_one_of_time_and_a_run_is_one_point(folder, sources):
    """Half the throughput is twice the time; a whole model's two metrics of one timing are not two points."""
    row = values.from_reported(r for r in sources.published if (r["figure"], r["metric"]) == ("table3", "throughput") and r["value"])[0]
    said = dataclasses.replace(row, mark="predicted", value=row.value / 2)
    assert [error for _, error in planner.errors([row, said])] == [pytest.approx(100.0)]
    (record,) = new_records(sources)["planner"][:1]
    told = record["predicted"] | {"tokens_per_s_per_gpu": record["tokens_per_s_per_gpu"] / 1.1}
    rows = planner.rows(added(folder, [record | {"predicted": told}]))
    mine = [(row.metric, round(error, 3)) for row, error in planner.errors(rows) if ", new, " in row.source]
    assert mine == [("step_time", 10.0), ("peak", 0.0)]
    del told["time_s"]
    rows = planner.rows(added(folder, [record | {"predicted": told, "point": "again"}]))
    mine = [(row.metric, round(error, 3)) for row, error in planner.errors(rows) if ", new, again" in row.source]
    assert mine == [("throughput", 10.0), ("peak", 0.0)]


def test_the_curve_over_two_nodes_is_of_two_nodes_and_one_model(sources):
    """Table 3's rings in one node, and Qwen3-32B on two, are other points."""
    found = multinode.two_nodes(sources)
    assert {(r["model"], r["gpus"], r["ring"]) for r in found} == {("llama3-8b", 16, 2)} and len(found) >= 10
    assert {row.gpus for row in multinode.rows(sources)} == {16}
    said = claims.two_nodes(sources)[1].split("; ")
    assert [text.split(":")[0] for text in said] == [f"*predicted* {length}" for length in ("512K", "2M", "4M", "6M", "8M")]


def profiled_at_512k(sources):
    """Records of whole models whose profile names no parts."""
    at = [r for r in sources.every if r["experiment"] == "stack" and r["tokens"] == 2**19 and breakdown._profile(r)]
    return [r for r in at if not r["trace"].get("parts_ms")]


def test_a_breakdown_keeps_profiles_and_compares_within_a_run(folder, sources):
    """A later step without a profile takes no profiled one's place, and each run's steps stand beside its own Ulysses."""
    (old,) = [r for r in profiled_at_512k(sources) if r["method"] == "ulysses"]
    later = old | {"profile": None, "trace": None, "run_id": "later", "date": "2999-01-01T00:00:00Z"}
    found = breakdown.rows(added(folder, [later]))
    runs = {(row.note, values.run_of(row)) for row in found if (row.method, row.tokens) == ("ulysses", 2**19) and "model" in row.setting}
    assert {("profiled step", f"stack.jsonl, {old['run_id']}"), ("timed step", "stack.jsonl, later")} <= runs
    at_1m = [row for row in found if row.tokens == 2**20]
    assert {values.run_of(row) for row in at_1m} == {values.run_of(row) for row in at_1m if row.method == "ulysses"}


def test_a_comparison_is_shown_whole_while_any_point_of_its_run_stands(sources):
    """Inputs not offloaded and pinned have been measured again since, pageable ones have not."""
    shown = {row.source for row in figures.FAMILIES["table3-2gpu"].rows(sources)}
    old = [r for r in sources.every if r["run_id"] == "20261130T104144Z-5bc591"]
    assert len(old) == 6 and len([r for r in old if any(r is kept for kept in sources.records)]) == 2
    assert {values.from_record(r, "throughput").source for r in old} <= shown


def test_a_profiled_step_stands_beside_the_same_step_without_the_profiler(sources):
    """Ring's at 128K is slowed by more than half; steps without a profile are in the table alone."""
    rows = breakdown.rows(sources)
    rings = [r for r in sources.every if r["method"] == "ring" and r["tokens"] == 2**17 and breakdown._profile(r)]
    ring = max(rings, key=lambda r: breakdown._profile(r)["window_ms"])
    mine = [row for row in rows if row.source == values.from_record(ring, "step_time").source]
    split = [row.value for row in mine if row.metric != "step_time"]
    assert [row.value for row in mine if row.metric == "step_time"] == [ring["time_s"]] and {row.unit for row in rows} == {"s"}
    assert sum(split) == pytest.approx(breakdown._profile(ring)["window_ms"] / 1e3) and sum(split) > 1.5 * ring["time_s"]
    drawn = breakdown.draw(rows)
    lines = [line for axis in drawn.axes for line in axis.lines if line.get_label() == breakdown.UNPROFILED]
    times = [line.get_xdata()[0] for line in lines]
    titles = [axis.get_title(loc="left") for axis in drawn.axes]
    figures.style.close(drawn)
    assert sorted(times) == sorted(row.value for row in rows if row.metric == "step_time") and len(times) > 10
    assert breakdown.TIMED in {row.note for row in rows} and not any(breakdown.TIMED in title for title in titles)
    # A step that was timed under the profiler has no time without it.
    under = [r for r in profiled_at_512k(sources) if r["first_s"] == r["time_s"]]
    with_time = {row.source for row in values.pick(rows, metric="step_time")}
    assert len(under) > 3 and not {values.from_record(r, "step_time").source for r in under} & with_time


def test_a_record_without_a_time_is_drawn_by_its_memory(sources, folder):
    """A run was cut off after the step for memory: of a new point the memory is shown, and a whole record keeps its place."""
    whole = changed(sources, "stack", outcome="ok", method="ulysses")
    again = whole | {"date": "2999-01-01T00:00:00Z", "run_id": "cut", "cut_off": "SIGTERM"}
    again |= dict.fromkeys(("time_s", "times_s", "warmup_steps", "tokens_per_s_per_gpu"))
    for name in ("least_s", "most_s", "wall_s", "parts_s"):
        again.pop(name)
    for record in (again, again | {"point": "another", "tokens": 2 * again["tokens"], "peak_units": again["peak_units"] / 2}):
        records.append(record, folder)
    given = figures.load(folder)
    mine = [r for r in given.records if r.get("cut_off") and r["experiment"] == "stack"]
    assert [r["point"] for r in mine] == ["another"] and whole in given.records
    shown = [row for family in figures.FAMILIES.values() for row in family.rows(given) if ", cut, " in row.source]
    assert {row.metric for row in shown} >= {"peak_above_states"} and all(row.value is not None for row in shown if "peak" in row.metric)
    assert not [row for row in shown if row.metric.startswith(("throughput", "step_time")) and row.value is not None]
    results.render(given), claims.render(given)
    figures.FAMILIES["table3-2gpu"].draw(figures.FAMILIES["table3-2gpu"].rows(given))


def test_every_value_has_the_mark_of_its_source(sources):
    """Looked up again in the files: the provenance of the record that a row names, or a published row of the same value."""
    provenance = {(f"{r['experiment']}.jsonl", r["run_id"], str(r.get("point", ""))): r["provenance"] for r in sources.every}
    published = {(f"{r['source']}, {r['figure']}", r["method"], r["tokens"], r["value"]) for r in sources.published}
    seen = set()
    for name, family in figures.FAMILIES.items():
        for row in family.rows(sources):
            seen.add(row.mark)
            if row.mark != "reported":
                assert provenance[tuple(row.source.split(", ", 2))] == row.mark, (name, row)
            elif not row.metric.endswith(" over Ulysses") and row.unit != "ratio":
                theirs = {(source, value) for source, _, tokens, value in published if tokens == row.tokens}
                assert (row.source, row.value) in theirs, (name, row)
    assert seen == set(values.MARKS)


def test_ratios_stay_within_one_mark_and_one_kernel(sources):
    record = changed(sources, "stack", method="alst")
    base = values.from_record(record, "throughput")
    others = [
        values.from_record(record | {"method": "upipe", "tokens_per_s_per_gpu": 2 * base.value, **change}, "throughput")
        for change in ({}, {"kernel": "fa4"}, {"provenance": "predicted"}, {"gpus": 4}, {"layers": 2})
    ]
    found = values.pick(values.over_ulysses([base, *others]), method="upipe")
    assert [(row.mark, row.kernel, row.value) for row in found] == [("measured", base.kernel, 2.0)]


def test_ratios_are_of_one_run(folder, sources):
    """A later run without a baseline takes no ratio away, and a later baseline changes none that an earlier run has."""
    (old,) = [r for r in sources.records if r["experiment"] == "stack" and r["method"] == "fpdt" and r["tokens"] == 2**19]
    alone, slow = old | {"run_id": "alone"}, changed(sources, "stack", method="ulysses", tokens=2**19) | {"run_id": "slow"}
    for record, seconds in ((alone, 128), (slow, 256)):
        record |= {"times_s": [seconds], "time_s": seconds, "tokens_per_s_per_gpu": record["tokens"] / seconds / 2}
    found = [throughput.rows_2gpu(s) for s in (sources, added(folder, [alone, slow]))]
    before, after = (values.pick(rows, method="fpdt", tokens=2**19, metric="throughput over Ulysses") for rows in found)
    assert before == after != []
    assert {row.value for row in values.pick(found[1], method="fpdt", tokens=2**19, metric="throughput")} > {2048.0}
    ratios = values.over_ulysses([values.from_record(r, "throughput") for r in (alone, slow)])
    assert values.pick(ratios, method="ulysses") and not values.pick(ratios, method="fpdt")


def test_a_deleted_picture_comes_back_the_same(tmp_path):
    assert command.main(["multinode", "--out", str(tmp_path)]) == 0
    first = (tmp_path / "multinode.png").read_bytes()
    assert first.startswith(b"\x89PNG") and (tmp_path / "multinode.pdf").read_bytes().startswith(b"%PDF")
    (tmp_path / "multinode.png").unlink()
    assert command.main(["multinode", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "multinode.png").read_bytes() == first


@pytest.mark.parametrize("name", ["table3", "planner"])
def test_a_picture_has_the_colour_of_every_method_in_it(sources, name):
    """Also of thin lines, whose pixels are few; the exact colour, not one like it."""
    drawn = figures.FAMILIES[name].draw(figures.FAMILIES[name].rows(sources))
    wanted = {to_hex(line.get_color()) for axis in drawn.axes for line in axis.lines if not line.get_label().startswith("_")}
    picture = figures.style.picture(drawn)
    figures.style.close(drawn)
    colours = {f"#{bytes(colour).hex()}" for _, colour in Image.open(io.BytesIO(picture)).convert("RGB").getcolors(256)}
    assert len(wanted) >= 6 and wanted <= colours and len(picture) < 300_000


def test_a_palette_keeps_the_colour_of_a_method_among_many_shades():
    """A single pixel of it, in a picture of more colours than a palette has."""
    image = Image.new("RGB", (64, 64))
    image.putdata([(n % 64 * 4, n // 64 * 4, 90) for n in range(64 * 64)])
    green = tuple(bytes.fromhex(figures.style.METHODS["ring"][1][1:]))
    image.putpixel((5, 7), green)
    smaller = figures.style._with_palette(image).convert("RGB")
    assert smaller.getpixel((5, 7)) == green and len(smaller.getcolors()) == 256


def test_a_logarithmic_axis_of_values_has_labels_at_1_2_5(sources):
    drawn = figures.FAMILIES["table3"].draw(figures.FAMILIES["table3"].rows(sources))
    with figures.style.look():
        drawn.canvas.draw()
    axis = drawn.axes[0]
    low, high = axis.get_ylim()
    labels = [text.get_text() for text, place in zip(axis.get_yticklabels(), axis.get_yticks()) if low <= place <= high]
    minor = [place for place in axis.get_yticks(minor=True) if low <= place <= high]
    figures.style.close(drawn)
    assert {"50", "100", "200", "500", "1000"} <= set(labels) and {label[0] for label in labels} == set("125") and len(minor) > len(labels)


def picture(name, sources):
    drawn = figures.FAMILIES[name].draw(figures.FAMILIES[name].rows(sources))
    made = figures.style.picture(drawn)
    figures.style.close(drawn)
    return made


def test_an_edited_record_changes_table_picture_results_and_claims(folder, sources):
    path = folder / "stack.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    mine = next(r for r in lines if r["method"] == "upipe" and r["tokens_per_s_per_gpu"])
    mine["times_s"] = [t / 2 for t in mine["times_s"]]
    mine["time_s"], mine["tokens_per_s_per_gpu"] = mine["time_s"] / 2, mine["tokens_per_s_per_gpu"] * 2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = figures.load(folder)
    rows = {name: family.rows for name, family in figures.FAMILIES.items()}
    speed = values.number(mine["tokens_per_s_per_gpu"])
    assert speed in figures.to_markdown(rows["table3-2gpu"](after)) and speed not in figures.to_markdown(rows["table3-2gpu"](sources))
    assert results.render(after) != results.render(sources) and speed in results.render(after)
    assert claims.render(after) != claims.render(sources)
    assert rows["glm"](after) == rows["glm"](sources)
    assert picture("table3-2gpu", after) != picture("table3-2gpu", sources) == picture("table3-2gpu", sources)
    assert picture("multinode", after) == picture("multinode", sources)


def trained(experiment, method, tokens, gpus, seconds, model="llama3-8b", layers=32, gpu="NVIDIA H100 80GB HBM3", outcome="ok", **more):
    """A record that the runner might write of a whole model, in which nothing but these values is new."""
    (old,) = records.load(values.RESULTS / "llama3_8b_4layers-2gpu.jsonl")
    ring = more.get("ring", gpus if method == "ring" else 1)
    peak = more.pop("peak", 40.0)
    made = old | {
        "experiment": experiment, "method": method, "tokens": tokens, "gpus": gpus, "processes": gpus, "gpu": gpu, "model": model,
        "layers": layers, "outcome": outcome, "run_id": "new", "sp": gpus // ring, "ring": ring, "time_s": seconds, "times_s": [seconds],
        "tokens_per_s_per_gpu": tokens / seconds / gpus, "peak_gib": peak, "states_gib": 15.0, "peak_above_states_gib": peak - 15,
        "reserved_gib": peak + 1, "peak_units": None, "heads_per_stage": gpus // ring if method == "upipe" else None, "overlap": True,
        "offload": "pinned", "tile_tokens": 8192, "predicted": None,
    }  # fmt: skip
    if outcome != "ok":
        made |= dict.fromkeys(("time_s", "times_s", "warmup_steps", "tokens_per_s_per_gpu", "loss", "grad_norm", "peak_gib", "states_gib"))
        made |= dict.fromkeys(("peak_above_states_gib", "reserved_gib")) | {"reason": "no memory"}
    made |= more
    return made | {"point": "-".join(str(made[k]) for k in ("method", "tokens", "gpus", "layers", "attention_output"))}


def new_records(sources):
    """Records of runs that nobody made, of the kinds that figures wait for: family -> records."""
    model = changed(sources, "stack", method="alst", model="llama3_8b") | {"kernel": "fa4", "run_id": "new"}
    oom = dict.fromkeys(("time_s", "times_s", "warmup_steps", "tokens_per_s_per_gpu", "loss", "grad_norm", "peak_gib", "states_gib"))
    oom |= dict.fromkeys(("peak_above_states_gib", "peak_units", "reserved_gib"))
    fast = changed(sources, "predict", point="paper-1M") | {"run_id": "new", "stack": None, "figure": "figure5-multinode"}
    full = model | {"layers": 32, "gpus": 8, "sp": 8, "tokens": 2**20, "method": "upipe"} | oom
    told = {"time_s": model["time_s"] * 1.1, "peak_gib": model["peak_gib"]}
    ladder = model | oom | {"longest_tokens": 2**18, "rung": "+ UPipe", "preset": "figure1", "cap_gib": 28.0, "memory_only": True}
    return {
        "table3-2gpu": [model | oom | {"point": "a", "layers": 4, "method": "fpdt", "outcome": "oom_device", "reason": "no memory"}],
        "table3": [
            full | {"point": "b", "time_s": 200.0, "times_s": [200.0], "warmup_steps": 1, "tokens_per_s_per_gpu": 2**20 / 200 / 8},
            full | {"point": "c", "tokens": 2**23, "outcome": "oom_device", "reason": "no memory"},
        ],
        "multinode": [
            fast | {"point": f"m{n}", "gpus": 16, "ring": 2, "method": method, "tokens_per_s_per_gpu": 2**20 / fast["time_s"] / 16}
            for n, method in enumerate(("upipe", "usp"))
        ],
        "memory-ladder": [ladder | {"point": "d", "search_complete": True}],
        "glm": [model | {"point": "e", "model": "glm-mini", "setting": "indexer-sharded"}],
        "trl": [trained("trl_qwen3_8b_1m", "ring", 2**20, 8, 305.0, model="qwen3-8b", layers=36)],
        # Of a prediction for another GPU than the record's nothing is made.
        "planner": [model | {"point": gpus, "predicted": told | {"machine": gpus}} for gpus in ("2xH200-141GB", "2xH100-80GB")],
    }


def test_a_search_that_was_cut_off_is_not_drawn_as_a_limit(folder, sources):
    ladder = new_records(sources)["memory-ladder"][0] | {"search_complete": False, "run_id": "cut", "moments_before": True}
    some, none = ladder | {"point": "some", "rung": "some"}, ladder | {"point": "none", "rung": "none", "longest_tokens": 0}
    found = figures.FAMILIES["memory-ladder"].rows(added(folder, [some, none]))
    mine = [row for row in found if ", cut, " in row.source]
    assert [row.setting for row in mine] == ["some"]
    figure = figures.FAMILIES["memory-ladder"].draw(mine)
    texts = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert "256K or more: the search was cut off" in texts and "OOM" not in texts
    assert "some 256K or more (the search was cut off)" in claims.eightfold(added(folder, []))[1]


def test_a_search_that_was_cut_off_leaves_a_finished_one_its_place():
    done = {"search_complete": True, "optimizer": "adamw", "moments_before": True, "time_s": None, "longest_tokens": 2**18}
    cut = done | {"search_complete": False, "cut_off": "--time-limit"}
    assert supersedes(done, cut) and supersedes(cut, cut) and not supersedes(cut, done)
    assert not supersedes(cut | {"longest_tokens": 0}, cut) and supersedes(cut, cut | {"longest_tokens": 0})
    # What a first step fits is another search with Adam, and none without an optimizer.
    assert supersedes(cut, done | {"moments_before": None})
    assert not supersedes(cut | {"optimizer": "none"}, done | {"optimizer": "none", "moments_before": None})


def added(folder, found):
    for record in found:
        problems = records.validate(record)
        assert not problems, problems
        with open(folder / f"{record['experiment']}.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
    return figures.load(folder)


def test_new_records_need_no_new_code(folder, sources):
    wanted = new_records(sources)
    after = added(folder, [record for found in wanted.values() for record in found])
    for name in wanted:
        family = figures.FAMILIES[name]
        new = [row for row in family.rows(after) if ", new, " in row.source]
        assert new, name
    rows = {name: figures.FAMILIES[name].rows(after) for name in wanted}
    fpdt = values.pick(rows["table3-2gpu"], method="fpdt")
    assert [r.outcome for r in fpdt if ", new, " in r.source] == ["oom", "oom"]
    assert {r.outcome for r in values.pick(rows["table3"], mark="measured")} == {"ok", "oom"}
    found = values.pick(rows["multinode"], mark="predicted", metric="throughput over Ulysses")
    assert [(r.value, r.setting) for r in found if ", new, " in r.source] == [(1.0, "8u2r, paper's set-up")] * 2
    assert [round(off, 3) for row, off in planner.errors(rows["planner"]) if ", new, " in row.source] == [10.0, 0.0]


def test_a_point_s_prediction_is_the_last_before_it_or_the_first_after(sources):
    """And of whole models peaks are those above the states, whatever other engines the process held."""
    mine = [r for r in sources.records if r["experiment"] == "stack" and r["tokens"] == 2**20]
    (true,) = [r for r in mine if r["setting"] == "ulysses:offload=pinned"]
    said = next(r for r in sources.every if r["provenance"] == "predicted" and r.get("point") == true["point"])
    day = true["date"][:8]

    def peaks(*days):
        every = [said | {"date": f"{day}{n}T00:00:00Z", "peak_above_states_gib": float(n)} for n in days]
        found = planner.rows(dataclasses.replace(sources, records=[true], every=every, published=[]))
        assert not values.pick(found, metric="peak")
        return [row.value for row in values.pick(found, mark="predicted", metric="peak_above_states")]

    assert true["date"][8:10] == "30"
    assert peaks(28, 29, 31) == [29.0] and peaks(31, 32) == [31.0] and peaks() == []


def test_out_of_memory_is_written_and_nothing_measured_is_said(sources):
    family = figures.FAMILIES["table3"]
    rows = family.rows(sources)
    drawn = family.draw(rows)
    said = [text.get_text() for text in drawn.axes[1].texts]
    figures.style.close(drawn)
    ended = {row.series for row in values.pick(rows, model="qwen3-32b", outcome="oom")}
    assert said.count("OOM") == len(ended) >= 4
    assert figures.style.NOTHING in said
    assert all(row.value is None for row in values.pick(rows, outcome="oom") if (row.mark, row.metric) != ("predicted", "peak"))
    mine = values.pick(rows, model="llama3-8b", method="upipe", mark="reported", metric="throughput")
    table = {row.tokens // 1024: row.value for row in mine}
    assert {length: table[length] for length in TABLE3} == TABLE3


def test_a_profile_that_cannot_be_split_is_not_drawn(sources):
    """Its record has a window without kernels: as of a step that was cut off."""
    whole = next(r for r in sources.every if isinstance(r.get("profile"), dict) and "top" in r["profile"])
    bare = whole | {"profile": {name: value for name, value in whole["profile"].items() if name not in ("top", "parts_ms")}}
    given = dataclasses.replace(sources, records=[bare], every=[bare])
    assert whole["profile"]["window_ms"] and {row.note for row in breakdown.rows(given)} <= {breakdown.TIMED}


def test_a_breakdown_adds_up_to_the_profiled_window(sources):
    profiles = [r["profile"] for r in sources.every if isinstance(r.get("profile"), dict)]
    assert len(profiles) > 5
    for profile in profiles:
        split = breakdown.parts(profile)
        assert min(split.values()) >= 0 and split["attention"] > 0.5 * profile["window_ms"]
        assert sum(split.values()) == pytest.approx(profile["window_ms"], rel=1e-6)


def planned(name, sources, **changes):
    """Records of every point of an experiment's file, as if each had run on GPUs: peaks, no times."""
    path, variant = points.find(name)
    experiment = points.read(path, variant)
    kind = points.kind_of(experiment.kind)
    made_with = {key: changed(sources, "stack")[key] for key in ("date", "commit", "dirty", "versions", "command", "host_gib")}
    made_with |= {"experiment": name, "run_id": "planned", "gpu": "NVIDIA H200", "warmup_steps": None}
    found = []
    for number, spec in enumerate(points.expand(experiment, path.parent), 1):
        record = kind.record(spec.point).to_dict() | made_with | {"point": spec.key, "gpus": spec.point.processes}
        peak = {"peak_gib": 10.0 + number, "states_gib": 10.0, "peak_above_states_gib": float(number)}
        found.append(record | peak | changes)
    return found


def test_no_two_points_of_a_group_have_one_label(sources):
    """Or a figure would stack them in one bar: inputs not offloaded, attention in blocks, ZeRO stages, tiles. Of every experiment's file
    and of the stack's records."""
    every = [r for r in records.load(Path(command.__file__).parents[1] / "results" / "stack.jsonl")]
    for name in points.names():
        every += planned(name, sources)
    found = {}
    for record in every:
        row = values.from_record(record, "peak")
        group = (record["experiment"], row.model, row.layers, row.gpus, row.tokens, row.series)
        found.setdefault(group, set()).add(record["point"])
    assert len(found) > 300 and not [(group, names) for group, names in found.items() if len(names) > 1]
    told = {values.setting_of(record) for record in every}
    assert {"output on host, inputs on device", "output on host", "output on device, U=4, attention in blocks"} <= told
    assert {"ZeRO-0, no checkpointing, untiled", "whole MLP and norms", "1u2r, output on device"} <= told


@pytest.mark.parametrize("name, lengths", [("figure1", 1), ("figure1-2gpu", 4)])
def test_every_point_of_figure_1_has_a_bar_of_its_own(folder, sources, name, lengths):
    """Also one out of memory, which is the word OOM and no zero."""
    oom = dict.fromkeys(("peak_gib", "states_gib", "peak_above_states_gib")) | {"outcome": "oom_device", "reason": "no memory"}
    made = planned(name, sources)
    count = len(made) // lengths
    for number in (0, 1):
        made[number * lengths] |= oom
    after = added(folder, made)
    rows = [row for row in figures.FAMILIES["memory-ladder"].rows(after) if ", planned, " in row.source]
    assert {row.source for row in rows} == {f"{name}.jsonl, planned, {record['point']}" for record in made} and count == 10
    drawn = figures.FAMILIES["memory-ladder"].draw(rows)
    (axis,) = [axis for axis in drawn.axes if len(axis.get_yticklabels()) == count]
    texts = [text.get_text() for text in axis.texts]
    wanted = {values.number(record["peak_gib"]) for record in made if record["peak_gib"]}
    assert wanted <= set(texts) and texts.count("OOM") == 2 and not any(text.startswith("0") for text in texts)
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert len(set(labels)) == count and not any("one GPU" in label for label in labels)
    places = [text.xy for text in axis.texts if isinstance(text, Annotation) and text.xycoords == "data"]
    assert len(set(places)) == len(places) == len(made) and sorted({place for _, place in places}) == list(range(count))
    figures.style.close(drawn)


def test_an_unknown_figure_is_refused_by_name(capsys):
    assert command.main(["tabel3"]) == 2
    assert "no figure 'tabel3'" in capsys.readouterr().err


def test_a_folder_that_is_not_there_draws_no_figure_of_published_numbers_alone(tmp_path, capsys):
    assert command.main(["multinode", "--results", str(tmp_path / "resluts"), "--out", str(tmp_path / "out")]) == 2
    assert "no folder of records" in capsys.readouterr().err and not (tmp_path / "out").exists()


def run_notebook(name, folder):
    written = notebooks.execute(notebooks.FOLDER / f"{name}.ipynb", folder)
    assert written == [folder / f"{name}.html", folder / f"{name}.png"]
    page = (folder / f"{name}.html").read_text()
    assert f'src="{name}.png"' in page and "<table" in page and len(page) < 100_000
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((folder / f"{name}.ipynb").read_text())
    assert [cell["execution_count"] for cell in saved["cells"] if cell["cell_type"] == "code"] == [1, 2]


def test_a_notebook_runs(tmp_path):
    pytest.importorskip("nbclient")
    run_notebook("multinode", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in figures.FAMILIES if name != "multinode"])
def test_the_other_notebooks_run(name, tmp_path):
    run_notebook(name, tmp_path)


@pytest.mark.slow
def test_every_figure_is_drawn_with_and_without_records(folder, sources, tmp_path_factory):
    after = added(folder, [record for found in new_records(sources).values() for record in found])
    empty = figures.load(tmp_path_factory.mktemp("none"))
    for name in figures.FAMILIES:
        for case in (after, empty):
            assert figures.make(name, case, tmp_path_factory.mktemp("out")) is not None
    assert {row.mark for family in figures.FAMILIES.values() for row in family.rows(empty)} == {"reported"}


def test_a_record_with_named_parts_is_drawn_by_them_beside_the_older_ones(folder, sources):
    """In panels of its own, with every part that the profile names told apart by its look."""
    old = profiled_at_512k(sources)
    times = {part: 3.0 + i for i, part in enumerate((*parts.PARTS, profiling.IDLE))}
    trace = {"parts_ms": times, "communication_ms": dict.fromkeys(profiling.COMMUNICATION, 9.0), "window_ms": sum(times.values())}
    new = [json.loads(json.dumps(r)) | {"run_id": "20991231T000000Z-abc123", "date": "2999-01-01T00:00:00Z"} for r in old]
    for record in new:
        record["trace"] |= trace
    before, after = breakdown.rows(sources), breakdown.rows(added(folder, new))
    mine = [row for row in after if row.note == "step by part" and values.run_of(row).endswith("abc123")]
    assert [row for row in after if row.note != "step by part"] == [row for row in before if row.note != "step by part"]
    by_part = [row for row in mine if row.metric != "step_time"]
    assert len(by_part) == len(old) * len(times) and {row.tokens for row in by_part} == {2**19}
    assert sum(row.value for row in by_part) == pytest.approx(len(old) * trace["window_ms"] / 1e3)
    assert all(row.metric in breakdown.LOOKS for row in by_part)
    looks = [breakdown.LOOKS[row] for row in dict.fromkeys(row.metric for row in by_part)]
    assert len({look[1:] for look in looks}) == len({look[0] for look in looks}) == len(times)
    drawn = breakdown.draw(mine)
    with figures.style.look():
        drawn.canvas.draw()
    titles = [axis._left_title for axis in drawn.axes]
    assert len(titles) == 1 and "step by part" in titles[0].get_text() and titles[0].get_window_extent().x1 < drawn.bbox.x1
    figures.style.close(drawn)


def test_records_of_the_trl_experiments_reach_table_figure_and_claim(folder, sources):
    of = {"model": "qwen3-8b", "layers": 36}
    new = [trained("trl_qwen3_8b_1m", method, 2**20, 8, s, peak=50.5, **of) for method, s in (("ring", 305.0), ("upipe", 290.0))]
    new += [trained("trl_scaling", "upipe", 2**17, gpus, seconds, **of) for gpus, seconds in ((2, 30.0), (4, 15.0), (8, 8.0))]
    new += [trained("trl_qwen3_8b_1m-2gpu", "upipe", 2**20, 2, 99.0, model="qwen3-8b", layers=2, gpu="NVIDIA H200")]
    on_cpu = dict.fromkeys(("gpu", "tokens_per_s_per_gpu", "peak_gib", "states_gib", "peak_above_states_gib", "reserved_gib"))
    new += [trained("trl_scaling-cpu", "upipe", 512, 2, 0.5, model="llama-toy", layers=2) | on_cpu | {"gpus": 0}]
    before, after = trl.rows(sources), trl.rows(added(folder, new))
    assert not values.pick(before, mark="measured") and {row.mark for row in before} == {"reported", "predicted"}
    ours = values.pick(after, mark="measured")
    assert {row.source.split(".jsonl")[0] for row in ours} == {r["experiment"] for r in new}
    assert [row.value for row in values.pick(ours, metric="peak", gpus=8)] == [50.5, 50.5]
    assert [(row.gpus, row.value) for row in values.pick(ours, metric=trl.FASTER, model="qwen3-8b")] == [(2, 1.0), (4, 2.0), (8, 3.75)]
    assert values.pick(ours, gpu=trl.CPU)[0].gpus == 2
    drawn = trl.draw(after)
    texts = [text.get_text() for axis in drawn.axes for text in axis.texts]
    lines = {line.get_label(): list(line.get_xdata()) for line in drawn.axes[2].lines}
    figures.style.close(drawn)
    assert {"305", "290", "99", "50.5"} <= set(texts) and figures.style.NOTHING not in texts
    assert [2, 4, 8] in [counts for label, counts in lines.items() if "Qwen3-8B, 36 layers" in label]
    said = claims.trl(figures.load(folder))[1]
    assert "*measured* on 8 × H100 80GB HBM3, Qwen3-8B, 36 layers, 1M: Ring 305 s, 50.5 GiB, UPipe (output on device) 290 s" in said
    assert "from 2 × H100 80GB HBM3 to 4: 2.00×, 8: 3.75×" in said and "2 × H200, Qwen3-8B, 2 layers, 1M" in said
    assert "toy" not in said and "305" not in claims.trl(sources)[1]


def test_published_peaks_stand_beside_predicted_and_measured_ones(folder, sources):
    rows = throughput.rows(sources)
    assert [row.value for row in values.pick(rows, metric="peak", mark="reported")] == [21.1, 39.98]
    said = values.pick(rows, metric="peak", mark="predicted", tokens=2**17, method="upipe")
    assert {row.model for row in said} == {"llama3-8b", "qwen3-32b"}
    drawn = throughput.draw(rows)
    texts = [text.get_text() for axis in drawn.axes for text in axis.texts]
    figures.style.close(drawn)
    assert "21.1 GiB reported" in texts and "39.98 GiB reported" in texts
    after = added(folder, [trained("table3_llama3_8b", "upipe", 2**17, 8, 7.0, peak=22.25)])
    assert [row.value for row in values.pick(throughput.rows(after), metric="peak", mark="measured")] == [22.25]
    (before,), (line,) = ([x for x in results.render(s).splitlines() if x.startswith("| Llama3-8B, 128K | 8 ×")] for s in (sources, after))
    assert "| 21.1 | 21.09 | -0.1 % |" in before and before.endswith("| – |") and line.endswith("UPipe (output on device) 22.25 |")


def test_what_was_measured_where_is_said_from_the_records(folder, sources):
    """The published size on its machine changes the words, and stands under no heading of another machine."""
    where = "8 × H100 80GB HBM3"
    before = results.render(sources), claims.render(sources)
    assert "no record is of all 32 layers on 8 GPUs" in before[0] and "not measured (no record of 32 layers on 8 GPUs)" in before[1]
    assert not any(where in text for text in before) and "2 × H200" in before[1]
    ended = {"ulysses": {3: "ok", 4: "oom_device"}, "upipe": {3: "ok", 5: "ok", 6: "oom_device"}, "fpdt": {4: "ok"}}
    points = [(method, n, outcome) for method, lengths in ended.items() for n, outcome in lengths.items()]
    new = [trained("table3_llama3_8b", method, n * 2**20, 8, 900.0 * n, outcome=outcome) for method, n, outcome in points]
    new += [trained("table3_llama3_8b", method, 2**18, 8, 5.0, layers=4) for method in ("ulysses", "upipe")]
    after = added(folder, new)
    text, told = results.render(after), claims.render(after)
    assert "no record is of all 32 layers on 8 GPUs" not in text and "no record is of all 64 layers on 16 GPUs" in text
    assert f"Measured on {where}." in text and f"2 × H200 and {where}" in text and f"2 × H200 and {where}" in told
    speed = values.number(2**20 / 900 / 8)
    (line,) = [x for x in text.splitlines() if x.startswith("| 3M | 162.4")]
    assert line.endswith(f"| Ulysses {speed}; UPipe (output on device) {speed} |")
    whole = [x for x in text.splitlines() if x.startswith("| Llama3-8B, ") and f"| {where} |" in x]
    shown = ["4 layers, 256K", *(f"32 layers, {n}M" for n in (3, 5, 6))]
    assert [x.split(" | ")[0] for x in whole] == [f"| Llama3-8B, {what}" for what in shown]
    own, said = claims.five_million(after)
    assert f"*measured* on {where}, UPipe (output on device): trains 5M at {speed} tokens/s/GPU, 6M ended in oom_device" in said
    assert "not measured" not in said
    own, said = claims.quarter_longer(after)
    assert f"Llama3-8B on {where}: Ulysses 3M, UPipe 5M, FPDT 4M (+25.0 %)" in said and "Not measured" not in said
    assert f"{where}: Llama3-8B, 4 layers, 256K, output on device: 1.000" in claims.as_fast(after)[1]


def test_blocks_of_two_machines_take_no_place_from_each_other(folder, sources):
    old = [r for r in sources.every if r["experiment"] == "block" and r["outcome"] == "ok" and r["tokens"] == 2**19]
    (pair, *_) = [(record, base) for record, base in results.blocks(sources) if record["tokens"] == 2**19]
    assert pair[0] in old
    new = [record | {"gpu": "NVIDIA H100 80GB HBM3", "run_id": "new"} for record in pair]
    before, after = results.blocks(sources), results.blocks(added(folder, new))
    assert len(after) == len(before) + 1 and all(one in after for one in before)
    assert "on 2 × H100 80GB HBM3: " in claims.seven_eighths(figures.load(folder))[1]
    (line,) = [x for x in results.render(figures.load(folder)).splitlines() if x.startswith("| 512K | 2 × H100 80GB HBM3 |")]
    assert line


def test_claims_say_their_conditions(sources):
    said = claims.eightfold(sources)[1]
    assert "on 2 × H200, 2 layers of Llama3-8B, 28 GiB of a GPU for torch's allocator, adamw, attention simulated" in said
    said = claims.trl(sources)[1]
    assert "on 1 × H200, 4 layers of Qwen3-4B, states and saved inputs of its other layers counted, 77 GiB" in said
    assert "attention simulated" in said and "*predicted* on 8 × H100-80GB, its ring: 306.4 s, 51.9 GiB" in said
    ladder = [r | {"memory_only": False} if r["experiment"] == "ladder" else r for r in sources.records]
    computed = claims.eightfold(dataclasses.replace(sources, records=ladder))[1]
    assert "attention computed" in computed and "simulated" not in computed


def test_two_nodes_have_both_methods_and_say_where_the_prediction_is_not_what_was_published(sources):
    told = {text.split(":")[0].split()[-1]: text for text in claims.two_nodes(sources)[1].split("; ")}
    assert "UPipe 51.2 GiB, USP 69.2 GiB (fits, where it was published out of memory)" in told["8M"]
    assert [length for length, text in told.items() if "published out of memory" in text] == ["8M"]
    ran_out = [r | {"outcome": "oom_device"} if (r["method"], r["tokens"]) == ("usp", 2**23) else r for r in sources.records]
    said = claims.two_nodes(dataclasses.replace(sources, records=ran_out))[1]
    assert "USP oom_device" in said and "published out of memory" not in said


def test_results_have_both_models_figure_1_and_the_two_nodes(sources):
    text = results.render(sources)
    for line in (
        "| 1M | 117 | 113.3 | 117.2 | +3.5 % |", "| UPipe | 15 + 19.5 + 16.6 | 51.1 | 45.31 | -11.3 % | – |",
        "| 8M | 69.5 | 51.16 | -26.4 % | OOM | 69.23 | – | – | 0.999 | – |",
    ):  # fmt: skip
        assert line in text.splitlines(), line
