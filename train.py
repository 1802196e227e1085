"""
The training loop: pretraining, healing and task training of recurrent and ordinary models alike.

    python train.py --config=config/tiny.toml                              one process
    torchrun --nproc_per_node=4 train.py --config=config/tiny.toml         4 processes
    python train.py --config=config/tiny.toml --lr=0.01 --updates=200      any setting by hand
    python train.py --eval_only --init_from=DIR --data=SHARDS --eval_steps=1,4,32      a checkpoint's losses, no training

What is unusual: an update draws its number of recurrences, r = n + k, from a heavy-tailed distribution whose
mean follows a curriculum; only the last k carry gradient. All randomness (rows, recurrences, initial states) is
a function of (seed, update), so a run that was killed or stopped is started again with the same command, on as
many processes as there are now, and ends with the same weights. muon.py shares out gradients and optimizer state
among the processes; there is no DDP. `--help` lists the settings.

Paper: arXiv 2511.07384, sections 3 and 4 and appendix D.
"""
import difflib
import fcntl
import filecmp
import functools
import glob
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file

from data import open_data, tiny
from model import (LOGITS_AT_ONCE, STARTS, TOKENIZER_FILES, Config, InputError, RecurrentLM, cli, find_checkpoint,
                   open_safetensors, read_json, save_folder, write_json, write_result)
from muon import Muon

TINY = "out/tiny/data"  # the embedded corpus, made when it is missing


@dataclass
class Settings:
    out_dir: str = ""              # the run's folder: step_* checkpoints and log.jsonl
    data: str = ""                 # a folder made by data.py, or several with their shares, A:1,B:1,C:2
    init_from: str = ""            # a checkpoint or run folder; empty: random weights of the shape below
    seed: int = 0                  # of the weights, the order of the data, r and the initial states
    # shape, for random weights only
    n_embd: int = 96
    n_head: int = 2
    n_kv_head: int = 2
    n_ffn: int = 240
    n_prelude: int = 6             # an ordinary model is all prelude
    n_core: int = 0
    n_coda: int = 0
    # budget
    updates: int = 1000            # optimizer updates
    match_tokens: str = ""         # a finished run's folder: spend as many tokens as it did since surgery
    match_flops: str = ""          # the same for training FLOPs; either one replaces `updates`
    batch_size: int = 128          # sequences an update, over all ranks
    micro_batch: int = 128         # most sequences on a device at once; the gradients of the others are added up
    draws: int = 1                 # of r an update, each for an equal part of its micro-batches
    context: int = 1024            # T, tokens a sequence
    # recurrence
    mean_recurrence: int = 32      # R, the mean of r (the paper's sampler has mean R + 1)
    recurrence_sampler: str = "poisson-lognormal"  # or "fixed": r is its mean every time
    start: str = ""                # s_0: noise (the paper), zero, or prelude: its output; empty: as init_from has it
    curriculum: str = "linear"     # how the mean rises from 1 to R: linear, 1-sqrt, none
    curriculum_warmup: float = 0.25  # over this fraction of the updates
    backprop_depth: int = 8        # k: the last recurrences, through which gradients flow; 0: all
    backprop_warmup: float = 0.0   # k rises from 2 over this fraction of the updates
    distill_from: str = ""         # a feed-forward checkpoint, such as the parent: learn its distribution, too
    distill_weight: float = 0.5    # ... with this share of the loss; the labels have the rest
    # optimizer
    optimizer: str = "muon"        # muon: matrices of blocks and adapter by Muon, the rest by AdamW; adamw; or adamw*
    lr: float = 0.001              # of Muon, or of AdamW (adamw*: Huginn's variant) for all
    adam_lr: float = 5e-5          # of the rest under muon
    weight_decay: float = 1e-4
    clip: float = 1.0              # largest gradient norm
    warmup: float = 0.005          # learning rate: linear over this fraction of the updates,
    cooldown: float = 0.9          # then constant, then cosine down over this last fraction
    # evaluation, checkpoints, machine
    eval_every: int = 100          # updates between validations; one before and one after in any case
    eval_rows: int = 512           # validation sequences
    eval_steps: list[int] = (1, 2, 4, 8)  # at these recurrences
    save_every: int = 500          # updates between checkpoints; one at the end in any case
    keep: int = 1                  # checkpoints that stay
    log_every: int = 1
    dtype: str = "float32"         # or bfloat16: of weights and activations; master weights stay float32
    compile: bool = True           # torch.compile
    recompute: bool = False        # activations inside a recurrence, in the backward pass: less memory, more time
    max_minutes: float = 0.0       # save and stop before so much time has passed (0: no limit)
    max_skips: int = 10            # updates in a row with a loss or gradient that is not finite: more end the run
    dry_run: bool = False          # print what the run would be and need, without its weights
    eval_only: bool = False        # validation loss and perplexity of init_from, as JSON in out_dir (default: init_from)


