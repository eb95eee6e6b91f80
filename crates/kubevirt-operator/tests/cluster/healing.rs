//! What others do to a cluster while the operator runs: rights taken away, names and addresses in use, a policy that
//! refuses. Each is told with what to do about it, and heals without a restart.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicyBinding;
use kube::api::{DeleteParams, DynamicObject, PostParams};
use kube::{Api, ResourceExt};
use kubevirt_operator::rbac;
use serde_json::{Value, json};
use vitivirt_api::machine::Machine;
use vitivirt_lab::harness::Suite;
use vitivirt_lab::manifests;

use crate::replica::ACCOUNT;
use crate::world::{IMPATIENT, World, condition, diagnosis, machine, phase};

const HEALED: Duration = Duration::from_secs(90);

pub(crate) fn add(suite: &mut Suite) {
    suite.test("a_right_that_was_taken_away_is_named_and_heals", |labs| async move {
        let lab = Box::pin(labs.reference()).await?;
        let all = rules(&[]);
        lab.grant("rights", ACCOUNT, &all).await?;
        reads_the_cluster(&lab, "rights").await?;
        let world = World::begin_granted(lab.clone(), "rights", vec![]).await?;
        world.create_json(&machine("before", &json!({"template": "small"}))).await?;
        world.running("before", HEALED).await?;

        lab.change_grant("rights", ACCOUNT, &rules(&["persistentvolumeclaims"])).await?;
        world.create_json(&machine("claim", &json!({"template": "small"}))).await?;
        let refused = world.expect("claim", "PermissionMissing").await?;
        for words in ["may not create persistentvolumeclaims", "in namespace rights"] {
            ensure!(diagnosis(&refused).contains(words), "{words:?} is missing in {:?}", refused.status);
        }
        ensure!(world.vms().get_opt("claim").await?.is_none(), "a machine without its disk");
        let untouched = world.machines().get("before").await?;
        ensure!(phase(&untouched) == Some("Running"), "one Machine's trouble is another's: {:?}", untouched.status);

        world.machines().delete("before", &DeleteParams::default()).await?;
        let held_up = world.expect("before", "PermissionMissing").await?;
        for words in
            ["the deletion of the PVCs failed", "may not delete persistentvolumeclaims", "grant the permission"]
        {
            ensure!(diagnosis(&held_up).contains(words), "{words:?} is missing in {:?}", held_up.status);
        }
        world.told("before", "PermissionMissing").await?;
        world.counts_errors(&["PermissionMissing"]).await?;

        lab.change_grant("rights", ACCOUNT, &all).await?;
        world.gone("before").await?;
        world.running("claim", HEALED).await.map(|_| ())
    });

    suite.test("a_foreign_network_attachment_is_left_alone", |labs| async move {
        let world = Box::pin(World::begin_with(&labs, "foreign-net", vec![IMPATIENT])).await?;
        let foreign = json!({
            "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition", "metadata": {"name": "taken"},
            "spec": {"config": "{\"type\": \"macvlan\"}"},
        });
        world.create_json(&foreign).await?;
        let before = text(&world.attachments().get("taken").await?)?;
        world.networks(&["taken"]).await?;
        let spec = json!({"template": "small", "networks": [{"name": "a", "networkName": "taken"}]});
        for name in ["first", "second"] {
            world.create_json(&machine(name, &spec)).await?;
            let refused = world.expect(name, "NameTaken").await?;
            let words = diagnosis(&refused);
            ensure!(
                words.contains("NetworkAttachmentDefinition taken") && words.contains("does not change it"),
                "{words}"
            );
            ensure!(phase(&refused) == Some("Failed"), "{:?}", refused.status);
        }
        world.edit("first", &json!({"resources": {"cpu": {"cores": 2}}})).await?;
        let is_observed =
            |machine: &Machine| machine.status.as_ref().and_then(|status| status.observed_generation) == Some(2);
        world.until("first", "a look at the edit", is_observed).await?;
        world.delete("first").await?;
        let after = text(&world.attachments().get("taken").await?)?;
        ensure!(before == after, "{before} became {after}");

        world.attachments().delete("taken", &Default::default()).await?;
        world.running("second", HEALED).await?;
        let ours = world.attachments().get("taken").await?;
        ensure!(text(&ours)?.contains("bridge"), "{ours:?}");
        Ok(())
    });

    suite.test("an_address_in_use_is_refused_to_the_younger_until_the_older_goes", |labs| async move {
        let world = Box::pin(World::begin(&labs, "mac-in-use")).await?;
        world.networks(&["shared", "other"]).await?;
        let on = |network: &str| {
            let interface = json!({"name": "a", "networkName": network, "macAddress": "02:00:00:00:00:77"});
            json!({"template": "small", "networks": [interface]})
        };
        world.create_json(&machine("older", &on("shared"))).await?;
        world.running("older", HEALED).await?;
        world.create_json(&machine("younger", &on("shared"))).await?;
        world.create_json(&machine("elsewhere", &on("other"))).await?;
        let refused = world.expect("younger", "MacAddressInUse").await?;
        let words = diagnosis(&refused);
        ensure!(["02:00:00:00:00:77", "older", "choose another"].iter().all(|part| words.contains(part)), "{words}");
        ensure!(phase(&refused) == Some("Failed"), "{:?}", refused.status);
        let network = condition(&refused, "NetworkReady").context("NetworkReady")?;
        ensure!((network.status.as_str(), network.reason.as_str()) == ("False", "NetworkFailed"), "{network:?}");
        ensure!(world.vms().get_opt("younger").await?.is_none(), "refused, and made all the same");
        // The same address on another network is nobody's concern, and the older one's least of all.
        world.running("elsewhere", HEALED).await?;
        ensure!(phase(&world.machines().get("older").await?) == Some("Running"), "the older one was there first");

        world.delete("older").await?;
        world.running("younger", HEALED).await.map(|_| ())
    });

    suite.test("what_a_policy_refuses_is_told_in_its_words_and_heals", |labs| async move {
        let world = Box::pin(World::begin_with(&labs, "policy", vec![IMPATIENT])).await?;
        let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(world.lab.client());
        let policies = policy(world.namespace, "CREATE", "no machines on Sundays");
        manifests::create(&world.lab.client(), &policies).await?;
        world.creation_is_refused().await?;
        world.create_json(&machine("sunday", &json!({"template": "small"}))).await?;
        let refused = world.expect("sunday", "AdmissionRefused").await?;
        ensure!(diagnosis(&refused).contains("no machines on Sundays"), "{:?}", refused.status);
        world.counts_errors(&["AdmissionRefused"]).await?;
        bindings.delete("policy-create", &DeleteParams::default()).await?;
        world.running("sunday", HEALED).await?;

        let policies = policy(world.namespace, "DELETE", "nothing goes on Sundays");
        manifests::create(&world.lab.client(), &policies).await?;
        world.deletion_is_refused("sunday").await?;
        world.machines().delete("sunday", &DeleteParams::default()).await?;
        let held_up = world.expect("sunday", "AdmissionRefused").await?;
        for words in ["the deletion of the VirtualMachine is held up", "nothing goes on Sundays"] {
            ensure!(diagnosis(&held_up).contains(words), "{words:?} is missing in {:?}", held_up.status);
        }
        bindings.delete("policy-delete", &DeleteParams::default()).await?;
        world.gone("sunday").await
    });
}

