"""
Muon for the matrices of the blocks and the adapter, AdamW for everything else, shared over ranks.

Muon replaces the momentum of a matrix by the nearest (semi-)orthogonal matrix, so that every
direction of the update has the same size. Five Newton-Schulz steps, which are matrix products only,
come close to it.

    opt = Optimizer(model.named_parameters(), lr=0.001, adam_lr=5e-5, weight_decay=1e-4, clip=1.0)
    loss.backward()                       # each micro-batch; loss is the sum over its labels
    opt.accumulate()
    total = opt.reduce().item()           # once an update, on every rank
    norm = opt.step(total, labels)        # labels: of all micro-batches of all ranks

What each rank holds, sends and receives in an update. Take 4 ranks, a matrix (2048, 5632) that Muon
updates, and embeddings (32000, 2048) that AdamW updates:

- Every rank holds all weights and their gradients in the model's dtype, and a float32 sum of the
  gradients of its micro-batches.
- Newton-Schulz needs whole matrices, so one rank owns the matrix. Only this rank holds its float32
  master weights and its momentum, 46 MB each.
- AdamW treats each number by itself, so the ranks share the embeddings: each one owns 8,000 rows,
  with master weights and two moments of 66 MB each. With N ranks, a rank owns about 1/N of all
  masters and moments.
- reduce() sends each sum of gradients to its owner (46 MB from each rank for the matrix). step()
  updates the masters there, rounds them to the model's dtype, and broadcasts them to all ranks (23
  MB in bfloat16).

Sources: Keller Jordan, "Muon: an optimizer for hidden layers" (2024) and its official code; AdamW:
Loshchilov and Hutter (2019); AdamW*: Huginn's variant. Hyperparameters: arXiv 2511.07384,
appendix D. Owners: ZeRO-1 (arXiv 1910.02054).
"""
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

MOMENTUM, BETA1, BETA2 = 0.95, 0.9, 0.95
BUFFERS = {  # each rule's moments
    "muon": ["momentum"],
    "adamw": ["exp_avg", "exp_avg_sq"],
    "adamw*": ["exp_avg", "exp_avg_sq"],
}


def newton_schulz(G):
    """
    Push the singular values of G (rows, cols) to about 1, in bfloat16. The quintic's coefficients
    maximise the slope at zero: values end in roughly [0.7, 1.2], which is enough.

    On a CPU the products are float32's, of the same bfloat16 numbers and rounded as often: many
    CPUs have no bfloat16, and torch's products there take three times as long (runs/README.md).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = G.size(0) > G.size(1)
    X = (G.mT if tall else G).bfloat16()  # so that the Gram matrix X X^T is the small one
    X = X / (X.norm() + 1e-7)

    def rounded(x):
        return x.bfloat16() if G.is_cuda else x.bfloat16().float()

    X = rounded(X)
    for _ in range(5):
        A = rounded(X @ X.mT)
        B = rounded(torch.addmm(A, A, A, beta=b, alpha=c))
        X = rounded(torch.addmm(X, B, X, beta=a))  # aX + (bA + cAA)X
    return X.mT if tall else X


def muon_(w, g, m, lr, weight_decay):
    """
    One update of the official Muon, in place. Weights w, gradient g and momentum m are float32
    matrices (rows, cols). g is overwritten.
    """
    rows, cols = w.shape
    m.lerp_(g, 1 - MOMENTUM)
    update = newton_schulz(g.lerp_(m, MOMENTUM))  # Nesterov
    w.mul_(1 - lr * weight_decay)
    shape = max(1, rows / cols) ** 0.5
    w.add_(update, alpha=-lr * shape)


def adamw_(weights, grads, m, v, t, lr, weight_decay, eps):
    """
    Update number t, from 1, of AdamW, in place, by torch's fused kernel. weights, grads and the
    moments m and v are lists of float32 tensors.
    """
    t = torch.full((), float(t), device=weights[0].device)
    torch._fused_adamw_(
        weights, grads, m, v, [], [t] * len(weights),
        lr=lr, beta1=BETA1, beta2=BETA2, eps=eps,
        weight_decay=weight_decay,
        amsgrad=False,
        maximize=False)


def adamw_star_(w, g, m, v, t, lr, decay):
    """
    Update number t, from 1, of Huginn's AdamW*, in place, for one float32 tensor. It differs from
    AdamW in four ways: the moments start from the first gradient; a tensor whose mean g^2 / v
    exceeds 1 takes a smaller step; atan2 needs no epsilon; and the weights shrink by 1 - decay,
    where decay follows the shape of the schedule but not the size of the learning rate.
    """
    if t == 1:
        m.copy_(g)
        v.copy_(g.square())
    m.lerp_(g, 1 - BETA1)
    v.lerp_(g.square(), 1 - BETA2).clamp_(min=1e-12)
    excess = (g.square() / v).mean().sqrt()
    excess = excess.clamp(min=1)
    step = lr / (1 - BETA1**t) / excess
    w.mul_(1 - decay)
    size = v.sqrt() / math.sqrt(1 - BETA2**t)
    w.sub_(step * torch.atan2(m, size))


def stacked_rows(model):
    """
    {name: [rows of each part]} of the matrices of an ordinary model that stack q, k and v, or gate
    and up. In the paper's static baselines, which are Hugging Face models, these are separate
    matrices, so Muon and AdamW* update each by itself. Its recurrent models stack them.
    """
    rows = {}
    for i, block in enumerate(model.prelude):
        rows[f"prelude.{i}.attn.qkv.weight"] = block.attn.split
        rows[f"prelude.{i}.mlp.fc.weight"] = [model.config.n_ffn] * 2
    return rows


def clip_factor(norm, clip):
    """The factor that scales a gradient of this norm down to `clip`, as torch's clip_grad_norm_."""
    return min(1.0, clip / (norm + 1e-6))


