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
as long as the longest reference, and there is one score, "accuracy": see same_answer().

Answers are appended to a .jsonl file beside the summary, whose first line holds the settings and
digests of the weights and the questions. The same command resumes an evaluation that was killed;
more --steps or a larger --limit extend the file. To start over, delete it.
"""
import json
import math
import re
import sys
import unicodedata
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path

import requests
from common import (DTYPE_HELP, DTYPES, Parser, UserError, check_settings, cli, digest, dtype_on,
                    lock_file, paths, positive, random_seed, read_json, reading, recurrences, say,
                    write_atomically, write_json)

import torch

from data import as_text
from sample import DEPTHS, Decoder, device_and_dtype, load_model

GSM8K = ("https://raw.githubusercontent.com/openai/grade-school-math/master/"
         "grade_school_math/data/test.jsonl")

# The first of the chain-of-thought examples of Wei et al. (arXiv 2201.11903).
EXAMPLE = """\
Q: There are 15 trees in the grove. Grove workers will plant trees in the grove today. After they \
are done, there will be 21 trees. How many trees did the grove workers plant today?
A: Let's think step by step. There are 15 trees originally. Then there were 21 trees after some \
more were planted. So there must have been 21 - 15 = 6. The answer is 6.

"""
STOPS = ("Q:", "</s>", "<|im_end|>")  # plain substrings; the tokenizer's EOS ends a text as well
WINDOW = 16  # tokens in which to look for a stop; at worst, each of its bytes is a token
INVALID = "[invalid]"


# ---------------------------------------------------------------------------------------- questions

def fetch_gsm8k():
    """Return the path of GSM8K's 1,319 test questions. The first call downloads them."""
    path = Path("out/data/gsm8k.jsonl")
    if not path.exists():
        say(f"downloading {GSM8K} to {path}", sys.stderr)
        response = requests.get(GSM8K, timeout=60)
        response.raise_for_status()
        with write_atomically(path) as new:
            new.write_bytes(response.content)
    return path


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
    number beside other words does not count: it may be part of a date or of a room's name.
    """
    text = re.sub(r"^([^=]*[^=<>!])?=", "", reference_text(answer)).strip()
    return last_number(text) if NUMBER.fullmatch(text) else None


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

def answer_batch(decoder, tokenizer, prompts, max_new_tokens, stops, r, seed=0):
    """
    Continue a batch of prompts, lists of ids, at depth r, each until it has produced one of the
    strings `stops`, an end of text, or max_new_tokens. seed: for the noise s_0.

    Returns the new texts, cut at the first stop string, and whether max_new_tokens cut them off,
    such as [(" It is 18.", False), ("", False)].
    """
    new = [[] for _ in prompts]
    ends = decoder.model.config.ends

    def is_last(row, token):
        text = tokenizer.decode(new[row][-WINDOW:])  # generate() has already yielded `token`
        return token in ends or any(stop in text for stop in stops)

    for row, token in decoder.generate(prompts, max_new_tokens, r, is_last, seed=seed):
        new[row].append(token)
    cut = [not is_last(row, ids[-1]) for row, ids in enumerate(new)]
    control = {*tokenizer.special.values(), *ends}  # not part of a text, as in the harness
    texts = [tokenizer.decode([i for i in ids if i not in control]) for ids in new]
    return [(cut_at_stops(text, stops), is_cut) for text, is_cut in zip(texts, cut)]


def cut_at_stops(text, stops):
    """Return `text` up to the first of the stop strings: ("18 Q: Is", ["Q:"]) gives "18 "."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def answer_rest(decoder, tokenizer, questions, steps, answers, file, args):
    """
    Answer each batch of questions that is not complete in `answers`, {(r, index): line}, and add
    its lines to `answers` and to their open file.
    """
    stops = STOPS if args.template == "cot" else ()
    # So that batches need little padding, and running out of memory happens early.
    longest_first = sorted(questions, key=lambda question: -len(question["ids"]))
    for r in steps:
        for first in range(0, len(questions), args.batch_size):
            batch = longest_first[first:first + args.batch_size]
            # A partly answered batch is rerun, because rounding depends on all of its rows.
            if all((r, question["index"]) in answers for question in batch):
                continue
            texts = answer_batch(decoder, tokenizer, [question["ids"] for question in batch],
                                 args.max_new_tokens, stops, r, args.seed)
            for question, (text, is_cut) in zip(batch, texts):
                line = {"index": question["index"], "steps": r, "output": text, "cut": is_cut}
                for metric, is_right in METRICS[args.template].items():
                    line[metric] = is_right(text, question["answer"])
                answers[r, question["index"]] = line
                file.write(json.dumps(line) + "\n")
            file.flush()
            say(f"r = {r}: {first + len(batch)} of {len(questions)} questions", sys.stderr)


