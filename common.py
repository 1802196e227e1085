"""
What every script needs and none is about: one-line errors, command lines, files that are written
completely or not at all, and torchrun's ranks. It imports no other file of loopgraft.
"""
import argparse
import contextlib
import difflib
import fcntl
import hashlib
import json
import math
import os
import re
import resource
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError

# torchrun sets these. A script that was started alone is rank 0 of 1.
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))


# ------------------------------------------------------------------------- errors and messages

class UserError(Exception):
    """A mistake of the user's, in one line. Scripts print it without a traceback."""


def cli(main):
    """
    Run a script's main() and exit with the code that it returns. A UserError or an OSError ends in
    one line on stderr and exit code 1. A bug keeps its traceback.
    """
    # A data set keeps each of its shards open, and there may be more than the usual limit of 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError) as e:
        sys.exit(f"error: {e}")


def say(text, file=None):
    """Print a line, on rank 0 only."""
    if RANK == 0:
        print(text, file=file, flush=True)


def find_gpu():
    """Whether torch can use a GPU. Prints a note if the machine has one that torch cannot use."""
    if torch.cuda.is_available():
        return True
    if os.path.exists("/dev/nvidia0") or os.path.exists("/dev/kfd"):
        say(f"note: this machine has a GPU, but torch {torch.__version__} cannot use it, so this "
            "runs on the CPU. README.md lists the wheels for each driver.", file=sys.stderr)
    return False


# ------------------------------------------------------------------------------- command lines

class Parser(argparse.ArgumentParser):
    """
    The command line of a script. A mistake in it raises UserError, and flags cannot be shortened.
    """

    def __init__(self, **options):
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def groups(self):
        """Three groups of flags, by which --help lists them."""
        return [self.add_argument_group(title) for title in ("what", "how", "output")]

    def error(self, message):
        for word in re.findall(r"--[\w-]+", message):
            if word not in self._option_string_actions:
                message += did_you_mean(word, self._option_string_actions)
        raise UserError(f"{message} (--help lists the flags)")


def did_you_mean(word, words):
    """" (did you mean X?)" with the one of some words that is nearest to a wrong one, or ""."""
    near = difflib.get_close_matches(str(word), map(str, words), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def opening(doc, paragraphs=2):
    """The first paragraphs of a script's docstring, for --help: what it does, and examples."""
    return "\n\n".join(doc.strip("\n").split("\n\n")[:paragraphs])


def between(lowest, highest=math.inf, kind=int):
    """The type of a flag that takes a number from `lowest` to `highest`."""
    def number(text):
        value = kind(text)
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"{text} is not between {lowest} and {highest}")
        return value
    return number


natural = between(0)
positive = between(1)
rate = between(0, kind=float)
fraction = between(0, 1, float)
seeds = between(0, 2**31 - 1)


def recurrences(text):
    """The type of --steps: "32,1,4" -> [1, 4, 32]"""
    return sorted({natural(part) for part in text.strip("[]").split(",")})


# --------------------------------------------------------------------------------------- files

