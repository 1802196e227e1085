"""
Make the corpus of tiny.sh, in a few seconds and without a download. Its task needs depth: the shell
game, or a running count.

    python -m runs.tiny_corpus --out out/tiny/data
    python -m runs.tiny_corpus --out out/counts/data --task counts

Each answer of a story depends on the one before it, so a model that works out one sentence per
layer needs a layer for each sentence, or has to reuse layers. The last word of a sentence asks for
the answer so far:

    cups        The ball is under B. B and D swap. A and D swap.   B, D and A: where the ball is
    counts      has 7 so loses 4 so times 3 so                     7, 3 and 9: a count's last digit

OUT gets two data sets, with several stories in each row, and two files of questions:

    pretrain        Every other row holds stories of 12 sentences in total, with the answer written
                    out after each. The rows in between hold stories of 2 or 3 sentences, whose
                    answers are not part of the text but are the targets.
    task            Each row holds three stories, of 3, 4 and 5 sentences in random order, again
                    with the answers as targets only. A validation row holds two short stories and
                    one of 8 sentences, in which only the last 3 answers count.
    test.jsonl      100 questions of each length from 1 to 12 sentences
    test18.jsonl    300 questions of 18 sentences

So a training story is no longer than 5 sentences. Only where answers are written out do counts go
up to 11, but no such story starts with a test question of more than 5; shorter ones may.
"""
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common import (Parser, check_settings, cli, creating, natural, paths, positive, read_json,
                    write_atomically, write_json)

import numpy as np

from data import Tokenizer, write_meta, write_shard
from model import IGNORE

SENTENCES = 12  # in a worked row, and in the longest questions of test.jsonl
LENGTHS = 5, 4, 3  # sentences of the stories in a row of the task
VAL_ROWS = 1024  # in each data set


class Task(NamedTuple):
    words: list     # the vocabulary
    step: Callable  # (state, number below 60) -> words of a sentence, state after it: the answer
    worked: tuple   # of each worked story in a pretraining row; (): of two, any that make SENTENCES
    short: tuple    # of each short story; a row of these has as many tokens as a worked one


# ----------------------------------------------------------------------------------- two tasks

CUPS = "ABCDE"
PAIRS = [*itertools.permutations(CUPS, 2)]


def swap(ball, draw):
    """The shell game, in which any two cups are equally likely to swap: where is the ball?"""
    if ball is None:
        ball = CUPS[draw % 5]
        return ["The", "ball", "is", "under", f"{ball}."], ball
    a, b = PAIRS[draw % 20]
    return [a, "and", b, "swap."], {a: b, b: a}.get(ball, ball)


def count(total, draw):
    """A running count of which only the last digit matters: has 7 loses 4 times 3 gets 2 -> 1."""
    if total is None:
        digit = draw % 10
        return ["has", str(digit), "so"], digit
    verb = ("gets", "loses", "times")[draw % 12 // 4]
    x = 2 + draw % 2 if verb == "times" else 1 + draw % 4
    total = {"gets": total + x, "loses": total - x, "times": total * x}[verb]
    return [verb, str(x), "so"], total % 10


TASKS = {
    "cups": Task(
        words="The ball is under and swap. A B C D E A. B. C. D. E.".split(),
        step=swap,
        worked=LENGTHS,
        short=(3, 3, 3, 3, 2),
    ),
    "counts": Task(
        words="has gets loses times so 0 1 2 3 4 5 6 7 8 9".split(),
        step=count,
        worked=(),
        short=(3,) * 5,
    ),
}


# ------------------------------------------------------------------------------ stories to rows

def make_story(step, rng, length):
    """A story of `length` sentences: tuples such as ("loses", "4", "so", "3")."""
    state = None
    story = []
    for draw in rng.integers(60, size=length):
        words, state = step(state, draw)
        story.append((*words, str(state)))
    return story


def worked(story):
    """`has 3 so 3 loses 4 so 9 </s>`, with every answer written out, as [(word, target), ...]"""
    words = [*itertools.chain(*story), "</s>"]
    return list(itertools.zip_longest(words, words[1:]))


def direct(story, first=1):
    """`has 3 so loses 4 so </s>`; the answers from sentence number `first` on are targets only."""
    document = []
    for number, (*words, last, answer) in enumerate(story, 1):
        document += [(word, None) for word in words]
        document.append((last, answer if number >= first else None))
    return [*document, ("</s>", None)]


# A row is a list of documents. All rows of a data set have the same number of tokens.

def worked_row(step, rng, lengths):
    """Stories of these lengths or, if there are none, two of SENTENCES sentences in total."""
    if not lengths:
        n = rng.integers(1, SENTENCES)
        lengths = n, SENTENCES - n
    return [make_story(step, rng, length) for length in lengths]


def direct_row(step, rng, lengths, first=1):
    """Stories of these lengths, direct()."""
    return [direct(make_story(step, rng, length), first) for length in lengths]


def pretrain_rows(rows, step, rng, short):
    """Yield each row, a list of stories, worked; then one of stories of `short` lengths, direct."""
    for row in rows:
        yield [worked(story) for story in row]
        yield direct_row(step, rng, short)


# ---------------------------------------------------------------------------------------- files

def make_tokenizer(ids):
    """The content of a tokenizer.json for {word: id}."""
    eos = {"id": ids["</s>"], "content": "</s>", "special": True}
    eos |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [eos],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"},
    }


