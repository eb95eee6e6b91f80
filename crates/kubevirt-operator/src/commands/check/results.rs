//! What the answers of a cluster mean for Machines.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{
        admissionregistration::v1::ValidatingAdmissionPolicy, core::v1::Node, rbac::v1::PolicyRule,
        storage::v1::StorageClass,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::ResourceExt;
use vitivirt_api::{docs_url, kubevirt::KubeVirt};
use vitivirt_cli::Check;
use vitivirt_runtime::{access::Permission, preflight::is_established};

use crate::{cache::ClassEntry, crd_guard::check_crd, policies, rbac};

pub(super) const POD_SECURITY: &str = "pod-security.kubernetes.io/enforce";
/// The device that virt-handler offers on nodes with hardware virtualization.
const KVM: &str = "devices.kubevirt.io/kvm";

/// A CRD of the operator. `field` is one that only its own version has.
pub(super) fn own_crd(name: &str, field: &str, crd: Option<&CustomResourceDefinition>, pre: bool) -> Check {
    let title = format!("CRD {name}");
    match crd {
        None if pre => Check::ok(&title, "does not exist yet"),
        None => Check::failed(&title, "not found", "apply the output of `kubevirt-operator crds`"),
        Some(crd) => match check_crd(crd, field) {
            Err(problem) => {
                Check::failed(&title, problem, format!("see {}", docs_url("faq.md#three-things-called-machines")))
            }
            Ok(()) if !is_established(crd) => Check::failed(
                &title,
                "not established: another CRD of the group has one of its names",
                format!("see `kubectl describe crd {name}`"),
            ),
            Ok(()) => Check::ok(&title, if pre { "exists and belongs to this operator" } else { "established" }),
        },
    }
}

/// The page about an operator for one namespace.
const ONE_NAMESPACE: &str = "tenants.md#an-operator-for-one-namespace";

/// What the operator's account needs. If it watches one namespace, it has the permissions there, and in the cluster only
/// those that a Role cannot grant.
pub(super) fn needed_permissions(namespace: &str, watched: Option<&str>) -> BTreeSet<Permission> {
    let (of_namespace, of_cluster): (Vec<PolicyRule>, Vec<PolicyRule>) =
        rbac::manager_rules().into_iter().partition(rbac::is_namespaced);
    let mut needed = Permission::of_rules(&of_namespace, watched);
    needed.extend(Permission::of_rules(&of_cluster, None));
    needed.extend(Permission::of_rules(&rbac::lease_rules(), Some(namespace)));
    needed
}

/// `config/rbac` is not the remedy for an operator of one namespace: it grants the permissions in all namespaces.
pub(super) fn permissions_remedy(watched: Option<&str>) -> String {
    let page = docs_url(ONE_NAMESPACE);
    match watched {
        None => format!(
            "run `helm upgrade`, or `kubectl apply -f config/rbac/`; if the operator watches one namespace, set \
             --watch-namespace instead; see {page}"
        ),
        Some(namespace) => format!(
            "run `helm upgrade`, or apply your Kustomization for namespace {namespace} again; do not apply config/rbac: \
             it grants the permissions in all namespaces; see {page}"
        ),
    }
}

/// A permission that an operator for one namespace does not have elsewhere.
pub(super) fn permission_of_all_namespaces() -> Permission {
    Permission { verb: "list".to_owned(), resource: "secrets".to_owned(), ..Permission::default() }
}

/// Of an operator for one namespace. `everywhere`: whether it has [`permission_of_all_namespaces`].
pub(super) fn other_namespaces(account: &str, watched: &str, everywhere: bool) -> Check {
    let name = "Other namespaces";
    if !everywhere {
        return Check::ok(name, format!("{account} cannot list Secrets outside of namespace {watched}"));
    }
    Check::warning(
        name,
        format!("{account} can list the Secrets of all namespaces, and the operator needs only those of {watched}"),
        format!(
            "delete the ClusterRoleBinding {}, which config/rbac creates; see {}",
            rbac::MANAGER_BINDING,
            docs_url(ONE_NAMESPACE)
        ),
    )
}

