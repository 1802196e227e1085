"""
Measure a training step and decoding, and draw results.

    python bench.py train                     tokens/s, model FLOPs utilisation, peak memory over (n, k)
    python bench.py train --peer              the same beside transformers' Llama of the unrolled depth
    python bench.py muon                      an optimizer step: ours, torch's Muon, the official formula in a loop
    python bench.py decode --steps 1,4,32     tokens/s over r, against the memory that a token takes
    python bench.py surgery                   TinyLlama's true shape, random weights: memory and time against a plain copy
    python bench.py plot A.json B.json        accuracy or loss over r, FLOPs or updates, with error bars

Without --model both measure a 27.3M-parameter Llama of shape (2,4,2) with random weights; a token's
speed does not depend on the weights' values. Every figure is the median of repeated runs after a
warm-up, with the smallest and the largest; the last line of output is JSON. Tokens/s mean little across
different r, so the utilisation counts FLOPs: 6 per matmul parameter and token where gradients flow, 2
where they do not, plus attention, against the matmul peak that this machine shows in the same run.
"""
import argparse
import bisect
import glob
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import fields, replace

import torch

import train
from data import WORDS, Tokenizer
from model import (LOGITS_AT_ONCE, Config, InputError, Linear, RecurrentLM, cli, find_checkpoint, load_config, read_json,
                   save_folder)
from muon import Muon, newton_schulz
from sample import Decoder, Decoding, check_device, generate, parse_steps
from surgery import PRESETS, TINYLLAMA, export

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "decode"):
        p = sub.add_parser(name)
        p.add_argument("--model", help="a checkpoint folder; default: the 27.3M model, random weights")
        p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
        p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        p.add_argument("--batch_size", type=int, default=4 if name == "train" else 1)
        p.add_argument("--repeat", type=int, default=5, help="timed runs of each figure")
    p.add_argument("--steps", default="1,2,4,8,16,32", help="recurrences r")
    p.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    p.add_argument("--tokens", type=int, default=64, help="new tokens")
    p.add_argument("--ways", default="", help="settings of sample.py, such as 'kv=last;draft_steps=4,draft_len=7;int8': "
                                              "plain decoding is always the first")
    p.add_argument("--text", help="take prompts from this file, and measure the loss of what follows them")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--peer", action="store_true", help="also time transformers' Llama of as many layers, with its cache")
    p = sub.choices["train"]
    p.add_argument("--steps", default="0+4,24+8", help="n+k pairs: recurrences without and with gradient")
    p.add_argument("--context", type=int, default=256)
    p.add_argument("--optimizer", choices=("muon", "adamw"), default="adamw")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--recompute", action="store_true", help="as train.py's")
    p.add_argument("--peer", action="store_true", help="also time transformers' Llama of n + k unrolled recurrences")
    p = sub.add_parser("muon")
    p.add_argument("--model", help="as above")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--repeat", type=int, default=5)
    p = sub.add_parser("surgery")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--repeat", type=int, default=3, help="timed runs")
    p = sub.add_parser("plot")
    p.add_argument("results", nargs="+", metavar="RESULT.json", help="written by a script that measures a model")
    p.add_argument("--x", choices=("steps", "flops", "train"), default="steps",
                   help="over recurrences (default), FLOPs of a token, or updates of the training, a result a checkpoint")
    p.add_argument("--metric", help="which of the results; default: the first of the first file")
    p.add_argument("--labels", help="comma-separated names, one a file")
    p.add_argument("--out", default="accuracy.png", help=".png or .svg (needs matplotlib; else a text chart is printed)")
    args = parser.parse_args()
    for key in ("batch_size", "repeat", "context", "prompt", "tokens"):
        if getattr(args, key, 1) < 1:
            raise InputError(f"--{key} {getattr(args, key)}: must be at least 1")
    if "device" in args:
        check_device(args.device)
    {"train": bench_train, "muon": bench_muon, "decode": bench_decode, "surgery": bench_surgery,
     "plot": plot}[args.command](args)


# ---------------------------------------------------------------- measuring

def sync(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(run, repeat, device):
    """Median, smallest and largest seconds of run(), after one warm-up; and the warm-up's seconds."""
    seconds = []
    for _ in range(repeat + 1):
        sync(device)
        start = time.perf_counter()
        run()
        sync(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]), min(seconds[1:]), max(seconds[1:]), seconds[0]


def matmul_peak(device, dtype):
    """FLOP/s of a large square matrix product on random data: the ceiling of this machine."""
    n = 8192 if device.startswith("cuda") else 2048
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / timed(lambda: a @ b, 10, device)[0]


