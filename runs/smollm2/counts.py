"""
Make the counting task of the experiment with SmolLM2: a running count told in plain English, in the
tokens of a real model. It is the stories of runs/tiny_corpus.py in sentences.

    python runs/smollm2/counts.py --tokenizer out/smollm2/keep --out out/smollm2/counts

`Tom has 7. So: Tom loses 4. So: Tom triples it. So:` asks after each step for the last digit of the
count so far: 7, 3 and 9. The answers are targets only and not part of the text. A training row
holds three stories, of 3, 4 and 5 steps in random order. OUT is a data set for train.py, and
test.jsonl in it has 100 questions of each length from 1 to 12 steps.
"""
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Parser, cli, opening, write_atomically, write_json
from data import Tokenizer, copy_tokenizer, write_shard
from model import IGNORE
from runs.tiny_corpus import count

ROW = 88  # tokens: three stories have at most 12 sentences of 7 tokens, and an EOS each
NAMES = "Tom Anna Ben Mary Sam Lucy Jack Emma".split()
FACTORS = {"2": "doubles", "3": "triples"}


def tell(rng, length):
    """Return the sentences and the answers of a story of `length` steps."""
    name = rng.choice(NAMES)
    total = None
    sentences = []
    answers = []
    for draw in rng.integers(60, size=length):
        (verb, number), total = count(total, draw)
        deed = f"{FACTORS[number]} it" if verb == "times" else f"{verb} {number}"
        sentences.append(f" {name} {deed}. So:")
        answers.append(str(total))
    return sentences, answers


def make_row(rng, tokenizer, lengths):
    """Return ids and targets (2, ROW) of stories of these lengths, padded with EOS."""
    ids = []
    targets = []
    for length in lengths:
        for sentence, answer in zip(*tell(rng, length)):
            tokens = tokenizer.encode(sentence)
            [digit] = tokenizer.encode(answer)
            ids += tokens
            targets += [IGNORE] * (len(tokens) - 1) + [digit]
        ids.append(tokenizer.eos_id)
        targets.append(IGNORE)
    padding = ROW - len(ids)
    return ids + [tokenizer.eos_id] * padding, targets + [IGNORE] * padding


def main():
    parser = Parser(description=opening(__doc__))
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER")
    parser.add_argument("--out", required=True, metavar="FOLDER")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer)
    rng = np.random.default_rng(0)
    with write_atomically(args.out) as folder:
        folder.mkdir()
        shards = {}
        for split, rows in (("train", 20_000), ("val", 256)):
            made = [make_row(rng, tokenizer, rng.permutation([3, 4, 5])) for _ in range(rows)]
            array = np.concatenate(made, axis=1, dtype=np.int32)
            shards[split] = [write_shard(folder, f"{split}_000000.npy", array)]
        copy_tokenizer(args.tokenizer, folder)
        write_json(folder / "meta.json", {
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "row_length": ROW,
            "shards": shards,
            "prompt": " Tom has 7. So: Tom loses 4. So: Tom triples it. So:",
        })
        with open(folder / "test.jsonl", "w") as file:
            for length in range(1, 13):
                for _ in range(100):
                    sentences, answers = tell(rng, length)
                    question = {"question": "".join(sentences), "answer": answers[-1],
                                "difficulty": length}
                    print(json.dumps(question), file=file)


if __name__ == "__main__":
    cli(main)
