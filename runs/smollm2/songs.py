"""
Real melodies as a task of your own, for runs/task.sh: which note has a folk song reached?

    python -m runs.smollm2.songs --out out/songs

A story tells part of a song by its intervals: {"events": ["The song begins on G.", " Up a third.",
" Down a second."], "answers": [" G", " B", " A"]}. It leaves out sharps, flats and octaves. The
8,514 songs are the Essen collection, which comes with the PyPI package music21. train.jsonl has
40,000 stories of 1 to 5 events. test.jsonl has 200 questions of each of the LENGTHS, which ask for
the last note. Every tenth song is only for the test, and no training story begins with a question.
"""
import itertools
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from common import Parser, UserError, cli, creating, new_folder

import numpy as np

from runs.stories import write_lines

PACKAGE = "music21-10.5.1-py3-none-any.whl"
LENGTHS = 4, 5, 6, 7, 8, 10, 12, 16
NOTES = "CDEFGAB"
INTERVALS = "a second,a third,a fourth,a fifth,a sixth,a seventh,an octave".split(",")


def height(note, octaves):
    """Return the height of a note in ABC notation, such as ("c", "'"), in steps above middle C."""
    octave = note.islower() + octaves.count("'") - octaves.count(",")
    return NOTES.index(note.upper()) + 7 * octave


def read_songs():
    """Download the songs. Returns the heights of each one's notes, [[int]]."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "music21==10.5.1"]
    if not Path(PACKAGE).exists() and subprocess.run(pip).returncode:
        raise UserError(f"{PACKAGE}: pip could not download it")
    songs = []
    with zipfile.ZipFile(PACKAGE) as package:
        for name in sorted(package.namelist()):
            if re.fullmatch(r"music21/corpus/essenFolksong/.*\.abc", name):
                for song in re.split("^X:", package.read(name).decode(), flags=re.M)[1:]:
                    body = re.sub("^.*:.*$", "", song, flags=re.M)  # without title, key and so on
                    body = re.sub(r"-[|\s]*[_=^]?[A-Ga-g][,']*", "", body)  # tied, so no new note
                    songs.append([height(*note) for note in re.findall("([A-Ga-g])([,']*)", body)])
    return songs


def tell(melody):
    """Return the events of a melody and the note after each of them, as text."""
    events = [f"The song begins on {NOTES[melody[0] % 7]}."]
    for steps in np.diff(melody):
        way = "Up" if steps > 0 else "Down"
        events.append(f" {way} {INTERVALS[abs(steps) - 1]}." if steps else " The same note.")
    return events, [f" {NOTES[height % 7]}" for height in melody]


def main():
    parser = Parser(__doc__)
    parser.add_argument("--out", type=new_folder, required=True, metavar="FOLDER")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    songs = read_songs()
    known = set()
    files = {}
    for name, lengths in ("train", rng.integers(1, 6, 40_000)), ("test", LENGTHS * 200):
        lines = files[name] = []
        while len(lines) < len(lengths):
            number, length = int(rng.integers(len(songs))), int(lengths[len(lines)])
            if (number % 10 == 0) != (name == "test") or len(songs[number]) < length:
                continue
            start = rng.integers(len(songs[number]) - length + 1)
            melody = songs[number][start:start + length]
            if any(abs(np.diff(melody)) > 7):
                continue
            events, answers = tell(melody)
            if name == "train":
                known.update(itertools.accumulate(events))
                lines.append({"events": events, "answers": answers})
            elif "".join(events) not in known:
                known.add("".join(events))
                lines.append({"question": "".join(events), "answer": answers[-1].strip(),
                              "difficulty": str(length)})
    with creating(args.out):
        for name, lines in files.items():
            write_lines(args.out / f"{name}.jsonl", lines)


if __name__ == "__main__":
    cli(main)
