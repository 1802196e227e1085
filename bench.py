"""
Measure the speed of training and decoding, and draw results. A speed is the median of repeated runs
after a warm-up, with the lowest and the highest.

    python bench.py train                        # tokens/s, FLOPs utilisation, GPU memory
    python bench.py decode --steps 1,4,32        # tokens/s over r
    python bench.py decode --model out/tiny/task --draft_steps 0,2,4
    python bench.py plot out/*/eval_test.json    # accuracy over r, a panel for each task
    python bench.py plot out/fig4 out/fig5       # loss curves of runs, from their log.jsonl
    python bench.py plot out/*/eval_*.json --table     # all scores, a line for each model and r

Without --model, train and decode run a Llama of 27.3M parameters and shape (2,4,2) with random
weights: the speed of a token does not depend on their values. The last line of output is JSON.
runs/plot.py draws.

Tokens/s mean little across different r, so training also shows its FLOPs utilisation (mfu). FLOPs
follow the paper's rule everywhere: 6 per parameter and token where gradients flow and 2 where they
do not, of the layers alone. The adapter, the head and attention come on top of that.
"""
import json
import statistics
import time

import torch

from common import Parser, cli, describe, natural, opening, positive, recurrences
from model import Config, RecurrentLM
from muon import Optimizer
from runs.plot import plot, plot_flags
from sample import Decoder

TRAIN = """\
Time updates of a model, with their share of the FLOPs that the device reaches in large matrix
products (mfu). The last line is JSON.

    python bench.py train --steps 0+4 --repeat 3"""
DECODE = """\
Time the decoding of random prompts, at several numbers of recurrences. The last line is JSON.

    python bench.py decode --steps 1,8 --repeat 3"""
PLOT = """\
Draw result files of eval_gsm8k.py and eval_lm.py over r, or the losses of runs over their updates.
Files with the same tasks share a panel.

    python bench.py plot out/tiny/eval_*_test.json"""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    timed = Parser(add_help=False)
    flag = timed.add_argument
    flag("--model", metavar="FOLDER", help="a checkpoint or run; default: random weights")
    flag("--dtype", choices=("float32", "bfloat16"), default="float32")
    flag("--repeat", type=positive, default=5, metavar="N", help="timed runs of each figure (5)")
    flag("--no_compile", action="store_true", help="do without torch.compile")

    parser = Parser(description=opening(__doc__))
    commands = parser.add_subparsers(dest="command", required=True)
    flag = commands.add_parser(
        "train", parents=[timed], help="time updates", usage="bench.py train [flags]",
        description=TRAIN).add_argument
    flag("--steps", type=n_plus_k, default="0+4,24+8", metavar="N+K,N+K",
         help="recurrences without + with gradient (%(default)s)")
    flag("--batch_size", type=positive, default=4, metavar="N", help="rows of an update (4)")
    flag("--context", type=positive, default=256, metavar="N", help="tokens of a row (256)")
    flag("--optimizer", choices=("muon", "adamw", "adamw*"), default="adamw")

    flag = commands.add_parser(
        "decode", parents=[timed], help="time new tokens", usage="bench.py decode [flags]",
        description=DECODE).add_argument
    flag("--steps", type=recurrences, default="1,2,4,8,16,32", metavar="R,R",
         help="recurrences r (%(default)s)")
    flag("--batch_size", type=positive, default=1, metavar="N", help="prompts at once (1)")
    flag("--prompt", type=positive, default=32, metavar="N", help="tokens of a prompt (32)")
    flag("--tokens", type=positive, default=64, metavar="N", help="new tokens of a row (64)")
    flag("--draft_steps", type=recurrences, default="0", metavar="R,R",
         help="recurrences of a draft; 0 (default): none")

    commands.add_parser("plot", parents=[plot_flags()], help="draw results, or losses of runs",
                        usage="bench.py plot FILE ... [flags]", description=PLOT)
    args = parser.parse_args()
    if args.command == "plot":
        plot(args)
    else:
        bench(args)


