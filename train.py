"""
The training loop: pretraining, healing and task training of recurrent and ordinary models alike.

    python train.py --config=config/tiny.toml                              one process
    torchrun --nproc_per_node=4 train.py --config=config/tiny.toml         4 processes
    python train.py --config=config/tiny.toml --lr=0.01 --updates=200      any setting by hand
    python train.py --config=config/fig4.toml --dry_run                    what it takes, no weights
    python train.py --eval_only --init_from=DIR --data=SHARDS --eval_steps=1,4,32     losses only

What is unusual: each update draws its number of recurrences, r = n + k, from a heavy-tailed
distribution whose mean follows a curriculum, and only the last k carry gradient. All randomness
(rows, recurrences, initial states) is a function of (seed, update). So a run that was killed
continues with the same command. On as many processes it ends with the same bits, on another number
with the same numbers to rounding. `--help` lists the settings.

Paper: arXiv 2511.07384, sections 3 and 4 and appendix D.
"""
import argparse
import bisect
import contextlib
import difflib
import functools
import glob
import inspect
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from data import (cli, locked, open_data, read_json, tiny, tokenizer_bytes, whole, write_json,
                  write_result)
from model import IGNORE, Config, RecurrentLM, find_checkpoint, load_config
from muon import BUFFERS, Muon

TINY = "out/tiny/data"  # the embedded corpus, made when it is missing


@dataclass
class Settings:
    """The defaults are the paper's recipe (appendix D). Files in config/ say what differs."""
    out_dir: str = ""              # the run's folder: step_* checkpoints and log.jsonl
    data: str = ""                 # a folder made by data.py, or a mixture: A:1,B:1,C:2
    init_from: str = ""            # a checkpoint or run; empty: random weights of the shape below
    reinit: bool = False           # keep the shape of init_from, but start from random weights
    embed_scale: float = 1.0       # of random weights: multiplies the embeddings (Huginn: 72.7)
    seed: int = 0                  # of weights, order of the data, r and initial states
    # shape, for random weights without init_from
    n_embd: int = 96
    n_head: int = 2
    n_kv_head: int = 2
    n_ffn: int = 240
    n_prelude: int = 6             # an ordinary model is all prelude
    n_core: int = 0
    n_coda: int = 0
    # budget
    updates: int = 25000           # optimizer updates
    match_tokens: str = ""         # a finished run: spend as many tokens as it did since surgery
    match_flops: str = ""          # the same for training FLOPs; either one replaces `updates`
    batch_size: int = 1024         # sequences per update, over all ranks
    micro_batch: int = 8           # micro-batch per device; the rest is gradient accumulation
    draws: int = 1                 # draws of r per update, each for an equal share of micro-batches
    context: int = 1024            # T, tokens per sequence
    # recurrence
    mean_recurrence: int = 32      # R, the mean of r (the paper's sampler has mean R + 1)
    recurrence_sampler: str = "poisson-lognormal"  # or "fixed": r is its mean every time
    curriculum: str = "linear"     # how the mean rises from 1 to R: linear, 1-sqrt, none
    curriculum_warmup: float = 0.25  # over this fraction of the updates
    backprop_depth: int = 8        # k: gradients flow through the last k recurrences; 0: all
    backprop_warmup: float = 0.0   # k rises from 2 over this fraction of the updates
    # optimizer
    optimizer: str = "muon"        # muon (embeddings, head and norms by AdamW), adamw or adamw*
    lr: float = 0.001              # of Muon, or of AdamW (adamw*: Huginn's variant) for all
    adam_lr: float = 5e-5          # of AdamW beside Muon
    weight_decay: float = 1e-4
    clip: float = 1.0              # largest gradient norm
    warmup: float = 0.005          # learning rate: linear over this fraction of the updates,
    cooldown: float = 0.9          # then constant, then cosine down over this last fraction
    # evaluation, checkpoints, machine
    eval_every: int = 1000         # updates between validations; also one before and one after
    eval_rows: int = 1024          # validation sequences
    eval_steps: list[int] = (1, 2, 4, 8, 16, 32)  # at these recurrences
    save_every: int = 500          # updates between checkpoints; also one at the end
    keep: int = 2                  # checkpoints that stay
    log_every: int = 1
    dtype: str = "bfloat16"        # of weights and products (masters stay float32), or float32
    compile: bool = True           # torch.compile
    recompute: bool = False        # recompute recurrences in the backward pass: less memory
    max_minutes: float = 0.0       # save and stop after so much time (0: no limit)
    max_skips: int = 10            # updates in a row that are not finite; more end the run
    dry_run: bool = False          # print what the run would be, without weights
    eval_only: bool = False        # validation losses of init_from, as JSON in out_dir or there


