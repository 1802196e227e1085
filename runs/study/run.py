"""
Run the study: train the models of its items and measure them.

    python runs/study/run.py                       all items
    python runs/study/run.py parents curriculum    some items
    python runs/study/run.py --quick               every training for 4 updates, too short to learn

PROTOCOL.md beside this file says what is compared, and how. Models go to
out/study/TASK/SEED, and what was measured to results/ITEM.json beside this file, with the commands
that made each model. A model that is in that file, made by the same commands, is not trained
again, not even on a machine that has none of the models. A model that several items need is trained
once, and one that was killed resumes from its checkpoint.
"""
import bisect
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]
import torch

import report
from common import Parser, UserError, cli, positive, read_json, say, write_atomically
from data import Tokenizer
from model import RecurrentLM, find_checkpoint
from train import choose_trained, make_optimizer, read_settings, run_config, run_flops

DESIGN = 4                      # of corpus, budgets and measures; a table never mixes two designs
SEEDS = 20, 21, 22, 23, 24      # of all comparisons
TUNING_SEED = 100               # of the trials that choose a learning rate
STEPS = [1, 2, 4, 8, 16, 32]    # r at which every model is asked
FAR = [32, 64, 128, 255, 256]   # r of models that are asked far beyond it


# ---------------------------------------------------------------------------- what is compared

class Arm(NamedTuple):
    """A way of training: config/tiny_task.toml, the settings of the task (RECIPES), and `flags`."""
    start: str = "heal"      # the model that it starts from, a key of STARTS
    flags: dict = {}
    rates: tuple = (0.01,)   # learning rates, of which trials choose one if there are several
    budget: str = "flops"    # FLOPs of the recipe, its "tokens", or a "third" of its FLOPs


class Item(NamedTuple):
    """A question of the study."""
    task: str             # of the corpus
    arms: dict            # {label: Arm}; the first is what the others are compared with
    far: bool = False     # whether to ask at an r of FAR, too


AROUND = 0.005, 0.01, 0.02   # rates around the recipe's
RECIPES = {
    "stories": {"updates": 400, "batch_size": 64, "micro_batch": 64, "context": 39},
    "s5": {"updates": 1700, "batch_size": 32, "micro_batch": 32, "context": 38},
}
HEALING = {"updates": 100, "batch_size": 64}  # config/tiny_heal.toml
PRETRAINING = {
    "stories": {"updates": 350, "context": 50},
    "s5": {"updates": 700, "context": 40},
}
STARTS = {  # {name: (kind of command, the model before it, flags)}
    "pretrain": ("pretrain", "", {}),
    "deep_pretrain": ("pretrain", "", {"n_prelude": 18}),  # as deep as the loop is at r = 8
    "cut": ("surgery", "pretrain", {}),
    "heal": ("heal", "cut", {}),
    "cut_torch": ("surgery", "pretrain", {"adapter_init": "torch"}),
    "heal_torch": ("heal", "cut_torch", {}),
}
SIZES = {  # layers of the models that a start leads to
    "pretrain": {"n_prelude": 6},
    "deep_pretrain": {"n_prelude": 18},
    "cut": {"n_prelude": 1, "n_core": 2, "n_coda": 1},
    "heal": {"n_prelude": 1, "n_core": 2, "n_coda": 1},
    "heal_torch": {"n_prelude": 1, "n_core": 2, "n_coda": 1},
}
PARENTS = {
    "the loop": Arm(),
    "parent, equal tokens": Arm("pretrain", rates=AROUND, budget="tokens"),
    "parent, equal FLOPs": Arm("pretrain", rates=AROUND),
    "untied parent of 18 layers, equal FLOPs": Arm("deep_pretrain", rates=AROUND),
}

S5_PARENTS = {label: PARENTS[label] for label in ("the loop", "parent, equal FLOPs")}


def truncation(budget):
    """The arms of the items about backprop depth and adapter, each at its best of three rates."""
    arms = {"k = 4": Arm(rates=AROUND, budget=budget)}
    for k in (1, 2, 8):
        arms[f"k = {k}"] = Arm(flags={"backprop_depth": k}, rates=AROUND, budget=budget)
    arms["k = 4, adapter from torch's init"] = Arm("heal_torch", rates=AROUND, budget=budget)
    return arms


