"""
Train a model, recurrent or ordinary, from pretraining to a task of your own. The same command
resumes a run that was stopped.

    python runs/tiny_corpus.py --out out/tiny/data                         some data
    python train.py --config=config/tiny.toml                              one process
    torchrun --nproc_per_node=4 train.py --config=config/tiny.toml         4 processes
    python train.py --config=config/tiny.toml --lr=0.01 --updates=200      any setting by hand
    python train.py --config=config/fig4.toml --dry_run                    what it takes, no weights
    python train.py --updates=0 --init_from=DIR --data=SHARDS --out_dir=NEW     its losses only
    python train.py --config=mine.toml --init_from=PARENT --flops_of=out/mine --out_dir=NEW
                                                                a baseline for as many FLOPs

Unusual: each update draws its number of recurrences, r = n + k, from a heavy-tailed
distribution whose mean follows a curriculum, and only the last k carry gradient. All randomness
(rows, recurrences, initial states) is a function of (seed, update). So a killed run resumes with
the same command: bit-identical on as many processes, otherwise equal up to rounding.

The file reads downwards: the settings, the run, then what it calls.

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
                    find_gpu, fraction, locked, natural, opening, positive, rate, read_json,
                    recurrences, say, seeds, whole, write_json)
from data import Dataset, check_tokenizer, read_tokenizer_files, write_tokenizer
from model import (COMPILING, IGNORE, Config, RecurrentLM, checkpoints, find_checkpoint,
                   load_config, presets, retrofitted)
from muon import BUFFERS, Optimizer, stacked_rows

MAX_SKIPS = 10  # updates in a row without a finite gradient; more end the run

# How the mean of r rises from 1 to R in the course of the warm-up: a function from the share of the
# warm-up that is done to the share of R, and its inverse, by which the paper's figures count FLOPs.
CURRICULA = {
    "linear": (lambda done: done, lambda share: share),
    "1-sqrt": (lambda done: 1 - math.sqrt(1 - done), lambda share: 1 - (1 - share) ** 2),
    "none": (lambda done: 1.0, lambda share: 0.0),
}


# ----------------------------------------------------------------------------------- the settings

def yes_or_no(text):
    """"true" -> True"""
    return bool(["false", "true"].index(text.lower()))


def folder_name(text):
    """"./out/m/" -> "out/m", so that a run may be continued by either name"""
    return os.path.normpath(text) if text else ""


def setting(default, meaning, kind):
    """A field of Settings. kind: makes its value from text, or is a tuple of the words allowed."""
    return field(default=default, metadata={"meaning": meaning, "kind": kind})


@dataclass
class Recipe:
    """
    The settings that decide the result. The defaults are the paper's (appendix D); files in config/
    say what differs.
    """
    init_from: str = setting("", "a checkpoint or run; empty: random weights of the shape below",
                             folder_name)
    reinit: bool = setting(False, "random weights in the shape of init_from", yes_or_no)
    embed_scale: float = setting(1.0, "multiplies the embeddings (Huginn: 72.7)",
                                 float)
    seed: int = setting(0, "decides random weights, order of the data, draws of r, initial states",
                        seeds)
    # shape, for random weights without init_from
    n_embd: int = setting(96, "width", positive)
    n_head: int = setting(2, "attention heads", positive)
    n_kv_head: int = setting(2, "heads of keys and values", positive)
    n_ffn: int = setting(240, "width inside the MLP", positive)
    n_prelude: int = setting(6, "layers before the loop; an ordinary model has no others", natural)
    n_core: int = setting(0, "layers in the loop", natural)
    n_coda: int = setting(0, "layers after the loop", natural)
    # budget
    updates: int = setting(25000, "optimizer updates; 0: validate only", natural)
    batch_size: int = setting(1024, "rows per update, over all processes", positive)
    draws: int = setting(1, "how often an update draws r, each time for an equal share of its rows",
                         positive)
    context: int = setting(1024, "T, tokens per row", positive)
    # recurrence
    mean_recurrence: int = setting(32, "R, the mean of r (the paper's sampler has mean R + 1)",
                                   positive)
    recurrence_sampler: str = setting("poisson-lognormal", "fixed: always the mean",
                                      ("poisson-lognormal", "fixed"))
    curriculum: str = setting("linear", "how the mean rises from 1 to R", tuple(CURRICULA))
    curriculum_warmup: float = setting(0.25, "fraction of the updates over which it rises",
                                       fraction)
    backprop_depth: int = setting(8, "k: gradients flow through the last k recurrences; 0: all",
                                  natural)
    backprop_warmup: float = setting(0.0, "k rises from 2 over this fraction of the updates",
                                     fraction)
    # optimizer
    train: str = setting("", "train only parameters whose names contain one of these parts, such "
                         "as core|adapter; empty: all", str)
    optimizer: str = setting("muon", "muon leaves embeddings, head and norms to AdamW; adamw* is "
                             "Huginn's variant of it",
                             tuple(BUFFERS))
    lr: float = setting(0.001, "learning rate of Muon, or of AdamW where that updates everything",
                        rate)
    adam_lr: float = setting(5e-5, "learning rate of AdamW beside Muon", rate)
    weight_decay: float = setting(1e-4, "of all weights", rate)
    clip: float = setting(1.0, "largest gradient norm; 0: any", rate)
    warmup: float = setting(0.005, "fraction of the updates over which the learning rates rise",
                            fraction)
    cooldown: float = setting(0.9, "last fraction of the updates, over which they fall (cosine)",
                              fraction)
    dtype: str = setting("bfloat16", "of weights and products; the optimizer keeps float32 copies",
                         ("bfloat16", "float32"))


@dataclass
class Settings(Recipe):
    """Settings that cannot change the result beyond rounding, so they may change on resume."""
    config: str = setting("", "a TOML file of settings; flags beside it win", str)
    out_dir: str = setting("", "the run's folder: step_* checkpoints and log.jsonl", str)
    flops_of: str = setting("", "a run: make as many updates as cost what it has spent, whatever "
                            "the TOML file says; not together with --updates", str)
    data: str = setting("", "a folder made by data.py, or a mixture: A:1,B:1,C:2", str)
    micro_batch: int = setting(8, "rows at a time on a device; the rest is gradient accumulation",
                               positive)
    eval_every: int = setting(1000, "updates between validations; also one before and one after",
                              positive)
    eval_rows: int = setting(1024, "validation rows", positive)
    eval_steps: list[int] = setting((1, 2, 4, 8, 16, 32), "validation at these recurrences",
                                   recurrences)
    save_every: int = setting(500, "updates between checkpoints; also one at the end", positive)
    keep: int = setting(2, "checkpoints to keep", positive)
    log_every: int = setting(1, "updates between lines of the log", positive)
    wandb: bool = setting(False, "log to Weights & Biases, too", yes_or_no)
    compile: bool = setting(True, "use torch.compile", yes_or_no)
    activation_budget: float = setting(1.0, "if compiled: share of the activations that is kept "
                                       "for the backward pass, 0.3 to 1; less takes more time",
                                       between(0.3, 1, float))
    recompute: bool = setting(False, "recompute recurrences in the backward pass: least memory",
                              yes_or_no)
    dry_run: bool = setting(False, "print what the run takes, without weights or data", yes_or_no)
    gpus: int = setting(WORLD, "number of GPUs that --dry_run assumes", positive)


GROUPS = {  # the groups of --help
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


def read_settings(argv):
    """
    Read the Settings from --config=FILE.toml (flat keys) and from --key=value, which wins. A
    yes-or-no --key without a value is true. Raises UserError for an invalid setting, also if an
    update does not divide into draws and micro-batches, or the width into heads.
    """
    parser = Parser(usage="train.py --config=FILE --key=value ...", description=opening(__doc__))
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    group_of = {name: groups[title] for title, names in GROUPS.items() for name in names.split()}
    for item in fields(Settings):
        kind = item.metadata["kind"]
        option = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        if kind is yes_or_no:
            option |= {"nargs": "?", "const": "true"}
        meaning = f"{item.metadata['meaning']} [{item.default}]"
        if "choices" not in option:
            option["metavar"] = {"str": "NAME", "int": "N", "float": "X"}.get(
                type(item.default).__name__, "VALUE")
        group_of[item.name].add_argument(f"--{item.name}", default=item.default, help=meaning,
                                         **option)
    config = parser.parse_known_args(argv)[0].config
    updates_given = any(word.split("=")[0] == "--updates" for word in argv)
    if config:
        argv = read_config(config) + argv
    s = Settings(**vars(parser.parse_args(argv)))
    if s.flops_of and updates_given:
        raise UserError(f"--updates={s.updates}: --flops_of={s.flops_of} decides the number of "
                        "updates, so give one of the two")
    if not (s.data and s.out_dir):
        parser.error("give --data and --out_dir, or --config=FILE")
    if s.init_from and os.path.realpath(s.init_from) == os.path.realpath(s.out_dir):
        raise UserError(f"--out_dir={s.out_dir}: is --init_from, which stays as it is")
    world = s.gpus if s.dry_run else WORLD
    s.micro_batch = min(s.micro_batch, math.ceil(s.batch_size / world))
    if s.batch_size % (s.micro_batch * world * s.draws):
        raise UserError(f"--batch_size={s.batch_size}: is not a multiple of {world} processes "
                        f"times --micro_batch={s.micro_batch} times --draws={s.draws}")
    if s.n_embd % (2 * s.n_head) or s.n_head % s.n_kv_head:
        raise UserError(f"--n_embd={s.n_embd}, --n_head={s.n_head}, --n_kv_head={s.n_kv_head}: a "
                        "head's width must be even, and n_kv_head divides n_head")
    return s


def read_config(path):
    """Read a TOML file's settings as flags. Raises UserError for a key that does not exist."""
    try:
        values = tomllib.loads(Path(path).read_text())
    except ValueError as e:
        raise UserError(f"{path}: {e}")
    unknown = values.keys() - {item.name for item in fields(Settings)}
    if unknown:
        known = [item.name for item in fields(Settings)]
        raise UserError(f"{path}: there is no setting {min(unknown)!r}"
                        + did_you_mean(min(unknown), known))
    return [f"--{name}={value}" for name, value in values.items()]


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
            dist.barrier()  # torchrun ends all others when one exits: rank 0 may still be saving
            dist.destroy_process_group()
    except RuntimeError as e:
        if "gloo" in str(e) or isinstance(e, dist.DistError):
            raise UserError(f"rank {RANK} lost contact with another rank ({e!s:.120}). The "
                            "cause is in that rank's output")
        raise
    return code