/// Whether a ValidatingAdmissionPolicy restricts the operator's account to objects of Machines. The chart adds the
/// namespace of the operator to its name if the operator watches one namespace.
pub(super) fn admission_policy(found: &[ValidatingAdmissionPolicy], namespace: &str, account: &str) -> Check {
    let name = "Admission policy";
    let user = policies::is_sent_by(namespace, account);
    let own: Vec<&ValidatingAdmissionPolicy> =
        found.iter().filter(|policy| policy.name_any().starts_with(policies::OWN_OBJECTS)).collect();
    let names_account = |policy: &&&ValidatingAdmissionPolicy| {
        let conditions = policy.spec.iter().flat_map(|spec| spec.match_conditions.iter().flatten());
        conditions.into_iter().any(|condition| condition.expression == user)
    };
    if let Some(policy) = own.iter().find(names_account) {
        let message = format!("{} restricts ServiceAccount {namespace}/{account}", policy.name_any());
        return Check::ok(name, message);
    }
    let problem = if own.is_empty() {
        format!("ValidatingAdmissionPolicy {} not found", policies::OWN_OBJECTS)
    } else {
        format!("no ValidatingAdmissionPolicy {} names ServiceAccount {namespace}/{account}", policies::OWN_OBJECTS)
    };
    let remedy = if (namespace, account) == (rbac::NAMESPACE, rbac::ACCOUNT) {
        "apply config/rbac/3_own_objects.yaml, or set policies.ownObjects of the chart"
    } else {
        "set policies.ownObjects of the chart; config/rbac names only the namespace and account of its own manifests"
    };
    Check::warning(name, format!("{problem}, so RBAC alone limits what the account can change"), remedy)
}

/// The operator's pod fits every level, so only a namespace that does not exist is an error.
pub(super) fn pod_security(namespace: &str, labels: Option<&BTreeMap<String, String>>, pre: bool) -> Check {
    let name = "Pod security";
    match labels {
        None if pre => Check::ok(name, format!("Namespace {namespace} does not exist yet")),
        None => Check::failed(
            name,
            format!("Namespace {namespace} not found"),
            "install the operator, or set --namespace to the namespace of its pods",
        ),
        Some(labels) => {
            let level = labels.get(POD_SECURITY).map_or("no level".to_owned(), |level| format!("the level {level}"));
            Check::ok(name, format!("Namespace {namespace} has {level}; the operator's pod is allowed at every level"))
        }
    }
}

/// The default StorageClass, and whether its volumes can be expanded and snapshotted. `drivers` are those of the
/// VolumeSnapshotClasses.
pub(super) fn storage(classes: &[StorageClass], drivers: &[String]) -> Vec<Check> {
    let mut defaults: Vec<&StorageClass> = classes.iter().filter(|class| ClassEntry::is_default(class)).collect();
    // Kubernetes takes the newest.
    defaults.sort_by_key(|class| std::cmp::Reverse(class.creation_timestamp().map(|time| time.0)));
    let Some(class) = defaults.first() else {
        let remedy = "mark one as default, or name a StorageClass in every disk";
        return vec![Check::warning("StorageClass", "the cluster has no default StorageClass", remedy)];
    };
    let name = class.name_any();
    let found = if defaults.len() > 1 {
        let message = format!("{} StorageClasses are marked as default; {name} is used", defaults.len());
        Check::warning("StorageClass", message, "remove the annotation from the others")
    } else {
        Check::ok("StorageClass", format!("{name} is the default"))
    };
    let expansion = if class.allow_volume_expansion == Some(true) {
        Check::ok("Volume expansion", format!("{name} allows it"))
    } else {
        let message = format!("StorageClass {name} does not allow it, so disks cannot grow");
        Check::warning("Volume expansion", message, "set allowVolumeExpansion if its driver supports it")
    };
    let snapshots = if drivers.contains(&class.provisioner) {
        Check::ok("Volume snapshots", format!("a VolumeSnapshotClass for {} exists", class.provisioner))
    } else {
        let message =
            format!("no VolumeSnapshotClass for {}, so disks cannot be created from snapshots", class.provisioner);
        Check::warning("Volume snapshots", message, "install the snapshot controller and a VolumeSnapshotClass")
    };
    vec![found, expansion, snapshots]
}

pub(super) fn multus(is_installed: bool) -> Check {
    if is_installed {
        return Check::ok("Multus", "installed");
    }
    let message = "not installed: Machines can use only the pod network";
    Check::warning("Multus", message, "install Multus to use NetworkConfigurations")
}

pub(super) fn cdi(is_installed: bool) -> Check {
    if is_installed {
        return Check::ok("CDI", "installed");
    }
    let message = "not installed: disks cannot be filled from an HTTP or registry source";
    Check::warning("CDI", message, "install the Containerized Data Importer, or use containerDisk sources")
}

