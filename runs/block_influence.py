"""
Keep the layers that change the hidden state most on a text, then run surgery.py with them. This is
ShortGPT's choice (arXiv 2403.03853), the baseline of the paper's Figure 12.

    python runs/block_influence.py SRC OUT --shape 4,8,4 --text FILE
    python runs/block_influence.py SRC OUT --shape 8 --text FILE --feed_forward

It prints what it finds, and hands further flags on to surgery.py.
"""
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from common import Parser, UserError, cli, opening, positive
from data import read_text
from surgery import PARTS, build, open_source, shape


@torch.no_grad()
def block_influence(model, idx):
    """
    For each layer of a feed-forward model 1 - the mean cosine of its input and output over all
    tokens of idx (B, T), the last layer's output taken before the final norm.
    """
    influence = torch.zeros(len(model.prelude), dtype=torch.float64)
    rope = model.rope(idx.shape[1])
    for row in idx:
        x = model.embed_idx(row[None])
        for i, block in enumerate(model.prelude):
            y = block(x, rope)
            cosine = F.cosine_similarity(x.double(), y.double(), dim=-1)
            influence[i] += (1 - cosine).mean()
            x = y
    return (influence / len(idx)).tolist()


def most_influential(source, path, window, count):
    """The `count` layers that change the hidden state most on a text, in order."""
    if not source.tokenizer:
        raise UserError(f"{source.folder}: has no tokenizer, which --text needs")
    ids = source.tokenizer.encode(read_text(path)[:1_000_000], bos=True)[:16384]
    if count > source.config.n_prelude:
        raise UserError(f"--shape: {count} layers, but {source.folder} has "
                        f"{source.config.n_prelude}")
    T = min(window, source.config.context, len(ids))
    if not T:
        raise UserError(f"{path}: has no text")
    influence = block_influence(build(source).float(), torch.tensor(ids).unfold(0, T, T))
    print("block influence:", *(f"{value:.6f}" for value in influence), flush=True)
    return sorted(torch.tensor(influence).topk(count).indices.tolist())


def main():
    parser = Parser(description=opening(__doc__, 3))
    flag = parser.add_argument
    flag("src", metavar="SRC", help="an ordinary model: a folder, a run, or a hub id")
    flag("out", metavar="OUT", help="a new folder")
    flag("--shape", type=shape, required=True, help="sizes of the parts, such as 4,8,4, or 8")
    flag("--text", type=Path, required=True, help="a file, of which it reads up to 16,384 tokens")
    flag("--window", type=positive, default=1024,
         help="tokens that the model reads at once (%(default)s)")
    args, flags = parser.parse_known_args()
    layers = most_influential(open_source(args.src), args.text, args.window, sum(args.shape))
    for part, size in zip(PARTS, args.shape):
        flags += [f"--{part}", ",".join(map(str, layers[:size]))]
        layers = layers[size:]
    command = [sys.executable, ROOT / "surgery.py", args.src, args.out, *flags]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    cli(main)
