"""
Train a model, recurrent or ordinary, from pretraining to a task of your own. The same command
resumes a run that was stopped.

    python runs/tiny_corpus.py --out out/tiny/data                         make some data
    python train.py --config=config/tiny.toml                              run one process
    torchrun --nproc_per_node=4 train.py --config=config/tiny.toml         run four processes
    python train.py --config=config/tiny.toml --lr=0.01 --updates=200      override settings
    python train.py --config=config/fig4.toml --dry_run                    estimate time and memory
    python train.py --updates=0 --init_from=DIR --data=SHARDS --out_dir=NEW     validate only
    python train.py --config=mine.toml --init_from=PARENT --flops_of=out/mine --out_dir=NEW
                                                      train a baseline for as many FLOPs as out/mine

Unusual: each update draws its number of recurrences, r = n + k, from a heavy-tailed distribution
whose mean follows a curriculum, and only the last k carry gradient. All randomness (rows,
recurrences, initial states) is a function of (seed, update), so a killed run resumes with the same
command. On a CPU, with the same number of processes, the result is bit-identical to that of a run
that was never killed; otherwise it is equal up to rounding.

Read this file from top to bottom: the settings, the run, then the functions that it calls.

Paper: arXiv 2511.07384, sections 3 and 4 and appendix D.
"""
import bisect
import contextlib
import functools
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
from typing import NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import (RANK, WORLD, Parser, UserError, between, check_settings, cli, did_you_mean,
                    find_gpu, fraction, locked, nan_to_null, natural, non_negative, opening,
                    positive, random_seed, read_json, recurrences, say, write_atomically,
                    write_json, yes_or_no)
from data import Dataset, check_tokenizer, read_tokenizer_files, write_tokenizer
from model import (COMPILING, IGNORE, Config, RecurrentLM, checkpoints, find_checkpoint,
                   load_config)
from muon import MOMENTS, Optimizer, stacked_rows
from surgery import presets, retrofitted

MAX_SKIPS = 10  # updates in a row that may lack a finite gradient; one more ends the run

