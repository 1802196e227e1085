"""
Accuracy over recurrences: one model, one set of questions, answered at several depths r.

    python eval_gsm8k.py --model out/llama-4-6-4 --data gsm8k/test.jsonl --steps 1,2,4,8,16,32
    python eval_gsm8k.py --model out/tiny/task --data out/tiny/test.jsonl --template plain --max_new_tokens 4

What is unusual: r is an argument of the evaluation, so every question is answered once per r. A
feed-forward model has no r and gives one row. All else is what the paper does for GSM8K with
lm-evaluation-harness: one shot, "Let's think step by step.", greedy, float32, at most 256 new tokens,
and two scores: "flexible" takes the last number of the answer, "strict" what follows "The answer is".

--data: lines {"question": ..., "answer": ...}; with "difficulty" also scored by it. Greedy, yet the
initial state is noise: answers depend a little on --seed (see sample.py).
"""
import argparse
import json
import math
import os
import re
import sys
import time

from model import InputError, cli, describe, write_result
from sample import add_model_arguments, generate, load_model

# The chain-of-thought examples of Wei et al. (arXiv 2201.11903), in lm-eval's order.
SHOTS = (
    ("There are 15 trees in the grove. Grove workers will plant trees in the grove today. After they are done, "
     "there will be 21 trees. How many trees did the grove workers plant today?",
     "There are 15 trees originally. Then there were 21 trees after some more were planted. So there must have "
     "been 21 - 15 = 6. The answer is 6."),
    ("If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the parking lot?",
     "There are originally 3 cars. 2 more cars arrive. 3 + 2 = 5. The answer is 5."),
    ("Leah had 32 chocolates and her sister had 42. If they ate 35, how many pieces do they have left in total?",
     "Originally, Leah had 32 chocolates. Her sister had 42. So in total they had 32 + 42 = 74. After eating 35, "
     "they had 74 - 35 = 39. The answer is 39."),
    ("Jason had 20 lollipops. He gave Denny some lollipops. Now Jason has 12 lollipops. How many lollipops did "
     "Jason give to Denny?",
     "Jason started with 20 lollipops. Then he had 12 after giving some to Denny. So he gave Denny 20 - 12 = 8. "
     "The answer is 8."),
    ("Shawn has five toys. For Christmas, he got two toys each from his mom and dad. How many toys does he have now?",
     "Shawn started with 5 toys. If he got 2 toys each from his mom and dad, then that is 4 more toys. 5 + 4 = 9. "
     "The answer is 9."),
    ("There were nine computers in the server room. Five more computers were installed each day, from monday to "
     "thursday. How many computers are now in the server room?",
     "There were originally 9 computers. For each of 4 days, 5 more computers were added. So 5 * 4 = 20 computers "
     "were added. 9 + 20 is 29. The answer is 29."),
    ("Michael had 58 golf balls. On tuesday, he lost 23 golf balls. On wednesday, he lost 2 more. How many golf "
     "balls did he have at the end of wednesday?",
     "Michael started with 58 golf balls. After losing 23 on tuesday, he had 58 - 23 = 35. After losing 2 more, he "
     "had 35 - 2 = 33 golf balls. The answer is 33."),
    ("Olivia has $23. She bought five bagels for $3 each. How much money does she have left?",
     "Olivia had 23 dollars. 5 bagels for 3 dollars each will be 5 x 3 = 15 dollars. So she has 23 - 15 dollars "
     "left. 23 - 15 is 8. The answer is 8."),
)
STOPS = {"cot": ("Q:", "</s>", "<|im_end|>"), "plain": ()}  # plain substrings; EOS always ends a text
INVALID = "[invalid]"


# -------------------------------------------------------------------- prompts and scores

def make_prompt(question, template="cot", shots=1):
    """The text that a model is asked with; "plain" is the question alone."""
    if template == "plain":
        return question
    asked = [f"Q: {q}\nA: Let's think step by step. {a}" for q, a in SHOTS[:shots]]
    return "\n\n".join([*asked, f"Q: {question}\nA: Let's think step by step."])


def cut(text, stops):
    """text up to the first of the stop strings."""
    return text[:min([i for i in map(text.find, stops) if i >= 0], default=len(text))]


def flexible_extract(text):
    """The last thing that looks like a number (a lone "..." does too: lm-eval's own pattern)."""
    found = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
    return found[-1] if found else INVALID


def strict_extract(text):
    """The number of the first "The answer is NUMBER", which takes one more character after it."""
    found = re.search(r"The answer is (-?[0-9.,]+).", text)
    return found[1] if found else INVALID


