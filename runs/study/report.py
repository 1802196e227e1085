"""
Write the tables of the study into the pages, and draw its pictures, from results/ITEM.json.

    python runs/study/report.py

run.py makes these files. A page asks for a table with a comment that names the file and the columns
to show, and this script writes the table under it, in runs/study/README.md and in the repository's
README.md. An error (±) is the standard error over the seeds. Numbers behind the name choose rows:

    <!-- table: curriculum | arm | 6 to 12, % -->
    <!-- table: first_screen 1 3 | arm | 12 -->
"""
import math
import re
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT))
from common import Parser, UserError, cli, read_json
from runs.plot import draw

PAGES = HERE / "README.md", ROOT / "README.md"
R = "32"  # the r of the outcome
OUTCOME = {"stories": range(6, 13), "s5": range(9, 13)}  # lengths of its questions
UNIT = {"stories": "sentences", "s5": "letters"}


def main():
    Parser(description=__doc__).parse_args()
    remake()


def remake():
    """Write the tables of the pages, and draw the pictures that the study's page shows."""
    for page in PAGES:
        write_tables(page)
    text = (HERE / "README.md").read_text()
    for picture, name in re.findall(r"(assets/study_(\w+)\.png)", text):
        if item := read_item(HERE / f"results/{name}.json"):
            draw(figures(item), ROOT / picture)


# ---------------------------------------------------------------------------- statistics

def mean_se(values):
    """The mean and the standard error of one value per seed; None for the error of one seed."""
    error = None
    if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), error


def paired_t_test(differences):
    """
    The two-sided p-value of five paired differences, by Student's t with 4 degrees of freedom,
    whose distribution has a closed form (Abramowitz and Stegun, 26.7.4).
    """
    if len(differences) != 5:
        raise ValueError(f"{len(differences)} differences, and this is a test of 5")
    mean, error = mean_se(differences)
    if error == 0:
        return float(mean == 0)
    angle = math.atan(abs(mean / error) / math.sqrt(4))
    return 1 - math.sin(angle) * (1 + math.cos(angle) ** 2 / 2)


def holm(p_values):
    """Holm's correction for p-values that are reported together. Returns them in the same order."""
    count = len(p_values)
    smallest_first = sorted(range(count), key=lambda i: p_values[i])
    corrected = [0.0] * count
    largest = 0.0  # a corrected p-value is never below that of a smaller one
    for rank, i in enumerate(smallest_first):
        largest = max(largest, (count - rank) * p_values[i])
        corrected[i] = min(1, largest)
    return corrected


# ---------------------------------------------------------------------------- numbers as text

def cell(values, digits=1, scale=1):
    """One value per seed -> "98.7 ± 0.3"."""
    mean, error = mean_se(values)
    rounded = round(scale * mean, digits) + 0.0  # not -0.0
    text = f"{rounded:.{digits}f}"
    return text if error is None else f"{text} ± {scale * error:.{digits}f}"


def percent(values):
    return cell(values, scale=100)


# ---------------------------------------------------------------------------- items

def read_item(path):
    """An item's file, with "runs" as {arm: [run of each seed]}, or None while any is missing."""
    if not path.exists():
        return None
    item = read_json(path)
    runs = {arm: [] for arm in item["arms"]}
    for run in sorted(item["runs"], key=lambda run: run["seed"]):
        runs[run["arm"]].append(run)
    if any(len(of_arm) != 5 for of_arm in runs.values()):
        return None
    return item | {"runs": runs}


def at_depth(run, r=R):
    """{length: share of right answers} at r. An ordinary model has one depth, "0", for any r."""
    return run["right"].get("0") or run["right"][r]


def outcome(item, run, r=R):
    """The share of right answers to the questions longer than those of training."""
    return statistics.fmean(at_depth(run, r)[str(n)] for n in OUTCOME[item["task"]])


