"""
Measure training and decoding, and draw results.

    python bench.py train                        # tokens/s, FLOPs utilisation, peak memory
    python bench.py train --peer                 # beside transformers' Llama, as deep when unrolled
    python bench.py decode --steps 1,4,32        # tokens/s over r
    python bench.py decode --model out/tiny/task --ways "kv=last;exit=kl,exit_threshold=0.01"
    python bench.py plot out/*/eval_test.json    # accuracy over r, with error bars
    python bench.py plot out/tiny/task           # loss curves of a run, from its log.jsonl

Without --model, train and decode run a Llama of 27.3M parameters and shape (2,4,2) with random
weights: the speed of a token does not depend on their values. Each speed is the median of repeated
runs after a warm-up, with the lowest and the highest. The last line of output is JSON.

Tokens/s mean little across different r, so the utilisation (mfu) counts FLOPs: 6 per matmul
parameter and token where gradients flow, 2 where they do not, plus attention. It divides them by
the matmul peak that the same run measures on the same machine.
"""
import argparse
import itertools
import json
import math
import operator
import os
import re
import resource
import statistics
import sys
import time
from dataclasses import fields

import torch

from data import cli, read_json
from model import Config, RecurrentLM
from muon import Muon
from sample import Decoding, generate, parse_steps

# What plot has on its x axis, and where train.json and log.jsonl keep the latter two.
AXES = {"steps": "recurrences r at test time", "flops": "FLOPs of a new token (the paper's rule)",
        "train": "updates of the training", "training_flops": "training FLOPs (the paper's rule)"}
