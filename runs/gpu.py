"""
What gpu.sh needs Python for: write a preset's shape, and print the GPU's memory in GB.

    python -m runs.gpu tinyllama-4-8-4 OUT
"""
from dataclasses import asdict

from common import Parser, UserError, cli, write_json

import torch

import bench
from surgery import retrofit_config
from tools import plan


def main():
    parser = Parser(__doc__)
    presets = plan.presets()
    parser.add_argument("preset", choices=presets, metavar="PRESET")
    parser.add_argument("out", metavar="OUT")
    args = parser.parse_args()
    if bench.DEVICE == "cpu":
        raise UserError("torch finds no GPU. For a CPU: bash runs/gpu.sh --cpu")
    config = retrofit_config(*presets[args.preset])
    write_json(f"{args.out}/config.json", {"model_type": "loopgraft"} | asdict(config))
    print(round(torch.cuda.get_device_properties().total_memory / 1e9))


if __name__ == "__main__":
    cli(main)
