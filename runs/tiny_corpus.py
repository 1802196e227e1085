"""
Make the corpus of tiny.sh or one of the study's, in a few seconds and without a download. Each has
a task that needs depth: the shell game, a running count, or products in the group S5.

    python -m runs.tiny_corpus --out out/tiny/data
    python -m runs.tiny_corpus --out out/counts/data --task counts
    python -m runs.tiny_corpus --out out/s5/data --task s5

Each answer of a story depends on the one before it, so a model that works out one sentence per
layer needs a layer for each sentence, or has to reuse layers. The last word of a sentence asks for
the answer so far:

    cups        The ball is under B. B and D swap. A and D swap.   B, D and A: where the ball is
    counts      has 7 so loses 4 so times 3 so                     7, 3 and 9: a count's last digit
    s5          a so d so c so          23514, 12534 and 42315: a product of permutations

OUT gets two data sets, with several stories in each row, and two files of questions:

    pretrain        Every other row holds worked stories of 12 sentences in total, with the answer
                    written out after each sentence. The rows in between hold short stories, of 2 or
                    3 sentences, in which the answers are not part of the text but are the targets.
    task            Each row holds three stories, of 3, 4 and 5 sentences in random order (s5: 3, 5
                    and 8 letters), again with the answers as targets only. A validation row holds a
                    story of 8 sentences (s5: 11 letters) of which only the last 3 answers count,
                    and two short stories that do not count.
    test.jsonl      100 questions of each length from 1 to 12 sentences
    test18.jsonl    300 questions of 18 sentences

So a training story is no longer than 5 sentences (s5: 8 letters). Only where answers are written
out do counts and products go up to 11 sentences, but no such story starts with a test question of
more than 5 sentences (s5: 8 letters). Shorter test questions may also occur in training. Another
--seed makes another corpus, with other test questions.
"""
import itertools
import json
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from common import (Parser, check_settings, cli, natural, paths, positive, read_json,
                    write_atomically, write_json)
from data import write_shard
from model import IGNORE

SENTENCES = 12  # in a worked row, and in the longest questions of test.jsonl
VAL_ROWS = 1024  # in each data set


class Task(NamedTuple):
    words: list     # the vocabulary; if it has "<s>", every story begins with that
    step: Callable  # (state, number below 60) -> words of a sentence, state after it: the answer
    lengths: tuple  # sentences of each story in a training row, the longest first
    worked: tuple   # of each worked story in a pretraining row; (): of two, any that make SENTENCES
    short: tuple    # of each short story; a row of these has as many tokens as a worked one


# --------------------------------------------------------------------------------- three tasks

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
    x = 1 + draw % 4
    if verb == "gets":
        total += x
    elif verb == "loses":
        total -= x
    else:
        x = 2 + draw % 2
        total *= x
    return [verb, str(x), "so"], total % 10


# Four random elements of S5, the group of permutations of five things.
FACTORS = {"a": "23514", "b": "31542", "c": "52413", "d": "41325"}


def multiply(product, draw):
    """
    A product in S5: a d c -> 42315. The group is not solvable, so no shortcut of fixed depth is
    known (arXiv 2503.03961). Stories begin with <s>, because without it d d would look like d:
    attention averages over equal words.
    """
    letter = "abcd"[draw % 4]
    product = product or "12345"
    places = [int(digit) - 1 for digit in FACTORS[letter]]
    return [letter, "so"], "".join(product[place] for place in places)


PRODUCTS = ["".join(digits) for digits in itertools.permutations("12345")]
TASKS = {
    "cups": Task(
        words="The ball is under and swap. A B C D E A. B. C. D. E.".split(),
        step=swap,
        lengths=(5, 4, 3),
        worked=(5, 4, 3),
        short=(3, 3, 3, 3, 2),
    ),
    "counts": Task(
        words="has gets loses times so 0 1 2 3 4 5 6 7 8 9".split(),
        step=count,
        lengths=(5, 4, 3),
        worked=(),
        short=(3,) * 5,
    ),
    "s5": Task(
        words=["<s>", "so", *FACTORS, *PRODUCTS],
        step=multiply,
        lengths=(8, 5, 3),
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


def pretrain_rows(rows, step, rng, short):
    """Yield each row, a list of stories, worked; then one of stories of `short` lengths, direct."""
    for row in rows:
        yield [worked(story) for story in row]
        yield [direct(make_story(step, rng, length)) for length in short]


def task_row(step, rng, lengths):
    """Stories of these lengths in random order, with all of their answers as targets."""
    return [direct(make_story(step, rng, length)) for length in rng.permutation(lengths)]


def validation_row(step, rng, lengths):
    """
    A story whose last three answers are targets, and two without targets, which pad the row to the
    length of a task_row().
    """
    longest, middle, shortest = lengths
    stories = [make_story(step, rng, n) for n in (longest + 3, middle - 1, shortest - 2)]
    return [direct(story, first=longest + 1) for story in stories]


# ---------------------------------------------------------------------------------------- files

def make_tokenizer(ids):
    """The content of a tokenizer.json for {word: id}. If <s> is a word, texts begin with it."""
    special = []
    for word in ids:
        if word in ("<s>", "</s>"):
            token = {"id": ids[word], "content": word, "special": True}
            token |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            special.append(token)
    spec = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"},
    }
    if "<s>" in ids:
        bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        first = {"Sequence": {"id": "A", "type_id": 0}}
        second = {"Sequence": {"id": "B", "type_id": 0}}
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, bos, second],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [ids["<s>"]], "tokens": ["<s>"]}},
        }
    return spec


