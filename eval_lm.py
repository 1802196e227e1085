"""
Any task of lm-evaluation-harness over recurrences (pip install lm_eval==0.4.13).

    python eval_lm.py --model out/tinyllama-4-8-4 --steps 1,4,32 --tasks arc_easy,hellaswag,piqa
    python eval_lm.py --model out/tiny/task --tasks my_task --include_path my_tasks --limit 100

What is unusual: log-likelihoods for every r come from one pass of the largest. And the choices of a question share its
context, which is computed once: a row holds the context and then each choice, which sees the context and itself, at the
positions that it has alone. Text is generated anew for each r, greedily. Tokens, truncation and scores are those of the
harness's own HFLM; BOS is added where the tokenizer has one.
"""
import argparse
import os
import random
import re
import sys
import time

import numpy as np
import torch

from eval_gsm8k import answer_batch
from model import LOGITS_AT_ONCE, InputError, cli, describe, write_result
from sample import add_model_arguments, decoding, load_model, parse_steps

try:
    from lm_eval import defaults, evaluator, utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from tqdm import tqdm
except ImportError as e:
    sys.exit(f"eval_lm.py: error: needs lm-evaluation-harness: pip install lm_eval==0.4.13 ({e})")


@register_model("nanoloop")
class Harness(TemplateLM):
    """
    A checkpoint as a model of the harness. steps: r, or several, of which .r answers now (at first the last); the
    others as sample.add_model_arguments(). What the base class does: split context and continuation into tokens.
    """

    def __init__(self, folder, steps, batch_size=16, device="cpu", dtype="float32", seed=0, state="noise"):
        super().__init__()
        self.model, self.tokenizer = load_model(folder, device, dtype)
        self.steps = ([steps] if isinstance(steps, int) else steps) if self.model.config.n_core else [0]
        self.batch_size, self.seed, self.state, self.r = int(batch_size), seed, state, self.steps[-1]
        self.max_length, self._device = self.model.config.context, self.model.embed.weight.device
        self.answers = {}  # (context, continuation), two tuples of ids -> {r: (log-likelihood, is it the greedy one)}
        self.tokens = 0    # computed so far

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self):  # what stands for an empty context
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.tokenizer.encode(string, bos=add_special_tokens is not False, special=True)

    @torch.no_grad()
    def score(self, rows):
        """[(context, [continuation, ...]), ...] of ids -> for each continuation, row by row, as in .answers."""
        m, c, T = self.model, self.model.config, max(map(size, rows))
        table, read, targets = [], [], []  # read: where in (B * T) the targets are predicted
        for b, (context, continuations) in enumerate(rows):
            n = len(context)
            ids, at, branch = list(context), list(range(n)), [0] * n  # branch: 0 is seen by all after it, k by k alone
            for k, x in enumerate(continuations, 1):
                read += [b * T + n - 1, *range(b * T + len(ids), b * T + len(ids) + len(x) - 1)]
                targets += x
                ids, at, branch = ids + list(x[:-1]), at + list(range(n, n + len(x) - 1)), branch + [k] * (len(x) - 1)
            self.tokens += len(ids)
            pad = T - len(ids)
            table.append((ids + [0] * pad, at + [0] * pad, branch + [-1] * pad))
        idx, at, branch = torch.tensor(table, device=self._device).unbind(1)                # (B, T)
        read, targets = (torch.tensor(x, device=self._device) for x in (read, targets))     # (N,)
        mask = ((branch[:, None] == 0) | (branch[:, None] == branch[:, :, None])).tril()[:, None]   # (B, 1, T, T)
        S = int(at.max()) + 1
        rope = [t[at][:, None] for t in m.rope(S)]                                          # (B, 1, T, D/2)
        x = e = m.run_prelude(m.embed_idx(idx), rope, mask)
        if c.n_core:  # as in generate(): the noise of a position follows from it and the seed alone
            noise = torch.zeros(S, c.n_embd, device=self._device)
            if self.state == "noise":
                noise = m.initial_state(S, 1, [self.seed * 1_000_003 + i for i in range(S)])[:, 0]
            x = m.first_state(e, noise[at])
        out, lengths, few = {}, [len(x) for _, row in rows for x in row], max(1, LOGITS_AT_ONCE // c.vocab_size)
        for r in range(max(self.steps) + 1):
            x = m.run_core(x, e, rope, mask) if r and c.n_core else x
            if r in self.steps:
                found = []
                for state, target in zip(m.run_coda(x, rope, mask).flatten(0, 1)[read].split(few), targets.split(few)):
                    logits = m.head(state).float()
                    p = logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(-1)
                    found.append(torch.stack((p.double(), logits.argmax(-1) == target)))    # (2, N)
                found = torch.cat(found, 1).cpu().split(lengths, 1)
                out[r] = [(p.sum().item(), bool(greedy.all())) for p, greedy in found]
        return [dict(zip(out, answers)) for answers in zip(*out.values())]

    def _loglikelihood_tokens(self, requests, **kwargs):
        """[(anything, context, continuation), ...] -> [(log-likelihood, is it the greedy one), ...] at .r."""
        keys, rows = [], []
        for _, context, continuation in requests:
            if not context or not 0 < len(continuation) <= self.max_length:
                raise InputError(f"--tasks: one asks about {len(continuation)} tokens after {len(context)}: a model takes 1 "
                                 f"to {self.max_length} after at least 1: leave it out")
            kept = tuple(context + continuation)[-self.max_length - 1:]  # the last one is predicted, not read
            keys.append((kept[:-len(continuation)], tuple(continuation)))
        for context, x in sorted(set(keys) - self.answers.keys()):
            # At most four times as long as the context: what is saved outweighs the attention's work.
            if not rows or rows[-1][0] != context or size(rows[-1]) + len(x) - 1 > 4 * len(context):
                rows.append((context, []))
            rows[-1][1].append(x)
        rows.sort(key=size, reverse=True)  # like lengths together, and what does not fit fails at once
        for i in tqdm(range(0, len(rows), self.batch_size), "batches of contexts scored", disable=not rows):
            batch = rows[i:i + self.batch_size]
            self.answers.update(zip([(context, x) for context, row in batch for x in row], self.score(batch)))
        return [self.answers[key][self.r] for key in keys]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Instances of (text,) -> log-likelihoods, in windows of the model's context. BOS is scored too, as by HFLM."""
        windows = [[(None, *utils.make_disjoint_window(window)) for window in utils.get_rolling_token_windows(
            self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1)] for request in requests]
        found = iter(self._loglikelihood_tokens([x for text in windows for x in text]))
        return [sum(next(found)[0] for _ in text) for text in windows]

    def generate_until(self, requests, disable_tqdm=False):
        """Instances of (context, settings) -> texts, cut at the first of settings["until"]."""
        jobs, batches, texts = [], [], {}
        for i, (context, settings) in enumerate(request.args for request in requests):
            settings = normalize_gen_kwargs(settings)
            new, stops, ids = settings["max_gen_toks"], settings.get("until") or [], self.tok_encode(context)
            if settings["do_sample"] or new >= self.max_length:
                raise InputError(f"--tasks: one asks for {new} tokens, sampled: {settings['do_sample']}; we decode greedily "
                                 f"in a context of {self.max_length}: leave it out")
            stops = tuple(filter(None, [stops] if isinstance(stops, str) else stops))
            jobs.append((new, stops, -len(ids), ids[new - self.max_length:], i))
        for job in sorted(jobs):
            if not batches or len(batches[-1]) == self.batch_size or batches[-1][0][:2] != job[:2]:
                batches.append([])
            batches[-1].append(job)
        for batch in tqdm(batches, f"batches of texts at r = {self.r}"):
            (new, *_), (stops, *_), _, prompts, where = zip(*batch)
            found, counts, _ = answer_batch(self.model, self.tokenizer, prompts, new, stops, self.r, seed=self.seed,
                                           state=self.state)
            texts.update(zip(where, found))
            self.tokens += sum(counts)
        return [texts[i] for i in range(len(requests))]


def size(row):
    """Tokens that a row of score() reads."""
    return len(row[0]) + sum(len(x) - 1 for x in row[1])


def load_tasks(names, include_path=None, num_fewshot=None):
    """The harness's tasks of these names (with *), with its simple_evaluate()'s random numbers. InputError."""
    random.seed(defaults.DEFAULT_RANDOM_SEED)
    np.random.seed(defaults.DEFAULT_OTHER_SEED)
    manager = TaskManager(include_path=include_path)
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise InputError(f"--tasks: there is no {unknown[0]!r}: `lm_eval ls tasks` lists the harness's own, and "
                         "--include_path names a folder with yours")
    try:
        tasks = manager.load(manager.match_tasks(names))
    except Exception as e:  # of the network, a data set, a task's own code: it cannot run
        why = " ".join(f"{type(e).__name__}: {e}".split())
        raise InputError(f"--tasks {','.join(names)}: cannot be loaded ({why:.300})")
    for task in tasks["tasks"].values():
        if (own := task.get_config("num_fewshot")) is None or num_fewshot is not None and own != 0:
            task.set_config("num_fewshot", num_fewshot or 0)
    return tasks


def evaluate(lm, tasks, limit=None):
    """"results" of write_result(): one for each r of lm.steps, task or group of tasks, and metric."""
    results = []
    for lm.r in lm.steps:  # the same requests each time: only the first computes likelihoods
        for task in tasks["tasks"].values():
            task.set_fewshot_seed(defaults.DEFAULT_OTHER_SEED)
        # Bootstrapped standard errors, such as a perplexity's: a hundredth of the harness's rounds, enough for 2 digits.
        found = evaluator.evaluate(lm, tasks, limit=limit, log_samples=False, bootstrap_iters=1000)
        for task, values in found["results"].items():
            n = found["n-samples"].get(task, {}).get("effective")
            for key, value in values.items():
                metric, comma, rule = key.partition(",")
                if comma and not metric.endswith("_stderr"):
                    error = values.get(f"{metric}_stderr,{rule}")  # "N/A" where it has none
                    results.append({"steps": lm.r, "task": task, "metric": metric if rule == "none" else key,
                                    "value": float(value), "n": n,
                                    "standard_error": float(error) if isinstance(error, float) else None})
    return results


def print_table(results, config):
    """A line for each task and metric, a column for each r; those deeper than the model's mean recurrence are marked."""
    lines = {}
    for x in results:
        error = x["standard_error"]
        lines.setdefault((x["task"], x["metric"]), {})[x["steps"]] = f"{x['value']:#.4g}" + (
            "" if error is None else f" ±{error:#.2g}")
    wide, steps = [max(map(len, column)) for column in zip(("task", "metric"), *lines)], next(iter(lines.values()))
    heads = [f"r = {r}{'*' * (r > config.mean_recurrence)}" if config.n_core else "value" for r in steps]
    for names, cells in [(("task", "metric"), heads), *((names, row.values()) for names, row in lines.items())]:
        print(*map(str.ljust, names, wide), *(f"{cell:>16}" for cell in cells), sep="  ")
    if max(steps) > config.mean_recurrence and config.n_core:
        print(f"* beyond the model's mean recurrence of {config.mean_recurrence}")


def main():
    p = argparse.ArgumentParser(description="Tasks of lm-evaluation-harness over recurrences.")
    p.add_argument("--model", required=True, help="checkpoint or run folder")
    p.add_argument("--tasks", required=True, help="the harness's names, comma-separated, * allowed")
    p.add_argument("--steps", default="1,2,4,8,16,32", help="recurrences r, comma-separated; default: %(default)s")
    p.add_argument("--include_path", help="a folder with .yaml files of further tasks")
    p.add_argument("--num_fewshot", type=int, help="examples before each question; default: as the task says, else none")
    p.add_argument("--limit", type=int, help="the first so many questions of each task only")
    p.add_argument("--batch_size", type=int, default=16, help="contexts, or prompts, at once; default: %(default)s")
    p.add_argument("--out", help="default: eval_TASKS.json in the folder of --model")
    add_model_arguments(p, dtype="float32")
    args = p.parse_args()
    for key, least in (("limit", 1), ("batch_size", 1), ("num_fewshot", 0)):
        if (value := getattr(args, key)) is not None and value < least:
            raise InputError(f"--{key} {value}: must be at least {least}")
    decoding(args)
    steps = sorted(parse_steps(args.steps))
    out = args.out or os.path.join(args.model, f"eval_{re.sub(r'[^a-zA-Z0-9_.,-]', '_', args.tasks):.100}.json")
    lm = Harness(args.model, steps, args.batch_size, args.device, args.dtype, args.seed, args.state)
    if not args.out and not os.path.isdir(args.model):
        raise InputError(f"--out: is needed, as {args.model} is no folder here to write the result into")
    if os.path.isdir(out) or not os.access(os.path.dirname(out) or ".", os.W_OK):  # said now, not in some hours
        raise InputError(f"{out}: no file can be written there: name another with --out")
    tasks = load_tasks(args.tasks.split(","), args.include_path, args.num_fewshot)
    print(f"{lm.model.folder}, {', '.join(describe(lm.model))}: {', '.join(tasks['tasks'])}", file=sys.stderr)
    began = time.perf_counter()
    results = evaluate(lm, tasks, args.limit)
    seconds = time.perf_counter() - began
    write_result(out, "eval_lm", lm.model, args.tasks, results, seconds, lm.tokens, num_fewshot=args.num_fewshot,
                 limit=args.limit, seed=args.seed, state=args.state)
    print_table(results, lm.model.config)
    print(f"\n{lm.tokens} tokens in {seconds:.1f} s: {out}")


if __name__ == "__main__":
    cli(main)
