//! Changes by other clients while the operator runs: revoked permissions, names and MAC addresses in use, admission
//! policies. The Machine reports each with a remedy, and recovers without a restart of the operator.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicyBinding;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, PostParams},
};
use serde_json::{Value, json};
use vitivirt_api::{machine::NetworkConfiguration, resources::import_source_resource};
use vitivirt_lab::{
    CLASS_NEVER, CLASS_STANDARD, Extension, Record,
    harness::{SharedLabs, Suite},
    manifests,
    proxy::{Match, ProxyFault, ProxyRule, RequestVerb, When},
};
use vitivirt_runtime::lease::message;

use crate::{
    machine_test::{
        FAST_RECONCILE, MACHINE_PATIENCE, MachineTest, check_diagnosis, condition, diagnosis, foreign_vm, is_protected,
        machine, operator_user, phase,
    },
    poll::poll_until,
    random_specs::create_import_source_crd,
    replica::{ACCOUNT, grant_cluster_scoped_kinds, namespaced_rules, rule_is_about},
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        a_revoked_permission_is_reported_and_recovers_when_granted,
        a_nad_of_another_owner_is_not_changed,
        a_mac_address_in_use_blocks_the_younger_machine_until_the_older_is_deleted,
        a_denial_by_an_admission_policy_is_reported_and_recovers,
        a_refused_write_is_sent_again_after_a_read_of_the_live_object,
    );
}

/// The API server refuses a write for a change that the operator has not seen yet, although nothing is wrong.
async fn a_refused_write_is_sent_again_after_a_read_of_the_live_object(labs: Arc<SharedLabs>) -> Result<()> {
    const NAMESPACE: &str = "refused-writes";
    let lab = Box::pin(labs.reference()).await?;
    lab.install(Extension::Multus).await?;
    create_import_source_crd(&lab).await?;
    let test = Box::pin(MachineTest::start_behind_proxy(&labs, NAMESPACE)).await?;
    let refuse = |verb: RequestVerb, resource: &'static str, status: u16| {
        let matcher = Match::verb(verb).user_agent("kubevirt-operator/").resource(resource).namespace(NAMESPACE);
        let answer = ProxyFault::Answer { status, retry_after: None };
        (resource, test.lab.proxy().add(ProxyRule::new(matcher, When::First(1), answer)))
    };
    let mut refused =
        vec![refuse(RequestVerb::Create, "volumeimportsources", 409), refuse(RequestVerb::Update, "leases", 409)];
    test.create_networks(&["net"]).await?;
    let disk = |url: &str, class: &str| json!([{"name": "root", "size": "1Gi", "storageClass": class, "source": {"http": {"url": url}}}]);
    let networks = json!([{"name": "a", "networkName": "net"}]);
    let spec = json!({
        "template": "small", "networks": networks, "disks": disk("http://images.example/one.img", CLASS_NEVER),
    });
    test.create_json(&machine("web", &spec)).await?;
    let sources = test.dynamic_api(&import_source_resource());
    let has_url = |url: &'static str| {
        move |source: Option<&DynamicObject>| source.is_some_and(|source| source.data.to_string().contains(url))
    };
    test.lab.wait("the source", MACHINE_PATIENCE, sources.clone(), "web-root", has_url("one.img")).await?;
    test.wait_for_reason("web", "PVCPending").await?;

    // The PVC never had a volume, so it and its source follow the spec.
    test.edit_spec("web", &json!({"disks": disk("http://images.example/two.img", CLASS_STANDARD)})).await?;
    test.lab.wait("the other source", MACHINE_PATIENCE, sources, "web-root", has_url("two.img")).await?;
    test.wait_until_running("web").await?;

    // The removal of the finalizer.
    refused.push(refuse(RequestVerb::Patch, "networkconfigurations", 422));
    test.edit_spec("web", &json!({"networks": [{"name": "a", "networkName": "pod"}]})).await?;
    let is_free = |network: Option<&NetworkConfiguration>| network.is_some_and(|network| !is_protected(network));
    test.lab.wait("an unused network", MACHINE_PATIENCE, test.api(), "net", is_free).await?;
    for (resource, rule) in &refused {
        let is_hit = || async { Ok(rule.hits() == 1) };
        poll_until(MACHINE_PATIENCE, is_hit, || format!("a write of {resource} is refused")).await?;
        let is_read = || async {
            let user = operator_user(NAMESPACE);
            let reads = |record: &Record| record.user == user && record.verb == "get" && record.resource == *resource;
            Ok(test.lab.audit()?.iter().any(reads))
        };
        poll_until(MACHINE_PATIENCE, is_read, || format!("the operator reads {resource}")).await?;
    }
    ensure!(!test.operator.log_text().contains(message::WORK_STOPPED), "the operator lost its Lease");
    test.delete_machine("web").await
}

