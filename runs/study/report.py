"""
Tables, pictures and the pages of the study, all from the measurements in results/ITEM.json.

    python runs/study/study.py

writes the tables into runs/study/README.md and the repository's README.md, in place, and draws the
pictures that the study's page shows. play.py measures and writes an item's file: a line for each
arm and seed, with the commands that made its model. An error is the standard error over the seeds.
A page asks for a table by the columns that it shows, and perhaps by the numbers of its rows:

    <!-- table: curriculum | arm | training FLOPs | accuracy, % -->
    <!-- table: curriculum 1 5 6 | arm | accuracy, % -->
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

UNSEEN = {"stories": 6, "s5": 9}  # tests of this length or longer repeat no question of training


def main():
    Parser(description=__doc__).parse_args()
    remake()


def remake():
    """Write the tables of the pages, and draw the pictures that the study's page shows."""
    for page, note in PAGES.items():
        write_page(page, note)
    for picture, name in re.findall(r"(assets/study_(\w+)\.png)", (HERE / "README.md").read_text()):
        draw_item(HERE / f"results/{name}.json", ROOT / picture)


# ---------------------------------------------------------------------------- numbers in words

def each(runs, *keys):
    """[run[key][key]..., ...]; a plain model has one recurrence, "0", which stands for any."""
    for key in keys:
        runs = [run["0"] if "0" in run else run[key] for run in runs]
    return runs


def mean_se(values):
    """[mean, standard error] of a value a seed; None for the error of one seed."""
    se = None
    if len(values) > 1:
        se = statistics.stdev(values) / math.sqrt(len(values))
    return [statistics.fmean(values), se]


def along(xs, runs, *keys):
    """A curve: [[x, mean, standard error], ...] of run[key]...[x]"""
    return [[float(x), *mean_se(each(runs, *keys, x))] for x in xs]


def cell(values, digits=1, scale=1):
    """A value a seed -> "98.7 ± 0.3", or "-" where a seed has none."""
    if not values or None in values:
        return "-"
    mean, se = mean_se(values)
    text = f"{scale * mean:.{digits}f}"
    return text if se is None else f"{text} ± {scale * se:.{digits}f}"


def percent(values, digits=1):
    return cell(values, digits, 100)


def whole(values):
    return cell(values, 0)


def tera(values):
    return cell(values, 2, 1e-12)


def scientific(values):
    """The mean of a value a seed -> "1.23e+12"."""
    return f"{statistics.fmean(values):.3g}"


def panel(x, y, curves, title="", **more):
    """A part of the picture, see runs/plot.py. curves: {label: [[x, mean, error], ...]}"""
    return {"title": title, "x": x, "y": y, "curves": curves, **more}


# ---------------------------------------------------------------------------- tables
# Functions of an item and its results {label: [a result each seed]}. They return figures and rows,
# each of them {column: text}.

LOSS = "validation loss"
UPDATES = "updates"
FLOPS = "training FLOPs since surgery"
STEPS = "recurrences r at test time"


def reached(runs, key, r, level=0.9):
    """`key` of each seed when accuracy first reached a level, between two validations, or None."""
    found = []
    for log in each(runs, "validations"):
        right = each(log, "accuracy", r)
        at = each(log, key)
        i = next((i for i, x in enumerate(right) if x >= level), 0)
        if i == 0:
            found.append(None)
        else:
            part = (level - right[i - 1]) / (right[i] - right[i - 1])
            found.append(at[i - 1] + part * (at[i] - at[i - 1]))
    return found


def last_accuracy(runs, r):
    return each(runs, "validations", -1, "accuracy", r)


def updates_to(runs, r):
    return reached(runs, "update", r)


def flops_to(runs, r):
    return reached(runs, "flops", r)


def minus(values, others):
    """The differences of two arms, paired by seed; none where one has no value."""
    if None in values + others:
        return []
    return [a - b for a, b in zip(values, others)]


