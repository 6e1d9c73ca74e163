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

LOOKS = 10  # probes at which optimisers that were left out are looked for


class Trained:
    """The model that the optimisers train. model: its module, if the user has named it."""

    def __init__(self, optimizers: Sequence[Any] = (), model: nn.Module | None = None) -> None:
        self.optimizers = tuple(optimizers)
        self._model = model
        self.forget()

    def forget(self) -> None:
        """Look anew: the model may have been loaded."""
        self._labels, self._whole, self._first, self._looks = Labels(), False, dict[str, int](), LOOKS

    def modules(self, predict: Any) -> list[nn.Module]:
        """Those that are named or found in predict; an error if there are none, or if the optimisers train none of their parameters."""
        modules = modules_of(predict) if self._model is None else [self._model]
        forget_gathered(modules)  # by the last probe, or by a validation: FSDP2 then has other parameters than the optimiser
        if modules and (not self.optimizers or any(id(p) in given(self.optimizers) for module in modules for p in module.parameters())):
            return modules
        if self._model is None:
            raise ValueError(f"cannot find the trained model in predict={brief(repr(predict))}; pass it: clock.attach(optimizer, model=model)")
        raise ValueError(
            "the attached optimiser has none of the model's parameters; if it trains copies of them, do not attach it, but call clock.updated() "
            "after each update"
        )

    def check(self, probe: Probe, health: Health) -> None:
        """Refuse a model of which only a part was found, and warn of labels in predict and of an optimiser that was left out."""
        if not self._whole and (hidden := self._outside(probe.modules)) and (used := probe.used(hidden)):
            raise ValueError(
                f"predict uses {len(used)} trained parameters that do not belong to the model found in it, so probes would leave them out; name all "
                "that is trained: clock.attach(optimizer, model=model), several as model=nn.ModuleList([...])"
            )
        self._whole = True
        if labels := self._labels.look(probe.predict, len(probe.x0)):
            health.warn("labels", told(labels))
        moved = self._moved(probe.modules)
        used = probe.used(list(moved.values())) if moved else []
        if names := [name for name, p in moved.items() if used is None or any(p is other for other in used)]:
            health.warn(
                "unattached",
                f"{len(names)} parameters of the model, such as {names[0]}, are trained by an optimiser that is not attached, so the sampler leaves "
                "them out; attach all of the model's optimisers, in the order of their steps: clock.attach(first, second)",
            )

    def _outside(self, modules: list[nn.Module]) -> list[nn.Parameter]:
        """What the optimisers train beside these modules."""
        inside = {id(p) for module in modules for p in module.parameters()}
        return [p for group in groups(self.optimizers) for p in group["params"] if p.requires_grad and id(p) not in inside]

    def _moved(self, modules: list[nn.Module]) -> dict[str, nn.Parameter]:
        """Parameters, by name, that the optimisers do not have and that have changed: perhaps by an optimiser that steps rarely."""
        if not self.optimizers or not self._looks:
            return {}
        self._looks -= 1
        mine = given(self.optimizers)
        named = ((name, p) for module in modules for name, p in module.named_parameters())
        rest = {name: p for name, p in named if p.requires_grad and id(p) not in mine and not p.is_inference()}
        # torch counts changes in place
        return {name: p for name, p in rest.items() if self._first.setdefault(name, p._version) != p._version}
