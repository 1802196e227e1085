"""
Say what a run of train.py will cost: tokens and epochs, FLOPs, hours and memory (estimates). Takes
the flags of train.py. With --preset, neither weights nor data need to be there.

    python -m tools.plan --config=config/evening.toml --preset=tinyllama-4-8-4 --gpus=8
    python -m tools.plan --config=config/tiny_parent.toml --flops_of=out/tiny/task
                                        the updates that spend as much as out/tiny/task
"""
import bisect
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from common import Parser, UserError, choose_dtype, cli, paths, positive, read_toml

import torch

from data import Dataset, read_mixture
from model import IGNORE, Config, RecurrentLM, find_checkpoint, load_config
from sample import DEPTHS, DEVICE
from surgery import retrofit_config
from train import (choose_trained, describe_run, draws_of, make_optimizer, read_progress,
                   read_settings, run_config, scheduled_k, spent_before, update_flops)

# The bfloat16 FLOP/s that we expect from each GPU: 61, 61 and 43% of its peak. Only the H100 was
# measured; with rows enough, an H200 reached 50% (runs/NOTES.md).
GPUS = {
    "RTX 4090 (24 GB)": 1.0e14,
    "A100 (80 GB)": 1.9e14,
    "H100 (80 GB)": 4.2e14,
}
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def main():
    parser = Parser(__doc__, usage="python -m tools.plan [flags]")
    flag = parser.add_argument
    flag("--gpus", type=positive, default=1, help="number of GPUs (1)")
    flag("--preset", choices=presets(), metavar="NAME",
         help="plan for this retrofit, which need not be made yet, instead of --init_from")
    flag("--flops_of", type=paths, metavar="RUN",
         help="print only how many updates spend the FLOPs that RUN, and the runs before it, have "
              "spent since the parent")
    flag("--answer", type=positive, metavar="T",
         help="print only how many questions of T tokens, with their answers, the model can answer "
              "at once on this machine. Fails if it has too little memory for one, or to train")
    args, flags = parser.parse_known_args()
    settings, model = read_run(args, flags)
    if args.flops_of:
        print(affordable_updates(settings, model, args.flops_of))
    elif args.answer:
        print(count_rows(settings, model, args.answer))
    else:
        print_plan(settings, model, args.gpus)


def read_run(args, flags):
    """Return the Settings that train.py's flags describe, and the model, without its weights."""
    if args.preset:
        flags.append(f"--init_from={args.preset}")  # only to say that it has a shape
    settings = read_settings(flags, args.gpus)
    folder = None
    if args.preset:
        config = run_config(settings, retrofit_config(*presets()[args.preset]))
    elif settings.init_from:
        folder = find_checkpoint(settings.init_from)
        config = run_config(settings, load_config(folder))
    else:
        (data_folder, _), *_ = read_mixture(settings.data)
        config = run_config(settings, None, data_folder)
    if settings.dtype == "auto":
        # As on a GPU, wherever the plan is made; --answer is about this machine.
        settings.dtype = choose_dtype("auto", DEVICE) if args.answer else "bfloat16"
    model = RecurrentLM.empty(config).to(getattr(torch, settings.dtype))
    model.folder = folder
    choose_trained(settings, model)
    return settings, model


def read_data(settings):
    """Return a run's Dataset, and the share of the tokens in 1,024 rows that have a target."""
    train_set = Dataset(settings.data, "train", settings.context)
    _, targets, _ = train_set.batch(settings.seed, 0, 0, 1, 1024)
    return train_set, (targets != IGNORE).double().mean().item()


def print_plan(settings, model, gpus):
    """Print what a run will cost."""
    describe_run(settings, model)
    labelled = 1.0
    try:
        train_set, labelled = read_data(settings)
        epochs = settings.updates * settings.batch_size / train_set.num_rows
        print(f"data: {epochs:.3g} epochs of {settings.data}")
    except UserError as e:
        print(f"data: not ready: {e}")

    flops, by_paper = run_flops(settings, model, labelled)
    print(f"FLOPs: {flops:.4g} in matrix products and attention. The paper's rule counts "
          f"{by_paper:.4g}: for each token, 6 per parameter of a layer, or 2 without gradient")
    parts = memory(settings, model, gpus)
    each = ", ".join(f"{what} {size:.1f}" for what, size in parts.items())
    print(f"memory: about {sum(parts.values()):.1f} GB on each of {gpus} GPUs ({each}) "
          f"in {settings.dtype}; leave 2 GB free")
    for name, speed in GPUS.items():
        hours = flops / (gpus * speed) / 3600
        print(f"time: about {hours:,.1f} hours on {gpus} {name}")


def presets():
    """
    Read parents.toml. Returns {name: (Config of the parent, layers to keep)}, such as
    {"tinyllama-4-8-4": (..., (4, 8, 4))}.
    """
    found = {}
    for parent, about in read_toml(Path(__file__).with_name("parents.toml")).items():
        for sizes in about.pop("shapes"):
            name = "-".join(map(str, [parent, *sizes]))
            found[name] = Config(**about), tuple(sizes)
    return found


def drawn_steps(settings, model):
    """
    Return how many of a run's updates use each (n, k): {(n, k): updates}. With several draws per
    update, each draw counts as a fraction of an update.
    """
    if not model.config.n_core:
        return {(0, 0): settings.updates}
    draws = Counter()
    for update in range(settings.updates):
        draws.update(draws_of(settings, update))
    return {steps: count / settings.draws for steps, count in draws.items()}


