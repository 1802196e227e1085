"""
Score a model on any task of lm-evaluation-harness, at several numbers of recurrences r. It needs
pip install "lm_eval[math]==0.4.13" accelerate.

    python eval_lm.py --model out/tiny/task --tasks arc_easy --limit 100
    python eval_lm.py --model out/llama-4-6-4 --steps 1,4,32 --tasks arc_easy,hellaswag,piqa
    python eval_lm.py --model out/llama-4-6-4 --tasks minerva_math500 --num_fewshot 1 --compile
    python eval_lm.py --model out/tiny/task --tasks my_task --include_path my_tasks --limit 100

What is unusual:
- Log-likelihoods for every r come from one pass of the largest.
- The choices of a question share its context, which is computed once. A row holds the context and
  then every choice. Each choice sees the context and itself, at the positions it has alone.
- Text is generated anew for each r, greedily.
- The last lines say which r is enough for a task, see eval_gsm8k.py. They need the score of each
  question, so a task whose score is no mean over its questions has none.

Tokens, truncation and scores are those of the harness's own HFLM, with BOS where the tokenizer has
one, but for texts that transformers reads in its own way, as an export's card says: `</s>` and the
like are text here. A file that exists is never replaced: name another with --out.

In Python: lm_eval.simple_evaluate(eval_lm.Harness("out/llama-4-6-4", [4]), tasks=["piqa"]).
"""
import math
import os
import random
import statistics
import time

import numpy as np
import torch

from common import (Parser, UserError, cli, digest, natural, opening, positive,
                    print_enough, smallest_enough, write_result)
from sample import (COMPILE, Decoder, add_evaluation_arguments, answer_batch, check_out,
                    load_model)

try:
    from lm_eval import defaults, evaluator, utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import Collator, normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from tqdm import tqdm
except ImportError as error:  # --help does without it
    TemplateLM, missing = object, error


def row_length(row):
    """Tokens that the model reads of a row: (context, [continuation, ...])."""
    context, continuations = row
    return len(context) + sum(len(x) - 1 for x in continuations)


