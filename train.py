"""
Train a model, recurrent or ordinary, from pretraining to a task of your own. The same command
resumes a run that was stopped.

    python runs/tiny_corpus.py --out out/tiny/data                         make some data
    python train.py --config=config/tiny.toml                              run one process
    torchrun --nproc_per_node=4 train.py --config=config/tiny.toml         run four processes
    python train.py --config=config/tiny.toml --lr=0.01 --updates=200      override settings
    python train.py --updates=0 --init_from=DIR --data=SHARDS --out_dir=NEW     validate only

`python bench.py plan --config=config/fig4.toml` says beforehand what a run will cost.

Unusual: each update draws its number of recurrences, r = n + k, from a heavy-tailed distribution
whose mean follows a curriculum, and only the last k carry gradient. All randomness (rows,
recurrences, initial states) is a function of (seed, update), so a killed run resumes with the same
command. On a CPU, with the same number of processes, the result is bit-identical to that of a run
that was never killed; otherwise it is equal up to rounding.

Read this file from top to bottom: the settings, the schedules, the training, then how it begins.

Paper: arXiv 2511.07384, sections 3 and 4 and appendix D.
"""
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
import tomllib
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from statistics import mean

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import (RANK, WORLD, Parser, UserError, between, check_settings, cli, find_gpu,
                    fraction, locked, nan_to_null, natural, non_negative, opening, positive,
                    random_seed, read_json, recurrences, say, write_atomically, write_json,
                    yes_or_no)
from data import Dataset, check_tokenizer, read_mixture, read_tokenizer_files, write_tokenizer
from model import (COMPILING, IGNORE, Config, RecurrentLM, checkpoints, find_checkpoint,
                   load_config)
from muon import MOMENTS, Optimizer, stacked_rows

MAX_SKIPS = 10  # updates in a row that may lack a finite gradient; one more ends the run

# How the sampler's mean rises from 1 to R during the curriculum's warm-up: functions from the
# fraction of the warm-up that is done to the fraction of R.
CURRICULA = {
    "linear": lambda done: done,
    "1-sqrt": lambda done: 1 - math.sqrt(1 - done),
    "none": lambda done: 1.0,
}


# ----------------------------------------------------------------------------------- the settings

def folder_name(text):
    """The type of a folder's name: "./out/m/" -> "out/m", so either spelling resumes a run."""
    return os.path.normpath(text) if text else ""


def setting(default, meaning, kind):
    """
    A field of Settings. meaning: its help text. kind: a function that parses its value, or a tuple
    of the words that are allowed.
    """
    return field(default=default, metadata={"meaning": meaning, "kind": kind})


