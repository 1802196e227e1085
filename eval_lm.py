"""
Score a model on any task of lm-evaluation-harness, at several numbers of recurrences r. Needs
`pip install "lm_eval[math]==0.4.13" accelerate`.

    python eval_lm.py --model out/tiny/task --tasks arc_easy --limit 100
    python eval_lm.py --model out/llama-4-6-4 --steps 1,4,32 --tasks arc_easy,hellaswag,piqa
    python eval_lm.py --model out/llama-4-6-4 --tasks minerva_math500 --num_fewshot 1 --compile
    python eval_lm.py --model out/tiny/task --tasks my_task --include_path my_tasks --limit 100

What is unusual:
- One pass at the largest r gives the log-likelihoods at every r.
- The choices of a question share its context, which is computed once. A row holds the context,
  followed by its choices (or several rows do, if that gets long). Each choice sees the context and
  itself, at the positions that it would have alone.
- Text is generated anew for each r, greedily.
- The last lines say which r is enough for a task, see eval_gsm8k.py. That takes a score for each
  question, so it is left out for a task whose score is not a mean over its questions.

Tokens, truncation and scores are those of the harness's own HFLM, with BOS if the tokenizer has
one. They differ only for texts that transformers tokenizes in its own way (see
assets/model_card.md): here `</s>` in a text is text. An existing result is never overwritten: name
another file with --out.

In Python: lm_eval.simple_evaluate(eval_lm.Harness("out/llama-4-6-4", [4]), tasks=["piqa"]).
"""
import math
import os
import random
import statistics
import time

import numpy as np
import torch

from common import Parser, UserError, cli, digest, natural, opening, positive
from eval_gsm8k import (add_evaluation_arguments, answer_batch, check_out, print_enough,
                        smallest_enough, write_result)
from sample import COMPILE_HELP, Decoder, load_model

try:
    from lm_eval import defaults, evaluator, utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import Collator, normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from tqdm import tqdm
except ImportError as e:  # --help works without it
    TemplateLM = object
    missing = e


def row_length(row):
    """
    Return how many tokens the model reads of a row (context, [continuation, ...]). The last token
    of a continuation is predicted, not read: ((1, 5, 9), [(7, 3), (8, 4, 2)]) has 3 + 1 + 2.
    """
    context, continuations = row
    return len(context) + sum(len(x) - 1 for x in continuations)


