"""
Measure the speed of training and decoding: the median of repeated runs after a warm-up, printed
with the lowest and the highest.

    python bench.py train                        # tokens/s, FLOPs utilization, GPU memory
    python bench.py decode --steps 1,4,32        # tokens/s over r
    python bench.py decode --model out/tiny/task

All weights are random, since speed hardly depends on their values. The shape is that of --model,
or a Llama of 27.3M parameters and (2,4,2) layers. The last line of output is JSON. `bash
runs/gpu.sh` does all that is worth measuring on a new GPU.

Tokens/s mean little across different r, so `train` also reports mfu: its FLOP/s in matrix products
and attention, as a share of those of a large matrix product (not of a data sheet's peak). What
--activation_budget makes it compute twice does not count. And `decode` reports mbu: the bytes/s of
weights that it reads, as a share of this machine's memory bandwidth. With one row, that is its
limit, unless the recurrent block fits in the cache.
"""
import json
import time
from statistics import median

from common import (DTYPE_HELP, DTYPES, Parser, between, choose_dtype, cli, natural, paths,
                    positive, recurrences, yes_or_no)

import torch
import torch._functorch.config as functorch_config

from model import Config, RecurrentLM, find_checkpoint, load_config
from muon import MOMENTS
from sample import DEVICE, Decoder, device_and_dtype
from train import Settings, attention_kernels, make_optimizer


def clock():
    """Return the time in seconds, after the device has finished all work that was launched."""
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_runs(run, repeat):
    """
    Call run() once as a warm-up, then `repeat` times. Returns the seconds of the warm-up, and a
    list of those of the others.
    """
    if DEVICE != "cpu":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeat + 1):
        began = clock()
        run()
        seconds.append(clock() - began)
    return seconds[0], seconds[1:]


def speeds(tokens, first, seconds):
    """The speeds of runs that process this many tokens each, and how long the warm-up took."""
    return {"tokens_per_s": tokens / median(seconds), "low": tokens / max(seconds),
            "high": tokens / min(seconds), "first_s": first}


# ------------------------------------------------------------------------------- training

def bench_train(model, args):
    """
    Time an update for each (n, k), done as in train.py: in bfloat16 the optimizer works on float32
    master weights. Yields a row for each.

    Compiling happens in the warm-up, so first_s shows how long it takes.
    """
    peak = matmul_speed(model.embed.weight.dtype, args.repeat)
    shape = 2, args.batch_size, args.context
    idx, targets = torch.randint(model.config.vocab_size, shape)
    idx = idx.to(DEVICE)  # targets stay on the CPU, as in train.py
    optimizer = make_optimizer(Settings(optimizer=args.optimizer), model, rank=0, world=1)
    functorch_config.activation_memory_budget = args.activation_budget
    if args.compile:
        model.compile_parts()
    tokens = args.micro_batches * idx.numel()
    for n, k in args.steps if model.config.n_core else [(0, 0)]:
        def update():
            for _ in range(args.micro_batches):
                with attention_kernels(DEVICE, args.context):
                    _, losses = model(idx, targets, (n, k))
                    losses.sum().backward()
                optimizer.accumulate()
            norm = optimizer.reduce()
            optimizer.step(norm.item(), tokens)

        first, seconds = time_runs(update, args.repeat)
        flops = tokens * model.flops_per_token((n, k), args.context, training=True)
        flops_per_s = (flops + optimizer.flops()) / median(seconds)
        yield {"n": n, "k": k, **speeds(tokens, first, seconds), "flops_per_s": flops_per_s,
               "mfu": flops_per_s / peak}


def matmul_speed(dtype, repeat):
    """Return the FLOP/s of a large square matrix product."""
    n = 2048 if DEVICE == "cpu" else 8192
    a, b = torch.randn(2, n, n, device=DEVICE, dtype=dtype)
    _, seconds = time_runs(lambda: a @ b, repeat)
    return 2 * n**3 / median(seconds)