# Settings that do not affect the result, but for rounding: a resumed run may change them.
FREE = {"out_dir", "micro_batch", "eval_every", "eval_rows", "eval_steps", "save_every", "keep",
        "log_every", "compile", "recompute", "max_minutes", "max_skips", "dry_run", "eval_only"}
CHOICES = {"recurrence_sampler": ("poisson-lognormal", "fixed"), "dtype": ("float32", "bfloat16"),
           "curriculum": ("linear", "1-sqrt", "none"), "optimizer": tuple(BUFFERS)}


def read_settings(argv):
    """--config=FILE.toml (flat keys), then --key=value, in their order. Exits on wrong ones."""
    parser = argparse.ArgumentParser("train.py", "train.py --config=FILE --key=value ...", __doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(f"train.py: error: {message} (--help lists settings)")
    comments = dict(re.findall(r"(?m)^    (\w+): .*?# (.*)$", inspect.getsource(Settings)))
    for f in fields(Settings):
        kind = {bool: yes_or_no, list[int]: numbers}.get(f.type, f.type)
        options = {"nargs": "?", "const": True} if f.type is bool else {}
        help = comments.get(f.name, "").replace("%", "%%")
        parser.add_argument(f"--{f.name}", type=kind, default=f.default, help=help,
                            choices=CHOICES.get(f.name), **options)
    args = []
    for arg in argv:
        is_file = arg.startswith("--config=")
        args += read_config(arg.removeprefix("--config=")) if is_file else [arg]
    known, unknown = parser.parse_known_args(args)
    if unknown:
        key = unknown[0].removeprefix("--").partition("=")[0]
        near = difflib.get_close_matches(key, vars(known), 1)
        hint = f"did you mean --{near[0]}=?" if near else "write --key=value"
        parser.error(f"unknown setting {unknown[0]}: {hint}")
    settings = Settings(**vars(known))
    for key in ("init_from" if settings.eval_only else "out_dir", "data"):
        if not getattr(settings, key):
            parser.error(f"--{key} is not set: give a folder, or --config=config/NAME.toml")
    return settings


def read_config(path):
    """The settings of a TOML file as arguments of the command line."""
    with open(path, "rb") as f:
        try:
            values = tomllib.load(f)
        except ValueError as e:
            sys.exit(f"{path}: {e}")
    lists = {key: ",".join(map(str, v)) for key, v in values.items() if isinstance(v, list)}
    return [f"--{key}={value}" for key, value in (values | lists).items()]


def yes_or_no(text):
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def numbers(text):
    """"1,2,4" -> [1, 2, 4]"""
    return [int(part) for part in text.split(",")]


# ------------------------------------------------------------ schedules: functions of the update

def mean_recurrence(settings, update):
    """Mean of r: rises from 1 to settings.mean_recurrence over the curriculum."""
    R, warmup = settings.mean_recurrence, math.ceil(settings.curriculum_warmup * settings.updates)
    if settings.curriculum == "none" or update >= warmup:
        return R
    f = update / warmup
    if settings.curriculum == "1-sqrt":
        f = 1 - math.sqrt(1 - f)
    return max(1, math.ceil(R * f))


def backprop_depth(settings, update):
    """k: never more than the mean recurrence; rises from 2 over its warm-up (Figure 16)."""
    k = settings.backprop_depth or settings.mean_recurrence
    warmup = math.ceil(settings.backprop_warmup * settings.updates)
    if update < warmup:
        k = min(k, 1 + math.ceil((k - 1) * (update + 1) / warmup))
    return min(k, mean_recurrence(settings, update))


def draw_steps(settings, update, number):
    """
    (n, k) at this update for draw `number`, counted from 1 over the whole run. Huginn's sampler:
    rate ~ LogNormal of mean r, p ~ Poisson(rate) + 1, n = max(p - k, 0). Seed 0 gives the paper's
    own sequence.
    """
    r, k = mean_recurrence(settings, update), backprop_depth(settings, update)
    if settings.recurrence_sampler == "fixed":
        return r - k, k
    seed = (514229 + number + 1_000_003 * settings.seed) % (2**31 - 1)
    generator = torch.Generator().manual_seed(seed)
    rate = torch.empty(1).log_normal_(math.log(r) - 0.125, 0.5, generator=generator)
    p = int(torch.poisson(rate, generator=generator)) + 1
    if settings.backprop_depth == 0:
        return 0, p
    return max(p - k, 0), min(p, k)


def lr_scale(settings, update):
    """Warm-up, stable, decay: what multiplies the learning rates; between 0.001 and 1."""
    warmup = math.ceil(settings.warmup * settings.updates)
    cooldown = math.ceil(settings.cooldown * settings.updates)
    low = 0.001
    if update < warmup:
        return low + (1 - low) * update / warmup
    done = max(0, update - (settings.updates - cooldown)) / max(1, cooldown)
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))


