"""
Check that loopgraft does on this GPU what it does on the CPU, and how fast. Each part takes less
than 8 minutes by estimate, and prints a line as soon as it knows it.

    bash runs/gpu_check.sh --part correct

torch calls every card "cuda", those of AMD too.
"""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from common import opening
from model import Config, RecurrentLM, find_checkpoint
from muon import Optimizer
from sample import Decoder, Decoding
from tiny_corpus import tiny

GPU = torch.cuda.is_available()
CARDS = torch.cuda.device_count()
DEVICE = "cuda:0" if GPU else "cpu"
SMALL = Config(512, 128, 4, 2, 352, 1, 2, 1, context=512, state_std=1.0)
# As training: heads of 64, 8 of q to one of k and v, rows of 1,024 tokens.
LONG = Config(512, 512, 8, 1, 1408, 1, 2, 1, context=1024, state_std=1.0)
LARGE = Config(32000, 2048, 32, 4, 5632, 4, 8, 4) if GPU else SMALL  # TinyLlama after surgery
DEPTHS = 4, 32
UPDATES = 30
TOKENS = 64
SCRATCH = tempfile.TemporaryDirectory(dir="out/gpu_check")  # gone at the end
FOLDER = SCRATCH.name
ROWS = []


def add(check, value, wanted="", ok=None):
    """Print a row of the table. ok: whether the value is as wanted, or None for a measurement."""
    ROWS.append({"check": check, "value": value, "wanted": wanted, "ok": ok})
    short = f"{value:.4g}" if isinstance(value, float) else str(value)
    verdict = {True: "ok", False: "FAILED", None: ""}[ok]
    print(f"{check:50s} {short:>12.60s}  {wanted!s:10s} {verdict}", flush=True)


def below(check, value, limit):
    add(check, value, f"< {limit:.2g}", value < limit)


def check_driver():
    """pip's torch is for one version of CUDA, and without its driver all would run on the CPU."""
    hidden = not GPU and any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd")))
    if hidden:
        add("torch finds the GPU of this machine", False, "see README", False)


# --------------------------------------------------------------------------------- is it right?

def small(device, dtype, config=None, T=128):
    """A fixed random model, by default SMALL, and tokens, targets (4, T) and s_0 that fit."""
    c = config or SMALL
    model = RecurrentLM(c)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(seed=0)
    idx = torch.randint(c.vocab_size, (4, T + 1), generator=generator)
    state = torch.randn(4, T, c.n_embd, generator=generator)
    return model.to(device, dtype), *(t.to(device) for t in (idx[:, :-1], idx[:, 1:], state))


def logits(device, dtype):
    model, idx, _, state = small(device, dtype)
    states = model.trajectory(idx, [1, *DEPTHS], state)
    return torch.stack([model.finish(s) for _, s in states]).cpu()


def make_update(device, dtype):
    """An optimizer, and a function that makes one update -> the norm of the gradient."""
    model, idx, targets, state = small(device, torch.float32)
    exact = {name: p.data for name, p in model.named_parameters()}
    optimizer = Optimizer(model.to(dtype).named_parameters(), lr=0.01, adam_lr=0.01,
                          weight_decay=0.0, clip=1.0, weights=exact)

    def update():
        model(idx, targets, (4, 4), state)[1].backward()
        optimizer.accumulate()
        return optimizer.step(optimizer.reduce().item())

    return optimizer, update


def change(device, dtype):
    """What one update changes, and the norm of its gradient."""
    optimizer, update = make_update(device, dtype)
    before = [w.clone() for w in optimizer.masters.values()]
    norm = update()
    changes = [w - b for w, b in zip(optimizer.masters.values(), before)]
    return torch.cat([c.flatten() for c in changes]).cpu(), norm


def relative(found, exact):
    """How far tensors are from the exact ones."""
    return ((found.cpu() - exact).norm() / exact.norm()).item()


def check_oracles():
    """Logits and an update against the CPU's in float32; in bfloat16 as near as the CPU comes."""
    exact = logits("cpu", torch.float32)
    update, norm = change("cpu", torch.float32)

    def errors(device, dtype):
        changes, its_norm = change(device, dtype)
        yield relative(logits(device, dtype), exact)
        yield abs(its_norm - norm) / max(norm, 1e-9)
        yield (1 - F.cosine_similarity(changes, update, 0)).item()

    names = "logits", "gradient norm", "update"
    near = [1.5 * error + 0.005 for error in errors("cpu", torch.bfloat16)]
    for dtype, limits in ((torch.float32, [1e-4, 1e-4, 0.02]), (torch.bfloat16, near)):
        for name, error, limit in zip(names, errors(DEVICE, dtype), limits):
            below(f"{name}, {dtype}, error", error, limit)
        twice = [change(DEVICE, dtype)[0] for _ in range(2)]
        add(f"update, {dtype}, twice the same bits", torch.equal(*twice))


