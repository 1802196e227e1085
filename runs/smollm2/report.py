"""
Print the tables of runs/smollm2/README.md, and draw its pictures if matplotlib is installed.

    python -m runs.smollm2.report                   of the published results.json
    python -m runs.smollm2.report out/smollm2       the tables of your own runs, made by run.sh
    python -m runs.smollm2.report out/smollm2 --publish     add those of `run.sh costs` to it
    python -m runs.smollm2.report out/songs/try --publish   or those of folk songs
"""
import importlib.util
import json
import math
import re
import statistics
from pathlib import Path

from common import Parser, cli, read_json, write_atomically

import numpy as np

from model import find_checkpoint
from runs.smollm2.score import ASKED

HERE = Path(__file__).resolve().parent
ASSETS = HERE.parents[1] / "assets"
RESULTS = HERE / "results.json"
RANGES = "3 to 5", "6 to 8", "9 to 12", "13 to 24"  # events
ARMS = {
    "retrofit": "looped, 6 of 30 layers, 2 in a loop",
    "random": "a random start of the same shape",
    "parent": "its full parent, 30 layers",
    "no-loop": "the same 6 layers without a loop",
}
TIMED = {  # arms of the picture of costs: what it calls them, in which color, how far from a point
    "loop": ("r = {}", "C0", (15, -9)),
    "parent": ("parent", "black", (0, 10)),
    "events": ("writes events\nand places", "C1", (0, -17)),
    "places": ("writes\nplaces", "C2", (0, -17)),
}
TUNING = "10"  # the seed of the trials that chose rates, whose runs no table counts


def collect(out):
    """
    Read the runs of run.sh under `out`, or those of the try of folk songs: {"cups": {"retrofit 0":
    its scores and settings}}.
    """
    found = {}
    for score in sorted([*Path(out).glob("c*/score.json"), *Path(out).glob("*/eval_test.json")]):
        name, scores = score.parent.name, read_json(score)
        if "results" in scores:  # of eval_gsm8k.py, which runs/task.sh asks
            name = f"songs-{name}"
            scores = {"test": {str(row["steps"]): {n: share for n, (share, *_) in
                                                   row["by_difficulty"].items()}
                               for row in scores["results"]}}
        experiment, arm, seed = re.fullmatch(r"(\w+)-(.+)-(\d+)", name).groups()
        made = read_json(Path(find_checkpoint(score.parent), "train.json"))
        settings = {key: made["config"][key] for key in ("lr", "batch_size", "dtype")}
        found.setdefault(experiment, {})[f"{arm} {seed}"] = scores | settings | {
            "updates": made["update"], "flops": made["flops"]}
    return found


def publish(experiment, found):
    """Add runs, {name: ...}, to an experiment of results.json."""
    results = read_json(RESULTS)
    results.setdefault(experiment, {}).update(found)
    text = json.dumps(results, indent=1)
    text = re.sub(r"(?<=[\[{])\n {4,}|\n {3,}(?=[\]}])", "", text)  # scores at one r: a line
    with write_atomically(RESULTS) as new:
        new.write_text(re.sub(r"\n {4,}", " ", text) + "\n")


# ------------------------------------------------------------------------------------- statistics

def mean_and_error(*groups):
    """
    Return "12.3 ± 0.4": the mean over a group's runs and its standard error, without it if there is
    only one. Of two groups, it is their difference.
    """
    mean = statistics.fmean(groups[0]) - sum(map(statistics.fmean, groups[1:]))
    if min(map(len, groups)) == 1:
        return f"{mean:.1f}"
    error = math.hypot(*(statistics.stdev(runs) / math.sqrt(len(runs)) for runs in groups))
    return f"{mean:.1f} ± {error:.1f}"


def runs_of(found, arm):
    """Return the runs of an arm, such as "retrofit", with any seed but that of the trials."""
    return [run for name, run in found.items()
            if name.rpartition(" ")[0] == arm and not name.endswith(f" {TUNING}")]


def accuracy(shares, events):
    """
    Return the percentage of right answers. shares: after each event, or {events: share}. events:
    "12", or "9 to 12".
    """
    if isinstance(shares, dict):
        return 100 * shares[events]
    first, *last = map(int, events.split(" to "))
    return 100 * statistics.fmean(shares[first - 1:last[0] if last else first])


def best_depth(runs, events):
    """Return the r with the best mean accuracy on the stories of dev.jsonl; 0 without a loop."""
    def quality(r):
        return statistics.fmean(accuracy(run["dev"][r], events) for run in runs)
    return max(runs[0]["dev"], key=quality)  # of equal ones the smallest


def scores_of(found, arm, part, events, r=None):
    """Return the accuracies of an arm's runs at this r, or at the best one for these events."""
    runs = runs_of(found, arm)
    r = r or best_depth(runs, events)
    return [accuracy(run[part][r], events) for run in runs]


# ------------------------------------------------------------------------------------------ tables