def start_processes():
    """
    Join the other processes, if any. Returns this one's device, and a store whose keys all of them
    see.
    """
    device, gpu = "cpu", None
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
        raise UserError("--max-restarts on several nodes: also put "
                        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in front of torchrun")
    store = next(dist.rendezvous("env://"))[0]
    if one_node:
        # Restarts share torchrun's store, with the addresses of dead processes, so each attempt
        # needs keys of its own. Several nodes, which count differently, get a store for each.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(store=store, rank=RANK, world_size=WORLD, device_id=gpu,
                            timeout=timedelta(hours=1))  # for one that compiles or saves
    return device, store


def train(settings, device, store):
    """The run. Returns the exit code: 0, or 128 + SIGTERM if a signal stopped it."""
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
    agree(progress, model)
    start = progress["update"]
    if 0 < start == settings.updates:
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
        began = time.time()
        for update in range(start, settings.updates):
            mark = time.time()
            draws = draws_of(settings, update)
            totals = add_gradients(settings, model, optimizer, dataset, update, draws, store)
            norm = optimizer.reduce()
            losses, labels, stops, norm = torch.stack((*totals, norm)).tolist()  # the only wait
            if stops:  # some processes left this update early, so it is dropped
                if update > start:
                    save_checkpoint(settings, model, weights, optimizer, tokenizer_files, progress)
                say(f"stopped by a signal after update {update}. Run the same command to resume")
                return 128 + signal.SIGTERM
            loss = losses / labels if labels else math.nan
            lr_factor = lr_scale(settings, update)
            norm = optimizer.step(norm, max(labels, 1), lr_factor)
            count(settings, model, progress, draws, norm)
            speed = settings.batch_size * settings.context / (time.time() - mark)
            pace = (time.time() - began) / (update + 1 - start)
            last = update + 1 == settings.updates
            if last or not math.isfinite(norm) or (update + 1) % settings.log_every == 0:
                report(settings, progress, model, loss, norm, draws, lr_factor, speed, pace)
            if last or (update + 1) % settings.eval_every == 0:
                log(settings, progress, validate(settings, model, val_sets))
            if last or (update + 1) % settings.save_every == 0:
                save_checkpoint(settings, model, weights, optimizer, tokenizer_files, progress)
    say(f"done: {settings.out_dir}")
    return 0