@contextlib.contextmanager
def whole(path):
    """
    Write a file or a folder completely or not at all.

    Yields a Path inside a temporary folder beside `path`, where the caller creates the file or
    folder. On success it is flushed to disk and renamed to `path`. On an error `path` keeps what it
    had before, and a full disk raises a UserError that names `path`. A killed process leaves the
    temporary folder, `path`.tmp-*, behind; locked() removes those.
    """
    target = Path(path).resolve()
    try:
        os.makedirs(target.parent, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.tmp-") as folder:
            new = Path(folder, target.name)
            yield new
            for item in (*new.rglob("*"), new):
                if item.is_file():  # safetensors writes files that only their owner can read
                    item.chmod(new.stat().st_mode & 0o666)
                    with open(item) as file:
                        os.fsync(file)
            if target.is_dir():
                target.rename(f"{folder}/old")  # deleted together with the temporary folder
            new.rename(target)
    except (OSError, SafetensorError) as e:  # safetensors reports a full disk as its own error
        raise UserError(f"{path}: cannot be written ({e}). What was there before is unchanged")


# The temporary folders of whole() that a killed process may leave in a data set or a run.
UNFINISHED = re.compile(r"((train|val|step)_\d+(\.npy)?|(progress|meta|recipe)\.json)\.tmp-\w{8}")


def locked(folder):
    """
    Create a folder if necessary and lock it, so that a second process is refused. Removes the
    unfinished files of a process that was killed there. The lock lasts until the file object that
    this returns is closed.
    """
    os.makedirs(folder, exist_ok=True)
    file = open(f"{folder}/.lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: another process is writing here. Wait for it, or choose "
                        "another folder")
    except OSError as e:  # some network file systems have no locks
        say(f"{folder}: cannot be locked ({e}), so make sure that no other process writes here")
        return file
    for path in Path(folder).glob("*.tmp-*/"):
        if UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    return file


def read_json(path):
    """The value in a JSON file."""
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as JSON ({e})")


def write_json(path, value):
    """Write a JSON file, completely or not at all. NaN and infinity become null."""
    value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    with whole(path) as new:
        new.write_text(json.dumps(value, indent=1) + "\n")


def digest(path):
    """The first 16 hex digits of a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def check_settings(path, earlier, settings, way_out):
    """
    Raise UserError if the output `path` was created with other settings than this command's.
    way_out: the end of the message, which says what to do instead.
    """
    for key, value in settings.items():
        if earlier.get(key) != value:
            raise UserError(f"{path}: was created with {key} = {earlier.get(key)!s:.80}, but this "
                            f"command says {value!s:.80}. {way_out}")


# ------------------------------------------------------------------------------- result files

def describe(model):
    """The names of a model's device and dtype."""
    weight = model.embed.weight
    device = torch.cuda.get_device_name(weight.device) if weight.is_cuda else str(weight.device)
    return device, str(weight.dtype).removeprefix("torch.")


def smallest_enough(model, task, metric, scores):
    """
    Find the smallest r that does as well as the best one: its score is within two standard errors
    of the paired difference. The errors are those of the differences between answers to the same
    questions, which vary less than the answers do.

    scores: {r: a number for each question, in the same order for all r}, more is better.

    Returns a list for the "enough" of a result file. It holds one dict: "steps" is the smallest r
    and "best" the best, "difference" what r is behind, "standard_error" that of the difference, and
    "flops" the FLOPs of a token at r relative to the best r's. It is empty without two r.
    """
    if len(scores) < 2:
        return []
    smallest_first = sorted(scores)
    best = max(smallest_first, key=lambda r: statistics.fmean(scores[r]))  # the first of equals
    for r in smallest_first:
        behind = [b - x for b, x in zip(scores[best], scores[r], strict=True)]
        difference = statistics.fmean(behind)
        error = statistics.pstdev(behind) / math.sqrt(len(behind))
        if difference <= 2 * error:  # of the best r itself, both are 0
            break
    return [{
        "task": task,
        "metric": metric,
        "steps": r,
        "best": best,
        "difference": difference,
        "standard_error": error,
        "flops": model.flops_per_token((0, r)) / model.flops_per_token((0, best)),
    }]


def print_enough(found):
    """Print a line for each task, about the first of its metrics. found: "enough" of a result."""
    first = {}
    for x in found:
        first.setdefault(x["task"], x)
    for task, x in first.items():
        r, best = x["steps"], x["best"]
        if r < best:
            words = (f"r = {r} is enough: {100 * x['difference']:.1f} ± "
                     f"{100 * x['standard_error']:.1f} points below r = {best}, at "
                     f"{x['flops']:.0%} of its FLOPs per token")
        else:
            words = (f"r = {r} is enough: no r scores higher, and no smaller one comes within two "
                     "standard errors of it")
        print(f"{task}, {x['metric']}: {words}")


def write_result(path, script, model, task, results, seconds, tokens, **more):
    """
    Write the JSON file of an evaluation.

    results: a list of {"steps": r, "metric": name, "value": x, "standard_error": se, "n": count,
    ...}. seconds, tokens: the time it took, and how many tokens were computed in it. The file also
    records the run's training, so that drawing it needs neither the model nor its folder.
    """
    device, dtype = describe(model)
    path_of_run = Path(model.folder, "train.json")
    run = read_json(path_of_run) if path_of_run.exists() else {}
    write_json(path, dict(
        script=script,
        model=model.folder,
        config=asdict(model.config),
        task=task,
        device=device,
        dtype=dtype,
        torch=torch.__version__,
        training={key: run.get(key) for key in ("update", "flops", "paper_flops")},
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        **more,
        results=results,
    ))
