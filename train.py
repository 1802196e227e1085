"""
The training loop: pretraining, healing and task training of recurrent and ordinary models alike.

    python runs/tiny_corpus.py --out out/tiny/data                         some data
    python train.py --config=config/tiny.toml                              one process
    torchrun --nproc_per_node=4 train.py --config=config/tiny.toml         4 processes
    python train.py --config=config/tiny.toml --lr=0.01 --updates=200      any setting by hand
    python train.py --config=config/fig4.toml --dry_run                    what it takes, no weights
    python train.py --updates=0 --init_from=DIR --data=SHARDS --out_dir=NEW     its losses only

What is unusual: each update draws its number of recurrences, r = n + k, from a heavy-tailed
distribution whose mean follows a curriculum, and only the last k carry gradient. All randomness
(rows, recurrences, initial states) is a function of (seed, update). So a killed run resumes with
the same command: bit-identical on as many processes, otherwise equal up to rounding.

The file reads downwards: the settings, the run, then what it calls.

Paper: arXiv 2511.07384, sections 3 and 4 and appendix D.
"""
import bisect
import contextlib
import functools
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
import tomllib
from dataclasses import make_dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from data import (RANK, WORLD, Dataset, Parser, check_settings, check_tokenizer, cli,
                  copy_tokenizer, fraction, locked, natural, positive, rate, read_json, say, whole,
                  write_json)
from model import IGNORE, Config, RecurrentLM, UserError, checkpoints, find_checkpoint, load_config
from muon import BUFFERS, Optimizer, stacked_parts

MAX_SKIPS = 10  # updates in a row without a finite gradient; more end the run


# ----------------------------------------------------------------------------------- the settings

def yes_or_no(text):
    """"true" -> True"""
    return bool(["false", "true"].index(text.lower()))


def numbers(text):
    """"1,2,4" -> [1, 2, 4]"""
    return [natural(part) for part in text.strip("[]").split(",")]


class Recipe:
    """
    name = default, what it means, what it may be: a function of its text, or a tuple of words.
    The defaults are the paper's (appendix D). Files in config/ say what differs.
    """
    init_from = "", "a checkpoint or run; empty: random weights of the shape below", str
    reinit = False, "keep the shape of init_from, but start from random weights", yes_or_no
    embed_scale = 1.0, "of random weights: multiplies the embeddings (Huginn: 72.7)", float
    seed = 0, "of weights, order of the data, r and initial states", natural
    # shape, for random weights without init_from
    n_embd = 96, "width", positive
    n_head = 2, "attention heads", positive
    n_kv_head = 2, "heads of keys and values", positive
    n_ffn = 240, "width inside the MLP", positive
    n_prelude = 6, "layers; an ordinary model is all prelude", natural
    n_core = 0, "layers of the recurrent block", natural
    n_coda = 0, "layers after it", natural
    # budget
    updates = 25000, "optimizer updates; 0: validate, and nothing else", natural
    batch_size = 1024, "rows per update, over all processes", positive
    draws = 1, "draws of r per update, each for an equal share of its rows", positive
    context = 1024, "T, tokens per row", positive
    # recurrence
    mean_recurrence = 32, "R, the mean of r (the paper's sampler has mean R + 1)", positive
    recurrence_sampler = "poisson-lognormal", "fixed: the mean", ("poisson-lognormal", "fixed")
    curriculum = "linear", "how the mean rises from 1 to R", ("linear", "1-sqrt", "none")
    curriculum_warmup = 0.25, "over this fraction of the updates", fraction
    backprop_depth = 8, "k: gradients flow through the last k recurrences; 0: all", natural
    backprop_warmup = 0.0, "k rises from 2 over this fraction of the updates", fraction
    # optimizer
    train = "", "parts of names: what has one is trained, such as core|adapter; empty: all", str
    optimizer = "muon", "muon has AdamW for embeddings, head and norms", tuple(BUFFERS)
    lr = 0.001, "of Muon, or of AdamW (adamw*: Huginn's variant) for all", rate
    adam_lr = 5e-5, "of AdamW beside Muon", rate
    weight_decay = 1e-4, "of all weights", rate
    clip = 1.0, "largest gradient norm", rate
    warmup = 0.005, "learning rate: linear over this fraction of the updates,", fraction
    cooldown = 0.9, "then constant, then cosine down over this last fraction", fraction
    rest = 0.0, "weight of the last recurrence's change of the state: exits come earlier", rate
    dtype = "bfloat16", "of weights and products (masters stay float32)", ("bfloat16", "float32")


