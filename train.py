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
with the same numbers to rounding.

Paper: arXiv 2511.07384, sections 3 and 4 and appendix D.
"""
import bisect
import contextlib
import functools
import inspect
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
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from data import (RANK, WORLD, Parser, cli, copy_tokenizer, locked, open_data, read_json, say, tiny,
                  tokenizer_bytes, whole, write_json, write_result)
from model import IGNORE, Config, RecurrentLM, UserError, find_checkpoint, load_config
from muon import BUFFERS, Optimizer, stacked_parts

TINY = "out/tiny/data"  # the embedded corpus, made when it is missing
MAX_SKIPS = 10  # updates in a row without a finite gradient; more end the run


class Settings(SimpleNamespace):
    """The defaults are the paper's recipe (appendix D). Files in config/ say what differs."""
    config = ""               # a TOML file of settings; those given beside it win
    out_dir = ""              # the run's folder: step_* checkpoints and log.jsonl
    data = ""                 # a folder made by data.py, or a mixture: A:1,B:1,C:2
    init_from = ""            # a checkpoint or run; empty: random weights of the shape below
    reinit = False            # keep the shape of init_from, but start from random weights
    embed_scale = 1.0         # of random weights: multiplies the embeddings (Huginn: 72.7)
    seed = 0                  # of weights, order of the data, r and initial states
    # shape, for random weights without init_from
    n_embd = 96               # width
    n_head = 2                # attention heads
    n_kv_head = 2             # heads of keys and values
    n_ffn = 240               # width inside the MLP
    n_prelude = 6             # layers; an ordinary model is all prelude
    n_core = 0                # layers of the recurrent block
    n_coda = 0                # layers after it
    # budget
    updates = 25000           # optimizer updates
    batch_size = 1024         # sequences per update, over all processes
    micro_batch = 8           # micro-batch per device; the rest is gradient accumulation
    draws = 1                 # draws of r per update, each for an equal share of micro-batches
    context = 1024            # T, tokens per sequence
    # recurrence
    mean_recurrence = 32      # R, the mean of r (the paper's sampler has mean R + 1)
    recurrence_sampler = "poisson-lognormal"  # or fixed: r is its mean every time
    curriculum = "linear"     # how the mean rises from 1 to R: linear, 1-sqrt, none
    curriculum_warmup = 0.25  # over this fraction of the updates
    backprop_depth = 8        # k: gradients flow through the last k recurrences; 0: all
    backprop_warmup = 0.0     # k rises from 2 over this fraction of the updates
    # optimizer
    optimizer = "muon"        # muon (embeddings, head and norms by AdamW), adamw or adamw*
    lr = 0.001                # of Muon, or of AdamW (adamw*: Huginn's variant) for all
    adam_lr = 5e-5            # of AdamW beside Muon
    weight_decay = 1e-4       # of all weights
    clip = 1.0                # largest gradient norm
    warmup = 0.005            # learning rate: linear over this fraction of the updates,
    cooldown = 0.9            # then constant, then cosine down over this last fraction
    # evaluation, checkpoints, machine
    eval_every = 1000         # updates between validations; also one before and one after
    eval_rows = 1024          # validation sequences
    eval_steps = (1, 2, 4, 8, 16, 32)  # at these recurrences
    save_every = 500          # updates between checkpoints; also one at the end
    keep = 2                  # checkpoints that stay
    log_every = 1             # updates between lines of the log
    wandb = False             # log to Weights & Biases, too
    dtype = "bfloat16"        # of weights and products (masters stay float32), or float32
    compile = True            # torch.compile
    recompute = False         # recompute recurrences in the backward pass: less memory
    dry_run = False           # print what the run would be, without weights
    eval_only = False         # validation losses of init_from, as JSON in out_dir or there


# Settings that do not affect the result, but for rounding: a resumed run may change them.
FREE = {"config", "out_dir", "micro_batch", "eval_every", "eval_rows", "eval_steps", "save_every",
        "keep", "log_every", "wandb", "compile", "recompute"}
CHOICES = {"recurrence_sampler": ["poisson-lognormal", "fixed"], "dtype": ["float32", "bfloat16"],
           "curriculum": ["linear", "1-sqrt", "none"], "optimizer": list(BUFFERS)}


