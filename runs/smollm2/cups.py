"""
Make the data of the experiment with SmolLM2: the shell game, told in plain English, with an answer
after each event.

    python -m runs.smollm2.cups --tokenizer out/smollm2/cut --out out/smollm2/cups

In ` The ball is under B. B and D swap. A and C swap.` each full stop asks under which of five cups
the ball is now: B, D and D. The answers are targets only and not part of the text. In 60% of the
swaps the ball's cup and another one change places, otherwise two of the others. A training row
holds three stories, of 3, 4 and 5 events in random order; a validation row holds one of 12 events.
OUT is a data set for train.py. In it, test.jsonl has 400 stories of 24 events and dev.jsonl 200
others, whose answers score.py scores after each event. fair.jsonl has 400 more, whose swaps are of
any two cups, so that they do not betray where the ball is, and fair48.jsonl 400 of 48 events. With
--written, targets are the steps that the model writes after a story: ` B D D` (places), or
` The ball is under B: B. B and D swap: D. A and C swap: D.` (events).
"""
import functools
from pathlib import Path

from common import Parser, UserError, cli, paths, positive

import numpy as np

from data import Tokenizer
from model import IGNORE
from runs.stories import encode_story, write_data

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


def lengths(text):
    """The type of --lengths: "3-24" becomes range(3, 25)."""
    first, last = map(positive, text.split("-"))
    return range(first, last + 1)


def main():
    parser = Parser(__doc__)
    flag = parser.add_argument
    flag("--tokenizer", type=paths, required=True, metavar="FOLDER")
    flag("--out", type=paths, required=True, metavar="FOLDER", help="folder of the new data set")
    flag("--lengths", type=lengths, default="3-5", metavar="A-B",
         help="events in a training story (3-5)")
    flag("--written", choices=WRITTEN, help="let the model write its steps after each story")
    flag("--row_length", type=positive, default=66, metavar="T",
         help="tokens in a row: those of its stories, with BOS and EOS (66, for three stories)")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer)

    encode = functools.partial(encode_written, form=args.written) if args.written else encode_story
    rng = np.random.default_rng(0)
    times = 480_000 // sum(args.lengths)  # stories of each length
    # Drawn when they are written, one after another.
    told = {"train": (tell(rng, n) for _ in range(times) for n in rng.permutation(args.lengths)),
            "val": (tell(rng, 12) for _ in range(256))}
    encoded = {split: (encode(tokenizer, *story) for story in stories)
               for split, stories in told.items()}
    tests = ((name, [tell(rng, length, share) for _ in range(count)])
             for name, count, length, share in TESTS)
    made_from = {"lengths": [*args.lengths], "written": args.written,
                 "row_length": args.row_length}
    write_data(Path(args.out), tokenizer, encoded, made_from, tests)


if __name__ == "__main__":
    cli(main)
