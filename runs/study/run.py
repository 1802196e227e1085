"""
The study: train looped models, their parents and variants of the recipe on five seeds, evaluate
them, and make the tables and the picture in README.md and on the study's page.

    python -m runs.study.run                    # whatever results.jsonl lacks, then the tables
    python -m runs.study.run --experiment rows --seed 20
    python -m runs.study.run --tables           # only the tables and the picture

Models go to out/study/TASK/SEED. Each model's accuracy is a line of results.jsonl beside this file;
to repeat a measurement, delete its line. Commands for different seeds may run at the same time.
"""
import datetime
import json
import math
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from common import Parser, UserError, cli, read_json, say
from model import find_checkpoint
from tools.plot import draw

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

SEEDS = 20, 21, 22, 23, 24
RESULTS = HERE / "results.jsonl"
PAGES = HERE / "README.md", ROOT / "README.md"
STEPS = "1,2,4,8,16,32,64,128,256"  # r at which a model is evaluated
ASKED = {"counts": range(6, 13), "s5": range(9, 13)}  # lengths of the outcome, at r = 32
UNIT = {"counts": "sentences", "s5": "letters"}
TITLE = {"counts": "running counts", "s5": "products of permutations (S5)"}


# ---------------------------------------------------------------------------- what is compared

class Arm(NamedTuple):
    """A run on the task: config/tiny_task.toml with the settings of TASKS and these flags."""
    lr: float               # the recipe's, or tuned on another seed (trials.jsonl)
    start: str = "heal"     # the model that it starts from, a key of STARTS
    updates: int = 0        # 0: as many as cost the same FLOPs as the recipe
    flags: str = ""         # of train.py


TASKS = {  # {task: (flags of pretraining, flags of training on the task)}
    "counts": ("--updates=350 --context=50", "--batch_size=64 --micro_batch=64 --context=39"),
    "s5": ("--updates=700 --context=40", "--batch_size=32 --micro_batch=32 --context=38"),
}
STARTS = {  # {model: (the model before it, what is done, flags)}
    "pretrain": ("", "pretrain", ""),
    "deep_pretrain": ("", "pretrain", "--n_prelude=18"),  # as deep as the loop is at r = 8
    "cut": ("pretrain", "surgery", "--shape=1,2,1"),
    "heal": ("cut", "heal", ""),
    "cut_torch": ("pretrain", "surgery", "--shape=1,2,1 --adapter_init=torch"),
    "heal_torch": ("cut_torch", "heal", ""),
}
LOOP = "the loop"
EQUAL_TOKENS = "parent, equal tokens"
EQUAL_FLOPS = "parent, equal FLOPs"
DEEP = "untied parent of 18 layers, equal FLOPs"
EXPERIMENTS = {  # {name: {label: Arm}}; the others are compared with the first
    "counts": {
        LOOP: Arm(0.01, updates=400),
        EQUAL_TOKENS: Arm(0.01, "pretrain", updates=528),
        EQUAL_FLOPS: Arm(0.005, "pretrain"),
        DEEP: Arm(0.04, "deep_pretrain"),
    },
    "s5": {
        LOOP: Arm(0.01, updates=1700),
        EQUAL_TOKENS: Arm(0.02, "pretrain", updates=1911),
        EQUAL_FLOPS: Arm(0.01, "pretrain"),
        DEEP: Arm(0.02, "deep_pretrain"),
    },
    "mean_r": {
        "mean r = 8": Arm(0.01, updates=400),
        "mean r = 4": Arm(0.01, flags="--mean_recurrence=4"),
        "mean r = 16": Arm(0.01, flags="--mean_recurrence=16"),
        "mean r = 32": Arm(0.01, flags="--mean_recurrence=32"),
    },
    "curriculum": {
        "linear, 50%": Arm(0.01, updates=400),
        "none": Arm(0.01, flags="--curriculum=none"),
        "linear, 25%": Arm(0.01, flags="--curriculum_warmup=0.25"),
        "linear, 100%": Arm(0.01, flags="--curriculum_warmup=1"),
        "1-sqrt, 75%": Arm(0.01, flags="--curriculum=1-sqrt --curriculum_warmup=0.75"),
    },
    "backprop": {
        "k = 4": Arm(0.005, updates=400),
        "k = 1": Arm(0.01, flags="--backprop_depth=1"),
        "k = 2": Arm(0.02, flags="--backprop_depth=2"),
        "k = 8": Arm(0.01, flags="--backprop_depth=8"),
        "k = 4, adapter from torch's init": Arm(0.01, "heal_torch", updates=400),
    },
    "third": {  # the same at a third of the recipe's FLOPs
        "k = 4": Arm(0.01, updates=99),
        "k = 1": Arm(0.01, updates=138, flags="--backprop_depth=1"),
        "k = 2": Arm(0.01, updates=120, flags="--backprop_depth=2"),
        "k = 8": Arm(0.04, updates=82, flags="--backprop_depth=8"),
        "k = 4, adapter from torch's init": Arm(0.02, "heal_torch", updates=99),
    },
    "rows": {
        f"{n} rows, not healed": Arm(lr, "cut", flags=f"--batch_size={n} --micro_batch={n}")
        for n, lr in ((64, 0.005), (16, 0.00125), (32, 0.0025), (128, 0.005))
    },
    "optimizer": {
        "muon": Arm(0.005, updates=400),
        "adamw": Arm(0.002, flags="--optimizer=adamw"),
    },
    "trained": {
        "everything": Arm(0.005, updates=400),
        "core and adapter": Arm(0.01, flags="--train=core|adapter"),
    },
}