def write_rows(folder, split, ids, rows):
    """Write the rows as ids, in the only shard of a split. Returns its entry in meta.json."""
    made = []
    for document in itertools.chain.from_iterable(rows):
        pairs = [(ids[word], ids.get(target, IGNORE)) for word, target in document]
        made.append(np.array(pairs, np.int32))
    array = np.concatenate(made).T.copy()  # (2, number of rows * their length)
    return write_shard(folder, f"{split}_000000.npy", array)


def write_set(folder, ids, arguments, train_rows, val_rows):
    """Write a data set, as `data.py prepare` would: its tokenizer, shards and meta.json."""
    write_json(folder / "tokenizer.json", make_tokenizer(ids))
    train = write_rows(folder, "train", ids, train_rows)
    val = write_rows(folder, "val", ids, val_rows)
    write_meta(folder, Tokenizer.load(folder), {"train": [train], "val": [val]},
               val[1] // VAL_ROWS, arguments=arguments)


def write_questions(path, stories, seed):
    """Write stories in random order to a .jsonl file as questions."""
    np.random.default_rng(seed).shuffle(stories)
    with write_atomically(path) as new, open(new, "w") as file:
        for story in stories:
            question = " ".join(word for *words, _ in story for word in words)
            row = {"question": question, "answer": story[-1][-1], "difficulty": len(story)}
            print(json.dumps(row), file=file)


def tiny(out, task="cups", seed=0, rows=50_000):
    """
    Write the corpus of a task, which depends only on the seed. rows: per training set. It is
    complete if its last file exists, and otherwise begun again.
    """
    arguments = {"task": task, "seed": seed, "rows": rows}
    out = Path(out)
    last = out / "test18.jsonl"
    if last.exists():
        earlier = read_json(f"{out}/task/meta.json")["arguments"]
        check_settings(out, earlier, arguments, "Choose another --out")
        print(f"{out} is already complete")
        return
    words, step, written, short = TASKS[task]
    ids = {word: i for i, word in enumerate(["<unk>", "</s>", *words])}
    rng = np.random.default_rng(seed)
    train_rows = [worked_row(step, rng, written) for _ in range(rows // 2)]
    val_rows = [worked_row(step, rng, written) for _ in range(VAL_ROWS // 2)]
    # Beginnings of worked stories that are longer than any training question.
    seen = {tuple(story[:n]) for story in itertools.chain(*train_rows)
            for n in range(max(LENGTHS) + 1, len(story) + 1)}

    def questions(count, length):
        """Draw random stories of the given length that are not in `seen`."""
        stories = [make_story(step, rng, length) for _ in range(10 * count)]
        fresh = [story for story in stories if tuple(story) not in seen]
        return fresh[:count]

    # The rows of both sets are generators: they are made as they are written, to save memory.
    with creating(out):
        write_set(
            out / "pretrain", ids, arguments,
            train_rows=pretrain_rows(train_rows, step, rng, short),
            val_rows=pretrain_rows(val_rows, step, rng, short),
        )
        write_set(
            out / "task", ids, arguments,
            train_rows=(direct_row(step, rng, rng.permutation(LENGTHS)) for _ in range(rows)),
            # The two short stories, without targets, pad a row to the length of a training row.
            val_rows=(direct_row(step, rng, (8, 3, 1), first=6) for _ in range(VAL_ROWS)),
        )
        test = [questions(100, length) for length in range(1, SENTENCES + 1)]
        write_questions(out / "test.jsonl", [*itertools.chain(*test)], seed)
        write_questions(last, questions(300, 18), seed)
    print(f"{out}: complete; train on pretrain and task, test on test.jsonl and test18.jsonl")


def main():
    parser = Parser(__doc__)
    flag = parser.add_argument
    flag("--out", type=paths, required=True, help="folder of the corpus")
    flag("--task", choices=TASKS, default="cups", help="the shell game (cups), or a running count")
    flag("--seed", type=natural, default=0, help="decides all stories, training and test (0)")
    flag("--rows", type=positive, default=50_000, help="training rows in each data set (50,000)")
    args = parser.parse_args()
    tiny(args.out, args.task, args.seed, args.rows)


if __name__ == "__main__":
    cli(main)
