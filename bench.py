"""
Measure training and decoding, and draw results.

    python bench.py train                        # tokens/s, FLOPs utilisation, GPU memory
    python bench.py train --peer                 # beside transformers' Llama, as deep when unrolled
    python bench.py decode --steps 1,4,32        # tokens/s over r
    python bench.py decode --model out/tiny/task --ways "kv=last;exit=kl,exit_threshold=0.01"
    python bench.py plot out/*/eval_test.json    # accuracy over r, a panel for each data set
    python bench.py plot out/fig4 out/fig5       # loss curves of runs, from their log.jsonl

Without --model, train and decode run a Llama of 27.3M parameters and shape (2,4,2) with random
weights: the speed of a token does not depend on their values. Each speed is the median of repeated
runs after a warm-up, with the lowest and the highest. The last line of output is JSON.

Tokens/s mean little across different r, so training has its FLOPs utilisation (mfu), too: FLOPs by
the paper's rule, 6 per parameter of the layers and token where gradients flow and 2 where they do
not, over the matmul peak that the same run measures. The head and attention come on top of that.
"""
import json
import math
import os
import statistics
import time
from dataclasses import fields

import torch

from data import Parser, cli, describe, read_json
from model import Config, RecurrentLM, UserError
from muon import Optimizer
from sample import Decoding, compile_decoding, generate, parse_steps

# What --x puts on the x axis: in words, and where train.json and log.jsonl keep the latter two.
AXES = {"steps": "recurrences r at test time", "flops": "FLOPs of a new token (the paper's rule)",
        "train": "updates of the training", "training_flops": "training FLOPs (the paper's rule)"}
PROGRESS = {"train": "update", "training_flops": "flops"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    parser = Parser(description=__doc__)
    flag = parser.add_argument
    flag("command", choices=("train", "decode", "plot"))
    flag("results", nargs="*", help="plot: result files; or runs, for their loss curves")
    flag("--x", choices=AXES, help="plot: default: steps of results, train of runs")
    flag("--metric", help="plot: which of the results; default: the first of each file")
    flag("--labels", help="plot: comma-separated names, one a file; equal ones share a curve")
    flag("--out", help="plot: .png or .svg; default: beside the first input")
    flag("--model", help="a checkpoint folder; default: random weights")
    flag("--dtype", choices=("float32", "bfloat16"), default="float32")
    flag("--steps", help="train: n+k pairs, recurrences without and with gradient; decode: r")
    flag("--batch_size", type=int, help="default: train 4, decode 1")
    flag("--context", type=int, default=256, help="train: tokens of each row")
    flag("--optimizer", default="adamw", help="train: muon, adamw or adamw*")
    flag("--prompt", type=int, default=32, help="decode: tokens of each prompt")
    flag("--tokens", type=int, default=64, help="decode: new tokens of each row")
    flag("--ways", default="", help="decode: settings of sample.py to compare with plain decoding, "
                                    "such as 'kv=last;draft_steps=4'")
    flag("--repeat", type=int, default=5, help="timed runs of each figure")
    flag("--no_compile", action="store_true")
    flag("--peer", action="store_true", help="also time transformers' Llama")
    args = parser.parse_intermixed_args()
    (plot if args.command == "plot" else bench)(args)


# ------------------------------------------------------------------------------- measuring

def bench(args):
    """
    Time training or decoding. Prints a row as soon as it is measured, and all of them as JSON.
    matmul_peak is the machine's ceiling: the FLOP/s of a large square matrix product. mfu is the
    share of it that a training step reaches. peak_mib: the most GPU memory in use so far.
    """
    if args.model:
        model = RecurrentLM.load(args.model, DEVICE, torch.float32)
    else:
        model = RecurrentLM(Config(4096, 512, 8, 2, 1408, 2, 4, 2)).to(DEVICE)
        model.init_weights(0)
    n = 8192 if DEVICE == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=getattr(torch, args.dtype))
    peak = measure(lambda: a @ b, 2 * n**3, args)["tokens_per_s"]
    result = {"device": describe(model)[0], "threads": torch.get_num_threads(),
              "torch": torch.__version__, "dtype": args.dtype, "matmul_peak": peak, "rows": []}
    for row in bench_train(model, args) if args.command == "train" else bench_decode(model, args):
        if "k" in row:
            row["mfu"] = row["tokens_per_s"] * model.flops_per_token((row["n"], row["k"])) / peak
        if DEVICE == "cuda":
            row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        for key, value in row.items():
            print(key, f"{value:.4g}" if isinstance(value, float) else value, end="  ")
        print(flush=True)
        result["rows"].append(row)
    print(json.dumps(result))


def measure(run, count, args, **row):
    """
    Time run(), which handles `count` tokens, args.repeat times after a warm-up. Returns `row` with
    the median, lowest and highest tokens per second, and the seconds of the warm-up.
    """
    seconds = []
    for _ in range(args.repeat + 1):
        start = time.perf_counter()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    first, *rest = seconds
    return row | {"tokens_per_s": count / statistics.median(rest), "low": count / max(rest),
                  "high": count / min(rest), "first_s": first}