def gradient(device, dtype, budget=0, **options):
    """The loss of LONG at (4, 4), and its gradient. budget: of activations; 0: not compiled."""
    model, idx, targets, state = small(device, dtype, LONG, LONG.context)
    if budget:
        torch.compiler.reset()
        functorch_config.activation_memory_budget = budget
        model.compile_parts()
    _, loss = model(idx, targets, (4, 4), state, **options)
    loss.backward()
    return loss.detach().cpu(), torch.cat([p.grad.flatten().cpu() for p in model.parameters()])


def check_update():
    """A compiled update of the kind that training makes, against float32's on the CPU."""
    exact = gradient("cpu", torch.float32)
    near = gradient("cpu", torch.bfloat16)
    ways = {"eager": {}, "compiled": {"budget": 1.0}, "compiled, budget 0.5": {"budget": 0.5},
            "compiled, recompute": {"budget": 1.0, "recompute": True}}
    for way, options in ways.items():
        found = gradient(DEVICE, torch.bfloat16, **options)
        for name, a, b, c in zip(("loss", "gradient"), found, near, exact):
            below(f"{name} of rows of {LONG.context}, {way}, error", relative(a, c),
                  1.5 * relative(b, c) + 0.005)


def check_attention():
    """
    Which kernel SDPA picks where we call it. MATH would store the scores of all pairs, and cuDNN
    would plan each of the many shapes of decoding anew.
    """
    picked = []
    actual = F.scaled_dot_product_attention

    def spy(q, k, v, mask=None, **flags):
        choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, **flags)
        picked.append(SDPBackend(choice).name.removesuffix("_ATTENTION"))
        return actual(q, k, v, mask, **flags)

    with mock.patch.object(F, "scaled_dot_product_attention", spy):
        for dtype in (torch.bfloat16, torch.float32):
            torch.backends.cuda.enable_cudnn_sdp(True)  # as in a new process
            model, idx, targets, state = small(DEVICE, dtype)
            mask = torch.ones(4, 1, 128, 128, dtype=torch.bool, device=DEVICE).tril()
            uses = {
                "training": lambda: model(idx, targets, (0, 1), state)[1].backward(),
                "eval_lm.py": lambda: list(model.trajectory(idx, [1], state, mask=mask)),
                "decoding": lambda: list(Decoder(model).generate([[1, 2, 3]], 2, 1)),
            }
            for use, run in uses.items():
                run()
                unwanted = {"MATH", "CUDNN"} if use == "decoding" else {"MATH"}
                add(f"attention of {use}, {dtype}", ", ".join(sorted(set(picked))),
                    f"not {', '.join(sorted(unwanted))}", not unwanted & set(picked))
                picked.clear()


def check_decoding():
    """Every way gives the tokens of the CPU, to the end of the context. One row ends early."""
    prompts = [[*range(1, n)] for n in (5, 20, 40)]

    def ends(row, token):
        return row == 1 and token == 7

    def tokens(decoder, **way):
        rows = [[] for _ in prompts]
        new = SMALL.context - len(prompts[-1])
        for row, token, _ in decoder.generate(prompts, new, 4, ends, **way):
            rows[row].append(token)
        return sum(rows, [])

    exact = tokens(Decoder(small("cpu", torch.float32)[0]))
    for how in ("", ", compiled"):
        decoder = Decoder(small(DEVICE, torch.float32)[0], compile=bool(how))
        for name, way in {"plain": {}, "drafted": {"draft_steps": 2}}.items():
            same = tokens(decoder, **way) == exact
            add(f"{len(exact)} tokens, {name}{how}, are the CPU's", same, True, same)


@torch.inference_mode()
def check_bfloat16():
    """Compiled and recorded, steps in bfloat16 are as near to float32 as forward() is."""
    B, T = 4, 32
    idx = small(DEVICE, torch.float32)[1][:, :T]

    def whole(device, dtype):
        model = small(device, dtype)[0]
        s_0 = model.initial_state(1, T, 0).expand(B, -1, -1)
        return model(idx.to(device), steps=4, state=s_0)[0]

    exact = whole("cpu", torch.float32)
    decoder = Decoder(small(DEVICE, torch.bfloat16)[0], compile=True)
    decoder.make_room(4, B, T, Decoding())
    steps = []
    for p in range(T):
        position = torch.full((B,), p, device=DEVICE)
        steps.append(decoder.next_logits(idx[:, p], position, p + 1).clone())
    limit = 1.5 * relative(whole(DEVICE, torch.bfloat16), exact) + 0.005
    below("cached steps, torch.bfloat16, error", relative(torch.stack(steps, 1), exact), limit)


