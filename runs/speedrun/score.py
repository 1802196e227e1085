"""
Print what runs of the speedrun cost and answer:

    python runs/speedrun/score.py out/speedrun/NAME

The folder holds a run of each seed, 0, 1 and so on. See README.md for the rules.
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


def answered(folder):
    """{r: share of the unseen answers that are right} after the last update."""
    log = folder / "log.jsonl"
    last = json.loads(log.read_text().splitlines()[-1]) if log.exists() else {}
    if "accuracy" not in last:
        raise UserError(f"{folder}: is not done: the same command goes on")
    return last["accuracy"]


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    seeds = sorted(folder.glob("[0-9]*"))
    if not seeds:
        raise UserError(f"{folder}: holds no runs: bash runs/speedrun.sh makes them")
    right = [answered(seed) for seed in seeds]
    flops = [flops_of(seed) for seed in seeds]
    model = RecurrentLM.load(find_checkpoint(seeds[0]))
    print(f"{folder.name}, seeds {', '.join(seed.name for seed in seeds)}: TFLOPs of training, % of "
          "answers, r, MFLOPs of a token at test time")
    for r in right[0]:
        answers = percent([accuracy[r] for accuracy in right])
        forward = model.flops_per_token((0, int(r))) / 3e6
        print(f"| {cell(flops, 2, 1e-12)} | {answers} | {r} | {forward:.2f} |")


if __name__ == "__main__":
    cli(main)