@dataclass
class Recipe:
    """
    The settings that decide the result. The defaults are the paper's (appendix D); the files in
    config/ override some of them.
    """
    init_from: str = setting("", "a checkpoint or run to start from; empty: random weights",
                             folder_name)
    reinit: bool = setting(False, "random weights in the shape of --init_from", yes_or_no)
    embed_scale: float = setting(1.0, "factor on the embeddings of a model with random weights "
                                 "(Huginn: 72.7)", float)
    seed: int = setting(0, "seed of random weights, data order, draws of r and initial states",
                        random_seed)
    # shape, for random weights without init_from
    n_embd: int = setting(96, "width", positive)
    n_head: int = setting(2, "attention heads", positive)
    n_kv_head: int = setting(2, "key/value heads", positive)
    n_ffn: int = setting(240, "width inside the MLP", positive)
    n_prelude: int = setting(6, "layers before the loop; an ordinary model has no others", natural)
    n_core: int = setting(0, "layers in the loop", natural)
    n_coda: int = setting(0, "layers after the loop", natural)
    # budget
    updates: int = setting(25000, "optimizer updates; 0: validate only", natural)
    batch_size: int = setting(1024, "rows per update, over all processes", positive)
    draws: int = setting(1, "draws of r per update, each for an equal share of the rows", positive)
    context: int = setting(1024, "T, tokens per row", positive)
    # recurrence
    mean_recurrence: int = setting(32, "R, the sampler's mean; poisson-lognormal adds 1, so that "
                                   "the mean of r is R + 1", positive)
    recurrence_sampler: str = setting("poisson-lognormal", "how r is drawn; fixed: always the mean",
                                      ("poisson-lognormal", "fixed"))
    curriculum: str = setting("linear", "how the sampler's mean rises from 1 to R",
                              tuple(CURRICULA))
    curriculum_warmup: float = setting(0.25, "fraction of the updates over which this mean rises",
                                       fraction)
    backprop_depth: int = setting(8, "k: gradients flow through the last k recurrences; 0: all",
                                  natural)
    backprop_warmup: float = setting(0.0, "fraction of the updates over which k rises from 2",
                                     fraction)
    # optimizer
    train: str = setting("", "train only the parameters whose names contain one of these words, "
                         "separated by |, such as core|adapter; empty: all", str)
    optimizer: str = setting("muon", "muon: Muon for matrices, AdamW for embeddings, head, norms "
                             "and biases; adamw*: Huginn's variant of AdamW", tuple(MOMENTS))
    lr: float = setting(0.001, "learning rate of Muon; of all parameters with adamw and adamw*",
                        non_negative)
    adam_lr: float = setting(5e-5, "learning rate of AdamW with --optimizer=muon", non_negative)
    weight_decay: float = setting(1e-4, "weight decay, applied to all parameters", non_negative)
    clip: float = setting(1.0, "clip gradients to this norm; 0: do not clip", non_negative)
    warmup: float = setting(0.005, "fraction of the updates over which the learning rates rise",
                            fraction)
    cooldown: float = setting(0.9, "last fraction of the updates, over which the learning rates "
                              "fall (cosine)", fraction)
    dtype: str = setting("bfloat16", "dtype of weights and matrix products; the optimizer keeps "
                         "float32 copies", ("bfloat16", "float32"))


@dataclass
class Settings(Recipe):
    """Settings that cannot change the result beyond rounding, so they may change on resume."""
    config: str = setting("", "a TOML file of settings, which flags override", str)
    out_dir: str = setting("", "folder of the run, for checkpoints (step_*) and log.jsonl", str)
    data: str = setting("", "a folder made by data.py, or a mixture: A:1,B:1,C:2", str)
    micro_batch: int = setting(8, "rows per forward pass on a device; a larger batch accumulates "
                               "gradients", positive)
    compile: bool = setting(True, "use torch.compile", yes_or_no)
    activation_budget: float = setting(1.0, "fraction of the activations that a compiled model "
                                       "keeps for the backward pass, 0.3 to 1; less saves memory "
                                       "and costs time", between(0.3, 1, float))
    recompute: bool = setting(False, "recompute every recurrence in the backward pass, which needs "
                              "the least memory", yes_or_no)
    eval_every: int = setting(1000, "updates between validations; there is also one at the start "
                              "and one at the end", positive)
    eval_rows: int = setting(1024, "validation rows of each data set, at most", positive)
    eval_recurrences: list[int] = setting((1, 2, 4, 8, 16, 32), "recurrences to validate at",
                                          recurrences)
    save_every: int = setting(500, "updates between checkpoints; there is also one at the end",
                              positive)
    keep: int = setting(2, "checkpoints to keep", positive)
    log_every: int = setting(1, "updates between lines of the log", positive)
    wandb: bool = setting(False, "also log to Weights & Biases", yes_or_no)


def settings_parser():
    """Return the command line's parser, which has a flag for each field of Settings."""
    parser = Parser(usage="train.py --config=FILE --key=value ...", description=opening(__doc__))
    for item in fields(Settings):
        kind = item.metadata["kind"]
        default = item.default
        if isinstance(default, tuple):  # show it as one types it: 1,2,4
            default = ",".join(map(str, default))
        option = {"default": item.default, "help": f"{item.metadata['meaning']} [{default}]"}
        if isinstance(kind, tuple):
            option["choices"] = kind
        else:
            option["type"] = kind
            option["metavar"] = "X"
        if kind is yes_or_no:  # --key alone means true
            option["nargs"] = "?"
            option["const"] = "true"
        parser.add_argument(f"--{item.name}", **option)
    return parser


