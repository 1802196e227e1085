"""
Measure how much each layer changes the hidden state on a text, and run surgery.py with the layers
that change it most. This is ShortGPT's choice (arXiv 2403.03853), the baseline of the paper's
Figure 12. Further flags go to surgery.py.

    python -m tools.block_influence SRC OUT --shape 4,8,4 --text FILE
    python -m tools.block_influence SRC OUT --shape 8,0,0 --text FILE --feed_forward
"""
import sys
from pathlib import Path

from common import Parser, UserError, cli, new_folder, paths, reading

import torch
import torch.nn.functional as F

import surgery
from data import Tokenizer

TOKENS = 16_384  # at most this many tokens of the text are read
WINDOW = 1024  # tokens that the model reads at once


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
        x = model.embed(row[None]).float() * model.config.embed_scale
        for i, block in enumerate(model.prelude):
            y = block(x, rope)
            cosine = F.cosine_similarity(x.double(), y.double(), dim=-1)  # (1, T)
            influence[i] += (1 - cosine).mean()
            x = y
    return (influence / len(idx)).tolist()


def most_influential(model, path, count):
    """
    Print the influence of each layer of an ordinary model on the text of the file `path`. Returns
    the numbers of the `count` layers that have the most, in the order of the model.
    """
    with reading(path):
        text = Path(path).read_text("utf-8-sig")[:1_000_000]  # more than the tokens that are used
    ids = Tokenizer.load(model.folder).encode(text, bos=True)[:TOKENS]
    T = min(WINDOW, model.config.context, len(ids))
    idx = torch.tensor(ids).unfold(0, T, T)  # (B, T), without the last tokens if they are fewer
    influence = block_influence(model.float(), idx)
    kept = sorted(torch.tensor(influence).topk(count).indices.tolist())
    print("layer  influence")
    for layer, value in enumerate(influence):
        print(f"{layer:5}  {value:.6f}", "kept" if layer in kept else "", flush=True)
    return kept


def main():
    parser = Parser(__doc__)
    flag = parser.add_argument
    flag("src", metavar="SRC", help="an ordinary model: a folder, a run, or a hub id")
    flag("out", metavar="OUT", type=new_folder, help="a new folder")
    flag("--shape", type=surgery.shape, required=True,
         help="sizes of prelude, core and coda, such as 4,8,4; or 8,0,0 with --feed_forward")
    flag("--text", type=paths, required=True, metavar="FILE",
         help=f"a text file; at most its first {TOKENS:,} tokens are read")
    args, flags = parser.parse_known_args()
    model = surgery.open_source(args.src)
    if model.config.n_core or sum(args.shape) > len(model.prelude):
        raise UserError(f"{args.src}: not an ordinary model of at least {sum(args.shape)} layers")
    layers = most_influential(model, args.text, sum(args.shape))
    for part, size in zip(surgery.PARTS, args.shape):
        numbers = ",".join(map(str, layers[:size]))
        flags += [f"--{part}", numbers]
        layers = layers[size:]
    sys.argv = ["surgery.py", args.src, str(args.out), *flags]
    surgery.main()


if __name__ == "__main__":
    cli(main)
