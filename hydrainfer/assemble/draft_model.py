"""The model that guesses beside another one (`--draft-model`): checks, weights and caches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from hydrainfer.assemble.model import ops_for
from hydrainfer.assemble.sizes import GIB, free_bytes
from hydrainfer.cache import TOKENS_PER_RUNNING, CacheSpec, for_stage
from hydrainfer.checkpoint import ModelConfig, locate, model_folder
from hydrainfer.config import ServeConfig
from hydrainfer.core import CheckpointError, ConfigError, Role, Stage
from hydrainfer.families import read_config
from hydrainfer.models import Model, load_model
from hydrainfer.runtime import CopyGuesser, DraftModel, Guesser
from hydrainfer.storage import BlockStore

SELF = "self-int8"
_LEAST_TOKENS = 1024
_ROLE = Role.parse("D")
_SHARE = 1 / 8
"""The most that a draft model's caches take of the memory that is free for caches."""


def check_draft_model(config: ServeConfig, device: torch.device, described: ModelConfig) -> None:
    """Check, before weights are read, that `config.draft_model` can guess for the model that is `described`. Raises
    `ConfigError` or `CheckpointError`."""
    if config.draft_model == SELF:
        if device.type != "cpu":
            raise ConfigError(f"--draft-model {SELF} is for --device cpu", param="draft_model")
        if config.quantization != "none":
            raise ConfigError(f"--draft-model {SELF}: the model has 8-bit weights itself", param="draft_model")
        if described.text.recurrence is not None:
            raise ConfigError(f"--draft-model {SELF} is not for models with recurrent layers", param="draft_model")
        return
    name, (folder, draft) = config.draft_model, _described(config)
    if draft.text.recurrence is not None:
        raise ConfigError(f"--draft-model {name}: models with recurrent layers cannot draft", param="draft_model")
    theirs, ours = (_vocabulary(each) for each in (folder, model_folder(config)))
    differs = min((i for i in theirs.keys() & ours.keys() if theirs[i] != ours[i]), default=None)
    if differs is not None:
        raise ConfigError(
            f"--draft-model {name} has another vocabulary: token {differs} is {theirs[differs]!r}, not "
            f"{ours[differs]!r}; give a model of the same family",
            param="draft_model",
        )
    if len(theirs.keys() & ours.keys()) < len(ours) / 2:
        raise ConfigError(
            f"--draft-model {name} has a vocabulary of {len(theirs)} tokens, the model one of {len(ours)}; give a "
            "model of the same family",
            param="draft_model",
        )


class Draft(NamedTuple):
    """A model that guesses, and the number of blocks of its caches; 0 if it uses the other model's."""

    model: Model
    n_blocks: int
    block_tokens: int

    @property
    def specs(self) -> tuple[CacheSpec, ...]:
        return self.model.cache_specs(kv_block_tokens=self.block_tokens)

    @property
    def n_bytes(self) -> int:
        return self.model.weight_bytes + self.n_blocks * sum(spec.block_bytes for spec in self.specs)


def load_draft(
    config: ServeConfig, described: ModelConfig, dtype: str, device: torch.device, n_threads: int, share: float
) -> Draft:
    """The language model that guesses. Its caches get as many tokens as the sequences that run usually have, if so much
    of the instance's `share` of memory is free for it. Raises `ConfigError` or `CheckpointError`."""
    itself = config.draft_model == SELF
    folder, of_draft = (model_folder(config), described) if itself else _described(config)
    ops = ops_for(config, of_draft, _ROLE, dtype, n_threads, "int8" if itself else config.quantization)
    draft = Draft(load_model(folder, _ROLE, device, dtype, None, ops, of_draft), 0, config.block_tokens)
    if itself:
        return draft
    longest, n_bytes = -(-of_draft.text.context // config.block_tokens), sum(spec.block_bytes for spec in draft.specs)
    wish = config.max_running * TOKENS_PER_RUNNING // config.block_tokens + 1
    n = min(wish, int(free_bytes(config, device, share, draft.model.weight_bytes) * _SHARE) // n_bytes)
    if n < min(longest, _LEAST_TOKENS // config.block_tokens):
        raise ConfigError(
            f"no memory for the draft model's caches: {n * n_bytes / GIB:.2g} GiB are free; leave --draft-model out",
            param="draft_model",
        )
    return draft._replace(n_blocks=n)


def guesser_of(config: ServeConfig, described: ModelConfig, draft: Draft, stores: Iterable[BlockStore]) -> Guesser:
    """`draft`, which guesses for the model that is `described` and has these `stores`."""
    if not draft.n_blocks:
        specs = [store.spec for store in stores]
        embed = for_stage(specs, Stage.ENCODE)
        return CopyGuesser(draft.model, [spec for spec in specs if spec is not embed])
    own = [BlockStore(spec, draft.n_blocks, draft.model.device) for spec in draft.specs]
    assert isinstance(config.token_budget, int)
    return DraftModel(draft.model, own, described.text.vocab, config.token_budget)


def _described(config: ServeConfig) -> tuple[Path, ModelConfig]:
    """The folder of `--draft-model`, and the model in it. Raises `ConfigError`."""
    assert config.draft_model is not None
    try:
        folder = locate(config.draft_model)
        return folder, read_config(folder)
    except CheckpointError as e:
        raise ConfigError(f"--draft-model: {e}", param="draft_model") from None


def _vocabulary(folder: Path) -> dict[int, str]:
    """The tokens by id. Raises `CheckpointError`."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        return {i: token for token, i in Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).items()}
    except Exception as e:
        raise CheckpointError(f"{file}: the tokenizer cannot be loaded: {str(e).splitlines()[0]}") from None