@dataclass
class Piece:
    """
    Rows of a parameter that one rank owns. Every rank has all Pieces, with `weight` and `grad`. The
    owner alone has `master` and `moments`.
    """
    owner: int                          # the rank, such as 2 of 4
    name: str                           # of the parameter, "embed.weight" (32000, 2048)
    rule: str                           # "muon", "adamw" or "adamw*"
    rows: slice                         # of the parameter, slice(16000, 24000)
    parts: list[int]                    # rows of each matrix that is updated by itself, [8000]
    weight: torch.Tensor                # those rows, in the model's dtype, (8000, 2048)
    grad: torch.Tensor | None = None    # the sum of their gradients, float32, (8000, 2048)
    master: torch.Tensor | None = None  # the exact weights, float32, (8000, 2048)
    # float32, such as {"embed.weight.exp_avg": (8000, 2048), "embed.weight.exp_avg_sq": ...}
    moments: dict[str, torch.Tensor] = field(default_factory=dict)

    def matrices(self):
        """Tuples (weights, gradient, *moments) for each part."""
        tensors = self.master, self.grad, *self.moments.values()
        return zip(*(t.split(self.parts) for t in tensors))

    @property
    def keys(self):
        """The names, in a checkpoint, of its moments."""
        return [f"{self.name}.{moment}" for moment in BUFFERS[self.rule]]


