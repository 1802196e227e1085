"""
Ask a model the questions of GSM8K, or your own, at several numbers of recurrences r.

    python eval_gsm8k.py --model out/llama-4-6-4 --steps 1,2,4,8,16,32
    python eval_gsm8k.py --model out/tiny/task --data out/tiny/data/test.jsonl \\
        --template plain --max_new_tokens 1

With --dtype float32, this follows the paper, which used the task gsm8k_cot_zeroshot of
lm-evaluation-harness 0.4.13 with --num_fewshot 1: greedy, at most 256 new tokens. "flexible" scores
the last number of the output, "strict" the one after "The answer is". For other tasks, run the
harness itself on an export (runs/README.md has the commands).

Each line of --data is {"question": ..., "answer": "... #### 18"}, with a "difficulty" if accuracy
should be broken down by it. With --template plain, the prompt is the question alone, answers may be
8 tokens longer than the longest reference, and there is one score, "accuracy": see same_answer().

Outputs are kept in a file beside the summary, and scored anew by each command. So the same command
resumes an evaluation that was killed, and more --steps or a larger --limit ask only what is new.
If the weights, what is asked, or the code that answers has changed, the file is set aside.

    torchrun --nproc_per_node=4 eval_gsm8k.py ...      # each GPU answers every fourth batch
"""
import hashlib
import json
import math
import random
import re
import sys
import unicodedata
from dataclasses import asdict
from decimal import Decimal
from itertools import chain
from pathlib import Path

from common import (DTYPE_HELP, DTYPES, RANK, WORLD, Parser, UserError, changed_keys, choose_dtype,
                    cli, code_of, digest, join_ranks, paths, positive, random_seed, read_json,
                    reading, recurrences, say, write_atomically, write_json, yes_or_no)

import requests
import torch
import torch.distributed as dist

from data import as_text, load_tokenizer, read_optional
from model import find_checkpoint, load_config
from sample import DEPTHS, DEVICE, Decoder, answer_batch, device_and_dtype, load_model

GSM8K = "out/data/gsm8k.jsonl"
GSM8K_URL = ("https://raw.githubusercontent.com/openai/grade-school-math/master/"
             "grade_school_math/data/test.jsonl")

# The first of the chain-of-thought examples of Wei et al. (arXiv 2201.11903).
EXAMPLE = """\
Q: There are 15 trees in the grove. Grove workers will plant trees in the grove today. After they \
are done, there will be 21 trees. How many trees did the grove workers plant today?
A: Let's think step by step. There are 15 trees originally. Then there were 21 trees after some \
more were planted. So there must have been 21 - 15 = 6. The answer is 6.

"""
STOPS = ("Q:", "</s>", "<|im_end|>")  # plain substrings; the tokenizer's EOS ends a text as well
INVALID = "[invalid]"


# ---------------------------------------------------------------------------------------- questions

def fetch_gsm8k():
    """Download GSM8K's 1,319 test questions, once."""
    if not Path(GSM8K).exists():
        say(f"downloading {GSM8K_URL} to {GSM8K}", sys.stderr)
        response = requests.get(GSM8K_URL, timeout=60)
        response.raise_for_status()
        with write_atomically(GSM8K) as new:
            new.write_bytes(response.content)


def read_questions(path):
    """
    Read a .jsonl file of questions (see the top). Returns a list of dicts, such as
    {"question": "The ball is under B.", "answer": "B", "difficulty": "1", "index": 0}. "index"
    counts the questions; "difficulty" may be None. Raises UserError if a line is not a question.
    """
    questions = []
    with reading(path):
        lines = Path(path).read_text("utf-8-sig").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():  # files may have empty lines
            continue
        try:
            row = json.loads(line)
            question = {key: as_text(row[key]) for key in ("question", "answer")}
            if not (question["question"].strip() and reference_text(question["answer"])):
                raise ValueError("one of them is empty")
            level = row.get("difficulty")
            question["difficulty"] = None if level is None else as_text(level).strip() or None
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f'{path}: line {number} is not a JSON object with "question" and '
                            f'"answer" ({e!r})')
        questions.append(question | {"index": len(questions)})
    if not questions:
        raise UserError(f"{path} has no questions")
    return questions


def make_prompt(question, template="cot"):
    """Return the text that the model continues: the question, for "cot" as the paper asks it."""
    if template == "plain":
        return question
    return f"{EXAMPLE}Q: {question}\nA: Let's think step by step."


