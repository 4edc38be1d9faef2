"""A program that behaves as `adb` does, over the folder of a `fake_adb.Phone`: its shell runs, its files move.

Its words, where it prints them and its exit codes are those of the real client, version 29, with nothing plugged in and
with broken connections. It starts dozens of times a test, so it imports as little as it can.
"""

# ruff: noqa: PTH110, PTH112, PTH113, PTH119, PTH120, PTH123

from __future__ import annotations

import marshal
import os
import sys
import time

SERIAL = "R5CT10ABCDE"
Settings = dict[str, object]


def main(folder: str, words: list[str]) -> int:
    with open(f"{folder}/settings", "rb") as file:
        settings: Settings = marshal.load(file)
    with open(f"{folder}/calls", "a") as calls:
        calls.write("\x1f".join(words) + "\x1e")
    slow = settings.get("slow_s", 0.0)
    assert isinstance(slow, float)
    time.sleep(slow)
    if words[:1] != ["-s"] or len(words) < 3:
        return _said("adb: more than one device/emulator", 1)
    verb, rest = words[2], words[3:]
    why = _missing(words[1], settings.get("is", "device") if words[1] == SERIAL else "gone")
    if why and verb in ("push", "pull"):
        return _told(f"adb: error: failed to get feature set: {why}", 1)  # transfers say it on stdout
    if why:
        return _said(f"error: {why}", 1)
    if verb == "get-state":
        return _told("device", 0)
    if verb == "shell":
        return _shell(folder, rest[-1], settings)
    if verb == "push":
        return _push(rest[0], rest[1], settings)
    return _pull(rest[0], rest[1])


def _missing(serial: str, state: object) -> str:
    """Why the phone cannot be used, in adb's words."""
    if state == "device":
        return ""
    if state == "offline":
        return "device offline"
    if state == "unauthorized":
        return (
            "device unauthorized.\nThis adb server's $ADB_VENDOR_KEYS is not set\nTry 'adb kill-server' if that seems "
            "wrong.\nOtherwise check for a confirmation dialog on your device."
        )
    return f"device '{serial}' not found"


def _told(text: str, code: int) -> int:
    sys.stdout.write(text + "\n")
    return code


def _said(text: str, code: int) -> int:
    sys.stderr.write(text + "\n")
    return code


def _shell(folder: str, command: str, settings: Settings) -> int:
    is_old, cut = bool(settings.get("old")), settings.get("cut")
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": "/"}
    os.chdir(f"{folder}/data")
    os.closerange(3, 256)  # nothing of this machine is open on a phone
    is_cut = isinstance(cut, str) and cut in command
    if not is_old and not is_cut:
        os.execve("/bin/sh", ["sh", "-c", command], environment)
    import subprocess

    done = subprocess.Popen(
        ["/bin/sh", "-c", command], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if is_old else None, start_new_session=True,
    )  # fmt: skip
    if is_cut:
        for _ in range(600):  # until what it waits for is there
            if os.path.exists(f"{folder}/data/{settings.get('cut_after', '')}"):
                break
            time.sleep(0.1)
        # The phone goes on without us; a new client says so, an old one ends as if all were well.
        return 0 if is_old or settings.get("silent") else _said("error: closed", 255)
    out = done.communicate()[0]
    sys.stdout.buffer.write(out.replace(b"\n", b"\r\n") if is_old else out)
    sys.stdout.flush()
    return 0 if is_old else done.returncode


def _push(source: str, target: str, settings: Settings) -> int:
    if not os.path.isdir(os.path.dirname(target)):
        return _not_copied(source, target, "remote couldn't create file: No such file or directory")
    with open(source, "rb") as file:
        data = file.read()
    kept, why, cut = data, "", settings.get("cut")
    if isinstance(cut, str) and cut in os.path.basename(target):
        kept, why = data[: len(data) // 2], "failed to read copy response: EOF"
    elif settings.get("full"):
        kept, why = data[:100], "remote write failed: No space left on device"
    elif settings.get("damages"):
        kept = data[:-1] + bytes([data[-1] ^ 1])
    with open(target, "wb") as file:
        file.write(kept)
    if why:
        return _not_copied(source, target, why)
    return _said(f"{source}: 1 file pushed, 0 skipped. 31.4 MB/s ({len(data)} bytes in 0.001s)", 0)


def _not_copied(source: str, target: str, why: str) -> int:
    return _told(f"adb: error: failed to copy '{source}' to '{target}': {why}", 1)


def _pull(source: str, target: str) -> int:
    if not os.path.isfile(source):
        return _told(f"adb: error: failed to stat remote object '{source}': No such file or directory", 1)
    with open(source, "rb") as file, open(target, "wb") as copy:
        size = copy.write(file.read())
    return _said(f"{source}: 1 file pulled, 0 skipped. 12.0 MB/s ({size} bytes in 0.001s)", 0)