def read_settings(argv):
    """
    Settings of --config=FILE.toml (flat keys) and of --key=value, which wins. --key alone is true.
    Exits on a wrong one.
    """
    parser = Parser(prog="train.py", usage="train.py --config=FILE --key=value ...",
                    description=__doc__)
    comments = re.findall(r"(?m)^    (\w+) = .*?# (.*)$", inspect.getsource(Settings))
    for name, comment in comments:
        default = getattr(Settings, name)
        kind = {bool: yes_or_no, tuple: numbers}.get(type(default), type(default))
        parser.add_argument(f"--{name}", type=kind, default=default, choices=CHOICES.get(name),
                            help=f"{comment} [{default}]", nargs="?", const="true")
    path = parser.parse_args(argv).config
    if path:
        try:
            config = tomllib.loads(Path(path).read_text())
        except ValueError as e:
            parser.error(f"{path}: {e}")
        argv = [f"--{key}={value}" for key, value in config.items()] + argv
    settings = Settings(**vars(parser.parse_args(argv)))
    if not (settings.data and (settings.out_dir or settings.eval_only)):
        parser.error("give --data and --out_dir, or --config=FILE")
    settings.micro_batch = min(settings.micro_batch, math.ceil(settings.batch_size / WORLD))
    if settings.batch_size % (settings.micro_batch * WORLD):
        parser.error(f"--batch_size={settings.batch_size} is not a multiple of {WORLD} processes "
                     f"times --micro_batch={settings.micro_batch}")
    return settings


def yes_or_no(text):
    """"true" -> True"""
    return bool(["false", "true"].index(text.lower()))


def numbers(text):
    """"1,2,4" -> [1, 2, 4]"""
    return [int(part) for part in text.strip("[]").split(",")]


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
    """k, where the mean recurrence is not below it; rises from 2 over its warm-up (Figure 16)."""
    k = settings.backprop_depth or settings.mean_recurrence
    warmup = math.ceil(settings.backprop_warmup * settings.updates)
    if update < warmup:
        k = min(k, 1 + math.ceil((k - 1) * (update + 1) / warmup))
    return k


def draw_steps(settings, update, number):
    """
    (n, k) at this update for draw `number`, counted from 1 over the whole run. Huginn's sampler:
    rate ~ LogNormal of the mean recurrence, r ~ Poisson(rate) + 1. Seed 0 gives the paper's own
    sequence.
    """
    r = mean_recurrence(settings, update)
    k = min(r, backprop_depth(settings, update))
    if settings.recurrence_sampler != "fixed":
        seed = (514229 + number + 1_000_003 * settings.seed) % (2**31 - 1)
        generator = torch.Generator().manual_seed(seed)
        rate = torch.empty(1).log_normal_(math.log(r) - 0.125, 0.5, generator=generator)
        r = int(torch.poisson(rate, generator=generator)) + 1
    k = min(r, k) if settings.backprop_depth else r
    return r - k, k


def lr_scale(settings, update):
    """Warm-up, stable, decay: what multiplies the learning rates; between 0.001 and 1."""
    warmup = math.ceil(settings.warmup * settings.updates)
    cooldown = math.ceil(settings.cooldown * settings.updates)
    if update < warmup:
        scale = update / warmup
    else:
        done = max(0, update - (settings.updates - cooldown)) / max(1, cooldown)
        scale = 0.5 * (1 + math.cos(math.pi * done))
    return 0.001 + 0.999 * scale


# ------------------------------------------------------------------------------------- the budget

def paper_flops(settings, model, updates):
    """
    Training FLOPs of the first `updates` as the paper's figures count them: by the scheduled r, not
    by the draws, whose mean is r + 1. The edges of their curriculum are up to an update off ours:
    r covers [int(f^-1((r-1)/R) W), int(f^-1(r/R) W)), W = int(warmup * total).
    """
    R, W = settings.mean_recurrence, int(settings.curriculum_warmup * settings.updates)
    if settings.curriculum == "none":
        W = 0
    power = 2 if settings.curriculum == "1-sqrt" else 1
    edges = [int((1 - (1 - r / R) ** power) * W) for r in range(1, R)]
    flops, flops_per_token = 0, functools.cache(model.flops_per_token)
    for update in range(updates):
        r = 1 + bisect.bisect_right(edges, update)
        k = min(r, backprop_depth(settings, update))
        flops += flops_per_token((r - k, k))
    return flops * settings.batch_size * settings.context


