//! Whole installations, decided pass by pass against a cluster in memory.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test may stop where something is not as it should be"
)]

mod invalid_resources;
mod world;

use serde_json::{Value, json};
use vitivirt_api::{ObjectKey, Stop};

use world::World;

fn variant(name: &str) -> Value {
    let path = format!("{}/tests/variants/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
    let kubevirt: Value = serde_saphyr::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    kubevirt["spec"].clone()
}

const VARIANTS: [&str; 7] = ["default", "customize", "gates", "images", "monitoring", "placement", "seed"];

fn installed(spec: &Value) -> World {
    let mut world = World::new(spec);
    world.settle();
    world
}

#[test]
fn an_installation_comes_to_rest_and_a_new_operator_finds_nothing_to_do() {
    for name in VARIANTS {
        let mut world = World::new(&variant(name));
        let passes = world.settle();
        assert_eq!(world.status()["phase"], "Deployed", "{name}");
        assert!(passes.len() <= 4, "{name}: {} passes", passes.len());
        let statuses = passes.iter().filter(|pass| pass.report.status.as_ref().unwrap().differs()).count();
        assert!(statuses <= 2, "{name}: {statuses} status writes");
        world.restart();
        let pass = world.reconcile();
        assert!(pass.is_silent(), "{name}: {:?}", pass.writes());
    }
}

#[test]
fn nothing_is_installed_after_the_word_deployed() {
    let mut world = World::new(&variant("gates"));
    let passes = world.settle();
    let deployed = passes.iter().position(|pass| pass.report.status.as_ref().unwrap().desired["phase"] == "Deployed");
    for pass in &passes[deployed.unwrap() + 1..] {
        assert_eq!(pass.writes(), [""; 0]);
    }
}

#[test]
fn what_checks_objects_is_there_before_what_makes_them() {
    let mut world = World::new(&json!({}));
    world.rolls_out = false;
    world.reconcile();
    assert!(world.has("Deployment", "virt-api") && !world.has("Deployment", "virt-controller"));
    assert!(world.objects.keys().any(|(_, key)| key.name().starts_with("virt-operator-tmp-webhook")));
    assert!(world.has("ValidatingWebhookConfiguration", "virt-api-validator"));
    assert_eq!(world.status()["phase"], "Deploying");
    let pass = world.reconcile();
    assert_eq!(pass.writes(), [""; 0], "it waits");
    world.roll_out();
    world.reconcile();
    assert!(world.has("Deployment", "virt-controller") && world.has("DaemonSet", "virt-handler"));
    assert!(!world.objects.keys().any(|(_, key)| key.name().starts_with("virt-operator-tmp-webhook")));
    assert_eq!(world.status()["phase"], "Deploying", "virt-controller has no pods yet");
    world.roll_out();
    world.reconcile();
    assert_eq!(world.status()["phase"], "Deployed");
}

/// While the webhook that forbade them is still in the API server's mind, one of them is refused and not all.
#[test]
fn the_first_instancetype_goes_alone() {
    let mut world = World::new(&json!({}));
    world.reconcile();
    world.roll_out();
    let pass = world.reconcile();
    let position = |name: &str| pass.plan.steps.iter().position(|step| step.name == name);
    let instancetypes: Vec<usize> =
        pass.plan.steps.iter().filter(|step| step.name == "instancetypes").map(|step| step.writes.len()).collect();
    assert_eq!(instancetypes, [1, 118]);
    assert!(position("unblocking") < position("components") && position("components") < position("instancetypes"));
}

#[test]
fn an_edit_is_done_when_the_pods_that_it_is_about_are() {
    let mut world = installed(&json!({}));
    world.rolls_out = false;
    world.edit(&json!({"customizeComponents": {"flags": {"controller": {"v": "4"}}}}));
    // virt-api first, whose Deployment is marked anew.
    world.reconcile();
    world.roll_out();
    let pass = world.reconcile();
    assert!(pass.writes().iter().any(|write| write.contains("virt-controller")), "{:?}", pass.writes());
    assert!(matches!(pass.outcome.stop, Stop::Waiting { .. }), "{:?}", pass.outcome.stop);
    world.roll_out();
    assert_eq!(world.reconcile().outcome.stop, Stop::Done);
}

/// Every way in which somebody else may change an object, for every object.
#[test]
fn every_drift_is_one_write() {
    let base = installed(&variant("gates"));
    let places: Vec<_> = base.objects.keys().filter(|(kind, _)| kind != "Namespace").cloned().collect();
    assert!(places.len() > 200);
    // The text of what is installed has a name that the server may choose: it is made again, not repaired.
    let places = places.into_iter().filter(|(_, key)| !key.name().starts_with("kubevirt-install-strategy"));
    for (index, place) in places.enumerate() {
        // They are all alike.
        if place.0.starts_with("VirtualMachineCluster") && index % 20 != 0 {
            continue;
        }
        let again = |what: &str, spoil: &dyn Fn(&mut World)| {
            let mut world = installed_from(&base);
            spoil(&mut world);
            let writes: Vec<String> = world.settle().iter().flat_map(world::Pass::writes).collect();
            assert_eq!(writes.len(), 1, "{what} {place:?}: {writes:?}");
            if index % 10 == 0 {
                world.restart();
                assert!(world.reconcile().is_silent(), "{what} {place:?}");
            }
        };
        again("deleted", &|world| drop(world.objects.remove(&place)));
        again("unlabelled", &|world| {
            world.at(&place)["metadata"]["labels"].as_object_mut().unwrap().remove("app.kubernetes.io/managed-by");
        });
        if place.0 != "ServiceAccount" {
            again("changed", &|world| spoil(world.at(&place)));
        }
    }
}

/// A copy: worlds are cheap to change and dear to make.
fn installed_from(base: &World) -> World {
    let mut world = World::new(&serde_json::to_value(&base.kubevirt.spec).unwrap());
    world.kubevirt = base.kubevirt.clone();
    world.objects = base.objects.clone();
    world.up_to_date = base.up_to_date.clone();
    world
}

/// Changes one value of the content, as an edit by hand would: the server notes who did it.
fn spoil(object: &mut Value) {
    const ASIDE: [&str; 6] = ["apiVersion", "kind", "metadata", "status", "roleRef", "type"];
    let fields = object.as_object_mut().unwrap();
    let Some((name, value)) = fields.iter_mut().find(|(key, _)| !ASIDE.contains(&key.as_str())) else { return };
    let mut path = vec![name.clone()];
    assert!(change_first(value, &mut path));
    let tree = path.iter().rev().fold(json!({}), |below, name| json!({ format!("f:{name}"): below }));
    object["metadata"]["generation"] = json!(object["metadata"]["generation"].as_i64().unwrap() + 1);
    let entry = json!({"manager": "kubectl-edit", "operation": "Update", "fieldsV1": tree});
    object["metadata"]["managedFields"].as_array_mut().unwrap().push(entry);
}

/// The first text or number. The path ends at a list: the server notes lists by keys or as a whole.
fn change_first(value: &mut Value, path: &mut Vec<String>) -> bool {
    match value {
        // The server lets nobody change the address of a Service.
        Value::Object(map) => map.iter_mut().filter(|(key, _)| !key.starts_with("clusterIP")).any(|(key, value)| {
            path.push(key.clone());
            let changed = change_first(value, path);
            if !changed {
                path.pop();
            }
            changed
        }),
        Value::Array(list) => list.iter_mut().any(|value| change_first(value, &mut Vec::new())),
        Value::String(text) => {
            text.push('x');
            true
        }
        Value::Number(number) => {
            *value = json!(number.as_i64().unwrap_or_default() + 1);
            true
        }
        _ => false,
    }
}

#[test]
fn what_a_gate_brought_goes_with_it() {
    let mut world = installed(&variant("gates"));
    assert!(world.has("Deployment", "virt-exportproxy"));
    world.edit(&json!({}));
    world.settle();
    assert!(!world.has("Deployment", "virt-exportproxy") && !world.has("PodDisruptionBudget", "virt-exportproxy-pdb"));
    let fresh = installed(&json!({}));
    let names = |world: &World| -> Vec<_> {
        world.objects.keys().filter(|(_, key)| !key.name().starts_with("kubevirt-install-strategy")).cloned().collect()
    };
    assert_eq!(names(&world), names(&fresh));
    let strategies = world.objects.keys().filter(|(_, key)| key.name().starts_with("kubevirt-install-strategy"));
    assert_eq!(strategies.count(), 1);
}

#[test]
fn an_edit_restarts_only_what_it_is_about() {
    let mut world = installed(&json!({}));
    let generation =
        |world: &mut World, kind: &str, name: &str| world.object(kind, name)["metadata"]["generation"].clone();
    // A part of the identifier of the deployment, and of no pod.
    world.edit(&json!({"uninstallStrategy": "BlockUninstallIfWorkloadsExist"}));
    let passes = world.settle();
    for (kind, name) in [("Deployment", "virt-api"), ("Deployment", "virt-controller"), ("DaemonSet", "virt-handler")] {
        assert_eq!(generation(&mut world, kind, name), 1, "{name}: {:?}", passes[0].writes());
    }
    world.edit(&json!({"customizeComponents": {"flags": {"api": {"v": "4"}}}}));
    world.settle();
    assert_ne!(generation(&mut world, "Deployment", "virt-api"), 1);
    assert_eq!(generation(&mut world, "Deployment", "virt-controller"), 1);
    assert_eq!(generation(&mut world, "DaemonSet", "virt-handler"), 1);
}

#[test]
fn somebody_else_s_object_is_left_alone_and_named() {
    let mut world = World::new(&json!({}));
    let key = ObjectKey::namespaced("kubevirt", "virt-api");
    let theirs =
        json!({"kind": "Service", "metadata": {"name": "virt-api", "namespace": "kubevirt"}, "spec": {"a": 1}});
    world.put("Service", key.clone(), theirs, "somebody");
    let before = world.object("Service", "virt-api").clone();
    let pass = world.reconcile();
    assert!(matches!(pass.outcome.stop, Stop::NameConflict { .. }));
    let message = world.status()["conditions"].to_string();
    assert!(message.contains("Service kubevirt/virt-api exists") && message.contains("DeploymentFailed"), "{message}");
    assert_eq!(*world.object("Service", "virt-api"), before);
    world.objects.remove(&("Service".to_owned(), key));
    world.settle();
    assert_eq!(world.status()["phase"], "Deployed");
    assert!(!world.status()["conditions"].to_string().contains("DeploymentFailed"));
}

#[test]
fn a_second_resource_and_one_elsewhere_are_not_installed() {
    let mut world = World::new(&json!({}));
    world.earlier = Some(ObjectKey::namespaced("kubevirt", "first"));
    let pass = world.reconcile();
    assert_eq!(pass.writes(), [""; 0]);
    let conditions = world.status()["conditions"].to_string();
    assert!(conditions.contains("ExistingDeployment") && conditions.contains("kubevirt/first"), "{conditions}");
    assert_eq!(world.status().get("phase"), None);
    world.earlier = None;
    world.kubevirt.metadata.namespace = Some("elsewhere".to_owned());
    let pass = world.reconcile();
    assert_eq!(pass.writes(), [""; 0]);
    assert!(world.status()["conditions"].to_string().contains("in kubevirt instead"));
    // There is an operator for it: what that one says stays.
    let mut world = installed(&json!({}));
    world.kubevirt.metadata.namespace = Some("elsewhere".to_owned());
    let pass = world.reconcile();
    assert!(pass.is_silent() && pass.report.status.is_none());
}

#[test]
fn another_release_is_asked_what_it_consists_of() {
    let mut world = World::new(&json!({"imageTag": "v1.9.0"}));
    let pass = world.reconcile();
    let jobs: Vec<String> = pass.writes().into_iter().filter(|write| write.contains("Job")).collect();
    assert_eq!(jobs.len(), 1);
    assert!(matches!(&pass.outcome.stop, Stop::Waiting { wait, .. } if wait.message.contains("virt-operator:v1.9.0")));
    assert_eq!(world.reconcile().writes(), [""; 0], "it is asked once");
    // It fails: that is told, and it is asked again after a while.
    let job = world.objects.keys().find(|(kind, _)| kind == "Job").cloned().unwrap();
    let ended =
        json!({"conditions": [{"type": "Failed", "status": "True", "lastTransitionTime": world.now.to_string()}]});
    world.at(&job)["status"] = ended;
    let pass = world.reconcile();
    assert!(matches!(&pass.outcome.stop, Stop::Waiting { wait, .. } if wait.message.contains("failed")
        && wait.requeue_after.is_some()));
    world.now += k8s_openapi::jiff::SignedDuration::from_secs(60);
    world.reconcile();
    assert!(!world.objects.contains_key(&job));
    world.reconcile();
    assert!(world.objects.contains_key(&job));
    // It tells. What it tells is installed, and the Job is not needed any more.
    let config = vitivirt_install::DeploymentConfig::new(&world.kubevirt, &world.environment);
    let strategy = vitivirt_install::Strategy::generate(&config, None, None).unwrap();
    let map = serde_json::to_value(vitivirt_install::config_map(&config, &strategy).unwrap()).unwrap();
    world.put("ConfigMap", config.strategy_key(), map, "other");
    let ended =
        json!({"conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": world.now.to_string()}]});
    world.at(&job)["status"] = ended;
    world.settle();
    assert_eq!(world.status()["observedKubeVirtVersion"], "v1.9.0");
    assert!(!world.objects.contains_key(&job));
}

