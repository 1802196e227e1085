"""
Tables and figures of the study, from the folders of its runs: the last step of each runs/study/NAME.sh.

    python runs/study/study.py curves NAME --runs out/study --out NAME.json ARM=LABEL ...     validation over training
    python runs/study/study.py optimizers|accuracy|healing|deeper|exits NAME --runs ... --out ... ARM=LABEL ...
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

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", ".."))
import numpy as np
import torch

from data import Dataset, cli, read_json, write_json
from model import Config, RecurrentLM


def commit():
    """The hash of the checkout that this file stands in, None where it is no checkout."""
    command = ["git", "-C", HERE, "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def mean_se(values):
    """[mean, standard error] of one value a seed; None for the error of one seed"""
    values = list(values)
    return [statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None]


def cell(pair, digits=1, scale=1):
    return " ± ".join(f"{scale * x:.{digits}f}" for x in pair if x is not None)


def seeds(args, arm, file):
    """The paths RUNS/SEED/ARM/file that exist, in the order of the seeds. Exits if there is none."""
    found = sorted(glob.glob(os.path.join(glob.escape(args.runs), "[0-9]*", arm, file)))
    return found or sys.exit(f"{args.runs}/*/{arm}/{file}: is missing: let the script make it first")


def read_log(path):
    """A run's log.jsonl: (validations, updates), lists of its lines."""
    with open(path) as f:
        lines = [json.loads(line) for line in f]
    return [x for x in lines if "val" in x], [x for x in lines if "loss" in x]


def panel(title, x, y, curves, **more):
    """A part of the picture, see draw() of bench.py: curves {label: [[x, mean, standard error], ...]}"""
    return {"title": title, "x": x, "y": y, "curves": curves, "share": y == "accuracy", **more}


def across(points):
    """Each seed's [(x, y), ...], of one length -> [[mean x, mean y, standard error of y], ...]"""
    return [[statistics.fmean(x for x, _ in column), *mean_se(y for _, y in column)] for column in zip(*points)]


# ---------------------------------------------------------------- validation over training

def first(log, key, level, value):
    """`key` ("update" or "flops") when value(validation) first reached level, between two validations, or None"""
    for a, b in zip(log, log[1:]):
        if value(b) >= level:
            return a[key] + (b[key] - a[key]) * max(0, level - value(a)) / (value(b) - value(a) or 1)


def measured(x, args):
    """The recurrence at which a validation is compared, as its key: --at, or "0" of plain models"""
    return "0" if "0" in x["val"] else args.at


def curves(args):
    """Loss and accuracy over updates and FLOPs; the last losses, and what it took to answer 90% rightly."""
    loss, accuracy, over_flops, rows, base = {}, {}, {}, [], None
    for arm, label in args.arms:
        logs = [read_log(path) for path in seeds(args, arm, "log.jsonl")]
        validations = [v for v, _ in logs]
        r = measured(validations[0][0], args)
        pick = lambda key, y: across([[(x[key], y(x)) for x in v] for v in validations])
        loss[label] = pick("update", lambda x: x["val"][r])
        accuracy[label] = pick("update", lambda x: x["accuracy"][r])
        over_flops[label] = pick("flops", lambda x: x["val"][r])
        ends = [v[-1] for v in validations]
        reached = [[first(v, key, 0.9, lambda x: x["accuracy"][r]) for v in validations] for key in ("update", "flops")]
        base = base or reached
        spikes = [sum(b["val"][r] > 1.1 * min(x["val"][r] for x in v[:i]) for i, b in enumerate(v) if i)
                  for v in validations]
        rows.append([label, len(logs), ends[0]["update"], f"{statistics.fmean(x['flops'] for x in ends):.3g}", r,
                     cell(mean_se(x["val"][r] for x in ends), 4), cell(mean_se(x["accuracy"][r] for x in ends), 1, 100),
                     *compared(reached, base), ", ".join(f"{x['val'][r]:.4f}" for x in ends), cell(mean_se(spikes)),
                     sum(x["skipped"] for _, u in logs for x in u),
                     cell(mean_se(max(x["norm"] for x in u) for _, u in logs))])
    columns = ["arm", "seeds", "updates", "training FLOPs", "at r", "validation loss", "accuracy, %", "updates to 90%",
               "updates, minus the first arm's", "TFLOPs to 90%", "TFLOPs, minus the first arm's",
               "loss of each seed", "validations 10% above the best", "non-finite updates", "largest gradient norm"]
    figures = [panel("", "updates", "validation loss", loss, y_log=True),
               panel("", "training FLOPs (the paper's rule)", "validation loss", over_flops, y_log=True),
               panel("", "updates", "accuracy", accuracy)]
    return figures, columns, rows