# How the sampler's mean rises from 1 to R during the curriculum's warm-up. Each curriculum has two
# functions: from the fraction of the warm-up that is done to the fraction of R, and its inverse,
# with which the paper's figures count FLOPs.
CURRICULA = {
    "linear": (lambda done: done, lambda share: share),
    "1-sqrt": (lambda done: 1 - math.sqrt(1 - done), lambda share: 1 - (1 - share) ** 2),
    "none": (lambda done: 1.0, lambda share: 0.0),
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
    flops_of: str = setting("", "a run: make as many updates as it takes to spend the same FLOPs. "
                            "Overrides the TOML file's updates; cannot be combined with --updates",
                            str)
    data: str = setting("", "a folder made by data.py, or a mixture: A:1,B:1,C:2", str)
    micro_batch: int = setting(8, "rows per forward pass on a device; a larger batch accumulates "
                               "gradients", positive)
    eval_every: int = setting(1000, "updates between validations; there is also one at the start "
                              "and one at the end", positive)
    eval_rows: int = setting(1024, "validation rows", positive)
    eval_steps: list[int] = setting((1, 2, 4, 8, 16, 32), "recurrences to validate at", recurrences)
    save_every: int = setting(500, "updates between checkpoints; there is also one at the end",
                              positive)
    keep: int = setting(2, "checkpoints to keep", positive)
    log_every: int = setting(1, "updates between lines of the log", positive)
    wandb: bool = setting(False, "also log to Weights & Biases", yes_or_no)
    compile: bool = setting(True, "use torch.compile", yes_or_no)
    activation_budget: float = setting(1.0, "fraction of the activations that a compiled model "
                                       "keeps for the backward pass, 0.3 to 1; less saves memory "
                                       "and costs time", between(0.3, 1, float))
    recompute: bool = setting(False, "recompute every recurrence in the backward pass, which needs "
                              "the least memory", yes_or_no)
    dry_run: bool = setting(False, "print the run's FLOPs, time and memory (estimates), and exit",
                            yes_or_no)
    gpus: int = setting(WORLD, "number of GPUs that --dry_run assumes", positive)


GROUPS = {  # the sections of --help
    "what": "config init_from data out_dir flops_of seed",
    "the shape of random weights": "reinit n_embd n_head n_kv_head n_ffn n_prelude n_core n_coda "
                                   "embed_scale",
    "how long": "updates batch_size context draws",
    "recurrence": "mean_recurrence recurrence_sampler curriculum curriculum_warmup "
                  "backprop_depth backprop_warmup",
    "optimizer": "train optimizer lr adam_lr weight_decay clip warmup cooldown",
    "speed and memory": "micro_batch dtype compile activation_budget recompute",
    "output": "eval_every eval_rows eval_steps save_every keep log_every wandb",
    "planning": "dry_run gpus",
}


def settings_parser():
    """Return the command line's parser, which has a flag for each field of Settings."""
    parser = Parser(usage="train.py --config=FILE --key=value ...", description=opening(__doc__))
    group_of = {}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names.split():
            group_of[name] = group
    metavars = {str: "NAME", int: "N", float: "X"}
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
            option["metavar"] = metavars.get(type(item.default), "VALUE")
        if kind is yes_or_no:  # --key alone means true
            option["nargs"] = "?"
            option["const"] = "true"
        group_of[item.name].add_argument(f"--{item.name}", **option)
    return parser


def read_settings(argv):
    """
    Read the Settings from --config=FILE.toml (flat keys), overridden by --key=value.

    A yes-or-no --key without a value is true. micro_batch is lowered to a rank's rows per update if
    it exceeds them. Raises UserError for an invalid setting, and for settings that contradict each
    other.
    """
    parser = settings_parser()
    config = parser.parse_known_args(argv)[0].config
    updates_given = any(word.split("=")[0] == "--updates" for word in argv)
    if config:
        argv = read_toml(config) + argv
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.flops_of and updates_given:
        raise UserError(f"--updates={settings.updates}: --flops_of={settings.flops_of} decides the "
                        "number of updates, so give one of the two")
    if not (settings.data and settings.out_dir):
        parser.error("give --data and --out_dir, or --config=FILE")
    world = settings.gpus if settings.dry_run else WORLD
    settings.micro_batch = min(settings.micro_batch, math.ceil(settings.batch_size / world))
    check_consistency(settings, world)
    return settings


def read_toml(path):
    """
    Return the settings in a TOML file as flags. Raises UserError for a setting that does not exist.
    """
    try:
        values = tomllib.loads(Path(path).read_text())
    except ValueError as e:
        raise UserError(f"{path}: {e}")
    known = [item.name for item in fields(Settings)]
    for name in values:
        if name not in known:
            raise UserError(f"{path}: unknown setting {name!r}{did_you_mean(name, known)}")
    return [f"--{name}={value}" for name, value in values.items()]


def check_consistency(settings, world):
    """
    Raise UserError if the run would overwrite init_from, if an update on `world` ranks does not
    divide into draws and micro-batches, or if the width does not divide into heads.
    """
    init_from = settings.init_from
    out_dir = settings.out_dir
    if init_from and os.path.realpath(init_from) == os.path.realpath(out_dir):
        raise UserError(f"--out_dir={out_dir}: is --init_from, which must not be overwritten. "
                        "Choose another folder")
    if settings.batch_size % (settings.micro_batch * world * settings.draws):
        raise UserError(f"--batch_size={settings.batch_size}: must be a multiple of the number of "
                        f"processes ({world}) times --micro_batch={settings.micro_batch} times "
                        f"--draws={settings.draws}")
    width = settings.n_embd
    heads = settings.n_head
    kv_heads = settings.n_kv_head
    if width % (2 * heads) or heads % kv_heads:
        raise UserError(f"--n_embd={width}, --n_head={heads}, --n_kv_head={kv_heads}: n_embd / "
                        "n_head must be an even number, and n_head a multiple of n_kv_head")


# ---------------------------------------------------------------------------------------- the run

def main():
    settings = read_settings(sys.argv[1:])
    if settings.flops_of:
        settings.updates = affordable_updates(settings)
    if settings.dry_run:
        return dry_run(settings)
    device, store = start_processes()
    try:
        code = train(settings, device, store)
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


def start_processes():
    """
    Join the other ranks, if there are any. Returns this rank's device, and a key-value store that
    all ranks share.
    """
    device = "cpu"
    gpu = None  # the device, if it is a GPU, for NCCL
    if find_gpu():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        gpu = torch.device(device)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if WORLD == 1:
        return device, dist.HashStore()
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
    return device, store


def train(settings, device, store):
    """Run the training. Returns the exit code: 0, or 128 + SIGTERM if a signal stopped it."""
    dataset = Dataset(settings.data, "train", settings.context)
    val_sets = validation_sets(settings)
    progress, folder = find_progress(settings, dataset)
    model, weights = make_model(settings, dataset, folder, device)
    # Read now, since --init_from may be gone when the first checkpoint is written.
    tokenizer_files = read_tokenizer_files(model.folder or dataset.folders[0])
    begin_progress(settings, model, progress)
    optimizer = make_optimizer(settings, model, RANK, WORLD, weights)
    if folder:
        load_moments(optimizer, folder, progress["update"] - progress["skipped"])
    plan(settings, model)
    print_label_shares(dataset)
    check_ranks(progress, model)
    start = progress["update"]
    if start > 0 and start == settings.updates:
        say(f"{settings.out_dir} is already complete")
        return 0
    if settings.wandb and RANK == 0:
        start_wandb(settings)
    # No files are written before this point.
    lock = locked(settings.out_dir) if RANK == 0 else contextlib.nullcontext()
    with lock, fast_attention(settings, device):
        warm_up(settings, model, dataset)
        if start == 0:
            if RANK == 0:
                write_json(f"{settings.out_dir}/recipe.json", progress["recipe"])
            log(settings, progress, validate(settings, model, val_sets))
        catch_signals(store)
        run_began = time.time()
        for update in range(start, settings.updates):
            update_began = time.time()
            draws = draws_of(settings, update)
            totals = add_gradients(settings, model, optimizer, dataset, update, draws, store)
            total_norm = optimizer.reduce()
            # The only wait for the device in an update.
            losses, labels, stops, total_norm = torch.stack((*totals, total_norm)).tolist()
            if stops:  # at least one rank left this update early, so it is dropped
                if update > start:
                    save_checkpoint(settings, model, weights, optimizer, tokenizer_files, progress)
                say(f"stopped by a signal after update {update}. Run the same command to resume")
                return 128 + signal.SIGTERM
            lr_factor = lr_scale(settings, update)
            norm = optimizer.step(total_norm, max(labels, 1), lr_factor)
            count_update(settings, model, progress, draws, norm)
            done = update + 1
            last = done == settings.updates
            if last or not math.isfinite(norm) or done % settings.log_every == 0:
                loss = losses / labels if labels else math.nan
                speed = settings.batch_size * settings.context / (time.time() - update_began)
                pace = (time.time() - run_began) / (done - start)
                report(settings, progress, model, loss, norm, draws, lr_factor, speed, pace)
            if last or done % settings.eval_every == 0:
                log(settings, progress, validate(settings, model, val_sets))
            if last or done % settings.save_every == 0:
                save_checkpoint(settings, model, weights, optimizer, tokenizer_files, progress)
    say(f"done: {settings.out_dir}")
    return 0


def add_gradients(settings, model, optimizer, dataset, update, draws, store):
    """
    Run the forward and backward passes of an update, and add up its gradients in the optimizer.

    draws: [(n, k), ...], each for an equal share of the rows. Returns three float64 scalars on the
    device, each summed over all ranks: the losses, the number of labels, and the number of ranks
    that left early because they were asked to stop.
    """
    B = settings.micro_batch
    accumulate = settings.batch_size // (WORLD * B)
    totals = torch.zeros(3, dtype=torch.float64, device=model.embed.weight.device)
    losses, labels, stops = totals
    for micro_step in range(accumulate):
        if store.check(["stop"]):
            stops += 1
            break
        index = update * accumulate + micro_step
        batch = dataset.batch(settings.seed, index, RANK, WORLD, B)
        steps = draws[micro_step * len(draws) // accumulate]
        loss = run_batch(settings, model, batch, steps)
        loss.backward()
        optimizer.accumulate()
        losses += loss.detach()
        labels += int((batch[1] != IGNORE).sum())
    if WORLD > 1:
        dist.all_reduce(totals)
    return losses, labels, stops


def run_batch(settings, model, batch, steps):
    """Return the summed loss of a loader's batch at steps = (n, k)."""
    idx, targets, state = to_inputs(model, batch, settings.seed)
    _, loss = model(idx, targets, steps, state, reduction="sum", recompute=settings.recompute)
    return loss


def to_inputs(model, batch, seed):
    """
    Return a loader's batch as the model's inputs, on its device: idx and targets (B, T), and s_0
    (B, T, C), which is None for an ordinary model.
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


def count_update(settings, model, progress, draws, norm):
    """
    Add an update to `progress`. norm: of its gradient; if that is not finite, the update was
    skipped. Raises UserError if more than MAX_SKIPS updates in a row were skipped.
    """
    tokens = settings.batch_size * settings.context
    steps = paper_steps(settings, progress["update"])
    progress["paper_flops"] += tokens * model.flops_per_token(steps)
    progress["update"] += 1
    progress["tokens"] += tokens
    progress["flops"] += tokens * sum(map(model.flops_per_token, draws)) // len(draws)
    if math.isfinite(norm):
        progress["skips"] = 0
        return
    progress["skipped"] += 1
    progress["skips"] += 1
    if progress["skips"] > MAX_SKIPS:
        raise UserError(f"the last {progress['skips']} updates had no finite gradient. Lower --lr "
                        f"(now {settings.lr}), or check the data")


def report(settings, progress, model, loss, norm, draws, lr_factor, speed, pace):
    """
    Print and log an update; the n and k in the log are means over its draws. loss: per label, NaN
    if there are no labels. norm: of the mean gradient. speed: tokens per second in this update.
    pace: seconds per update since this process started.
    """
    n, k = (mean(depths) for depths in zip(*draws))
    done = progress["update"]
    minutes_left = pace * (settings.updates - done) / 60
    depth = f"n {n:g} k {k:g}  " if model.config.n_core else ""
    loss_text = "no labels" if math.isnan(loss) else f"loss {loss:.4f}"
    say(f"update {done:5d}/{settings.updates}  {loss_text}  {depth}norm {norm:.2f}  "
        f"{speed:,.0f} tokens/s  {minutes_left:.1f} min left at this pace")
    log(settings, progress, {"loss": loss, "norm": norm, "n": n, "k": k,
                             "lr": settings.lr * lr_factor, "tokens_per_s": round(speed)})


# --------------------------------------------------------------------------------- the beginning

def find_progress(settings, dataset):
    """
    Find where to begin. Returns `progress`, a dict that every checkpoint keeps in train.json, and
    the folder of the newest checkpoint; for a new run, a fresh dict and None.

    Raises UserError if out_dir was created with another recipe.
    """
    recipe = {item.name: getattr(settings, item.name) for item in fields(Recipe)}
    recipe["digest of the data"] = dataset.fingerprint()
    saved = checkpoints(settings.out_dir)
    recipe_file = Path(settings.out_dir, "recipe.json")
    if saved:
        folder = saved[-1]
        progress = read_json(folder / "train.json")
        check_settings(settings.out_dir, progress["recipe"], recipe,
                       "To continue with other settings, use --init_from=OLD --out_dir=NEW")
        return progress, folder
    if recipe_file.exists():  # a log without a checkpoint; this run would overwrite it
        check_settings(settings.out_dir, read_json(recipe_file), recipe,
                       "Choose another --out_dir, or delete this one, which has a log but no "
                       "checkpoint")
    return {
        "update": 0,
        "skipped": 0,  # updates without a finite gradient, in the whole run
        "skips": 0,    # those of them in a row, up to now
        "tokens": 0,
        "flops": 0,
        "paper_flops": 0,
        "log_bytes": 0,
        "recipe": recipe,
    }, None


def begin_progress(settings, model, progress):
    """
    For a new run, record its past in `progress`: the tokens and FLOPs since surgery that went into
    init_from, and, for the model card of an export, the surgery and the stages of training, of
    which this run is the last.
    """
    if progress["update"]:
        return
    earlier = read_run(model.folder) if model.folder else {}
    progress |= carried_over(earlier, model.config)
    progress["surgery"] = earlier.get("surgery")
    if model.folder and Path(model.folder, "surgery.json").exists():
        progress["surgery"] = read_json(f"{model.folder}/surgery.json")
    stage = {
        "data": [Path(part.partition(":")[0]).name for part in settings.data.split(",")],
        "updates": settings.updates,
        "mean_recurrence": settings.mean_recurrence,
    }
    progress["stages"] = [*earlier.get("stages", []), stage]


def read_run(folder):
    """Return the train.json of a checkpoint, or {} if it does not come from training."""
    path = Path(folder, "train.json")
    return read_json(path) if path.exists() else {}


def carried_over(earlier, config):
    """
    Return the totals {"tokens": ..., "flops": ..., "paper_flops": ...} with which a run of this
    Config begins. earlier: the train.json of what it starts from. Totals count from surgery on, so
    an ordinary model that was pretrained here from random weights begins at zero, which is {}.
    """
    if earlier and (config.n_core or earlier["config"]["init_from"]):
        return {key: earlier[key] for key in ("tokens", "flops", "paper_flops")}
    return {}


def run_config(settings, folder=None):
    """
    Build the Config of a run: from its own checkpoint `folder`, or else from init_from, or else
    from the settings and the data's vocabulary. mean_recurrence and backprop_depth always come from
    the settings, and the context is the longer of the two.
    """
    folder = folder or settings.init_from
    if folder:
        config = parent_config(settings, folder)
        if settings.context > config.context:
            say(f"warning: --context={settings.context} is beyond the {config.context} tokens that "
                f"{folder} was made for; the model has to learn the later positions")
    else:
        meta = Dataset(settings.data, "val", settings.context).sources[0][0].meta
        config = Config(
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
    random_weights = settings.reinit or not folder
    return replace(
        config,
        embed_scale=settings.embed_scale if random_weights else config.embed_scale,
        mean_recurrence=settings.mean_recurrence,
        backprop_depth=settings.backprop_depth or settings.mean_recurrence,
        context=max(config.context, settings.context),
    )


def parent_config(settings, folder):
    """
    Return the Config of a checkpoint or run.

    In a dry run the folder need not exist yet. The Config is then guessed: from a name that begins
    with a preset's, from the name of a known parent, or from another file beside --config whose
    out_dir it is.
    """
    if not settings.dry_run or Path(folder).exists():
        return load_config(find_checkpoint(folder))
    name = Path(folder).name
    for preset, (parent, sizes) in presets().items():
        if name == preset or name.startswith(f"{preset}-"):
            size = 2 * RecurrentLM.empty(parent).num_params()["total"] / 1e9
            say(f"--init_from={folder}: is not there yet; assuming --preset {preset}, whose parent "
                f"is a {size:.1f} GB download in bfloat16")
            return retrofitted(parent, sizes)
        parent_name = preset.rsplit("-", 3)[0]  # "tinyllama-4-8-4" -> "tinyllama"
        if name in (parent_name, f"{parent_name}-untied"):
            say(f"--init_from={folder}: is not there yet; assuming all layers of {parent_name}")
            return replace(parent, tie_embeddings=name == parent_name and parent.tie_embeddings)
    if settings.config:
        for path in sorted(Path(settings.config).parent.glob("*.toml")):
            values = tomllib.loads(path.read_text())
            if values.get("out_dir") == folder and values.get("init_from"):
                # The run of this file will make the folder, from its own init_from.
                return parent_config(settings, values["init_from"])
    return load_config(find_checkpoint(folder))  # raises UserError, which says what is missing


def make_model(settings, dataset, folder, device):
    """
    Make the model of a run, on the device and in settings.dtype: from its own checkpoint `folder`,
    or else from init_from, or else with random weights. Checks that its tokenizer is the data's.

    Returns the model, and its exact weights as {name: tensor} on the CPU. Those of a checkpoint are
    memory-mapped.
    """
    config = run_config(settings, folder)
    if not settings.reinit:
        folder = folder or settings.init_from
    if folder:
        model, weights = RecurrentLM.open_mapped(find_checkpoint(folder), config)
    else:
        model = RecurrentLM(config)
        model.init_weights(settings.seed)
        weights = {name: p.data for name, p in model.named_parameters()}
    model.to(device, getattr(torch, settings.dtype))
    say(f"data: {settings.data}, {dataset.num_rows:,} rows; {settings.dtype} on {device}; "
        f"from {folder or 'random weights'}")
    check_tokenizer(config, model.folder or dataset.folders[0], *dataset.folders)
    choose_trained(settings, model)
    return model, weights


def print_label_shares(dataset):
    """For a mixture, print how much each data set contributes to the loss."""
    if len(dataset.folders) < 2:
        return
    shares = [f"{share:.0%} {folder}" for folder, share in dataset.label_shares().items()]
    say(f"share of the labels, and so of the loss: {', '.join(shares)}. (The weights in --data "
        "count rows.)")


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


def load_moments(optimizer, folder, updates):
    """
    Load the optimizer's moments from the run's checkpoint `folder`, for which the optimizer made
    `updates` updates. Raises UserError if they are corrupt.
    """
    path = folder / "optimizer.safetensors"
    try:
        optimizer.load(load_file(path), updates)  # memory-mapped: a rank reads only what it owns
    except (SafetensorError, KeyError) as e:
        raise UserError(f"{path}: corrupt ({e!r:.80}). If you delete this checkpoint, the run "
                        "resumes from an older one")


def check_ranks(progress, model):
    """Raise UserError if ranks differ in settings, data, weights or progress."""
    if WORLD == 1:
        return
    checksum = sum(p.detach().view(torch.int16).sum() for p in model.parameters()).item()
    mine = {**progress["recipe"], "update": progress["update"], "weights": f"{checksum:x}"}
    starts = [None] * WORLD
    dist.all_gather_object(starts, mine)
    for key, value in starts[0].items():
        if mine[key] != value:
            raise UserError(f"rank {RANK} has {key} = {mine[key]}, but rank 0 has {value}. All "
                            "ranks need the same settings and the same files")


def fast_attention(settings, device):
    """
    Return a context in which attention is fast. On a CPU and for short rows, the backward pass of
    SDPA's fused kernel takes twice as long as that of the plain one, so those use the plain one.
    """
    if device == "cpu" and settings.context <= 128:
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()


def catch_signals(store):
    """
    Make SIGTERM, Ctrl-C and a closed terminal set the key "stop" in the store, at which all ranks
    stop.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda *_: store.set("stop", ""))


def warm_up(settings, model, dataset):
    """
    Compile the model, and run one forward and backward pass at the run's largest k. Compiling, and
    running out of memory, thus happen now, and not hours later when the curriculum has risen.
    Prints the peak memory of a GPU. The gradients are discarded.
    """
    say("warm-up: one pass at the full depth")
    if settings.compile:
        functorch_config.activation_memory_budget = settings.activation_budget
        try:
            model.compile_parts()
            say(f"warm-up: {COMPILING}")
        except UserError as e:
            say(f"warning: {e}. Continuing without torch.compile")
    began = time.time()
    batch = dataset.batch(0, 0, 0, 1, settings.micro_batch)
    k = largest_depth(settings)
    try:
        loss = run_batch(settings, model, batch, (1, k))
        say(f"warm-up: {time.time() - began:.0f} s for the forward pass; now the backward pass")
        loss.backward()
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory with --micro_batch={len(batch[0])} at k = {k}. Lower "
                        "--micro_batch or --context, or try --activation_budget=0.5, then "
                        "--recompute")
    say(f"warm-up: {time.time() - began:.0f} s in all")
    model.zero_grad()
    if model.embed.weight.is_cuda:
        peak = torch.cuda.max_memory_allocated()
        say(f"warm-up: peak memory {peak / 1e9:.2f} GB")