def llama(c, r):
    """transformers' Llama with random weights and the depth that r recurrences unroll to."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.n_embd,
        intermediate_size=c.n_ffn,
        num_hidden_layers=c.n_prelude + r * c.n_core + c.n_coda,
        num_attention_heads=c.n_head,
        num_key_value_heads=c.n_kv_head,
        head_dim=c.head_dim,
    )
    return LlamaForCausalLM(config).to(DEVICE)


# ------------------------------------------------------------------------------- training

def bench_train(model, args):
    """
    Time one optimizer update for each (n, k), as train.py makes it: in bfloat16 the optimizer works
    on float32 master weights. Compiling happens in the warm-up, so first_s shows what it takes.
    """
    shape = 2, args.batch_size or 4, args.context
    idx, targets = torch.randint(model.config.vocab_size, shape, device=DEVICE)
    model.to(getattr(torch, args.dtype))
    optimizer = Optimizer(model.named_parameters(), lr=1e-3, adam_lr=5e-5,
                          weight_decay=1e-4, rule=args.optimizer)
    if not args.no_compile:
        model.compile_parts()

    def update():
        model(idx, targets, (n, k))[1].backward()
        optimizer.accumulate()
        optimizer.step(1.0, 1.0)

    for pair in (args.steps or "0+4,24+8").split(","):
        n, k = map(int, pair.split("+"))
        yield measure(update, idx.numel(), args, name="loopgraft", n=n, k=k)
        if args.peer:
            yield train_peer(llama(model.config, n + k), idx, targets, args, n + k)


def train_peer(peer, idx, targets, args, r):
    """
    Time an update of transformers' model, eager, by torch's fused AdamW. In bfloat16 it keeps
    float32 weights and runs under autocast, as its users train.
    """
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-3, fused=True)

    def update():
        with torch.autocast(DEVICE, torch.bfloat16, args.dtype == "bfloat16"):
            loss = peer(idx, labels=idx, shift_labels=targets, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return measure(update, idx.numel(), args, name="transformers", n=0, k=r)


# ------------------------------------------------------------------------------- decoding

def bench_decode(model, args):
    """
    Time the decoding of prompts: new tokens per second over all rows, prefill included. Plain
    decoding comes first at each r.

    of_saving: an exit saves in theory the fixed r over its mean recurrences, as if the prelude, the
    coda and the prompts were free. This share of it is what the clock shows.
    """
    steps, ways = parse_steps(args.steps or "1,2,4,8,16,32"), parse_ways(args.ways)
    model.to(getattr(torch, args.dtype)).eval()
    if not args.no_compile:
        compile_decoding(model)
    torch.manual_seed(0)
    idx = torch.randint(model.config.vocab_size, (args.batch_size or 1, args.prompt))
    for r in steps:
        for way in ways:
            if way.get("draft_steps", -1) >= r:
                continue  # drafts take fewer recurrences
            events = []

            def run():
                events[:] = generate(model, idx.tolist(), args.tokens, r, **way)

            row = measure(run, len(idx) * args.tokens, args, r=r, way=way)
            row["mean_steps"] = statistics.fmean(recurrences for _, _, recurrences in events)
            if not way:
                plain = row["tokens_per_s"]
            if "exit" in way:
                row["of_saving"] = row["tokens_per_s"] / plain * row["mean_steps"] / r
            yield row
        if args.peer:
            yield decode_peer(llama(model.config, r), idx.to(DEVICE), args, r)


def parse_ways(text):
    """
    'kv=last;draft_steps=4' -> [{}, {"kv": "last"}, {"draft_steps": 4}],
    settings of sample.Decoding. The first is plain decoding.
    """
    kinds = {field.name: type(field.default) for field in fields(Decoding)} | {"exit": str}
    ways = [{}]
    try:
        for way in filter(None, text.split(";")):
            pairs = (pair.split("=") for pair in way.split(","))
            ways.append({key: kinds[key](value) for key, value in pairs})
            Decoding(**ways[-1])  # refuses what makes no sense
    except (AssertionError, KeyError, UserError, ValueError):
        raise UserError(f"--ways {text}: write settings of sample.py, such as "
                        "'kv=last;draft_steps=4'")
    return ways


def decode_peer(peer, idx, args, r):
    """Time transformers' greedy generate() with its own cache."""
    peer.to(getattr(torch, args.dtype)).eval()
    mask = torch.ones_like(idx)  # without it, ids equal to the padding's would be padding

    def run():
        peer.generate(idx, attention_mask=mask, do_sample=False, pad_token_id=0,
                      min_new_tokens=args.tokens, max_new_tokens=args.tokens)

    return measure(run, len(idx) * args.tokens, args, name="transformers", r=r)


