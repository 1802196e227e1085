"""
Muon for the matrices of the blocks and the adapter, AdamW for everything else.

Muon replaces a matrix's momentum by the nearest (semi-)orthogonal matrix, so that every direction
of the update has the same size. Five Newton-Schulz steps, made of matrix products only, come close.

    opt = Optimizer(model.named_parameters(), lr=0.001, adam_lr=5e-5, weight_decay=1e-4)
    loss.backward()                        # for each micro-batch; loss is a sum over its labels
    opt.accumulate()
    norm = opt.step(lr_factor, clip=1.0, labels=labels)    # once an update, on every rank

Gradients add up in one float32 buffer, and one all-reduce sums it over the ranks, which all hold
the same state. They share the Newton-Schulz work: each orthogonalises some of the matrices and
broadcasts the results. Where the model computes in bfloat16, the optimizer keeps float32 master
weights.

Sources: Keller Jordan, "Muon: an optimizer for hidden layers" (2024) and its official code; AdamW:
Loshchilov and Hutter (2019); AdamW*: Huginn's variant. Hyperparameters: arXiv 2511.07384,
appendix D.
"""
import math

import torch
import torch.distributed as dist

MOMENTUM, BETA1, BETA2 = 0.95, 0.9, 0.95
BUFFERS = {  # what each rule keeps of a parameter
    "muon": ["momentum"],
    "adamw": ["exp_avg", "exp_avg_sq"],
    "adamw*": ["exp_avg", "exp_avg_sq"],
}