def n_plus_k(text):
    """The type of --steps: "0+4,24+8" -> [(0, 4), (24, 8)], r without and with gradient."""
    pairs = [pair.split("+") for pair in text.split(",")]
    return [(natural(n), positive(k)) for n, k in pairs]


# ------------------------------------------------------------------------------- decoding

def bench_decode(model, args):
    """
    Time the decoding of random prompts for each r: new tokens per second over all rows, prefill
    included. Yields a row for each.
    """
    peak = read_speed(args.repeat)
    decoder = Decoder(model, args.compile)
    torch.manual_seed(0)
    shape = args.batch_size, args.prompt_tokens
    prompts = torch.randint(model.config.vocab_size, shape).tolist()
    for r in args.steps if model.config.n_core else [0]:
        def run():
            for _ in decoder.generate(prompts, args.tokens, r):
                pass

        row = {"r": r, **speeds(len(prompts) * args.tokens, *time_runs(run, args.repeat))}
        weights = model.flops_per_token(r, T=0) / 2  # that each new token reads
        read = weights * model.embed.weight.itemsize * row["tokens_per_s"] / len(prompts)
        yield row | {"mbu": read / peak, "read_peak": peak}


def read_speed(repeat):
    """Return the bytes/s of reading 2 GB, in a dot product of two vectors."""
    a, b = torch.ones(2, 2**28, device=DEVICE)
    _, seconds = time_runs(lambda: a @ b, repeat)
    return 2 * a.nbytes / median(seconds)


# ----------------------------------------------------------------------------- the command

def parse_args():
    parser = Parser(__doc__)
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("train", help="time updates")
    train.set_defaults(bench=bench_train)
    decode = commands.add_parser("decode", help="time new tokens")
    decode.set_defaults(bench=bench_decode)
    for flag in train.add_argument, decode.add_argument:
        flag("--model", type=paths, metavar="FOLDER",
             help="a checkpoint or run, for its shape alone")
        flag("--dtype", choices=DTYPES, default="auto", help=DTYPE_HELP)
        flag("--repeat", type=positive, default=5, help="timed runs per measurement (5)")
        flag("--compile", type=yes_or_no, nargs="?", const=True, default=True,
             help="use torch.compile (true)")

    flag = train.add_argument
    flag("--steps", type=n_plus_k, default="0+4,24+8",
         help="recurrences without + with gradient (%(default)s)")
    flag("--batch_size", type=positive, default=4, help="rows per micro-batch (4)")
    flag("--micro_batches", type=positive, default=1, help="micro-batches per update (1)")
    flag("--activation_budget", type=between(0.3, 1, float), default=1.0,
         help="fraction of activations that a compiled model keeps (1)")
    flag("--context", type=positive, default=256, help="tokens per row (256)")
    flag("--optimizer", choices=tuple(MOMENTS), default="muon", help="(%(default)s)")

    flag = decode.add_argument
    flag("--steps", type=recurrences, default="1,2,4,8,16,32", help="recurrences r (%(default)s)")
    flag("--batch_size", type=positive, default=1, help="prompts at once (1)")
    flag("--prompt_tokens", type=positive, default=32, help="tokens per prompt (32)")
    flag("--tokens", type=positive, default=64, help="new tokens per row (64)")
    return parser.parse_args()


def main():
    args = parse_args()
    dtype = choose_dtype(args.dtype, DEVICE)
    config = Config(vocab_size=4096, n_embd=512, n_head=8, n_kv_head=2, n_ffn=1408,
                    n_prelude=2, n_core=4, n_coda=2)
    if args.model:
        config = load_config(find_checkpoint(args.model))
    model = RecurrentLM(config).to(DEVICE)
    model.init_weights(0)
    model.to(getattr(torch, dtype))
    device, _ = device_and_dtype(model)
    print(f"{dtype} on {device}")
    rows = []
    for row in args.bench(model, args):
        if DEVICE != "cpu":
            row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20  # in these runs
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
        rows.append(row)
    print(json.dumps({"device": device, "threads": torch.get_num_threads(),
                      "torch": torch.__version__, "dtype": dtype, "rows": rows}))


if __name__ == "__main__":
    cli(main)