PROGRESS = {"train": "update", "training_flops": "flops"}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    for name, batch_size in (("train", 4), ("decode", 1)):
        flag = sub.add_parser(name).add_argument
        flag("--model", help="a checkpoint folder; default: random weights")
        flag("--dtype", choices=("float32", "bfloat16"), default="float32")
        flag("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        flag("--batch_size", type=int, default=batch_size)
        flag("--repeat", type=int, default=5, help="timed runs of each figure")
        flag("--no_compile", action="store_true")
        flag("--peer", action="store_true", help="also time transformers' Llama")
    flag("--steps", default="1,2,4,8,16,32", help="recurrences r")
    flag("--prompt", type=int, default=32, help="tokens of each prompt")
    flag("--tokens", type=int, default=64, help="new tokens of each row")
    flag("--ways", default="", help="settings of sample.py to compare with plain decoding, such "
                                    "as 'kv=last;draft_steps=4,draft_len=7'")
    flag = sub.choices["train"].add_argument
    flag("--steps", default="0+4,24+8", help="n+k pairs: recurrences without and with gradient")
    flag("--context", type=int, default=256)
    flag("--optimizer", choices=("muon", "adamw"), default="adamw")
    flag = sub.add_parser("plot").add_argument
    flag("results", nargs="+", help="result files; or runs, for their loss curves")
    flag("--x", choices=AXES, help="default: steps of results, train of runs")
    flag("--metric", help="which of the results; default: the first of the first file")
    flag("--labels", help="comma-separated names, one a file")
    flag("--out", help=".png or .svg; default: beside the first input")
    args = parser.parse_args()
    {"train": bench_train, "decode": bench_decode, "plot": plot}[args.command](args)


# ------------------------------------------------------------------------------- measuring

def measure(run, count, args, **row):
    """
    Time run(), which handles `count` tokens, args.repeat times after a warm-up. Returns `row` with
    the median, lowest and highest tokens per second, and the seconds of the warm-up.
    """
    seconds = []
    for _ in range(args.repeat + 1):
        start = time.perf_counter()
        run()
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    first, *rest = seconds
    row["tokens_per_s"] = count / statistics.median(rest)
    return row | {"low": count / max(rest), "high": count / min(rest), "first_s": first}


def show(row):
    """Print a row of a table, each value after its name."""
    cells = [f"{key} {value:<9,.4g}" if isinstance(value, float) else f"{key} {value}"
             for key, value in row.items()]
    print("  ".join(cells), flush=True)


def add_row(result, row):
    """Print a row, and keep it for the last line."""
    show(row)
    result["rows"].append(row)


def peak_memory(device):
    """MiB: the most allocated on the GPU, or the largest resident set of this process so far."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def load(args, dtype):
    """The model of --model, or one with random weights."""
    if args.model:
        return RecurrentLM.load(args.model, args.device, dtype)
    model = RecurrentLM(Config(4096, 512, 8, 2, 1408, 2, 4, 2))
    model.init_weights(0)
    return model.to(args.device, dtype)


def begin(args, model):
    """
    Print what is measured and where -> the result, still without rows. The machine's ceiling is
    the FLOP/s of a large square matrix product.
    """
    machine, n = f"CPU with {torch.get_num_threads()} threads", 2048
    if args.device.startswith("cuda"):
        machine, n = torch.cuda.get_device_name(), 8192
    a, b = torch.randn(2, n, n, device=args.device, dtype=getattr(torch, args.dtype))
    peak = measure(lambda: a @ b, 2 * n**3, args)["tokens_per_s"]
    result = {"machine": machine, "torch": torch.__version__, "dtype": args.dtype,
              "parameters": model.num_params()["total"], "matmul_peak": peak}
    show(result)
    return result | {"rows": []}


def llama(c, r, args):
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
    return LlamaForCausalLM(config).to(args.device)


# ------------------------------------------------------------------------------- training

def bench_train(args):
    """Time one optimizer update for each (n, k): forward, backward, clip, step."""
    pairs = [tuple(map(int, pair.split("+"))) for pair in args.steps.split(",")]
    model, B, T = load(args, torch.float32), args.batch_size, args.context
    result = begin(args, model)
    idx = torch.randint(model.config.vocab_size, (B, T + 1), device=args.device)
    batch = idx[:, :-1].contiguous(), idx[:, 1:].contiguous()
    update = our_update(model, args, *batch)
    runs = [("nanoloop", n, k, update) for n, k in pairs]
    for n, k in pairs if args.peer else ():
        update = peer_update(llama(model.config, n + k, args), args, *batch)
        runs.append(("transformers", 0, n + k, update))
    for name, n, k, update in runs:
        if args.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        row = measure(lambda: update(n, k), B * T, args, name=name, n=n, k=k)
        flops = step_flops(model, n, k, T) * row["tokens_per_s"]
        row["mfu"] = flops / result["matmul_peak"]
        row["peak_mib"] = peak_memory(args.device)
        add_row(result, row)
    print(json.dumps(result))


def step_flops(model, n, k, T):
    """
    FLOPs per token of a training step. The paper's rule counts the layers' parameters alone; the
    hardware also works for the adapter, the head and causal attention.
    """
    c, per_core = model.config, 6 * k + 2 * n
    attention = T * c.n_head * c.head_dim  # of a layer: 2 products over T/2 columns on average
    layers = 6 * (c.n_prelude + c.n_coda) + per_core * c.n_core
    rest = 6 * c.vocab_size * c.n_embd + per_core * model.num_params()["adapter"]
    return model.flops_per_token((n, k)) + layers * attention + rest


def our_update(model, args, idx, targets):
    """
    An update(n, k) of our model as train.py makes it: in bfloat16 the optimizer works on float32
    master weights. Compiling happens in the warm-up, so first_s shows what it takes.
    """
    masters = {name: p.data for name, p in model.named_parameters()}
    model.to(getattr(torch, args.dtype))
    optimizer = Muon(model.named_parameters(), 1e-3, 5e-5, 1e-4, args.optimizer, masters)
    if not args.no_compile:
        model.compile_parts()

    def update(n, k):
        model(idx, targets, (n, k))[1].backward()
        optimizer.accumulate()
        optimizer.step(1.0, 1.0)

    return update


def peer_update(peer, args, idx, targets):
    """
    An update of transformers' model on the same tokens, eager, by torch's fused AdamW. In bfloat16
    it keeps float32 weights and runs under autocast, as its users train.
    """
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    mixed = torch.autocast(idx.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")

    def update(n, k):
        with mixed:
            out = peer(input_ids=idx, labels=idx, shift_labels=targets, use_cache=False)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


# ------------------------------------------------------------------------------- decoding

def bench_decode(args):
    """
    Time the decoding of prompts: new tokens per second over all rows, prefill included.

    Plain decoding comes first at each r, and the other ways are compared with it:
    as_plain: the share of tokens that are the same. Drafts are exact, but for near ties in
    bfloat16; exits and shared caches are not.
    of_saving: an exit saves in theory the fixed r over its mean recurrences, as if the prelude, the
    coda and the prompts were free. This share of it is what the clock shows.
    """
    steps, ways = parse_steps(args.steps), [{}, *parse_ways(args.ways)]
    model = load(args, getattr(torch, args.dtype)).eval()
    result = begin(args, model)
    generator = torch.Generator().manual_seed(0)
    shape = args.batch_size, args.prompt
    prompts = torch.randint(model.config.vocab_size, shape, generator=generator)
    if not args.no_compile:
        model.compile_parts(dynamic=True)
    for r, way in itertools.product(steps, ways):
        if way.get("draft_steps", -1) >= r:
            continue  # drafts take fewer recurrences
        row, tokens = time_way(model, prompts, r, way, args)
        if not way:
            plain, plain_tokens = row, tokens
        row["as_plain"] = statistics.fmean(map(operator.eq, tokens, plain_tokens))
        if "exit" in way:
            faster = row["tokens_per_s"] / plain["tokens_per_s"]
            row["of_saving"] = faster * row["mean_steps"] / r
        add_row(result, row)
    for r in steps if args.peer else ():
        add_row(result, time_peer(llama(model.config, r, args), prompts, r, args))
    print(json.dumps(result))


def time_way(model, prompts, r, way, args):
    """Time one way of decoding at r -> the first part of its row, and the new tokens, by row."""
    events = []

    def run():
        events[:] = generate(model, prompts.tolist(), args.tokens, r, **way)

    row = measure(run, args.batch_size * args.tokens, args, r=r, way=way)
    events.sort(key=operator.itemgetter(0))  # stable: the tokens of a row stay in order
    _, tokens, recurrences = zip(*events)
    row["mean_steps"] = statistics.fmean(recurrences)
    return row, tokens


def time_peer(peer, prompts, r, args):
    """
    transformers' greedy generate() with its own cache. It gets a mask, since it would take ids
    that are equal to the padding's for padding.
    """
    peer.to(getattr(torch, args.dtype)).eval()
    idx = prompts.to(args.device)
    options = dict(attention_mask=torch.ones_like(idx), do_sample=False, pad_token_id=0,
                   min_new_tokens=args.tokens, max_new_tokens=args.tokens)
    count = args.batch_size * args.tokens
    return measure(lambda: peer.generate(idx, **options), count, args, r=r, name="transformers")


def parse_ways(text):
    """'kv=last;draft_steps=4,draft_len=7' -> [{"kv": "last"}, {"draft_steps": 4, ...}]"""
    kinds = {field.name: type(field.default) for field in fields(Decoding)} | {"exit": str}

    def setting(pair):
        key, value = pair.split("=")
        return key, kinds[key](value)

    try:
        ways = [dict(map(setting, way.split(","))) for way in text.split(";") if way]
    except (KeyError, ValueError):
        sys.exit(f"--ways {text}: write settings of sample.py, such as 'kv=last;draft_steps=4'")
    for way in ways:
        Decoding(**way)  # refuses what makes no sense before anything is timed
    return ways


# ------------------------------------------------------------------------------- drawing
# A figure is one panel of a picture: {"title", "x", "y": its words, "curves": {label: [(x, y,
# error), ...]}}, perhaps with "x_log": base, "y_log", and "share": y from 0 to 1. An x of None
# stands for a level line. A file with "figures", as runs/study has them, is drawn as it is.

def plot(args):
    """Draw result files, the loss curves of runs, or a file's own figures."""
    paths, curves, hard = args.results, {}, {}
    names = args.labels.split(",") if args.labels else [x.removesuffix(".json") for x in paths]
    assert len(names) == len(paths), f"--labels: {len(names)} names for {len(paths)} files"
    out = args.out or os.path.splitext(paths[0].rstrip("/"))[0] + ".png"
    if os.path.isdir(paths[0]) or paths[0].endswith(".jsonl"):
        axis, metric = args.x or "train", "loss"
        for name, path in zip(names, paths):
            add_losses(curves, name, path, PROGRESS[axis])
    else:
        results = [read_json(path) for path in paths]
        if "figures" in results[0]:
            return draw(results[0]["figures"], out)
        axis, metric = args.x or "steps", args.metric or results[0]["results"][0]["metric"]
        for name, result in zip(names, results):
            if axis in PROGRESS and not args.labels:  # the checkpoints of a run are one curve
                name = re.sub(r"/step_\d+$", "", result["model"])
            add_results(curves, hard, name, result, axis, metric)
    if not curves:
        sys.exit(f"--metric {metric}: none of the files holds it")
    y = {"flexible": "accuracy"}.get(metric, metric)
    figures = [{"title": "", "x": AXES[axis], "y": y, "curves": curves,
                "x_log": {"steps": 2, "flops": 10}.get(axis)}]
    if hard:
        x = "difficulty (tiny corpus: sentences)"
        figures.append({"title": "", "x": x, "y": y, "curves": hard})
    draw(figures, out)


def add_losses(curves, name, path, key):
    """
    Add the loss curves of a run, of training and of validation at each r. path: its folder or its
    log.jsonl. key: what is on the x axis, "update" or "flops".
    """
    if os.path.isdir(path):
        path = os.path.join(path, "log.jsonl")
    with open(path) as f:
        for line in map(json.loads, f):
            losses = {f"r = {r}": loss for r, loss in line.get("val", {}).items()}
            for curve, loss in (losses or {"training": line["loss"]}).items():
                curves.setdefault(f"{name}, {curve}", []).append((line[key], loss, 0))


def add_results(curves, hard, name, result, axis, metric):
    """
    Add what a result file says about a metric: to `curves` over an axis, to `hard` over the
    difficulty of the questions, a curve for each r. Over the training each r is a curve, too.
    """
    for row in result["results"]:
        if row["metric"] == metric and row["value"] is not None:
            label = f"{name}, {row['task']}" if "task" in row else name
            at_r = f"{label}, r = {row['steps']}"
            point = place(axis, result, row["steps"]), row["value"], row.get("standard_error")
            curves.setdefault(at_r if axis in PROGRESS else label, []).append(point)
            for level, (value, error, *_) in row.get("by_difficulty", {}).items():
                hard.setdefault(at_r, []).append((int(level), value, error))


def place(axis, result, r):
    """
    Where a result at r stands on an axis. None: nowhere, its value is a level line. That is a
    feed-forward model over r, and a parent that train.py never touched over the training.
    """
    config, path = Config(**result["config"]), os.path.join(result["model"], "train.json")
    if axis == "flops":  # of training 6 per parameter that a token meets, of decoding 2
        return RecurrentLM.empty(config).flops_per_token((0, r)) / 3
    if axis == "steps":
        return r if config.n_core else None
    return read_json(path)[PROGRESS[axis]] if config.n_core or os.path.exists(path) else None


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
    picture = pyplot.figure(figsize=(4.8 * columns, 3.9 * rows), layout="tight")
    for number, figure in enumerate(figures, 1):
        ax = picture.add_subplot(rows, columns, number)
        for i, (label, points) in enumerate(figure["curves"].items()):
            x, y, error = zip(*points)
            if x[0] is None:
                ax.axhline(y[0], color=f"C{i}", ls="--", label=label)
            else:
                ax.errorbar(x, y, error if any(error) else None, color=f"C{i}", label=label,
                            marker=".", lw=1.2, capsize=2)
        ax.set(xlabel=figure["x"], ylabel=figure["y"], title=figure["title"])
        if base := figure.get("x_log"):
            ax.set_xscale("log", base=base)
            ax.xaxis.set_major_formatter("{x:g}")
        if figure.get("y_log"):
            ax.set_yscale("log")
        if figure.get("share"):
            ax.set_ylim(0, 1.03)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    picture.savefig(out, dpi=110)
    print(f"wrote {out}")


if __name__ == "__main__":
    cli(main)