#[test]
fn a_component_that_fails_later_is_told() {
    let mut world = installed(&json!({}));
    world.object("Deployment", "virt-api")["status"]["readyReplicas"] = json!(0);
    world.reconcile();
    let conditions = world.status()["conditions"].to_string();
    assert_eq!(world.status()["phase"], "Deployed");
    assert!(conditions.contains("virt-api: none of its pods is ready"), "{conditions}");
    world.roll_out();
    world.reconcile();
    assert!(!world.status()["conditions"].to_string().contains("virt-api"));
}

/// Anybody who may label an object may do this; nothing of the installation may go for it.
#[test]
fn a_label_never_makes_an_object_superfluous() {
    let base = installed(&json!({}));
    for place in base.objects.keys().filter(|(kind, _)| kind != "Namespace") {
        if place.0.starts_with("VirtualMachineCluster") || place.1.name().starts_with("kubevirt-install-strategy") {
            continue;
        }
        let mut world = installed_from(&base);
        world.at(place)["metadata"]["labels"]["kubevirt.io/install-strategy"] = json!("");
        let writes: Vec<String> = world.settle().iter().flat_map(world::Pass::writes).collect();
        assert_eq!(writes, [""; 0], "{place:?}");
    }
}

#[test]
fn a_definition_with_objects_stays() {
    let gates = json!({"configuration": {"developerConfiguration": {"featureGates": ["Template"]}}});
    let mut world = installed(&gates);
    let name = "virtualmachinetemplates.template.kubevirt.io";
    assert!(world.has("CustomResourceDefinition", name));
    world.in_use.insert(ObjectKey::cluster(name));
    world.edit(&json!({}));
    world.settle();
    assert!(world.has("CustomResourceDefinition", name) && !world.has("Deployment", "virt-template-controller"));
    world.in_use.clear();
    world.settle();
    assert!(!world.has("CustomResourceDefinition", name));
}