def add_gradients(settings, model, optimizer, dataset, update, draws, store):
    """
    The forward and backward passes of an update. draws: [(n, k)], each for an equal share of its
    rows. Returns three float64 scalars, sums over all processes that stay on the device: of the
    losses, of the labels, and of the processes that were asked to stop, which leave early.
    """
    B = settings.micro_batch
    accumulate = settings.batch_size // (WORLD * B)
    totals = torch.zeros(3, dtype=torch.float64, device=model.embed.weight.device)
    losses, labels, stops = totals
    for micro_step in range(accumulate):
        if store.check(["stop"]):
            stops += 1
            break
        number = update * accumulate + micro_step
        batch = dataset.batch(settings.seed, number, RANK, WORLD, B)
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
    """The sum of the losses of a batch."""
    idx, targets, state = to_inputs(model, batch, settings.seed)
    _, loss = model(idx, targets, steps, state, "sum", settings.recompute)
    return loss


def to_inputs(model, batch, seed):
    """A loader's batch -> idx, targets and s_0 (None for ordinary models) on the model's device."""
    idx, targets, numbers = batch
    device = model.embed.weight.device
    state = None
    if model.config.n_core:
        state = model.initial_state(*idx.shape, seed, int(numbers[0]))
    if device.type == "cuda":  # a copy from pinned memory does not wait for the GPU
        idx = idx.pin_memory()
        targets = targets.pin_memory()
    return idx.to(device, non_blocking=True), targets.to(device, non_blocking=True), state