# ------------------------------------------------------------------------------- drawing
# A figure is one panel of a picture: {"title", "x", "y": its words, "curves": {label: [(x, y,
# error), ...]}}, perhaps with "x_log": base, "y_log", and "share": y from 0 to 1. An x of None
# stands for a level line. A file with "figures", as runs/study has them, is drawn as it is.

def plot(args):
    """Draw result files, the loss curves of runs, or a file's own figures."""
    figures = {}
    out = args.out or args.results[0].rstrip("/").removesuffix(".json") + ".png"
    names = args.labels.split(",") if args.labels else args.results
    for name, path in zip(names, args.results, strict=True):
        if os.path.isdir(path):
            points = losses(name, path, args.x or "train")
        else:
            result = read_json(path)
            if "figures" in result:
                return draw(result["figures"], out)
            points = scores(name, result, args.x or "steps", args.metric)
        for title, x, y, label, *point in points:
            figure = figures.setdefault((title, x, y), {
                "title": title, "x": AXES.get(x, x), "y": y, "curves": {},
                "x_log": {"steps": 2, "flops": 10}.get(x), "share": y == "accuracy"})
            figure["curves"].setdefault(label, []).append(point)
    if not figures:
        raise UserError(f"--metric {args.metric}: none of the files holds it")
    draw(list(figures.values()), out)


def losses(name, folder, axis):
    """
    The losses of a run, of training and of validation at each r. Yields for each the title of its
    figure, words for x and y, the curve's label, x, y and its error.
    """
    with open(f"{folder}/log.jsonl") as f:
        for line in map(json.loads, f):
            values = {f"{name}, validation at r = {r}": x for r, x in line.get("val", {}).items()}
            for label, loss in (values or {name: line["loss"]}).items():
                yield "", axis, "loss", label, line[PROGRESS[axis]], loss, 0


def scores(name, result, axis, metric):
    """
    Yields the same for what a result file says about a metric. Each task has a figure, and so has
    the difficulty of the questions. There, and over the training, each r is a curve.
    """
    config = Config(**result["config"])
    metric = metric or result["results"][0]["metric"]
    y = "accuracy" if metric == "flexible" else metric
    for row in result["results"]:
        if row["metric"] != metric:
            continue
        r, task = row["steps"], row.get("task", result.get("task", ""))
        at_r = f"{name}, r = {r}" if config.n_core else name
        label = at_r if axis in PROGRESS else name
        x = place(axis, result["model"], config, r)
        yield task, axis, y, label, x, row["value"], row.get("standard_error")
        for level, (value, error, *_) in row.get("by_difficulty", {}).items():
            yield "", result.get("difficulty", "difficulty"), y, at_r, int(level), value, error


def place(axis, folder, config, r):
    """
    Where a result at r stands on an axis. None: nowhere, its value is a level line. That is a
    feed-forward model over r, and what train.py never touched over the training.
    """
    if axis == "steps":
        return r if config.n_core else None
    if axis == "flops":  # of training 6 per parameter that a token meets, of decoding 2
        return RecurrentLM.empty(config).flops_per_token((0, r)) / 3
    path = os.path.join(folder, "train.json")
    return read_json(path)[PROGRESS[axis]] if os.path.exists(path) else None


def draw(figures, out):
    """Print each curve as a line of x: y ± error, then draw the figures side by side."""
    for figure in figures:
        print(f"{figure['title'] or figure['y']} over {figure['x']}")
        for label, points in figure["curves"].items():
            last = (f"{x or 0:g}: {y:.4f} ± {error or 0:.4f}" for x, y, error in points[-12:])
            print(f"  {label:32s}", *last, sep="   ")
    try:
        from matplotlib import pyplot
    except ImportError:
        return print("no picture: pip install matplotlib")
    pyplot.switch_backend("agg")
    rows = 1 + len(figures) // 4
    columns = math.ceil(len(figures) / rows)
    picture, axes = pyplot.subplots(rows, columns, figsize=(4.8 * columns, 3.9 * rows),
                                    layout="tight", squeeze=False)
    for figure, ax in zip(figures, axes.flat):
        for i, (label, points) in enumerate(figure["curves"].items()):
            x, y, error = zip(*points)
            if x[0] is None:
                ax.axhline(y[0], color=f"C{i}", ls="--", label=label)
            else:
                # Hollow marks of several shapes: curves that lie on each other can be told apart.
                marker = "os^Dv*PX"[i % 8] if len(x) < 20 else ""
                ax.errorbar(x, y, error if any(error) else None, color=f"C{i}", label=label,
                            marker=marker, mfc="none")
        ax.set(xlabel=figure["x"], ylabel=figure["y"], title=figure["title"])
        if base := figure.get("x_log"):
            ax.set_xscale("log", base=base)
            ax.xaxis.set_major_formatter("{x:g}")
        if figure.get("y_log"):
            ax.set_yscale("log")
        if figure.get("share"):
            ax.set_ylim(0, 1.03)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7, framealpha=0.4)
    picture.savefig(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    cli(main)