# ---------------------------------------------------------------------------- trainings

class Training:
    """The commands that make the models of a task and a seed, in out/study/TASK/SEED."""

    def __init__(self, task, seed):
        self.task = task
        self.seed = seed
        self.corpus = f"out/study/{task}/data"
        self.folder = Path(f"out/study/{task}/{seed}")

    def flags(self, kind, start):
        """The flags of train.py for pretraining, healing or the task, from a model's folder."""
        pretraining, training = TASKS[self.task]
        flags = [
            f"--config=config/tiny_{kind}.toml",
            f"--data={self.corpus}/{'task' if kind == 'task' else 'pretrain'}",
            f"--init_from={start}",
            f"--seed={self.seed}",
            "--eval_every=100000",  # at the beginning and at the end only
        ]
        if kind == "heal":
            return [*flags, *pretraining.split()[1:]]  # the config sets the updates
        return flags + (training if kind == "task" else pretraining).split()

    def start(self, name):
        """Make a model of STARTS, unless it is there. Returns its folder."""
        before, kind, flags = STARTS[name]
        source = self.start(before) if before else ""
        folder = self.folder / name
        if kind != "surgery":  # train.py resumes, or has nothing left to do
            execute("train.py", *self.flags(kind, source), *flags.split(), f"--out_dir={folder}")
        elif not folder.exists():
            execute("surgery.py", source, folder, *flags.split())
        return folder

    def arm(self, name, label):
        """Train an arm of an experiment, unless that is done. Returns the folder of the run."""
        arm = EXPERIMENTS[name][label]
        flags = [*self.flags("task", self.start(arm.start)), f"--lr={arm.lr}", *arm.flags.split()]
        folder = self.folder / re.sub(r"\W+", "_", f"{name} {label}")
        updates = arm.updates
        if not updates:
            recipe = f"--flops_of={self.arm(self.task, LOOP)}"
            plan = execute("-m", "tools.plan", *flags, f"--out_dir={folder}", recipe, "--quiet")
            updates = plan.strip()
        execute("train.py", *flags, f"--out_dir={folder}", f"--updates={updates}")
        return folder


