"""From what the user calls a model to a folder, and from a configuration to a model.

Room: models. Rule: one place knows which families are served and how each is built; anything that
needs a network says so in one sentence when there is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import torch

from rimuru.errors import ConfigError, UnsupportedModelError
from rimuru.models.config import ModelConfig
from rimuru.models.decoder import Decoder

_BUILDERS: dict[str, Callable[..., Decoder]] = {
    "mixtral": Decoder,
    "qwen2_moe": Decoder,
    "qwen3_moe": Decoder,
    "olmoe": Decoder,
    "qwen3_next": Decoder,
    "qwen3_5_moe": Decoder,
}
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def build_model(
    config: ModelConfig,
    ops: ModuleType,
    device: torch.device | str,
    dtype: torch.dtype,
    max_positions: int | None = None,
    embedding: torch.Tensor | None = None,
) -> Decoder:
    """Allocate a model, weights uninitialised. On device "meta" it costs nothing and can be measured.
    `embedding`: see `Decoder`.
    """
    try:
        builder = _BUILDERS[config.family]
    except KeyError:
        raise UnsupportedModelError(
            f"family {config.family!r} is not served; served are {', '.join(_BUILDERS)}"
        ) from None
    return builder(config, ops, device, dtype, max_positions, embedding)


def resolve_model(
    name: str,
    revision: str | None = None,
    local: Mapping[str, Callable[[], Path]] | None = None,
    weights: bool = True,
) -> Path:
    """The folder of model `name`: a name in `local`, an existing folder, or a Hub id (then downloaded).

    `local` maps names to functions that give a folder. Without `weights` only configuration and
    tokenizer are fetched. Raises `ConfigError` where there is no such folder, repository or network.
    """
    if local and name in local:
        return local[name]()
    try:
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder
        is_file = folder.is_file()
    except (OSError, RuntimeError):  # a name too long for a path, a user that does not exist
        is_file = False
    if is_file:
        raise ConfigError(
            f"{name} is a file; MODEL must be the folder that holds config.json and the weights"
        )
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"{name!r}: no such folder; MODEL must be a local folder or a Hub id such as org/name"
        )
    return _download(name, revision, [*_SMALL_FILES, *(["*.safetensors"] if weights else [])])


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    # Imported here: it is slow to import, and of no use to whoever serves a local folder.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"model {name!r}: no such folder here, and as a Hub id"
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, ignore_patterns="consolidated*"
            )
        )
    except GatedRepoError:
        raise ConfigError(
            f"{where} it is gated: accept its terms on the Hub and log in with `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(f"{where} it has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise ConfigError(f"{where} it does not exist (or is private: log in with `hf auth login`)") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ConfigError(
            f"{where} it is not in the local cache and cannot be fetched ({type(error).__name__}): "
            "check the network and HF_HUB_OFFLINE, or give a local folder"
        ) from None