# ------------------------------------------------------------------------------- measuring

def bench(args):
    """
    Time training or decoding. Prints a row as soon as it is measured, and all of them as JSON.
    matmul_peak is the FLOP/s of a large square matrix product, and mfu the share of it that an
    update reaches. peak_mib: the most GPU memory in use so far.
    """
    dtype = getattr(torch, args.dtype)
    if args.model:
        model = RecurrentLM.load(args.model, DEVICE)
    else:
        model = RecurrentLM(Config(vocab_size=4096, n_embd=512, n_head=8, n_kv_head=2, n_ffn=1408,
                                   n_prelude=2, n_core=4, n_coda=2)).to(DEVICE)
        model.init_weights(0)
    model.to(dtype)
    n = 8192 if DEVICE == "cuda" else 2048
    a = torch.randn(n, n, device=DEVICE, dtype=dtype)
    b = torch.randn(n, n, device=DEVICE, dtype=dtype)
    peak = measure(lambda: a @ b, 2 * n**3, args)["tokens_per_s"]
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
        if "k" in row:
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
    """Seconds, once the device has done all that it was told."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(run, count, args, **row):
    """
    Time run(), which handles `count` tokens, args.repeat times after a warm-up. Returns `row` with
    the median, lowest and highest tokens per second, and the seconds of the warm-up.
    """
    seconds = []
    for _ in range(args.repeat + 1):
        began = clock()
        run()
        seconds.append(clock() - began)
    first, *rest = seconds
    return row | {
        "tokens_per_s": count / statistics.median(rest),
        "low": count / max(rest),
        "high": count / min(rest),
        "first_s": first,
    }


# ------------------------------------------------------------------------------- training

def bench_train(model, args):
    """
    Time one optimizer update of one micro-batch for each (n, k), as train.py makes it: in bfloat16
    the optimizer works on float32 master weights. Compiling happens in the warm-up, so first_s
    shows what it takes. update_s: the optimizer's part, which a run pays once for all micro-batches
    of an update.
    """
    shape = 2, args.batch_size, args.context
    idx, targets = torch.randint(model.config.vocab_size, shape, device=DEVICE)
    optimizer = Optimizer(model.named_parameters(), lr=1e-3, adam_lr=5e-5,
                          weight_decay=1e-4, clip=1.0, rule=args.optimizer)
    spent = []
    if not args.no_compile:
        model.compile_parts()

    def update():
        model(idx, targets, (n, k))[1].backward()
        optimizer.accumulate()
        began = clock()
        optimizer.step(optimizer.reduce().item())
        spent.append(clock() - began)

    for n, k in args.steps:
        spent.clear()
        row = measure(update, idx.numel(), args, n=n, k=k)
        row["update_s"] = statistics.median(spent)
        yield row


def n_plus_k(text):
    """'0+4,24+8' -> [(0, 4), (24, 8)], recurrences without and with gradient"""
    pairs = (pair.split("+") for pair in text.split(","))
    return [(natural(n), positive(k)) for n, k in pairs]


# ------------------------------------------------------------------------------- decoding

def bench_decode(model, args):
    """
    Time the decoding of prompts: new tokens per second over all rows, prefill included. accepted:
    the share of tokens that were right drafts.
    """
    decoder = Decoder(model, not args.no_compile)
    torch.manual_seed(0)
    idx = torch.randint(model.config.vocab_size, (args.batch_size, args.prompt))
    for r in args.steps:
        for draft_steps in args.draft_steps:
            drafts = []  # whether each token was one

            def run():
                drafts.clear()
                tokens = decoder.generate(idx.tolist(), args.tokens, r, draft_steps=draft_steps)
                for _, _, drafted in tokens:
                    drafts.append(drafted)

            row = measure(run, len(idx) * args.tokens, args, r=r, draft_steps=draft_steps)
            if draft_steps:
                row["accepted"] = statistics.fmean(drafts)
            yield row


if __name__ == "__main__":
    cli(main)
