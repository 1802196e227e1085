"""The steps of gpu_check.sh. torch calls every card "cuda", those of AMD too."""
import json
import subprocess
import sys
import tempfile
import time
import warnings

import torch
import torch.nn.functional as F

from data import tiny
from model import Config, RecurrentLM
from muon import Optimizer
from sample import Decoder, Decoding, compile_decoding, generate

GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if GPU else "cpu"
SMALL = Config(512, 128, 4, 2, 352, 1, 2, 1, context=512, state_std=1.0)
LARGE = Config(32000, 2048, 32, 4, 5632, 4, 8, 4) if GPU else SMALL  # TinyLlama after surgery
SCRATCH = tempfile.TemporaryDirectory(dir="out/gpu_check")  # gone at the end
FOLDER = SCRATCH.name
ROWS, TABLE = [], []


def add(check, value, wanted="", ok=None):
    """A row of the table. ok: whether the value is as wanted, or None for a measurement."""
    ROWS.append({"check": check, "value": value, "wanted": wanted, "ok": ok})
    short = f"{value:.4g}" if isinstance(value, float) else str(value)
    verdict = {True: "ok", False: "FAILED", None: ""}[ok]
    TABLE.append(f"{check:50s} {short:>12.60s}  {wanted!s:10s} {verdict}")
    print(TABLE[-1], flush=True)


def below(check, value, limit):
    add(check, value, f"< {limit:.2g}", value < limit)


# --------------------------------------------------------------------------------- is it right?

def small(device, dtype):
    """A fixed random model, and tokens, targets (4, 128) and s_0 that fit."""
    model, generator = RecurrentLM(SMALL), torch.Generator().manual_seed(0)
    model.init_weights(seed=0)
    idx = torch.randint(SMALL.vocab_size, (4, 129), generator=generator)
    state = torch.randn(4, 128, SMALL.n_embd, generator=generator)
    return model.to(device, dtype), *(t.to(device) for t in (idx[:, :-1], idx[:, 1:], state))


def logits(device, dtype):
    model, idx, _, state = small(device, dtype)
    states = model.trajectory(idx, [1, 4, 32], state)
    return torch.stack([model.finish(s) for _, s in states]).cpu()


def make_update(device, dtype):
    """An optimizer, and a function that makes one update -> the norm of the gradient."""
    model, idx, targets, state = small(device, torch.float32)
    masters = {name: p.data for name, p in model.named_parameters()}
    optimizer = Optimizer(model.to(dtype).named_parameters(), lr=0.01, adam_lr=0.01,
                          weight_decay=0.0, masters=masters)

    def update():
        model(idx, targets, (4, 4), state)[1].backward()
        optimizer.accumulate()
        return optimizer.step(1.0, 1.0)

    return optimizer, update


def change(device, dtype):
    """What one update changes, and the norm of its gradient."""
    optimizer, update = make_update(device, dtype)
    before = [w.clone() for w in optimizer.masters.values()]
    norm = update()
    changes = [w - b for w, b in zip(optimizer.masters.values(), before)]
    return torch.cat([c.flatten() for c in changes]).cpu(), norm


def check_oracles():
    """Logits and an update against the CPU's in float32; in bfloat16 as near as the CPU comes."""
    exact, (update, norm) = logits("cpu", torch.float32), change("cpu", torch.float32)

    def errors(device, dtype):
        changes, its_norm = change(device, dtype)
        yield ((logits(device, dtype) - exact).norm() / exact.norm()).item()
        yield abs(its_norm / norm - 1)
        yield 1 - F.cosine_similarity(changes, update, 0).item()

    limits = {torch.float32: [1e-4, 1e-4, 0.02],
              torch.bfloat16: [1.5 * error + 0.005 for error in errors("cpu", torch.bfloat16)]}
    for dtype in limits:
        names = ("logits", "gradient norm", "update")
        for name, error, limit in zip(names, errors(DEVICE, dtype), limits[dtype]):
            below(f"{name}, {dtype}, error", error, limit)
        twice = [change(DEVICE, dtype)[0] for _ in range(2)]
        add(f"update, {dtype}, twice the same bits", torch.equal(*twice))


def check_decoding():
    """Every way gives the tokens of plain decoding: three prompts, of which two end early."""
    model, prompts = small(DEVICE, torch.float32)[0], [[*range(1, n)] for n in (5, 20, 40)]

    def tokens(**way):
        return sorted(generate(model, prompts, 40, 4, lambda row, _: row > 0, **way),
                      key=lambda event: event[0])

    plain = tokens()
    same = tokens(draft_steps=2) == plain
    add("tokens of drafts as plain", same, True, same)
    compile_decoding(model)
    same = tokens() == plain
    add("tokens of compiled (on a GPU recorded) as plain", same, True, same)


