"""
Muon for the matrices that the caller names, AdamW for everything else, sharded over ranks.

Muon replaces a matrix's momentum with the nearest (semi-)orthogonal matrix, so that the update has
the same size in every direction. Five Newton-Schulz steps approximate that matrix, using only
matrix products. This file needs only torch, so you can copy it into another project:

    matrices = [name for name, p in model.named_parameters() if "blocks" in name and p.dim() == 2]
    opt = Optimizer(model.named_parameters(), matrices, lr=0.02, adam_lr=0.003, weight_decay=0.01)
    loss(model, batch).backward()       # each micro-batch: the sum over its labels
    opt.accumulate()
    opt.step(opt.reduce().item(), labels)       # once per update, on every rank

With several ranks, every rank holds all weights and gradients, but only the owner of a tensor holds
its float32 master weights and its moments. Newton-Schulz needs whole matrices, so a matrix has one
owner. AdamW treats each number separately, so embeddings and head are split by rows over all ranks.
With N ranks, each owns about 1/N of all masters and moments. reduce() sends the summed gradients
to their owners; step() updates the masters there, rounds them to the model's dtype, and broadcasts
them to all ranks.

Sources: Keller Jordan, "Muon: an optimizer for hidden layers" (2024) and its official code; AdamW:
Loshchilov and Hutter (2019); AdamW*: Huginn's variant. Hyperparameters: the code of arXiv
2511.07384. Owners: ZeRO-1 (arXiv 1910.02054).
"""
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

MOMENTUM = 0.95  # Muon's
BETA1 = 0.9      # AdamW's
BETA2 = 0.95
MOMENTS = {  # what each rule keeps besides the master weights
    "muon": ["momentum"],
    "adamw": ["exp_avg", "exp_avg_sq"],
    "adamw*": ["exp_avg", "exp_avg_sq"],
}


def newton_schulz(G, dtype=torch.bfloat16):
    """
    Push all singular values of G (rows, cols) toward 1. The coefficients of the quintic maximize
    its slope at zero. Singular values end up between about 0.7 and 1.2, which is close enough.
    Every product is rounded to bfloat16 and stored in dtype.
    """
    def rounded(x):
        return x.bfloat16().to(dtype)

    a, b, c = 3.4445, -4.7750, 2.0315
    rows, cols = G.shape
    X = (G.T if rows > cols else G).bfloat16()  # so that the Gram matrix X X^T is the small one
    X = rounded(X / (X.norm() + 1e-7))
    for _ in range(5):
        A = rounded(X @ X.T)
        B = rounded(torch.addmm(A, A, A, beta=b, alpha=c))
        X = rounded(torch.addmm(X, B, X, beta=a))  # aX + (bA + cAA)X
    return X.T if rows > cols else X


def muon_(w, g, m, lr, weight_decay, product_dtype):
    """
    Apply one update of the official Muon, in place, to a float32 matrix w (rows, cols) with
    gradient g, which is overwritten, and momentum m.
    """
    w.mul_(1 - lr * weight_decay)
    m.lerp_(g, 1 - MOMENTUM)
    update = newton_schulz(g.lerp_(m, MOMENTUM), product_dtype)  # Nesterov
    rows, cols = w.shape
    w.add_(update, alpha=-lr * max(1, rows / cols) ** 0.5)


def adamw_(w, g, m, v, t, lr, weight_decay, eps):
    """
    Apply AdamW's update number t (the first is 1), in place, to a float32 tensor w with gradient g
    and moments m and v, using torch's fused kernel.
    """
    step = torch.full((), float(t), device=w.device)
    torch._fused_adamw_([w], [g], [m], [v], [], [step], lr=lr, beta1=BETA1, beta2=BETA2, eps=eps,
                        weight_decay=weight_decay, amsgrad=False, maximize=False)


def adamw_star_(w, g, m, v, t, lr, decay):
    """
    Apply update number t (the first is 1) of Huginn's AdamW*, in place, to a float32 tensor w with
    gradient g and moments m and v. It differs from AdamW in four ways: the moments start from the
    first gradient; a tensor whose mean g^2 / v exceeds 1 takes a smaller step; atan2 replaces the
    division, so there is no epsilon; and the weights are multiplied by 1 - decay, where decay
    follows the schedule of the learning rate but not its size.
    """
    if t == 1:
        m.copy_(g)
        v.copy_(g.square())
    m.lerp_(g, 1 - BETA1)
    v.lerp_(g.square(), 1 - BETA2)
    v.clamp_(min=1e-12)
    excess = (g.square() / v).mean().sqrt().clamp(min=1)
    # As in Huginn's code, 1 - BETA1**t and 1 - BETA2**t correct moments that start from zero,
    # although these start from the first gradient.
    step = lr / (1 - BETA1**t) / excess
    w.mul_(1 - decay)
    w.sub_(step * torch.atan2(m, v.sqrt() / math.sqrt(1 - BETA2**t)))


