"""
Score an attempt at the speedrun:

    python runs/speedrun/score.py out/speedrun/N
    python runs/speedrun/score.py out/speedrun/N --keep      and add it to records.jsonl

bash runs/speedrun.sh makes the folder. The score is the mean of the training FLOPs since surgery,
counted as in the study (runs/study/run.py). README.md beside this file has the rules.
"""
import hashlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "study")]
from common import Parser, UserError, cli, read_json
from model import find_checkpoint
from report import mean_se, percent
from run import answers, provenance, read_questions, training_flops
from train import Settings

MARK = 0.9             # of the answers, mean minus two standard errors
LENGTHS = range(6, 13)  # sentences of the questions that count
RECORDS = HERE / "records.jsonl"


def trainings_since(cut, run):
    """
    Read the train.json of each training that led from the cut parent to a run, in order.
    Raises UserError for a run that did not start there.
    """
    found = []
    folder = run
    while Path(folder).resolve() != cut.resolve():
        path = Path(find_checkpoint(folder), "train.json")
        if not path.exists():
            raise UserError(f"{run}: started from {folder}, which is not {cut}")
        found.insert(0, read_json(path))
        folder = found[0]["config"]["init_from"]
    return found


def flops_of(trainings):
    """The sum of the FLOPs of trainings, as trainings_since() returns them."""
    return sum(training_flops(Settings(**training["config"])) for training in trainings)


def recipe_of(trainings):
    """The settings that a run shares with the other four of its attempt: all but seed and folders."""
    own = {"seed", "init_from"}
    return [{key: value for key, value in training["recipe"].items() if key not in own}
            for training in trainings]


def last_validation(folder):
    """{r: accuracy} of a finished run. Raises UserError for one that is not finished."""
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    last = json.loads(lines[-1]) if lines else {}
    if "accuracy" not in last or last["update"] == 0:
        raise UserError(f"{folder}: is not finished. `bash runs/speedrun.sh` resumes it")
    return last["accuracy"]


def digest_of(paths):
    """The SHA-256 of files, one after another."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()


def score(folder):
    """The line of an attempt in records.jsonl."""
    if not folder.name.isdecimal():
        raise UserError(f"{folder}: is not the folder of an attempt, out/speedrun/N")
    number = int(folder.name)
    runs = [folder / f"seed-{1000 * number + i}" for i in range(5)]
    validations = [last_validation(run) for run in runs]
    # Chosen before any test question is asked: the best r in validation, the smallest of equals.
    r = max(validations[0], key=lambda r: (sum(found[r] for found in validations), -int(r)))
    trainings = [trainings_since(folder / "cut", run) for run in runs]
    recipes = [recipe_of(of_run) for of_run in trainings]
    for run, recipe in zip(runs, recipes):
        if recipe != recipes[0]:
            raise UserError(f"{run}: has other settings than {runs[0]}")
    questions = read_questions(folder / "data")
    questions = {length: questions[length] for length in LENGTHS}
    right = []
    for run in runs:
        by_length = answers(run, questions, [int(r)])[int(r)]
        right.append(sum(by_length.values()) / len(by_length))
    return {
        "attempt": number,
        "flops": [flops_of(of_run) for of_run in trainings],
        "r": int(r),
        "right": right,
        "data": digest_of(sorted(path for path in (folder / "data").rglob("*") if path.is_file())),
        "parent": digest_of([Path(find_checkpoint(folder / "parent"), "model.safetensors")]),
        "surgery": read_json(folder / "cut" / "surgery.json"),
        "recipes": recipes[0],
        **provenance(),
    }


def keep(found):
    """Add an attempt to records.jsonl. Raises UserError if its number is not the next one."""
    following = len(RECORDS.read_text().splitlines()) + 1
    if found["attempt"] != following:
        raise UserError(f"attempt {found['attempt']}: the next one in {RECORDS} is {following}")
    with open(RECORDS, "a") as file:
        print(json.dumps(found), file=file)


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", action="store_true", help="add the attempt to records.jsonl")
    args = parser.parse_args()
    found = score(args.folder)
    mean, error = mean_se(found["right"])
    verdict = "counts" if mean - 2 * error >= MARK else "does not count"
    flops, _ = mean_se(found["flops"])
    print(f"| {found['attempt']} | {flops / 1e12:.2f} | {percent(found['right'])} | {found['r']} |")
    print(f"mean minus two standard errors: {mean - 2 * error:.1%}, so it {verdict} "
          f"(mark: {MARK:.0%})")
    if args.keep:
        keep(found)


if __name__ == "__main__":
    cli(main)