def optimizers(args):
    """curves() of arms MODEL_OPTIMIZER_LR, drawn over the learning rate, and over updates for the best ones."""
    figures, columns, rows = curves(args)
    over_lr, over_updates = {}, {}
    for arm, label in args.arms:
        model, optimizer, lr = arm.split("_")
        last = read_log(seeds(args, arm, "log.jsonl")[0])[0][-1]
        points = over_lr.setdefault(model, {}).setdefault(optimizer.replace("star", "*"), [])
        points.append([float(lr), last["val"][measured(last, args)], 0.0])
        if next(row for row in rows if row[0] == label)[1] > 1:
            over_updates.setdefault(model, {})[label.partition(", ")[2]] = figures[0]["curves"][label]
    return [panel(f"{model}, seed 0", "learning rate", "last validation loss", over_lr[model], x_log=10, y_log=True)
            for model in over_lr] + [panel(f"{model}, the best of each", "updates", "validation loss", over_updates[model],
                                           y_log=True) for model in over_updates], columns, rows


# ---------------------------------------------------------------- answers over recurrences

def answers(args, arm, test):
    """eval_ARM_TEST.json of each seed: [{r: its row}, ...], and the model's Config; a plain model has one row, of any r"""
    found = [read_json(path) for path in seeds(args, "", f"eval_{arm}_{test}.json")]
    config, metric = Config(**found[0]["config"]), found[0]["results"][0]["metric"]
    return [{x["steps"]: x for x in result["results"] if x["metric"] == metric} for result in found], config


