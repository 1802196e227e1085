"""
Ask a model the questions of GSM8K, or your own, at several numbers of recurrences r. At the end,
print the smallest r that is good enough.

    python eval_gsm8k.py --model out/tiny/task --data out/tiny/data/test.jsonl \\
        --template plain --max_new_tokens 1
    python eval_gsm8k.py --model out/llama-4-6-4 --steps 1,2,4,8,16,32
    torchrun --nproc_per_node=4 eval_gsm8k.py --model out/llama-4-6-4
    python eval_gsm8k.py --model out/my-task --data my_task.jsonl --template plain

Unusual: every question is answered once per r. All else follows the paper, which used
lm-evaluation-harness 0.4.13 (gsm8k_cot_zeroshot with one shot): greedy, float32, at most 256 new
tokens. "flexible" scores the last number of the output, "strict" the one after "The answer is".
With --template plain there is one score, "accuracy": where a reference ends in a number, the last
number of the output has to equal it; elsewhere the whole output has to be the reference's text.
Answers depend a little on --seed, since s_0 is noise. Decoding, with its cache and drafts, is that
of sample.py. An ordinary model has no r and gets one row.

The last line says which r is enough: the smallest whose accuracy is within two standard errors of
the best one's, by the differences between answers to the same question.

Without --data, the test set of GSM8K is downloaded once, to out/data/gsm8k/test.jsonl. Each line of
--data is {"question": ..., "answer": "... #### 18"}. If the lines have a "difficulty", such as the
number of sentences, accuracy is broken down by it.

OUT stands for --out without its .json. Each batch appends its answers to OUT.jsonl, one line per
question and r. The first line holds the settings, and digests of the weights and the questions. The
same command resumes an evaluation that was killed, on any number of processes, even if the files
have moved. More --steps or a larger --limit extend an existing file. To start over, delete
OUT.jsonl. OUT.json, the summary, is written last.
"""
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from decimal import Decimal
from itertools import chain, product
from pathlib import Path

import requests
import torch
import torch.distributed as dist

from common import (RANK, WORLD, Parser, UserError, check_settings, cli, digest, natural, opening,
                    positive, read_json, recurrences, say, write_atomically, write_json)
from data import as_text
from sample import (COMPILE_HELP, DEPTHS, DRAFT_STEPS_HELP, Decoder, add_model_arguments,
                    decoding_options, describe, end_ids, load_model)

GSM8K = Path("out/data/gsm8k/test.jsonl")
SOURCE = ("https://raw.githubusercontent.com/openai/grade-school-math/master/"
          "grade_school_math/data/test.jsonl")
DIGEST = "3730d312f6e34405"  # what common.digest() returns for the file

