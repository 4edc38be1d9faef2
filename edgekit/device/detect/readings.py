"""Parsers of the text of /proc, /sys and sysctl. Pure functions."""

from __future__ import annotations

import re

_FLAGS = {
    "avx2": "avx2",
    "avx_vnni": "avx-vnni",
    "avx512f": "avx512",
    "avx512_vnni": "avx512-vnni",
    "avx512_bf16": "avx512-bf16",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
    "asimd": "neon",
    "asimdhp": "fp16",
    "asimddp": "dotprod",
    "bf16": "bf16",
    "i8mm": "i8mm",
    "sve": "sve",
    "sve2": "sve2",
    "sme": "sme",
}
_MAC_FEATURES = {
    "hw.optional.arm.FEAT_FP16": "fp16",
    "hw.optional.arm.FEAT_DotProd": "dotprod",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_SME": "sme",
}


def simd_levels(cpuinfo: str) -> tuple[str, ...]:
    """Return the relevant vector instructions, from the flags of /proc/cpuinfo."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return tuple(name for flag, name in _FLAGS.items() if flag in flags)


def cpu_name(cpuinfo: str, architecture: str) -> str:
    """Return the processor's name in /proc/cpuinfo, or the board's on ARM."""
    for key in ("model name", "Model", "Hardware"):
        match = re.search(rf"^{key}\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
        if match and match[1].strip():
            return match[1].strip()[:200]
    return architecture or "unknown processor"


def linux_version(os_release: str, kernel: str) -> str:
    """Return the distribution's version, or the kernel's if it has none."""
    match = re.search(r'^VERSION_ID="?(\d+(?:\.\d+){0,3})"?\s*$', os_release, re.MULTILINE)
    return match[1] if match else leading_version(kernel)


def leading_version(text: str) -> str:
    """Return the numbers at the start of a version string; `0` without any."""
    match = re.match(r"\d{1,9}(?:\.\d{1,9}){0,3}", text)
    return match[0] if match else "0"


def sysctl_values(text: str) -> dict[str, str]:
    """Parse the `name: value` lines of sysctl."""
    pairs = (line.partition(": ") for line in text.splitlines())
    return {name: value.strip() for name, between, value in pairs if between}


def mac_simd(values: dict[str, str]) -> tuple[str, ...]:
    """Return the vector instructions of an Apple chip or an Intel Mac."""
    if "hw.optional.arm64" in values or any(name.startswith("hw.optional.arm.") for name in values):
        return ("neon", *(level for name, level in _MAC_FEATURES.items() if values.get(name) == "1"))
    return ("avx2",) if values.get("hw.optional.avx2_0") == "1" else ()