ITEMS = {
    "parents": Item("stories", PARENTS),
    "recurrence": Item("stories", {
        "mean r = 8": Arm(),
        "mean r = 4": Arm(flags={"mean_recurrence": 4}),
        "mean r = 16": Arm(flags={"mean_recurrence": 16}),
        "mean r = 32": Arm(flags={"mean_recurrence": 32}),
    }, far=True),
    "curriculum": Item("stories", {
        "linear, 50%": Arm(),
        "none": Arm(flags={"curriculum": "none"}),
        "linear, 25%": Arm(flags={"curriculum_warmup": 0.25}),
        "linear, 100%": Arm(flags={"curriculum_warmup": 1}),
        "1-sqrt, 75%": Arm(flags={"curriculum": "1-sqrt", "curriculum_warmup": 0.75}),
    }),
    "s5_parents": Item("s5", S5_PARENTS),
    "truncation_third": Item("stories", truncation("third")),
    "truncation": Item("stories", truncation("flops")),
    "rows": Item("stories", {
        f"{rows} rows, not healed": Arm("cut", {"batch_size": rows, "micro_batch": rows}, AROUND)
        for rows in (64, 16, 32, 128)
    }),
    "optimizer": Item("stories", {
        "muon": Arm(rates=AROUND),
        "adamw": Arm(flags={"optimizer": "adamw"}, rates=(0.001, 0.002, 0.004)),
    }),
    "parts": Item("stories", {
        "everything": Arm(rates=AROUND),
        "core and adapter": Arm(flags={"train": "core|adapter"}, rates=AROUND),
    }),
}


# ---------------------------------------------------------------------------- budgets

def newton_schulz_flops(settings, model):
    """FLOPs of Muon's five Newton-Schulz steps in an update of a model (muon.py)."""
    flops = 0
    for piece in make_optimizer(settings, model, rank=0, world=1).pieces:
        if piece.rule == "muon":
            for rows in piece.splits:
                small, large = sorted((rows, piece.weight.shape[1]))
                flops += 5 * (4 * small**2 * large + 2 * small**3)
    return flops


def training_flops(settings):
    """
    All FLOPs that a training executes in products and attention: with the recurrences that it
    draws, adapter, head and optimizer, and without validation.
    """
    model = RecurrentLM.empty(run_config(settings))
    choose_trained(settings, model)
    updates = settings.updates
    if not model.config.n_core:  # all updates cost the same
        settings = replace(settings, updates=1)
    flops = run_flops(settings, model) / settings.updates
    return updates * (flops + newton_schulz_flops(settings, model))


# ---------------------------------------------------------------------------- trainings

