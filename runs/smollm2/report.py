"""
Collect the results of runs/smollm2/run.sh in results.json, then print the tables and draw the
picture of README.md.

    python -m runs.smollm2.report --collect out/smollm2     after the runs: write results.json
    python -m runs.smollm2.report                           tables; matplotlib draws smollm2.png
"""
import math
import statistics
from pathlib import Path

from common import Parser, cli, opening, read_json, write_json
from model import find_checkpoint
from runs.study.run import paired_t_test

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

LENGTHS = {"3 to 5": range(3, 6), "6 to 8": range(6, 9), "9 to 12": range(9, 13)}
DEPTHS = 1, 2, 4, 8


# --------------------------------------------------------------------------------------- collect

def collect(out):
    """Read the runs under `out` into results.json, replacing entries with the same names."""
    found = read_json(HERE / "results.json")
    for score in sorted(Path(out).glob("*-*-*/score.json")):
        run = score.parent
        task, arm, seed = run.name.split("-")
        scores = read_json(score)
        losses = {r: [round(x, 2) for x in sums] for r, sums in scores["losses"].items()}
        scores["losses"] = losses
        if "right" in scores:  # then no table needs the losses
            del scores["losses"], scores["labels"]
        made = read_json(Path(find_checkpoint(run), "train.json"))
        found.setdefault(task, {})[f"{arm} {seed}"] = scores | {
            "moves": scores["moves"] and [round(x, 5) for x in scores["moves"]],
            "update": made["update"],
            "flops": made["flops"],
            "lr": made["config"]["lr"],
        }
    for path in sorted(Path(out).glob("generation-*-*.json")):
        _, task, arm = path.stem.split("-")
        shares = {result["steps"]: result["value"] for result in read_json(path)["results"]}
        found.setdefault("generation", {})[f"{task} {arm}"] = shares
    write_json(HERE / "results.json", found)


# ---------------------------------------------------------------------------------------- tables

def seeds_of(found, arm="loop"):
    """Return the seeds of an arm's runs, such as ["0", "1", "2"]."""
    return sorted(name.removeprefix(f"{arm} ") for name in found if name.startswith(arm))


