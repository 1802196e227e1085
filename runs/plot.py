"""
What `python bench.py plot` draws: results over r or FLOPs, and the losses of runs.

A figure is a dict, drawn as one panel:

    title, x, y     texts: the title, and the labels of the axes
    curves          {label: [(x, y, error), ...]}; error may be None, and a curve whose points have
                    None for x is a horizontal line
    x_log           optional: base of a logarithmic x axis
    y_log           optional: whether the y axis is logarithmic
    dashed          optional: labels of the curves that are dashed
    line            optional: [x, label] of a vertical line
    ticks           optional: ticks of the x axis

A point with a fourth item, ENOUGH, is ringed. A result file with "figures", such as
runs/study/lengths.py writes, is drawn as it is. One with "models", such as
runs/released/models.json, holds a result for each model name.
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
    "update": "training updates",
    "flops": "training FLOPs, as the paper counts them",
}
LOG_BASE = {"steps": 2, "token_flops": 10}
POINTS = 13   # at most this many points of a curve are printed; those of lengths.py have 13
MARKERS = 30  # at most this many points of a curve get a marker
ENOUGH = "enough"
RING = "enough: the smallest r\nwithin 2 standard errors\nof the best"


def plot_flags():
    """Return a Parser of the command's flags."""
    parser = Parser(add_help=False)
    flag = parser.add_argument
    flag("results", nargs="+", help="result files, or folders of runs")
    flag("--x", choices=AXES, help="x axis; default: steps for results, update for runs")
    flag("--labels", metavar="NAME,NAME",
         help="comma-separated names, one per file; files with the same name share a curve")
    flag("--table", action="store_true", help="print all scores in Markdown instead")
    flag("--out", metavar="FILE", help=".png or .svg; default: named after the first input")
    return parser


def plot(args):
    """
    Draw result files, the losses of runs, and the figures that a file brings; or print a table.
    args: the values of plot_flags().
    """
    # A pattern such as out/fig3* also matches a picture that was drawn before.
    paths = [path for path in args.results if not path.endswith(".png")] or args.results
    labels = args.labels.split(",") if args.labels else paths
    if len(labels) != len(paths):
        raise UserError(f"--labels: {len(labels)} labels for {len(paths)} files")
    axis = args.x or ("update" if Path(paths[0]).is_dir() else "steps")
    figures = []
    curves_of = {}  # {(title, y label): {curve label: [point, ...]}}
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
            curves = curves_of.setdefault((title, y), {})
            curves.setdefault(curve, []).append(point)
    if args.table:
        print_markdown(curves_of)
        return
    for (title, y), curves in curves_of.items():
        figures.append({
            "title": title,
            "x": AXES[axis],
            "y": y,
            "x_log": LOG_BASE.get(axis),
            "y_log": y == "loss",
            "curves": curves,
        })
    if not figures:
        raise UserError(f"{paths[0]} holds nothing to draw")
    draw(figures, args.out or paths[0].rstrip("/").removesuffix(".json") + ".png")


def losses(label, folder, axis):
    """
    Yield the points of a run's training loss, and of its validation loss at each r, as (title of
    the figure, y label, label of the curve, x, y, error).
    """
    if axis not in ("update", "flops"):
        raise UserError(f"--x {axis}: losses of a run are drawn over update or flops")
    with open(f"{folder}/log.jsonl") as f:
        for entry in map(json.loads, f):
            x = position(entry, axis)
            if "val" not in entry:
                yield "", "loss", label, x, entry["loss"], None
            for r, loss in entry.get("val", {}).items():
                depth = f" at r = {r}" if int(r) else ""
                yield "", "loss", f"{label}, validation{depth}", x, loss, None


def position(entry, axis):
    """
    Return the x of a log entry, or of a result, on an axis. For FLOPs that is paper_flops, by the
    paper's counting, where an entry has it beside flops, which counts the r that were drawn.
    """
    if axis == "flops" and "paper_flops" in entry:
        axis = "paper_flops"
    return entry.get(axis)


