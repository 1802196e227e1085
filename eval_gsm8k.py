r"""
Accuracy over recurrences: one model, one set of questions, answered at several depths r.

    python eval_gsm8k.py --model out/llama-4-6-4 --data gsm8k/test.jsonl --steps 1,2,4,8,16,32
    python eval_gsm8k.py --model out/llama-4-6-4 --data math500.jsonl --task math500 --max_new_tokens 512
    torchrun --nproc_per_node=4 eval_gsm8k.py --model out/llama-4-6-4 --data gsm8k/test.jsonl
    python eval_gsm8k.py --paired A/eval_test.json B/eval_test.json

What is unusual: r is an argument of the evaluation, so every question is answered once per r. A feed-forward model
has no r and gives one row. All else is what the paper does for GSM8K with lm-evaluation-harness: one shot, "Let's
think step by step.", greedy, float32, at most 256 new tokens; below stands what counts as right, in other tasks too. A
row's "difficulty" is scored by, too. Greedy, yet the initial state is noise: answers depend a little on --seed. Caches,
exits and drafts are those of sample.py.

Answers go to OUT.jsonl, one line for every (question, r), as batches end; the first line says what the run is. The
same command goes on where that file ends, on any number of processes, with more --steps or a larger --limit if asked;
answers do not depend on the number of processes, but in their last bits on --batch_size (padding). The summary
OUT.json comes last; its seconds are those of answering, added up over processes and sessions.

--paired compares two finished runs question by question: by a bootstrap over questions, is their difference real?

Tasks, by the fields of a row of --data:

    gsm8k                                       {"question", "answer": "... #### 18"[, "difficulty"]}
    math500                                     {"question", "answer"} or {"problem", "solution"}, with \boxed{...}
    asdiv, svamp, multiarith, singleeq, addsub  word problems, with the fields of their usual files

GSM8K is scored as lm-evaluation-harness 0.4.13 does (gsm8k_cot_zeroshot, which the paper uses with one shot), as text:
"flexible" takes the last number of the output, "strict" what follows "The answer is".

Word problems: the same prompt and the same two places, but numbers are compared as numbers (43.0 is 43, "9 (apples)" is
9, 2/3 is one number), equal within 1e-4. Questions whose answer is not one number (a name, a time, a ratio: 122 of
ASDiv's 2,215) are left out and counted.

MATH: the answer is the last \boxed{...}, else what follows the last "The answer is" or "Final Answer". "exact" compares
after normalising the LaTeX: spacing, \left, \dfrac, \frac12, a/b, mixed numbers, units, \text, degrees, %, $, thousands'
commas, leading "x =" or "x \in", \pm, numbers as numbers; intervals, tuples and matrices entry by entry, lists and sets in
any order. It does NOT see as equal what takes algebra (2\sqrt3 and \sqrt{12}, x+1 and 1+x, \frac{1}{\sqrt2} and
\frac{\sqrt2}{2}), a rounded decimal and its fraction (0.33, 1/3), 50% and 0.5 (it is 50), numbers in words, different
names (x, t), y = 2x + 3 and 2x - y + 3 = 0. It does see as equal 5 and 5 cm, and (C) and C. Where the package
math_verify is installed, its verdict is a second metric, "math_verify", as in lm-eval's minerva_math.
"""
import argparse
import contextlib
import fcntl
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
from fractions import Fraction
from importlib.metadata import version

import numpy as np
import torch.distributed as dist

from model import InputError, cli, describe, read_json, write_result, writing
from sample import add_decoding_arguments, add_model_arguments, decoding, generate, load_model, parse_steps

try:
    import math_verify
except ImportError:  # optional: `pip install math_verify`
    math_verify = None