def run_flops(settings, model, labelled):
    """
    Return a run's FLOPs, with its own draws of r and without validation: what it executes, and what
    the paper's rule counts.
    """
    optimizer = make_optimizer(settings, model, rank=0, world=1)
    tokens = settings.batch_size * settings.context
    executed = by_paper = 0
    for steps, updates in drawn_steps(settings, model).items():
        executed += updates * update_flops(settings, model, optimizer, [steps], labelled)
        by_paper += updates * tokens * paper_flops(model, steps)
    return executed, by_paper


def paper_flops(model, steps):
    """
    Return training FLOPs per token by the paper's rule: each use of a layer parameter counts 6 if
    it carries gradient, otherwise 2. Each of the n + k recurrences uses the core once.
    """
    n, k = steps
    size = model.num_params()
    trained = model.num_params(trained=True)
    forward = size["prelude"] + (n + k) * size["core"] + size["coda"]
    backward = trained["prelude"] + k * trained["core"] + trained["coda"]
    if not model.config.n_core:  # the paper counts the final norm of an ordinary model
        forward += size["norm_f"]
        backward += trained["norm_f"]
    return 2 * forward + 4 * backward


def affordable_updates(settings, model, run):
    """
    Return the number of updates that comes closest to spending what the folder `run`, and the runs
    before it, have spent since the parent. Raises UserError if that is less than half an update.
    """
    _, labelled = read_data(settings)
    run = find_checkpoint(run)
    budget = read_progress(run).flops
    # A loop's FLOPs are counted from its surgery on, without what its parent had spent before.
    if not settings.reinit and bool(model.config.n_core) == bool(load_config(run).n_core):
        budget -= spent_before(model.folder, {})["flops"]

    def cost(updates):
        executed, _ = run_flops(replace(settings, updates=updates), model, labelled)
        return executed

    too_many = 1
    while cost(too_many) <= budget:
        too_many *= 2
    most = bisect.bisect(range(1, too_many), budget, key=cost)  # within the budget
    updates = min(most, most + 1, key=lambda updates: abs(cost(updates) - budget))
    if not updates:
        raise UserError(f"--flops_of={run}: {settings.init_from or 'nothing'} has already spent "
                        "that, to within half an update")
    return updates


def memory(settings, model, gpus):
    """Return what each GPU holds during training: {what: GB}."""
    optimizer = make_optimizer(settings, model, rank=0, world=gpus)
    weights = sum(p.nbytes for p in model.parameters())
    gradients = optimizer.sums.nbytes  # float32 sums; the next line adds those of one micro-batch
    gradients += optimizer.sums.numel() * model.embed.weight.element_size()
    states = [t for piece in optimizer.own for t in piece.moments]
    if settings.dtype != "float32":  # float32 weights need no master copy
        states += [piece.master for piece in optimizer.own]

    # Bytes per layer and token that a compiled forward pass keeps for the backward pass, counted
    # on small models in bfloat16.
    c = model.config
    heads = c.n_head + c.n_kv_head
    layer = 14 * c.n_embd + 6 * (c.n_ffn + heads * c.head_dim)
    if settings.dtype == "float32":
        layer *= 2
    layers = c.depth(scheduled_k(settings, settings.updates))
    activations = settings.micro_batch * settings.context * layer * layers
    if settings.compile:
        activations *= settings.activation_budget
    return {
        "weights": weights / 1e9,
        "gradients": gradients / 1e9,
        "optimizer": sum(t.nbytes for t in states) / 1e9,
        "activations": activations / 1e9,
    }


def free_memory():
    """
    Return the free bytes of this machine's GPU, or without one, of its memory, but at most the
    limit of a container or a Slurm job (cgroup v2).
    """
    if DEVICE != "cpu":
        return torch.cuda.mem_get_info()[0]
    if not PROC.exists():
        return math.inf  # not known
    free = [1024 * int(re.search(r"MemAvailable: +(\d+)", (PROC / "meminfo").read_text())[1])]
    groups = PROC / "self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        folder = GROUPS / line.split(":", 2)[2].lstrip("/")
        for group in folder, *folder.parents:
            if (file := group / "memory.max").exists():
                free += map(int, re.findall(r"\d+", file.read_text()))  # not "max"
    return min(free)


def count_rows(settings, model, length):
    """
    Return how many questions of `length` tokens, with their answers, a run's model can answer at
    once, at most 32, by estimates. Raises UserError if there is too little memory for one of them,
    or for training.
    """
    c, r = model.config, max(DEPTHS)
    training = memory(settings, model, 1)
    # The cache has all recurrences, and a pass over the prompts has a layer's activations.
    token = 2 * c.depth(r) * c.n_kv_head * c.head_dim + 8 * c.n_embd + 3 * c.n_ffn
    token *= model.embed.weight.element_size()
    question = 1.1 * (min(length, c.context) + 256) * token / 1e9
    free = free_memory() / 1e9
    for what, needed in (("training", sum(training.values())),
                         (f"answering a question at r = {r}", training["weights"] + question)):
        if needed > free:
            raise UserError(f"{settings.out_dir}: {what} takes about {needed:.1f} GB, and "
                            f"{free:.1f} GB are free. Use shorter rows or questions, a smaller "
                            "model, or --micro_batch=1 and --activation_budget=0.5")
    return int(min(32, (free - training["weights"]) / question))


if __name__ == "__main__":
    cli(main)
