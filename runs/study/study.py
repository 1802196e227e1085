"""
Tables and figures of the study, from the folders of its runs: the last step of each runs/study/NAME.sh.

    python runs/study/study.py curves NAME --runs out/study --out NAME.json ARM=LABEL ...     validation over training
    python runs/study/study.py accuracy|healing|deeper|exits|start NAME --runs ... --out ... ARM=LABEL ...
    python runs/study/study.py best PREFIX --runs out/study                                    the best learning rate

An arm has a run in RUNS/SEED/ARM for each seed. All errors are standard errors over the seeds (sd / sqrt(n)). The JSON holds
"figures", which `bench.py plot` draws, and "columns" and "rows", the table that is printed here, too.
"""
import argparse
import datetime
import glob
import json
import math
import os
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
import torch

from data import Shards
from model import InputError, RecurrentLM, cli, read_json, write_json, writing


def mean_se(values):
    """[mean, standard error] of one value a seed; no error for one seed"""
    values = list(values)
    return [statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0]


def cell(pair, digits=1, scale=1):
    return f"{scale * pair[0]:.{digits}f} ± {scale * pair[1]:.{digits}f}"


def seeds(args, arm, file):
    """The paths RUNS/SEED/ARM/file that exist, in the order of the seeds. InputError if there is none."""
    if not (found := sorted(glob.glob(os.path.join(glob.escape(args.runs), "[0-9]*", arm, file)))):
        raise InputError(f"{args.runs}/*/{arm}/{file}: is missing: let the script make it first")
    return found


def read_log(path):
    """A run's log.jsonl: (validations, updates), lists of its lines."""
    with open(path) as f:
        lines = [json.loads(line) for line in f]
    return [x for x in lines if "val" in x], [x for x in lines if "loss" in x]


def panel(title, x, y, curves, **more):
    """A figure's part, for bench.py plot: curves {label: [[x, mean, standard error], ...]}"""
    return {"title": title, "x": x, "y": y, "curves": curves, **more}


def across(points):
    """Each seed's [(x, y), ...], of one length -> [[mean x, mean y, standard error of y], ...]"""
    return [[statistics.fmean(x for x, _ in column), *mean_se(y for _, y in column)] for column in zip(*points)]


# ---------------------------------------------------------------- validation over training

def first(log, key, level):
    """`key` ("update" or "flops") when the accuracy at the last recurrence first reached level, between two validations; None"""
    value = lambda x: x["accuracy"][measured(x)]
    for a, b in zip(log, log[1:]):
        if value(b) >= level:
            return a[key] + (b[key] - a[key]) * max(0, level - value(a)) / (value(b) - value(a) or 1)


def measured(x):
    """The recurrence at which a validation is compared, as its key: 8, 16 where it was trained with 16, 0 of plain models"""
    return "0" if "0" in x["val"] else "16" if "16" in x["val"] else "8"


def curves(args):
    """Loss and accuracy over updates and FLOPs; the last losses, and what it took to answer 90% rightly."""
    loss, accuracy, over_flops, rows, notes = {}, {}, {}, [], []
    for arm, label in args.arms:
        logs = [read_log(path) for path in seeds(args, arm, "log.jsonl")]
        validations = [v for v, _ in logs]
        r = measured(validations[0][0])
        pick = lambda key, y: across([[(x[key], y(x)) for x in v] for v in validations])
        loss[label] = pick("update", lambda x: x["val"][r])
        accuracy[label] = pick("update", lambda x: x["accuracy"][r])
        over_flops[label] = pick("flops", lambda x: x["val"][r])
        ends = [v[-1] for v in validations]
        reached = [[first(v, key, 0.9) for v in validations] for key in ("update", "flops")]
        spikes = [sum(b["val"][r] > 1.1 * min(x["val"][r] for x in v[:i + 1]) for i, b in enumerate(v[1:])) for v in validations]
        rows.append([label, len(logs), ends[0]["update"], f"{statistics.fmean(x['flops'] for x in ends):.3g}", r,
                     cell(mean_se(x["val"][r] for x in ends), 4), cell(mean_se(x["accuracy"][r] for x in ends), 1, 100),
                     *("-" if None in values else cell(mean_se(values), digits, scale)
                       for values, digits, scale in zip(reached, (0, 2), (1, 1e-12))),
                     cell(mean_se(spikes)), sum(x["skipped"] for _, u in logs for x in u),
                     cell(mean_se(max(x["norm"] for x in u) for _, u in logs))])
    columns = ["arm", "seeds", "updates", "training FLOPs", "at r", "validation loss", "accuracy, %", "updates to 90%",
               "TFLOPs to 90%", "validations 10% above the best before", "non-finite updates", "largest gradient norm"]
    figures = [panel("", "updates", "validation loss", loss, y_log=True),
               panel("", "training FLOPs (the paper's rule)", "validation loss", over_flops, y_log=True),
               panel("", "updates", "accuracy", accuracy)]
    return figures, columns, rows


def best(args):
    """Print the learning rate of seed 0's run PREFIX_LR with the lowest last validation loss."""
    losses = {}
    for path in glob.glob(os.path.join(glob.escape(args.runs), "0", f"{args.name}_*", "log.jsonl")):
        last = read_log(path)[0][-1]
        losses[os.path.dirname(path).rpartition("_")[2]] = last["val"][measured(last)]
    if not losses:
        raise InputError(f"{args.runs}/0/{args.name}_*: is missing: let the script make it first")
    print(min(losses, key=lambda lr: losses[lr] if math.isfinite(losses[lr]) else math.inf))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[f.__name__ for f in (*TABLES, best)])
    parser.add_argument("name", help="the script's name; for best: the arms' prefix")
    parser.add_argument("arms", nargs="*", metavar="ARM=LABEL")
    parser.add_argument("--runs", default="out/study")
    parser.add_argument("--out", help="the JSON file to write")
    args = parser.parse_args()
    if args.what == "best":
        return best(args)
    args.arms = [(arm, label or arm) for arm, _, label in (x.partition("=") for x in args.arms)]
    figures, columns, rows = globals()[args.what](args)
    print("|".join(["", *map(str, columns), ""]) + "\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("|".join(["", *map(str, row), ""]))
    commit = subprocess.run(("git", "rev-parse", "HEAD"), capture_output=True, text=True).stdout.strip() or None
    os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
    with writing(args.out):
        write_json(args.out + ".tmp", {"study": args.name, "commit": commit, "date": str(datetime.date.today()),
                                       "torch": torch.__version__, "runs": args.runs, "figures": figures,
                                       "columns": columns, "rows": rows})
        os.replace(args.out + ".tmp", args.out)


TABLES = [curves]
if __name__ == "__main__":
    cli(main)