# May differ between the parts of a resumed run: they leave the weights alone, but for rounding.
FREE = {"out_dir", "micro_batch", "eval_every", "eval_rows", "eval_steps", "save_every", "keep", "log_every", "compile",
        "recompute", "max_minutes", "max_skips", "dry_run", "eval_only"}
MAY_BE_ZERO = {"n_prelude", "n_core", "n_coda", "seed", "backprop_depth"}  # of the integers
FRACTIONS = {"distill_weight", "curriculum_warmup", "backprop_warmup", "warmup", "cooldown"}
CHOICES = {"recurrence_sampler": ("poisson-lognormal", "fixed"), "curriculum": ("linear", "1-sqrt", "none"),
           "start": ("", *STARTS), "optimizer": ("muon", "adamw", "adamw*"), "dtype": ("float32", "bfloat16")}


def read_settings(argv):
    """--config=FILE.toml (flat keys), then --key=value, in their order. InputError for unknown keys and types."""
    known, values = {f.name: f.type for f in fields(Settings)}, {}

    def put(key, value, source):
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise InputError(f"{source}: unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else ""))
        values[key] = convert(key, known[key], value, source)

    for arg in argv:
        key, equals, value = arg.removeprefix("--").partition("=")
        if arg.startswith("--") and not equals and known.get(key) is bool:
            equals, value = "=", "true"
        if not arg.startswith("--") or not equals:
            raise InputError(f"{arg}: settings are written --key=value (--help lists them)")
        if key != "config":
            put(key, value, arg)
            continue
        try:
            with open(value, "rb") as f:
                file = tomllib.load(f)
        except (OSError, ValueError) as e:  # also what is not TOML, or not UTF-8
            raise InputError(f"--config={value}: {e}")
        for k, v in file.items():
            put(k, v, value)
    s = Settings(**values)
    for key in ("init_from" if s.eval_only else "out_dir", "data"):
        if not getattr(s, key):
            raise InputError(f"--{key}: is not set: give a folder, by --config=config/NAME.toml for instance")
    for key, allowed in CHOICES.items():
        if getattr(s, key) not in allowed:
            raise InputError(f"--{key}={getattr(s, key)}: is not one of {', '.join(allowed)}")
    for key in (key for key, kind in known.items() if kind in (int, float)):
        low, high = int(known[key] is int and key not in MAY_BE_ZERO), 1 if key in FRACTIONS else 10**9
        if not low <= getattr(s, key) <= high:
            raise InputError(f"--{key}={getattr(s, key)}: must lie between {low} and {high}")
    if not s.eval_steps or min(s.eval_steps) < 0:
        raise InputError(f"--eval_steps={s.eval_steps}: give recurrences such as 1,2,4")
    if s.match_tokens and s.match_flops:
        raise InputError("--match_tokens: and --match_flops exclude each other: give one")
    return s


def convert(key, kind, value, source):
    """A TOML value or a string of the command line as the setting's type."""
    try:
        if kind is bool:
            return value if isinstance(value, bool) else {"true": True, "false": False}[value.lower()]
        if kind == list[int]:
            return [convert(key, int, v, source) for v in (value.split(",") if isinstance(value, str) else value)]
        if isinstance(value, bool) or kind is str and not isinstance(value, str):
            raise ValueError
        number = kind(float(value)) if kind is int and float(value) == int(float(value)) else kind(value)
        if kind is int and number != float(value):
            raise ValueError
        return number
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError):
        name = "list of integers, like 1,2,4" if kind == list[int] else kind.__name__
        raise InputError(f"{source}: {key} must be of type {name}, not {value!r}")


# ---------------------------------------------------------------- schedules: functions of the update

def mean_recurrence(s, u):
    """Mean of r at update u: rises from 1 to s.mean_recurrence over the curriculum."""
    W = math.ceil(s.curriculum_warmup * s.updates)
    if s.curriculum == "none" or u >= W:
        return s.mean_recurrence
    f = u / W if s.curriculum == "linear" else 1 - math.sqrt(1 - u / W)
    return max(1, math.ceil(s.mean_recurrence * f))