sys.set_int_max_str_digits(0)  # a model may write 5,000 digits in a row

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
# The first example of Lewkowycz et al. (arXiv 2206.14858, appendix D), minerva_math's own.
MATH_SHOT = (r"Find the domain of the expression  $\frac{\sqrt{x-2}}{\sqrt{5-x}}$.",
             r"The expressions inside each square root must be non-negative. Therefore, $x-2 \ge 0$, so $x\ge2$, and $5 - x "
             r"\ge 0$, so $x \le 5$. Also, the denominator cannot be equal to zero, so $5-x>0$, which gives $x<5$. "
             r"Therefore, the domain of the expression is $\boxed{[2,5)}$." "\n"
             r"Final Answer: The final answer is $[2,5)$. I hope it is correct.")
STOPS = {"cot": ("Q:", "</s>", "<|im_end|>"), "math": ("Problem:",), "plain": ()}  # plain substrings; EOS always ends a text
INVALID = "[invalid]"
FIELDS = {  # task -> the fields of a row that make the question, and the one with the answer
    "gsm8k": (("question",), "answer"), "math500": (("question",), "answer"), "asdiv": (("body", "question"), "answer"),
    "svamp": (("Body", "Question"), "Answer"), "multiarith": (("input",), "target"), "singleeq": (("input",), "target"),
    "addsub": (("input",), "target")}
SIGNED = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d*[1-9]\d*)?"  # of a word problem: $1,200.50, 2/3, .5


# -------------------------------------------------------------------- rows and prompts

def read_questions(path, task, limit=None):
    """
    The rows of a .jsonl file (at most limit) as {"index": its number in the file, "question", "gold"[, "difficulty"]},
    and the number of rows left out (see the top). InputError names file:line and what is wrong there.
    """
    rows, left_out, index = [], 0, 0
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
            question, gold = read_row(row, task, f"{path}:{number}")
            if gold is None:
                left_out += 1
            else:
                rows.append({"index": index, "question": question, "gold": gold}
                            | ({"difficulty": row["difficulty"]} if "difficulty" in row else {}))
            index += 1
    if not rows:
        raise InputError(f"{path}: holds no questions: is it the right file?")
    return rows, left_out


def read_row(row, task, where):
    """(question, gold) of a row; gold: a string, or for word problems a Fraction, None where it is not one number."""
    fields, answer = FIELDS[task]
    if task == "math500" and isinstance(row, dict) and "problem" in row:
        fields, answer = ("problem",), "solution"
    words = task not in ("gsm8k", "math500")
    if not isinstance(row, dict) or not all(isinstance(row.get(k), str) for k in fields) \
            or not isinstance(row.get(answer), (str, int, float) if words else str):
        need = ", ".join(f'"{k}"' for k in (*fields, answer))
        raise InputError(f"{where}: --task {task} needs {need}, strings: is it another task's file?")
    # The first part of some of SVAMP's questions has no full stop: "If he sold 51 of them".
    parts = [row[k].strip() for k in fields] if words else [row[fields[0]]]
    question = " ".join(p if p[-1:] in ".,;?!" else p + "," for p in parts[:-1]) + " " * (len(parts) > 1) + parts[-1]
    if not words:
        return question, row[answer] if task == "gsm8k" else last_boxed(row[answer]) or row[answer]
    found = re.fullmatch(rf"({SIGNED}|-\(\d+/\d+\))\s*(\([^()\d;]*\))?", str(row[answer]).strip())
    return question, to_number(found[1]) if found else None


def make_prompt(question, template="cot", shots=1):
    """The text that a model is asked with; "plain" is the question alone, "math" minerva_math's."""
    if template == "plain":
        return question
    ask, examples = ("Q: {}\nA: Let's think step by step.", SHOTS) if template == "cot" else (
        "Problem:\n{}\n\nSolution:", [MATH_SHOT])
    return "\n\n".join([*(f"{ask.format(q)} {a}" for q, a in examples[:shots]), ask.format(question)])


def cut(text, stops):
    """text up to the first of the stop strings."""
    return text[:min([i for i in map(text.find, stops) if i >= 0], default=len(text))]


