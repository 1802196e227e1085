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
    if args.command == "page":
        return write_page(HERE / "README.md")
    for name in args.items or ITEMS:
        write_tables(name, Study(args.quick))


# ---------------------------------------------------------------------------- numbers in words

def mean_se(values):
    """[mean, standard error] of a value a seed; None for the error of one seed."""
    values = list(values)
    se = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return [statistics.fmean(values), se]


def cell(values, digits=1, scale=1):
    """A value a seed -> "98.7 ± 0.3", or "-" where a seed has none."""
    values = list(values)
    if None in values or not values:
        return "-"
    return " ± ".join(f"{scale * x:.{digits}f}" for x in mean_se(values) if x is not None)


def percent(values, digits=1):
    return cell(values, digits, 100)


def panel(x, y, curves, title="", **more):
    """A part of the picture, see draw() of bench.py. curves: {label: [[x, mean, error], ...]}"""
    return {"title": title, "x": x, "y": y, "curves": curves, **more}


# ---------------------------------------------------------------------------- tables
# Functions of an item and its results {label: [a result each seed]}. They return figures and rows,
# each of them {column: text}.

def at_r(values, r):
    """The value at recurrence r of {"1": ..., "8": ...}, or of a plain model's {"0": ...}."""
    return values["0"] if "0" in values else values[str(r)]


def first(result, key, r, level=0.9):
    """`key` ("update" or "flops") when accuracy first reached a level, between two validations."""
    log = result["validations"]
    for a, b in zip(log, log[1:]):
        low, high = at_r(a["accuracy"], r), at_r(b["accuracy"], r)
        if high >= level:
            return a[key] + (b[key] - a[key]) * max(0, level - low) / ((high - low) or 1)


def compare(runs, base, key, r, digits=0, scale=1):
    """Cells: `key` until 90% were right, and minus the first arm's, paired by seed."""
    values, others = ([first(run, key, r) for run in part] for part in (runs, base))
    apart = []
    if runs is not base and None not in values + others:
        apart = [a - b for a, b in zip(values, others)]
    return cell(values, digits, scale), cell(apart, digits, scale)


def curves(item, found):
    """Loss and accuracy over updates and FLOPs; the last ones, and what 90% of answers took."""
    loss, over_flops, accuracy, rows, r = {}, {}, {}, [], item.at
    base = next(iter(found.values()))
    for label, runs in found.items():
        for curve, x, y in ((loss, "update", "val"), (over_flops, "flops", "val"),
                            (accuracy, "update", "accuracy")):
            together = zip(*(run["validations"] for run in runs))
            curve[label] = [[statistics.fmean(v[x] for v in seeds),
                             *mean_se(at_r(v[y], r) for v in seeds)] for seeds in together]
        ends = [run["validations"][-1] for run in runs]
        updates, more_updates = compare(runs, base, "update", r)
        flops, more_flops = compare(runs, base, "flops", r, 2, 1e-12)
        rows.append({
            "arm": label,
            "updates": cell((end["update"] for end in ends), 0),
            "training FLOPs": f"{statistics.fmean(end['flops'] for end in ends):.3g}",
            "validation loss": cell((at_r(end["val"], r) for end in ends), 4),
            "accuracy, %": percent(at_r(end["accuracy"], r) for end in ends),
            "updates to 90%": updates,
            "updates, minus the first arm's": more_updates,
            "TFLOPs to 90%": flops,
            "TFLOPs, minus the first arm's": more_flops,
            "loss of each seed": ", ".join(f"{at_r(end['val'], r):.4f}" for end in ends),
            "largest gradient norm": cell(run["norm"] for run in runs),
            "skipped updates": sum(run["skipped"] for run in runs),
            "optimizer state, MB": cell((run["state_bytes"] for run in runs[:1]), 2, 1e-6),
        })
    return [panel("updates", "validation loss", loss, y_log=True),
            panel("training FLOPs (the paper's rule)", "validation loss", over_flops, y_log=True),
            panel("updates", "accuracy", accuracy)], rows