def backprop_depth(s, u):
    """k at update u: never more than the mean recurrence; rises from 2 over its warm-up (Figure 16)."""
    k, W = s.backprop_depth or s.mean_recurrence, math.ceil(s.backprop_warmup * s.updates)
    if u < W:
        k = min(k, 1 + math.ceil((k - 1) * (u + 1) / W))
    return min(k, mean_recurrence(s, u))


def draw_steps(s, u, number):
    """
    (n, k) at update u: draw `number`, counted from 1 over the whole run. Huginn's sampler: rate ~ LogNormal of
    mean r, p ~ Poisson(rate) + 1, n = max(p - k, 0); seed 0 gives the paper's own sequence.
    """
    r, k = mean_recurrence(s, u), backprop_depth(s, u)
    if s.recurrence_sampler == "fixed":
        return r - k, k
    g = torch.Generator().manual_seed((514229 + number + 1_000_003 * s.seed) % (2**31 - 1))
    rate = torch.empty(1).log_normal_(math.log(r) - 0.125, 0.5, generator=g)
    p = int(torch.poisson(rate, generator=g)) + 1
    return (max(p - k, 0), min(p, k)) if s.backprop_depth else (0, p)


def lr_factor(s, u):
    """Warm-up, stable, decay: what update u multiplies the learning rates by; between 0.001 and 1."""
    W, D, low = math.ceil(s.warmup * s.updates), math.ceil(s.cooldown * s.updates), 0.001
    if u < W:
        return u / W * (1 - low) + low
    q = max(0, u - (s.updates - D)) / D if D else 0
    return 0.5 * (1 + math.cos(math.pi * q)) * (1 - low) + low


def split_batch(s, world):
    """A process's micro-batches an update, and the rows of each. InputError."""
    accumulate = math.ceil(s.batch_size / world / s.micro_batch)
    B, rest = divmod(s.batch_size, world * accumulate)
    if rest:
        raise InputError(f"--batch_size={s.batch_size}: does not divide into {world} processes with {accumulate} "
                         f"micro-batches of at most {s.micro_batch}: change it or --micro_batch")
    if accumulate % s.draws:
        raise InputError(f"--draws={s.draws}: does not divide a process's {accumulate} micro-batches an update: change "
                         "--micro_batch")
    return accumulate, B


# ---------------------------------------------------------------- checkpoints

def save_checkpoint(s, model, opt, u, tokenizer, progress, run):
    """
    out_dir/step_*: float32 weights, each rank's share of the optimizer's state, and where the run is. Old ones go
    when the new one is whole. All ranks call it.
    """
    folder, state = os.path.join(s.out_dir, f"step_{u:06d}"), opt.state_tensors()

    def share(path):  # every rank writes its own, into rank 0's unfinished folder
        run.wait()
        error = None
        try:
            save_file({name: t.cpu() for name, t in state.items()}, path)
            with open(path, "rb") as f:
                os.fsync(f.fileno())
        except Exception as e:
            error = e
        if run.sum(float(error is not None)):
            raise InputError(f"{folder}: cannot be written ({error or 'by another rank'}); older checkpoints are untouched")

    weights = {name: t.cpu() for name, t in opt.gather_masters()}
    if run.rank:
        return share(f"{folder}.tmp-{run.boss}/optimizer_{run.rank}.safetensors")
    save_folder(folder, {"model_type": "nanoloop"} | asdict(model.config), weights, tokenizer, {
        "train.json": lambda path: write_json(path, {"config": asdict(s), "update": u, "world": run.world, **progress}),
        "optimizer_0.safetensors": share})
    for old in checkpoints(s)[:-s.keep]:
        shutil.rmtree(old)


def checkpoints(s):
    """The complete checkpoints of out_dir, oldest first."""
    folders = glob.glob(os.path.join(glob.escape(s.out_dir), "step_*"))
    return sorted((p for p in folders if re.search(r"step_\d+$", p)), key=lambda p: int(p.rpartition("_")[2]))


def load_optimizer(folder, opt, u):
    """This rank's share of the optimizer as it was after its update u, whatever the shares were then. InputError."""
    where, wanted = {}, opt.wanted()
    for path in glob.glob(os.path.join(glob.escape(folder), "optimizer_*.safetensors")):
        with open_safetensors(path) as f:
            where |= {name: (path, tuple(f.get_slice(name).get_shape())) for name in f.keys()}
    wrong = [name for name, shape in wanted.items() if where.get(name, (0, 0))[1] != tuple(shape)]
    if wrong:
        raise InputError(f"{folder}: lacks the optimizer's {wrong[0]}: delete {folder} to go on from an older checkpoint")

    def get(name):
        with open_safetensors(where[name][0]) as f:
            return f.get_tensor(name)

    opt.load(get, u)


