"""
Muon for the matrices of the blocks and the adapter, AdamW for everything else.

Muon replaces a matrix's momentum by the nearest (semi-)orthogonal matrix, so every direction of the
update has the same size. Five Newton-Schulz steps, made of matrix products only, come close.

    opt = Optimizer(model.named_parameters(), lr=0.001, adam_lr=5e-5, weight_decay=1e-4)
    loss.backward()                              # each micro-batch; loss is a sum over its labels
    opt.accumulate()
    norm = opt.reduce().item() / labels          # once an update, on every rank
    opt.step(lr_factor, clip_factor(norm, 1.0) / labels)

Every parameter has an owner: one rank keeps its float32 master weights and its moments, receives
the sum of its gradients from all ranks, updates it and broadcasts the new weights in the model's
dtype. AdamW works number by number, so each rank owns some rows of what it updates. With N ranks,
one keeps about 1/N of masters and moments.

Sources: Keller Jordan, "Muon: an optimizer for hidden layers" (2024) and its official code; AdamW:
Loshchilov and Hutter (2019); AdamW*: Huginn's variant. Hyperparameters: arXiv 2511.07384,
appendix D. Owners: ZeRO-1 (arXiv 1910.02054).
"""
import math
from dataclasses import dataclass

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
    """An update of the official Muon for a matrix (rows, cols), in place; g is spent."""
    rows, cols = w.shape
    m.lerp_(g, 1 - MOMENTUM)
    update = newton_schulz(g.lerp_(m, MOMENTUM))  # Nesterov
    w.mul_(1 - lr * weight_decay)
    shape = max(1, rows / cols) ** 0.5
    w.add_(update, alpha=-lr * shape)


def adamw_(weights, grads, m, v, t, lr, weight_decay, eps):
    """Update t (from 1) of AdamW for lists of tensors, in place, by torch's fused kernel."""
    t = torch.full((), float(t), device=weights[0].device)
    torch._fused_adamw_(
        weights, grads, m, v, [], [t] * len(weights),
        lr=lr, beta1=BETA1, beta2=BETA2, eps=eps,
        weight_decay=weight_decay,
        amsgrad=False,
        maximize=False)


def adamw_star_(w, g, m, v, t, lr, decay):
    """
    Update t (from 1) of Huginn's AdamW*, in place. The moments start from the first gradient. A
    tensor whose mean g^2 / v exceeds 1 takes a smaller step. atan2 needs no epsilon. The weights
    shrink by 1 - decay, which follows the schedule's shape, not the learning rate's size.
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


def stacked_parts(model):
    """
    {name: rows of its parts} of a feed-forward model's matrices that stack q, k and v, or gate and
    up. In the paper's static baselines, Hugging Face models, these are separate matrices; its
    recurrent models stack them.
    """
    parts = {}
    for i, block in enumerate(model.prelude):
        parts[f"prelude.{i}.attn.qkv.weight"] = block.attn.split
        parts[f"prelude.{i}.mlp.fc.weight"] = [model.config.n_ffn] * 2
    return parts


def clip_factor(norm, clip):
    """The factor that scales a gradient of this norm down to `clip`, as torch's clip_grad_norm_."""
    return min(1.0, clip / (norm + 1e-6))


@dataclass
class Piece:
    """Rows of a parameter that one rank owns."""
    owner: int
    name: str
    rows: slice
    weight: torch.Tensor              # the parameter's rows
    grad: torch.Tensor | None = None  # the sum of their gradients, float32


