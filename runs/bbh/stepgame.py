"""
Make StepGame (Shi et al., AAAI 2022, MIT) a task for runs/task.sh.

    python -m runs.bbh.stepgame FILES OUT

FILES is the folder with qa1_train.json(.gz) and the like, StepGame's Dataset/CompleteVersion/clean.
train.jsonl has the official training stories of 1 to 5 sentences. test.jsonl has at most 200 of
the official test stories for each number of hops, the shortest path between the two letters that
are asked about, and sentences.jsonl 100 for each number of sentences, 1 to 10; those of 7 and more
are the official validation stories, since the test stories are not at hand.

A sentence means what it means in the training stories of one sentence. Stories with a sentence that
has several meanings there, which is noise of the data, are left out, and every label is checked.
"""
import gzip
import json
import random
import re
from collections import Counter, defaultdict
from pathlib import Path

from common import Parser, cli, new_folder, reading, say, write_atomically

MOVES = {"left": (-1, 0), "right": (1, 0), "above": (0, 1), "below": (0, -1),
         "upper-left": (-1, 1), "upper-right": (1, 1), "lower-left": (-1, -1),
         "lower-right": (1, -1), "overlap": (0, 0)}
QUESTION = re.compile(r"What is the relation of the agent (\w) to the agent (\w)\?")


def read(folder, name):
    """Return the stories of a file, NAME.json or NAME.json.gz."""
    path = Path(folder, f"{name}.json")
    if not path.exists():
        path = path.with_suffix(".json.gz")
    with reading(path):
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        return list(json.loads(content).values())


def split_letters(sentence):
    """Return a sentence with its letters replaced, and the letters in the order of mention."""
    letters = list(dict.fromkeys(re.findall(r"\b[A-Z]\b", sentence)))
    for i, letter in enumerate(letters):
        sentence = re.sub(rf"\b{letter}\b", f"<{i}>", sentence)
    return sentence, letters


def meanings(stories):
    """
    Return {sentence: (dx, dy)}, where the first letter is as seen from the second, of those with
    a single meaning.
    """
    seen = defaultdict(Counter)
    for story in stories:
        text, letters = split_letters(story["story"][0])
        if len(letters) == 2:
            dx, dy = MOVES[story["label"]]
            target, _ = QUESTION.fullmatch(story["question"]).groups()
            seen[text][(dx, dy) if target == letters[0] else (-dx, -dy)] += 1
    return {text: next(iter(count)) for text, count in seen.items() if len(count) == 1}


def solve(story, known):
    """Return (hops, answer), or None if a sentence is unknown or has several meanings."""
    steps = defaultdict(dict)
    for sentence in story["story"]:
        text, letters = split_letters(sentence)
        if text not in known or len(letters) != 2:
            return None
        (a, b), (dx, dy) = letters, known[text]
        steps[b][a], steps[a][b] = (dx, dy), (-dx, -dy)
    target, start = QUESTION.fullmatch(story["question"]).groups()
    places, todo = {start: (0, 0, 0)}, [start]
    for node in todo:  # grows while it is read: breadth first
        x, y, hops = places[node]
        for other, (dx, dy) in steps[node].items():
            if other not in places:
                places[other] = x + dx, y + dy, hops + 1
                todo.append(other)
    x, y, hops = places[target]
    sign = (x > 0) - (x < 0), (y > 0) - (y < 0)
    return hops, next(name for name, move in MOVES.items() if move == sign)


def sample(lines, count):
    """Return the first `count` lines of each difficulty, in order."""
    seen, kept = Counter(), []
    for line in lines:
        seen[line["difficulty"]] += 1
        if seen[line["difficulty"]] <= count:
            kept.append(line)
    return sorted(kept, key=lambda line: int(line["difficulty"]))


def write_lines(path, lines):
    """Write a .jsonl file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main():
    parser = Parser(__doc__)
    parser.add_argument("files", metavar="FILES")
    parser.add_argument("out", metavar="OUT", type=new_folder)
    args = parser.parse_args()
    known = meanings(read(args.files, "qa1_train"))
    rng = random.Random(0)
    with write_atomically(args.out) as folder:
        folder.mkdir()
        for split, ks in ("train", range(1, 6)), ("test", range(1, 11)):
            lines, left_out = [], 0
            for k in ks:
                for story in read(args.files, f"qa{k}_{split if k < 7 else 'valid'}"):
                    solved = solve(story, known)
                    if solved and solved[1] == story["label"]:
                        question = " ".join([*story["story"], story["question"]])
                        lines.append({"question": question, "answer": story["label"],
                                      "difficulty": str(solved[0]), "k": k})
                    else:
                        left_out += 1
            rng.shuffle(lines)
            say(f"{split}: {len(lines)} stories, {left_out} left out")
            if split == "train":
                write_lines(folder / "train.jsonl", lines)
                continue
            write_lines(folder / "test.jsonl", sample(lines, 200))
            by_k = sample([line | {"difficulty": str(line["k"])} for line in lines], 100)
            write_lines(folder / "sentences.jsonl", by_k)


if __name__ == "__main__":
    cli(main)