# ------------------------------------------------------------ schedules: functions of the update

def num_updates(settings, share):
    """Return a fraction of the run as a number of updates, rounded up."""
    return math.ceil(share * settings.updates)


def scheduled_mean(settings, update):
    """
    Return the sampler's mean at an update, which rises from 1 to R. (Except with a fixed r, the
    sampler adds 1 to it; see draw_steps().)
    """
    R = settings.mean_recurrence
    warmup = num_updates(settings, settings.curriculum_warmup)
    if update >= warmup:
        return R
    rise, _ = CURRICULA[settings.curriculum]
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


# ------------------------------------------------------------------------------------- the budget

def paper_steps(settings, update):
    """
    Return (n, k) of an update as the paper's figures count it: r is the scheduled mean, without the
    1 that the sampler adds. It rises where the curriculum's inverse says, rounded as in the paper's
    code, which is at most one update away from where scheduled_mean() rises.
    """
    R = settings.mean_recurrence
    W = int(settings.curriculum_warmup * settings.updates)
    _, inverse = CURRICULA[settings.curriculum]
    edges = [int(inverse(r / R) * W) for r in range(1, R)]
    r = 1 + bisect.bisect_right(edges, update)
    k = min(r, scheduled_depth(settings, update))
    return r - k, k


def paper_flops(settings, model, updates):
    """Return the training FLOPs of `updates` updates as the paper's figures count them."""
    flops_per_token = functools.cache(model.flops_per_token)
    flops = sum(flops_per_token(paper_steps(settings, update)) for update in range(updates))
    return flops * settings.batch_size * settings.context


