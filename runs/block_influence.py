"""
Keep the layers that change the hidden state most on a text, then run surgery.py with them. This is
ShortGPT's choice (arXiv 2403.03853), the baseline of the paper's Figure 12.

    python runs/block_influence.py SRC OUT --shape 4,8,4 --text FILE
    python runs/block_influence.py SRC OUT --shape 8 --text FILE --feed_forward

It prints the influence of each layer. Further flags go to surgery.py.
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

TOKENS = 16_384  # at most this many tokens of the text are read


@torch.no_grad()
def block_influence(model, idx):
    """
    For each layer of an ordinary model, compute 1 minus the mean cosine between its input and its
    output over all tokens of idx (B, T). The last layer's output is taken before the final norm.
    Returns a list of numbers.
    """
    influence = torch.zeros(len(model.prelude), dtype=torch.float64)
    rope = model.rope(idx.shape[1])
    for row in idx:
        x = model.embed_idx(row[None])
        for i, block in enumerate(model.prelude):
            y = block(x, rope)
            cosine = F.cosine_similarity(x.double(), y.double(), dim=-1)  # (1, T)
            change = 1 - cosine
            influence[i] += change.mean()
            x = y
    return (influence / len(idx)).tolist()


def most_influential(source, path, window, count):
    """
    Return the numbers of the `count` layers of a Source that change the hidden state most on the
    text of the file `path`, in the order of the model. window: how many tokens the model reads at
    once. Raises UserError if there is no tokenizer, no text, or fewer layers.
    """
    if not source.tokenizer:
        raise UserError(f"{source.folder} has no tokenizer, which --text needs")
    text = read_text(path)[:1_000_000]  # more than the tokens that are used
    ids = source.tokenizer.encode(text, bos=True)[:TOKENS]
    if count > source.config.n_prelude:
        raise UserError(f"--shape has {count} layers, but {source.folder} has only "
                        f"{source.config.n_prelude}")
    T = min(window, source.config.context, len(ids))
    if T == 0:
        raise UserError(f"{path} has no text")
    idx = torch.tensor(ids).unfold(0, T, T)  # (B, T), without the last tokens if they are fewer
    model = build(source).float()
    influence = block_influence(model, idx)
    print("block influence:", *(f"{value:.6f}" for value in influence), flush=True)
    most = torch.tensor(influence).topk(count)
    return sorted(most.indices.tolist())


def main():
    parser = Parser(description=opening(__doc__, 3))
    flag = parser.add_argument
    flag("src", metavar="SRC", help="an ordinary model: a folder, a run, or a hub id")
    flag("out", metavar="OUT", help="a new folder")
    flag("--shape", type=shape, required=True,
         help="sizes of prelude, core and coda, such as 4,8,4; or 8 with --feed_forward")
    flag("--text", type=Path, required=True,
         help=f"a text file; at most its first {TOKENS:,} tokens are read")
    flag("--window", type=positive, default=1024,
         help="tokens that the model reads at once (%(default)s)")
    args, flags = parser.parse_known_args()
    source = open_source(args.src)
    layers = most_influential(source, args.text, args.window, sum(args.shape))
    for part, size in zip(PARTS, args.shape):
        chosen = layers[:size]
        layers = layers[size:]
        numbers = ",".join(map(str, chosen))
        flags += [f"--{part}", numbers]
    command = [sys.executable, ROOT / "surgery.py", args.src, args.out, *flags]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    cli(main)
