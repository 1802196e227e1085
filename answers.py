r"""
What is asked, and what counts as right: prompts, stops, extraction and comparison of every task of eval_gsm8k.py.

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
import json
import re
import sys
from fractions import Fraction

from model import InputError

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
