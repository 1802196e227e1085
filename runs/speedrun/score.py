"""
Print what runs of the speedrun cost and answer:

    python runs/speedrun/score.py out/speedrun/NAME
    python runs/speedrun/score.py out/speedrun/NAME --keep      and add their logs to logs.jsonl

The folder holds a run of each seed, 0, 1 and so on. logs.jsonl has a line for each run: its training
FLOPs, its validations, and loss and gradient norm over the updates. See README.md for the rules.
"""
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parents[1]), str(HERE.parent / "study")]
from common import Parser, UserError, cli, read_json
from model import RecurrentLM, find_checkpoint
from play import training_flops
from study import cell, percent
from train import Settings


def flops_of(folder):
    """Training FLOPs of a run, and of the runs that it started from."""
    checkpoint = Path(find_checkpoint(folder))
    path = checkpoint / "train.json"
    if not path.exists():  # a cut parent
        return 0
    settings = Settings(**read_json(path)["config"])
    flops = training_flops(settings, RecurrentLM.load(checkpoint))
    return flops_of(settings.init_from) + flops


def line_of(name, seed, flops, log):
    """The line of a run in logs.jsonl. log: the entries of its log.jsonl."""
    training = [entry for entry in log if "loss" in entry]
    return {
        "run": name,
        "seed": seed,
        "flops": round(flops),
        "validations": [{key: entry[key] for key in ("update", "val", "accuracy")}
                        for entry in log if "accuracy" in entry],
        "update": [entry["update"] for entry in training],
        "loss": [round(entry["loss"], 4) for entry in training],
        "norm": [round(entry["norm"], 4) for entry in training],
    }


def run_of(folder):
    """The line of a run in its folder. Raises UserError if it has not been validated at its end."""
    path = folder / "log.jsonl"
    log = path.read_text().splitlines() if path.exists() else []
    log = [json.loads(entry) for entry in log]
    if not log or "accuracy" not in log[-1]:
        raise UserError(f"{folder}: is not done: the same command goes on")
    return line_of(folder.parent.name, int(folder.name), flops_of(folder), log)


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", action="store_true", help="add the logs to logs.jsonl")
    args = parser.parse_args()
    folders = sorted(args.folder.glob("[0-9]*"))
    if not folders:
        raise UserError(f"{args.folder}: holds no runs: bash runs/speedrun.sh makes them")
    runs = [run_of(folder) for folder in folders]
    if args.keep:
        with open(HERE / "logs.jsonl", "a") as file:
            for run in runs:
                print(json.dumps(run), file=file)
    seeds = ", ".join(folder.name for folder in folders)
    print(f"{args.folder.name}, seeds {seeds}: TFLOPs of training, % of answers, r, MFLOPs of a "
          "token at test time")
    model = RecurrentLM.load(find_checkpoint(folders[0]))
    flops = cell([run["flops"] for run in runs], 2, 1e-12)
    last = [run["validations"][-1]["accuracy"] for run in runs]
    for r in last[0]:
        answers = percent([accuracy[r] for accuracy in last])
        forward = model.flops_per_token((0, int(r))) / 3e6
        print(f"| {flops} | {answers} | {r} | {forward:.2f} |")


if __name__ == "__main__":
    cli(main)
