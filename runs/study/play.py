"""
Play the study: train an item's models, measure them, and draw its picture and the pages' tables.

    python runs/study/play.py                      all items
    python runs/study/play.py curriculum parts     some items
    python runs/study/play.py --quick              every run for 4 updates, too short to learn
    python runs/study/play.py --jobs 8             on as many cores; two runs at a time otherwise

Models go to out/study/TASK/SEED/RUN. What was measured goes to results/ITEM.json beside this file,
with the commands that made each model. A run that is in that file, made by the same commands, is
not played again, not even on a machine that has none of the models. A model that several items need
is trained once, a run that was killed continues from its checkpoint, and one that fails does not
keep others from running.
"""
import bisect
import datetime
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
import torch

import study
from common import Parser, UserError, cli, positive, read_json, whole
from data import Dataset
from model import IGNORE, RecurrentLM, find_checkpoint
from train import draws_of, read_settings, run_config


# ---------------------------------------------------------------------------- what is asked

class Run(NamedTuple):
    """
    Training by config/tiny_SCRIPT.toml, or "surgery". start: the run whose weights it takes, ""
    for random ones. flags: of train.py or surgery.py, and one of our own: equal=RUN, as many updates
    as cost what that run has cost since surgery (if this one starts from random weights, with that
    run's pretraining).
    """
    name: str
    script: str
    start: str
    flags: dict


class Item(NamedTuple):
    """A question of the study. Validations are compared at recurrence `at`."""
    task: str         # of the embedded corpus
    table: str        # of study.py; it decides what is measured, see MEASURES
    runs: dict        # label: Run; the first is what the others are compared with
    at: int = 8
    seeds: int = 100  # at most


def task(name, start="heal", **flags):
    return Run(name, "task", start, flags)


def healed(name, **flags):
    """Another cut of the parent, and its healing."""
    return (Run(f"cut{name}", "surgery", "pretrain", {"shape": "1,2,1"} | flags),
            Run(f"heal{name}", "heal", f"cut{name}", {}))


PARENT_RATES = {  # three around the best
    "stories": {
        "tokens": (0.005, 0.01, 0.02),
        "flops": (0.0025, 0.005, 0.01),
        "deep": (0.01, 0.02, 0.04),
    },
    "s5": {
        "tokens": (0.005, 0.01, 0.02),
        "flops": (0.005, 0.01, 0.02),
        "deep": (0.005, 0.01, 0.02),
    },
}


def parents(task_name, loop, tokens, deep):
    """
    Runs of the parents, each at three learning rates: {"KIND RATE": Run}. tokens: updates of as
    many tokens as the run `loop` has had since surgery; deep: updates of the parent of 18 layers.
    """
    lengths = {
        "tokens": {"updates": tokens},
        "flops": {"equal": loop},
        "deep": {"updates": deep},
    }
    runs = {}
    for kind, length in lengths.items():
        start = "deep_pretrain" if kind == "deep" else "pretrain"
        for lr in PARENT_RATES[task_name][kind]:
            runs[f"{kind} {lr}"] = task(f"{task_name}_{kind}_{lr}", start, lr=lr, **length)
    return runs


DESIGN = 3  # of corpus, noise and measures: results of two designs never share a table
UPDATES = {  # where a run's flags do not say
    "stories": {"pretrain": 350, "heal": 100, "task": 200},
    "s5": {"pretrain": 700, "heal": 100, "task": 1700},
}
TASK_ROWS = {  # of the task's updates
    "stories": {"batch_size": 128, "micro_batch": 128},
    # As record 1 of runs/speedrun, which learns S5 for a third of the FLOPs of record 0.
    "s5": {"batch_size": 32, "micro_batch": 32, "eval_every": 100},
}
LOOPED = {"n_prelude": 1, "n_core": 2, "n_coda": 1}  # from random weights; the parent has 6 layers
PRETRAIN = Run("pretrain", "pretrain", "", {})
CUT, HEAL = healed("")
BEFORE = [
    PRETRAIN, CUT, HEAL,
    Run("deep_pretrain", "pretrain", "", {"n_prelude": 18}),  # as deep as the loop is at r = 8
    *healed("_influence", text="{corpus}/text.txt", window=50),
    *healed("_default", adapter_init="torch"),
    *healed("_add", adapter="add"),
]
TASK = task("task")
PART = task("part", train="core|adapter")
LOOPS = {f"trained with r = {r}": task(f"r{r}", mean_recurrence=r, updates=350)
         for r in (4, 8, 16, 32)}