def encode_prompts(questions, tokenizer, template, room):
    """
    Add to each question the "ids" of its prompt. One that is longer than `room` loses its
    beginning, as in the harness.
    """
    count_cut = 0
    for question in questions:
        ids = tokenizer.encode(make_prompt(question["question"], template), bos=True)
        question["ids"] = ids[-room:]
        count_cut += len(ids) > room
    if count_cut:
        say(f"{count_cut} prompts lose their beginning, because --max_new_tokens leaves only "
            f"{room} tokens of the model's context", sys.stderr)


# ------------------------------------------------------------------------------ scores of an answer

def flexible_extract(text):
    """Return the last number, by the harness's pattern, which also matches a lone "..."."""
    found = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
    return found[-1] if found else INVALID


def strict_extract(text):
    """
    Return the number in the first "The answer is NUMBER", by the harness's pattern, which requires
    one more character after the number, so a number at the end of a line loses its last digit.
    """
    found = re.search(r"The answer is (-?[0-9.,]+).", text)
    return found[1] if found else INVALID


def normalize(text):
    """
    Drop commas, dollar signs, everything up to "####" and a final period, as the harness's
    exact_match does, and spaces at the ends. It then compares text, so "18.00" is not "18".
    """
    for pattern in (",", r"\$", r"(?s).*####", r"\.$"):
        text = re.sub(pattern, "", text).strip()
    return text.lower()


# A number in the output of --template plain, such as -3, .5, 1.5e6 or $1,234.50. A comma belongs to
# it only before groups of three digits. A minus may be U+2212, and follows no letter: not in "B-3".
DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
NUMBER = re.compile(rf"(?:(?<!\w)[\u2212-])?\$?{DIGITS}(?:[eE][+-]?\d{{1,3}}(?!\d))?")


def last_number(text):
    """Return the last number in a text, such as Decimal("1234.5") for "3 or $1,234.50", or None."""
    found = NUMBER.findall(text)
    return Decimal(re.sub("[$,]", "", found[-1]).replace("\u2212", "-")) if found else None


def reference_text(answer):
    """Return the text of a reference answer: what follows its last "####", if it has one."""
    text = unicodedata.normalize("NFC", answer)  # as Qwen's tokenizer makes it
    return text.rpartition("####")[2].strip().removesuffix(".").rstrip()


def reference_number(answer):
    """
    Return the number that a reference answer is, or that follows its only equals sign, else None. A
    number beside other words does not count: it may be part of a date or of a room's name. Nor does
    one with a leading zero, such as 007 or 0110: it is a name, or a state.
    """
    text = re.sub(r"^([^=]*[^=<>!])?=", "", reference_text(answer)).strip()
    is_name = re.match(r"[\u2212-]?\$?0,?\d", text)
    return last_number(text) if NUMBER.fullmatch(text) and not is_name else None


def same_answer(output, answer):
    """
    Whether an output is right when the prompt asks for no particular answer format. If the
    reference is a number, the last number of the output must equal it. Otherwise the whole text
    must, ignoring case, spaces after commas and a final period.
    """
    number = reference_number(answer)
    if number is None:
        said, wanted = (reference_text(x).lower().replace(", ", ",") for x in (output, answer))
        return said == wanted
    return last_number(output) == number


# What is scored with each template, as {metric: (output, reference) -> whether it is right}.
METRICS = {
    "cot": {
        "flexible": lambda output, answer: normalize(flexible_extract(output)) == normalize(answer),
        "strict": lambda output, answer: normalize(strict_extract(output)) == normalize(answer),
    },
    "plain": {"accuracy": same_answer},
}


# ------------------------------------------------------------------------------------------ answers

def read_answers(path, asked, auto):
    """
    Read a file of answers, as {(r, index): answer}. If they were made with other settings than
    `asked`, rename it, and return {}. auto: whether to go on in the dtype in which they began.
    Raises UserError if the file holds something else.
    """
    if not path.exists():
        return {}
    kept = read_json(path)
    if kept.keys() != {"asked", "answers"}:
        raise UserError(f"{path}: holds something else. Name another file with --out")
    changed = changed_keys(kept["asked"], asked)
    if auto and changed == "dtype":
        asked["dtype"] = kept["asked"]["dtype"]
    elif changed:
        aside = path.with_suffix(f".{digest(path)}.json")
        path.rename(aside)
        say(f"{path}: renamed to {aside.name}, because {changed} changed since. All questions "
            "are asked again", sys.stderr)
        return {}
    return {(answer["steps"], answer["index"]): answer for answer in kept["answers"]}


