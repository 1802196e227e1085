"""
Make the task of the experiment with SmolLM2: the shell game, told in plain English, in the tokens
of a real model.

    python -m runs.smollm2.cups --tokenizer out/smollm2/cut --out out/smollm2/cups

In ` The ball is under B. B and D swap. A and C swap.` each full stop asks under which of five cups
the ball is now: B, D and D. The answers are targets only and not part of the text. In 60% of the
swaps the ball's cup and another one change places, otherwise two of the others. A training row
holds three stories, of 3, 4 and 5 events in random order; a validation row holds one of 12 events.
OUT is a data set for train.py. In it, test.jsonl has 400 stories of 24 events and dev.jsonl 200
others, whose answers score.py scores after each event. fair.jsonl has 400 more, whose swaps are of
any two cups, so that they do not betray where the ball is.
"""
import json

import numpy as np

from common import Parser, cli, write_atomically, write_json
from data import Tokenizer, copy_tokenizer, write_shard
from model import IGNORE

ROW = 66  # tokens: three stories have 12 events of 5 tokens, plus 1 and an EOS for each story
CUPS = "ABCDE"


def tell(rng, length, share=0.6):
    """
    Return the events and the answers of a story of `length` events, as text. share: of swaps with
    the ball's cup; at 0.4, all pairs of the five cups are equally likely.
    """
    ball, *others = rng.permutation(list(CUPS))
    events = [f" The ball is under {ball}."]
    answers = [f" {ball}"]
    for _ in range(length - 1):
        a, b = others[:2]
        if rng.random() < share:
            a, b = rng.permutation([ball, others[0]])
            ball, others[0] = others[0], ball
        events.append(f" {a} and {b} swap.")
        answers.append(f" {ball}")
        rng.shuffle(others)
    return events, answers


def encode_story(tokenizer, events, answers):
    """Return ids and targets, two lists: the answer is the target of an event's last token."""
    ids = []
    targets = []
    for event, answer in zip(events, answers):
        tokens = tokenizer.encode(event)
        ids += tokens
        targets += [IGNORE] * (len(tokens) - 1) + tokenizer.encode(answer)
    return ids, targets


def make_row(rng, tokenizer, lengths):
    """Return ids and targets (2, ROW) of stories of these lengths, padded with EOS."""
    row = []
    row_targets = []
    for length in lengths:
        ids, targets = encode_story(tokenizer, *tell(rng, length))
        row += [*ids, tokenizer.eos_id]
        row_targets += [*targets, IGNORE]
    padding = ROW - len(row)
    return row + [tokenizer.eos_id] * padding, row_targets + [IGNORE] * padding


def main():
    parser = Parser(__doc__)
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER")
    parser.add_argument("--out", required=True, metavar="FOLDER")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer)
    rng = np.random.default_rng(0)
    with write_atomically(args.out) as folder:
        folder.mkdir()
        rows = {
            "train": [make_row(rng, tokenizer, rng.permutation([3, 4, 5])) for _ in range(40_000)],
            "val": [make_row(rng, tokenizer, [12]) for _ in range(256)],
        }
        shards = {}
        for split, made in rows.items():
            array = np.concatenate(made, axis=1, dtype=np.int32)
            shards[split] = [write_shard(folder, f"{split}_000000.npy", array)]
        copy_tokenizer(args.tokenizer, folder)
        write_json(folder / "meta.json", {
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "row_length": ROW,
            "shards": shards,
        })
        for name, count, share in (("dev", 200, 0.6), ("test", 400, 0.6), ("fair", 400, 0.4)):
            with open(folder / f"{name}.jsonl", "w") as file:
                for _ in range(count):
                    events, answers = tell(rng, 24, share)
                    print(json.dumps({"events": events, "answers": answers}), file=file)


if __name__ == "__main__":
    cli(main)
