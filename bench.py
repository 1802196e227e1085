"""
Say what a training run will cost, and measure the speed of training and decoding. A speed is the
median of repeated runs after a warm-up, printed with the lowest and the highest.

    python bench.py plan --config=config/fig4.toml --preset=tinyllama-4-8-4 --gpus=8
    python bench.py train                        # tokens/s, FLOPs utilization, GPU memory
    python bench.py decode --steps 1,4,32        # tokens/s over r
    python bench.py decode --model out/tiny/task --draft_steps 0,2,4

Without --model, train and decode run a Llama of 27.3M parameters and shape (2,4,2) with random
weights: except with --draft_steps, speed does not depend on their values. The last line of output
is JSON.

Tokens/s mean little across different r, so `train` also reports mfu: the FLOP/s that it executes in
matrix products and attention, as a share of those of a large matrix product.
"""
import bisect
import json
import statistics
import time
import tomllib
from collections import Counter
from dataclasses import replace

import torch

from common import (Parser, UserError, cli, natural, opening, positive, read_json, recurrences,
                    several, yes_or_no)
from data import Dataset
from model import Config, RecurrentLM, find_checkpoint, load_config
from muon import MOMENTS
from sample import Decoder, describe
from surgery import ASSETS, retrofit_config
from train import (Settings, choose_trained, describe_run, draws_of, largest_depth, make_config,
                   make_optimizer, read_settings, spent_before, update_flops)

# The bfloat16 FLOP/s that we expect from each GPU: not measured, but 61, 61 and 43% of its peak.
GPUS = {
    "RTX 4090 (24 GB)": 1.0e14,
    "A100 (80 GB)": 1.9e14,
    "H100 (80 GB)": 4.2e14,
}

