"""
Ask a model the questions of GSM8K, or your own, at several numbers of recurrences r. Afterwards it
names the smallest r that is enough.

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
Answers depend a little on --seed, since s_0 is noise. Caches and drafts are those of
sample.py. A feed-forward model has no r and gets one row.

The last line says which r is enough: the smallest whose accuracy is within two standard errors of
the best one's, by the differences between answers to the same question.

Without --data, the test set of GSM8K is fetched once, to out/data/gsm8k/test.jsonl. Each line of
--data is {"question": ..., "answer": "... #### 18"}. If the lines have a "difficulty", such as the
number of sentences, accuracy is broken down by it.

Each batch appends its answers to OUT.jsonl, one line per question and r. The first line holds the
settings, and digests of the weights and the questions. The same command resumes an evaluation that
was killed, on any number of processes, even if the files have moved. More --steps or a larger
--limit extend an existing file. To start over, delete OUT.jsonl. OUT.json, the summary, is written
last.
"""
import json
import math
import os
import re
import sys
import time
from decimal import Decimal
from itertools import chain, product
from pathlib import Path

import requests
import torch.distributed as dist

from common import (RANK, WORLD, Parser, UserError, check_settings, cli, describe, digest, natural,
                    opening, positive, print_enough, read_json, say, smallest_enough, whole,
                    write_result)
from data import as_text
from sample import (COMPILE, DRAFT_STEPS, Decoder, add_evaluation_arguments, answer_batch,
                    check_out, decoding, load_model)

GSM8K = Path("out/data/gsm8k/test.jsonl")
SOURCE = ("https://raw.githubusercontent.com/openai/grade-school-math/master/"
          "grade_school_math/data/test.jsonl")
SHA256 = "3730d312f6e34405"  # its first digits: digest()

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
    """The path of GSM8K's 1,319 test questions. They come from GitHub at the first call."""
    if not GSM8K.exists():
        try:
            answer = requests.get(SOURCE, timeout=60)
            answer.raise_for_status()
        except requests.RequestException as e:
            raise UserError(f"{SOURCE}: cannot be fetched: save it as {GSM8K} ({e!r:.200})")
        with whole(GSM8K) as new:
            new.write_bytes(answer.content)
    if digest(GSM8K) != SHA256:
        raise UserError(f"{GSM8K}: is not GSM8K's test set: delete it, or name a file with --data")
    return GSM8K