def check_waits():
    """How often the host waits for the GPU, by torch's own count."""
    if not GPU:
        return
    _, update = make_update(DEVICE, torch.bfloat16)
    model = small(DEVICE, torch.bfloat16)[0]
    tokens = Decoder(model).generate([[1, 2, 3]], 8, 4)
    for name, step in (("update", update), ("token", lambda: next(tokens))):
        seconds(step, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # which itself warns
            step()
            torch.cuda.set_sync_debug_mode("default")
        count = sum("called a synchronizing" in str(w.message) for w in caught)
        add(f"waits per {name}", count, 1, count == 1)


# -------------------------------------------------------------------------------- does it train?

def run(*command, signal_after=None):
    """
    A Python command -> its last line. signal_after: a log; once it has an update, the command is
    asked to stop.
    """
    p = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True,
                         stderr=subprocess.PIPE)
    while signal_after and p.poll() is None:
        if os.path.exists(signal_after) and "norm" in open(signal_after).read():
            p.send_signal(signal.SIGTERM)
            break
        time.sleep(0.01)
    said, errors = p.communicate()
    if p.returncode and not signal_after:
        raise RuntimeError(errors[-2000:])
    return said.splitlines()[-1]


def train(name, world=1, stop=False):
    """train.py on the embedded corpus, in bfloat16 and compiled -> weights, validation losses."""
    out = f"{FOLDER}/{name}"
    launcher = ()
    if world > 1:
        launcher = "-m", "torch.distributed.run", f"--nproc_per_node={world}"
    shape = "--n_embd=128 --n_head=4 --n_prelude=1 --n_core=1 --n_coda=1 --context=39"
    budget = f"--updates={UPDATES} --batch_size=64 --micro_batch=32 --save_every=10 --lr=0.01"
    steps = "--mean_recurrence=4 --backprop_depth=2 --eval_steps=1,4 --eval_every=10 --eval_rows=64"
    run(*launcher, "train.py", f"--data={FOLDER}/data/task", f"--out_dir={out}", *shape.split(),
        *budget.split(), *steps.split(), signal_after=f"{out}/log.jsonl" if stop else None)
    with open(f"{out}/log.jsonl") as f:
        entries = [json.loads(line) for line in f]
    losses = [entry["val"]["4"] for entry in entries if "val" in entry]
    return RecurrentLM.load(out).state_dict(), losses


def check_training():
    """A run that was stopped and goes on, and one on two cards, end as one that was not."""
    tiny(f"{FOLDER}/data", rows=8000)
    weights, losses = train("unbroken")
    below("validation loss after training", losses[-1], losses[0])
    train("stopped", stop=True)
    last = os.path.basename(find_checkpoint(f"{FOLDER}/stopped"))
    add("SIGTERM saves and stops", last, "early", last < f"step_{UPDATES:06d}")
    resumed, its_losses = train("stopped")
    below("resumed, its loss against the unbroken one's", abs(its_losses[-1] - losses[-1]), 0.02)
    same = all(t.equal(resumed[name]) for name, t in weights.items())
    add("... the same bits", same, "" if GPU else True, None if GPU else same)
    if CARDS == 1:
        return add("two processes", "one card: not run")
    _, its_losses = train("two", world=2)  # by NCCL; without a GPU by gloo
    below("two processes, loss against one's", abs(its_losses[-1] - losses[-1]), 0.02)


# -------------------------------------------------------------------------------- how fast is it?

def bench(command, *flags):
    """bench.py's results, on a CPU without a minute of compiling."""
    flags = f"--model={FOLDER}/random", "--dtype=bfloat16", "--repeat=2", *flags
    if not GPU:
        flags += ("--no_compile",)
    return json.loads(run("bench.py", command, *flags))


def seconds(step, repeat):
    """What step() takes, on average, after one to warm up."""
    for i in range(repeat + 1):
        if GPU and i < 2:
            torch.cuda.synchronize()
        if i == 1:
            began = time.perf_counter()
        step()
    if GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeat


def save_random():
    if os.path.exists(f"{FOLDER}/random"):
        return
    with torch.device(DEVICE):
        model = RecurrentLM(LARGE)
    model.init_weights(0)
    model.to(torch.bfloat16).save(f"{FOLDER}/random")


def expected_memory(rows):
    """GB that training at LARGE's shape takes: as a dry run says, and 2 for logits and CUDA."""
    # Memory does not depend on the number of updates, whose draws would all be counted.
    said = run("train.py", "--config=config/fig4.toml", "--dry_run", f"--micro_batch={rows}",
               "--updates=1", f"--init_from={FOLDER}/random")
    return float(re.search(r"about ([\d.]+) GB", said)[1]) + 2


