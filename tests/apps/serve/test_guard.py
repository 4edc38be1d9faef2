"""Who may call: addresses, names, origins, keys, sizes and kinds of bodies. Each refusal has its API's form."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, serving

from edgekit.apps.serve.application import routes_of
from edgekit.apps.serve.guard import PUBLIC
from edgekit.apps.serve.keys import read_keys
from edgekit.apps.serve.page import PATHS
from edgekit.apps.serve.server import check_exposure
from edgekit.apps.serve.service import Service
from edgekit.apps.serve.settings import ServerSettings
from edgekit.errors import InvalidInput

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
KEY = "a-key-of-more-than-16"


def raw(served: Served, data: bytes) -> bytes:
    """The beginning of what the server answers to bytes; nothing if it closes or is silent."""
    host, port = served.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=2) as connection:
        connection.sendall(data)
        try:
            return connection.recv(100)
        except TimeoutError:
            return b""


def test_other_hosts_need_keys(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.4", "example.org"):
        with pytest.raises(InvalidInput, match="--api-key-file"):
            check_exposure(ServerSettings(host=host))
        check_exposure(ServerSettings(host=host, api_key_file=tmp_path))
    for host in ("127.0.0.1", "localhost", "::1"):
        check_exposure(ServerSettings(host=host))


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# mine\nalice {KEY}\nbob sha256:{hashlib.sha256(b'the other key of bob').hexdigest()}\n")
    with serving(
        ollama=True, api_key_file=file, allowed_hosts=("models.example",), allowed_origins=("https://app.example",)
    ) as served:
        yield served


@pytest.mark.parametrize(
    ("method", "path"), [(method, path) for method, path, _ in routes_of(ServerSettings(ollama=True))]
)
def test_every_path_but_health_needs_a_key(keyed: Served, method: str, path: str) -> None:
    answer = httpx.request(
        method, keyed.url + path.replace("{name:path}", "tiny"), json=CHAT if method == "POST" else None
    )
    if path in PUBLIC | PATHS:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 401
        assert "bearer" in answer.headers["www-authenticate"].lower()
        assert "error" in answer.json()


def test_unknown_paths_say_nothing_without_a_key(keyed: Served) -> None:
    assert httpx.get(f"{keyed.url}/nothing").status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": "the other key of bob"}, 200),
        ({"x-api-key": KEY, "authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY, "authorization": "Bearer the other key of bob"}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
def test_keys(keyed: Served, headers: dict[str, str], status: int) -> None:
    assert httpx.get(f"{keyed.v1}/models", headers=headers).status_code == status


def test_key_files_are_checked(tmp_path: Path) -> None:
    for text, reason in (
        ("", "holds no key"),
        ("a short", "shorter"),
        ("alone", "a name and a key"),
        ("a " + KEY + "\na " + KEY, "unique"),
    ):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(InvalidInput, match=reason):
            read_keys(tmp_path / "keys")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1234", 200),
        ("models.example", 200),
        ("evil.com", 403),
        ("127.0.0.1.evil.com", 403),
        ("localhost.evil.com", 403),
        ("127.0.0.1@evil.com", 403),
        ("", 403),
    ],
)
def test_only_known_host_names_are_answered(keyed: Served, host: str, status: int) -> None:
    assert httpx.get(f"{keyed.url}/livez", headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\nConnection: close\r\n\r\n",
        b"GET http://evil.com/livez HTTP/1.1\r\nHost: evil.com\r\nConnection: close\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 80 + b"\r\n",
        b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /\r\n\r\n",
    ],
)
def test_strange_requests_are_refused(keyed: Served, head: bytes) -> None:
    assert raw(keyed, head)[9:10] in (b"4", b"")
    assert httpx.get(f"{keyed.url}/livez").status_code == 200


def test_only_allowed_pages_may_call(keyed: Served) -> None:
    call: Any = {"url": f"{keyed.v1}/chat/completions", "json": CHAT}
    key = {"x-api-key": KEY}
    allowed = httpx.post(**call, headers=key | {"origin": "https://app.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        refused = httpx.post(**call, headers=key | headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert not [name for name in refused.headers if name.startswith("access-control")]
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    assert httpx.options(call["url"], headers=asked).status_code == 204
    assert httpx.options(call["url"], headers=asked | {"origin": "https://evil.example"}).status_code == 403


def test_bodies_are_json_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "max_body", 2000)
    with serving() as served:
        url = f"{served.v1}/chat/completions"
        as_json = {"content-type": "application/json"}
        assert httpx.post(url, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
        assert httpx.post(url, content=b"{}", headers=as_json | {"content-encoding": "gzip"}).status_code == 415
        assert httpx.post(url, content=b"x" * 2001, headers=as_json).status_code == 413
        assert httpx.post(url, content=iter([b"x" * 1500] * 2), headers=as_json).status_code == 413
        hostile = (
            b"",
            b"{",
            b"[]",
            b'"x"',
            b'{"messages": NaN}',
            b'{"messages":"\\ud800"}',
            b"[" * 1900,
            b"\xff\xfe",
            b'{"a":' * 300,
        )
        for body in hostile:
            answer = httpx.post(url, content=body, headers=as_json)
            assert (answer.status_code, set(answer.json()["error"])) == (400, {"message", "type", "param", "code"})


def test_an_error_does_not_repeat_its_input() -> None:
    with serving() as served:
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}] * 200}] * 50}
        answer = httpx.post(
            f"{served.v1}/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert len(answer.content) < 1000


def test_a_request_id_is_kept_if_it_is_plain(keyed: Served) -> None:
    assert httpx.get(f"{keyed.url}/livez", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert httpx.get(f"{keyed.url}/livez", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req_")


def test_wrong_methods_name_the_right_one(keyed: Served) -> None:
    answer = httpx.get(f"{keyed.v1}/chat/completions", headers={"x-api-key": KEY})
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_the_log_holds_no_content(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with serving() as served:
        canary = "a-canary-in-a-mine"
        body = {
            "messages": [{"role": "user", "content": canary, "name": canary}],
            "user": canary,
            "stop": [canary],
            "max_tokens": 2,
        }
        httpx.post(
            f"{served.v1}/chat/completions?key={canary}", json=body, headers={"authorization": f"Bearer {canary}"}
        )
        httpx.post(f"{served.v1}/chat/completions", json={"messages": canary, "model": canary})
    ours = [record for record in caplog.records if record.name.startswith(("edgekit", "uvicorn"))]
    assert any("/v1/chat/completions" in record.getMessage() for record in ours)
    assert not [record for record in ours if canary in record.getMessage()]