def peak_memory(device):
    """Bytes: the most allocated on the GPU, or the process's largest resident set."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load(args, dtype):
    if args.model:
        return RecurrentLM.load(args.model, dtype=dtype).to(args.device)
    model = RecurrentLM(Config(4096, 512, 8, 2, 1408, 2, 4, 2))
    model.init_weights(0)
    return model.to(args.device, dtype)


def step_flops(model, n, k, T):
    """FLOPs per token of a training step, everything counted: layers, adapter, head, causal attention."""
    c, p = model.config, model.num_params()
    attention = 2 * T * c.n_head * c.head_dim  # forward, one layer: 2 products over T/2 columns on average
    once = p["prelude"] + p["coda"] + c.vocab_size * c.n_embd + (c.n_prelude + c.n_coda) * attention / 2
    core = p["core"] + p["adapter"] + c.n_core * attention / 2
    return 6 * (once + k * core) + 2 * n * core


def headline(args, model, peak):
    c = model.config
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, {args.dtype}; matmul peak {peak / 1e9:,.0f} GFLOP/s; "
          f"({c.n_prelude},{c.n_core},{c.n_coda}), width {c.n_embd}, {model.num_params()['total']:,} parameters")
    return {"command": " ".join(sys.argv[1:]), "machine": name, "torch": torch.__version__, "dtype": args.dtype,
            "matmul_peak": peak, "rows": []}


def bench_train(args):
    """One optimizer update per timed run: forward, backward, clip, step; then once more, part by part."""
    if not re.fullmatch(r"\d+\+\d+(,\d+\+\d+)*", args.steps):
        raise InputError(f"--steps {args.steps}: write n+k pairs, such as 0+4,24+8")
    pairs = [tuple(map(int, pair.split("+"))) for pair in args.steps.split(",")]
    dtype = getattr(torch, args.dtype)
    model, B, T = load(args, torch.float32), args.batch_size, args.context
    result = headline(args, model, peak := matmul_peak(args.device, dtype))
    c = model.config
    idx = torch.randint(c.vocab_size, (B, T + 1), device=args.device)
    idx, targets = idx[:, :-1].contiguous(), idx[:, 1:].contiguous()
    depth = lambda pair: c.n_prelude + c.n_coda + sum(pair) * c.n_core
    masters = {name: p.data for name, p in model.named_parameters()}
    model.to(dtype)
    model.recompute, opt = args.recompute, Muon(model.named_parameters(), 1e-3, 5e-5, 1e-4, args.optimizer, masters)
    if not args.no_compile:
        model.compile_parts()

    def ours(pair):
        model(idx, targets, pair)[1].backward()
        opt.accumulate()
        opt.reduce()
        opt.step(1.0, 1.0)

    runs = [("nanoloop", pair, ours) for pair in pairs]
    if args.peer:
        runs += [("transformers", (0, sum(pair)), peer_update(c, depth(pair), args, idx, targets)) for pair in pairs]
    print(f"{'':14s}{'(n, k)':>9s} {'tokens/s':>9s} {'range':>15s} {'MFU':>6s} {'first step':>11s} {'peak so far':>12s}")
    for name, pair, run in runs:
        if args.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        t, fast, slow, first = timed(lambda: run(pair), args.repeat, args.device)
        row = {"name": name, "n": pair[0], "k": pair[1], "tokens_per_s": B * T / t,
               "mfu": step_flops(model, *pair, T) * B * T / t / peak, "seconds": [fast, t, slow], "first": first,
               "peak_memory": peak_memory(args.device)}
        if run is ours:
            row |= {"parts": breakdown(model, opt, idx, targets, pair, args.device),
                    "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}
        result["rows"].append(row)
        print(f"{name:14s}{str(pair):>9s} {B * T / t:9,.0f} {B * T / slow:7,.0f}-{B * T / fast:7,.0f} {row['mfu']:6.1%} "
              f"{first:9.1f} s {row['peak_memory'] / 2**20:8,.0f} MiB", flush=True)
    for row in (row for row in result["rows"] if "parts" in row):
        total = sum(row["parts"].values())
        print(f"{str((row['n'], row['k'])):>9s} " + ", ".join(f"{k} {v / total:.1%}" for k, v in row["parts"].items())
              + f"; {row['graphs']} graphs compiled so far")
    print(json.dumps(result))


def breakdown(model, opt, idx, targets, pair, device):
    """Seconds of each part of one update, waited for one by one, so that their sum may exceed an update's time."""
    parts, own = {}, {name: getattr(model, name) for name in ("run_prelude", "run_core", "run_coda")}

    def clocked(name, run):
        def wrapped(*args):
            sync(device)
            start = time.perf_counter()
            out = run(*args)
            sync(device)
            where = name + (" without gradient" if name == "core" and not torch.is_grad_enabled() else "")
            parts[where] = parts.get(where, 0.0) + time.perf_counter() - start
            return out
        return wrapped

    for name, run in own.items():
        setattr(model, name, clocked(name.removeprefix("run_"), run))
    loss = clocked("forward", model)(idx, targets, pair)[1]
    parts["head, loss and the rest"] = parts.pop("forward") - sum(parts.values())
    clocked("backward", loss.backward)()
    clocked("clip", lambda: (opt.accumulate(), opt.reduce()))()
    clocked("optimizer", opt.step)(1.0, 1.0)
    for name, run in own.items():
        setattr(model, name, run)
    return parts


