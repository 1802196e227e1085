"""
The training loop: pretraining, healing and task training of recurrent and ordinary models alike.

    python train.py --config=config/tiny.toml                              one process
    torchrun --nproc_per_node=4 train.py --config=config/tiny.toml         4 processes (DDP)
    python train.py --config=config/tiny.toml --lr=0.01 --updates=200      any setting by hand

What is unusual: every micro-step draws its number of recurrences, r = n + k, from a heavy-tailed
distribution whose mean follows a curriculum; only the last k carry gradient. All randomness (rows,
recurrences, initial states) is a function of (seed, micro-step), so a run that was killed is started
again with the same command and ends with the same weights. `--help` lists the settings.

Paper: arXiv 2511.07384, sections 3 and 4 and appendix D.
"""
import contextlib
import difflib
import filecmp
import functools
import glob
import inspect
import json
import math
import os
import re
import shutil
import sys
import time
import tomllib
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from data import Shards, tiny
from model import (TOKENIZER_FILES, Config, InputError, RecurrentLM, cli, find_checkpoint, open_safetensors, read_json,
                   write_json)
from muon import Muon, param_groups


TINY = "out/tiny/data"  # the embedded corpus, made when it is missing


@dataclass
class Settings:
    out_dir: str = ""              # the run's folder: step_* checkpoints and log.jsonl
    data: str = ""                 # a folder made by data.py
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
    micro_batch: int = 128         # most sequences on a device at once; the rest is accumulated
    context: int = 1024            # T, tokens a sequence
    # recurrence
    mean_recurrence: int = 32      # R, the mean of r (the paper's sampler has mean R + 1)
    recurrence_sampler: str = "poisson-lognormal"  # or "fixed": r is its mean every time
    curriculum: str = "linear"     # how the mean rises from 1 to R: linear, 1-sqrt, none
    curriculum_warmup: float = 0.25  # over this fraction of the updates
    backprop_depth: int = 8        # k: the last recurrences, through which gradients flow
    backprop_warmup: float = 0.0   # k rises from 2 over this fraction of the updates
    # optimizer
    optimizer: str = "muon"        # muon: matrices of blocks and adapter by Muon, the rest by AdamW; or adamw
    lr: float = 0.001              # of Muon, or of AdamW for all
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
    dtype: str = "float32"         # or bfloat16: autocast
    compile: bool = True           # torch.compile


# May differ between the parts of a resumed run: they leave the weights alone, but for rounding.
FREE = {"out_dir", "micro_batch", "eval_every", "eval_rows", "eval_steps", "save_every", "keep", "log_every", "compile"}
MAY_BE_ZERO = {"n_prelude", "n_core", "n_coda", "seed"}  # of the integers
FRACTIONS = {"curriculum_warmup", "backprop_warmup", "warmup", "cooldown"}
CHOICES = {"recurrence_sampler": ("poisson-lognormal", "fixed"), "curriculum": ("linear", "1-sqrt", "none"),
           "optimizer": ("muon", "adamw"), "dtype": ("float32", "bfloat16")}


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
    for key in ("out_dir", "data"):
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
    k, W = s.backprop_depth, math.ceil(s.backprop_warmup * s.updates)
    if u < W:
        k = min(k, 1 + math.ceil((k - 1) * (u + 1) / W))
    return min(k, mean_recurrence(s, u))


def draw_steps(s, u, micro_step):
    """
    (n, k) of a micro-step, alike on every rank. Huginn's sampler: rate ~ LogNormal of mean r,
    p ~ Poisson(rate) + 1, n = max(p - k, 0); seed 0 gives the paper's own sequence.
    """
    r, k = mean_recurrence(s, u), backprop_depth(s, u)
    if s.recurrence_sampler == "fixed":
        return r - k, k
    g = torch.Generator().manual_seed((514229 + micro_step + 1_000_003 * s.seed) % (2**31 - 1))
    rate = torch.empty(1).log_normal_(math.log(r) - 0.125, 0.5, generator=g)
    p = int(torch.poisson(rate, generator=g)) + 1
    return max(p - k, 0), min(p, k)


