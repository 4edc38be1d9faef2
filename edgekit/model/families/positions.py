"""Reads rotary position embeddings from `rope_theta` with `rope_scaling`, and from `rope_parameters`.

If both are present and disagree, they are refused, because libraries differ in which one they use.
"""

from __future__ import annotations

from typing import NamedTuple

from edgekit.model.families.fields import Fields
from edgekit.model.parts import Rope

MAX_POSITIONS = 1 << 28
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_ALL_KINDS = (*KINDS, "proportional")
_THETA = (1.0 + 1e-6, 1e15)
_FACTOR = (1e-3, 1e6)


class _Usual(NamedTuple):
    """The defaults of a rope's fields, and the fields that the family allows."""

    head_dim: int
    max_positions: int
    theta: float
    partial: float | None
    original: int
    alpha: bool = False


def read_rope(
    fields: Fields,
    head_dim: int,
    max_positions: int,
    *,
    theta: float = 10_000.0,
    partial: float | None = None,
    original: int | None = None,
    alpha: bool = False,
) -> Rope:
    """Read the rope of a model with one. `partial`: the default share of a head that rotates; None: always all of it.

    `original` is the default number of trained positions; None: all of them. `alpha`: the family's dynamic ropes may
    have an `alpha`, which raises theta for every text alike.
    """
    usual = _Usual(head_dim, max_positions, theta, partial, original or max_positions, alpha)
    for kind in ("full_attention", "sliding_attention"):
        if isinstance(fields.get("rope_parameters"), dict) and kind in fields.get("rope_parameters"):
            raise fields.refusal(
                "rope_parameters", "differs by kind of layer, which this family cannot; correct the file"
            )
    sections = [section for name in ("rope_scaling", "rope_parameters") if (section := fields.section(name))]
    ropes = [_rope(section, fields, usual) for section in sections]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise fields.refusal("rope_scaling", "and rope_parameters do not say the same; keep the right one")
    return ropes[0] if ropes else _rope(fields.with_values({}), fields, usual)


def read_ropes_by_kind(
    fields: Fields,
    full_dim: int,
    sliding_dim: int,
    max_positions: int,
    *,
    theta: float = 1_000_000.0,
    local_theta: float | None = 10_000.0,
    proportional: bool = False,
) -> dict[str, Rope]:
    """Read two ropes: `full` for global layers, `sliding` for windowed ones. The defaults are Gemma 3's.

    `local_theta` None: by default, windowed layers have the theta of global ones.
    """
    both = fields.section("rope_parameters")
    if both and not (both.has("full_attention") or both.has("sliding_attention")):
        raise fields.refusal(
            "rope_parameters", "needs one entry for full_attention and one for sliding_attention; correct the file"
        )
    full = both.section("full_attention") if both else None
    sliding = both.section("sliding_attention") if both else None
    scaling = fields.section("rope_scaling")
    none = fields.with_values({})
    default = {"rope_type": "proportional", "partial_rotary_factor": 0.25} if proportional else {}
    if local_theta is None:
        local_theta = fields.number("rope_theta", *_THETA, default=theta)
    local_theta = fields.number("rope_local_base_freq", *_THETA, default=local_theta)
    usual = _Usual(full_dim, max_positions, theta, None, max_positions)
    if full and scaling and _rope(full, fields, usual) != _rope(scaling, fields, usual):
        raise fields.refusal(
            "rope_scaling", "and rope_parameters.full_attention do not say the same; keep the right one"
        )
    return {
        "full": _rope(full or scaling or fields.with_values(default), fields, usual),
        "sliding": _rope(sliding or none, none, _Usual(sliding_dim, max_positions, local_theta, None, max_positions)),
    }