MEAN_16 = {"curriculum": "none", "mean_recurrence": 16}
PARENTS = parents("stories", "r32", tokens=450, deep=350)
S5_PARENTS = parents("s5", "task", tokens=2247, deep=1700)
RATES = {
    "muon": (0.005, 0.01, 0.02, 0.04),
    "adamw": (0.001, 0.002, 0.004, 0.008),
    "adamw*": (0.001, 0.002, 0.004, 0.008),
}
ITEMS = {
    "pretrained": Item("stories", "curves", {
        "pretrained": task("unhealed", "cut", updates=250),
        "random weights": task("random", "", updates=250, **LOOPED),
        "random weights, FLOPs of all": task("random_long", "", equal="unhealed", **LOOPED),
    }),
    "curriculum": Item("stories", "curves", {
        "none": task("fixed", curriculum="none"),
        "linear, 25%": task("linear25", curriculum_warmup=0.25),
        "linear, 50%": TASK,
        "linear, 75%": task("linear75", curriculum_warmup=0.75),
        "linear, 100%": task("linear100", curriculum_warmup=1),
        "1-sqrt, 50%": task("sqrt50", curriculum="1-sqrt"),
        "1-sqrt, 75%": task("sqrt75", curriculum="1-sqrt", curriculum_warmup=0.75),
        "none; k over 50%": task("depth50", curriculum="none", backprop_warmup=0.5),
    }),
    "optimizer": Item("stories", "optimizers", {
        f"{model}, {optimizer} {lr}": task(
            f"{model}_{optimizer.replace('*', 'star')}_{lr}", start,
            optimizer=optimizer, lr=lr, updates=120)
        for model, start in (("looped", "heal"), ("parent", "pretrain"))
        for optimizer, rates in RATES.items() for lr in rates
    }),
    "recurrence": Item("stories", "accuracy", {
        **LOOPS,
        "parent, equal tokens": PARENTS["tokens 0.01"],
        "parent, FLOPs of r = 32": PARENTS["flops 0.005"],
        "untied parent of 18 layers": PARENTS["deep 0.02"],
    }),
    "parent_rates": Item("stories", "curves", PARENTS, seeds=1),
    "layers": Item("stories", "curves", {
        "the paper's rule": TASK,
        "block influence": task("influence", "heal_influence"),
        "torch's adapter init": task("default", "heal_default"),
        "adding adapter": task("add", "heal_add"),
    }),
    "deeper": Item("stories", "deeper", LOOPS),
    "truncation": Item("stories", "curves", {
        f"k = {k}" if k else "all": task(
            f"depth{k}", backprop_depth=k, **MEAN_16,
            **({"updates": 100} if k == 4 else {"equal": "depth4"}))
        for k in (4, 1, 2, 8, 16, 0)
    }, at=16),
    "parts": Item("stories", "curves", {
        "everything": TASK,
        "core and adapter": PART,
    }),
    "s5_parents": Item("s5", "accuracy", {
        "trained with r = 8": TASK,
        "parent, equal tokens": S5_PARENTS["tokens 0.01"],
        "parent, equal FLOPs": S5_PARENTS["flops 0.01"],
        "untied parent of 18 layers": S5_PARENTS["deep 0.01"],
    }),
    "s5_rates": Item("s5", "curves", S5_PARENTS, seeds=1),
    "s5_adapter": Item("s5", "curves", {
        "identity": TASK,
        "torch's init": task("default", "heal_default"),
    }, at=16),
    "s5_truncation": Item("s5", "curves", {
        "k = 4": TASK,
        "k = 1": task("k1", backprop_depth=1, equal="task"),
        "k = 2": task("k2", backprop_depth=2, equal="task"),
        "k = 8": task("k8", backprop_depth=8, equal="task"),
    }, at=16),
    "s5_parts": Item("s5", "curves", {
        "everything": TASK,
        "core and adapter": PART,
    }, at=16),
}
RUNS = {run.name: run for item in ITEMS.values() for run in item.runs.values()}
RUNS |= {run.name: run for run in BEFORE}


# ---------------------------------------------------------------------------- how runs are made