def curves(item, found):
    """Loss and accuracy over updates and FLOPs; the last ones, and what 90% of answers took."""
    r = str(item["at"])
    figures = []
    for x, words, key, y in (
        ("update", UPDATES, "val", LOSS),
        ("flops", FLOPS, "val", LOSS),
        ("update", UPDATES, "accuracy", "accuracy"),
    ):
        points = {}
        for label, runs in found.items():
            logs = zip(*each(runs, "validations"))
            points[label] = []
            for seeds in logs:
                point = [statistics.fmean(each(seeds, x)), *mean_se(each(seeds, key, r))]
                points[label].append(point)
        figures.append(panel(words, y, points, f"validation at r = {r}", y_log=y == LOSS))
    rows = [curve_row(label, runs, r) for label, runs in found.items()]
    first, *others = found.values()
    for row, runs in zip(rows[1:], others):
        for column, value, show in (
            ("points, minus the first arm's", last_accuracy, percent),
            ("updates, minus the first arm's", updates_to, whole),
            ("TFLOPs, minus the first arm's", flops_to, tera),
        ):
            row[column] = show(minus(value(runs, r), value(first, r)))
    for row in rows[:1]:
        row |= {column: "-" for column in rows[-1] if column not in row}
    return figures, rows


def curve_row(label, runs, r):
    """What the runs of an arm ended with, at recurrence r."""
    losses = each(runs, "validations", -1, "val", r)
    return {
        "arm": label,
        "updates": whole(each(runs, "update")),
        "training FLOPs": scientific(each(runs, "flops")),
        "validation loss": cell(losses, 4),
        "accuracy, %": percent(last_accuracy(runs, r)),
        "updates to 90%": whole(updates_to(runs, r)),
        "TFLOPs to 90%": tera(flops_to(runs, r)),
        "loss of each seed": ", ".join(f"{loss:.4f}" for loss in losses),
        "largest gradient norm": cell(each(runs, "norm")),
        "skipped updates": sum(each(runs, "skipped")),
        "optimizer state, MB": f"{runs[0]['state_bytes'] / 1e6:.2f}",
    }


def optimizers(item, found):
    """Losses over the learning rate; of each optimizer, the row of the rate that ended best."""
    figures, rows = curves(item, found)
    over_updates = figures[0]["curves"]
    grid = {}  # {model: {optimizer: points}}
    best = {}  # {(model, optimizer): (loss, row)}
    for row, (label, runs) in zip(rows, found.items()):
        model, optimizer, lr = re.split(", | ", label)
        loss, se = mean_se(each(runs, "validations", -1, "val", str(item["at"])))
        points = grid.setdefault(model, {}).setdefault(optimizer, [])
        points.append([float(lr), loss, se])
        key = model, optimizer
        if key not in best or loss < best[key][0]:
            best[key] = loss, row
    rows = [row for _, row in best.values()]
    figures = [panel("learning rate", LOSS, points, model, x_log=10, y_log=True)
               for model, points in grid.items()]
    for model in grid:
        arms = [row["arm"] for row in rows if row["arm"].startswith(model)]
        shown = {arm: over_updates[arm] for arm in arms}
        figures.append(panel(UPDATES, LOSS, shown, f"{model}, the best of each", y_log=True))
    return figures, rows


def unit(item):
    """What the length of a question is counted in."""
    return "letters" if item["task"] == "s5" else "sentences"


def unseen(item, values):
    """The mean of {length: value} over the lengths whose questions are not in training."""
    first = UNSEEN[item["task"]]
    return statistics.fmean(x for n, x in values.items() if int(n) >= first)


