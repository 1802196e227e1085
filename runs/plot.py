"""
What `python bench.py plot` draws: results over r or FLOPs, and the losses of runs.

A figure is one panel of a picture: {"title", "x", "y": its words, "curves": {label: [(x, y, error),
...]}}, perhaps with "x_log": base, and "y_log"; "dashed": labels of curves; "line": [x, words], a
vertical line; "ticks": those of x. An x of None stands for a level line. A point with a fourth item,
ENOUGH, gets a ring. A file with "figures", as runs/study/lengths.py writes them, is drawn as it is.
A file with "models", as runs/released/models.json, holds the results of each by its name.
"""
import json
import math
import shlex
import sys
from pathlib import Path

from common import Parser, UserError, read_json
from model import Config, RecurrentLM

AXES = {
    "steps": "recurrences r at test time",
    "token_flops": "FLOPs of a new token (the paper's rule)",
    "update": "updates of the training",
    "flops": "training FLOPs (the paper's rule)",
}
LOG_BASE = {"steps": 2, "token_flops": 10}
POINTS = 13   # of a curve, in words: all lengths of runs/study/lengths.py
MARKERS = 30  # of a curve, at most
ENOUGH = "enough"
RING = "enough: the smallest r\nwithin 2 errors of the best"


def plot_flags():
    """The flags of the command."""
    parser = Parser(add_help=False)
    flag = parser.add_argument
    flag("results", nargs="+", help="result files, or folders of runs")
    flag("--x", choices=AXES, help="the axis; default: steps of results, update of runs")
    flag("--labels", metavar="NAME,NAME",
         help="comma-separated names, one a file; equal ones share a curve")
    flag("--table", action="store_true", help="print all scores in Markdown instead")
    flag("--out", metavar="FILE", help=".png or .svg; default: named after the first input")
    return parser


def plot(args):
    """Draw result files, the losses of runs, or a file's own figures. Or print a table."""
    # out/fig3* has an earlier picture of itself, too.
    paths = [path for path in args.results if not path.endswith(".png")] or args.results
    labels = args.labels.split(",") if args.labels else paths
    if len(labels) != len(paths):
        raise UserError(f"--labels: {len(labels)} labels for {len(paths)} files")
    axis = args.x or ("update" if Path(paths[0]).is_dir() else "steps")
    figures = []
    found = {}  # {(title, words for y): curves}
    for label, path in zip(labels, paths):
        if Path(path).is_dir():
            points = losses(label, path, axis)
        else:
            result = read_json(path)
            figures += result.get("figures", [])
            points = []
            for model, of_model in result.get("models", {label: result}).items():
                points += scores(model, of_model, axis)
        for title, y, curve, *point in points:
            found.setdefault((title, y), {}).setdefault(curve, []).append(point)
    if args.table:
        return print_table(found)
    for (title, y), curves in found.items():
        figures.append({
            "title": title,
            "x": AXES[axis],
            "y": y,
            "x_log": LOG_BASE.get(axis),
            "y_log": y == "loss",
            "curves": curves,
        })
    if not figures:
        raise UserError(f"{paths[0]}: holds nothing to draw")
    draw(figures, args.out or paths[0].rstrip("/").removesuffix(".json") + ".png")


def losses(label, folder, axis):
    """
    The losses of a run, of training and of validation at each r. Yields for each the title of its
    figure, words for y, the curve's label, x, y and its error.
    """
    if axis not in ("update", "flops"):
        raise UserError(f"--x {axis}: the losses of a run are over its update or flops")
    with open(f"{folder}/log.jsonl") as f:
        for entry in map(json.loads, f):
            x = position(entry, axis)
            if "val" not in entry:
                yield "", "loss", label, x, entry["loss"], None
            for r, loss in entry.get("val", {}).items():
                depth = f" at r = {r}" if int(r) else ""
                yield "", "loss", f"{label}, validation{depth}", x, loss, None


def position(entry, axis):
    """Where it stands on an axis. Beside the paper's FLOPs it may have those of the draws of r."""
    if axis == "flops" and "paper_flops" in entry:
        axis = "paper_flops"
    return entry.get(axis)


