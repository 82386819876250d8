"""One reading of a URL, and no way around it to an address that is not public."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrainfer.core import InvalidRequest
from hydrainfer.processor.fetching.addresses import check_host, is_listed, may_connect, parse_url

pytestmark = pytest.mark.unit

PUBLIC = ["8.8.8.8", "93.184.216.34", "172.15.0.1", "172.32.0.1", "100.63.0.1", "100.128.0.1", "2606:4700::1111"]
PRIVATE = ["127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "::1"]
PRIVATE += ["fc00::1", "fd12::1"]
NEVER = ["0.0.0.0", "0.1.2.3", "169.254.169.254", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.0.8"]
NEVER += ["198.18.0.1", "192.0.2.1", "198.51.100.1", "203.0.113.1", "192.88.99.1", "100.100.100.200", "168.63.129.16"]
NEVER += ["::", "fe80::1", "fec0::1", "ff02::1", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "::8.8.8.8", "64:ff9b::808:808"]
NEVER += ["64:ff9b:1::1", "2002:7f00:1::", "2001::1", "2001:db8::1", "100::1", "5f00::1", "fd00:ec2::254"]


@pytest.mark.parametrize("ip", [*PUBLIC, *PRIVATE, *NEVER])
def test_addresses(ip):
    assert may_connect(ip_address(ip), "public") is (ip in PUBLIC)
    assert may_connect(ip_address(ip), "any") is (ip in PUBLIC or ip in PRIVATE)
    assert not may_connect(ip_address(ip), "none")


@given(st.ip_addresses())
def test_addresses_that_python_calls_private_are_never_public(ip):
    if not ip.is_global or ip.is_multicast:
        assert not may_connect(ip, "public")


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("http://a.example", ("http", "a.example", 80, "/")),
        ("HTTPS://A.Example.:444/b c".replace(" ", "%20"), ("https", "a.example", 444, "/b%20c")),
        ("http://a.example/ü?q=ä b#frag".replace(" ", "+"), ("http", "a.example", 80, "/%C3%BC?q=%C3%A4+b")),
        ("http://bücher.example/", ("http", "xn--bcher-kva.example", 80, "/")),
        ("http://a.example?x=1", ("http", "a.example", 80, "/?x=1")),
        ("http://8.8.8.8:81/x", ("http", "8.8.8.8", 81, "/x")),
        ("http://[2606:4700:0:0::1111]/x", ("http", "2606:4700::1111", 80, "/x")),
        ("http://8.8.8.8/x", ("http", "8.8.8.8", 80, "/x")),  # full-width digits
        (
            "http://a.example//b/../c;d=%2e?u=http://b.example/",
            ("http", "a.example", 80, "//b/../c;d=%2e?u=http://b.example/"),
        ),
    ],
)
def test_urls_are_parsed_into_host_port_and_path(url, parsed):
    assert tuple(parse_url(url, "p"))[:4] == parsed


def test_the_host_header():
    assert parse_url("http://[2606:4700::1]:81/", "p").netloc == "[2606:4700::1]:81"
    assert parse_url("https://a.example:443/", "p").url == "https://a.example/"


SPELLINGS = ["2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "127.0.1", "127.0.0.01", "1.2.3.4.5", "0x"]
SPELLINGS += ["127.0.0.1.", "256.1.1.1", "08.8.8.8", "１２７.1", "a.0x7f", "foo.1"]


@pytest.mark.parametrize("host", SPELLINGS)
def test_other_spellings_of_ipv4_are_refused(host):
    with pytest.raises(InvalidRequest, match="four decimal numbers"):
        parse_url(f"http://{host}/x", "p")


BAD = ["", "http:", "http://", "http:///x", "//a.example/x", "a.example/x", "http://a b/", "http://a.example/\nx"]
BAD += ["http://a.example\\@b.example/", "http:\\\\a.example/", "http://user@a.example/", "http://u:p@a.example/"]
BAD += ["http://@a.example/", "http://a.example:0/", "http://a.example:99999/", "http://a.example:x/", "http://[::1/"]
BAD += ["http://[::1%25eth0]/", "http://[fe80::1%eth0]/", "http://a..example/", "http://-a.example/", "http://a%2eb/"]
BAD += ["http://a.example%00.b/", "ftp://a.example/", "gopher://a/", "http://" + "a" * 64 + ".example/", "http://*.b/"]
BAD += ["http://a.example/" + "x" * 9000, "http://[v1.x]/", "http://[::ffff:127.0.0.1/", "javascript:alert(1)"]


@pytest.mark.parametrize("url", BAD)
def test_bad_urls(url):
    with pytest.raises(InvalidRequest, match="URL cannot be used") as e:
        parse_url(url, "messages.0")
    assert e.value.param == "messages.0" and e.value.code == "invalid_url"


@given(st.text(max_size=30))
def test_no_text_raises_anything_else(text):
    for url in (text, f"http://{text}", f"http://a.example/{text}", f"http://[{text}]/"):
        try:
            address = parse_url(url, "p")
        except InvalidRequest:
            continue
        assert address.target.isascii() and address.host.isascii() and " " not in address.target


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "169.254.169.254", "[fe80::1]", "0.0.0.0"]
)
def test_addresses_written_in_a_url(host):
    address = parse_url(f"http://{host}/", "p")
    with pytest.raises(InvalidRequest, match="does not connect to") as e:
        check_host(address, "public", (), "p")
    assert "127" not in e.value.message
    if host in ("127.0.0.1", "[::1]"):
        check_host(address, "any", (), "p")


def test_domains():
    domains = ("a.example", "*.b.example")
    assert is_listed("a.example", domains) and is_listed("x.b.example", domains) and is_listed("x.y.b.example", domains)
    assert not any(is_listed(h, domains) for h in ("b.example", "x.a.example", "xb.example", "a.example.evil"))
    with pytest.raises(InvalidRequest, match="list of allowed hosts"):
        check_host(parse_url("http://c.example/", "p"), "public", domains, "p")
    with pytest.raises(InvalidRequest, match="not fetched by this server"):
        check_host(parse_url("http://a.example/", "p"), "none", domains, "p")