def accuracy(item, found):
    """Accuracy over test recurrences, over the length of a question, and over an answer's FLOPs."""
    over_r = {}
    over_flops = {}
    hard = {}
    far = {}
    rows = []
    steps = "1", "2", "4", "8", "16", "32", "64"
    first = UNSEEN[item["task"]]
    for label, runs in found.items():
        right = {r: [unseen(item, lengths) for lengths in each(runs, "by_length", r)]
                 for r in steps}
        over_r[label] = [[float(r), *mean_se(right[r])] for r in steps]
        far[label] = along(steps, runs, "right_18")
        lengths = each(runs, "by_length", "32")
        hard[label] = along(lengths[0], lengths)
        plain = "0" in runs[0]["by_length"]
        over_flops[label] = [[flops, *mean_se(right["1" if plain else r])]
                             for r, flops in runs[0]["token_flops"].items()]
        row = {"arm": label, "training FLOPs": scientific(each(runs, "flops"))}
        row |= {f"r = {r}": percent(right[r]) for r in steps}
        row[f"18 {unit(item)}, r = 32"] = percent(each(runs, "right_18", "32"))
        rows.append(row)
    token_flops = "FLOPs of a new token (the paper's rule)"
    asked = f"{first} to 12 {unit(item)}"
    figures = [
        panel(STEPS, "accuracy", over_r, asked, x_log=2),
        panel(f"{unit(item)} of the question", "accuracy", hard, "r = 32"),
        panel(token_flops, "accuracy", over_flops, asked, x_log=10),
        panel(STEPS, "accuracy", far, f"18 {unit(item)}", x_log=2),
    ]
    return figures, rows


def healing(item, found):
    """What each stage has learnt of the task, and what it leaves of the general text."""
    points = {}
    rows = []
    for label, runs in found.items():
        row = {"arm": label}
        for part, words in (("pretrain", "text"), ("task", "task")):
            row[f"{words}: loss, r = 1"] = cell(each(runs, part, "1", 0), 3)
            row[f"{words}: loss, r = 8"] = cell(each(runs, part, "8", 0), 3)
            right = each(runs, part, "8", 1)
            row[f"{words}: %, r = 8"] = percent(right)
            row[f"{words}: % of each seed"] = ", ".join(f"{100 * x:.1f}" for x in right)
        rows.append(row)
        learnt, _ = mean_se(each(runs, "task", "8", 1))
        points[label] = [[learnt, *mean_se(each(runs, "pretrain", "8", 0))]]
    return [panel("task: accuracy at r = 8", "general text: loss at r = 8", points)], rows


def deeper(item, found):
    """r up to 256: accuracy, how far a recurrence moves the state, and where that ends."""
    over_r = {}
    moved = {}
    last_move = {}
    rows = []
    for label, runs in found.items():
        over_r[label] = along(runs[0]["right"], runs, "right")
        moved[label] = along(runs[0]["moved"], runs, "moved")
        last_move[label] = along(runs[0]["last_move"], runs, "last_move")
        row = {"arm": label}
        for r in ("8", "32", "64", "256"):
            row[f"r = {r}, %"] = percent(each(runs, "right", r))
        row["at a point, %"] = percent(each(runs, "point"))
        row["in a cycle, %"] = percent(each(runs, "cycle"))
        row["right when at a point, %"] = percent(each(runs, "right_at_point"))
        row["right elsewhere, %"] = percent(each(runs, "right_elsewhere"))
        for n in runs[0]["point_by_length"]:
            row[f"at a point after {n}, %"] = percent(each(runs, "point_by_length", n), 0)
        rows.append(row)
    change = "change of the state, relative (median)"
    figures = [
        panel(STEPS, "accuracy", over_r, x_log=2),
        panel("recurrence", change, moved, x_log=2, y_log=True),
        panel("sentences read so far", "the last recurrence that moves it by 1%", last_move),
    ]
    return figures, rows


def exits(item, found):
    """
    Accuracy over mean recurrences: of exits of a prompt's last id, of a fixed r for this id, of one
    r for all ids. And whether hard questions take longer.
    """
    (runs,) = found.values()
    first = UNSEEN[item["task"]]
    over = {}
    hard = {}
    rows = []
    for rule in runs[0]["rules"]:
        kind, value = rule.split()
        words = KINDS[kind]
        right = [unseen(item, x) for x in each(runs, "rules", rule, 0)]
        steps = each(runs, "rules", rule, 1)
        took = [unseen(item, x) for x in steps]
        row = {
            "rule": f"{words}: {value}",
            "accuracy, %": percent(right),
            "recurrences of the last id": cell(took, 2),
            "of an id, mean": cell([of_prompt(item, kind, x) for x in steps], 2),
        }
        for n in "1", str(first), "12":
            row[f"at length {n}"] = cell(each(steps, n))
        rows.append(row)
        over.setdefault(words, []).append([statistics.fmean(took), *mean_se(right)])
        if kind == "kl":
            hard[rule] = along(sorted(steps[0], key=int), steps)
    last = "mean recurrences of the last id"
    figures = [
        panel(last, "accuracy", over, f"{first} to 12 {unit(item)}", x_log=2),
        panel(f"{unit(item)} of the question", last, hard),
    ]
    return figures, rows