class Harness(TemplateLM):
    """
    A checkpoint as a model of the harness, at each r of the list `steps`; .r is the one that
    answers now. The base class splits context and continuation into tokens.
    """

    def __init__(self, folder, steps, batch_size=16, device="cpu", dtype="float32", seed=0,
                 max_length=None, compile=False):
        super().__init__()
        self.model, self.tokenizer = load_model(folder, device, dtype)
        self.decoder = Decoder(self.model, compile)
        self.steps = steps if self.model.config.n_core else [0]
        self.r = self.steps[-1]
        self.batch_size = batch_size
        self.seed = seed
        context = self.model.config.context
        self.max_length = min(max_length or context, context)
        self.answers = {}  # (context, continuation), tuples of ids: {r: (likelihood, is greedy)}
        self.tokens = 0    # computed so far

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self):
        """The token that stands for an empty context."""
        bos = self.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.tokenizer.encode(string, bos=add_special_tokens is not False)

    def pack(self, rows):
        """
        Rows (context, [continuation, ...]) as tensors. Ids, positions and branches (B, T): branch 0
        is the context, which all that follows sees, and branch k is continuation k. Then, for every
        token of the continuations, the place in (B * T,) that predicts it and the token (N,).
        """
        T = max(map(row_length, rows))
        table = torch.zeros(len(rows), T, 3, dtype=torch.long)  # nothing sees the padding behind it
        places, targets = [], []
        for b, (context, continuations) in enumerate(rows):
            n = len(context)
            row = [(token, position, 0) for position, token in enumerate(context)]
            for branch, x in enumerate(continuations, 1):
                # The end of the context predicts the first token, and the last predicts nothing.
                start = b * T + len(row)
                places.append(b * T + n - 1)
                places += range(start, start + len(x) - 1)
                targets += x
                for position, token in enumerate(x[:-1], n):
                    row.append((token, position, branch))
            table[b, :len(row)] = torch.tensor(row)
            self.tokens += len(row)
        device = self.model.embed.weight.device
        places, targets = torch.tensor([places, targets], device=device)
        idx, position, branch = table.to(device).unbind(-1)
        return idx, position, branch, places, targets

    @torch.no_grad()
    def score(self, rows):
        """
        Score each continuation of some rows at every r, into self.answers. A token sees earlier
        tokens of its own branch and of the context. Its position, and with it the noise of its s_0,
        is the one that it would have in a row without the other continuations.
        """
        model = self.model
        idx, position, branch, places, targets = self.pack(rows)
        S = int(position.max()) + 1
        rope = [table[position] for table in model.rope(S)]                 # (B, T, 1, D/2)
        same = branch[:, None, :] == branch[:, :, None]                     # (B, T, T)
        context = (branch == 0)[:, None, :]
        mask = (same | context).tril()[:, None]                             # (B, 1, T, T)
        noise = model.initial_state(1, S, self.seed)[0]                     # as in decoding
        asked = []
        for context, continuations in rows:
            asked += [(context, x) for x in continuations]
        lengths = [len(x) for _, x in asked]

        for r, s in model.trajectory(idx, self.steps, noise[position], rope, mask):
            x = model.run_coda(s, rope, mask).flatten(0, 1)[places]         # (N, C)
            losses, right = model.token_scores(x, targets)                  # (N,)
            losses = losses.double().cpu().split(lengths)
            right = right.cpu().split(lengths)
            for key, loss, greedy in zip(asked, losses, right):
                answer = self.answers.setdefault(key, {})
                answer[r] = -loss.sum().item(), bool(greedy.all())

    def at(self, r):
        """Answer at depth r from now on. Returns itself."""
        self.r = r
        return self

    def _loglikelihood_tokens(self, requests, **kwargs):
        """[(_, context, continuation), ...] -> [(log-likelihood, is it the greedy one), ...]"""
        keys = []
        for _, context, x in requests:
            assert context and 0 < len(x) <= self.max_length  # as HFLM does
            kept = tuple(context + x)[-self.max_length - 1:]  # the last one is predicted, not read
            keys.append((kept[:-len(x)], tuple(x)))
        rows = []
        for context, x in sorted(set(keys) - self.answers.keys()):
            # In rows of a few contexts' length, the saving outweighs the longer attention.
            full = rows and row_length(rows[-1]) > 3 * len(context)
            if not rows or rows[-1][0] != context or full:
                rows.append((context, []))
            rows[-1][1].append(x)
        # Similar lengths together, and the longest first: if memory runs out, then soon.
        rows.sort(key=row_length, reverse=True)
        for i in tqdm(range(0, len(rows), self.batch_size), "batches of contexts",
                      disable=not rows):
            self.score(rows[i:i + self.batch_size])
        return [self.answers[key][self.r] for key in keys]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Log-likelihoods of texts, in windows of the model's context. As in HFLM, BOS counts."""
        texts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            texts.append([(None, *utils.make_disjoint_window(window)) for window in windows])
        self._loglikelihood_tokens(sum(texts, []))  # all in one go; their answers are kept
        sums = []
        for text in texts:
            sums.append(sum(x for x, _ in self._loglikelihood_tokens(text)))
        return sums

    def generate_until(self, requests, disable_tqdm=False):
        """
        Greedy continuations of contexts, each cut at the first of its stop strings. Exits if a task
        wants samples, or more tokens than the context holds.
        """
        jobs = []
        for request in requests:
            context, settings = request.args
            settings = normalize_gen_kwargs(settings)
            new = settings["max_gen_toks"]
            if settings["do_sample"] or new >= self.max_length:
                raise UserError(f"--tasks: one wants {new} tokens, sampled: "
                                f"{settings['do_sample']}. This model decodes greedily, in a "
                                f"context of {self.max_length}")
            ids = self.tok_encode(context)[new - self.max_length:]
            jobs.append((ids, settings))
        batches = Collator(jobs, lambda job: -len(job[0]), group_by="gen_kwargs")
        texts = []
        for batch in tqdm([*batches.get_batched(self.batch_size)], f"batches at r = {self.r}"):
            settings = batch[0][1]  # all of a batch have the same
            found, counts = answer_batch(
                self.decoder,
                self.tokenizer,
                [ids for ids, _ in batch],
                settings["max_gen_toks"],
                [*filter(None, settings["until"])],
                self.r,
                seed=self.seed,
            )
            texts += found
            self.tokens += sum(counts)
        return batches.get_original(texts)


