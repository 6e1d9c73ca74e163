"""Selection of the few times that best predict the effect of an update on all times (Algorithm 2 of 2411.09998).

Each probe gives one row: δ_τ, the decrease of the loss at every time τ of a grid, for one x0. The last |Q| rows are kept; Δ, the mean of a row, is
regressed on each column, and the |S| columns that predict it best are measured for the whole batch at the next probe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ENOUGH = 3  # rows: with two, a regression line fits exactly and F has no degrees of freedom
SELECTORS = ("f", "greedy", "all")


def evenly(columns: int, count: int) -> Tensor:
    """(count,) column numbers, spread evenly.

    >>> evenly(1000, 3).tolist()
    [166, 500, 833]
    """
    return ((torch.arange(count, device="cpu") + 0.5) * columns / count).long()


def f_statistic(rows: Tensor, target: Tensor) -> Tensor:
    """(C,) the F statistic of regressing `target` (n,) on each column of `rows` (n, C) alone: F = r²/(1-r²)·(n-2).

    Columns that are constant or not finite get -inf, so that they are never selected.

    >>> x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]])
    >>> f_statistic(x, torch.tensor([1.0, 3.0, 2.0, 4.0]))
    tensor([3.5556,   -inf])
    """
    usable = rows.isfinite().all(0)
    centred = torch.where(usable, rows - rows.mean(0), 0.0)
    aim = target - target.mean()
    spread = centred.square().sum(0)
    # a column whose spread is only rounding error counts as constant
    usable &= spread > (torch.finfo(rows.dtype).eps * rows.abs().nan_to_num(0, 0, 0).amax(0)) ** 2 * len(rows)
    r2 = (centred * aim[:, None]).sum(0).square() / (spread * aim.square().sum()).clamp(min=torch.finfo(rows.dtype).tiny)
    r2 = r2.clamp(max=1)
    return torch.where(usable, r2 / (1 - r2) * (len(rows) - 2), -torch.inf)


def best_by_f(rows: Tensor, count: int) -> Tensor:
    """The paper's choice: the `count` columns with the largest F for the rows' mean; fewer if fewer are usable."""
    f = f_statistic(rows, _mean(rows))
    return f.topk(min(count, int((f > -torch.inf).sum()))).indices


def best_by_greed(rows: Tensor, count: int) -> Tensor:
    """Forward selection: each step adds the column that explains most of the residual, so that neighbouring times do not repeat each other."""
    aim, rest = _mean(rows), rows.clone()
    chosen: list[Tensor] = []
    for _ in range(count):
        f = f_statistic(rest, aim)
        if chosen:
            f[torch.stack(chosen)] = -torch.inf
        best = f.argmax()
        if f[best] == -torch.inf:
            break
        chosen.append(best)
        direction = rest[:, best] - rest[:, best].mean()
        direction = direction / direction.norm()
        aim = aim - (aim @ direction) * direction
        rest = rest - torch.outer(direction, direction @ rest)
    return torch.stack(chosen) if chosen else torch.empty(0, dtype=torch.long, device="cpu")


def _mean(rows: Tensor) -> Tensor:
    """(n,) Δ of each row, over the columns that are finite in all rows."""
    return rows[:, rows.isfinite().all(0)].mean(1)


def r_squared(rows: Tensor, selected: Tensor) -> Tensor:
    """(...) the squared correlation of the mean over the selected columns (..., S) with the mean over all; NaN with fewer than three rows.

    >>> round(float(r_squared(torch.randn(9, 5, generator=torch.Generator().manual_seed(0)), torch.arange(5))), 6)
    1.0
    """
    if len(rows) < ENOUGH or selected.numel() == 0:
        return rows.new_full(selected.shape[:-1], torch.nan)
    some, aim = rows.T[selected].mean(-2), _mean(rows)  # (..., n) and (n,)
    some, aim = some - some.mean(-1, keepdim=True), aim - aim.mean()
    return ((some @ aim).square() / (some.square().sum(-1) * aim.square().sum())).clamp(max=1)


class Queue:
    """The last `size` rows of `columns` differences, float64 on the host, and the columns selected from them.

    select: "f" (the paper's), "greedy", or "all" columns, which makes Δ exact.
    """

    def __init__(self, size: int, columns: int, count: int, select: str) -> None:
        self.size, self.columns, self.count, self.select = size, columns, count, select
        self.rows = torch.empty(0, columns, dtype=torch.float64, device="cpu")
        self.selected = torch.arange(columns, device="cpu") if select == "all" else evenly(columns, count)

    def push(self, row: Tensor) -> None:
        """Add a row (C,) and repeat the selection."""
        if not row.isfinite().any():  # from a broken sample: while such a row is kept, no column can be selected
            return
        self.rows = torch.cat([self.rows, row.detach().to("cpu", torch.float64)[None]])[-self.size :]
        if self.select == "all" or len(self.rows) < ENOUGH:
            return
        best = (best_by_f if self.select == "f" else best_by_greed)(self.rows, self.count)
        if len(best) == self.count:  # otherwise too few columns vary, and the previous selection stays
            self.selected = best

    @property
    def r_squared(self) -> float:
        """R² of the selected columns, over the rows."""
        return float(r_squared(self.rows, self.selected))

    @property
    def f(self) -> float:
        """The F statistic of the selected columns, R²/(1-R²)·(n-2): unlike R², it accounts for the number of rows n."""
        return float(f_statistic(self.rows[:, self.selected].mean(1, keepdim=True), _mean(self.rows))) if len(self.rows) >= ENOUGH else math.nan

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows.clone(), "selected": self.selected.clone()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless the state fits."""
        rows, selected = state.get("rows"), state.get("selected")
        fits = isinstance(rows, Tensor) and isinstance(selected, Tensor) and rows.ndim == 2 and selected.shape == self.selected.shape
        if not fits or rows.shape[1] != self.columns or len(rows) > self.size:  # type: ignore[union-attr, arg-type]  # `fits` says that they are tensors
            raise ValueError(f"the queue in the state must hold up to {self.size} rows of {self.columns} times")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check(state)
        # a checkpoint may have been read onto a GPU
        self.rows, self.selected = (state[name].to("cpu", copy=True) for name in ("rows", "selected"))