def plan(settings, model):
    """Print what a run is: parameters, budget, schedules."""
    c, updates = model.config, settings.updates
    tokens = updates * settings.batch_size * settings.context
    parts = ", ".join(f"{part} {n:,}" for part, n in model.num_params().items() if n)
    say(f"model: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, width {c.n_embd}; {parts}")
    say(f"budget: {updates:,} updates of {settings.batch_size:,} sequences, {tokens:.4g} tokens, "
        f"{paper_flops(settings, model, updates):.4g} training FLOPs by the paper's rule")
    if c.n_core:
        say(f"mean r: up to {settings.mean_recurrence} ({settings.curriculum} curriculum, "
            f"{settings.curriculum_warmup * updates:,.0f} updates)")
    say(f"learning rate: {settings.lr:g} ({settings.optimizer}), up over "
        f"{settings.warmup * updates:,.0f} updates, cosine down over the last "
        f"{settings.cooldown * updates:,.0f}")


# ----------------------------------------------------------------------------------- checkpoints

def checkpoints(settings):
    """The checkpoints of out_dir, oldest first."""
    return sorted(Path(settings.out_dir).glob("step_" + "[0-9]" * 6))


def save_checkpoint(settings, model, optimizer, dataset, progress):
    """
    out_dir/step_*: float32 weights, the optimizer's state and where the run is. Old ones go when
    the new one is whole. Rank 0 calls it: all ranks hold the same.
    """
    if not all(weight.isfinite().all() for weight in optimizer.masters.values()):
        raise UserError(f"{settings.out_dir}: the weights are no longer finite, so nothing was "
                        "saved: lower --lr; the checkpoint that is there stays")
    with whole(Path(settings.out_dir, f"step_{progress['update']:06d}")) as folder:
        model.save(folder, optimizer.masters)
        copy_tokenizer(dataset.folder, folder)
        save_file(optimizer.state, Path(folder, "optimizer.safetensors"))
        write_json(Path(folder, "train.json"), progress | {"config": vars(settings)})
    kept = checkpoints(settings)[-settings.keep:]
    for path in Path(settings.out_dir).glob("step_*"):  # also what a killed save left
        if path not in kept:
            shutil.rmtree(path)


def find_resume(settings, fingerprint):
    """The newest checkpoint of out_dir and its train.json, or (None, None). Same settings only."""
    found = checkpoints(settings)
    if not found:
        return None, None
    progress = read_json(found[-1] / "train.json")
    for key, value in vars(settings).items():
        old = progress["config"].get(key, value)
        if key not in FREE and old != value:
            raise UserError(f"{settings.out_dir}: holds a run with {key}={old}, not {value}: to "
                            f"start from its weights, --init_from={settings.out_dir} "
                            "--out_dir=NEW")
    if progress["data"] != fingerprint:
        raise UserError(f"{settings.data}: has changed since the run in {settings.out_dir} "
                        "began: restore it, or choose another --out_dir")
    return found[-1], progress


# ------------------------------------------------------------------------------------- the model

def shape(settings):
    """Config of random weights: of init_from, or of the settings and the data's meta.json."""
    if settings.init_from:
        try:
            return load_config(find_checkpoint(settings.init_from))
        except UserError as e:
            raise UserError(f"{e}: the comment of the run's file in config/ says which command "
                            "makes it")
    meta = read_json(Path(re.split("[:,]", settings.data)[0], "meta.json"))
    return Config(meta["vocab_size"], settings.n_embd, settings.n_head, settings.n_kv_head,
                  settings.n_ffn, settings.n_prelude, settings.n_core, settings.n_coda,
                  context=max(2048, settings.context), eos_token_id=meta["eos_id"])


