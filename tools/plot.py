"""
Draw results of eval_gsm8k.py, or the losses of runs, and print what is drawn as tables. Files with
the same task share a panel; scores are in %. Runs that share a label become their mean ± its
standard error, or over FLOPs, which differ between them, a curve each.

    python -m tools.plot out/*/eval_gsm8k.json                 # over r
    python -m tools.plot out/tiny/eval_*.json --x difficulty  # a curve for each model and r
    python -m tools.plot out/fig4 out/fig5                    # losses over updates

The picture needs matplotlib. A result file may hold several models, as runs/released/models.json
does.
"""
import json
import math
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from common import Parser, UserError, cli, paths, read_json, reading

import numpy as np

from model import Config, RecurrentLM

AXES = {
    "steps": "recurrences r at test time",
    "difficulty": "difficulty of the question",
    "parameters": "layer parameters that a token passes through, counting every pass",
    "update": "training updates",
    "flops": "training FLOPs",
}
LOG_BASE = {"steps": 2, "parameters": 10}
COLUMNS = 13  # at most this many points of a curve are printed
MARKERS = 30  # at most this many points of a curve get a marker
PICTURES = ".png", ".svg", ".pdf"


class Point(NamedTuple):
    """A point of a picture. The title and the label of its y axis name its panel."""
    title: str
    y: str
    curve: str  # its name
    run: str    # the folder of the run
    x: float | str | None  # None: the point is a horizontal line
    value: float | None    # None: a loss that was not finite, or had no labels
    error: float | None


def main():
    parser = Parser(__doc__)
    flag = parser.add_argument
    flag("results", nargs="+", metavar="FILE", help="result files, or folders of runs")
    flag("--x", choices=AXES, help="x axis; default: steps for results, update for runs")
    flag("--labels", metavar="NAME,NAME",
         help="comma-separated names, one per file; files with the same name share a curve")
    flag("--out", type=paths, metavar="FILE",
         help=".png, .svg or .pdf; default: named after the first input")
    args = parser.parse_args()
    # A pattern such as out/fig3* also matches a picture that was drawn before.
    files = [path for path in args.results if not path.endswith(PICTURES)] or args.results
    labels = args.labels.split(",") if args.labels else files
    if len(labels) != len(files):
        raise UserError(f"--labels: {len(labels)} labels for {len(files)} files")
    out = args.out or files[0].rstrip("/").removesuffix(".json") + ".png"
    if not out.endswith(PICTURES):
        raise UserError(f"--out {out}: must end in {', '.join(PICTURES)}")
    axis = args.x or ("update" if Path(files[0]).is_dir() else "steps")
    found = {}  # {label: its Points}
    for label, path in zip(labels, files):
        read = losses if Path(path).is_dir() else scores
        found.setdefault(label, []).extend(read(label, path, axis))
    curves_of = {}  # {(title, y): {curve: [(x, value, error), ...]}}
    for label, points in found.items():
        several = len({point.run for point in points}) > 1
        for title, y, curve, run, *point in points:
            if axis == "flops" and several:  # each run has its own x, so no line joins them
                curve = curve.replace(label, f"{label} ({run})", 1)
            if point[1] is not None:
                curves_of.setdefault((title, y), {}).setdefault(curve, []).append(point)
    if not curves_of:
        raise UserError(f"{files[0]} holds nothing to draw")
    panels = [{"title": title, "x": AXES[axis], "y": y, "x_log": LOG_BASE.get(axis),
               "curves": {curve: average(points) for curve, points in curves.items()}}
              for (title, y), curves in curves_of.items()]
    draw(panels, out)
    for panel in panels:
        print_table(panel)


# --------------------------------------------------------------------------------- reading

def losses(label, folder, axis):
    """Yield the Points of a run's training loss, and of its validation loss at each r."""
    if axis not in ("update", "flops"):
        raise UserError(f"--x {axis}: losses of a run are drawn over update or flops")
    with reading(f"{folder}/log.jsonl") as path:
        *lines, _ = Path(path).read_text().split("\n")  # the last is empty, or cut off
        entries = [*map(json.loads, lines)]
    for entry in entries:
        x = entry[axis]
        if "loss" in entry:
            yield Point("", "loss", label, folder, x, entry["loss"], None)
        for r, loss in entry.get("val", {}).items():
            depth = f" at r = {r}" if int(r) else ""
            yield Point("", "loss", f"{label}, validation{depth}", folder, x, loss, None)


def scores(label, path, axis):
    """
    Yield the Points of each row of a result file; each task and metric has a panel. Over anything
    but r and parameters, each r has its own curve. An ordinary model is a horizontal line over r,
    and a model that train.py never trained is one over update or flops.
    """
    content = read_json(path)
    for name, result in content.get("models", {label: content}).items():
        run = run_of(result.get("model", path))
        rows = result.get("results", [])
        for row in rows if isinstance(rows, list) else ():  # lm-evaluation-harness has a dict
            r = row["steps"]
            config = Config(**result["config"])
            title = row.get("task", result.get("task", ""))
            y = row["metric"].replace("flexible", "accuracy")
            curve = name
            if config.n_core and axis not in ("steps", "parameters"):
                curve += f", r = {r}"
            if axis == "difficulty":
                levels = row["by_difficulty"]
                words = not all(level.replace(".", "", 1).isdecimal() for level in levels)
                for level, (score, *_) in levels.items():
                    x = level if words else float(level)
                    yield Point(title, y, curve, run, x, score, None)
                continue
            if axis == "steps":
                x = r if config.n_core else None
            elif axis == "parameters":
                size = RecurrentLM.empty(config).num_params()
                x = size["prelude"] + r * size.get("core", 0) + size.get("coda", 0)
            else:
                x = result.get("training", {}).get(axis)
            yield Point(title, y, curve, run, x, row["value"], row.get("standard_error"))