def load_tasks(names, include_path=None, num_fewshot=None):
    """
    The harness's tasks of these names, loaded as its simple_evaluate() does. num_fewshot: examples
    in the prompt; by default what a task says itself. A task that says 0 keeps its 0.
    """
    random.seed(defaults.DEFAULT_RANDOM_SEED)
    np.random.seed(defaults.DEFAULT_OTHER_SEED)
    try:
        tasks = TaskManager(include_path=include_path).load(names)
    except Exception as e:  # unknown, no network, a data set that is gone, a task's own code
        raise UserError(f"--tasks {','.join(names)}: cannot be loaded ({e!r:.300}). `lm_eval ls "
                        "tasks` lists the harness's own; --include_path names a folder with "
                        "yours")
    for task in tasks["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or num_fewshot is not None and own != 0:
            task.set_config("num_fewshot", num_fewshot or 0)
    return tasks


def evaluate(lm, tasks, limit=None):
    """
    Returns the "results" of write_result(), a dict for each r of lm.steps, task and metric; and
    {(task, metric): {r: the score of each question}} where scores are means of these.
    """
    results = []
    scores = {}
    for r in lm.steps:  # the same requests each time: only the first computes likelihoods
        for task in tasks["tasks"].values():
            task.set_fewshot_seed(defaults.DEFAULT_OTHER_SEED)
        # Fewer rounds of bootstrap than the harness's 100,000 are enough for two digits.
        found = evaluator.evaluate(
            lm.at(r), tasks, limit=limit, log_samples=True, bootstrap_iters=1000)
        for task, values in found["results"].items():
            n = found["n-samples"].get(task, {}).get("effective")
            for key, value in values.items():
                metric, _, rule = key.partition(",")
                if rule and not metric.endswith("_stderr"):
                    error = values.get(f"{metric}_stderr,{rule}")  # "N/A" where there is none
                    name = key.removesuffix(",none")
                    each = question_scores(found, task, metric, rule)
                    if each and math.isclose(statistics.fmean(each), value):
                        scores.setdefault((task, name), {})[r] = each
                    results.append({
                        "steps": r,
                        "task": task,
                        "metric": name,
                        "value": float(value),
                        "standard_error": error if isinstance(error, float) else None,
                        "n": n,
                    })
    return results, scores


def question_scores(found, task, metric, rule):
    """
    Returns a metric's score of each question, or [] if these scores are not numbers, or if lower
    is better. found: what the harness's evaluate() returned; rule: the name of the answer filter.
    """
    if found["higher_is_better"].get(task, {}).get(metric) is not True:
        return []
    each = []
    for sample in found["samples"].get(task, []):
        if sample["filter"] == rule:
            each.append(sample.get(metric))
    numbers = all(isinstance(x, (bool, int, float, np.number)) for x in each)
    return [float(x) for x in each] if numbers else []


def print_table(results):
    """A line for each task, metric and r."""
    by_task = sorted(results, key=lambda x: (x["task"], x["metric"], x["steps"]))
    for x in by_task:
        r = f"r = {x['steps']}" if x["steps"] else ""
        error = "" if x["standard_error"] is None else f" ± {x['standard_error']:.2g}"
        print(f"{x['task']:24} {x['metric']:24} {r:10}{x['value']:.4g}{error}")


def parse_args():
    p = Parser(usage="eval_lm.py --model MODEL --tasks TASK,TASK [flags]",
               description=opening(__doc__))
    what, how, output = p.groups()
    add_evaluation_arguments(what, how, output)
    flag = what.add_argument
    flag("--tasks", required=True, help="names, comma-separated")
    flag("--limit", type=positive, metavar="N",
         help="ask only the first N questions of a task, as the harness does")
    flag("--include_path", metavar="FOLDER", help="a folder with .yaml files of further tasks")
    flag = how.add_argument
    flag("--num_fewshot", type=natural, metavar="N",
         help="examples in the prompt; default: as the task says, or else none")
    flag("--max_length", type=positive, metavar="N",
         help="longest prompt with answer, in tokens; default, and at most: the model's context")
    flag("--compile", action="store_true", help=f"{COMPILE}; for tasks that generate text")
    args = p.parse_args()
    args.out = args.out or f"{args.model}/eval_{args.tasks:.100}.json"
    return args


def main():
    args = parse_args()
    if TemplateLM is object:
        raise UserError('eval_lm.py needs pip install "lm_eval[math]==0.4.13" accelerate '
                        f'({missing})')
    check_out(args.out)
    if os.path.exists(args.out):
        raise UserError(f"{args.out}: exists already: name another with --out")
    lm = Harness(args.model, args.steps, args.batch_size, args.device, args.dtype, args.seed,
                 args.max_length, args.compile)
    tasks = load_tasks(args.tasks.split(","), args.include_path, args.num_fewshot)
    keys = "tasks", "num_fewshot", "limit", "max_length", "dtype", "seed"
    settings = {key: getattr(args, key) for key in keys}
    settings["weights"] = digest(f"{lm.model.folder}/model.safetensors")
    began = time.perf_counter()
    results, scores = evaluate(lm, tasks, args.limit)
    seconds = time.perf_counter() - began
    enough = []
    for (task, metric), by_r in scores.items():
        enough += smallest_enough(lm.model, task, metric, by_r)
    print_table(results)
    print_enough(enough)
    write_result(args.out, "eval_lm", lm.model, args.tasks, results, seconds, lm.tokens,
                 settings=settings, enough=enough)
    print(f"{lm.model.folder}: {lm.tokens} tokens in {seconds:.1f} s: {args.out}")


if __name__ == "__main__":
    cli(main)