class Harness(TemplateLM):
    """
    A checkpoint as a model of the harness. The base class splits context and continuation into
    tokens.

    steps: the list of r to score, such as [1, 4, 32]. `r` is the one whose answers are returned at
    the moment, see at(). max_length: longest prompt with answer, in tokens.
    """

    def __init__(self, folder, steps, batch_size=32, device="cpu", dtype="float32", seed=0,
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
        self.tokens = 0    # computed so far
        # {(context, continuation): {r: (log-likelihood, is it greedy)}}, both tuples of ids
        self.answers = {}

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self):
        """The token that stands for an empty context."""
        bos_id = self.tokenizer.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.tokenizer.encode(string, bos=add_special_tokens is not False)

    def pack(self, rows):
        """
        Pack rows (context, [continuation, ...]) into int64 tensors. A batch of the single row
        ((1, 5, 9), [(7, 3), (8, 4, 2)]) gives

            idx       1 5 9 7 8 4   the context, then each continuation without its last token
            position  0 1 2 3 3 4   each continuation begins where the context ends
            branch    0 0 0 1 2 2   0: the context, which all tokens see; k: continuation k
            places    2 3 2 4 5     where each token of the continuations is predicted
            targets   7 3 8 4 2     these tokens

        idx, position and branch are (B, T), such as (1, 6). places, indices into all B * T tokens,
        and targets are (N,), such as (5,).
        """
        T = max(map(row_length, rows))
        # Rows end in zeros, which none of their tokens sees.
        table = torch.zeros(len(rows), T, 3, dtype=torch.long)
        places = []
        targets = []
        for b, (context, continuations) in enumerate(rows):
            n = len(context)
            row = [(token, position, 0) for position, token in enumerate(context)]
            for branch, x in enumerate(continuations, 1):
                # The last token of the context predicts the first token of a continuation.
                places.append(b * T + n - 1)
                start = b * T + len(row)
                places += range(start, start + len(x) - 1)
                targets += x
                for position, token in enumerate(x[:-1], n):
                    row.append((token, position, branch))
            table[b, :len(row)] = torch.tensor(row)
        device = self.model.embed.weight.device
        places = torch.tensor(places, device=device)
        targets = torch.tensor(targets, device=device)
        idx, position, branch = table.to(device).unbind(-1)
        return idx, position, branch, places, targets

    @torch.no_grad()
    def score(self, rows):
        """
        Score the continuations of some rows at every r of self.steps. Stores {r: (log-likelihood,
        is it greedy)} of each in self.answers.

        rows: B tuples (context, [continuation, ...]) of tuples of ids, such as ((1, 5, 9), [(7, 3),
        (8, 4, 2)]), which has T = 6 tokens to read and N = 5 to score, see pack(). A token sees the
        earlier tokens of the context and of its own branch. Its position, and with it the noise of
        its s_0, is the one that it would have in a row without the other continuations.
        """
        model = self.model
        idx, position, branch, places, targets = self.pack(rows)
        self.tokens += sum(map(row_length, rows))
        positions = int(position.max()) + 1
        rope = [table[position] for table in model.rope(positions)]         # (B, T, 1, D/2)
        own_branch = branch[:, None, :] == branch[:, :, None]               # (B, T, T): query, key
        in_context = (branch == 0)[:, None, :]                              # (B, 1, T)
        mask = (own_branch | in_context).tril()[:, None]                    # (B, 1, T, T)
        noise = model.initial_state(1, positions, self.seed)[0]             # (positions, C)
        keys = []
        for context, continuations in rows:
            for x in continuations:
                keys.append((context, x))
        lengths = [len(x) for _, x in keys]

        for r, s in model.trajectory(idx, self.steps, noise[position], rope, mask):
            x = model.run_coda(s, rope, mask)                               # (B, T, C)
            x = x.flatten(0, 1)[places]                                     # (N, C)
            losses, right = model.token_scores(x, targets)                  # (N,)
            losses = losses.double().cpu().split(lengths)
            right = right.cpu().split(lengths)
            for key, loss, greedy in zip(keys, losses, right):
                answer = self.answers.setdefault(key, {})
                answer[r] = -loss.sum().item(), bool(greedy.all())

    def at(self, r):
        """Answer at depth r from now on. Returns self, for evaluator.evaluate(lm.at(r), ...)."""
        self.r = r
        return self

    def _loglikelihood_tokens(self, requests, **kwargs):
        """
        Return the log-likelihoods of continuations at self.r. Results that are not in self.answers
        yet are computed for every r of self.steps at once.

        requests: [(_, context, continuation), ...], both lists of ids, such as (_, [1, 5, 9],
        [7, 3]). Returns [(log-likelihood, whether the continuation is the greedy one), ...].
        """
        keys = []
        for _, context, x in requests:
            # As in HFLM.
            assert context and 0 < len(x) <= self.max_length, (len(context), len(x))
            kept = tuple(context + x)[-self.max_length - 1:]  # the last one is predicted, not read
            context = kept[:-len(x)]
            keys.append((context, tuple(x)))
        rows = []
        for context, x in sorted(set(keys) - self.answers.keys()):
            # A row that is longer than three contexts takes no more continuations: the longer
            # attention would cost more than sharing the context saves.
            full = rows and row_length(rows[-1]) > 3 * len(context)
            if not rows or rows[-1][0] != context or full:
                rows.append((context, []))
            _, continuations = rows[-1]
            continuations.append(x)
        # Sorted by length, so that batches need little padding. The longest come first, so that
        # running out of memory happens early.
        rows.sort(key=row_length, reverse=True)
        starts = range(0, len(rows), self.batch_size)
        for start in tqdm(starts, "batches of contexts", disable=not rows):
            self.score(rows[start:start + self.batch_size])
        return [self.answers[key][self.r] for key in keys]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """
        Return the log-likelihood of each text, in windows of max_length. As in HFLM, a BOS that the
        tokenizer puts before the text is scored, too.
        """
        texts = []
        for request in requests:
            text, *_ = request.args
            ids = self.tok_encode(text)
            windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            texts.append([(None, *utils.make_disjoint_window(window)) for window in windows])
        self._loglikelihood_tokens(sum(texts, []))  # all at once, into self.answers
        sums = []
        for text in texts:
            answers = self._loglikelihood_tokens(text)
            sums.append(sum(likelihood for likelihood, _ in answers))
        return sums

    def generate_until(self, requests, disable_tqdm=False):
        """
        Return the greedy continuation of each context, cut at the first of its stop strings. Raises
        UserError if a task asks for samples, or for more tokens than the context has room for.
        """
        jobs = []
        for request in requests:
            context, settings = request.args
            settings = normalize_gen_kwargs(settings)
            new = settings["max_gen_toks"]
            if settings["do_sample"]:
                raise UserError("--tasks: a task asks for samples, but eval_lm.py decodes greedily")
            room = self.max_length - new
            if room <= 0:
                raise UserError(f"--tasks: a task asks for {new} new tokens, which leave no room "
                                f"for a prompt in {self.max_length}")
            ids = self.tok_encode(context)
            jobs.append((ids[-room:], settings))  # cut as HFLM does
        batches = Collator(jobs, lambda job: -len(job[0]), group_by="gen_kwargs")
        texts = []
        for batch in tqdm([*batches.get_batched(self.batch_size)], f"batches at r = {self.r}"):
            _, settings = batch[0]  # the same for all of a batch
            stops = [stop for stop in settings["until"] if stop]  # an empty one would end any text
            answers, counts = answer_batch(
                self.decoder,
                self.tokenizer,
                [ids for ids, _ in batch],
                settings["max_gen_toks"],
                stops,
                self.r,
                seed=self.seed,
            )
            texts += answers
            self.tokens += sum(counts)
        return batches.get_original(texts)


