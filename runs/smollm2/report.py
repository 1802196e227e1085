"""
Print the tables of runs/smollm2/README.md, and draw its pictures if matplotlib is installed.

    python -m runs.smollm2.report                   of the published results.json
    python -m runs.smollm2.report out/smollm2       the tables of your own runs, made by run.sh
"""
import importlib.util
import math
import statistics
from pathlib import Path

from common import Parser, cli, read_json

import numpy as np

from model import find_checkpoint

HERE = Path(__file__).resolve().parent
ASSETS = HERE.parents[1] / "assets"
CUPS = {"3 to 5": (3, 5), "6 to 8": (6, 8), "9 to 12": (9, 12), "13 to 24": (13, 24)}
ARMS = {
    "retrofit": "looped, 6 of 30 layers, 2 in a loop",
    "random": "a random start of the same shape",
    "parent": "its full parent, 30 layers",
    "no-loop": "the same 6 layers without a loop",
}


def collect(out):
    """Read the runs of run.sh under `out`: {"retrofit 0": its scores and its settings, ...}."""
    found = {}
    for score in sorted(Path(out).glob("cups-*/score.json")):
        arm, seed = score.parent.name.removeprefix("cups-").rsplit("-", 1)
        made = read_json(Path(find_checkpoint(score.parent), "train.json"))
        settings = {key: made["config"][key] for key in ("lr", "batch_size", "dtype")}
        found[f"{arm} {seed}"] = read_json(score) | settings | {
            "updates": made["update"], "flops": made["flops"]}
    return found


# ------------------------------------------------------------------------------------- statistics

def mean_and_error(values):
    """Return "12.3 ± 0.4": the mean over seeds and its standard error; "12.3" for one seed."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.1f} ± {error:.1f}"


def runs_of(found, arm):
    """Return an arm's runs as {seed: run}."""
    return {name.split()[1]: run for name, run in found.items() if name.split()[0] == arm}


def accuracy(shares, first, last):
    """Return the percentage of right answers after events number `first` to `last`."""
    return 100 * statistics.fmean(shares[first - 1:last])


def best_depth(runs, lengths):
    """Return the r with the best mean accuracy on the stories of dev.jsonl; 0 without a loop."""
    def quality(r):
        return statistics.fmean(accuracy(run["dev"][r], *lengths) for run in runs.values())
    return max(next(iter(runs.values()))["dev"], key=quality)  # of equal ones the smallest


def scores_at(found, arm, part, lengths, r=None):
    """Return r, or an arm's best r for these lengths, and its runs' accuracies there."""
    runs = runs_of(found, arm)
    r = r or best_depth(runs, lengths)
    return r, [accuracy(run[part][r], *lengths) for run in runs.values()]


def gain_and_error(ours, theirs):
    """Return "12.3 ± 0.4": the difference of two arms' means, and its error over seeds."""
    gain = statistics.fmean(ours) - statistics.fmean(theirs)
    if min(len(ours), len(theirs)) == 1:
        return f"{gain:.1f}"
    error = math.hypot(*(statistics.stdev(x) / math.sqrt(len(x)) for x in (ours, theirs)))
    return f"{gain:.1f} ± {error:.1f}"


# ------------------------------------------------------------------------------------------ tables

def print_table(found, rows, part):
    """
    Print accuracy by number of events, and how many runs it is the mean of. rows: (title, arm, r);
    r None: the best one for each number of events.
    """
    print("| (runs) | " + " | ".join(f"{name} events" for name in CUPS) + " |")
    print("| --- " * (1 + len(CUPS)) + "|")
    for title, arm, r in rows:
        cells = []
        for lengths in CUPS.values():
            depth, scores = scores_at(found, arm, part, lengths, r)
            best = f" (r = {depth})" if r is None and depth != "0" else ""
            cells.append(mean_and_error(scores) + best)
        print(f"| {title} ({len(scores)}) | {' | '.join(cells)} |")


def print_cups(found):
    """
    Print the shell game's outcome: accuracy at each r and of each arm, what the looped model gains
    over the others, and how far each r gets.
    """
    arms = {arm: title for arm, title in ARMS.items() if runs_of(found, arm)}
    depths = next(iter(runs_of(found, "retrofit").values()))["test"]
    for part, kind in (("fair", "fair stories"), ("test", "stories whose swaps tell")):
        if part not in next(iter(found.values())):
            continue
        print(f"\n{kind}\n")
        rows = [(f"looped, r = {r}", "retrofit", r) for r in depths]
        if "random" in arms:
            rows.append(("random start, r = 32", "random", "32"))
        print_table(found, rows, part)
        print()
        print_table(found, [(title, arm, None) for arm, title in arms.items()], part)
        print()
        for name, lengths in CUPS.items():
            r, ours = scores_at(found, "retrofit", part, lengths)
            for arm, title in list(arms.items())[1:]:
                _, theirs = scores_at(found, arm, part, lengths)
                print(f"{name} events: looped at r = {r} over {title}: "
                      f"{gain_and_error(ours, theirs)} points")
        for r in [*depths, "0"]:
            runs = runs_of(found, "parent" if r == "0" else "retrofit").values()
            means = map(statistics.fmean, zip(*(run[part][r] for run in runs)))
            horizon = next((n for n, share in enumerate(means) if share < 0.7), 24)
            name = "parent" if r == "0" else f"r = {r}"
            print(f"at least 70% right up to {horizon} events: {name}")
        for arm in ARMS:
            shares = [run[part].get("32", run[part].get("0"))[13]
                      for run in runs_of(found, arm).values()]
            if shares:
                mean = statistics.fmean(shares)
                print(f"after 14 events, at r = 32 if looped: {arm} {mean:.1%}, of",
                      *(f"{share:.1%}" for share in shares))
    print()
    for name, run in found.items():
        minutes = f", {run['minutes']} minutes" if "minutes" in run else ""
        print(f"{name}: {run['updates']} updates of {run['batch_size']} rows, {run['flops']:.3g} "
              f"FLOPs, learning rate {run['lr']:g}, {run['dtype']}{minutes}")


