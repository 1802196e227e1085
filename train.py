"""
Train a model, recurrent or ordinary: pretraining, healing, or a task of your own. To resume a run
that was stopped, repeat its command.

    python -m runs.tiny_corpus --out out/tiny/data                         make some data
    python train.py --config=config/tiny.toml                              run one process
    torchrun --nproc_per_node=4 train.py --config=config/tiny.toml         run four processes
    python train.py --config=config/tiny.toml --lr=0.01 --updates=200      override settings
    python train.py --updates=0 --init_from=DIR --data=SHARDS --out_dir=NEW     validate only

`python -m tools.plan` estimates what a run will cost.

What is unusual here: each update draws its number of recurrences, r = n + k, from a heavy-tailed
distribution whose mean follows a curriculum, and only the last k carry gradient. `update` counts
the optimizer's steps, also in the names of checkpoints, step_*; elsewhere, `steps` are recurrences,
r or (n, k).

All randomness (rows, recurrences, initial states) is a function of (seed, update). So on a CPU,
with the same numbers of processes and threads, the result of a run that was killed and resumed is
bit-identical to that of an uninterrupted one; otherwise it is equal up to rounding.

Paper: arXiv 2511.07384, sections 3 and 4, appendices B and D.
"""
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import mean

from common import (DTYPE_HELP, DTYPES, LOCAL_RANK, RANK, WORLD, Parser, UserError, between,
                    changed_keys, check_settings, choose_dtype, cli, code_of, fraction, join_ranks,
                    lock, natural, non_negative, paths, positive, random_seed, read_json,
                    read_toml, reading, recurrences, refuse_idle, say, write_atomically, write_json,
                    yes_or_no)

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from data import Dataset, check_same_tokenizer, load_tokenizer, read_tokenizer_files, row_length
from model import (IGNORE, Config, RecurrentLM, checkpoints, find_checkpoint, load_config,
                   to_device)
from muon import MOMENTS, Optimizer

CODE = code_of("common.py", "model.py", "muon.py", "data.py", "train.py")  # of this process
MAX_SKIPS = 10  # tolerate this many updates in a row without a finite gradient

# How the sampler's mean rises from 1 to R over the curriculum's warm-up. Each function maps the
# completed fraction of the warm-up to a fraction of R.
CURRICULA = {
    "linear": lambda done: done,
    "1-sqrt": lambda done: 1 - math.sqrt(1 - done),
    "none": lambda done: 1.0,
}


# ------------------------------------------------------------------------------------- the settings

def setting(default, meaning, **option):
    """Return a field for Settings. Its annotation is the flag's type, `meaning` the help text."""
    shown = "" if default is None else f" [{default}]"
    name = None if "choices" in option else "X"
    return field(default=default, metadata={"help": meaning + shown, "metavar": name, **option})


