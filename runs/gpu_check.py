"""
Check that loopgraft computes the same on this GPU as on the CPU, and measure its speed. Each part
should take less than 8 minutes and prints every result when it is available.

    bash runs/gpu_check.sh --part correct

torch calls every GPU "cuda", AMD's as well.
"""
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Parser, cli, opening
from model import Config, RecurrentLM, find_checkpoint
from muon import Optimizer
from runs.tiny_corpus import tiny
from sample import Decoder, Decoding

GPU = torch.cuda.is_available()
GPU_COUNT = torch.cuda.device_count()
DEVICE = "cuda:0" if GPU else "cpu"
SMALL = Config(
    vocab_size=512,
    n_embd=128,
    n_head=4,
    n_kv_head=2,
    n_ffn=352,
    n_prelude=1,
    n_core=2,
    n_coda=1,
    context=512,
    state_std=1.0,
)
LONG = Config(  # as in training: head size 64, 8 query heads for a kv head, rows of 1,024 tokens
    vocab_size=512,
    n_embd=512,
    n_head=8,
    n_kv_head=1,
    n_ffn=1408,
    n_prelude=1,
    n_core=2,
    n_coda=1,
    context=1024,
    state_std=1.0,
)
TINYLLAMA = Config(  # after surgery
    vocab_size=32000,
    n_embd=2048,
    n_head=32,
    n_kv_head=4,
    n_ffn=5632,
    n_prelude=4,
    n_core=8,
    n_coda=4,
)
LARGE = TINYLLAMA if GPU else SMALL
DEPTHS = 4, 32
UPDATES = 30
TOKENS = 64
# For data and models. main() creates this folder, and deletes it at the end.
FOLDER = f"out/gpu_check/{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
ROWS = []


def report(check, value, wanted="", ok=None):
    """
    Add a line to ROWS and print it. wanted: what the value should be; ok: whether it is, or None
    for a measurement.
    """
    ROWS.append({"check": check, "value": value, "wanted": wanted, "ok": ok})
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    verdict = {True: "ok", False: "FAILED", None: ""}[ok]
    print(f"{check:50s} {text:>12.60s}  {wanted!s:10s} {verdict}", flush=True)


def report_below(check, value, limit):
    """Report a value that should be below a limit."""
    report(check, value, f"< {limit:.2g}", value < limit)


def check_driver():
    """
    Report a GPU that torch cannot use. pip's torch is built for one CUDA version, and without its
    driver everything would run on the CPU.
    """
    has_gpu = os.path.exists("/dev/nvidia0") or os.path.exists("/dev/kfd")
    if has_gpu and not GPU:
        report("torch finds the GPU of this machine", False, "see README", False)


# --------------------------------------------------------------------------------- is it right?

def small(device, dtype, config=None, T=128):
    """
    Return a fixed random model of a Config (SMALL by default), and idx, targets, both (4, T) int64,
    and s_0 (4, T, C).
    """
    c = config or SMALL
    model = RecurrentLM(c)
    model.init_weights(seed=0)
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(c.vocab_size, (4, T + 1), generator=generator)
    state = torch.randn(4, T, c.n_embd, generator=generator)
    return (
        model.to(device, dtype),
        idx[:, :-1].to(device),
        idx[:, 1:].to(device),
        state.to(device),
    )


def logits(device, dtype):
    """Return the logits of the small model at r = 1, 4 and 32, (3, 4, T, V), on the CPU."""
    model, idx, _, state = small(device, dtype)
    states = model.trajectory(idx, [1, *DEPTHS], state)
    return torch.stack([model.finish(s) for _, s in states]).cpu()


def make_update(device, dtype):
    """
    Return an optimizer of the small model, and a function that makes one update and returns the
    norm of the gradient.
    """
    model, idx, targets, state = small(device, torch.float32)
    exact = {name: p.data for name, p in model.named_parameters()}
    model.to(dtype)
    optimizer = Optimizer(
        model.named_parameters(),
        lr=0.01,
        adam_lr=0.01,
        weight_decay=0.0,
        clip=1.0,
        weights=exact,
    )

    def update():
        _, loss = model(idx, targets, (4, 4), state)
        loss.backward()
        optimizer.accumulate()
        return optimizer.step(optimizer.reduce().item())

    return optimizer, update