@dataclass
class Piece:
    """
    Rows of a parameter that one rank owns. Every rank has all Pieces, with `weight` and `grad`;
    only the owner has `master` and `moments`. The examples are rank 2's quarter of the embeddings.
    """
    owner: int                          # the rank, e.g. 2 (of 4)
    name: str                           # of the parameter, e.g. "embed.weight" (32000, 2048)
    rule: str                           # "muon", "adamw" or "adamw*"
    rows: slice                         # of the parameter, e.g. slice(16000, 24000)
    splits: list[int]                   # rows of each part updated separately, e.g. [8000]
    weight: torch.Tensor                # those rows, in the model's dtype, (8000, 2048)
    grad: torch.Tensor | None = None    # the sum of their gradients, float32, (8000, 2048)
    master: torch.Tensor | None = None  # the exact weights, float32, (8000, 2048)
    moments: list | None = None         # [exp_avg, exp_avg_sq], float32, (8000, 2048) each

    @property
    def keys(self):
        """The names of its master and its moments in a checkpoint: name, name.exp_avg, ..."""
        return [self.name, *(f"{self.name}.{moment}" for moment in MOMENTS[self.rule])]

    def parts(self):
        """Yield (weights, gradient, *moments) of each part that is updated separately."""
        tensors = self.master, self.grad, *self.moments
        return zip(*(t.split(self.splits) for t in tensors))