def scores(label, result, axis):
    """
    Yield points as losses() does, for each row of a result file; each task and metric has a figure.
    With --x update or flops each r is a curve. An ordinary model is a horizontal line over r, and a
    model that train.py never trained is one over update or flops. The point of the smallest r that
    is enough ends in ENOUGH.
    """
    rows = result.get("results", [])
    if not rows:
        return
    config = Config(**result["config"])
    model = RecurrentLM.empty(config)
    enough = {(x["task"], x["metric"], x["steps"]) for x in result.get("enough", [])}
    for row in rows:
        r = row["steps"]
        positions = dict(result.get("training", {}))
        positions["steps"] = r if config.n_core else None
        # flops_per_token() is of training, 6 FLOPs per parameter. A forward pass takes 2.
        positions["token_flops"] = model.flops_per_token((0, r)) // 3
        curve = label
        if config.n_core and axis in ("update", "flops"):
            curve += f", r = {r}"
        title = row.get("task", result.get("task", ""))
        metric = row["metric"].replace("flexible", "accuracy")
        x = position(positions, axis)
        error = row.get("standard_error")
        if (title, row["metric"], r) in enough:
            yield title, metric, curve, x, row["value"], error, ENOUGH
        else:
            yield title, metric, curve, x, row["value"], error


def print_markdown(curves_of):
    """
    Print scores in %, as a table in Markdown: a row for each model and r, and a column for each
    task and metric. curves_of: {(task, metric): {model: [(r, score, error), ...]}}.
    """
    rows = {}  # {(model, r): {(task, metric): text}}
    for column, curves in curves_of.items():
        for model, points in curves.items():
            for r, score, error, *_ in points:
                text = f"{100 * score:.1f}"
                if error is not None:
                    text += f" ± {100 * error:.1f}"
                row = rows.setdefault((model, r or "-"), {})
                row[column] = text
    print("| model | r |", *(f"{task} {metric} |" for task, metric in curves_of))
    print("|", "--- | " * (2 + len(curves_of)))
    for (model, r), row in rows.items():
        print(f"| {model} | {r} |", *(f"{row.get(column, '')} |" for column in curves_of))


def draw(figures, out):
    """
    Print up to POINTS points of each curve, as x: y ± error, then draw the figures side by side.
    out: the path of the picture, a .png or .svg.
    """
    for figure in figures:
        print(f"{figure['title'] or figure['y']} over {figure['x']}")
        for label, points in figure["curves"].items():
            every = math.ceil(len(points) / POINTS)
            shown = points[:-1:every] + points[-1:]  # the last one always
            print(f"  {label:32s}", *map(describe_point, shown), sep="   ")
    try:
        from matplotlib import pyplot
    except ImportError:
        print("No picture was drawn. To get one: pip install matplotlib, then python "
              f"{shlex.join(sys.argv)}")
        return
    pyplot.switch_backend("agg")
    rows = math.ceil(len(figures) / 2)
    columns = min(2, len(figures))
    picture = pyplot.figure(figsize=(7.2 * columns, 3.7 * rows), layout="constrained")
    for i, figure in enumerate(figures, 1):
        draw_panel(picture.add_subplot(rows, columns, i), figure)
    picture.savefig(out)
    print(f"wrote {out}")


def describe_point(point):
    """Return a point as text, such as "8: 0.9120 ± 0.0080 (enough)"."""
    x, y, error, *marks = point
    text = "-" if x is None else f"{x:g}"
    text += f": {y:.4f}"
    if error:
        text += f" ± {error:.4f}"
    for mark in marks:
        text += f" ({mark})"
    return text


def draw_panel(panel, figure):
    """Draw a figure on a panel, an Axes of matplotlib."""
    lines = []
    rings = []   # [(x, y), ...]
    colors = {}  # {run: color}; the validation loss of a run has the same one
    for i, (label, points) in enumerate(figure["curves"].items()):
        run, validation, _ = label.partition(", validation")
        style = {
            "label": label,
            "color": colors.setdefault(run, f"C{len(colors)}"),
            "linestyle": "--" if validation or label in figure.get("dashed", ()) else "-",
        }
        known = [point for point in points if point[0] is not None]
        if known:
            lines.append(panel.errorbar(
                [x for x, *_ in known],
                [y for _, y, *_ in known],
                [error or 0 for _, _, error, *_ in known],
                # Hollow markers of different shapes keep curves apart that lie on each other.
                marker="os^Dv*PX"[i % 8],
                markerfacecolor="none",
                markevery=math.ceil(len(known) / MARKERS),
                **style,
            ))
            rings += [(x, y) for x, y, _, *marks in known if marks]
        else:
            _, level, *_ = points[0]
            style["linestyle"] = "--"
            lines.append(panel.axhline(level, **style))
    if rings:
        xs, ys = zip(*rings)
        lines += panel.plot(xs, ys, "o", markersize=14, markerfacecolor="none", color="black",
                            label=RING, clip_on=False)
    if "line" in figure:
        x, label = figure["line"]
        lines.append(panel.axvline(x, color="gray", linestyle=":", label=label))
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