def change(device, dtype):
    """Make one update. Returns the change of all weights, on the CPU, and the gradient's norm."""
    optimizer, update = make_update(device, dtype)
    before = [w.clone() for w in optimizer.masters.values()]
    norm = update()
    changes = []
    for w, old in zip(optimizer.masters.values(), before):
        changes.append((w - old).flatten())
    return torch.cat(changes).cpu(), norm


def relative(found, exact):
    """Return the relative error of a tensor, by the 2-norm."""
    return ((found.cpu() - exact).norm() / exact.norm()).item()


def bfloat16_limit(cpu_error):
    """Return the limit of an error in bfloat16, given the CPU's own error in bfloat16."""
    return 1.5 * cpu_error + 0.005


def check_oracles():
    """
    Compare logits and an update with the CPU's in float32. In bfloat16 the error may be 1.5 times
    the CPU's own.
    """
    exact = logits("cpu", torch.float32)
    exact_change, exact_norm = change("cpu", torch.float32)

    def errors(device, dtype):
        found, norm = change(device, dtype)
        return {
            "logits": relative(logits(device, dtype), exact),
            "gradient norm": abs(norm - exact_norm) / max(exact_norm, 1e-9),
            "update": (1 - F.cosine_similarity(found, exact_change, 0)).item(),
        }

    limits = {
        torch.float32: {"logits": 1e-4, "gradient norm": 1e-4, "update": 0.02},
        torch.bfloat16: {},
    }
    for name, error in errors("cpu", torch.bfloat16).items():
        limits[torch.bfloat16][name] = bfloat16_limit(error)
    for dtype, limit in limits.items():
        for name, error in errors(DEVICE, dtype).items():
            report_below(f"{name}, {dtype}, error", error, limit[name])
        first, _ = change(DEVICE, dtype)
        second, _ = change(DEVICE, dtype)
        report(f"update, {dtype}, twice the same bits", first.equal(second))


def gradient(device, dtype, budget=0, **options):
    """
    Return the loss of LONG at (n, k) = (4, 4), and its gradient, both on the CPU. budget:
    activation budget of torch.compile; 0: do not compile. options: of RecurrentLM.forward().
    """
    model, idx, targets, state = small(device, dtype, LONG, LONG.context)
    if budget:
        torch.compiler.reset()
        functorch_config.activation_memory_budget = budget
        model.compile_parts()
    _, loss = model(idx, targets, (4, 4), state, **options)
    loss.backward()
    grads = [p.grad.flatten().cpu() for p in model.parameters()]
    return loss.detach().cpu(), torch.cat(grads)


def check_update():
    """Compare compiled updates, as training makes them, with one in float32 on the CPU."""
    exact = gradient("cpu", torch.float32)
    on_cpu = gradient("cpu", torch.bfloat16)
    ways = {
        "eager": {},
        "compiled": {"budget": 1.0},
        "compiled, budget 0.5": {"budget": 0.5},
        "compiled, recompute": {"budget": 1.0, "recompute": True},
    }
    limits = [bfloat16_limit(relative(*pair)) for pair in zip(on_cpu, exact)]
    for way, options in ways.items():
        found = gradient(DEVICE, torch.bfloat16, **options)
        errors = [relative(*pair) for pair in zip(found, exact)]
        for name, error, limit in zip(("loss", "gradient"), errors, limits):
            report_below(f"{name} of rows of {LONG.context}, {way}, error", error, limit)


def check_attention():
    """
    Report which kernel SDPA picks where we call it. MATH would store the scores of all pairs, and
    cuDNN would plan again for each of the many shapes of decoding.
    """
    picked = []
    actual = F.scaled_dot_product_attention

    def spy(q, k, v, mask=None, **flags):
        choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, **flags)
        picked.append(SDPBackend(choice).name.removesuffix("_ATTENTION"))
        return actual(q, k, v, mask, **flags)

    def training():
        _, loss = model(idx, targets, (0, 1), state)
        loss.backward()

    def evaluation():
        mask = torch.ones(4, 1, 128, 128, dtype=torch.bool, device=DEVICE).tril()
        list(model.trajectory(idx, [1], state, mask=mask))

    def decoding():
        list(Decoder(model).generate([[1, 2, 3]], 2, 1))

    uses = {
        "training": (training, {"MATH"}),
        "eval_lm.py": (evaluation, {"MATH"}),
        "decoding": (decoding, {"MATH", "CUDNN"}),
    }
    with mock.patch.object(F, "scaled_dot_product_attention", spy):
        for dtype in (torch.bfloat16, torch.float32):
            torch.backends.cuda.enable_cudnn_sdp(True)  # as in a new process
            model, idx, targets, state = small(DEVICE, dtype)
            for use, (call, unwanted) in uses.items():
                picked.clear()
                call()
                report(
                    f"attention of {use}, {dtype}",
                    ", ".join(sorted(set(picked))),
                    f"not {', '.join(sorted(unwanted))}",
                    not unwanted & set(picked),
                )


