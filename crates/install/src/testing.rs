//! Random KubeVirt resources, for tests of this crate and of virt-operator (feature `testing`).

use serde_json::{Map, Value, json};

/// Numbers that follow from a seed, so that a failure can be repeated. They are the same in every version.
struct Random(u64);

impl Random {
    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn once_in(&mut self, times: u64) -> bool {
        self.next().is_multiple_of(times)
    }

    fn pick(&mut self, values: &[Value]) -> Value {
        let count = u64::try_from(values.len()).unwrap_or(1).max(1);
        let index = usize::try_from(self.next() % count).unwrap_or_default();
        values.get(index).cloned().unwrap_or_default()
    }
}

/// The spec of a KubeVirt resource that this operator installs, with any of the settings that change an installation.
/// All its pods can start in a cluster whose nodes have the labels that every kubelet sets.
pub fn random_spec(seed: u64) -> Value {
    let mut random = Random(seed);
    let mut spec = Map::new();
    for (path, values) in settings() {
        if random.once_in(3) {
            set(&mut spec, path, random.pick(&values));
        }
    }
    for (path, values) in lists() {
        let chosen: Vec<Value> = values.into_iter().filter(|_| random.once_in(4)).collect();
        if !chosen.is_empty() {
            set(&mut spec, path, Value::Array(chosen));
        }
    }
    Value::Object(spec)
}

/// Settings, each with some of its values.
fn settings() -> Vec<(&'static str, Vec<Value>)> {
    let verbosity = json!({"virtAPI": 4, "virtController": 3, "virtHandler": 5});
    let placement = vec![
        json!({"nodeSelector": {"kubernetes.io/arch": "amd64"}}),
        json!({"tolerations": [{"key": "virt", "operator": "Exists", "effect": "NoSchedule"}]}),
        json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "preference": {"matchExpressions": [{"key": "example.com/a", "operator": "Exists"}]}},
        ]}}}),
        json!({}),
    ];
    vec![
        ("infra/nodePlacement", placement.clone()),
        ("workloads/nodePlacement", placement),
        ("infra/replicas", vec![json!(1), json!(3)]),
        ("imagePullSecrets", vec![json!([{"name": "a"}]), json!([{"name": "a"}, {"name": "b"}])]),
        ("imagePullPolicy", vec![json!("Always"), json!("IfNotPresent")]),
        ("imageRegistry", vec![json!("registry.example.com/virt"), json!("quay.io/kubevirt")]),
        ("configuration/migrations/network", vec![json!("migration"), json!("other")]),
        ("configuration/developerConfiguration/logVerbosity", vec![verbosity, json!({"virtAPI": 6})]),
        ("configuration/virtualMachineInstancesPerNode", vec![json!(50)]),
        ("configuration/commonInstancetypesDeployment/enabled", vec![json!(false), json!(true)]),
        ("monitorNamespace", vec![json!("observability"), json!("monitoring")]),
        ("serviceMonitorNamespace", vec![json!("monitors")]),
        ("productName", vec![json!("shop"), json!("acme")]),
        ("productVersion", vec![json!("4.2")]),
        ("productComponent", vec![json!("platform")]),
        ("certificateRotateStrategy/selfSigned/ca", vec![json!({"duration": "48h", "renewBefore": "24h"})]),
        ("uninstallStrategy", vec![json!("BlockUninstallIfWorkloadsExist")]),
        ("customizeComponents/flags/api", vec![json!({"v": "5"})]),
        ("customizeComponents/flags/controller", vec![json!({"v": "3"})]),
        ("customizeComponents/flags/handler", vec![json!({"v": "4"})]),
    ]
}

/// Lists, of whose elements any may be set.
fn lists() -> Vec<(&'static str, Vec<Value>)> {
    let patch = |kind: &str, name: &str, format: &str, patch: Value| json!({"resourceType": kind, "resourceName": name, "type": format, "patch": patch.to_string()});
    let template = |value: Value| json!({"spec": {"template": value}});
    let container = |name: &str, mut value: Value| {
        if let Some(fields) = value.as_object_mut() {
            fields.insert("name".to_owned(), json!(name));
        }
        template(json!({"spec": {"containers": [value]}}))
    };
    let add = |path: &str, value: Value| json!([{"op": "add", "path": path, "value": value}]);
    let limits = json!({"resources": {"limits": {"memory": "2Gi"}}});
    let patches = vec![
        patch("Deployment", "virt-controller", "json", add("/metadata/labels/patched", json!("yes"))),
        patch("Deployment", "virt-api", "merge", json!({"metadata": {"annotations": {"team": "infra"}}})),
        patch("Deployment", "*", "merge", template(json!({"metadata": {"annotations": {"example.com/note": "x"}}}))),
        patch("Deployment", "virt-api", "strategic", template(json!({"spec": {"dnsPolicy": "Default"}}))),
        patch("Deployment", "virt-api", "strategic", template(json!({"spec": {"terminationGracePeriodSeconds": 45}}))),
        patch(
            "Deployment",
            "virt-controller",
            "strategic",
            template(json!({"spec": {"volumes": [{"name": "x", "emptyDir": {}}]}})),
        ),
        patch("Deployment", "virt-controller", "strategic", container("virt-controller", limits)),
        patch("Deployment", "virt-controller", "merge", json!({"spec": {"revisionHistoryLimit": 3}})),
        patch("DaemonSet", "virt-handler", "merge", json!({"spec": {"minReadySeconds": 1}})),
        patch(
            "DaemonSet",
            "virt-handler",
            "merge",
            template(json!({"metadata": {"labels": {"example.com/tier": "v"}}})),
        ),
        patch(
            "DaemonSet",
            "virt-handler",
            "strategic",
            container("virt-handler", json!({"env": [{"name": "EXTRA", "value": "1"}]})),
        ),
        patch("Service", "virt-api", "merge", json!({"spec": {"sessionAffinity": "ClientIP"}})),
        patch("Service", "virt-api", "merge", json!({"metadata": {"labels": {"example.com/exposed": "no"}}})),
        patch(
            "ValidatingWebhookConfiguration",
            "virt-api-validator",
            "json",
            add("/webhooks/0/timeoutSeconds", json!(20)),
        ),
        patch(
            "MutatingWebhookConfiguration",
            "virt-api-mutator",
            "json",
            add("/webhooks/0/matchPolicy", json!("Exact")),
        ),
        patch("APIService", "*", "merge", json!({"metadata": {"annotations": {"example.com/note": "x"}}})),
        patch(
            "Secret",
            "kubevirt-virt-api-certs",
            "merge",
            json!({"metadata": {"labels": {"example.com/kind": "leaf"}}}),
        ),
    ];
    let gates =
        ["VMExport", "DecentralizedLiveMigration", "Snapshot", "OptOutRoleAggregation", "ExternalNetResourceInjection"];
    vec![
        ("customizeComponents/patches", patches),
        ("configuration/developerConfiguration/featureGates", gates.map(Value::from).into()),
    ]
}

fn set(spec: &mut Map<String, Value>, path: &str, value: Value) {
    match path.split_once('/') {
        None => drop(spec.insert(path.to_owned(), value)),
        Some((first, rest)) => {
            let below = spec.entry(first).or_insert_with(|| Value::Object(Map::new()));
            if let Some(below) = below.as_object_mut() {
                set(below, rest, value);
            }
        }
    }
}
