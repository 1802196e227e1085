"""
Turn stories with an answer after each event into a data set for train.py.

    python -m runs.stories --input FILE.jsonl --tokenizer out/smollm2/cut --out out/mine/data

Each line of FILE is a story:

    {"events": ["The ball is under B.", " B and D swap."], "answers": [" B", " D"]}

The answers are targets only and not part of the text. So an answer has to be a single token after
its event, here with the space before it. A twentieth of the stories, drawn at random, is for
validation. --test checks that the questions of a test are such stories, too, with one answer at the
end. runs/task.py does all of this with a folder of your own.
"""
import itertools
import json
import math
import sys
from pathlib import Path

from common import (Parser, UserError, check_settings, cli, creating, digest, paths, positive,
                    read_json, reading, say)

import numpy as np

from data import Tokenizer, copy_tokenizer, write_meta, write_shard
from eval_gsm8k import read_questions, reference_text
from model import IGNORE


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
            are_texts = type(events) is list and {*map(type, events + answers)} == {str}
            if not are_texts or len(events) != len(answers):
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
    answer is not a single token. Questions have their answers without the space before them. Warns
    if stories begin with questions.
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
    told = {text for events, _ in stories for text in itertools.accumulate(events)}
    if known := sum(row["question"] in told for row in tested):
        say(f"warning: the stories have {known} questions of {path}", sys.stderr)


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


def write_lines(path, lines):
    """Write a .jsonl file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_data(folder, tokenizer, encoded, made_from, tests=()):
    """
    Write a data set, unless the folder has it already. encoded: {split: the ids and targets of its
    stories}. made_from: its settings, with the "row_length". tests: (name, stories) of .jsonl files
    to be put beside it. Raises UserError if the folder has another data set.
    """
    if (folder / "meta.json").exists():
        made_from = made_from | {"tokenizer": tokenizer.fingerprint}
        check_settings(folder, read_json(folder / "meta.json"), made_from, "Choose another folder")
        say(f"{folder} is already complete")
        return
    if tokenizer.eos_id is None:
        raise UserError(f"{tokenizer.folder}: has no known end-of-text token to end a story with. "
                        "Name it as eos_token in tokenizer_config.json")
    with creating(folder):
        shards = {}
        for split, stories in encoded.items():
            tokens = pack(stories, tokenizer.eos_id, made_from["row_length"])
            shards[split] = [write_shard(folder, f"{split}_000000.npy", tokens)]
        copy_tokenizer(tokenizer.folder, folder)
        for name, told in tests:
            write_lines(folder / f"{name}.jsonl",
                        ({"events": events, "answers": answers} for events, answers in told))
        write_meta(folder, tokenizer, shards, **made_from)


def main():
    parser = Parser(__doc__)
    flag = parser.add_argument
    flag("--input", type=paths, required=True, metavar="FILE", help="the stories")
    flag("--tokenizer", type=paths, required=True, metavar="FOLDER")
    flag("--out", type=paths, required=True, metavar="FOLDER", help="folder of the new data set")
    flag("--row_length", type=positive, default=512, metavar="T",
         help="tokens in a row, which holds whole stories (512)")
    flag("--test", type=paths, metavar="FILE", help="questions to check")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer)
    stories = read_stories(args.input)
    if args.test:
        check_test(args.test, stories, tokenizer)
    drawn = np.random.default_rng(0).permutation(len(stories))
    held_out = math.ceil(len(stories) / 20)
    encoded = {split: (encode_story(tokenizer, *stories[i]) for i in sorted(part))
               for split, part in (("train", drawn[held_out:]), ("val", drawn[:held_out]))}
    made_from = {"stories": digest(args.input), "row_length": args.row_length}
    write_data(Path(args.out), tokenizer, encoded, made_from)


if __name__ == "__main__":
    cli(main)
