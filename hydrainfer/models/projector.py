"""The projector of a vision tower: steps from its features to rows of the language model's width.

Each class of step in `checkpoint.tower` has a part here, and its entry in `_PARTS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hydrainfer.checkpoint import Activation, Gate, Matrix, Merge, Norm, Pool, Steps
from hydrainfer.models.activations import activation, gated
from hydrainfer.models.slots import Slot
from hydrainfer.models.vit_parts import Linear, Make, RowNorm
from hydrainfer.ops import OpSet


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What parts need. `merge`: the side of a square of patches; `squares`: a function that gives rows [rows, width] as
    a view of these squares [..., merge, merge, width]; `make`: a function that allocates a tensor."""

    merge: int
    squares: Callable[[Tensor], Tensor]
    make: Make
    ops: OpSet


class Projector:
    """The parts of all steps, one after the other. `width`: of the features."""

    def __init__(self, steps: Steps, width: int, around: Surroundings) -> None:
        self._parts: list[Part] = []
        for step in steps:
            part = _PARTS[type(step)](step, width, around)
            self._parts.append(part)
            width = part.width

    def slots(self) -> dict[str, Slot]:
        return {name: slot for part in self._parts for name, slot in part.slots().items()}

    def multiplied(self) -> list[Tensor]:
        return [weight for part in self._parts for weight in part.multiplied()]

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, width] → [tokens, the language model's width]."""
        for part in self._parts:
            x = part(x)
        return x


class Part(ABC):
    """What computes one step. `width`: of the rows that come out."""

    width: int

    @abstractmethod
    def __init__(self, step: Any, width: int, around: Surroundings) -> None:
        """`width`: of the rows that go in."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, width that goes in] → [rows, width that comes out]; a step that merges patches returns fewer rows."""

    def slots(self) -> dict[str, Slot]:
        """The slots of the step's tensors, by our names."""
        return {}

    def multiplied(self) -> list[Tensor]:
        """The matrices that rows are multiplied by through `ops`."""
        return []


class _Norm(Part):
    def __init__(self, step: Norm, width: int, around: Surroundings) -> None:
        self.width = width
        self._name = step.name
        self._norm = RowNorm(step.kind, step.eps, width, around.make, around.ops)

    def slots(self) -> dict[str, Slot]:
        return self._norm.slots(self._name)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x)


class _Matrix(Part):
    def __init__(self, step: Matrix, width: int, around: Surroundings) -> None:
        self.width = step.width
        self._name, self._ops = step.name, around.ops
        self._linear = Linear.make(width, step.width, step.bias, around.make)
        self._kernel = None
        if step.kernel:
            self._kernel = step.width, width // around.merge**2, around.merge, around.merge

    def slots(self) -> dict[str, Slot]:
        slots = self._linear.slots(self._name)
        if self._kernel is not None:
            slots[f"{self._name}.weight"] = Slot(self._linear.weight, self._kernel)
        return slots

    def multiplied(self) -> list[Tensor]:
        return [self._linear.weight]

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._ops)


class _TransposedMatrix(Part):
    def __init__(self, step: Matrix, width: int, around: Surroundings) -> None:
        self.width = step.width
        self._name = step.name
        self._weight = around.make(width, step.width)

    def slots(self) -> dict[str, Slot]:
        return {self._name: Slot(self._weight)}

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self._weight


def _matrix(step: Matrix, width: int, around: Surroundings) -> Part:
    if step.transposed:
        return _TransposedMatrix(step, width, around)
    return _Matrix(step, width, around)


class _Gate(Part):
    def __init__(self, step: Gate, width: int, around: Surroundings) -> None:
        self.width = step.width
        self._names, self._ops = (step.gate, step.up), around.ops
        self._linear = Linear.make(width, 2 * step.width, False, around.make)
        self._gated = gated(step.activation, around.ops)

    def slots(self) -> dict[str, Slot]:
        return self._linear.slots(*self._names)

    def multiplied(self) -> list[Tensor]:
        return [self._linear.weight]

    def __call__(self, x: Tensor) -> Tensor:
        return self._gated(self._linear(x, self._ops))


class _Activation(Part):
    def __init__(self, step: Activation, width: int, around: Surroundings) -> None:
        self.width = width
        self._activation = activation(step.name, around.ops)

    def __call__(self, x: Tensor) -> Tensor:
        return self._activation(x)


class _Merge(Part):
    def __init__(self, step: Merge, width: int, around: Surroundings) -> None:
        self.width = width
        if step.how != "mean":
            self.width *= around.merge**2
        self._how, self._squares = step.how, around.squares

    def __call__(self, x: Tensor) -> Tensor:
        squares = self._squares(x)  # [..., merge, merge, width]
        if self._how == "mean":
            merged = squares.mean((-3, -2))
        elif self._how == "unfolded":
            merged = squares.movedim(-1, -3).flatten(-3)
        else:
            merged = squares.flatten(-3)
        return merged.flatten(0, -2)


class _Pool(Part):
    def __init__(self, step: Pool, width: int, around: Surroundings) -> None:
        self.width = width
        self._name, self._factor, self._squares = step.name, step.factor, around.squares
        self._standard: tuple[Tensor, Tensor] | None = None
        if step.name:
            self._standard = around.make(width), around.make(width)

    def slots(self) -> dict[str, Slot]:
        if self._standard is None:
            return {}
        bias, scale = self._standard
        return {f"{self._name}.bias": Slot(bias), f"{self._name}.scale": Slot(scale)}

    def __call__(self, x: Tensor) -> Tensor:
        wide = self._squares(x.float()).mean((-3, -2)).flatten(0, -2).mul_(self._factor)
        if self._standard is not None:
            bias, scale = self._standard
            wide.sub_(bias).mul_(scale)
        return wide.to(x.dtype)


_PARTS: dict[type, Callable[[Any, int, Surroundings], Part]] = {
    Norm: _Norm,
    Matrix: _matrix,
    Gate: _Gate,
    Activation: _Activation,
    Merge: _Merge,
    Pool: _Pool,
}