def execute(*command):
    """Run a Python command on one thread. Returns its output. UserError if it fails."""
    command = [sys.executable, *map(str, command)]
    threads = os.environ | {"OMP_NUM_THREADS": "1"}  # small matrices gain little from a second
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=threads)
    if done.returncode:
        raise UserError(f"{' '.join(command)} ended with exit code {done.returncode}")
    return done.stdout


def measure(name, label, seed):
    """Train the model of an arm and a seed, and append its accuracy to results.jsonl."""
    task = name if name in TASKS else "counts"
    training = Training(task, seed)
    execute("-m", "runs.tiny_corpus", f"--out={training.corpus}", f"--task={task}")
    run = training.arm(name, label)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=ROOT)
    progress = read_json(Path(find_checkpoint(run), "train.json"))
    right = {}  # {r: {length: share of right answers}}
    for test in ("test", "test18"):
        out = f"{run}/{test}.json"
        execute("eval_gsm8k.py", f"--model={run}", f"--data={training.corpus}/{test}.jsonl",
                f"--steps={STEPS}", f"--out={out}", "--template=plain", "--max_new_tokens=1",
                "--dtype=float32")
        for row in read_json(out)["results"]:
            for length, (share, *_) in row["by_difficulty"].items():
                right.setdefault(row["steps"], {})[length] = share
    entry = {
        "experiment": name,
        "arm": label,
        "seed": seed,
        "lr": EXPERIMENTS[name][label].lr,
        "updates": progress["update"],
        "flops": progress["flops"],
        "commit": commit.strip(),
        "date": str(datetime.date.today()),
        "right": right,
    }
    with open(RESULTS, "a") as file:
        print(json.dumps(entry), file=file)


# ---------------------------------------------------------------------------- statistics

