"""
What gpu.sh needs Python for.

    python -m runs.gpu shape tinyllama-4-8-4 OUT    write a shape; print the GPU's GB
    python -m runs.gpu compare                      compare a small model with the CPU's
"""
import json
from dataclasses import asdict

from common import Parser, UserError, cli, write_json

import torch

import bench
from model import Config, RecurrentLM
from surgery import retrofit_config
from tools import plan


def shape(preset, folder):
    """Write the config.json of a preset of tools.plan. Prints the GPU's memory in GB."""
    if bench.DEVICE == "cpu":
        raise UserError("torch finds no GPU. For a CPU: bash runs/gpu.sh --cpu")
    config = retrofit_config(*plan.presets()[preset])
    write_json(f"{folder}/config.json", {"model_type": "loopgraft"} | asdict(config))
    print(round(torch.cuda.get_device_properties().total_memory / 1e9))


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


def main():
    parser = Parser(__doc__)
    commands = {"shape": shape, "compare": compare}
    parser.add_argument("command", choices=commands)
    parser.add_argument("args", nargs="*")
    args = parser.parse_args()
    commands[args.command](*args.args)


if __name__ == "__main__":
    cli(main)