KINDS = {
    "kl": "kl, of the last id",
    "last": "fixed, of the last id",
    "all": "fixed, of all ids",
}


def of_prompt(item, kind, steps):
    """
    Mean recurrences of a prompt's ids, in the corpus that was measured (no word `so`). steps:
    {length: those of the last id}; the others take 32 unless all take the same.
    """
    means = {}
    for n, last in steps.items():
        ids = 1 + int(n) if item["task"] == "s5" else 2 * int(n)
        means[n] = last if kind == "all" else (32 * (ids - 1) + last) / ids
    return unseen(item, means)


TABLES = {
    "curves": curves,
    "optimizers": optimizers,
    "accuracy": accuracy,
    "healing": healing,
    "deeper": deeper,
    "exits": exits,
}


def result_of(path):
    """
    An item's table and figures, of the seeds that all of its arms have, or None if there are none
    yet. A file that holds "rows" is a result already.
    """
    if not path.exists():
        return None
    item = read_json(path)
    if "rows" in item:
        return item
    arms = {arm: {} for arm in item["arms"]}
    for run in item["runs"]:
        arms[run["arm"]][run["seed"]] = run
    seeds = sorted(set.intersection(*map(set, arms.values())))
    if not seeds:
        return None
    found = {arm: [runs[seed] for seed in seeds] for arm, runs in arms.items()}
    figures, rows = TABLES[item["table"]](item, found)
    results = sum(found.values(), [])
    return {
        "command": item["command"],
        "design": item["design"],
        "commit": ", ".join(sorted({run["commit"] for run in results})),
        "seeds": len(seeds),
        "figures": figures,
        "columns": list(rows[0]),
        "rows": [list(row.values()) for row in rows],
    }


def draw_item(path, picture):
    """Draw an item, if it is measured."""
    if result := result_of(path):
        draw(result["figures"], picture)


# ---------------------------------------------------------------------------- the page

def write_page(page, note):
    """Write the table that each comment of a page asks for, and under it what note() says of it."""
    def fill(found):
        wanted, *columns = found[2].split(" | ")
        name, *rows = wanted.split()
        text = f"Not measured yet: `python runs/study/play.py {name}`\n"
        if result := result_of(HERE / f"results/{name}.json"):
            text = table(name, result, columns, map(int, rows)) + note(result)
        return found[1] + text + found[3]

    pattern = r"(<!-- table: (.*) -->\n)(?:.*\n)*?(<!-- end -->)"
    page.write_text(re.sub(pattern, fill, page.read_text()))


def table(name, result, columns, numbers):
    """Columns of an item as Markdown: the rows of these numbers, from 1, or all of them."""
    if unknown := set(columns) - set(result["columns"]):
        raise UserError(f"{name}.json: has no column {unknown.pop()!r}")
    chosen = [result["rows"][i - 1] for i in numbers] or result["rows"]
    rows = [columns, ["---"] * len(columns)]
    for row in chosen:
        cells = dict(zip(result["columns"], row))
        rows.append([str(cells[column]) for column in columns])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def source(result):
    """The line that says how an item was measured: command, commit, seeds."""
    line = f"`{result['command']}` at {result['commit']}"
    if result["seeds"] != 3:
        line += f", seeds: {result['seeds']}"
    if result["design"] == 1:
        line += "; of the first design"
    return f"\n{line}\n"


PAGES = {HERE / "README.md": source, ROOT / "README.md": lambda result: ""}


if __name__ == "__main__":
    cli(main)
