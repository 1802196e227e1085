"""
Real melodies as a task of your own, for runs/task.sh: from its intervals alone, which note has a
folk song reached?

    python -m runs.smollm2.songs --out out/songs

The songs are the Essen collection's, 8,514 from many countries, in the PyPI package music21, which
is downloaded. A story is a part of one: {"events": ["The song begins on G.", " Up a third.",
" Down a second."], "answers": [" G", " B", " A"]}. Sharps and flats are left out, octaves are not
named. train.jsonl has 40,000 stories of 1 to 5 events; test.jsonl asks for the last note of 200 of
each of the LENGTHS, from other songs: every tenth. None of them is in train.jsonl.
"""
import itertools
import json
import re
import subprocess
import sys
import zipfile

import numpy as np

from common import Parser, cli, paths, write_atomically

PACKAGE = "music21-10.5.1-py3-none-any.whl"
LENGTHS = 4, 5, 6, 7, 8, 10, 12, 16
NOTES = "CDEFGAB"
INTERVALS = "second third fourth fifth sixth seventh octave".split()


def songs():
    """Return the melodies: [[height of each note, in steps above middle C]], as in ABC notation."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "music21==10.5.1"]
    subprocess.run(pip, check=True)
    found = []
    with zipfile.ZipFile(PACKAGE) as package:
        for name in sorted(package.namelist()):
            if re.fullmatch(r"music21/corpus/essenFolksong/.*\.abc", name):
                for song in re.split(r"^X:", package.read(name).decode(), flags=re.M)[1:]:
                    body = re.sub(r"^.*:.*$", "", song, flags=re.M)
                    body = re.sub(r"-[|\s]*[_=^]?[A-Ga-g][,']*", "", body)  # tied: no new note
                    found.append([
                        NOTES.index(note.upper()) + 7 * (
                            note.islower() + octaves.count("'") - octaves.count(","))
                        for note, octaves in re.findall(r"([A-Ga-g])([,']*)", body)])
    return found


def sing(melody):
    """Return the events of a melody and the note after each of them, as text; None for a leap."""
    events, answers = [f"The song begins on {NOTES[melody[0] % 7]}."], []
    for before, after in itertools.pairwise(melody):
        steps = abs(after - before)
        if steps > 7:
            return None
        article = "an" if steps == 7 else "a"
        way = "Up" if after > before else "Down"
        events.append(f" {way} {article} {INTERVALS[steps - 1]}." if steps else " The same note.")
    return events, [f" {NOTES[height % 7]}" for height in melody]


def main():
    parser = Parser(__doc__)
    parser.add_argument("--out", type=paths, required=True, metavar="FOLDER")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    found = songs()
    with write_atomically(args.out) as folder:
        folder.mkdir()
        known = set()
        train = rng.integers(1, 6, 40_000)
        for name, lengths in ("train", train), ("test", LENGTHS * 200):
            lines = []
            while len(lines) < len(lengths):
                song = int(rng.integers(len(found)))
                length = int(lengths[len(lines)])
                if (song % 10 == 0) != (name == "test") or len(found[song]) < length:
                    continue
                start = int(rng.integers(len(found[song]) - length + 1))
                told = sing(found[song][start:start + length])
                if not told:
                    continue
                events, answers = told
                if name == "train":
                    known.update(itertools.accumulate(events))
                    lines.append({"events": events, "answers": answers})
                elif "".join(events) not in known:
                    known.add("".join(events))
                    lines.append({"question": "".join(events), "answer": answers[-1].strip(),
                                  "difficulty": str(length)})
            with open(folder / f"{name}.jsonl", "w") as file:
                for line in lines:
                    print(json.dumps(line), file=file)


if __name__ == "__main__":
    cli(main)
