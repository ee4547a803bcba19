"""Headless Chromium, controlled over a pipe (the DevTools protocol)."""

import json
import os
import select
import shutil
import subprocess
import time
from contextlib import suppress

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
)


class Page:
    """One page; `problems` has the errors and warnings of its console and its network requests."""

    def __init__(self, folder, address, width=1280, height=900, dark=False):
        self.problems, self.last, self.buffer = [], 0, b""
        commands, self.write = os.pipe()
        self.read, answers = os.pipe()
        shell = (
            f"exec 3<&{commands} 4>&{answers}; "
            f'exec "{CHROMIUM}" {CHROMIUM_FLAGS} --remote-debugging-pipe --user-data-dir="{folder}"'
        )
        self.process = subprocess.Popen(
            ["bash", "-c", shell], pass_fds=(commands, answers), stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.resize(width, height)
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        with suppress(OSError, TimeoutError):
            self.call("Browser.close", everywhere=True)
        self.process.kill()
        self.process.wait()
        os.close(self.write)
        os.close(self.read)

    def resize(self, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def call(self, method, everywhere=False, **params):
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session and not everywhere:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.last:
                assert "error" not in answer, answer
                return answer["result"]
            self.record_problem(answer)

    def receive(self, seconds=60):
        while b"\0" not in self.buffer:
            if not select.select([self.read], [], [], seconds)[0]:
                raise TimeoutError("Chromium does not respond")
            chunk = os.read(self.read, 1 << 20)
            if not chunk:
                raise OSError("Chromium has exited")
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def record_problem(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(params["args"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.problems.append(url)

    def value(self, expression):
        """The value of a JavaScript expression; an exception in the page fails the test."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression, seconds=30):
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.05)

    def mouse(self, kind, x, y, buttons=1):
        self.call(
            "Input.dispatchMouseEvent",
            type=kind, x=x, y=y, button="left", buttons=buttons, clickCount=1,
        )  # fmt: skip