def split_batch(settings, world):
    """A rank's micro-batches per update, and the rows of each."""
    accumulate = math.ceil(settings.batch_size / world / settings.micro_batch)
    B, rest = divmod(settings.batch_size, world * accumulate)
    if rest:
        sys.exit(f"--batch_size={settings.batch_size}: does not divide into {world} processes with "
                 f"{accumulate} micro-batches of at most {settings.micro_batch}: change either")
    return accumulate, B


# ----------------------------------------------------------------------------------- checkpoints

def save_checkpoint(settings, model, optimizer, tokenizer, progress):
    """
    out_dir/step_*: float32 weights, the optimizer's state and where the run is. Old ones go when
    the new one is whole. Rank 0 calls it: all ranks hold the same.
    """
    tensors = {**optimizer.masters, **optimizer.state}
    if not all(t.isfinite().all() for t in tensors.values()):
        sys.exit(f"{settings.out_dir}: the weights are no longer finite, so nothing was saved: "
                 "lower --lr; the checkpoint that is there stays")
    with whole(os.path.join(settings.out_dir, f"step_{progress['update']:06d}")) as folder:
        model.save(folder, tokenizer, optimizer.masters)
        save_file(optimizer.state, os.path.join(folder, "optimizer.safetensors"))
        write_json(os.path.join(folder, "train.json"), {"config": asdict(settings), **progress})
    for old in checkpoints(settings)[:-settings.keep]:
        shutil.rmtree(old)


def checkpoints(settings):
    """The checkpoints of out_dir, oldest first."""
    return sorted(glob.glob(os.path.join(glob.escape(settings.out_dir), "step_" + "[0-9]" * 6)))


def find_resume(settings, fingerprint):
    """The newest checkpoint of out_dir and its train.json, or (None, None). Same settings only."""
    if not checkpoints(settings):
        return None, None
    folder = checkpoints(settings)[-1]
    progress = read_json(os.path.join(folder, "train.json"))
    if settings.match_tokens or settings.match_flops:  # that run is no longer needed
        settings.updates = progress["config"]["updates"]
    old = asdict(Settings()) | progress["config"]
    for key, value in json.loads(json.dumps(asdict(settings))).items():
        if key not in FREE and old[key] != value:
            sys.exit(f"{settings.out_dir}: holds a run with {key}={old[key]}, not {value}: choose "
                     "another --out_dir (--init_from can start from that run)")
    if progress["data"] != json.loads(json.dumps(fingerprint)):
        sys.exit(f"{settings.data}: has changed since the run in {settings.out_dir} began: restore "
                 "it, or choose another --out_dir")
    return folder, progress


def match_updates(settings, flops):
    """Set settings.updates to spend what another run did; flops: of this model per token."""
    per_update = settings.batch_size * settings.context
    for key, cost in (("tokens", per_update), ("flops", per_update * flops)):
        folder = getattr(settings, f"match_{key}")
        if folder:
            other = read_json(os.path.join(find_checkpoint(folder), "train.json"))
            if other["update"] != other["config"]["updates"]:
                sys.exit(f"--match_{key}={folder}: is at update {other['update']} of "
                         f"{other['config']['updates']}: let that run finish first")
            settings.updates = max(1, round(other[key] / cost))


