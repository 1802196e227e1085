"""
Helpers that all scripts share: one-line error messages, command-line flags, files that are written
completely or not at all, and torchrun's ranks. This file imports nothing else from loopgraft.
"""
import sys

if sys.version_info < (3, 11):
    sys.exit(f"error: needs Python 3.11 or newer, and this is {sys.version.split()[0]}")

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import tempfile
import tomllib
from datetime import timedelta
from pathlib import Path

# Scripts import this file first, so a missing package is reported here.
try:
    import torch
    import torch.distributed as dist
    from safetensors import SafetensorError
except ModuleNotFoundError as e:
    sys.exit(f"error: {sys.executable} has no package {e.name}. Activate the environment in which "
             "you installed requirements.txt, or: pip install -r requirements.txt")


# --------------------------------------------------------------------------------------- ranks

# torchrun sets all of these. If one is missing, the others are left over, and this is rank 0 of 1.
TORCHRUNS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
LAUNCH = os.environ if TORCHRUNS <= os.environ.keys() else {}
WORLD = int(LAUNCH.get("WORLD_SIZE", 1))
RANK = int(LAUNCH.get("RANK", 0))
LOCAL_RANK = int(LAUNCH.get("LOCAL_RANK", 0))  # on this machine


def join_ranks(device):
    """
    Join the process group of torchrun's ranks. When it restarts those of a node after a crash, its
    store still holds the addresses of the dead ones, so each attempt writes under its own prefix.
    For several nodes, which may count restarts differently, see runs/README.md.
    """
    store, *_ = next(dist.rendezvous("env://"))
    if os.environ.get("LOCAL_WORLD_SIZE", str(WORLD)) == str(WORLD):  # a single node
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(store=store, rank=RANK, world_size=WORLD,
                            device_id=None if device == "cpu" else torch.device(device),
                            timeout=timedelta(hours=1))  # another rank may be compiling or saving


# ------------------------------------------------------------------------- errors and messages

# Those of requirements.txt, and the optional ones of runs/README.md. Any other missing module is a
# typo, so it keeps its traceback.
PACKAGES = ("torch numpy tiktoken sentencepiece safetensors requests pytest pyarrow matplotlib "
            "transformers accelerate gguf tokenizers huggingface_hub wandb lm_eval").split()

FULL_MEMORY = "MemoryError|out of memory|DefaultCPUAllocator|bad_alloc|Cannot allocate memory"


class UserError(Exception):
    """An error that the user can fix. Scripts print its one-line message, without a traceback."""


def cli(main, on_every_rank=False):
    """
    Run a script's main(), on rank 0 alone unless on_every_rank. A UserError, an OSError, a missing
    package or full memory ends it with one line on stderr, a closed pipe (`| head`) silently. Any
    other exception is a bug and keeps its traceback.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # of characters that its encoding lacks
    try:
        if WORLD > 1 and not on_every_rank:
            say(f"only rank 0 of {WORLD} works; this script uses a single process", sys.stderr)
        end = main() if on_every_rank or RANK == 0 else 0
    except KeyboardInterrupt:
        end = 128 + signal.SIGINT
    except BrokenPipeError:
        end = 128 + signal.SIGPIPE
    except (UserError, OSError) as e:
        end = f"error: {e}"
    except (MemoryError, RuntimeError) as e:
        if not re.search(FULL_MEMORY, repr(e)):
            raise
        end = ("error: out of memory. Lower --batch_size, --tokens or --steps, if the script has "
               "them; in training, --micro_batch or --context, or try --activation_budget=0.5")
    except ModuleNotFoundError as e:
        if e.name not in PACKAGES:
            raise
        end = f"error: this needs `pip install {e.name}`"
    say("", end="")  # flushes what print() has not written yet
    sys.exit(end)


def say(text, file=None, end="\n"):
    """Print a line, on rank 0 only. It is lost if the pipe or terminal was closed."""
    file = file or sys.stdout
    if RANK == 0:
        try:
            print(text, file=file, end=end, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


# ------------------------------------------------------------------------------- command lines

class Parser(argparse.ArgumentParser):
    """
    An ArgumentParser that raises UserError and accepts no abbreviated flags. Its --help begins with
    the first two paragraphs of a script's docstring.
    """

    def __init__(self, doc="", **options):
        paragraphs = (doc or "").strip().split("\n\n")  # `python -OO` has no docstrings
        super().__init__(description="\n\n".join(paragraphs[:2]), allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")


def between(lowest, highest=math.inf, number_type=int):
    """Return the type of a flag that takes a number from `lowest` to `highest`, inclusive."""
    def number(text):
        value = number_type(text)
        if not lowest <= value <= highest or value == math.inf:
            raise argparse.ArgumentTypeError(f"must be a finite number from {lowest} to {highest}, "
                                             f"not {text}")
        return value
    return number


# Types for most numeric flags.
natural = between(0)
positive = between(1)
non_negative = between(0, number_type=float)
fraction = between(0, 1, float)
random_seed = between(0, 2**31 - 1)


def yes_or_no(text):
    """The type of a flag that takes "true" or "false", in upper or lower case."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, not {text}")
    return text.lower() == "true"


