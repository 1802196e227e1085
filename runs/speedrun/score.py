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
from run import answers, read_questions, training_flops
from train import Settings

MARK = 0.9             # of the answers, mean minus two standard errors
LENGTHS = range(6, 13)  # sentences of the questions that count


def flops_since_surgery(folder):
    """Training FLOPs of a run and of the run, if any, that it started from."""
    path = Path(find_checkpoint(folder), "train.json")
    if not path.exists():  # the cut parent
        return 0
    settings = Settings(**read_json(path)["config"])
    return flops_since_surgery(settings.init_from) + training_flops(settings)


def last_validation(folder):
    """{r: accuracy} of a finished run. Raises UserError for one that is not finished."""
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    last = json.loads(lines[-1]) if lines else {}
    if "accuracy" not in last or last["update"] == 0:
        raise UserError(f"{folder}: is not finished. `bash runs/speedrun.sh` resumes it")
    return last["accuracy"]


def digest_of(folder):
    """The first 16 hex digits of the SHA-256 of a folder's files, in the order of their names."""
    found = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def score(folder):
    """The line of an attempt in records.jsonl."""
    runs = sorted(folder.glob("seed-*/"))
    if len(runs) != 5:
        raise UserError(f"{folder}: holds {len(runs)} runs instead of 5. `bash runs/speedrun.sh` "
                        "makes them")
    validations = [last_validation(run) for run in runs]
    # Chosen before any test question is asked: the best r in validation, the smallest of equals.
    r = max(validations[0], key=lambda r: (sum(found[r] for found in validations), -int(r)))
    questions = read_questions(folder / "data")
    questions = {length: questions[length] for length in LENGTHS}
    right = []
    for run in runs:
        by_length = answers(run, questions, [int(r)])[int(r)]
        right.append(sum(by_length.values()) / len(by_length))
    return {
        "attempt": folder.name,
        "flops": [flops_since_surgery(run) for run in runs],
        "r": int(r),
        "right": right,
        "data": digest_of(folder / "data"),
        "parent": digest_of(find_checkpoint(folder / "parent")),
        "settings": read_json(Path(find_checkpoint(runs[0]), "train.json"))["config"],
    }


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
        with open(HERE / "records.jsonl", "a") as file:
            print(json.dumps(found), file=file)


if __name__ == "__main__":
    cli(main)
