"""
Run the study: train the models of its items and measure them.

    python runs/study/run.py                       all items
    python runs/study/run.py parents curriculum    some items
    python runs/study/run.py --quick               every training for 4 updates, too short to learn

PROTOCOL.md beside this file says what is compared, and how. Models go to out/study/TASK/SEED, and
measurements to results/ITEM.json beside this file, with the commands that made each model. A model
whose measurements are in that file is not trained again, unless its commands have changed. A model
that several items need is trained once, and a training that was killed resumes.
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
    """A way of training: config/tiny_task.toml with the settings of RECIPES, changed by `flags`."""
    start: str = "heal"      # the model that it starts from, a key of STARTS
    flags: dict = {}         # settings of train.py, such as {"backprop_depth": 8}
    rates: tuple = (0.01,)   # learning rates; if there are several, trials choose one
    budget: str = "flops"    # the recipe's "flops" or "tokens", or a "third" of its FLOPs


class Item(NamedTuple):
    """A question of the study."""
    task: str             # "stories" or "s5"
    arms: dict            # {label: Arm}; the others are compared with the first
    far: bool = False     # whether to measure at each r of FAR, too


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
    "s5_parents": Item("s5", PARENTS),
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
    """
    The trainings and measurements of all items. quick: every training makes 4 updates, in a folder
    of its own.

    The model of an arm takes several commands: pretraining, surgery, healing and the task. They are
    passed around as [(folder, command), ...], in order, where a command is a list of words.
    """

    def __init__(self, quick=False):
        self.quick = quick
        self.folder = Path("out/study-quick" if quick else "out/study")
        self.results = self.folder / "results" if quick else HERE / "results"
        self.writing = threading.Lock()
        self.locks = {}   # {folder: held while its model is made}
        self.made = set()  # folders whose models are complete
        # Training is faster in bfloat16 on an AMD EPYC, and slower on Intel processors without AMX
        # (runs/README.md).
        cpu = Path("/proc/cpuinfo").read_text()
        slow = "GenuineIntel" in cpu and "amx_bf16" not in cpu
        self.dtype = "bfloat16" if "bf16" in cpu and not slow else "float32"

    def corpus(self, task):
        """The folder of a task's data."""
        return self.folder / task / "data"

    def make_corpus(self, task):
        """Make a task's data, unless they are there."""
        corpus = self.corpus(task)
        rows = ["--rows=8000"] if self.quick else []
        execute(corpus, ["runs/tiny_corpus.py", f"--out={corpus}", f"--task={task}", *rows])

    def training(self, task, seed, kind, flags):
        """
        The flags of train.py for a stage of training. kind: "pretrain", "heal" or "task", which has
        the settings of config/tiny_KIND.toml. flags: settings that override them.
        """
        settings = {
            "config": f"config/tiny_{kind}.toml",
            "data": self.corpus(task) / ("task" if kind == "task" else "pretrain"),
            "seed": seed,
        }
        if kind == "task":
            settings |= RECIPES[task]
        else:
            settings["context"] = PRETRAINING[task]["context"]
        settings |= {
            "eval_every": 100_000,  # at the beginning and at the end only
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
        """training_flops() of a stage. The model that it starts from need not exist yet."""
        flags = {**flags, **SIZES[start], "init_from": "", "out_dir": "unused"}
        return training_flops(read_settings(self.training(task, seed, kind, flags)))

    def spent(self, task, seed, arm, updates):
        """Training FLOPs since surgery of an arm that makes `updates` updates, healing included."""
        flops = self.cost(task, seed, "task", arm.start, {**arm.flags, "updates": updates})
        if arm.start.startswith("heal"):
            flops += self.cost(task, seed, "heal", "cut", {})
        return flops

    def updates(self, task, seed, arm):
        """The number of updates that an arm's budget pays for."""
        recipe = RECIPES[task]
        if arm.budget == "tokens":
            tokens_per_update = recipe["batch_size"] * recipe["context"]
            tokens = recipe["updates"] * tokens_per_update
            tokens += HEALING["updates"] * HEALING["batch_size"] * PRETRAINING[task]["context"]
            return round(tokens / tokens_per_update)
        budget = self.spent(task, seed, Arm(), recipe["updates"])
        if arm.budget == "third":
            budget /= 3

        def spent(updates):
            return self.spent(task, seed, arm, updates)

        return bisect.bisect(range(1, 10_000), budget, key=spent)

    def commands(self, task, seed, arm, rate):
        """The commands that make an arm's model from the corpus, at a learning rate."""
        steps = self.commands_of_start(task, seed, arm.start)
        start, _ = steps[-1]
        name = f"{arm.start}-{arm.budget}-lr{rate}"
        for key, value in arm.flags.items():
            name += f"-{key}{value}"
        folder = self.folder / task / str(seed) / re.sub(r"[^\w.-]", "_", name)
        flags = {**arm.flags, "lr": rate, "updates": self.updates(task, seed, arm)}
        command = ["train.py", f"--init_from={start}", f"--out_dir={folder}",
                   *self.training(task, seed, "task", flags)]
        return [*steps, (folder, command)]

    def commands_of_start(self, task, seed, start):
        """The commands that make a model of STARTS."""
        kind, before, flags = STARTS[start]
        folder = self.folder / task / str(seed) / start
        steps = []
        source = ""
        if before:
            steps = self.commands_of_start(task, seed, before)
            source, _ = steps[-1]
        if kind == "surgery":
            flags = [f"--{key}={value}" for key, value in flags.items()]
            command = ["surgery.py", source, folder, "--shape=1,2,1", *flags]
        else:
            command = ["train.py", f"--init_from={source}", f"--out_dir={folder}",
                       *self.training(task, seed, kind, flags)]
        return [*steps, (folder, command)]

    def make(self, folder, command):
        """Run the command that makes a folder, once. train.py resumes, or sees that it is done."""
        script = command[0]
        with self.locks.setdefault(folder, threading.Lock()):
            if folder in self.made:
                return
            if script == "train.py":
                execute(folder, [*command, f"--dtype={self.dtype}"])
            elif not folder.exists():
                execute(folder, command)
            self.made.add(folder)

    # ------------------------------------------------------------------------ trials and runs

    def trial(self, name, label, rate):
        """
        Train an arm of an item at a learning rate, on TUNING_SEED, unless the item's file has it.
        Returns its validation as (accuracy, -loss), where higher is better.
        """
        item = ITEMS[name]
        steps = self.commands(item.task, TUNING_SEED, item.arms[label], rate)
        folder, command = steps[-1]
        known = self.read(name, "trials").get((label, rate))
        if known and known["command"] == as_text(command):
            return known["accuracy"], -known["loss"]
        for step in steps:
            self.make(*step)
        last_line = (folder / "log.jsonl").read_text().splitlines()[-1]
        validation = json.loads(last_line)
        (loss,) = validation["val"].values()
        (accuracy,) = validation["accuracy"].values()
        self.write(name, "trials", {
            "arm": label,
            "rate": rate,
            "accuracy": accuracy,
            "loss": loss,
            "command": as_text(command),
        })
        return accuracy, -loss

    def choose_rate(self, name, label):
        """
        Returns an arm's learning rate with the highest validation accuracy (of equals, with the
        lowest loss). While the best rate is the smallest or the largest so far, tries half or
        double of it, too.
        """
        rates = sorted(ITEMS[name].arms[label].rates)
        if len(rates) == 1:
            return rates[0]
        with self.locks.setdefault((name, label), threading.Lock()):
            scores = {rate: self.trial(name, label, rate) for rate in rates}
            while True:
                best = max(scores, key=scores.get)
                if best == min(scores):
                    further = best / 2
                elif best == max(scores):
                    further = 2 * best
                else:
                    return best
                if self.quick:
                    return best
                scores[further] = self.trial(name, label, further)

    def run(self, name, label, seed):
        """
        Train and measure the model of an arm and a seed, unless the item's file has it. Returns
        what was done, in words.
        """
        began = time.time()
        item = ITEMS[name]
        arm = item.arms[label]
        rate = self.choose_rate(name, label)
        steps = self.commands(item.task, seed, arm, rate)
        commands = [as_text(command) for _, command in steps]
        known = self.read(name, "runs").get((label, seed))
        if known and known["commands"] == commands:
            return "already measured"
        for step in steps:
            self.make(*step)
        folder, _ = steps[-1]
        run = {"arm": label, "seed": seed, "rate": rate, "commands": commands}
        run |= measure(folder, self.corpus(item.task))
        run["flops"] = self.spent(item.task, seed, arm, run["updates"])
        run["dtype"] = self.dtype
        if item.far:
            run["far"] = far(folder, self.corpus(item.task))
        self.write(name, "runs", run)
        return f"{time.time() - began:.0f} s"

    # An item's file has two lists, "trials" and "runs", with a line for each entry.
    KEYS = {"trials": ("arm", "rate"), "runs": ("arm", "seed")}

    def read(self, name, part):
        """
        Read the "trials" or "runs" of an item's file, as {(arm, rate or seed): entry}. Entries of
        another design do not count.
        """
        path = self.results / f"{name}.json"
        found = read_json(path) if path.exists() else {}
        if found.get("design") != DESIGN:
            return {}
        first, second = self.KEYS[part]
        return {(entry[first], entry[second]): entry for entry in found[part]}

    def write(self, name, part, entry):
        """Add an entry to the "trials" or "runs" of an item's file."""
        item = ITEMS[name]
        head = {
            "task": item.task,
            "design": DESIGN,
            "command": f"python runs/study/run.py {name}",
            "arms": list(item.arms),
        }
        with self.writing:
            text = json.dumps(head).removesuffix("}")
            for list_name, (first, second) in self.KEYS.items():
                entries = self.read(name, list_name)
                if list_name == part:
                    entries[entry[first], entry[second]] = entry
                lines = [json.dumps(entries[key]) for key in sorted(entries)]
                text += f', "{list_name}": [\n' + ",\n".join(lines) + "\n]"
            self.results.mkdir(parents=True, exist_ok=True)
            with write_atomically(self.results / f"{name}.json") as new:
                new.write_text(text + "}\n")


def as_text(command):
    """A command as one would type it."""
    return shlex.join(["python", *map(str, command)])


def execute(folder, command):
    """
    Run a Python command on one thread. Its output goes to FOLDER.log. Raises UserError, with the
    last line of the output, if it fails.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = Path(f"{folder}.log")
    with open(log, "ab") as file:
        command = [sys.executable, *map(str, command)]
        threads = os.environ | {"OMP_NUM_THREADS": "1"}  # small matrices gain little from a second
        done = subprocess.run(command, stdout=file, stderr=file, cwd=ROOT, env=threads)
    if done.returncode:
        raise UserError(f"{log}: {log.read_text().splitlines()[-1]}")


# ---------------------------------------------------------------------------- measures

def measure(folder, corpus):
    """What a model answers, the number of its updates, and its provenance()."""
    progress = read_json(Path(find_checkpoint(folder), "train.json"))
    right = answers(folder, read_questions(corpus), STEPS)
    return {"updates": progress["update"], "right": right, **provenance()}


def provenance():
    """Commit, torch, processor and date of today's measurements."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    cpu = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "commit": commit,
        "torch": torch.__version__,
        "cpu": cpu and cpu[1],
        "date": str(datetime.date.today()),
    }


