"""The operations that the fault harness runs: everything that writes files which are opened again."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import published
import pytest
import tiny_models
from fake_artifacts import install
from fault_points import Operation
from lab_fakes import QUICK, fakes, lab_of
from measured import fake

import edgekit
from edgekit.apps.delivery import fetching, publish, pull
from edgekit.apps.lab.matrix import entries_of
from edgekit.apps.lab.run import run_lab
from edgekit.apps.lab.store import LabStore
from edgekit.artifact.artifact import verify
from edgekit.common.content_store import ContentStore
from edgekit.contracts.neutral import CalibrationFact, NeutralWeights
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import EdgekitError
from edgekit.model.source import open_source
from edgekit.quant.calibration import Calibration
from edgekit.quant.pipeline import neutral_weights

_KEYS = ["0" * 64, "1" * 64, "2" * 64]


def operations(shared: Path) -> dict[str, Operation]:
    """The operations over a tiny model in `shared`, which they only read."""
    shared.mkdir(parents=True)
    install(shared / "site", pytest.MonkeyPatch())
    model = tiny_models.write_tiny(shared / "tiny", layers=1)
    fake(shared / "fake.edgekit")
    lab = lab_of(shared, 1)
    rows = tuple(tuple(3 + (row * 7 + place * place) % 90 for place in range(16)) for row in range(4))
    fact = CalibrationFact(sha256="0" * 64, description="a rule", sequences=4, tokens=64)
    calibration = Calibration(rows, fact)

    def at_home(folder: Path) -> None:
        os.environ["EDGEKIT_HOME"] = str(folder / "home")

    def quantise(folder: Path) -> None:
        at_home(folder)
        neutral_weights(open_source(model, need_weights=True), named_recipe("s4-g32"))

    def calibrate(folder: Path) -> None:
        at_home(folder)
        neutral_weights(
            open_source(model, need_weights=True), named_recipe("s4-g32"), method="gptq", calibration=calibration
        )

    def check_weights(folder: Path) -> None:
        for place in (folder / "home" / "weights").glob("[0-9a-f]*"):
            NeutralWeights.open(place, verify=True)

    def export(folder: Path) -> None:
        at_home(folder)
        if not (folder / "out.edgekit").exists():  # nothing is overwritten
            tiny_models.artifact_of(model, folder / "out.edgekit", context=64)

    def check_export(folder: Path) -> None:
        check_weights(folder)
        if (folder / "out.edgekit").exists():
            verify(folder / "out.edgekit")

    def save_prefixes(folder: Path) -> None:
        at_home(folder)
        with edgekit.open(shared / "fake.edgekit", prefixes="1MiB", memory="2GiB") as runtime:
            for prompt in ([5, 6, 7, 8, 9], [5, 6, 7, 50, 51]):
                runtime.complete(prompt, max_tokens=1, ignore_eos=True)
            assert runtime.save_prefixes(folder / "saved.prefixes") > 0

    def check_prefixes(folder: Path) -> None:
        at_home(folder)
        if (folder / "saved.prefixes").exists():
            with edgekit.open(shared / "fake.edgekit", prefixes="1MiB", memory="2GiB") as runtime:
                assert runtime.load_prefixes(folder / "saved.prefixes") > 0

    def measure(folder: Path) -> None:
        at_home(folder)
        with LabStore(folder / "lab.sqlite") as store:
            if not store.history():
                paths = [*map(Path, lab.artifacts)]
                store.begin("run-1", lab, entries_of(lab, {device.name: paths for device in lab.devices}), 1000.0)
            info = run_lab(lab, store, "run-1", fakes(lab), clock=QUICK)
            if info.states != {"done": 4}:
                raise EdgekitError(f"some entries have no result: {info.states}")

    def check_lab(folder: Path) -> None:
        if (folder / "lab.sqlite").exists():
            with LabStore(folder / "lab.sqlite") as store:
                for info in store.history():
                    results = [store.result(info.id, entry.id) for entry, _ in store.entries(info.id)]
                    assert len(results) == 4 and info.states.get("done", 0) <= 4 - results.count(None)

    def fill_store(folder: Path) -> None:
        for age, key in enumerate(_KEYS):
            place = folder / "store" / key
            place.mkdir(parents=True)
            for number in range(3):
                (place / f"{number}").write_bytes(bytes([age]) * 1000)
            os.utime(place, (1000 + age, 1000 + age))

    def prune(folder: Path) -> None:
        ContentStore(folder / "store").keep_within(0, _KEYS[2])
        if len(list((folder / "store").iterdir())) > 1:
            raise EdgekitError("a folder is still there")

    def check_store(folder: Path) -> None:
        for place in (folder / "store").glob("[0-9a-f]*"):
            assert len(list(place.iterdir())) == 3, f"{place} is half there"

    releases = [published.make_artifact(shared / f"release-{number}", (0, 5)[:number], number) for number in (0, 1)]
    device, shop = published.device_profile(shared), shared / "shop"
    fetching._FIRST_WAIT_S = 0.01

    def add_release(number: int, site: Path) -> None:
        publish([releases[number].folder], site, release=f"{number}")

    def pull_into(app: Path, site: Path) -> None:
        pull(site.as_uri(), app, device=device, allow=("file",))

    def publish_next(folder: Path) -> None:
        at_home(folder)
        add_release(1, folder / "shop")

    def check_shop(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as place:
            pull_into(Path(place) / "app", folder / "shop")
            verify(Path(place) / "app")

    def pull_next(folder: Path) -> None:
        at_home(folder)
        pull_into(folder / "app", shop)

    def check_app(folder: Path) -> None:
        verify(folder / "app")

    # What a shop and an installation hold before: one release.
    add_release(0, shop)
    shutil.copytree(shop, shared / "former-shop")
    pull_into(shared / "former-app", shop)
    add_release(1, shop)

    def nothing(folder: Path) -> None:
        at_home(folder)

    # Imports, and what is measured once, belong to no operation.
    before = shared / "before"
    before.mkdir()
    for run in (quantise, calibrate, export, save_prefixes, measure):
        run(before)
    (before / "out.edgekit").rename(shared / "out.edgekit")
    shutil.rmtree(before)
    return {
        "quantise": Operation(nothing, quantise, check_weights),
        "calibrate": Operation(nothing, calibrate, check_weights),
        "export": Operation(nothing, export, check_export),
        "prefixes": Operation(nothing, save_prefixes, check_prefixes),
        "lab": Operation(nothing, measure, check_lab),
        "prune": Operation(fill_store, prune, check_store),
        "publish": Operation(
            lambda folder: shutil.copytree(shared / "former-shop", folder / "shop"), publish_next, check_shop
        ),
        "pull": Operation(lambda folder: shutil.copytree(shared / "former-app", folder / "app"), pull_next, check_app),
    }