class Free:
    """Settings that change the result by rounding at most. A run that goes on may change them."""
    config = "", "a TOML file of settings; those given beside it win", str
    out_dir = "", "the run's folder: step_* checkpoints and log.jsonl", str
    data = "", "a folder made by data.py, or a mixture: A:1,B:1,C:2", str  # its digest must stay
    micro_batch = 8, "rows at a time on a device; the rest is gradient accumulation", positive
    eval_every = 1000, "updates between validations; also one before and one after", positive
    eval_rows = 1024, "validation rows", positive
    eval_steps = (1, 2, 4, 8, 16, 32), "validation at these recurrences", numbers
    save_every = 500, "updates between checkpoints; also one at the end", positive
    keep = 2, "checkpoints that stay", positive
    log_every = 1, "updates between lines of the log", positive
    wandb = False, "log to Weights & Biases, too", yes_or_no
    compile = True, "torch.compile", yes_or_no
    recompute = False, "recompute recurrences in the backward pass: less memory", yes_or_no
    dry_run = False, "print what the run would be, without weights", yes_or_no


TABLE = {name: line for name, line in {**vars(Recipe), **vars(Free)}.items() if name[0] != "_"}
Settings = make_dataclass("Settings", [(name, object, line[0]) for name, line in TABLE.items()])


def read_settings(argv):
    """
    The Settings of --config=FILE.toml (flat keys) and of --key=value, which wins. --key alone is
    true. UserError says which one is wrong: an update must divide into draws and micro-batches, and
    the width into heads.
    """
    parser = Parser(usage="train.py --config=FILE --key=value ...", description=__doc__)
    for name, (default, meaning, kind) in TABLE.items():
        option = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        parser.add_argument(f"--{name}", default=default, help=f"{meaning} [{default}]",
                            nargs="?", const="true", **option)
    config = parser.parse_known_args(argv)[0].config
    if config:
        try:
            values = tomllib.loads(Path(config).read_text())
        except ValueError as e:
            parser.error(f"{config}: {e}")
        argv = [f"--{name}={value}" for name, value in values.items()] + argv
    s = Settings(**vars(parser.parse_args(argv)))
    if not (s.data and s.out_dir):
        parser.error("give --data and --out_dir, or --config=FILE")
    if s.init_from and os.path.realpath(s.init_from) == os.path.realpath(s.out_dir):
        raise UserError(f"--out_dir={s.out_dir}: is --init_from, which stays as it is")
    s.micro_batch = min(s.micro_batch, math.ceil(s.batch_size / WORLD))
    if s.batch_size % (s.micro_batch * WORLD * s.draws):
        raise UserError(f"--batch_size={s.batch_size}: is not a multiple of {WORLD} processes "
                        f"times --micro_batch={s.micro_batch} times --draws={s.draws}")
    if s.n_embd % (2 * s.n_head) or s.n_head % s.n_kv_head:
        raise UserError(f"--n_embd={s.n_embd}, --n_head={s.n_head}, --n_kv_head={s.n_kv_head}: a "
                        "head's width must be even, and n_kv_head divides n_head")
    return s


# ---------------------------------------------------------------------------------------- the run

def main():
    settings = read_settings(sys.argv[1:])
    if settings.dry_run:
        return dry_run(settings)
    device, store = start_processes()
    code = train(settings, device, store)
    if WORLD > 1:
        dist.barrier()  # torchrun ends all others when one exits: rank 0 may still be saving
        dist.destroy_process_group()
    return code


def start_processes():
    """
    Join the other processes, if there are any. Returns this one's device, and a store in which all
    of them see a key that one has set.
    """
    device, gpu = "cpu", None
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        gpu = torch.device(device)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if WORLD == 1:
        return device, dist.HashStore()
    store = next(dist.rendezvous("env://"))[0]
    if os.environ.get("LOCAL_WORLD_SIZE") == str(WORLD):
        # Restarts by torchrun on one node share its store, with the addresses of dead processes.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), store)
    dist.init_process_group(store=store, rank=RANK, world_size=WORLD, device_id=gpu,
                            timeout=timedelta(hours=1))  # for one that compiles or saves
    return device, store