class BudgetEffect(NamedTuple):
    """What --activation_budget does to a compiled part of the model."""
    kept: float       # bytes that it keeps, as a fraction of those at a budget of 1
    products: float   # fraction of the forward pass's matrix products that the backward repeats
    attention: float  # the same for attention


# The largest values that `runs/activations.py count` finds for models of 6 and 8 layers
# (runs/README.md).
BUDGETS = {
    0.3: BudgetEffect(0.34, 0.36, 1),
    0.5: BudgetEffect(0.55, 0.07, 1),
    0.7: BudgetEffect(0.63, 0, 1),
    1.0: BudgetEffect(1, 0, 0),
}


def budget_effect(settings):
    """
    Return the BudgetEffect of a run's --activation_budget, rounded up to the next one in BUDGETS.
    """
    if not settings.compile:
        return BUDGETS[1.0]
    return BUDGETS[min(budget for budget in BUDGETS if budget >= settings.activation_budget)]


def executed_flops(settings, model, steps):
    """
    Return the FLOPs per token that a micro-batch at steps = (n, k) executes in matrix products and
    attention. The paper's rule leaves out attention, the head, the adapter and what is computed
    twice.
    """
    n, k = steps
    c = model.config
    effect = budget_effect(settings)
    size = model.num_params()
    trained = model.num_params(trained=True)
    # A layer has two products over all pairs of tokens: 4 T FLOPs per channel, of which a causal
    # kernel computes half.
    attention = 2 * settings.context * c.n_head * c.head_dim

    def forward(layers, *parts):
        return 2 * sum(size[part] for part in parts) + layers * attention

    def backward(layers, *parts):  # towards inputs and weights; attention computes its scores again
        weights = 2 * sum(trained[part] for part in parts)
        repeated = effect.products * forward(0, *parts) + effect.attention * layers * attention
        return forward(0, *parts) + weights + 2.5 * layers * attention + repeated

    head = 2 * model.head.weight.numel()
    loop = forward(c.n_core, "core", "adapter")
    flops = forward(c.n_prelude, "prelude") + (n + k) * loop + forward(c.n_coda, "coda")
    flops += 2 * head  # the backward pass computes the logits again
    # The backward pass reaches a part if that part, or one before it, is trained.
    reached = model.embed.weight.requires_grad or trained["prelude"]
    if reached:
        flops += backward(c.n_prelude, "prelude")
    reached = reached or trained["core"] or trained["adapter"]
    if reached:
        flops += k * backward(c.n_core, "core", "adapter")
        if settings.recompute:
            flops += k * loop
    reached = reached or trained["coda"] or trained["norm_f"]
    if reached:
        flops += backward(c.n_coda, "coda") + head
    if model.head.weight.requires_grad:
        flops += head
    return flops