def training_flops(settings, model):
    """
    FLOPs of a training with the very recurrences that it draws: by the paper's rule, and of the
    adapter, which that leaves out.
    """
    adapter = model.adapter.weight.numel() if hasattr(model, "adapter") else 0

    @functools.cache
    def flops_per_token(draw):
        n, k = draw
        return model.flops_per_token(draw) + adapter * (2 * n + 6 * k)

    flops = 0
    for update in range(settings.updates):
        for draw in draws_of(settings, update):
            flops += flops_per_token(draw) / settings.draws
    return flops * settings.batch_size * settings.context


class Study:
    """folder: of the models; results: of the items' files; quick: runs are too short to learn."""

    def __init__(self, quick=False):
        self.quick = quick
        self.folder = Path("out/study-quick" if quick else "out/study")
        self.results = self.folder / "results" if quick else HERE / "results"
        self.writing = threading.Lock()
        self.locks = {}
        self.made = set()
        self.dtype = "float32"
        cpu = Path("/proc/cpuinfo").read_text()
        slow = "GenuineIntel" in cpu and "amx_bf16" not in cpu  # see runs/README.md
        if "bf16" in cpu and not slow:
            self.dtype = "bfloat16"  # of training: a third faster on an AMD EPYC

    def corpus(self, task):
        return self.folder / task / "data"

    def model(self, task, seed, name):
        return self.folder / task / str(seed) / name

    def make_corpus(self, task):
        """A task's data, and what some runs need beside it."""
        corpus = self.corpus(task)
        rows = ["--rows=8000"] if self.quick else []
        execute(corpus, ["runs/tiny_corpus.py", f"--out={corpus}", f"--task={task}", *rows])
        for name in ("test18.jsonl", "test.jsonl"):
            questions = (corpus / name).read_text().splitlines(keepends=True)
            if self.quick and len(questions) > 100:
                (corpus / name).write_text("".join(questions[::20]))
        text = " ".join(json.loads(line)["question"] for line in questions)
        (corpus / "text.txt").write_text(text)

    def flags(self, task, seed, run):
        """Those of run.script, but for the folders that it starts from and goes to."""
        corpus = self.corpus(task)
        flags = {key: str(value).format(corpus=corpus) for key, value in run.flags.items()}
        if "equal" in flags:
            other = RUNS[flags.pop("equal")]
            flags["updates"] = self.equal_updates(task, seed, run, other)
        if run.script != "surgery":
            data = corpus / ("task" if run.script == "task" else "pretrain")
            more = TASK_ROWS[task] if run.script == "task" else {}
            flags = {
                "config": f"config/tiny_{run.script}.toml",
                "data": data,
                "context": read_json(data / "meta.json")["row"],
                "seed": seed,
                "updates": UPDATES[task][run.script],
                "eval_every": 25 if task == "stories" else 50,
                "eval_steps": "1,4,8,16",
                "eval_rows": 512,
                "log_every": 1,
            } | more | flags
            if self.quick:
                flags |= {"updates": 4, "eval_every": 2, "compile": "false"}
        return [f"--{key}={value}" for key, value in flags.items()]

    def cost(self, task, seed, run, **more):
        """Training FLOPs of a run. more: settings."""
        sizes = {} if "pretrain" in (run.name, run.start) else LOOPED
        flags = {**run.flags, **sizes, **more, "init_from": ""}
        flags.pop("equal", None)
        settings = read_settings(self.flags(task, seed, run._replace(flags=flags)))
        return training_flops(settings, RecurrentLM.empty(run_config(settings)))

    def equal_updates(self, task, seed, run, other):
        """How many updates of a run cost what the run `other` has cost, see Run."""
        budget = self.cost(task, seed, other)
        if run.start == "pretrain":
            budget += self.cost(task, seed, HEAL)
        elif not run.start:
            budget += self.cost(task, seed, PRETRAIN)

        def cost(updates):
            return self.cost(task, seed, run, updates=updates)

        return bisect.bisect(range(1, 5000), budget, key=cost)

    def commands(self, task, seed, run):
        """[(folder, command), ...] that make a run's model from the corpus, in order."""
        folder = self.model(task, seed, run.name)
        steps = []
        start = ""
        if run.start:
            steps = self.commands(task, seed, RUNS[run.start])
            start = self.model(task, seed, run.start)
        if run.script == "surgery":
            script = "runs/block_influence.py" if "text" in run.flags else "surgery.py"
            command = [script, start, folder]
        else:
            command = ["train.py", f"--init_from={start}", f"--out_dir={folder}"]
        steps.append((folder, [*command, *self.flags(task, seed, run)]))
        return steps

    def make(self, folder, command):
        """Run a command once in this process. train.py itself knows what is there already."""
        with self.locks.setdefault(folder, threading.Lock()):
            cut = command[0] != "train.py" and folder.exists()
            if folder not in self.made and not cut:
                if command[0] == "train.py":
                    command = [*command, f"--dtype={self.dtype}"]
                execute(folder, command)
            self.made.add(folder)

    def play(self, name, arm, seed):
        """Train and measure a run of an item, unless its file has it. Returns what was done."""
        began = time.time()
        item = ITEMS[name]
        steps = self.commands(item.task, seed, item.runs[arm])
        commands = [shlex.join(["python", *map(str, command)]) for _, command in steps]
        words = f"{name}, {arm}, seed {seed}"
        there = self.runs_of(name).get((arm, seed))
        if there and there["commands"] == commands:
            return f"{words}: is there"
        for step in steps:
            self.make(*step)
        folder = self.model(item.task, seed, item.runs[arm].name)
        found = MEASURES[item.table](folder, self.corpus(item.task))
        about = {"arm": arm, "seed": seed, "commands": commands, "dtype": self.dtype}
        self.write(name, about | describe(folder) | found)
        return f"{words}: {time.time() - began:.0f} s"

    def runs_of(self, name):
        """{(arm, seed): run} of an item's file; those of another design do not count."""
        path = self.results / f"{name}.json"
        item = read_json(path) if path.exists() else {}
        runs = item["runs"] if item.get("design") == DESIGN else []
        return {(run["arm"], run["seed"]): run for run in runs if run["arm"] in ITEMS[name].runs}

    def write(self, name, run):
        """Add a run to its item's file, which has a line for each."""
        item = ITEMS[name]
        head = {
            "task": item.task,
            "table": item.table,
            "at": item.at,
            "design": DESIGN,
            "command": f"python runs/study/play.py {name}",
            "arms": list(item.runs),
        }
        with self.writing:
            runs = self.runs_of(name) | {(run["arm"], run["seed"]): run}
            lines = ",\n".join(json.dumps(runs[key]) for key in sorted(runs))
            self.results.mkdir(parents=True, exist_ok=True)
            with whole(self.results / f"{name}.json") as new:
                new.write_text(f'{json.dumps(head)[:-1]}, "runs": [\n{lines}\n]}}\n')


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