def make_model(settings, dataset, folder=None):
    """The model in float32: of the checkpoint `folder`, else of init_from, else random weights."""
    if not settings.reinit:
        folder = folder or settings.init_from
    if folder:
        model = RecurrentLM.load(folder, dtype=torch.float32)
    else:
        config = shape(settings)
        config.embed_scale = settings.embed_scale
        config.mean_recurrence = settings.mean_recurrence  # the effective depth of its init
        model = RecurrentLM(config)
        model.init_weights(settings.seed)
    if settings.context > model.config.context:
        raise UserError(f"--context={settings.context}: the model is for at most "
                        f"{model.config.context}")
    if model.folder and tokenizer_bytes(model.folder) != tokenizer_bytes(dataset.folder):
        raise UserError(f"{dataset.folder}: its tokenizer is not {model.folder}'s: prepare it with "
                        "that one")
    return model


def set_up(settings, dataset, device):
    """
    Model, optimizer and progress (a dict that train.json keeps), of our newest checkpoint or of the
    run's beginning. Says what was decided.
    """
    fingerprint = dataset.fingerprint()
    folder, progress = find_resume(settings, fingerprint)
    model = make_model(settings, dataset, folder)
    c = model.config
    c.mean_recurrence = settings.mean_recurrence
    c.backprop_depth = settings.backprop_depth or settings.mean_recurrence
    if not folder:
        progress = dict(update=0, skipped=0, tokens=0, flops=0, log_bytes=0, data=fingerprint)
        earlier = Path(model.folder or "", "train.json")
        if c.n_core and earlier.exists():  # tokens and FLOPs count from surgery on
            progress |= {key: read_json(earlier)[key] for key in ("tokens", "flops")}
    plan(settings, model)
    say(f"data: {settings.data}, {dataset.num_rows:,} rows; {settings.dtype} on {device}; "
        f"from {model.folder or 'random weights'}")

    masters = {name: p.data for name, p in model.named_parameters()}
    model.to(device, getattr(torch, settings.dtype))
    model.recompute = settings.recompute
    parts = {} if c.n_core else stacked_parts(model)
    optimizer = Optimizer(model.named_parameters(), settings.lr, settings.adam_lr,
                          settings.weight_decay, settings.optimizer, masters, parts, RANK, WORLD)
    if folder:
        state = load_file(folder / "optimizer.safetensors", device=device)
        optimizer.load(state, progress["update"] - progress["skipped"])
    if device == "cpu" and settings.context <= 128:
        # SDPA's fused backward on a CPU is slow for short rows: its plain form takes half the time.
        torch.backends.cuda.enable_flash_sdp(False)
    return model, optimizer, progress


def to_inputs(model, batch, seed):
    """
    A loader's batch -> idx, targets and s_0 (None for ordinary models) on the model's device. The
    noise depends on a row's number alone.
    """
    idx, targets, numbers = batch
    device = model.embed.weight.device
    state = model.initial_state(*idx.shape, seed, numbers) if model.config.n_core else None
    if device.type == "cuda":  # from pinned memory a copy does not wait for what the GPU does
        idx, targets = idx.pin_memory(), targets.pin_memory()
    return idx.to(device, non_blocking=True), targets.to(device, non_blocking=True), state


def run_batch(model, batch, seed, steps):
    """The mean loss of a batch."""
    idx, targets, state = to_inputs(model, batch, seed)
    return model(idx, targets, steps, state)[1]


def warm_up(settings, model, batch):
    """
    Compile, and make one forward and backward pass at the full backprop depth. So the graphs with
    and without gradient are compiled, and a memory limit is met, now and not when the curriculum
    has risen. Says how much was needed. Nothing of it stays.
    """
    say("warm-up: one pass at the full depth")
    if settings.compile:
        try:
            model.compile_parts()
        except UserError as e:
            say(f"{e}: going on without torch.compile")
    k = min(settings.mean_recurrence, backprop_depth(settings, settings.updates))
    try:
        run_batch(model, batch, 0, (1, k)).backward()
    except RuntimeError as e:  # torch.OutOfMemoryError is one
        if "memory" not in str(e):
            raise
        raise UserError(f"out of memory with --micro_batch={len(batch[0])} at k = {k}: make that "
                        "smaller, or --context, or try --recompute")
    model.zero_grad()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if model.embed.weight.is_cuda:
        peak = torch.cuda.max_memory_allocated()
    say(f"warm-up: {peak / 1e9:.2f} GB of memory at the peak")


