"""The TLS of a server, from its options."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from hydrainfer.config import ServeConfig
from hydrainfer.core import ConfigError


def tls_arguments(config: ServeConfig) -> dict[str, Any]:
    """The arguments of `uvicorn.Config` for TLS. Raises `ConfigError`."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile or config.ssl_ca_certs:
            raise ConfigError("ssl_keyfile and ssl_ca_certs need ssl_certfile", param="ssl_certfile")
        return {}
    names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    files = {n: str(Path(file).expanduser()) for n in names if (file := getattr(config, n)) is not None}
    for name, path in {**files, "ssl_keyfile": files.get("ssl_keyfile", files["ssl_certfile"])}.items():
        _check_pem(Path(path), name, "PRIVATE KEY" if name == "ssl_keyfile" else "CERTIFICATE")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files["ssl_certfile"], files.get("ssl_keyfile"), password="")
        if config.ssl_ca_certs:
            context.load_verify_locations(files["ssl_ca_certs"])
    except (OSError, ValueError) as e:
        raise ConfigError(f"TLS: {', '.join(files.values())}: {e}", param="ssl_certfile") from None
    return {**files, **({"ssl_cert_reqs": ssl.CERT_REQUIRED} if config.ssl_ca_certs else {})}


def _check_pem(path: Path, option: str, kind: str) -> None:
    """Raises `ConfigError` unless the file of this option can be read and holds PEM of this kind."""
    flag = f"--{option.replace('_', '-')}"
    try:
        held = path.read_text("latin-1")
    except OSError as e:
        raise ConfigError(f"{flag}: cannot read {path}: {e.strerror}", param=option) from None
    if f"{kind}-----" not in held:
        other = "PRIVATE KEY" if kind == "CERTIFICATE" else "CERTIFICATE"
        hint = f", but a {other.lower()}" if f"{other}-----" in held else ""
        raise ConfigError(f"{flag}: {path} holds no {kind.lower()} (PEM){hint}", param=option)