def newton_schulz(G):
    """
    Push the singular values of G (rows, cols) to about 1, in bfloat16. The quintic's coefficients
    maximise the slope at zero: values end in roughly [0.7, 1.2], which is enough.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = G.size(0) > G.size(1)
    X = (G.mT if tall else G).bfloat16()  # so that the Gram matrix X X^T is the small one
    X = X / (X.norm() + 1e-7)
    for _ in range(5):
        A = X @ X.mT
        B = torch.addmm(A, A, A, beta=b, alpha=c)
        X = torch.addmm(X, B, X, beta=a)  # aX + (bA + cAA)X
    return X.mT if tall else X


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
    excess = (g.square() / v).mean().sqrt().clamp(min=1)
    step = lr / (1 - BETA1**t) / excess
    w.mul_(1 - decay)
    w.sub_(step * torch.atan2(m, v.sqrt() / math.sqrt(1 - BETA2**t)))


def stacked_parts(model):
    """
    {name: rows of its parts} of the matrices of a feed-forward model that stack q, k and v, or gate
    and up. The paper's static baselines are Hugging Face models, in which these are matrices of
    their own; its recurrent models stack them.
    """
    parts = {}
    for i, block in enumerate(model.prelude):
        parts[f"prelude.{i}.attn.qkv.weight"] = block.attn.split
        parts[f"prelude.{i}.mlp.fc.weight"] = [model.config.n_ffn] * 2
    return parts


class Optimizer:
    """
    named: (name, parameter) pairs, each parameter once. rule "muon": matrices of blocks and adapter
    by Muon at lr, the rest by AdamW at adam_lr. "adamw" and "adamw*": everything at lr.

    masters: {name: float32 weights} for parameters in bfloat16 (default: copies of these).
    parts: {name: rows of its parts} of stacked matrices that are updated part by part, which
    matters to Muon and AdamW*. With world > 1 all ranks of torch.distributed make the same calls.
    """

    def __init__(
            self, named, *, lr, adam_lr, weight_decay, rule="muon", masters=None, parts=None,
            rank=0, world=1):
        # Small ones first: while a large gradient is added to its sum, the others are gone already.
        self.params = dict(sorted(named, key=lambda item: item[1].numel()))
        self.lr = lr
        self.adam_lr = adam_lr if rule == "muon" else lr
        self.eps = 1e-10 if rule == "muon" else 1e-8
        self.weight_decay = weight_decay
        self.rank = rank
        self.world = world
        self.updates = 0

        params = list(self.params.values())
        sizes = [p.numel() for p in params]
        self.sums = torch.zeros(sum(sizes), device=params[0].device)
        self.grads = [flat.view_as(p) for flat, p in zip(self.sums.split(sizes), params)]
        self.masters, self.state = {}, {}
        self.groups = {rule: [] for rule in BUFFERS}  # tuples (weight, grad, *buffers)
        for (name, p), grad in zip(self.params.items(), self.grads):
            weight = p.detach()
            if p.dtype != torch.float32:
                weight = (masters or self.params)[name].detach().to(p.device, torch.float32)
            self.masters[name] = weight
            matrix = p.dim() == 2 and not name.startswith(("embed.", "head."))
            own_rule = "adamw" if rule == "muon" and not matrix else rule
            tensors = [weight, grad]
            for key in BUFFERS[own_rule]:
                self.state[f"{name}.{key}"] = buffer = torch.zeros_like(weight)
                tensors.append(buffer)
            rows = (parts or {}).get(name, [len(weight)])
            self.groups[own_rule] += zip(*(t.split(rows) for t in tensors))
        # Ranks take turns with the matrices, the most expensive first: their work is nearly even.
        self.groups["muon"].sort(key=lambda tensors: tensors[0].numel(), reverse=True)

    @torch.no_grad()
    def accumulate(self):
        """Add the parameters' gradients to their float32 sums; call it after each backward()."""
        for p, grad in zip(self.params.values(), self.grads):
            if p.grad is not None:
                grad += p.grad
                p.grad = None

    @torch.no_grad()
    def reduce(self):
        """
        Sum the gradients over the ranks, once an update. Returns the norm of the sum, a float64
        scalar that stays on the device.
        """
        if self.world > 1:
            dist.all_reduce(self.sums)
        # Row by row: over 65M weights one float32 sum would be wrong by 1% (on a CPU).
        squares = [torch.linalg.vector_norm(grad, dim=-1).double().square().sum()
                   for grad in self.grads]
        return torch.stack(squares).sum().sqrt()

    @torch.no_grad()
    def step(self, lr_factor=1.0, clip=math.inf, labels=1, norm=None):
        """
        One update at lr_factor times the learning rates. The summed gradients are divided by
        `labels` and scaled down to norm `clip`. norm: what reduce() returned, as a number, by a
        caller that reads it with other numbers; by default it is called here. Returns the norm
        before clipping. If that is not finite, weights and state stay as they are.
        """
        if norm is None:
            norm = self.reduce().item()
        norm = norm / labels
        if math.isfinite(norm):
            self.updates += 1
            self.sums.mul_(min(1.0, clip / (norm + 1e-6)) / labels)
            lr = self.lr * lr_factor
            adam_lr = self.adam_lr * lr_factor
            self.muon_step(lr)
            if self.groups["adamw"]:
                lists = zip(*self.groups["adamw"])
                adamw_(*lists, self.updates, adam_lr, self.weight_decay, self.eps)
            for tensors in self.groups["adamw*"]:
                adamw_star_(*tensors, self.updates, lr, self.weight_decay * lr_factor)
            for name, p in self.params.items():
                if p.dtype != torch.float32:
                    p.copy_(self.masters[name])
        self.sums.zero_()
        return norm

    def muon_step(self, lr):
        """Official Muon. A matrix's broadcast travels while the next ones are orthogonalised."""
        flying = []
        for i, (weight, grad, momentum) in enumerate(self.groups["muon"]):
            owner = i % self.world
            momentum.lerp_(grad, 1 - MOMENTUM)
            if owner == self.rank:
                nesterov = grad.lerp_(momentum, MOMENTUM)
                update = newton_schulz(nesterov).contiguous()
            else:
                update = torch.empty_like(grad, dtype=torch.bfloat16)
            work = None
            if self.world > 1:
                work = dist.broadcast(update, owner, async_op=True)
            flying.append((weight, update, work))
            if len(flying) > self.world:  # a round ahead: few updates are in memory at a time
                self.apply(*flying.pop(0), lr)
        for pending in flying:
            self.apply(*pending, lr)

    def apply(self, weight, update, work, lr):
        """Take a matrix's orthogonal update once its broadcast `work` has arrived."""
        if work:
            work.wait()
        rows, cols = weight.shape
        weight.mul_(1 - lr * self.weight_decay)
        weight.add_(update, alpha=-lr * max(1, rows / cols) ** 0.5)

    # Checkpoints: every rank has all of it, so rank 0 saves {name: tensor} of .state and .masters.

    def load(self, state, updates):
        """Continue after `updates` updates with the saved tensors {name: tensor}."""
        for name, t in self.state.items():
            t.copy_(state[name])
        self.updates = updates