def mean_se(values):
    """The mean and the standard error of one value per seed."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def paired_t_test(differences):
    """
    The two-sided p-value of five paired differences, by Student's t with 4 degrees of freedom,
    whose distribution has a closed form (Abramowitz and Stegun, 26.7.4).
    """
    mean, error = mean_se(differences)
    if error == 0:
        return float(mean == 0)
    angle = math.atan(abs(mean / error) / math.sqrt(4))
    return 1 - math.sin(angle) * (1 + math.cos(angle) ** 2 / 2)


# ---------------------------------------------------------------------------- tables and pictures

def read_results():
    """Read results.jsonl as {experiment: {label: [entry of each seed]}}."""
    found = {name: {label: {} for label in arms} for name, arms in EXPERIMENTS.items()}
    for entry in map(json.loads, RESULTS.read_text().splitlines()):
        found[entry["experiment"]][entry["arm"]][entry["seed"]] = entry
    for arms in found.values():
        for label, by_seed in arms.items():
            arms[label] = [by_seed[seed] for seed in SEEDS if seed in by_seed]
    return found


def right(entry, lengths, r=32):
    """The share of right answers at these lengths. An ordinary model has one depth for every r."""
    at_depth = entry["right"].get("0") or entry["right"][str(r)]
    return statistics.fmean(at_depth[str(length)] for length in lengths)


def percent(values):
    """One share per seed -> "98.7 ± 0.3", in %."""
    mean, error = mean_se(values)
    return f"{round(100 * mean, 1) + 0.0:.1f} ± {100 * error:.1f}"  # + 0.0: not -0.0


def compare(arms, asked):
    """
    Compare arms with the first one, paired by seed. Returns {label: (difference, p)}, where p is
    multiplied by the number of comparisons (Bonferroni's correction).
    """
    first, *others = arms.values()
    found = {}
    for label, entries in list(arms.items())[1:]:
        pairs = zip(first, entries, strict=True)
        differences = [right(b, asked) - right(a, asked) for a, b in pairs]
        found[label] = percent(differences), min(1, len(others) * paired_t_test(differences))
    return found


def main_table(arms, task):
    """The table of the loop, at three r, and its parents. Returns Markdown."""
    asked = ASKED[task]
    lengths = {"counts": [5, 6, 8, 10, 12, 18], "s5": [8, 9, 10, 12, 18]}[task]
    outcome = f"{asked[0]} to {asked[-1]} {UNIT[task]}"
    rows = [["", "updates", "TFLOPs", *map(str, lengths), outcome, "p"]]
    compared = compare(arms, asked)
    for label, entries in arms.items():
        for r in (4, 8, 32) if label == LOOP else (32,):
            difference, p = compared.get(label, ("", None))
            rows.append([
                f"{label}, r = {r}" if label == LOOP else label,
                f"{statistics.fmean(entry['updates'] for entry in entries):,.0f}",
                f"{statistics.fmean(entry['flops'] for entry in entries) / 1e12:.2f}",
                *(percent([right(entry, [n], r) for entry in entries]) for n in lengths),
                percent([right(entry, asked, r) for entry in entries]),
                "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}",
            ])
    return markdown(rows)


def varied_table(results):
    """The table of all other experiments, one row per arm. Returns Markdown."""
    rows = [["experiment", "arm", "learning rate", "updates", "6 to 12 sentences", "18 sentences",
             "beside the first arm", "difference"]]
    for name in list(EXPERIMENTS)[len(TASKS):]:
        compared = compare(results[name], ASKED["counts"])
        for label, entries in results[name].items():
            difference, p = compared.get(label, ("", None))
            verdict = "measurable" if p is not None and p < 0.05 else "not measurable"
            rows.append([
                name,
                label,
                f"{entries[0]['lr']:g}",
                f"{statistics.fmean(entry['updates'] for entry in entries):,.0f}",
                percent([right(entry, ASKED["counts"]) for entry in entries]),
                percent([right(entry, [18]) for entry in entries]),
                difference,
                "" if p is None else f"{verdict} (p = {p:.2f})",
            ])
            name = ""  # only in the first row
    return markdown(rows)


def markdown(rows):
    head, *others = ["| " + " | ".join(row) + " |\n" for row in rows]
    return head + "|" + "---|" * len(rows[0]) + "\n" + "".join(others)


def panel(arms, task):
    """A task's panel of the picture, see tools/plot.py: the loop at several r, and its parents."""
    lengths = [*range(1, 13), 18]
    curves = {}
    for label, entries in arms.items():
        for r in (1, 2, 4, 8, 32) if label == LOOP else (32,):
            curve = f"{label}, r = {r}" if label == LOOP else label
            curves[curve] = [(n, *mean_se([right(x, [n], r) for x in entries])) for n in lengths]
    return {"title": TITLE[task], "x": f"{UNIT[task]} in the question", "y": "accuracy",
            "curves": curves, "ticks": [2, 4, 6, 8, 10, 12, 18],
            "line": (ASKED[task][0] - 1, "longest question\nin training")}


def publish(pages=PAGES):
    """
    Write the tables that pages ask for between <!-- table: NAME --> and <!-- end -->, and draw the
    picture.
    """
    results = read_results()
    tables = {task: main_table(results[task], task) for task in TASKS}
    tables["varied"] = varied_table(results)
    wanted = re.compile(r"(<!-- table: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
    for page in pages:
        text = wanted.sub(lambda found: found[1] + tables[found[2]], page.read_text())
        page.write_text(text)
    draw([panel(results[task], task) for task in TASKS], ROOT / "assets/study.png")


def main():
    parser = Parser(__doc__)
    flag = parser.add_argument
    flag("--experiment", choices=EXPERIMENTS, help="default: all")
    flag("--seed", type=int, choices=SEEDS, help="default: all")
    flag("--tables", action="store_true", help="train nothing")
    args = parser.parse_args()
    for seed in [args.seed] if args.seed else SEEDS:
        for name in [args.experiment] if args.experiment else EXPERIMENTS:
            for label, entries in read_results()[name].items():
                known = any(entry["seed"] == seed for entry in entries)
                if not known and not args.tables:
                    say(f"seed {seed}, {name}: {label}")
                    measure(name, label, seed)
    publish()


if __name__ == "__main__":
    cli(main)