def paths(text):
    """The type of a flag that names files or folders, as in ~/A:1,~/B:2. Expands ~."""
    return ",".join(map(os.path.expanduser, text.split(",")))


def recurrences(text):
    """The type of --steps: "32,1,4,4" becomes [1, 4, 32]."""
    return sorted({positive(part) for part in text.split(",")})


def refuse_idle(given, rules):
    """
    Raise UserError if a flag that was given would be ignored. rules: (whether this one applies, the
    flags that it is about, the reason to give), ...
    """
    for applies, flags, reason in rules:
        idle = [f"--{flag}" for flag in flags if flag in given]
        if applies and idle:
            raise UserError(f"{', '.join(idle)}: {reason}")


# --------------------------------------------------------------------------------------- dtypes

CPUINFO = Path("/proc/cpuinfo")
DTYPES = "auto", "bfloat16", "float32"  # the choices of --dtype
AMD_BFLOAT16 = "gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"  # gcnArchName
DTYPE_HELP = "auto (default): bfloat16 on GPUs and CPUs that multiply it natively, else float32"


def choose_dtype(dtype, device):
    """
    Resolve --dtype: auto is bfloat16 where that is native, else float32. Native means NVIDIA GPUs
    from compute capability 8.0 on, AMD's from CDNA 1 and RDNA 3 on, and CPUs by Intel with AMX, by
    AMD with AVX-512 bfloat16, and by ARM with bf16 (not measured). Intel CPUs with AVX-512 bfloat16
    but no AMX are slower in it than in float32: see runs/NOTES.md.
    """
    if dtype != "auto":
        return dtype
    if device == "cpu":
        words = set(CPUINFO.read_text().split()) if CPUINFO.exists() else set()
        native = words & {"amx_bf16", "bf16"} or words >= {"AuthenticAMD", "avx512_bf16"}
    else:
        gpu = torch.cuda.get_device_properties()
        amd = torch.version.hip
        native = gpu.gcnArchName.startswith(AMD_BFLOAT16) if amd else gpu.major >= 8
    return "bfloat16" if native else "float32"


# --------------------------------------------------------------------------------------- files

@contextlib.contextmanager
def write_atomically(path):
    """
    Write a file completely or not at all: `with write_atomically(path) as new: ...`

    Yields a Path inside a temporary folder beside `path`, where the caller creates the file. It is
    then flushed to disk and renamed to `path`. A killed process leaves the temporary folder behind.
    """
    target = Path(path).resolve()
    try:
        os.makedirs(target.parent, exist_ok=True)
        prefix = f"{target.name}.loopgraft-unfinished-"
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as folder:
            new = Path(folder, target.name)
            yield new
            # safetensors creates files that only their owner can read. Give this one the
            # permissions that the umask gives to a new file.
            empty = Path(folder, f".{target.name}")
            empty.touch()
            with contextlib.suppress(OSError):  # some file systems have no permissions
                shutil.copymode(empty, new)
            with open(new) as file:
                os.fsync(file)
            new.rename(target)
    except (OSError, SafetensorError) as e:  # safetensors reports a full disk as its own error
        raise UserError(f"{path}: not written ({e})")