def load_tasks(names, include_path=None, num_fewshot=None):
    """
    Load the harness's tasks of these names, such as ["arc_easy"], as its simple_evaluate() does.

    include_path: a folder with .yaml files of further tasks. num_fewshot: examples in the prompt;
    by default what a task says itself. A task that says 0 keeps its 0.
    """
    random.seed(defaults.DEFAULT_RANDOM_SEED)
    np.random.seed(defaults.DEFAULT_OTHER_SEED)
    try:
        tasks = TaskManager(include_path=include_path).load(names)
    except Exception as e:  # unknown, no network, a data set that is gone, a task's own code
        raise UserError(f"--tasks {','.join(names)} cannot be loaded ({e!r:.300}). `lm_eval ls "
                        "tasks` lists the harness's own; --include_path names a folder with yours")
    for task in tasks["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (num_fewshot is not None and own != 0):
            task.set_config("num_fewshot", num_fewshot or 0)
    return tasks


def evaluate(lm, tasks, limit=None):
    """
    Evaluate tasks at each r of lm.steps. limit: ask only the first questions of a task.

    Returns the "results" of write_result(), a dict for each r, task and metric; and {(task,
    metric): {r: [score of each question]}} for the metrics that are means of these scores.
    """
    results = []
    scores = {}
    for r in lm.steps:  # always the same requests, so only the first r computes likelihoods
        for task in tasks["tasks"].values():
            task.set_fewshot_seed(defaults.DEFAULT_OTHER_SEED)
        # Fewer rounds of bootstrap than the harness's 100,000 are enough for two digits.
        found = evaluator.evaluate(
            lm.at(r), tasks, limit=limit, log_samples=True, bootstrap_iters=1000)
        for task, values in found["results"].items():
            samples = found["n-samples"].get(task, {})
            for key, value in values.items():
                metric, _, answer_filter = key.partition(",")
                if not answer_filter or metric.endswith("_stderr"):
                    continue
                name = key.removesuffix(",none")
                error = values.get(f"{metric}_stderr,{answer_filter}")  # "N/A" if unknown
                results.append({
                    "steps": r,
                    "task": task,
                    "metric": name,
                    "value": float(value),
                    "standard_error": error if isinstance(error, float) else None,
                    "n": samples.get("effective"),
                })
                each = question_scores(found, task, metric, answer_filter)
                if each and math.isclose(statistics.fmean(each), value):
                    by_r = scores.setdefault((task, name), {})
                    by_r[r] = each
    return results, scores


def question_scores(found, task, metric, answer_filter):
    """
    Return a metric's score of each question, or [] if these scores are not numbers, or if lower is
    better. found: what the harness's evaluate() returned. answer_filter: a name such as "none".
    """
    if found["higher_is_better"].get(task, {}).get(metric) is not True:
        return []
    each = []
    for sample in found["samples"].get(task, []):
        if sample["filter"] == answer_filter:
            each.append(sample.get(metric))
    if not all(isinstance(x, (bool, int, float, np.number)) for x in each):
        return []
    return [float(x) for x in each]


def print_scores(results):
    """Print a line for each task, metric and r."""
    by_task = sorted(results, key=lambda x: (x["task"], x["metric"], x["steps"]))
    for x in by_task:
        r = f"r = {x['steps']}" if x["steps"] else ""
        error = "" if x["standard_error"] is None else f" ± {x['standard_error']:.2g}"
        print(f"{x['task']:24} {x['metric']:24} {r:10}{x['value']:.4g}{error}")


def parse_args():
    p = Parser(usage="eval_lm.py --model MODEL --tasks TASK,TASK [flags]",
               description=opening(__doc__))
    what, how, output = p.groups()
    add_evaluation_arguments(what, how, output, named_after="--tasks")
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
    flag("--compile", action="store_true", help=f"{COMPILE_HELP}; for tasks that generate text")
    args = p.parse_args()
    args.out = args.out or f"{args.model}/eval_{args.tasks:.100}.json"
    return args


def main():
    args = parse_args()
    if TemplateLM is object:
        raise UserError('eval_lm.py needs `pip install "lm_eval[math]==0.4.13" accelerate` '
                        f"({missing})")
    check_out(args.out)
    if os.path.exists(args.out):
        raise UserError(f"{args.out} exists already. Name another file with --out")
    lm = Harness(
        args.model,
        args.steps,
        batch_size=args.batch_size,
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
        max_length=args.max_length,
        compile=args.compile,
    )
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
    print_scores(results)
    print_enough(enough)
    write_result(args.out, "eval_lm", lm.model, args.tasks, results, seconds, lm.tokens,
                 settings=settings, enough=enough)
    print(f"wrote {args.out} ({lm.tokens} tokens in {seconds:.1f} s)")


if __name__ == "__main__":
    cli(main)
