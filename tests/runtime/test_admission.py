"""Memory admission at open: the first fallback step that fits, in order, or a refusal with the numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fake_artifacts import install, make_artifact
from hypothesis import given, settings, strategies as st

import edgekit
from edgekit.common.footprint import mapped_data_bytes
from edgekit.common.free_memory import free_memory
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.memory import usual_terms
from edgekit.contracts.plan import Plan
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported
from edgekit.runtime.memory.admission import FEWEST_TOKENS, MemoryLimit, RunConfig, admit, estimate_of
from edgekit.runtime.memory.report import report
from edgekit.testing import fake_model, fake_plan

PLAN: Plan = fake_plan(fake_model(vocabulary=300), context=4096)
WANTED = RunConfig(
    kv_config=KVCacheConfig(capacity_tokens=4096, kv_bits=16),
    policy=KVEvictionPolicy(),
    sequences=2,
    prefix_bytes=1 << 20,
)
PRICE = partial(estimate_of, PLAN, memory=usual_terms)
NEEDED = PRICE(WANTED)


def admitted(short_bytes: int, *, kv_bits: tuple[int, ...] = (16, 8), can_evict: bool = True) -> Any:
    allowed = MemoryLimit(NEEDED.private_bytes - short_bytes, "a test")
    return admit(PRICE, WANTED, allowed, kv_bits=kv_bits, can_evict=can_evict)


def test_config_that_fits_is_unchanged() -> None:
    found = admitted(0)
    assert (found.config, found.ladder, found.estimate) == (WANTED, (), NEEDED)
    assert found.shared_bytes == NEEDED.kv_bytes + NEEDED.prefix_bytes


LADDERS = {
    "prefixes give way first": (1000, (16, 8), True, ["prefixes"]),
    "then bits": ((1 << 20) + 1000, (16, 8), True, ["prefixes", "cache bits"]),
    "without fewer bits, a window": ((1 << 20) + 1000, (16,), True, ["prefixes", "window"]),
    "what cannot evict has less context": ((1 << 20) + 1000, (16,), False, ["prefixes", "context"]),
    "bits, then a window": (NEEDED.prefix_bytes + NEEDED.kv_bytes * 3 // 4, (16, 8), True,
                            ["prefixes", "cache bits", "window"]),
}  # fmt: skip


@pytest.mark.parametrize(("short", "bits", "can_evict", "expected"), LADDERS.values(), ids=LADDERS)
def test_fallback_steps_are_taken_in_order(
    short: int, bits: tuple[int, ...], can_evict: bool, expected: list[str]
) -> None:
    found = admitted(short, kv_bits=bits, can_evict=can_evict)
    assert [name for name, step in zip(expected, found.ladder, strict=True) if step.change.startswith(name)] == expected
    saved = NEEDED.private_bytes - found.estimate.private_bytes
    assert sum(step.saved_bytes for step in found.ladder) == saved >= short


def test_prefixes_shrink_only_as_far_as_needed() -> None:
    assert admitted(1000).config.prefix_bytes == (1 << 20) - 1000


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, NEEDED.private_bytes),
    st.sampled_from([(16,), (16, 8), (16, 8, 4)]),
    st.booleans(),
    st.sampled_from([KVEvictionPolicy(), KVEvictionPolicy.of(4096, 4), KVEvictionPolicy.of(FEWEST_TOKENS)]),
)
def test_admitted_config_never_exceeds_the_limit(
    allowed: int, bits: tuple[int, ...], can_evict: bool, policy: KVEvictionPolicy
) -> None:
    storage = WANTED.kv_config.model_copy(update={"capacity_tokens": policy.window or 4096})
    wanted = WANTED.model_copy(update={"policy": policy, "kv_config": storage})
    try:
        found = admit(PRICE, wanted, MemoryLimit(allowed, "a test"), kv_bits=bits, can_evict=can_evict)
    except DoesNotFit:
        assert allowed < PRICE(wanted).private_bytes
        return
    assert PRICE(found.config).private_bytes <= allowed
    assert found.shared_bytes >= found.estimate.kv_bytes
    opening = found.config
    assert opening.policy.window in (None, opening.kv_config.capacity_tokens)


def test_memory_that_only_opening_takes_is_free_afterwards() -> None:
    reading = PLAN.memory.model_copy(update={"tokenizer_reading_bytes": NEEDED.private_bytes})
    plan = PLAN.model_copy(update={"memory": reading})
    price = partial(estimate_of, plan, memory=usual_terms)
    needed = price(WANTED).private_bytes
    assert needed > NEEDED.private_bytes
    found = admit(price, WANTED, MemoryLimit(needed, "a test"), kv_bits=(16,), can_evict=False)
    assert found.shared_bytes - found.estimate.kv_bytes >= needed - NEEDED.private_bytes


def test_refuse_names_the_change_that_would_fit() -> None:
    allowed = MemoryLimit(NEEDED.private_bytes - 1000, "a test")
    with pytest.raises(DoesNotFit, match=r"are needed and .* are allowed \(a test\); give it .*, or allow prefixes"):
        admit(PRICE, WANTED, allowed, kv_bits=(16,), can_evict=True, on_pressure="refuse")


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "site", monkeypatch)
    return make_artifact(tmp_path / "artifact", context=4096)


def test_memory_report_has_prediction_measurement_and_fallbacks(artifact: Path) -> None:
    with edgekit.open(artifact, prefixes=0) as runtime:
        needed = runtime.memory().predicted_private_bytes
        assert runtime.memory().ladder == () and runtime.notes == ()
    with edgekit.open(artifact, prefixes=0, memory=needed - 1000) as runtime:
        runtime.generate("the cat", max_tokens=4)
        report = runtime.memory()
        assert report.allowed_bytes == needed - 1000 and report.predicted_private_bytes <= needed - 1000
        assert [step.change.split()[0] for step in report.ladder] == [note.split()[3] for note in runtime.notes]
        assert {one.name for one in report.classes} >= {"cache", "activations", "prefixes", "adapters"}
        assert report.states_used_bytes == 0
        (cache,) = [one for one in report.classes if one.name == "cache"]
        assert cache.measured_bytes == 0 and 0 < (cache.most_bytes or 0) <= cache.predicted_bytes


def test_memory_report_shows_compiled_formats_within_what_is_allowed(artifact: Path) -> None:
    pytest.importorskip("llguidance")
    with edgekit.open(artifact, prefixes=0, memory="1GiB") as runtime:
        before = runtime.memory()
        assert before.formats_bytes == 0, "nothing is taken before the first format"
        runtime.generate("the cat", regex="[ab]{3}", max_tokens=4)
        report = runtime.memory()
        (formats,) = [one for one in report.classes if one.name == "compiled formats"]
        assert report.formats_bytes == formats.predicted_bytes > (formats.measured_bytes or 0) > 0
        assert report.predicted_private_bytes == before.predicted_private_bytes + report.formats_bytes
        (workers,) = [one for one in report.classes if one.name.startswith("workers")]
        assert 0 < (workers.measured_bytes or 0) <= workers.predicted_bytes * 1.05


def test_a_cache_that_the_engine_takes_at_opening_is_reported_as_cache(artifact: Path) -> None:
    with edgekit.open(artifact, prefixes=0) as runtime:
        baseline, metrics = runtime._baseline, runtime.metrics()
    assert baseline is not None
    cache_bytes = baseline.admitted.estimate.kv_bytes
    baseline = baseline._replace(loaded=baseline.before + cache_bytes + 1000)
    found = {one.name: one for one in report(baseline, metrics, {}, 0, (), reserves_kv=True).classes}
    assert found["cache"].measured_bytes == cache_bytes and found["cache"].most_bytes is None
    assert found["runtime and private weights"].measured_bytes == baseline.before + 1000


SMAPS = """\
55d0-55d1 r--p 00000000 08:01 11 /opt/model/weights.bin
Size:                512 kB
Rss:                 400 kB
55d2-55d3 r-xp 00000000 08:01 12 /usr/lib/libonnx.so.1.2
Rss:                3000 kB
55d4-55d5 rw-p 00000000 00:00 0
Rss:                  50 kB
55d6-55d7 rw-p 00000000 00:00 0 [heap]
Rss:                  70 kB
55d8-55d9 r--s 00000000 08:01 13 /opt/a model/packed weights
Rss:                  20 kB
55da-55db rw-p 00000000 08:01 11 /opt/model/weights.bin
Rss:                 100 kB
55dc-55dd rw-p 00001000 08:01 11 /opt/model/weights.bin
Rss:                   8 kB
"""


def test_mapped_weights_exclude_libraries_and_anonymous_memory_and_count_a_place_once(tmp_path: Path) -> None:
    (tmp_path / "smaps").write_text(SMAPS)
    assert mapped_data_bytes(tmp_path / "smaps") == 428 << 10
    assert mapped_data_bytes(tmp_path / "none") is None


def test_refusal_at_open_has_the_numbers(artifact: Path) -> None:
    with edgekit.open(artifact, prefixes=0) as runtime:
        needed = runtime.memory().predicted_private_bytes
    with pytest.raises(DoesNotFit, match="memory, as given"):
        edgekit.open(artifact, prefixes=0, memory=needed - 1000, on_pressure="refuse")
    with pytest.raises(DoesNotFit, match="give more memory") as caught:
        edgekit.open(artifact, memory=1000)
    assert "runtime " in caught.value.table and "the smallest (1 × context" in caught.value.table


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"memory": "much"}, "memory: 'much' is not a size"),
        ({"memory": 0}, "memory 0: must be at least 1"),
        ({"on_pressure": "panic"}, "on_pressure 'panic': input should be 'degrade' or 'refuse'"),
        ({"kv_bits": 3}, "kv_bits: this artifact cannot store 3 bits"),
        ({"kv_bits": "8"}, "kv_bits '8': input should be a valid integer"),
    ],
)
def test_invalid_memory_options_are_refused(artifact: Path, asked: dict[str, Any], said: str) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=said):
        edgekit.open(artifact, **asked)


def test_refused_threads_end_no_process(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.Thread.start", Mock(side_effect=RuntimeError("can't start")))
    with pytest.raises(RuntimeError, match="can't start"):
        edgekit.open(artifact)


CGROUPS = {
    "no cgroup": ({"/proc/meminfo": "MemAvailable:    1000 kB\n"}, 1000 << 10),
    "addresses": (
        {"/proc/self/limits": "Max address space 600000 7 b\n", "/proc/self/status": "VmSize: 100 kB\n"},
        497600,
    ),
    "version 2": (
        {
            "/proc/meminfo": "MemAvailable:    1000 kB\n",
            "/proc/self/cgroup": "0::/app\n",
            "/sys/fs/cgroup/app/memory.max": "600000\n",
            "/sys/fs/cgroup/app/memory.current": "500000\n",
            "/sys/fs/cgroup/app/memory.stat": "anon 1\ninactive_file 100000\nactive_file 50000\n",
        },
        250_000,
    ),
    "version 1": (
        {
            "/proc/meminfo": "MemAvailable:    1000 kB\n",
            "/proc/self/cgroup": "4:memory:/app\n",
            "/sys/fs/cgroup/memory/app/memory.limit_in_bytes": "600000\n",
            "/sys/fs/cgroup/memory/app/memory.usage_in_bytes": "500000\n",
            "/sys/fs/cgroup/memory/app/memory.stat": "total_inactive_file 100000\ntotal_active_file 0\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
        200_000,
    ),
}


@pytest.mark.parametrize(("files", "expected"), CGROUPS.values(), ids=CGROUPS)
def test_free_memory_is_the_lowest_of_machine_and_cgroups(
    files: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    found = free_memory(files.get)
    assert found is not None and found.bytes == expected