def train(settings, device, store):
    """The run. Returns the exit code: 0, or 128 + SIGTERM if a signal stopped it."""
    dataset = Dataset(settings.data, "train", settings.context)
    val_set = Dataset(settings.data, "val", settings.context)
    model, optimizer, progress = set_up(settings, dataset, device)
    agree(settings, progress, model, store)
    start = progress["update"]
    if 0 < start == settings.updates:
        say(f"{settings.out_dir}: is complete, nothing to do")
        return 0
    if settings.wandb and RANK == 0:
        start_wandb(settings)
    # Until here nothing is written, so a mistake leaves nothing behind.
    with locked(settings.out_dir) if RANK == 0 else contextlib.nullcontext():
        warm_up(settings, model, dataset.batch(0, 0, 0, 1, settings.micro_batch))
        if start == 0:
            log(settings, progress, validate(settings, model, val_set))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the last: a lost terminal
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda *_: store.set("stop", ""))  # all processes see it
        tokens, began = settings.batch_size * settings.context, time.time()

        for update in range(start, settings.updates):
            mark = time.time()
            draws = draws_of(settings, update)
            sums = add_gradients(settings, model, optimizer, dataset, update, draws, store)
            loss, labels, stop, norm = sums.tolist()  # the one wait for the device
            if stop:  # this update is dropped: some processes have not finished it
                if update > start:
                    save_checkpoint(settings, model, optimizer, dataset, progress)
                say(f"stopped after update {update} by a signal: the same command continues")
                return 128 + signal.SIGTERM
            scale, labels = lr_scale(settings, update), max(labels, 1)
            loss, norm = loss / labels, optimizer.step(scale, settings.clip, labels, norm)

            progress["update"] = done = update + 1
            progress["tokens"] += tokens
            progress["flops"] += tokens * sum(map(model.flops_per_token, draws)) // len(draws)
            skip = not math.isfinite(norm)
            progress["skipped"] += skip
            progress["skips"] = skip * (progress["skips"] + 1)  # in a row
            if progress["skips"] > MAX_SKIPS:
                raise UserError(f"the last {progress['skips']} updates had no finite gradient: "
                                f"lower --lr={settings.lr} or look at the data")
            last = done == settings.updates
            if last or skip or done % settings.log_every == 0:
                n, k = draws[-1]
                speed = round(tokens / (time.time() - mark))
                left = (time.time() - began) / (done - start) * (settings.updates - done)
                depth = f"n {n} k {k}  " if model.config.n_core else ""
                say(f"update {done:5d}/{settings.updates}  loss {loss:.4f}  {depth}norm "
                    f"{norm:.2f}  {speed:,} tokens/s  {left / 60:.1f} min left at this pace")
                log(settings, progress, {
                    "loss": loss, "norm": norm, "n": n, "k": k, "lr": settings.lr * scale,
                    "tokens_per_s": speed})
            if last or done % settings.eval_every == 0:
                log(settings, progress, validate(settings, model, val_set))
            if last or done % settings.save_every == 0:
                save_checkpoint(settings, model, optimizer, dataset, progress)
    say(f"done: {settings.out_dir}")
    return 0


