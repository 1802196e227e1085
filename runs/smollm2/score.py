"""
Score a model on stories of cups.py at several r: the share of right answers after each event.

    python -m runs.smollm2.score --model out/smollm2/loop --data out/smollm2/cups --out FILE

The right answer must be the most likely of all tokens.
"""
import json
from pathlib import Path

from common import Parser, cli, paths, write_json

import torch

from model import IGNORE
from runs.smollm2.cups import encode_story
from sample import load_model

ROWS = 50  # stories in one pass
STEPS = 1, 2, 4, 8, 16, 32, 64  # r


@torch.no_grad()
def right_answers(model, stories, steps):
    """
    Return {r: [the share of right answers after each event]}. stories: ids and targets
    (2, stories, T), so all have the same number of tokens.
    """
    device = model.embed.weight.device
    hits = {r: 0 for r in steps}
    for idx, targets in zip(*(part.to(device).split(ROWS) for part in stories)):
        state = model.initial_state(*idx.shape, seed=0) if model.core else None
        asked = targets != IGNORE
        for r, x in model.trajectory(idx, steps, state):
            logits = model.logits(x[asked])
            hits[r] += (logits.argmax(-1) == targets[asked]).view(len(idx), -1).sum(0)
    return {r: (hit / stories.shape[1]).tolist() for r, hit in hits.items()}


def main():
    parser = Parser(__doc__)
    parser.add_argument("--model", type=paths, required=True, metavar="FOLDER")
    parser.add_argument("--data", type=paths, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=paths, required=True, metavar="FILE")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    found = {}
    for name in ("dev", "test", "fair"):
        lines = Path(args.data, f"{name}.jsonl").read_text().splitlines()
        stories = [encode_story(tokenizer, **json.loads(line)) for line in lines]
        stories = torch.tensor(stories).transpose(0, 1)
        found[name] = right_answers(model, stories, STEPS if model.core else [0])
    for r, shares in found["test"].items():
        print(f"r = {r}: right after each event:", *(f"{x:.0%}" for x in shares))
    write_json(args.out, found)


if __name__ == "__main__":
    cli(main)
