"""
Measure the speed of training and decoding. A speed is the median of repeated runs after a warm-up,
printed with the lowest and the highest.

    python bench.py train                        # tokens/s, FLOPs utilisation, GPU memory
    python bench.py decode --steps 1,4,32        # tokens/s over r
    python bench.py decode --model out/tiny/task --draft_steps 0,2,4

Without --model, train and decode run a Llama of 27.3M parameters and shape (2,4,2) with random
weights: except with --draft_steps, speed does not depend on their values. The last line of output
is JSON.

Tokens/s mean little across different r, so training also shows its FLOPs utilisation (mfu). FLOPs
follow the paper's rule everywhere: 6 per parameter and token where gradients flow and 2 where they
do not, of the layers alone. The adapter, the head and attention are not counted, so the device
computes a little more than mfu says.
"""
import json
import statistics
import time

import torch

from common import Parser, cli, find_gpu, natural, opening, positive, recurrences, several
from model import Config, RecurrentLM
from muon import MOMENTS, Optimizer
from sample import Decoder, describe

TRAIN = """\
Time updates of a model, with their share of the FLOPs that the device reaches in large matrix
products (mfu). The last line is JSON.

    python bench.py train --steps 0+4 --repeat 3"""
DECODE = """\
Time the decoding of random prompts, at several numbers of recurrences. The last line is JSON.

    python bench.py decode --steps 1,8 --repeat 3"""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    timed = Parser(add_help=False)
    flag = timed.add_argument
    flag("--model", metavar="FOLDER", help="a checkpoint or run; default: random weights")
    flag("--dtype", choices=("float32", "bfloat16"), default="float32")
    flag("--repeat", type=positive, default=5, metavar="N", help="timed runs per measurement (5)")
    flag("--no_compile", action="store_true", help="do not use torch.compile")

    parser = Parser(description=opening(__doc__))
    commands = parser.add_subparsers(dest="command", required=True)
    flag = commands.add_parser(
        "train", parents=[timed], help="time updates", usage="bench.py train [flags]",
        description=TRAIN).add_argument
    flag("--steps", type=n_plus_k, default="0+4,24+8", metavar="N+K,N+K",
         help="recurrences without + with gradient (%(default)s)")
    flag("--batch_size", type=positive, default=4, metavar="N", help="rows per update (4)")
    flag("--context", type=positive, default=256, metavar="N", help="tokens per row (256)")
    flag("--optimizer", choices=tuple(MOMENTS), default="adamw")

    flag = commands.add_parser(
        "decode", parents=[timed], help="time new tokens", usage="bench.py decode [flags]",
        description=DECODE).add_argument
    flag("--steps", type=recurrences, default="1,2,4,8,16,32", metavar="R,R",
         help="recurrences r (%(default)s)")
    flag("--batch_size", type=positive, default=1, metavar="N", help="prompts at once (1)")
    flag("--prompt", type=positive, default=32, metavar="N", help="tokens per prompt (32)")
    flag("--tokens", type=positive, default=64, metavar="N", help="new tokens per row (64)")
    flag("--draft_steps", type=several(natural), default="0", metavar="R,R",
         help="recurrences of a draft; 0 (default): none")

    bench(parser.parse_args())


# ------------------------------------------------------------------------------- measuring

def bench(args):
    """
    Time training or decoding. Prints a line for each measurement, and then all of them as one line
    of JSON.

    matmul_peak: FLOP/s of a large square matrix product. mfu: the share of it that an update
    reaches. peak_mib: the most GPU memory in use so far, in MiB.
    """
    find_gpu()  # prints a note if torch cannot use the GPU
    dtype = getattr(torch, args.dtype)
    if args.model:
        model = RecurrentLM.load(args.model, DEVICE)
    else:
        config = Config(vocab_size=4096, n_embd=512, n_head=8, n_kv_head=2, n_ffn=1408,
                        n_prelude=2, n_core=4, n_coda=2)
        model = RecurrentLM(config).to(DEVICE)
        model.init_weights(0)
    model.to(dtype)
    n = 8192 if DEVICE == "cuda" else 2048
    a = torch.randn(n, n, device=DEVICE, dtype=dtype)
    b = torch.randn(n, n, device=DEVICE, dtype=dtype)
    _, seconds = time_runs(lambda: a @ b, args.repeat)
    peak = 2 * n**3 / statistics.median(seconds)
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
            flops = model.flops_per_token((row["n"], row["k"]))
            row["mfu"] = row["tokens_per_s"] * flops / peak
        if DEVICE == "cuda":
            row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        for key, value in row.items():
            print(key, f"{value:.4g}" if isinstance(value, float) else value, end="  ")
        print(flush=True)
        result["rows"].append(row)
    print(json.dumps(result))


def clock():
    """Return the time in seconds, after the device has finished all work that was launched."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def time_runs(run, repeat):
    """
    Call run() once as a warm-up, then `repeat` times. Returns the seconds of the warm-up, and the
    list of seconds of the others.
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
    seconds of the warm-up. tokens: of one run. first, seconds: see time_runs().
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

    Compiling happens in the warm-up, so first_s shows how long it takes. update_s: the optimizer's
    part of an update (median), which a run pays once for all micro-batches of an update.
    """
    shape = 2, args.batch_size, args.context
    idx, targets = torch.randint(model.config.vocab_size, shape, device=DEVICE)
    optimizer = Optimizer(model.named_parameters(), lr=1e-3, adam_lr=5e-5,
                          weight_decay=1e-4, clip=1.0, rule=args.optimizer)
    if not args.no_compile:
        model.compile_parts()
    for n, k in args.steps:
        optimizer_seconds = []

        def update():
            _, loss = model(idx, targets, (n, k))
            loss.backward()
            optimizer.accumulate()
            began = clock()
            norm = optimizer.reduce()
            optimizer.step(norm.item())
            optimizer_seconds.append(clock() - began)

        first, seconds = time_runs(update, args.repeat)
        row = {"n": n, "k": k} | speeds(idx.numel(), first, seconds)
        _, *after_warm_up = optimizer_seconds
        row["update_s"] = statistics.median(after_warm_up)
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
    decoder = Decoder(model, not args.no_compile)
    torch.manual_seed(0)
    idx = torch.randint(model.config.vocab_size, (args.batch_size, args.prompt))
    for r in args.steps:
        for draft_steps in args.draft_steps:
            drafts = []  # whether each token was an accepted draft

            def run():
                drafts.clear()
                tokens = decoder.generate(idx.tolist(), args.tokens, r, draft_steps=draft_steps)
                for _, _, accepted in tokens:
                    drafts.append(accepted)

            first, seconds = time_runs(run, args.repeat)
            row = {"r": r, "draft_steps": draft_steps}
            row |= speeds(len(idx) * args.tokens, first, seconds)
            if draft_steps:
                row["accepted"] = statistics.fmean(drafts)
            yield row


if __name__ == "__main__":
    cli(main)