class Study:
    """quick: trainings are too short to learn, in a folder of their own."""

    def __init__(self, quick=False):
        self.quick = quick
        self.folder = Path("out/study-quick" if quick else "out/study")
        self.results = self.folder / "results" if quick else HERE / "results"
        self.writing = threading.Lock()
        self.locks = {}  # {folder: held while its model is made}
        self.made = set()
        self.dtype = "float32"
        cpu = Path("/proc/cpuinfo").read_text()
        slow = "GenuineIntel" in cpu and "amx_bf16" not in cpu  # see runs/README.md
        if "bf16" in cpu and not slow:
            self.dtype = "bfloat16"  # of training: a third faster on an AMD EPYC

    def corpus(self, task):
        return self.folder / task / "data"

    def make_corpus(self, task):
        rows = ["--rows=8000"] if self.quick else []
        corpus = self.corpus(task)
        execute(corpus, ["runs/tiny_corpus.py", f"--out={corpus}", f"--task={task}", *rows])

    def training(self, task, seed, kind, flags):
        """The flags of train.py. kind: the config, config/tiny_KIND.toml. flags win."""
        settings = {
            "config": f"config/tiny_{kind}.toml",
            "data": self.corpus(task) / ("task" if kind == "task" else "pretrain"),
            "seed": seed,
            **(RECIPES[task] if kind == "task" else {"context": PRETRAINING[task]["context"]}),
            "eval_every": 100_000,
            "eval_steps": 32,
            "eval_rows": 512,
        }
        if kind == "pretrain":
            settings["updates"] = PRETRAINING[task]["updates"]
        settings |= flags
        if self.quick:
            settings |= {"updates": 4, "compile": "false"}
        return [f"--{key}={value}" for key, value in settings.items()]

    def cost(self, task, seed, kind, start, flags):
        """training_flops() of a training before there are any files of the model it starts from."""
        flags = {**flags, **SIZES[start], "init_from": "", "out_dir": "unused"}
        return training_flops(read_settings(self.training(task, seed, kind, flags)))

    def spent(self, task, seed, arm, updates):
        """Training FLOPs since surgery of an arm that makes so many updates, with its healing."""
        flops = self.cost(task, seed, "task", arm.start, {**arm.flags, "updates": updates})
        if arm.start.startswith("heal"):
            flops += self.cost(task, seed, "heal", "cut", {})
        return flops

    def updates(self, task, seed, arm):
        """How many updates an arm makes: as many as its budget pays for."""
        recipe = RECIPES[task]
        if arm.budget == "tokens":
            healing = {**HEALING, "context": PRETRAINING[task]["context"]}
            tokens = sum(x["updates"] * x["batch_size"] * x["context"] for x in (recipe, healing))
            return round(tokens / recipe["batch_size"] / recipe["context"])
        budget = self.spent(task, seed, Arm(), recipe["updates"])
        if arm.budget == "third":
            budget /= 3
        return bisect.bisect(range(1, 10_000), budget,
                             key=lambda updates: self.spent(task, seed, arm, updates))

    def commands(self, task, seed, arm, rate):
        """[(folder, command), ...] that make an arm's model from the corpus, in order."""
        steps = self.commands_of_start(task, seed, arm.start)
        name = "-".join([arm.start, arm.budget, f"lr{rate}",
                         *(f"{key}{value}" for key, value in arm.flags.items())])
        folder = self.folder / task / str(seed) / re.sub(r"[^\w.-]", "_", name)
        flags = {**arm.flags, "lr": rate, "updates": self.updates(task, seed, arm)}
        before, _ = steps[-1]
        command = ["train.py", f"--init_from={before}", f"--out_dir={folder}",
                   *self.training(task, seed, "task", flags)]
        return [*steps, (folder, command)]

    def commands_of_start(self, task, seed, start):
        """The same for a model of STARTS."""
        kind, before, flags = STARTS[start]
        folder = self.folder / task / str(seed) / start
        steps = self.commands_of_start(task, seed, before) if before else []
        source = steps[-1][0] if steps else ""
        if kind == "surgery":
            flags = [f"--{key}={value}" for key, value in flags.items()]
            command = ["surgery.py", source, folder, "--shape=1,2,1", *flags]
        else:
            command = ["train.py", f"--init_from={source}", f"--out_dir={folder}",
                       *self.training(task, seed, kind, flags)]
        return [*steps, (folder, command)]

    def make(self, folder, command):
        """Run a command once in this process. train.py itself knows what is there already."""
        with self.locks.setdefault(folder, threading.Lock()):
            cut = command[0] == "surgery.py" and folder.exists()
            if folder not in self.made and not cut:
                if command[0] == "train.py":
                    command = [*command, f"--dtype={self.dtype}"]
                execute(folder, command)
            self.made.add(folder)

    # ------------------------------------------------------------------------ trials and runs

    def trial(self, name, label, rate):
        """The validation of an arm at a rate, as ("accuracy", "loss"), of TUNING_SEED."""
        item = ITEMS[name]
        arm = item.arms[label]
        steps = self.commands(item.task, TUNING_SEED, arm, rate)
        folder, command = steps[-1]
        command = shlex.join(["python", *map(str, command)])
        there = self.read(name, "trials", ("arm", "rate")).get((label, rate))
        if there and there["command"] == command:
            return there["accuracy"], -there["loss"]
        for step in steps:
            self.make(*step)
        last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
        (loss,) = last["val"].values()
        (accuracy,) = last["accuracy"].values()
        trial = {"arm": label, "rate": rate, "accuracy": accuracy, "loss": loss,
                 "command": command}
        self.write(name, "trials", trial, ("arm", "rate"))
        return accuracy, -loss

    def choose_rate(self, name, label):
        """
        The rate of the highest validation accuracy (of equals, that of the lower loss). While the
        best rate is the smallest or the largest of those tried, half or double of it is tried, too.
        """
        rates = sorted(ITEMS[name].arms[label].rates)
        if len(rates) == 1:
            return rates[0]
        with self.locks.setdefault((name, label), threading.Lock()):
            scores = {rate: self.trial(name, label, rate) for rate in rates}
            while True:
                best = max(scores, key=scores.get)
                further = best / 2 if best == min(scores) else 2 * best
                if best not in (min(scores), max(scores)) or self.quick:
                    return best
                scores[further] = self.trial(name, label, further)

    def run(self, name, label, seed):
        """Train and measure a model of an item, unless its file has it. Returns what was done."""
        began = time.time()
        item = ITEMS[name]
        rate = self.choose_rate(name, label)
        steps = self.commands(item.task, seed, item.arms[label], rate)
        commands = [shlex.join(["python", *map(str, command)]) for _, command in steps]
        words = f"{name}, {label}, seed {seed}"
        there = self.read(name, "runs", ("arm", "seed")).get((label, seed))
        if there and there["commands"] == commands:
            return f"{words}: is there"
        for step in steps:
            self.make(*step)
        folder = steps[-1][0]
        run = {"arm": label, "seed": seed, "rate": rate, "commands": commands}
        run |= describe(folder, self.corpus(item.task))
        run["flops"] = self.spent(item.task, seed, item.arms[label], run["updates"])
        run["dtype"] = self.dtype
        if item.far:
            run["far"] = far(folder, self.corpus(item.task))
        self.write(name, "runs", run, ("arm", "seed"))
        return f"{words}: {time.time() - began:.0f} s"

    def read(self, name, part, keys):
        """{keys: entry} of the "runs" or "trials" of an item's file, if it is of this design."""
        path = self.results / f"{name}.json"
        found = read_json(path) if path.exists() else {}
        entries = found.get(part, []) if found.get("design") == DESIGN else []
        return {tuple(entry[key] for key in keys): entry for entry in entries}

    def write(self, name, part, entry, keys):
        """Add an entry to the "runs" or "trials" of an item's file, which has a line for each."""
        item = ITEMS[name]
        head = {
            "task": item.task,
            "design": DESIGN,
            "command": f"python runs/study/run.py {name}",
            "arms": list(item.arms),
        }
        with self.writing:
            parts = {
                "trials": self.read(name, "trials", ("arm", "rate")),
                "runs": self.read(name, "runs", ("arm", "seed")),
            }
            parts[part][tuple(entry[key] for key in keys)] = entry
            text = json.dumps(head)[:-1]
            for key, entries in parts.items():
                lines = ",\n".join(json.dumps(entries[key]) for key in sorted(entries))
                text += f', "{key}": [\n{lines}\n]'
            self.results.mkdir(parents=True, exist_ok=True)
            with write_atomically(self.results / f"{name}.json") as new:
                new.write_text(text + "}\n")