# ------------------------------------------------------------------------- validation and the log

@torch.no_grad()
def validate(settings, model, dataset):
    """
    Over eval_rows sequences of the validation split: "val" {r: mean loss} and "accuracy" {r: share
    of labels that are the most likely token}, for each r of eval_steps.
    """
    steps = sorted(settings.eval_steps) if model.config.n_core else [0]
    limit, B, sums = min(settings.eval_rows, dataset.num_rows), settings.micro_batch, 0
    rope = model.rope(settings.context)
    for i in range(math.ceil(limit / (B * WORLD))):
        batch = dataset.batch(0, i, RANK, WORLD, B)
        batch[1][batch[2] >= limit] = IGNORE  # the last batch has too many rows
        idx, targets, state = to_inputs(model, batch, 0)
        scores, targets = [], targets.flatten()
        for _, s in model.trajectory(idx, steps, state, rope):
            losses, right = model.token_losses(model.run_coda(s, rope).flatten(0, 1), targets)
            scores.append(torch.stack((
                (targets != IGNORE).sum(), losses.double().sum(), right.sum())))
        sums += torch.stack(scores, dim=1)
    if WORLD > 1:
        dist.all_reduce(sums)
    labels, losses, right = sums
    losses = dict(zip(steps, (losses / labels).tolist()))
    accuracy = dict(zip(steps, (right / labels).tolist()))
    say("validation loss " + ", ".join(f"{loss:.4f} at r = {r}" for r, loss in losses.items()))
    return {"val": losses, "accuracy": accuracy}


def evaluate(settings, device):
    """eval_only: losses over recurrences, also as out_dir/eval_loss_DATA.json."""
    dataset = open_data(settings.data, "val", settings.context)
    model = make_model(settings, dataset).to(device, getattr(torch, settings.dtype))
    began = time.time()
    found = validate(settings, model, dataset)
    results = [{"steps": r, "metric": "loss", "value": loss, "accuracy": found["accuracy"][r]}
               for r, loss in found["val"].items()]
    if RANK == 0:
        path = Path(settings.out_dir or settings.init_from,
                    f"eval_loss_{Path(settings.data).name}.json")
        tokens = min(settings.eval_rows, dataset.num_rows) * settings.context
        write_result(path, "train", model, settings.data, results, time.time() - began, tokens)


def start_log(settings, progress):
    """Cut log.jsonl to what it was at our checkpoint. What comes after is done and logged again."""
    if RANK > 0:
        return
    with open(Path(settings.out_dir, "log.jsonl"), "ab") as f:
        f.truncate(min(f.tell(), progress["log_bytes"]))
    if settings.wandb:
        try:
            import wandb
        except ImportError:
            raise UserError("--wandb: needs `pip install wandb`")
        wandb.init(project="loopgraft", name=settings.out_dir, config=vars(settings))


def log(settings, progress, entry):
    """Append an entry to log.jsonl."""
    if RANK > 0:
        return
    entry |= {key: progress[key] for key in ("update", "tokens", "flops")}
    path = Path(settings.out_dir, "log.jsonl")
    try:
        with open(path, "a") as f:
            f.write(json.dumps(entry) + "\n")
            progress["log_bytes"] = f.tell()
    except OSError as e:
        raise UserError(f"{path}: cannot be written ({e}); the checkpoints are whole")
    if settings.wandb:
        import wandb
        wandb.log(entry, step=entry["update"])


# ---------------------------------------------------------------------------------------- the run