def count(settings, model, progress, draws, norm):
    """
    Count an update in `progress`. Raises UserError after MAX_SKIPS updates in a row without a
    finite gradient.
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
    progress["skips"] += 1  # in a row
    if progress["skips"] > MAX_SKIPS:
        raise UserError(f"the last {progress['skips']} updates had no finite gradient: "
                        f"lower --lr={settings.lr} or look at the data")


def report(settings, progress, model, loss, norm, draws, lr_factor, speed, pace):
    """
    Print and log an update. The log's n and k are the means of its draws. speed: tokens per second;
    pace: seconds per update, so far.
    """
    n, k = (mean(depths) for depths in zip(*draws))
    done = progress["update"]
    left = pace * (settings.updates - done) / 60
    depth = f"n {n:g} k {k:g}  " if model.config.n_core else ""
    loss_text = "no labels" if math.isnan(loss) else f"loss {loss:.4f}"
    say(f"update {done:5d}/{settings.updates}  {loss_text}  {depth}norm {norm:.2f}  "
        f"{speed:,.0f} tokens/s  {left:.1f} min left at this pace")
    log(settings, progress, {"loss": loss, "norm": norm, "n": n, "k": k,
                             "lr": settings.lr * lr_factor, "tokens_per_s": round(speed)})


# --------------------------------------------------------------------------------- the beginning

def find_progress(settings, dataset):
    """
    Our newest checkpoint, if any -> progress (a dict that train.json keeps) and its folder or None.
    Raises UserError if out_dir was created with another recipe.
    """
    recipe = {item.name: getattr(settings, item.name) for item in fields(Recipe)}
    recipe["digest of the data"] = dataset.fingerprint()
    saved = checkpoints(settings.out_dir)
    begun = Path(settings.out_dir, "recipe.json")
    if saved:
        folder = saved[-1]
        progress = read_json(folder / "train.json")
        check_settings(settings.out_dir, progress["recipe"], recipe,
                       "To go on from it with other settings, give --init_from=OLD --out_dir=NEW")
        return progress, folder
    if begun.exists():  # its log would be overwritten
        check_settings(settings.out_dir, read_json(begun), recipe, "Choose another --out_dir, or "
                       "delete this one, which has a log but no checkpoint")
    return dict(update=0, skipped=0, skips=0, tokens=0, flops=0, paper_flops=0, log_bytes=0,
                recipe=recipe), None


def begin_progress(settings, model, progress):
    """
    Carry over to a new run what is known of init_from: the tokens and FLOPs of its training, and,
    for the model card of an export, its surgery and the stages of its training.
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
    """The train.json of a checkpoint; {} if training did not make it."""
    path = Path(folder, "train.json")
    return read_json(path) if path.exists() else {}


def carried_over(earlier, config):
    """{"flops": ..., "tokens": ..., ...} that a run takes over from `earlier`, see read_run()."""
    if earlier and (config.n_core or earlier["config"]["init_from"]):  # they count from surgery on
        return {key: earlier[key] for key in ("tokens", "flops", "paper_flops")}
    return {}


def run_config(settings, folder=None):
    """
    The Config of a run: that of our checkpoint `folder`, else of init_from, else of the settings
    and the data's vocabulary. The settings decide on the recurrence, and may extend the context.
    """
    folder = folder or settings.init_from
    if folder:
        config = parent_config(settings, folder)
        if settings.context > config.context:
            say(f"warning: --context={settings.context} is beyond the {config.context} tokens that "
                f"{folder} was made for; it has to learn the positions after that")
    else:
        meta = Dataset(settings.data, "val", settings.context).parts[0][0].meta
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
    random = settings.reinit or not folder
    return replace(
        config,
        embed_scale=settings.embed_scale if random else config.embed_scale,
        mean_recurrence=settings.mean_recurrence,
        backprop_depth=settings.backprop_depth or settings.mean_recurrence,
        context=max(config.context, settings.context),
    )


def parent_config(settings, folder):
    """
    The Config of a checkpoint or run. In a dry run the folder need not exist yet: its name may
    begin with that of a preset, or be that of a known parent, or a file beside --config makes it.
    """
    if not settings.dry_run or Path(folder).exists():
        return load_config(find_checkpoint(folder))
    name = Path(folder).name
    for preset, (parent, sizes) in presets().items():
        if f"{name}-".startswith(f"{preset}-"):
            size = 2 * RecurrentLM.empty(parent).num_params()["total"] / 1e9
            say(f"--init_from={folder}: is not there yet; assuming --preset {preset}, whose parent "
                f"is a download of {size:.1f} GB if it is stored in bfloat16")
            return retrofitted(parent, sizes)
        parent_name = preset.rsplit("-", 3)[0]
        if name in (parent_name, f"{parent_name}-untied"):
            say(f"--init_from={folder}: is not there yet; assuming all layers of {parent_name}")
            return replace(parent, tie_embeddings=name == parent_name and parent.tie_embeddings)
    if settings.config:
        for path in sorted(Path(settings.config).parent.glob("*.toml")):
            values = tomllib.loads(path.read_text())
            if values.get("out_dir") == folder and values.get("init_from"):
                return parent_config(settings, values["init_from"])
    return load_config(find_checkpoint(folder))  # raises UserError, which says what is missing