def lr_factor(s, u):
    """Warm-up, stable, decay: what update u multiplies the learning rates by; between 0.001 and 1."""
    W, D, low = math.ceil(s.warmup * s.updates), math.ceil(s.cooldown * s.updates), 0.001
    if u < W:
        return u / W * (1 - low) + low
    q = max(0, u - (s.updates - D)) / D if D else 0
    return 0.5 * (1 + math.cos(math.pi * q)) * (1 - low) + low


# ---------------------------------------------------------------- checkpoints

def save_checkpoint(s, model, opt, u, progress):
    """out_dir/step_*: the model, the optimizer and where the run is; old ones go when the new one is whole."""
    names = {p: name for name, p in model.named_parameters()}
    state = {f"{names[p]}.{key}": t for p, d in opt.state.items() for key, t in d.items()}
    progress = {"config": asdict(s), "update": u, **progress}
    model.save(os.path.join(s.out_dir, f"step_{u:06d}"), tokenizer=s.data, extra={
        "optimizer.safetensors": lambda path: save_file(state, path),
        "train.json": lambda path: write_json(path, progress)})
    for folder in checkpoints(s)[:-s.keep]:
        shutil.rmtree(folder)


def checkpoints(s):
    """The complete checkpoints of out_dir, oldest first."""
    folders = glob.glob(os.path.join(glob.escape(s.out_dir), "step_*"))
    return sorted((p for p in folders if re.search(r"step_\d+$", p)), key=lambda p: int(p.rpartition("_")[2]))


def load_optimizer(folder, model, opt, u):
    """Fill opt as it was after update u. InputError where its file is not of this model."""
    path, names = os.path.join(folder, "optimizer.safetensors"), {p: name for name, p in model.named_parameters()}
    buffers = {"muon": ("momentum",), "adamw": ("exp_avg", "exp_avg_sq")}
    wanted = {f"{names[p]}.{x}": (p, x) for g in opt.param_groups for p in g["params"] for x in buffers[g["kind"]]}
    with open_safetensors(path) as f:
        shapes = {key: tuple(f.get_slice(key).get_shape()) for key in f.keys()}
        if shapes != {key: tuple(p.shape) for key, (p, _) in wanted.items()}:
            raise InputError(f"{path}: is not this model's: delete {folder} to go on from an older checkpoint")
        for key, (p, x) in wanted.items():
            opt.state[p][x] = f.get_tensor(key).to(p.device)
    for group in opt.param_groups:
        group["step"] = u


def resume_folder(s, accumulate):
    """The newest checkpoint of out_dir and its train.json, or None; InputError if it was made with other settings."""
    if not checkpoints(s):
        return None, None
    folder = checkpoints(s)[-1]
    progress = read_json(os.path.join(folder, "train.json"))
    if {"config", "update", "tokens", "flops", "accumulate"} - progress.keys():
        raise InputError(f"{folder}/train.json: is incomplete: delete {folder} to go on from an older checkpoint")
    old, new = progress["config"], json.loads(json.dumps(asdict(s)))
    for key in new.keys() - FREE:
        if old.get(key) != new[key]:
            raise InputError(f"{s.out_dir}: holds a run with {key}={old.get(key)}, not {new[key]}: choose another "
                             "--out_dir, or delete that folder")
    if progress["accumulate"] != accumulate:  # every micro-step draws its own r
        raise InputError(f"--micro_batch={s.micro_batch}: makes {accumulate} micro-steps an update, the run in {s.out_dir} "
                         f"made {progress['accumulate']}: scale it with the number of processes")
    return folder, progress


# ---------------------------------------------------------------- the run

def main():
    if {"-h", "--help"} & set(sys.argv):
        return print(__doc__ + "\n" + inspect.getsource(Settings))
    s = read_settings(sys.argv[1:])

    # Processes: torchrun sets the environment; alone we are rank 0 of 1.
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if world > 1:
        dist.init_process_group("nccl" if device != "cpu" else "gloo")
    train(s, rank, world, device, print if rank == 0 else lambda *a, **k: None)
    if world > 1:
        # All ranks are done, and leave together and at once: in an ordinary exit a thread of gloo's
        # aborts the process now and then ("terminate called without an active exception").
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)


