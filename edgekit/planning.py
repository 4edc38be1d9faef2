"""From names to plans: finds the model, the profiles and the targets, and asks the resolver. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgekit import plugins
from edgekit.device import check_entitlements
from edgekit.errors import InvalidInput, clip
from edgekit.interfaces import Target
from edgekit.plan import PLAN_VERSION, Plan
from edgekit.profiles import all_profiles, load_profile
from edgekit.quality_facts import known
from edgekit.reading import parse_json, read_bytes, read_yaml, validate
from edgekit.recipe import Recipe, named_recipe
from edgekit.resolve import Subject, Wish, resolve
from edgekit.source import open_source
from edgekit.weights.neutral import MANIFEST, NeutralManifest, read_manifest

UNCALIBRATED = (
    "without --calibrate, export rounds weights to the nearest (rtn); with it gptq chooses them, which is closer"
)
_MAX_PLAN_BYTES = 32 << 20


def make_plans(
    model: str | Path,
    devices: Sequence[str],
    wish: Wish | None = None,
    *,
    draft: str | Path | None = None,
    per_device: bool = False,
    profiles: Sequence[Path] = (),
) -> tuple[Plan, ...]:
    """One plan for each device, in order. Raises `DoesNotFit` with the table of what was tried.

    A device is a name, the path of a profile, or `this`; `profiles` are folders with profiles of one's own.
    """
    wish = wish or Wish()
    made_already = is_quantised(model)
    if made_already:
        wish = _with_its_recipe(Path(model), wish)
    asked, others = [load_profile(name, profiles) for name in devices], tuple(all_profiles(profiles).values())
    check_entitlements(wish.entitlements, (*asked, *others))
    plans = resolve(
        subject_of(model, draft), asked, targets_for(wish.target), wish, per_device=per_device, others=others
    )
    return plans if made_already else tuple(_with_method(plan) for plan in plans)


def _with_method(plan: Plan) -> Plan:
    """The plan, saying how its integers will be chosen."""
    if plan.recipe.is_exact() or plan.recipe.is_native():
        return plan
    return plan.model_copy(update={"notes": (*plan.notes, UNCALIBRATED)})


def with_what_was_done(plan: Plan, made: NeutralManifest) -> Plan:
    """The plan of an artifact: what it said about the choice of integers is now known."""
    if UNCALIBRATED not in plan.notes or made.method == "rtn":
        return plan
    text = f" on {made.calibration.description}" if made.calibration else ""
    done = f"{made.method} chose the integers{text}"
    return plan.model_copy(update={"notes": tuple(done if note == UNCALIBRATED else note for note in plan.notes)})


def subject_of(model: str | Path, draft: str | Path | None = None) -> Subject:
    """What is planned, read from its `config.json`; of neutral weights, from their manifest."""
    source = open_source(model)
    spec = read_manifest(Path(model)).model if is_quantised(model) else source.spec
    measured = known(source.config_sha256, source.name)
    if draft is None:
        return Subject(spec, str(model), source.config_sha256, measured=measured)
    return Subject(spec, str(model), source.config_sha256, open_source(draft).spec, str(draft), measured)


def is_quantised(model: str | Path) -> bool:
    """Whether `model` is a folder of neutral weights, as `edgekit quantize` writes them."""
    return (Path(model) / MANIFEST).is_file()


def _with_its_recipe(folder: Path, wish: Wish) -> Wish:
    """Weights that are quantised already can be planned in their own recipe alone."""
    recipe = read_manifest(folder).recipe
    if wish.recipe is not None and wish.recipe.name != recipe.name:
        raise InvalidInput(
            f"{folder}: is quantised already, as {recipe.name}; leave --recipe {wish.recipe.name} away,"
            " or give the float model"
        )
    return wish.model_copy(update={"recipe": recipe})


def targets_for(name: str | None) -> dict[str, Target]:
    """The target of that name, or every installed one."""
    names = [name] if name else plugins.target_names()
    return {each: plugins.load_target(each) for each in names}


def find_recipe(name: str) -> Recipe:
    """A built-in recipe, a vendor's own format by name, or a YAML file of rules."""
    return read_yaml(Path(name), Recipe) if name.endswith((".yaml", ".yml")) else named_recipe(name)


def read_plan(path: Path) -> Plan:
    """A plan that `edgekit plan -o` wrote."""
    data = read_bytes(path, _MAX_PLAN_BYTES)
    version = parse_json(data, str(path)).get("version")
    if not isinstance(version, int) or version > PLAN_VERSION:
        raise InvalidInput(
            f"{path}: plan version {clip(version)}, this edgekit reads up to {PLAN_VERSION}; upgrade edgekit"
        )
    return validate(data, Plan, str(path))