def print_table(title, found, part, columns):
    """Print accuracy by number of events of each arm at each r, and how many runs it is of."""
    print(f"\n{title}\n\n| (runs) | {' | '.join(columns)} |\n{'| --- ' * (1 + len(columns))}|")
    for arm in dict.fromkeys(name.rpartition(" ")[0] for name in found):
        scored = [run[part] for run in runs_of(found, arm) if part in run]
        for r in scored[0] if scored else ():
            runs = [shares[r] for shares in scored if r in shares]
            cells = (mean_and_error([accuracy(shares, n) for shares in runs]) for n in columns)
            depth = f", r = {r}" if r != "0" else ""
            print(f"| {arm}{depth} ({len(runs)}) | {' | '.join(cells)} |")


def print_gains(found, part, ours, others, columns, r=None):
    """Print by how much an arm leads others at each number of events, all at r or their best r."""
    for events in columns:
        for arm in filter(lambda arm: runs_of(found, arm), others):
            theirs = scores_of(found, arm, part, events, r if arm != "parent" else "0")
            gain = mean_and_error(scores_of(found, ours, part, events, r), theirs)
            print(f"{events} events: {ours} over {arm} at {f'r = {r}' if r else 'the best r'}: "
                  f"{gain} points")


def print_cups(found):
    """Print the shell game's outcome, and how far each r gets."""
    for part, title in ("fair", "Fair stories"), ("test", "Ordinary stories"):
        print_table(title, found, part, RANGES)
        print()
        print_gains(found, part, "retrofit", ["random", "parent", "no-loop"], RANGES)
        for arm in ARMS:
            for r in (runs := runs_of(found, arm)) and runs[0][part]:
                means = map(statistics.fmean, zip(*(run[part][r] for run in runs)))
                horizon = next((n for n, share in enumerate(means) if share < 0.7), 24)
                after = sorted(scores_of(found, arm, part, "14", r))
                print(f"{arm}, r = {r}: at least 70% right up to {horizon} events; after 14, "
                      f"{statistics.fmean(after):.1f}%, of {after[0]:.1f} to {after[-1]:.1f}")


def print_runs(found):
    """Print what each run took."""
    for name, run in found.items():
        facts = (f"{key} {value:.3g}" if key == "flops" else f"{key} {value}"
                 for key, value in run.items() if not isinstance(value, dict))
        print(f"{name}: {', '.join(facts)}")


def quality(run):
    """Return what the protocol chooses by: the mean accuracy on dev.jsonl after events 3 to 24."""
    shares = run["dev"].get("32") or run["dev"]["0"]
    return statistics.fmean(shares.values() if isinstance(shares, dict) else shares[2:])


def print_choice(found):
    """Print the quality() of the runs that were asked about dev.jsonl."""
    print()
    for name, run in found.items():
        if "dev" in run:
            print(f"{name}, dev.jsonl: {quality(run):.1%}")


def print_seconds(found):
    """Print the seconds and the FLOPs of an answer, measured by costs.py."""
    print(f"\nseconds and FLOPs of an answer, {found['machine']}\n")
    print(f"| events | {' | '.join(found['loop'])} |\n{'| --- ' * (1 + len(found['loop']))}|")
    for arm, by_events in found.items():
        for r in by_events["12"] if arm != "machine" else ():
            cells = (f"{seconds:.2g} s, {flops:.1e}" for seconds, flops in
                     (of_r[r] for of_r in by_events.values()))
            print(f"| {arm}{f', r = {r}' if arm == 'loop' else ''} | {' | '.join(cells)} |")


def print_all(results):
    """Print the tables of the experiments that there are, then what each run took."""
    if "cups" in results:
        print_cups(results["cups"])
    for name in ("final answers", "final answers, counts", "songs", "twice the training"):
        if found := results.get(name):
            columns = list(next(iter(next(iter(found.values()))["test"].values())))
            print_table(name, found, "test", columns)
            if name.startswith("final"):
                print_gains(found, "test", "loop", ["parent"], columns, "32")
    if costs := results.get("costs"):
        # Arms that write their steps are asked after a few events only: a dict, not a list.
        each = {name: run for name, run in costs.items()
                if isinstance(next(iter(run["fair"].values())), list)}
        print_table("costs, without written steps, fair stories", each, "fair", RANGES)
        columns = [str(n) for n in ASKED[24]]
        print_table("fair stories", costs | results.get("cups", {}), "fair", columns)
        print_table("costs, fair stories", costs, "fair48", ["48"])
        print_choice(costs)
    if "seconds" in results:
        print_seconds(results["seconds"])
    print()
    for name, found in results.items():
        if name != "seconds":
            print_runs(found)


# ---------------------------------------------------------------------------------------- pictures

