"""The chart, with real Helm on a real API server: it installs, and asks for little."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from integration.apiserver import ApiServer
from sluice_cluster import binaries
from sluice_cluster.settings import ClusterSettings, LocalClusterError
from sluice_cluster.shell import Word, run, wait_until
from unit.operator.objects import changed, valid_object

CHART = Path(__file__).parents[2] / "charts" / "sluice"
IMAGES = ("--set", "image=registry/operator:1", "--set", "worker.image=registry/worker:1")
NAMESPACE = "chart-test"
CRDS = ("inferenceservices.sluice.dev", "inferencebatches.sluice.dev")
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:sluice"

Manifest = dict[str, Any]


@pytest.fixture(scope="session")
def helm() -> Path:
    """Helm, built from its Go module."""
    return binaries.ensure(ClusterSettings.from_environment().paths, ("helm",)) / "helm"


@pytest.fixture(scope="session")
def installed(helm: Path, apiserver: ApiServer) -> ApiServer:
    """The API server with the chart installed in a namespace that enforces `restricted`."""
    body = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": NAMESPACE,
            "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
        },
    }
    kubectl(apiserver, "apply", "-f", "-", stdin=json.dumps(body))
    # the CRD may be there already, from another test
    on_cluster(helm, apiserver, "install", "sluice", str(CHART), *IMAGES, "--take-ownership")
    return apiserver


def kubectl(server: ApiServer, *arguments: str, stdin: str | None = None) -> str:
    command: list[Word] = [server.kubectl, f"--kubeconfig={server.kubeconfig}", *arguments]
    return run(command, stdin=stdin)


def on_cluster(helm: Path, server: ApiServer, *arguments: str) -> str:
    where = ("--namespace", NAMESPACE, "--kubeconfig", str(server.kubeconfig))
    return run([helm, *arguments, *where], env=dict(os.environ))


def template(helm: Path, *arguments: str) -> list[Manifest]:
    rendered = run([helm, "template", "sluice", CHART, "--namespace", NAMESPACE, *arguments])
    return [body for body in yaml.safe_load_all(rendered) if body]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [body for body in manifests if body["kind"] == kind]


def test_notes_name_each_namespace_and_the_crd_only_where_it_is_the_chart_s(helm: Path) -> None:
    install: list[Word] = [helm, "install", "sluice", str(CHART), "--dry-run=client", *IMAGES]
    mine = run([*install, "--set", "watchNamespaces={a,b}"])
    assert (
        "\n  kubectl delete infs,infbatch --all -n a\n  kubectl delete infs,infbatch --all -n b\n"
        in mine
    )
    assert "kubectl delete crd" in mine
    policy = "inferenceservices-pod-template.sluice.dev"
    for kind in ("validatingadmissionpolicy", "validatingadmissionpolicybinding"):
        assert f"\n  kubectl delete {kind} {policy}" in mine
    assert "\n  kubectl delete clusterrole sluice-admin sluice-edit sluice-view" in mine
    other = run([*install, "--set", "crds.install=false,userRoles=false"])
    assert "kubectl delete infs,infbatch --all --all-namespaces" in other
    assert "kubectl delete crd" not in other
    assert "kubectl delete clusterrole" not in other


def test_on_openshift_user_and_groups_are_left_to_the_namespace(helm: Path) -> None:
    def rendered(*more: str) -> tuple[set[str], list[str]]:
        [pods] = of_kind(template(helm, *IMAGES, *more), "Deployment")
        spec = pods["spec"]["template"]["spec"]
        fixed = {"runAsUser", "runAsGroup", "fsGroup"} & spec["securityContext"].keys()
        return fixed, spec["containers"][0]["args"]

    fixed, arguments = rendered()
    assert (len(fixed), "--assigned-user" in arguments) == (3, False)
    fixed, arguments = rendered("--set", "openshift=true")
    assert (len(fixed), "--assigned-user" in arguments) == (0, True)


@pytest.mark.parametrize("namespaces", [(), ("--set", "watchNamespaces={one,two}")])
def test_only_on_openshift_owner_references_take_a_right_to_delete(
    helm: Path, namespaces: tuple[str, ...]
) -> None:
    def deletable(*more: str) -> set[str]:
        manifests = template(helm, *IMAGES, "--set", "userRoles=false", *namespaces, *more)
        roles = [*of_kind(manifests, "ClusterRole"), *of_kind(manifests, "Role")]
        rules = [rule for role in roles for rule in role["rules"]]
        return {one for rule in rules if "delete" in rule["verbs"] for one in rule["resources"]}

    assert deletable() == set()
    assert deletable("--set", "openshift=true") == {
        "deployments", "services", "configmaps", "secrets", "poddisruptionbudgets",
        "leaderworkersets", "jobs",
    }  # fmt: skip


def test_lint_has_nothing_to_say(helm: Path) -> None:
    assert "0 chart(s) failed" in run([helm, "lint", "--strict", CHART, *IMAGES])


def test_every_value_can_be_given_and_all_that_is_rendered_is_yaml(helm: Path) -> None:
    given = (
        "--set", "verbose=true,logFormat=json,nodeSelector.disk=ssd,podAnnotations.a=b",
        "--set", "watchNamespaces={one,two},imagePullSecrets[0].name=pull",
        "--set", "modelsVolume.persistentVolumeClaim.claimName=models",
        "--set", "tolerations[0].operator=Exists,affinity.nodeAffinity=null",
        "--set", "hub.endpoint=https://hub.example,hub.proxy=http://proxy:3128",
        "--set", "hub.caConfigMap.name=authorities,hub.caConfigMap.key=all.pem",
        "--set", "priorityClassName=high,podLabels.team=ml",
        "--set", "serviceAccount.name=other,serviceAccount.annotations.a=b",
    )  # fmt: skip
    manifests = template(helm, *IMAGES, *given)
    made = of_kind(manifests, "Deployment")[0]["spec"]["template"]
    evictable = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    assert made["metadata"]["annotations"] == {"a": "b", evictable: "tmp"}
    pod = made["spec"]
    arguments = set(pod["containers"][0]["args"])
    assert {"--verbose", "--log-format=json", "--namespace=one"} <= arguments
    assert {"--hub-endpoint=https://hub.example", "--hub-proxy=http://proxy:3128"} <= arguments
    assert {f"--instance={NAMESPACE}/sluice", "--pod-ip=$(POD_IP)"} <= arguments
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod["containers"][0][
        "volumeMounts"
    ]
    assert [role["metadata"]["namespace"] for role in of_kind(manifests, "Role")] == ["one", "two"]
    assert not of_kind(manifests, "ClusterRoleBinding")
    assert pod["priorityClassName"] == "high"
    account = of_kind(manifests, "ServiceAccount")[0]["metadata"]
    assert (account["name"], account["annotations"]) == ("other", {"a": "b"})
    bound = {s["name"] for one in of_kind(manifests, "RoleBinding") for s in one["subjects"]}
    assert bound == {pod["serviceAccountName"]} == {"other"}


def test_a_pull_secret_that_is_named_later_makes_a_new_pod(helm: Path) -> None:
    """One of the account's would reach only pods that are made after it."""
    manifests = template(helm, *IMAGES, "--set", "imagePullSecrets[0].name=pull")
    [deployment] = of_kind(manifests, "Deployment")
    assert deployment["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    assert "imagePullSecrets" not in of_kind(manifests, "ServiceAccount")[0]


def test_labels_of_the_pod_leave_those_that_pick_it(helm: Path) -> None:
    mine = "podLabels.team=ml,podLabels.app\\.kubernetes\\.io/name=other"
    [deployment] = of_kind(template(helm, *IMAGES, "--set", mine), "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels["team"] == "ml"
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_authorities_of_a_hub_are_the_operators_own_and_named_to_it_for_the_pods(
    helm: Path,
) -> None:
    def rendered(*more: str) -> Manifest:
        [deployment] = of_kind(template(helm, *IMAGES, *more), "Deployment")
        pod: Manifest = deployment["spec"]["template"]["spec"]
        return pod

    pod = rendered("--set", "hub.caConfigMap.name=authorities,hub.caConfigMap.key=all.pem")
    [container] = pod["containers"]
    assert "--hub-ca-config-map=authorities/all.pem" in container["args"]
    [file] = [one["value"] for one in container["env"] if one["name"] == "SSL_CERT_FILE"]
    source = {"name": "authorities", "items": [{"key": "all.pem", "path": Path(file).name}]}
    [volume] = [one["name"] for one in pod["volumes"] if one.get("configMap") == source]
    mount = {"name": volume, "mountPath": str(Path(file).parent), "readOnly": True}
    assert mount in container["volumeMounts"]
    assert "ca" not in {one["name"] for one in rendered()["volumes"]}


def test_the_crd_and_the_roles_of_users_can_be_left_out(helm: Path) -> None:
    def shared(*more: str) -> set[str]:
        kinds = ("CustomResourceDefinition", "ClusterRole")
        rendered = template(helm, *IMAGES, *more)
        return {one["metadata"]["name"] for kind in kinds for one in of_kind(rendered, kind)}

    crds, roles = set(CRDS), {"sluice-admin", "sluice-edit", "sluice-view"}
    assert shared() == {*crds, "sluice", *roles}
    assert shared("--set", "crds.install=false") == {"sluice", *roles}
    assert shared("--set", "userRoles=false") == {*crds, "sluice"}
    without = "crds.install=false,userRoles=false,watchNamespaces={one}"
    assert shared("--set", without) == set()


def test_what_the_docs_tell_a_cluster_admin_to_apply_is_the_definition_its_policy_and_the_roles(
    helm: Path,
) -> None:
    lines = (CHART.parents[1] / "docs" / "operate.md").read_text().splitlines()
    [command] = [line.partition(" | ")[0] for line in lines if "--show-only" in line]
    program, *arguments = command.replace("charts/sluice", str(CHART)).split()
    assert program == "helm"
    applied = [body for body in yaml.safe_load_all(run([helm, *arguments])) if body]
    names = {body["metadata"]["name"] for body in applied}
    policy = "inferenceservices-pod-template.sluice.dev"
    assert names == {*CRDS, policy, "sluice-admin", "sluice-edit", "sluice-view"}


def test_enabled_is_a_parent_charts_and_not_a_way_to_install_nothing(
    helm: Path, tmp_path: Path
) -> None:
    parent = {"apiVersion": "v2", "name": "parent", "version": "1.0.0"}
    child = {"name": "sluice", "version": "0.1.0", "condition": "sluice.enabled"}
    (tmp_path / "Chart.yaml").write_text(json.dumps({**parent, "dependencies": [child]}))
    (tmp_path / "charts").mkdir()
    shutil.copytree(CHART, tmp_path / "charts" / "sluice")

    def rendered(enabled: bool) -> str:
        given = [
            f"sluice.enabled={str(enabled).lower()}",
            "sluice.image=a",
            "sluice.worker.image=b",
        ]
        return run([helm, "template", "x", tmp_path, "--set", ",".join(given)])

    assert rendered(False).strip() == ""
    assert "kind: Deployment" in rendered(True)


def test_a_network_policy_lets_in_nobody_but_who_reads_the_metrics_and_helm_test(
    helm: Path, installed: ApiServer
) -> None:
    assert not of_kind(template(helm, *IMAGES), "NetworkPolicy")
    on = (*IMAGES, "--set", "networkPolicy.enabled=true")
    monitoring = "namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=monitoring"
    [closed] = of_kind(template(helm, *on), "NetworkPolicy")
    some = template(helm, *on, "--set", f"networkPolicy.metricsFrom[0].{monitoring}")
    [ajar] = of_kind(some, "NetworkPolicy")
    [deployment] = of_kind(some, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert ajar["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    [pod] = of_kind(some, "Pod")
    assert closed["spec"]["policyTypes"] == ["Ingress"]
    for policy, num in ((closed, 1), (ajar, 2)):
        [rule] = policy["spec"]["ingress"]
        assert [port["port"] for port in rule["ports"]] == ["metrics"]
        assert len(rule["from"]) == num
        chosen = rule["from"][0]["podSelector"]["matchLabels"]
        assert chosen == pod["metadata"]["labels"]
    for policy in (closed, ajar):
        kubectl(installed, "apply", "--dry-run=server", "-f", "-", stdin=json.dumps(policy))


def test_a_namespaces_admins_editors_and_viewers_have_the_same_for_its_objects(helm: Path) -> None:
    rendered = of_kind(template(helm, *IMAGES), "ClusterRole")
    roles = {body["metadata"]["name"]: body for body in rendered}
    aggregated = "rbac.authorization.k8s.io/aggregate-to-"
    to = {
        name: {label.removeprefix(aggregated) for label in body["metadata"]["labels"]}
        for name, body in roles.items()
    }
    assert "admin" in to["sluice-admin"]
    assert not {"edit", "view"} & to["sluice-admin"]
    assert {"admin", "edit"} <= to["sluice-edit"]
    assert "view" in to["sluice-view"]
    assert not {"admin", "edit", "view"} & to["sluice"]
    [seen] = roles["sluice-view"]["rules"]
    assert set(seen["verbs"]) == {"get", "list", "watch"}
    assert {rule["apiGroups"][0] for rule in roles["sluice-edit"]["rules"]} == {"sluice.dev"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "image is required"),
        (("--set", "image=a"), "worker.image is required"),
        ((*IMAGES, "--set", "replicas=2"), "replicas"),
        ((*IMAGES, "--set", "logFormat=xml"), "logFormat"),
        ((*IMAGES, "--set", "watchNamespaces={A_b}"), "watchNamespaces"),
        ((*IMAGES, "--set", "hub.proxy=http://somebody:word@proxy"), "hub.proxy"),
        # As a line `hub:` with nothing below it, or of a release older than the value.
        ((*IMAGES, "--set", "hub=null"), "missing property 'hub'"),
        ((*IMAGES, "--set", "networkPolicy=null"), "missing property 'networkPolicy'"),
        ((*IMAGES, "--set", "tickSeconds=null"), "missing property 'tickSeconds'"),
        ((*IMAGES, "--set", "crds.install=null"), "missing property 'install'"),
        ((*IMAGES, "--set", "hub.caConfigMap=null"), "missing property 'caConfigMap'"),
        ((*IMAGES, "--set", "hub.caConfigMap.key=a/b"), "caConfigMap/key"),
        ((*IMAGES, "--set", "monitoring.enabled=often"), "monitoring/enabled"),
        ((*IMAGES, "--set", "monitoring.interval=30s"), "interval"),
        ((*IMAGES, "--set", "monitoring.labels.release=1"), "monitoring/labels/release"),
        ((*IMAGES, "--set", "monitoring=null"), "missing property 'monitoring'"),
        ((*IMAGES, "--set", "serviceAccount=null"), "missing property 'serviceAccount'"),
        ((*IMAGES, "--set", "serviceAccount.name=A_b"), "serviceAccount/name"),
        ((*IMAGES, "--set", "enabled=false"), "'/enabled': value must be true"),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    helm: Path, arguments: tuple[str, ...], says: str
) -> None:
    with pytest.raises(LocalClusterError, match=says):
        template(helm, *arguments)


def test_the_operator_may_do_what_it_does_and_no_more(helm: Path) -> None:
    (role,) = of_kind(template(helm, *IMAGES, "--set", "userRoles=false"), "ClusterRole")
    allowed = {
        f"{verb} {resource}.{group}".removesuffix(".")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert allowed == {
        "get inferenceservices.sluice.dev", "list inferenceservices.sluice.dev",
        "watch inferenceservices.sluice.dev", "patch inferenceservices/status.sluice.dev",
        "list inferencebatches.sluice.dev", "watch inferencebatches.sluice.dev",
        "patch inferencebatches/status.sluice.dev",
        "get jobs.batch", "list jobs.batch", "watch jobs.batch", "create jobs.batch",
        "patch jobs.batch",
        "get deployments.apps", "list deployments.apps", "watch deployments.apps",
        "create deployments.apps", "patch deployments.apps",
        "get services", "list services", "watch services", "create services", "patch services",
        "get configmaps", "list configmaps", "watch configmaps", "create configmaps",
        "patch configmaps",
        "get secrets", "create secrets", "patch secrets",
        "get poddisruptionbudgets.policy", "create poddisruptionbudgets.policy",
        "patch poddisruptionbudgets.policy",
        "get leaderworkersets.leaderworkerset.x-k8s.io",
        "create leaderworkersets.leaderworkerset.x-k8s.io",
        "patch leaderworkersets.leaderworkerset.x-k8s.io",
        "list pods", "watch pods",
        "create events",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("right", "expected"),
    [
        ("list inferenceservices.sluice.dev", "yes"),
        ("patch inferenceservices.sluice.dev/status", "yes"),
        ("patch inferenceservices.sluice.dev", "no"),
        ("patch inferencebatches.sluice.dev/status", "yes"),
        ("patch inferencebatches.sluice.dev", "no"),
        ("create jobs.batch", "yes"),
        ("delete jobs.batch", "no"),
        ("create deployments.apps", "yes"),
        ("delete deployments.apps", "no"),
        ("get secrets", "yes"),
        ("list secrets", "no"),
        ("create pods/exec", "no"),
        ("create pods", "no"),
        ("list nodes", "no"),
    ],
)
def test_the_api_server_grants_the_account_that(
    installed: ApiServer, right: str, expected: str
) -> None:
    verb, resource = right.split()
    name, _, subresource = resource.partition("/")
    group = "sluice.dev" if "sluice.dev" in name else name.partition(".")[2]
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": ACCOUNT,
            "resourceAttributes": {
                "namespace": "default",
                "verb": verb,
                "group": group,
                "resource": name.partition(".")[0],
                "subresource": subresource,
            },
        },
    }
    answer = kubectl(installed, "create", "-f", "-", "-o", "json", stdin=json.dumps(review))
    assert json.loads(answer)["status"]["allowed"] == (expected == "yes")


@pytest.fixture
def bob(installed: ApiServer) -> Iterator[str]:
    """A namespace whose user `bob` may do all with its objects, and make no pods."""
    name = "bobs"
    kubectl(installed, "create", "namespace", name)
    role = ("create", "rolebinding", "edit", "--clusterrole", "sluice-edit", "--user", "bob")
    kubectl(installed, *role, "-n", name)
    yield name
    kubectl(installed, "delete", "namespace", name, "--wait=false")


def test_an_object_with_an_overlay_is_edited_with_the_right_to_create_pods(
    installed: ApiServer, bob: str
) -> None:
    """Else who may make objects, and no pods, would run code as any account of the namespace."""

    def apply(name: str, who: tuple[str, ...], **spec: Any) -> str:
        body = changed(valid_object(name), "metadata.namespace", bob)
        body["spec"] |= spec
        given = json.dumps(body)
        return kubectl(installed, "apply", "--server-side", "-f", "-", *who, stdin=given)

    def refused(name: str, **spec: Any) -> bool:
        try:
            apply(name, as_bob, **spec)
        except LocalClusterError as e:
            return "edited with the right to create pods" in str(e)
        return False

    as_bob, admin = ("--as", "bob"), ("--force-conflicts",)
    overlay: Manifest = {"spec": {"serviceAccountName": "admin"}}
    wait_until("the policy to be in force", lambda: refused("new", podTemplate=overlay), 60.0)
    apply("plain", as_bob)
    assert refused("plain", podTemplate=overlay)
    apply("theirs", admin, podTemplate=overlay)
    patch = ("patch", "infs", "theirs", "-n", bob, *as_bob, "--type=merge", "-p")
    kubectl(installed, *patch, '{"metadata": {"labels": {"a": "b"}}}')
    kubectl(installed, "scale", "infs/theirs", "--replicas=1", "-n", bob, *as_bob)
    with pytest.raises(LocalClusterError, match="edited with the right to create pods"):
        kubectl(installed, *patch, '{"spec": {"engine": {"image": "r/mine:1"}}}')
    kubectl(installed, *patch, '{"spec": {"podTemplate": null}}')


@pytest.fixture
def home(installed: ApiServer) -> Iterator[str]:
    """A namespace, and its administrator `ann`. The API server runs without the controller that
    fills the role `admin`, so hers are those that it takes in."""
    name = "home"
    kubectl(installed, "create", "namespace", name)
    label = "rbac.authorization.k8s.io/aggregate-to-"
    listed = [
        kubectl(installed, "get", "clusterrole", "-l", f"{label}{to}=true", "-o", "name").split()
        for to in ("admin", "edit", "view")
    ]
    for role in {one.partition("/")[2] for one in sum(listed, [])}:
        binding = role.replace(":", "-")
        what = ("rolebinding", binding, "--clusterrole", role, "--user", "ann", "-n", name)
        kubectl(installed, "create", *what)
    yield name
    kubectl(installed, "delete", "namespace", name, "--wait=false")


def test_a_namespaces_admin_installs_the_operator_for_it_beside_the_cluster_admins_roles(
    helm: Path, installed: ApiServer, home: str
) -> None:
    """With the definition and `users.yaml` there; nobody may grant rights that they have not."""
    given = f"crds.install=false,userRoles=false,openshift=true,watchNamespaces={{{home}}}"
    run(
        [helm, "install", "sluice", CHART, *IMAGES, "--set", given, "--namespace", home,
         "--kubeconfig", installed.kubeconfig, "--kube-as-user", "ann"]
    )  # fmt: skip
    made = kubectl(installed, "get", "role,rolebinding,deployment", "-n", home, "-o", "name")
    names = made.split()
    for kind in ("role.rbac", "rolebinding.rbac"):
        assert f"{kind}.authorization.k8s.io/sluice" in names
    assert "deployment.apps/sluice" in names
    infs = ("get", "infs", "-n", home, "--as", "ann", "-o", "name")
    assert kubectl(installed, *infs) == ""


def test_the_operators_pod_passes_pod_security_restricted(helm: Path, installed: ApiServer) -> None:
    (deployment,) = of_kind(template(helm, *IMAGES), "Deployment")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator", "namespace": NAMESPACE},
        "spec": deployment["spec"]["template"]["spec"],
    }
    said = kubectl(installed, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    assert "pod/operator created" in said
    root = pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    assert root is True


def test_there_is_one_operator_at_any_time(installed: ApiServer) -> None:
    body = json.loads(
        kubectl(installed, "get", "deployment", "sluice", "-n", NAMESPACE, "-o", "json")
    )
    assert body["spec"]["replicas"] == 1
    assert body["spec"]["strategy"] == {"type": "Recreate"}


def test_an_upgrade_renews_the_crd_and_an_uninstall_keeps_it(
    helm: Path, installed: ApiServer
) -> None:
    crd = ("crd", "inferenceservices.sluice.dev")
    kubectl(installed, "patch", *crd, "--type=json", "-p", _WITHOUT_SHORT_NAMES)
    on_cluster(helm, installed, "upgrade", "sluice", str(CHART), *IMAGES, "--force-conflicts")
    live = json.loads(kubectl(installed, "get", *crd, "-o", "json"))
    assert live["spec"]["names"]["shortNames"] == ["infs"]
    # Not by a later release without them either: objects would be nobody's.
    without = ("--set", "crds.install=false,userRoles=false")
    on_cluster(helm, installed, "upgrade", "sluice", str(CHART), *IMAGES, *without)
    on_cluster(helm, installed, "uninstall", "sluice")
    assert kubectl(installed, "get", "deployment", "-n", NAMESPACE, "-o", "name") == ""
    assert kubectl(installed, "get", *crd, "-o", "name").strip().endswith("sluice.dev")
    # The roles too. Other tests have some of these names of their own.
    roles = ("sluice-admin", "sluice-edit", "sluice-view")
    kubectl(installed, "delete", "clusterrole", *roles)


_WITHOUT_SHORT_NAMES = '[{"op": "remove", "path": "/spec/names/shortNames"}]'
