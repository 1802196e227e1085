"""
Accuracy over recurrences: one model, one set of questions, answered at several depths r.

    python eval_gsm8k.py --model out/llama-4-6-4 --data gsm8k/test.jsonl --steps 1,2,4,8,16,32
    python eval_gsm8k.py --model out/llama-4-6-4 --data math500.jsonl --task math500 --max_new_tokens 512
    torchrun --nproc_per_node=4 eval_gsm8k.py --model out/llama-4-6-4 --data gsm8k/test.jsonl
    python eval_gsm8k.py --paired A/eval_test.json B/eval_test.json

What is unusual: r is an argument of the evaluation, so every question is answered once per r. A feed-forward model
has no r and gives one row. All else is what the paper does for GSM8K with lm-evaluation-harness: one shot, "Let's
think step by step.", greedy, float32, at most 256 new tokens; answers.py has the prompts and what counts as right,
of the other tasks too. A row "difficulty" of the data is scored by, too. Greedy, yet the initial state is noise:
answers depend a little on --seed (see sample.py).

Answers go to OUT.jsonl, one line for every (question, r), as batches end; the first line says what the run is. The
same command goes on where that file ends, on any number of processes, with more --steps or a larger --limit if asked;
answers do not depend on the number of processes, but in their last bits on --batch_size (padding). The summary
OUT.json comes last; its seconds are those of answering, added up over processes and sessions.

--paired compares two finished runs question by question: by a bootstrap over questions, is their difference real?
"""
import argparse
import contextlib
import glob
import hashlib
import json
import math
import os
import re
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version

import numpy as np
import torch.distributed as dist

from answers import FIELDS, STOPS, cut, make_prompt, math_verify, read_questions, score
from model import InputError, cli, describe, read_json, write_result
from sample import add_model_arguments, generate, load_model

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


# -------------------------------------------------------------------- the file of answers

OPENING = b'{"script": "eval_gsm8k"'

def settings_of(args, model):
    """What decides an answer: a file holds answers of one such dict. Ways of decoding belong here."""
    digest = {}
    for key, path in (("weights", os.path.join(model.folder, "model.safetensors")), ("data", args.data)):
        with open(path, "rb") as f:
            digest[key + "_sha256"] = hashlib.file_digest(f, "sha256").hexdigest()
    return {"script": "eval_gsm8k", "model": model.folder, "config": asdict(model.config), **digest, "task": args.task,
            "template": args.template, "shots": args.shots, "max_new_tokens": args.max_new_tokens, "seed": args.seed,
            "state": args.state, "dtype": describe(model)[1],
            "math_verify": version("math_verify") if args.task == "math500" and math_verify else None}


@contextlib.contextmanager
def writing(path):
    """A full disk ends in one line; what has been written is whole but for its last line, which read_answers() cuts."""
    try:
        yield
    except OSError as e:
        raise InputError(f"{path}: cannot be written ({e}): make room, and the same command goes on where it was")


def read_answers(path):
    """
    (settings, {(r, index): answer}) of a file of answers, without a half-written last line; settings: {} of a file
    that ends before them. InputError for another file, or a broken line.
    """
    with open(path, "rb") as f:
        text = f.read()
    if text[:len(OPENING)] != OPENING[:len(text)]:
        raise InputError(f"{path}: is something else than a file of answers: name another with --out")
    rows = []
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        try:
            rows.append(dict(json.loads(line)))
            if number > 1 and not {"steps", "index"} <= rows[-1].keys():
                raise ValueError("no answer")
        except (ValueError, TypeError) as e:
            raise InputError(f"{path}:{number}: is damaged ({e}): mend the line, or name another file with --out")
    return (rows or [{}])[0], {(row["steps"], row["index"]): row for row in rows[1:]}