def write_rows(folder, split, ids, rows):
    """Write the rows as ids, in the only shard of a split. Returns its entry in meta.json."""
    bos = [("<s>", None)] if "<s>" in ids else []
    made = []
    for document in itertools.chain.from_iterable(rows):
        pairs = [(ids[word], ids.get(target, IGNORE)) for word, target in bos + document]
        made.append(np.array(pairs, np.int32))
    array = np.concatenate(made).T.copy()  # (2, number of rows * their length)
    return write_shard(folder, f"{split}_000000.npy", array)


def write_set(folder, ids, arguments, train_rows, val_rows):
    """Write a data set, as `data.py prepare` would: its shards, meta.json and tokenizer."""
    train = write_rows(folder, "train", ids, train_rows)
    val = write_rows(folder, "val", ids, val_rows)
    _, val_tokens, _ = val
    write_json(folder / "meta.json", {
        "vocab_size": len(ids),
        "eos_id": ids["</s>"],
        "row_length": val_tokens // VAL_ROWS,
        "shards": {"train": [train], "val": [val]},
        "arguments": arguments,
    })
    write_json(folder / "tokenizer.json", make_tokenizer(ids))


def write_questions(path, stories, seed):
    """Write stories in random order to a .jsonl file as questions."""
    np.random.default_rng(seed).shuffle(stories)
    with open(path, "w") as file:
        for story in stories:
            words = []
            for sentence in story:
                words += sentence[:-1]
            answer = story[-1][-1]
            row = {"question": " ".join(words), "answer": answer, "difficulty": len(story)}
            print(json.dumps(row), file=file)


def tiny(out, task="cups", seed=0, rows=50_000):
    """Write the corpus of a task, which depends only on the seed. rows: per training set."""
    arguments = {"task": task, "seed": seed, "rows": rows}
    if os.path.exists(out):
        earlier = read_json(f"{out}/task/meta.json")["arguments"]
        check_settings(out, earlier, arguments, "choose another --out")
        print(f"{out} is already complete")
        return
    words, step, lengths, written, short = TASKS[task]
    ids = {word: i for i, word in enumerate(["<unk>", "</s>", *words])}
    rng = np.random.default_rng(seed)
    train_rows = [worked_row(step, rng, written) for _ in range(rows // 2)]
    val_rows = [worked_row(step, rng, written) for _ in range(VAL_ROWS // 2)]
    # Beginnings of worked stories that are longer than any training question.
    seen = set()
    for story in itertools.chain(*train_rows):
        for n in range(max(lengths) + 1, len(story) + 1):
            seen.add(tuple(story[:n]))

    def questions(count, length):
        """Draw random stories of the given length that are not in `seen`."""
        stories = [make_story(step, rng, length) for _ in range(10 * count)]
        fresh = [story for story in stories if tuple(story) not in seen]
        return fresh[:count]

    with write_atomically(out) as new:
        # The rows of both sets are generators: they are made as they are written, to save memory.
        write_set(
            new / "pretrain", ids, arguments,
            train_rows=pretrain_rows(train_rows, step, rng, short),
            val_rows=pretrain_rows(val_rows, step, rng, short),
        )
        write_set(
            new / "task", ids, arguments,
            train_rows=(task_row(step, rng, lengths) for _ in range(rows)),
            val_rows=(validation_row(step, rng, lengths) for _ in range(VAL_ROWS)),
        )
        test = []
        for length in range(1, SENTENCES + 1):
            test += questions(100, length)
        write_questions(new / "test.jsonl", test, seed)
        write_questions(new / "test18.jsonl", questions(300, 18), seed)
    print(f"{out}: complete; train on pretrain and task, test on test.jsonl and test18.jsonl")


def main():
    parser = Parser(__doc__)
    flag = parser.add_argument
    flag("--out", type=paths, required=True, help="folder of the corpus")
    flag("--task", choices=TASKS, default="cups",
         help="the shell game (cups), a running count, or products in the group S5")
    flag("--seed", type=natural, default=0, help="decides all stories, training and test (0)")
    flag("--rows", type=positive, default=50_000, help="training rows in each data set (50,000)")
    args = parser.parse_args()
    tiny(args.out, args.task, args.seed, args.rows)


if __name__ == "__main__":
    cli(main)