def bench_muon(args):
    """One update of the model's matrices, in float32, with random gradients. A training step's share: bench.py train."""
    model = load(args, torch.float32)
    named = [(n, p) for n, p in model.named_parameters() if p.dim() == 2 and not n.startswith(("embed.", "head."))]
    grads = [torch.randn_like(p) for _, p in named]
    momenta = [torch.zeros_like(p) for _, p in named]
    ours = Muon(named, 1e-3, 5e-5, 1e-4)

    def give():
        for (_, p), g in zip(named, grads):
            p.grad = g.clone()

    @torch.no_grad()
    def loop():
        for (_, p), m in zip(named, momenta):
            m.lerp_(p.grad, 0.05)
            update = newton_schulz(p.grad.lerp(m, 0.95))
            p.mul_(1 - 1e-7).add_(update, alpha=-1e-3 * max(1, p.size(0) / p.size(1)) ** 0.5)

    runs = {"nanoloop": lambda: (ours.accumulate(), ours.reduce(), ours.step(1.0, 1.0)), "a plain loop": loop}
    if hasattr(torch.optim, "Muon"):
        runs["torch.optim.Muon"] = torch.optim.Muon([p for _, p in named], lr=1e-3, weight_decay=1e-4).step
    count, rows = sum(p.numel() for _, p in named), {}
    print(f"{len(named)} matrices, {count:,} parameters, {args.device}, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads")
    idle = timed(give, args.repeat, args.device)[0]  # making the gradients is no part of a step
    for name, run in runs.items():
        t, fast, slow, _ = timed(lambda: (give(), run()), args.repeat, args.device)
        rows[name] = [fast - idle, t - idle, slow - idle]
        print(f"{name:18s} {1e3 * (t - idle):8.1f} ms ({1e3 * (fast - idle):.1f}-{1e3 * (slow - idle):.1f})", flush=True)
    print(json.dumps({"matrices": len(named), "parameters": count, "device": args.device, "seconds": rows}))