def describe(folder):
    """What stands beside a measurement: version, machine, date, and what the training came to."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    cpu = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    found = {
        "commit": commit,
        "torch": torch.__version__,
        "cpu": cpu and cpu[1],
        "date": str(datetime.date.today()),
    }
    folder = Path(find_checkpoint(folder))
    if (folder / "train.json").exists():
        progress = read_json(folder / "train.json")
        found |= {key: progress[key] for key in ("update", "flops", "skipped")}
        found["state_bytes"] = (folder / "optimizer.safetensors").stat().st_size
    return found


# ---------------------------------------------------------------------------- what is measured
# Functions of a run's folder and its task's corpus. A plain model's recurrence is 0.

def curve(folder, corpus):
    """The validations of a training, and the largest norm of a gradient."""
    text = (folder / "log.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return {
        "validations": [line for line in lines if "val" in line],
        "norm": max(line["norm"] for line in lines if "norm" in line),
    }


STEPS = "1,2,4,8,16,32,64"


def ask(folder, questions, name, *flags):
    """The results of eval_gsm8k.py."""
    out = folder / f"{name}.json"
    execute(folder, ["eval_gsm8k.py", "--model", folder, "--data", questions, "--out", out,
                     "--template", "plain", "--max_new_tokens", 1, "--batch_size", 200, *flags])
    return read_json(out)["results"]


def right_by_length(row):
    """{sentences: share of right answers} of one of the results of eval_gsm8k.py."""
    return {n: score[0] for n, score in row["by_difficulty"].items()}


def answers(folder, corpus):
    """
    Shares of right answers over r: to questions of 1 to 12 sentences by their number, to such of
    18. With the FLOPs of a new token.
    """
    results = ask(folder, corpus / "test.jsonl", "test", "--steps", STEPS)
    results_18 = ask(folder, corpus / "test18.jsonl", "test18", "--steps", STEPS)
    model = RecurrentLM.load(folder)
    found = {"by_length": {}, "right_18": {}, "token_flops": {}}
    for row, row_18 in zip(results, results_18):
        r = row["steps"]
        found["by_length"][r] = right_by_length(row)
        found["right_18"][r] = row_18["value"]
        found["token_flops"][r] = model.flops_per_token((0, r)) // 3
    return found


@torch.no_grad()
def states(folder, corpus):
    """
    r up to 256 on 128 validation rows of three answers: how many are right; by how much a
    recurrence moves a state (median); how many states end at a point, which no recurrence moves by
    more than 0.1%, or in a cycle of up to 32 recurrences; the last recurrence that moves one by 1%
    (median, by the number of sentences).
    """
    far = 256
    rows = 128
    model = RecurrentLM.load(folder, dtype=torch.float32)
    dataset = Dataset(str(corpus / "task"), "val", 39)
    idx, targets, _ = dataset.batch(0, 0, 0, 1, rows)
    labels = targets != IGNORE
    start = model.initial_state(*idx.shape, seed=0)
    states = []
    right = []
    for _, s in model.trajectory(idx, range(1, far + 1), start):
        states.append(s[labels].view(rows, 3, -1))
        equal = model.finish(s).argmax(-1) == targets
        right.append(equal[labels].view(rows, 3))
    states = torch.stack(states)  # (far, rows, 3, C)
    right = torch.stack(right).double()
    moved = relative(states[1:] - states[:-1], states[1:])  # by recurrences 2 ... 256
    back = relative(states[-1] - states[-33:-1], states[-1])
    point = moved[-1] < 1e-3
    cycle = ~point & (back.amin(0) < 1e-3)
    recurrence = torch.arange(2, far + 1)[:, None, None]
    last_move = torch.where(moved < 0.01, 1, recurrence).amax(0).double()
    found = {
        "right": {},
        "moved": {},
        "point": point.double().mean().item(),
        "cycle": cycle.double().mean().item(),
        "right_at_point": right[-1][point].mean().item(),
        "right_elsewhere": right[-1][~point].mean().item(),
        "point_by_length": by_sentences(point.double().mean(0)),
        "last_move": by_sentences(last_move.median(0).values),
    }
    for r in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        found["right"][r] = right[r - 1].mean().item()
        if r > 1:
            found["moved"][r] = moved[r - 2].median().item()
    return found


def relative(change, states):
    """Sizes (...) of changes (..., C) of states."""
    return change.norm(dim=-1) / states.norm(dim=-1)


def by_sentences(values):
    """A tensor (3,), of the lengths that validation asks -> {sentences: value}."""
    return dict(enumerate(values.tolist(), study.UNSEEN["stories"]))


MEASURES = {
    "curves": curve,
    "optimizers": curve,
    "accuracy": answers,
    "deeper": states,
}


# ---------------------------------------------------------------------------- the command

def parse_args():
    parser = Parser(description=__doc__)
    flag = parser.add_argument
    flag("items", nargs="*", metavar="ITEM", help=f"default: all, {', '.join(ITEMS)}")
    flag("--quick", action="store_true", help="4 updates a run, to see that all of it works")
    flag("--seeds", type=positive, default=3, help="runs of each arm (3)")
    flag("--jobs", type=positive, default=2, help="runs at a time (2)")
    args = parser.parse_args()
    if unknown := set(args.items) - set(ITEMS):
        parser.error(f"no such item: {', '.join(unknown)}")
    return args


def main():
    args = parse_args()
    began = time.time()
    torch.set_num_threads(1)
    plays = Study(args.quick)
    failed = 0
    names = args.items or list(ITEMS)
    for task_name in {ITEMS[name].task for name in names}:
        plays.make_corpus(task_name)
    jobs = [(name, arm, seed) for name in names for arm in ITEMS[name].runs
            for seed in range(min(args.seeds, ITEMS[name].seeds))]
    pool = ThreadPoolExecutor(args.jobs)
    futures = [pool.submit(plays.play, *job) for job in jobs]
    try:
        for done, future in enumerate(as_completed(futures), 1):
            try:
                said = future.result()
            except UserError as e:
                failed += 1
                said = f"error: {e}"
            print(f"{done}/{len(jobs)}, {(time.time() - began) / 60:.0f} min: {said}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    if failed:
        raise UserError(f"{failed} of {len(jobs)} failed; the same command tries them again")
    if not args.quick:
        return study.remake()
    for name in names:
        path = plays.results / f"{name}.json"
        study.draw_item(path, path.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)