def read_progress(folder, **kinds):
    """A checkpoint's train.json, with at least these keys, of these types. InputError."""
    progress = read_json(os.path.join(folder, "train.json"))
    if wrong := [key for key, kind in kinds.items() if not isinstance(progress.get(key), kind)]:
        raise InputError(f"{folder}/train.json: has no {wrong[0]}: delete {folder} to go on from an older checkpoint")
    return progress


def match_updates(s, flops):
    """Set s.updates to spend what the run of match_tokens or match_flops did, if given; flops: of this model, a token."""
    for key, cost in (("tokens", 1), ("flops", flops)):
        if folder := getattr(s, f"match_{key}"):
            other = read_progress(find_checkpoint(folder), config=dict, update=int, **{key: int})
            if other["update"] != other["config"].get("updates"):
                raise InputError(f"--match_{key}={folder}: is at update {other['update']} of "
                                 f"{other['config'].get('updates')}: let that run finish first")
            s.updates = max(1, round(other[key] / (cost * s.batch_size * s.context)))


def resume_folder(s, fingerprint):
    """The newest checkpoint of out_dir and its train.json, or None; InputError if it was made with other settings."""
    if not checkpoints(s):
        return None, None
    folder = checkpoints(s)[-1]
    progress = read_progress(folder, config=dict, data=dict, update=int, tokens=int, flops=int)
    if s.match_tokens or s.match_flops:  # that run is no longer needed
        s.updates = progress["config"].get("updates", s.updates)
    old, new = asdict(Settings()) | progress["config"], json.loads(json.dumps(asdict(s)))
    for key in new.keys() - FREE:
        if old.get(key) != new[key]:
            raise InputError(f"{s.out_dir}: holds a run with {key}={old.get(key)}, not {new[key]}: choose another "
                             "--out_dir, or delete that folder")
    was, now = progress["data"], json.loads(json.dumps(fingerprint))
    if changed := [key for key in was.keys() | now.keys() if was.get(key) != now.get(key)]:
        raise InputError(f"{s.data}: has changed since the run in {s.out_dir} began: {changed[0]} was "
                         f"{was.get(changed[0])}, is {now.get(changed[0])}: restore it, or choose another --out_dir")
    return folder, progress


# ---------------------------------------------------------------- the run