def train(s, rank, world, device, say):
    if os.path.normpath(s.data).startswith(TINY + os.sep) and not os.path.isdir(s.data) and rank == 0:
        tiny(TINY)
    if world > 1:
        dist.barrier()
    if s.batch_size % world:
        raise InputError(f"--batch_size={s.batch_size}: does not divide by {world} processes")
    accumulate = math.ceil(s.batch_size / world / s.micro_batch)
    B, rest = divmod(s.batch_size, world * accumulate)
    if rest:
        raise InputError(f"--batch_size={s.batch_size}: does not divide into {world} processes with {accumulate} "
                         f"micro-batches of at most {s.micro_batch}: change --micro_batch")
    rows, val_rows = (Shards(s.data, split, s.context) for split in ("train", "val"))

    # Model: from our newest checkpoint, from another run or surgery, or from scratch.
    before = {"tokens": 0, "flops": 0}  # spent since surgery, over all stages: what match_* reads
    if s.init_from:
        model = RecurrentLM.load(s.init_from, dtype=torch.float32)
        earlier = os.path.join(model.folder, "train.json")
        if model.config.n_core and os.path.exists(earlier):
            before = {k: read_json(earlier)[k] for k in before}
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
    c.mean_recurrence, c.backprop_depth = s.mean_recurrence, s.backprop_depth
    per_update = s.batch_size * s.context
    for key, cost in (("tokens", per_update), ("flops", per_update * model.flops_per_token())):
        if run := getattr(s, f"match_{key}"):
            s.updates = max(1, round(read_json(os.path.join(find_checkpoint(run), "train.json"))[key] / cost))
    for file in TOKENIZER_FILES:
        ours, theirs = os.path.join(s.data, file), os.path.join(model.folder or s.data, file)
        if os.path.exists(ours) and os.path.exists(theirs) and not filecmp.cmp(ours, theirs, shallow=False):
            raise InputError(f"{ours}: is not the tokenizer of {s.init_from}: prepare the data with that one")
    (folder, progress), start = resume_folder(s, accumulate), 0
    if folder:
        model = RecurrentLM.load(folder)
        start, before = progress["update"], {k: progress[k] for k in before}
    model.to(device)
    opt = Muon(param_groups(model, s.lr, s.adam_lr, s.weight_decay, s.optimizer))
    if folder:
        load_optimizer(folder, model, opt, start)
        say(f"resuming {folder}")

    # Speed.
    if device == "cpu" and s.context <= 128:
        # SDPA's fused backward on CPU is slow for short rows: its plain form takes half the time.
        torch.backends.cuda.enable_flash_sdp(False)
    if s.compile and device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        say("no C++ compiler found: going on without torch.compile")
    elif s.compile:
        model.compile_parts()
    ddp = DistributedDataParallel(model) if world > 1 else model
    autocast = lambda: torch.autocast(device.split(":")[0], torch.bfloat16, enabled=s.dtype == "bfloat16",
                                      cache_enabled=False)  # a cast cached under no_grad would lose its gradient

    def inputs(seed, idx, targets, number):
        """On the device, with initial states that depend on a row's number alone, not on the ranks."""
        state = model.initial_state(*idx.shape, [1_000_003 * seed + int(i) for i in number]) if c.n_core else None
        return idx.to(device), targets.to(device), state

    @torch.no_grad()
    def validate():
        """Mean validation loss at each recurrence of eval_steps."""
        B_val = min(B, val_rows.rows // world)
        if B_val == 0:
            raise InputError(f"{s.data}: its validation split has {val_rows.rows} rows of {s.context} tokens, fewer than "
                             "processes: prepare it with a larger --val")
        depths = s.eval_steps if c.n_core else [0]
        sums = torch.zeros(len(depths) + 1, device=device, dtype=torch.float64)
        for i in range(math.ceil(min(s.eval_rows, val_rows.rows) / (B_val * world))):
            idx, targets, state = inputs(0, *val_rows.batch(0, i, rank, world, B_val))
            count = (targets != -100).sum()
            sums[-1] += count
            for j, r in enumerate(depths):
                with autocast():
                    loss = model(idx, targets, (r, 0), state)[1].double()
                sums[j] += torch.where(count > 0, loss, 0.0) * count
        if world > 1:
            dist.all_reduce(sums)
        return {r: (sums[j] / sums[-1]).item() for j, r in enumerate(depths)}

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
        for folder in glob.glob(os.path.join(glob.escape(s.out_dir), "step_*.tmp-*")):  # of a killed save
            shutil.rmtree(folder)
        keep_log(log_path, start)

    def log(entry):
        if rank == 0:
            with open(log_path, "a") as f:
                f.write(json.dumps(entry) + "\n")

    def report(u):
        losses = validate()
        say(f"update {u:5d}/{s.updates}  validation loss  " + "  ".join(
            f"r={r}: {x:.4f}" if c.n_core else f"{x:.4f}" for r, x in losses.items()), flush=True)
        log({"update": u, "val": losses})

    # What an update costs, for the time left: the curriculum makes late updates dearer.
    flops = functools.cache(lambda n, k: model.flops_per_token((n, k)))
    cost = lambda u: flops(mean_recurrence(s, u) - backprop_depth(s, u), backprop_depth(s, u))
    ahead = sum(map(cost, range(start, s.updates)))
    done, spent = 0, dict(before)

    if start == 0:
        report(0)
    clock = mark = time.time()
    marked = start
    for u in range(start, s.updates):
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"] * lr_factor(s, u)
        micro = [u * accumulate + a for a in range(accumulate)]
        batches = [rows.batch(s.seed, m, rank, world, B) for m in micro]
        # The loss is the mean over all labels of the update, however they fall on ranks and micro-batches.
        counts = torch.stack([(targets != -100).sum() for _, targets, _ in batches]).to(device, torch.float32)
        total = counts.sum()
        if world > 1:
            dist.all_reduce(total)
        loss = torch.zeros((), device=device)
        for m, rows_m, count in zip(micro, batches, counts):
            idx, targets, state = inputs(s.seed, *rows_m)
            n, k = draw_steps(s, u, m + 1)
            with ddp.no_sync() if world > 1 and m != micro[-1] else contextlib.nullcontext():
                with autocast():
                    part = ddp(idx, targets, (n, k), state)[1]
                part = torch.where(count > 0, part, 0.0) * (count / total.clamp(min=1))
                (part * world).backward()  # DDP averages over the ranks
            loss += part.detach()
            spent["flops"] += B * world * s.context * flops(n, k)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip)
        opt.step()
        opt.zero_grad(set_to_none=True)
        spent["tokens"] += per_update
        done += cost(u)

        u1, last = u + 1, u + 1 == s.updates
        if u1 % s.log_every == 0 or last or u1 % s.save_every == 0:
            if world > 1:
                dist.all_reduce(loss)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise InputError(f"--lr={s.lr}: loss {loss.item()}, gradient norm {norm.item()} at update {u1}, and nothing "
                                 "was saved since the last checkpoint: lower it, or look at the data")
            now = time.time()
            speed, mark, marked = (u1 - marked) * per_update / (now - mark), now, u1
            eta = (now - clock) / done * (ahead - done)
            entry = {"update": u1, "loss": loss.item(), "mean_r": mean_recurrence(s, u), "n": n, "k": k, "norm": norm.item(),
                     "lr": opt.param_groups[0]["lr"], "tokens_per_s": round(speed), **spent}
            depth = f"mean r {entry['mean_r']:2d} (n {n:2d} k {k})  " if c.n_core else ""
            say(f"update {u1:5d}/{s.updates}  loss {entry['loss']:.4f}  {depth}norm {entry['norm']:.2f}  "
                f"{speed:,.0f} tokens/s  eta {int(eta // 60)}:{int(eta % 60):02d}", flush=True)
            log(entry)
        if u1 % s.eval_every == 0 or last:
            report(u1)
        if rank == 0 and (u1 % s.save_every == 0 or last):
            save_checkpoint(s, model, opt, u1, {"accumulate": accumulate, **spent})
    say(f"done: {find_checkpoint(s.out_dir)}, {spent['tokens']:,} tokens and {spent['flops']:.3g} FLOPs since surgery, "
        f"{time.time() - clock:.0f} s" if rank == 0 else "")


def keep_log(path, start):
    """Drop the lines of updates that a resumed run will do again."""
    if os.path.exists(path):
        with open(path) as f:
            lines = [line for line in f if (m := re.match(r'{"update": (\d+),.*}\n', line)) and int(m[1]) <= start > 0]
        with open(path + ".tmp", "w") as f:
            f.writelines(lines)
        os.replace(path + ".tmp", path)


if __name__ == "__main__":
    cli(main)