def add_gradients(settings, model, optimizer, dataset, update, draws, store):
    """
    The forward and backward passes of an update. draws: [(n, k)], each for an equal share of its
    rows. Returns a tensor of four sums over all processes: losses, labels, processes that were
    asked to stop, which leave early, and the norm of the gradient.
    """
    B, device = settings.micro_batch, model.embed.weight.device
    accumulate = settings.batch_size // (WORLD * B)
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for micro_step in range(accumulate):
        if store.check(["stop"]):
            sums[2] += 1  # "=" would copy the number from the CPU, and wait
            break
        number = update * accumulate + micro_step
        batch = dataset.batch(settings.seed, number, RANK, WORLD, B)
        labels = int((batch[1] != IGNORE).sum())  # the update's loss is a mean over labels
        steps = draws[micro_step * len(draws) // accumulate]
        loss = labels * run_batch(model, batch, settings.seed, steps)
        loss.backward()
        optimizer.accumulate()
        sums[0] += loss.detach()
        sums[1] += labels
    if WORLD > 1:
        dist.all_reduce(sums)
    sums[3] = optimizer.reduce()
    return sums


def run_batch(model, batch, seed, steps):
    """The mean loss of a batch."""
    idx, targets, state = to_inputs(model, batch, seed)
    return model(idx, targets, steps, state)[1]


def to_inputs(model, batch, seed):
    """
    A loader's batch -> idx, targets and s_0 (None for ordinary models) on the model's device. The
    noise depends on a row's number alone.
    """
    idx, targets, numbers = batch
    device = model.embed.weight.device
    state = None
    if model.config.n_core:
        state = model.initial_state(*idx.shape, seed, int(numbers[0]))
    if device.type == "cuda":  # from pinned memory a copy does not wait for what the GPU does
        idx, targets = idx.pin_memory(), targets.pin_memory()
    return idx.to(device, non_blocking=True), targets.to(device, non_blocking=True), state


# --------------------------------------------------------------------------------- the beginning

def shape(settings):
    """Config of random weights: of init_from, or of the settings and the data's vocabulary."""
    if settings.init_from:
        if settings.dry_run and not os.path.exists(settings.init_from):
            return planned_shape(settings)
        return load_config(find_checkpoint(settings.init_from))
    meta = Dataset(settings.data, "val", settings.context).parts[0][0].meta
    sizes = {name: size for name, size in vars(settings).items() if name.startswith("n_")}
    return Config(vocab_size=meta["vocab_size"], eos_token_id=meta["eos_id"], **sizes)


def planned_shape(settings):
    """
    Config of an init_from that is not there yet, by its name: of a run of config/, of a preset of
    surgery.py or of its parent.
    """
    from surgery import PRESETS
    say(f"{settings.init_from}: is not there yet, so its shape is what its name says")
    name = Path(settings.init_from).name
    recipe = Path(__file__).parent / "config" / f"{name}.toml"
    if recipe.exists():
        return shape(read_settings([f"--config={recipe}", "--dry_run"]))
    for preset, (parent, (P, R, C)) in PRESETS.items():
        if name.startswith(preset):
            return replace(parent, n_prelude=P, n_core=R, n_coda=C, tie_embeddings=False)
        if preset.startswith(name.removesuffix("-untied")):
            tied = parent.tie_embeddings and not name.endswith("-untied")
            return replace(parent, tie_embeddings=tied)
    raise UserError(f"{settings.init_from}: no preset has this name")


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
    check_tokenizer(model.config, model.folder or dataset.folders[0], *dataset.folders)
    return model


def choose_trained(settings, model):
    """Only parameters that --train names carry gradient. UserError if none does."""
    for name, p in model.named_parameters():
        p.requires_grad = any(part in name for part in settings.train.split("|"))
    if not model.num_params(trained=True)["total"]:
        raise UserError(f"--train={settings.train}: matches none of the model's parameters")


def set_up(settings, dataset, device):
    """
    Model, optimizer and progress (a dict that train.json keeps), of our newest checkpoint or of the
    run's beginning. Says what was decided.
    """
    recipe = {name: value for name, value in vars(settings).items() if hasattr(Recipe, name)}
    recipe["digest of the data"] = dataset.fingerprint()
    progress = dict(update=0, skipped=0, skips=0, tokens=0, flops=0, log_bytes=0, recipe=recipe)
    folder = [None, *checkpoints(settings.out_dir)][-1]
    if folder:
        progress |= read_json(folder / "train.json")
        check_settings(settings.out_dir, progress["recipe"], recipe)
    model = make_model(settings, dataset, folder)
    c = model.config
    c.mean_recurrence = settings.mean_recurrence
    c.backprop_depth = settings.backprop_depth or settings.mean_recurrence
    c.context = max(c.context, settings.context)
    earlier = Path(model.folder or "", "train.json")
    if not folder and earlier.exists():
        earlier = read_json(earlier)
        if c.n_core or earlier["config"]["init_from"]:  # they count from surgery on
            progress |= {key: earlier[key] for key in ("tokens", "flops")}
    choose_trained(settings, model)
    plan(settings, model)
    say(f"data: {settings.data}, {dataset.num_rows:,} rows; {settings.dtype} on {device}; "
        f"from {model.folder or 'random weights'}")

    masters = {name: p.data for name, p in model.named_parameters()}
    model.to(device, getattr(torch, settings.dtype))
    model.recompute, model.rest = settings.recompute, settings.rest
    optimizer = make_optimizer(settings, model, masters)
    if folder:
        state = load_file(folder / "optimizer.safetensors", device=device)
        optimizer.load(state, progress["update"] - progress["skipped"])
    if device == "cpu" and settings.context <= 128:
        # SDPA's fused backward on a CPU is slow for short rows: its plain form takes half the time.
        torch.backends.cuda.enable_flash_sdp(False)
    return model, optimizer, progress


def make_optimizer(settings, model, masters=None):
    """The Optimizer of the parameters that are trained."""
    return Optimizer(
        ((name, p) for name, p in model.named_parameters() if p.requires_grad),
        lr=settings.lr,
        adam_lr=settings.adam_lr,
        weight_decay=settings.weight_decay,
        rule=settings.optimizer,
        masters=masters,
        parts={} if model.config.n_core else stacked_parts(model),
        rank=RANK,
        world=WORLD,
    )


def agree(settings, progress, model, store):
    """UserError if another process starts from another update or other weights than this one."""
    bits = sum(p.detach().view(torch.int16).sum() for p in model.parameters())
    start = f"update {progress['update']}, weights {bits.item():x}"
    first = store.compare_set("start", "", start).decode()
    if start != first:
        raise UserError(f"{settings.out_dir}: process {RANK} starts from {start}, another one from "
                        f"{first}: they must see the same files")


def warm_up(settings, model, batch):
    """
    Compile, and make one forward and backward pass at the full backprop depth. So the graphs with
    and without gradient are compiled, and a memory limit is met, now and not when the curriculum
    has risen. Says how much a GPU needed. Nothing of it stays.
    """
    say("warm-up: one pass at the full depth")
    if settings.compile:
        try:
            model.compile_parts()
        except UserError as e:
            say(f"{e}: going on without torch.compile")
    k = deepest(settings)
    try:
        run_batch(model, batch, 0, (1, k)).backward()
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory with --micro_batch={len(batch[0])} at k = {k}: make that "
                        "smaller, or --context, or try --recompute")
    model.zero_grad()
    if model.embed.weight.is_cuda:
        peak = torch.cuda.max_memory_allocated()
        say(f"warm-up: {peak / 1e9:.2f} GB of memory at the peak")


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
    """k, where r is not below it; rises from 2 over its warm-up (Figure 16)."""
    k = min(settings.backprop_depth or settings.mean_recurrence, settings.mean_recurrence)
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