class Optimizer:
    """
    Muon and AdamW with float32 master weights, sharded over ranks: see the top of this file.

    named: (name, parameter) pairs, each parameter once. Frozen ones stay as they are.
    matrices: names of the parameters that Muon updates: two-dimensional, and neither embeddings nor
        the head.
    rule: "muon" updates the matrices with Muon at lr, and everything else with AdamW at adam_lr;
        "adamw" and "adamw*" update everything at lr.
    clip: the largest norm of an update's mean gradient, over all parameters together.
    weights: {name: exact weights} to start the masters from; by default, the parameters.
    stacked: {name: [rows of each matrix]} of weights that Muon and AdamW* update matrix by matrix,
        such as {"prelude.0.mlp.fc.weight": [5632, 5632]}.
    product_dtype: of Muon's products, which are rounded to bfloat16 in any case. float32 is faster
        on devices that emulate bfloat16.
    rank, world: with world > 1, all ranks of torch.distributed must make the same calls.

    A float32 parameter is its own master.
    """

    def __init__(self, named, matrices, *, lr, adam_lr, weight_decay, clip=math.inf, rule="muon",
                 weights=None, stacked=None, product_dtype=torch.bfloat16, rank=0, world=1):
        # Largest first, so that make_pieces() can give all ranks similar shares.
        trained = [(name, p) for name, p in named if p.requires_grad]
        self.params = dict(sorted(trained, key=lambda item: -item[1].numel()))
        self.lr = lr
        self.adam_lr = adam_lr if rule == "muon" else lr
        self.eps = 1e-10 if rule == "muon" else 1e-8  # as in the paper's runs
        self.weight_decay = weight_decay
        self.clip = clip
        self.product_dtype = product_dtype
        self.rank = rank
        self.world = world
        self.updates = 0
        self.pieces, owned = self.make_pieces(matrices, rule, stacked or {})
        self.own = [piece for piece in self.pieces if piece.owner == rank]

        # All summed gradients are in one tensor, sorted by owner, so that an update sends each rank
        # its slice in one message.
        sizes = [piece.weight.numel() for piece in self.pieces]
        device = self.pieces[0].weight.device
        self.sums = torch.zeros(sum(sizes), device=device)
        self.slices = self.sums.split(owned)  # one for each rank
        for piece, grad in zip(self.pieces, self.sums.split(sizes)):
            piece.grad = grad.view_as(piece.weight)

        for piece in self.own:
            piece.master = piece.weight
            if piece.weight.dtype != torch.float32:
                exact = weights[piece.name][piece.rows] if weights else piece.weight
                piece.master = exact.to(device, torch.float32)
            piece.moments = [torch.zeros_like(piece.master) for _ in MOMENTS[piece.rule]]

    def make_pieces(self, matrices, rule, stacked):
        """
        Split the parameters into Pieces, sorted by owner (see the top), and count the numbers that
        each rank owns. A parameter that is not split goes to the rank that owns the fewest so far.
        """
        for name in self.params.keys() & set(matrices):
            assert self.params[name].dim() == 2, f"{name}: not a matrix"
        pieces = []
        owned = [0] * self.world  # by each rank
        for name, p in self.params.items():
            matrix = name in matrices
            adamw = rule == "adamw" or rule == "muon" and not matrix
            owners = [owned.index(min(owned))]
            # Embeddings and head. (AdamW*'s step needs the mean over a whole tensor.)
            if adamw and p.dim() == 2 and not matrix:
                owners = range(self.world)
            for i, owner in enumerate(owners):
                rows = slice(i * len(p) // len(owners), (i + 1) * len(p) // len(owners))
                weight = p.detach()[rows]
                splits = [len(weight)] if adamw else stacked.get(name, [len(weight)])
                pieces.append(Piece(owner, name, "adamw" if adamw else rule, rows, splits, weight))
                owned[owner] += weight.numel()
        return sorted(pieces, key=lambda piece: piece.owner), owned

    def masters_and_moments(self):
        """{name or name.moment: float32 tensor} of the rows that this rank owns."""
        return {key: t for piece in self.own
                for key, t in zip(piece.keys, (piece.master, *piece.moments))}

    def flops(self):
        """FLOPs of Newton-Schulz in one update, over all ranks; AdamW's are negligible."""
        total = 0
        for piece in self.pieces:
            if piece.rule == "muon":
                for rows in piece.splits:
                    small, large = sorted((rows, piece.weight.shape[1]))
                    total += 5 * (4 * small**2 * large + 2 * small**3)  # five steps
        return total

    @torch.no_grad()
    def accumulate(self):
        """Add all gradients to their float32 sums, and free them. Call it after each backward()."""
        for piece in self.pieces:
            grad = self.params[piece.name].grad
            if grad is not None:
                piece.grad.add_(grad[piece.rows])
        for p in self.params.values():
            p.grad = None

    @torch.no_grad()
    def reduce(self):
        """
        Send each rank the sum, over all ranks, of the gradients that it owns. Call it once per
        update. Returns the norm of the whole summed gradient, a float64 scalar that stays on the
        device, so that the caller decides when to wait for it.
        """
        if self.world > 1:
            for owner, gradients in enumerate(self.slices):
                dist.reduce(gradients, owner)
        total = torch.zeros((), dtype=torch.float64, device=self.sums.device)
        for piece in self.own:
            # Row by row, because one float32 sum over 65M weights is off by 1% (on a CPU).
            norms = torch.linalg.vector_norm(piece.grad, dim=-1)
            total += norms.double().square().sum()
        if self.world > 1:
            dist.all_reduce(total)
        return total.sqrt()

    @torch.no_grad()
    def step(self, sum_norm, labels=1, lr_factor=1.0):
        """
        Apply one update, then zero the summed gradients. The update uses the mean gradient over
        `labels` labels, clipped, at lr_factor times the learning rates. sum_norm: what reduce()
        returned, as a Python number. Returns the norm of the mean gradient. If that is not finite,
        the update is skipped.
        """
        norm = sum_norm / labels
        if not math.isfinite(norm):
            self.sums.zero_()
            return norm
        self.updates += 1
        clipping = min(1.0, self.clip / (norm + 1e-6))  # as in torch's clip_grad_norm_
        self.slices[self.rank].mul_(clipping / labels)
        lr, adam_lr = self.lr * lr_factor, self.adam_lr * lr_factor
        for piece in self.own:
            for tensors in piece.parts():
                if piece.rule == "muon":
                    muon_(*tensors, lr, self.weight_decay, self.product_dtype)
                elif piece.rule == "adamw*":
                    adamw_star_(*tensors, self.updates, lr, self.weight_decay * lr_factor)
                else:
                    adamw_(*tensors, self.updates, adam_lr, self.weight_decay, self.eps)
            piece.weight.copy_(piece.master)
        if self.world > 1:
            for owner in sorted({piece.owner for piece in self.pieces}):
                weights = [piece.weight for piece in self.pieces if piece.owner == owner]
                # In one message, or in several of 256 MB.
                dist._broadcast_coalesced(dist.group.WORLD, weights, 2**28, owner)
        self.sums.zero_()
        return norm

    # A checkpoint holds whole tensors by name, so a run can resume on any number of ranks.

    @torch.no_grad()
    def gather(self):
        """
        Collect all masters and moments on rank 0. Returns {name or name.moment: whole tensor}
        there, and {} on other ranks. With several ranks the result is on the CPU, and rank 0's
        device holds one piece of another rank at a time.
        """
        mine = self.masters_and_moments()
        if self.world == 1:
            return mine
        if self.rank > 0:
            for piece in self.own:
                for key in piece.keys:
                    dist.send(mine[key], 0)
            return {}
        whole = {}
        for piece in self.pieces:
            for key in piece.keys:
                rows = mine[key] if piece.owner == 0 else torch.empty_like(piece.grad)
                if piece.owner > 0:
                    dist.recv(rows, piece.owner)
                if key not in whole:
                    whole[key] = torch.empty(self.params[piece.name].shape)
                whole[key][piece.rows] = rows
        return whole

    def load(self, moments, updates):
        """
        Resume after `updates` updates. moments: whole saved tensors {name.moment: tensor}. Raises
        KeyError if one is missing.
        """
        for piece in self.own:
            for key, moment in zip(piece.keys[1:], piece.moments):
                moment.copy_(moments[key][piece.rows])
        self.updates = updates