# -------------------------------------------------------------------------------- what it takes

def cost(settings, c, update):
    """What an update costs, in layers: a recurrence without gradient is a third of one with it."""
    r, k = mean_recurrence(settings, update), backprop_depth(settings, update)
    return c.n_prelude + c.n_coda + c.n_core * (k + (r - k) / 3)


def paper_flops(settings, model, updates=None):
    """
    Training FLOPs of the first `updates` (default: all) as the paper's figures count them: by the
    scheduled r, not by the draws, whose mean is r + 1. The edges of their curriculum are up to an
    update off ours: r covers [int(f^-1((r-1)/R) W), int(f^-1(r/R) W)), W = int(warmup * total).
    """
    R, flat = settings.mean_recurrence, replace(settings, curriculum="none")
    updates = settings.updates if updates is None else updates
    edges = []
    if settings.curriculum != "none":
        W = int(settings.curriculum_warmup * settings.updates)
        linear = settings.curriculum == "linear"
        edges = [int((r / R if linear else 1 - (1 - r / R) ** 2) * W) for r in range(1, R + 1)]
    steps = Counter()
    for update in range(updates):
        r = min(R, 1 + bisect.bisect_right(edges, update)) if edges else R
        k = min(r, backprop_depth(flat, update))
        steps[r - k, k] += 1
    flops = sum(count * model.flops_per_token(nk) for nk, count in steps.items())
    return flops * settings.batch_size * settings.context


def plan(settings, c, world):
    """Lines that say what a run is: parameters, budget, schedules."""
    model, (accumulate, B) = RecurrentLM.empty(c), split_batch(settings, world)
    parts = ", ".join(f"{part} {n:,}" for part, n in model.num_params().items() if n)
    tokens = settings.batch_size * settings.context
    yield f"model: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, width {c.n_embd}; {parts}"
    yield (f"budget: {settings.updates:,} updates of {tokens:,} tokens ({world} x {accumulate} x "
           f"{B} rows of {settings.context}), {settings.updates * tokens:.4g} tokens, "
           f"{paper_flops(settings, model):.4g} training FLOPs by the paper's rule")
    if c.n_core:
        means = (mean_recurrence(settings, u) for u in range(settings.updates))
        runs = [f"{r} x {len(list(same)):,}" for r, same in itertools.groupby(means)]
        runs = runs if len(runs) < 8 else [*runs[:3], "...", *runs[-2:]]
        yield (f"curriculum: mean r {', '.join(runs)} updates, {settings.draws} draws per update; "
               f"k up to {settings.backprop_depth or 'r'}")
    warmup = math.ceil(settings.warmup * settings.updates)
    cooldown = math.ceil(settings.cooldown * settings.updates)
    yield (f"learning rate: {settings.lr:g} ({settings.optimizer}), {settings.adam_lr:g} of AdamW "
           f"beside Muon, up over {warmup:,} updates, cosine down over the last {cooldown:,}")


# ---------------------------------------------------------------------------------- the processes

@dataclass
class Ranks:
    """The processes of a run. torchrun sets the environment; alone we are rank 0 of 1."""
    rank: int
    world: int
    device: str

    @classmethod
    def start(cls):
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        device = "cpu"
        if torch.cuda.is_available():
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
            torch.cuda.set_device(device)
            torch.set_float32_matmul_precision("high")
        if world > 1:
            store = next(dist.rendezvous("env://"))[0]
            if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
                # Restarts by torchrun share its store, with the addresses of dead processes.
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                store = dist.PrefixStore(attempt, store)
            backend = "gloo" if device == "cpu" else "nccl"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        return cls(rank, world, device)

    def sum(self, t):
        """A tensor, summed over the ranks."""
        if self.world > 1:
            dist.all_reduce(t)
        return t

    def wait(self):
        if self.world > 1:
            dist.barrier()

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)


# --------------------------------------------------------------------------- model and validation