/// What the operator may do in a namespace, without these kinds.
fn rules(without: &[&str]) -> Value {
    let granted = |resources: &Option<Vec<String>>| {
        !resources.iter().flatten().any(|resource| without.contains(&resource.as_str()))
    };
    let all = rbac::manager_rules().into_iter().chain(rbac::lease_rules());
    let mut rules: Vec<Value> = all.clone().filter(|rule| granted(&rule.resources)).map(|rule| json!(rule)).collect();
    // It still sees them: what is taken away is the right to write.
    for mut rule in all.filter(|rule| !granted(&rule.resources)) {
        rule.verbs.retain(|verb| ["get", "list", "watch"].contains(&verb.as_str()));
        rules.push(json!(rule));
    }
    json!(rules)
}

/// The kinds without a namespace, which a Role cannot grant.
async fn reads_the_cluster(lab: &vitivirt_lab::Lab, namespace: &str) -> Result<()> {
    let name = format!("reads-the-cluster-{namespace}");
    let mut role = rbac::manager_role();
    let mut binding = rbac::manager_binding();
    role.metadata.name = Some(name.clone());
    let cluster_wide = ["storage.k8s.io", "apiextensions.k8s.io"];
    if let Some(rules) = &mut role.rules {
        rules.retain(|rule| rule.api_groups.iter().flatten().any(|group| cluster_wide.contains(&group.as_str())));
    }
    binding.metadata.name = Some(name.clone());
    binding.role_ref.name = name;
    for subject in binding.subjects.iter_mut().flatten() {
        subject.namespace = Some(namespace.to_owned());
    }
    manifests::create(&lab.client(), &[json!(role), json!(binding)]).await
}

/// Refuses an operation on VirtualMachines in one namespace, with these words.
fn policy(namespace: &str, operation: &str, words: &str) -> [Value; 2] {
    let name = format!("{namespace}-{}", operation.to_lowercase());
    let group = "admissionregistration.k8s.io/v1";
    let matches = json!({
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "resourceRules": [{
            "apiGroups": ["kubevirt.io"], "apiVersions": ["*"], "operations": [operation], "resources": ["virtualmachines"],
        }],
    });
    [
        json!({
            "apiVersion": group, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name},
            "spec": {"matchConstraints": matches, "validations": [{"expression": "false", "message": words}]},
        }),
        json!({
            "apiVersion": group, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        }),
    ]
}

impl World {
    /// A policy is in force a moment after it was made.
    async fn creation_is_refused(&self) -> Result<()> {
        let vm = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "probe"},
            "spec": {"runStrategy": "Halted", "template": {"spec": {"domain": {"devices": {}, "memory": {"guest": "128Mi"}}}}},
        });
        let vm: DynamicObject = serde_json::from_value(vm)?;
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        let refused = async {
            while self.vms().create(&dry, &vm).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(HEALED, refused).await.context("the policy never came into force")
    }

    async fn deletion_is_refused(&self, vm: &str) -> Result<()> {
        let dry = DeleteParams { dry_run: true, ..DeleteParams::default() };
        let refused = async {
            while self.vms().delete(vm, &dry).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(HEALED, refused).await.context("the policy never came into force")
    }
}

/// Everything about the object, its version and its writers included.
fn text(object: &DynamicObject) -> Result<String> {
    ensure!(object.uid().is_some(), "it is stored");
    Ok(serde_json::to_string(object)?)
}
