"""
Make the corpus of tiny.sh and of the study, in a few seconds and without a download. Its two tasks
need depth: stories, a running count, and products in the group S5.

    python runs/tiny_corpus.py --out out/tiny/data
    python runs/tiny_corpus.py --out out/s5/data --task s5

Each sentence of a story needs all before it, so a model that is shallower than the story must reuse
its layers. The word `so` asks what a story has come to. "stories" is a running count: the answer to
`has 7 so loses 4 so times 3 so` is 9. "s5" multiplies permutations: `a so d so c so`. Training asks
short stories only, of up to 5 sentences (s5: 8). OUT gets two data sets of rows and two files of
questions:

    pretrain        worked stories of up to 11 sentences, in which every answer stands before the
                    next sentence, and stories whose first three answers are targets
    task            stories of 12 sentences without answers; training's targets are those of the
                    first 5, validation's those of the 6th to 8th (s5: 8, and the 9th to 11th)
    test.jsonl      100 questions of each length from 1 to 12 sentences; no training story begins
                    with one that is longer than training asks
    test18.jsonl    300 of 18 sentences, more than any row of training has
"""
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Parser, check_settings, cli, opening, positive, read_json, whole, write_json
from data import write_shard

SENTENCES = 12  # of a training story


class Task(NamedTuple):
    words: list     # of the vocabulary; with "<s>", rows begin with it
    step: Callable  # (state, draw below 60) -> words of a sentence, state after it, its answer
    asked: int      # sentences of the longest question in training
    prompt: str     # a sample


# ----------------------------------------------------------------------------------- two tasks

def count(total, draw):
    """A running count of which only the last digit matters: has 7 loses 4 times 3 gets 2 -> 1."""
    if total is None:
        return ["has", str(draw % 10)], draw % 10
    verb, x = divmod(draw % 12, 4)
    x = 2 + x % 2 if verb == 2 else 1 + x
    total = (total + x, total - x, total * x)[verb] % 10
    return [("gets", "loses", "times")[verb], str(x)], total


# Four random elements of S5, the group of permutations of five things.
FACTORS = dict(a="23514", b="31542", c="52413", d="41325")


def multiply(product, draw):
    """
    A product in S5: a d c -> 24153. The group is not solvable, so no shortcut of fixed depth is
    known (2503.03961). Rows begin with <s>: without it d d looks like d, since attention averages
    equal words.
    """
    letter = "abcd"[draw % 4]
    return [letter], "".join((product or "12345")[int(i) - 1] for i in FACTORS[letter])


TASKS = {
    "stories": Task("has gets loses times so 0 1 2 3 4 5 6 7 8 9".split(), count, 5,
                    "has 7 so loses 4 so times 3 so gets 2 so gets 1 so loses 4 so"),
    "s5": Task(["<s>", "so", *FACTORS, *map("".join, itertools.permutations("12345"))], multiply, 8,
               "a so d so c so b so b so a so d so"),
}


# ------------------------------------------------------------------------------ stories to rows

def make_stories(step, rng, n, length):
    """n stories of `length` sentences: tuples such as ("loses", "4", "so", "3")."""
    stories = []
    for draws in rng.integers(60, size=(n, length)):
        state = None
        story = []
        for draw in draws:
            words, state = step(state, draw)
            story.append((*words, "so", str(state)))
        stories.append(story)
    return stories


def worked(story):
    """`has 3 so 3 loses 4 so 9 </s>`, a document that says each answer: [(word, target), ...]"""
    words = [*itertools.chain(*story), "</s>"]
    return list(itertools.zip_longest(words, words[1:]))


def direct(story, asked):
    """`has 3 so loses 4 so </s>`; asked: numbers of the sentences whose answer is a target."""
    document = []
    for i, (*words, so, answer) in enumerate(story, 1):
        document += [(word, None) for word in words]
        document.append((so, answer if i in asked else None))
    return [*document, ("</s>", None)]


def pretrain_rows(stories, rng):
    """Rows of two stories, in turn worked, 12 sentences in all, and direct with three answers."""
    rows = []
    first = range(1, 4)
    words = len(stories[0][0])  # of a sentence with its answer
    short = SENTENCES * words // (2 * (words - 1))  # direct rows are as long as worked ones
    for i, (a, b) in enumerate(zip(stories[::2], stories[1::2])):
        n = rng.integers(1, SENTENCES)
        if i % 2:
            rows.append(direct(a[:short], first) + direct(b[:short], first))
        else:
            rows.append(worked(a[:n]) + worked(b[:SENTENCES - n]))
    return rows