def make_model(settings, rows, folder):
    """The model in float32: of the checkpoint `folder`, else of init_from, else random weights."""
    source = folder or settings.init_from
    if source and (folder or not settings.reinit):
        model = RecurrentLM.load(source, dtype=torch.float32)
    else:
        config = shape(settings, rows.meta)
        config.embed_scale = settings.embed_scale
        config.mean_recurrence = settings.mean_recurrence  # the effective depth of its init
        model = RecurrentLM(config)
        model.init_weights(settings.seed)
    c, vocab_size = model.config, rows.meta["vocab_size"]
    if vocab_size > c.vocab_size:
        sys.exit(f"{settings.data}: its tokenizer has ids up to {vocab_size - 1}, the model's end "
                 f"at {c.vocab_size - 1}: prepare the data with the model's tokenizer")
    if settings.context > c.context:
        sys.exit(f"--context={settings.context}: the model is for at most {c.context} tokens")
    theirs = tokenizer_bytes(model.folder) if model.folder else b""
    if theirs and theirs != tokenizer_bytes(rows.folder):
        sys.exit(f"{rows.folder}: its tokenizer is not {model.folder}'s: prepare it with that one")
    return model


def shape(settings, meta):
    """Config of random weights: of init_from, or of the settings and the data's meta.json."""
    if settings.init_from:
        return load_config(find_checkpoint(settings.init_from))
    keys = ("n_embd", "n_head", "n_kv_head", "n_ffn", "n_prelude", "n_core", "n_coda")
    return Config(meta["vocab_size"], *(getattr(settings, key) for key in keys),
                  context=max(2048, settings.context), eos_token_id=meta["eos_id"])


def muon_splits(c):
    """
    {name: rows of its parts}. The paper's static baselines are Hugging Face models, in which q, k,
    v, gate and up are matrices of their own. In recurrent models they are stacked.
    """
    splits = {}
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    for i in range(c.n_prelude):
        splits[f"prelude.{i}.attn.qkv.weight"] = [q, kv, kv]
        splits[f"prelude.{i}.mlp.fc.weight"] = [c.n_ffn, c.n_ffn]
    return splits


def run_batch(model, batch, seed, steps, device):
    """The mean loss of a loader's batch, with noise that depends on a row's number alone."""
    idx, targets, numbers = batch
    state = model.initial_state(*idx.shape, seed, numbers) if model.config.n_core else None
    return model(idx.to(device), targets.to(device), steps, state)[1]