def measure_training():
    """A micro-batch of the paper, or what fits, and an update, apart. The memory beside it."""
    save_random()
    rows = 8
    context = 32
    if GPU:
        total = torch.cuda.get_device_properties(0).total_memory / 1e9
        rows = next((n for n in (8, 4, 2, 1) if expected_memory(n) < total), None)
        context = 1024
    if not rows:
        return add("train, one row of 1024", "does not fit: not run")
    result = bench("train", "--optimizer=muon", "--steps=24+8", f"--batch_size={rows}",
                   f"--context={context}")
    row = result["rows"][0]
    tokens = rows * context
    micro_batch = tokens / row["tokens_per_s"] - row["update_s"]
    flops = tokens * RecurrentLM.empty(LARGE).flops_per_token((24, 8))
    add("matmul peak, TFLOP/s", result["matmul_peak"] / 1e12)
    add(f"micro-batch, {rows} rows of {context}, n=24 k=8, ms", 1e3 * micro_batch)
    add("... tokens/s", tokens / micro_batch)
    add("... share of the matmul peak (MFU)", flops / micro_batch / result["matmul_peak"])
    add("an update beside its micro-batches, ms", 1e3 * row["update_s"])
    add("compiling and the first one, s", row["first_s"])
    if GPU:
        used = row["peak_mib"] * 2**20 / 1e9
        below("GB of memory, beside the estimate", used, 1.1 * expected_memory(rows))


@torch.inference_mode()
def measure_decoding():
    """Single steps, against the time that it takes to read the weights; then whole texts."""
    save_random()
    source = torch.ones(1 << (28 if GPU else 24), device=DEVICE)
    bandwidth = 2 * source.nbytes / seconds(source.clone, 10)
    add("bandwidth of a copy, GB/s", bandwidth / 1e9)
    model = RecurrentLM.load(f"{FOLDER}/random", DEVICE)
    n = model.num_params()
    token = torch.tensor([1], device=DEVICE)
    for how in ("eager", "compiled, on a GPU recorded"):
        decoder = Decoder(model, compile=how != "eager")
        for r in DEPTHS:
            decoder.make_room(r, 1, 128, Decoding())
            began = time.perf_counter()
            decoder.next_logits(token, token, 8)
            add(f"the first step, {how}, r={r}, s", time.perf_counter() - began)
            took = seconds(lambda: decoder.next_logits(token, token, 8), 20)
            read = n["prelude"] + r * (n["adapter"] + n["core"]) + n["coda"] + n["embeddings"] / 2
            add(f"a step, {how}, r={r}, ms", 1e3 * took)
            add("... tokens/s", 1 / took)
            add("... share of the bandwidth", 2 * read / took / bandwidth)


def measure_texts():
    """Whole texts, with what one pays once for each: the prompt, and recording."""
    save_random()
    steps = ",".join(map(str, DEPTHS))
    for row in bench("decode", f"--steps={steps}", f"--tokens={TOKENS}")["rows"]:
        add(f"a text of {TOKENS} tokens, r={row['r']}, s", TOKENS / row["tokens_per_s"])


PARTS = {
    "correct": (check_driver, check_oracles, check_update, check_attention, check_waits,
                check_decoding, check_bfloat16),
    "train": (check_driver, check_training),
    "speed": (check_driver, measure_training),
    "decode": (check_driver, measure_decoding, measure_texts),
}


def main():
    parser = argparse.ArgumentParser(description=opening(__doc__),
                                     usage="gpu_check.sh [--part PART]",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="default: all of them")
    part = parser.parse_args().part
    steps = PARTS[part] if part else dict.fromkeys(sum(PARTS.values(), ()))
    began = time.time()
    for step in steps:
        print(f"\n== {step.__name__} ==  ({time.time() - began:.0f} s)", flush=True)
        try:
            step()
        except Exception as e:  # the others go on
            add(step.__name__, f"{type(e).__name__}: {e}", "no error", False)
    machine = {
        "machine": torch.cuda.get_device_name() if GPU else "CPU",
        "cards": CARDS,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "part": part,
    }
    failed = [row["check"] for row in ROWS if row["ok"] is False]
    if failed:
        print(f"\nNOT well: {len(failed)} of {len(ROWS)} lines failed: {', '.join(failed)}.")
    else:
        print(f"\nAll is well on this {'GPU' if GPU else 'CPU'}.")
    print(json.dumps(machine | {"seconds": round(time.time() - began), "rows": ROWS}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
