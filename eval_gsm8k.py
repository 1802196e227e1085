"""
GSM8K over recurrences: the same questions, answered by one model at several depths r.

    python eval_gsm8k.py --model out/llama-4-6-4 --data gsm8k/test.jsonl --steps 1,2,4,8,16,32
    torchrun --nproc_per_node=4 eval_gsm8k.py --model out/llama-4-6-4 --data gsm8k/test.jsonl

What is unusual: r is an argument, so every question is answered once per r. All else is what the
paper does with lm-evaluation-harness (gsm8k_cot_zeroshot with one shot, version 0.4.13): greedy,
float32, at most 256 new tokens. "flexible" scores the last number of the output, "strict" the one
after "The answer is". Greedy or not, answers depend a little on --seed, since s_0 is noise. Caches,
exits and drafts are those of sample.py. A feed-forward model has no r and gives one row.

Rows of --data are {"question", "answer": "... #### 18"}. If they have a "difficulty", accuracy is
broken down by it.

Answers go to OUT.jsonl as batches end, one line for each question and r; the first line holds the
settings. The same command resumes an evaluation that was killed, on any number of processes. With
more --steps or a larger --limit it adds to what is there. OUT.json, the summary, is written last.
"""
import argparse
import json
import math
import os
import re
import sys
import time
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist

from data import cli, describe, read_json, whole, write_result
from sample import (add_decoding_arguments, add_model_arguments, decoding, generate, load_model,
                    parse_steps)

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
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun's


# ---- questions and answers --------------------------------------------------------------------

def read_questions(path, limit=None):
    """The first `limit` rows of a .jsonl file (see the top) as a list of dicts."""
    rows = []
    try:
        with open(path, encoding="utf-8") as f:
            for line in islice(f, limit):
                row = json.loads(line)
                rows.append({
                    "question": str(row["question"]),
                    "answer": str(row["answer"]),
                    "difficulty": row.get("difficulty"),
                })
    except (ValueError, KeyError, TypeError) as e:  # ValueError also for what is not text
        sys.exit(f'{path}:{len(rows) + 1}: not a JSON object with "question" and "answer" ({e!r})')
    if not rows:
        sys.exit(f"{path}: holds no questions")
    return rows


def make_prompt(question, template="cot", shots=1):
    """The text that the model continues. "cot": the paper's prompt; "plain": the question alone."""
    if template == "plain":
        return question
    return "\n\n".join([*EXAMPLES[:shots], f"Q: {question}\nA: Let's think step by step."])


def cut(text, stops):
    """text up to the first of the stop strings."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def flexible_extract(text):
    """The last thing that looks like a number. A lone "..." does, too: the harness's pattern."""
    found = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
    return found[-1] if found else INVALID


def strict_extract(text):
    """The number of the first "The answer is NUMBER"; one more character has to follow it."""
    found = re.search(r"The answer is (-?[0-9.,]+).", text)
    return found[1] if found else INVALID


def is_correct(extracted, answer):
    """Equal as text, so "18.00" is not "18". answer: the field of the data set, "... #### 18"."""
    return normalise(extracted) == normalise(answer)


def normalise(text):
    """The harness's exact_match drops commas, dollars, all up to "#### ", a final full stop."""
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.lower()


METRICS = {"flexible": flexible_extract, "strict": strict_extract}


# ---- decoding ---------------------------------------------------------------------------------

def answer_batch(model, tokenizer, prompts, max_new_tokens, stops, r, **options):
    """
    Continue a batch of prompts (lists of ids) until each has met a stop string or EOS.
    options: those of sample.Decoding.

    Returns three lists: texts, cut at the first stop; tokens generated; recurrences these took.
    """
    new = [[] for _ in prompts]
    recurrences = [0] * len(prompts)
    # A stop of n characters has at most n tokens, so the end of the text is enough to see it.
    tail = max(map(len, stops), default=0)

    def ends(row, token):
        end = tokenizer.decode(new[row][-tail:])
        return token == tokenizer.eos_id or any(stop in end for stop in stops)

    for row, token, took in generate(model, prompts, max_new_tokens, r, ends, **options):
        new[row].append(token)
        recurrences[row] += took
    texts = []
    for ids in new:
        ids = [token for token in ids if token != tokenizer.eos_id]
        texts.append(cut(tokenizer.decode(ids), stops))
    return texts, [len(ids) for ids in new], recurrences


