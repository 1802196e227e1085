"""
Print the tables of runs/bbh/README.md, and draw its picture if matplotlib is installed.

    python -m runs.bbh.report                       of the published results.json
    python -m runs.bbh.report out/bbh               the tables of your own runs, made by run.sh
"""
import importlib.util
import math
from pathlib import Path

from common import Parser, cli, read_json
from model import find_checkpoint
from runs.smollm2.report import ASSETS, print_final, runs_of

HERE = Path(__file__).resolve().parent
PARTS = {"swaps": {"test": "swaps", "long": "swaps"},
         "stepgame": {"test": "hops", "sentences": "sentences"}}
PUBLISHED = {  # Suzgun et al., 2022, code-davinci-002, few-shot; their items are ours and 50 more
    "175B, few-shot": {3: 37.6, 5: 20.4, 7: 14.4},
    "175B, few-shot, writing its steps out": {3: 78, 5: 90, 7: 86},
}


def collect(out):
    """Read the runs of run.sh under `out`: {task: {"loop 0": its accuracies and its cost, ...}}."""
    found = {}
    for path in sorted(Path(out).glob("*/*-*/eval_*.json")):
        run, task = path.parent, path.parts[-3]
        made = read_json(Path(find_checkpoint(run), "train.json"))
        scores = {str(result["steps"]): {n: round(p, 4) for n, (p, *_)
                                         in result["by_difficulty"].items()}
                  for result in read_json(path)["results"]}
        entry = found.setdefault(task, {}).setdefault(run.name.replace("-", " "), {})
        entry[path.stem.removeprefix("eval_")] = scores
        entry |= {"updates": made["update"], "flops": made["flops"]}
    return found


def draw(found):
    """Draw accuracy over swaps: the looped model at each r, its parent, chance, and BBH's items."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, panel = plt.subplots(figsize=(8, 3.8), constrained_layout=True)

    def curve(arm, r, *style, **look):
        curves = [run["long"][r] for run in runs_of(found, arm).values()]
        panel.plot([int(n) for n in curves[0]],
                   [100 * sum(curve[n] for curve in curves) / len(curves) for n in curves[0]],
                   *style, **look)

    depths = list(found["loop 0"]["long"])
    for i, r in enumerate(depths):
        curve("loop", r, label=f"r = {r}", color=plt.cm.plasma(0.9 - 0.9 * i / len(depths)))
    curve("parent", "0", "--", color="black", label="its parent")
    panel.axhline(100 / 7, ls=":", c="gray", label="chance")
    panel.axvspan(1, 5, alpha=0.1, color="gray", label="lengths in training")
    for (name, marks), marker in zip(PUBLISHED.items(), "x^"):
        panel.plot(7, marks[7], marker, c="C2", label=f"published: {name}")
    panel.set(xlabel="swaps among 7 people", ylabel="accuracy, %", ylim=(0, 103), xlim=(1, 16))
    panel.legend(fontsize=8, loc="upper right", ncols=2)
    figure.savefig(ASSETS / "bbh.png", dpi=110)


def main():
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="?", metavar="FOLDER", help="print the tables of these runs")
    args = parser.parse_args()
    found = collect(args.runs) if args.runs else read_json(HERE / "results.json")
    for task, runs in found.items():
        for part, unit in PARTS[task].items():
            if part in runs["loop 0"]:
                print(f"\n{task}, {part}.jsonl, by {unit}\n")
                print_final(runs, part, unit)
        for name, run in runs.items():
            print(f"{task}, {name}: {run['updates']} updates, {run['flops']:.3g} FLOPs")
    print(f"one standard error of 200 questions is at most {50 / math.sqrt(200):.1f} points")
    if "long" in found["swaps"]["loop 0"] and importlib.util.find_spec("matplotlib"):
        draw(found["swaps"])


if __name__ == "__main__":
    cli(main)
