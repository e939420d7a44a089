"""What the manifests of `manifests/` become: fields of the first object, and parts of its lines."""

from typing import Any

ENGINE = "spec.podTemplate.spec.containers.0"
EXPECTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "vllm-claim": (
        {
            "metadata.name": "chat-sluice",
            "metadata.namespace": "language",
            "spec.model": {
                "uri": "hf://Qwen/Qwen3-14B",
                "name": "qwen",
                "maxModelLen": 16000,
                "cache": {"pvc": "hub-cache"},
                "secretRef": {"name": "hub", "key": "access"},
            },
            "spec.engine.args": ["--enable-auto-tool-choice", "--tool-call-parser=hermes"],
            "spec.batching": {
                "maxNumSeqs": 96,
                "memoryUtilization": "0.88",
                "prefixCaching": True,
            },
            "spec.scaling": {"minReplicas": 2, "maxReplicas": 2},
            "spec.drain.timeout": "90s",
            "spec.hardware.memory": "80Gi",
            "spec.podTemplate.metadata.labels": {"cost-center": "4711"},
            "spec.podTemplate.spec": {},
        },
        [
            "--served-model-name: an object has one name, so not qwen-14b",
            "owned: containers[server].readinessProbe",
            "owned: containers[server].args: --port: 8000",
        ],
    ),
    "vllm-one-liner": (
        {
            "spec.model.uri": "hf://Qwen/Qwen2.5-Coder-32B-Instruct",
            "spec.model.dtype": "float16",
            "spec.model.secretRef": {"name": "hub-token", "key": "HF_TOKEN"},
            "spec.hardware.gpus": 2,
            "spec.engine.command": {},
            "spec.engine.args": [
                '--speculative-config={"method": "ngram", "prompt_lookup_max": 4}'
            ],
            "spec.engine.env.1": {"name": "VLLM_USE_V1", "value": "1"},
            f"{ENGINE}.resources.requests": {"cpu": 8, "memory": "64Gi"},
            "spec.podTemplate.spec.volumes.0.emptyDir.sizeLimit": "16Gi",
        },
        ["owned: containers[coder].volumeMounts[scratch]"],
    ),
    "vllm-prelude": (
        {
            "spec.engine.command": [
                "bash",
                "-c",
                'pip install --user flashinfer-extras && exec vllm serve "$@"',
                "sh",
            ],
            "spec.rollout": "Replace",
            "spec.hardware.memory": "80Gi",
            "spec.engine.args": ["--chat-template=/etc/templates/judge.jinja", "--enforce-eager"],
            "spec.podTemplate.spec.volumes.0.configMap.name": "judge-templates",
            f"{ENGINE}.resources.limits": {"ephemeral-storage": "100Gi"},
        },
        ["changed: containers[vllm].command: is kept"],
    ),
    "vllm-awq": (
        {
            "spec.engine.args": ["--quantization=awq_marlin"],
            "spec.batching.prefixCaching": False,
            "spec.hardware.memory": "22Gi",
            f"{ENGINE}.resources.requests": {"cpu": 2, "memory": "12Gi"},
            "spec.podTemplate.spec.priorityClassName": "interactive",
        },
        ["missing: hardware.memory: 22Gi by node.kubernetes.io/instance-type=g5.2xlarge"],
    ),
    "vllm-init-sidecar": (
        {
            "spec.model.uri": "pvc://legal-models/legal-8b",
            "spec.engine.args": [
                "--lora-modules",
                "tax=/models/tax-lora",
                "labour=/models/labour-lora",
                "--enable-lora",
            ],
            "spec.podTemplate.spec.initContainers.0.volumeMounts.0.name": "own-models",
            f"{ENGINE}.volumeMounts": [{"name": "own-models", "mountPath": "/models"}],
            "spec.podTemplate.spec.containers.1.name": "audit",
            "spec.podTemplate.spec.imagePullSecrets": [{"name": "registry"}],
        },
        ["owned: volumes[models]: is own-models"],
    ),
    "vllm-s3": (
        {
            "spec.model.uri": "s3://acme-models/llama-3.3-70b",
            "spec.hardware.gpus": 4,
            "spec.hardware.memory": "81559Mi",
            "spec.podTemplate.spec.serviceAccountName": "model-reader",
            "spec.podTemplate.spec.automountServiceAccountToken": True,
            f"{ENGINE}.envFrom": [{"configMapRef": {"name": "streamer"}}],
            "spec.engine.env.1.valueFrom.secretKeyRef.key": "id",
        },
        ["owned: containers[vllm].volumeMounts[shm]: the operator mounts"],
    ),
    "vllm-cpu": (
        {
            "spec.hardware": {"accelerator": "cpu", "cpu": "8", "memory": "16Gi"},
            "spec.model.dtype": "bfloat16",
            f"{ENGINE}.resources.requests": {"cpu": "4"},
            f"{ENGINE}.securityContext.capabilities.add": ["SYS_NICE"],
        },
        [],
    ),
    "vllm-mig": (
        {
            "metadata.labels": {"kueue.x-k8s.io/queue-name": "inference"},
            "spec.hardware.resource": "nvidia.com/mig-1g.10gb",
            "spec.hardware.memory": "10Gi",
            "spec.hardware.runtimeClassName": "nvidia",
            "spec.podTemplate.spec.schedulerName": "binpack",
        },
        ["missing: hardware.memory: 10Gi by nvidia.com/mig-1g.10gb"],
    ),
    "vllm-amd": (
        {
            "spec.hardware.accelerator": "other",
            "spec.hardware.resource": "amd.com/gpu",
            "spec.hardware.memory": "192Gi",
            "spec.podTemplate.spec.hostIPC": True,
            "spec.podTemplate.spec.securityContext.runAsNonRoot": False,
            "spec.engine.args": ["--swap-space=16", "--disable-log-requests"],
        },
        [],
    ),
    "vllm-tpu": (
        {
            "spec.hardware.resource": "google.com/tpu",
            "spec.hardware.gpus": 4,
            "spec.hardware.memory": "32Gi",
            "spec.engine.command": {},
            "spec.engine.args": {},
        },
        ["missing: hardware.cpu"],
    ),
    "vllm-dra": (
        {
            "spec.hardware.accelerator": "other",
            "spec.hardware.resource": {},
            "spec.podTemplate.spec.resourceClaims.0.resourceClaimTemplateName": "one-big-gpu",
            f"{ENGINE}.resources.claims": [{"name": "gpu"}],
        },
        [
            "changed: containers[vllm]: no device is asked for; it comes by resourceClaims",
            "owned: ResourceClaimTemplate one-big-gpu: stays",
        ],
    ),
    "vllm-lws-ray": (
        {
            "metadata.name": "giant-sluice",
            "spec.hardware.nodes": 2,
            "spec.hardware.gpus": 8,
            "spec.engine.args": {},
            "spec.engine.command": {},
            "spec.hardware.hostMemory": "1124Gi",
            "spec.model.secretRef": {"name": "hub", "key": "token"},
            "spec.podTemplate.spec.volumes.0.emptyDir.sizeLimit": "15Gi",
        },
        ["multi-node-serving.sh leader", "owned: workerTemplate"],
    ),
    "vllm-lws-mp": (
        {
            "spec.hardware.nodes": 4,
            "spec.scaling.minReplicas": 2,
            "spec.engine.args": ["--trust-remote-code"],
            f"{ENGINE}.resources.limits": {"rdma/hca": 8},
            f"{ENGINE}.env.1": {"name": "VLLM_HOST_IP", "value": "$(POD_IP)"},
            "spec.podTemplate.spec.hostNetwork": True,
        },
        ["owned: containers[vllm].args: --node-rank", "changed: hostNetwork"],
    ),
    "sglang-lws": (
        {
            "spec.hardware.nodes": 2,
            "spec.model.uri": "file:///models/deepseek-v3",
            "spec.engine.args": ["--trust-remote-code", "--tp=16"],
            "spec.podTemplate.spec.volumes.0.hostPath.path": "/mnt/nvme/models",
        },
        [
            "--dist-init-addr: $(LWS_LEADER_ADDRESS):20000: hardware.nodes joins the pods",
            "changed: containers[sglang].volumeMounts[models]: user 65532",
        ],
    ),
    "sglang-hostpath": (
        {
            "spec.batching": {
                "memoryUtilization": "0.85",
                "maxNumSeqs": 200,
                "maxNumBatchedTokens": 8192,
            },
            "spec.engine.env": [{"name": "HF_HUB_CACHE", "value": "/mnt/hub/hub"}],
            f"{ENGINE}.volumeMounts.0": {"name": "hf-cache", "mountPath": "/mnt/hub"},
            f"{ENGINE}.lifecycle.preStop.exec.command": ["sleep", "15"],
        },
        ["changed: containers[sgl].volumeMounts[hf-cache]: mounted at /mnt/hub"],
    ),
    "vllm-intel": (
        {
            "spec.hardware.resource": "gpu.intel.com/i915",
            "spec.engine.command.2": 'source /opt/intel/oneapi/setvars.sh && exec vllm serve "$@"',
        },
        ["missing: hardware.memory: 80Gi is a placeholder"],
    ),
    "tgi-env": (
        {
            "spec.model.cache": {"pvc": "tgi-data"},
            "spec.hardware.gpus": 2,
            "spec.model.secretRef": {"name": "hub", "key": "hf_api_token"},
            "spec.model.maxModelLen": 8192,
            "spec.batching.maxNumSeqs": 64,
            "spec.engine.env": [{"name": "MAX_INPUT_TOKENS", "value": "7000"}],
        },
        ["owned: containers[tgi].env.PORT: 8080"],
    ),
    "llamacpp-statefulset": (
        {
            "spec.model": {"uri": "file:///models/phi-4.gguf", "maxModelLen": 4096},
            "spec.batching.maxNumSeqs": 8,
            "metadata.name": "gguf-sluice",
            "spec.engine.args": ["-ngl", "99", "--flash-attn", "on"],
        },
        ["changed: volumeClaimTemplates[models]: a claim now ends with its pod"],
    ),
    "llamacpp-cpu": (
        {
            "spec.model": {
                "uri": "hf://ggml-org/gemma-3-4b-it-GGUF",
                "maxModelLen": 4096,
                "cache": {"pvc": "gguf-cache"},
            },
            "spec.engine.args": ["--hf-repo", "ggml-org/gemma-3-4b-it-GGUF:Q8_0"],
            "spec.scaling": {"minReplicas": 1, "maxReplicas": 4},
        },
        ["changed: HorizontalPodAutoscaler edge"],
    ),
    "ollama-pull": (
        {
            "spec.model.uri": "hf://bartowski/Qwen2.5-7B-Instruct-GGUF",
            "spec.engine.command": {},
            "spec.engine.env": [{"name": "OLLAMA_FLASH_ATTENTION", "value": "1"}],
            "spec.batching.maxNumSeqs": 4,
            "spec.model.maxModelLen": 8192,
        },
        ["owned: containers[ollama].command", "owned: containers[ollama].env.OLLAMA_HOST"],
    ),
    "vllm-several": (
        {"spec.model.revision": "9216db5781bf21249d130ec9da846c4624c16137"},
        ["owned: Deployment web: stays", "owned: PodDisruptionBudget big"],
    ),
    "vllm-key-lora": (
        {
            "spec.apiKeySecretRef": {"name": "tuned-sluice-keys"},
            f"{ENGINE}.env.1.valueFrom.resourceFieldRef.containerName": "engine",
            "spec.engine.env.0.name": "API_KEY",
        },
        ["it is key password of Secret tuned-api now"],
    ),
    "vllm-dp-statefulset": (
        {
            "metadata.name": "experts",
            "spec.scaling.minReplicas": 3,
            "spec.engine.args": ["--data-parallel-size=4", "--enable-expert-parallel"],
            f"{ENGINE}.resources.limits": {"hugepages-2Mi": "1Gi"},
        },
        ["owned: containers[vllm].volumeMounts[shm]"],
    ),
    "vllm-node-cache": (
        {
            "spec.model": {"uri": "file:///models/qwen3-8b", "name": "qwen3-8b"},
            "spec.podTemplate.spec.securityContext": {"runAsUser": 0, "runAsNonRoot": False},
        },
        [],
    ),
    "vllm-csi": (
        {
            "spec.model.uri": "file:///bucket/llama-8b",
            "spec.hardware.memory": "40Gi",
            "spec.podTemplate.metadata.annotations": {"gke-gcsfuse/volumes": "true"},
            "spec.podTemplate.spec.volumes.0.csi.driver": "gcsfuse.csi.storage.gke.io",
        },
        [],
    ),
    "vllm-neuron": (
        {"spec.hardware.gpus": 4, "spec.engine.args": ["--block-size=32", "-tp", "8"]},
        [],
    ),
    "vllm-supervised": (
        {"spec.model.uri": "hf://Qwen/Qwen3-4B", "spec.engine.command.3": "sh"},
        ["lost: containers[vllm].command", "lost: shareProcessNamespace"],
    ),
    "vllm-without-owner": ({"spec.model.uri": "hf://gpt2"}, []),
}