def _rope(section: Fields, outer: Fields, usual: _Usual) -> Rope:
    """Read one rope from its section; missing fields come from the object around it."""
    kind = section.text("rope_type", section.text("type", "default"))
    if kind in ("su", "yarn") and section.has("short_factor"):
        kind = "longrope"  # by Phi-3's older names
    if kind not in _ALL_KINDS or section.get("mrope_section") is not None:
        raise section.unsupported("rope_type", f"is not supported; supported: {', '.join(KINDS)}")
    theta = _agreed(section, outer, "rope_theta", _THETA, usual.theta)
    share = _agreed(section, outer, "partial_rotary_factor", (1e-3, 1.0), usual.partial or 1.0)
    if share != 1.0 and usual.partial is None and kind != "proportional":
        raise section.unsupported("partial_rotary_factor", "is not supported in this family; only 1.0 is")
    dim = usual.head_dim if kind == "proportional" else int(usual.head_dim * share)
    if dim < 2 or dim % 2:
        raise outer.refusal(
            "head_dim", f"makes rotary embeddings turn {dim} values of a head; an even number from 2 is needed"
        )
    if kind == "default":
        return Rope(theta=theta, dim=dim)
    if kind == "proportional":
        factor = section.number("factor", *_FACTOR, default=1.0)
        return Rope(theta=theta, dim=dim, kind="proportional", factor=factor, proportion=share)
    if kind == "linear":
        return Rope(theta=theta, dim=dim, kind="linear", factor=section.number("factor", *_FACTOR))
    if kind == "dynamic":
        if dim < 4:
            raise outer.refusal("head_dim", "is too small for a dynamic rope; it needs at least 4 rotary values")
        factor = section.number("factor", 1.0, _FACTOR[1])
        alpha = section.maybe_number("alpha", 1.0, _FACTOR[1]) if usual.alpha else None
        if alpha is not None:
            return Rope(theta=theta * alpha ** (dim / (dim - 2)), dim=dim)
        return Rope(theta=theta, dim=dim, kind="dynamic", factor=factor, original_positions=usual.max_positions)
    original = _agreed_count(section, outer, "original_max_position_embeddings", usual.original)
    if kind == "llama3":
        low = section.number("low_freq_factor", *_FACTOR)
        high = section.number("high_freq_factor", *_FACTOR)
        if high <= low:
            raise section.refusal("high_freq_factor", f"is not above low_freq_factor ({low:g}); correct the file")
        return Rope(
            theta=theta,
            dim=dim,
            kind="llama3",
            factor=section.number("factor", *_FACTOR),
            original_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = section.number("factor", *_FACTOR, default=usual.max_positions / original)
    attention = section.maybe_number("attention_factor", 0.0, 1e3)
    if kind == "yarn":
        return Rope(
            theta=theta,
            dim=dim,
            kind="yarn",
            factor=factor,
            original_positions=original,
            attention_factor=attention,
            beta_fast=section.maybe_number("beta_fast", 1e-6, 1e6),
            beta_slow=section.maybe_number("beta_slow", 1e-6, 1e6),
            mscale=section.maybe_number("mscale", 0.0, 1e3),
            mscale_all_dim=section.maybe_number("mscale_all_dim", 0.0, 1e3),
            truncate=section.flag("truncate", True),
        )
    if original < 2:
        raise section.refusal("original_max_position_embeddings", "is too small for a longrope; correct the file")
    return Rope(
        theta=theta,
        dim=dim,
        kind="longrope",
        factor=factor,
        original_positions=original,
        attention_factor=attention,
        short_factor=section.numbers("short_factor", dim // 2, *_FACTOR),
        long_factor=section.numbers("long_factor", dim // 2, *_FACTOR),
    )


def _agreed(section: Fields, outer: Fields, field: str, bounds: tuple[float, float], default: float) -> float:
    inner, around = section.maybe_number(field, *bounds), outer.maybe_number(field, *bounds)
    if inner is not None and around is not None and inner != around:
        raise outer.refusal(field, f"contradicts the value inside the rope, {inner:g}; keep the right one")
    return inner if inner is not None else around if around is not None else default


def _agreed_count(section: Fields, outer: Fields, field: str, default: int) -> int:
    inner, around = section.maybe_count(field, MAX_POSITIONS), outer.maybe_count(field, MAX_POSITIONS)
    if inner is not None and around is not None and inner != around:
        raise outer.refusal(field, f"contradicts the value inside the rope, {inner}; keep the right one")
    return inner if inner is not None else around if around is not None else default