pub(super) fn kubevirt(kubevirts: &[KubeVirt], pre: bool) -> Check {
    let name = "KubeVirt";
    let Some(kubevirt) = kubevirts.first() else {
        let remedy = "install it with virt-operator; Machines wait until then";
        return match pre {
            true => Check::warning(name, "not installed", remedy),
            false => Check::failed(name, "not installed", remedy),
        };
    };
    let status = kubevirt.status.clone().unwrap_or_default();
    let which = format!("{}/{}", kubevirt.namespace().unwrap_or_default(), kubevirt.name_any());
    if status.phase == "Deployed" {
        return Check::ok(name, format!("{which} {} is deployed", status.observed_kube_virt_version));
    }
    let phase = if status.phase.is_empty() { "not set" } else { &status.phase };
    let message = format!("phase of {which} is {phase}");
    Check::failed(name, message, "wait, or run `virt-operator check` to see what is wrong")
}

/// Nodes that can run guests with hardware virtualization, unless KubeVirt emulates it.
pub(super) fn nodes(nodes: &[Node], kubevirt: Option<&KubeVirt>) -> Check {
    let name = "Nodes";
    let emulation = "/configuration/developerConfiguration/useEmulation";
    let emulates = kubevirt.and_then(|kubevirt| {
        let spec = serde_json::to_value(&kubevirt.spec).ok()?;
        spec.pointer(emulation)?.as_bool()
    });
    if emulates == Some(true) {
        return Check::warning(name, "KubeVirt emulates CPUs, which is slow", "use it for tests only");
    }
    let has_kvm = |node: &&Node| {
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        allocatable.and_then(|resources| resources.get(KVM)).is_some_and(|count| !count.0.starts_with('0'))
    };
    let count = nodes.iter().filter(has_kvm).count();
    if count == 0 {
        let message = format!("none of {} nodes has hardware virtualization (KVM)", nodes.len());
        let remedy = "enable it in the firmware of the nodes, or set useEmulation in the KubeVirt resource for tests";
        return Check::warning(name, message, remedy);
    }
    Check::ok(name, format!("{count} of {} have hardware virtualization (KVM)", nodes.len()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use vitivirt_cli::CheckStatus;

    use super::*;

    fn class(name: &str, is_default: bool, more: &Value) -> StorageClass {
        let mut class = json!({
            "metadata": {"name": name, "annotations": {"storageclass.kubernetes.io/is-default-class": is_default.to_string()}},
            "provisioner": "csi.example.com",
        });
        class.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(class).unwrap()
    }

    fn statuses(checks: &[Check]) -> Vec<(String, CheckStatus)> {
        checks.iter().map(|check| (check.name.clone(), check.status)).collect()
    }

    #[test]
    fn an_operator_for_one_namespace_needs_only_cluster_kinds_elsewhere() {
        let everywhere = |watched: Option<&str>| -> Vec<String> {
            let needed = needed_permissions("system", watched);
            needed.iter().filter(|permission| permission.namespace.is_none()).map(ToString::to_string).collect()
        };
        let of_cluster = [
            "list customresourcedefinitions.apiextensions.k8s.io",
            "list storageclasses.storage.k8s.io",
            "watch customresourcedefinitions.apiextensions.k8s.io",
            "watch storageclasses.storage.k8s.io",
        ];
        assert_eq!(everywhere(Some("shop")), of_cluster);
        assert!(everywhere(None).contains(&permission_of_all_namespaces().to_string()));
        let texts: Vec<String> = needed_permissions("system", Some("shop")).iter().map(ToString::to_string).collect();
        for expected in ["list secrets in namespace shop", "update leases.coordination.k8s.io in namespace system"] {
            assert!(texts.iter().any(|text| text == expected), "{expected} is not in {texts:?}");
        }
        assert_eq!(needed_permissions("system", None).len(), needed_permissions("system", Some("shop")).len());
    }

    #[test]
    fn a_remedy_for_one_namespace_does_not_grant_permissions_in_all_namespaces() {
        assert!(permissions_remedy(None).contains("kubectl apply -f config/rbac/"));
        let remedy = permissions_remedy(Some("shop"));
        assert!(remedy.contains("do not apply config/rbac") && remedy.contains("namespace shop"), "{remedy}");
        assert_eq!(other_namespaces("a", "shop", false).status, CheckStatus::Ok);
        let wide = other_namespaces("a", "shop", true);
        assert_eq!(wide.status, CheckStatus::Warning);
        assert!(wide.remedy.unwrap().contains(rbac::MANAGER_BINDING));
    }

    #[test]
    fn a_policy_must_name_the_account() {
        let of = |name: &str, namespace: &str| policies::own_objects(name, namespace, rbac::ACCOUNT);
        let config = of(policies::OWN_OBJECTS, rbac::NAMESPACE);
        let check = |found: &[ValidatingAdmissionPolicy], namespace| admission_policy(found, namespace, rbac::ACCOUNT);
        assert_eq!(check(std::slice::from_ref(&config), rbac::NAMESPACE).status, CheckStatus::Ok);
        let of_chart = of(&format!("{}-team-b", policies::OWN_OBJECTS), "team-b");
        assert_eq!(check(&[config.clone(), of_chart], "team-b").status, CheckStatus::Ok);
        let missing = check(&[], rbac::NAMESPACE);
        assert!(missing.status == CheckStatus::Warning && missing.message.contains("not found"), "{missing:?}");
        assert!(missing.remedy.unwrap().contains("3_own_objects.yaml"));
        // A kustomization that sets another namespace does not change the expression.
        let other = check(&[config], "team-b");
        assert!(other.status == CheckStatus::Warning && other.message.contains("team-b/"), "{other:?}");
        assert!(other.remedy.unwrap().contains("policies.ownObjects"));
    }

    #[test]
    fn the_default_storage_class_decides() {
        use CheckStatus::{Ok, Warning};
        let drivers = vec!["csi.example.com".to_owned()];
        let good = class("a", true, &json!({"allowVolumeExpansion": true}));
        let is = |checks: &[Check], expected: &[(&str, CheckStatus)]| {
            let expected: Vec<_> = expected.iter().map(|(name, status)| ((*name).to_owned(), *status)).collect();
            assert_eq!(statuses(checks), expected);
        };
        is(
            &storage(&[good.clone(), class("b", false, &json!({}))], &drivers),
            &[("StorageClass", Ok), ("Volume expansion", Ok), ("Volume snapshots", Ok)],
        );
        is(
            &storage(&[class("a", true, &json!({}))], &[]),
            &[("StorageClass", Ok), ("Volume expansion", Warning), ("Volume snapshots", Warning)],
        );
        is(&storage(&[class("a", false, &json!({}))], &drivers), &[("StorageClass", Warning)]);
        assert_eq!(storage(&[good.clone(), good], &drivers)[0].status, Warning);
    }

    #[test]
    fn kubevirt_must_be_deployed_after_the_installation() {
        let of = |phase: &str| -> KubeVirt {
            serde_json::from_value(json!({
                "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
                "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
                "spec": {}, "status": {"phase": phase, "observedKubeVirtVersion": "v1.8.4"},
            }))
            .unwrap()
        };
        assert_eq!(kubevirt(&[], true).status, CheckStatus::Warning);
        assert_eq!(kubevirt(&[], false).status, CheckStatus::Failed);
        assert_eq!(kubevirt(&[of("Deploying")], false).status, CheckStatus::Failed);
        assert_eq!(kubevirt(&[of("Deployed")], false).message, "kubevirt/kubevirt v1.8.4 is deployed");
    }

    #[test]
    fn nodes_need_kvm_unless_kubevirt_emulates_it() {
        let node =
            |count: &str| -> Node { serde_json::from_value(json!({"status": {"allocatable": {KVM: count}}})).unwrap() };
        assert_eq!(nodes(&[node("0"), node("1k")], None).message, "1 of 2 have hardware virtualization (KVM)");
        assert_eq!(nodes(&[node("0"), Node::default()], None).status, CheckStatus::Warning);
        let spec = json!({"configuration": {"developerConfiguration": {"useEmulation": true}}});
        let emulating: KubeVirt = serde_json::from_value(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt"}, "spec": spec,
        }))
        .unwrap();
        assert!(nodes(&[node("110")], Some(&emulating)).message.contains("emulates"));
    }

    #[test]
    fn a_crd_of_another_product_fails_before_and_after_the_installation() {
        let (name, field) = crate::crd_guard::OWN_FIELDS[0];
        let mut crd = vitivirt_api::machine::crds().remove(0);
        assert_eq!(own_crd(name, field, None, true).status, CheckStatus::Ok);
        assert_eq!(own_crd(name, field, None, false).status, CheckStatus::Failed);
        assert!(own_crd(name, field, Some(&crd), false).message.contains("not established"));
        let established = json!({"conditions": [
            {"type": "Established", "status": "True", "reason": "x", "message": "", "lastTransitionTime": null},
        ]});
        crd.status = serde_json::from_value(established).unwrap();
        assert_eq!(own_crd(name, field, Some(&crd), false).status, CheckStatus::Ok);
        crd.spec.versions[0].schema = None;
        for pre in [true, false] {
            let check = own_crd(name, field, Some(&crd), pre);
            assert!(check.status == CheckStatus::Failed && check.message.contains("another product"), "{check:?}");
        }
    }
}