def rows(item):
    """An item's table: for each arm {column: text}. The first arm is the one compared with."""
    first, *others = item["runs"].values()
    asked = OUTCOME[item["task"]]
    unit = UNIT[item["task"]]
    differences = []
    for runs in others:
        pairs = zip(first, runs, strict=True)
        differences.append([outcome(item, b) - outcome(item, a) for a, b in pairs])
    p_values = holm([paired_t_test(values) for values in differences])
    compared = [("", "")]
    for values, p in zip(differences, p_values):
        compared.append((percent(values), "< 0.001" if p < 0.001 else f"{p:.3f}"))
    made = []
    for (arm, runs), (difference, p) in zip(item["runs"].items(), compared):
        row = {
            "arm": arm,
            "learning rate": f"{runs[0]['rate']:g}",
            "updates": f"{statistics.fmean(run['updates'] for run in runs):,.0f}",
            "TFLOPs": f"{statistics.fmean(run['flops'] for run in runs) / 1e12:.2f}",
        }
        for r in ("4", "8", "16"):
            row[f"r = {r}, %"] = percent([outcome(item, run, r) for run in runs])
        row |= {
            f"{asked[0]} to {asked[-1]} {unit}, %": percent([outcome(item, run) for run in runs]),
            "points beside the first": difference,
            "p": p,
            f"18 {unit}, %": percent([at_depth(run)["18"] for run in runs]),
            "each seed, %": ", ".join(f"{100 * outcome(item, run):.0f}" for run in runs),
        }
        if "far" in runs[0]:
            for r in ("32", "64", "128", "256"):
                right = [run["far"][r]["12"] for run in runs]
                row[f"12 {unit}, r = {r}, %"] = percent(right)
            moves = [run["far"]["moved"]["12"] for run in runs]
            row["last move, %"] = cell(moves, 2, 100)
        made.append(row)
    return made


def figures(item):
    """The panels of an item's picture, see runs/plot.py: accuracy over length, and over r."""
    unit = UNIT[item["task"]]
    over_length = {}
    over_r = {}
    for arm, runs in item["runs"].items():
        lengths = at_depth(runs[0])
        over_length[arm] = along(lengths, [at_depth(run) for run in runs])
        over_r[arm] = [
            [float(r), *mean_se([outcome(item, run, r) for run in runs])]
            for r in ("1", "2", "4", "8", "16", "32")
        ]
    asked = OUTCOME[item["task"]]
    return [
        panel(f"{unit} of the question", over_length, title=f"r = {R}",
              ticks=[int(n) for n in lengths if int(n) % 2 == 0],  # all of them would overlap
              line=[asked[0] - 1, "longest question\nasked in training"]),
        panel("recurrences r at test time", over_r, title=f"{asked[0]} to {asked[-1]} {unit}",
              x_log=2),
    ]


def along(xs, values):
    """A curve: [[x, mean, standard error], ...] of a list of {x: value}, one for each seed."""
    return [[float(x), *mean_se([value[x] for value in values])] for x in xs]


def panel(x, curves, **more):
    """A panel of accuracy over x, see runs/plot.py. curves: {label: [[x, mean, error], ...]}"""
    return {"title": "", "x": x, "y": "accuracy", "curves": curves, **more}


# ---------------------------------------------------------------------------- pages

def write_tables(page):
    """Write the table that each comment of a page asks for under the comment."""
    def fill(found):
        wanted, *columns = found[2].split(" | ")
        name, *numbers = wanted.split()
        return found[1] + table(name, columns, [int(i) for i in numbers]) + found[3]

    pattern = r"(<!-- table: (.*) -->\n)(?:.*\n)*?(<!-- end -->)"
    page.write_text(re.sub(pattern, fill, page.read_text()))


def table(name, columns, numbers):
    """Columns of an item as Markdown: the rows with these numbers, from 1, or all of them."""
    path = HERE / f"results/{name}.json"
    found = read_json(path) if path.exists() else {}
    source = ""
    if "rows" in found:  # lengths.py has made the table
        made = [dict(zip(found["columns"], row)) for row in found["rows"]]
    elif item := read_item(path):
        made = rows(item)
        runs = sum(item["runs"].values(), [])
        commits = ", ".join(sorted({run["commit"] for run in runs}))
        source = f"\n`{item['command']}` at {commits}\n"
    else:
        return f"Not measured yet: `python runs/study/run.py {name}`\n"
    if unknown := set(columns) - set(made[0]):
        raise UserError(f"{name}.json: has no column {unknown.pop()!r}")
    lines = [columns, ["---"] * len(columns)]
    for row in [made[i - 1] for i in numbers] or made:
        lines.append([row[column] for column in columns])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + source


if __name__ == "__main__":
    cli(main)