def llama(c, depth, device):
    """transformers' Llama of `depth` layers, random weights."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise InputError("--peer needs transformers: pip install transformers")
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.n_ffn, num_hidden_layers=depth,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim)).to(device)


def peer_update(c, depth, args, idx, targets):
    """An update of llama() on the same tokens."""
    peer = llama(c, depth, args.device)
    opt = torch.optim.AdamW(peer.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)

    def update(pair):
        with torch.autocast(args.device.split(":")[0], torch.bfloat16, enabled=args.dtype != "float32"):
            loss = peer(input_ids=idx, labels=idx, shift_labels=targets, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)

    return update


def bench_decode(args):
    """
    Decoding of a prompt: new tokens per second over all rows, prefill included, against what the linear layers alone
    would allow (torch's own products, one row after another for every recurrence) or, on a GPU, reading them would.
    """
    steps, dtype, ways = parse_steps(args.steps), getattr(torch, args.dtype), parse_ways(args.ways)
    model, B = load(args, dtype).eval(), args.batch_size
    result, c = headline(args, model, matmul_peak(args.device, dtype)), model.config
    texts, ways = decode_texts(args, model), [{}] + ways  # plain: what the others are compared with
    prompts, int8 = texts[:, :args.prompt].tolist(), None
    if any("int8" in way for way in ways):
        int8 = load(args, dtype).eval()
        int8.quantise_core()
    limits = {r: linear_limit(model, r, B, args) for r in steps}
    for m in filter(None, (model, int8) if not args.no_compile else ()):
        m.compile_parts(dynamic=True)
    print(f"{'r':>4s} {'':42s} {'tokens/s':>9s} {'range':>17s} {'of limit':>9s} {'cache a token':>14s} {'as plain':>10s}"
          + f" {'loss':>8s} {'change':>17s}" * bool(args.text))
    for r, way in itertools.product(steps, ways):
        options = {k: v for k, v in way.items() if k != "int8"}
        if options.get("draft_steps", 0) >= r and "draft_steps" in options:
            continue
        m, found = int8 if "int8" in way else model, []

        def run():
            found[:] = sorted(generate(m, prompts, args.tokens, r, **options), key=lambda event: event[0])

        t, fast, slow, _ = timed(run, args.repeat, args.device)
        rate, took = [B * args.tokens / x for x in (slow, t, fast)], [event[2] for event in found]
        tokens = torch.tensor([event[1] for event in found]).view(B, -1)
        plain = tokens if not way else plain
        slots = c.n_prelude + Decoder.count(options.get("kv", "full"), r) * c.n_core + c.n_coda
        row = {"r": r, "way": way, "tokens_per_s": rate[1], "range": rate[::2], "of_limit": rate[1] / limits[r],
               "cache_bytes_per_token": 2 * slots * c.n_kv_head * c.head_dim * dtype.itemsize,
               "mean_steps": sum(took) / len(took), "same_texts": (tokens == plain).all(1).sum().item(),
               "peak_memory": peak_memory(args.device)}
        if args.text and not way.keys() & {"draft_steps", "exit"}:  # drafts change nothing; of exits: eval_gsm8k.py
            losses = forced_losses(m, texts, args.prompt, r, options)
            full = losses if not way else full
            change = losses - full
            row |= {"loss": losses.mean().item(), "loss_change": change.mean().item(),
                    "loss_change_se": (change.std() / len(change) ** 0.5).item()}
        result["rows"].append(row)
        name = ", ".join(f"{k}={v}" if v else k for k, v in way.items()) or "plain"
        name += f" ({row['mean_steps']:.1f} steps)" if "exit" in way else ""
        print(f"{r:4d} {name:42s} {rate[1]:9,.1f} "
              f"{rate[0]:8,.1f}-{rate[2]:8,.1f} {row['of_limit']:9.0%} {row['cache_bytes_per_token']:8,d} bytes "
              f"{row['same_texts']:4d} of {B:2d} "
              + (f"{row['loss']:8.4f} {row['loss_change']:+9.4f} ±{row['loss_change_se']:.4f}" if "loss" in row else ""),
              flush=True)
    for r in steps if args.peer else ():
        peer = llama(c, c.n_prelude + r * c.n_core + c.n_coda, args.device).to(dtype).eval()
        ask = dict(attention_mask=torch.ones(B, args.prompt, device=args.device), do_sample=False, pad_token_id=0,
                   min_new_tokens=args.tokens, max_new_tokens=args.tokens)
        idx = texts[:, :args.prompt].to(args.device)
        t, fast, slow, _ = timed(lambda: peer.generate(idx, **ask), args.repeat, args.device)
        rate = [B * args.tokens / x for x in (slow, t, fast)]
        result["rows"].append({"r": r, "name": "transformers", "tokens_per_s": rate[1], "range": rate[::2]})
        print(f"{r:4d} {'transformers':42s} {rate[1]:9,.1f} {rate[0]:8,.1f}-{rate[2]:8,.1f} {rate[1] / limits[r]:9.0%}")
    print(json.dumps(result))


def parse_ways(text):
    """'kv=last;draft_steps=4,draft_len=7;int8' -> [{"kv": "last"}, ...]"""
    numbers, flag = {int: int, float: float, float | None: float}, {"": ""}.__getitem__
    ways, kinds = [], {f.name: numbers.get(f.type, str) for f in fields(Decoding)} | {"int8": flag}
    for way in filter(None, text.split(";")):
        ways.append({})
        for key, _, value in (pair.partition("=") for pair in filter(None, way.split(","))):
            try:
                ways[-1][key] = kinds[key](value)
            except (KeyError, ValueError):
                raise InputError(f"--ways: {key}={value}: write settings of sample.py, such as 'kv=last;draft_steps=4'")
        Decoding(**{key: value for key, value in ways[-1].items() if key != "int8"})  # what makes no sense is said now
    return ways


def decode_texts(args, model):
    """(B, prompt + tokens) ids: of --text, else random."""
    shape, generator = (args.batch_size, args.prompt + args.tokens), torch.Generator().manual_seed(0)
    if not args.text:
        return torch.randint(model.config.vocab_size, shape, generator=generator)
    if not model.folder:
        raise InputError("--text: needs --model, for its tokenizer")
    try:
        with open(args.text, encoding="utf-8") as f:
            text = f.read(100 * math.prod(shape) + 100)
    except UnicodeDecodeError as e:
        raise InputError(f"--text {args.text}: is not UTF-8 text ({e})")
    ids = Tokenizer.load(model.folder).encode(text)
    if len(ids) < math.prod(shape):
        raise InputError(f"{args.text}: has {len(ids)} tokens, {math.prod(shape)} are needed: give a longer text")
    return torch.tensor(ids[:math.prod(shape)]).view(shape)


@torch.inference_mode()
def linear_limit(model, r, B, args):
    """Tokens/s of the linear layers alone: run one by one, or on a GPU read once a token."""
    weights = lambda part: [m.weight for m in part.modules() if isinstance(m, Linear)]
    core = weights(model.core) + ([model.adapter.weight] if hasattr(model, "adapter") else [])
    all_of_them = weights(model.prelude) + r * core + weights(model.coda) + [model.head.weight]
    if args.device.startswith("cuda"):
        x = torch.ones(1 << 30, device=args.device)
        bandwidth = 2 * x.nbytes / timed(x.clone, 5, args.device)[0]
        return B * bandwidth / sum(w.nbytes for w in all_of_them)
    x = {w.shape[1]: torch.randn(B, w.shape[1], dtype=w.dtype) for w in all_of_them}
    return B / timed(lambda: [torch.nn.functional.linear(x[w.shape[1]], w) for w in all_of_them], 5, args.device)[0]


@torch.inference_mode()
def forced_losses(model, texts, start, r, options):
    """The loss of each token of texts (B, T) from column `start` on, decoded from the true ones before it; one by one."""
    o, (B, T), losses = Decoding(**options), texts.shape, []
    d, texts = Decoder(model, r, B, T, o), texts.to(model.embed.weight.device)
    for i in range(start, T):
        if i == start:
            logits = d.prefill(texts[:, :start].tolist())
        else:
            logits = d.step(texts[:, i - 1], torch.full_like(texts[:, 0], i - 1), i)
        losses.append(torch.nn.functional.cross_entropy(logits, texts[:, i], reduction="none"))
    return torch.cat(losses)


def bench_surgery(args):
    """
    `surgery.py --preset tinyllama-4-8-4` as a process of its own, on a checkpoint made here and deleted after: its peak
    memory against the bytes that it writes, and its time against copying as many bytes, the source not in the page cache.
    """
    dtype = getattr(torch, args.dtype)
    with tempfile.TemporaryDirectory(prefix="nanoloop-") as folder:
        src, out, copy = (os.path.join(folder, name) for name in ("src", "out", "copy"))
        maker = multiprocessing.get_context("spawn").Process(target=synthetic, args=(src, dtype))
        maker.start(), maker.join()  # apart, as a child's peak memory begins at its parent's
        command = [sys.executable, os.path.join(HERE, "surgery.py"), src, out, "--preset", "tinyllama-4-8-4", "--overwrite"]
        seconds, copying = [], []
        for _ in range(args.repeat):
            forget(src)
            start = time.perf_counter()
            _, status, usage = os.wait4(subprocess.Popen(command, stdout=subprocess.DEVNULL).pid, 0)
            seconds.append(time.perf_counter() - start)
            if status:
                raise InputError("surgery: failed, see above")
            forget(src), forget(out)
            start = time.perf_counter()
            with open(os.path.join(out, "model.safetensors"), "rb") as a, open(copy, "wb") as b:
                while block := a.read(1 << 24):
                    b.write(block)
                b.flush()
                os.fsync(b.fileno())
            copying.append(time.perf_counter() - start)
        written = sum(entry.stat().st_size for entry in os.scandir(out))
    peak = usage.ru_maxrss * 1024
    spread = lambda x: f"{statistics.median(x):.1f} s ({min(x):.1f}-{max(x):.1f})"
    print(f"surgery of TinyLlama's shape, {args.dtype}: wrote {written / 1e9:.2f} GB, peak memory {peak / 1e9:.2f} GB "
          f"({peak / written:.2f} of it)\n{spread(seconds)}; copying as many bytes {spread(copying)}")
    print(json.dumps({"dtype": args.dtype, "written": written, "peak_memory": peak, "seconds": seconds, "copying": copying}))


def synthetic(folder, dtype):
    """A checkpoint of TinyLlama's shape in Hugging Face layout, with random weights."""
    shapes = RecurrentLM.empty(TINYLLAMA).state_shapes()
    tensors = {name: torch.empty(shape, dtype=dtype).normal_(0, 0.02) for name, shape in shapes.items()}
    save_folder(folder, *export(TINYLLAMA, tensors, dtype))


def forget(folder):
    """Drop a folder's files from the page cache, so that reading them reads the disk."""
    os.sync()
    for entry in os.scandir(folder):
        fd = os.open(entry.path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# ---------------------------------------------------------------- forecasts: train.py --dry_run

def shape(s):
    """
    Of init_from; where that is not there yet, of the run that makes it (out_dir of a file in config/), or what its name
    says: tinyllama, tinyllama-8 (layers), tinyllama-4-8-4, tinyllama-4-8-4-add. Random weights: vocabulary of the data.
    """
    sources = {preset.rsplit("-", 3)[0]: source for preset, (source, *_) in PRESETS.items()} | {
        "tiny": Config(len(WORDS), 96, 2, 2, 240, 6, 0, 0), "stories260K": Config(512, 64, 8, 4, 172, 5, 0, 0)}
    if not s.init_from:
        folder = re.sub(r":\d+$", "", s.data.split(",")[0])
        sizes = {"tiny": len(WORDS)} | {name: source.vocab_size for name, source in sources.items()}
        path, near = os.path.join(folder, "meta.json"), [size for name, size in sizes.items() if name in folder.split("/")]
        vocab = read_json(path).get("vocab_size") if os.path.exists(path) or not near else near[0]
        return Config(vocab, s.n_embd, s.n_head, s.n_kv_head, s.n_ffn, s.n_prelude, s.n_core, s.n_coda)
    if os.path.isdir(s.init_from):
        return load_config(find_checkpoint(s.init_from))
    name = os.path.basename(os.path.normpath(s.init_from))
    for path in sorted(glob.glob(os.path.join(glob.escape(HERE), "config", "*.toml"))):
        if os.path.normpath((other := train.read_settings([f"--config={path}"])).out_dir) == os.path.normpath(s.init_from):
            return shape(other)
    match = re.fullmatch(rf"({'|'.join(map(re.escape, sources))})(-\d+-\d+-\d+|-\d+)?(-[a-z]+)?", name)
    if not match:
        raise InputError(f"--init_from={s.init_from}: no such folder, and its name does not tell a shape: make it first")
    source, sizes = sources[match[1]], [int(n) for n in (match[2] or "").split("-")[1:]]
    prelude, core, coda = sizes if len(sizes) == 3 else (*(sizes or [source.n_prelude]), 0, 0)
    return replace(source, n_prelude=prelude, n_core=core, n_coda=coda, tie_embeddings=source.tie_embeddings and not core,
                   adapter="add" if match[3] == "-add" else "linear")


def paper_flops(s, net, updates=None):
    """
    6 N1 D + 2 N2 D of the first `updates` (default: all), as the paper's figures count them: by the scheduled r, not by the
    draws, of mean r + 1. Their curriculum has edges up to an update off the true one, ceil(R f(u / W)): r covers
    [int(finv((r-1)/R) W), int(finv(r/R) W)), W = int(warmup * total); the file of Figure 13 has older ones, ceil((r-1) W/R).
    """
    R, flat, done = s.mean_recurrence, replace(s, curriculum="none"), s.updates if updates is None else updates
    W = 0 if s.curriculum == "none" else int(s.curriculum_warmup * s.updates)
    edges = [int((r / R if s.curriculum == "linear" else 1 - (1 - r / R)**2) * W) for r in range(1, R + 1)]
    rs = ((u, min(R, 1 + bisect.bisect_right(edges, u))) for u in range(done))
    steps = Counter((r - k, k) for u, r in rs for k in [min(r, train.backprop_depth(flat, u))])
    return s.batch_size * s.context * sum(count * net.flops_per_token(nk) for nk, count in steps.items())


def saved_bytes(c, B, T, k, e=4, fused=False, recompute=False):
    """
    Bytes that a micro-batch keeps for its backward pass, e bytes a number (2: weights cast to bf16), from what autograd
    saves, within 3 %. Of a token, C wide, q and kv wide in the heads: an RMSNorm its input in float32 and the normalised,
    (4 + e) C; inputs of qkv and fc 2 e C; attention qkv (v is a view of it), rotated q and k, output and its reordered copy
    e (4 q + 3 kv); the MLP gate and up, silu(gate), product 4 e F; OLMo-2's norms of q and k the same as others, but that
    in float32 their input is qkv itself; 1/rms, logsumexp. A recurrence: and the adapter's input 2 e C. The loss: gradients
    of the head's input and weight. fused (compiled): norms keep e C, no silu(gate). recompute: one recurrence at a time."""
    C, q, kv = c.n_embd, c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    norms, norm, mlp = 4 if c.norm == "sandwich" else 2, e if fused else 4 + e, 3 if fused else 4
    layer = norms * norm * C + e * (2 * C + 4 * q + 3 * kv + mlp * c.n_ffn) + 4 * (norms + c.n_head)
    layer += (c.norm == "post") * ((0 if fused else 4 if e == 4 else 6) * (q + kv) + 8)
    core = bool(c.n_core) * (c.n_core * layer + (c.adapter == "linear") * 2 * e * C)
    core = min(k, 1) * core + k * e * C if recompute else k * core
    return B * T * ((c.n_prelude + c.n_coda) * layer + core + (norm + e) * C) + 4 * c.vocab_size * C


def plan(s, c, ranks=1, say=print):
    """Print parameters, budget, schedules and the memory of each of `ranks` devices."""
    net, tokens, e = RecurrentLM.empty(c), s.batch_size * s.context, 2 if s.dtype == "bfloat16" else 4
    n, (A, B) = net.num_params(), train.split_batch(s, ranks)
    k = min(s.backprop_depth or s.mean_recurrence, s.mean_recurrence)
    train.match_updates(s, net.flops_per_token((s.mean_recurrence - k, k)))
    say(f"model: ({c.n_prelude},{c.n_core},{c.n_coda}) layers, width {c.n_embd}, {n['total']:,} parameters: "
        + ", ".join(f"{part} {x:,}" for part, x in n.items() if x and part != "total"))
    say(f"budget: {s.updates:,} updates of {tokens:,} tokens ({ranks} x {A} x {B} rows of {s.context}), "
        f"{s.updates * tokens:.4g} tokens, {paper_flops(s, net):.4g} training FLOPs by the paper's rule")
    if c.n_core:
        rs = (train.mean_recurrence(s, u) for u in range(s.updates))
        *runs, (R, last) = [(r, len(list(same))) for r, same in itertools.groupby(rs)]
        text = [f"{r} x {count:,}, " for r, count in runs]
        text = "".join(text[:3] + ["... "] + text[-1:] if len(text) > 7 else text) + f"{R} from update {s.updates - last:,}"
        rise = f"2 to {k} over {math.ceil(s.backprop_warmup * s.updates):,} updates" if s.backprop_warmup else k
        say(f"curriculum: mean r {text}, at the end {R + (s.recurrence_sampler != 'fixed')} in truth; k {rise}, at most r")
    W, D = (math.ceil(x * s.updates) for x in (s.warmup, s.cooldown))
    say(f"learning rate: {s.lr:g} ({s.optimizer})" + (f" and {s.adam_lr:g} (the rest)" if s.optimizer == "muon" else "")
        + f", up over {W:,} updates, " + (f"cosine from {max(W, s.updates - D):,} on, " if D else "then constant, ")
        + f"x {train.lr_factor(s, s.updates - 1):.3g} at the end")
    # Muon: one buffer a matrix (norms: rounding), else two. Gradients: one being made, and accumulate()'s tree of sums.
    matrices = (s.optimizer == "muon") * (n["prelude"] + n["core"] + n["coda"] + n["adapter"])
    parts = {"weights": n["total"] * e,
             "gradients": n["total"] * (e + max(4 * (m >> 1).bit_count() + e * (m & 1) for m in range(A))),
             "master weights and optimizer": ((12 if e == 2 else 8) * n["total"] - 4 * matrices) / ranks,
             "activations": saved_bytes(c, B, s.context, k, e, s.compile, s.recompute),
             "logits": min(LOGITS_AT_ONCE, B * s.context * c.vocab_size) * (4 + 2 * e) + 4 * c.vocab_size * c.n_embd}
    if s.distill_from:
        other = load_config(find_checkpoint(s.distill_from))
        parts["teacher"] = RecurrentLM.empty(other).num_params()["total"] * e
        parts["logits"] = 5 * B * s.context * c.vocab_size * 4  # all at once: two of logits, two of log p, a gradient
    say(f"memory a device: {sum(parts.values()) / 1e9:.1f} GB: " + ", ".join(f"{p} {b / 1e9:.2f}" for p, b in parts.items()))


# ---------------------------------------------------------------- drawing

def token_flops(config, r):
    """FLOPs of a new token at r: 2 per parameter that it meets, once a recurrence in core and adapter; no attention."""
    n = RecurrentLM.empty(config).num_params()
    return 2 * (n["prelude"] + r * (n["core"] + n["adapter"]) + n["coda"] + config.vocab_size * config.n_embd)


def updates_of(folder):
    """The updates after which a checkpoint was saved: its name's, step_N, or its train.json's; None of one never trained."""
    if match := re.fullmatch(r"step_(\d+)", os.path.basename(folder)):
        return int(match[1])
    path = os.path.join(folder, "train.json")
    return read_json(path).get("update") if os.path.exists(path) else None


def read_curves(args):
    """
    (title, curves, flats, hard) of the files: curves {label: sorted [(x, value, standard error)]}; flats {label: (value,
    standard error)}, what has no x: a feed-forward model has no r, and an untouched one no updates; hard {label: {"label,
    r = 4": [(difficulty, value, standard error)]}}.
    """
    results, curves, flats, hard = [read_json(path) for path in args.results], {}, {}, {}
    for path, result in zip(args.results, results):
        rows = result.get("results")
        kinds, wanted = [type(result.get(key)) for key in ("model", "config", "results")], {"steps", "metric", "value"}
        if kinds != [str, dict, list] or not rows or not all(isinstance(x, dict) and wanted <= x.keys() for x in rows):
            raise InputError(f"{path}: holds no results: give files that eval_gsm8k.py wrote, or another measuring script")
    metric = args.metric or results[0]["results"][0]["metric"]
    folders = [os.path.normpath(result["model"]) for result in results]
    runs = [os.path.dirname(f) if re.fullmatch(r"step_\d+", os.path.basename(f)) else f for f in folders]
    labels = args.labels.split(",") if args.labels else [os.path.basename(run) for run in runs]
    if len(labels) != len(results):
        raise InputError(f"--labels: {len(labels)} names for {len(results)} files")
    if not args.labels and args.x != "train" and len(set(labels)) < len(labels):
        labels = [os.path.relpath(folder, os.path.commonpath(folders)) if len(set(folders)) > 1 else path
                  for folder, path in zip(folders, args.results)]
    for path, result, folder, label in zip(args.results, results, folders, labels):
        try:
            config, rows = Config(**result["config"]), [row for row in result["results"] if row["metric"] == metric]
        except TypeError as e:
            raise InputError(f"{path}: its config is not of this version's models ({e}): measure again")
        if not rows:
            has = ", ".join(dict.fromkeys(row["metric"] for row in result["results"]))
            raise InputError(f"{path}: holds no {metric}, but {has}: choose with --metric")
        updates = updates_of(folder) if args.x == "train" else None
        if args.x == "train" and updates is None and config.n_core:
            raise InputError(f"{path}: its model {folder} is no step_N and has no train.json: it has no place on --x train")
        for row in rows:
            name = f"{label}, {row['task']}" if "task" in row else label  # a file of several tasks
            value = row["value"], row.get("standard_error") or 0.0
            if args.x == "train" and config.n_core:
                name += f", r = {row['steps']}"
            x = {"steps": row["steps"] if config.n_core else None, "flops": token_flops(config, row["steps"]),
                 "train": updates}[args.x]
            if x is None or (args.x == "flops" and not config.n_core):
                flats[name] = value
            if x is not None:
                curves.setdefault(name, []).append((x, *value))
            if args.x == "steps" and "by_difficulty" in row:  # the x axis: what is no number has no place there
                hard.setdefault(name, {})[f"{name}, r = {x}" if config.n_core else name] = sorted(
                    (int(d), *v[:2]) for d, v in row["by_difficulty"].items() if d.isdecimal())
    first, row = results[0], next(row for row in results[0]["results"] if row["metric"] == metric)
    title = f"{metric} on {first.get('data') or first.get('task')}" + (f" (n = {row['n']})" if "n" in row else "")
    return title, {name: sorted(points) for name, points in curves.items()}, flats, hard


AXES = {"steps": "recurrences r at test time", "flops": "FLOPs of a new token", "train": "updates of the training"}


def plot(args):
    """
    Results over r, FLOPs or updates, models without an x as lines; over r also by difficulty, where they have it; or the
    figures of a file of runs/study/results.
    """
    if os.path.splitext(args.out)[1] not in (".png", ".svg"):
        raise InputError(f"--out {args.out}: write .png or .svg")
    if len(args.results) == 1 and (figures := read_json(args.results[0]).get("figures")):
        return draw(figures, args.out, lambda: print(f"the numbers are in {args.results[0]}"))
    title, curves, flats, hard = read_curves(args)
    names = list(dict.fromkeys([*curves, *flats]))
    values = [y for curve in curves.values() for _, y, _ in curve] + [y for y, _ in flats.values()]
    figure = {"title": "", "x": AXES[args.x], "y": title, "curves": curves, "flats": flats,
              "share": not title.startswith("loss") and max(values) <= 1,
              "styles": {name: {"color": f"C{i}"} for i, name in enumerate(names)}}
    if args.x != "train" and curves:
        figure["x_log"] = 2 if args.x == "steps" else 10
    figures = [figure]
    if hard:
        styles = {label: {"color": f"C{i}", "alpha": 0.25 + 0.75 * j / len(hard[name]),  # deeper is darker
                          "ls": "--" if label in flats else "-", "marker": None}
                  for i, name in enumerate(names) if name in hard for j, label in enumerate(hard[name], 1)}
        figures += [figure | {"x": "difficulty", "y": "", "styles": styles, "flats": {}, "x_log": None,
                              "curves": {label: points for own in hard.values() for label, points in own.items()}}]
    draw(figures, args.out, lambda: text_chart(curves, flats, title, AXES[args.x], hard))


def draw(figures, out, without):
    """
    A picture of panels {"title", "x", "y", "curves": {label: [(x, y, error), ...]}}, and perhaps "flats": {label: (y,
    error)}, lines; "x_log": base, "y_log", "share": y from 0 to 1, "styles": {label: matplotlib's}. without(): in its place.
    """
    try:
        import matplotlib
    except ImportError:
        print("note: a text chart; for a picture: pip install matplotlib")
        return without()
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    columns, shown = 2 if len(figures) == 4 else min(3, len(figures)), None
    rows = -(-len(figures) // columns)
    fig, axes = plt.subplots(rows, columns, figsize=(4.8 * columns, 3.9 * rows), squeeze=False)
    for ax, figure in zip(axes.flat, figures):
        curves, base = figure["curves"], figure.get("x_log")
        flats, styles = figure.get("flats", {}), figure.get("styles", {})
        for i, (name, points) in enumerate(curves.items()):
            x, y, error = zip(*points)
            style = {"color": f"C{i}", "marker": "o"} | styles.get(name, {})
            ax.errorbar(x, y, error if any(error) else None, ms=3, lw=1.2, capsize=2, label=name, **style)
        for name, (y, error) in flats.items():
            style = styles.get(name, {})
            ax.axhline(y, ls="--", label=None if name in curves else name, **style)
            ax.axhspan(y - error, y + error, alpha=0.15, **style)
        if base:
            ax.set_xscale("log" if all(x for points in curves.values() for x, *_ in points) else "symlog", base=base)
        if base == 2:
            ax.xaxis.set_major_formatter("{x:.0f}")
        if figure.get("y_log"):
            ax.set_yscale("log")
        if figure.get("share"):
            ax.set_ylim(0, 1.03)
        ax.set(xlabel=figure["x"], ylabel=figure["y"], title=figure["title"])
        ax.grid(alpha=0.3)
        if (names := [*curves, *flats]) and names != shown:  # the same arms need no second legend
            ax.legend(fontsize=7)
        shown = names
    fig.tight_layout()
    fig.savefig(out, dpi=110)
    print(f"wrote {out}")


def text_chart(curves, flats, title, axis, hard):
    """The same in the terminal: one bar of up to 50 columns for each point."""
    most = max([1.0, *(value for points in curves.values() for _, value, _ in points), *(v for v, _ in flats.values())])
    print(f"{title}, over {axis}")
    for name in dict.fromkeys([*curves, *flats]):
        print(name)
        for x, value, error in curves.get(name) or [("-", *flats[name])]:
            x = x if isinstance(x, str) else f"{x:.3g}" if x >= 1e6 else str(x)
            print(f"  {x:>8s} {value:.3f} ± {error:.3f} {'█' * round(50 * max(value, 0) / most)}")
    hard = {label: points for own in hard.values() for label, points in own.items()}
    difficulties = sorted({d for points in hard.values() for d, *_ in points})
    if difficulties:
        print(f"\n{'by difficulty':22s}" + "".join(f"{d:6d}" for d in difficulties))
    for label, points in hard.items():
        values = {d: value for d, value, _ in points}
        print(f"{label:22s}" + "".join(f"{values[d]:6.2f}" if d in values else "     -" for d in difficulties))


if __name__ == "__main__":
    cli(main)