def read_settings(argv, world=1):
    """
    Read the Settings from --config=FILE.toml (flat keys), overridden by --key=value.

    world: the number of ranks. micro_batch is lowered to a rank's rows per update if it exceeds
    them. Raises UserError for an invalid setting, or an update that does not divide into draws and
    micro-batches.
    """
    parser = settings_parser()
    config = parser.parse_known_args(argv)[0].config
    if config:
        values = tomllib.loads(Path(config).read_text())
        argv = [f"--{name}={value}" for name, value in values.items()] + argv
    settings = Settings(**vars(parser.parse_args(argv)))
    if not (settings.data and settings.out_dir):
        parser.error("give --data and --out_dir, or --config=FILE")
    settings.micro_batch = min(settings.micro_batch, math.ceil(settings.batch_size / world))
    if settings.batch_size % (settings.micro_batch * world * settings.draws):
        raise UserError(f"--batch_size={settings.batch_size}: must be a multiple of the number of "
                        f"processes ({world}) times --micro_batch={settings.micro_batch} times "
                        f"--draws={settings.draws}")
    return settings


# ------------------------------------------------------------ schedules: functions of the update

def num_updates(settings, share):
    """Return a fraction of the run as a number of updates, rounded up."""
    return math.ceil(share * settings.updates)


def scheduled_mean(settings, update):
    """Return the mean that the sampler is given at an update, which rises from 1 to R."""
    R = settings.mean_recurrence
    warmup = num_updates(settings, settings.curriculum_warmup)
    if update >= warmup:
        return R
    rise = CURRICULA[settings.curriculum]
    return max(1, math.ceil(R * rise(update / warmup)))


def scheduled_depth(settings, update):
    """
    Return the largest k that --backprop_depth allows at an update, which rises from 2 over
    --backprop_warmup (Figure 16).
    """
    k = min(settings.backprop_depth or settings.mean_recurrence, settings.mean_recurrence)
    warmup = num_updates(settings, settings.backprop_warmup)
    if update < warmup:
        k = min(k, 1 + math.ceil((k - 1) * (update + 1) / warmup))
    return k


def draw_steps(settings, update, number):
    """
    Return (n, k) of a draw at an update. number: of this draw, counted from 1 over the whole run.

    Huginn's sampler draws a rate from a log-normal distribution whose mean is the scheduled one,
    and r from a Poisson distribution of that rate, plus 1. The mean of r is therefore the scheduled
    mean + 1. Seed 0 gives the paper's own sequence.
    """
    scheduled = scheduled_mean(settings, update)
    r = scheduled
    if settings.recurrence_sampler != "fixed":
        seed = (514229 + number + 1_000_003 * settings.seed) % (2**31 - 1)
        generator = torch.Generator().manual_seed(seed)
        sigma = 0.5
        mu = math.log(scheduled) - sigma**2 / 2  # so that the rate's mean is `scheduled`
        rate = torch.empty(1).log_normal_(mu, sigma, generator=generator)
        r = int(torch.poisson(rate, generator=generator)) + 1
    k = r
    if settings.backprop_depth:  # as in the paper's code, k does not exceed the scheduled mean
        k = min(r, scheduled, scheduled_depth(settings, update))
    return r - k, k


def draws_of(settings, update):
    """Return all draws of an update: [(n, k), ...]"""
    first = update * settings.draws + 1
    return [draw_steps(settings, update, first + i) for i in range(settings.draws)]


def largest_depth(settings):
    """
    Return an upper bound on k over the whole run, at least 1. With --backprop_depth=0 it is the
    largest r that the run draws.
    """
    if settings.backprop_depth:
        return min(settings.backprop_depth, settings.mean_recurrence)
    drawn = [1]
    for update in range(settings.updates):
        drawn += [k for _, k in draws_of(settings, update)]
    return max(drawn)