def score(task, output, gold):
    """
    {metric: what was found, metric_correct: bool} of an output (cut already); the first metric is the one to follow.
    """
    if task == "gsm8k":
        found = {"flexible": flexible_extract(output), "strict": strict_extract(output)}
        right = {key: is_correct(text, gold) for key, text in found.items()}
    elif task == "math500":
        found = {"exact": math_extract(output)}
        right = {"exact": same_math(found["exact"], gold)}
        if math_verify:
            parsed = math_verify.parse(output)
            found["math_verify"] = str(parsed[-1]) if parsed else INVALID
            right["math_verify"] = bool(math_verify.verify(math_verify.parse(rf"$\boxed{{{gold}}}$"), parsed))
    else:
        numbers, after = re.findall(SIGNED, output), re.search(rf"[Tt]he answer is ({SIGNED})", output)
        found = {"flexible": numbers[-1] if numbers else INVALID, "strict": after[1] if after else INVALID}
        right = {key: text != INVALID and abs(to_number(text) - gold) <= Fraction(1, 10_000) for key, text in found.items()}
    return found | {f"{key}_correct": value for key, value in right.items()}


# -------------------------------------------------------------------- numbers

def flexible_extract(text):
    """The last thing that looks like a number (a lone "..." does too: lm-eval's own pattern)."""
    found = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
    return found[-1] if found else INVALID


def strict_extract(text):
    """The number of the first "The answer is NUMBER", which takes one more character after it."""
    found = re.search(r"The answer is (-?[0-9.,]+).", text)
    return found[1] if found else INVALID


def is_correct(extracted, answer):
    """GSM8K: equal as text (so "18.00" is not "18"); answer: the data set's field, "... #### 18" or "18"."""
    return normalise(extracted) == normalise(answer)


def normalise(text):
    """lm-eval's exact_match: without commas, dollars, all up to "#### ", one final full stop, case."""
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.lower()


def to_number(text):
    """What SIGNED matches, as a Fraction."""
    number, _, below = re.sub(r"[$,()]", "", text).partition("/")
    return Fraction(number) / int(below or 1)


# -------------------------------------------------------------------- MATH

UNITS = r"(?:degrees?|radians?|cents?|dollars?|inch(?:es)?|in|feet|foot|ft|yards?|miles?|mph|mm|cm|km|meters?|units?" \
        r"|seconds?|minutes?|hours?|days?|years?|pounds?|grams?|points?|square|cubic|per|ways?)"


def last_boxed(text):
    """What the last \\boxed{...} of a text holds, or None; braces are matched, a lost one ends with the text."""
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    start, depth = text.index("{", start) + 1, 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if not depth:
            return text[start:i].strip()
    return text[start:].strip()


def math_extract(text):
    """The answer in an output: see the top; INVALID where there is none."""
    if boxed := last_boxed(text):
        return boxed
    _, *after = re.split(r"(?i)the (?:final )?answer is|final answer", text)
    line = after[-1].strip(" :\n").partition("\n")[0] if after else ""
    return re.split(r"\.(?:\s|$)| I hope", line)[0].strip() or INVALID


def same_math(a, b):
    """Two answers in LaTeX, equal as the top of this file says."""
    return canonical(simplify(a)) == canonical(simplify(b))


