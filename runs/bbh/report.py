"""
Print the tables of runs/bbh/README.md.

    python -m runs.bbh.report                       of the published results.json
    python -m runs.bbh.report out/bbh               the tables of your own runs, made by run.sh
"""
import math
from pathlib import Path

from common import Parser, cli, read_json
from model import find_checkpoint
from runs.smollm2.report import print_final

HERE = Path(__file__).resolve().parent
PARTS = {"swaps": {"test": "swaps", "long": "swaps"},
         "stepgame": {"test": "hops", "sentences": "sentences"}}


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


if __name__ == "__main__":
    cli(main)