async fn a_revoked_permission_is_reported_and_recovers_when_granted(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = Box::pin(labs.reference()).await?;
    let all = namespaced_rules(|_| {});
    lab.grant("rights", ACCOUNT, &all).await?;
    grant_cluster_scoped_kinds(&lab, "rights").await?;
    let test = MachineTest::start_with_existing_permissions(lab.clone(), "rights").await?;
    test.create_json(&machine("before", &json!({"template": "small"}))).await?;
    test.wait_until_running("before").await?;

    let reading_pvcs_only = namespaced_rules(|rule| {
        if rule_is_about(rule, &["persistentvolumeclaims"]) {
            rule.verbs.retain(|verb| ["get", "list", "watch"].contains(&verb.as_str()));
        }
    });
    lab.change_grant("rights", ACCOUNT, &reading_pvcs_only).await?;
    test.create_json(&machine("after", &json!({"template": "small"}))).await?;
    let refused = test.wait_for_reason("after", "PermissionMissing").await?;
    check_diagnosis(&refused, &["may not create persistentvolumeclaims", "in namespace rights"])?;
    ensure!(test.vms().get_opt("after").await?.is_none(), "the operator created a VM without its disk");
    let untouched = test.machines().get("before").await?;
    ensure!(phase(&untouched) == Some("Running"), "another Machine is affected: {:?}", untouched.status);

    test.machines().delete("before", &DeleteParams::default()).await?;
    let held_up = test.wait_for_reason("before", "PermissionMissing").await?;
    check_diagnosis(
        &held_up,
        &["the deletion of the PVCs failed", "may not delete persistentvolumeclaims", "grant the permission"],
    )?;
    test.wait_for_event("before", "PermissionMissing").await?;
    test.wait_for_error_counts(&["PermissionMissing"]).await?;

    lab.change_grant("rights", ACCOUNT, &all).await?;
    test.wait_until_deleted("before").await?;
    test.wait_until_running("after").await.map(|_| ())
}

async fn a_nad_of_another_owner_is_not_changed(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start_with_environment(&labs, "foreign-net", vec![FAST_RECONCILE])).await?;
    let foreign = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition", "metadata": {"name": "taken"},
        "spec": {"config": "{\"type\": \"macvlan\"}"},
    });
    test.create_json(&foreign).await?;
    let before = stored_json(&test.nads().get("taken").await?)?;
    test.create_networks(&["taken"]).await?;
    let spec = json!({"template": "small", "networks": [{"name": "a", "networkName": "taken"}]});
    for name in ["first", "second"] {
        test.create_json(&machine(name, &spec)).await?;
        let refused = test.wait_for_reason(name, "NameTaken").await?;
        check_diagnosis(&refused, &["NetworkAttachmentDefinition taken", "does not change it"])?;
        ensure!(phase(&refused) == Some("Failed"), "{:?}", refused.status);
    }
    test.edit_spec("first", &json!({"resources": {"cpu": {"cores": 2}}})).await?;
    test.wait_until_observed("first").await?;
    test.delete_machine("first").await?;
    let after = stored_json(&test.nads().get("taken").await?)?;
    ensure!(before == after, "{before} became {after}");

    test.nads().delete("taken", &DeleteParams::default()).await?;
    test.wait_until_running("second").await?;
    let created = test.nads().get("taken").await?;
    ensure!(stored_json(&created)?.contains("bridge"), "{created:?}");
    Ok(())
}