WRAPPER = r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|textit)\s*"
REWRITES = (  # in this order; what is left is without spaces, and \frac and \sqrt have braces
    (r"\\\\(?:\[[^]]*\])?", ";"), (r"\\begin\{[pbvB]?matrix\}", "[["), (r"\\end\{[pbvB]?matrix\}", "]]"),
    (r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|displaystyle)(?![a-z])|\\[!,;:]|\\q?quad(?![a-z])|\\?\$|~", ""),
    (r"\\ ", " "), (r"\{,\}", ","), (r"\\?%|\^\s*\\circ|\^\s*\{\s*\\circ\s*\}|\\degree|°", ""),
    (WRAPPER + r"\{\s*(?:and|or)\s*\}", ","),
    (r"(?<=[\w})])\s*" + WRAPPER + r"\{[^{}]*\}(?:\^\{?\d\}?)?\s*$", ""),  # behind something: a unit; alone: the answer
    (WRAPPER + r"\{([^{}]*)\}", r"\1"),
    # a unit in plain letters, behind a digit, a brace or \pi
    (rf"(?<=[\d}}i])\s*(?:{UNITS}\s*)+(?:\^\{{?\d\}}?)?\s*$", ""),
    (r"\\[dtc]frac", r"\\frac"), (r"\\frac\s*(\d)", r"\\frac{\1}"), (r"(\\frac\s*\{[^{}]*\})\s*(\w)", r"\1{\2}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"), (r"\\cup(?![a-z])", "∪"), (r"\\pm(?![a-z])", "±"), (r"\\in(?![a-z])", "="),
    (r"\\(?:cdot|times)(?![a-z])", "*"), (r"\\[{}]", ""), (r"\s+", ""), (r"(?<!\d)\*|\*(?!\d)", ""),
    (r"(?<![\w.)}])(\d+)\\frac\{(\d+)\}\{(\d+)\}",  # a mixed number
     lambda m: rf"\frac{{{int(m[1]) * int(m[3]) + int(m[2])}}}{{{m[3]}}}"))


def simplify(text):
    """LaTeX -> plain text without spaces: \\dfrac{1}{2} -> 1/2, 2\\sqrt3 -> 2sqrt(3), \\{1, 2\\} -> 1,2."""
    for pattern, new in REWRITES:
        text = re.sub(pattern, new, text)
    top = lambda s: f"({s})" if re.search(r".[+\-±]", s) else s
    bottom = lambda s: s if re.fullmatch(r"\d+|\\?[a-z]+|sqrt\(\w+\)", s) else f"({s})"
    raised = lambda s: s if re.fullmatch(r"-?\d+|\w", s) else f"({s})"
    for _ in range(text.count("{")):  # the innermost braces first
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text)
        text = re.sub(r"([\^_])\{([^{}]*)\}", lambda m: m[1] + raised(m[2]), text)
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", lambda m: f"{top(m[1])}/{bottom(m[2])}", text)
    text = re.sub(r"[\\{}]", "", text).rstrip(".,").lower()
    text = re.sub(r"^(?:[a-z]|[a-z]\([a-z]\))=", "", text)
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text) else text


def split(text, separator):
    """text at the separators outside of all brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([") - (char in ")]")
        if char == separator and depth <= 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def canonical(text):
    """simplify()'s text as a value that equal answers share: a Fraction, text, or tuples of them, brackets and all."""
    if "±" in text and len(split(text, ",")) == 1:
        return canonical(text.replace("±", "+") + "," + text.replace("±", "-"))
    for separator in ",∪":  # of lists and sets, in any order; of unions
        if len(parts := split(text, separator)) > 1:
            return separator, frozenset(value for part in parts for value in (
                canonical(part)[1] if "±" in part else (canonical(part),)))
    if text.startswith("[[") and text.endswith("]]"):
        return "matrix", tuple(tuple(map(canonical, split(row, "&"))) for row in split(text[2:-2], ";"))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        parts = split(text[1:-1], ",")
        if len(parts) > 1:
            return text[0], tuple(map(canonical, parts)), text[-1]
        if re.fullmatch(r"\([a-z]\)", text):  # a choice: (C) is C
            return text[1]
    return to_number(text) if re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:/-?\d*[1-9]\d*)?", text) else text


# -------------------------------------------------------------------- decoding

def answer_batch(model, tokenizer, prompts, max_new_tokens, stops, r, **options):
    """
    Greedy continuations of a batch of prompts (lists of ids) -> three lists: texts cut at the first stop, tokens generated
    and recurrences that these took. Ends when every row has met a stop or EOS. options: sample.Decoding's.
    """
    new, recurrences = [[] for _ in prompts], [0] * len(prompts)
    # A stop of n characters has at most n tokens: the end of the text is enough to see it come.
    tail = max(map(len, stops), default=0)

    def ends(row, token):
        end = tokenizer.decode(new[row][-tail:]) if tail else ""
        return token == tokenizer.eos_id or cut(end, stops) != end

    for row, token, took in generate(model, prompts, max_new_tokens, r, ends, **options):
        new[row].append(token)
        recurrences[row] += took
    texts = [tokenizer.decode(ids[:-1] if ids[-1] == tokenizer.eos_id else ids) for ids in new]
    return [cut(text, stops) for text in texts], list(map(len, new)), recurrences


