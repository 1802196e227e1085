"""
What gpu.sh needs Python for.

    python -m runs.gpu shape tinyllama-4-8-4 OUT    write a shape; print the GPU's GB
    python -m runs.gpu compare                      compare a small model with the CPU's
    python -m runs.gpu report OUT SHAPE             print the results of all parts
"""
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import bench
from common import UserError, cli, write_json
from model import Config, RecurrentLM, load_config
from surgery import retrofit_config
from tools import plan
from train import Settings

# Dense bfloat16 TFLOP/s by the data sheets. A GPU's is the first whose key is part of its name.
PEAKS = {
    "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "B200": 2250, "A100": 312,
    "L40S": 362, "RTX 3090": 71, "RTX 4090": 165, "RTX 5090": 210,
    "MI300X": 1307, "RX 7900 XTX": 123,
}


def shape(preset, folder):
    """Write the config.json of a preset of tools.plan. Prints the GPU's memory in GB."""
    if bench.DEVICE == "cpu":
        raise UserError("torch finds no GPU. For a CPU: bash runs/gpu.sh --cpu")
    config = retrofit_config(*plan.presets()[preset])
    write_json(f"{folder}/config.json", {"model_type": "loopgraft"} | asdict(config))
    print(plan.gpu_memory())


def compare():
    """
    Print the relative errors of a small model's logits and gradients on this device, beside those
    of the CPU in float32, as JSON: {"float32": {"logits": 1e-6, "gradients": 2e-6}, ...}.
    """
    config = Config(vocab_size=512, n_embd=256, n_head=4, n_kv_head=2, n_ffn=704, n_prelude=1,
                    n_core=2, n_coda=1)
    idx, targets = torch.randint(512, (2, 2, 256), generator=torch.Generator().manual_seed(0))

    def run(device, dtype):
        model = RecurrentLM(config)
        model.init_weights(0)
        model.to(device, dtype)
        state = model.initial_state(*idx.shape, seed=0)
        logits, _ = model(idx.to(device), None, (4, 4), state)
        _, losses = model(idx.to(device), targets, (4, 4), state)
        losses.mean().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        return {"logits": logits.detach().cpu(), "gradients": gradients.float().cpu()}

    exact = run("cpu", torch.float32)
    errors = {}
    for dtype in "float32", "bfloat16":
        found = run(bench.DEVICE, getattr(torch, dtype))
        errors[dtype] = {what: ((found[what] - t).norm() / t.norm()).item()
                         for what, t in exact.items()}
    print(json.dumps(errors))


# ------------------------------------------------------------------------------- the report

def report(out, shape_folder, *about):
    """
    Print the results of all parts as a table and as a line of JSON. The last line of OUT/PART.log
    is a part's result in JSON, or its error. about: "key=value" strings to add to both.
    """
    logs = sorted(Path(out).glob("*.log"), key=lambda log: log.stat().st_mtime)
    found = {log.stem: last_line(log) for log in logs}
    device = torch.cuda.get_device_name() if bench.DEVICE == "cuda" else "a CPU"
    about = {"torch": torch.__version__} | dict(pair.split("=", 1) for pair in about)
    first = sum(row["first_s"] for part in found.values() for row in part.get("rows", []))
    about["seconds of first runs, which compile"] = f"{first:.0f}"
    print(f"\n| | {device} |\n|---|---|")
    print("| run |", ", ".join(f"{key} {value}" for key, value in about.items()), "|")
    for part, result in found.items():
        text = result.get("text") or describe(part, result, shape_folder)
        print(f"| {part} | {text} |")
    print(json.dumps({"device": device} | about | found))


def last_line(log):
    """Return the last line of a part's log: the dict in it, or {"text": it}."""
    *_, last = log.read_text(errors="replace").splitlines() or ["no output"]
    try:
        return json.loads(last, parse_float=lambda number: float(f"{float(number):.4g}"))
    except ValueError:
        return {"text": last}


def describe(part, result, shape_folder):
    """Return a cell of the table. part: "compare", "train-ROWS-BUDGET" or "decode-ROWS"."""
    kind, *numbers = part.split("-")
    if kind == "compare":
        return "relative to the CPU's float32, " + "; ".join(
            f"logits are off by {error['logits']:.1e} and gradients by {error['gradients']:.1e} "
            f"in {dtype}" for dtype, error in result.items())
    rows = result["rows"]
    if kind == "decode":
        return "; ".join(f"r = {row['r']}: {row['tokens_per_s']:.4g} tokens/s, {row['mbu']:.0%} of "
                         "a read" for row in rows)
    (row,) = rows
    tera = row["flops_per_s"] / 1e12
    text = f"{row['tokens_per_s']:.4g} tokens/s, {tera:.4g} TFLOP/s, {row['mfu']:.0%} of a matmul"
    for name, peak in PEAKS.items():
        if name in result["device"]:
            text += f" and {tera / peak:.0%} of the data sheet's {peak}"
            break
    if "peak_mib" in row:
        micro_batch, budget = numbers
        settings = Settings(context=1024, micro_batch=int(micro_batch), backprop_depth=row["k"],
                            activation_budget=float(budget), dtype="bfloat16")  # as in gpu.sh
        model = RecurrentLM.empty(load_config(shape_folder)).to(torch.bfloat16)
        planned = sum(plan.memory(settings, model, gpus=1).values())
        text += f"; {row['peak_mib'] * 2**20 / 1e9:.1f} GB, tools.plan says {planned:.1f}"
    return text


def main():
    command, *args = sys.argv[1:]
    {"shape": shape, "compare": compare, "report": report}[command](*args)


if __name__ == "__main__":
    cli(main)