def make_model(settings, dataset, folder, device):
    """
    The model of our checkpoint `folder`, else of init_from, else of random weights, on the device;
    and {name: exact weights} on the CPU. Those of a checkpoint are mapped, and read when used.
    """
    config = run_config(settings, folder)
    if not settings.reinit:
        folder = folder or settings.init_from
    if folder:
        model, weights = RecurrentLM.map(find_checkpoint(folder), config)
    else:
        model = RecurrentLM(config)
        model.init_weights(settings.seed)
        weights = {name: p.data for name, p in model.named_parameters()}
    model.to(device, getattr(torch, settings.dtype))
    say(f"data: {settings.data}, {dataset.num_rows:,} rows; {settings.dtype} on {device}; "
        f"from {folder or 'random weights'}")
    check_tokenizer(config, model.folder or dataset.folders[0], *dataset.folders)
    if len(dataset.folders) > 1:
        shares = dataset.label_shares()
        say("labels, and so the loss, come from "
            + ", ".join(f"{share:.0%} {folder}" for folder, share in shares.items())
            + ". The weights in --data count rows")
    choose_trained(settings, model)
    return model, weights


def choose_trained(settings, model):
    """
    Turn off the gradients of all parameters that --train does not name. Raises UserError if a part
    of --train names no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    parts = settings.train.split("|")  # [""] if empty, which all names contain
    for part in parts:
        if settings.train and not (part and any(part in name for name in names)):
            raise UserError(f"--train={settings.train}: {part!r} matches none of the parameters, "
                            f"such as {names[-2]}")
    for name, p in model.named_parameters():
        p.requires_grad = any(part in name for part in parts)


def make_optimizer(settings, model, rank, world, weights=None):
    """The Optimizer of the parameters that are trained."""
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
    """Load the moments of our checkpoint `folder`, which has made `updates` updates."""
    path = folder / "optimizer.safetensors"
    try:
        optimizer.load(load_file(path), updates)  # mapped: a rank reads what it owns
    except (SafetensorError, KeyError) as e:
        raise UserError(f"{path}: corrupt ({e!r:.80}). If you delete this checkpoint, the run "
                        "resumes from an older one")


def agree(progress, model):
    """Raises UserError if ranks have different settings, data, weights or numbers of updates."""
    if WORLD == 1:
        return
    bits = sum(p.detach().view(torch.int16).sum() for p in model.parameters()).item()
    mine = {**progress["recipe"], "update": progress["update"], "weights": f"{bits:x}"}
    starts = [None] * WORLD
    dist.all_gather_object(starts, mine)
    for key, value in starts[0].items():
        if mine[key] != value:
            raise UserError(f"process {RANK} has {key} = {mine[key]}, process 0 has {value}: they "
                            "must have the same settings and see the same files")


def fast_attention(settings, device):
    """On a CPU, SDPA's fused backward pass takes twice the plain one's time for short rows."""
    if device == "cpu" and settings.context <= 128:
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()


def catch_signals(store):
    """Make SIGTERM, Ctrl-C and a lost terminal set a key in the store, which stops all ranks."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: store.set("stop", ""))


def warm_up(settings, model, dataset):
    """
    Compile, and make one forward and backward pass at the full backprop depth. So the graphs with
    and without gradient are compiled, and a memory limit is met, now and not when the curriculum
    has risen. Says how much a GPU needed. Gradients are discarded.
    """
    say("warm-up: one pass at the full depth")
    if settings.compile:
        functorch_config.activation_memory_budget = settings.activation_budget
        try:
            model.compile_parts()
            say(f"warm-up: {COMPILING}")
        except UserError as e:
            say(f"{e}: going on without torch.compile")
    began = time.time()
    batch = dataset.batch(0, 0, 0, 1, settings.micro_batch)
    k = deepest(settings)
    try:
        loss = run_batch(settings, model, batch, (1, k))
        say(f"warm-up: {time.time() - began:.0f} s for the forward pass; now the backward pass")
        loss.backward()
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory with --micro_batch={len(batch[0])} at k = {k}: make that "
                        "smaller, or --context, or try --activation_budget=0.5, then --recompute")
    say(f"warm-up: {time.time() - began:.0f} s in all")
    model.zero_grad()
    if model.embed.weight.is_cuda:
        peak = torch.cuda.max_memory_allocated()
        say(f"warm-up: {peak / 1e9:.2f} GB of memory at the peak")


# ------------------------------------------------------------ schedules: functions of the update

def mean_rise(settings):
    """The number of updates over which the mean of r rises."""
    return math.ceil(settings.curriculum_warmup * settings.updates)


def mean_recurrence(settings, update):
    """Mean of r: rises from 1 to settings.mean_recurrence over the curriculum."""
    R = settings.mean_recurrence
    warmup = mean_rise(settings)
    if update >= warmup:
        return R
    rise, _ = CURRICULA[settings.curriculum]
    return max(1, math.ceil(R * rise(update / warmup)))


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
    if settings.backprop_depth:
        return min(settings.backprop_depth, settings.mean_recurrence)
    drawn = [1]
    for update in range(settings.updates):
        drawn += [k for _, k in draws_of(settings, update)]
    return max(drawn)


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