def read_questions(path, limit=None):
    """
    Read a .jsonl file of questions (see the top) as a list of dicts. limit: read only this many
    questions, spread evenly over the file, since files are often sorted.
    """
    rows = []
    try:
        with open(path, encoding="utf-8-sig") as f:
            for line in filter(str.strip, f):  # leaves out empty lines
                rows.append(read_question(json.loads(line)) | {"index": len(rows)})
    except (ValueError, KeyError, TypeError) as e:  # ValueError also for a file that is not text
        raise UserError(f'{path}: line {len(rows) + 1} is not a JSON object with "question" and '
                        f'"answer" ({e!r})')
    if not rows:
        raise UserError(f"{path}: holds no questions")
    count = min(limit or len(rows), len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def read_question(row):
    """What a line says: a dict of question, answer (text or numbers) and, perhaps, difficulty."""
    found = {"difficulty": row.get("difficulty")}
    if isinstance(found["difficulty"], (list, dict)):
        raise TypeError("a difficulty is a number or text")
    for key in ("question", "answer"):
        found[key] = as_text(row[key])
        if not isinstance(found[key], str):
            raise TypeError(f"{key} is neither text nor a number")
    return found


def make_prompt(question, template="cot", shots=1):
    """The text that the model continues. "cot": the paper's prompt; "plain": the question alone."""
    if template == "plain":
        return question
    return "\n\n".join([*EXAMPLES[:shots], f"Q: {question}\nA: Let's think step by step."])


def flexible_extract(text):
    """The last thing that looks like a number. A lone "..." does, too: the harness's pattern."""
    found = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
    return found[-1] if found else INVALID


def strict_extract(text):
    """The number of the first "The answer is NUMBER"; one more character has to follow it."""
    found = re.search(r"The answer is (-?[0-9.,]+).", text)
    return found[1] if found else INVALID


def equals(extracted, answer):
    """Equal as text, so "18.00" is not "18". answer: the field of the data set, "... #### 18"."""
    return normalise(extracted) == normalise(answer)


def normalise(text):
    """The harness's exact_match drops commas, dollars, all up to "#### ", a final full stop."""
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.lower()


# A number that does not belong to a word, a fraction, a date or a range.
NUMBER = re.compile(r"(?<![\w.,/:-])-?\$?\d[\d,]*(?:\.\d+)?(?![\w/:-])")


def reference_text(answer):
    """The text of a reference answer: what follows its last "####", if it has one."""
    return answer.rpartition("####")[2].strip().removesuffix(".").rstrip()


def reference_number(answer):
    """The number that a reference answer ends in, or None."""
    text = reference_text(answer)
    found = [*NUMBER.finditer(text)]
    if found and found[-1].end() == len(text):
        return to_number(found[-1][0])
    return None


def to_number(text):
    """"$1,234.50" -> Decimal("1234.50"), which equals Decimal("1234.5")"""
    return Decimal(re.sub("[$,]", "", text))


def same_answer(output, answer):
    """
    Whether an output is right, where no prompt asks for a form of the answer. As numbers if the
    reference ends in one, else as text, in any case and with or without a full stop.
    """
    number = reference_number(answer)
    if number is None:
        return reference_text(output).lower() == reference_text(answer).lower()
    found = NUMBER.findall(output)
    return bool(found) and to_number(found[-1]) == number


# What is scored with each template, as {metric: (output, reference) -> whether it is right}.
METRICS = {
    "cot": {
        "flexible": lambda output, answer: equals(flexible_extract(output), answer),
        "strict": lambda output, answer: equals(strict_extract(output), answer),
    },
    "plain": {"accuracy": same_answer},
}


# ---- decoding ---------------------------------------------------------------------------------

def answer_questions(decoder, tokenizer, rows, r, args):
    """Answer a batch of rows at depth r -> their lines of the file of answers."""
    began = time.perf_counter()
    prompts = [row["ids"] for row in rows]
    stops = STOPS if args.template == "cot" else ()
    found = answer_batch(decoder, tokenizer, prompts, args.max_new_tokens, stops, r,
                         **decoding(args))
    seconds = (time.perf_counter() - began) / len(rows)
    lines = []
    for row, text, tokens in zip(rows, *found):
        line = {"index": row["index"], "steps": r, "output": text, "tokens": tokens,
                "seconds": seconds}
        for metric, is_right in METRICS[args.template].items():
            line[metric] = is_right(text, row["answer"])
        lines.append(line)
    return lines


def answer_rest(decoder, tokenizer, rows, steps, answers, path, args):
    """
    Answer the questions that `answers`, {(r, index): line}, lacks. Add their lines there and to the
    file. In each round every process answers one batch, and rank 0 writes.
    """
    # Prompts of one length need no padding. The longest come first: if memory runs out, then soon.
    order = sorted(rows, key=lambda row: -len(row["ids"]))
    todo = []
    for r in steps:
        for first in range(0, len(order), args.batch_size):
            batch = order[first:first + args.batch_size]
            # A batch that was half answered is answered anew: rounding depends on all its rows.
            if any((r, row["index"]) not in answers for row in batch):
                todo.append((r, batch))
    for first in range(0, len(todo), WORLD):
        parts = [[]] * WORLD
        if first + RANK < len(todo):
            r, batch = todo[first + RANK]
            parts[RANK] = answer_questions(decoder, tokenizer, batch, r, args)
        if WORLD > 1:
            dist.all_gather_object(parts, parts[RANK])
        new = {(line["steps"], line["index"]): line for line in chain(*parts)}
        new = {key: line for key, line in new.items() if key not in answers}
        answers |= new
        if RANK == 0:
            with open(path, "a") as f:
                f.writelines(json.dumps(line) + "\n" for line in new.values())
        show_progress(min(first + WORLD, len(todo)), len(todo))


def show_progress(done, total):
    """Say how many batches are done: on a line that changes, or in a file about ten times."""
    if sys.stderr.isatty():
        if RANK == 0:
            end = "\n" if done == total else "\r"
            print(f"batch {done} of {total}", end=end, file=sys.stderr, flush=True)
    elif done == total or done * 10 // total > (done - WORLD) * 10 // total:
        say(f"batch {done} of {total}", file=sys.stderr)


# ---- the file of answers ----------------------------------------------------------------------

def check_summary(path, task):
    """Raise UserError if this command's summary would replace that of another script or task."""
    if not os.path.exists(path):
        return
    found = read_json(path)
    if not isinstance(found, dict) or (found.get("script"), found.get("task")) != (SCRIPT, task):
        raise UserError(f"{path}: is not a summary of {task} by eval_gsm8k.py: name another file "
                        "with --out")


def read_answers(path, settings):
    """
    {(r, index): line} of a file of answers; {} if there is no file. A last line without an end is
    dropped: the process that wrote it was killed.
    """
    if not os.path.exists(path):
        return {}
    try:
        lines = Path(path).read_text().split("\n")[:-1]
        first, *answers = map(json.loads, lines)
        answers = {(line["steps"], line["index"]): line for line in answers}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: is damaged or not a file of answers: name another with --out")
    check_settings(path, first, settings, "name another with --out")
    return answers


# ---- scores -----------------------------------------------------------------------------------

def score(rows, answers, r, metric):
    """Accuracy, its standard error, and the number of answers."""
    lines = [answers[r, row["index"]] for row in rows]
    n = len(lines)
    p = sum(line[metric] for line in lines) / n
    return p, math.sqrt(p * (1 - p) / n), n


def summarise(rows, answers, steps, metrics):
    """The "results" of write_result(): a dict for each r and metric."""
    results = []
    levels = {row["difficulty"] for row in rows} - {None}
    levels = sorted(levels, key=lambda level: (isinstance(level, str), level))  # numbers first
    for r, metric in product(steps, metrics):
        result = {"steps": r, "metric": metric, "by_difficulty": {}}
        keys = "value", "standard_error", "n"
        result |= zip(keys, score(rows, answers, r, metric))
        for level in levels:
            part = [row for row in rows if row["difficulty"] == level]
            result["by_difficulty"][str(level)] = score(part, answers, r, metric)
        results.append(result)
    return results


def find_enough(model, rows, answers, steps, metrics, task):
    """The "enough" of a result file: see smallest_enough()."""
    found = []
    for metric in metrics:
        scores = {r: [answers[r, row["index"]][metric] for row in rows] for r in steps}
        found += smallest_enough(model, task, metric, scores)
    return found


def print_table(results, args):
    """A line for each r and metric. On the right stand the accuracies of each difficulty."""
    levels = results[0]["by_difficulty"]
    print(f"\n{args.task}" + ", on the right by difficulty" * bool(levels))
    print(f"{'r':>6}  {'metric':9}{'right':>6}{'±':>6}{'n':>7}  "
          + "".join(f"{level:>5}" for level in levels))
    for row in results:
        print(f"{row['steps'] or '-':>6}  {row['metric']:9}{row['value']:6.1%}"
              f"{row['standard_error']:6.1%}{row['n']:7}  "
              + "".join(f"{right:5.0%}" for right, *_ in row["by_difficulty"].values()))


# ---- the command ------------------------------------------------------------------------------

def parse_args():
    p = Parser(usage="eval_gsm8k.py --model MODEL [flags]", description=opening(__doc__),
               epilog="Answers are added to OUT.jsonl as they come, where the same command resumes.")
    what, how, output = p.groups()
    add_evaluation_arguments(what, how, output)
    flag = what.add_argument
    flag("--data", metavar="FILE",
         help='.jsonl with "question" and "answer"; default: GSM8K, which it fetches once')
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
    output.add_argument("--task", metavar="NAME",
                        help="what tables and pictures call the questions; default: its file")
    flag("--compile", action="store_true", help=COMPILE)
    flag("--draft_steps", type=natural, default=0, metavar="R", help=DRAFT_STEPS)
    args = p.parse_args()
    args.task = args.task or Path(args.data or "GSM8K").name
    args.data = args.data or fetch_gsm8k()
    args.out = args.out or f"{args.model}/eval_{Path(args.data).stem}.json"
    return args


def main():
    args = parse_args()
    if WORLD > 1:
        dist.init_process_group("gloo")
        if args.device == "cuda":
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    check_out(args.out)
    check_summary(args.out, args.task)
    rows = read_questions(args.data, args.limit)
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    config = model.config
    steps = args.steps if config.n_core else [0]
    if args.max_new_tokens >= config.context:
        raise UserError(f"--max_new_tokens {args.max_new_tokens}: leaves no room for a prompt in "
                        f"the model's context of {config.context}")
    for row in rows:
        prompt = make_prompt(row["question"], args.template, args.shots)
        ids = tokenizer.encode(prompt, bos=True)
        row["ids"] = ids[args.max_new_tokens - config.context:]  # cut as the harness does

    path = args.out.removesuffix(".json") + ".jsonl"
    # What decides an answer. A digest tells more than a path: a file may move, and a model train
    # on in its folder.
    keys = "template", "shots", "max_new_tokens", "dtype"
    settings = {key: getattr(args, key) for key in keys} | decoding(args)
    settings["questions"] = digest(args.data)
    settings["weights"] = digest(f"{model.folder}/model.safetensors")
    settings["config"] = digest(f"{model.folder}/config.json")
    settings["tokenizer"] = tokenizer.fingerprint
    answers = read_answers(path, settings)
    depths = f" at r = {steps}" if config.n_core else ""
    if RANK == 0:
        # A process that reads the file only now finds the same answers there.
        with whole(path) as new, open(new, "w") as f:
            f.writelines(json.dumps(line) + "\n" for line in (settings, *answers.values()))
        known = f"; {path} holds {len(answers)} answers already" if answers else ""
        print(f"{model.folder}, {', '.join(describe(model))}: {len(rows)} questions{depths}{known}",
              file=sys.stderr)
        if args.template == "plain":
            numbers = sum(reference_number(row["answer"]) is not None for row in rows)
            print(f"answers are compared as numbers in {numbers} of these questions, as text in "
                  f"the other {len(rows) - numbers}", file=sys.stderr)
    decoder = Decoder(model, args.compile)
    answer_rest(decoder, tokenizer, rows, steps, answers, path, args)
    if RANK == 0:
        # Earlier commands may have answered all of these questions at other r.
        steps = [r for r in sorted({r for r, _ in answers})
                 if all((r, row["index"]) in answers for row in rows)]
        metrics = METRICS[args.template]
        results = summarise(rows, answers, steps, metrics)
        seconds = sum(answer["seconds"] for answer in answers.values())  # of all processes
        tokens = sum(answer["tokens"] for answer in answers.values())
        enough = find_enough(model, rows, answers, steps, metrics, args.task)
        print_table(results, args)
        print_enough(enough)
        write_result(args.out, SCRIPT, model, args.task, results, seconds, tokens,
                     settings=settings, enough=enough)
        print(f"{tokens} tokens in {seconds:.1f} s: {args.out}; every answer: {path}")


if __name__ == "__main__":
    cli(main)