def drawn_flops(settings, flops_per_token):
    """
    Add up, over the updates of a run, the mean FLOPs per token of their draws. flops_per_token: a
    function of (n, k).
    """
    flops = 0
    for update in range(settings.updates):
        flops += sum(map(flops_per_token, draws_of(settings, update))) / settings.draws
    return flops


def run_flops(settings, model):
    """Return the FLOPs that the whole run executes, with its own draws of r, without validation."""
    flops_per_token = functools.cache(lambda steps: executed_flops(settings, model, steps))
    flops = drawn_flops(settings, flops_per_token)
    return flops * settings.batch_size * settings.context


def affordable_updates(settings):
    """
    Return the number of updates, rounded to the nearest, after which this run has spent as many
    FLOPs as the run --flops_of. Both count what earlier runs have spent since surgery.

    Raises UserError if that run has counted no FLOPs, or too few for one update.
    """
    other = read_run(find_checkpoint(settings.flops_of))
    if not other.get("flops"):
        raise UserError(f"--flops_of={settings.flops_of}: has no train.json that counts FLOPs. "
                        "Name a run of train.py")
    if os.path.realpath(settings.flops_of) == os.path.realpath(settings.out_dir):
        raise UserError(f"--flops_of={settings.flops_of}: is --out_dir. Name another run")
    config = run_config(settings)
    model = RecurrentLM.empty(config)
    choose_trained(settings, model)
    budget = other["flops"]
    if settings.init_from and not settings.reinit:
        earlier = read_run(find_checkpoint(settings.init_from))
        budget -= carried_over(earlier, config).get("flops", 0)
    tokens = settings.batch_size * settings.context
    flops_per_token = functools.cache(model.flops_per_token)

    def cost(updates):
        if not config.n_core:  # all updates of an ordinary model cost the same
            return updates * tokens * flops_per_token()
        trial = replace(settings, updates=updates)  # the curriculum depends on their number
        return drawn_flops(trial, flops_per_token) * tokens

    if budget < cost(1):
        raise UserError(f"--flops_of={settings.flops_of}: leaves {budget:.4g} FLOPs for this run, "
                        f"but one update takes {cost(1):.4g}")
    updates = nearest_count(cost, budget)
    say(f"--flops_of={settings.flops_of}: {other['flops']:.4g} FLOPs since surgery, of which "
        f"{budget:.4g} are left for this run, so it makes {updates:,} updates")
    return updates


