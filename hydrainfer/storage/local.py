"""Copies within one process, from store to store."""

from __future__ import annotations

import numpy as np
import torch

from hydrainfer.core import ExportHandle
from hydrainfer.ops import upload
from hydrainfer.storage.store import BlockStore
from hydrainfer.storage.transport import CopyBlocks, LocalExports, Unreachable, pieces_of
from hydrainfer.storage.way import ProcessPlace, Tools, Way


class LocalTransport:
    """The transport within a process: one copy per run of blocks or, on CUDA, one call of `copy_blocks` for all."""

    def __init__(self, exports: LocalExports, copy_blocks: CopyBlocks | None = None) -> None:
        self._exports, self._copy_blocks = exports, copy_blocks

    def copy(self, source: ExportHandle, source_ids: list[int], store: BlockStore, ids: list[int]) -> None:
        theirs = self._exports.get(source.ways["local"])
        if theirs is None:
            raise Unreachable(f"{source.owner} is not in this process")
        pieces = pieces_of(source, source_ids, store, ids)
        if self._copy_blocks is not None and len(pieces) > 1 and theirs.device == store.device:
            on = upload({"to": np.array(ids), "from": np.array(source_ids)}, store.device)
            self._copy_blocks(store.bytes, on["to"], theirs.bytes, on["from"])
            pieces = []
        for first, into, n in pieces:
            store.bytes[into : into + n].copy_(theirs.bytes[first : first + n], non_blocking=True)
        for device in {theirs.device, store.device}:  # one of the stores may be in host memory
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def forget(self, owner: str) -> None:
        pass

    def close(self) -> None:
        pass


def _offer(key: str, store: BlockStore, tools: Tools) -> str:
    assert tools.local is not None, "no LocalExports"
    tools.local.add(key, store)
    return key


def _reaches(source: ExportHandle, place: ProcessPlace, device: torch.device) -> str:  # noqa: ARG001 - any device
    return "same process" if (source.host, source.process) == place else ""


WAY = Way(
    "local",
    check=lambda _: "",
    offer=_offer,
    reaches=_reaches,
    open=lambda tools: LocalTransport(tools.local or LocalExports(), tools.copy_blocks),
    between=False,
)
