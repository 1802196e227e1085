"""
Make the counting task of the experiment with SmolLM2: a running count told in plain English, in the
tokens of a real model.

    python -m runs.smollm2.counts --tokenizer out/smollm2/keep --out out/smollm2/counts

In `Tom has 7, loses 4, gets 2,` each comma asks for the count so far: 7, 3 and 5, always one digit.
The answers are targets only and not part of the text. A training row holds three stories, of 3, 4
and 5 events in random order. In a validation row only the last 3 answers of a story of 8 events
count. OUT is a data set for train.py. In it, test.jsonl has 100 questions of each length from 1 to
12 events for eval_gsm8k.py, and stories.jsonl 400 other stories of 12 events for score.py, which
scores the answer to every event.
"""
import json

import numpy as np

from common import Parser, cli, opening, write_atomically, write_json
from data import Tokenizer, copy_tokenizer, write_shard
from model import IGNORE

ROW = 54  # tokens: three stories have 12 events of 4 tokens, plus a name and an EOS each
NAMES = "Tom Anna Ben Mary Sam Lucy Jack Emma".split()
CHANGES = [-4, -3, -2, -1, 1, 2, 3, 4]


def tell(rng, length):
    """Return the events and the answers of a story of `length` events, as text."""
    total = int(rng.integers(10))
    events = [f" {rng.choice(NAMES)} has {total},"]
    answers = [str(total)]
    for _ in range(length - 1):
        change = rng.choice([x for x in CHANGES if 0 <= total + x <= 9])
        total += change
        events.append(f" {'gets' if change > 0 else 'loses'} {abs(change)},")
        answers.append(str(total))
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


def make_row(rng, tokenizer, lengths, first=1):
    """
    Return ids and targets (2, ROW) of stories of these lengths, padded with EOS. Answers to events
    before number `first` are not targets.
    """
    row = []
    row_targets = []
    for length in lengths:
        ids, targets = encode_story(tokenizer, *tell(rng, length))
        asked = [i for i, target in enumerate(targets) if target != IGNORE]
        for i in asked[:first - 1]:
            targets[i] = IGNORE
        row += [*ids, tokenizer.eos_id]
        row_targets += [*targets, IGNORE]
    padding = ROW - len(row)
    return row + [tokenizer.eos_id] * padding, row_targets + [IGNORE] * padding


def main():
    parser = Parser(description=opening(__doc__))
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER")
    parser.add_argument("--out", required=True, metavar="FOLDER")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer)
    rng = np.random.default_rng(0)
    with write_atomically(args.out) as folder:
        folder.mkdir()
        rows = {
            "train": [make_row(rng, tokenizer, rng.permutation([3, 4, 5])) for _ in range(20_000)],
            "val": [make_row(rng, tokenizer, [8], first=6) for _ in range(256)],
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
        with open(folder / "test.jsonl", "w") as file:
            for length in range(1, 13):
                for _ in range(100):
                    events, answers = tell(rng, length)
                    question = {
                        "question": "".join(events),
                        "answer": answers[-1],
                        "difficulty": length,
                    }
                    print(json.dumps(question), file=file)
        with open(folder / "stories.jsonl", "w") as file:
            for _ in range(400):
                events, answers = tell(rng, 12)
                print(json.dumps({"events": events, "answers": answers}), file=file)


if __name__ == "__main__":
    cli(main)