@contextlib.contextmanager
def lock(path):
    """
    Create a file, and its folder if necessary, and lock it. If the folder holds nothing else in the
    end, because the command was refused, it is removed again. Raises UserError if another process
    holds the lock.
    """
    # A link may lead to a folder that is gone.
    os.makedirs(os.path.realpath(path.parent), exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path.parent}: another process is writing here. Wait, or choose "
                            "another folder")
        except OSError as e:  # of some network file systems
            say(f"warning: {path} cannot be locked ({e}). Let no other process write there")
        try:
            yield
        finally:
            if [*path.parent.glob("*")] == [path]:
                shutil.rmtree(path.parent, ignore_errors=True)  # NFS keeps an open file's name


UNFINISHED = ".unfinished"


def new_folder(text):
    """The type of OUT: a folder that is new or empty, or that a killed creating() has left."""
    out = Path(text).expanduser()
    if out.exists() and any(out.iterdir()) and not (out / UNFINISHED).exists():
        raise UserError(f"{out} exists already. Choose another folder")
    return out


@contextlib.contextmanager
def creating(out):
    """Create and lock the folder OUT, of a new_folder(); delete it if the body fails."""
    folder = Path(os.path.realpath(new_folder(out)))  # a link may lead to a folder that is gone
    with lock(folder / UNFINISHED):
        for path in folder.iterdir():  # left by a killed process
            if path.name != UNFINISHED:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        (folder / UNFINISHED).unlink()


# What libraries raise for a file that is damaged, or of another kind: the errors of JSON, TOML,
# UTF-8, npy and parquet are ValueErrors, those of SentencePiece RuntimeErrors, of gguf IndexErrors.
DAMAGE = ValueError, RuntimeError, IndexError, EOFError, OSError, SafetensorError


@contextlib.contextmanager
def reading(path):
    """
    Turn what a library raises for a damaged file into a UserError that names the file: `with
    reading(path): ...`. Put only the call that reads into it: a mistake in code would look like a
    damaged file there.
    """
    try:
        yield path
    except BaseException as e:
        # Rust's libraries raise bare Exceptions, and panics, which are not even Exceptions.
        from_rust = type(e) is Exception or type(e).__name__ == "PanicException"
        damage = isinstance(e, DAMAGE) and not re.search(FULL_MEMORY, repr(e))
        named = isinstance(e, OSError) and e.filename  # its message has the path
        if named or not (from_rust or damage):
            raise
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if file.read(20) == b"version https://git-":
                raise UserError(f"{path}: only a pointer of Git LFS. Get it with `git lfs pull`")
        reason = " ".join(f"{type(e).__name__}: {e}".split())
        raise UserError(f"{path}: damaged, or not what it should be ({reason:.200})") from e


def read_json(path):
    """Return the {key: value} of a JSON file."""
    with reading(path):
        value = json.loads(Path(path).read_bytes())
        if not isinstance(value, dict):
            raise ValueError("not an object")
    return value


def read_toml(path):
    """Return the {key: value} of a TOML file."""
    with reading(path):
        return tomllib.loads(Path(path).read_text("utf-8-sig"))


def write_json(path, value):
    """Write a JSON file, completely or not at all."""
    with write_atomically(path) as new:
        new.write_text(json.dumps(value, indent=1) + "\n")


# ------------------------------------------------------------------ what an output was made with

def digest(path):
    """Return the first 16 hex digits of a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def code_of(*names):
    """Return {name: digest} of this repository's files with these names, such as "model.py"."""
    return {name: digest(Path(__file__).parent / name) for name in names}


def changed_keys(earlier, now):
    """
    Name the keys that have changed since an output was made, such as "model.py, data.py"; "" if
    none. earlier, now: {key: value}, such as code_of()'s; an older version stored nothing, {}.
    """
    changed = ", ".join(key for key in now if earlier.get(key) != now[key])
    return changed if earlier or not changed else "an older version"


def check_settings(path, earlier, settings, advice):
    """
    Raise UserError if an output was created with different settings. earlier, settings: {name:
    value} of the output and of this command. advice: what to do instead.
    """
    for key, value in settings.items():
        if earlier.get(key) != value:
            raise UserError(f"{path}: was created with {key} = {earlier.get(key)!s:.80}, but this "
                            f"command says {value!s:.80}. {advice}")
