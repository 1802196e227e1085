"""
Measure training and decoding, and draw results.

    python bench.py train                        # tokens/s, FLOPs utilisation, GPU memory
    python bench.py decode --steps 1,4,32        # tokens/s over r
    python bench.py decode --model out/tiny/task --ways "kv=1;exit=kl,exit_threshold=0.01"
    python bench.py plot out/*/eval_test.json    # accuracy over r, a panel for each task
    python bench.py plot out/fig4 out/fig5       # loss curves of runs, from their log.jsonl
    python bench.py plot out/*/eval_*.json --table     # all scores, a line for each model and r

Without --model, train and decode run a Llama of 27.3M parameters and shape (2,4,2) with random
weights: the speed of a token does not depend on their values. Each speed is the median of repeated
runs after a warm-up, with the lowest and the highest. The last line of output is JSON.

Tokens/s mean little across different r, so training also shows its FLOPs utilisation (mfu). FLOPs
follow the paper's rule everywhere: 6 per parameter and token where gradients flow and 2 where they
do not, of the layers alone. The adapter, the head and attention come on top of that.
"""
import json
import math
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch

from data import Parser, cli, describe, natural, positive, read_json
from model import Config, RecurrentLM, UserError
from muon import Optimizer, clip_factor
from sample import Decoder, add_decoding_arguments, decoding, parse_steps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    timed = Parser(add_help=False)
    flag = timed.add_argument
    flag("--model", help="a checkpoint folder; default: random weights")
    flag("--dtype", choices=("float32", "bfloat16"), default="float32")
    flag("--repeat", type=positive, default=5, help="timed runs of each figure")
    flag("--no_compile", action="store_true", help="do without torch.compile")

    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    flag = commands.add_parser("train", parents=[timed], help="time updates").add_argument
    flag("--steps", type=n_plus_k, default="0+4,24+8", help="recurrences without + with gradient")
    flag("--batch_size", type=positive, default=4, help="rows of an update")
    flag("--context", type=positive, default=256, help="tokens of a row")
    flag("--optimizer", choices=("muon", "adamw", "adamw*"), default="adamw")

    flag = commands.add_parser("decode", parents=[timed], help="time new tokens").add_argument
    flag("--steps", type=parse_steps, default="1,2,4,8,16,32", help="recurrences r")
    flag("--batch_size", type=positive, default=1, help="prompts at once")
    flag("--prompt", type=positive, default=32, help="tokens of a prompt")
    flag("--tokens", type=positive, default=64, help="new tokens of a row")
    flag("--ways", type=parse_ways, default="", help="settings of sample.py to compare with plain "
                                                     "decoding, such as 'kv=1;draft_steps=4'")

    flag = commands.add_parser("plot", help="draw results, or the losses of runs").add_argument
    flag("results", nargs="+", help="result files, or folders of runs")
    flag("--x", choices=AXES, help="default: steps of results, update of runs")
    flag("--labels", help="comma-separated names, one a file; equal ones share a curve")
    flag("--table", action="store_true", help="print all scores in Markdown instead")
    flag("--out", help=".png or .svg; default: named after the first input")

    args = parser.parse_args()
    if args.command == "plot":
        plot(args)
    else:
        bench(args)


# ------------------------------------------------------------------------------- measuring

def bench(args):
    """
    Time training or decoding. Prints a row as soon as it is measured, and all of them as JSON.
    matmul_peak is the FLOP/s of a large square matrix product, and mfu the share of it that an
    update reaches. peak_mib: the most GPU memory in use so far.
    """
    dtype = getattr(torch, args.dtype)
    if args.model:
        model = RecurrentLM.load(args.model, DEVICE)
    else:
        model = RecurrentLM(Config(vocab_size=4096, n_embd=512, n_head=8, n_kv_head=2, n_ffn=1408,
                                   n_prelude=2, n_core=4, n_coda=2)).to(DEVICE)
        model.init_weights(0)
    model.to(dtype)
    n = 8192 if DEVICE == "cuda" else 2048
    a = torch.randn(n, n, device=DEVICE, dtype=dtype)
    b = torch.randn(n, n, device=DEVICE, dtype=dtype)
    peak = measure(lambda: a @ b, 2 * n**3, args)["tokens_per_s"]
    result = {
        "device": describe(model)[0],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": args.dtype,
        "matmul_peak": peak,
        "rows": [],
    }
    run = bench_train if args.command == "train" else bench_decode
    for row in run(model, args):
        if "k" in row:
            flops = model.flops_per_token((row["n"], row["k"]))
            row["mfu"] = row["tokens_per_s"] * flops / peak
        if DEVICE == "cuda":
            row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        for key, value in row.items():
            print(key, f"{value:.4g}" if isinstance(value, float) else value, end="  ")
        print(flush=True)
        result["rows"].append(row)
    print(json.dumps(result))