class Optimizer:
    """
    named: (name, parameter) pairs, each parameter once. rule "muon": matrices of blocks and adapter
    by Muon at lr, the rest by AdamW at adam_lr. "adamw" and "adamw*": everything at lr.

    weights: {name: exact weights}, to begin the masters with; by default the parameters. parts:
    {name: rows of its parts} of stacked matrices that Muon and AdamW* update part by part; AdamW,
    whose numbers do not depend on each other, needs none. With world > 1 all ranks of torch.distributed make the same calls.

    Of its own rows, a rank keeps .masters {name: weights} and .moments {name.key: tensor}, all
    float32. A float32 parameter is its own master.
    """

    def __init__(
            self, named, *, lr, adam_lr, weight_decay, rule="muon", weights=None, parts=None,
            rank=0, world=1):
        self.params = dict(sorted(named, key=lambda item: item[1].numel()))
        self.lr = lr
        self.adam_lr = adam_lr if rule == "muon" else lr
        self.eps = 1e-10 if rule == "muon" else 1e-8
        self.weight_decay = weight_decay
        self.rank = rank
        self.world = world
        self.updates = 0
        self.rules = {}
        for name, p in self.params.items():
            matrix = p.dim() == 2 and not name.startswith(("embed.", "head."))
            self.rules[name] = "adamw" if rule == "muon" and not matrix else rule

        self.pieces = self.share_out()
        self.own = [piece for piece in self.pieces if piece.owner == rank]
        sizes = [piece.weight.numel() for piece in self.pieces]
        device = self.pieces[0].weight.device
        self.sums = torch.zeros(sum(sizes), device=device)
        for piece, grad in zip(self.pieces, self.sums.split(sizes)):
            piece.grad = grad.view_as(piece.weight)
        owned = [0] * world
        for piece in self.pieces:
            owned[piece.owner] += piece.weight.numel()
        self.shares = self.sums.split(owned)  # the sums that each rank owns

        self.masters = {}
        self.moments = {}
        self.groups = {rule: [] for rule in BUFFERS}  # tuples (weight, grad, *moments)
        for piece in self.own:
            name = piece.name
            master = piece.weight
            if master.dtype != torch.float32:
                exact = (weights or self.params)[name].detach()[piece.rows]
                master = exact.to(master.device, torch.float32)
            self.masters[name] = master
            tensors = [master, piece.grad]
            for key in self.keys(name)[1:]:
                self.moments[key] = torch.zeros_like(master)
                tensors.append(self.moments[key])
            sizes = [len(master)]
            if parts and name in parts and self.rules[name] != "adamw":
                sizes = parts[name]
            split = [t.split(sizes) for t in tensors]
            self.groups[self.rules[name]] += zip(*split)

    def share_out(self):
        """
        All Pieces, one rank's after another's. AdamW works number by number, so all ranks share the
        rows of what it updates. Any other parameter, the largest first, goes to the rank that has
        least so far.
        """
        owners = {}
        loads = [0] * self.world
        for name, p in reversed(self.params.items()):
            if self.rules[name] != "adamw":
                owners[name] = loads.index(min(loads))
                loads[owners[name]] += p.numel()
        pieces = []
        for rank in range(self.world):
            for name, p in self.params.items():
                rows = slice(len(p))
                if name not in owners:
                    start = rank * len(p) // self.world
                    rows = slice(start, (rank + 1) * len(p) // self.world)
                elif owners[name] != rank:
                    continue
                weight = p.detach()[rows]
                pieces.append(Piece(rank, name, rows, weight))
        return pieces

    @torch.no_grad()
    def accumulate(self):
        """Add the parameters' gradients to their float32 sums; call it after each backward()."""
        for piece in self.pieces:
            grad = self.params[piece.name].grad
            if grad is not None:
                piece.grad.add_(grad[piece.rows])
        for p in self.params.values():
            p.grad = None

    @torch.no_grad()
    def reduce(self):
        """
        Once an update: each rank receives the sum, over all ranks, of the gradients that it owns.
        Returns the norm of the whole gradient, a float64 scalar that stays on the device.
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
    def step(self, lr_factor=1.0, scale=1.0):
        """
        One update at lr_factor times the learning rates by `scale` times the summed gradients,
        which are zero afterwards.
        """
        self.updates += 1
        self.shares[self.rank].mul_(scale)
        lr = self.lr * lr_factor
        adam_lr = self.adam_lr * lr_factor
        for tensors in self.groups["muon"]:
            muon_(*tensors, lr, self.weight_decay)
        if self.groups["adamw"]:
            lists = zip(*self.groups["adamw"])
            adamw_(*lists, self.updates, adam_lr, self.weight_decay, self.eps)
        for tensors in self.groups["adamw*"]:
            adamw_star_(*tensors, self.updates, lr, self.weight_decay * lr_factor)
        for piece in self.own:
            piece.weight.copy_(self.masters[piece.name])
        if self.world > 1:
            flying = []
            for piece in self.pieces:
                flying.append(dist.broadcast(piece.weight, piece.owner, async_op=True))
            for work in flying:
                work.wait()
        self.drop()

    def drop(self):
        """Forget the gradients of this update."""
        self.sums.zero_()

    # A checkpoint has whole tensors by name, so any number of ranks continues it.

    @torch.no_grad()
    def gather(self):
        """
        All masters and moments as whole tensors {name or name.key: tensor}, on rank 0. Its device
        holds one piece of another rank at a time. Other ranks return {}.
        """
        kept = self.masters | self.moments
        if self.world == 1:
            return kept
        found = {}
        for piece in self.pieces:
            for key in self.keys(piece.name):
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
        """Continue after `updates` updates with whole saved tensors {name.key: tensor}."""
        for piece in self.own:
            for key in self.keys(piece.name)[1:]:
                self.moments[key].copy_(moments[key][piece.rows])
        self.updates = updates

    def keys(self, name):
        """The names of a parameter's master and of its moments."""
        return [name, *(f"{name}.{key}" for key in BUFFERS[self.rules[name]])]
