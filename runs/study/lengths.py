"""
Accuracy over the length of a story, in runs of tiny.sh: a curve for each r, and the parent.

    python runs/study/lengths.py out/tiny                  out/tiny/lengths.json and lengths.png
    python runs/study/lengths.py out/tiny-seed{0..4} --out runs/study/results/first_screen.json \\
        --picture assets/tiny.png

The JSON holds what each run answers, and over all runs mean and standard error: as "figures", which
`bench.py plot` draws, and as "columns" and "rows" of a table, which report.py writes into pages.
FLOPs are those of the training since surgery, by the paper's rule, with the r that were drawn.
"""
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1]), str(HERE)]
from common import Parser, cli, read_json, write_json
from runs.plot import draw
from runs.tiny_corpus import TASKS
from report import along, panel, percent

PARENTS = {"parent_tokens": "parent, equal tokens", "parent_flops": "parent, equal FLOPs"}


def arms_of(folder):
    """
    Read a run of tiny.sh. Returns {arm: {"right": {sentences: share of right answers}, "flops": of
    its training}}.
    """
    arms = {}
    for model in ("task", *PARENTS):
        for test in ("test", "test18"):
            result = read_json(f"{folder}/eval_{model}_{test}.json")
            for row in result["results"]:
                label = PARENTS.get(model, f"r = {row['steps']}")
                arm = arms.setdefault(label, {"right": {}, "flops": result["training"]["flops"]})
                arm["right"] |= {n: score[0] for n, score in row["by_difficulty"].items()}
    return arms


def main():
    parser = Parser(description=__doc__)
    flag = parser.add_argument
    flag("folders", nargs="+", help="runs of tiny.sh that differ only in the seed")
    flag("--out", help="the JSON file; default: lengths.json in the first folder")
    flag("--picture", help="the plot; default: the name of the JSON file with .png")
    args = parser.parse_args()
    out = Path(args.out or f"{args.folders[0]}/lengths.json")
    runs = {folder: arms_of(folder) for folder in args.folders}
    curves = {}
    rows = []
    for label in runs[args.folders[0]]:
        found = [arms[label] for arms in runs.values()]
        lengths = list(found[0]["right"])
        if label != PARENTS["parent_tokens"]:  # its curve would lie on the other parent's
            curves[label] = along(lengths, [run["right"] for run in found])
        tflops = statistics.fmean(run["flops"] for run in found) / 1e12
        row = {"arm": label, "training TFLOPs": f"{tflops:.2f}"}
        row |= {n: percent([run["right"][n] for run in found]) for n in lengths}
        rows.append(row)
    asked = max(TASKS["stories"].lengths)
    figure = panel("sentences of the question", curves,
                   ticks=[int(n) for n in lengths], dashed=[PARENTS["parent_flops"]],
                   line=[asked, "longest question\nasked in training"])
    write_json(out, {"figures": [figure], "columns": list(rows[0]),
                     "rows": [list(row.values()) for row in rows], "runs": runs})
    draw([figure], args.picture or out.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
