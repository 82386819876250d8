"""Who drafts in an instance, and where a draft pays."""

from __future__ import annotations

from dataclasses import replace

import torch

from hydrainfer.assemble.draft_model import check_draft_model
from hydrainfer.checkpoint import ModelConfig, model_folder
from hydrainfer.config import ServeConfig
from hydrainfer.core import ConfigError, Guessing
from hydrainfer.models import Model, holds_mtp
from hydrainfer.scheduler import DRAFTERS, MANY_ROWS, Budgets, Drafting, Guide, Worth

_MTP, _MODEL = "mtp", "model"
_WORTH_MTP = 1 << 24
"""Elements of a decoder's MLPs from which `auto` drafts by MTP: in a smaller one the calls of a guess's operators take
as long as a step."""


def drafters_of(config: ServeConfig, device: torch.device, described: ModelConfig, *, ahead: bool) -> tuple[str, ...]:
    """The names of those who draft, in the order in which they are asked. With `auto` there are some only on a CPU,
    where nothing is launched ahead: a draft model, if there is one, else MTP, if the files have its layer and it is not
    tiny. Raises `ConfigError` or `CheckpointError`."""
    names = _named(config, device, described, ahead)
    if config.draft_model is not None:
        if _MODEL not in names:
            raise ConfigError(
                f"--draft-model without --drafts model, which --drafts {config.drafts} leaves out here",
                param="draft_model",
            )
        check_draft_model(config, device, described)
    return names


def _named(config: ServeConfig, device: torch.device, described: ModelConfig, ahead: bool) -> tuple[str, ...]:
    if Guessing.of(config.drafts, config.max_drafts) is not None:
        if config.device != "emulated":
            raise ConfigError(f"--drafts {config.drafts} is for emulated devices (--device emulated)", param="drafts")
        return ()
    names = tuple(name.strip() for name in config.drafts.split(","))
    if names == ("off",):
        return ()
    if names == ("auto",):
        fits = device.type == "cpu" and config.device != "emulated" and config.native_kernels
        names = tuple(DRAFTERS) if fits and not ahead else ()
        by_model = config.draft_model is not None
        text = described.text
        large = 3 * text.layers * text.hidden * text.intermediate >= _WORTH_MTP or text.experts is not None
        mtp = bool(names and text.mtp and large and not by_model) and holds_mtp(model_folder(config), described)
        return tuple(name for name in names if {_MTP: mtp, _MODEL: by_model}.get(name, True))
    unknown = [name for name in names if name not in DRAFTERS]
    if unknown:
        raise ConfigError(
            f"unknown drafter {unknown[0]!r}; --drafts takes auto, off or {', '.join(DRAFTERS)}", param="drafts"
        )
    if _MTP in names and not described.text.mtp:
        raise ConfigError("this model has no MTP layer that is supported: leave mtp out of --drafts", param="drafts")
    if _MODEL in names and config.draft_model is None:
        raise ConfigError("--drafts model needs --draft-model", param="draft_model")
    if _MTP in names and _MODEL in names:
        raise ConfigError("--drafts takes mtp or model, not both: each guesses behind every step", param="drafts")
    if ahead:
        raise ConfigError("drafts need --no-async-scheduling: a step ahead does not know its tokens", param="drafts")
    return names


def guessing_of(described: ModelConfig, names: tuple[str, ...]) -> ModelConfig:
    """The model as it is loaded with drafters of these names: with its MTP layer if that is one of them."""
    return replace(described, text=replace(described.text, guesses=True)) if _MTP in names else described


def drafting_of(
    config: ServeConfig,
    names: tuple[str, ...],
    budgets: Budgets,
    model: Model | None,
    guide: Guide | None,
    n_vocab: int,
) -> Drafting:
    """The drafters of these names, and the policy that gives them rows. `model`: None on an emulated device. `guide`:
    None if no request has a grammar."""
    if (guessing := Guessing.of(config.drafts, config.max_drafts)) is not None:
        return Drafting.of_guesses(guessing, budgets)
    if not names:
        return Drafting()
    worth = Worth(MANY_ROWS, budgets.draft_s)
    if model is not None and model.language is not None and model.ops.products is not None:
        worth = Worth(model.language.few_rows or MANY_ROWS, budgets.draft_s, model.ops.products.slower)
    drafters = [made for name in names if (made := DRAFTERS[name](guide)) is not None]
    return Drafting(drafters, worth, config.max_drafts, guide, n_vocab)


def said_of(drafting: Drafting) -> str:
    """The drafters, for people."""
    names = ", ".join(drafter.name for drafter in drafting.drafters)
    assert drafting.worth is not None
    times = drafting.worth.seconds.of(1 + drafting.most) / drafting.worth.seconds.of(1)
    return f"{names}; up to {drafting.most} at a time, whose rows take {times:.2f} times as long as one to multiply"
