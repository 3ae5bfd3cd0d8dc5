"""Certificates of a site: the names of its servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509

from moorage.bus.certificates import certificates
from moorage.bus.site import Server, Site


@pytest.mark.parametrize(
    ("host", "names"),
    [
        ("127.0.0.1", {"127.0.0.1", "localhost"}),
        ("10.0.0.7", {"10.0.0.7"}),
        ("nats-1.example", {"nats-1.example"}),
    ],
)
def test_a_server_is_named_by_its_host_and_on_loopback_by_localhost_too(
    tmp_path: Path, host: str, names: set[str]
) -> None:
    """Callers in JavaScript refused a server of 127.0.0.1: they ask for `localhost`."""
    certificates(tmp_path, Site(tenants=("acme",), servers=(Server(host),), auth="mtls"))
    made = x509.load_pem_x509_certificate((tmp_path / "server.1.pem").read_bytes())
    assert {
        str(each.value) for each in made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    } == names