def lr_scale(settings, update):
    """
    Return the factor on the learning rates at an update, from 0.001 to 1: a linear warm-up, then
    constant, then a cosine cooldown.
    """
    warmup = num_updates(settings, settings.warmup)
    cooldown = num_updates(settings, settings.cooldown)
    if update < warmup:
        scale = update / warmup
    else:
        done = max(0, update - (settings.updates - cooldown)) / max(1, cooldown)
        scale = 0.5 * (1 + math.cos(math.pi * done))
    return 0.001 + 0.999 * scale


# ----------------------------------------------------------------------------------- the training

def train(settings, device):
    """Run the training. Returns the exit code: 0, or 128 + SIGTERM if a signal stopped it."""
    # ---- The beginning, which is the newest checkpoint if there is one.
    saved = checkpoints(settings.out_dir)
    resumed = saved[-1] if saved else None
    model, weights = make_model(settings, resumed, device)
    train_set = Dataset(settings.data, "train", settings.context)
    val_sets = [Dataset(folder, "val", settings.context) for folder in train_set.folders]
    # Read now, since --init_from may be gone when the first checkpoint is written.
    tokenizer_files = read_tokenizer_files(model.folder or train_set.folders[0])
    optimizer = make_optimizer(settings, model, RANK, WORLD, weights)
    progress = {
        "update": 0,
        "skipped": 0,  # updates without a finite gradient
        "tokens": 0,
        "flops": 0,
        "log_bytes": 0,
    }
    if resumed:
        progress = read_json(resumed / "train.json")
        moments = load_file(resumed / "optimizer.safetensors")  # memory-mapped
        optimizer.load(moments, progress["update"] - progress["skipped"])
    elif model.folder:
        progress |= spent_before(model.folder)
    recipe = {item.name: getattr(settings, item.name) for item in fields(Recipe)}
    recipe["digest of the data"] = train_set.fingerprint()
    recipe_file = Path(settings.out_dir, "recipe.json")
    if recipe_file.exists():
        check_settings(settings.out_dir, read_json(recipe_file), recipe,
                       "To continue with other settings, use --init_from=OLD --out_dir=NEW")
    check_ranks(recipe, model, progress)
    say(f"data: {settings.data}, {train_set.num_rows:,} rows; {settings.dtype} on {device}; "
        f"from {model.folder or 'random weights'}")
    describe_run(settings, model)
    start = progress["update"]
    if start > 0 and start == settings.updates:
        say(f"{settings.out_dir} is already complete")
        return 0

    # ---- No files are written before this point.
    lock = locked(settings.out_dir) if RANK == 0 else contextlib.nullcontext()
    attention = contextlib.nullcontext()
    if device == "cpu" and settings.context <= 128:
        # For short rows, the backward pass of SDPA's fused kernel takes twice as long.
        attention = sdpa_kernel(SDPBackend.MATH)
    with lock, attention:
        if settings.updates:
            warm_up(settings, model, train_set)
        if RANK == 0:
            write_json(recipe_file, recipe)
        if start == 0:
            log(settings, progress, validate(settings, model, val_sets))
        signals = catch_signals()
        skips = 0  # updates in a row without a finite gradient
        B = settings.micro_batch
        num_micro_batches = settings.batch_size // (B * WORLD)  # of each rank in an update
        tokens = settings.batch_size * settings.context         # of all ranks in an update
        run_began = time.time()
        for update in range(start, settings.updates):
            update_began = time.time()

            # ---- Gradients: each micro-batch runs n recurrences without and k with gradient.
            draws = draws_of(settings, update)
            totals = torch.zeros(3, dtype=torch.float64, device=device)
            losses, labels, stops = totals
            for i in range(num_micro_batches):
                if signals:
                    stops += 1
                    break
                index = update * num_micro_batches + i
                batch = train_set.batch(settings.seed, index, RANK, WORLD, B)
                idx, targets, state = to_inputs(model, batch, settings.seed)
                n, k = draws[i * len(draws) // num_micro_batches]
                _, micro_losses = model(idx, targets, (n, k), state, settings.recompute)
                loss = micro_losses.sum()
                loss.backward()
                optimizer.accumulate()
                losses += loss.detach()
                labels += int((batch[1] != IGNORE).sum())  # on the CPU, so nothing waits
            if WORLD > 1:
                dist.all_reduce(totals)
            total_norm = optimizer.reduce()
            # The only wait for the device in an update.
            losses, labels, stops, total_norm = torch.stack((*totals, total_norm)).tolist()
            if stops:  # at least one rank left this update early, so it is dropped
                if update > start:
                    save_checkpoint(settings, model, weights, optimizer, tokenizer_files, progress)
                say(f"stopped by a signal after update {update}. Run the same command to resume")
                return 128 + signal.SIGTERM

            # ---- The step.
            lr_factor = lr_scale(settings, update)
            norm = optimizer.step(total_norm, max(labels, 1), lr_factor)
            skips = 0 if math.isfinite(norm) else skips + 1
            if skips > MAX_SKIPS:
                raise UserError(f"the last {skips} updates had no finite gradient. Lower --lr (now "
                                f"{settings.lr}), or check the data")
            done = update + 1
            progress["update"] = done
            progress["skipped"] += skips > 0
            progress["tokens"] += tokens
            progress["flops"] += update_flops(settings, model, optimizer, draws)

            # ---- The log, validation and checkpoints.
            last = done == settings.updates
            if last or skips or done % settings.log_every == 0:
                loss = losses / labels if labels else math.nan
                mean_n, mean_k = (mean(depths) for depths in zip(*draws))
                tokens_per_s = round(tokens / (time.time() - update_began))
                seconds = (time.time() - run_began) / (done - start)  # of an update
                minutes_left = seconds * (settings.updates - done) / 60
                depth = f"n {mean_n:g} k {mean_k:g}  " if model.config.n_core else ""
                say(f"update {done:5d}/{settings.updates}  loss {loss:.4f}  {depth}"
                    f"norm {norm:.2f}  {tokens_per_s:,} tokens/s  "
                    f"{minutes_left:.1f} min left at this pace")
                log(settings, progress, {
                    "loss": loss,
                    "norm": norm,
                    "n": mean_n,
                    "k": mean_k,
                    "lr": settings.lr * lr_factor,
                    "tokens_per_s": tokens_per_s,
                })
            if last or done % settings.eval_every == 0:
                log(settings, progress, validate(settings, model, val_sets))
            if last or done % settings.save_every == 0:
                save_checkpoint(settings, model, weights, optimizer, tokenizer_files, progress)
    say(f"done: {settings.out_dir}")
    return 0


def to_inputs(model, batch, seed):
    """
    Return a batch of a Dataset as the model's inputs, on its device: idx and targets (B, T), and
    s_0 (B, T, C), which is None for an ordinary model.
    """
    idx, targets, numbers = batch
    device = model.embed.weight.device
    state = None
    if model.config.n_core:
        state = model.initial_state(*idx.shape, seed, int(numbers[0]))
    if device.type == "cuda":  # copies from pinned memory do not wait for the GPU
        idx = idx.pin_memory()
        targets = targets.pin_memory()
    return idx.to(device, non_blocking=True), targets.to(device, non_blocking=True), state


def update_flops(settings, model, optimizer, draws):
    """Return the FLOPs of an update with these draws, on all ranks, Newton-Schulz included."""
    per_token = [
        model.flops_per_token(steps, settings.context, training=True, recompute=settings.recompute)
        for steps in draws
    ]
    tokens = settings.batch_size * settings.context
    return tokens * sum(per_token) // len(draws) + optimizer.flops()


@torch.no_grad()
def validate(settings, model, val_sets):
    """
    Validate on the first --eval_rows rows of each data set, or on all that it has. Returns an entry
    for the log: "val" {r: mean loss of a label} and "accuracy" {r: fraction of the labels that the
    model finds most likely}, over all data sets, for each r of --eval_recurrences; and for a
    mixture "val_by_source" {folder: {r: mean loss of a label}}.
    """
    steps = settings.eval_recurrences if model.config.n_core else [0]
    B = settings.micro_batch
    overall = 0
    by_source = {}
    for val_set in val_sets:
        (folder,) = val_set.folders
        rows = min(settings.eval_rows, val_set.num_rows)
        totals = torch.zeros(3, len(steps), dtype=torch.float64,
                             device=model.embed.weight.device)
        losses, right, labels = totals
        for i in range(math.ceil(rows / (B * WORLD))):
            batch = val_set.batch(0, i, RANK, WORLD, B)
            _, targets, numbers = batch
            targets[numbers >= rows] = IGNORE  # the last batch may reach beyond the rows
            labels += int((targets != IGNORE).sum())
            idx, targets, state = to_inputs(model, batch, 0)
            for j, (_, s) in enumerate(model.trajectory(idx, steps, state)):
                loss, hit = model.score(s, targets)
                losses[j] += loss.double().sum()
                right[j] += hit.sum()
        if WORLD > 1:
            dist.all_reduce(totals)
        count = labels[0].long().item()
        if not count:
            raise UserError(f"{folder}: none of the {rows} validation rows has a label, so there "
                            "is no loss to measure. Raise --eval_rows, or create the data set "
                            "again")
        by_source[folder] = dict(zip(steps, (losses / labels).tolist()))
        say(f"validation on {rows:,} rows of {folder}, {count:,} labels: loss "
            + ", ".join(f"{loss:.4f} at r = {r}" for r, loss in by_source[folder].items()))
        overall = overall + totals
    losses, right, labels = overall
    entry = {
        "val": dict(zip(steps, (losses / labels).tolist())),
        "accuracy": dict(zip(steps, (right / labels).tolist())),
    }
    if len(val_sets) > 1:
        entry["val_by_source"] = by_source
    return entry


def log(settings, progress, entry):
    """
    Append an entry to log.jsonl. Truncates the log to the newest checkpoint first, because a killed
    run redoes the updates after it. NaN becomes null.
    """
    if RANK > 0:
        return
    entry = nan_to_null(entry | {key: progress[key] for key in ("update", "tokens", "flops")})
    with open(f"{settings.out_dir}/log.jsonl", "ab") as f:
        size = min(f.tell(), progress["log_bytes"])
        f.truncate(size)
        progress["log_bytes"] = size + f.write(json.dumps(entry).encode() + b"\n")
    if settings.wandb:
        import wandb
        if not wandb.run:
            wandb.init(project="loopgraft", name=settings.out_dir, config=vars(settings))
        wandb.log(entry, step=entry["update"])


def save_checkpoint(settings, model, weights, optimizer, tokenizer_files, progress):
    """
    Write the checkpoint out_dir/step_*, on rank 0, which collects it from all ranks. Then delete
    the oldest checkpoints, so that --keep are left.

    A checkpoint holds the float32 masters, the frozen parameters as in `weights`, the optimizer's
    moments, the tokenizer, and `progress`.
    """
    kept = optimizer.gather()
    if RANK > 0:
        return
    moments = {key: t for key, t in kept.items() if key not in optimizer.params}
    with write_atomically(f"{settings.out_dir}/step_{progress['update']:06d}") as folder:
        model.save(folder, weights | kept)
        write_tokenizer(tokenizer_files, folder)
        save_file(moments, folder / "optimizer.safetensors")
        write_json(folder / "train.json", progress | {"config": vars(settings)})
    for path in checkpoints(settings.out_dir)[:-settings.keep]:
        shutil.rmtree(path, ignore_errors=True)  # NFS keeps files that are still open somewhere


def catch_signals():
    """
    Return a list to which SIGTERM, Ctrl-C and a closed terminal add their number, instead of ending
    the process. All ranks stop at the end of the update in which one of them received a signal; a
    rank that did leaves out the rest of the update.
    """
    received = []

    def receive(number, frame):
        if RANK == 0 and not received:
            # Not print(), which this signal may have interrupted.
            os.write(2, b"stopping: this update is dropped, and the last one is saved\n")
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, receive)
    return received