#[test]
fn marks_that_were_copied_elsewhere_are_not_ours() {
    let mut world = installed(&json!({}));
    let role = world.object("Role", "kubevirt-handler").clone();
    world.put("Role", ObjectKey::namespaced("tenant", "kubevirt-handler"), role, "tenant");
    assert_eq!(world.settle().iter().flat_map(world::Pass::writes).collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn a_monitor_in_another_namespace_replaces_the_one_before() {
    let place =
        |namespace: &str| ("ServiceMonitor".to_owned(), ObjectKey::namespaced(namespace, "prometheus-kubevirt-rules"));
    for (before, after) in [
        (json!({}), json!({"monitorNamespace": "obs"})),
        (json!({"serviceMonitorNamespace": "monitors"}), json!({})),
        (json!({"serviceMonitorNamespace": "monitors"}), json!({"serviceMonitorNamespace": "obs"})),
    ] {
        let named = |spec: &Value, field: &str| spec[field].as_str().map(str::to_owned);
        let stack = |spec: &Value| named(spec, "monitorNamespace").unwrap_or_else(|| "monitoring".to_owned());
        let home = |spec: &Value| named(spec, "serviceMonitorNamespace").unwrap_or_else(|| stack(spec));
        let mut world = World::new(&before);
        world.cluster.service_monitors = true;
        world.cluster.monitor_namespace = Some(stack(&before));
        world.settle();
        let copied = world.objects[&place(&home(&before))].clone();
        world.put(
            "ServiceMonitor",
            ObjectKey::namespaced("tenant", "prometheus-kubevirt-rules"),
            Value::clone(&copied),
            "tenant",
        );
        world.cluster.monitor_namespace = Some(stack(&after));
        world.edit(&after);
        world.settle();
        let have: Vec<&str> = world
            .objects
            .keys()
            .filter(|(kind, _)| kind == "ServiceMonitor")
            .filter_map(|(_, key)| key.namespace())
            .collect();
        assert_eq!(have, [home(&after).as_str(), "tenant"], "{before} to {after}");
    }
}

/// A virtual machine that names none is made for it, and the next leader may run on another node.
#[test]
fn the_default_architecture_does_not_follow_the_leader() {
    let mut world = installed(&json!({}));
    assert_eq!(world.status()["defaultArchitecture"], "amd64");
    world.architecture = "arm64";
    world.restart();
    assert_eq!(world.settle().len(), 0);
    world.edit(&json!({"configuration": {"architectureConfiguration": {"defaultArchitecture": "s390x"}}}));
    world.settle();
    assert_eq!(world.status()["defaultArchitecture"], "s390x");
}

#[test]
fn what_a_strategy_is_found_by_may_be_lost() {
    for mark in [
        "/metadata/labels/kubevirt.io~1install-strategy",
        "/metadata/annotations/kubevirt.io~1install-strategy-identifier",
    ] {
        let mut world = installed(&json!({}));
        let place = world.objects.keys().find(|(_, key)| key.name().starts_with("kubevirt-install-strategy")).cloned();
        let (parent, key) = mark.rsplit_once('/').unwrap();
        let key = key.replace("~1", "/");
        world.at(&place.unwrap()).pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(&key);
        let writes: Vec<String> = world.settle().iter().flat_map(world::Pass::writes).collect();
        assert_eq!(writes.len(), 2, "{mark}: {writes:?}");
        assert_eq!(world.status()["phase"], "Deployed");
    }
}

#[test]
fn another_number_of_pods_restarts_none_of_them() {
    let mut world = installed(&json!({}));
    world.edit(&json!({"productName": "shop"}));
    world.settle();
    let identity = |world: &mut World| {
        let template = world.object("Deployment", "virt-controller")["spec"]["template"]["metadata"].clone();
        template["annotations"]["kubevirt.io/install-strategy-identifier"].clone()
    };
    let before = identity(&mut world);
    world.edit(&json!({"productName": "shop", "infra": {"replicas": 3}}));
    world.settle();
    assert_eq!(world.object("Deployment", "virt-controller")["spec"]["replicas"], 3);
    assert_eq!(identity(&mut world), before);
}

#[test]
fn a_long_wait_says_for_what() {
    let mut world = World::new(&json!({}));
    world.rolls_out = false;
    for _ in 0..25 {
        world.reconcile();
    }
    let conditions = world.status()["conditions"].to_string();
    assert!(
        conditions.contains("virt-api: it has no pods yet") || conditions.contains("virt-api: its pods"),
        "{conditions}"
    );
}

#[test]
fn a_resource_that_is_deleted_keeps_its_installation_and_says_so() {
    let mut world = installed(&json!({}));
    world.kubevirt.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(world.now));
    world.objects.remove(&("Service".to_owned(), ObjectKey::namespaced("kubevirt", "virt-api")));
    let writes: Vec<String> = world.settle().iter().flat_map(world::Pass::writes).collect();
    assert_eq!(writes, ["Create(Service kubevirt/virt-api)"]);
    assert!(world.status()["conditions"].to_string().contains("does not remove"));
}
