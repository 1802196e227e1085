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
and --arms may grow. Other flags, such as another --lr, need a different --out.
"""
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from common import (Parser, UserError, changed_keys, check_settings, cli, code_of, digest, lock,
                    non_negative, paths, positive, random_seed, read_json, reading, say, write_json)

import numpy as np

from data import load_tokenizer
from eval_gsm8k import read_questions
from model import IGNORE, load_config
from train import read_settings

ROOT = Path(__file__).resolve().parents[1]
ARMS = "loop", "random", "parent"  # in the order of training
# What the program itself says to train.py, and what the parent has in common with the looped model.
OURS = "seed", "out_dir", "init_from", "data", "reinit", "config"
SHARED = re.compile("--(batch_size|micro_batch|context|dtype|compile|activation_budget|eval_\\w+"
                    "|save_every|log_every|keep|wandb)\\b")
CODE = code_of("common.py", "data.py", "eval_gsm8k.py", "model.py", "muon.py", "sample.py",
               "surgery.py", "train.py", "tools/plan.py", "config/task.toml", "runs/task.py",
               "runs/stories.py")


def several(kind, name):
    """Return the type of a flag that takes several of a kind: "1 0" or "1,0" becomes [0, 1]."""
    def words(text):
        return sorted({kind(word) for word in re.split("[, ]+", text.strip())})
    words.__name__ = name  # argparse says: invalid NAME value
    return words


def parse_args():
    """Return the flags. .own: those of train.py, which follow --."""
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
    flag("--arms", type=several(ARMS.index, "arm"), default="loop,parent",
         help="what to train: loop, parent, random: the loop from random weights (%(default)s)")
    flag("--seeds", type=several(random_seed, "seed"), default="0",
         help='train all arms with each, as in "0 1" (0)')
    flag("--parent_lr", type=non_negative, default=3e-4, metavar="LR",
         help="the parent's learning rate, with AdamW (%(default)s)")
    flag("--row_length", type=positive, metavar="T",
         help="tokens in a row of data (at least two questions; 512 for stories)")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    args.own = sys.argv[end + 1:]
    args.arms = [ARMS[i] for i in args.arms]
    for flag in args.own:
        if not re.match(rf"--(?!({'|'.join(OURS)})=)\w+=", flag):
            parser.error(f"{flag}, after --: task.py sets {', '.join(OURS)} itself; write other "
                         "flags of train.py as --key=value")
    if "parent" in args.arms and ("loop" not in args.arms or args.loop and not args.parent):
        parser.error("--arms: parent needs loop, whose FLOPs it spends, and --parent with --loop")
    read_settings([*train_flags(args, "loop", 0), "--context=1"])  # refuses what it must
    return args


def train_flags(args, arm, seed):
    """Return the flags of train.py for an arm, with names relative to OUT."""
    flags = [f"--config={ROOT}/config/task.toml", "--data=data", f"--seed={seed}",
             f"--out_dir={arm}-{seed}"]
    if arm == "parent":
        return [*flags, *filter(SHARED.match, args.own), "--init_from=parent",
                "--optimizer=adamw", f"--lr={args.parent_lr}"]
    return [*flags, *args.own, "--init_from=cut", f"--reinit={arm == 'random'}"]


def choose_form(train, tested):
    """
    Return the form of train.jsonl, "question", "messages" or "events". Raises UserError if it does
    not go with the questions of the test.
    """
    with reading(train):
        text = train.read_text("utf-8-sig")
    form = re.match(r'(?!.*"question"\s*:).*"(events|messages)"\s*:', text.lstrip())  # line 1
    if not form:
        known = {row["question"] for row in read_questions(train)}
        if both := known & {row["question"] for row in tested}:
            say(f"warning: {train} has {len(both)} questions of the test", sys.stderr)
        return "question"
    other = re.search(r'(?i)"role\W+(system|developer|tool)\b', text)
    if form[1] == "messages" and other:
        raise UserError(f"{train}: the test has no {other[1]} message. Put it into the user's, and "
                        "into the questions")
    return form[1]


def run(*command, **options):
    """
    Run a command, and return what it printed if stdout=PIPE. If it fails, this process ends with
    its exit code; and after a signal to this process, both end, once the command has saved.
    """
    for number in signal.SIGTERM, signal.SIGUSR1:  # like Ctrl-C
        signal.signal(number, signal.default_int_handler)
    child = subprocess.Popen([*map(str, command)], text=True, **options)
    try:
        printed, _ = child.communicate()
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise
    if code := child.returncode:
        sys.exit(code if code > 0 else f"error: signal {-code} ended {shlex.join(child.args)}")
    return printed


def python(script, *flags, **options):
    """Run a script of this repository: see run()."""
    return run(sys.executable, "-m", script, *flags, **options)


def find_parent(args):
    """Return --parent, or the folder of SmolLM2, which is downloaded if it is not there."""
    if not args.parent:
        run("bash", ROOT / "runs/smollm2/run.sh", "model")
    return args.parent or ROOT / "out/smollm2/hf"


def count_tokens(tested, form):
    """Return how many tokens an answer may have, and how many a question has with its answer."""
    config = load_config("cut")
    tokenizer = load_tokenizer("cut", config)
    question = max(len(tokenizer.encode(row["question"], bos=True)) for row in tested)
    if form == "events":
        return 1, question + 1
    _, targets = np.load("data/train_000000.npy", mmap_mode="r")
    trained = int(np.diff(np.flatnonzero(targets == IGNORE)).max())
    answer = 8 + max(trained, *(len(tokenizer.encode(f"\n{row['answer']}")) for row in tested))
    answer = min(answer, config.context // 2)
    return answer, question + answer


def main():
    args = parse_args()
    train, test = (Path(args.folder, f"{name}.jsonl").resolve() for name in ("train", "test"))
    out = Path(args.out or f"{args.folder}/try").resolve()
    tested = read_questions(test)
    form = choose_form(train, tested)
    prepare = {
        "question": ["data", "prepare", "--prompt=question", "--field=answer", "--input", train],
        "messages": ["data", "prepare", "--loss=assistant", "--field=messages", "--input", train],
        "events": ["runs.stories", "--test", test, "--input", train],
    }[form]
    names = "parent", "loop", "shape", "row_length", "parent_lr"
    made = {name: getattr(args, name) for name in names} | {"digest of train.jsonl": digest(train)}
    made |= dict(flag.split("=", 1) for flag in args.own)
    is_new = not (out / "settings.json").exists()
    if is_new and out.exists() and {*os.listdir(out)} - {".lock"}:
        raise UserError(f"{out}: contains other files. Choose another --out")

    with lock(out / ".lock"):
        earlier = made | {"code": CODE} if is_new else read_json(out / "settings.json")
        code = earlier.pop("code", {})
        check_settings(out, earlier, dict.fromkeys(earlier) | made, "Choose another --out")
        if changed := changed_keys(code, CODE):
            say(f"{out}: the code has changed since this try began ({changed}). It goes on; "
                "another --out starts over")
        try:
            write_json(out / "settings.json", made | {"code": code})
            if not (out / "cut/config.json").exists():
                # --loop is copied, since OUT is all that is needed to resume. It has its shape.
                shape = [] if args.loop and not args.shape else ["--shape", args.shape or "2,2,2"]
                python("surgery", args.loop or find_parent(args), out / "cut", "--verify", *shape)
            if "parent" in args.arms and not (out / "parent/config.json").exists():
                python("surgery", find_parent(args), out / "parent", "--feed_forward")
            os.chdir(out)  # all names below are relative to it, so that it may be moved
            if args.row_length:
                prepare += ["--row_length", args.row_length]
            python(*prepare, "--tokenizer=cut", "--out=data")
            longest, length = count_tokens(tested, form)
            rows = min(int(python("tools.plan", *train_flags(args, arm, 0), f"--answer={length}",
                                  stdout=subprocess.PIPE)) for arm in args.arms)
        except (UserError, SystemExit):
            if is_new:
                # A refused command leaves nothing; a stopped one resumes.
                shutil.rmtree(out, ignore_errors=True)  # NFS keeps an open file's name
            raise

        results = {}  # {file: label}
        for seed, arm in itertools.product(args.seeds, args.arms):
            flags = train_flags(args, arm, seed)
            if arm == "parent":
                updates = python("tools.plan", *flags, f"--flops_of=loop-{seed}",
                                 stdout=subprocess.PIPE)
                flags.append(f"--updates={updates.strip()}")
            python("train", *flags)
            python("eval_gsm8k", f"--model={arm}-{seed}", "--data", test, "--template=plain",
                   "--steps=1,4,8,16,32", f"--max_new_tokens={longest}", f"--batch_size={rows}")
            results[f"{arm}-{seed}/eval_test.json"] = arm
        x = "difficulty" if any(row["difficulty"] for row in tested) else "steps"
        python("tools.plot", *results, "--x", x, "--labels", ",".join(results.values()),
               "--out=accuracy.png")

    names = f"{args.arms[0]}-{args.seeds[0]}", "export"
    model, export = (shlex.quote(f"{out}/{name}") for name in names)
    say(f"""
Ask it:     python sample.py --model {model} --steps 1,8,32
Export it:  python -m tools.export {model} {export} --mean_recurrence 32
(in {ROOT})""")


if __name__ == "__main__":
    cli(main)