# ---------------------------------------------------------------------------------- how it begins

def make_config(settings, source=None):
    """
    Return the Config of a run. source: the Config of the checkpoint that it starts from, or None
    for random weights, whose Config follows from the settings and the data's vocabulary.
    """
    random_weights = settings.reinit or not source
    if not source:
        folder, _ = read_mixture(settings.data)[0]
        meta = read_json(f"{folder}/meta.json")
        source = Config(
            vocab_size=meta["vocab_size"],
            n_embd=settings.n_embd,
            n_head=settings.n_head,
            n_kv_head=settings.n_kv_head,
            n_ffn=settings.n_ffn,
            n_prelude=settings.n_prelude,
            n_core=settings.n_core,
            n_coda=settings.n_coda,
            eos_token_id=meta["eos_id"],
        )
    return replace(
        source,
        embed_scale=settings.embed_scale if random_weights else source.embed_scale,
        mean_recurrence=settings.mean_recurrence,
        backprop_depth=settings.backprop_depth or settings.mean_recurrence,
        context=max(source.context, settings.context),
    )


def make_model(settings, resumed, device):
    """
    Make the model of a run, on the device and in settings.dtype: from its own checkpoint `resumed`,
    or else from init_from, or else with random weights. Checks that its tokenizer is the data's.

    Returns the model, and its exact weights as {name: tensor} on the CPU. Those of a checkpoint are
    memory-mapped.
    """
    source = None
    folder = resumed or settings.init_from
    if folder:
        folder = find_checkpoint(folder)
        source = load_config(folder)
        if settings.context > source.context:
            say(f"warning: --context={settings.context} is beyond the {source.context} tokens that "
                f"{folder} was made for; the model has to learn the later positions")
    config = make_config(settings, source)
    if folder and (resumed or not settings.reinit):
        model, weights = RecurrentLM.open_mapped(folder, config)
    else:
        model = RecurrentLM(config)
        model.init_weights(settings.seed)
        weights = {name: p.data for name, p in model.named_parameters()}
    model.to(device, getattr(torch, settings.dtype))
    data_folders = [data_folder for data_folder, _ in read_mixture(settings.data)]
    check_tokenizer(config, model.folder or data_folders[0], *data_folders)
    choose_trained(settings, model)
    return model, weights