def train(settings, device):
    """The run. Returns the exit code: 0, or 128 + the signal that stopped it."""
    dataset = open_data(settings.data, "train", settings.context)
    val_set = open_data(settings.data, "val", settings.context)
    model, optimizer, progress = set_up(settings, dataset, device)
    start, B, skips = progress["update"], settings.micro_batch, 0
    if start == settings.updates:
        say(f"{settings.out_dir}: is complete, nothing to do")
        return 0
    warm_up(settings, model, dataset.batch(0, 0, 0, 1, B))
    start_log(settings, progress)
    if start == 0:
        log(settings, progress, validate(settings, model, val_set))
    stops = []  # grows when we are asked to stop
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stops.append(True))
    accumulate = settings.batch_size // (WORLD * B)
    tokens = settings.batch_size * settings.context
    flops_per_token, flops_before = functools.cache(model.flops_per_token), progress["flops"]
    planned = paper_flops(settings, model, settings.updates) - paper_flops(settings, model, start)
    began = mark = time.time()

    for update in range(start, settings.updates):
        scale = lr_scale(settings, update)
        sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, labels, stops, norm
        for micro_step in range(accumulate):
            draw = update * settings.draws + micro_step % settings.draws + 1
            n, k = draw_steps(settings, update, draw)
            number = (update * WORLD + RANK) * accumulate + micro_step
            batch = dataset.batch(settings.seed, number, 0, 1, B)
            labels = int((batch[1] != IGNORE).sum())  # the update's loss is a mean over labels
            loss = labels * run_batch(model, batch, settings.seed, (n, k))
            loss.backward()
            optimizer.accumulate()
            sums[0] += loss.detach()
            sums[1] += labels
            progress["flops"] += WORLD * B * settings.context * flops_per_token((n, k))
        sums[2] += len(stops)  # "=" would copy the number from the CPU, and wait
        if WORLD > 1:
            dist.all_reduce(sums)
        sums[3] = optimizer.reduce()
        loss, labels, stop, norm = sums.tolist()  # the one wait for the device
        labels = max(labels, 1)
        loss, norm = loss / labels, optimizer.step(scale, settings.clip, labels, norm)

        progress["update"] = done = update + 1
        progress["tokens"] += tokens
        last = done == settings.updates
        skips = 0 if math.isfinite(norm) else skips + 1  # in a row; nothing is saved meanwhile
        progress["skipped"] += skips > 0
        if last or skips or done % settings.log_every == 0:
            speed = round(tokens / (time.time() - mark))
            # Late updates cost more, as the curriculum rises.
            share = planned / (progress["flops"] - flops_before)
            left = (time.time() - began) * max(0, share - 1)
            depth = f"n {n} k {k}  " if model.config.n_core else ""
            say(f"update {done:5d}/{settings.updates}  loss {loss:.4f}  {depth}norm {norm:.2f}  "
                f"{speed:,} tokens/s  {left / 60:.1f} min left", renew=not last)
            log(settings, progress, {
                "loss": loss, "norm": norm, "n": n, "k": k, "skipped": skips > 0,
                "lr": settings.lr * scale, "tokens_per_s": speed})
        if skips > MAX_SKIPS or (last and skips):
            raise UserError(f"the last {skips} updates had no finite gradient and were not "
                            f"saved: lower --lr={settings.lr} or look at the data")
        if last or done % settings.eval_every == 0:
            log(settings, progress, validate(settings, model, val_set))
        save = last or stop or done % settings.save_every == 0
        if save and not skips and RANK == 0:
            save_checkpoint(settings, model, optimizer, dataset, progress)
        if stop and not last:
            say(f"stopped after update {done} by a signal: the same command continues")
            return 128 + signal.SIGTERM
        mark = time.time()
    say(f"done: {settings.out_dir}")
    return 0


def start_processes():
    """Join the other processes, if there are any. Returns this one's device."""
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if WORLD > 1:
        store = next(dist.rendezvous("env://"))[0]
        if os.environ.get("LOCAL_WORLD_SIZE") == str(WORLD):
            # Restarts by torchrun share its store, with the addresses of dead processes.
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        dist.init_process_group(store=store, rank=RANK, world_size=WORLD)
    return device


def main():
    settings = read_settings(sys.argv[1:])
    if settings.dry_run:
        return plan(settings, RecurrentLM.empty(shape(settings)))
    device = start_processes()
    if settings.data.startswith(TINY) and not os.path.exists(TINY) and RANK == 0:
        tiny(TINY)
    if WORLD > 1:
        dist.barrier()
    if settings.eval_only:
        code = evaluate(settings, device)
    else:
        with locked(settings.out_dir) if RANK == 0 else contextlib.nullcontext():
            code = train(settings, device)
    if WORLD > 1:
        dist.barrier()  # torchrun ends all others when one exits: rank 0 may still be saving
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    cli(main)
