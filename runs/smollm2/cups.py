"""
Make data that asks for an answer after each step of a story: for the experiment with SmolLM2, the
shell game, told in plain English; or your own stories.

    python -m runs.smollm2.cups --tokenizer out/smollm2/cut --out out/smollm2/cups
    python -m runs.smollm2.cups --tokenizer out/smollm2/cut --out out/mine/data --stories FILE.jsonl

In ` The ball is under B. B and D swap. A and C swap.` each full stop asks under which of five cups
the ball is now: B, D and D. The answers are targets only and not part of the text. In 60% of the
swaps the ball's cup and another one change places, otherwise two of the others. A training row
holds three stories, of 3, 4 and 5 events in random order; a validation row holds one of 12 events.
OUT is a data set for train.py. In it, test.jsonl has 400 stories of 24 events and dev.jsonl 200
others, whose answers score.py scores after each event. fair.jsonl has 400 more, whose swaps are of
any two cups, so that they do not betray where the ball is, and fair48.jsonl 400 of 48 events. With
--written, targets are the steps that the model writes after a story: ` B D D` (places), or
` The ball is under B: B. B and D swap: D. A and C swap: D.` (events).

A line of --stories is a story:

    {"events": ["The ball is under B.", " B and D swap."], "answers": [" B", " D"]}

An answer has to be a single token after its event, here with the space before it. A twentieth of
the stories, drawn at random, is for validation. --test checks that the questions of a test are such
stories, too, with one answer at the end.
"""
import itertools
import json
import math
from pathlib import Path

from common import (Parser, UserError, check_settings, cli, creating, digest, paths, positive,
                    read_json, reading, write_json)

import numpy as np

from data import Tokenizer, copy_tokenizer, write_shard
from eval_gsm8k import read_questions, reference_text
from model import IGNORE

CUPS = "ABCDE"

# Name, stories, events in each, and share: see tell().
TESTS = (("dev", 200, 24, 0.6), ("test", 400, 24, 0.6),
         ("fair", 400, 24, 0.4), ("fair48", 400, 48, 0.4))

# How a model writes its steps: what it writes for each event. The last letter is its answer.
WRITTEN = {
    "events": lambda events, answers: [f"{e[:-1]}:{a}." for e, a in zip(events, answers)],
    "places": lambda events, answers: answers,
}


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
    """
    Return ids and targets, two lists: the answer is the target of an event's last token. The ids
    are those of the whole text, as a question of eval_gsm8k.py has them.
    """
    text = ""
    ids = tokenizer.encode(text, bos=True)
    targets = [IGNORE] * len(ids)
    for event, answer in zip(events, answers, strict=True):
        text += event
        before, ids = ids, tokenizer.encode(text, bos=True)
        if ids[:len(before)] != before or len(ids) == len(before):
            raise UserError(f"the event {event!r} has no tokens of its own in {text!r:.100}. Begin "
                            "events with a space, and end none with one")
        *asked, target = tokenizer.encode(text + answer, bos=True)
        if asked != ids:
            raise UserError(f"the answer {answer!r} is not one token of its own after {event!r}")
        targets += [IGNORE] * (len(ids) - len(before) - 1) + [target]
    return ids, targets


def encode_written(tokenizer, events, answers, form):
    """
    Return ids and targets of a story and the steps that a model writes after it, in one of the
    forms WRITTEN, up to EOS. Only what it writes is a target.
    """
    asked = tokenizer.encode("".join(events), bos=True)
    steps = WRITTEN[form](events, answers)
    ids = tokenizer.encode("".join([*events, *steps]), bos=True)
    if ids[:len(asked)] != asked:
        raise UserError(f"{steps[0]!r} has no tokens of its own after {events[-1]!r}")
    return ids, [IGNORE] * (len(asked) - 1) + ids[len(asked):] + [tokenizer.eos_id]


def pack(stories, eos_id, length):
    """
    Return the tokens (2, N) of rows of as many whole stories as fit, padded with EOS. stories: ids
    and targets of each.
    """
    rows, room = [], 0
    for ids, targets in stories:
        size = len(ids) + 1
        if size > length:
            raise UserError(f"a story has {size} tokens with its EOS. Give a larger --row_length")
        if size > room:
            rows.append(np.full((2, length), [[eos_id], [IGNORE]], np.int32))
            room = length
        start = length - room
        rows[-1][:, start:start + size] = [*ids, eos_id], [*targets, IGNORE]
        room -= size
    return np.concatenate(rows, axis=1)


