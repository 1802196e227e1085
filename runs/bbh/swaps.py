"""
Make BIG-Bench Hard's tracking_shuffled_objects (Suzgun et al., 2022, MIT) a task for runs/task.sh.

    python -m runs.bbh.swaps FILES OUT

FILES is the folder with tracking_shuffled_objects_{three,five,seven}_objects.json. The first 50
items of each lend their sentences; who holds what, who swaps and who is asked are drawn anew.

    test.jsonl        the other 200 items of each file, untouched; as many swaps as people
    train.jsonl       20,000 stories of 1 to 5 swaps as chats, each asked about half of its people;
                      the first message is a question as in the test. When asked about all people, a
                      model first learns, for hundreds of updates, that each letter is right once
    questions.jsonl   40,000 such stories with one question each
    dev.jsonl, long.jsonl     7 people, 100 questions for each of 1 to 8, 10, 12 and 16 swaps

Every one of the 750 items is solved and written back first, and has to give its own answer and its
own text.
"""
import json
import random
import re
from pathlib import Path

from common import Parser, UserError, cli, new_folder, read_json, write_atomically

PEOPLE = {"three": 3, "five": 5, "seven": 7}
LENGTHS = 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16
SWAP = re.compile(r"(?:First|Then|Finally), (\w+) and (\w+) ([^.]+)\. ?")
ASKED = re.compile(r"\b[A-Z]\w+(?= (?:is|has)\b)")  # the person in the last sentence


class Item:
    """An item in pieces: what precedes the list of holders, the list, and what follows it."""

    def __init__(self, text):
        story, options = text.split("\nOptions:\n")
        self.options = [line.split(") ", 1)[1] for line in options.split("\n")]
        swaps = list(SWAP.finditer(story))
        self.swaps = [(swap[1], swap[2]) for swap in swaps]
        self.verb = swaps[0][3]
        head, self.end = story[:swaps[0].start()], story[swaps[-1].end():]
        first = head.index(": ") + 2
        last = head.index(".\n", first)
        self.before, listing, self.after = head[:first], head[first:last], head[last:]
        self.holders = [part.split(" ", 1) for part in re.split(r", (?:and )?", listing)]
        self.people = [name for name, _ in self.holders]
        self.person = ASKED.findall(self.end)[-1]

    def write(self, objects, swaps, person):
        """Return the text with these objects, in the order of people and options, and swaps."""
        parts = [f"{name} {rest.replace(old, new)}"
                 for (name, rest), old, new in zip(self.holders, self.options, objects)]
        words = ["First", *["Then"] * (len(swaps) - 2), *["Finally"] * (len(swaps) > 1)]
        told = " ".join(f"{word}, {a} and {b} {self.verb}." for word, (a, b) in zip(words, swaps))
        options = "\n".join(f"({chr(65 + i)}) {name}" for i, name in enumerate(objects))
        return (f"{self.before}{', '.join(parts[:-1])}, and {parts[-1]}{self.after}{told} "
                f"{self.ask(person)}\nOptions:\n{options}")

    def ask(self, person):
        """Return the last sentence, about a person."""
        return ASKED.sub(person, self.end)

    def answer(self, swaps, person):
        """Return the letter of a person's object after the swaps, such as "(C)"."""
        held = dict(zip(self.people, range(len(self.people))))
        for a, b in swaps:
            held[a], held[b] = held[b], held[a]
        return f"({chr(65 + held[person])})"


def draw(rng, frames, length):
    """Draw a story: an item, the objects of one of its kind in a new order, and `length` swaps."""
    item = rng.choice(frames)
    kind = [other for other in frames if other.verb == item.verb]
    objects = rng.sample(rng.choice(kind).options, len(item.people))
    return item, objects, [tuple(rng.sample(item.people, 2)) for _ in range(length)]


def line(question, answer, difficulty):
    """Return a line of a .jsonl file of questions."""
    return {"question": f"{question}\nAnswer:", "answer": answer, "difficulty": str(difficulty)}


def question(rng, frames, length):
    """Draw a story with a question about one person."""
    item, objects, swaps = draw(rng, frames, length)
    person = rng.choice(item.people)
    return line(item.write(objects, swaps, person), item.answer(swaps, person), length)


def chat(rng, frames, length):
    """Draw a story with questions about half of its people, in a new order."""
    item, objects, swaps = draw(rng, frames, length)
    messages = []
    for person in rng.sample(item.people, (len(item.people) + 1) // 2):
        text = item.ask(person) if messages else item.write(objects, swaps, person)
        messages += [{"role": "user", "content": f"{text}\nAnswer:"},
                     {"role": "assistant", "content": item.answer(swaps, person)}]
    return {"messages": messages, "difficulty": str(length)}


def read_items(path):
    """Return the Items of a file, and its lines for test.jsonl, after solving each of them."""
    items, lines = [], []
    for example in read_json(path)["examples"]:
        item = Item(example["input"])
        if (item.write(item.options, item.swaps, item.person) != example["input"]
                or item.answer(item.swaps, item.person) != example["target"]):
            raise UserError(f"{path}: this script cannot solve an item: {example['input']:.80}")
        items.append(item)
        lines.append(line(example["input"], example["target"], len(item.people)))
    return items, lines


def main():
    parser = Parser(__doc__)
    parser.add_argument("files", metavar="FILES")
    parser.add_argument("out", metavar="OUT", type=new_folder)
    args = parser.parse_args()
    frames, test = {}, []
    for word, people in PEOPLE.items():
        path = Path(args.files, f"tracking_shuffled_objects_{word}_objects.json")
        items, lines = read_items(path)
        frames[people] = items[:50]
        test += lines[50:]

    rng = random.Random(0)
    sets = {name: [question(rng, frames[7], length) for length in LENGTHS for _ in range(100)]
            for name in ("dev", "long")}
    sets["test"] = test
    known = {x["question"] for lines in sets.values() for x in lines}
    for name, draw_one, count in ("questions", question, 40_000), ("train", chat, 20_000):
        sets[name] = []
        while len(sets[name]) < count:
            x = draw_one(rng, frames[rng.choice((3, 5, 7))], rng.randint(1, 5))
            first = x["question"] if "question" in x else x["messages"][0]["content"]
            if first not in known:
                sets[name].append(x)
    with write_atomically(args.out) as folder:
        folder.mkdir()
        for name, lines in sets.items():
            with open(folder / f"{name}.jsonl", "w") as file:
                for x in lines:
                    print(json.dumps(x), file=file)


if __name__ == "__main__":
    cli(main)
