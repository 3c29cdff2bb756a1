"""Drives headless Chromium through its DevTools protocol on two pipes."""

import base64
import io
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from matplotlib.image import imread

CHROMIUM = shutil.which("chromium")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --hide-scrollbars
    --disable-dev-shm-usage --remote-debugging-pipe""".split()


class Browser:
    """One page; `events` holds all events of the browser as (method, parameters)."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self.into = os.pipe()
        self.out_of, theirs_too = os.pipe()
        # The browser reads commands from 3 and writes answers to 4, each ended by a zero byte.
        script = f'exec "$0" "$@" 3<&{theirs} 4>&{theirs_too}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *FLAGS, f"--user-data-dir={self.folder.name}"],
            pass_fds=(theirs, theirs_too),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(theirs_too)
        self.number, self.rest, self.session, self.events = 0, b"", None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.into)
        os.close(self.out_of)
        self.folder.cleanup()

    def call(self, method, **params):
        """Sends a command and returns its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "result" in answer, answer
                return answer["result"]
            self.events.append((answer["method"], answer["params"]))

    def open(self, path: Path, *, width: int, dark: bool):
        """Opens a file in a window of this width, in light or dark mode; waits until it loads."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in [method for method, _ in self.events]:
            answer = self._next()
            self.events.append((answer["method"], answer["params"]))

    def ask(self, expression: str):
        """Evaluates a JavaScript expression on the page."""
        return self.call("Runtime.evaluate", expression=expression)["result"]["value"]

    def picture(self):
        """A screenshot of the whole page: an array (height, width, 3), and its PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        png = base64.b64decode(shot)
        return imread(io.BytesIO(png))[..., :3], png

    def complaints(self) -> list[str]:
        """Console output, errors, and all requests but that for the page."""
        found = []
        for method, params in self.events:
            if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(f"{method}: {json.dumps(params)}")
            elif method == "Network.requestWillBeSent" and params["type"] != "Document":
                found.append(f"request: {params['request']['url']}")
        return found

    def _next(self):
        while b"\0" not in self.rest:
            block = os.read(self.out_of, 1 << 20)
            assert block, "the browser has exited"
            self.rest += block
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)
