"""The start files of servers have the plan's settings in each server's own fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import LLAMA_2_70B, QWEN_3_30B_A3B, SMOLLM2_135M

from edgekit.apps.handover import dynamo, kserve, ray_serve
from edgekit.apps.handover.bundle import FILES
from edgekit.apps.handover.gpus import all_gpus, gpu_group
from edgekit.apps.handover.readme import readme
from edgekit.apps.handover.server_plan import ServerName, ServerPlan
from edgekit.apps.handover.servers.layouts import ServerSubject
from edgekit.apps.handover.servers.request import ServerRequest
from edgekit.apps.handover.servers.resolver import resolve_server
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import Unsupported
from edgekit.model.families import model_from_config
from edgekit.quant.vllm_compat import handover

Config = dict[str, Any]
VERSIONS = {"kserve": kserve.VERSION, "dynamo": dynamo.VERSION}


def plan_of(to: ServerName, config: Config = LLAMA_2_70B, gpu: str = "H100x4", **wishes: Any) -> ServerPlan:
    model = model_from_config(config, "Some Model 7.5", "config.json")
    subject = ServerSubject(model, "model", "0" * 64, handover(named_recipe("s4-g128")))
    request = ServerRequest.model_validate({"to": to, "sequences": 4, **wishes})
    return resolve_server(subject, [gpu_group(gpu)], request)


def files_of(plan: ServerPlan) -> dict[str, Any]:
    return {name: yaml.safe_load(text) for name, text in FILES[plan.server](plan).items()}


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
    (text,) = FILES["sglang"](plan).values()
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


def test_dynamo_gets_a_worker_for_each_role_and_refuses_gpus_that_it_lacks() -> None:
    services = files_of(plan_of("dynamo", disaggregate=True))["dynamo.yaml"]["spec"]["services"]
    assert set(services) == {"Frontend", "prefill", "decode"}
    for role in ("prefill", "decode"):
        words = services[role]["extraPodSpec"]["mainContainer"]["args"]
        assert words[words.index("--disaggregation-mode") + 1] == role
        assert words[words.index("--model") + 1] == "/models/some-model-7-5/weights"
    with pytest.raises(Unsupported, match="not for mi300x"):
        files_of(plan_of("dynamo", gpu="MI300X"))


@pytest.mark.parametrize("to", ["kserve", "dynamo"])
def test_resources_of_kubernetes_have_the_fields_of_their_versions(to: ServerName) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the extra `eval` is not installed")
    known = json.loads((Path(__file__).parents[2] / "data" / "server_schemas.json").read_text())
    check = jsonschema.Draft202012Validator({**known[to], "$defs": known["$defs"]})
    beside = {"adapters": ("/home/me/law",), "adapter_rank": 8, "draft": "small"}
    plans = [
        plan_of(to),
        plan_of(to, disaggregate=True),
        plan_of(to, QWEN_3_30B_A3B, expert_parallel=True, kv_format="fp8"),
        plan_of(to).model_copy(update=beside),
    ]
    for plan in plans:
        (resource,) = files_of(plan).values()
        assert resource["apiVersion"].partition("/")[2] in VERSIONS[to]
        assert [error.message for error in check.iter_errors(resource)] == []
    for spoiled in ("replica", "modell"):  # a name that the version does not have
        assert list(check.iter_errors({**resource, "spec": {**resource["spec"], spoiled: 1}}))
    assert list(check.iter_errors({**resource, "apiVersion": "v1"}))


def test_ray_applications_have_the_fields_of_their_version() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the extra `eval` is not installed")
    known = json.loads((Path(__file__).parents[2] / "data" / "server_schemas.json").read_text())
    assert f"{ray_serve.VERSION}:" in known["ray"]["$comment"]
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


@pytest.mark.parametrize("to", sorted(FILES))
def test_every_readme_has_the_commands_and_says_that_figures_are_predictions(to: ServerName) -> None:
    plan = plan_of(to)
    text = readme(plan, sorted(FILES[to](plan)))
    assert "Every figure is a prediction" in text and "smoke_test.py --url" in text
    assert all(name in text for name in FILES[to](plan))