async fn a_mac_address_in_use_blocks_the_younger_machine_until_the_older_is_deleted(
    labs: Arc<SharedLabs>,
) -> Result<()> {
    let test = Box::pin(MachineTest::start(&labs, "mac-in-use")).await?;
    test.create_networks(&["shared", "other"]).await?;
    let spec_on = |network: &str| {
        let interface = json!({"name": "a", "networkName": network, "macAddress": "02:00:00:00:00:77"});
        json!({"template": "small", "networks": [interface]})
    };
    test.create_json(&machine("older", &spec_on("shared"))).await?;
    test.wait_until_running("older").await?;
    test.create_json(&machine("younger", &spec_on("shared"))).await?;
    test.create_json(&machine("elsewhere", &spec_on("other"))).await?;
    let refused = test.wait_for_reason("younger", "MacAddressInUse").await?;
    check_diagnosis(&refused, &["02:00:00:00:00:77", "older", "choose another"])?;
    ensure!(phase(&refused) == Some("Failed"), "{:?}", refused.status);
    let network = condition(&refused, "NetworkReady").context("no condition NetworkReady")?;
    ensure!((network.status.as_str(), network.reason.as_str()) == ("False", "NetworkFailed"), "{network:?}");
    ensure!(test.vms().get_opt("younger").await?.is_none(), "the operator created the VM of the younger Machine");
    // The same MAC address on another network is not a conflict, and the older Machine is not affected.
    test.wait_until_running("elsewhere").await?;
    ensure!(phase(&test.machines().get("older").await?) == Some("Running"), "the older Machine does not run");

    test.delete_machine("older").await?;
    test.wait_until_running("younger").await.map(|_| ())
}

async fn a_denial_by_an_admission_policy_is_reported_and_recovers(labs: Arc<SharedLabs>) -> Result<()> {
    let test = Box::pin(MachineTest::start_with_environment(&labs, "policy", vec![FAST_RECONCILE])).await?;
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(test.lab.client());
    let policies = deny_policy(test.namespace, "CREATE", "no machines on Sundays");
    manifests::create(&test.lab.client(), &policies).await?;
    wait_until_creation_is_denied(&test).await?;
    test.create_json(&machine("sunday", &json!({"template": "small"}))).await?;
    let refused = test.wait_for_reason("sunday", "AdmissionRefused").await?;
    ensure!(diagnosis(&refused).contains("no machines on Sundays"), "{:?}", refused.status);
    test.wait_for_error_counts(&["AdmissionRefused"]).await?;
    bindings.delete("policy-create", &DeleteParams::default()).await?;
    test.wait_until_running("sunday").await?;

    let policies = deny_policy(test.namespace, "DELETE", "no deletions on Sundays");
    manifests::create(&test.lab.client(), &policies).await?;
    wait_until_deletion_is_denied(&test, "sunday").await?;
    test.machines().delete("sunday", &DeleteParams::default()).await?;
    let held_up = test.wait_for_reason("sunday", "AdmissionRefused").await?;
    check_diagnosis(&held_up, &["the deletion of the VirtualMachine failed", "no deletions on Sundays"])?;
    bindings.delete("policy-delete", &DeleteParams::default()).await?;
    test.wait_until_deleted("sunday").await
}

/// A policy and its binding that deny an operation on VMs in one namespace, with this message.
fn deny_policy(namespace: &str, operation: &str, message: &str) -> [Value; 2] {
    let name = format!("{namespace}-{}", operation.to_lowercase());
    let group = "admissionregistration.k8s.io/v1";
    let matches = json!({
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "resourceRules": [{
            "apiGroups": ["kubevirt.io"], "apiVersions": ["*"],
            "operations": [operation], "resources": ["virtualmachines"],
        }],
    });
    [
        json!({
            "apiVersion": group, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name},
            "spec": {"matchConstraints": matches, "validations": [{"expression": "false", "message": message}]},
        }),
        json!({
            "apiVersion": group, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        }),
    ]
}

/// The API server enforces a policy a moment after its creation.
async fn wait_until_creation_is_denied(test: &MachineTest) -> Result<()> {
    let vm: DynamicObject = serde_json::from_value(foreign_vm("probe"))?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let is_denied = || async { Ok(test.vms().create(&dry_run, &vm).await.is_err()) };
    poll_until(MACHINE_PATIENCE, is_denied, || "the policy is in force".to_owned()).await
}

async fn wait_until_deletion_is_denied(test: &MachineTest, vm: &str) -> Result<()> {
    let dry_run = DeleteParams { dry_run: true, ..DeleteParams::default() };
    let is_denied = || async { Ok(test.vms().delete(vm, &dry_run).await.is_err()) };
    poll_until(MACHINE_PATIENCE, is_denied, || "the policy is in force".to_owned()).await
}

/// The whole stored object, with its resource version and managed fields.
fn stored_json(object: &DynamicObject) -> Result<String> {
    ensure!(object.uid().is_some(), "the object is not stored");
    Ok(serde_json::to_string(object)?)
}