@dataclass
class Recipe:
    """
    The settings that determine the result. The defaults are those of the paper's Figure 4, except
    for draws: see config/fig4.toml. Learning rates, weight decay, clipping and batch size are from
    Appendix D, the backprop depth is from Appendix B, the rest from the text or the result files.
    """
    init_from: paths = setting("", "a checkpoint or run to start from; empty: random weights")
    reinit: yes_or_no = setting(False, "random weights in the shape of --init_from")
    embed_scale: float = setting(1.0, "factor on embeddings with random weights (Huginn: 72.7)")
    seed: random_seed = setting(0, "seed of weights, data order, draws of r and initial states")
    # shape, for random weights without init_from
    n_embd: positive = setting(None, "width; n_* are the shape of a run without --init_from")
    n_head: positive = setting(None, "attention heads")
    n_kv_head: natural = setting(0, "key/value heads; 0: as many as --n_head")
    n_ffn: positive = setting(None, "width inside the MLP")
    n_prelude: natural = setting(None, "layers before the loop; an ordinary model has no others")
    n_core: natural = setting(0, "layers in the loop")
    n_coda: natural = setting(0, "layers after the loop")
    # budget
    updates: natural = setting(25000, "optimizer updates; 0: validate only")
    batch_size: positive = setting(1024, "rows per update, over all processes")
    draws: positive = setting(1, "draws of r per update, each for an equal share of the rows")
    context: natural = setting(0, "T, tokens per row; 0: the data's row length, or else 1,024")
    # recurrence
    mean_recurrence: positive = setting(32, "R; poisson-lognormal draws r with a mean of R + 1")
    recurrence_sampler: str = setting("poisson-lognormal", "how r is drawn; fixed: always the mean",
                                      choices=["poisson-lognormal", "fixed"])
    curriculum: str = setting("linear", "how the mean rises from 1 to R", choices=CURRICULA)
    curriculum_warmup: fraction = setting(0.25, "fraction of the updates over which it rises")
    backprop_depth: positive = setting(8, "k: gradients flow through the last k recurrences")
    backprop_warmup: fraction = setting(0.0, "fraction of the updates over which k rises from 2")
    # optimizer
    train: str = setting("", "a|b: train only parameters whose names contain a or b; empty: all")
    optimizer: str = setting("muon", "muon: Muon for the layers' matrices, AdamW for the rest; "
                             "adamw*: Huginn's AdamW", choices=MOMENTS)
    lr: non_negative = setting(0.001, "learning rate of Muon, or of all parameters with adamw(*)")
    adam_lr: non_negative = setting(5e-5, "learning rate of AdamW with --optimizer=muon")
    weight_decay: non_negative = setting(1e-4, "weight decay, applied to all parameters")
    clip: non_negative = setting(1.0, "clip gradients to this norm; 0: do not clip")
    warmup: fraction = setting(0.005, "fraction of the updates over which the learning rates rise")
    cooldown: fraction = setting(0.9, "last fraction of the updates, over which they fall (cosine)")
    dtype: str = setting("auto", DTYPE_HELP, choices=DTYPES)


@dataclass
class Settings(Recipe):
    """
    All settings. Those below change the weights by rounding at most, so they may change on resume.
    (The data may move; its digest is part of the recipe.)
    """
    config: paths = setting(None, "a TOML file; flags and later files win", action="append")
    out_dir: paths = setting("", "folder of the run, for checkpoints (step_*) and log.jsonl")
    data: paths = setting("", "a folder made by data.py, or a mixture: A:1,B:1,C:2")
    micro_batch: positive = setting(8, "rows per forward and backward pass on a device")
    compile: yes_or_no = setting(True, "use torch.compile")
    activation_budget: between(0.3, 1, float) = setting(
        1.0, "fraction of activations that a compiled model keeps; less saves memory, costs time")
    eval_every: positive = setting(1000, "updates between validations, besides the first and last")
    eval_rows: positive = setting(1024, "validation rows of each data set, at most")
    eval_recurrences: recurrences = setting("1,2,4,8,16,32", "recurrences to validate at")
    save_every: positive = setting(500, "updates between checkpoints, besides the last")
    keep: positive = setting(2, "checkpoints to keep; all but the newest hold weights alone")
    log_every: positive = setting(1, "updates between lines of the log")
    wandb: yes_or_no = setting(False, "also log to Weights & Biases")


SHAPE = "n_embd", "n_head", "n_kv_head", "n_ffn", "n_prelude", "n_core", "n_coda"


