"""Plans for servers with several GPUs, and the files of vLLM, Ray, KServe and Kubernetes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import LLAMA_2_70B, QWEN_3_30B_A3B, SMOLLM2_135M

from edgekit.apps.handover.gpus import all_gpus, gpu_group
from edgekit.apps.handover.ranks import Load, ServerSubject, rank_memory, rank_model
from edgekit.apps.handover.request import ServerRequest
from edgekit.apps.handover.resolver import resolve_server
from edgekit.apps.handover.served_models import handover
from edgekit.apps.handover.server_files import VERSIONS, readme, server_files
from edgekit.apps.handover.server_plan import ParallelLayout, RejectedLayout, ServerName, ServerPlan
from edgekit.contracts.recipe import Recipe, named_recipe
from edgekit.contracts.token_costs import kv_bytes
from edgekit.errors import DoesNotFit, InvalidInput, UnknownName, Unsupported
from edgekit.model.families import model_from_config
from edgekit.model.spec import ModelSpec

GIB = 1 << 30


LLAMA_3_70B = LLAMA_2_70B | {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 8192}


def spec(config: dict[str, object]) -> ModelSpec:
    return model_from_config(config, "model", "config.json")


def subject(config: dict[str, object], recipe: str | Recipe = "float16") -> ServerSubject:
    chosen = named_recipe(recipe) if isinstance(recipe, str) else recipe
    return ServerSubject(spec(config), "model", "0" * 64, handover(chosen))


def planned(config: dict[str, object], gpu: str, recipe: str | Recipe = "float16", **wishes: object) -> ServerPlan:
    request = ServerRequest.model_validate({"to": "vllm", **wishes})
    return resolve_server(subject(config, recipe), [gpu_group(gpu)], request)


def refused(config: dict[str, object], gpu: str, recipe: str | Recipe = "float16", **wishes: object) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        planned(config, gpu, recipe, **wishes)
    return caught.value


def of(layouts: tuple[RejectedLayout, ...], **degrees: int) -> RejectedLayout:
    return next(
        each for each in layouts if all(getattr(each.layout, name) == degree for name, degree in degrees.items())
    )


@pytest.mark.parametrize("name", sorted(all_gpus()))
def test_every_figure_of_a_gpu_names_its_source(name: str) -> None:
    gpu = all_gpus()[name]
    for field in type(gpu).model_fields:
        fact = getattr(gpu, field)
        if hasattr(fact, "confidence"):
            assert len(fact.source) >= 15, field
            assert fact.confidence == "recalled" or any(mark in fact.source for mark in "./#"), field
            assert (fact.confidence == "recalled") == ("from memory" in fact.source), field


def test_a_group_of_gpus_is_named_with_its_count() -> None:
    assert str(gpu_group("H100x4")) == "h100x4" and str(gpu_group("A100x8")) == "a100-80gbx8"
    assert str(gpu_group("a100-40gbx2")) == "a100-40gbx2" and gpu_group("MI300X").size == 1
    assert str(gpu_group("MI300Xx8")) == "mi300xx8"
    with pytest.raises(UnknownName, match="unknown GPU 'h10'; did you mean"):
        gpu_group("h10x4")
    with pytest.raises(InvalidInput, match="such as H100x4"):
        gpu_group("4 H100")


def test_ranks_together_hold_the_model_and_its_cache_once() -> None:
    model, recipe = spec(LLAMA_3_70B), named_recipe("float16")
    layout = ParallelLayout(tensor=8)
    subject = ServerSubject(model, "model", "0" * 64, recipe)
    memory = rank_memory(subject, layout, Load(8192, 64, "auto"))
    assert model.parameters * 2 / 8 <= memory.weights_bytes <= model.parameters * 2 / 8 * 1.001
    assert memory.kv_bytes == 64 * 8192 * 80 * 2 * 8 * 128 * 2 // 8
    assert 8 * kv_bytes(rank_model(model, layout), 100, 16) == kv_bytes(model, 100, 16)
    half = rank_memory(subject, layout, Load(8192, 64, "fp8"))
    assert 2 * half.kv_bytes == memory.kv_bytes


def test_kv_heads_are_replicated_with_more_gpus_than_heads() -> None:
    model = spec(QWEN_3_30B_A3B)
    assert {layer.kv_heads for layer in rank_model(model, ParallelLayout(tensor=8)).layers} == {1}
    four = kv_bytes(rank_model(model, ParallelLayout(tensor=4)), 100, 16)
    assert kv_bytes(rank_model(model, ParallelLayout(tensor=8)), 100, 16) == four


def test_expert_and_tensor_parallel_weights_have_equal_size() -> None:
    subject = ServerSubject(spec(QWEN_3_30B_A3B), "model", "0" * 64, named_recipe("float16"))
    sizes = [
        rank_memory(subject, ParallelLayout(tensor=4, experts=dealt), Load(64, 1, "auto")) for dealt in (False, True)
    ]
    assert sizes[0].weights_bytes == sizes[1].weights_bytes
    assert sizes[0].weights_bytes == pytest.approx(subject.model.parameters * 2 / 4, rel=0.01)


@pytest.mark.parametrize("gpu", ["A100x8", "H100x8"])
def test_llama_3_70b_in_16_bits_on_eight_gpus_of_80_gb(gpu: str) -> None:
    plan = planned(LLAMA_3_70B, gpu, sequences=64)
    assert plan.layout == ParallelLayout(tensor=8)
    assert 16 * GIB < plan.memory.weights_bytes < 17 * GIB and plan.memory.kv_bytes == 20 * GIB
    assert plan.kv_tokens > 64 * 8192 and plan.predicted
    alone = of(plan.rejected, tensor=1, data=8)
    assert alone.failures[0].what == "memory" and "GiB a GPU before any KV" in alone.failures[0].found


def test_llama_3_70b_on_four_gpus_holds_it_but_not_64_full_contexts() -> None:
    assert planned(LLAMA_3_70B, "A100x4", sequences=16).layout == ParallelLayout(tensor=4)
    error = refused(LLAMA_3_70B, "A100x4", sequences=64)
    failure = of(error.rejected["a100-80gbx4"], tensor=4).failures[0]
    assert failure.what == "KV" and failure.found == "40 GiB a GPU for 64 × 8,192 tokens"
    assert "--sequences 64 → 5" in failure.cure and "--gpu a100-80gbx8 (TP 8)" in failure.cure
    fewer = int(failure.cure.partition("→ ")[2].partition(";")[0])
    assert planned(LLAMA_3_70B, "A100x4", sequences=fewer).layout == ParallelLayout(tensor=4)
    assert of(planned(LLAMA_3_70B, "A100x4", sequences=fewer + 1).rejected, tensor=4).failures[0].what == "KV"


def test_fp8_kv_is_offered_where_it_makes_the_cache_fit() -> None:
    cure = of(refused(LLAMA_3_70B, "H100x4", sequences=100).rejected["h100x4"], tensor=4).failures[0].cure
    assert "--sequences 100 → " in cure and "--context" in cure
    assert planned(LLAMA_3_70B, "H100x4", sequences=100, kv_format="fp8").memory.kv_bytes < 32 * GIB


@pytest.mark.parametrize(("gpu", "tensor"), [("H100x4", 4), ("H100x8", 8)])
def test_qwen3_30b_a3b_fits_on_gpus_of_80_gb_with_and_without_expert_parallelism(gpu: str, tensor: int) -> None:
    plan = planned(QWEN_3_30B_A3B, gpu, sequences=64)
    assert plan.layout.gpus == tensor
    dealt = planned(QWEN_3_30B_A3B, gpu, sequences=64, expert_parallel=True)
    assert dealt.layout.experts and dealt.layout.expert_group == tensor
    assert all(each.layout.experts for each in dealt.rejected if each.layout.tensor * each.layout.data > 1)


def test_sglang_needs_even_expert_counts_and_vllm_does_not() -> None:
    odd = {"gpu": "H100x3", "sequences": 4, "expert_parallel": True}
    assert planned(QWEN_3_30B_A3B, **odd).layout == ParallelLayout(tensor=1, data=3, experts=True)  # type: ignore[arg-type]
    failures = of(planned(QWEN_3_30B_A3B, to="sglang", **odd).rejected, data=3).failures  # type: ignore[arg-type]
    assert failures[0].what == "experts" and failures[0].found == "128 experts over 3 GPUs"


def test_heads_that_cannot_be_divided_name_the_degree_that_can() -> None:
    failures = of(planned(SMOLLM2_135M, "L4x2").rejected, tensor=2).failures
    assert failures[0].what == "heads" and failures[0].found == "9 heads over 2 GPUs"
    assert failures[0].cure == "tensor parallel 2 → 1"


def test_a_group_across_ranks_is_refused_with_the_group_that_divides() -> None:
    config = LLAMA_3_70B | {"intermediate_size": 28672 + 8 * 64}
    error = of(planned(config, "H100x8", "s4-g128", sequences=1).rejected, tensor=8)
    group = next(each for each in error.failures if each.what == "group")
    assert group.found == "mlp.down_proj: 29,184 / 8 = 3,648 values a row" and "of 128" in group.allowed
    assert group.cure.startswith("--recipe s4-g64, or tensor parallel 8 → 4")
    assert planned(config, "H100x8", "s4-g64", sequences=1).layout == ParallelLayout(tensor=8)


def test_speed_and_first_token_are_limits() -> None:
    fast = refused(LLAMA_3_70B, "A10x8", "s4-g128", min_tokens_per_second=1000)
    assert any(each.what == "speed" for layout in fast.rejected["a10x8"] for each in layout.failures)
    prompt = refused(LLAMA_3_70B, "H100x8", max_first_token=0.0001)
    assert any(each.what == "first token" for layout in prompt.rejected["h100x8"] for each in layout.failures)


def test_a_cache_in_fp8_is_refused_by_name_on_ampere() -> None:
    failures = refused(LLAMA_3_70B, "A100x8", "float16", kv_format="fp8").rejected["a100-80gbx8"][0].failures
    assert failures[0].what == "fp8" and "a100-80gb, which is ampere" in failures[0].found
    assert planned(LLAMA_3_70B, "H100x8", "float16", kv_format="fp8").gpu == "h100"


def test_split_prefill_and_decode_count_transferred_kv() -> None:
    plan = planned(LLAMA_3_70B, "H100x8", "s4-g128", sequences=16, disaggregate=True)
    assert 0 < plan.layout.prefill < plan.layout.data
    assert plan.transfer_bytes == kv_bytes(spec(LLAMA_3_70B), 4096, 16)
    assert any("does not raise throughput" in note for note in plan.notes)
    with pytest.raises(InvalidInput, match="need a GPU each"):
        planned(LLAMA_3_70B, "H100", disaggregate=True)


def test_first_sufficient_gpu_group_is_chosen() -> None:
    groups = [gpu_group("L4x2"), gpu_group("H100x4"), gpu_group("H200x8")]
    plan = resolve_server(subject(LLAMA_3_70B), groups, ServerRequest(to="vllm", sequences=4))
    assert plan.gpu == "h100" and any("h100x4 stands before it" in each.reason for each in plan.rejected)


def test_more_than_one_machine_is_not_one_tensor_group() -> None:
    plan = planned(LLAMA_3_70B, "H100x16", sequences=64)
    assert plan.layout.tensor <= 8
    assert of(plan.rejected, tensor=16).failures[0].what == "links"


def test_a_plan_survives_its_file() -> None:
    plan = planned(QWEN_3_30B_A3B, "H100x4", sequences=64)
    assert ServerPlan.model_validate_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["predicted"] is True


Config = dict[str, Any]


def plan_of(to: ServerName, config: Config = LLAMA_2_70B, gpu: str = "H100x4", **wishes: Any) -> ServerPlan:
    model = model_from_config(config, "Some Model 7.5", "config.json")
    subject = ServerSubject(model, "model", "0" * 64, handover(named_recipe("s4-g128")))
    request = ServerRequest.model_validate({"to": to, "sequences": 4, **wishes})
    return resolve_server(subject, [gpu_group(gpu)], request)


def files_of(plan: ServerPlan) -> dict[str, Any]:
    return {name: yaml.safe_load(text) for name, text in server_files(plan).items()}


def test_vllm_gets_the_degrees_and_the_limits_of_the_plan() -> None:
    plan = plan_of("vllm", sequences=32, context=2048, kv_format="fp8")
    config = files_of(plan)["vllm.yaml"]
    assert config["tensor-parallel-size"] == plan.layout.tensor == 4
    assert config["max-model-len"] == 2048 and config["max-num-seqs"] == 32
    assert config["kv-cache-dtype"] == "fp8" and config["gpu-memory-utilization"] == plan.memory_share
    assert config["host"] == "127.0.0.1" and config["model"] == "./weights"
    assert "enable-expert-parallel" not in config and "data-parallel-size" not in config


def test_a_split_starts_one_vllm_for_prefill_and_one_for_decode() -> None:
    plan = plan_of("vllm", disaggregate=True)
    prefill, decode = files_of(plan)["vllm-prefill.yaml"], files_of(plan)["vllm-decode.yaml"]
    assert prefill["port"] != decode["port"]
    assert json.loads(prefill["kv-transfer-config"])["kv_connector"] == "NixlConnector"
    copies = prefill.get("data-parallel-size", 1) + decode.get("data-parallel-size", 1)
    assert copies == plan.layout.data and "proxy" in readme(plan, ["x"])


def test_experts_adapters_and_a_draft_reach_vllm() -> None:
    plan = plan_of("vllm", QWEN_3_30B_A3B, expert_parallel=True)
    plan = plan.model_copy(update={"adapters": ("/home/me/law/",), "adapter_rank": 20, "draft": "small"})
    config = files_of(plan)["vllm.yaml"]
    assert config["enable-expert-parallel"] is True
    assert config["lora-modules"] == ["law=./adapters/law"] and config["max-lora-rank"] == 32
    assert json.loads(config["speculative-config"])["model"] == "./draft"


def test_a_head_reaches_vllm_by_its_own_method() -> None:
    config = files_of(plan_of("vllm").model_copy(update={"drafter": "/home/me/head"}))["vllm.yaml"]
    assert json.loads(config["speculative-config"]) == {
        "method": "eagle3", "model": "./drafter", "num_speculative_tokens": 3,
    }  # fmt: skip


def test_sglang_counts_all_gpus_that_share_experts_as_its_tensor_group() -> None:
    whole = files_of(plan_of("sglang", sequences=32))["sglang.yaml"]
    assert whole["tp-size"] == 4 and whole["max-running-requests"] == 32 and "ep-size" not in whole
    plan = plan_of("sglang", QWEN_3_30B_A3B, expert_parallel=True)
    shared = files_of(plan)["sglang.yaml"]
    assert shared["tp-size"] == shared["ep-size"] == 4
    assert plan.layout.data == 1 or shared["attn-dp-size"] == plan.layout.data


def test_sglang_takes_paths_of_adapters_from_its_command_alone() -> None:
    plan = plan_of("sglang").model_copy(update={"adapters": ("/home/me/law", "/home/me/my tax"), "adapter_rank": 8})
    (text,) = server_files(plan).values()
    config = yaml.safe_load(text)
    assert config["enable-lora"] is True and config["max-lora-rank"] == 8 and "lora-paths" not in config
    start = "--config sglang.yaml --lora-paths law=./adapters/law 'my tax=./adapters/my tax'"
    assert f"{start}, from this folder" in text.splitlines()[0] and f"{start}\n" in readme(plan, ["x"])


def test_ray_gets_one_replica_for_each_copy() -> None:
    (application,) = files_of(plan_of("ray"))["ray-serve.yaml"]["applications"]
    (config,) = application["args"]["llm_configs"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app" and config["accelerator_type"] == "H100"
    assert config["engine_kwargs"]["tensor_parallel_size"] == 4
    assert config["deployment_config"]["autoscaling_config"]["max_replicas"] == 1
    split = files_of(plan_of("ray", disaggregate=True))["ray-serve.yaml"]["applications"][0]
    assert split["import_path"].endswith("build_pd_openai_app") and set(split["args"]) == {
        "prefill_config",
        "decode_config",
    }


@pytest.mark.parametrize("split", [False, True])
def test_kserve_gets_the_parallelism_and_the_gpus_of_a_replica(split: bool) -> None:
    plan = plan_of("kserve", disaggregate=split)
    spec = files_of(plan)["kserve.yaml"]
    assert spec["apiVersion"] == "serving.kserve.io/v1alpha2" and spec["metadata"]["name"] == "some-model-7-5"
    for workload in [spec["spec"], *([spec["spec"]["prefill"]] if split else [])]:
        assert workload["parallelism"]["tensor"] == plan.layout.tensor
        (container,) = workload["template"]["containers"]
        gpus = plan.layout.tensor * plan.layout.pipeline
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
        assert f"--tensor-parallel-size {plan.layout.tensor}" in container["env"][0]["value"]


def test_the_resource_of_kserve_has_the_fields_of_its_version() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the extra `eval` is not installed")
    known = json.loads((Path(__file__).parents[2] / "data" / "server_schemas.json").read_text())
    check = jsonschema.Draft202012Validator({**known["kserve"], "$defs": known["$defs"]})
    more = {"adapters": ("/home/me/law",), "adapter_rank": 8, "draft": "small"}
    plans = [
        plan_of("kserve"),
        plan_of("kserve", disaggregate=True),
        plan_of("kserve", QWEN_3_30B_A3B, expert_parallel=True, kv_format="fp8"),
        plan_of("kserve").model_copy(update=more),
    ]
    for plan in plans:
        (resource,) = files_of(plan).values()
        assert resource["apiVersion"].partition("/")[2] in VERSIONS["kserve"]
        assert [error.message for error in check.iter_errors(resource)] == []
    for spoiled in ("replica", "modell"):  # a name that the version does not have
        assert list(check.iter_errors({**resource, "spec": {**resource["spec"], spoiled: 1}}))
    assert list(check.iter_errors({**resource, "apiVersion": "v1"}))


def test_ray_applications_have_the_fields_of_their_version() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the extra `eval` is not installed")
    known = json.loads((Path(__file__).parents[2] / "data" / "server_schemas.json").read_text())
    assert f"{VERSIONS['ray']}:" in known["ray"]["$comment"]
    check = jsonschema.Draft202012Validator({**known["ray"], "$defs": known["$defs"]})
    plans = [
        *(plan_of("ray", SMOLLM2_135M, gpu, sequences=1, context=512) for gpu in sorted(all_gpus())),
        plan_of("ray", disaggregate=True),
        plan_of("ray", QWEN_3_30B_A3B, expert_parallel=True, kv_format="fp8"),
        plan_of("ray").model_copy(update={"draft": "small"}),
    ]
    builders = set()
    for plan in plans:
        (file,) = files_of(plan).values()
        assert [error.message for error in check.iter_errors(file)] == []
        (application,) = file["applications"]
        builders.add(application["import_path"])
    assert len(builders) == 3
    (config,) = (application := files_of(plans[0])["ray-serve.yaml"]["applications"][0])["args"]["llm_configs"]
    for spoiled in (
        {**config, "accelerator_type": "H1000"},
        {**config, "engine_kwargs": {"tensor_parallel": 1}},
        {**config, "deployment_config": {"max_replica": 1}},
    ):
        changed = {**application, "args": {"llm_configs": [spoiled]}}
        assert list(check.iter_errors({"applications": [changed]})), spoiled
    assert list(check.iter_errors({"applications": [{**application, "args": {"llm_config": config}}]}))


def test_unsupported_server_options_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="loads adapters from a bucket"):
        files_of(plan_of("ray").model_copy(update={"adapters": ("law",), "adapter_rank": 8}))


@pytest.mark.parametrize("to", sorted(VERSIONS))
def test_every_readme_has_the_commands_and_says_that_figures_are_predictions(to: ServerName) -> None:
    plan = plan_of(to)
    text = readme(plan, sorted(server_files(plan)))
    assert "Every figure is a prediction" in text and "smoke_test.py --url" in text
    assert all(name in text for name in server_files(plan))