def is_correct(extracted, answer):
    """Equal as text (so "18.00" is not "18"); answer: the data set's field, "... #### 18" or "18"."""
    return normalise(extracted) == normalise(answer)


def normalise(text):
    """lm-eval's exact_match: without commas, dollars, all up to "#### ", one final full stop, case."""
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.lower()


# -------------------------------------------------------------------- questions and answers

def read_questions(path, limit=None):
    """The rows of a .jsonl file (at most limit). InputError names file:line and what is wrong there."""
    rows = []
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if len(rows) == limit:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as e:  # also what is not UTF-8
                raise InputError(f"{path}:{number}: is not a line of JSON ({e})")
            if not isinstance(row, dict) or not all(isinstance(row.get(k), str) for k in ("question", "answer")):
                raise InputError(f'{path}:{number}: needs "question" and "answer", both strings')
            rows.append(row)
    if not rows:
        raise InputError(f"{path}: holds no questions: is it the right file?")
    return rows


def answer_batch(model, tokenizer, prompts, max_new_tokens, stops, r, seed, state):
    """
    Greedy continuations of a batch of prompts (lists of ids) -> (texts cut at the first stop,
    tokens generated). Ends when every row has met a stop or EOS.
    """
    new = [[] for _ in prompts]
    # A stop of n characters has at most n tokens: the end of the text is enough to see it come.
    tail = max(map(len, stops), default=0)

    def ends(row, token):
        end = tokenizer.decode(new[row][-tail:]) if tail else ""
        return token == tokenizer.eos_id or cut(end, stops) != end

    for row, token, _ in generate(model, prompts, max_new_tokens, r, ends, seed=seed, state=state):
        new[row].append(token)
    texts = [tokenizer.decode(ids[:-1] if ids[-1] == tokenizer.eos_id else ids) for ids in new]
    return [cut(text, stops) for text in texts], sum(map(len, new))


def rate(correct):
    """(accuracy, standard error, n) of a list of booleans"""
    p = sum(correct) / len(correct)
    return p, math.sqrt(p * (1 - p) / len(correct)), len(correct)


def summarise(r, answers, rows):
    """One entry of "results": what the answers (of one r, in the order of rows) are worth."""
    flexible, strict = (rate([a[key] for a in answers]) for key in ("flexible_correct", "strict_correct"))
    result = {"steps": r, "flexible": flexible[0], "flexible_se": flexible[1],
              "strict": strict[0], "strict_se": strict[1]}
    groups = {}
    for answer, row in zip(answers, rows):
        if "difficulty" in row:
            groups.setdefault(str(row["difficulty"]), []).append(answer["flexible_correct"])
    if groups:  # numbers in their order, then whatever is no number
        order = sorted(groups, key=lambda d: (0, int(d), d) if d.isdecimal() else (1, 0, d))
        result["by_difficulty"] = {d: rate(groups[d]) for d in order}
    return result


def print_tables(results, n, recurrent):
    percent = lambda p, se: f"{100 * p:6.1f} ±{100 * se:4.1f}"
    name = lambda result: result["steps"] if recurrent else "-"
    print(f"\n{'r':>4}  {'flexible %':>12}  {'strict %':>12}  {'n':>6}")
    for x in results:
        print(f"{name(x):>4}  {percent(x['flexible'], x['flexible_se']):>12}  "
              f"{percent(x['strict'], x['strict_se']):>12}  {n:>6}")
    if "by_difficulty" in results[0]:
        print("\nflexible %, by difficulty (rows) and r (columns)")
        print(f"{'':>10}" + "".join(f"{name(x):>7}" for x in results) + f"{'n':>8}")
        for key, (_, _, count) in results[0]["by_difficulty"].items():
            print(f"{key:>10}" + "".join(f"{100 * x['by_difficulty'][key][0]:7.1f}" for x in results) + f"{count:>8}")


# -------------------------------------------------------------------- the command

