"""Machines of a labgrid coordinator: reserved through labgrid's client, measured over ssh, always released.

labgrid queues users and controls power and wiring; this module holds one place during one measurement.
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

from edgekit.common.files import home
from edgekit.device.load import load_profile
from edgekit.errors import DeviceFailed, DeviceTimeout, DeviceUnreachable, InvalidInput, quote_short
from edgekit.lab.devices import DeviceSpec
from edgekit.lab.leases import lease
from edgekit.lab.programs import Programs
from edgekit.lab.ssh import SshDevice
from edgekit.measure.bench.measurement import Measurement

_OPTIONS = {"place": str, "tags": str, "client": str, "boot_s": int}
_POWER = ("NetworkPowerPort", "PDUDaemonPort", "NetworkUSBPowerPort", "NetworkSiSPMPowerPort", "TasmotaPowerPort",
          "NetworkYKUSHPowerPort")  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TAGS = re.compile(r"[a-z][a-z0-9_]{1,31}=[A-Za-z0-9_-]{1,64}(,[a-z][a-z0-9_]{1,31}=[A-Za-z0-9_-]{1,64}){0,9}")
_MAX_TOLD_BYTES, _CLIENT_S, _CYCLE_AFTER, _STEP_S = 1 << 20, 60.0, 2, 2.0
# Its stdin ends when the lab releases the place, and also when the lab is killed.
_GUARD = """
cat > /dev/null
for try in 1 2 3 4 5 6; do
  answer=$({client} -p +{token} release-from {owner} 2>&1) && break
  case "$answer" in *"is not acquired"*|*"matches nothing"*) break;; esac
  sleep 5
