"""
Accuracy over the length of a story, in runs of tiny.sh: a curve for each r, and the parent.

    python runs/study/lengths.py out/tiny                  out/tiny/lengths.json and lengths.png
    python runs/study/lengths.py out/tiny-seed{0..4} --out runs/study/results/first_screen.json \\
        --picture assets/tiny.png

The JSON holds the share of right answers of each folder, and over all of them mean and standard
error: as "figures", which `bench.py plot` draws, and as "columns" and "rows" of a table, which
study.py writes into pages.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1]), str(HERE)]
from common import Parser, cli, read_json, write_json
from runs.plot import draw
from runs.tiny_corpus import TASKS
from study import along, panel, percent

PARENTS = {"parent, equal tokens": "parent_tokens", "parent, equal FLOPs": "parent_flops"}
DRAWN = "parent, equal FLOPs"
ASKED = TASKS["stories"].asked


def right_of(folder, model):
    """{r: {sentences: share of right answers}} of a model; a plain one has r = "0"."""
    found = {}
    for test in ("test", "test18"):
        for row in read_json(f"{folder}/eval_{model}_{test}.json")["results"]:
            lengths = {n: score[0] for n, score in row["by_difficulty"].items()}
            found.setdefault(str(row["steps"]), {}).update(lengths)
    return found


def main():
    parser = Parser(description=__doc__)
    flag = parser.add_argument
    flag("folders", nargs="+", help="of runs of tiny.sh, which differ in the seed alone")
    flag("--out", help="the JSON; default: lengths.json in the first folder")
    flag("--picture", help="default: beside the JSON, with its name")
    args = parser.parse_args()
    out = Path(args.out or f"{args.folders[0]}/lengths.json")
    right = {}  # {folder: {model: {r: {sentences: share}}}}
    for folder in args.folders:
        right[folder] = {model: right_of(folder, model) for model in ("task", *PARENTS.values())}
    arms = {}  # {label: [{sentences: share} of each folder]}
    for r in right[args.folders[0]]["task"]:
        arms[f"r = {r}"] = [models["task"][r] for models in right.values()]
    for label, model in PARENTS.items():
        arms[label] = [models[model]["0"] for models in right.values()]
    lengths = list(arms[DRAWN][0])
    curves = {label: along(lengths, runs) for label, runs in arms.items()
              if label not in PARENTS or label == DRAWN}
    rows = []
    for label, runs in arms.items():
        row = {"arm": label}
        row |= {n: percent([lengths[n] for lengths in runs]) for n in lengths}
        rows.append(row)
    figure = panel("sentences of the question", "accuracy", curves, dashed=[DRAWN],
                   line=[ASKED, "longest question\nasked in training"])
    write_json(out, {"figures": [figure], "columns": list(rows[0]),
                     "rows": [list(row.values()) for row in rows], "right": right})
    draw([figure], args.picture or out.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
