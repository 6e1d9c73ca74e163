"""The trained model: its modules, named by the user or found in predict, and its optimisers; and what either of them lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from noiseclock.core.checks import brief
from noiseclock.core.directions import forget_gathered
from noiseclock.core.health import Health
from noiseclock.core.optimizers import given, groups
from noiseclock.core.probes import Probe
from noiseclock.core.reach import Labels, modules_of, told


class Trained:
    """The model that the optimisers train. model: its module, if the user has named it."""

    def __init__(self, optimizers: Sequence[Any] = (), model: nn.Module | None = None) -> None:
        self.optimizers = tuple(optimizers)
        self._model = model
        self.forget()

    def forget(self) -> None:
        """Look anew: the model may have been loaded."""
        self._labels, self._whole, self._first, self._unused = Labels(), frozenset[int](), dict[int, int](), set[int]()

    def modules(self, predict: Any) -> tuple[list[nn.Module], list[nn.Module]]:
        """The trained modules, the one that is named or those found in predict, and the others in predict; an error if nothing of them is trained."""
        found, mine = modules_of(predict), given(self.optimizers)
        candidates = found if self._model is None else [self._model]
        forget_gathered([*candidates, *found])  # by the last probe, or by a validation: FSDP2 then has other parameters than the optimiser
        modules = [module for module in candidates if not self.optimizers or any(id(p) in mine for p in module.parameters())]
        if modules:
            return modules, [module for module in found if not any(module is other for other in modules)]
        if self._model is None:
            raise ValueError(f"cannot find the trained model in predict={brief(repr(predict))}; pass it: clock.attach(optimizer, model=model)")
        raise ValueError(
            "the attached optimiser has none of the model's parameters; if it trains copies of them, do not attach it, but call clock.updated() "
            "after each update"
        )

    def check(self, probe: Probe, health: Health) -> None:
        """Refuse a model of which only a part was found, and warn of labels in predict and of an optimiser that was left out."""
        hidden = self._outside(probe.modules)
        if (ids := frozenset(map(id, hidden))) != self._whole and (used := probe.used(hidden)):
            raise ValueError(
                f"predict uses trained parameters that do not belong to the model found in it, {len(used)} tensors, so probes would leave them out; "
                "name all that is trained: clock.attach(optimizer, model=model), several as model=nn.ModuleList([...]), a parameter by itself as "
                "nn.ParameterList([...]) in it"
            )
        self._whole = ids
        if labels := self._labels.look(probe.predict, len(probe.x0)):
            health.warn("labels", told(labels))
        moved = self._moved([*probe.modules, *probe.others])
        used = probe.used([p for _, p in moved]) if moved else []
        self._unused |= {id(p) for _, p in moved}  # or told of
        if names := [name for name, p in moved if used is None or any(p is other for other in used)]:
            health.warn(
                "unattached",
                f"{len(names)} parameters of the model, such as {names[0]}, are trained by an optimiser that is not attached, so the sampler leaves "
                "them out; attach all of the model's optimisers, in the order of their steps: clock.attach(first, second)",
            )

    def _outside(self, modules: list[nn.Module]) -> list[nn.Parameter]:
        """What the optimisers train beside these modules."""
        inside = {id(p) for module in modules for p in module.parameters()}
        return [p for group in groups(self.optimizers) for p in group["params"] if p.requires_grad and id(p) not in inside]

    def _moved(self, modules: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
        """Parameters, named, that the optimisers do not have and that have changed: perhaps by an optimiser that steps rarely. Each one once."""
        if not self.optimizers:
            return []
        known = given(self.optimizers) | self._unused
        named = {id(p): (name, p) for module in modules for name, p in module.named_parameters() if p.requires_grad and id(p) not in known}
        # torch counts changes in place
        return [(name, p) for name, p in named.values() if not p.is_inference() and self._first.setdefault(id(p), p._version) != p._version]