def print_final(found, part="test", unit="events"):
    """Print accuracy by difficulty, such as the number of events, of questions with one answer."""
    depths = found["loop 0"][part]
    lengths, deepest = list(depths["1"]), list(depths)[-1]
    print("| (runs) | " + " | ".join(lengths) + " |")
    print("| --- " * (1 + len(lengths)) + "|")
    rows = [(f"looped, r = {r}", "loop", r) for r in depths]
    rows += [("looped on an H100, r = 32", "loop/H100", "32"),
             ("random start on an H100, r = 32", "random", "32"), ("parent", "parent", "0"),
             ("parent that writes out its steps", "worked", "0")]
    for title, arm, r in rows:
        runs = runs_of(found, arm).values()
        if runs:
            cells = [mean_and_error([100 * run[part][r][n] for run in runs]) for n in lengths]
            print(f"| {title} ({len(runs)}) | {' | '.join(cells)} |")
    for n in lengths if runs_of(found, "parent") else ():
        ours, theirs = ([100 * run[part][r][n] for run in runs_of(found, arm).values()]
                        for arm, r in (("loop", deepest), ("parent", "0")))
        gain = gain_and_error(ours, theirs)
        print(f"{n} {unit}: looped at r = {deepest} over parent: {gain} points")


def print_trials(found):
    """Print the accuracy on dev.jsonl by which the parent's recipe was chosen."""
    for name, run in found.items():
        shares = run["dev"].get("32") or run["dev"]["0"]
        mean = statistics.fmean(shares[n] for n in ("6", "7", "8", "10", "12"))
        print(f"{name}, dev.jsonl, 6 to 12 events: {mean:.1%}")


def draw(found):
    """
    Draw accuracy on fair stories by number of events: the looped model at each r, and all arms at
    their best r.
    """
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    lengths = range(1, 25)

    def curve(panel, arm, style, color, r=None, **label):
        runs = runs_of(found, arm)
        depths = [r or best_depth(runs, (n, n)) for n in lengths]
        values = np.array([[100 * run["fair"][d][n - 1] for run in runs.values()]
                           for n, d in zip(lengths, depths)])
        mean, error = values.mean(1), values.std(1, ddof=1) / math.sqrt(len(runs))
        panel.plot(lengths, mean, style, c=color, **label)
        panel.fill_between(lengths, mean - error, mean + error, color=color, alpha=0.15, lw=0)
        return mean

    def name(panel, mean, text, color, y):
        """Write text on a curve, where it falls below y."""
        i = int(np.argmax(mean < y))
        x = lengths[i] - (y - mean[i]) / (mean[i - 1] - mean[i])
        panel.text(x, y, text, color=color, fontsize=9, va="center", ha="center",
                   bbox={"fc": "white", "ec": "none", "pad": 1})

    figure, panel = plt.subplots(figsize=(8, 3.8), constrained_layout=True)
    depths = "1", "2", "4", "8", "16", "32"  # at r = 64, the curve is almost that of r = 32
    for i, r in enumerate(depths):
        color = plt.cm.plasma(0.9 - 0.9 * i / len(depths))
        name(panel, curve(panel, "retrofit", "-", color, r), f"r = {r}", color, 70)
    name(panel, curve(panel, "parent", "--", "black"), "parent", "black", 45)
    finish(figure, panel, "smollm2.png", 20, (3, 5), "events in the story")

    figure, panel = plt.subplots(figsize=(8, 3.8), constrained_layout=True)
    for (arm, title), color in zip(ARMS.items(), ("C0", "C1", "black", "C3")):
        if runs_of(found, arm):
            looped = arm in ("retrofit", "random")
            label = f"{title} (best r)" if looped else title
            curve(panel, arm, "-" if looped else "--", color, label=label)
    finish(figure, panel, "smollm2_arms.png", 20, (3, 5), "events in the story")


def finish(figure, panel, name, chance, trained, xlabel, **legend):
    """Add to a picture what guessing gives and the lengths in training, and write it to assets."""
    panel.axhline(chance, ls=":", c="gray", label="guessing")
    panel.axvspan(*trained, alpha=0.1, color="gray", label="lengths in training")
    panel.set(xlabel=xlabel, ylabel="accuracy, %", ylim=(0, 103))
    panel.margins(x=0)
    panel.legend(fontsize=8, loc="upper right", **legend)
    figure.savefig(ASSETS / name, dpi=110)


def main():
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="?", metavar="FOLDER", help="print the tables of these runs")
    args = parser.parse_args()
    if args.runs:
        print_cups(collect(args.runs))
        return
    found = read_json(HERE / "results.json")
    print_cups(found["cups"])
    print("\nthe same on a GPU")
    print_cups(found["cups on a GPU"])
    for task in ("final answers", "final answers, counts"):
        print(f"\n{task}\n")
        print_final(found[task])
    print_trials(found["final answers, trials"])
    if importlib.util.find_spec("matplotlib"):
        draw(found["cups"])


if __name__ == "__main__":
    cli(main)