def accuracy(args):
    """Accuracy over test recurrences, by difficulty, and over the FLOPs of an answer."""
    over_r, hard, over_flops, far, rows = {}, {}, {}, {}, []
    steps = [1, 2, 4, 8, 16, 32, 64]
    for arm, label in args.arms:
        (found, config), (found18, _) = answers(args, arm, "test"), answers(args, arm, "test18")
        at = lambda results, r: mean_se(x[r if config.n_core else min(x)]["value"] for x in results)
        over_r[label] = [[r, *at(found, r)] for r in steps]
        far[label] = [[r, *at(found18, r)] for r in steps]
        model = RecurrentLM.empty(config)
        over_flops[label] = [[model.flops_per_token((0, r)) // 3, *at(found, r)]  # as in bench.py plot
                             for r in (steps if config.n_core else [1])]
        last = [x[32 if config.n_core else min(x)]["by_difficulty"] for x in found]
        hard[label] = [[int(d), *mean_se(x[d][0] for x in last)] for d in sorted(last[0], key=int)]
        log = [read_log(path)[1][-1] for path in seeds(args, arm, "log.jsonl")]
        rows.append([label, len(found), f"{statistics.fmean(x['flops'] for x in log):.3g}",
                     *(cell(at(found, r), 1, 100) for r in (steps if config.n_core else steps[:1])),
                     *([""] * (0 if config.n_core else len(steps) - 1)), cell(at(found18, 32), 1, 100)])
    columns = ["arm", "seeds", "training FLOPs", *(f"r = {r}" for r in steps), "18 sentences, r = 32"]
    return [panel("1 to 12 sentences", "recurrences r at test time", "accuracy", over_r, x_log=2),
            panel("r = 32", "sentences", "accuracy", hard),
            panel("1 to 12 sentences", "FLOPs of a new token (the paper's rule)", "accuracy", over_flops, x_log=10),
            panel("18 sentences (trained on 12)", "recurrences r at test time", "accuracy", far, x_log=2)], columns, rows


def compared(reached, base):
    """Each seed's [updates, FLOPs], or None -> cells: updates, minus the first arm's paired by seed, TFLOPs, the same"""
    cells = []
    for values, others, digits, scale in zip(reached, base, (0, 2), (1, 1e-12)):
        apart = [a - b for a, b in zip(values, others) if a is not None and b is not None]
        cells.append("-" if None in values else cell(mean_se(values), digits, scale))
        paired = base is not reached and 1 < len(apart) == len(values)
        cells.append(cell(mean_se(apart), digits, scale) if paired else "-")
    return cells


def healing(args):
    """curves() of the task and of the mixture; what every stage leaves of the general text and has learnt of the task."""
    figures, _, _ = curves(args)
    mixed = {label for arm, label in args.arms if arm.endswith("mix")}
    part = lambda figure, title, kept: figure | {"title": title, "curves": {
        label: points for label, points in figure["curves"].items() if (label in mixed) == kept}}
    table, before = [], [("pretrain", "the parent"), ("cut", "cut, not trained"), ("heal", "healed")]
    for stage, label in before + args.arms:
        row = [label]
        for data in ("pretrain", "task"):
            paths = seeds(args, stage, f"eval_loss_{data}.json")
            found = [{x["steps"]: x for x in read_json(path)["results"]} for path in paths]
            at = lambda r, key: mean_se(x[r if r in x else min(x)][key] for x in found)
            row += [cell(at(1, "value"), 3), cell(at(8, "value"), 3), cell(at(8, "accuracy"), 1, 100)]
        table.append(row)
    columns = ["model", *(f"{data}: {what}" for data in ("general text", "task") for what in
                          ("loss at r = 1", "at r = 8", "accuracy at r = 8, %"))]
    return [part(figures[0], "task alone", False), part(figures[1], "task alone", False),
            part(figures[0], "mixture", True)], columns, table


# ---------------------------------------------------------------- states

@torch.no_grad()
def trace(folder, data, rows, steps):
    """
    A run's states and answers on `rows` validation rows of the task, after every r of steps: states (R, N, 13, C), answers
    (R, N, 13) int64, right (R, N, 13) bool; 13: after 0 to 12 sentences.
    """
    model, batch = RecurrentLM.load(folder, dtype=torch.float32), []
    idx, targets, number = Dataset(data, "val", 26).batch(0, 0, 0, 1, rows)
    for part in torch.arange(rows).split(64):
        labels, state = targets[part] != -100, model.initial_state(len(part), 26, 0, part)
        found = []
        for _, s in model.trajectory(idx[part], steps, state):
            answers = model.finish(s).argmax(-1)
            found.append([t[labels].unflatten(0, (len(part), -1)) for t in (s, answers)])
        batch.append([torch.stack(x) for x in zip(*found)])
    states, said = (torch.cat(x, 1) for x in zip(*batch))
    return states, said, said == targets[targets != -100].view(rows, -1)


def deeper(args):
    """r up to 256: accuracy, how far a recurrence moves the state, and where that ends: a point, a cycle, or neither."""
    R, rows, few = 256, 128, [1, 2, 4, 8, 16, 32, 64, 128, 256]
    over_r, moved_by, settle_by, walks, table = {}, {}, {}, {}, []
    for arm, label in args.arms:
        right_at, moves, kinds, settled, still = [], [], [], [], []
        for run in seeds(args, arm, "done"):
            states, said, right = trace(os.path.dirname(run), f"{args.runs}/data/task", rows, range(1, R + 1))
            states, right = states[:, :, 1:], right[:, :, 1:]  # after 1 to 12 sentences
            size = states[1:].norm(dim=-1)
            moved = (states[1:] - states[:-1]).norm(dim=-1) / size                       # (R - 1, N, 12): of 2 ... R
            back = torch.stack([(states[-1] - states[-1 - p]).norm(dim=-1) for p in range(1, 33)]) / size[-1]
            point, cycle = moved[-1] < SETTLED, (back.min(0).values < SETTLED) & (moved[-1] >= SETTLED)
            right_at.append([right[r - 1].double().mean().item() for r in few])
            moves.append([moved[r - 2].median().item() for r in few[1:]])
            kinds.append([x.double().mean().item() for x in (point, cycle, ~point & ~cycle)])
            kinds[-1] += [right[-1][x].double().mean().item() if x.any() else None for x in (point, ~point)]
            still.append(point.double().mean(0).tolist())
            late = torch.where(moved >= 0.01, torch.arange(2, R + 1)[:, None, None], 1).amax(0).double()
            settled.append([late[:, i].median().item() for i in range(12)])
            if arm == "r8" and not walks:
                walks = walk(states, point)
        over_r[label] = [[r, *mean_se(x)] for r, x in zip(few, zip(*right_at))]
        moved_by[label] = [[r, *mean_se(x)] for r, x in zip(few[1:], zip(*moves))]
        settle_by[label] = [[i + 1, *mean_se(x)] for i, x in enumerate(zip(*settled))]
        when = lambda i: cell(mean_se(x), 1, 100) if (x := [k[i] for k in kinds if k[i] is not None]) else "-"
        table.append([label, len(kinds), *(cell(x[1:], 1, 100) for x in over_r[label] if x[0] in (8, 32, 64, 128, 256)),
                      *map(when, range(5)), *(cell(mean_se(x[i - 1] for x in still), 0, 100) for i in (1, 4, 8, 12))])
    columns = ["arm", "seeds", *(f"r = {r}, %" for r in (8, 32, 64, 128, 256)), "at a point, %", "in a cycle, %",
               "neither, %", "right when at a point, %", "right elsewhere, %",
               *(f"at a point after {i}, %" for i in (1, 4, 8, 12))]
    return [panel("", "recurrences r at test time", "accuracy", over_r, x_log=2),
            panel("the median answer", "recurrence", "change of the state, relative", moved_by, x_log=2, y_log=True),
            panel("until a recurrence moves the state by less than 1%", "sentences", "recurrences (median)", settle_by),
            panel("states, trained with r = 8, seed 0", "first principal component", "second", walks)], columns, table


SETTLED = 1e-3  # relative: a state that a recurrence, or up to 32, moves less than this has settled


def walk(states, point):
    """Paths in the plane of the two first principal components of the picture's own states, 48 recurrences each."""
    where = {f"{i + 1} sentence{'s' * (i > 0)}": [0, i] for i in (0, 3, 7, 11)}
    if len(wild := (~point).nonzero()):
        where |= {f"no point, {wild[-1][1] + 1} sentences": wild[-1].tolist()}
    paths = torch.stack([states[:48, n, i] for n, i in where.values()])
    flat = paths.flatten(0, 1) - paths.flatten(0, 1).mean(0)
    plane = flat @ torch.linalg.svd(flat, full_matrices=False)[2][:2].T
    return {label: [[x, y, 0.0] for x, y in path.tolist()] for label, path in zip(where, plane.view(len(where), 48, 2))}


# ---------------------------------------------------------------- exits

def exits(args):
    """eval_exit_RULE_THRESHOLD_test.json: accuracy over mean recurrences, and whether hard questions take longer."""
    difficulty = [json.loads(line)["difficulty"] for line in open(f"{args.runs}/data/test.jsonl")]
    fixed, _ = answers(args, "r8", "test")
    over = {"fixed r, all tokens": [[r, *mean_se(x[r]["value"] for x in fixed)] for r in fixed[0] if r <= 32]}
    hard, rows = {}, []
    for arm, label in args.arms:
        rule, _, threshold = arm.removeprefix("exit_").rpartition("_")
        found, _ = answers(args, arm, "test")
        (R,) = found[0]
        took, together = [], []
        for path in seeds(args, "", f"eval_{arm}_test.jsonl"):
            with open(path) as f:
                took.append({x["index"]: x["recurrences"] for x in map(json.loads, f) if "index" in x})
            together.append(interval(difficulty, [took[-1][i] for i in range(len(difficulty))]))
        value, mean = (mean_se(x) for x in ([x[R]["value"] for x in found], [statistics.fmean(x.values()) for x in took]))
        over.setdefault("fixed r, the last token" if rule == "fixed" else rule, []).append([mean[0], *value])
        hard[label] = [[d, *mean_se(statistics.fmean(x[i] for i in x if difficulty[i] == d) for x in took)]
                       for d in sorted(set(difficulty))]
        harder = "; ".join(f"{r:+.2f} ({low:+.2f} to {high:+.2f})" for r, low, high in together if r == r) or "-"
        rows.append([rule, threshold, len(found), cell(value, 1, 100), cell(mean, 2),
                     *(cell(x[1:], 1) for x in hard[label] if x[0] in (1, 4, 8, 12)), harder])
    columns = ["rule", "threshold", "seeds", "accuracy, %", "mean recurrences", *(f"{d} sentence{'s' * (d > 1)}" for d in
               (1, 4, 8, 12)), "rank correlation with the number of sentences, each seed (95% interval)"]
    shown = {}  # of each rule the loosest threshold that answers 99% rightly, or its tightest
    for (rule, threshold, _, value, *_), label in zip(rows, hard):
        if rule != "fixed" and shown.get(rule, (0, ""))[0] < 99:
            shown[rule] = float(value.split()[0]), label
    return [panel("", "mean recurrences of the last token", "accuracy", over, x_log=2),
            panel("the loosest threshold with 99%, or the tightest", "sentences", "mean recurrences",
                  {label: hard[label] for _, label in shown.values()})], columns, rows


def interval(a, b, resamples=1000):
    """Spearman's rank correlation of two lists and its 95% bootstrap interval over their pairs."""
    a, b, rng = np.array(a), np.array(b), np.random.default_rng(0)

    def ranks(x):
        _, place, count = np.unique(x, return_inverse=True, return_counts=True)
        return (np.cumsum(count) - (count - 1) / 2)[place]

    def correlation(x, y):
        x, y = (t - t.mean() for t in (ranks(x), ranks(y)))
        return float((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())) if x.any() and y.any() else math.nan

    drawn = sorted(correlation(a[i], b[i]) for i in rng.integers(len(a), size=(resamples, len(a))))
    return correlation(a, b), drawn[int(0.025 * resamples)], drawn[int(0.975 * resamples) - 1]


def best(args):
    """Print the learning rate of seed 0's run PREFIX_LR with the lowest last validation loss."""
    losses = {}
    for path in glob.glob(os.path.join(glob.escape(args.runs), "0", f"{args.name}_*", "log.jsonl")):
        last = read_log(path)[0][-1]
        losses[os.path.dirname(path).rpartition("_")[2]] = last["val"][measured(last, args)]
    if not losses:
        sys.exit(f"{args.runs}/0/{args.name}_*: is missing: let the script make it first")
    print(min(losses, key=lambda lr: losses[lr] if math.isfinite(losses[lr]) else math.inf))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[f.__name__ for f in (*TABLES, best)])
    parser.add_argument("name", help="the script's name; for best: the arms' prefix")
    parser.add_argument("arms", nargs="*", metavar="ARM=LABEL")
    parser.add_argument("--at", default="8", help="the recurrence at which validations are compared (default: %(default)s)")
    parser.add_argument("--runs", default="out/study")
    parser.add_argument("--out", help="the JSON file to write")
    args = parser.parse_intermixed_args()
    if args.what == "best":
        return best(args)
    args.arms = [(arm, label or arm) for arm, _, label in (x.partition("=") for x in args.arms)]
    figures, columns, rows = globals()[args.what](args)
    print("|".join(["", *map(str, columns), ""]) + "\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("|".join(["", *map(str, row), ""]))
    write_json(args.out, {"study": args.name, "commit": commit(), "date": str(datetime.date.today()),
                          "torch": torch.__version__, "runs": args.runs, "figures": figures,
                          "columns": columns, "rows": rows})


TABLES = [curves, optimizers, accuracy, healing, deeper, exits]
if __name__ == "__main__":
    cli(main)