def check_decoding():
    """
    Check that every way of decoding gives the CPU's tokens up to the end of the context, also if
    one row ends early.
    """
    prompts = [list(range(1, n)) for n in (5, 20, 40)]

    def ends(row, token):
        return row == 1 and token == 7

    def tokens(decoder, **options):
        rows = [[] for _ in prompts]
        new = SMALL.context - len(prompts[-1])
        for row, token, _ in decoder.generate(prompts, new, 4, ends, **options):
            rows[row].append(token)
        return sum(rows, [])

    model, *_ = small("cpu", torch.float32)
    exact = tokens(Decoder(model))
    for how, compiled in (("", False), (", compiled", True)):
        model, *_ = small(DEVICE, torch.float32)
        decoder = Decoder(model, compile=compiled)
        for name, options in {"plain": {}, "drafted": {"draft_steps": 2}}.items():
            same = tokens(decoder, **options) == exact
            report(f"{len(exact)} tokens, {name}{how}, are the CPU's", same, True, same)


@torch.inference_mode()
def check_bfloat16():
    """
    Check that steps in bfloat16, compiled and with a CUDA graph, are as close to float32 as
    forward() is.
    """
    B = 4
    T = 32
    r = 4
    _, idx, *_ = small(DEVICE, torch.float32)
    idx = idx[:, :T]

    def all_logits(device, dtype):
        model, *_ = small(device, dtype)
        state = model.initial_state(1, T, 0).expand(B, -1, -1)
        found, _ = model(idx.to(device), steps=r, state=state)
        return found

    exact = all_logits("cpu", torch.float32)
    model, *_ = small(DEVICE, torch.bfloat16)
    decoder = Decoder(model, compile=True)
    decoder.make_room(r, B, T, Decoding())
    steps = []
    for t in range(T):
        position = torch.full((B,), t, device=DEVICE)
        step = decoder.next_logits(idx[:, t], position, t + 1)
        steps.append(step.clone())
    error = relative(torch.stack(steps, 1), exact)
    uncached_error = relative(all_logits(DEVICE, torch.bfloat16), exact)
    limit = bfloat16_limit(uncached_error)
    report_below("cached steps, torch.bfloat16, error", error, limit)


def check_waits():
    """Check how often the host waits for the GPU, by torch's own count."""
    if not GPU:
        return
    _, update = make_update(DEVICE, torch.bfloat16)
    model, *_ = small(DEVICE, torch.bfloat16)
    tokens = Decoder(model).generate([[1, 2, 3]], 8, 4)
    for name, step in (("update", update), ("token", lambda: next(tokens))):
        seconds(step, 1)  # warms up
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # which itself warns
            step()
            torch.cuda.set_sync_debug_mode("default")
        count = sum("called a synchronizing" in str(w.message) for w in caught)
        report(f"waits per {name}", count, 1, count == 1)


# -------------------------------------------------------------------------------- does it train?

def run(*command, signal_after=None):
    """
    Run a Python command and return the last line of its output. signal_after: the path of a log;
    when it has an entry of an update, send SIGTERM. Raises RuntimeError if the command fails.
    """
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while signal_after and process.poll() is None:
        log = Path(signal_after)
        if log.exists() and "norm" in log.read_text():
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.01)
    out, errors = process.communicate()
    if process.returncode and not signal_after:
        raise RuntimeError(errors[-2000:])
    return out.splitlines()[-1]