def nearest_count(cost, budget):
    """
    Return the number of updates whose cost is nearest to `budget`. cost: a function of the number
    that rises with it; one update must not cost more than the budget.
    """
    too_many = 1
    while cost(too_many) <= budget:
        too_many *= 2
    most = bisect.bisect(range(too_many), budget, key=cost) - 1  # the most within the budget
    return min(most, most + 1, key=lambda count: abs(cost(count) - budget))


# {GPU: (FLOP/s that we expect in bfloat16, memory in GB)}. The speeds are not measured; they are
# 61, 61 and 43% of the peak.
GPUS = {"RTX 4090": (1.0e14, 24), "A100": (1.9e14, 80), "H100": (4.2e14, 80)}


def plan(settings, model):
    """Print the run's shape, budget and schedules. Returns its FLOPs as the paper counts them."""
    c = model.config
    updates = settings.updates
    rows = updates * settings.batch_size
    parts = ", ".join(f"{part} {n:,}" for part, n in model.num_params().items() if n)
    say(f"model: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, width {c.n_embd}; parameters: "
        f"{parts}, trained {model.num_params(trained=True)['total']:,}")
    flops = paper_flops(settings, model, updates)
    say(f"budget: {updates:,} updates of {settings.batch_size:,} rows, "
        f"{rows * settings.context:.4g} tokens, {flops:.4g} training FLOPs as the paper counts "
        "them")
    if c.n_core:
        extra = 0 if settings.recurrence_sampler == "fixed" else 1  # see draw_steps()
        highest = settings.mean_recurrence + extra
        warmup = num_updates(settings, settings.curriculum_warmup)
        rise = f"{1 + extra} to {highest} over {warmup:,} updates"
        if settings.curriculum == "none":
            rise = f"{highest} throughout"
        if extra:
            rise += " (the sampler adds 1 to --mean_recurrence)"
        say(f"mean of r: {rise}; gradients through at most the last "
            f"{largest_depth(settings)}")
    say(f"learning rate: {settings.lr:g} ({settings.optimizer}), linear warm-up over "
        f"{num_updates(settings, settings.warmup):,} updates, cosine cooldown over the last "
        f"{num_updates(settings, settings.cooldown):,}")
    return flops


