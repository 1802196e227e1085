"""
Score a model at several r, without generating anything: the loss per token of each answer, and how
far the state still moves.

    python -m runs.smollm2.score --model out/smollm2/loop --data out/smollm2/test.jsonl --out FILE

Each line of the data is a question with its answer, whose tokens are scored as train.py does after
`data.py prepare --prompt question --field answer`, or a story of counts.py, in which the answer to
each event is scored. The move of recurrence i is the norm of s_i - s_(i-1) divided by the norm of
s_i, averaged over all tokens of the first 16 lines.
"""
import json
from argparse import Namespace

import numpy as np
import torch
import torch.nn.functional as F

from common import Parser, cli, opening, recurrences, write_json
from data import Tokenizer, document
from model import IGNORE, RecurrentLM
from runs.smollm2.counts import encode_story

MOVES = 64  # recurrences over which the state is tracked


def read_documents(path, tokenizer):
    """Return the lines of a file of questions or of stories as arrays (2, T): ids and targets."""
    how = Namespace(field="answer", prompt="question", strip_roles=False)
    documents = []
    for line in open(path):
        record = json.loads(line)
        if "events" in record:
            tokens = np.array(encode_story(tokenizer, record["events"], record["answers"]))
        else:
            tokens = document(tokenizer, record, how)
        documents.append(tokens)
    return documents


@torch.no_grad()
def score_answers(model, documents, steps):
    """
    Return {r: [sum of the losses of each document's labels]}, and {r: [[1 for each label that is
    the most likely token, 0 for the others], ...]}.
    """
    losses = {r: [] for r in steps}
    right = {r: [] for r in steps}
    for tokens in documents:
        idx, targets = torch.from_numpy(tokens).long()
        state = model.initial_state(1, len(idx), 0) if model.core else None
        for r, s in model.trajectory(idx[None], steps, state):
            logits = model.finish(s)[0]
            scores = F.cross_entropy(logits, targets, reduction="none")
            hits = logits.argmax(-1) == targets
            losses[r].append(scores.double().sum().item())
            right[r].append(hits[targets != IGNORE].int().tolist())
    return losses, right


@torch.no_grad()
def state_moves(model, documents):
    """Return the mean relative move of the state in each of MOVES recurrences."""
    moves = torch.zeros(MOVES, dtype=torch.float64)
    tokens_seen = 0
    for tokens in documents:
        idx = torch.from_numpy(tokens[:1]).long()
        last = model.initial_state(1, idx.shape[1], 0)
        for r, s in model.trajectory(idx, range(1, MOVES + 1), last):
            move = (s - last).norm(dim=-1) / s.norm(dim=-1)
            moves[r - 1] += move.sum()
            last = s
        tokens_seen += idx.numel()
    return (moves / tokens_seen).tolist()


def main():
    parser = Parser(description=opening(__doc__))
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--data", required=True, metavar="FILE")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--steps", type=recurrences, default="1,2,4,8,16,64")
    args = parser.parse_args()
    model = RecurrentLM.load(args.model, dtype=torch.bfloat16)
    tokenizer = Tokenizer.load(model.folder)
    documents = read_documents(args.data, tokenizer)
    steps = args.steps if model.core else [0]
    losses, right = score_answers(model, documents, steps)
    labels = [int((targets != IGNORE).sum()) for _, targets in documents]
    found = {"model": args.model, "labels": labels, "losses": losses}
    for r in steps:
        print(f"r = {r}: {sum(losses[r]) / sum(labels):.4f} nats per token")
    if len(set(labels)) == 1:  # stories, all of 12 events
        found["right"] = {r: np.mean(right[r], axis=0).tolist() for r in steps}
        for r in steps:
            print(f"r = {r}: right after each event:", *(f"{x:.0%}" for x in found["right"][r]))
    moves = state_moves(model, documents[:16]) if model.core else None
    write_json(args.out, found | {"moves": moves})


if __name__ == "__main__":
    cli(main)