def answer_rest(decoder, tokenizer, questions, steps, answers, path, asked, batch_size):
    """
    Ask what `answers`, {(r, index): answer}, lacks. Each rank takes every WORLD-th batch, and after
    each round, rank 0 writes all answers to the file `path`. After a kill, the same command goes on
    with the batches that were left.
    """
    batches = []
    for r in steps:
        rest = [question for question in questions if (r, question["index"]) not in answers]
        # So that batches need little padding, and running out of memory happens early.
        rest.sort(key=lambda question: -len(question["ids"]))
        batches += [(r, rest[i:i + batch_size]) for i in range(0, len(rest), batch_size)]
    for first in range(0, len(batches), WORLD):
        now = batches[first:first + WORLD]
        mine = [answer_batch(decoder, tokenizer, [question["ids"] for question in batch],
                             asked["max_new_tokens"], asked["stops"], r, asked["seed"])
                for r, batch in now[RANK:RANK + 1]]
        found = [mine] * WORLD
        if WORLD > 1:
            dist.all_gather_object(found, mine)
        for (r, batch), texts in zip(now, chain(*found)):
            for question, (text, is_cut) in zip(batch, texts):
                answers[r, question["index"]] = {"index": question["index"], "steps": r,
                                                 "output": text, "cut": is_cut}
        if RANK == 0:
            if path.exists() and (kept := read_json(path))["asked"] == asked:
                for answer in kept["answers"]:  # perhaps of another command, at other r
                    answers.setdefault((answer["steps"], answer["index"]), answer)
            with write_atomically(path) as new:
                new.write_text(json.dumps({"asked": asked, "answers": [*answers.values()]}))
        say(f"r = {r}: {first + len(now)} of {len(batches)} batches", sys.stderr)


# -------------------------------------------------------------------------------------- the summary

def accuracy(right):
    """Return the share of the True in a list, its standard error, and the length of the list."""
    n = len(right)
    p = sum(right) / n
    return p, math.sqrt(p * (1 - p) / n), n


def summarize(questions, answers, metrics):
    """
    Score the answers at each r that has them all. Returns a result for each r and metric, and the
    lines of a table of them.
    """
    levels = {question["difficulty"] for question in questions} - {None}
    levels = sorted(levels, key=lambda level: (len(level), level))  # so that 10 comes after 9
    more = ", on the right for each difficulty" if levels else ""
    table = [f"\naccuracy ± standard error over n questions{more}; cut: outputs truncated at "
             "--max_new_tokens",
             " ".join([f"{'r':>6}  {'metric':9}{'right':>6}{'±':>6}{'n':>7}{'cut':>6}  ",
                       *(f"{level:>4}" for level in levels)])]
    results = []
    for r in sorted({r for r, _ in answers}):  # earlier commands may have asked at others, too
        given = [answers.get((r, question["index"])) for question in questions]
        if None in given:
            continue
        cut = sum(answer["cut"] for answer in given)
        for metric, is_right in metrics.items():
            right = [is_right(answer["output"], question["answer"])
                     for answer, question in zip(given, questions)]
            p, error, n = accuracy(right)
            by_difficulty = {
                level: accuracy([x for x, question in zip(right, questions)
                                 if question["difficulty"] == level]) for level in levels}
            results.append({"steps": r, "metric": metric, "value": p, "standard_error": error,
                            "n": n, "cut": cut, "by_difficulty": by_difficulty})
            table.append(" ".join([f"{r or '-':>6}  {metric:9}{p:6.1%}{error:6.1%}{n:7}{cut:6}  ",
                                   *(f"{value:{max(4, len(level))}.0%}"
                                     for level, (value, *_) in by_difficulty.items())]))
    return results, table


# -------------------------------------------------------------------------------------- the command

def parse_args():
    parser = Parser(__doc__, usage="eval_gsm8k.py --model MODEL [flags]")
    flag = parser.add_argument
    flag("--model", type=paths, required=True, metavar="FOLDER", help="checkpoint or run folder")
    flag("--data", type=paths, metavar="FILE", default=GSM8K,
         help='.jsonl with "question" and "answer"; default: GSM8K, which is downloaded once')
    flag("--limit", type=positive, help="ask only this many, drawn from the file")
    flag("--steps", type=recurrences, default=",".join(map(str, DEPTHS)),
         help="recurrences r, comma-separated; default: %(default)s")
    flag("--template", choices=("cot", "plain"), default="cot",
         help="cot: the paper's prompt (default); plain: the question alone, and one score")
    flag("--max_new_tokens", type=positive,
         help="longest answer; default: 256, with --template plain the longest reference + 8")
    flag("--batch_size", type=positive, default=32, help="questions at once (32)")
    flag("--compile", type=yes_or_no, nargs="?", const=True, default=False,
         help="use torch.compile, which takes a while (false)")
    flag("--dtype", choices=DTYPES, default="auto", help=DTYPE_HELP)
    flag("--seed", type=random_seed, default=0, help="seed of the initial state (0)")
    flag("--out", type=paths, metavar="FILE.json",
         help="the summary; default: eval_NAME.json in the folder of --model, with the NAME of "
              "--data, or gsm8k")
    flag("--task", metavar="NAME",
         help="name of the questions in tables and pictures; default: the name of the --data file")
    return parser.parse_args()