def answer_questions(model, tokenizer, rows, r, batch, args):
    """Answer the questions in batch, a list of indices of rows: {(r, index): line of the file}."""
    began = time.perf_counter()
    room = model.config.context - args.max_new_tokens
    prompts = [rows[i]["ids"][-room:] for i in batch]  # cut from the left, as the harness does
    stops = STOPS if args.template == "cot" else ()
    found = answer_batch(model, tokenizer, prompts, args.max_new_tokens, stops, r, **decoding(args))
    seconds = (time.perf_counter() - began) / len(batch)
    answers = {}
    for i, text, tokens, recurrences in zip(batch, *found):
        answer = {"index": i, "steps": r, "output": text}
        for metric, extract in METRICS.items():
            answer[metric] = is_correct(extract(text), rows[i]["answer"])
        answer |= {"tokens": tokens, "recurrences": recurrences, "seconds": seconds}
        answers[r, i] = answer
    return answers


def answer_rest(model, tokenizer, rows, answers, path, args):
    """
    Answer what `answers`, {(r, index): line of the file}, does not have yet. New answers are added
    to it and to the file. In each round every process answers one batch, and rank 0 writes.
    """
    # Similar lengths together need little padding. The longest first: out of memory comes at once.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["ids"]))
    batches = [order[i:i + args.batch_size] for i in range(0, len(rows), args.batch_size)]
    # A batch that was answered in part is answered whole, as rounding depends on its other rows.
    todo = [(r, batch) for r in args.steps for batch in batches
            if any((r, i) not in answers for i in batch)]
    costs = [r + 1 for r, _ in todo]  # prelude and coda are about as deep as the core
    began = time.perf_counter()
    for first in range(0, len(todo), WORLD):
        parts = [{}] * WORLD
        if first + RANK < len(todo):
            r, batch = todo[first + RANK]
            parts[RANK] = answer_questions(model, tokenizer, rows, r, batch, args)
        if WORLD > 1:
            dist.all_gather_object(parts, parts[RANK])
        new = {key: line for part in parts for key, line in part.items() if key not in answers}
        answers |= new
        if RANK == 0:
            try:
                with open(path, "a", encoding="utf-8") as f:
                    f.writelines(json.dumps(line) + "\n" for line in new.values())
            except OSError as e:
                sys.exit(f"{path}: cannot be written ({e}): make room and start this again")
            seconds = time.perf_counter() - began
            share = sum(costs[:first + WORLD]) / sum(costs)
            print(f"r = {r}: {len(answers)} answers, {share:.0%} of the work in {seconds:.0f} s, "
                  f"{seconds / share - seconds:.0f} s to go", file=sys.stderr)


# ---- the file of answers ----------------------------------------------------------------------

def settings_of(args, model):
    """Everything that decides an answer; the first line of the file of answers."""
    no_effect = ("steps", "limit", "batch_size", "out", "overwrite", "device", "compile")
    settings = {key: value for key, value in vars(args).items() if key not in no_effect}
    # A model that was trained again in the same folder is another one.
    saved = os.path.getmtime(os.path.join(model.folder, "model.safetensors"))
    return settings | {"script": "eval_gsm8k", "model": model.folder, "weights_saved": saved}


def read_answers(path, settings, overwrite):
    """
    {(r, index): line} of a file of answers; {} if there is no file, or with overwrite. A last line
    without an end is dropped: the process that wrote it was killed.
    """
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().split("\n")[:-1]
        first, *answers = [json.loads(line) for line in lines]
        assert first["script"] == settings["script"]
    except (ValueError, KeyError, TypeError, AssertionError):
        sys.exit(f"{path}: is damaged or not a file of answers: name another with --out")
    if overwrite:
        return {}
    for key, value in settings.items():
        if first.get(key) != value:
            sys.exit(f"{path}: holds answers with {key} {first.get(key)}, not {value}: name "
                     "another file with --out, or replace them with --overwrite")
    return {(answer["steps"], answer["index"]): answer for answer in answers}


# ---- scores -----------------------------------------------------------------------------------

def score(answers, metric):
    """Accuracy, its standard error, the number of answers, mean recurrences of a token."""
    n = len(answers)
    p = sum(answer[metric] for answer in answers) / n
    recurrences = sum(answer["recurrences"] for answer in answers)
    tokens = sum(answer["tokens"] for answer in answers)
    return p, math.sqrt(p * (1 - p) / n), n, recurrences / tokens


def summarise(answers, rows, steps, metrics):
    """The "results" of write_result(): a dict for each r and metric."""
    levels = sorted({row["difficulty"] for row in rows} - {None})
    results = []
    for r in steps:
        given = [answers[r, i] for i in range(len(rows))]
        for metric in metrics:
            keys = ("value", "standard_error", "n", "mean_steps")
            result = {"steps": r, "metric": metric} | dict(zip(keys, score(given, metric)))
            for level in levels:
                part = [answer for answer, row in zip(given, rows) if row["difficulty"] == level]
                result.setdefault("by_difficulty", {})[str(level)] = score(part, metric)
            results.append(result)
    return results


def depth(r, config):
    """r as tables show it: * is beyond the mean recurrence of training, - has no recurrence."""
    if not config.n_core:
        return "-"
    return f"{r}*" if r > config.mean_recurrence else f"{r}"


