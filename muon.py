"""
Muon for the matrices of the blocks and the adapter, AdamW for everything else, shared out over the ranks.

Muon replaces a matrix's momentum by the nearest (semi-)orthogonal matrix, so that every direction of the update
has the same size; five Newton-Schulz steps, made of matrix products only, come close to it.

    opt = Muon(model.named_parameters(), lr=0.001, adam_lr=5e-5, weight_decay=1e-4, rank=rank, world=world)
    loss(...).backward(); opt.accumulate()   # for each micro-batch; the update's loss is the plain sum, over ranks too
    norm = opt.reduce()                      # summed gradients to their owners
    opt.step(lr_factor, clip=1.0)            # owners update; every rank has the new weights

What is unusual: a parameter belongs to one rank, and only this owner keeps its momentum and, where the model
computes in bfloat16, its float32 master weight (ZeRO's stage 1, but by whole tensors: Muon needs whole matrices).
And the bits do not depend on the number of ranks: with 2^m micro-batches an update and 2^w ranks, each with
consecutive ones and as many threads, all sums are one binary tree, and no matrix's product depends on its
neighbours. Other numbers have a fixed order too, but agree to rounding only.

Sources: Keller Jordan, "Muon: an optimizer for hidden layers" (2024) and its official code; AdamW: Loshchilov
and Hutter (2019); AdamW*: Huginn's variant; ZeRO: arXiv 1910.02054. Hyperparameters: arXiv 2511.07384, appendix D.
"""
import math
from collections import Counter
from types import SimpleNamespace as Slot

import torch
import torch.distributed as dist

MOMENTUM, BETAS, EPS = 0.95, (0.9, 0.95), 1e-10
BUCKET = 2**23  # weights that travel together, over all ranks: 32 MB in float32


def newton_schulz(G):
    """
    Push the singular values of G (rows, cols), or of a batch (n, rows, cols), to about 1, in bfloat16. The
    quintic's coefficients maximise the slope at zero: values end in roughly [0.7, 1.2], which is enough.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall, addmm = G.size(-2) > G.size(-1), torch.addmm if G.dim() == 2 else torch.baddbmm
    X = (G.mT if tall else G).bfloat16()  # the Gram matrix X X^T is the small one
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.mT
        X = addmm(X, addmm(A, A, A, beta=b, alpha=c), X, beta=a)  # aX + (bA + cAA)X
    return X.mT if tall else X


def muon_update(weights, grads, momenta, t, lr, weight_decay):
    """
    Official Muon, in place; uses up grads. Same-shape matrices go together on a GPU, which is short of work with one. On
    a CPU that gains nothing, and a product's rounding would depend on the batch, hence on the number of ranks.
    """
    torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
    torch._foreach_lerp_(grads, momenta, MOMENTUM)  # Nesterov
    torch._foreach_mul_(weights, 1 - lr * weight_decay)
    shapes = {}
    for i, p in enumerate(weights):
        shapes.setdefault((p.shape, i if p.device.type == "cpu" else 0), []).append(i)
    for ((rows, cols), _), alike in shapes.items():
        G = torch.stack([grads[i] for i in alike]) if len(alike) > 1 else grads[alike[0]]
        updates = newton_schulz(G).view(-1, rows, cols).unbind()
        torch._foreach_add_([weights[i] for i in alike], updates, alpha=-lr * max(1, rows / cols) ** 0.5)


def adamw_update(weights, grads, m, v, t, lr, weight_decay):
    """Update t (from 1) of AdamW, in place, by torch's kernel: a third of the time of single operations."""
    t = torch.tensor(float(t), device=weights[0].device)
    torch._fused_adamw_(weights, grads, m, v, [], [t] * len(weights), lr=lr, beta1=BETAS[0], beta2=BETAS[1], eps=EPS,
                        weight_decay=weight_decay, amsgrad=False, maximize=False)