def run_of(checkpoint):
    """The folder of the run that a checkpoint belongs to."""
    return re.sub(r"/step_\d+$", "", checkpoint)


def average(points):
    """
    Sort the (x, y, error) of a curve by x. Several with the same x, such as those of other seeds,
    become one: their mean and its standard error.
    """
    same_x = {}
    for point in points:
        same_x.setdefault(point[0], []).append(point)
    averaged = []
    for x in sorted(same_x, key=place):
        _, ys, (error, *_) = zip(*same_x[x])
        if len(ys) > 1:
            error = statistics.stdev(ys) / math.sqrt(len(ys))
        averaged.append((x, statistics.fmean(ys), error))
    return averaged


def place(x):
    """The sort key of an x: None, then numbers, then words, in the order of eval_gsm8k.py."""
    if isinstance(x, str):
        return 1, len(x), x
    return 0, -math.inf if x is None else x


# --------------------------------------------------------------------------------- tables

def print_table(panel):
    """
    Print a panel in Markdown: a row for each curve, and a column for each x, or for every second
    or third if there are many. A horizontal line has its value in every column.
    """
    curves = panel["curves"]
    xs = {x for points in curves.values() for x, *_ in points}
    xs = sorted(xs - {None}, key=place)
    every = math.ceil(len(xs) / COLUMNS)
    xs = xs[::-every][::-1] if xs else [None]  # always keeps the last
    rows = [["", *map(x_text, xs)]]
    for label, points in curves.items():
        texts = {x: as_text(panel["y"], score, error) for x, score, error in points}
        rows.append([label, *(texts.get(x, texts.get(None, "")) for x in xs)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    scores = f"{panel['title']} {panel['y']}".strip()
    print(f"\n{scores} over {panel['x']}\n")
    for row in rows:
        print("|", " | ".join(text.ljust(width) for text, width in zip(row, widths)), "|")


def x_text(x):
    return f"{x:g}" if isinstance(x, int | float) else x or ""


def as_text(y, value, error):
    """A loss, or a score in %, as text: "49.4 ± 1.4"."""
    scale, digits = (1, 4) if y == "loss" else (100, 1)
    text = f"{scale * value:.{digits}f}"
    return text if error is None else f"{text} ± {scale * error:.{digits}f}"


# --------------------------------------------------------------------------------- drawing

def draw(panels, out):
    """
    Draw panels side by side to the file `out`. A panel is a dict: "title", "x" and "y" are texts,
    "x_log" is the base of a logarithmic x axis, or None, and "curves" {label: [(x, y, error), ...]}
    in which error may be None. A curve whose points have None for x is a horizontal line.
    """
    try:
        from matplotlib import pyplot
    except ImportError:
        print("\nNo picture was drawn, because that needs matplotlib: pip install matplotlib")
        return
    pyplot.switch_backend("agg")
    rows = math.ceil(len(panels) / 2)
    columns = min(2, len(panels))
    picture = pyplot.figure(figsize=(7.2 * columns, 3.7 * rows), layout="constrained")
    for i, panel in enumerate(panels, 1):
        axes = picture.add_subplot(rows, columns, i)
        draw_panel(axes, panel)
        is_last = i == len(panels)
        # Panels with the same curves share the legend of the last one.
        if is_last or list(panel["curves"]) != list(panels[i]["curves"]):
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    picture.savefig(out)
    print(f"\nwrote {out}")


def draw_panel(axes, panel):
    """Draw a panel (see draw()) on a matplotlib Axes."""
    colors = {}  # {run: color}; a run's validation loss has the same color
    for i, (label, points) in enumerate(panel["curves"].items()):
        run, validation, _ = label.partition(", validation")
        style = {"label": label, "color": colors.setdefault(run, f"C{len(colors)}"),
                 "linestyle": "--" if validation else "-"}
        points = [point for point in points if point[0] is not None] or points
        xs, ys, errors = zip(*points)
        if xs[0] is None:
            axes.axhline(ys[0], **style | {"linestyle": "--"})
            continue
        errors = np.array([error or 0 for error in errors])
        every = math.ceil(len(points) / MARKERS)
        # Hollow markers of different shapes tell overlapping curves apart.
        axes.errorbar(xs, ys, errors, marker="os^Dv*PX"[i % 8], markerfacecolor="none",
                      markevery=every, errorevery=every, **style)
        band = ys - errors, ys + errors
        axes.fill_between(xs, *band, color=style["color"], alpha=0.15, linewidth=0)
    axes.set(xlabel=panel["x"], ylabel=panel["y"], title=panel["title"])
    if panel["x_log"]:
        axes.set_xscale("log", base=panel["x_log"])
        axes.xaxis.set_major_formatter("{x:g}")
    if panel["y"] == "loss":
        axes.set_yscale("log")
    if panel["y"] == "accuracy":
        axes.set_ylim(0, 1.03)
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    cli(main)