def paper_steps(settings, update):
    """
    (n, k) of an update as the paper's figures count it: by the scheduled r, not by the draws, whose
    mean is r + 1. The edges of their curriculum are up to an update off ours: r covers
    [int(f^-1((r-1)/R) W), int(f^-1(r/R) W)), W = int(warmup * total).
    """
    R = settings.mean_recurrence
    W = int(settings.curriculum_warmup * settings.updates)
    _, inverse = CURRICULA[settings.curriculum]
    edges = [int(inverse(r / R) * W) for r in range(1, R)]
    r = 1 + bisect.bisect_right(edges, update)
    k = min(r, backprop_depth(settings, update))
    return r - k, k


def paper_flops(settings, model, updates):
    """Training FLOPs of the first `updates` as the paper's figures count them."""
    flops_per_token = functools.cache(model.flops_per_token)
    flops = sum(flops_per_token(paper_steps(settings, update)) for update in range(updates))
    return flops * settings.batch_size * settings.context


class Budgeted(NamedTuple):
    """What --activation_budget does to a compiled part."""
    kept: float       # share of the bytes that dry_run() counts at 1
    products: float   # how often the backward pass repeats the forward pass's products,
    attention: float  # and its attention


# The most that `runs/activations.py count` finds for shapes of 6 and 8 layers (runs/README.md).
BUDGETS = {
    0.3: Budgeted(0.34, 0.36, 1),
    0.5: Budgeted(0.55, 0.07, 1),
    0.7: Budgeted(0.63, 0, 1),
    1.0: Budgeted(1, 0, 0),
}


def budgeted(settings):
    """The effect of the least --activation_budget we know that is not below the run's."""
    if not settings.compile:
        return BUDGETS[1.0]
    return BUDGETS[min(budget for budget in BUDGETS if budget >= settings.activation_budget)]


def executed_flops(settings, model, steps):
    """
    FLOPs per token that a micro-batch of (n, k) executes in products and attention. The paper's
    rule leaves out attention, the head, the adapter and what is computed twice.
    """
    n, k = steps
    c = model.config
    again = budgeted(settings)
    size = model.num_params()
    trained = model.num_params(trained=True)
    # A layer's two products of all pairs of tokens, of which a causal kernel computes half.
    attention = 2 * settings.context * c.n_head * c.head_dim

    def forward(layers, *parts):
        return 2 * sum(size[part] for part in parts) + layers * attention

    def backward(layers, *parts):  # towards inputs and weights; attention computes its scores again
        weights = 2 * sum(trained[part] for part in parts)
        repeated = again.products * forward(0, *parts) + again.attention * layers * attention
        return forward(0, *parts) + weights + 2.5 * layers * attention + repeated

    head = 2 * model.head.weight.numel()
    loop = forward(c.n_core, "core", "adapter")
    flops = forward(c.n_prelude, "prelude") + (n + k) * loop + forward(c.n_coda, "coda")
    flops += 2 * head  # the backward pass computes the logits again
    # A part needs a backward pass if it, or what lies before it, is trained.
    before = model.embed.weight.requires_grad or trained["prelude"]
    if before:
        flops += backward(c.n_prelude, "prelude")
    before = before or trained["core"] or trained["adapter"]
    if before:
        flops += k * backward(c.n_core, "core", "adapter")
        flops += k * loop if settings.recompute else 0
    before = before or trained["coda"] or trained["norm_f"]
    if before:
        flops += backward(c.n_coda, "coda") + head
    return flops + head * model.head.weight.requires_grad


def run_flops(settings, model):
    """FLOPs that the whole run executes, with its own draws of r, without validation."""
    flops_per_token = functools.cache(lambda steps: executed_flops(settings, model, steps))
    flops = 0
    for update in range(settings.updates):
        draws = draws_of(settings, update)
        flops += sum(map(flops_per_token, draws)) / len(draws)
    return flops * settings.batch_size * settings.context


def affordable_updates(settings):
    """
    The number of updates, to the nearest, after which a run has spent as many FLOPs as the run
    --flops_of. Both count what the runs before them spent since surgery. Raises UserError if that
    run has no FLOPs, or too few for one update.
    """
    run = read_run(find_checkpoint(settings.flops_of))
    if not run.get("flops"):
        raise UserError(f"--flops_of={settings.flops_of}: has no train.json that counts FLOPs. "
                        "Name a run of train.py")
    if os.path.realpath(settings.flops_of) == os.path.realpath(settings.out_dir):
        raise UserError(f"--flops_of={settings.flops_of}: is --out_dir. Name another run")
    config = run_config(settings)
    model = RecurrentLM.empty(config)
    choose_trained(settings, model)
    budget = run["flops"]
    if settings.init_from and not settings.reinit:
        earlier = read_run(find_checkpoint(settings.init_from))
        budget -= carried_over(earlier, config).get("flops", 0)
    tokens = settings.batch_size * settings.context
    flops_per_token = functools.cache(model.flops_per_token)

    def cost(updates):
        if not config.n_core:  # all updates of an ordinary model cost the same
            return updates * tokens * flops_per_token()
        trial = replace(settings, updates=updates)  # the curriculum depends on their number
        flops = 0
        for update in range(updates):
            flops += sum(map(flops_per_token, draws_of(trial, update))) / settings.draws
        return flops * tokens

    if budget < cost(1):
        raise UserError(f"--flops_of={settings.flops_of}: leaves {budget:.4g} FLOPs, and one "
                        f"update takes {cost(1):.4g}")
    most = 1
    while cost(most) <= budget:
        most *= 2
    below = bisect.bisect(range(most), budget, key=cost) - 1  # the most updates within the budget
    updates = min(below, below + 1, key=lambda count: abs(cost(count) - budget))
    say(f"--flops_of={settings.flops_of}: {run['update']:,} updates, {run['flops']:.4g} FLOPs, so "
        f"{updates:,} updates here")
    return updates