def choose_trained(settings, model):
    """
    Turn off the gradients of all parameters that --train does not name. Raises UserError if one of
    its words matches no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    words = settings.train.split("|") if settings.train else []
    for word in words:
        if not word or not any(word in name for name in names):
            raise UserError(f"--train={settings.train}: {word!r} matches none of the parameter "
                            f"names, which look like {names[-2]}")
    for name, p in model.named_parameters():
        p.requires_grad = not words or any(word in name for word in words)


def make_optimizer(settings, model, rank, world, weights=None):
    """Return the Optimizer of the parameters that are trained."""
    return Optimizer(
        ((name, p) for name, p in model.named_parameters() if p.requires_grad),
        lr=settings.lr,
        adam_lr=settings.adam_lr,
        weight_decay=settings.weight_decay,
        clip=settings.clip or math.inf,
        rule=settings.optimizer,
        weights=weights,
        stacked={} if model.config.n_core else stacked_rows(model),
        rank=rank,
        world=world,
    )


def spent_before(folder):
    """
    Return {"tokens": ..., "flops": ...} that earlier runs have spent on the checkpoint `folder`
    since the parent. A parent is a checkpoint that train.py did not make, such as one of
    surgery.py, or the end of a run without --init_from, which was pretraining.
    """
    path = Path(folder, "train.json")
    if path.exists():
        earlier = read_json(path)
        if earlier["config"]["init_from"]:
            return {key: earlier[key] for key in ("tokens", "flops")}
    return {"tokens": 0, "flops": 0}


def check_ranks(recipe, model, progress):
    """Raise UserError if ranks differ in settings, data, weights or progress."""
    if WORLD == 1:
        return
    checksum = sum(p.detach().view(torch.int16).sum() for p in model.parameters()).item()
    mine = {**recipe, "update": progress["update"], "weights": f"{checksum:x}"}
    starts = [None] * WORLD
    dist.all_gather_object(starts, mine)
    for key, value in starts[0].items():
        if mine[key] != value:
            raise UserError(f"rank {RANK} has {key} = {mine[key]}, but rank 0 has {value}. All "
                            "ranks need the same settings and the same files")


def describe_run(settings, model):
    """Print what the settings mean: the model, the updates, and the schedules."""
    c = model.config
    size = model.num_params()
    parts = ", ".join(f"{part} {n:,}" for part, n in size.items())
    say(f"model: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, width {c.n_embd}; parameters: "
        f"{parts}; {size.total():,} in all, {model.num_params(trained=True).total():,} trained")
    updates = settings.updates
    tokens = updates * settings.batch_size * settings.context
    say(f"run: {updates:,} updates of {settings.batch_size:,} rows of {settings.context:,} tokens, "
        f"{tokens:.4g} tokens in all")
    if c.n_core:
        extra = 0 if settings.recurrence_sampler == "fixed" else 1  # see draw_steps()
        first = scheduled_mean(settings, 0) + extra
        last = settings.mean_recurrence + extra
        rise = f"{last} throughout"
        if first < last:
            warmup = num_updates(settings, settings.curriculum_warmup)
            rise = f"{first} to {last} over {warmup:,} updates"
        say(f"mean of r: {rise}; gradients through at most the last {largest_depth(settings)}")


def warm_up(settings, model, train_set):
    """
    Compile the model, and run one forward and backward pass at the run's largest k. Compiling, and
    running out of memory, thus happen now, and not hours later when the curriculum has risen.
    Prints the peak memory of a GPU. The gradients are discarded.
    """
    announcement = "warm-up: one pass at the full depth"
    if settings.compile:
        functorch_config.activation_memory_budget = settings.activation_budget
        try:
            model.compile_parts()
            announcement += f"; {COMPILING}; --compile=false skips it"
        except UserError as e:
            say(f"warning: {e}. Continuing without torch.compile")
    say(announcement)
    began = time.time()
    batch = train_set.batch(0, 0, 0, 1, settings.micro_batch)
    idx, targets, state = to_inputs(model, batch, settings.seed)
    k = largest_depth(settings)
    try:
        _, losses = model(idx, targets, (1, k), state, settings.recompute)
        say(f"warm-up: {time.time() - began:.0f} s for the forward pass; now the backward pass")
        losses.sum().backward()
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory with --micro_batch={settings.micro_batch} at k = {k}. "
                        "Lower --micro_batch or --context, or try --activation_budget=0.5, then "
                        "--recompute")
    model.zero_grad()
    memory = ""
    if model.embed.weight.is_cuda:
        memory = f", peak memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB"
    say(f"warm-up: {time.time() - began:.0f} s in all{memory}")


def start_processes():
    """Join the other ranks, if there are any. Returns this rank's device."""
    device = "cpu"
    gpu = None  # the device, if it is a GPU, for NCCL
    if find_gpu():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        gpu = torch.device(device)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if WORLD == 1:
        return device
    one_node = os.environ.get("LOCAL_WORLD_SIZE", str(WORLD)) == str(WORLD)
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and not one_node and os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        raise UserError("--max-restarts on several nodes needs "
                        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in front of torchrun")
    store = next(dist.rendezvous("env://"))[0]
    if one_node:
        # All attempts on one node share torchrun's store, which still holds the addresses of
        # processes that died, so each attempt gets a key prefix of its own. Several nodes may count
        # their restarts differently; there, each attempt needs a store of its own (see above).
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(store=store, rank=RANK, world_size=WORLD, device_id=gpu,
                            timeout=timedelta(hours=1))  # another rank may compile or save
    return device


def main():
    settings = read_settings(sys.argv[1:], WORLD)
    device = start_processes()
    try:
        code = train(settings, device)
        if WORLD > 1:
            # torchrun kills the other ranks when one exits, and rank 0 may still be saving.
            dist.barrier()
            dist.destroy_process_group()
    except RuntimeError as e:
        if "gloo" in str(e) or isinstance(e, dist.DistError):
            raise UserError(f"rank {RANK} lost contact with another rank ({e!s:.120}). The "
                            "cause is in that rank's output")
        raise
    return code


if __name__ == "__main__":
    cli(main)