def read_answers(file, settings):
    """
    Lock an open file of answers, and read it as {(r, index): line}, or begin it. An unfinished last
    line, left by a killed process, is removed. Raises UserError if another process has locked the
    file, or if it has answers with different settings.
    """
    lock_file(file, file.name)
    with reading(file.name):
        file.seek(0)
        text = file.read()
        begins = json.dumps(settings)[:12]  # '{"template":'
        if not begins.startswith(text[:12]):
            raise UserError(f"{file.name}: holds something else. Name another file with --out")
        if text.count("\n") < 2:  # no answers yet, so nothing to keep
            file.truncate(0)
            file.write(json.dumps(settings) + "\n")
            return {}
        *lines, unfinished = text.split("\n")
        header, *lines = map(json.loads, lines)
        check_settings(file.name, header, settings, "Name another file with --out")
        answers = {(line["steps"], line["index"]): line for line in lines}
    file.truncate(len(text) - len(unfinished))
    return answers


# -------------------------------------------------------------------------------------- the summary

def accuracy(questions, answers, r, metric):
    """Return the accuracy at r, its standard error, and the number of questions."""
    n = len(questions)
    p = sum(answers[r, question["index"]][metric] for question in questions) / n
    return p, math.sqrt(p * (1 - p) / n), n


def summarize(questions, answers, steps, metrics):
    """Return a result for each r and metric, and the lines of a table of them."""
    levels = {question["difficulty"] for question in questions} - {None}
    levels = sorted(levels, key=lambda level: (len(level), level))  # so that 10 comes after 9
    more = ", and on the right for each difficulty" if levels else ""
    table = [f"\nhow many of n answers are right, with the standard error{more}; cut: how many "
             "reached --max_new_tokens without ending",
             " ".join([f"{'r':>6}  {'metric':9}{'right':>6}{'±':>6}{'n':>7}{'cut':>6}  ",
                       *(f"{level:>4}" for level in levels)])]
    results = []
    for r in steps:
        for metric in metrics:
            p, error, n = accuracy(questions, answers, r, metric)
            by_difficulty = {}
            for level in levels:
                part = [question for question in questions if question["difficulty"] == level]
                by_difficulty[level] = accuracy(part, answers, r, metric)
            cut = sum(answers[r, question["index"]].get("cut", False) for question in questions)
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
    flag("--data", type=paths, metavar="FILE",
         help='.jsonl with "question" and "answer"; default: GSM8K, which is downloaded once')
    flag("--limit", type=positive, help="ask only this many, spread evenly over the file")
    flag("--steps", type=recurrences, default=",".join(map(str, DEPTHS)),
         help="recurrences r, comma-separated; default: %(default)s")
    flag("--template", choices=("cot", "plain"), default="cot",
         help="cot: the paper's prompt (default); plain: the question alone, and one score")
    flag("--max_new_tokens", type=positive,
         help="longest answer; default: 256, with --template plain the longest reference + 8")
    flag("--batch_size", type=positive, default=32, help="questions at once (32)")
    flag("--compile", action="store_true", help="use torch.compile, which takes a while")
    flag("--dtype", choices=DTYPES, default="auto", help=DTYPE_HELP)
    flag("--seed", type=random_seed, default=0, help="seed of the initial state (0)")
    flag("--out", type=paths, metavar="FILE.json",
         help="the summary; default: eval_NAME.json in the folder of --model, with the NAME of "
              "--data, or gsm8k")
    flag("--task", metavar="NAME",
         help="name of the questions in tables and pictures; default: the name of the --data file")
    return parser.parse_args()


