"""A machine that labgrid lends: reserved and acquired through its own client, measured over ssh, always given back.

Who waits for whom, and what is wired to what, is labgrid's business. Here: one place, while one question is answered.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from edgekit.errors import DeviceFailed, DeviceTimeout, DeviceUnreachable, InvalidInput, clip
from edgekit.files import home
from edgekit.lab.devices import DeviceSpec
from edgekit.lab.leases import lease
from edgekit.lab.programs import Programs
from edgekit.lab.ssh import SshDevice
from edgekit.measure.measurement import Measurement
from edgekit.profiles import load_profile

_OPTIONS = {"place": str, "tags": str, "client": str, "boot_s": int}
_POWER = ("NetworkPowerPort", "PDUDaemonPort", "NetworkUSBPowerPort", "NetworkSiSPMPowerPort", "TasmotaPowerPort",
          "NetworkYKUSHPowerPort")  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TAGS = re.compile(r"[a-z][a-z0-9_]{1,31}=[A-Za-z0-9_-]{1,64}(,[a-z][a-z0-9_]{1,31}=[A-Za-z0-9_-]{1,64}){0,9}")
_MAX_TOLD_BYTES, _CLIENT_S, _CYCLE_AFTER, _STEP_S = 1 << 20, 60.0, 2, 2.0
# Its input ends when the lab lets go, and also when the lab is killed.
_GUARD = """
cat > /dev/null
for try in 1 2 3 4 5 6; do
  told=$({client} -p +{token} release-from {owner} 2>&1) && break
  case "$told" in *"is not acquired"*|*"matches nothing"*) break;; esac
  sleep 5
