"""The files of the page: what is served, with which headers, and that nothing is asked of anybody else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.endpoint import DEMO, Stub, error_of, fresh, stubbed
from support.waiting import LIMIT

from mlx_spec.apps.server import page
from mlx_spec.apps.server.settings import Settings

FOLDER = Path(page.__file__).parent
PATHS = ["/", *(page.PREFIX + name for name in page.FILES if name != page.INDEX)]
NODE = shutil.which("node")
NAME_OF_SVG = "http://www.w3.org/2000/svg"  # the namespace, which is never fetched
FOREIGN = re.compile(r"""(?:\w+:)?//[\w$\[]""")


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def foreign(text: str) -> list[str]:
    """Addresses in a text: the namespace does not count, nor do comments."""
    code = re.sub(r"(?m)(^|[;{}])\s*//.*$|[;,{(] // .*$", "", text).replace(NAME_OF_SVG, "")
    return FOREIGN.findall(code)


def test_the_list_names_every_file():
    there = (path for path in FOLDER.rglob("*.*") if path.suffix not in (".py", ".pyc", ".md", ".txt"))
    assert {str(path.relative_to(FOLDER)) for path in there} == set(page.FILES)
    licences = text_of("vendor/LICENSES.txt")
    for name in page.LIBRARIES:
        assert re.search(f"(?m)^== .*{Path(name).name.removesuffix('.min.js')}", licences)


@pytest.mark.parametrize("path", PATHS)
def test_every_file_is_served_as_its_kind_and_guarded(path):
    client = fresh()[1].client
    found = client.get(path)
    name = path.removeprefix(page.PREFIX) if path != "/" else page.INDEX
    assert found.status_code == 200 and found.content == (FOLDER / name).read_bytes()
    assert found.headers["content-type"] in (
        "text/html; charset=utf-8",
        "text/css; charset=utf-8",
        "text/javascript; charset=utf-8",
        "image/svg+xml",
    )
    assert found.headers["x-content-type-options"] == "nosniff"
    policy = found.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert client.head(path).content == b""


def test_unchanged_files_are_not_sent_again():
    client = fresh()[1].client
    found = client.get("/")
    assert found.headers["cache-control"] == "no-cache"
    again = client.get("/", headers={"if-none-match": f'W/{found.headers["etag"]}, "other"'})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/page/__init__.py", "/page/..%2fapp.py", "/page/%2e%2e/app.py"])
def test_other_names_are_404(path):
    assert error_of(fresh()[1].client.get(path), 404)["code"] == "unknown_url"


@pytest.mark.parametrize("name", sorted({*page.FILES} - {*page.LIBRARIES}))
def test_nothing_is_fetched_from_elsewhere(name):
    assert foreign(text_of(name)) == []
    assert "data:" not in re.sub('"data:"|/\\^data:', "", text_of(name))  # such addresses are read


def test_page_names_only_what_is_served():
    named = re.findall(r'(?:src|href)="([^"#]+)"', text_of(page.INDEX))
    assert len(named) == 6 and {f"/{name}" for name in named} <= set(PATHS), "below the path of a proxy, too"
    for name in page.MODULES:
        imported = re.findall(r'from "\./([^"]+)"', text_of(name))
        assert set(imported) <= set(page.MODULES), name
        assert not re.search(r'["`]/(?:v1|page|health|metrics)', text_of(name)), name


def test_text_never_becomes_markup():
    for name in page.MODULES:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|eval\(", text_of(name)
        )
        assert "document.cookie" not in text_of(name)
    html = text_of(page.INDEX)
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\son\w+=", html)


def test_metrics_are_there_as_the_page_reads_them():
    endpoint = stubbed(Stub())
    assert endpoint.client.get("/metrics.json").json()["last"] is None
    endpoint.chat()
    found = endpoint.client.get("/metrics.json").json()
    assert found["queue"] == {"waiting": 0, "running": 0, "waits_for": None} and found["loading"] is None
    assert found["memory_bytes"] == found["memory_budget_bytes"] == 0
    expected = {
        "model": "demo",
        "predicted_per_second": 20.0,
        "batch_n": 1.5,
        "gain": pytest.approx(1.5),
        "acceptance_length": 2.0,
        "speculation": "on",
        "reason": "speculation pays",
    }
    assert {key: found["last"][key] for key in expected} == expected
    numbers = found["models"]["demo"]
    assert numbers["last"] == found["last"]
    assert numbers["generation_tokens_total"] == 4 and numbers["gain"] == pytest.approx(1.5)
    assert numbers["spec_decode_num_accepted_tokens_per_pos_total"] == {"lookup": [1, 1]}
    script = text_of("figures.js")
    read = set(re.findall(r'(?:"|numbers\.)([a-z_]+_(?:total|count|sum))', script))
    assert len(read) == 10 and read <= set(numbers)
    assert set(re.findall(r"metrics\.(?!json)(\w+)", script + text_of("chat.js"))) <= set(found)


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize(("path", "leads"), [("/v1", "./"), ("/v1/", "../")])
def test_the_base_url_leads_a_browser_to_the_page(path, leads, key):
    client = stubbed(Stub(), Settings(DEMO, api_key=key)).client
    led = client.get(path, headers={"accept": "text/html,*/*"}, follow_redirects=False)
    assert (led.status_code, led.headers["location"]) == (307, leads), "below the path of a proxy, too"
    assert client.get(path, headers={"accept": "text/html"}).text == text_of(page.INDEX)
    for asked in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        assert client.get(path, headers=asked).status_code == (404 if key is None else 401)
    assert client.post(path, headers={"accept": "text/html"}, json={}).status_code == (
        404 if key is None else 401
    )


@pytest.mark.skipif(NODE is None, reason="needs Node 18: install Debian's package nodejs")
def test_functions_of_the_page_without_a_browser(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "page")
    (folder / "package.json").write_text('{"type": "module"}')  # as a browser takes them
    tests = Path(__file__).with_name("page.test.mjs")
    environment = os.environ | {"PAGE": str(folder)}
    done = subprocess.run(
        [str(NODE), "--test", str(tests)], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
