"""
Ask for more than the last answer of a story: data for train.py from train.jsonl of swaps.py.

    python -m runs.bbh.mentions --stories FILE.jsonl --tokenizer out/bbh/cut --out out/bbh/mentions

In "First, Alice and Bob swap balls. Then, Bob and Claire swap balls. ... Alice has", the target at
each name is the letter of the ball that this person has at that point: A, B, A, C and B. The text
is that of the chats, without these letters, and the answers are targets as usual.
"""
import json
from pathlib import Path

import numpy as np

from common import (Parser, UserError, cli, new_folder, paths, reading, write_atomically,
                    write_json)
from data import Tokenizer, copy_tokenizer, fill_rows, hold_out, write_shard
from model import IGNORE
from runs.bbh.swaps import ASKED, SWAP

NAMES = "Alice Bob Claire Dave Eve Fred Gertrude".split()  # who starts with (A), (B), ...
ROW = 512  # tokens


def mentions(text, held):
    """
    Find the names in the swaps of a text and in its question: [(where it ends, letter), ...].
    held: {person: the letter of their object}, which the swaps change.
    """
    found, start = [], 0
    for swap in SWAP.finditer(text):
        a, b, start = swap[1], swap[2], swap.end()
        found += [(swap.end(1), held[a]), (swap.end(2), held[b])]
        held[a], held[b] = held[b], held[a]
    asked = list(ASKED.finditer(text, start))[-1]
    return [*found, (asked.end(), held[asked[0]])]


def document(tokenizer, letters, messages):
    """
    Return the tokens of a chat as data.document() does, (2, N), with a target at each mention.
    letters: {"A": its token in an answer, ...}.
    """
    held = {name: name[0] for name in NAMES}
    ids, targets = [], []
    for message in messages:
        text = "\n" * bool(ids) + message["content"]
        part = tokenizer.encode(text)
        if message["role"] == "assistant":
            part.append(tokenizer.eos_id)
            targets[-1:] = [*part, IGNORE]  # the target is the next token
        else:
            targets += [IGNORE] * len(part)
            for end, letter in mentions(text, held):
                before = tokenizer.encode(text[:end])
                if part[:len(before)] != before:
                    raise UserError("this tokenizer has tokens that go beyond the end of a name")
                targets[len(ids) + len(before) - 1] = letters[letter]
        ids += part
    return np.array([ids, targets], np.int32)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--stories", type=paths, required=True, metavar="FILE")
    parser.add_argument("--tokenizer", type=paths, required=True, metavar="FOLDER")
    parser.add_argument("--out", required=True, metavar="FOLDER", type=new_folder)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer)
    letters = {name[0]: tokenizer.encode(f"({name[0]}")[-1] for name in NAMES}
    with reading(args.stories):
        chats = [json.loads(line) for line in Path(args.stories).read_text().splitlines()]
        documents = [document(tokenizer, letters, chat["messages"]) for chat in chats]
    if (longest := max(tokens.shape[1] for tokens in documents)) > ROW:
        raise UserError(f"{args.stories}: a story of {longest} tokens. A row has {ROW}")
    with write_atomically(args.out) as folder:
        folder.mkdir()
        shards = {split: [write_shard(folder, f"{split}_000000.npy",
                                      fill_rows(part, ROW, tokenizer.eos_id))]
                  for split, part in zip(("train", "val"), hold_out(documents, 0.01, ROW))}
        copy_tokenizer(args.tokenizer, folder)
        write_json(folder / "meta.json", {"vocab_size": tokenizer.vocab_size,
                                          "eos_id": tokenizer.eos_id, "row_length": ROW,
                                          "shards": shards})


if __name__ == "__main__":
    cli(main)
