"""
Tables, pictures and the page of the study, from what play.py has measured.

    python runs/study/study.py tables [ITEM ...]     results/ITEM.json, ../../assets/study_ITEM.png
    python runs/study/study.py page                  writes the tables into README.md, in place

An error is the standard error over the seeds. An item's JSON holds "figures", which `bench.py plot`
draws, and "columns" and "rows". The page asks for a table by the columns that it shows:

    <!-- table: curriculum | arm | training FLOPs | accuracy, % -->
"""
import math
import re
import statistics

from play import HERE, ITEMS, ROOT, Study
from bench import draw
from data import Parser, cli, read_json, write_json
from model import UserError


def main():
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    tables = commands.add_parser("tables", help="an item's table and picture from its results")
    tables.add_argument("items", nargs="*", metavar="ITEM", help="default: all that have results")
    tables.add_argument("--quick", action="store_true", help="of `all.sh --quick`")
    commands.add_parser("page", help="write the tables into README.md")
    args = parser.parse_args()
    if args.items == ["rest"]:
        return write_rest(Study())
    if args.command == "page":
        return write_page(HERE / "README.md")
    for name in args.items or ITEMS:
        write_tables(name, Study(args.quick))


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


def scientific(values):
    """The mean of a value a seed -> "1.23e+12"."""
    return f"{statistics.fmean(values):.3g}"


def panel(x, y, curves, title="", **more):
    """A part of the picture, see draw() of bench.py. curves: {label: [[x, mean, error], ...]}"""
    return {"title": title, "x": x, "y": y, "curves": curves, **more}


# ---------------------------------------------------------------------------- tables
# Functions of an item and its results {label: [a result each seed]}. They return figures and rows,
# each of them {column: text}.

LOSS = "validation loss"
UPDATES = "updates"
FLOPS = "training FLOPs (the paper's rule)"
STEPS = "recurrences r at test time"
LENGTHS = "1", "4", "8", "12"  # sentences of a question


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


def minus(values, others):
    """The differences of two arms, paired by seed; none where one has no value."""
    return [] if None in values + others else [a - b for a, b in zip(values, others)]


def curves(item, found):
    """Loss and accuracy over updates and FLOPs; the last ones, and what 90% of answers took."""
    r = str(item.at)
    figures, rows, base = [], [], None
    for x, words, key, y in (
        ("update", UPDATES, "val", LOSS),
        ("flops", FLOPS, "val", LOSS),
        ("update", UPDATES, "accuracy", "accuracy"),
    ):
        points = {}
        for label, runs in found.items():
            logs = zip(*each(runs, "validations"))
            points[label] = [[statistics.fmean(each(seeds, x)), *mean_se(each(seeds, key, r))]
                             for seeds in logs]
        figures.append(panel(words, y, points, y_log=y == LOSS))
    for label, runs in found.items():
        took = [reached(runs, key, r) for key in ("update", "flops")]
        if base is None:
            base, apart = took, ([], [])
        else:
            apart = list(map(minus, took, base))
        losses = each(runs, "validations", -1, "val", r)
        rows.append({
            "arm": label,
            "updates": cell(each(runs, "update"), 0),
            "training FLOPs": scientific(each(runs, "flops")),
            "validation loss": cell(losses, 4),
            "accuracy, %": percent(each(runs, "validations", -1, "accuracy", r)),
            "updates to 90%": cell(took[0], 0),
            "updates, minus the first arm's": cell(apart[0], 0),
            "TFLOPs to 90%": cell(took[1], 2, 1e-12),
            "TFLOPs, minus the first arm's": cell(apart[1], 2, 1e-12),
            "loss of each seed": ", ".join(f"{loss:.4f}" for loss in losses),
            "largest gradient norm": cell(each(runs, "norm")),
            "skipped updates": sum(each(runs, "skipped")),
            "optimizer state, MB": f"{runs[0]['state_bytes'] / 1e6:.2f}",
        })
    return figures, rows


def optimizers(item, found):
    """Losses over the learning rate; of each optimizer, the row of the rate that ended best."""
    figures, rows = curves(item, found)
    over_updates = figures[0]["curves"]
    grid = {}  # {model: {optimizer: points}}
    best = {}  # {(model, optimizer): (loss, row)}
    for row, (label, runs) in zip(rows, found.items()):
        model, optimizer, lr = re.split(", | ", label)
        loss, se = mean_se(each(runs, "validations", -1, "val", str(item.at)))
        grid.setdefault(model, {}).setdefault(optimizer, []).append([float(lr), loss, se])
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