def optimizers(item, found):
    """Losses over the learning rate; of each optimizer, the row of the rate that ended best."""
    figures, rows = curves(item, found)
    over_lr, best, shown = {}, {}, {}
    for row, (label, runs) in zip(rows, found.items()):
        model, optimizer, lr = re.split(", | ", label)
        end = mean_se(at_r(run["validations"][-1]["val"], item.at) for run in runs)
        over_lr.setdefault(model, {}).setdefault(optimizer, []).append([float(lr), *end])
        if not end[0] >= best.get((model, optimizer), (math.inf,))[0]:
            best[model, optimizer] = end[0], row
    for (model, _), (_, row) in best.items():
        shown.setdefault(model, {})[row["arm"]] = figures[0]["curves"][row["arm"]]
    return [panel("learning rate", "last validation loss", over_lr[model], model, x_log=10,
                  y_log=True) for model in over_lr] + [
            panel("updates", "validation loss", shown[model], f"{model}, the best of each",
                  y_log=True) for model in shown], [row for _, row in best.values()]


def accuracy(item, found):
    """Accuracy over test recurrences, by the number of sentences, and over an answer's FLOPs."""
    over_r, far, over_flops, hard, rows = {}, {}, {}, {}, []
    steps = 1, 2, 4, 8, 16, 32, 64
    for label, runs in found.items():
        over_r[label], far[label] = ([[r, *mean_se(at_r(run[key], r) for run in runs)]
                                      for r in steps] for key in ("right", "right_18"))
        over_flops[label] = [[flops, *mean_se(run["right"][r] for run in runs)]
                             for r, flops in runs[0]["token_flops"].items()]
        hard[label] = [[int(n), *mean_se(run["by_length"][n] for run in runs)]
                       for n in runs[0]["by_length"]]
        row = {"arm": label, "training FLOPs": f"{statistics.fmean(x['flops'] for x in runs):.3g}"}
        for r in steps:
            row[f"r = {r}"] = percent(at_r(run["right"], r) for run in runs)
            if r > 1 and "0" in runs[0]["right"]:
                row[f"r = {r}"] = "same"
        rows.append(row | {"18 sentences, r = 32": percent(
            at_r(run["right_18"], 32) for run in runs)})
    r = "recurrences r at test time"
    return [panel(r, "accuracy", over_r, "1 to 12 sentences", x_log=2),
            panel("sentences", "accuracy", hard, "r = 32"),
            panel("FLOPs of a new token (the paper's rule)", "accuracy", over_flops,
                  "1 to 12 sentences", x_log=10),
            panel(r, "accuracy", far, "18 sentences (trained on 12)", x_log=2)], rows


def healing(item, found):
    """What each stage has learnt of the task, and what it leaves of the general text."""
    points, rows = {}, []
    for label, runs in found.items():
        row = {"arm": label}
        for part, text in (("pretrain", "general text"), ("task", "task")):
            for r in (1, 8):
                row[f"{text}: loss at r = {r}"] = cell((at_r(x[part], r)[0] for x in runs), 3)
            row[f"{text}: accuracy at r = 8, %"] = percent(at_r(x[part], 8)[1] for x in runs)
        rows.append(row)
        learnt, _ = mean_se(at_r(run["task"], 8)[1] for run in runs)
        points[label] = [[learnt, *mean_se(at_r(run["pretrain"], 8)[0] for run in runs)]]
    return [panel("task: accuracy at r = 8", "general text: loss at r = 8", points)], rows


def deeper(item, found):
    """r up to 256: accuracy, how far a recurrence moves the state, and where that ends."""
    over_r, moved, last, rows = {}, {}, {}, []
    for label, runs in found.items():
        for curve, key in ((over_r, "right"), (moved, "moved")):
            curve[label] = [[int(r), *mean_se(run[key][r] for run in runs)] for r in runs[0][key]]
        last[label] = [[n, *mean_se(seeds)] for n, seeds in
                       enumerate(zip(*(run["last_move_by_length"] for run in runs)), 1)]
        rows.append({
            "arm": label,
            **{f"r = {r}, %": percent(run["right"][str(r)] for run in runs)
               for r in (8, 32, 64, 256)},
            "at a point, %": percent(run["point"] for run in runs),
            "in a cycle, %": percent(run["cycle"] for run in runs),
            "right when at a point, %": percent(run["right_at_point"] for run in runs),
            "right elsewhere, %": percent(run["right_elsewhere"] for run in runs),
            **{f"at a point after {n}, %": percent((run["point_by_length"][n - 1]
                                                    for run in runs), 0) for n in (1, 4, 8, 12)},
        })
    return [panel("recurrences r at test time", "accuracy", over_r, x_log=2),
            panel("recurrence", "change of the state, relative (median)", moved, x_log=2,
                  y_log=True),
            panel("sentences", "recurrences until one moves the state by less than 1%", last)], rows