def execute(folder, command):
    """Run Python. What it prints goes to FOLDER.log, its last line into the UserError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = Path(f"{folder}.log")
    with open(log, "ab") as file:
        command = [sys.executable, *map(str, command)]
        threads = os.environ | {"OMP_NUM_THREADS": "1"}  # small matrices gain little from a second
        done = subprocess.run(command, stdout=file, stderr=file, cwd=ROOT, env=threads)
    if done.returncode:
        raise UserError(f"{log}: {log.read_text().splitlines()[-1]}")


# ---------------------------------------------------------------------------- measures

def describe(folder, corpus):
    """What is known of a trained model: its answers, its training, and where that ran."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    cpu = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    progress = read_json(Path(find_checkpoint(folder), "train.json"))
    return {
        "updates": progress["update"],
        "right": answers(folder, read_questions(corpus), STEPS),
        "commit": commit,
        "torch": torch.__version__,
        "cpu": cpu and cpu[1],
        "date": str(datetime.date.today()),
    }


def read_questions(corpus):
    """{length: [{"question": ..., "answer": ...}, ...]} of the corpus's tests."""
    found = {}
    for name in ("test.jsonl", "test18.jsonl"):
        for line in (corpus / name).read_text().splitlines():
            question = json.loads(line)
            found.setdefault(question["difficulty"], []).append(question)
    return dict(sorted(found.items()))