def train(name, world=1, stop=False):
    """
    Run train.py on the task of tiny_corpus.py, in bfloat16 and compiled. world: the number of
    processes; stop: send SIGTERM after the first update. Returns the weights and the validation
    losses.
    """
    out = f"{FOLDER}/{name}"
    log = f"{out}/log.jsonl"
    launcher = []
    if world > 1:
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={world}"]
    run(
        *launcher,
        "train.py",
        f"--data={FOLDER}/data/task",
        f"--out_dir={out}",
        "--n_embd=128",
        "--n_head=4",
        "--n_prelude=1",
        "--n_core=1",
        "--n_coda=1",
        "--context=39",
        f"--updates={UPDATES}",
        "--batch_size=64",
        "--micro_batch=32",
        "--save_every=10",
        "--lr=0.01",
        "--mean_recurrence=4",
        "--backprop_depth=2",
        "--eval_steps=1,4",
        "--eval_every=10",
        "--eval_rows=64",
        signal_after=log if stop else None,
    )
    with open(log) as f:
        entries = [json.loads(line) for line in f]
    losses = [entry["val"]["4"] for entry in entries if "val" in entry]
    return RecurrentLM.load(out).state_dict(), losses


def check_training():
    """
    Check that a run that was stopped and resumed, and a run on two GPUs, end like an uninterrupted
    one.
    """
    tiny(f"{FOLDER}/data", rows=8000)
    weights, losses = train("unbroken")
    report_below("validation loss after training", losses[-1], losses[0])
    train("stopped", stop=True)
    last = os.path.basename(find_checkpoint(f"{FOLDER}/stopped"))
    report("SIGTERM saves and stops", last, "early", last < f"step_{UPDATES:06d}")

    resumed, resumed_losses = train("stopped")
    difference = abs(resumed_losses[-1] - losses[-1])
    report_below("resumed, its loss against the unbroken one's", difference, 0.02)
    same = all(t.equal(resumed[name]) for name, t in weights.items())
    if GPU:  # which may add numbers in another order
        report("... the same bits", same)
    else:
        report("... the same bits", same, True, same)

    if GPU_COUNT == 1:
        report("two processes", "not run: there is one GPU")
        return
    _, losses_of_two = train("two", world=2)  # over NCCL; without a GPU over gloo
    difference = abs(losses_of_two[-1] - losses[-1])
    report_below("two processes, loss against one's", difference, 0.02)


# -------------------------------------------------------------------------------- how fast is it?

def bench(command, *flags):
    """Run bench.py and return its JSON; on a CPU without compiling, which takes a minute."""
    more = [] if GPU else ["--no_compile"]
    line = run(
        "bench.py", command,
        f"--model={FOLDER}/random",
        "--dtype=bfloat16",
        "--repeat=2",
        *flags,
        *more,
    )
    return json.loads(line)


def seconds(step, repeat):
    """Return the mean seconds of step() over `repeat` calls, after one to warm up."""
    def synchronize():
        if GPU:
            torch.cuda.synchronize()

    step()
    synchronize()
    began = time.perf_counter()
    for _ in range(repeat):
        step()
    synchronize()
    return (time.perf_counter() - began) / repeat


def save_random():
    """Save a random model of LARGE's shape in bfloat16, unless there is one."""
    if os.path.exists(f"{FOLDER}/random"):
        return
    with torch.device(DEVICE):
        model = RecurrentLM(LARGE)
    model.init_weights(0)
    model.to(torch.bfloat16).save(f"{FOLDER}/random")


def expected_memory(rows):
    """
    Return the GB that training at LARGE's shape takes, with micro-batches of `rows`: the estimate
    of --dry_run, and 2 GB for logits and CUDA.
    """
    line = run(
        "train.py",
        "--config=config/fig4.toml",
        "--dry_run",
        f"--micro_batch={rows}",
        "--updates=1",  # memory does not depend on them, and --dry_run counts the FLOPs of all
        f"--init_from={FOLDER}/random",
    )
    estimate = re.search(r"about ([\d.]+) GB", line)
    return float(estimate[1]) + 2


def largest_micro_batch():
    """Return how many rows fit on this GPU, at most the paper's 8; 0 if not even one does."""
    total = torch.cuda.get_device_properties(0).total_memory / 1e9
    for rows in (8, 4, 2, 1):
        if expected_memory(rows) < total:
            return rows
    return 0