@torch.no_grad()
def validate(settings, model, rows, ranks):
    """
    {r: (mean loss, its standard error, accuracy, number of labels)} over eval_rows sequences of the
    validation split, for each r of eval_steps. The standard error takes labels for independent;
    those of one text are not, so the truth is larger.
    """
    B = min(split_batch(settings, ranks.world)[1], rows.rows // ranks.world)
    if B == 0:
        sys.exit(f"{settings.data}: its validation split has {rows.rows} rows of {settings.context}"
                 " tokens, fewer than processes: prepare it with a larger --val")
    steps = list(settings.eval_steps) if model.config.n_core else [0]
    limit = min(settings.eval_rows, rows.rows)
    sums = torch.zeros(len(steps), 4, device=ranks.device, dtype=torch.float64)

    def moments(s, rope, targets):
        targets = targets.flatten()
        keep = targets != IGNORE
        x = model.run_coda(s, rope).flatten(0, 1)
        losses, right = model.token_losses(x[keep], targets[keep])
        losses = losses.double()
        return torch.stack([keep.sum(), losses.sum(), losses.square().sum(), right.sum()])

    for i in range(math.ceil(limit / (B * ranks.world))):
        idx, targets, numbers = rows.batch(0, i, ranks.rank, ranks.world, B)
        targets[torch.from_numpy(numbers >= limit)] = IGNORE  # the last batch has too many
        state = model.initial_state(*idx.shape, 0, numbers) if model.config.n_core else None
        idx, targets = idx.to(ranks.device), targets.to(ranks.device)
        found = model.trajectory(idx, steps, targets, state, moments)
        sums += torch.stack([found[r] for r in steps])
    result = {}
    for r, (n, total, squares, right) in zip(steps, ranks.sum(sums).tolist()):
        n = max(n, 1)
        variance = max(0.0, squares - total**2 / n) / max(n - 1, 1)
        result[r] = total / n, math.sqrt(variance / n), right / n, int(n)
    return result


def evaluate(settings, ranks):
    """eval_only: a table of losses over recurrences, also as out_dir/eval_loss_DATA.json."""
    rows = open_data(settings.data, "val", settings.context)
    model = make_model(settings, rows, settings.init_from)
    model.to(ranks.device, getattr(torch, settings.dtype))
    began, results = time.time(), []
    ranks.say(f"{'r':>5}{'loss':>9}{'± s.e.':>9}{'accuracy':>10}{'labels':>12}")
    for r, (loss, error, accuracy, n) in validate(settings, model, rows, ranks).items():
        results.append({"steps": r, "metric": "loss", "value": loss, "standard_error": error,
                        "n": n, "accuracy": accuracy})
        name = r if model.config.n_core else "-"
        ranks.say(f"{name:>5}{loss:9.4f}{error:9.4f}{accuracy:10.2%}{n:12,}")
    if ranks.rank == 0:
        names = [part.partition(":")[0].rstrip("/") for part in settings.data.split(",")]
        name = "+".join(map(os.path.basename, names))
        path = os.path.join(settings.out_dir or settings.init_from, f"eval_loss_{name}.json")
        tokens = min(settings.eval_rows, rows.rows) * settings.context
        write_result(path, "train", model, settings.data, results, time.time() - began, tokens)
        print(path)


def warm_up(settings, model, batch, device):
    """
    One forward and backward pass at the full backprop depth. It compiles the graphs with and
    without gradient and meets a memory limit now, not when the curriculum has risen. Nothing of it
    stays.
    """
    k = min(settings.backprop_depth or settings.mean_recurrence, settings.mean_recurrence)
    B, began = len(batch[0]), time.time()
    try:
        run_batch(model, batch, 0, (1, k), device).backward()
    except RuntimeError as e:  # torch.OutOfMemoryError is one
        if "memory" not in str(e):
            raise
        change = f"--micro_batch={B // 2}" if B > 1 else "fewer tokens (--context)"
        if not settings.recompute and model.config.n_core:
            change += " or --recompute"
        sys.exit(f"out of memory with {B} sequences at k = {k}: try {change}")
    model.zero_grad()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device != "cpu":
        peak = torch.cuda.max_memory_allocated()
    return f"{peak / 1e9:.2f} GB at the peak, {time.time() - began:.0f} s"


# ---------------------------------------------------------------------------------------- the run

def begin(settings, rows, ranks):
    """
    Model, optimizer and progress (a dict that train.json keeps), of our newest checkpoint or of the
    run's beginning. Says what was decided.
    """
    folder, progress = find_resume(settings, rows.fingerprint())
    model = make_model(settings, rows, folder)
    c = model.config
    c.mean_recurrence = settings.mean_recurrence
    c.backprop_depth = settings.backprop_depth or settings.mean_recurrence
    if not folder:
        match_updates(settings, model.flops_per_token())
        # Tokens and FLOPs count from surgery on, over all stages, for --match_* of another run.
        progress = {"update": 0, "skipped": 0, "tokens": 0, "flops": 0}
        earlier = os.path.join(model.folder or "", "train.json")
        if c.n_core and os.path.exists(earlier):
            progress |= {key: read_json(earlier)[key] for key in ("tokens", "flops")}
        progress["data"] = rows.fingerprint()
    masters = {name: p.data for name, p in model.named_parameters()}
    model.to(ranks.device, getattr(torch, settings.dtype))
    model.recompute = settings.recompute
    splits = {} if c.n_core else muon_splits(c)
    optimizer = Muon(model.named_parameters(), settings.lr, settings.adam_lr, settings.weight_decay,
                     settings.optimizer, masters, splits, ranks.rank, ranks.world)
    if folder:
        state = load_file(os.path.join(folder, "optimizer.safetensors"), device=ranks.device)
        optimizer.load(state, progress["update"] - progress["skipped"])
    for line in plan(settings, c, ranks.world):
        ranks.say(line)
    epochs = settings.updates * settings.batch_size / rows.rows
    ranks.say(f"data: {settings.data}, {rows.rows:,} rows, {epochs:.2f} epochs; {settings.dtype}, "
              f"{ranks.device}; from {folder or model.folder or 'random weights'}")
    if splits and settings.optimizer == "muon":
        ranks.say("muon: q, k, v, gate and up each by itself, as the paper's static baselines do")
    if settings.compile and ranks.device == "cpu" and not shutil.which("g++"):
        ranks.say("no C++ compiler (g++) found: going on without torch.compile")
    elif settings.compile:
        model.compile_parts()
    if ranks.device == "cpu" and settings.context <= 128:
        # SDPA's fused backward on a CPU is slow for short rows: its plain form takes half the time.
        torch.backends.cuda.enable_flash_sdp(False)
    return model, optimizer, progress


class Log:
    """What rank 0 prints and appends to log.jsonl. Other ranks say nothing."""

    def __init__(self, settings, model, rank, start):
        self.settings, self.recurrent, self.rank = settings, model.config.n_core > 0, rank
        self.path = os.path.join(settings.out_dir, "log.jsonl")
        costs = (cost(settings, model.config, u) for u in range(settings.updates))
        self.cost = list(itertools.accumulate(costs, initial=0))  # of the updates before each
        self.start = self.last = start
        self.began = self.mark = time.time()
        if rank == 0 and os.path.exists(self.path):  # what a resumed run does again goes
            with open(self.path) as f:
                old = [json.loads(line) for line in f if line.endswith("}\n")]
            with whole(self.path) as path, open(path, "w") as f:
                f.writelines(json.dumps(x) + "\n" for x in old if x["update"] <= start > 0)

    def write(self, entry, text):
        if self.rank == 0:
            print(f"update {entry['update']:5d}/{self.settings.updates}  {text}", flush=True)
            with open(self.path, "a") as f:
                f.write(json.dumps(entry) + "\n")

    def update(self, entry):
        """entry: what log.jsonl has of an update, less its speed."""
        done, now = entry["update"], time.time()
        tokens = (done - self.last) * self.settings.batch_size * self.settings.context
        entry["tokens_per_s"] = round(tokens / (now - self.mark))
        self.mark, self.last = now, done
        # Late updates cost more, as the curriculum rises.
        share = (self.cost[-1] - self.cost[done]) / (self.cost[done] - self.cost[self.start])
        minutes, seconds = divmod(int((now - self.began) * share), 60)
        depth = "mean r {mean_r} (n {n} k {k})  " if self.recurrent else ""
        text = "loss {loss:.4f}  " + depth + "norm {norm:.2f}  {tokens_per_s:,} tokens/s  "
        self.write(entry, text.format(**entry) + f"{minutes}:{seconds:02d} left")

    def validation(self, losses, progress):
        entry = {key: progress[key] for key in ("update", "tokens", "flops")}
        entry["val"] = {r: loss for r, (loss, _, _, _) in losses.items()}
        entry["accuracy"] = {r: accuracy for r, (_, _, accuracy, _) in losses.items()}
        losses = entry["val"].items()
        text = "  ".join(f"r={r}: {x:.4f}" if self.recurrent else f"{x:.4f}" for r, x in losses)
        self.write(entry, f"validation loss  {text}")


def prefetch(load, updates):
    """Yields (update, load(update)), reading the next one's rows while this one is computed."""
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(load, updates[0])
        for update in updates:
            batches = ready.result()
            if update + 1 in updates:
                ready = pool.submit(load, update + 1)
            yield update, batches


def train(settings, ranks):
    """The run. Returns the exit code: 0, or 128 + the signal that stopped it."""
    rank, world, device = ranks.rank, ranks.world, ranks.device
    begun, signals, skips = time.time(), [], 0
    accumulate, B = split_batch(settings, world)
    rows = open_data(settings.data, "train", settings.context)
    val_rows = open_data(settings.data, "val", settings.context)
    if rank == 0:
        for left in glob.glob(os.path.join(glob.escape(settings.out_dir), "step_*.tmp-*")):
            shutil.rmtree(left)  # of a save that was killed
    model, optimizer, progress = begin(settings, rows, ranks)
    start = progress["update"]
    if start == settings.updates:
        ranks.say(f"{settings.out_dir}: is complete, nothing to do")
        return 0
    ranks.say(f"warm-up: {warm_up(settings, model, rows.batch(0, 0, 0, 1, B), device)}")
    log, flops_per_token = Log(settings, model, rank, start), functools.cache(model.flops_per_token)
    if start == 0:
        log.validation(validate(settings, model, val_rows, ranks), progress)

    def load(update):  # micro-batches are numbered alike on any number of ranks
        first = (update * world + rank) * accumulate
        return [rows.batch(settings.seed, first + i, 0, 1, B) for i in range(accumulate)]

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))

    for update, batches in prefetch(load, range(start, settings.updates)):
        scale = lr_scale(settings, update)
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        sums[2] = len(signals)
        sums[3] = 0 < 60 * settings.max_minutes < time.time() - begun
        for micro_step, batch in enumerate(batches):
            number = update * settings.draws + micro_step % settings.draws + 1
            n, k = draw_steps(settings, update, number)
            labels = int((batch[1] != IGNORE).sum())  # the update's loss is a mean over labels
            loss = labels * run_batch(model, batch, settings.seed, (n, k), device)
            loss.backward()
            optimizer.accumulate()
            sums[0] += loss.detach()
            sums[1] += labels
            progress["flops"] += world * B * settings.context * flops_per_token((n, k))
        ranks.sum(sums)
        norm = optimizer.step(scale, settings.clip, sums[1].clamp(min=1))
        loss, labels, stopped, late = sums.tolist()

        progress["update"] = update + 1
        progress["tokens"] += settings.batch_size * settings.context
        finite = math.isfinite(norm)
        skips = 0 if finite else skips + 1  # in a row; nothing is saved meanwhile
        progress["skipped"] += not finite
        last = update + 1 == settings.updates
        if last or not finite or (update + 1) % settings.log_every == 0:
            log.update({"update": update + 1, "loss": loss / max(labels, 1), "norm": norm, "n": n,
                        "k": k, "mean_r": mean_recurrence(settings, update), "skipped": not finite,
                        "lr": settings.lr * scale,
                        "tokens": progress["tokens"], "flops": progress["flops"]})
        if skips > settings.max_skips or (last and not finite):
            sys.exit(f"the last {skips} updates had no finite gradient: lower --lr="
                     f"{settings.lr} or look at the data; {settings.out_dir} keeps its checkpoint")
        if last or (update + 1) % settings.eval_every == 0:
            log.validation(validate(settings, model, val_rows, ranks), progress)
        stop = stopped or late
        if finite and (last or stop or (update + 1) % settings.save_every == 0):
            if rank == 0:
                save_checkpoint(settings, model, optimizer, rows.folder, progress)
            ranks.wait()
        if stop and not last:
            why = signal.Signals(signals[0]).name if signals else "--max_minutes"
            ranks.say(f"stopped after update {update + 1} by {why}: the same command continues")
            return 128 + (signals or [signal.SIGTERM])[0] if stopped else 0
    ranks.say(f"done: {settings.out_dir}, {progress['tokens']:,} tokens and "
              f"{progress['flops']:.3g} FLOPs since surgery, {time.time() - begun:.0f} s")
    return 0


def dry_run(settings):
    """Print the plan of a run. It needs the shape of init_from, not its weights."""
    meta = os.path.join(settings.data.split(",")[0], "meta.json")
    try:
        config = shape(settings, None if settings.init_from else read_json(meta))
    except FileNotFoundError as e:
        sys.exit(f"{e}: the comment of the run's file in config/ says which command makes it")
    match_updates(settings, RecurrentLM.empty(config).flops_per_token())
    for line in plan(settings, config, world=1):
        print(line)


def main():
    settings = read_settings(sys.argv[1:])
    if settings.dry_run:
        return dry_run(settings)
    ranks = Ranks.start()
    if settings.data.startswith(TINY) and not os.path.isdir(TINY) and ranks.rank == 0:
        tiny(TINY)
    ranks.wait()
    if settings.eval_only:
        code = evaluate(settings, ranks)
    else:
        with locked(settings.out_dir) if ranks.rank == 0 else contextlib.nullcontext():
            code = train(settings, ranks)
    if ranks.world > 1:
        dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    cli(main)