def draw(found):
    """
    Draw accuracy on fair stories by number of events: the looped model at each r, and all arms at
    their best r.
    """
    from matplotlib import pyplot as plt
    lengths = range(1, 25)

    def curve(panel, arm, style, color, r=None, **label):
        values = np.array([scores_of(found, arm, "fair", str(n), r) for n in lengths])
        mean, error = values.mean(1), values.std(1, ddof=1) / math.sqrt(values.shape[1])
        panel.plot(lengths, mean, style, c=color, **label)
        panel.fill_between(lengths, mean - error, mean + error, color=color, alpha=0.15, lw=0)
        return mean

    def name(panel, mean, text, color, y):
        """Write text on a curve, where it falls below y."""
        i = int(np.argmax(mean < y))
        x = lengths[i] - (y - mean[i]) / (mean[i - 1] - mean[i])
        panel.text(x, y, text, color=color, fontsize=9, va="center", ha="center",
                   bbox={"fc": "white", "ec": "none", "pad": 1})

    def finish(figure, panel, file):
        """Add what guessing gives and the lengths in training."""
        panel.axhline(20, ls=":", c="gray", label="guessing")
        panel.axvspan(3, 5, alpha=0.1, color="gray", label="lengths in training")
        panel.set(xlabel="events in the story", ylabel="accuracy, %", ylim=(0, 103))
        panel.margins(x=0)
        panel.legend(fontsize=8, loc="upper right")
        figure.savefig(ASSETS / file, dpi=110)

    figure, panel = plt.subplots(figsize=(8, 3.8), constrained_layout=True)
    depths = "1", "2", "4", "8", "16", "32"  # at r = 64, the curve is almost that of r = 32
    for i, r in enumerate(depths):
        color = plt.cm.plasma(0.9 - 0.9 * i / len(depths))
        name(panel, curve(panel, "retrofit", "-", color, r), f"r = {r}", color, 70)
    name(panel, curve(panel, "parent", "--", "black"), "parent", "black", 45)
    finish(figure, panel, "smollm2.png")

    figure, panel = plt.subplots(figsize=(8, 3.8), constrained_layout=True)
    for (arm, title), color in zip(ARMS.items(), ("C0", "C1", "black", "C3")):
        looped = arm in ("retrofit", "random")
        label = f"{title} (best r)" if looped else title
        curve(panel, arm, "-" if looped else "--", color, label=label)
    finish(figure, panel, "smollm2_arms.png")


def chosen(costs, arm):
    """Return the runs of an arm, named arm-value, with the best value that was tried."""
    names = {name.rpartition(" ")[0] for name in costs if name.startswith(f"{arm}-")}
    tried = [runs_of(costs, name) for name in sorted(names)]
    if len(tried) == 1:
        return tried[0]
    return max(tried, key=lambda runs: statistics.fmean(map(quality, runs)), default=[])


def draw_costs(results):
    """
    Draw accuracy on fair stories of 12 events over the seconds of an answer, after training on
    short stories and on long ones: the looped model's curve has a point for each r.
    """
    from matplotlib import pyplot as plt
    costs = results.get("costs", {})
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, constrained_layout=True)
    for panel, trained, lengths in zip(panels, ("short", "long"), ("3 to 5", "3 to 24")):
        runs = {arm: chosen(costs, f"{trained}-{arm}") for arm in TIMED}
        if trained == "short":
            runs |= {arm: runs_of(results["cups"], name)
                     for arm, name in (("loop", "retrofit"), ("parent", "parent"))}
        for timed, by_events in results["seconds"].items():
            arm = timed.rpartition(" ")[2]  # that of "llama.cpp, events" is events
            if not runs.get(arm):
                continue
            title, color, place = TIMED[arm]
            points = [(cost, statistics.fmean(accuracy(run["fair"][r], "12") for run in runs[arm]))
                      for r, (cost, _) in by_events["12"].items()]
            panel.plot(*zip(*points), "o-", c=color, mfc=color if timed == arm else "white")
            for r, point in zip(by_events["12"], points) if timed == arm else ():
                if r not in ("2", "4"):
                    panel.annotate(title.format(r), point, place, textcoords="offset points",
                                   ha="center", va="center", fontsize=8, color=color)
        panel.axhline(20, ls=":", c="gray")
        panel.set(xscale="log", xlim=(0.06, 9), ylim=(-9, 106), xlabel="seconds per answer",
                  title=f"trained on {lengths} events")
        panel.xaxis.set_major_formatter("{x:g}")
    panels[0].set_ylabel("accuracy at 12 events, %")
    figure.savefig(ASSETS / "smollm2_costs.png", dpi=110)


def main():
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="?", metavar="FOLDER", help="print the tables of these runs")
    parser.add_argument("--publish", action="store_true",
                        help="add the runs of costs and of songs to results.json")
    args = parser.parse_args()
    results = collect(args.runs) if args.runs else read_json(RESULTS)
    print_all(results)
    if args.publish:
        for name in results.keys() & {"costs", "songs"}:
            publish(name, results[name])
    elif not args.runs and importlib.util.find_spec("matplotlib"):
        import matplotlib
        matplotlib.use("Agg")
        draw(results["cups"])
        if "seconds" in results:
            draw_costs(results)


if __name__ == "__main__":
    cli(main)
