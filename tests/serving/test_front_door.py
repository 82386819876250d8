"""What an operator sets at the front door: TLS, a prefix, a chat template of one's own."""

import shutil
import ssl
import subprocess

import httpx
import pytest
from rich.console import Console

from hydrainfer.config import load
from hydrainfer.core import ConfigError
from hydrainfer.serving import serve_in_background
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key, "-out", cert]
    about = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", *made, *about], check=True, capture_output=True)
    return cert, key


def serving(**options):
    return serve_in_background(load({"port": 0, "media_workers": 0, **options}), Console(quiet=True))


def test_tls_and_prefix_and_template(certificate, tmp_path):
    cert, key = certificate
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %} ANSWER")
    files = {"ssl_certfile": str(cert), "ssl_keyfile": str(key), "ssl_ca_certs": str(cert)}
    ask = {"messages": [{"role": "user", "content": "hi"}]}
    with serving(**files, root_path="/hydra", chat_template=str(template)) as (url, _):
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            httpx.get(f"{url}/health", verify=context, timeout=PATIENCE_S)  # the server wants to see a certificate
        context.load_cert_chain(cert, key)
        with httpx.Client(base_url=f"{url}/hydra", verify=context, timeout=60) as client:
            assert client.get("/health").json() == {"status": "ok"}
            made = client.post("/tokenize", json={**ask, "return_token_strs": True}).json()
            assert "".join(made["token_strs"]).strip().endswith("ANSWER")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ssl_keyfile": "key.pem"}, "need ssl_certfile"),
        ({"ssl_certfile": "nowhere.pem"}, "--ssl-certfile: cannot read .*nowhere.pem: No such file"),
        ({"chat_template": "nowhere.jinja"}, "nowhere.jinja"),
    ],
)
def test_mistakes_are_found_at_start(options, why):
    with pytest.raises(ConfigError, match=why), serving(**options):
        pass


def test_swapped_and_missing_tls_files_are_named(certificate):
    cert, key = map(str, certificate)
    for files, why in (
        (
            {"ssl_certfile": key, "ssl_keyfile": cert},
            f"--ssl-certfile: {key} holds no certificate.*, but a private key",
        ),
        ({"ssl_certfile": cert}, f"--ssl-keyfile: {cert} holds no private key"),
        ({"ssl_certfile": cert, "ssl_keyfile": "no.pem"}, "--ssl-keyfile: cannot read no.pem"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": key}, "--ssl-ca-certs: .* holds no certificate"),
    ):
        with pytest.raises(ConfigError, match=why), serving(**files):
            pass


def test_a_prefix_begins_with_a_slash():
    for wrong in ("hydra", "/hydra/", "/a?b"):
        with pytest.raises(ConfigError, match=r"root_path .flag.: must be a path that begins with /"):
            load({"root_path": wrong})