def check_waits():
    """How often the host waits for the GPU, by torch's own count."""
    tokens = generate(small(DEVICE, torch.bfloat16)[0], [[1, 2, 3]], 8, 4)
    steps = {"update": make_update(DEVICE, torch.bfloat16)[1], "token": lambda: next(tokens)}
    for name, step in steps.items() if GPU else ():
        seconds(step, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step()
            torch.cuda.set_sync_debug_mode("default")
        add(f"waits per {name}", sum("synchroniz" in str(w.message) for w in caught), "1 or 2")


def check_ranks():
    """Two processes lose as much as one: NCCL on two cards, gloo without a GPU."""
    if torch.cuda.device_count() == 1:
        return add("two processes", "one card: not run")
    tiny(f"{FOLDER}/data", rows=8000)
    losses = []
    for world in "12":
        run("-m", "torch.distributed.run", f"--nproc_per_node={world}", "train.py", "--updates=4",
            f"--data={FOLDER}/data/task", f"--out_dir={FOLDER}/{world}", "--context=26",
            "--n_prelude=1", "--n_core=1", "--mean_recurrence=4", "--backprop_depth=2",
            "--batch_size=64", "--micro_batch=32", "--dtype=float32", "--compile=false")
        with open(f"{FOLDER}/{world}/log.jsonl") as f:
            losses.append(json.loads(f.readlines()[-1])["val"]["4"])
    below("two processes, loss against one's", abs(losses[0] - losses[1]), 0.01)


# -------------------------------------------------------------------------------- how fast is it?

def run(*command):
    """A Python command -> its last line."""
    p = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if p.returncode:
        raise RuntimeError(p.stderr[-2000:])
    return p.stdout.splitlines()[-1]


def bench(command, *flags):
    model = f"--model={FOLDER}/random"
    return json.loads(run("bench.py", command, model, "--dtype=bfloat16", "--repeat=2", *flags))


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
    with torch.device(DEVICE):
        model = RecurrentLM(LARGE)
    model.init_weights(0)
    model.to(torch.bfloat16).save(f"{FOLDER}/random")


def measure_training():
    rows, flags = 1, ["--context=32", "--no_compile"]
    if GPU:  # weights and optimizer take 20 GB, every sequence of 1024 tokens about 8 more
        rows = max(1, int((torch.cuda.get_device_properties(0).total_memory / 1e9 - 20) / 10))
        flags = ["--context=1024"]
    result = bench("train", "--optimizer=muon", "--steps=24+8", f"--batch_size={rows}", *flags)
    row = result["rows"][0]
    add("matmul peak, TFLOP/s", result["matmul_peak"] / 1e12)
    add(f"train, {rows} sequences, n=24 k=8, tokens/s", row["tokens_per_s"])
    add("... share of the matmul peak", row["mfu"])
    add("... GB of GPU memory", row.get("peak_mib", 0) / 1024)


@torch.inference_mode()
def measure_decoding():
    """Whole texts; then single steps, against the time that it takes to read the weights."""
    for row in bench("decode", "--steps=4,32", *(() if GPU else ("--no_compile",)))["rows"]:
        add(f"decode 64 tokens, r={row['r']}, tokens/s", row["tokens_per_s"])
    source = torch.ones(1 << (28 if GPU else 24), device=DEVICE)
    bandwidth = 2 * source.nbytes / seconds(source.clone, 10)
    add("bandwidth of a copy, GB/s", bandwidth / 1e9)
    model, token = RecurrentLM.load(f"{FOLDER}/random", DEVICE), torch.tensor([1], device=DEVICE)
    n = model.num_params()
    for how in ("plain", "compiled, on a GPU recorded"):
        if how != "plain":
            compile_decoding(model)
        for r in (4, 32):
            decoder = Decoder(model, r, 1, 128, Decoding())
            s = torch.zeros(1, 1, LARGE.n_embd, device=DEVICE)
            took = seconds(lambda: decoder.step(token, token, token, s, s, end=8), 20)
            read = n["prelude"] + n["coda"] + n["embeddings"] / 2 + r * (n["core"] + n["adapter"])
            add(f"a step, {how}, r={r}, ms", 1e3 * took)
            add("... share of the bandwidth", 2 * read / took / bandwidth)


def main():
    began = time.time()
    for step in (check_oracles, check_decoding, check_waits, check_ranks, save_random,
                 measure_training, measure_decoding):
        print(f"\n== {step.__name__} ==  ({time.time() - began:.0f} s)", flush=True)
        try:
            step()
        except Exception as e:  # the others go on
            add(step.__name__, f"{type(e).__name__}: {e}", "no error", False)
    machine = {"machine": torch.cuda.get_device_name() if GPU else "CPU",
               "cards": torch.cuda.device_count(), "torch": torch.__version__,
               "cuda": torch.version.cuda, "hip": torch.version.hip}
    print("", machine, *TABLE, sep="\n")
    print(json.dumps(machine | {"seconds": round(time.time() - began), "rows": ROWS}))
    sys.exit(any(row["ok"] is False for row in ROWS))


if __name__ == "__main__":
    main()