class Optimizer:
    """
    named: (name, parameter) pairs, each parameter once. rule: "muon" updates matrices of blocks and
    adapter by Muon at lr, and the rest by AdamW at adam_lr; "adamw" and "adamw*" update everything
    at lr. clip: the largest norm of a gradient.

    weights: {name: exact weights} for the masters to begin with, by default the parameters.
    stacked: {name: [rows of each part]} of matrices that Muon and AdamW* update part by part. With
    world > 1 all ranks of torch.distributed make the same calls. A float32 parameter is its own
    master.
    """

    def __init__(
            self, named, *, lr, adam_lr, weight_decay, clip=math.inf, rule="muon", weights=None,
            stacked=None, rank=0, world=1):
        self.params = dict(sorted(named, key=lambda item: item[1].numel()))
        self.lr = lr
        self.adam_lr = adam_lr if rule == "muon" else lr
        self.eps = 1e-10 if rule == "muon" else 1e-8
        self.weight_decay = weight_decay
        self.clip = clip
        self.rank = rank
        self.world = world
        self.updates = 0
        self.pieces = self.make_pieces(rule, stacked or {})
        self.own = [piece for piece in self.pieces if piece.owner == rank]

        # All sums of gradients lie in one tensor, one rank's after another's, so that an update
        # sends each rank its share in one message.
        sizes = [piece.weight.numel() for piece in self.pieces]
        device = self.pieces[0].weight.device
        self.sums = torch.zeros(sum(sizes), device=device)
        for piece, grad in zip(self.pieces, self.sums.split(sizes)):
            piece.grad = grad.view_as(piece.weight)
        owned = [0] * world
        for piece in self.pieces:
            owned[piece.owner] += piece.weight.numel()
        self.shares = self.sums.split(owned)

        for piece in self.own:
            piece.master = piece.weight
            if piece.master.dtype != torch.float32:
                exact = (weights or self.params)[piece.name].detach()[piece.rows]
                piece.master = exact.to(device, torch.float32)
            piece.moments = {key: torch.zeros_like(piece.master) for key in piece.keys}

    def make_pieces(self, rule, stacked):
        """
        Returns all Pieces, sorted by the rank that owns them. A parameter that AdamW updates is
        split by rows over all ranks. Any other parameter goes as a whole to the rank that owns the
        least so far.
        """
        rules = {}
        owners = {}
        loads = [0] * self.world
        for name, p in reversed(self.params.items()):
            matrix = p.dim() == 2 and not name.startswith(("embed.", "head."))
            rules[name] = "adamw" if rule == "muon" and not matrix else rule
            if rules[name] != "adamw":
                owners[name] = loads.index(min(loads))
                loads[owners[name]] += p.numel()
        pieces = []
        for rank in range(self.world):
            for name, p in self.params.items():
                if rules[name] == "adamw":
                    rows = slice(rank * len(p) // self.world, (rank + 1) * len(p) // self.world)
                    parts = [rows.stop - rows.start]
                elif owners[name] == rank:
                    rows = slice(0, len(p))
                    parts = stacked.get(name, [len(p)])
                else:
                    continue
                pieces.append(Piece(rank, name, rules[name], rows, parts, p.detach()[rows]))
        return pieces

    @property
    def masters(self):
        """{name: float32 weights} of the rows that this rank owns."""
        return {piece.name: piece.master for piece in self.own}

    @property
    def moments(self):
        """{name.moment: tensor} of the rows that this rank owns."""
        return {key: t for piece in self.own for key, t in piece.moments.items()}

    @torch.no_grad()
    def accumulate(self):
        """Add the parameters' gradients to their float32 sums. Call it after each backward()."""
        for piece in self.pieces:
            grad = self.params[piece.name].grad
            if grad is not None:
                piece.grad.add_(grad[piece.rows])
        for p in self.params.values():
            p.grad = None

    @torch.no_grad()
    def reduce(self):
        """
        Send each rank the sum, over all ranks, of the gradients that it owns. Call it once an
        update. Returns the norm of the whole summed gradient: a float64 scalar on the device, so
        that the caller decides when to wait for it.
        """
        if self.world > 1:
            flying = []
            for owner, share in enumerate(self.shares):
                flying.append(dist.reduce(share, owner, async_op=True))
            for work in flying:
                work.wait()
        total = torch.zeros((), dtype=torch.float64, device=self.sums.device)
        for piece in self.own:
            # Row by row: over 65M weights one float32 sum would be wrong by 1% (on a CPU).
            norms = torch.linalg.vector_norm(piece.grad, dim=-1)
            total += norms.double().square().sum()
        if self.world > 1:
            dist.all_reduce(total)
        return total.sqrt()

    @torch.no_grad()
    def step(self, total_norm, labels=1, lr_factor=1.0):
        """
        Apply one update, then zero the sums of gradients. The update uses the mean gradient over
        `labels` labels, clipped, at lr_factor times the learning rates. total_norm: what reduce()
        returned, as a number. Returns the norm of the mean gradient. If that is not finite, the
        weights stay as they are.
        """
        norm = total_norm / labels
        if not math.isfinite(norm):
            self.drop()
            return norm
        self.updates += 1
        self.shares[self.rank].mul_(clip_factor(norm, self.clip) / labels)
        lr = self.lr * lr_factor
        adamw = []
        for piece in self.own:
            if piece.rule == "adamw":
                adamw += piece.matrices()
            for tensors in piece.matrices():
                if piece.rule == "muon":
                    muon_(*tensors, lr, self.weight_decay)
                elif piece.rule == "adamw*":
                    adamw_star_(*tensors, self.updates, lr, self.weight_decay * lr_factor)
        if adamw:  # one kernel for all
            adam_lr = self.adam_lr * lr_factor
            adamw_(*zip(*adamw), self.updates, adam_lr, self.weight_decay, self.eps)
        for piece in self.own:
            piece.weight.copy_(piece.master)
        if self.world > 1:
            flying = []
            for piece in self.pieces:
                flying.append(dist.broadcast(piece.weight, piece.owner, async_op=True))
            for work in flying:
                work.wait()
        self.drop()
        return norm

    def drop(self):
        """Forget the gradients of this update."""
        self.sums.zero_()

    # A checkpoint has whole tensors by name, so any number of ranks can continue from it.

    @torch.no_grad()
    def gather(self):
        """
        All masters and moments as whole tensors, {name or name.moment: tensor}, on rank 0. Its
        device holds one piece of another rank at a time. Other ranks return {}.
        """
        kept = self.masters | self.moments
        if self.world == 1:
            return kept
        found = {}
        for piece in self.pieces:
            for key in (piece.name, *piece.keys):
                if self.rank == 0:
                    part = kept[key] if piece.owner == 0 else torch.empty_like(piece.grad)
                    if piece.owner > 0:
                        dist.recv(part, piece.owner)
                    shape = self.params[piece.name].shape
                    found.setdefault(key, torch.empty(shape))[piece.rows] = part
                elif self.rank == piece.owner:
                    dist.send(kept[key], 0)
        return found

    def load(self, moments, updates):
        """Continue after `updates` updates with whole saved tensors {name.moment: tensor}."""
        for piece in self.own:
            for key, moment in piece.moments.items():
                moment.copy_(moments[key][piece.rows])
        self.updates = updates