def accuracy(item, found):
    """Accuracy over test recurrences, by the number of sentences, and over an answer's FLOPs."""
    over_r, over_flops, hard, far = {}, {}, {}, {}
    rows = []
    steps = "1", "2", "4", "8", "16", "32", "64"
    for label, runs in found.items():
        over_r[label] = along(steps, runs, "right")
        far[label] = along(steps, runs, "right_18")
        hard[label] = along(runs[0]["by_length"], runs, "by_length")
        over_flops[label] = [[flops, *mean_se(each(runs, "right", r))]
                             for r, flops in runs[0]["token_flops"].items()]
        row = {"arm": label, "training FLOPs": scientific(each(runs, "flops"))}
        row |= {f"r = {r}": percent(each(runs, "right", r)) for r in steps}
        if "0" in runs[0]["right"]:
            row |= {f"r = {r}": "same" for r in steps[1:]}
        row["18 sentences, r = 32"] = percent(each(runs, "right_18", "32"))
        rows.append(row)
    token_flops = "FLOPs of a new token (the paper's rule)"
    figures = [
        panel(STEPS, "accuracy", over_r, "1 to 12 sentences", x_log=2),
        panel("sentences", "accuracy", hard, "r = 32"),
        panel(token_flops, "accuracy", over_flops, "1 to 12 sentences", x_log=10),
        panel(STEPS, "accuracy", far, "18 sentences (trained on 12)", x_log=2),
    ]
    return figures, rows


def healing(item, found):
    """What each stage has learnt of the task, and what it leaves of the general text."""
    points, rows = {}, []
    for label, runs in found.items():
        row = {"arm": label}
        for part, words in (("pretrain", "text"), ("task", "task")):
            row[f"{words}: loss, r = 1"] = cell(each(runs, part, "1", 0), 3)
            row[f"{words}: loss, r = 8"] = cell(each(runs, part, "8", 0), 3)
            row[f"{words}: %, r = 8"] = percent(each(runs, part, "8", 1))
        rows.append(row)
        learnt, _ = mean_se(each(runs, "task", "8", 1))
        points[label] = [[learnt, *mean_se(each(runs, "pretrain", "8", 0))]]
    return [panel("task: accuracy at r = 8", "general text: loss at r = 8", points)], rows


def deeper(item, found):
    """r up to 256: accuracy, how far a recurrence moves the state, and where that ends."""
    over_r, moved, last_move = {}, {}, {}
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
        for n in LENGTHS:
            row[f"at a point after {n}, %"] = percent(each(runs, "point_by_length", n), 0)
        rows.append(row)
    change = "change of the state, relative (median)"
    figures = [
        panel(STEPS, "accuracy", over_r, x_log=2),
        panel("recurrence", change, moved, x_log=2, y_log=True),
        panel("sentences", "the last recurrence that moves it by 1%", last_move),
    ]
    return figures, rows


def exits(item, found):
    """Accuracy over mean recurrences of exits, and whether hard questions take longer."""
    (runs,) = found.values()
    over = {"fixed r of all tokens": along(runs[0]["right"], runs, "right")}
    hard, rows = {}, []
    for rule in runs[0]["rules"]:
        right, took, by_length = (each(runs, "rules", rule, i) for i in range(3))
        kind = "fixed r of the last token"
        if rule.startswith("kl"):
            kind = "kl"
            hard[rule] = along(by_length[0], by_length)
        over.setdefault(kind, []).append([statistics.fmean(took), *mean_se(right)])
        row = {"rule": rule, "accuracy, %": percent(right), "mean recurrences": cell(took, 2)}
        for n in LENGTHS:
            words = "1 sentence" if n == "1" else f"{n} sentences"
            row[words] = cell(each(by_length, n))
        rows.append(row)
    figures = [
        panel("mean recurrences of the last token", "accuracy", over, x_log=2),
        panel("sentences", "mean recurrences", hard),
    ]
    return figures, rows


TABLES = {
    "curves": curves,
    "optimizers": optimizers,
    "accuracy": accuracy,
    "healing": healing,
    "deeper": deeper,
    "exits": exits,
}