def read_questions(corpus):
    """Read a corpus's tests as {length: [{"question": ..., "answer": ...}, ...]}."""
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
    """Returns {r: {length: share of right answers}}."""
    found = {}
    for length, r, right, _ in trajectories(folder, questions, steps):
        found.setdefault(r, {})[length] = right.double().mean().item()
    return found


def far(folder, corpus):
    """
    Ask the questions of 12 sentences far beyond the r of training. Returns {r: {12: share of right
    answers}} for each r of FAR, and {"moved": {12: move}}, the median move of the state behind an
    answer in the last recurrence, relative to its size.
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
        say(f"{minutes:.0f} min: {', '.join(map(str, arguments))}: {done}")

    pool = ThreadPoolExecutor(args.jobs)

    def submit_trials(name):
        return [pool.submit(attempt, study.choose_rate, name, label)
                for label in ITEMS[name].arms]

    try:
        # The trials of the next item are queued before the runs of this one, so that no core has to
        # wait for a learning rate.
        trials = submit_trials(names[0])
        for name, next_name in zip(names, [*names[1:], None]):
            next_trials = submit_trials(next_name) if next_name else []
            wait(trials)
            for seed in SEEDS:
                for label in ITEMS[name].arms:
                    pool.submit(attempt, study.run, name, label, seed)
            trials = next_trials
        pool.shutdown()
    finally:  # after Ctrl-C, nothing new begins
        pool.shutdown(cancel_futures=True)
    if failed:
        raise UserError(f"{failed} failed; the same command tries them again")
    if not args.quick:
        report.remake()


if __name__ == "__main__":
    cli(main)