# -------------------------------------------------------------------- the file of answers

OPENING = b'{"script": "eval_gsm8k"'
ANSWER = {"index": [int], "steps": [int]} | dict.fromkeys(("seconds", "tokens", "recurrences"), [int, float])


def settings_of(args, model):
    """What decides an answer: a file holds answers of one such dict."""
    digest = {}
    for key, paths in (("weights", sorted(glob.glob(os.path.join(glob.escape(model.folder), "model*.safetensors")))),
                       ("data", [args.data])):
        whole = hashlib.sha256()
        for path in paths:
            with open(path, "rb") as f:
                whole.update(hashlib.file_digest(f, "sha256").digest())
        digest[key + "_sha256"] = whole.hexdigest()
    return {"script": "eval_gsm8k", "model": model.folder, "config": asdict(model.config), **digest, "task": args.task,
            "template": args.template, "shots": args.shots, "max_new_tokens": args.max_new_tokens, "int8": args.int8,
            **decoding(args), "dtype": describe(model)[1],
            "math_verify": version("math_verify") if args.task == "math500" and math_verify else None}


def lock(path, held):
    """Keep other runs away from a file for as long as the ExitStack `held` lives: each would replace the other's."""
    f = held.enter_context(open(path, "ab"))
    try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another run is writing there: wait for its end, or name another file with --out")
    except OSError as e:  # NFS and Lustre may not lock
        print(f"{path}: cannot be locked ({e}): see that no second run writes there", file=sys.stderr)


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
            if number > 1 and not (all(type(rows[-1].get(key)) in kinds for key, kinds in ANSWER.items())
                                   and metrics_of(rows[-1])):
                raise ValueError("no answer")
        except (ValueError, TypeError, RecursionError) as e:
            raise InputError(f"{path}:{number}: is damaged ({e}): mend the line, or name another file with --out")
    return (rows or [{}])[0], {(row["steps"], row["index"]): row for row in rows[1:]}


def gather(path, settings, overwrite=False):
    """
    All answers of `path` and of the parts beside it, which processes left, as {(r, index): answer}; after it there is
    only `path`, whole and in order. InputError where one has other settings; overwrite: those are thrown away.
    """
    parts, answers = sorted(glob.glob(glob.escape(path) + ".part*")), {}
    for file in [path] * os.path.exists(path) + parts:
        there, found = read_answers(file)
        if not (other := [key for key in settings if key != "model" and there and there.get(key) != settings[key]]):
            answers = found | answers
        elif not overwrite:
            what = ", ".join(key + (f" ({there.get(key)}, not {settings[key]})" if len(str(settings[key])) < 40 else "")
                             for key in other)
            raise InputError(f"{file}: holds answers with another {what}: name another file with --out, or replace them "
                             "with --overwrite")
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
    steps = lambda group: sum(a["recurrences"] for a in group) / sum(a["tokens"] for a in group)  # mean of a token
    for metric in metrics_of(answers[0]):
        right = lambda group: rate([a[f"{metric}_correct"] for a in group])
        result = dict(zip(("steps", "metric", "value", "standard_error", "n"), (r, metric, *right(answers))))
        result["mean_steps"] = steps(answers)
        results.append(result | ({"by_difficulty": {d: (*right(groups[d]), steps(groups[d])) for d in order}}
                                 if groups else {}))
    return results


