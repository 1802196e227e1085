"""
Print the tables of runs/bbh/README.md, and draw its picture if matplotlib is installed.

    python -m runs.bbh.report                       of the published results.json
    python -m runs.bbh.report out/bbh               the tables of your own runs, made by run.sh
"""
import importlib.util
import math
from pathlib import Path
from statistics import mean

from common import Parser, cli, read_json
from model import find_checkpoint
from runs.smollm2.report import finish, print_final, runs_of

HERE = Path(__file__).resolve().parent

# code-davinci-002 by the number of swaps, which is that of the people: Suzgun et al., 2022.
PUBLISHED = {"few examples": (37.6, 20.4, 14.4), "steps written out": (78, 90, 86)}


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
    """Draw accuracy on long.jsonl by number of swaps, of looped models at each r and of parents."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, panel = plt.subplots(figsize=(9.5, 3.6), constrained_layout=True)
    depths = found["loop 0"]["long"]
    swaps = list(map(int, depths["1"]))

    def plot(arm, r, *style, **how):
        runs = [run["long"][r] for run in runs_of(found, arm).values()]
        means = [100 * mean(run[str(n)] for run in runs) for n in swaps]
        panel.plot(swaps, means, *style, **how)

    for i, r in enumerate(depths):
        plot("loop", r, c=plt.cm.plasma(0.9 - 0.9 * i / len(depths)), label=f"r = {r}")
    plot("parent", "0", "--", c="black", label="its parent")
    for marker, (kind, values) in zip("x+", PUBLISHED.items()):
        panel.plot((3, 5, 7), values, marker, c="C2", label=f"code-davinci, {kind}")
    finish(figure, panel, "bbh.png", 100 / 7, (1, 5), "swaps; seven people",
           bbox_to_anchor=(1.325, 1))


def main():
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="?", metavar="FOLDER", help="print the tables of these runs")
    args = parser.parse_args()
    found = collect(args.runs) if args.runs else read_json(HERE / "results.json")
    notes = found.pop("notes", {})
    for task, runs in found.items():
        for part in "test", "long":
            if part in runs["loop 0"]:
                print(f"\n{task}, {part}.jsonl, by swaps\n")
                print_final(runs, part, "swaps")
        for name, run in runs.items():
            print(f"{task}, {name}: {run['updates']} updates, {run['flops']:.2g} FLOPs")
    for kind, values in PUBLISHED.items():
        print(f"code-davinci-002, {kind}: {values}")
    print(f"one standard error of 200 questions is at most {50 / math.sqrt(200):.1f} points")
    for title, lines in notes.items():
        print(f"\n{title}\n")
        if isinstance(lines, dict):
            lines = [f"| {name} | {value} |" for name, value in lines.items()]
        print(*lines, sep="\n")
    if importlib.util.find_spec("matplotlib") and not args.runs:
        draw(found["swaps"])


if __name__ == "__main__":
    cli(main)
