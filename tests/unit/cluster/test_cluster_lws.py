"""LeaderWorkerSets on the cluster: what is changed of their module's manifests."""

from __future__ import annotations

import json

import yaml
from groups.lws import DNS, adapted

DEPLOYMENT = """apiVersion: apps/v1
kind: Deployment
metadata: {name: lws-controller-manager}
spec:
  replicas: 2
  template:
    spec:
      containers:
      - {name: manager, args: [--config=/c.yaml], command: [/manager], image: far/away:1}
"""
OTHER = """apiVersion: v1
kind: Secret
metadata: {name: certificate}
"""


def test_the_controller_runs_once_from_our_image_and_other_manifests_stay() -> None:
    made, other = adapted(f"{DEPLOYMENT}---\n{OTHER}", "near/lws:2").split("\n---\n")
    assert other == OTHER
    spec = json.loads(made)["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert spec["replicas"] == 1
    assert (container["image"], container["command"]) == ("near/lws:2", ["/lws"])
    assert container["args"] == ["--config=/c.yaml", "--leader-elect=false"]
    assert yaml.safe_load(DEPLOYMENT)["metadata"] == json.loads(made)["metadata"]


def test_dns_is_built_with_few_plugins() -> None:
    [text] = DNS.files.values()
    assert text.count("coredns/plugin/") == 4
    assert '\t_ "github.com/coredns/coredns/plugin/kubernetes"\n' in text