done
{client} cancel-reservation {token}
"""


class LabgridPlace(NamedTuple):
    """A place of labgrid with its resources."""

    name: str
    resources: tuple[tuple[str, dict[str, Any]], ...]  # class and parameters

    def host(self) -> dict[str, Any] | None:
        """Return the parameters of its first NetworkService: address, user and port."""
        return next((known for kind, known in self.resources if kind == "NetworkService"), None)

    def has_power(self) -> bool:
        """Return whether labgrid can switch it off and on."""
        return any(kind in _POWER for kind, _ in self.resources)


class LabgridDevice:
    """Acquires a place of a labgrid coordinator, measures on it over ssh, and always releases it."""

    can_prepare = True

    def __init__(self, spec: DeviceSpec, profiles: Sequence[Path] = ()) -> None:
        ours = {name: value for name, value in spec.options.items() if name in _OPTIONS}
        for name, value in ours.items():
            if type(value) is not _OPTIONS[name]:
                raise InvalidInput(
                    f"{spec.name}: option {name}: expected {_OPTIONS[name].__name__}, not {quote_short(value)}"
                )
        if spec.address is None or not re.fullmatch(r"[A-Za-z0-9\[][A-Za-z0-9_.:\]-]{0,253}", spec.address):
            raise InvalidInput(f"{spec.name}: address: give the labgrid coordinator's, as HOST:PORT")
        self.name, self.spec, self.profile = spec.name, spec, load_profile(spec.profile, profiles)
        self._filters_of_place = _filters(spec.name, ours)
        self._boot_s = float(ours.get("boot_s", 180))
        program = shutil.which(str(ours.get("client", "labgrid-client")))
        if program is None:
            raise DeviceFailed(f"{spec.name}: kind labgrid needs labgrid-client: pip install labgrid, or say `client`")
        self._client = [program, "-x", spec.address]
        # The same for all runs of this user on this machine, to recognise places that a dead run still holds.
        self._owner = (platform.node(), f"edgekit-{hashlib.sha256(str(home()).encode()).hexdigest()[:12]}")
        self._environment = {**os.environ, "LG_HOSTNAME": self._owner[0], "LG_USERNAME": self._owner[1]}
        self._others = {name: value for name, value in spec.options.items() if name not in _OPTIONS}
        self._profiles, self._programs = profiles, Programs(spec.name)
        self._ssh = self._reached({"address": "not-known-yet"})  # refuses unknown options now
        self._lost = 0  # in a row

    def ping(self, *, timeout_s: float) -> str:
        if "name" not in self._filters_of_place:
            self._ask(["places"], timeout_s)
            return f"labgrid at {self.spec.address}; any place with {self._said()}"
        place = self._place(["-p", self._filters_of_place["name"]], timeout_s)
        return f"labgrid place {place.name} at {quote_short(self._host(place)['address'])}"

    @contextmanager
    def acquire(self, *, timeout_s: float) -> Iterator[None]:
        ends = monotonic() + timeout_s
        with lease(f"labgrid {self.spec.address} {self._said()}", self.name, timeout_s):
            if "name" in self._filters_of_place:
                # Left by a dead run of ours whose guard could not release it, for example after a power loss.
                with suppress(DeviceFailed):
                    self._ask(["-p", self._filters_of_place["name"], "release-from", "/".join(self._owner)], _CLIENT_S)
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
            measurement = self._ssh.measure(artifact, workload, timeout_s=timeout_s)
        except (DeviceUnreachable, DeviceTimeout):
            self._lost += 1
            raise
        self._lost = 0
        return measurement

    def stop(self) -> None:
        self._programs.stop()
        self._ssh.stop()

    def _reserve(self) -> str:
        """Reserve the place and return the token; labgrid may grant it later."""
        filters = [f"{key}={value}" for key, value in self._filters_of_place.items()]
        output = self._ask(["reserve", "--shell", *filters], _CLIENT_S)
        match = re.search(r"^export LG_TOKEN=([A-Z0-9]{4,64})$", output, re.MULTILINE)
        if match is None:
            raise DeviceFailed(
                f"{self.name}: labgrid-client reserve answered {quote_short(output)}; it may be another version"
            )
        return match[1]

    @contextmanager
    def _guarded(self, token: str) -> Iterator[None]:
        """Start a guard process that releases the place after the block, even if edgekit is killed."""
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
            with suppress(subprocess.TimeoutExpired):  # the guard keeps trying without us
                guard.wait(_CLIENT_S)

    def _cycle(self, token: str) -> None:
        """Power-cycle the machine and wait until it answers."""
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

    def _host(self, place: LabgridPlace) -> dict[str, Any]:
        host = place.host()
        if host is None or not isinstance(host.get("address"), str):
            raise DeviceFailed(f"{self.name}: place {place.name} has no NetworkService; its exporter must offer one")
        if dict(host.get("extra") or {}).get("proxy_required"):
            raise DeviceFailed(f"{self.name}: place {place.name} is reached through a proxy only; use one that is not")
        return host

    def _place(self, which: Sequence[str], timeout_s: float) -> LabgridPlace:
        place = read_place(self._ask([*which, "show"], timeout_s))
        # The client also matches a part of a name.
        if self._filters_of_place.get("name", place.name) != place.name:
            raise DeviceFailed(
                f"{self.name}: labgrid knows no place {self._filters_of_place['name']}; it has {place.name}"
            )
        return place

    def _ask(self, words: Sequence[str], timeout_s: float) -> str:
        ended = self._programs.run([*self._client, *words], timeout_s, environment=self._environment)
        if ended.code != 0:
            raise DeviceUnreachable(f"{self.name}: labgrid-client {words[-1]}: {ended.last_line}")
        return ended.answer[:_MAX_TOLD_BYTES].decode("utf-8", "replace")

    def _said(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self._filters_of_place.items())


def _filters(name: str, ours: dict[str, str | int | float | bool]) -> dict[str, str]:
    """Return labgrid's filters: tags, or a name, by default the device's."""
    place, tags = ours.get("place"), ours.get("tags")
    if place is not None and tags is not None:
        raise InvalidInput(f"{name}: give `place` or `tags`, not both")
    if tags is not None:
        if not _TAGS.fullmatch(str(tags)):
            raise InvalidInput(f"{name}: tags {quote_short(tags)}: write them as board=orin,room=lab")
        return dict(pair.split("=") for pair in str(tags).split(","))
    if not _NAME.fullmatch(str(place or name)):
        raise InvalidInput(f"{name}: place {quote_short(place)}: is not a valid name of a place")
    return {"name": str(place or name)}


def read_place(output: str) -> LabgridPlace:
    """Parse the output of `labgrid-client show`: Python literals, each below a line with its name."""
    head = re.match(r"Place '([^']{1,200})':\n", output)
    if head is None:
        raise DeviceFailed(f"labgrid-client show answered {quote_short(output)}; it may be another version")
    resources = []
    for block in re.split(r"^(?:Acquired|Matching) resource ", output, flags=re.MULTILINE)[1:]:
        try:
            value = ast.literal_eval(block.partition(":\n")[2].strip())
            resources.append((str(value["cls"]), dict(value["params"])))
        except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as error:
            raise DeviceFailed(f"labgrid-client show told a resource as {quote_short(block)}") from error
    return LabgridPlace(head[1], tuple(resources))