PLAN = """\
Say what a run of train.py will cost: tokens and epochs, FLOPs, hours and memory (estimates). Takes
the flags of train.py. With --preset, neither weights nor data need to be there.

    python bench.py plan --config=config/evening.toml --preset=tinyllama-4-8-4
    python bench.py plan --config=config/mine.toml --init_from=PARENT --flops_of=out/mine/loop
                                        spend as many FLOPs as out/mine/loop did"""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    timed = Parser(add_help=False)
    flag = timed.add_argument
    flag("--model", metavar="FOLDER", help="a checkpoint or run; default: random weights")
    flag("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="(%(default)s)")
    flag("--repeat", type=positive, default=5, help="timed runs per measurement (5)")
    flag("--compile", type=yes_or_no, nargs="?", const=True, default=True,
         help="use torch.compile (true)")

    parser = Parser(description=opening(__doc__))
    commands = parser.add_subparsers(dest="command", required=True)
    flag = commands.add_parser("train", parents=[timed], help="time updates").add_argument
    flag("--steps", type=n_plus_k, default="0+4,24+8",
         help="recurrences without + with gradient (%(default)s)")
    flag("--batch_size", type=positive, default=4, help="rows per update (4)")
    flag("--context", type=positive, default=256, help="tokens per row (256)")
    flag("--optimizer", choices=tuple(MOMENTS), default="muon", help="(%(default)s)")

    flag = commands.add_parser("decode", parents=[timed], help="time new tokens").add_argument
    flag("--steps", type=recurrences, default="1,2,4,8,16,32",
         help="recurrences r (%(default)s)")
    flag("--batch_size", type=positive, default=1, help="prompts at once (1)")
    flag("--prompt_tokens", type=positive, default=32, help="tokens per prompt (32)")
    flag("--tokens", type=positive, default=64, help="new tokens per row (64)")
    flag("--draft_steps", type=several(natural), default="0",
         help="recurrences of a draft; 0 (default): none")

    flag = commands.add_parser("plan", help="say what a training run will cost",
                               usage="bench.py plan [flags]", description=PLAN).add_argument
    flag("--gpus", type=positive, default=1, help="number of GPUs (1)")
    flag("--preset", choices=presets(), metavar="NAME",
         help="plan for this retrofit, which need not be made yet, instead of --init_from")
    flag("--flops_of", metavar="RUN", help="make as many updates as it takes to spend the FLOPs "
         "that RUN, and the runs before it, have spent since the parent")
    flag("--quiet", action="store_true", help="print the number of updates alone")

    args, settings = parser.parse_known_args()
    if args.command == "plan":
        plan(args, read_settings(settings, args.gpus))
    elif settings:
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    else:
        bench(args)


# ------------------------------------------------------------------------------- planning

def presets():
    """
    Read assets/parents.toml. Returns {name: (Config of the parent, layers to keep)}, such as
    {"tinyllama-4-8-4": (..., (4, 8, 4))}.
    """
    found = {}
    text = (ASSETS / "parents.toml").read_text()
    for parent, about in tomllib.loads(text).items():
        for sizes in about.pop("shapes"):
            name = "-".join(map(str, [parent, *sizes]))
            found[name] = Config(**about), tuple(sizes)
    return found


def plan(args, settings):
    """Print what a run of train.py with these settings will cost."""
    folder = None
    source = None
    if args.preset:
        source = retrofit_config(*presets()[args.preset])
    elif settings.init_from:
        folder = find_checkpoint(settings.init_from)
        source = load_config(folder)
    config = make_config(settings, source)
    model = RecurrentLM.empty(config).to(getattr(torch, settings.dtype))
    choose_trained(settings, model)
    if args.flops_of:
        budget = read_json(f"{find_checkpoint(args.flops_of)}/train.json")["flops"]
        if not settings.reinit:
            budget -= spent_before(folder)["flops"]
        settings.updates = affordable_updates(settings, model, budget)
    if args.quiet:
        print(settings.updates)
        return
    describe_run(settings, model)
    try:
        train_set = Dataset(settings.data, "train", settings.context)
        epochs = settings.updates * settings.batch_size / train_set.num_rows
        print(f"data: {epochs:.3g} epochs of {settings.data}")
    except UserError as e:
        print(f"data: not ready: {e}")

    flops = run_flops(settings, model)
    by_paper = 0
    tokens = settings.batch_size * settings.context
    for steps, updates in drawn_steps(settings, model).items():
        by_paper += updates * tokens * paper_flops(model, steps)
    print(f"FLOPs: {flops:.4g} in matrix products and attention. The paper's rule counts "
          f"{by_paper:.4g}: for each token, 6 per parameter of a layer, or 2 without gradient")
    gigabytes = memory(settings, model, args.gpus)
    needed = sum(gigabytes.values())
    each = ", ".join(f"{what} {size:.1f}" for what, size in gigabytes.items())
    print(f"memory: about {needed:.1f} GB on each of {args.gpus} GPUs ({each}); leave 2 GB free")
    for name, speed in GPUS.items():
        hours = flops / (args.gpus * speed) / 3600
        print(f"time: about {hours:,.1f} hours on {args.gpus} {name}")


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


def run_flops(settings, model):
    """Return the FLOPs that a whole run executes, with its own draws of r, without validation."""
    optimizer = make_optimizer(settings, model, rank=0, world=1)
    total = 0
    for steps, updates in drawn_steps(settings, model).items():
        total += updates * update_flops(settings, model, optimizer, [steps])
    return total


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


def affordable_updates(settings, model, budget):
    """Return the number of updates that comes closest to spending `budget` FLOPs."""
    def cost(updates):
        return run_flops(replace(settings, updates=updates), model)

    too_many = 1
    while cost(too_many) <= budget:
        too_many *= 2
    most = bisect.bisect(range(1, too_many), budget, key=cost)  # within the budget
    left = budget - cost(most)
    lacking = cost(most + 1) - budget  # for one more
    return most if left <= lacking else most + 1


def memory(settings, model, gpus):
    """Return what each GPU holds during training: {what: GB}."""
    optimizer = make_optimizer(settings, model, rank=0, world=gpus)
    weights = sum(p.nbytes for p in model.parameters())
    gradients = optimizer.sums.nbytes  # float32 sums; the next line adds those of one micro-batch
    gradients += optimizer.sums.numel() * model.embed.weight.element_size()
    states = [*optimizer.moments.values()]
    if settings.dtype != "float32":  # float32 weights need no master copy
        states += optimizer.masters.values()

    # Bytes per layer and token that a compiled forward pass keeps for the backward pass, counted
    # on small models in bfloat16.
    c = model.config
    heads = c.n_head + c.n_kv_head
    layer = 14 * c.n_embd + 6 * (c.n_ffn + heads * c.head_dim)
    if settings.dtype == "float32":
        layer *= 2
    loops = 1 if settings.recompute else largest_depth(settings)
    layers = c.n_prelude + c.n_core * loops + c.n_coda
    activations = settings.micro_batch * settings.context * layer * layers
    if settings.compile:
        activations *= settings.activation_budget
    return {
        "weights": weights / 1e9,
        "gradients": gradients / 1e9,
        "optimizer": sum(t.nbytes for t in states) / 1e9,
        "activations": activations / 1e9,
    }


# ------------------------------------------------------------------------------- measuring

def bench(args):
    """
    Time training or decoding. Prints a line for each measurement, and then all of them as one line
    of JSON.

    matmul_peak: FLOP/s of a large square matrix product. peak_mib: the most GPU memory in use so
    far, in MiB.
    """
    dtype = getattr(torch, args.dtype)
    if args.model:
        model = RecurrentLM.load(args.model, DEVICE)
    else:
        config = Config(
            vocab_size=4096,
            n_embd=512,
            n_head=8,
            n_kv_head=2,
            n_ffn=1408,
            n_prelude=2,
            n_core=4,
            n_coda=2,
        )
        model = RecurrentLM(config).to(DEVICE)
        model.init_weights(0)
    model.to(dtype)
    peak = matmul_speed(dtype, args.repeat)
    result = {
        "device": describe(model)[0],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": args.dtype,
        "matmul_peak": peak,
        "rows": [],
    }
    run = bench_train if args.command == "train" else bench_decode
    for row in run(model, args):
        if args.command == "train":
            row["mfu"] = row["flops_per_s"] / peak
        if DEVICE == "cuda":
            row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        cells = []
        for key, value in row.items():
            text = f"{value:.4g}" if isinstance(value, float) else value
            cells.append(f"{key} {text}")
        print("  ".join(cells), flush=True)
        result["rows"].append(row)
    print(json.dumps(result))


def matmul_speed(dtype, repeat):
    """Return the FLOP/s of a large square matrix product, the median of `repeat` products."""
    n = 8192 if DEVICE == "cuda" else 2048
    a = torch.randn(n, n, device=DEVICE, dtype=dtype)
    b = torch.randn(n, n, device=DEVICE, dtype=dtype)
    _, seconds = time_runs(lambda: a @ b, repeat)
    return 2 * n**3 / statistics.median(seconds)


def clock():
    """Return the time in seconds, after the device has finished all work that was launched."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_runs(run, repeat):
    """
    Call run() once as a warm-up, then `repeat` times. Returns how many seconds the warm-up took,
    and a list of the seconds of the other calls.
    """
    seconds = []
    for _ in range(repeat + 1):
        began = clock()
        run()
        seconds.append(clock() - began)
    first, *rest = seconds
    return first, rest


def speeds(tokens, first, seconds):
    """
    Return the columns of a row as a dict: tokens per second (median, lowest, highest) and the
    seconds of the warm-up. tokens: how many per run. first, seconds: see time_runs().
    """
    return {
        "tokens_per_s": tokens / statistics.median(seconds),
        "low": tokens / max(seconds),
        "high": tokens / min(seconds),
        "first_s": first,
    }


# ------------------------------------------------------------------------------- training

def bench_train(model, args):
    """
    Time an update of one micro-batch for each (n, k), done as in train.py: in bfloat16 the
    optimizer works on float32 master weights. Yields a row for each.

    Compiling happens in the warm-up, so first_s shows how long it takes.
    """
    shape = 2, args.batch_size, args.context
    idx, targets = torch.randint(model.config.vocab_size, shape, device=DEVICE)
    optimizer = make_optimizer(Settings(optimizer=args.optimizer), model, rank=0, world=1)
    if args.compile:
        model.compile_parts()
    for n, k in args.steps:
        def update():
            _, losses = model(idx, targets, (n, k))
            losses.sum().backward()
            optimizer.accumulate()
            norm = optimizer.reduce()
            optimizer.step(norm.item(), idx.numel())

        first, seconds = time_runs(update, args.repeat)
        row = {"n": n, "k": k}
        row |= speeds(idx.numel(), first, seconds)
        flops = model.flops_per_token((n, k), args.context, training=True)
        flops = idx.numel() * flops + optimizer.flops()
        row["flops_per_s"] = flops / statistics.median(seconds)
        yield row


def n_plus_k(text):
    """The type of --steps: "0+4,24+8" -> [(0, 4), (24, 8)], r without and with gradient."""
    pairs = []
    for pair in text.split(","):
        n, k = pair.split("+")
        pairs.append((natural(n), positive(k)))
    return pairs


# ------------------------------------------------------------------------------- decoding

def bench_decode(model, args):
    """
    Time the decoding of random prompts for each r and draft_steps: new tokens per second over all
    rows, prefill included. Yields a row for each.

    accepted: the share of the new tokens that were accepted drafts.
    """
    decoder = Decoder(model, args.compile)
    torch.manual_seed(0)
    idx = torch.randint(model.config.vocab_size, (args.batch_size, args.prompt_tokens))
    prompts = idx.tolist()
    for r in args.steps:
        for draft_steps in args.draft_steps:
            drafts = []  # whether each token was an accepted draft

            def run():
                drafts.clear()
                events = decoder.generate(prompts, args.tokens, r, draft_steps=draft_steps)
                for _, _, accepted in events:
                    drafts.append(accepted)

            first, seconds = time_runs(run, args.repeat)
            row = {"r": r, "draft_steps": draft_steps}
            row |= speeds(len(prompts) * args.tokens, first, seconds)
            if draft_steps:
                row["accepted"] = statistics.fmean(drafts)
            yield row


if __name__ == "__main__":
    cli(main)