def measure_training():
    """
    Time a micro-batch, as large as the paper's or as fits, apart from the optimizer's update, and
    check the memory against the estimate.
    """
    save_random()
    rows = largest_micro_batch() if GPU else 8
    context = 1024 if GPU else 32
    if not rows:
        report("train, one row of 1024", "not run: it does not fit")
        return
    result = bench(
        "train",
        "--optimizer=muon",
        "--steps=24+8",
        f"--batch_size={rows}",
        f"--context={context}",
    )
    (row,) = result["rows"]
    peak = result["matmul_peak"]
    tokens = rows * context
    micro_batch = tokens / row["tokens_per_s"] - row["update_s"]
    flops = tokens * RecurrentLM.empty(LARGE).flops_per_token((24, 8))
    report("matmul peak, TFLOP/s", peak / 1e12)
    report(f"micro-batch, {rows} rows of {context}, n=24 k=8, ms", 1e3 * micro_batch)
    report("... tokens/s", tokens / micro_batch)
    report("... share of the matmul peak (MFU)", flops / micro_batch / peak)
    report("an update beside its micro-batches, ms", 1e3 * row["update_s"])
    report("compiling and the first one, s", row["first_s"])
    if GPU:
        used = row["peak_mib"] * 2**20 / 1e9
        report_below("GB of memory, beside the estimate", used, 1.1 * expected_memory(rows))


@torch.inference_mode()
def measure_decoding():
    """Time single steps, and compare them with the time that it takes to read the weights once."""
    save_random()
    source = torch.ones(1 << (28 if GPU else 24), device=DEVICE)
    bandwidth = 2 * source.nbytes / seconds(source.clone, 10)
    report("bandwidth of a copy, GB/s", bandwidth / 1e9)
    model = RecurrentLM.load(f"{FOLDER}/random", DEVICE)
    size = model.num_params()
    token = torch.tensor([1], device=DEVICE)
    # The compiled one is last, because Decoder compiles the model in place.
    for how, compiled in (("eager", False), ("compiled, on a GPU recorded", True)):
        decoder = Decoder(model, compile=compiled)

        def step():
            decoder.next_logits(token, token, 8)

        for r in DEPTHS:
            decoder.make_room(r, 1, 128, Decoding())
            began = time.perf_counter()
            step()
            report(f"the first step, {how}, r={r}, s", time.perf_counter() - began)
            took = seconds(step, 20)
            # Weights that a step reads: those of the loop r times, and of embeddings and head,
            # which have the same size, only the head's.
            read = size["prelude"] + size["coda"] + size["embeddings"] / 2
            read += r * (size["adapter"] + size["core"])
            bytes_read = 2 * read
            report(f"a step, {how}, r={r}, ms", 1e3 * took)
            report("... tokens/s", 1 / took)
            report("... share of the bandwidth", bytes_read / took / bandwidth)


def measure_texts():
    """Time whole texts, including what each costs once: the prompt, and capturing the graph."""
    save_random()
    steps = ",".join(map(str, DEPTHS))
    result = bench("decode", f"--steps={steps}", f"--tokens={TOKENS}")
    for row in result["rows"]:
        report(f"a text of {TOKENS} tokens, r={row['r']}, s", TOKENS / row["tokens_per_s"])


PARTS = {
    "correct": [
        check_driver,
        check_oracles,
        check_update,
        check_attention,
        check_waits,
        check_decoding,
        check_bfloat16,
    ],
    "train": [check_driver, check_training],
    "speed": [check_driver, measure_training],
    "decode": [check_driver, measure_decoding, measure_texts],
}


def main():
    parser = Parser(usage="gpu_check.sh [--part PART]", description=opening(__doc__))
    parser.add_argument("--part", choices=PARTS, help="default: all of them")
    args = parser.parse_args()
    if args.part:
        steps = PARTS[args.part]
    else:
        steps = dict.fromkeys(itertools.chain(*PARTS.values()))  # each once, in order
    began = time.time()
    os.makedirs(FOLDER)
    try:
        for step in steps:
            print(f"\n== {step.__name__} ==  ({time.time() - began:.0f} s)", flush=True)
            try:
                step()
            except Exception as e:  # the other checks still run
                report(step.__name__, f"{type(e).__name__}: {e}", "no error", False)
    finally:
        shutil.rmtree(FOLDER)

    failed = [row["check"] for row in ROWS if row["ok"] is False]
    if failed:
        print(f"\nFAILED: {len(failed)} of {len(ROWS)} lines: {', '.join(failed)}.")
    else:
        print(f"\nAll checks passed on this {'GPU' if GPU else 'CPU'}.")
    print(json.dumps({
        "machine": torch.cuda.get_device_name() if GPU else "CPU",
        "cards": GPU_COUNT,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "part": args.part,
        "seconds": round(time.time() - began),
        "rows": ROWS,
    }))
    return int(bool(failed))


if __name__ == "__main__":
    cli(main)
