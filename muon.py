"""
Muon for the matrices of the blocks and the adapter, AdamW for everything else, in one optimizer.

Muon replaces a matrix's momentum by the nearest (semi-)orthogonal matrix, so that every direction
of the update has the same size. The orthogonalisation, five Newton-Schulz steps, is made of
matrix products only; matrices of one shape are stacked and go through it together.

    opt = Muon(param_groups(model, lr=0.001, adam_lr=5e-5, weight_decay=1e-4))

Sources: Keller Jordan, "Muon: an optimizer for hidden layers" (2024) and its official code;
AdamW: Loshchilov and Hutter (2019). Hyperparameters: arXiv 2511.07384, appendix D.
"""
import torch


def newton_schulz(G):
    """
    Push the singular values of G (..., rows, cols) to about 1, in bfloat16. The quintic's
    coefficients maximise the slope at zero: values end in roughly [0.7, 1.2], which is enough.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.bfloat16()
    tall = X.size(-2) > X.size(-1)
    if tall:  # the Gram matrix X X^T should be the small one
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X


def param_groups(model, lr, adam_lr, weight_decay, optimizer="muon"):
    """
    Every parameter of a RecurrentLM in exactly one group. optimizer "muon": matrices of blocks and
    adapter to Muon at lr; embeddings, head and norms to AdamW at adam_lr. "adamw": all at lr.
    """
    matrix = lambda name, p: p.dim() == 2 and not name.startswith(("embed.", "head."))
    named = list(model.named_parameters())
    muon = [p for name, p in named if optimizer == "muon" and matrix(name, p)]
    adam = [p for name, p in named if not (optimizer == "muon" and matrix(name, p))]
    assert len(muon) + len(adam) == len({id(p) for p in model.parameters()})
    groups = [{"kind": "muon", "params": muon, "lr": lr},
              {"kind": "adamw", "params": adam, "lr": adam_lr if optimizer == "muon" else lr}]
    return [group | {"weight_decay": weight_decay} for group in groups if group["params"]]


class Muon(torch.optim.Optimizer):
    """
    Groups of kind "muon" (momentum; matrices only) and "adamw" (betas, eps). `step` counts
    updates in the group, so that the state holds tensors only (safetensors can store it).
    Gradients are left intact. Raises ValueError for a group of unknown kind.
    """

    def __init__(self, groups):
        for group in groups:
            if group["kind"] not in ("muon", "adamw"):
                raise ValueError(f"kind={group['kind']!r}: a group's kind is 'muon' or 'adamw'")
            group["initial_lr"] = group["lr"]  # what a schedule multiplies
        super().__init__(groups, dict(step=0, momentum=0.95, betas=(0.9, 0.95), eps=1e-10))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                (self.muon if group["kind"] == "muon" else self.adamw)(group, params)

    def muon(self, group, params):
        momentum, shapes = group["momentum"], {}
        for p in params:
            shapes.setdefault(p.shape, []).append(p)
        for (rows, cols), ps in shapes.items():
            grads = [p.grad for p in ps]
            buffers = [self.buffer(p, "momentum") for p in ps]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            updates = newton_schulz(torch.stack(torch._foreach_lerp(grads, buffers, momentum)))  # Nesterov
            torch._foreach_mul_(ps, 1 - group["lr"] * group["weight_decay"])
            updates = updates.to(ps[0].dtype)
            torch._foreach_add_(ps, list(updates.unbind()), alpha=-group["lr"] * max(1, rows / cols) ** 0.5)

    def adamw(self, group, params):
        (b1, b2), t = group["betas"], group["step"]
        grads = [p.grad for p in params]
        m = [self.buffer(p, "exp_avg") for p in params]
        v = [self.buffer(p, "exp_avg_sq") for p in params]
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(m, grads, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, grads, grads, 1 - b2)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_div_(denominator, (1 - b2**t) ** 0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, m, denominator, -group["lr"] / (1 - b1**t))

    def buffer(self, p, name):
        """A state tensor of p, zeros at first."""
        if name not in self.state[p]:
            self.state[p][name] = torch.zeros_like(p)
        return self.state[p][name]
