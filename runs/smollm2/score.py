"""
Score a model on stories of cups.py at several r: the share of right answers after each event.

    python -m runs.smollm2.score --model out/smollm2/loop --data out/smollm2/cups --out FILE

The right answer must be the most likely of all tokens. With --written, the model reads the first
events of each story and writes its steps in that form; the last letter must be right.
"""
import json
from pathlib import Path

from common import Parser, cli, paths, write_json

import torch

from model import IGNORE
from runs.smollm2.cups import WRITTEN, encode_written
from runs.stories import encode_story
from sample import Decoder, answer_batch, load_model

ROWS = 50  # stories in one pass
STEPS = 1, 2, 4, 8, 16, 32, 64  # r
ASKED = {24: (3, 5, 8, 12, 16, 24), 48: (48,)}  # events after which a model writes its steps


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


def right_when_written(decoder, tokenizer, stories, form):
    """Return {events: the share of stories whose last letter is right}, after each of ASKED."""
    found = {}
    for n in ASKED[len(stories[0]["events"])]:
        prompts = [tokenizer.encode("".join(story["events"][:n]), bos=True) for story in stories]
        ids, _ = encode_written(tokenizer, *(stories[0][key][:n] for key in stories[0]), form)
        longest = len(ids) - len(prompts[0]) + 8  # a few more than right steps take
        texts = []
        for i in range(0, len(prompts), ROWS):
            batch = prompts[i:i + ROWS]
            texts += answer_batch(decoder, tokenizer, batch, longest, [], None)
        right = [text.rstrip(".").endswith(story["answers"][n - 1])
                 for (text, _), story in zip(texts, stories, strict=True)]
        found[n] = sum(right) / len(right)
    return found


def main():
    parser = Parser(__doc__)
    parser.add_argument("--model", type=paths, required=True, metavar="FOLDER")
    parser.add_argument("--data", type=paths, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=paths, required=True, metavar="FILE")
    parser.add_argument("--parts", default="dev,test,fair", metavar="LIST",
                        help="files of --data (dev,test,fair)")
    parser.add_argument("--written", choices=WRITTEN)
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    found = {}
    for name in args.parts.split(","):
        lines = Path(args.data, f"{name}.jsonl").read_text().splitlines()
        stories = [json.loads(line) for line in lines]
        if args.written:
            found[name] = {0: right_when_written(Decoder(model), tokenizer, stories, args.written)}
        else:
            encoded = torch.tensor([encode_story(tokenizer, **story) for story in stories])
            steps = STEPS if model.core else [0]
            found[name] = right_answers(model, encoded.transpose(0, 1), steps)
    for name, by_depth in found.items():
        for r, shares in by_depth.items():
            shares = shares.values() if args.written else shares
            print(f"{name}, r = {r}: right after each event:", *(f"{x:.0%}" for x in shares))
    write_json(args.out, found)


if __name__ == "__main__":
    cli(main)
