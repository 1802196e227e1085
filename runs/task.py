"""
Your own task, from questions to a table: cut a parent, train the looped model, train the parent
itself for as many FLOPs, and score both.

    bash runs/task.sh FOLDER [--out OUT] [flags] [-- --key=value ...]

FOLDER/train.jsonl and FOLDER/test.jsonl have lines such as

    {"question": "The ball is under B. B and D swap.", "answer": "D", "difficulty": "2"}

An answer may be a text, a number, or a solution that ends with "#### 18"; the difficulty is
optional. train.jsonl may have chats instead, {"messages": [{"role": "user", "content": ...}]}, in
which each turn of the assistant is an answer; or stories, with an answer after each step:

    {"events": ["The ball is under B.", " B and D swap."], "answers": [" B", " D"]}

Such an answer must be one token, here with its leading space. The model never reads it.

What follows -- are flags of train.py for the looped model; config/task.toml has the defaults. The
parent takes the batch size and the like from them.

OUT is one try: it holds all that is made. The same command resumes what was stopped, and --seeds
and --arms may grow. Other settings, such as another --lr, are another try, in another OUT.
"""
import itertools
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from common import (Parser, UserError, changed_code, check_settings, choose_dtype, cli, code_of,
                    digest, locked, non_negative, paths, positive, random_seed, read_json,
                    reading, say, write_json)

import torch

import surgery
from data import load_tokenizer, read_chat
from eval_gsm8k import read_questions, reference_text
from model import RecurrentLM, load_config
from runs.smollm2.cups import read_stories
from tools.plan import memory
from train import read_settings, run_config

ROOT = Path(__file__).resolve().parents[1]
ARMS = "loop", "random", "parent"  # in the order of training
STEPS = 1, 4, 8, 16, 32            # r of the evaluation
# What the program itself says to train.py, and what the parent has in common with the looped model.
OURS = "seed", "out_dir", "init_from", "data", "reinit", "config"
SHARED = re.compile("--(batch_size|micro_batch|context|dtype|compile|activation_budget|eval_\\w+"
                    "|save_every|log_every|keep|wandb)\\b")
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
CODE = code_of("common.py", "data.py", "eval_gsm8k.py", "model.py", "muon.py", "sample.py",
               "surgery.py", "train.py", "runs/task.py", "runs/smollm2/cups.py")


# ---------------------------------------------------------------------- checks before any training

def check_questions(train, test):
    """
    Return the flags with which `data.py prepare` reads train.jsonl; its stories, which cups.py
    reads, or []; and the questions of test.jsonl. Raises UserError if a line cannot be read, or if
    the two files cannot belong together.
    """
    for path in train, test:
        if not path.exists():
            raise UserError(f"{path} does not exist. Put your questions there")
    tested = read_questions(test)
    asked = {question["question"] for question in tested}
    with reading(train):
        lines = train.read_text("utf-8-sig").split("\n")
    lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    number, first = lines[0] if lines else (1, "")
    try:
        first = json.loads(first)
        if type(first) is not dict:
            raise ValueError
    except ValueError:
        raise UserError(f"{train}: line {number} is not a JSON object. Write each on a line of its "
                        "own, without commas or brackets around them")
    chat = next((name for name in ("messages", "conversations") if name in first), None)
    flags, stories, end = [], [], str.isspace
    known, answers = [], []
    if chat:
        flags = ["--field", chat, "--loss", "assistant"]
        for number, line in lines:
            try:
                messages = read_chat(json.loads(line)[chat])
            except (ValueError, KeyError, TypeError) as e:
                raise UserError(f"{train}: line {number} is not a chat ({e!r})")
            if "system" in [role for role, _, _ in messages]:
                raise UserError(f"{train}: line {number} has a system message, which the test "
                                "cannot give. Put it into the user's message, and into the "
                                f"questions of {test}")
            known += [text for _, text, _ in messages]
            answers += known[-1:]
    elif "events" in first:
        stories = read_stories(train)
        end = str
        joints = {a[-1:] + b[:1] for events, _ in stories for a, b in itertools.pairwise(events)}
        if joints and not any(joint in text for text in asked for joint in joints):
            raise UserError(f"{train}: events meet as in {min(joints)!r}, which no question of "
                            f"{test} has. Is a space missing?")
        known = (text for events, _ in stories for text in itertools.accumulate(events))
    else:
        flags = ["--prompt", "question", "--field", "answer"]
        trained = read_questions(train)
        known, answers = ([question[key] for question in trained] for key in ("question", "answer"))
    last_lines = {answer.strip().rpartition("\n")[2] for answer in answers}
    if "####" in "".join(last_lines) and not any("####" in row["answer"] for row in tested):
        raise UserError(f"{train}: answers end like '#### 18', but none of {test} does, whose "
                        "longest answer limits what the model may write. Give both the same form")

    def shape(text):  # at its ends
        return text[:1].isspace(), end(text[-1:])

    both, shapes = set(), set()
    for text in known:
        both |= asked & {text, text.strip()}
        shapes.add(shape(text))
    for text in asked:
        if shape(text) not in shapes:
            raise UserError(f"{test}: the question {text!r:.100} begins or ends as none of {train} "
                            "does. Spaces and newlines count")
    if both:
        say(f"warning: {len(both)} of the {len(asked)} questions of {test} are also in {train}",
            sys.stderr)
    return flags, stories, tested