def draws_of(settings, update):
    """All draws of an update: [(n, k), ...]"""
    first = update * settings.draws + 1
    return [draw_steps(settings, update, first + i) for i in range(settings.draws)]


def deepest(settings):
    """The largest k of the whole run, at least 1."""
    draws = (draws_of(settings, update) for update in range(settings.updates))
    return max((k for _, k in itertools.chain(*draws)), default=1)


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
    say(f"model: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, width {c.n_embd}; {parts}; of these "
        f"{model.num_params(trained=True)['total']:,} trained")
    flops = paper_flops(settings, model, updates)
    say(f"budget: {updates:,} updates of {settings.batch_size:,} rows, {tokens:.4g} tokens, "
        f"{flops:.4g} training FLOPs by the paper's rule, which a card that makes 1e14 a second "
        f"makes in {flops / 3.6e17:,.1f} hours, 32 of them in {flops / 32 / 3.6e17:,.1f}")
    if c.n_core:
        say(f"mean r: up to {settings.mean_recurrence} ({settings.curriculum} curriculum, "
            f"{settings.curriculum_warmup * updates:,.0f} updates)")
    say(f"learning rate: {settings.lr:g} ({settings.optimizer}), up over "
        f"{settings.warmup * updates:,.0f} updates, cosine down over the last "
        f"{settings.cooldown * updates:,.0f}")