def mean_and_error(values):
    """Return "12.3 ± 0.4": the mean over seeds and its standard error; "12.3" for one seed."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.1f} ± {error:.1f}"


def right_answers(run, r, lengths):
    """Return the percentage of right answers to the questions of these lengths at r."""
    shares = [run["right"][str(r)][length - 1] for length in lengths]
    return 100 * statistics.fmean(shares)


def print_counts(found):
    """Print right answers by number of events: one row for each r of the loop, and the parent."""
    print("| | " + " | ".join(f"{name} events" for name in LENGTHS) + " |")
    print("| --- " * (1 + len(LENGTHS)) + "|")
    rows = [(f"loop, r = {r}", "loop", r) for r in DEPTHS]
    rows.append(("parent, equal FLOPs", "parent", 0))
    for title, arm, r in rows:
        cells = []
        for lengths in LENGTHS.values():
            runs = [found[f"{arm} {seed}"] for seed in seeds_of(found, arm)]
            cells.append(mean_and_error([right_answers(run, r, lengths) for run in runs]))
        print(f"| {title} | {' | '.join(cells)} |")


def print_gains(found):
    """
    Print how many points the loop gains at r = 8 over smaller r and over the parent, with p of a
    paired t-test if there are five seeds; and how far its state moves.
    """
    others = ("its r = 1", "loop", 1), ("its r = 4", "loop", 4), ("the parent", "parent", 0)
    for title, arm, r in others:
        for name, lengths in LENGTHS.items():
            gains = []
            for seed in seeds_of(found, arm):
                ours = right_answers(found[f"loop {seed}"], 8, lengths)
                gains.append(ours - right_answers(found[f"{arm} {seed}"], r, lengths))
            p = f", p = {paired_t_test(gains):.2g}" if len(gains) == 5 else ""
            print(f"loop, r = 8, over {title}, {name} events: {mean_and_error(gains)}{p}")
    for r in (2, 3, 4, 8, 16, 64):
        moves = [100 * found[f"loop {seed}"]["moves"][r - 1] for seed in seeds_of(found)]
        print(f"the state moves in recurrence {r} by {mean_and_error(moves)}%")


def difference(run, r, other, other_r):
    """
    Return how much lower the loss per token of one run is than that of another on the same
    problems, and the standard error, in thousandths of a nat.
    """
    labels = run["labels"]
    pairs = zip(other["losses"][str(other_r)], run["losses"][str(r)], strict=True)
    gains = [theirs - ours for theirs, ours in pairs]
    mean = sum(gains) / sum(labels)
    rest = [gain - mean * count for gain, count in zip(gains, labels)]
    error = math.sqrt(len(rest)) * statistics.stdev(rest) / sum(labels)
    return f"{1000 * mean:+.1f} ± {1000 * error:.1f}"


def print_language(found):
    """Print the loss per token over r, and its differences to r = 1 and to the parent."""
    print("| seed | r | NLL | gain over its r = 1, mnat | gain over the parent, mnat |")
    print("| --- " * 5 + "|")
    for seed in seeds_of(found):
        loop = found[f"loop {seed}"]
        parent = found[f"parent {seed}"]
        tokens = sum(loop["labels"])
        for r in loop["losses"]:
            nll = sum(loop["losses"][r]) / tokens
            over_one = difference(loop, r, loop, 1)
            over_parent = difference(loop, r, parent, 0)
            print(f"| {seed} | {r} | {nll:.4f} | {over_one} | {over_parent} |")
        print(f"| {seed} | parent | {sum(parent['losses']['0']) / tokens:.4f} | | |")


def draw(found):
    """Draw right answers by number of events, and NLL over r, as smollm2.png."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    counts = found["counts"]
    lengths = range(1, 13)
    for arm, r in [*(("loop", r) for r in DEPTHS), ("parent", 0)]:
        runs = [counts[f"{arm} {seed}"] for seed in seeds_of(counts, arm)]
        means = [statistics.fmean(right_answers(run, r, [n]) for run in runs) for n in lengths]
        left.plot(lengths, means, "k--" if arm == "parent" else "-", label=f"r = {r}" if r else arm)
    left.axvspan(3, 5, alpha=0.1, label="trained")
    left.set(xlabel="events in the story", ylabel="accuracy, %", ylim=(0, 103))
    left.legend(fontsize=8)
    language = found["language"]
    for seed in seeds_of(language):
        loop = language[f"loop {seed}"]
        tokens = sum(loop["labels"])
        right.plot(DEPTHS, [sum(loop["losses"][str(r)]) / tokens for r in DEPTHS], "o-",
                   label=f"loop, seed {seed}")
        nll = sum(language[f"parent {seed}"]["losses"]["0"]) / tokens
        right.axhline(nll, ls="--", c="k", lw=1, label="parent" if seed == "0" else None)
    right.set(xscale="log", xticks=DEPTHS, xlabel="r", ylabel="NLL per token of GSM8K's solutions")
    right.set_xticks(DEPTHS, DEPTHS)
    right.minorticks_off()
    right.legend(fontsize=8)
    figure.savefig(ROOT / "assets" / "smollm2.png", dpi=110)


def main():
    parser = Parser(description=opening(__doc__))
    parser.add_argument("--collect", metavar="FOLDER", help="the runs to read")
    args = parser.parse_args()
    if args.collect:
        collect(args.collect)
    found = read_json(HERE / "results.json")
    for task in ("counts", "short"):
        print(f"{task}\n")
        print_counts(found[task])
        print()
        print_gains(found[task])
        print()
    print_language(found["language"])
    for name, shares in found["generation"].items():
        print(name, *(f"{share:.0%} at r = {r}" for r, share in shares.items()))
    draw(found)


if __name__ == "__main__":
    cli(main)