def adamw_star_update(weights, grads, m, v, t, lr, decay):
    """
    Update t (from 1) of Huginn's AdamW*, in place: moments start from the first gradient; a tensor whose mean g^2 / v
    exceeds 1 takes a smaller step; atan2 needs no epsilon; weights shrink by 1 - decay. Uses up grads.
    """
    for p, g, m, v in zip(weights, grads, m, v):
        if t == 1:
            m.copy_(g), v.copy_(g).square_()
        m.lerp_(g, 1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
        ratio = g.square_().div_(v).nan_to_num_(0, 0)  # v = 0: never a gradient, as for a token never seen
        step = lr / (1 - BETAS[0]**t) / ratio.mean().sqrt().clamp(min=1)
        denominator = torch.sqrt(v, out=g).div_((1 - BETAS[1]**t) ** 0.5)
        p.mul_(1 - decay).sub_(torch.atan2(m, denominator, out=g).mul_(step))


RULES = {"muon": (muon_update, ("momentum",)),
         "adamw": (adamw_update, ("exp_avg", "exp_avg_sq")), "adamw*": (adamw_star_update, ("exp_avg", "exp_avg_sq"))}


class Muon:
    """
    named: (name, parameter) pairs, each parameter once, on their device for good. Float32 ones are their own master
    weights, bfloat16 ones copies of masters, which start from masters[name] (default: from the copies).
    optimizer "muon": matrices of blocks and adapter to Muon at lr; embeddings, head and norms to AdamW at adam_lr.
    "adamw", "adamw*": all at lr; another: ValueError. With world > 1 all ranks of torch.distributed make the same calls.
    """

    def __init__(self, named, lr, adam_lr, weight_decay, optimizer="muon", masters=None, rank=0, world=1, group=None):
        if optimizer not in RULES:
            raise ValueError(f"optimizer={optimizer!r}: is not one of {', '.join(RULES)}")
        matrix = lambda name, p: p.dim() == 2 and not name.startswith(("embed.", "head."))
        # One slot a parameter, later with its owner and where it starts in its owner's row: all that this rank owns.
        self.slots = [Slot(name=name, p=p, kind=optimizer if optimizer != "muon" or matrix(name, p) else "adamw")
                      for name, p in named]
        assert len({s.p for s in self.slots}) == len(self.slots), "a parameter is named twice"
        assert {s.p.dtype for s in self.slots} <= {torch.float32, torch.bfloat16}, "a parameter is of another dtype"
        self.lr = {"muon": lr, "adamw": adam_lr if optimizer == "muon" else lr, "adamw*": lr}
        self.weight_decay, self.device = weight_decay, self.slots[0].p.device
        self.rank, self.world, self.group = rank, world, group
        self.share_out()
        self.masters, self.state = {}, {}  # of our share alone
        for s in self.owned:
            weight = masters[s.name] if masters and s.p.dtype != torch.float32 else s.p.detach()
            self.masters[s.name] = weight.to(self.device, torch.float32, copy=s.p.dtype != torch.float32)
            self.state |= {f"{s.name}.{x}": torch.zeros_like(self.masters[s.name]) for x in RULES[s.kind][1]}
        self.partial, self.grads = [], {}  # partial sums of our micro-batches; full sums of our share, by name
        self.updates, self.norm = 0, math.nan

    def share_out(self):
        """Owners: the dearest parameter first, to the rank with the least work of its kind, then the fewest weights."""
        def cost(s):  # multiplications of a Newton-Schulz step, or weights
            low, high = sorted(s.p.shape) if s.kind == "muon" else (1, s.p.numel())
            return low * low * (2 * high + low)

        work, weights, ends = Counter(), Counter(), Counter()
        for s in sorted(self.slots, key=cost, reverse=True):  # a stable sort: alike on every rank
            s.owner = min(range(self.world), key=lambda r: (work[r, s.kind], weights[r], r))
            work[s.owner, s.kind] += cost(s)
            weights[s.owner] += s.p.numel()
        # Muon's matrices begin each row: at one place of their rows all ranks are then equally far in their work.
        self.rows = sorted(self.slots, key=lambda s: s.kind != "muon")
        for s in self.rows:
            s.start = ends[s.owner]
            ends[s.owner] += -(-s.p.numel() // 64) * 64  # aligned like a tensor of its own: sums on a GPU depend on it
        self.owned = [s for s in self.rows if s.owner == self.rank]
        self.row_length, width = max(ends.values()), max(1, BUCKET // self.world)
        self.buckets = [(low, min(low + width, self.row_length)) for low in range(0, self.row_length, width)]

    def pieces(self, low, high):
        """What lies at low..high of the rows: (its slot, where in its flat parameter, where in low..high)"""
        for s in self.rows:
            begin, end = max(s.start, low), min(s.start + s.p.numel(), high)
            if begin < end:
                yield s, slice(begin - s.start, end - s.start), slice(begin - low, end - low)

    @torch.no_grad()
    def accumulate(self):
        """After each backward(): takes all p.grad and leaves None. A parameter without one counts as zero."""
        self.partial.append((1, [torch.zeros_like(s.p) if s.p.grad is None else s.p.grad for s in self.slots]))
        for s in self.slots:
            s.p.grad = None
        while len(self.partial) > 1 and self.partial[-2][0] == self.partial[-1][0]:
            self.carry()

    def carry(self):
        """Add up the last two partial sums: of equal counts, as in a binary counter, which makes the sum a tree."""
        (m, a), (n, b) = self.partial[-2:]
        a = [x.float() for x in a]  # copies bfloat16 only
        torch._foreach_add_(a, b)
        self.partial[-2:] = [(m + n, a)]

    @torch.no_grad()
    def reduce(self):
        """After the last accumulate(): brings the summed gradients to their owners. Returns the global norm."""
        while len(self.partial) > 1:
            self.carry()
        sums = dict(zip([s.name for s in self.slots], self.partial.pop()[1]))
        self.grads = {name: g.float() for name, g in sums.items()} if self.world == 1 else self.exchange(sums)
        squares = torch.zeros(len(self.slots), dtype=torch.float64, device=self.device)
        for i, s in enumerate(self.slots):
            if s.owner == self.rank:
                # Rows in float32 are fast; over 65M weights its sums would be wrong by 1 % (on a CPU).
                squares[i] = torch.linalg.vector_norm(self.grads[s.name], dim=-1).double().square().sum()
        if self.world > 1:
            dist.all_reduce(squares, group=self.group)  # exact: all but the owner add zero
        self.norm = squares.sum().sqrt().item()
        return self.norm

    def exchange(self, sums):
        """{name: this rank's sum}, emptied on the way -> {name: sum over the ranks} of this rank's share, float32"""
        row, flying = torch.empty(self.row_length, device=self.device), []
        for low, high in self.buckets:
            send = torch.empty(self.world, high - low, device=self.device)  # (to whom, what); past a row's end: anything
            for s, part, place in self.pieces(low, high):
                send[s.owner, place] = sums[s.name].view(-1)[part]
                if part.stop == s.p.numel():
                    del sums[s.name]  # memory is fullest here
            receive = torch.empty_like(send)  # (from whom, what)
            flying.append((low, high, receive, dist.all_to_all_single(receive, send, group=self.group, async_op=True)))
        for low, high, receive, work in flying:
            work.wait()
            parts = list(receive)
            while len(parts) > 1:  # (0 + 1) + (2 + 3): the tree's upper half
                parts = [a.add_(b) for a, b in zip(parts[::2], parts[1::2])] + parts[len(parts) // 2 * 2:]
            row[low:high] = parts[0]
        return {s.name: row[s.start:s.start + s.p.numel()].view_as(s.p) for s in self.owned}

    @torch.no_grad()
    def step(self, lr_factor, clip):
        """
        After reduce(): one update at lr_factor times the learning rates, of gradients scaled down to norm clip.
        FloatingPointError, on every rank, if the norm is not finite: nothing has changed then.
        """
        if not math.isfinite(self.norm):
            raise FloatingPointError(f"gradient norm {self.norm}: the weights were left as they are")
        self.updates += 1
        scale, flying = min(1.0, clip / (self.norm + 1e-6)), []
        if self.world == 1:
            self.update(self.owned, lr_factor, scale)
            for s in self.slots:
                if s.p.dtype != torch.float32:
                    s.p.copy_(self.masters[s.name])
            return
        wire = torch.float32 if any(s.p.dtype == torch.float32 for s in self.slots) else torch.bfloat16
        for low, high in self.buckets:
            self.update([s for s in self.owned if low <= s.start < high], lr_factor, scale)  # earlier buckets travel
            send = torch.empty(high - low, dtype=wire, device=self.device)
            for s, part, place in self.pieces(low, high):
                if s.owner == self.rank:
                    send[place] = self.masters[s.name].view(-1)[part]
            receive = send.new_empty(self.world, high - low)  # (from whom, what)
            flying.append((low, high, receive, dist.all_gather(list(receive), send, group=self.group, async_op=True)))
        for low, high, receive, work in flying:
            work.wait()
            for s, part, place in self.pieces(low, high):
                s.p.view(-1)[part] = receive[s.owner, place]

    def update(self, slots, lr_factor, scale):
        """New master weights and state of slots, which this rank owns; their gradients go."""
        for kind, (rule, buffers) in RULES.items():
            if names := [s.name for s in slots if s.kind == kind]:
                grads = [self.grads.pop(name) for name in names]
                if scale < 1:
                    torch._foreach_mul_(grads, scale)
                state = [[self.state[f"{name}.{x}"] for name in names] for x in buffers]
                # AdamW*'s weight decay follows the schedule's shape, not the learning rate's size.
                decay = self.weight_decay * (lr_factor if kind == "adamw*" else 1)
                rule([self.masters[name] for name in names], grads, *state, self.updates, self.lr[kind] * lr_factor, decay)

    # Checkpoints: each rank saves its share. On loading, any number of ranks, each takes what it wants from all files.

    def state_tensors(self):
        """{"NAME.momentum", "NAME.exp_avg" or "NAME.exp_avg_sq": tensor} of this rank's share"""
        return dict(self.state)

    def wanted(self):
        """{name: shape} of what load() will get."""
        return {name: tuple(t.shape) for name, t in self.state.items()}

    def load(self, get, update):
        """Go on after `update` updates; get(name) returns a saved state tensor, of the shape that wanted() says."""
        for name, t in self.state.items():
            saved = get(name)
            assert saved.shape == t.shape, f"{name}: has shape {tuple(saved.shape)}, not {tuple(t.shape)}"
            t.copy_(saved)
        self.updates = update

    def gather_masters(self):
        """All (name, float32 tensor), one at a time, on rank 0; nothing on others, which must iterate it, too."""
        for s in self.slots:
            weight = s.p.detach() if s.p.dtype == torch.float32 else self.masters.get(s.name)
            if weight is None and self.rank == 0:
                weight = torch.empty(s.p.shape, device=self.device)
                dist.recv(weight, s.owner)
            elif s.p.dtype != torch.float32 and self.rank == s.owner != 0:
                dist.send(weight, 0)
            if self.rank == 0:
                yield s.name, weight