def dry_run(settings):
    """Say what a run takes. Neither weights nor data are needed, nor what makes them."""
    model = RecurrentLM.empty(shape(settings)).bfloat16()
    choose_trained(settings, model)
    plan(settings, model)
    rows = settings.updates * settings.batch_size
    try:
        epochs = rows / Dataset(settings.data, "train", settings.context).num_rows
        say(f"data: {rows:,} rows, {epochs:.3g} epochs of {settings.data}")
    except UserError as e:
        say(f"data: {rows:,} rows of {settings.context} tokens; but {e}")
    optimizer = make_optimizer(settings, model)
    held = [*model.parameters(), *optimizer.masters.values(), *optimizer.state.values()]
    held = sum(t.nbytes for t in held) / 1e9
    held += 1.5 * optimizer.sums.nbytes / 1e9  # sums of gradients, and half as much for these
    # What the forward pass of a row keeps for the backward pass, in bfloat16 and compiled; so many
    # bytes a layer and token were counted on small models.
    c = model.config
    layer = 20 * c.n_embd + 6 * (c.n_ffn + c.n_kv_head * c.head_dim)
    k = 1 if settings.recompute else deepest(settings)
    prelude = c.n_prelude * any(p.requires_grad for p in model.prelude.parameters())
    layers = prelude + c.n_core * k + c.n_coda
    batch = settings.micro_batch * settings.context * layer * layers / 1e9
    say(f"memory: about {held + batch:.1f} GB a process in bfloat16: {held:.1f} for weights, "
        f"gradients and optimizer, {batch:.1f} for --micro_batch={settings.micro_batch} if "
        "compiled")


# ------------------------------------------------------------------------- validation and the log

@torch.no_grad()
def validate(settings, model, dataset):
    """
    Over eval_rows rows of the validation split: "val" {r: mean loss} and "accuracy" {r: share
    of labels that are the most likely token}, for each r of eval_steps.
    """
    steps = sorted(settings.eval_steps) if model.config.n_core else [0]
    limit, B = min(settings.eval_rows, dataset.num_rows), settings.micro_batch
    rope = model.rope(settings.context)
    sums = torch.zeros(len(steps), 3, dtype=torch.float64, device=rope[0].device)
    for i in range(math.ceil(limit / (B * WORLD))):
        batch = dataset.batch(0, i, RANK, WORLD, B)
        batch[1][batch[2] >= limit] = IGNORE  # the last batch has too many rows
        idx, targets, state = to_inputs(model, batch, 0)
        targets = targets.flatten()
        for row, (_, s) in zip(sums, model.trajectory(idx, steps, state, rope)):
            losses, right = model.token_losses(model.run_coda(s, rope).flatten(0, 1), targets)
            row += torch.stack(((targets != IGNORE).sum(), losses.double().sum(), right.sum()))
    if WORLD > 1:
        dist.all_reduce(sums)
    _, losses, accuracy = (sums.T / sums[:, 0]).tolist()
    say("validation loss " + ", ".join(f"{x:.4f} at r = {r}" for r, x in zip(steps, losses)))
    return {"val": dict(zip(steps, losses)), "accuracy": dict(zip(steps, accuracy))}


def start_wandb(settings):
    try:
        import wandb
    except ImportError:
        raise UserError("--wandb: needs `pip install wandb`")
    wandb.init(project="loopgraft", name=settings.out_dir, config=vars(settings))


def log(settings, progress, entry):
    """Append an entry to log.jsonl, after what it was at our checkpoint: the rest is done again."""
    if RANK > 0:
        return
    entry |= {key: progress[key] for key in ("update", "tokens", "flops")}
    with open(f"{settings.out_dir}/log.jsonl", "ab") as f:
        size = min(f.tell(), progress["log_bytes"])
        f.truncate(size)
        progress["log_bytes"] = size + f.write(json.dumps(entry).encode() + b"\n")
    if settings.wandb:
        import wandb
        wandb.log(entry, step=entry["update"])


# ----------------------------------------------------------------------------------- checkpoints

def save_checkpoint(settings, model, optimizer, dataset, progress):
    """
    out_dir/step_*: all weights, in float32 those that are trained, the optimizer's state and where
    the run is. Old ones go when the new one is whole. Rank 0 writes it: all ranks hold the same.
    """
    if RANK > 0:
        return
    with whole(f"{settings.out_dir}/step_{progress['update']:06d}") as folder:
        model.save(folder, model.state_dict() | optimizer.masters)
        copy_tokenizer(dataset.folders[0], folder)
        save_file(optimizer.state, folder / "optimizer.safetensors")
        write_json(folder / "train.json", progress | {"config": vars(settings)})
    for path in checkpoints(settings.out_dir)[:-settings.keep]:
        shutil.rmtree(path, ignore_errors=True)  # NFS keeps files that are still open somewhere


if __name__ == "__main__":
    cli(main)
