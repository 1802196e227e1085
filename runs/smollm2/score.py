"""
Score a model on a text over r, without generating anything: the loss per token of each answer, and
how far the state still moves.

    python runs/smollm2/score.py --model out/smollm2/loop --data out/smollm2/test.jsonl --out FILE

For each question it takes the loss (NLL) of the answer's tokens after the question, as train.py
does with `data.py prepare --prompt question --field answer`. The move of recurrence i is the norm
of s_i - s_(i-1) divided by the norm of s_i, a mean over all tokens of the first 16 questions.
"""
import json
import sys
from argparse import Namespace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import Parser, cli, opening, recurrences, write_json
from data import Tokenizer, document
from model import IGNORE, RecurrentLM

MOVES = 64  # recurrences over which the state is followed


@torch.no_grad()
def answer_losses(model, documents, steps):
    """Return {r: [sum of the losses of each document's labels]}."""
    losses = {r: [] for r in steps}
    for tokens in documents:
        idx, targets = torch.from_numpy(tokens).long()[:, None]
        rope = model.rope(idx.shape[1])
        state = model.initial_state(1, idx.shape[1], 0) if model.core else None
        for r, s in model.trajectory(idx, steps, state, rope):
            x = model.run_coda(s, rope).flatten(0, 1)
            scores, _ = model.token_scores(x, targets.flatten())
            losses[r].append(scores.double().sum().item())
    return losses


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
    how = Namespace(field="answer", prompt="question", loss="all", strip_roles=False)
    records = [json.loads(line) for line in open(args.data)]
    documents = [document(tokenizer, record, how) for record in records]
    steps = args.steps if model.core else [0]
    losses = answer_losses(model, documents, steps)
    labels = [int((targets != IGNORE).sum()) for _, targets in documents]
    for r in steps:
        print(f"r = {r}: {sum(losses[r]) / sum(labels):.4f} nats per token")
    moves = state_moves(model, documents[:16]) if model.core else None
    write_json(args.out, {"model": args.model, "labels": labels, "losses": losses, "moves": moves})


if __name__ == "__main__":
    cli(main)