def print_table(results, config):
    """A line for each r and metric; last come the accuracies of each difficulty, if there are."""
    levels = results[0].get("by_difficulty", {})
    print(f"\n{'by difficulty' if levels else '':>57}")
    print(f"{'r':>6}  {'metric':9}{'right':>6}{'±':>6}{'n':>7}{'mean r':>8}  "
          + "".join(f"{level:>5}" for level in levels))
    for row in results:
        print(f"{depth(row['steps'], config):>6}  {row['metric']:9}{row['value']:6.1%}"
              f"{row['standard_error']:6.1%}{row['n']:7}{row['mean_steps']:8.2f}  "
              + "".join(f"{row['by_difficulty'][level][0]:5.0%}" for level in levels))
    if config.n_core:
        print(f"* beyond the mean recurrence of training, {config.mean_recurrence}")


# ---- the command ------------------------------------------------------------------------------

def parse_args():
    p = argparse.ArgumentParser(description="GSM8K over recurrences.")
    p.add_argument("--model", required=True, help="checkpoint or run folder")
    p.add_argument("--data", required=True, help='.jsonl with "question" and "answer"')
    p.add_argument("--steps", default="1,2,4,8,16,32",
                   help="recurrences r, comma-separated; default: %(default)s")
    p.add_argument("--template", choices=("cot", "plain"), default="cot",
                   help="cot: the paper's prompt (default); plain: the question alone")
    p.add_argument("--shots", type=int, choices=(0, 1, 8), default=1,
                   help="examples in the prompt; default: 1, as in the paper")
    p.add_argument("--limit", type=int, help="the first so many questions only")
    p.add_argument("--batch_size", type=int, default=32, help="default: %(default)s")
    p.add_argument("--max_new_tokens", type=int, default=256, help="default: %(default)s")
    p.add_argument("--out", help="the summary; default: eval_DATA.json in the folder of --model")
    p.add_argument("--overwrite", action="store_true", help="discard the answers that are there")
    add_model_arguments(p, dtype="float32")
    add_decoding_arguments(p)
    args = p.parse_args()
    stem = os.path.splitext(os.path.basename(args.data))[0]
    args.out = args.out or os.path.join(args.model, f"eval_{stem}.json")
    return args


def main():
    args = parse_args()
    if WORLD > 1:
        # All wait for the slowest batch of a round, so no timeout within a day.
        dist.init_process_group("gloo", timeout=timedelta(days=1))
        if args.device == "cuda":
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(args.device)
    rows = read_questions(args.data, args.limit)
    model, tokenizer = load_model(args.model, args.device, args.dtype, args.compile)
    config = model.config
    args.steps = sorted(parse_steps(args.steps)) if config.n_core else [0]
    if not 0 < args.max_new_tokens < config.context:
        sys.exit(f"--max_new_tokens {args.max_new_tokens}: must be positive and leave room for a "
                 f"prompt in the model's context of {config.context}")
    room = config.context - args.max_new_tokens
    for row in rows:
        prompt = make_prompt(row["question"], args.template, args.shots)
        row["ids"] = tokenizer.encode(prompt, bos=True)
    truncated = sum(len(row["ids"]) > room for row in rows)

    if os.path.exists(args.out) and read_json(args.out).get("script") != "eval_gsm8k":
        sys.exit(f"{args.out}: is not an earlier summary: name another file with --out")
    path = args.out.removesuffix(".json") + ".jsonl"
    settings = settings_of(args, model)
    answers = read_answers(path, settings, args.overwrite)
    if WORLD > 1:
        dist.barrier()  # everybody has read the file
    if RANK == 0:
        with whole(path) as new, open(new, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(line) + "\n" for line in (settings, *answers.values()))
        print(f"{model.folder}, {', '.join(describe(model))}: {len(rows)} questions at r = "
              f"{args.steps}; {truncated} prompts are cut to their last {room} tokens; "
              f"{path} holds {len(answers)} answers", file=sys.stderr)
    answer_rest(model, tokenizer, rows, answers, path, args)
    if RANK == 0:
        # Without the paper's prompt nothing asks for "The answer is".
        metrics = ["flexible", "strict"] if args.template == "cot" else ["flexible"]
        results = summarise(answers, rows, args.steps, metrics)
        seconds = sum(answer["seconds"] for answer in answers.values())  # of all processes
        tokens = sum(answer["tokens"] for answer in answers.values())
        write_result(args.out, "eval_gsm8k", model, "gsm8k", results, seconds, tokens,
                     data=os.path.basename(args.data), n=len(rows), truncated=truncated,
                     settings=settings)
        print_table(results, config)
        print(f"{tokens} tokens in {seconds:.1f} s: {args.out}; every answer: {path}")


if __name__ == "__main__":
    cli(main)