def exits(item, found):
    """Accuracy over mean recurrences of exits, and whether hard questions take longer."""
    over, hard, rows = {}, {}, []
    (runs,) = found.values()
    for rule in runs[0]["rules"]:
        right, took, by_length = zip(*(run["rules"][rule] for run in runs))
        kind = "kl" if rule.startswith("kl") else "fixed r of the last token"
        over.setdefault(kind, []).append([statistics.fmean(took), *mean_se(right)])
        by_length = {n: [x[n] for x in by_length] for n in by_length[0]}
        if kind == "kl":
            hard[rule] = [[int(n), *mean_se(x)] for n, x in by_length.items()]
        rows.append({"rule": rule, "accuracy, %": percent(right),
                     "mean recurrences": cell(took, 2),
                     **{f"{n} sentences": cell(by_length[n]) for n in ("1", "4", "8", "12")}})
    return [panel("mean recurrences of the last token", "accuracy", over, x_log=2),
            panel("sentences", "mean recurrences", hard)], rows


TABLES = {"curves": curves, "optimizers": optimizers, "accuracy": accuracy, "healing": healing,
          "deeper": deeper, "exits": exits}


def write_tables(name, study):
    """An item's JSON and picture, from the seeds that all of its arms have."""
    item, paths = ITEMS[name], {}
    for label, run in item.runs.items():
        paths[label] = {path.parent.name: path for path in study.measured(item, run)}
        if not paths[label]:
            print(f"{name}: nothing is measured of {label}")
            del paths[label]
    seeds = sorted(set.intersection(*map(set, paths.values()))) if paths else []
    if not seeds:
        return
    found = {label: [read_json(of_arm[seed]) for seed in seeds] for label, of_arm in paths.items()}
    figures, rows = TABLES[item.table](item, found)
    results = [result for of_arm in found.values() for result in of_arm]
    path = study.results / f"{name}.json"
    write_json(path, {
        "study": name,
        "command": f"bash runs/study/all.sh {name}",
        **{key: ", ".join(sorted({result[key] for result in results}))
           for key in ("commit", "date", "torch", "cpu", "dtype")},
        "seeds": len(seeds),
        "minutes": round(sum(result["seconds"] for result in results) / 60),
        "figures": figures,
        "columns": list(rows[0]),
        "rows": [list(row.values()) for row in rows],
    })
    draw(figures, path.with_suffix(".png") if study.quick else ROOT / f"assets/study_{name}.png")
    print(path)


# ---------------------------------------------------------------------------- the page

def write_page(page):
    """Write the table that each comment of a page asks for, up to the line of its command."""
    text = re.sub(r"(<!-- table: (.*) -->\n)(.*\n)*?(<!-- end -->)",
                  lambda found: f"{found[1]}{table(*found[2].split(' | '))}{found[4]}",
                  page.read_text())
    page.write_text(text)


def table(name, *columns):
    """Columns of results/NAME.json as Markdown, and which version measured them."""
    result = read_json(HERE / "results" / f"{name}.json")
    if unknown := set(columns) - set(result["columns"]):
        raise UserError(f"{name}.json: has no column {unknown.pop()!r}")
    places = [result["columns"].index(column) for column in columns]
    rows = [columns, ["---"] * len(columns), *([row[i] for i in places] for row in result["rows"])]
    lines = ["| " + " | ".join(map(str, row)) + " |\n" for row in rows]
    time = f", {result['minutes']} minutes of one thread" if "minutes" in result else ""
    return "".join([*lines, f"\n`{result['command']}` at commit {result['commit']}, "
                            f"{result['date']}{time}\n"])


if __name__ == "__main__":
    cli(main)