def check_one_token(tokenizer, stories, tested, test):
    """Raise UserError if a tested answer has several tokens, with the space of those of stories."""
    spaces = {answer[:-len(answer.lstrip())] for _, answers in stories for answer in answers}
    for row in tested:
        question, answer = row["question"], reference_text(row["answer"])
        length = len(tokenizer.encode(question, bos=True))
        size = min(len(tokenizer.encode(question + space + answer, bos=True)) for space in spaces)
        if size - length > 1:
            raise UserError(f"{test}: the answer {answer!r} has {size - length} tokens after "
                            f"{question!r:.100}, but after stories a model answers with one. Use "
                            "shorter names, or lines of questions and answers in train.jsonl")


def free_memory(device):
    """
    Return the free bytes of a GPU; or those of the machine, of each container or control group
    around this process, and of `ulimit -v`, whichever are fewest.
    """
    if device != "cpu":  # asked by another process, because it would keep a part of them
        ask = "import torch; print(torch.cuda.mem_get_info()[0])"
        return int(subprocess.check_output([sys.executable, "-c", ask]))

    def number(path, pattern=r"(\d+)\n"):
        """The last number in a file that a pattern finds; None if there is none."""
        found = re.findall(pattern, path.read_text(), re.M) if path.exists() else []
        return int(found[-1]) if found else None

    free = [1024 * (number(PROC / "meminfo", r"MemAvailable: +(\d+)") or math.inf)]
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        free.append(most - 1024 * number(PROC / "self/status", r"VmSize:\s+(\d+)"))
    listed = PROC / "self/cgroup"
    for line in listed.read_text().splitlines() if listed.exists() else ():
        _, controllers, path = line.split(":", 2)
        limit, used, root = "memory.max", "memory.current", GROUPS  # version 2
        if controllers:
            limit, used, root = "memory.limit_in_bytes", "memory.usage_in_bytes", GROUPS / "memory"
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents) if controllers in ("", "memory") else ():
            if most := number(group / limit):  # not "max"
                cached = number(group / "memory.stat", r"^(?:total_)?inactive_file (\d+)")
                free.append(most - number(group / used) + cached)
    return min(free)