def read_settings(argv, world=1):
    """
    Read the Settings from flags, one for each of their fields, and from --config=FILE.toml (flat
    keys), which flags override. With --init_from, the settings of the shape are None. micro_batch
    is capped at a rank's rows per update. world: the number of ranks.

    Raises UserError if a setting is invalid, missing or without effect, or if an update does not
    divide evenly into draws and micro-batches.
    """
    parser = Parser(__doc__, usage="train.py --config=FILE --key=value ...")
    for item in fields(Settings):
        option = {"default": item.default, **item.metadata}
        if item.type is yes_or_no:  # --key alone means true
            option |= {"nargs": "?", "const": True}
        parser.add_argument(f"--{item.name}", type=item.type, **option)
    flags = []
    for file in parser.parse_known_args(argv)[0].config or []:
        for name, value in read_toml(file).items():
            if name == "config":
                raise UserError(f"{file}: names another file. Use --config={value} --config={file}")
            if isinstance(value, list):
                value = ",".join(map(str, value))
            flags.append(f"--{name}={value}")
    s = Settings(**vars(parser.parse_args(flags + argv)))
    if not (s.data and s.out_dir):
        parser.error("give --data and --out_dir, or --config=FILE")
    if Path(s.out_dir, "config.json").exists():
        parser.error(f"--out_dir={s.out_dir}: this folder holds a model. Choose a new one")
    # Only typed flags count, because runs of different kinds may share a TOML file.
    typed = [flag[2:].partition("=")[0] for flag in argv if flag.startswith("--")]
    refuse_idle(typed, (
        (s.init_from, SHAPE, "no effect with --init_from, which has a shape"),
        (s.init_from and not s.reinit, ["embed_scale"], "no effect without random weights"),
        (not s.init_from, ["reinit"], "no effect without --init_from"),
        (s.optimizer != "muon", ["adam_lr"], "no effect without --optimizer=muon"),
        (s.curriculum == "none", ["curriculum_warmup"], "no effect with --curriculum=none"),
        (not s.compile, ["activation_budget"], "no effect with --compile=false")))
    if s.init_from:
        vars(s).update(dict.fromkeys(SHAPE))
    elif missing := [f"--{name}" for name in SHAPE if getattr(s, name) is None]:
        parser.error(f"give {', '.join(missing)}, or --init_from")
    s.n_kv_head = s.n_kv_head or s.n_head
    s.context = s.context or row_length(s.data)
    most = math.ceil(s.batch_size / (world * s.draws))  # rows of a rank for each draw
    s.micro_batch = min(s.micro_batch, most)
    if s.batch_size % (s.micro_batch * world * s.draws):
        raise UserError(f"--batch_size={s.batch_size}: must be a multiple of {world} processes "
                        f"times --micro_batch={s.micro_batch} times --draws={s.draws}")
    return s


# --------------------------------------------------------------- schedules: functions of the update

def updates_in(settings, share):
    """Convert a fraction of the run to a number of updates, rounded up."""
    return math.ceil(round(share * settings.updates, 6))  # 0.07 * 100 is 7.000000000000001


def scheduled_mean(settings, update):
    """Return the sampler's mean at an update, which rises from 1 to R."""
    R, warmup = settings.mean_recurrence, updates_in(settings, settings.curriculum_warmup)
    if update >= warmup:
        return R
    return max(1, math.ceil(R * CURRICULA[settings.curriculum](update / warmup)))


def scheduled_k(settings, update):
    """Return the largest k at an update, which rises from 2 over --backprop_warmup (Figure 16)."""
    k = min(settings.backprop_depth, settings.mean_recurrence)
    warmup = updates_in(settings, settings.backprop_warmup)
    if update < warmup:
        k = min(k, 1 + math.ceil((k - 1) * (update + 1) / warmup))
    return k


def draw_steps(settings, update, number):
    """
    Return (n, k) for one draw of an update. number: the draw's index in the whole run, from 1.

    Huginn's sampler draws a rate from a log-normal distribution with the scheduled mean, then r - 1
    from a Poisson distribution with that rate. The mean of r is therefore the scheduled mean + 1.
    Seed 0 gives the paper's own sequence.
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
    k = min(r, scheduled, scheduled_k(settings, update))  # `scheduled` as in the paper's code
    return r - k, k


def draws_of(settings, update):
    """Return all draws of an update: [(n, k), ...]."""
    first = update * settings.draws + 1
    return [draw_steps(settings, update, first + i) for i in range(settings.draws)]


def lr_scale(settings, update):
    """Return the factor on the learning rates, 0.001 to 1: linear warm-up, cosine cooldown."""
    warmup = updates_in(settings, settings.warmup)
    cooldown = updates_in(settings, settings.cooldown)
    rising = update / warmup if warmup else 1
    done = max(0, update - (settings.updates - cooldown)) / max(1, cooldown)
    falling = 0.5 * (1 + math.cos(math.pi * done))
    return 0.001 + 0.999 * min(rising, 1, falling)


# ------------------------------------------------------------------------------------- the training

@dataclass
class Progress:
    """What a run has done and where it comes from, as stored in a checkpoint's train.json."""
    recipe: dict         # its Recipe, with a digest of its data
    config: dict         # all of its Settings
    tokens: int          # read by this run and the runs that it starts from, without pretraining
    flops: int           # spent on these tokens
    code: dict = field(default_factory=dict)  # CODE when it began; {}: an older version
    first_row: int = 0   # where its data begins: earlier rows were read by the runs before it
    update: int = 0      # complete updates
    skipped: int = 0     # those without a finite gradient
    validated: int = -1  # the update after which it was last validated
    log_bytes: int = 0   # the length of log.jsonl
    wandb_id: str | None = None