def read_stories(path):
    """Return the stories of a .jsonl file, [(events, answers), ...]: see the top."""
    with reading(path):
        lines = Path(path).read_text("utf-8-sig").split("\n")
    stories = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            story = json.loads(line)
            events, answers = story["events"], story["answers"]
            if {*map(type, events + answers)} != {str} or len(events) != len(answers):
                raise ValueError("as many answers as events, all of them texts")
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f'{path}: line {number} is not a story with "events" and "answers" '
                            f"({e!r})")
        stories.append((events, answers))
    if len(stories) < 2:
        raise UserError(f"{path}: too few stories")
    return stories


def check_test(path, stories, tokenizer):
    """
    Raise UserError if a question of a test does not begin, go on and end as stories do, or if its
    answer is not a single token. Questions have their answers without the space before them.
    """
    tested = read_questions(path)
    ends = {(events[0][:1] == " ", event[-1:]) for events, _ in stories for event in events}
    joints = {a[-1:] + b[:1] for events, _ in stories for a, b in itertools.pairwise(events)}
    text = "\n".join(row["question"] for row in tested)
    is_joined = not joints or any(joint in text for joint in joints)
    _, (answer, *_) = stories[0]
    space = " " * answer.startswith(" ")
    for row in tested:
        question = row["question"]
        if not is_joined or (question[:1] == " ", question[-1:]) not in ends:
            raise UserError(f"{path}: the question {question!r:.100} begins, goes on or ends as no "
                            "story does. Spaces and newlines count")
        encode_story(tokenizer, [question], [space + reference_text(row["answer"])])


def write_lines(path, lines):
    """Write a .jsonl file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def lengths(text):
    """The type of --lengths: "3-24" becomes range(3, 25)."""
    first, last = map(positive, text.split("-"))
    return range(first, last + 1)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--tokenizer", type=paths, required=True, metavar="FOLDER")
    parser.add_argument("--out", type=paths, required=True, metavar="FOLDER")
    parser.add_argument("--stories", type=paths, metavar="FILE",
                        help="your own; default: the shell game")
    parser.add_argument("--test", type=paths, metavar="FILE", help="questions to check with them")
    parser.add_argument("--lengths", type=lengths, default="3-5", metavar="A-B",
                        help="events in the shell game's training stories (3-5)")
    parser.add_argument("--written", choices=WRITTEN,
                        help="let the model write its steps after each story")
    parser.add_argument("--row_length", type=positive, default=66,
                        help="tokens in a row: those of its stories, with BOS and EOS (66, for "
                             "three stories of the shell game)")
    args = parser.parse_args()
    made_from = {
        "stories": args.stories and digest(args.stories),
        "lengths": [*args.lengths],
        "written": args.written,
        "row_length": args.row_length,
    }
    tokenizer = Tokenizer.load(args.tokenizer)
    own = read_stories(args.stories) if args.stories else []
    if own and args.test:
        check_test(args.test, own, tokenizer)
    folder = Path(args.out)
    if (folder / "meta.json").exists():
        earlier = read_json(folder / "meta.json")
        check_settings(folder, earlier, made_from, "Choose another folder")
        return
    if tokenizer.eos_id is None:
        raise UserError(f"{args.tokenizer}: has no known end-of-text token to end a story with. "
                        "Name it as eos_token in tokenizer_config.json")
    rng = np.random.default_rng(0)
    if own:
        drawn, held_out = rng.permutation(len(own)), math.ceil(len(own) / 20)
        train, val = ([own[i] for i in sorted(part)]
                      for part in (drawn[held_out:], drawn[:held_out]))
    else:
        times = 480_000 // sum(args.lengths)  # stories of each length
        train = (tell(rng, n) for _ in range(times) for n in rng.permutation(args.lengths))
        val = (tell(rng, 12) for _ in range(256))
    with creating(folder):
        shards = {}
        for split, stories in ("train", train), ("val", val):
            encoded = (encode_written(tokenizer, *story, args.written) if args.written else
                       encode_story(tokenizer, *story) for story in stories)
            tokens = pack(encoded, tokenizer.eos_id, args.row_length)
            shards[split] = [write_shard(folder, f"{split}_000000.npy", tokens)]
        copy_tokenizer(args.tokenizer, folder)
        for name, count, length, share in () if args.stories else TESTS:
            told = (tell(rng, length, share) for _ in range(count))
            write_lines(folder / f"{name}.jsonl",
                        ({"events": events, "answers": answers} for events, answers in told))
        write_json(folder / "meta.json", {
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "tokenizer": tokenizer.fingerprint,
            "shards": shards,
        } | made_from)


if __name__ == "__main__":
    cli(main)