def main():
    args = parse_args()
    data = args.data or fetch_gsm8k()
    out = Path(args.out or f"{args.model}/eval_{Path(data).stem}.json")
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder. Name a file in it")
    answers_path = out.with_name(out.name.removesuffix(".json") + ".jsonl")
    if Path(data).resolve() in (out.resolve(), answers_path.resolve()):
        raise UserError(f"--out {out}: would write over the questions. Name another file")
    questions = read_questions(data)
    if args.template == "cot" and all(reference_number(x["answer"]) is None for x in questions):
        raise UserError(f"no answer in {data} is a number, and --template cot scores nothing else. "
                        "--template plain compares text")
    model, tokenizer = load_model(args.model, args.dtype)
    device, dtype = device_and_dtype(model)
    if not args.max_new_tokens and args.template == "plain":  # for all, so that --limit may change
        references = [tokenizer.encode("\n" + question["answer"]) for question in questions]
        args.max_new_tokens = max(map(len, references)) + 8
    args.max_new_tokens = args.max_new_tokens or 256
    kept = min(args.limit or len(questions), len(questions))  # spread, since files are often sorted
    questions = [questions[i * len(questions) // kept] for i in range(kept)]
    room = max(1, model.config.context - args.max_new_tokens)
    encode_prompts(questions, tokenizer, args.template, room)
    # Record the training cost, too, so that plotting a summary does not need the model. Read now,
    # because a run that goes on may delete this checkpoint.
    train_json = Path(model.folder, "train.json")
    training = read_json(train_json) if train_json.exists() else {}
    # What an answer depends on, except for what changes it by rounding at most: the device,
    # --batch_size and --compile. Files are identified by digest, since they may move, and training
    # may continue in the model's folder.
    settings = {
        "template": args.template,
        "max_new_tokens": args.max_new_tokens,
        "dtype": dtype,
        "seed": args.seed,
        "questions": digest(data),
        "weights": digest(f"{model.folder}/model.safetensors"),
        "config": digest(f"{model.folder}/config.json"),
    }
    steps = args.steps if model.config.n_core else [0]
    out.parent.resolve().mkdir(parents=True, exist_ok=True)
    with open(answers_path, "a+") as file:  # locked until the summary is written
        answers = read_answers(file, settings)
        say(f"{model.folder}, {dtype_on(dtype, device)}: {len(questions)} questions at r = "
            f"{steps}; {answers_path} holds {len(answers)} answers already", sys.stderr)
        answer_rest(Decoder(model, args.compile), tokenizer, questions, steps, answers, file, args)

        # Earlier commands may have answered all of these questions at other r, too.
        complete = [r for r in sorted({r for r, _ in answers})
                    if all((r, question["index"]) in answers for question in questions)]
        results, table = summarize(questions, answers, complete, METRICS[args.template])
        write_json(out, {
            "script": "eval_gsm8k",
            "model": model.folder,
            "config": asdict(model.config),
            "task": args.task or (Path(data).name if args.data else "GSM8K"),
            "device": device,
            "dtype": dtype,
            "torch": torch.__version__,
            "training": {key: training.get(key) for key in ("update", "flops")},
            "settings": settings,
            "results": results,
        })
    say("\n".join(table))
    say(f"wrote {out}, and every answer to {answers_path}")


if __name__ == "__main__":
    cli(main)