class Run:
    """
    A run: its settings, data, model, optimizer and progress, at its newest checkpoint, or else from
    --init_from, or else with random weights. Resolves --dtype=auto. Raises UserError if the run was
    started with a different Recipe or data, or if the data was made with another tokenizer.
    """

    def __init__(self, settings, device):
        self.settings = settings
        self.device = device
        self.signals = []  # those received since catch_signals()

        # The data.
        self.train_set = Dataset(settings.data, "train", settings.context)
        data_folders = self.train_set.folders
        self.val_sets = [Dataset(folder, "val", settings.context) for folder in data_folders]

        # Begun or resumed, and with the same recipe?
        saved = checkpoints(settings.out_dir)
        resumed = saved[-1] if saved else None
        if resumed:
            progress = read_progress(resumed)
            if settings.dtype == "auto":  # what it became on the machine that began the run
                settings.dtype = progress.recipe["dtype"]
        settings.dtype = choose_dtype(settings.dtype, device)
        recipe = {item.name: getattr(settings, item.name) for item in fields(Recipe)}
        recipe["digest of the data"] = self.train_set.fingerprint()
        if resumed:
            check_settings(settings.out_dir, progress.recipe, recipe, "To resume, repeat its "
                           "settings. For others, on the rows that follow, use --init_from=OLD "
                           "--out_dir=NEW")
            if changed := changed_keys(progress.code, CODE):
                say(f"{settings.out_dir}: the code has changed since this run began ({changed}). "
                    "Resuming anyway. To start over, use another --out_dir")

        # The model and its tokenizer. exact: the weights before they are rounded to --dtype, on the
        # CPU, perhaps memory-mapped.
        source = resumed or settings.init_from
        folder = find_checkpoint(source) if source else None
        config = run_config(settings, load_config(folder) if folder else None, data_folders[0])
        if folder and (resumed or not settings.reinit):
            model = RecurrentLM.load_mapped(folder, config)
        else:
            model = RecurrentLM(config)
            model.init_weights(settings.seed)
        self.exact = {name: p.data for name, p in model.named_parameters()}
        tokenizer_folder = model.folder or data_folders[0]
        tokenizer = load_tokenizer(tokenizer_folder, config)
        for data_folder in data_folders:
            check_same_tokenizer(tokenizer, data_folder)
        # Read now, as its folder may be deleted before the first checkpoint is written.
        self.tokenizer_files = read_tokenizer_files(tokenizer_folder)
        self.model = model.to(device, getattr(torch, settings.dtype))
        choose_trained(settings, model)

        # The optimizer, and what the run has done so far.
        self.optimizer = make_optimizer(settings, model, RANK, WORLD, self.exact)
        if resumed:
            if not (resumed / "optimizer.safetensors").exists():
                raise UserError(f"{resumed}: holds weights alone. To go on from them, use "
                                f"--init_from={resumed} --out_dir=NEW")
            with reading(resumed / "optimizer.safetensors") as path:
                moments = load_file(path)  # memory-mapped
            self.optimizer.load(moments, progress.update - progress.skipped)
            progress.config = vars(settings)
        else:
            progress = Progress(recipe, vars(settings), code=CODE,
                                **spent_before(model.folder, recipe))
        self.progress = progress
        check_ranks(vars(settings) | {"data": self.train_set.fingerprint(),
                                      "update": progress.update})

    def train(self):
        """Train the model. Returns the exit code: 0, or 128 + SIGTERM if a signal stopped it."""
        settings, model, progress = self.settings, self.model, self.progress
        start = progress.update

        def due(every):
            """Whether this update is a multiple of `every`, or the last."""
            return progress.update == settings.updates or progress.update % every == 0

        epochs = settings.updates * settings.batch_size / self.train_set.num_rows
        say(f"data: {settings.data}, {epochs:.2g} epochs of {self.train_set.num_rows:,} rows; "
            f"{settings.dtype} on {self.device}; from {model.folder or 'random weights'}")
        if progress.first_row:
            say(f"rows begin after the {progress.first_row:,} of earlier runs on this data")
        describe_run(settings, model)
        if settings.wandb and RANK == 0 and progress.validated < settings.updates:
            self.begin_wandb()
        if start < settings.updates:
            if settings.compile:
                functorch_config.activation_memory_budget = settings.activation_budget
                model.compile_parts()
            self.try_update()
        self.signals = catch_signals()
        if RANK == 0 and settings.updates:  # drop the log of updates to be redone
            with open(f"{settings.out_dir}/log.jsonl", "ab") as f:
                f.truncate(min(f.tell(), progress.log_bytes))
        if due(settings.eval_every) and progress.validated != start:
            self.validate()
        skips = 0  # updates in a row without a finite gradient
        tokens = settings.batch_size * settings.context  # per update, over all ranks
        run_began = time.monotonic()
        for update in range(start, settings.updates):
            began = time.monotonic()
            draws = draws_of(settings, update) if model.config.n_core else [(0, 0)]
            losses, labels, sum_norm = self.sum_gradients(update, draws)
            if sum_norm is None:  # a signal has ended this update early, so discard it
                if update > start and not due(settings.save_every):  # if not saved yet
                    self.save()
                break
            lr_factor = lr_scale(settings, update)
            norm = self.optimizer.step(sum_norm, max(labels, 1), lr_factor)

            skips = 0 if math.isfinite(norm) else skips + 1
            if skips > MAX_SKIPS:
                raise UserError(f"the last {skips} updates had no finite gradient. Lower --lr (now "
                                f"{settings.lr}), or check the data")
            progress.update += 1
            progress.skipped += skips > 0
            progress.tokens += tokens
            progress.flops += update_flops(settings, model, self.optimizer, draws, labels / tokens)
            if due(settings.log_every) or skips:
                now = time.monotonic()
                pace = (now - run_began) / (progress.update - start)
                minutes_left = pace * (settings.updates - progress.update) / 60
                entry = {"loss": losses / labels if labels else math.nan, "norm": norm,
                         "n": mean(n for n, _ in draws), "k": mean(k for _, k in draws),
                         "lr": settings.lr * lr_factor,
                         "tokens_per_s": round(tokens / (now - began))}
                say(f"update {progress.update:5d}/{settings.updates}  loss {entry['loss']:.4f}  "
                    f"n {entry['n']:g} k {entry['k']:g}  norm {norm:.2f}  "
                    f"{entry['tokens_per_s']:,} tokens/s  {minutes_left:.1f} min left at this pace")
                self.log(entry)
            if due(settings.save_every):
                self.save()
            if due(settings.eval_every):
                self.validate()
        if progress.validated < settings.updates:
            say(f"stopped by a signal after update {progress.update}. Run the same command to "
                "resume")
            return 128 + signal.SIGTERM
        say(f"done: {settings.out_dir}")
        return 0

    def sum_gradients(self, update, draws):
        """
        Run the forward and backward passes of an update. Leaves its gradients, summed over all
        ranks, in the optimizer. Returns the sum of the losses, the number of labels, and the norm
        of the sum of the gradients, over all ranks; the norm is None if a rank has received a
        signal.
        """
        settings, model, B = self.settings, self.model, self.settings.micro_batch
        count = settings.batch_size // (B * WORLD)  # micro-batches on each rank
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        losses, labels, stops = sums  # views of it
        for i in range(count):
            if self.signals:
                stops += 1
                break
            batch = self.train_set.batch(settings.seed, update * count + i, RANK, WORLD, B,
                                         self.progress.first_row)
            idx, targets, state = to_inputs(model, batch, settings.seed)
            _, token_losses = model(idx, targets, draws[i * len(draws) // count], state)
            loss = token_losses.sum()
            loss.backward()
            self.optimizer.accumulate()
            losses += loss.detach()
            labels += (targets != IGNORE).sum().item()  # targets are on the CPU
        if WORLD > 1:
            dist.all_reduce(sums)
        # The update's only wait for the device.
        losses, labels, stops, norm = torch.stack((*sums, self.optimizer.reduce())).tolist()
        return losses, labels, None if stops else norm

    def begin_wandb(self):
        """Begin a run of Weights & Biases, or go on in the one that a resumed run began."""
        import wandb
        try:
            wandb.init(project="loopgraft", name=self.settings.out_dir, config=vars(self.settings),
                       id=self.progress.wandb_id, resume="allow")
        except wandb.Error as e:
            raise UserError(f"--wandb: {e!r}. WANDB_MODE=offline needs no login")
        self.progress.wandb_id = wandb.run.id

    def try_update(self):
        """
        Run one forward and backward pass at the run's largest k, and discard the gradients, so that
        compiling, or running out of memory, happens now and not hours later when the curriculum has
        risen. Prints a GPU's peak memory.
        """
        began = time.monotonic()
        settings, model = self.settings, self.model
        batch = self.train_set.batch(settings.seed, 0, 0, 1, settings.micro_batch)
        idx, targets, state = to_inputs(model, batch, settings.seed)
        steps = 1, scheduled_k(settings, settings.updates)
        _, losses = model(idx, targets, steps, state)
        losses.sum().backward()
        model.zero_grad()
        say(f"warm-up: {time.monotonic() - began:.0f} s")
        if idx.is_cuda:
            say(f"peak memory: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")

    @torch.no_grad()
    def validate(self):
        """
        Validate on the same --eval_rows random rows of each data set every time, or on all if it
        has fewer. Unless a signal ends it, prints and logs the mean loss per label at each r, and
        sets progress.validated.
        """
        settings, model, progress = self.settings, self.model, self.progress
        steps = settings.eval_recurrences if model.config.n_core else [0]
        B = settings.micro_batch
        totals = torch.zeros(3, len(steps), dtype=torch.float64, device=self.device)
        losses, labels, stops = totals  # views of it
        for val_set in self.val_sets:
            rows = min(settings.eval_rows, val_set.num_rows)
            for i in range(math.ceil(rows / (B * WORLD))):
                if self.signals:
                    stops += 1
                    break
                idx, targets, numbers = val_set.batch(0, i, RANK, WORLD, B)
                targets[numbers >= rows] = IGNORE  # the last batch may run past the last row
                idx, targets, state = to_inputs(model, (idx, targets, numbers), 0)
                labels += (targets != IGNORE).sum()
                for j, (_, x) in enumerate(model.trajectory(idx, steps, state)):
                    losses[j] += model.losses(x, targets).double().sum()
        if WORLD > 1:
            dist.all_reduce(totals)
        if stops[0]:
            return
        val = dict(zip(steps, (losses / labels).tolist()))
        say(f"validation on {labels[0].long().item():,} labels: loss "
            + ", ".join(f"{loss:.4f} at r = {r}" for r, loss in val.items()))
        self.log({"val": val})
        progress.validated = progress.update
        saved = f"{settings.out_dir}/step_{progress.update:06d}"
        if RANK == 0 and os.path.exists(saved):
            write_json(f"{saved}/train.json", vars(progress))

    def log(self, entry):
        """Append an entry to log.jsonl. NaN becomes null."""
        if RANK > 0:
            return
        progress = self.progress
        entry |= {"update": progress.update, "tokens": progress.tokens, "flops": progress.flops}
        entry = json.loads(json.dumps(entry), parse_constant=lambda name: None)
        with open(f"{self.settings.out_dir}/log.jsonl", "a") as f:
            f.write(json.dumps(entry) + "\n")
            progress.log_bytes = f.tell()
        if self.settings.wandb:
            import wandb
            wandb.log(entry, step=progress.update)

    def save(self):
        """
        Gather a checkpoint from all ranks, and write it to out_dir/step_* on rank 0: the tokenizer,
        the optimizer's moments, the progress, the weights (float32 masters, and frozen ones as in
        `exact`) and, last, config.json, without which it does not count. Then delete the oldest
        checkpoints, leaving --keep, and the optimizer's state of all but the newest.
        """
        kept = self.optimizer.gather()
        if RANK > 0:
            return
        settings, progress = self.settings, self.progress
        folders = [path for path in Path(settings.out_dir).glob("step_*/")
                   if path.name[5:].isdecimal()]
        self.delete({*folders} - {*checkpoints(settings.out_dir)})  # what a kill left
        folder = Path(settings.out_dir, f"step_{progress.update:06d}")
        for name, content in self.tokenizer_files.items():
            with write_atomically(folder / name) as new:
                new.write_bytes(content)
        with write_atomically(folder / "optimizer.safetensors") as new:
            save_file({key: t for key, t in kept.items() if key not in self.optimizer.params}, new)
        write_json(folder / "train.json", vars(progress))
        self.model.save(folder, self.exact | kept)

        saved = checkpoints(settings.out_dir)
        self.delete(saved[:-settings.keep])
        for path in saved[:-1]:
            (path / "optimizer.safetensors").unlink(missing_ok=True)

    def delete(self, folders):
        """Delete checkpoints to which nobody has added files, such as an evaluation."""
        ours = {"config.json", "model.safetensors", "optimizer.safetensors", "train.json",
                *self.tokenizer_files}
        for path in folders:
            # A kill may have left train.json.loopgraft-unfinished-*.
            if ours.issuperset(name.split(".loopgraft-")[0] for name in os.listdir(path)):
                (path / "config.json").unlink(missing_ok=True)  # first: now it does not count
                shutil.rmtree(path, ignore_errors=True)  # NFS keeps files that are still open


def to_inputs(model, batch, seed):
    """
    Turn a Dataset's batch into the model's inputs: idx (B, T) and s_0 (B, T, C) on its device, and
    targets (B, T), which stay on the CPU, so that counting them does not wait for a GPU. s_0 is
    None for an ordinary model.
    """
    idx, targets, numbers = batch
    looped = model.config.n_core > 0
    state = model.initial_state(*idx.shape, seed, int(numbers[0])) if looped else None
    return to_device(idx, model.embed.weight.device), targets, state


def update_flops(settings, model, optimizer, draws, labelled):
    """Return an update's FLOPs, with Newton-Schulz, over all ranks. See flops_per_token()."""
    per_token = [model.flops_per_token(steps, settings.context, True, labelled) for steps in draws]
    tokens = settings.batch_size * settings.context
    return round(tokens * sum(per_token) / len(draws)) + optimizer.flops()


def catch_signals():
    """
    Return a list that collects the numbers of SIGTERM, SIGINT (Ctrl-C), SIGHUP (a closed terminal)
    and SIGUSR1 (Slurm's notice), which no longer end the process; only a second SIGINT does. A rank
    that has received one skips the rest of its update or validation; all ranks then discard that
    and stop.
    """
    received = []

    def stop(number, frame):
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            if RANK == 0:
                with contextlib.suppress(OSError):  # print() may be what the signal interrupted
                    os.write(2, b"Saving the run. Ctrl-C again ends it at once, unsaved\n")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    return received


# ---------------------------------------------------------------------------------------- the setup

def run_config(settings, config, data_folder=None):
    """
    Return the Config of a run: `config` with what the settings change in it. If `config` is None,
    it is a new one, in the shape of the settings, for the vocabulary of the data.
    """
    if not config:
        meta = read_json(f"{data_folder}/meta.json")
        config = Config(vocab_size=meta["vocab_size"], eos_token_id=meta["eos_id"],
                        embed_scale=settings.embed_scale,
                        **{name: getattr(settings, name) for name in SHAPE})
    return replace(config, mean_recurrence=settings.mean_recurrence,
                   backprop_depth=settings.backprop_depth,
                   context=max(config.context, settings.context),
                   embed_scale=settings.embed_scale if settings.reinit else config.embed_scale)


def choose_trained(settings, model):
    """Freeze all parameters that --train does not name. Raises UserError if a word matches none."""
    words = settings.train.split("|")  # by default [""], which matches every name
    names = "\n".join(dict(model.named_parameters()))
    for word in words:
        if word not in names or settings.train and not word:
            raise UserError(f"--train={settings.train}: no parameter is named {word!r}")
    for name, p in model.named_parameters():
        p.requires_grad = any(word in name for word in words)


def make_optimizer(settings, model, rank, world, weights=None):
    """Return an Optimizer for a model's parameters."""
    matrices = {name for name, p in model.named_parameters()
                if p.dim() == 2 and not name.startswith(("embed.", "head."))}
    stacked = {}
    if not model.config.n_core:
        # The paper's static baselines are Hugging Face models, in which q, k and v, or gate and up,
        # are separate matrices. Its recurrent models stack them as ours do.
        for i, block in enumerate(model.prelude):
            stacked[f"prelude.{i}.attn.qkv.weight"] = block.attn.split
            stacked[f"prelude.{i}.mlp.fc.weight"] = [model.config.n_ffn] * 2
    device = "cuda" if model.embed.weight.is_cuda else "cpu"
    product_dtype = getattr(torch, choose_dtype("auto", device))
    return Optimizer(model.named_parameters(), matrices, lr=settings.lr, adam_lr=settings.adam_lr,
                     weight_decay=settings.weight_decay, clip=settings.clip or math.inf,
                     rule=settings.optimizer, weights=weights, stacked=stacked,
                     product_dtype=product_dtype, rank=rank, world=world)


def read_progress(folder):
    """Read a checkpoint's train.json. Raises UserError if its keys are not those of a Progress."""
    path = f"{folder}/train.json"
    values = read_json(path)
    try:
        return Progress(**values)
    except TypeError as e:
        raise UserError(f"{path}: not of this version of train.py ({e})")


def spent_before(folder, recipe):
    """
    Return what the chain of runs that led to the checkpoint `folder` has spent: "tokens" and
    "flops", without those of a first run without --init_from, which was pretraining; and the
    "first_row" of a run with this recipe, after theirs if it reads the same data in the same order.
    """
    if not (folder and Path(folder, "train.json").exists()):  # not made by train.py
        return {"tokens": 0, "flops": 0, "first_row": 0}
    last = read_progress(folder)
    order = "seed", "context", "digest of the data"
    same = all(last.recipe[key] == recipe.get(key) for key in order)
    rows = last.first_row + last.update * last.recipe["batch_size"] if same else 0
    if not last.recipe["init_from"]:  # pretraining. (A run with --reinit has one, and counts.)
        last.tokens = last.flops = 0
    return {"tokens": last.tokens, "flops": last.flops, "first_row": rows}


def check_ranks(mine):
    """Raise UserError if a value in the dict `mine` differs on rank 0."""
    first = [mine]
    if WORLD > 1:
        dist.broadcast_object_list(first)
    for key, value in first[0].items():
        if mine[key] != value:
            raise UserError(f"rank {RANK} has {key} = {mine[key]}, but rank 0 has {value}")


def describe_run(settings, model):
    """Print what the settings mean: model, updates and schedules."""
    c, size = model.config, model.num_params()
    parts = ", ".join(f"{part} {n:,}" for part, n in size.items())
    say(f"model: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, width {c.n_embd}; parameters: "
        f"{parts}; {size.total():,} in all, {model.num_params(trained=True).total():,} trained")
    tokens = settings.updates * settings.batch_size * settings.context
    say(f"run: {settings.updates:,} updates of {settings.batch_size:,} rows of "
        f"{settings.context:,} tokens, {tokens:.4g} tokens in all")
    if c.n_core:
        extra = settings.recurrence_sampler != "fixed"  # see draw_steps()
        say(f"mean of r: {scheduled_mean(settings, 0) + extra} at first, "
            f"{settings.mean_recurrence + extra} at the end; gradients through at most the last "
            f"{scheduled_k(settings, settings.updates)}")


def attention_kernels(device, T):
    """Return a context manager that chooses the kernels of attention for rows of T tokens."""
    # The backward pass of SDPA's fused kernel for CPUs takes twice as long for short rows.
    short = device == "cpu" and T <= 128
    return sdpa_kernel(SDPBackend.MATH) if short else contextlib.nullcontext()


def main():
    settings = read_settings(sys.argv[1:], WORLD)
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{LOCAL_RANK}"
        torch.cuda.set_device(device)
    if WORLD > 1:
        join_ranks(device)
    # Rank 0 locks before the run is read, so that no other process continues it meanwhile.
    locked = contextlib.nullcontext() if RANK else lock(Path(settings.out_dir, ".lock"))
    with locked, attention_kernels(device, settings.context):
        code = Run(settings, device).train()
    if WORLD > 1:
        # torchrun kills the other ranks when one fails, and rank 0 may still be saving.
        dist.barrier()
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    cli(main, on_every_rank=True)