class Run:
    """The processes of a run: torchrun sets the environment; alone we are rank 0 of 1. boss: rank 0's process id."""

    def __init__(self):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device, self.boss, self.begun = "cpu", os.getpid(), time.time()
        if torch.cuda.is_available():
            self.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")
        self.group = self.locked = None
        if "TORCHELASTIC_RUN_ID" in os.environ and os.path.exists("/proc/uptime"):
            # --max_minutes counts from the start of torchrun, our parent, or a restart would begin anew.
            with open(f"/proc/{os.getppid()}/stat") as stat, open("/proc/uptime") as uptime:
                ticks = float(stat.read().rpartition(")")[2].split()[19])  # from boot
                self.begun -= float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
        if self.world > 1:
            hour = timedelta(hours=1)
            store = next(dist.rendezvous("env://", timeout=hour))[0]
            if os.environ.get("LOCAL_WORLD_SIZE") == str(self.world):  # torchrun's restarts share a store, with addresses
                store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), store)  # of dead processes
            dist.init_process_group("nccl" if self.device != "cpu" else "gloo", store=store, rank=self.rank,
                                    world_size=self.world, timeout=hour)
            self.wait()
            # In an update a rank that is silent for a minute is lost; a slow start, or save, is not.
            self.group = dist.new_group(timeout=timedelta(minutes=1))
            self.boss = int(self.sum(float(os.getpid()) if self.rank == 0 else 0.0))

    def wait(self):
        if self.world > 1:
            dist.barrier()

    def lock(self, folder, shared=False):
        """Keep others away from a folder (shared: those who train there), from the first call to unlock(). InputError."""
        if self.locked is None:
            self.locked = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(self.locked, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{folder}: another process is at this run: end it, or choose another --out_dir")
            except OSError as e:  # NFS and Lustre may not lock a folder
                print(f"{folder}: cannot be locked ({e}): see that no second process writes there")

    def unlock(self):
        if self.locked is not None:
            os.close(self.locked)

    def sum(self, value):
        """A number or a tensor, summed over the ranks; entries that only one rank fills are exact."""
        t = torch.as_tensor(value, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(t, group=self.group)
        return t if torch.is_tensor(value) else t.item()

    def say(self, *args, **kwargs):
        if self.rank == 0:
            print(*args, **kwargs)


def main():
    if {"-h", "--help"} & set(sys.argv):
        return print(__doc__ + "\n" + inspect.getsource(Settings))
    s, world = read_settings(sys.argv[1:]), int(os.environ.get("WORLD_SIZE", 1))
    if s.dry_run:
        import bench  # measures and forecasts; the run itself needs none of it
        return bench.plan(s, bench.shape(s), world, print if os.environ.get("RANK", "0") == "0" else lambda *_: None)
    if world == 1:
        run = Run()
        try:
            code = train(s, run)
        finally:
            run.unlock()
        return sys.exit(code) if code else None
    code = 1
    try:
        run = Run()
        code = train(s, run)
        run.wait()
    except (InputError, OSError) as e:
        sys.stderr.write(f"train.py: error: {e}\n")  # in one piece: others write, too
    except RuntimeError as e:
        if not re.search(r"gloo|NCCL|[Cc]onnection|[Tt]imed? ?out|process group", str(e)):
            raise
        print("train.py: error: another process of the run was lost, or silent for a minute: the same command goes on "
              f"from the last checkpoint ({str(e).splitlines()[0]:.150})", file=sys.stderr)
    # Leave at once: in an ordinary exit a thread of gloo's aborts the process now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train(s, run):
    """The run; returns the exit code: 0, or 128 + the signal that stopped it."""
    rank, world, device, say = run.rank, run.world, run.device, run.say
    if os.path.normpath(s.data).startswith(TINY + os.sep) and not os.path.isdir(s.data) and rank == 0:
        tiny(TINY)
    run.wait()
    accumulate, B = split_batch(s, world)
    rows, val_rows = (open_data(s.data, split, s.context) for split in ("val" if s.eval_only else "train", "val"))

    # Model: from our newest checkpoint, which needs no other, from another run or surgery, or from scratch.
    before, start = {"tokens": 0, "flops": 0}, 0  # spent since surgery, over all stages: what match_* reads
    s.out_dir = s.out_dir or s.init_from  # of eval_only
    owner = re.sub(r"/step_\d+/*$", "", s.out_dir) if s.eval_only else s.out_dir  # the run at work on it, if any
    if rank == 0 and os.path.isdir(owner):
        run.lock(owner, shared=s.eval_only)
    folder, progress = (None, None) if s.eval_only else resume_folder(s, rows.fingerprint())
    if source := folder or s.init_from:
        model = RecurrentLM.load(source, dtype=torch.float32)
        if folder:
            start, before = progress["update"], {k: progress[k] for k in before}
        elif model.config.n_core and os.path.exists(os.path.join(model.folder, "train.json")):
            earlier = read_progress(model.folder, tokens=int, flops=int)
            before = {k: earlier[k] for k in before}
    else:
        c = Config(rows.meta["vocab_size"], s.n_embd, s.n_head, s.n_kv_head, s.n_ffn, s.n_prelude, s.n_core, s.n_coda,
                   context=max(2048, s.context), mean_recurrence=s.mean_recurrence, eos_token_id=rows.meta["eos_id"])
        model = RecurrentLM(c)
        model.init_weights(s.seed)
    c = model.config
    vocab = rows.meta["vocab_size"]
    if vocab > c.vocab_size:
        raise InputError(f"{s.data}: its tokenizer has ids up to {vocab - 1}, the model's vocabulary ends at "
                         f"{c.vocab_size - 1}: prepare the data with the tokenizer of {s.init_from}")
    if s.context > c.context:
        raise InputError(f"--context={s.context}: {s.init_from} was made for at most {c.context} tokens")
    per_update = s.batch_size * s.context
    if not s.eval_only:
        c.mean_recurrence, c.backprop_depth = s.mean_recurrence, s.backprop_depth or s.mean_recurrence
        c.start = s.start or c.start
        if not folder:
            match_updates(s, model.flops_per_token())
    for file in TOKENIZER_FILES:
        ours, theirs = os.path.join(rows.folder, file), os.path.join(model.folder or rows.folder, file)
        if os.path.exists(ours) and os.path.exists(theirs) and not filecmp.cmp(ours, theirs, shallow=False):
            raise InputError(f"{ours}: is not the tokenizer of {s.init_from}: prepare the data with that one")
    learns = s.distill_from and not s.eval_only
    teacher = RecurrentLM.load(s.distill_from, device, getattr(torch, s.dtype)) if learns else None
    if teacher and (teacher.config.n_core or teacher.config.vocab_size != c.vocab_size):
        raise InputError(f"--distill_from={s.distill_from}: is recurrent or of another vocabulary: give the parent")
    masters = {name: p.data for name, p in model.named_parameters()}
    model.to(device, getattr(torch, s.dtype))  # with bfloat16 the float32 weights live on in the optimizer
    opt = None if s.eval_only else Muon(model.named_parameters(), s.lr, s.adam_lr, s.weight_decay, s.optimizer, masters,
                                        rank, world, run.group)
    del masters
    if folder:
        load_optimizer(folder, opt, start - progress.get("skipped", 0))
        say(f"resuming {folder}")
    model.recompute = s.recompute

    # Speed.
    if device == "cpu" and s.context <= 128:
        # SDPA's fused backward on CPU is slow for short rows: its plain form takes half the time.
        torch.backends.cuda.enable_flash_sdp(False)
    if s.compile and device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        say("no C++ compiler found: going on without torch.compile")
    elif s.compile:
        model.compile_parts()
        if teacher:
            teacher.compile_parts()

    def inputs(seed, idx, targets, number):
        """On the device, with initial states that depend on a row's number alone, not on the ranks."""
        state = model.initial_state(*idx.shape, [1_000_003 * seed + int(i) for i in number]) if c.n_core else None
        return idx.to(device), targets.to(device), state

    @torch.no_grad()
    def validate():
        """At each recurrence of eval_steps: {r: (mean loss, its standard error, number of labels, accuracy)}."""
        B_val = min(B, val_rows.rows // world)
        if B_val == 0:
            raise InputError(f"{s.data}: its validation split has {val_rows.rows} rows of {s.context} tokens, fewer than "
                             "processes: prepare it with a larger --val")
        depths, limit = s.eval_steps if c.n_core else [0], min(s.eval_rows, val_rows.rows)
        sums = torch.zeros(len(depths), 4, device=device, dtype=torch.float64)
        for i in range(math.ceil(limit / (B_val * world))):
            idx, targets, number = val_rows.batch(0, i, rank, world, B_val)
            targets[torch.from_numpy(number >= limit)] = -100  # what the last batch has too many
            idx, targets, state = inputs(0, idx, targets, number)
            losses = model.trajectory(idx, depths, targets, state, functools.partial(moments, model))
            sums += torch.stack([losses[r] for r in depths])
        n, total, squares, right = run.sum(sums).T
        n = n.clamp(min=1)  # without a label the loss is 0, as model.py has it
        error = ((squares - total**2 / n).clamp(min=0) / (n - 1).clamp(min=1) / n).sqrt()
        return dict(zip(depths, zip((total / n).tolist(), error.tolist(), n.long().tolist(), (right / n).tolist())))

    if s.eval_only:
        return evaluate(s, run, model, val_rows, validate)

    # Say what was decided.
    n = model.num_params()
    say(f"model: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, width {c.n_embd}, {n['total']:,} parameters: "
        + ", ".join(f"{k} {v:,}" for k, v in n.items() if v and k not in ("total", "body")))
    say(f"data: {s.data}, {rows.rows:,} rows of {s.context} tokens, {s.updates * s.batch_size / rows.rows:.2f} epochs")
    say(f"run: {s.updates} updates of {per_update:,} tokens ({world} x {accumulate} x {B} rows), {s.optimizer}, "
        f"{s.dtype}, {device}" + (f", r to {s.mean_recurrence} ({s.curriculum}), k {s.backprop_depth}" if c.n_core else ""))

    log_path = os.path.join(s.out_dir, "log.jsonl")
    if rank == 0:
        os.makedirs(s.out_dir, exist_ok=True)
        run.lock(s.out_dir)
        for left in glob.glob(os.path.join(glob.escape(s.out_dir), "step_*.tmp-*")):  # of a killed save
            shutil.rmtree(left)
        keep_log(log_path, start)

    def log(entry):
        if rank == 0:
            with open(log_path, "a") as f:
                f.write(json.dumps(entry) + "\n")

    def report(u):
        losses = validate()
        say(f"update {u:5d}/{s.updates}  validation loss  " + "  ".join(
            f"r={r}: {x:.4f}" if c.n_core else f"{x:.4f}" for r, (x, *_) in losses.items()), flush=True)
        log({"update": u, "val": {r: x for r, (x, *_) in losses.items()},
             "accuracy": {r: right for r, (*_, right) in losses.items()}, **spent})

    # What an update costs, for the time left: the curriculum makes late updates dearer.
    watching = teacher.flops_per_token() // 3 if teacher else 0  # 2 of 6: it carries no gradient
    flops = functools.cache(lambda n, k: model.flops_per_token((n, k)) + watching)
    cost = lambda u: flops(mean_recurrence(s, u) - backprop_depth(s, u), backprop_depth(s, u))
    ahead = sum(map(cost, range(start, s.updates)))
    done, spent, skips, slowest = 0, dict(before), 0, 0.0

    def load(u):
        """This rank's micro-batches of update u. They are numbered alike on any number of ranks."""
        return [rows.batch(s.seed, (u * world + rank) * accumulate + a, 0, 1, B) for a in range(accumulate)]

    def save(u):
        progress = {"data": rows.fingerprint(), "skipped": u - opt.updates, **spent}
        save_checkpoint(s, model, opt, u, rows.folder, progress, run)
        run.wait()

    if start == 0:
        report(0)
    clock = mark = time.time()
    marked, saved, signals = start, start, []
    handlers = {sig: signal.signal(sig, lambda number, _: signals.append(number)) for sig in (signal.SIGTERM, signal.SIGINT)}
    loader = ThreadPoolExecutor(1)  # the next update's rows are read while this one is computed
    ready = loader.submit(load, start)
    try:
        for u in range(start, s.updates):
            batches, ready = ready.result(), loader.submit(load, min(u + 1, s.updates - 1))
            began = time.time()
            # Labels of every micro-batch of the update, on every rank; why to stop; each is filled by one rank.
            table = torch.zeros(world, accumulate + 2, dtype=torch.float64)
            table[rank, :accumulate] = torch.tensor([(targets != -100).sum() for _, targets, _ in batches])
            table[rank, -1] = max(signals, default=0)
            table[rank, -2] = bool(s.max_minutes) and began - run.begun + 2 * slowest > 60 * s.max_minutes
            table = run.sum(table)
            if table[:, -2:].any():
                number = int(table[:, -1].max())
                if u > saved:
                    save(u)
                why = signal.Signals(number).name if number else "--max_minutes"
                say(f"stopped at update {u} by {why}: the same command goes on from here", flush=True)
                return 128 + number if number else 0
            # The loss is the mean over all labels of the update, however they fall on ranks and micro-batches.
            total = table[:, :accumulate].sum().clamp(min=1).item()
            losses = torch.zeros(world, accumulate, device=device, dtype=torch.float64)
            for a, batch in enumerate(batches):
                idx, targets, state = inputs(s.seed, *batch)
                n, k = draw_steps(s, u, u * s.draws + a % s.draws + 1)
                loss = distil(model, teacher, idx, targets, (n, k), state, s.distill_weight) if teacher else \
                    model(idx, targets, (n, k), state)[1]
                loss = loss * (table[rank, a].item() / total)
                loss.backward()
                opt.accumulate()
                losses[rank, a] = loss.detach()
                spent["flops"] += B * world * s.context * flops(n, k)
            if u == start:
                run.wait()  # compiling takes some ranks longer
            loss, norm = run.sum(losses).sum().item(), float(opt.reduce())
            if finite := math.isfinite(loss) and math.isfinite(norm):
                opt.step(lr_factor(s, u), s.clip)
                skips = 0
            else:
                skips += 1
                say(f"update {u + 1:5d}/{s.updates}  skipped: loss {loss}, norm {norm}, {skips} in a row", flush=True)
                if skips > s.max_skips:
                    raise InputError(f"--max_skips={s.max_skips}: {skips} updates in a row had no finite loss or gradient: "
                                     f"lower --lr={s.lr} or look at the data; the last checkpoint in {s.out_dir} stays")
            spent["tokens"] += per_update
            done += cost(u)

            u1, last = u + 1, u + 1 == s.updates
            if u1 % s.log_every == 0 or last or not finite:
                now = time.time()
                speed, mark, marked = (u1 - marked) * per_update / (now - mark), now, u1
                eta = (now - clock) / done * (ahead - done)
                entry = {"update": u1, "loss": loss, "mean_r": mean_recurrence(s, u), "n": n, "k": k, "norm": norm,
                         "lr": s.lr * lr_factor(s, u), "tokens_per_s": round(speed), "skipped": not finite, **spent}
                depth = f"mean r {entry['mean_r']:2d} (n {n:2d} k {k})  " if c.n_core else ""
                say(f"update {u1:5d}/{s.updates}  loss {loss:.4f}  {depth}norm {norm:.2f}  "
                    f"{speed:,.0f} tokens/s  eta {int(eta // 60)}:{int(eta % 60):02d}", flush=True)
                log(entry)
            if u1 % s.eval_every == 0 or last:
                report(u1)
            if u1 % s.save_every == 0 or last:
                save(u1)
                saved = u1
            if u > start:  # compiling takes longer
                slowest = max(slowest, time.time() - began)
    finally:
        loader.shutdown(cancel_futures=True)
        for sig, handler in handlers.items():
            signal.signal(sig, handler)
    say(f"done: {s.out_dir}/step_{s.updates:06d}, {spent['tokens']:,} tokens and {spent['flops']:.3g} FLOPs since surgery, "
        f"{time.time() - clock:.0f} s")
    return 0


def distil(model, teacher, idx, targets, steps, state, weight):
    """
    The mean over all labels of (1 - weight) cross-entropy + weight KL(teacher || model). It makes all logits at once,
    so it takes smaller micro-batches than learning from labels alone.
    """
    keep = targets != -100
    with torch.no_grad():
        wanted = teacher(idx)[0][keep].log_softmax(-1)
    logp = model(idx, steps=steps, state=state)[0][keep].log_softmax(-1)
    apart = F.kl_div(logp, wanted, reduction="sum", log_target=True)
    return ((1 - weight) * F.nll_loss(logp, targets[keep], reduction="sum") + weight * apart) / keep.sum().clamp(min=1)


def moments(model, x, rope, targets):
    """
    RecurrentLM.finish() for standard errors: the labels' number, the sum and the sum of squares of their losses, and how
    many are the most likely token; (4,) float64.
    """
    keep, rows = targets.flatten() != -100, max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    x, targets = (t.flatten(0, 1)[keep].split(rows) for t in (model.run_coda(x, rope), targets))
    sums = torch.zeros(4, device=keep.device, dtype=torch.float64)
    for a, b in zip(x, targets):
        logits = model.head(a).float()
        losses = F.cross_entropy(logits, b, reduction="none").double()
        sums += torch.stack([torch.ones_like(losses), losses, losses.square(), logits.argmax(-1) == b], 1).sum(0)
    return sums


def evaluate(s, run, model, rows, validate):
    """
    eval_only: a table of loss, perplexity and accuracy over recurrences, also as out_dir/eval_loss_DATA.json. The standard
    errors take labels for independent; those of one text are not, so the truth is larger.
    """
    name = "+".join(os.path.basename(os.path.normpath(re.sub(r":\d+$", "", part))) for part in s.data.split(","))
    path, count, began = os.path.join(s.out_dir, f"eval_loss_{name}.json"), min(s.eval_rows, rows.rows), time.time()
    if run.rank == 0:
        os.makedirs(s.out_dir, exist_ok=True)  # what cannot be written is said now
    run.say(f"{model.folder}: {count:,} validation rows of {s.context} tokens of {s.data}, {s.dtype}, {run.device}\n"
            f"{'r':>5}  {'loss':>7} {'± s.e.':>7}  {'perplexity':>10}  {'accuracy':>8}  {'labels':>9}", flush=True)
    table = [{"steps": r, "metric": "loss", "value": x, "standard_error": e, "n": n, "perplexity": math.exp(min(x, 700)),
              "accuracy": right} for r, (x, e, n, right) in validate().items()]
    for x in table:
        run.say(f"{x['steps'] if model.config.n_core else '-':>5}  {x['value']:7.4f} ±{x['standard_error']:6.4f}  "
                f"{x['perplexity']:10.3f}  {x['accuracy']:8.2%}  {x['n']:9,}")
    if run.rank == 0:
        write_result(path, "train", model, s.data, table, time.time() - began, count * s.context, context=s.context)
    run.say(path)
    return 0


def keep_log(path, start):
    """Drop the lines of updates that a resumed run will do again."""
    if os.path.exists(path):
        with open(path, errors="replace") as f:
            lines = [line for line in f if (m := re.match(r'{"update": (\d+),.*}\n', line)) and int(m[1]) <= start > 0]
        with open(path + ".tmp", "w") as f:
            f.writelines(lines)
        os.replace(path + ".tmp", path)


if __name__ == "__main__":
    cli(main)