done
{client} cancel-reservation {token}
"""


class Place(NamedTuple):
    """What labgrid says of a place."""

    name: str
    resources: tuple[tuple[str, dict[str, Any]], ...]  # class and parameters

    def host(self) -> dict[str, Any] | None:
        """How it is reached: its first NetworkService."""
        return next((known for kind, known in self.resources if kind == "NetworkService"), None)

    def has_power(self) -> bool:
        """Whether labgrid can switch it off and on."""
        return any(kind in _POWER for kind, _ in self.resources)


class LabgridDevice:
    """Acquires a place of a labgrid coordinator, measures there over ssh, and gives it back, whatever happens."""

    can_prepare = True

    def __init__(self, spec: DeviceSpec, profiles: Sequence[Path] = ()) -> None:
        ours = {name: value for name, value in spec.options.items() if name in _OPTIONS}
        for name, value in ours.items():
            if type(value) is not _OPTIONS[name]:
                raise InvalidInput(f"{spec.name}: option {name}: expected {_OPTIONS[name].__name__}, not {clip(value)}")
        if spec.address is None or not re.fullmatch(r"[A-Za-z0-9\[][A-Za-z0-9_.:\]-]{0,253}", spec.address):
            raise InvalidInput(f"{spec.name}: address: give that of the labgrid coordinator, as HOST:PORT")
        self.name, self.spec, self.profile = spec.name, spec, load_profile(spec.profile, profiles)
        self._wanted = _filters(spec.name, ours)
        self._boot_s = float(ours.get("boot_s", 180))
        found = shutil.which(str(ours.get("client", "labgrid-client")))
        if found is None:
            raise DeviceFailed(f"{spec.name}: kind labgrid needs labgrid-client: pip install labgrid, or say `client`")
        self._client = [found, "-x", spec.address]
        # The same for all runs of this user here: what a dead one still holds is told from what others hold.
        self._owner = (platform.node(), f"edgekit-{hashlib.sha256(str(home()).encode()).hexdigest()[:12]}")
        self._environment = {**os.environ, "LG_HOSTNAME": self._owner[0], "LG_USERNAME": self._owner[1]}
        self._others = {name: value for name, value in spec.options.items() if name not in _OPTIONS}
        self._profiles, self._programs = profiles, Programs(spec.name)
        self._ssh = self._reached({"address": "not-known-yet"})  # refuses unknown options now
        self._lost = 0  # in a row

    def ping(self, *, timeout_s: float) -> str:
        if "name" not in self._wanted:
            self._ask(["places"], timeout_s)
            return f"labgrid at {self.spec.address}; any place with {self._said()}"
        place = self._place(["-p", self._wanted["name"]], timeout_s)
        return f"labgrid place {place.name} at {clip(self._host(place)['address'])}"

    @contextmanager
    def acquire(self, *, timeout_s: float) -> Iterator[None]:
        ends = monotonic() + timeout_s
        with lease(f"labgrid {self.spec.address} {self._said()}", self.name, timeout_s):
            if "name" in self._wanted:
                # Ours and dead, if ever: the guard of a lab whose machine lost power could not give it back.
                with suppress(DeviceFailed):
                    self._ask(["-p", self._wanted["name"], "release-from", "/".join(self._owner)], _CLIENT_S)
            token = self._reserve()
            with self._guarded(token):
                self._ask(["wait", token], max(1.0, ends - monotonic()))
                self._ask(["-p", f"+{token}", "acquire"], max(1.0, ends - monotonic()))
                place = self._place(["-p", f"+{token}"], _CLIENT_S)
                self._ssh = self._reached(self._host(place))
                if self._lost >= _CYCLE_AFTER and place.has_power():
                    self._cycle(token)
                yield

    def measure(self, artifact: Path, workload: Path, *, timeout_s: float) -> Measurement:
        try:
            found = self._ssh.measure(artifact, workload, timeout_s=timeout_s)
        except (DeviceUnreachable, DeviceTimeout):
            self._lost += 1
            raise
        self._lost = 0
        return found

    def stop(self) -> None:
        self._programs.stop()
        self._ssh.stop()

    def _reserve(self) -> str:
        """The token of a new reservation; its turn may come later."""
        filters = [f"{key}={value}" for key, value in self._wanted.items()]
        told = self._ask(["reserve", "--shell", *filters], _CLIENT_S)
        found = re.search(r"^export LG_TOKEN=([A-Z0-9]{4,64})$", told, re.MULTILINE)
        if found is None:
            raise DeviceFailed(f"{self.name}: labgrid-client reserve answered {clip(told)}; it may be another version")
        return found[1]

    @contextmanager
    def _guarded(self, token: str) -> Iterator[None]:
        """For the length of the block the place may be held; after it a program of its own gives it back."""
        script = _GUARD.format(client=shlex.join(self._client), token=token, owner=shlex.quote("/".join(self._owner)))
        guard = subprocess.Popen(
            ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=self._environment, start_new_session=True,
        )  # fmt: skip
        try:
            yield
        finally:
            assert guard.stdin is not None
            guard.stdin.close()
            with suppress(subprocess.TimeoutExpired):  # it goes on trying without us
                guard.wait(_CLIENT_S)

    def _cycle(self, token: str) -> None:
        """Off and on again, and until it can be spoken to: it was lost twice, and may hang."""
        self._ask(["-p", f"+{token}", "power", "cycle"], _CLIENT_S)
        self._lost = 0
        ends = monotonic() + self._boot_s
        while True:
            try:
                self._ssh.ping(timeout_s=15.0)
                return
            except DeviceFailed as error:
                if monotonic() >= ends:
                    raise DeviceUnreachable(f"{error}, {self._boot_s:.0f} s after its power was cycled") from error
            sleep(_STEP_S)

    def _reached(self, host: dict[str, Any]) -> SshDevice:
        options = dict(self._others)
        for name, option, kind in (("username", "user", str), ("port", "port", int)):
            if isinstance(host.get(name), kind):
                options.setdefault(option, host[name])
        spec = self.spec.model_copy(update={"address": str(host["address"]), "options": options})
        return SshDevice(spec, self._profiles)

    def _host(self, place: Place) -> dict[str, Any]:
        found = place.host()
        if found is None or not isinstance(found.get("address"), str):
            raise DeviceFailed(f"{self.name}: place {place.name} has no NetworkService; its exporter must offer one")
        if dict(found.get("extra") or {}).get("proxy_required"):
            raise DeviceFailed(f"{self.name}: place {place.name} is reached through a proxy only; use one that is not")
        return found

    def _place(self, which: Sequence[str], timeout_s: float) -> Place:
        place = read_place(self._ask([*which, "show"], timeout_s))
        # The client takes a part of a name for the whole of another.
        if self._wanted.get("name", place.name) != place.name:
            raise DeviceFailed(f"{self.name}: labgrid knows no place {self._wanted['name']}; it has {place.name}")
        return place

    def _ask(self, words: Sequence[str], timeout_s: float) -> str:
        ended = self._programs.run([*self._client, *words], timeout_s, environment=self._environment)
        if ended.code != 0:
            raise DeviceUnreachable(f"{self.name}: labgrid-client {words[-1]}: {ended.told}")
        return ended.answer[:_MAX_TOLD_BYTES].decode("utf-8", "replace")

    def _said(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self._wanted.items())


def _filters(name: str, ours: dict[str, str | int | float | bool]) -> dict[str, str]:
    """What a place must have: a name, which is the device's own where nothing is said, or tags."""
    place, tags = ours.get("place"), ours.get("tags")
    if place is not None and tags is not None:
        raise InvalidInput(f"{name}: give `place` or `tags`, not both")
    if tags is not None:
        if not _TAGS.fullmatch(str(tags)):
            raise InvalidInput(f"{name}: tags {clip(tags)}: write them as board=orin,room=lab")
        return dict(pair.split("=") for pair in str(tags).split(","))
    if not _NAME.fullmatch(str(place or name)):
        raise InvalidInput(f"{name}: place {clip(place)}: is no name of a place")
    return {"name": str(place or name)}


def read_place(told: str) -> Place:
    """What `labgrid-client show` prints of a place; its blocks are Python literals below a line that names each."""
    head = re.match(r"Place '([^']{1,200})':\n", told)
    if head is None:
        raise DeviceFailed(f"labgrid-client show answered {clip(told)}; it may be another version")
    resources = []
    for block in re.split(r"^(?:Acquired|Matching) resource ", told, flags=re.MULTILINE)[1:]:
        try:
            found = ast.literal_eval(block.partition(":\n")[2].strip())
            resources.append((str(found["cls"]), dict(found["params"])))
        except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as error:
            raise DeviceFailed(f"labgrid-client show told a resource as {clip(block)}") from error
    return Place(head[1], tuple(resources))
