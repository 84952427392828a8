"""Muon for the matrices of the layers (Jordan et al., 2024), AdamW for everything else."""

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return the matrices, [N, rows, columns], with singular values near 1 (five Newton-Schulz steps)."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Muon over the 2-D parameters given, grouped by size so that each group is one batched product."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.02) -> None:
        self.momentum, self.decay = momentum, decay
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape].append(parameter)
        self.groups = list(groups.values())
        self.buffers = [torch.zeros(len(g), *g[0].shape) for g in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters from their gradients; updates are as large as AdamW's at the same rate."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            buffer.mul_(self.momentum).add_(gradient)
            update = orthogonalized(gradient + self.momentum * buffer) * 0.2 * max(gradient.shape[1:]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(change, alpha=rate)


class Optimizer:
    """Muon and AdamW behind one step, clipped at norm 1, with a state that can be saved."""

    def __init__(self, model: nn.Module) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if p.ndim == 2 and "embed_tokens" not in n]
        rest = [p for n, p in named if p.ndim != 2 or "embed_tokens" in n]
        self.parameters = [p for _, p in named]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, rate: float) -> None:
        """Clips, updates and clears the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.muon.step(rate)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, object]:
        """Return what `load` needs to go on."""
        return {"muon": self.muon.buffers, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        """Restore a state."""
        self.muon.buffers = state["muon"]  # type: ignore[assignment]
        self.adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