def write_tables(name, study):
    """An item's JSON and picture, from the seeds that all of its arms have."""
    item, paths = ITEMS[name], {}
    for label, run in item.runs.items():
        of_arm = {path.parent.name: path for path in study.measured(item, run)}
        if of_arm:
            paths[label] = of_arm
        else:
            print(f"{name}: nothing is measured of {label}")
    seeds = sorted(set.intersection(*map(set, paths.values()))) if paths else []
    if not seeds:
        return
    found = {label: [read_json(of_arm[seed]) for seed in seeds] for label, of_arm in paths.items()}
    figures, rows = TABLES[item.table](item, found)
    results = sum(found.values(), [])
    about = {key: ", ".join(sorted({result[key] for result in results}))
             for key in ("commit", "date", "torch", "cpu", "dtype")}
    path = study.results / f"{name}.json"
    write_json(path, {
        "study": name,
        "command": f"bash runs/study/all.sh {name}",
        **about,
        "seeds": len(seeds),
        "minutes": round(sum(result["seconds"] for result in results) / 60),
        "figures": figures,
        "columns": list(rows[0]),
        "rows": [list(row.values()) for row in rows],
    })
    picture = ROOT / f"assets/study_{name}.png"
    if study.quick:
        picture = path.with_suffix(".png")
    draw(figures, picture)
    print(path)


def write_rest(study):
    """The table of the loss on the state's rest, on both tasks."""
    rows, seconds = [], 0
    for words, task, arms in (("stories", "stories", ("r8", "rest")), ("S5", "s5", ("task", "s5_rest"))):
        for arm, name in zip(("the usual loss", "and the state's rest"), arms):
            folder = study.results / "runs" / task
            answers = [read_json(folder / str(seed) / f"{name}.answers.json") for seed in range(3)]
            exits = [read_json(folder / str(seed) / f"{name}.exits.json") for seed in range(3)]
            seconds += sum(result["seconds"] for result in answers + exits)
            rows.append({
                "arm": f"{words}: {arm}",
                "r = 8": percent(each(answers, "right", "8")),
                "r = 64": percent(each(answers, "right", "64")),
                "18 sentences, r = 16": percent(each(answers, "right_18", "16")),
                "18 sentences, r = 64": percent(each(answers, "right_18", "64")),
                "accuracy, exits at 0.001": percent(each(exits, "rules", "kl 0.001", 0)),
                "recurrences, exits at 0.001": cell(each(exits, "rules", "kl 0.001", 1), 2),
                "recurrences, exits at 0.1": cell(each(exits, "rules", "kl 0.1", 1), 2),
            })
    write_json(study.results / "rest.json", {
        "study": "rest", "command": "python runs/study/play.py rest rest_exits s5_rest s5_rest_exits",
        "commit": exits[0]["commit"], "date": exits[0]["date"], "seeds": 3,
        "minutes": round(seconds / 60), "columns": list(rows[0]),
        "rows": [list(row.values()) for row in rows]})


# ---------------------------------------------------------------------------- the page

def write_page(page):
    """Write the table that each comment of a page asks for, up to the line of its command."""
    def fill(found):
        return found[1] + table(*found[2].split(" | ")) + found[3]

    pattern = r"(<!-- table: (.*) -->\n)(?:.*\n)*?(<!-- end -->)"
    page.write_text(re.sub(pattern, fill, page.read_text()))


def table(name, *columns):
    """Columns of results/NAME.json as Markdown, and which version measured them."""
    path = HERE / "results" / f"{name}.json"
    if not path.exists():
        return f"Not measured yet: `bash runs/study/all.sh {name}`\n"
    result = read_json(path)
    if unknown := set(columns) - set(result["columns"]):
        raise UserError(f"{name}.json: has no column {unknown.pop()!r}")
    rows = [columns, ["---"] * len(columns)]
    for row in result["rows"]:
        cells = dict(zip(result["columns"], row))
        rows.append([str(cells[column]) for column in columns])
    text = "".join("| " + " | ".join(row) + " |\n" for row in rows)
    time = f", {result['minutes']} minutes of one thread" if "minutes" in result else ""
    return (f"{text}\n`{result['command']}` at commit {result['commit']}, "
            f"{result['date']}{time}\n")


if __name__ == "__main__":
    cli(main)