def begin(args, out, answers_path):
    """
    Find out what to ask, on rank 0 alone. Returns what the summary says besides results, the
    questions with the "ids" of their prompts, and {(r, index): answer} of those already answered.
    """
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder. Name a file in it")
    if Path(args.data).resolve() in (out.resolve(), answers_path.resolve()):
        raise UserError(f"--out {out}: would write over the questions. Name another file")
    if args.data == GSM8K:
        fetch_gsm8k()
    questions = read_questions(args.data)
    if args.template == "cot" and all(flexible_extract(normalize(question["answer"])) == INVALID
                                      for question in questions):
        raise UserError(f"no answer in {args.data} is a number, and --template cot scores nothing "
                        "else. --template plain compares text")
    folder = find_checkpoint(args.model)
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, config)
    longest = args.max_new_tokens or 256
    if not args.max_new_tokens and args.template == "plain":
        references = [tokenizer.encode("\n" + question["answer"]) for question in questions]
        longest = max(map(len, references)) + 8
    room = config.context - longest
    if room < 1:
        raise UserError(f"answers of up to {longest} tokens leave no room for a question in the "
                        f"context of {config.context}. Lower --max_new_tokens")
    encode_prompts(questions, tokenizer, args.template, room)
    prompts = json.dumps([question["ids"] for question in questions])
    # What an answer depends on, except for what changes it by rounding at most: the device,
    # --batch_size and --compile.
    asked = {
        "template": args.template,
        "max_new_tokens": longest,
        "stops": list(STOPS) if args.template == "cot" else [],
        "dtype": choose_dtype(args.dtype, DEVICE),
        "seed": args.seed,
        "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:16],
        "weights": digest(f"{folder}/model.safetensors"),
        "config": digest(f"{folder}/config.json"),
        **code_of("model.py", "sample.py", "data.py"),
    }
    answers = read_answers(answers_path, asked, args.dtype == "auto")
    # Files are often sorted, or go in cycles. A larger --limit draws the same ones, and more.
    random.Random(0).shuffle(questions)
    # Record the training cost, too, so that plotting a summary does not need the model. Read now,
    # because a run that goes on may delete this checkpoint.
    training = read_optional(folder, "train.json")
    summary = {
        "script": "eval_gsm8k",
        "model": folder,
        "config": asdict(config),
        "task": args.task or ("GSM8K" if args.data == GSM8K else Path(args.data).name),
        "dtype": asked["dtype"],
        "training": {key: training.get(key) for key in ("update", "flops")},
        "settings": asked,
    }
    return summary, questions[:args.limit], answers


def main():
    args = parse_args()
    out = Path(args.out or f"{args.model}/eval_{Path(args.data).stem}.json")
    answers_path = out.parent / f"answers_{out.name}"
    begun = [begin(args, out, answers_path) if RANK == 0 else None]
    if WORLD > 1:
        join_ranks("cpu")  # only texts travel between them
        dist.broadcast_object_list(begun)
    summary, questions, answers = begun[0]
    model, tokenizer = load_model(summary["model"], summary["dtype"])
    device, dtype = device_and_dtype(model)
    steps = args.steps if model.config.n_core else [0]
    say(f"{model.folder}, {dtype} on {device}: {len(questions)} questions at r = {steps}; "
        f"{answers_path} holds {len(answers)} answers already", sys.stderr)
    answer_rest(Decoder(model, args.compile), tokenizer, questions, steps, answers, answers_path,
                summary["settings"], args.batch_size)
    if RANK == 0:
        results, table = summarize(questions, answers, METRICS[args.template])
        write_json(out, summary | {"device": device, "torch": torch.__version__,
                                   "results": results})
        say("\n".join(table))
        say(f"wrote {out}, and every answer to {answers_path}")


if __name__ == "__main__":
    cli(main, on_every_rank=True)