def dry_run(settings):
    """
    Print what a run would cost. This needs no weights, and no data unless the vocabulary has to
    come from it (random weights without init_from). The init_from of a preset or a known parent
    need not exist.
    """
    c = run_config(settings)
    model = RecurrentLM.empty(c).to(getattr(torch, settings.dtype))
    choose_trained(settings, model)
    flops = plan(settings, model)
    executed = run_flops(settings, model)
    say(f"executed: {executed / max(flops, 1):.2f} times as many FLOPs, because the paper "
        "counts the scheduled r instead of the draws, and leaves out attention, the head, the "
        "adapter and what is computed twice")
    plan_data(settings)
    alone = make_optimizer(settings, model, 0, 1)
    gathered = sum(t.nbytes for t in [*alone.masters.values(), *alone.moments.values()])
    say(f"checkpoints: rank 0 gathers {gathered / 1e9:.1f} GB of masters and moments in host "
        "memory")
    held = max(memory_held(settings, model, rank) for rank in range(settings.gpus)) / 1e9
    kept = activation_bytes(settings, model) / 1e9
    memory = held + kept
    for name, (speed, size) in GPUS.items():
        seconds = executed / (settings.gpus * speed)
        fits = f"{size} GB each"
        if memory > size - 2:  # 2 GB for the CUDA context and fragmentation
            fits = f"DOES NOT FIT into {size} GB"
        say(f"time: {duration(seconds)} on {settings.gpus} {name}, {fits} (an estimate)")
    say(f"memory: about {memory:.1f} GB on each of {settings.gpus} GPUs: {held:.1f} for "
        f"weights, gradients and optimizer, {kept:.1f} for the activations of "
        f"--micro_batch={settings.micro_batch} if compiled")