@torch.no_grad()
def trajectories(folder, questions, steps):
    """
    Yields (length, r, right, state): whether a model in float32 answers each question of a length
    (B,) bool, and the state behind its answer (B, C). The answer is the likeliest token after the
    question, as in eval_gsm8k.py --template plain. An ordinary model has one r, 0.
    """
    model = RecurrentLM.load(folder, dtype=torch.float32)
    tokenizer = Tokenizer.load(model.folder)
    for length, asked in questions.items():
        idx = torch.tensor([tokenizer.encode(x["question"], bos=True) for x in asked])
        answer = torch.tensor([tokenizer.encode(x["answer"])[-1] for x in asked])
        state = model.initial_state(1, idx.shape[1], seed=0).expand(len(idx), -1, -1)
        for r, s in model.trajectory(idx, steps if model.config.n_core else [0], state):
            likeliest = model.finish(s)[:, -1].argmax(-1)
            yield length, r, likeliest == answer, s[:, -1]


def answers(folder, questions, steps):
    """{r: {length: share of right answers}}"""
    found = {}
    for length, r, right, _ in trajectories(folder, questions, steps):
        found.setdefault(r, {})[length] = right.double().mean().item()
    return found


def far(folder, corpus):
    """
    Far beyond the r of training, for the longest questions of test.jsonl (12 sentences): {r: {length:
    share of right answers}} for each r of FAR. And {"moved": {length: move}}, the median move of the
    state behind an answer in the last recurrence, relative to its size.
    """
    questions = {12: read_questions(corpus)[12]}
    found = {"moved": {}}
    before = None
    for length, r, right, state in trajectories(folder, questions, FAR):
        found.setdefault(r, {})[length] = right.double().mean().item()
        if r == FAR[-1]:
            move = (state - before).norm(dim=-1) / state.norm(dim=-1)
            found["moved"][length] = move.median().item()
        before = state
    return found


# ---------------------------------------------------------------------------- the command

def parse_args():
    parser = Parser(description=__doc__)
    flag = parser.add_argument
    flag("items", nargs="*", metavar="ITEM", help=f"default: all, {', '.join(ITEMS)}")
    flag("--quick", action="store_true", help="4 updates per training, to see that all of it works")
    flag("--jobs", type=positive, default=2, help="trainings at a time, one thread each (2)")
    args = parser.parse_args()
    if unknown := set(args.items) - set(ITEMS):
        parser.error(f"no such item: {', '.join(unknown)}")
    return args


def main():
    args = parse_args()
    began = time.time()
    torch.set_num_threads(1)
    study = Study(args.quick)
    names = args.items or list(ITEMS)
    for task in {ITEMS[name].task for name in names}:
        study.make_corpus(task)
    failed = 0

    def attempt(work, *arguments):
        nonlocal failed
        try:
            done = work(*arguments)
        except UserError as e:
            failed += 1
            done = f"error: {e}"
        minutes = (time.time() - began) / 60
        say(f"{minutes:.0f} min: {' '.join(map(str, arguments))}: {done}")

    with ThreadPoolExecutor(args.jobs) as pool:
        def submit_trials(name):
            return [pool.submit(attempt, study.choose_rate, name, label)
                    for label in ITEMS[name].arms]

        # The trials of the next item stand behind those of this one, so that no core waits for a
        # rate.
        trials = submit_trials(names[0])
        for i, name in enumerate(names):
            upcoming = submit_trials(names[i + 1]) if name != names[-1] else []
            wait(trials)
            for seed in SEEDS:
                for label in ITEMS[name].arms:
                    pool.submit(attempt, study.run, name, label, seed)
            trials = upcoming
    if failed:
        raise UserError(f"{failed} failed; the same command tries them again")
    if not args.quick:
        report.remake()


if __name__ == "__main__":
    cli(main)