def parse_args():
    p = argparse.ArgumentParser(description="Accuracy on GSM8K-like questions over recurrences.")
    p.add_argument("--model", required=True, help="checkpoint or run folder")
    p.add_argument("--data", required=True, help='.jsonl of {"question", "answer"[, "difficulty"]}')
    p.add_argument("--steps", default="1,2,4,8,16,32", help="recurrences r, comma-separated; default: %(default)s")
    p.add_argument("--template", choices=tuple(STOPS), default="cot",
                   help="cot (default): as the paper asks; plain: the question alone")
    p.add_argument("--shots", type=int, choices=(0, 1, 8), default=1, help="examples in cot; default: 1, as the paper")
    p.add_argument("--limit", type=int, help="the first so many questions only")
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--max_new_tokens", type=int, default=256)
    p.add_argument("--out", help="default: eval_<data>.json in the folder of --model")
    add_model_arguments(p, dtype="float32")
    args = p.parse_args()
    for key in ("limit", "batch_size", "max_new_tokens"):
        if (value := getattr(args, key)) is not None and value < 1:
            raise InputError(f"--{key} {value}: must be at least 1")
    if not re.fullmatch(r"\d+(,\d+)*", args.steps):
        raise InputError(f"--steps {args.steps}: give recurrences such as 1,2,4,8")
    args.steps = sorted(set(map(int, args.steps.split(","))))
    stem = os.path.splitext(os.path.basename(args.data))[0]
    args.out = args.out or os.path.join(args.model, f"eval_{stem}.json")
    return args


def main():
    args = parse_args()
    say = lambda text: print(text, file=sys.stderr, flush=True)
    rows = read_questions(args.data, args.limit)
    model, tokenizer = load_model(args.model, args)
    folder = os.path.dirname(args.out) or "."
    if os.path.isdir(args.out) or not os.access(folder, os.W_OK):  # said now, not in some hours
        raise InputError(f"{args.out}: no file can be written there: name another with --out")
    c = model.config
    room = c.context - args.max_new_tokens
    if room < 1:
        raise InputError(f"--max_new_tokens {args.max_new_tokens}: leaves no room for a prompt in the model's "
                         f"context of {c.context}: ask for fewer")
    if not c.n_core:
        args.steps = [0]
        say("a feed-forward model: --steps has no effect")
    prompts = [tokenizer.encode(make_prompt(row["question"], args.template, args.shots), bos=True) for row in rows]
    truncated = sum(len(ids) > room for ids in prompts)
    if truncated:
        say(f"{truncated} of {len(prompts)} prompts are longer than {room} tokens (context {c.context}, less "
            f"{args.max_new_tokens} new ones): only their last {room} tokens are asked")
    prompts = [ids[-room:] for ids in prompts]  # from the left, as lm-eval does
    # Like lengths together: little padding. The longest first: what does not fit fails at once.
    order = sorted(range(len(rows)), key=lambda i: -len(prompts[i]))
    batches = [order[i:i + args.batch_size] for i in range(0, len(order), args.batch_size)]
    device, dtype = describe(model)
    say(f"{model.folder}, {device}, {dtype}: {len(rows)} questions of {args.data}, {args.template}"
        + (f" with {args.shots} shots" if args.template == "cot" else ""))

    layers = {r: 1 + c.n_prelude + r * c.n_core + c.n_coda for r in args.steps}  # a token's cost; 1: the head
    work, done, tokens, reported, started = len(rows) * sum(layers.values()), 0, 0, 0, time.perf_counter()
    results, answers = [], []
    for r in args.steps:
        found = {}
        for batch in batches:
            texts, count = answer_batch(model, tokenizer, [prompts[i] for i in batch], args.max_new_tokens,
                                        STOPS[args.template], r, args.seed, args.state)
            for i, text in zip(batch, texts):
                flexible, strict = flexible_extract(text), strict_extract(text)
                found[i] = {"index": i, "steps": r, "output": text, "flexible": flexible, "strict": strict,
                            "flexible_correct": is_correct(flexible, rows[i]["answer"]),
                            "strict_correct": is_correct(strict, rows[i]["answer"])}
            tokens, done, seconds = tokens + count, done + len(batch) * layers[r], time.perf_counter() - started
            if seconds - reported > 2 or len(found) == len(rows):
                reported = seconds
                say(f"r={r if c.n_core else '-'}: {len(found)}/{len(rows)}, flexible "
                    f"{100 * rate([a['flexible_correct'] for a in found.values()])[0]:.1f}%, "
                    f"{tokens / seconds:.0f} tokens/s, {seconds:.0f} s, ETA {seconds * (work - done) / done:.0f} s")
        answers += (found := [found[i] for i in range(len(rows))])
        results.append(summarise(r, found, rows))
    seconds = time.perf_counter() - started

    write_result(args.out, "eval_gsm8k", model, os.path.basename(args.data), results, seconds, tokens,
                 template=args.template, shots=args.shots if args.template == "cot" else 0, n=len(rows),
                 max_new_tokens=args.max_new_tokens, truncated=truncated, seed=args.seed, state=args.state,
                 answers=answers)
    print_tables(results, len(rows), recurrent=c.n_core > 0)
    print(f"\n{tokens} tokens in {seconds:.1f} s; every answer: {args.out}")


if __name__ == "__main__":
    cli(main)