# The chain-of-thought examples of Wei et al. (arXiv 2201.11903), in the harness's order.
EXAMPLES = """\
Q: There are 15 trees in the grove. Grove workers will plant trees in the grove today. After they \
are done, there will be 21 trees. How many trees did the grove workers plant today?
A: Let's think step by step. There are 15 trees originally. Then there were 21 trees after some \
more were planted. So there must have been 21 - 15 = 6. The answer is 6.

Q: If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the parking \
lot?
A: Let's think step by step. There are originally 3 cars. 2 more cars arrive. 3 + 2 = 5. The \
answer is 5.

Q: Leah had 32 chocolates and her sister had 42. If they ate 35, how many pieces do they have left \
in total?
A: Let's think step by step. Originally, Leah had 32 chocolates. Her sister had 42. So in total \
they had 32 + 42 = 74. After eating 35, they had 74 - 35 = 39. The answer is 39.

Q: Jason had 20 lollipops. He gave Denny some lollipops. Now Jason has 12 lollipops. How many \
lollipops did Jason give to Denny?
A: Let's think step by step. Jason started with 20 lollipops. Then he had 12 after giving some to \
Denny. So he gave Denny 20 - 12 = 8. The answer is 8.

Q: Shawn has five toys. For Christmas, he got two toys each from his mom and dad. How many toys \
does he have now?
A: Let's think step by step. Shawn started with 5 toys. If he got 2 toys each from his mom and \
dad, then that is 4 more toys. 5 + 4 = 9. The answer is 9.

Q: There were nine computers in the server room. Five more computers were installed each day, from \
monday to thursday. How many computers are now in the server room?
A: Let's think step by step. There were originally 9 computers. For each of 4 days, 5 more \
computers were added. So 5 * 4 = 20 computers were added. 9 + 20 is 29. The answer is 29.

Q: Michael had 58 golf balls. On tuesday, he lost 23 golf balls. On wednesday, he lost 2 more. How \
many golf balls did he have at the end of wednesday?
A: Let's think step by step. Michael started with 58 golf balls. After losing 23 on tuesday, he \
had 58 - 23 = 35. After losing 2 more, he had 35 - 2 = 33 golf balls. The answer is 33.

Q: Olivia has $23. She bought five bagels for $3 each. How much money does she have left?
A: Let's think step by step. Olivia had 23 dollars. 5 bagels for 3 dollars each will be 5 x 3 = \
15 dollars. So she has 23 - 15 dollars left. 23 - 15 is 8. The answer is 8.""".split("\n\n")
STOPS = ("Q:", "</s>", "<|im_end|>")  # plain substrings; the tokenizer's EOS ends a text as well
INVALID = "[invalid]"
SCRIPT = "eval_gsm8k"  # its name in the summary


# ---- questions and answers --------------------------------------------------------------------

def fetch_gsm8k():
    """Return the path of GSM8K's 1,319 test questions. The first call downloads them."""
    if not GSM8K.exists():
        try:
            response = requests.get(SOURCE, timeout=60)
            response.raise_for_status()
        except requests.RequestException as e:
            raise UserError(f"{SOURCE} cannot be downloaded ({e!r:.200}). Download it elsewhere "
                            f"and save it as {GSM8K}")
        with write_atomically(GSM8K) as new:
            new.write_bytes(response.content)
    if digest(GSM8K) != DIGEST:
        raise UserError(f"{GSM8K} is not GSM8K's test set. Delete it, or name a file with --data")
    return GSM8K