def print_tables(results, config):
    """results as in the summary; r beyond the training mean is marked."""
    metrics = list(dict.fromkeys(x["metric"] for x in results))
    name = lambda r: f"{r}{'*' * (r > config.mean_recurrence)}" if config.n_core else "-"
    at = {(x["steps"], x["metric"]): x for x in results}
    steps = list(dict.fromkeys(x["steps"] for x in results))
    settled = config.n_core and any(abs(x["mean_steps"] - x["steps"]) > 1e-9 for x in results)  # with --exit
    print(f"\n{'r':>5}" + "".join(f"{metric + ' %':>15}" for metric in metrics) + f"{'n':>8}"
          + f"{'mean steps':>12}" * settled)
    for r in steps:
        cells = (at[r, metric] for metric in metrics)
        print(f"{name(r):>5}" + "".join(f"{100 * x['value']:9.1f} ±{100 * x['standard_error']:4.1f}" for x in cells)
              + f"{at[r, metrics[0]]['n']:>8}" + f"{at[r, metrics[0]]['mean_steps']:12.2f}" * settled)
    if "by_difficulty" in results[0]:
        print(f"\n{metrics[0]} %{', and mean steps' * settled}, by difficulty (rows) and r (columns)")
        print(f"{'':>10}" + "".join(f"{name(r):>7}" + f"{'steps':>7}" * settled for r in steps) + f"{'n':>8}")
        for key, (_, _, count, _) in results[0]["by_difficulty"].items():
            cells = (at[r, metrics[0]]["by_difficulty"][key] for r in steps)
            print(f"{key:>10}" + "".join(f"{100 * x[0]:7.1f}" + f"{x[3]:7.2f}" * settled for x in cells) + f"{count:>8}")
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
    if summary.get("script") != "eval_gsm8k" or not {"results", "n"} <= summary.keys():
        raise InputError(f"{path}: is no summary that eval_gsm8k.py wrote")
    answers_path = os.path.splitext(path)[0] + ".jsonl"
    settings, answers = read_answers(answers_path)
    if not settings or any(value != summary.get(key) for key, value in settings.items() if key != "model"):
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
    p.add_argument("--data", help="the task's .jsonl; its fields stand at the top of this file")
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
    add_decoding_arguments(p)
    args = p.parse_args()
    if args.paired:
        return args
    for key in ("model", "data"):
        if getattr(args, key) is None:
            raise InputError(f"--{key}: is missing; or give two finished runs with --paired")
    for key in ("limit", "batch_size", "max_new_tokens"):
        if (value := getattr(args, key)) is not None and value < 1:
            raise InputError(f"--{key} {value}: must be at least 1")
    args.steps = sorted(parse_steps(args.steps))
    if args.draft_steps and args.draft_steps >= args.steps[0]:
        raise InputError(f"--draft_steps {args.draft_steps}: drafts take fewer recurrences than --steps {args.steps[0]}")
    decoding(args)
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
    with contextlib.ExitStack() as held:
        evaluate(args, held)


def evaluate(args, held):
    """Answer what is lacking and write the summary. held: the ExitStack that keeps other runs away meanwhile."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    say = lambda text: rank or print(text, file=sys.stderr, flush=True)
    if world > 1 and args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    rows, left_out = read_questions(args.data, args.task, args.limit)
    model, tokenizer = load_model(args.model, args.device, args.dtype, args.int8, args.compile)
    if args.out.startswith(os.path.join(args.model, "")) and not os.path.isdir(args.model):
        raise InputError(f"--out: is needed, as {args.model} is no folder here to write the summary into")
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
        lock(answers_path, held)
        gather(answers_path, settings, args.overwrite)
        lock(answers_path, held)  # now another file of this name
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
            found = answer_batch(model, tokenizer, [prompts[i] for i in batch], args.max_new_tokens,
                                 STOPS[args.template], r, **decoding(args))
            now = time.perf_counter()
            new = [{"index": row["index"], "steps": r, "output": text, **score(args.task, text, row["gold"]),
                    "tokens": count, "recurrences": took, "seconds": (now - began) / len(batch)}
                   for row, text, count, took in zip((rows[i] for i in batch), *found) if (r, row["index"]) not in answers]
            f.writelines(json.dumps(answer) + "\n" for answer in new)
            f.flush()
            here[r] += new
            tokens, done, seconds = tokens + sum(found[1]), done + len(batch) * layers[r], now - started
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