def check_memory(settings, length):
    """
    Raise UserError if a run, or answering one question of `length` tokens with its model, needs
    more memory than is free, by estimates. Returns how many questions to answer at once.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings.dtype = choose_dtype(settings.dtype, device)
    c = run_config(settings, load_config(settings.init_from))
    model = RecurrentLM.empty(c).to(getattr(torch, settings.dtype))
    free = free_memory(device) / 1e9
    needed = sum(memory(settings, model, 1).values())
    if needed > free:
        raise UserError(f"{settings.out_dir}: training takes about {needed:.1f} GB in "
                        f"{settings.dtype}, and {free:.1f} GB are free. Try --micro_batch=1 and "
                        "--activation_budget=0.5, or a smaller model")
    # The cache has all recurrences, and a pass over the prompts has a layer's activations.
    size = getattr(torch, choose_dtype("auto", device)).itemsize
    layers = c.n_prelude + max(STEPS) * c.n_core + c.n_coda
    token = size * (2 * layers * c.n_kv_head * c.head_dim + 8 * c.n_embd + 3 * c.n_ffn)
    weights = size * model.num_params().total()
    for rows in 32, 16, 8, 4, 2, 1:
        needed = (weights + 1.1 * rows * (min(length, c.context) + 256) * token) / 1e9
        if needed < free:
            return rows
    raise UserError(f"{settings.out_dir}: answering one question of {length} tokens at r = "
                    f"{max(STEPS)} takes about {needed:.1f} GB, and {free:.1f} GB are free. Ask "
                    "shorter questions, or take a smaller model")


# ------------------------------------------------------------------------------------- the commands

child = None  # the process that run() waits for
signals = []  # received by this one


def pass_on(number, frame):
    """End the child, which may have something to save first; then this process ends, too."""
    signals.append(number)
    if child:
        child.terminate()


def run(*command, **options):
    """
    Run a command, and return what it printed if stdout=PIPE. If it fails, or a signal stopped it,
    this process ends with its exit code.
    """
    global child
    child = subprocess.Popen([*map(str, command)], text=True, **options)
    if signals:  # one that came before there was a child
        child.terminate()
    printed, _ = child.communicate()
    if signals or child.returncode > 0:
        sys.exit(child.returncode if child.returncode > 0 else 128 + signals[0])
    if child.returncode:
        sys.exit(f"error: signal {-child.returncode} ended {shlex.join(child.args)}")
    return printed


def python(script, *flags, **options):
    """Run a script of this repository: see run()."""
    return run(sys.executable, "-m", script, *flags, **options)


def find_parent(parent):
    """Return --parent, or the folder of SmolLM2, which is downloaded if it is not there."""
    if not parent:
        run("bash", ROOT / "runs/smollm2/run.sh", "model")
    return parent or ROOT / "out/smollm2/hf"


def make_parts(args, train, test, flags, stories, tested):
    """Make what all arms share in OUT, the folders cut and data: see check_questions()."""
    if args.loop:
        python("surgery", args.loop, "cut")  # copies it, since OUT is all that is needed to resume
    else:
        python("surgery", find_parent(args.parent), "cut", "--shape", args.shape, "--verify")
    if stories:
        check_one_token(load_tokenizer("cut", load_config("cut")), stories, tested, test)
        python("runs.smollm2.cups", "--stories", train, "--tokenizer=cut", "--out=data",
               f"--row_length={args.row_length or 512}")
    else:
        if args.row_length:
            flags = [*flags, f"--row_length={args.row_length}"]
        python("data", "prepare", "--input", train, *flags, "--tokenizer=cut", "--out=data")


def train_flags(args, own, arm, seed):
    """Return the flags of train.py for an arm. own: those after --."""
    flags = [f"--config={ROOT}/config/task.toml", "--data=data", f"--seed={seed}",
             f"--out_dir={arm}-{seed}"]
    if arm == "parent":
        return [*flags, *filter(SHARED.match, own), "--init_from=parent", "--optimizer=adamw",
                f"--lr={args.parent_lr}"]
    return [*flags, *own, "--init_from=cut", f"--reinit={arm == 'random'}"]


def words(text):
    """Split "a b" or "a,b". Returns each word once."""
    return [*dict.fromkeys(re.split("[, ]+", text.strip()))]


def parse_args():
    """Return the flags, and those of train.py, which follow --."""
    parser = Parser(usage="bash runs/task.sh FOLDER [--out OUT] [flags] [-- --key=value ...]")
    parser.description = __doc__  # all of it
    flag = parser.add_argument
    flag("folder", type=paths, metavar="FOLDER", help="has train.jsonl and test.jsonl; only read")
    flag("--out", type=paths, help="folder of this try (FOLDER/try)")
    flag("--parent", type=paths, default="", metavar="SRC",
         help="whatever surgery.py reads: a folder, or the name of a model on the hub; default: "
              "SmolLM2-135M, downloaded with pip")
    flag("--shape", metavar="P,R,C", type=lambda text: ",".join(map(str, surgery.shape(text))),
         help="layers in the prelude, the recurrent block and the coda (2,2,2)")
    flag("--loop", type=paths, default="", metavar="RUN",
         help="start from this model, which was cut from SRC before, and perhaps healed")
    flag("--arms", type=words, default="loop,parent",
         help="what to train: loop, parent, random (the loop from random weights); default: "
              "loop,parent")
    flag("--seeds", type=lambda text: [*map(random_seed, words(text))], default="0",
         help='train each of them with each of these, as in "0 1" (0)')
    flag("--parent_lr", type=non_negative, default=3e-4, metavar="LR",
         help="the parent's learning rate, with AdamW (3e-4)")
    flag("--row_length", type=positive, metavar="T",
         help="tokens in a row of training data; default: at least two questions, or 512 for "
              "stories")
    argv = sys.argv[1:]
    end = argv.index("--") if "--" in argv else len(argv)
    args, own = parser.parse_args(argv[:end]), argv[end + 1:]
    for flag in own:
        key = flag.partition("=")[0].removeprefix("--")
        if key in OURS or not flag.startswith("--"):
            parser.error(f"{flag}, after --: task.py sets {', '.join(OURS)} itself; write other "
                         "flags of train.py as --key=value")
    if unknown := {*args.arms} - {*ARMS}:
        parser.error(f"--arms: {unknown.pop()!r} is not one of {', '.join(ARMS)}")
    if "parent" in args.arms and "loop" not in args.arms:
        parser.error("--arms: parent trains for as many FLOPs as loop did, so name that, too")
    if args.loop and args.shape:
        parser.error("--loop has a --shape already")
    if args.loop and "parent" in args.arms and not args.parent:
        parser.error("--loop needs its --parent, or --arms loop")
    args.arms = [arm for arm in ARMS if arm in args.arms]
    args.shape = args.shape or "2,2,2"
    return args, own


def how_to_ask(args, own, stories, tested):
    """
    Return how many tokens an answer may have, and how many questions to ask an arm at once, {arm:
    number}. Raises UserError if an arm's training or its answers need too much memory.
    """
    tokenizer = load_tokenizer("cut", load_config("cut"))
    longest = 1 if stories else 8 + max(len(tokenizer.encode(f"\n{row['answer']}"))
                                        for row in tested)
    length = longest + max(len(tokenizer.encode(row["question"], bos=True)) for row in tested)
    return longest, {arm: check_memory(read_settings(train_flags(args, own, arm, 0)), length)
                     for arm in args.arms}


def train_and_score(args, own, test, longest, rows):
    """Train and score all arms with all seeds: see how_to_ask(). Returns the results' files."""
    runs = [(arm, seed) for seed in args.seeds for arm in args.arms]
    for arm, seed in runs:
        flags = train_flags(args, own, arm, seed)
        if arm == "parent":
            updates = python("tools.plan", *flags, f"--flops_of=loop-{seed}", "--quiet",
                             stdout=subprocess.PIPE)
            flags.append(f"--updates={updates.strip()}")
        python("train", *flags)
        python("eval_gsm8k", "--model", f"{arm}-{seed}", "--data", test, "--template=plain",
               f"--steps={','.join(map(str, STEPS))}", f"--max_new_tokens={longest}",
               f"--batch_size={rows[arm]}")
    return {f"{arm}-{seed}/eval_test.json": arm for arm, seed in runs}