def clock():
    """Seconds, once the device has done all that it was told."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(run, count, args, **row):
    """
    Time run(), which handles `count` tokens, args.repeat times after a warm-up. Returns `row` with
    the median, lowest and highest tokens per second, and the seconds of the warm-up.
    """
    seconds = []
    for _ in range(args.repeat + 1):
        began = clock()
        run()
        seconds.append(clock() - began)
    first, *rest = seconds
    return row | {
        "tokens_per_s": count / statistics.median(rest),
        "low": count / max(rest),
        "high": count / min(rest),
        "first_s": first,
    }


# ------------------------------------------------------------------------------- training

def bench_train(model, args):
    """
    Time one optimizer update of one micro-batch for each (n, k), as train.py makes it: in bfloat16
    the optimizer works on float32 master weights. Compiling happens in the warm-up, so first_s
    shows what it takes. update_s: the optimizer's part, which a run pays once for all micro-batches
    of an update.
    """
    shape = 2, args.batch_size, args.context
    idx, targets = torch.randint(model.config.vocab_size, shape, device=DEVICE)
    optimizer = Optimizer(model.named_parameters(), lr=1e-3, adam_lr=5e-5,
                          weight_decay=1e-4, rule=args.optimizer)
    spent = []
    if not args.no_compile:
        model.compile_parts()

    def update():
        model(idx, targets, (n, k))[1].backward()
        optimizer.accumulate()
        began = clock()
        optimizer.step(1.0, clip_factor(optimizer.reduce().item(), 1.0))
        spent.append(clock() - began)

    for n, k in args.steps:
        spent.clear()
        row = measure(update, idx.numel(), args, n=n, k=k)
        row["update_s"] = statistics.median(spent)
        yield row


def n_plus_k(text):
    """'0+4,24+8' -> [(0, 4), (24, 8)], recurrences without and with gradient"""
    pairs = (pair.split("+") for pair in text.split(","))
    return [(natural(n), positive(k)) for n, k in pairs]


# ------------------------------------------------------------------------------- decoding

def bench_decode(model, args):
    """
    Time the decoding of prompts: new tokens per second over all rows, prefill included. Plain
    decoding comes first at each r.

    of_saving: an exit saves in theory the fixed r over its mean recurrences, as if the prelude, the
    coda and the prompts were free. This share of it is what the clock shows.
    """
    decoder = Decoder(model, not args.no_compile)
    torch.manual_seed(0)
    idx = torch.randint(model.config.vocab_size, (args.batch_size, args.prompt))
    for r in args.steps:
        for way, options in args.ways.items():
            took = []  # recurrences of each token

            def run():
                took.clear()
                tokens = decoder.generate(idx.tolist(), args.tokens, r, **options)
                for _, _, recurrences in tokens:
                    took.append(recurrences)

            row = measure(run, len(idx) * args.tokens, args, r=r, way=way)
            row["mean_steps"] = statistics.fmean(took)
            if options["draft_steps"]:  # what a right draft takes
                row["accepted"] = took.count(options["draft_steps"]) / len(took)
            if not way:
                plain = row["tokens_per_s"]
            if options["exit"] and r:
                row["of_saving"] = row["tokens_per_s"] / plain * row["mean_steps"] / r
            yield row


def parse_ways(text):
    """
    'kv=1;exit=kl,exit_every=4' -> {"": {...}, "kv=1": {"kv": 1, ...}, ...}, settings of
    sample.py. The first is plain decoding.
    """
    parser = Parser()
    add_decoding_arguments(parser)
    ways = {}
    for way in ["", *text.split(";")]:
        flags = [f"--{setting}" for setting in way.split(",") if setting]
        ways[way] = decoding(parser.parse_args(flags))
    return ways


# ------------------------------------------------------------------------------- drawing
# A figure is one panel of a picture: {"title", "x", "y": its words, "curves": {label: [(x, y,
# error), ...]}}, perhaps with "x_log": base, and "y_log". An x of None stands for a level line. A
# file with "figures", as runs/study writes them, is drawn as it is.

AXES = {
    "steps": "recurrences r at test time",
    "token_flops": "FLOPs of a new token (the paper's rule)",
    "update": "updates of the training",
    "flops": "training FLOPs (the paper's rule)",
}
LOG_BASE = {"steps": 2, "token_flops": 10}
POINTS = 10  # of a curve, in words


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
            points = scores(label, result, axis)
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
    train.py never touched is one over the training.
    """
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
        yield title, metric, curve, position(x, axis), row["value"], error


def print_table(found):
    """Print scores over r in %, in Markdown: a line for each model and r, a column each task."""
    lines = {}  # {(label, r): {column: words}}
    for (title, metric), curves in found.items():
        for label, points in curves.items():
            for r, value, error in points:
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
    x, y, error = point
    x = "-" if x is None else f"{x:g}"
    return f"{x}: {y:.4f} ± {error:.4f}" if error else f"{x}: {y:.4f}"


def draw_panel(panel, figure):
    """Draw a figure on a panel, matplotlib's axes."""
    lines = []
    colors = {}  # {run: color}; its validation has it, too, dashed
    for i, (label, points) in enumerate(figure["curves"].items()):
        run, validation, _ = label.partition(", validation")
        style = {
            "label": label,
            "color": colors.setdefault(run, f"C{len(colors)}"),
            "linestyle": "--" if validation else "-",
        }
        known = [point for point in points if point[0] is not None]
        x, y, error = zip(*(known or points))
        if x[0] is None:
            lines.append(panel.axhline(y[0], **style | {"linestyle": "--"}))
        else:
            # Hollow marks of several shapes: curves that lie on each other can be told apart.
            marker = "os^Dv*PX"[i % 8] if len(x) < 20 else ""
            error = [e or 0 for e in error]
            lines.append(panel.errorbar(x, y, error, marker=marker, mfc="none", **style))
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


if __name__ == "__main__":
    cli(main)
