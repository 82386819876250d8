"""The description of a vision transformer and its projector as data. `models/vit.py` computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

from hydrainfer.checkpoint.model import REFERENCE, Fit, VisionConfig, VisionShape
from hydrainfer.checkpoint.pixels import PixelBackend
from hydrainfer.checkpoint.videos import BudgetVideoSettings, QwenVideoSettings, SmolVideoSettings, SquareVideoSettings


class Norm(NamedTuple):
    """A norm of each row. `name`: our name of its tensors. "layer" has a weight and a bias, "rms" a weight; of "rms+1"
    the file holds the weight minus 1, and all is computed in float32; "plain" is an RMS norm without a weight."""

    name: str
    eps: float
    kind: Literal["layer", "rms", "rms+1", "plain"] = "layer"


class Matrix(NamedTuple):
    """A product with a matrix, which makes rows of `width` numbers. `name`: our name of its tensors. `transposed`: the
    file holds [in, out] as one tensor of this name, without a bias; `kernel`: it holds [out, in, rows, columns], a
    convolution of merge squares whose numbers lie "unfolded"."""

    name: str
    width: int
    bias: bool = True
    transposed: bool = False
    kernel: bool = False


class Gate(NamedTuple):
    """The activation of a product with the matrix `gate`, times that with `up`; both make rows of `width` numbers, and
    have no bias."""

    gate: str
    up: str
    width: int
    activation: str


class Activation(NamedTuple):
    """An activation, one of `ACTIVATIONS`."""

    name: str


class Merge(NamedTuple):
    """The rows of a square of `TowerConfig.merge` patches become one. "beside": their numbers lie beside each other,
    patch after patch; pixel shuffle is the same. "unfolded": likewise, but the patches' first numbers lie before their
    second ones. "mean": their mean."""

    how: Literal["beside", "unfolded", "mean"]


class Pool(NamedTuple):
    """The mean of the rows of a square of `TowerConfig.merge` patches, times `factor`. `name`: our name of the vectors
    "bias" and "scale", by which it is then standardised as (x - bias) * scale; "" for none. All in float32."""

    factor: float
    name: str = ""


Steps = tuple[Norm | Matrix | Gate | Activation | Merge | Pool, ...]


@dataclass(frozen=True, kw_only=True)
class TowerConfig(VisionConfig):
    """A vision transformer over squares of `image_size` pixels, at most `squares` of a picture, or, if that is 0, over
    pictures and frames of any size.

    **Patches** have a side of `patch` pixels and `temporal` frames; the files' matrix takes all red values, then green
    and blue ones, or pixel after pixel (`by_pixel`). `patch_bias`: of their matrix, whose rows are normalised if
    `patch_norm`. `positions`: a table that is added, for squares "learned", a row for each row; for any size "bilinear"
    or "bicubic", a square of `grid` rows a side, stretched over each picture, or "axes", `grid` rows for columns, then
    as many for rows. `class_row`: one more row before the patches of a square; `keep_class`: it is used, too.
    `batched`: in the files, positions and the class row have a batch of one. `pre_norm`: a norm before the blocks.

    **Blocks**: `norm` is the kind of all norms, with `norm_eps`. `qkv_bias`, `out_bias`, `mlp_bias`: of the matrices.
    `clamped`: the files hold bounds for what goes into each matrix and what comes out. `qk_norm`: an RMS norm of
    queries and keys, with `qk_eps`, before they are rotated, of each head by itself or of all heads together ("row");
    `value_norm`: of each head of values, without a weight. `attention_scale`: of the scores, unless 0. `gated`: the
    activation of one half of the MLP's first matrix is multiplied by the other half. `layer_scale`: what attention and
    MLP add is multiplied by a vector; `sandwich`: it is normalised. `fused`: queries, keys and values are one tensor in
    the files. `rotation` of queries and keys by row and column with the base `theta`, for towers of any size: "halves",
    those of all rows' frequencies, then of all columns'; "alternating", columns have the frequencies between those of
    rows; "axial", one half of a head by columns, the other by rows. `leftover`: a picture's sides in patches need not
    be multiples of `merge`; patches left over at right and lower edges take part in all layers and become no token.
    `window`: side, in tokens, of the squares within which all layers but `full_layers` attend; 0 without windows.

    **Projector**: `features` are the hidden states that are used, 0 for the embeddings, i for the output of layer i;
    several lie beside each other. `steps` bring them to the language model's width; then rows are multiplied by
    `scale`, which is that of text embeddings where a decoder scales all its input. `merge` squared patches become a
    token. `levels`: layers whose outputs, by `level_steps`, are added in the first language layers.

    `pixels` and `videos`: the preprocessing. `marks`: see `VisionConfig`."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    norm_eps: float
    activation: str
    pixels: Any
    patch: int
    features: tuple[int, ...]
    image_size: int = 0
    squares: int = 1
    temporal: int = 1
    merge: int = 1
    videos: QwenVideoSettings | BudgetVideoSettings | SmolVideoSettings | SquareVideoSettings | None = None
    by_pixel: bool = False
    patch_bias: bool = False
    patch_norm: bool = False
    positions: Literal["none", "learned", "bilinear", "bicubic", "axes"] = "none"
    grid: int = 0
    class_row: bool = False
    keep_class: bool = False
    batched: bool = False
    pre_norm: bool = False
    norm: Literal["layer", "rms"] = "layer"
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    qk_norm: Literal["none", "row", "head"] = "none"
    qk_eps: float = 1e-6
    value_norm: bool = False
    attention_scale: float = 0.0
    clamped: bool = False
    gated: bool = False
    layer_scale: bool = False
    sandwich: bool = False
    fused: bool = False
    rotation: Literal["none", "halves", "alternating", "axial"] = "none"
    theta: float = 10_000.0
    leftover: bool = False
    window: int = 0
    full_layers: tuple[int, ...] = ()
    steps: Steps = ()
    scale: float = 1.0
    levels: tuple[int, ...] = ()
    level_steps: tuple[Steps, ...] = ()
    marks: tuple[str, ...] = ()

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def position_rows(self) -> int:
        """The rows of the table of positions."""
        stretched = self.grid**2
        rows = {"learned": self.square_rows, "bilinear": stretched, "bicubic": stretched, "axes": 2 * self.grid}
        return rows.get(self.positions, 0)

    @property
    def depth(self) -> int:
        """The number of layers that run."""
        return max(self.features)

    @property
    def side(self) -> int:
        """The side of a square in patches."""
        return self.image_size // self.patch

    @property
    def patches(self) -> int:
        return self.side**2

    @property
    def square_rows(self) -> int:
        """The rows of a square between the layers."""
        return self.patches + self.class_row

    @property
    def square_tokens(self) -> int:
        """The rows of the embedding of a square."""
        return self.patches // self.merge**2 + self.keep_class

    @property
    def tokens(self) -> int:
        """The rows of the largest picture."""
        return self.squares * self.square_tokens if self.image_size else self.pixels.tokens

    def by(self, backend: PixelBackend) -> Self:
        videos = None if self.videos is None else self.videos.by(backend)
        return replace(self, pixels=self.pixels.by(backend), videos=videos)

    def shape(self, width: int, fit: Fit) -> VisionShape:  # noqa: ARG002  # the steps say the width
        """The tower as numbers for the planner. All rows of a square attend to each other. So do those of a frame, or
        of a window in it; a still picture counts as `temporal` frames."""
        hidden, n_merged = self.hidden, self.merge**2
        mlp = (3 if self.gated else 2) * hidden * self.intermediate
        projected = [(self.steps, hidden * len(self.features)), *((steps, hidden) for steps in self.level_steps)]
        n_tokens = fit(*REFERENCE)
        n_rows = self.square_rows * max(1, n_tokens // self.square_tokens) if self.image_size else 0
        return VisionShape(
            layers=self.depth,
            hidden=hidden,
            row_weights=3 * self.temporal * self.patch**2 * hidden + self.depth * (4 * hidden**2 + mlp),
            token_weights=sum(_weights(steps, first, n_merged) for steps, first in projected),
            rows_per_token=n_rows / n_tokens if self.image_size else float(n_merged),
            picture_tokens=self.tokens if self.image_size else fit(10_000, 10_000),
            window_rows=self.square_rows if self.image_size else (self.window * self.merge) ** 2,
            full_layers=len(self.full_layers),
        )


def _weights(steps: Steps, width: int, n_merged: int) -> int:
    """The number of weights in the matrices of these steps over rows of `width` numbers."""
    total = 0
    for step in steps:
        if isinstance(step, Merge) and step.how != "mean":
            width *= n_merged
        elif isinstance(step, Matrix | Gate):
            total += width * step.width * (1 + isinstance(step, Gate))
            width = step.width
    return total