# Executed FLOP/s of a card, and its memory in GB. The speeds are estimates, not measured here: 61,
# 61 and 43% of the peak in bfloat16.
CARDS = {"RTX 4090": (1.0e14, 24), "A100": (1.9e14, 80), "H100": (4.2e14, 80)}


def plan(settings, model):
    """Print the run's shape, budget and schedules. Returns its FLOPs."""
    c = model.config
    updates = settings.updates
    rows = updates * settings.batch_size
    parts = ", ".join(f"{part} {n:,}" for part, n in model.num_params().items() if n)
    say(f"model: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, width {c.n_embd}; {parts}; of these "
        f"{model.num_params(trained=True)['total']:,} trained")
    flops = paper_flops(settings, model, updates)
    say(f"budget: {updates:,} updates of {settings.batch_size:,} rows, "
        f"{rows * settings.context:.4g} tokens, {flops:.4g} training FLOPs by the paper's rule")
    if c.n_core:
        rise = f"1 to {settings.mean_recurrence} over {mean_rise(settings):,} updates"
        if settings.curriculum == "none":
            rise = f"{settings.mean_recurrence} throughout"
        say(f"mean r: {rise}; gradients through the last {deepest(settings)}")
    say(f"learning rate: {settings.lr:g} ({settings.optimizer}), up over "
        f"{settings.warmup * updates:,.0f} updates, cosine down over the last "
        f"{settings.cooldown * updates:,.0f}")
    return flops


def dry_run(settings):
    """Print what a run takes. It needs neither weights nor data, nor the init_from of a preset."""
    c = run_config(settings)
    model = RecurrentLM.empty(c).to(getattr(torch, settings.dtype))
    choose_trained(settings, model)
    flops = plan(settings, model)
    executed = run_flops(settings, model)
    say(f"executed: {executed / max(flops, 1):.2f} times as many FLOPs: draws of r, attention, "
        "head, adapter, what is computed twice")
    plan_data(settings)
    alone = make_optimizer(settings, model, 0, 1)
    gathered = sum(t.nbytes for t in [*alone.masters.values(), *alone.moments.values()])
    say(f"saving: rank 0 gathers {gathered / 1e9:.1f} GB of masters and moments in its host's "
        "memory")
    held = max(memory_held(settings, model, rank) for rank in range(settings.gpus)) / 1e9
    kept = activation_bytes(settings, model) / 1e9
    memory = held + kept
    for name, (speed, size) in CARDS.items():
        seconds = executed / (settings.gpus * speed)
        fits = f"{size} GB each"
        if memory > size - 2:  # the CUDA context and fragments
            fits = f"DOES NOT FIT into {size} GB"
        say(f"time: {duration(seconds)} on {settings.gpus} {name}, {fits} (an estimate)")
    say(f"memory: about {memory:.1f} GB on each of {settings.gpus} GPUs: {held:.1f} for "
        f"weights, gradients and optimizer, {kept:.1f} for --micro_batch={settings.micro_batch} "
        "if compiled")