def main():
    args, own = parse_args()
    train, test = (Path(args.folder).resolve() / f"{name}.jsonl" for name in ("train", "test"))
    out = Path(args.out or f"{args.folder}/try").resolve()
    flags, stories, tested = check_questions(train, test)
    settings = vars(read_settings([*train_flags(args, own, "loop", 0), f"--data={out}"]))
    names = {*os.listdir(out)} if out.exists() else set()
    if names - {".lock"} and "settings.json" not in names:
        raise UserError(f"{out}: contains other files. Choose another --out")
    with locked(out):
        earlier = read_json(out / "settings.json") if "settings.json" in names else {}
        for name in "parent", "loop":  # a folder, which may be gone by now, or a name on the hub
            path = os.path.abspath(source := getattr(args, name))
            if source and (os.path.exists(path) or path == earlier.get(name)):
                setattr(args, name, path)
        made = {name: getattr(args, name)
                for name in ("parent", "loop", "shape", "row_length", "parent_lr")}
        made |= {name: value for name, value in settings.items() if name not in OURS}
        made["digest of train.jsonl"] = digest(train)
        check_settings(out, made | earlier, made, "Choose another --out")
        os.chdir(out)  # all names below are relative to it, so that it may be moved
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, pass_on)
        if earlier and (changed := changed_code(earlier["code"], CODE)):
            say(f"{out}: the code has changed since this try began ({changed}). It goes on; "
                "another --out starts over")
        try:
            if not earlier:
                for name in "cut", "data", "parent":  # what a killed process left
                    shutil.rmtree(name, ignore_errors=True)
                write_json("settings.json", {})
                make_parts(args, train, test, flags, stories, tested)
            if "parent" in args.arms and not Path("parent/config.json").exists():
                python("surgery", find_parent(args.parent), "parent", "--feed_forward")
            how = how_to_ask(args, own, stories, tested)
            if not earlier:  # complete
                write_json("settings.json", made | {"code": CODE})
        except (SystemExit, UserError, OSError):
            if not earlier:  # a refused command leaves nothing behind
                shutil.rmtree(out, ignore_errors=True)
            raise
        results = train_and_score(args, own, test, *how)
        x = "difficulty" if any(row["difficulty"] for row in tested) else "steps"
        python("tools.plot", *results, "--x", x, "--labels", ",".join(results.values()),
               "--out=accuracy.png")
    if out.is_relative_to(ROOT):
        out = out.relative_to(ROOT)
    model = f"{args.arms[0]}-{args.seeds[0]}"
    tries = f"{shlex.quote(str(out.parent))}/*/{model}/eval_test.json"
    folder, export = (shlex.quote(str(out / name)) for name in (model, "export"))
    say(f"""
In {ROOT}:

Ask it:         python sample.py --model {folder} --steps 1,8,32
Export it:      python -m tools.export {folder} {export} --mean_recurrence 32
Serve it:       vllm serve {export} --trust-remote-code      (pip install vllm)
Compare tries:  python -m tools.plot {tries} --x {x}""")


if __name__ == "__main__":
    cli(main)