def duration(seconds):
    """Return a number of seconds as text: 1000 -> "about 17 minutes"."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 3600:
        return f"about {seconds / 60:,.0f} minutes"
    return f"about {seconds / 3600:,.1f} hours"


def plan_data(settings):
    """
    Print how much data a run reads. Says so if the data is not there, and warns if the run passes
    over it ten times or more.
    """
    rows = settings.updates * settings.batch_size
    size = 2 * rows * settings.context / 1e9  # most vocabularies fit into 2 bytes
    say(f"data: {rows:,} rows of {settings.context} tokens, {size:.2g} GB of ids (twice that if "
        "the vocabulary exceeds 65,536)")
    try:
        available = Dataset(settings.data, "train", settings.context).num_rows
        validation_sets(settings)
    except UserError as e:
        say(f"data: not ready: {e}")
        return
    epochs = rows / available
    say(f"data: {epochs:.3g} epochs of {settings.data}")
    if epochs >= 10:
        say("warning: from about ten epochs on, a model memorizes rows. Use fewer --updates, or "
            "more data")


def activation_bytes(settings, model):
    """
    Return the bytes of activations that a compiled forward pass of a micro-batch keeps for the
    backward pass.
    """
    c = model.config
    # Bytes per layer and token, counted on small models in bfloat16.
    layer = 14 * c.n_embd + 6 * (c.n_ffn + (c.n_head + c.n_kv_head) * c.head_dim)
    if settings.dtype == "float32":
        layer *= 2
    prelude = c.n_prelude * any(p.requires_grad for p in model.prelude.parameters())
    loops = 1 if settings.recompute else largest_depth(settings)
    layers = prelude + c.n_core * loops + c.n_coda
    return settings.micro_batch * settings.context * layer * budget_effect(settings).kept * layers


def memory_held(settings, model, rank):
    """
    Return the bytes that a rank of --gpus keeps: weights, gradients, their float32 sums, masters
    and moments.
    """
    optimizer = make_optimizer(settings, model, rank, settings.gpus)
    kept = [*model.parameters(), *optimizer.moments.values()]
    if settings.dtype != "float32":  # otherwise the weights are their own masters
        kept += optimizer.masters.values()
    gradients = optimizer.sums.numel() * model.embed.weight.element_size()
    return sum(t.nbytes for t in kept) + optimizer.sums.nbytes + gradients


# ------------------------------------------------------------------------- validation and the log

def validation_sets(settings):
    """
    Return [(Dataset, number of rows), ...]: --eval_rows, divided among the folders of --data by
    their weights. A folder with fewer validation rows gives all that it has.
    """
    mixture = Dataset(settings.data, "val", settings.context)
    total = sum(weight for _, weight in mixture.sources)
    sets = []
    for folder, (_, weight) in zip(mixture.folders, mixture.sources):
        alone = Dataset(folder, "val", settings.context)
        rows = math.ceil(settings.eval_rows * weight / total)
        sets.append((alone, min(rows, alone.num_rows)))
    return sets


@torch.no_grad()
def score_rows(settings, model, dataset, rows, steps):
    """
    Score the first `rows` rows of a Dataset, in its shuffled order, at each r of `steps`.

    Returns a tensor (3, len(steps)) float64, summed over all ranks: the losses, the number of
    labels that the model finds most likely, and the number of labels.
    """
    B = settings.micro_batch
    rope = model.rope(settings.context)
    totals = torch.zeros(3, len(steps), dtype=torch.float64, device=rope[0].device)
    losses, right, labels = totals
    for i in range(math.ceil(rows / (B * WORLD))):
        batch = dataset.batch(0, i, RANK, WORLD, B)
        _, targets, numbers = batch
        targets[numbers >= rows] = IGNORE  # the last batch may reach beyond the rows
        idx, targets, state = to_inputs(model, batch, 0)
        targets = targets.flatten()
        labels += (targets != IGNORE).sum()
        for j, (_, s) in enumerate(model.trajectory(idx, steps, state, rope)):
            x = model.run_coda(s, rope).flatten(0, 1)
            loss, hit = model.token_scores(x, targets)
            losses[j] += loss.double().sum()
            right[j] += hit.sum()
    if WORLD > 1:
        dist.all_reduce(totals)
    return totals


def validate(settings, model, val_sets):
    """
    Validate on all sets. val_sets: what validation_sets() returns.

    Returns an entry for the log: "val" {r: mean loss} and "accuracy" {r: fraction of the labels
    that the model finds most likely}, for each r of eval_steps. With several data sets there is
    also "val_by_source", with the losses, rows and labels of each.
    """
    steps = settings.eval_steps if model.config.n_core else [0]

    def by_r(sums, labels):
        return dict(zip(steps, (sums / labels).tolist()))

    overall = 0
    sources = {}
    for dataset, rows in val_sets:
        totals = score_rows(settings, model, dataset, rows, steps)
        losses, _, labels = totals
        count = labels[0].long().item()
        name = dataset.folders[0]
        if not count:
            raise UserError(f"{name}: none of the {rows} validation rows has a label, so there is "
                            "no loss to measure. Raise --eval_rows, or create the data set again")
        sources[name] = {"val": by_r(losses, labels), "rows": rows, "labels": count}
        say(f"validation on {rows:,} rows of {name}, {count:,} labels: loss "
            + ", ".join(f"{x:.4f} at r = {r}" for r, x in sources[name]["val"].items()))
        overall = overall + totals
    losses, right, labels = overall
    entry = {"val": by_r(losses, labels), "accuracy": by_r(right, labels)}
    if len(val_sets) > 1:
        entry["val_by_source"] = sources
    return entry


def start_wandb(settings):
    """Start logging to Weights & Biases. Raises UserError if that fails."""
    try:
        import wandb
        wandb.init(project="loopgraft", name=settings.out_dir, config=vars(settings))
    except ImportError:
        raise UserError("--wandb: needs `pip install wandb`")
    except Exception as e:  # no key, no network
        reason = " ".join(str(e).split())  # in one line
        raise UserError(f"--wandb: {reason:.300}. Run `wandb login`, or leave out --wandb")


def log(settings, progress, entry):
    """
    Append an entry to log.jsonl. Truncates the log to the newest checkpoint first, because a killed
    run redoes the updates after it. NaN becomes null.
    """
    if RANK > 0:
        return
    entry |= {key: progress[key] for key in ("update", "tokens", "flops", "paper_flops")}
    entry = nan_to_null(entry)
    with open(f"{settings.out_dir}/log.jsonl", "ab") as f:
        size = min(f.tell(), progress["log_bytes"])
        f.truncate(size)
        progress["log_bytes"] = size + f.write(json.dumps(entry).encode() + b"\n")
    if settings.wandb:
        import wandb
        wandb.log(entry, step=entry["update"])


# ----------------------------------------------------------------------------------- checkpoints

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


if __name__ == "__main__":
    cli(main)
