"""`edgekit devices`: lists device profiles, and shows one with the source of every figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import Field

from edgekit.cli._console import WIDE_TABLE, console as new_console
from edgekit.cli._options import OwnProfiles, json_option, options
from edgekit.common.base import Frozen
from edgekit.common.options import ByteCount, Option
from edgekit.common.units import show_bytes
from edgekit.contracts.device import (
    OS_TITLES,
    THIS,
    THIS_CPU,
    Budget,
    DeviceKind,
    DeviceProfile,
    Os,
    SourcedBytes,
    SourcedCount,
    SourcedNumber,
    check_entitlements,
)
from edgekit.contracts.plan import Speed
from edgekit.contracts.recipe import RECIPES
from edgekit.device.catalogue import all_profiles, profile_sha256
from edgekit.device.load import load_profile
from edgekit.errors import UnknownName
from edgekit.model.known_models import known_models
from edgekit.planner.make import targets_for
from edgekit.planner.speed import at_half

_FIGURES = ("ram", "vram", "reserve", "peak_bandwidth_gb_s", "usable_bandwidth_gb_s")
_SHOWN, _RECIPE, _CONTEXT = "Llama-3.2-1B-Instruct", "s4-g64", 4096  # of the speeds that are shown
_COMPUTE = ("fp32_tflops", "fp16_tflops", "int8_tops", "cores")


class DeviceFilter(OwnProfiles):
    """Choose the devices to list."""

    kind: DeviceKind | None = Field(default=None, description="Only devices of this kind.")
    os: Os | None = Field(default=None, description="Only devices with this operating system.")
    target: str | None = Field(default=None, description="Only devices on which this target runs.")
    min_memory: ByteCount | None = Field(
        default=None, description="Only devices that give one app at least this much, e.g. 6GiB."
    )


class DeviceOptions(OwnProfiles):
    """Choose what to show of one device."""

    os_version: Annotated[str | None, Option(metavar="VERSION")] = Field(
        default=None, description="The budget under this OS version instead of all known ones."
    )
    entitlements: Annotated[tuple[str, ...], Option(name="entitlement")] = Field(
        default=(), description="The budget with this entitlement."
    )
    measure: bool = Field(default=False, description="With `this`: measure again instead of using stored measurements.")


@click.group(name="devices", invoke_without_command=True)
@options(choice=DeviceFilter)
@json_option("JSON instead of a table.")
@click.pass_context
def command(context: click.Context, choice: DeviceFilter, as_json: bool) -> None:
    """List the known devices, or show one.

    `one app` is the most memory that the OS charges to an app, under the profile's OS version and without entitlements;
    `in RAM` is the most that may be in memory, mapped weights included.
    """
    if context.invoked_subcommand is not None:
        if choice.model_fields_set or as_json:
            raise click.UsageError(f"options of `devices {context.invoked_subcommand}` go after its name")
        return
    profiles, target = all_profiles(choice.profiles).values(), choice.target
    if target is not None and not any(target in device.targets for device in profiles):
        raise UnknownName("target", target, {name for device in profiles for name in device.targets})
    least = choice.min_memory or 0
    devices = [
        device
        for device in profiles
        if (choice.kind is None or device.kind == choice.kind)
        and (choice.os is None or device.os == choice.os)
        and (target is None or target in device.targets)
        and device.budget().total_bytes >= least
    ]
    if as_json:
        _print_json([_summary(device) for device in devices])
    else:
        _print_list(devices)


@command.command()
@click.argument("name")
@options(choice=DeviceOptions)
@json_option("JSON instead of text.")
def show(name: str, choice: DeviceOptions, as_json: bool) -> None:
    """Show every figure of one device with its source.

    NAME is a name from the list, the path of a profile, `this` for this machine, or `this-cpu` for it without its GPU.
    """
    if choice.measure and name not in (THIS, THIS_CPU):
        raise click.UsageError(f"--measure measures only this machine; use it with `{THIS}`")
    if choice.measure:
        from edgekit.device.detect import this_device

        device = this_device(with_gpu=name == THIS, measure_again=True)
    else:
        device = load_profile(name, choice.profiles)
    if choice.entitlements:
        check_entitlements(choice.entitlements, (device, *all_profiles(choice.profiles).values()))
    budgets = _budgets(device, choice.os_version, frozenset(choice.entitlements))
    speeds = _speeds(device)
    if as_json:
        body = device.model_dump(mode="json")
        shown, ranges = [_budget(*row) for row in budgets], {name: speed.show() for name, speed in speeds.items()}
        _print_json({"profile": body, "sha256": profile_sha256(device), "budgets": shown, "speeds": ranges})
    else:
        _print_device(device, budgets, speeds)


class CalibrationOptions(Frozen):
    device: str | None = Field(default=None, description="The profile of what was measured on a machine without one.")


@command.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@options(choice=CalibrationOptions)
def calibrate(files: tuple[Path, ...], choice: CalibrationOptions) -> None:
    """Write what FILES of `bench --share` or `lab share` measured into profiles of your own; plans predict by them."""
    from edgekit.device.calibration import calibrate as written

    click.echo("\n".join(written(files, choice.device)))


_Row = tuple[str, str | None, Budget]


def _budgets(device: DeviceProfile, os_version: str | None, entitlements: frozenset[str]) -> list[_Row]:
    """Return the budgets under the given OS version and entitlements; without them, one per range of the profile."""
    named = ", ".join(sorted(entitlements)) or None
    if os_version or entitlements or not device.app_limits:
        version = os_version or device.os_version
        return [(version, named, device.budget(version, entitlements))]
    rows: list[_Row] = []
    for limit in device.app_limits:
        granted = frozenset({limit.entitlement}) if limit.entitlement else frozenset[str]()
        rows.append((limit.versions(), limit.entitlement, device.budget(limit.from_version, granted)))
    return rows


def _budget(versions: str, entitlement: str | None, budget: Budget) -> dict[str, Any]:
    return {"os_versions": versions, "entitlement": entitlement, **budget._asdict()}


def _summary(device: DeviceProfile) -> dict[str, Any]:
    budget = device.budget()
    return {
        "name": device.name,
        "title": device.title,
        "kind": device.kind,
        "os": device.os,
        "os_version": device.os_version,
        "chip": device.chip,
        "memory_bytes": (device.vram or device.ram).value,
        "private_bytes": budget.private_bytes,
        "total_bytes": budget.total_bytes,
        "usable_bandwidth_gb_s": device.usable_bandwidth_gb_s.value,
        "targets": device.targets,
    }


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))


def _print_list(devices: list[DeviceProfile]) -> None:
    from rich.table import Table

    console = new_console()
    is_wide = console.width >= WIDE_TABLE
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "os", "memory", "one app", *(["in RAM"] if is_wide else []), "GB/s", "runs"):
        right = heading in ("memory", "one app", "in RAM", "GB/s")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "runs")
    for device in devices:
        budget = device.budget()
        table.add_row(
            device.name,
            f"{device.os} {device.os_version}",
            show_bytes((device.vram or device.ram).value),
            show_bytes(budget.private_bytes),
            *([show_bytes(budget.total_bytes)] if is_wide else []),
            f"{device.usable_bandwidth_gb_s.value:g}",
            _runs(device) if is_wide else ", ".join(device.targets),
        )
    console.print(table)
    counted = f"{len(devices)} device{'' if len(devices) == 1 else 's'}"
    console.print(
        f"\n{counted}; `edgekit devices show NAME` shows one, `edgekit devices show this` measures this machine."
    )


def _speeds(device: DeviceProfile) -> dict[str, Speed]:
    """Return the speed of a known model in 4 bits with each installed engine, whether or not the model fits."""
    (model,) = (each.source().spec for each in known_models().models if each.id.endswith(f"/{_SHOWN}"))
    speeds = {}
    for name, target in targets_for(None).items():
        for backend in device.targets.get(name, ()):
            offer = target.offer(model, device, backend, RECIPES[_RECIPE])
            bits = max(offer.capabilities.kv_bits)
            speeds[f"{name} {backend}"] = at_half(model, offer, device, held_tokens=_CONTEXT, kv_bits=bits)
    return speeds


def _print_device(device: DeviceProfile, budgets: list[_Row], speeds: Mapping[str, Speed]) -> None:
    from rich.table import Table

    console = new_console()
    console.print(f"{device.title}  ({device.name})", style="bold")
    console.print(f"{device.chip}, {OS_TITLES[device.os]} {device.os_version}, runs {_runs(device)}")
    if device.simd:
        console.print(f"vector instructions: {', '.join(device.simd)}")
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("fact", "value", "confidence", "source"):
        table.add_column(heading, justify="right" if heading == "value" else "left", no_wrap=heading != "source")
    for field in (*_FIGURES, *_COMPUTE):
        fact = getattr(device, field)
        if fact is not None:
            table.add_row(field, _shown(fact), fact.confidence, fact.source)
    for engine, figures in device.engines.items():
        for name, number in (("bandwidth_gb_s", figures.bandwidth_gb_s), ("layer_ms", figures.layer_ms)):
            if number is not None:
                table.add_row(f"{engine} {name}", f"{number.value:.3g}", number.confidence, number.source)
    for limit in device.app_limits:
        charged = "" if limit.counts == "private" else "; mapped pages count"
        who = f" with {limit.entitlement}" if limit.entitlement else ""
        source = f"{limit.versions()}{who}{charged}: {limit.limit.source}"
        table.add_row("app_limit", _shown(limit.limit), limit.limit.confidence, source)
    console.print(table)
    console.print("\nMemory for one app", style="bold")
    for versions, entitlement, budget in budgets:
        who = f" with {entitlement}" if entitlement else ""
        amounts = f"{show_bytes(budget.private_bytes)} charged to it, {show_bytes(budget.total_bytes)} in memory"
        console.print(f"  {OS_TITLES[device.os]} {versions}{who}: {amounts}")
        console.print(f"    {budget.why}", style="dim")
    if speeds:
        title = f"Decoding of {_SHOWN} in {_RECIPE}, with {_CONTEXT // 2:,} tokens in the cache"
        console.print(f"\n{title}", style="bold")
    for engine, speed in speeds.items():
        console.print(f"  {engine}: {speed.show()}")
    for note in device.notes:
        console.print(f"\nNote: {note}")
    console.print(f"\nsha256 {profile_sha256(device)}", style="dim")


def _shown(fact: SourcedBytes | SourcedNumber | SourcedCount) -> str:
    return show_bytes(fact.value) if isinstance(fact, SourcedBytes) else f"{fact.value:g}"


def _runs(device: DeviceProfile) -> str:
    return ", ".join(f"{target} ({', '.join(backends)})" for target, backends in device.targets.items())
