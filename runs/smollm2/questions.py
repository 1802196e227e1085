"""
Make a game a task of your own, for runs/task.sh: questions with their final answers, or stories
with an answer after each event.

    python -m runs.smollm2.questions --out out/mine
    python -m runs.smollm2.questions --out out/steps --steps
    python -m runs.smollm2.questions --out out/counts --game counts

A line of the shell game is {"question": "The ball is under B. B and D swap. A and C swap.",
"answer": "D", "difficulty": "3"}: the difficulty is the number of events. Every two cups are as
likely to swap. Counts, such as "Tom has 7, loses 4, gets 2,", stay between 0 and 9. train.jsonl
has 40,000 questions of 1 to 5 events, with repeats; dev.jsonl and test.jsonl have 100 and 200
others of each of the LENGTHS. With --steps, the lines of train.jsonl are stories, which begin with
none of those: {"events": ["The ball is under B.", " B and D swap."], "answers": [" B", " D"]}.
"""
import itertools

from common import Parser, cli, creating, new_folder

import numpy as np

from runs.smollm2.cups import tell
from runs.stories import write_lines

LENGTHS = 3, 4, 5, 6, 7, 8, 10, 12, 16
NAMES = "Tom Anna Ben Mary Sam Lucy Jack Emma".split()


def count(rng, length):
    """Return the events of a story and the count after each of them, as text; see cups.tell()."""
    total = int(rng.integers(10))
    events, counts = [f"{rng.choice(NAMES)} has {total},"], [str(total)]
    while len(events) < length:
        change = int(rng.integers(-4, 5))
        if change and 0 <= total + change <= 9:
            total += change
            events.append(f" {'gets' if change > 0 else 'loses'} {abs(change)},")
            counts.append(str(total))
    return events, counts


def main():
    parser = Parser(__doc__)
    parser.add_argument("--out", type=new_folder, required=True, metavar="FOLDER")
    parser.add_argument("--game", choices=["cups", "counts"], default="cups")
    parser.add_argument("--steps", action="store_true", help="an answer after each event")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    train = rng.choice([1, 2, 3, 4, 5], 40_000, p=[0.2] * 5)  # without p, other draws
    asked = set()
    files = {}
    for name, lengths in (("test", LENGTHS * 200), ("dev", LENGTHS * 100), ("train", train)):
        questions = files[name] = []
        while len(questions) < len(lengths):
            length = int(lengths[len(questions)])
            events, answers = (tell(rng, length, share=0.4) if args.game == "cups" else
                               count(rng, length))
            events[0] = events[0].strip()
            question = "".join(events)
            steps = args.steps and name == "train"  # then the start of a story is asked, too
            if asked.isdisjoint(itertools.accumulate(events) if steps else [question]):
                questions.append({"events": events, "answers": answers} if steps else
                                 {"question": question, "answer": answers[-1].strip(),
                                  "difficulty": str(length)})
        asked |= {line["question"] for line in questions if name != "train"}
    with creating(args.out):
        for name, questions in files.items():
            write_lines(args.out / f"{name}.jsonl", questions)


if __name__ == "__main__":
    cli(main)