def gather(path, settings, overwrite=False):
    """
    All answers of `path` and of the parts beside it, which processes left, as {(r, index): answer}; after it there is
    only `path`, whole and in order. InputError where one has other settings; overwrite: they are thrown away.
    """
    parts, answers = sorted(glob.glob(glob.escape(path) + ".part*")), {}
    for file in [path] * os.path.exists(path) + parts:
        there, found = read_answers(file)
        if overwrite:
            continue
        if other := [key for key in settings if key != "model" and there and there.get(key) != settings[key]]:
            what = ", ".join(key + (f" ({there.get(key)}, not {settings[key]})" if len(str(settings[key])) < 40 else "")
                             for key in other)
            raise InputError(f"{file}: holds answers with another {what}: name another file with --out, or replace them "
                             "with --overwrite")
        answers = found | answers
    answers = dict(sorted(answers.items()))
    new = f"{path}.tmp-{os.getpid()}"
    try:
        with writing(path), open(new, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in (settings, *answers.values()))
        os.replace(new, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(new)
    for part in parts:
        os.remove(part)
    return answers


# -------------------------------------------------------------------- scores

def rate(correct):
    """(accuracy, standard error, n) of a list of booleans"""
    p = sum(correct) / len(correct)
    return p, math.sqrt(p * (1 - p) / len(correct)), len(correct)


def metrics_of(answer):
    return [key.removesuffix("_correct") for key in answer if key.endswith("_correct")]


def summarise(r, answers, rows):
    """The entries of "results", one a metric: what the answers (of one r, in the order of rows) are worth."""
    groups, results = {}, []
    for answer, row in zip(answers, rows):
        if "difficulty" in row:
            groups.setdefault(str(row["difficulty"]), []).append(answer)
    # numbers in their order, then whatever is no number
    order = sorted(groups, key=lambda d: (0, int(d), d) if d.isdecimal() else (1, 0, d))
    for metric in metrics_of(answers[0]):
        right = lambda group: rate([a[f"{metric}_correct"] for a in group])
        result = dict(zip(("steps", "metric", "value", "standard_error", "n"), (r, metric, *right(answers))))
        results.append(result | ({"by_difficulty": {d: right(groups[d]) for d in order}} if groups else {}))
    return results


def print_tables(results, config):
    """results as in the summary; r beyond the training mean is marked."""
    metrics = list(dict.fromkeys(x["metric"] for x in results))
    name = lambda r: f"{r}{'*' * (r > config.mean_recurrence)}" if config.n_core else "-"
    at = {(x["steps"], x["metric"]): x for x in results}
    steps = list(dict.fromkeys(x["steps"] for x in results))
    print(f"\n{'r':>5}" + "".join(f"{metric + ' %':>15}" for metric in metrics) + f"{'n':>8}")
    for r in steps:
        cells = (at[r, metric] for metric in metrics)
        print(f"{name(r):>5}" + "".join(f"{100 * x['value']:9.1f} ±{100 * x['standard_error']:4.1f}" for x in cells)
              + f"{at[r, metrics[0]]['n']:>8}")
    if "by_difficulty" in results[0]:
        print(f"\n{metrics[0]} %, by difficulty (rows) and r (columns)")
        print(f"{'':>10}" + "".join(f"{name(r):>7}" for r in steps) + f"{'n':>8}")
        for key, (_, _, count) in results[0]["by_difficulty"].items():
            print(f"{key:>10}" + "".join(f"{100 * at[r, metrics[0]]['by_difficulty'][key][0]:7.1f}" for r in steps)
                  + f"{count:>8}")
    if config.n_core and max(steps) > config.mean_recurrence:
        print(f"* beyond the mean recurrence of the training, {config.mean_recurrence}")


# -------------------------------------------------------------------- two runs, question by question

def bootstrap(a, b, resamples=10_000, seed=0):
    """
    a, b: arrays of booleans, of the same questions -> (difference of the means, low and high end of its 95 % interval,
    p that there is none), by drawing questions anew. p: twice the smaller share of resamples on either side of zero.
    """
    d = a.astype(int) - b.astype(int)
    # d has three values, so that their counts in a resample are multinomial: no question need be drawn.
    share = [(d == value).mean() for value in (-1, 0, 1)]
    draws = np.random.default_rng(seed).multinomial(len(d), share, resamples) @ (-1, 0, 1) / len(d)
    p = min(1.0, 2 * (1 + min((draws <= 0).sum(), (draws >= 0).sum())) / (1 + resamples))
    return d.mean(), *np.quantile(draws, (0.025, 0.975)), p


def read_run(path):
    """(summary, settings, {r: its answers, of the summary's questions}) of a finished run."""
    summary = read_json(path)
    if summary.get("script") != "eval_gsm8k":
        raise InputError(f"{path}: is no summary that eval_gsm8k.py wrote")
    answers_path = os.path.splitext(path)[0] + ".jsonl"
    settings, answers = read_answers(answers_path)
    if any(settings.get(key) != summary.get(key) for key in ("weights_sha256", "data_sha256", "template", "seed")):
        raise InputError(f"{answers_path}: holds another run than {path}: evaluate again")
    steps = sorted({row["steps"] for row in summary["results"]})
    by_r = {r: [answer for (r_, _), answer in sorted(answers.items()) if r_ == r][:summary["n"]] for r in steps}
    if any(len(found) < summary["n"] for found in by_r.values()):
        raise InputError(f"{answers_path}: lacks answers of {path}: evaluate again")
    return summary, settings, by_r


def paired(paths, resamples=10_000):
    """Print how far two runs differ for each r that both have; a feed-forward one is compared with every r."""
    (a, settings_a, answers_a), (b, settings_b, answers_b) = map(read_run, paths)
    for key in ("task", "data_sha256"):
        if settings_a[key] != settings_b[key]:
            raise InputError(f"{paths[0]} and {paths[1]}: answer different questions ({key}): evaluate both on one file")
    if a["n"] != b["n"]:
        raise InputError(f"{paths[0]} and {paths[1]}: answer {a['n']} and {b['n']} questions: give both the same --limit")
    free = [x["config"]["n_core"] == 0 for x in (a, b)]
    pairs = [(i, j) for i in answers_a for j in answers_b if i == j or any(free)]
    if not pairs:
        raise InputError(f"{paths[0]} and {paths[1]}: have no r in common: evaluate both at the same --steps")
    print(f"A: {a['model']} ({paths[0]})\nB: {b['model']} ({paths[1]})\n{settings_a['task']}, {a['n']} questions, "
          f"{resamples:,} resamples\n\n{'r of A':>7}{'r of B':>7}  {'metric':12}{'A %':>7}{'B %':>7}{'A - B':>8}"
          f"{'95 % interval':>18}{'p':>9}")
    for i, j in pairs:
        for metric in metrics_of(answers_a[i][0]):
            if f"{metric}_correct" in answers_b[j][0]:
                x, y = (np.array([answer[f"{metric}_correct"] for answer in rows]) for rows in (answers_a[i], answers_b[j]))
                difference, low, high, p = bootstrap(x, y, resamples)
                print(f"{'-' if free[0] else i:>7}{'-' if free[1] else j:>7}  {metric:12}{100 * x.mean():7.1f}"
                      f"{100 * y.mean():7.1f}{100 * difference:+8.1f}{f'{100 * low:+.1f} to {100 * high:+.1f}':>18}{p:9.4f}")


# -------------------------------------------------------------------- the command

def parse_args():
    p = argparse.ArgumentParser(description="Accuracy over recurrences on GSM8K, MATH-500 and word problems.")
    p.add_argument("--model", help="checkpoint or run folder")
    p.add_argument("--data", help="the task's .jsonl; see answers.py for its fields")
    p.add_argument("--task", choices=tuple(FIELDS), default="gsm8k", help="how rows are read and scored; default: gsm8k")
    p.add_argument("--steps", default="1,2,4,8,16,32", help="recurrences r, comma-separated; default: %(default)s")
    p.add_argument("--template", choices=tuple(STOPS),
                   help="cot: as the paper asks; math: minerva_math's (default for math500); plain: the question alone")
    p.add_argument("--shots", type=int, choices=(0, 1, 8), help="examples in the prompt; default: 1, as the paper")
    p.add_argument("--limit", type=int, help="the first so many questions only")
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--max_new_tokens", type=int, default=256)
    p.add_argument("--out", help="the summary; default: eval_<data>.json in the folder of --model; answers: .jsonl beside")
    p.add_argument("--overwrite", action="store_true", help="throw away the answers of another run in that place")
    p.add_argument("--paired", nargs=2, metavar=("A.json", "B.json"), help="compare two finished runs, and no more")
    add_model_arguments(p, dtype="float32")
    args = p.parse_args()
    if args.paired:
        return args
    for key in ("model", "data"):
        if getattr(args, key) is None:
            raise InputError(f"--{key}: is missing; or give two finished runs with --paired")
    for key in ("limit", "batch_size", "max_new_tokens"):
        if (value := getattr(args, key)) is not None and value < 1:
            raise InputError(f"--{key} {value}: must be at least 1")
    if not re.fullmatch(r"\d+(,\d+)*", args.steps):
        raise InputError(f"--steps {args.steps}: give recurrences such as 1,2,4,8")
    args.steps = sorted(set(map(int, args.steps.split(","))))
    args.template = args.template or ("math" if args.task == "math500" else "cot")
    shots = {"cot": (0, 1, 8), "math": (0, 1), "plain": (0,)}[args.template]
    args.shots = min(1, shots[-1]) if args.shots is None or args.template == "plain" else args.shots
    if args.shots not in shots:
        raise InputError(f"--shots {args.shots}: --template {args.template} has {', '.join(map(str, shots))}")
    stem = os.path.splitext(os.path.basename(args.data))[0]
    args.out = args.out or os.path.join(args.model, f"eval_{stem}.json")
    return args


def main():
    args = parse_args()
    if args.paired:
        return paired(args.paired)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    say = lambda text: rank or print(text, file=sys.stderr, flush=True)
    if world > 1 and args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    rows, left_out = read_questions(args.data, args.task, args.limit)
    model, tokenizer = load_model(args.model, args)
    answers_path = os.path.splitext(args.out)[0] + ".jsonl"
    if os.path.isdir(args.out) or args.out == answers_path or not os.access(os.path.dirname(args.out) or ".", os.W_OK):
        raise InputError(f"{args.out}: no summary can be written there: name a .json file with --out")  # not in some hours
    if os.path.exists(args.out) and read_json(args.out).get("script") != "eval_gsm8k":
        raise InputError(f"{args.out}: is something else than an older summary: name another file with --out")
    c = model.config
    room = c.context - args.max_new_tokens
    if room < 1:
        raise InputError(f"--max_new_tokens {args.max_new_tokens}: leaves no room for a prompt in the model's "
                         f"context of {c.context}: ask for fewer")
    if not c.n_core:
        args.steps = [0]
        say("a feed-forward model: --steps has no effect")
    if left_out:
        say(f"{left_out} questions are left out: their answers are not one number")
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
    say(f"{model.folder}, {device}, {dtype}: {len(rows)} questions of {args.data}, {args.task}, {args.template}"
        + (f" with {args.shots} shots" if args.template != "plain" else "") + (f", {world} processes" if world > 1 else ""))

    settings = settings_of(args, model)
    if world > 1:  # nothing but waiting for one another: each process writes a file of its own
        dist.init_process_group("gloo", timeout=timedelta(days=30))
    if rank == 0:
        gather(answers_path, settings, args.overwrite)
    if world > 1:
        dist.barrier()
    answers = read_answers(answers_path)[1]
    wanted = lambda r, batch: any((r, rows[i]["index"]) not in answers for i in batch)
    # Whole batches, dealt out in one fixed order: an answer does not depend on who gives it, or after which kill.
    todo = [(r, batch) for r in args.steps for batch in batches][rank::world]
    todo = [(r, batch) for r, batch in todo if wanted(r, batch)]
    asked = {row["index"] for row in rows}
    here = {r: [a for (r_, index), a in answers.items() if r_ == r and index in asked] for r in args.steps}
    if any(here.values()):
        say(f"{answers_path}: holds {sum(map(len, here.values()))} of {len(args.steps) * len(rows)} answers: going on")
    layers = {r: 1 + c.n_prelude + r * c.n_core + c.n_coda for r in args.steps}  # a token's cost; 1: the head
    goal = {r: len(here[r]) + sum((r, rows[i]["index"]) not in answers for r_, batch in todo if r_ == r for i in batch)
            for r in args.steps}  # of this process
    work, done, tokens, reported, started = sum(len(b) * layers[r] for r, b in todo), 0, 0, 0, time.perf_counter()
    own = f"{answers_path}.part{rank}" if rank else answers_path
    with writing(own), open(own, "a", encoding="utf-8") as f:
        if rank:
            f.write(json.dumps(settings) + "\n")
        for r, batch in todo:
            began = time.perf_counter()
            texts, count = answer_batch(model, tokenizer, [prompts[i] for i in batch], args.max_new_tokens,
                                        STOPS[args.template], r, args.seed, args.state)
            now = time.perf_counter()
            share = {"seconds": (now - began) / len(batch), "tokens": count / len(batch)}  # of its batch
            new = [{"index": row["index"], "steps": r, "output": text, **score(args.task, text, row["gold"]), **share}
                   for row, text in zip((rows[i] for i in batch), texts) if (r, row["index"]) not in answers]
            f.writelines(json.dumps(answer) + "\n" for answer in new)
            f.flush()
            here[r] += new
            tokens, done, seconds = tokens + count, done + len(batch) * layers[r], now - started
            if seconds - reported > 2 or len(here[r]) == goal[r]:
                reported, metric = seconds, metrics_of(new[0])[0]
                say(f"r={r if c.n_core else '-'}: {len(here[r])}/{goal[r]}, {metric} "
                    f"{100 * rate([a[f'{metric}_correct'] for a in here[r]])[0]:.1f}%, {tokens / seconds:.0f} tokens/s, "
                    f"{seconds:.0f} s, ETA {seconds * (work - done) / done:.0f} s")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    if rank:
        return
    answers = gather(answers_path, settings)
    lacking = [r for r in args.steps if wanted(r, range(len(rows)))]
    if lacking:
        raise InputError(f"{answers_path}: lacks answers at r = {lacking}: did another run write there? Start this again")
    found = [[answers[r, row["index"]] for row in rows] for r in args.steps]
    results = [result for r, given in zip(args.steps, found) for result in summarise(r, given, rows)]
    seconds, tokens = (sum(answer[key] for given in found for answer in given) for key in ("seconds", "tokens"))
    more = {key: settings[key] for key in settings.keys() - {"script", "model", "config", "task", "dtype"}}
    write_result(args.out, "eval_gsm8k", model, args.task, results, seconds, tokens, data=os.path.basename(args.data),
                 n=len(rows), left_out=left_out, truncated=truncated, **dict(sorted(more.items())))
    print_tables(results, c)
    print(f"\n{tokens:.0f} tokens in {seconds:.1f} s of answering; {args.out}; every answer: {answers_path}")


if __name__ == "__main__":
    cli(main)