def duration(seconds):
    """Seconds as text: 1000 is 16.7 minutes."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 3600:
        return f"about {seconds / 60:,.0f} minutes"
    return f"about {seconds / 3600:,.1f} hours"


def plan_data(settings):
    """Print how much data a run reads, and warn if it is not there or is read too often."""
    rows = settings.updates * settings.batch_size
    size = 2 * rows * settings.context / 1e9  # most vocabularies fit into 2 bytes
    say(f"data: {rows:,} rows of {settings.context} tokens, {size:.2g} GB of ids (twice as much if "
        "there are more than 65,536)")
    try:
        available = Dataset(settings.data, "train", settings.context).num_rows
        validation_sets(settings)
    except UserError as e:
        return say(f"data: not ready: {e}")
    epochs = rows / available
    say(f"data: {epochs:.3g} epochs of {settings.data}")
    if epochs >= 10:
        say("warning: from about ten epochs on a model learns rows by heart: take fewer --updates, "
            "or more data")


def activation_bytes(settings, model):
    """Bytes that a compiled forward pass keeps for the backward pass, of a micro-batch."""
    c = model.config
    # Bytes a layer and token, counted on small models in bfloat16.
    layer = 14 * c.n_embd + 6 * (c.n_ffn + (c.n_head + c.n_kv_head) * c.head_dim)
    if settings.dtype == "float32":
        layer *= 2
    prelude = c.n_prelude * any(p.requires_grad for p in model.prelude.parameters())
    layers = prelude + c.n_core * (1 if settings.recompute else deepest(settings)) + c.n_coda
    return settings.micro_batch * settings.context * layer * budgeted(settings).kept * layers


def memory_held(settings, model, rank):
    """Bytes that a rank of --gpus keeps: weights, gradients, their sums, masters and moments."""
    optimizer = make_optimizer(settings, model, rank, settings.gpus)
    kept = [*model.parameters(), *optimizer.moments.values()]
    if settings.dtype != "float32":
        kept += optimizer.masters.values()
    # Gradients take half as much as their sums.
    return sum(t.nbytes for t in kept) + 1.5 * optimizer.sums.nbytes


# ------------------------------------------------------------------------- validation and the log

def validation_sets(settings):
    """
    [(Dataset, number of rows), ...]: each folder of --data has its share of --eval_rows, as far as
    its validation rows go.
    """
    mixture = Dataset(settings.data, "val", settings.context)
    total = sum(weight for _, weight in mixture.parts)
    sets = []
    for folder, (_, weight) in zip(mixture.folders, mixture.parts):
        alone = Dataset(folder, "val", settings.context)
        share = math.ceil(settings.eval_rows * weight / total)
        sets.append((alone, min(share, alone.num_rows)))
    return sets


@torch.no_grad()
def score_rows(settings, model, dataset, rows, steps):
    """
    Over the first rows of a Dataset, for each r of steps: the sums of the losses and of the labels
    that are the likeliest token, and the number of labels. A tensor (3, len(steps)) float64, summed
    over all processes.
    """
    B = settings.micro_batch
    rope = model.rope(settings.context)
    totals = torch.zeros(3, len(steps), dtype=torch.float64, device=rope[0].device)
    losses, right, labels = totals
    for i in range(math.ceil(rows / (B * WORLD))):
        batch = dataset.batch(0, i, RANK, WORLD, B)
        batch[1][batch[2] >= rows] = IGNORE  # the last batch has too many rows
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
    The log's entry of a validation: "val" {r: mean loss} and "accuracy" {r: share of labels that
    are the likeliest token}, for each r of eval_steps. With several data sets, "val_by_source" has
    the losses, rows and labels of each.
    """
    steps = settings.eval_steps if model.config.n_core else [0]

    def by_r(sums, labels):
        return dict(zip(steps, (sums / labels).tolist()))

    total = 0
    sources = {}
    for dataset, rows in val_sets:
        totals = score_rows(settings, model, dataset, rows, steps)
        losses, _, labels = totals
        count = labels[0].long().item()
        name = dataset.folders[0]
        if not count:
            raise UserError(f"{name}: none of the {rows} validation rows has a label, so there is "
                            "no loss to measure: take more --eval_rows, or make the set again")
        sources[name] = {"val": by_r(losses, labels), "rows": rows, "labels": count}
        say(f"validation on {rows:,} rows of {name}, {count:,} labels: loss "
            + ", ".join(f"{x:.4f} at r = {r}" for r, x in sources[name]["val"].items()))
        total = total + totals
    losses, right, labels = total
    entry = {"val": by_r(losses, labels), "accuracy": by_r(right, labels)}
    if len(val_sets) > 1:
        entry["val_by_source"] = sources
    return entry


def start_wandb(settings):
    try:
        import wandb
        wandb.init(project="loopgraft", name=settings.out_dir, config=vars(settings))
    except ImportError:
        raise UserError("--wandb: needs `pip install wandb`")
    except Exception as e:  # no key, no network
        raise UserError(f"--wandb: {' '.join(str(e).split()):.300}")


def log(settings, progress, entry):
    """
    Append an entry to log.jsonl. Truncates the log to the newest checkpoint first, because a killed
    run redoes the updates after it. NaN becomes null.
    """
    if RANK > 0:
        return
    entry |= {key: progress[key] for key in ("update", "tokens", "flops", "paper_flops")}
    entry = json.loads(json.dumps(entry), parse_constant=lambda name: None)
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
    out_dir/step_*: masters in float32, frozen parameters as `weights` has them, moments, and where
    the run is. Rank 0 writes what all ranks send it. Old checkpoints go when the new one is whole.
    """
    kept = optimizer.gather()
    if RANK > 0:
        return
    moments = {key: t for key, t in kept.items() if key not in optimizer.params}
    with whole(f"{settings.out_dir}/step_{progress['update']:06d}") as folder:
        model.save(folder, weights | kept)
        write_tokenizer(tokenizer_files, folder)
        save_file(moments, folder / "optimizer.safetensors")
        write_json(folder / "train.json", progress | {"config": vars(settings)})
    for path in checkpoints(settings.out_dir)[:-settings.keep]:
        shutil.rmtree(path, ignore_errors=True)  # NFS keeps files that are still open somewhere


if __name__ == "__main__":
    cli(main)