def scores(label, result, axis):
    """
    Yields the same for the rows of a result file, a figure for each task and metric. Over the
    training, each r is a curve. A feed-forward model is a level line over r, and a model that
    train.py never touched is one over the training. The smallest r that is enough has ENOUGH behind
    its error.
    """
    enough = {(x["task"], x["metric"], x["steps"]) for x in result.get("enough", [])}
    for row in result.get("results", []):
        r = row["steps"]
        curve = label
        config = Config(**result["config"])
        x = result.get("training", {}) | {"steps": r if config.n_core else None}
        x["token_flops"] = RecurrentLM.empty(config).flops_per_token((0, r)) // 3
        if config.n_core and axis in ("update", "flops"):
            curve += f", r = {r}"
        title = row.get("task", result.get("task", ""))
        metric = row["metric"].replace("flexible", "accuracy")
        error = row.get("standard_error")
        mark = [ENOUGH] if (title, row["metric"], r) in enough else []
        yield title, metric, curve, position(x, axis), row["value"], error, *mark


def print_table(found):
    """Print scores over r in %, in Markdown: a line for each model and r, a column each task."""
    lines = {}  # {(label, r): {column: words}}
    for (title, metric), curves in found.items():
        for label, points in curves.items():
            for r, value, error, *_ in points:
                words = f"{100 * value:.1f}"
                if error is not None:
                    words += f" ± {100 * error:.1f}"
                lines.setdefault((label, r or "-"), {})[title, metric] = words
    print("| model | r |", *(f"{title} {metric} |" for title, metric in found))
    print("|", "--- | " * (2 + len(found)))
    for (label, r), line in lines.items():
        print(f"| {label} | {r} |", *(f"{line.get(column, '')} |" for column in found))


def draw(figures, out):
    """Print some points of each curve as x: y ± error, then draw the figures side by side."""
    for figure in figures:
        print(f"{figure['title'] or figure['y']} over {figure['x']}")
        for label, points in figure["curves"].items():
            every = math.ceil(len(points) / POINTS)
            shown = points[:-1:every] + points[-1:]
            print(f"  {label:32s}", *map(in_words, shown), sep="   ")
    try:
        from matplotlib import pyplot
    except ImportError:
        return print(f"no picture: pip install matplotlib, then python {shlex.join(sys.argv)}")
    pyplot.switch_backend("agg")
    rows = math.ceil(len(figures) / 2)
    columns = min(2, len(figures))
    picture = pyplot.figure(figsize=(7.2 * columns, 3.7 * rows), layout="constrained")
    for i, figure in enumerate(figures, 1):
        draw_panel(picture.add_subplot(rows, columns, i), figure)
    picture.savefig(out)
    print(f"wrote {out}")


def in_words(point):
    x, y, error, *mark = point
    x = "-" if x is None else f"{x:g}"
    words = f"{x}: {y:.4f} ± {error:.4f}" if error else f"{x}: {y:.4f}"
    return f"{words} ({mark[0]})" if mark else words


def draw_panel(panel, figure):
    """Draw a figure on a panel, matplotlib's axes."""
    lines = []
    rings = []
    colors = {}  # {run: color}; its validation has it, too, dashed
    for i, (label, points) in enumerate(figure["curves"].items()):
        run, validation, _ = label.partition(", validation")
        style = {
            "label": label,
            "color": colors.setdefault(run, f"C{len(colors)}"),
            "linestyle": "--" if validation or label in figure.get("dashed", ()) else "-",
        }
        known = [point for point in points if point[0] is not None]
        x, y, error = zip(*(point[:3] for point in known or points))
        if x[0] is None:
            lines.append(panel.axhline(y[0], **style | {"linestyle": "--"}))
        else:
            # Hollow marks of several shapes: curves that lie on each other can be told apart.
            marker = "os^Dv*PX"[i % 8]
            every = math.ceil(len(x) / MARKERS)
            error = [e or 0 for e in error]
            lines.append(panel.errorbar(x, y, error, marker=marker, mfc="none", markevery=every,
                                        **style))
        rings += [point[:2] for point in known if point[3:]]
    if rings:
        lines += panel.plot(*zip(*rings), "o", ms=14, mfc="none", color="black", label=RING,
                            clip_on=False)
    if "line" in figure:
        x, words = figure["line"]
        lines.append(panel.axvline(x, color="gray", linestyle=":", label=words))
    if "ticks" in figure:
        panel.set_xticks(figure["ticks"])
    panel.set(xlabel=figure["x"], ylabel=figure["y"], title=figure["title"])
    if figure.get("x_log"):
        panel.set_xscale("log", base=figure["x_log"])
        panel.xaxis.set_major_formatter("{x:g}")
    if figure.get("y_log"):
        panel.set_yscale("log")
    if figure["y"] == "accuracy":
        panel.set_ylim(0, 1.03)
    panel.grid(alpha=0.3)
    panel.legend(handles=lines, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