def read_questions(path, limit=None):
    """
    Read a .jsonl file of questions (see the top).

    limit: read only this many questions, spread evenly over the file, since files are often sorted.

    Returns a list of dicts, such as {"question": "has 1 so", "answer": "1", "difficulty": 2,
    "index": 0}, where "index" counts the questions of the file. Raises UserError if a line is not a
    question.
    """
    questions = []
    number = 0
    try:
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                if line.strip():  # files may have empty lines
                    question = read_question(json.loads(line))
                    question["index"] = len(questions)
                    questions.append(question)
    except (ValueError, KeyError, TypeError) as e:  # ValueError: not JSON, or not even UTF-8
        raise UserError(f'{path}: line {number} is not a JSON object with "question" and "answer" '
                        f"({e!r})")
    count = len(questions)
    if not count:
        raise UserError(f"{path} has no questions")
    kept = min(limit or count, count)
    return [questions[i * count // kept] for i in range(kept)]


def read_question(row):
    """
    Check the value of a line of JSON. Returns {"question": text, "answer": text, "difficulty":
    number, text or None}; a question or answer that is a number becomes text. Raises KeyError if
    one is missing, and TypeError if it has another type.
    """
    if not isinstance(row, dict):
        raise TypeError("it is not an object")
    question = {"difficulty": row.get("difficulty")}
    if isinstance(question["difficulty"], (list, dict)):
        raise TypeError("a difficulty is a number or text")
    for key in ("question", "answer"):
        question[key] = as_text(row[key])
        if not isinstance(question[key], str):
            raise TypeError(f"{key} is neither text nor a number")
    return question


def make_prompt(question, template="cot", shots=1):
    """
    Return the text that the model continues. template: "cot" for the paper's prompt, with `shots`
    examples, or "plain" for the question alone.
    """
    if template == "plain":
        return question
    return "\n\n".join([*EXAMPLES[:shots], f"Q: {question}\nA: Let's think step by step."])


def flexible_extract(text):
    """
    Return the last thing that looks like a number, by the harness's pattern, which also matches a
    lone "...".
    """
    found = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
    return found[-1] if found else INVALID


def strict_extract(text):
    """
    Return the number in the first "The answer is NUMBER", by the harness's pattern. It wants one
    more character after the number, so at the end of a line the number loses its last digit.
    """
    found = re.search(r"The answer is (-?[0-9.,]+).", text)
    return found[1] if found else INVALID


def equals(extracted, answer):
    """
    Whether two numbers are equal as text, so "18.00" is not "18". answer: the field of the data
    set, such as "... #### 18".
    """
    return normalise(extracted) == normalise(answer)


def normalise(text):
    """
    Drop commas, dollar signs, everything up to "#### " and a final full stop, as the harness's
    exact_match does.
    """
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.lower()


# A number that does not belong to a word, a fraction, a date or a range.
NUMBER = re.compile(r"(?<![\w.,/:-])-?\$?\d[\d,]*(?:\.\d+)?(?![\w/:-])")


def reference_text(answer):
    """Return the text of a reference answer: what follows its last "####", if it has one."""
    return answer.rpartition("####")[2].strip().removesuffix(".").rstrip()


def reference_number(answer):
    """Return the number that a reference answer ends in, or None."""
    text = reference_text(answer)
    numbers = list(NUMBER.finditer(text))
    if not numbers or numbers[-1].end() < len(text):
        return None
    return to_number(numbers[-1].group())


def to_number(text):
    """"$1,234.50" -> Decimal("1234.50"), which equals Decimal("1234.5")"""
    return Decimal(re.sub("[$,]", "", text))


def same_answer(output, answer):
    """
    Whether an output is right where the prompt asks for no particular form of answer. Compares
    numbers if the reference ends in one, otherwise text, ignoring case and a final full stop.
    """
    number = reference_number(answer)
    if number is None:
        return reference_text(output).lower() == reference_text(answer).lower()
    found = NUMBER.findall(output)
    if not found:
        return False
    return to_number(found[-1]) == number


# What is scored with each template, as {metric: (output, reference) -> whether it is right}.
METRICS = {
    "cot": {
        "flexible": lambda output, answer: equals(flexible_extract(output), answer),
        "strict": lambda output, answer: equals(strict_extract(output), answer),
    },
    "plain": {"accuracy": same_answer},
}


# ---- decoding ---------------------------------------------------------------------------------

def encode_prompts(questions, model, tokenizer, args):
    """Add its prompt, a list of token ids, to each question as "ids"."""
    room = model.config.context - args.max_new_tokens
    if room <= 0:
        raise UserError(f"--max_new_tokens {args.max_new_tokens} leaves no room for a prompt in "
                        f"the model's context of {model.config.context}")
    for question in questions:
        prompt = make_prompt(question["question"], args.template, args.shots)
        ids = tokenizer.encode(prompt, bos=True)
        question["ids"] = ids[-room:]  # long prompts lose their beginning, as in the harness


def answer_batch(decoder, tokenizer, prompts, max_new_tokens, stops, r, **options):
    """
    Continue a batch of prompts at depth r, each until it has produced a stop string, an end of
    text, or max_new_tokens.

    prompts: lists of ids, such as [[1, 660], [1, 29984, 29901]].
    stops: a list of strings, such as ["Q:", "</s>"]; may be empty.
    options: the fields of Decoding.

    Returns two lists: the new texts, cut at the first stop string, such as [" It is 18.", ""], and
    the numbers of tokens generated, such as [7, 1].
    """
    new = [[] for _ in prompts]
    last = end_ids(decoder.model, tokenizer)
    # A stop of n bytes spans at most n tokens. One more, because decode() may drop the space before
    # the first token.
    lengths = [len(stop.encode()) for stop in stops]
    window = 1 + max(lengths, default=0)

    def ends(row, token):
        if token in last:
            return True
        if not stops:
            return False
        text = tokenizer.decode(new[row][-window:])  # generate() has already yielded `token`
        return any(stop in text for stop in stops)

    for row, token, _ in decoder.generate(prompts, max_new_tokens, r, ends, **options):
        new[row].append(token)
    control = {*tokenizer.special.values(), *last}  # not part of a text, as in HFLM
    texts = []
    for ids in new:
        text = tokenizer.decode([i for i in ids if i not in control])
        texts.append(cut(text, stops))
    return texts, [len(ids) for ids in new]


def cut(text, stops):
    """Return `text` up to the first of the stop strings: ("18 Q: Is", ["Q:"]) gives "18 "."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def answer_questions(decoder, tokenizer, questions, r, args):
    """
    Answer a batch of questions at depth r.

    Returns a line of the file of answers for each question: a dict of "index", "steps", "output",
    "tokens", "seconds", and whether the output is right by each metric.
    """
    began = time.perf_counter()
    prompts = [question["ids"] for question in questions]
    stops = STOPS if args.template == "cot" else ()
    texts, counts = answer_batch(decoder, tokenizer, prompts, args.max_new_tokens, stops, r,
                                 **decoding_options(args))
    seconds = (time.perf_counter() - began) / len(questions)  # of one question
    lines = []
    for question, text, tokens in zip(questions, texts, counts):
        line = {
            "index": question["index"],
            "steps": r,
            "output": text,
            "tokens": tokens,
            "seconds": seconds,
        }
        for metric, is_right in METRICS[args.template].items():
            line[metric] = is_right(text, question["answer"])
        lines.append(line)
    return lines


def unanswered_batches(questions, steps, answers, batch_size):
    """
    Return the batches in which a question has no answer yet, as [(r, [question, ...]), ...].
    answers: {(r, index): line}.
    """
    # Sorted by length, so that batches need little padding. The longest come first, so that
    # running out of memory happens early.
    order = sorted(questions, key=lambda question: -len(question["ids"]))
    batches = []
    for r in steps:
        for first in range(0, len(order), batch_size):
            batch = order[first:first + batch_size]
            # A batch that is only half answered is run again as a whole, because rounding depends
            # on all of its rows.
            if any((r, question["index"]) not in answers for question in batch):
                batches.append((r, batch))
    return batches


def answer_rest(decoder, tokenizer, questions, steps, answers, path, args):
    """
    Answer the questions that `answers`, {(r, index): line}, lacks. Adds their lines there and to
    the file. In each round every rank answers one batch, and rank 0 writes.
    """
    batches = unanswered_batches(questions, steps, answers, args.batch_size)
    for first in range(0, len(batches), WORLD):
        lines = []
        if first + RANK < len(batches):
            r, batch = batches[first + RANK]
            lines = answer_questions(decoder, tokenizer, batch, r, args)
        if WORLD > 1:
            of_ranks = [None] * WORLD
            dist.all_gather_object(of_ranks, lines)
            lines = list(chain(*of_ranks))
        new = {}
        for line in lines:
            key = line["steps"], line["index"]
            if key not in answers:
                new[key] = line
        answers |= new
        if RANK == 0:
            with open(path, "a") as f:
                f.writelines(json.dumps(line) + "\n" for line in new.values())
        show_progress(min(first + WORLD, len(batches)), len(batches))


def show_progress(done, total):
    """
    Print how many batches are done: on a terminal in a line that is overwritten, otherwise about
    ten times.
    """
    if sys.stderr.isatty():
        if RANK == 0:
            end = "\n" if done == total else "\r"
            print(f"batch {done} of {total}", end=end, file=sys.stderr, flush=True)
    elif done == total or done * 10 // total > (done - WORLD) * 10 // total:
        say(f"batch {done} of {total}", file=sys.stderr)


# ---- the file of answers ----------------------------------------------------------------------

def check_out(path):
    """
    Create the folder of --out. Raises UserError or OSError now, rather than after hours, if the
    result cannot be written there.
    """
    path = Path(path).resolve()
    if path.is_dir():
        raise UserError(f"--out {path} is a folder. Name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()


def check_summary(path, task):
    """Raise UserError if this command's summary would replace that of another script or task."""
    if not os.path.exists(path):
        return
    summary = read_json(path)
    if not isinstance(summary, dict):
        summary = {}
    if summary.get("script") != SCRIPT or summary.get("task") != task:
        raise UserError(f"{path} is not a summary of {task} by eval_gsm8k.py. Name another file "
                        "with --out")


def answer_settings(args, model, tokenizer):
    """
    Return all that decides an answer, as the first line of a file of answers holds it. Files are
    named by their digests, since a file may move, and training may go on in the model's folder.
    """
    keys = "template", "shots", "max_new_tokens", "dtype"
    settings = {key: getattr(args, key) for key in keys}
    settings |= decoding_options(args)
    settings["questions"] = digest(args.data)
    settings["weights"] = digest(f"{model.folder}/model.safetensors")
    settings["config"] = digest(f"{model.folder}/config.json")
    settings["tokenizer"] = tokenizer.fingerprint
    return settings


def read_answers(path, settings):
    """
    Read a file of answers as {(r, index): line}; {} if there is no file. An unfinished last line,
    of a process that was killed, is dropped. Raises UserError if the file has other settings.
    """
    if not os.path.exists(path):
        return {}
    try:
        *lines, unfinished = Path(path).read_text().split("\n")
        header, *lines = map(json.loads, lines)
        answers = {(line["steps"], line["index"]): line for line in lines}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged or not a file of answers. Name another file with --out")
    check_settings(path, header, settings, "Name another file with --out")
    return answers


# ---- scores -----------------------------------------------------------------------------------

def score(questions, answers, r, metric):
    """Return the accuracy at r, its standard error, and the number of answers."""
    lines = [answers[r, question["index"]] for question in questions]
    n = len(lines)
    p = sum(line[metric] for line in lines) / n
    return p, math.sqrt(p * (1 - p) / n), n


def summarise(questions, answers, steps, metrics):
    """Return the "results" of write_result(): a dict for each r and metric."""
    results = []
    levels = {question["difficulty"] for question in questions} - {None}
    levels = sorted(levels, key=lambda level: (isinstance(level, str), level))  # numbers first
    for r, metric in product(steps, metrics):
        value, error, n = score(questions, answers, r, metric)
        by_difficulty = {}
        for level in levels:
            part = [question for question in questions if question["difficulty"] == level]
            by_difficulty[str(level)] = score(part, answers, r, metric)
        results.append({
            "steps": r,
            "metric": metric,
            "by_difficulty": by_difficulty,
            "value": value,
            "standard_error": error,
            "n": n,
        })
    return results


def smallest_enough(model, task, metric, scores):
    """
    Find the smallest r whose score is within two standard errors of the best one's.

    All r answer the same questions, so the comparison is paired: the standard error is that of the
    mean difference per question, which is usually smaller than that of either score.

    model: for its FLOPs. task, metric: their names. scores: {r: one number per question}, where
    higher is better, and the questions have the same order for every r.

    Returns a list for "enough" in a result file. It is empty if there is only one r; otherwise it
    holds one dict. Its "steps" is the r found, "best" the r of the highest score (the smallest such
    r in a tie), "difference" how far "steps" scores below "best", "standard_error" that of the
    difference, and "flops" the FLOPs per token at "steps" divided by those at "best".
    """
    if len(scores) < 2:
        return []
    smallest_first = sorted(scores)
    best = max(smallest_first, key=lambda r: statistics.fmean(scores[r]))  # the first in a tie
    for r in smallest_first:  # ends at `best` at the latest, where difference and error are 0
        behind = [b - x for b, x in zip(scores[best], scores[r], strict=True)]
        difference = statistics.fmean(behind)
        error = statistics.pstdev(behind) / math.sqrt(len(behind))
        if difference <= 2 * error:
            break
    return [{
        "task": task,
        "metric": metric,
        "steps": r,
        "best": best,
        "difference": difference,
        "standard_error": error,
        "flops": model.flops_per_token(r) / model.flops_per_token(best),
    }]


def find_enough(model, questions, answers, steps, metrics, task):
    """Return the "enough" of a result file, see smallest_enough()."""
    enough = []
    for metric in metrics:
        scores = {}
        for r in steps:
            lines = [answers[r, question["index"]] for question in questions]
            scores[r] = [line[metric] for line in lines]
        enough += smallest_enough(model, task, metric, scores)
    return enough


def print_accuracies(results, task):
    """Print a line for each r and metric, with the accuracy at each difficulty on the right."""
    levels = results[0]["by_difficulty"]
    heading = f"{task}, on the right by difficulty" if levels else task
    columns = "".join(f"{level:>5}" for level in levels)
    print(f"\n{heading}")
    print(f"{'r':>6}  {'metric':9}{'right':>6}{'±':>6}{'n':>7}  {columns}")
    for x in results:
        r = x["steps"] or "-"
        columns = "".join(f"{right:5.0%}" for right, *_ in x["by_difficulty"].values())
        print(f"{r:>6}  {x['metric']:9}{x['value']:6.1%}{x['standard_error']:6.1%}{x['n']:7}  "
              f"{columns}")


def print_enough(found):
    """Print one line per task, for the first of its metrics. found: a result file's "enough"."""
    first = {}
    for entry in found:
        first.setdefault(entry["task"], entry)
    for task, entry in first.items():
        r = entry["steps"]
        best = entry["best"]
        reason = "no r scores higher, and no smaller r comes within two standard errors of it"
        if r < best:
            reason = (f"{100 * entry['difference']:.1f} ± {100 * entry['standard_error']:.1f} "
                      f"points below r = {best}, at {entry['flops']:.0%} of its FLOPs per token")
        print(f"{task}, {entry['metric']}: r = {r} is enough: {reason}")


def write_result(path, script, model, task, results, seconds, tokens, **more):
    """
    Write the JSON result file of an evaluation.

    script, task: their names. results: a list of {"steps": r, "metric": name, "value": x,
    "standard_error": se, "n": count, ...}. seconds: how long the evaluation took; tokens: how many
    tokens it computed in that time. more: further keys of the file. The file also records what the
    model's training cost, so that plotting it needs neither the model nor its folder.
    """
    device, dtype = describe(model)
    train_json = Path(model.folder, "train.json")
    training = read_json(train_json) if train_json.exists() else {}
    write_json(path, dict(
        script=script,
        model=model.folder,
        config=asdict(model.config),
        task=task,
        device=device,
        dtype=dtype,
        torch=torch.__version__,
        training={key: training.get(key) for key in ("update", "flops")},
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        **more,
        results=results,
    ))


# ---- the command ------------------------------------------------------------------------------

def add_evaluation_arguments(what, how, output, named_after):
    """
    Add the flags of every script that scores a model to the groups of its parser. named_after: the
    flag that gives the result file its default name.
    """
    what.add_argument("--model", required=True, help="checkpoint or run folder")
    depths = ",".join(map(str, DEPTHS))
    how.add_argument("--steps", type=recurrences, default=depths, metavar="R,R",
                     help="recurrences r, comma-separated; default: %(default)s")
    how.add_argument("--batch_size", type=positive, default=32, metavar="N",
                     help="questions at once; default: %(default)s")
    output.add_argument("--out", metavar="FILE",
                        help="file of the summary; default: eval_NAME.json in the folder of "
                             f"--model, named after {named_after}")
    add_model_arguments(how, dtype="float32")


def parse_args():
    p = Parser(usage="eval_gsm8k.py --model MODEL [flags]", description=opening(__doc__),
               epilog="Answers are appended to OUT.jsonl as they come, and the same command "
                      "resumes from there.")
    what, how, output = p.groups()
    add_evaluation_arguments(what, how, output, named_after="--data")
    flag = what.add_argument
    flag("--data", metavar="FILE",
         help='.jsonl with "question" and "answer"; default: GSM8K, which is downloaded once')
    flag("--limit", type=positive, metavar="N",
         help="ask only N questions, spread evenly over the file")
    flag = how.add_argument
    flag("--template", choices=("cot", "plain"), default="cot",
         help="cot: the paper's prompt (default); plain: the question alone, and one score, by "
              "number where the answer ends in one, else by text")
    flag("--shots", type=int, choices=range(9), default=1,
         help="examples in the prompt of cot; default: 1, as in the paper")
    flag("--max_new_tokens", type=positive, default=256, metavar="N",
         help="longest answer; default: %(default)s")
    flag("--compile", action="store_true", help=COMPILE_HELP)
    flag("--draft_steps", type=natural, default=0, metavar="R", help=DRAFT_STEPS_HELP)
    output.add_argument("--task", metavar="NAME",
                        help="name of the questions in tables and pictures; default: the name of "
                             "the --data file")
    return p.parse_args()


def main():
    args = parse_args()
    if not args.data:
        args.data = fetch_gsm8k()
        args.task = args.task or "GSM8K"
    args.task = args.task or Path(args.data).name
    args.out = args.out or f"{args.model}/eval_{Path(args.data).stem}.json"
    if WORLD > 1:
        dist.init_process_group("gloo")
        if args.device == "cuda":
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    check_out(args.out)
    check_summary(args.out, args.task)
    questions = read_questions(args.data, args.limit)
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    encode_prompts(questions, model, tokenizer, args)
    steps = args.steps if model.config.n_core else [0]
    path = args.out.removesuffix(".json") + ".jsonl"
    settings = answer_settings(args, model, tokenizer)
    answers = read_answers(path, settings)
    if RANK == 0:
        # Rewritten without the unfinished line of a killed process. A rank that reads it only now
        # finds the same answers there.
        with write_atomically(path) as new, open(new, "w") as f:
            f.writelines(json.dumps(line) + "\n" for line in (settings, *answers.values()))
        depths = f" at r = {steps}" if model.config.n_core else ""
        known = f"; {path} holds {len(answers)} answers already" if answers else ""
        print(f"{model.folder}, {', '.join(describe(model))}: {len(questions)} questions"
              f"{depths}{known}", file=sys.stderr)
        if args.template == "plain":
            numbers = sum(reference_number(x["answer"]) is not None for x in questions)
            print(f"answers are compared as numbers in {numbers} of these questions, as text in "
                  f"the other {len(questions) - numbers}", file=sys.stderr)
    decoder = Decoder(model, args.compile)
    answer_rest(decoder, tokenizer, questions, steps, answers, path, args)
    if RANK == 0:
        # Earlier commands may have answered all of these questions at other r, too.
        answered = sorted({r for r, _ in answers})
        steps = [r for r in answered if all((r, x["index"]) in answers for x in questions)]
        metrics = METRICS[args.template]
        results = summarise(questions, answers, steps, metrics)
        seconds = sum(line["seconds"] for line in answers.values())  # of all processes
        tokens = sum(line["tokens"] for line in answers.values())
        enough = find_enough(model, questions, answers, steps, metrics, args.task)
        print_accuracies(results, args.task)
        print_enough(enough)
        write_result(args.out, SCRIPT, model, args.task, results, seconds, tokens,
                     settings=settings, enough=enough)
        print(f"wrote {args.out}, and every answer to {path} ({tokens} tokens in {seconds:.1f} s)")


if __name__ == "__main__":
    cli(main)
