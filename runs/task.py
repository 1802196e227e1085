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
and --arms may grow. Other flags, such as another --lr, are another try, in another OUT.
"""
import contextlib
import functools
import itertools
import json
import math
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from common import (Parser, UserError, changed_code, check_settings, choose_dtype, cli, code_of,
                    digest, locked, non_negative, paths, positive, random_seed, read_json,
                    reading, say, write_json)

import torch

from data import load_tokenizer, read_chat
from eval_gsm8k import read_questions, reference_text
from model import RecurrentLM, load_config
from runs.smollm2.cups import read_stories
from tools.plan import memory
from train import catch_signals, read_settings, run_config

ROOT = Path(__file__).resolve().parents[1]
ARMS = "loop", "random", "parent"  # in the order of training
STEPS = 1, 4, 8, 16, 32            # r of the evaluation
# What the program itself says to train.py, and what the parent has in common with the looped model.
OURS = "seed", "out_dir", "init_from", "data", "reinit", "config"
SHARED = re.compile("--(batch_size|micro_batch|context|dtype|compile|activation_budget|eval_\\w+"
                    "|save_every|log_every|keep|wandb)\\b")
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
CODE = code_of("common.py", "data.py", "eval_gsm8k.py", "model.py", "muon.py", "sample.py",
               "surgery.py", "train.py", "config/task.toml", "runs/task.py",
               "runs/smollm2/cups.py")


# ---------------------------------------------------------------------- checks before any training

def check_questions(train, test):
    """
    Return the command that makes data of train.jsonl, its longest answer, and the questions of
    test.jsonl. Raises UserError if a line cannot be read, or if the two do not belong together.
    """
    tested = read_questions(test)
    asked = [row["question"] for row in tested]
    with reading(train):
        text = train.read_text("utf-8-sig")
    form = re.search(r'"(events|messages|conversations)"\s*:', text)
    command = ["data", "prepare", "--input", train]
    stories, known, answers = [], [], []
    if form and form[1] == "events":
        command = ["runs.smollm2.cups", "--row_length=512", "--stories", train]
        stories = read_stories(train)
        known = [text for events, _ in stories for text in itertools.accumulate(events)]
        answers = [answer for _, given in stories for answer in given]
    elif form:
        command += ["--field", form[1], "--loss", "assistant"]
        try:
            for number, line in enumerate(text.split("\n"), 1):
                for role, said, _ in read_chat(json.loads(line)[form[1]]) if line.strip() else ():
                    if role not in ("user", "assistant"):
                        raise ValueError(f"the test has no {role} message. Put it into the user's, "
                                         "and into the questions")
                    known.append(said)
                    answers += [said] * (role == "assistant")
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"{train}: line {number} is not a chat for this ({e!r})")
    else:
        command += ["--prompt", "question", "--field", "answer"]
        trained = read_questions(train)
        known, answers = ([row[key] for row in trained] for key in ("question", "answer"))

    def ends(text):  # those of a story count as they are, of others only whether they are blank
        return text[:1].isspace(), text[-1:] if stories else text[-1:].isspace()

    usual = {*map(ends, known)}
    odd = [text for text in asked if ends(text) not in usual]
    joints = {a[-1:] + b[:1] for events, _ in stories for a, b in itertools.pairwise(events)}
    if joints and not any(joint in text for text in asked for joint in joints):
        odd = asked  # as if a space were missing between the events
    if odd:
        raise UserError(f"{test}: the question {odd[0]!r:.100} begins, ends or goes on as none of "
                        f"{train} does. Spaces and newlines count")
    if both := {*asked} & {*known, *map(str.strip, known)}:
        say(f"warning: {len(both)} of the {len(asked)} questions of {test} are also in {train}",
            sys.stderr)
    return command, max(answers, key=len, default=""), tested


def free_memory(device):
    """
    Return the free bytes of a GPU; or those of the machine, if a container or control group around
    this process does not allow less, or `ulimit -v`.
    """
    if device != "cpu":  # asked by another process, because it would keep a part of them
        ask = "import torch; print(torch.cuda.mem_get_info()[0])"
        return int(subprocess.check_output([sys.executable, "-c", ask]))
    if not PROC.exists():
        return math.inf  # not known
    free = [1024 * int(re.search(r"MemAvailable: +(\d+)", (PROC / "meminfo").read_text())[1])]
    taken = resource.getpagesize() * int((PROC / "self/statm").read_text().split()[0])
    free += [most - taken for most in resource.getrlimit(resource.RLIMIT_AS) if most > 0]
    for line in (PROC / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        folder = GROUPS / controllers / path.lstrip("/")
        for group in folder, *folder.parents:
            for file in group / "memory.max", group / "memory.limit_in_bytes":
                if file.exists():
                    free += map(int, re.findall(r"\d+", file.read_text()))  # not "max"
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
    # The cache has all recurrences, and a pass over the prompts has a layer's activations.
    size = getattr(torch, choose_dtype("auto", device)).itemsize
    layers = c.n_prelude + max(STEPS) * c.n_core + c.n_coda
    token = size * (2 * layers * c.n_kv_head * c.head_dim + 8 * c.n_embd + 3 * c.n_ffn)
    weights = size * model.num_params().total() / 1e9
    question = 1.1 * (min(length, c.context) + 256) * token / 1e9
    free = free_memory(device) / 1e9
    for what, needed, advice in (
        ("training", sum(memory(settings, model, 1).values()),
         "--micro_batch=1 and --activation_budget=0.5 after --"),
        (f"answering one question at r = {max(STEPS)}", weights + question, "shorter questions"),
    ):
        if needed > free:
            raise UserError(f"{settings.out_dir}: {what} takes about {needed:.1f} GB, and "
                            f"{free:.1f} GB are free. Try {advice}, or a smaller model")
    return int(min(32, (free - weights) / question))


# ------------------------------------------------------------------------------------- the commands

received = functools.cache(catch_signals)  # one list


def run(*command, **options):
    """
    Run a command, and return what it printed if stdout=PIPE. If it fails, this process ends with
    its exit code; and after a signal to this process, both end, which may take until it has saved.
    """
    stopped = received()
    child = subprocess.Popen([*map(str, command)], text=True, **options)
    while child.returncode is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            printed, _ = child.communicate(timeout=1)
        if stopped:
            child.terminate()
    if stopped:
        sys.exit(128 + stopped[0])
    if code := child.returncode:
        sys.exit(code if code > 0 else f"error: signal {-code} ended {shlex.join(child.args)}")
    return printed


def python(script, *flags, **options):
    """Run a script of this repository: see run()."""
    return run(sys.executable, "-m", script, *flags, **options)


def find_parent(parent):
    """Return --parent, or the folder of SmolLM2, which is downloaded if it is not there."""
    if not parent:
        run("bash", ROOT / "runs/smollm2/run.sh", "model")
    return parent or ROOT / "out/smollm2/hf"


def train_flags(args, own, arm, seed):
    """Return the flags of train.py for an arm. own: those after --."""
    flags = [f"--config={ROOT}/config/task.toml", "--data=data", f"--seed={seed}",
             f"--out_dir={arm}-{seed}"]
    if arm == "parent":
        return [*flags, *filter(SHARED.match, own), "--init_from=parent", "--optimizer=adamw",
                f"--lr={args.parent_lr}"]
    return [*flags, *own, "--init_from=cut", f"--reinit={arm == 'random'}"]


def arms(text):
    """The type of --arms: "parent loop" or "parent,loop" becomes ["loop", "parent"]."""
    return sorted({*re.split("[, ]+", text.strip())}, key=ARMS.index)


def seeds(text):
    """The type of --seeds: "0 1" or "0,1" becomes [0, 1]."""
    return sorted({*map(random_seed, re.split("[, ]+", text.strip()))})


def parse_args():
    """Return the flags, and those of train.py, which follow --."""
    parser = Parser(usage="bash runs/task.sh FOLDER [--out OUT] [flags] [-- --key=value ...]")
    parser.description = __doc__  # all of it
    flag = parser.add_argument
    flag("folder", type=paths, metavar="FOLDER", help="has train.jsonl and test.jsonl; only read")
    flag("--out", type=paths, help="folder of this try (FOLDER/try)")
    flag("--parent", type=paths, metavar="SRC",
         help="what surgery.py reads, such as a folder or hub id (SmolLM2-135M, got with pip)")
    flag("--shape", metavar="P,R,C", help="layers in prelude, recurrent block and coda (2,2,2)")
    flag("--loop", type=paths, metavar="RUN",
         help="start from this model, which was cut from SRC before, and perhaps healed")
    flag("--arms", type=arms, default="loop,parent",
         help="what to train: loop, parent, random: the loop from random weights (%(default)s)")
    flag("--seeds", type=seeds, default="0", help='train all arms with each, as in "0 1" (0)')
    flag("--parent_lr", type=non_negative, default=3e-4, metavar="LR",
         help="the parent's learning rate, with AdamW (%(default)s)")
    flag("--row_length", type=positive, metavar="T",
         help="tokens in a row of data (at least two questions; 512 for stories)")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, own = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1:]
    for flag in own:
        if not re.match(rf"--(?!({'|'.join(OURS)})\b)", flag):
            parser.error(f"{flag}, after --: task.py sets {', '.join(OURS)} itself; write other "
                         "flags of train.py as --key=value")
    if "parent" in args.arms and ("loop" not in args.arms or args.loop and not args.parent):
        parser.error("--arms: parent needs loop, whose FLOPs it spends, and --parent with --loop")
    read_settings([*train_flags(args, own, "loop", 0), "--context=1"])  # refuses what it must
    return args, own


def prepare(args, own, out, command, answer, tested, test):
    """
    Make what is not there yet of the folders cut, parent and data in OUT, and enter it. command,
    answer, tested: see check_questions(). Returns how many tokens an answer may have, and how many
    questions to ask at once.
    """
    if not (out / "cut/config.json").exists():
        # --loop is copied, since OUT is all that is needed to resume. It has its shape.
        shape = ["--shape", args.shape or "2,2,2"] if args.shape or not args.loop else []
        python("surgery", args.loop or find_parent(args.parent), out / "cut", "--verify", *shape)
    if "parent" in args.arms and not (out / "parent/config.json").exists():
        python("surgery", find_parent(args.parent), out / "parent", "--feed_forward")
    os.chdir(out)  # all names below are relative to it, so that it may be moved
    config = load_config("cut")
    tokenizer = load_tokenizer("cut", config)
    if "--stories" in command:
        longest = 1
        space = answer[:-len(answer.lstrip())]
        for row in tested:
            question, reply = row["question"], space + reference_text(row["answer"])
            if len(tokenizer.encode(question + reply)) > len(tokenizer.encode(question)) + 1:
                raise UserError(f"{test}: the answer {reply!r} has several tokens after "
                                f"{question!r:.100}, but stories are answered with one")
    else:
        texts = [answer, *(row["answer"] for row in tested)]
        longest = 8 + max(len(tokenizer.encode(f"\n{text}")) for text in texts)
        longest = min(longest, config.context // 2)
    length = longest + max(len(tokenizer.encode(row["question"], bos=True)) for row in tested)
    if args.row_length:
        command = [*command, "--row_length", args.row_length]
    python(*command, "--tokenizer=cut", "--out=data")
    runs = [read_settings(train_flags(args, own, arm, 0)) for arm in args.arms]
    return longest, min(check_memory(settings, length) for settings in runs)


def train_and_score(args, own, test, longest, rows):
    """Train and score all arms with all seeds: see prepare(). Returns {results' file: arm}."""
    results = {}
    for seed, arm in itertools.product(args.seeds, args.arms):
        flags = train_flags(args, own, arm, seed)
        if arm == "parent":
            updates = python("tools.plan", *flags, f"--flops_of=loop-{seed}", "--quiet",
                             stdout=subprocess.PIPE)
            flags.append(f"--updates={updates.strip()}")
        python("train", *flags)
        python("eval_gsm8k", "--model", f"{arm}-{seed}", "--data", test, "--template=plain",
               f"--steps={','.join(map(str, STEPS))}", f"--max_new_tokens={longest}",
               f"--batch_size={rows}")
        results[f"{arm}-{seed}/eval_test.json"] = arm
    return results


def main():
    args, own = parse_args()
    train, test = (Path(args.folder, f"{name}.jsonl").resolve() for name in ("train", "test"))
    out = Path(args.out or f"{args.folder}/try").resolve()
    command, answer, tested = check_questions(train, test)
    made = {name: getattr(args, name)
            for name in ("parent", "loop", "shape", "row_length", "parent_lr")}
    made |= {"digest of train.jsonl": digest(train)}
    made |= dict(flag.partition("=")[::2] for flag in own)
    names = {*os.listdir(out)} if out.exists() else set()
    is_new = "settings.json" not in names
    if is_new and names - {".lock"}:
        raise UserError(f"{out}: contains other files. Choose another --out")
    with locked(out):
        earlier = {} if is_new else read_json(out / "settings.json")
        code = earlier.pop("code", CODE)
        if earlier:
            if args.loop and not earlier["parent"]:  # the arm that needs it may be new
                earlier["parent"] = args.parent
            check_settings(out, earlier, dict.fromkeys(earlier) | made, "Choose another --out")
        if changed := changed_code(code, CODE):
            say(f"{out}: the code has changed since this try began ({changed}). It goes on; "
                "another --out starts over")
        try:
            write_json(out / "settings.json", made | {"code": code})
            how = prepare(args, own, out, command, answer, tested, test)
        except BaseException:
            if is_new and not received():  # a refused command leaves nothing; a stopped one resumes
                shutil.rmtree(out)
            raise
        results = train_and_score(args, own, test, *how)
        x = "difficulty" if any(row["difficulty"] for row in tested) else "steps"
        python("tools.plot", *results, "--x", x, "--labels", ",".join(results.values()),
               "--out=accuracy.png")
    name = f"{args.arms[0]}-{args.seeds[0]}"
    model, export, tries = map(shlex.quote, (f"{out}/{name}", f"{out}/export", f"{out.parent}"))
    say(f"""
Ask it:         python sample.py --model {model} --steps 1,8,32
Export it:      python -m tools.export {model} {export} --mean_recurrence 32
Compare tries:  python -m tools.plot {tries}/*/{name}/eval_test.json --x {x}
(in {ROOT})""")


if __name__ == "__main__":
    cli(main)