def task_rows(stories, asked):
    """A story a row."""
    return [direct(story, asked) for story in stories]


# ---------------------------------------------------------------------------------------- files

def make_tokenizer(ids):
    """
    The tokenizer.json of {word: id}, which the tokenizers library and transformers read, too. If
    there is a word <s>, each text begins with it.
    """
    special = [dict(id=ids[word], content=word, special=True, single_word=False, lstrip=False,
                    rstrip=False, normalized=False) for word in ids if word in ("<s>", "</s>")]
    spec = dict(version="1.0", added_tokens=special, pre_tokenizer={"type": "WhitespaceSplit"},
                model={"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"})
    if "<s>" in ids:
        bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        first = {"Sequence": {"id": "A", "type_id": 0}}
        second = {"Sequence": {"id": "B", "type_id": 0}}
        spec["post_processor"] = dict(
            type="TemplateProcessing", single=[bos, first], pair=[bos, first, bos, second],
            special_tokens={"<s>": dict(id="<s>", ids=[ids["<s>"]], tokens=["<s>"])})
    return spec


def write_rows(folder, split, ids, rows):
    """Write a split's only shard: rows of (word, target) pairs as ids -> its entry in meta.json."""
    bos = [("<s>", None)] if "<s>" in ids else []
    tokens = [[ids.get(word, -100) for word in pair] for row in rows for pair in bos + row]
    array = np.array(tokens, np.int32).T.copy()  # (2, number of rows * their length)
    return write_shard(folder, f"{split}_000000.npy", array)


def write_questions(path, stories):
    """Write stories to a .jsonl file as questions."""
    with open(path, "w") as file:
        for story in stories:
            question = " ".join(word for sentence in story for word in sentence[:-1])
            row = dict(question=question, answer=story[-1][-1], difficulty=len(story))
            print(json.dumps(row), file=file)


def tiny(out, task="stories", seed=0, rows=80_000):
    """Write the corpus of a task, which follows from the seed alone. rows: training stories."""
    arguments = dict(task=task, seed=seed, rows=rows)
    if os.path.exists(out):
        earlier = read_json(f"{out}/task/meta.json")["arguments"]
        check_settings(out, earlier, arguments, "choose another --out")
        return print(f"{out}: is complete, nothing to do")
    task = TASKS[task]
    ids = {word: i for i, word in enumerate(["<unk>", "</s>", *task.words])}
    rng = np.random.default_rng(seed)
    seen = set()  # how training stories begin, where that is longer than a question of training
    with whole(out) as new:
        for kind in ("pretrain", "task"):
            shards = {}
            for split, n in (("train", rows), ("val", 1024)):
                stories = make_stories(task.step, rng, n, SENTENCES)
                if split == "train":
                    seen |= {tuple(story[:n]) for story in stories
                             for n in range(task.asked + 1, SENTENCES + 1)}
                if kind == "pretrain":
                    made = pretrain_rows(stories, rng)
                elif split == "train":
                    made = task_rows(stories, range(1, task.asked + 1))
                else:
                    made = task_rows(stories, range(task.asked + 1, task.asked + 4))
                shards[split] = [write_rows(new / kind, split, ids, made)]
            row = shards[split][0][1] // len(made)  # tokens in one
            meta = dict(vocab_size=len(ids), eos_id=ids["</s>"], row=row, shards=shards,
                        arguments=arguments, prompt=task.prompt)
            write_json(new / kind / "meta.json", meta)
            write_json(new / kind / "tokenizer.json", make_tokenizer(ids))
        for name, n, lengths in (("test.jsonl", 100, range(1, SENTENCES + 1)),
                                 ("test18.jsonl", 300, [18])):
            questions = []
            for length in lengths:
                stories = make_stories(task.step, rng, 10 * n, length)
                fresh = [story for story in stories if tuple(story) not in seen]
                questions += fresh[:n]
            np.random.default_rng(seed).shuffle(questions)
            write_questions(new / name, questions)
    print(f"{out}: complete; train on pretrain and task, test on test.jsonl and test18.jsonl")


def main():
    parser = Parser(description=opening(__doc__))
    flag = parser.add_argument
    flag("--out", required=True, help="folder of the corpus")
    flag("--task", choices=TASKS, default="stories",
         help="a running count (stories), or products in the group S5")
    flag("--rows", type=positive, default=80_000, help="training stories of each data set (80,000)")
    args = parser.parse_args()
    tiny(args.out, args.task, rows=args.rows)


if __name__ == "__main__":
    cli(main)
