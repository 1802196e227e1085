"""
Checks of runs/task.sh before it trains anything.

    python -m runs.task check FOLDER        are the questions in order? Prints flags for prepare
    python -m runs.task fits [flags]        does a run of train.py with these flags fit in memory?
"""
import itertools
import json
import re
import sys
from pathlib import Path

from common import UserError, choose_dtype, cli, reading, say

import torch

from data import as_text, parse_chat, read_message
from eval_gsm8k import read_questions
from model import RecurrentLM, find_checkpoint, load_config
from runs.smollm2.cups import read_stories
from tools.plan import memory
from train import read_settings, run_config


def check(folder):
    """
    Return how `data.py prepare` reads FOLDER/train.jsonl, or "stories", which cups.py reads. Raises
    UserError if neither can.
    """
    train, test = (Path(folder, f"{name}.jsonl") for name in ("train", "test"))
    for path in train, test:
        if not path.exists():
            raise UserError(f"{path} does not exist. Put your questions there")
    tested = read_questions(test)
    asked = {question["question"] for question in tested}
    with reading(train), open(train, encoding="utf-8-sig") as file:
        first = json.loads(next(filter(str.strip, file), "{}"))
    chat = next((name for name in ("messages", "conversations") if name in first), None)
    end = str.isspace
    if chat:
        with reading(train), open(train, encoding="utf-8-sig") as file:
            rows = [parse_chat(json.loads(line)[chat]) for line in file if line.strip()]
            if "system" in [read_message(message)[0] for row in rows for message in row]:
                raise UserError(f"{train}: a chat has a system message, which the test cannot "
                                "give. Put it into the user's message, and into the questions of "
                                f"{test}")
            known = [as_text([message]) for row in rows for message in row]
            answers = [as_text(row[-1:]) for row in rows]
    elif "events" in first:
        stories, end = read_stories(train), str
        joints = {a[-1:] + b[:1] for events, _ in stories for a, b in itertools.pairwise(events)}
        if joints and not any(joint in text for text in asked for joint in joints):
            raise UserError(f"{train}: events meet as in {min(joints)!r}, which no question of "
                            f"{test} has. Is a space missing?")
        known = (text for events, _ in stories for text in itertools.accumulate(events))
        answers = []
    else:
        trained = read_questions(train)
        known, answers = ([question[key] for question in trained] for key in ("question", "answer"))
    last_lines = {answer.strip().rpartition("\n")[2] for answer in answers}
    if "####" in "".join(last_lines) and not any("####" in row["answer"] for row in tested):
        raise UserError(f"{train}: answers end like '#### 18', but none of {test} does, whose "
                        "longest answer limits what the model may write. Give both the same form")

    def shape(text):  # at its ends
        return text[:1].isspace(), end(text[-1:])

    both, shapes = set(), set()
    for text in known:
        both |= asked & {text, text.strip()}
        shapes.add(shape(text))
    for text in asked:
        if shape(text) not in shapes:
            raise UserError(f"{test}: the question {text!r:.100} begins or ends as none of {train} "
                            "does. Spaces and newlines count")
    if both:
        say(f"warning: {len(both)} of the {len(asked)} questions of {test} are also in {train}",
            sys.stderr)
    if "events" in first:
        return "stories"
    return f"--field {chat} --loss assistant" if chat else "--prompt question --field answer"


def free_memory(device):
    """Return the free bytes of a GPU, or of the machine; infinity where that is not known."""
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    about = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: +(\d+) kB", about.read_text() if about.exists() else "")
    return 1024 * int(found[1]) if found else float("inf")


def check_memory(settings):
    """Raise UserError if a run needs more memory, by the estimate of tools.plan, than is free."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings.dtype = choose_dtype(settings.dtype, device)
    config = run_config(settings, load_config(find_checkpoint(settings.init_from)))
    model = RecurrentLM.empty(config).to(getattr(torch, settings.dtype))
    needed, free = sum(memory(settings, model, 1).values()), free_memory(device) / 1e9
    if needed > free:
        raise UserError(f"{settings.out_dir}: training takes about {needed:.1f} GB in "
                        f"{settings.dtype}, and {free:.1f} GB are free. Try --micro_batch=1 and "
                        "--activation_budget=0.5, or a smaller model")


def main():
    command, *flags = sys.argv[1:] or [""]
    if command == "check" and len(flags) == 1:
        print(check(*flags))
    elif command == "fits":
        check_memory(read_settings(flags))
    else:
        raise UserError("usage: python -m runs.task check FOLDER, or fits [flags of train.py]")


if __name__ == "__main__":
    cli(main)
