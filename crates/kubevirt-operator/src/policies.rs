//! Admission policies in `config/`: what the operator's account can change, which bridges and VLANs of the nodes a
//! namespace can use, and warnings about Machines. RBAC decides by kind and namespace only.

use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MatchResources, NamedRuleWithOperations, ValidatingAdmissionPolicy,
    ValidatingAdmissionPolicyBinding, ValidatingAdmissionPolicyBindingSpec, ValidatingAdmissionPolicySpec, Validation,
    Variable,
};
use vitivirt_api::{
    docs_url,
    machine::{
        ANNOTATION_ADOPT, ANNOTATION_ADOPT_BY, ANNOTATION_IDENTITY, LABEL_MACHINE, LABEL_MACHINE_UID, LABEL_MANAGED_BY,
        LABEL_TEMPLATE, MANAGED_BY,
    },
};

use crate::rbac::metadata_named;

pub const OWN_OBJECTS: &str = "kubevirt-operator-own-objects";
pub const ALLOWED_NETWORKS: &str = "networkconfigurations-allowed-networks";
pub const MACHINE_WARNINGS: &str = "machines-warnings";
/// An annotation of a namespace: the bridges and VLANs that its NetworkConfigurations can name.
pub const ANNOTATION_ALLOWED_NETWORKS: &str = "vitistack.io/allowed-networks";

/// The kinds that the operator writes, by API group, with the operations that RBAC grants.
const WRITTEN: [(&str, &[&str], &[&str]); 5] = [
    ("vitistack.io", &["machines", "networkconfigurations"], &["UPDATE"]),
    ("kubevirt.io", &["virtualmachines", "virtualmachineinstances"], &["CREATE", "UPDATE", "DELETE"]),
    ("", &["persistentvolumeclaims", "secrets"], &["CREATE", "UPDATE", "DELETE"]),
    ("k8s.cni.cncf.io", &["network-attachment-definitions"], &["CREATE", "UPDATE"]),
    ("cdi.kubevirt.io", &["volumeimportsources"], &["CREATE", "DELETE"]),
];

/// The operator's account can create only objects with the operator's label, and can change and delete only objects that
/// belong to a Machine. A client that gets its token cannot change other objects of the cluster.
pub fn own_objects(name: &str, namespace: &str, account: &str) -> ValidatingAdmissionPolicy {
    policy(
        name,
        ValidatingAdmissionPolicySpec {
            match_constraints: Some(matching(
                WRITTEN.iter().map(|(group, resources, operations)| rule(group, resources, operations)),
            )),
            match_conditions: Some(vec![MatchCondition {
                name: "sent-by-the-operator".to_owned(),
                expression: is_sent_by(namespace, account),
            }]),
            variables: Some(vec![
                variable("labels", &labels_of("object")),
                variable("old_labels", &labels_of("oldObject")),
                variable("annotations", &annotations_of("object")),
                variable("old_annotations", &annotations_of("oldObject")),
                variable("is_own", &is_own()),
            ]),
            validations: Some(own_object_validations()),
            ..ValidatingAdmissionPolicySpec::default()
        },
    )
}

/// Whether a ServiceAccount sends the request.
pub(crate) fn is_sent_by(namespace: &str, account: &str) -> String {
    format!("request.userInfo.username == 'system:serviceaccount:{namespace}:{account}'")
}

fn labels_of(object: &str) -> String {
    format!("{object} != null && has({object}.metadata.labels) ? {object}.metadata.labels : {{}}")
}

fn annotations_of(object: &str) -> String {
    format!("{object} != null && has({object}.metadata.annotations) ? {object}.metadata.annotations : {{}}")
}

/// Whether the stored object belongs to a Machine. One mark is enough, because the operator restores the others.
fn is_own() -> String {
    format!(
        "oldObject != null && (('{LABEL_MANAGED_BY}' in variables.old_labels \
         && variables.old_labels['{LABEL_MANAGED_BY}'] == '{MANAGED_BY}') \
         || '{LABEL_MACHINE_UID}' in variables.old_labels \
         || (request.resource.resource == 'persistentvolumeclaims' && '{ANNOTATION_IDENTITY}' in variables.old_annotations) \
         || (request.resource.resource == 'virtualmachineinstances' && '{LABEL_MACHINE}' in variables.old_labels) \
         || (has(oldObject.metadata.ownerReferences) && oldObject.metadata.ownerReferences.exists(owner, \
         owner.apiVersion.startsWith('vitistack.io/') && owner.kind in ['Machine', 'NetworkConfiguration'])))"
    )
}

fn own_object_validations() -> Vec<Validation> {
    let of_users = "request.resource.group == 'vitistack.io'";
    // A Machine can take over a PVC or Secret that existed before it, with the consent of its owner on the object. The
    // operator cannot set that consent, so a client that gets its token cannot mark an object and delete it afterwards.
    let consents = format!("'{ANNOTATION_ADOPT_BY}' in variables.old_annotations");
    let takes_over = format!(
        "{consents} && (request.resource.resource == 'secrets' \
         || (request.resource.resource == 'persistentvolumeclaims' && object.spec == oldObject.spec))"
    );
    let keeps_consent = format!(
        "!('{ANNOTATION_ADOPT_BY}' in variables.annotations) || ({consents} \
         && variables.annotations['{ANNOTATION_ADOPT_BY}'] == variables.old_annotations['{ANNOTATION_ADOPT_BY}'])"
    );
    vec![
        validation(
            &format!("!({of_users}) || object.spec == oldObject.spec"),
            "the operator does not change the spec of Machines and NetworkConfigurations",
        ),
        validation(
            &format!(
                "request.operation != 'CREATE' || ('{LABEL_MANAGED_BY}' in variables.labels \
                 && variables.labels['{LABEL_MANAGED_BY}'] == '{MANAGED_BY}')"
            ),
            "the operator creates only objects with its label",
        ),
        // The token controller fills a Secret of another type with the token of a ServiceAccount.
        validation(
            "request.operation != 'CREATE' || request.resource.resource != 'secrets' || !has(object.type) \
             || object.type == 'Opaque'",
            "the operator creates only Secrets of type Opaque",
        ),
        validation(
            &format!("request.operation != 'UPDATE' || {of_users} || variables.is_own || ({takes_over})"),
            "the operator changes only objects that belong to a Machine",
        ),
        validation(
            &format!("request.operation == 'DELETE' || {of_users} || {keeps_consent}"),
            "the operator does not consent to the adoption of an object",
        ),
        validation(
            "request.operation != 'DELETE' || variables.is_own",
            "the operator deletes only objects that belong to a Machine",
        ),
    ]
}

/// Optional. A NetworkConfiguration can name only a bridge and a VLAN that the annotation of its namespace lists:
/// `br1/100` (one VLAN), `br1/100-199` (a range), `br1/*` (every VLAN, and none), `br2` (without VLAN).
pub fn allowed_networks() -> ValidatingAdmissionPolicy {
    let annotation = format!("namespaceObject.metadata.annotations['{ANNOTATION_ALLOWED_NETWORKS}']");
    let has_annotation = format!(
        "has(namespaceObject.metadata.annotations) && '{ANNOTATION_ALLOWED_NETWORKS}' in \
         namespaceObject.metadata.annotations"
    );
    let in_range = "entry.startsWith(variables.bridge + '/') \
                    && entry.substring(size(variables.bridge) + 1).matches('^[0-9]{1,4}-[0-9]{1,4}$') \
                    && variables.vlan >= int(entry.substring(size(variables.bridge) + 1).split('-')[0]) \
                    && variables.vlan <= int(entry.substring(size(variables.bridge) + 1).split('-')[1])";
    let is_listed = format!(
        "variables.allowed.exists(entry, entry == variables.bridge + '/*' || entry == variables.wanted || ({in_range}))"
    );
    policy(
        ALLOWED_NETWORKS,
        ValidatingAdmissionPolicySpec {
            match_constraints: Some(matching([rule(
                "vitistack.io",
                &["networkconfigurations"],
                &["CREATE", "UPDATE"],
            )])),
            variables: Some(vec![
                variable("allowed", &format!("{has_annotation} ? {annotation}.replace(' ', '').split(',') : []")),
                variable("bridge", "has(object.spec.bridge) ? string(object.spec.bridge) : ''"),
                variable("vlan", "has(object.spec.vlan) ? int(object.spec.vlan) : 0"),
                variable(
                    "wanted",
                    "has(object.spec.vlan) ? variables.bridge + '/' + string(variables.vlan) : variables.bridge",
                ),
            ]),
            validations: Some(vec![Validation {
                message_expression: Some(format!(
                    "'bridge and VLAN ' + variables.wanted + ' are not allowed in this namespace; a cluster \
                     administrator can add them to its annotation {ANNOTATION_ALLOWED_NETWORKS}'"
                )),
                // A change of labels or finalizers is allowed, whatever the annotation says today.
                ..validation(
                    &format!("(oldObject != null && object.spec == oldObject.spec) || {is_listed}"),
                    "bridge and VLAN are not allowed in this namespace",
                )
            }]),
            ..ValidatingAdmissionPolicySpec::default()
        },
    )
}

/// Optional. Warns the user who writes a Machine with an unknown template, or one whose boot devices have no content: the
/// rule of [`vitivirt_machine::warnings`]. It refuses nothing.
pub fn machine_warnings() -> ValidatingAdmissionPolicy {
    let templates = vitivirt_machine::resolve::template_names();
    let listed: Vec<String> = templates.iter().map(|name| format!("'{name}'")).collect();
    let label = format!("has(object.metadata.labels) && '{LABEL_TEMPLATE}' in object.metadata.labels");
    let adopts = format!("has(object.metadata.annotations) && '{ANNOTATION_ADOPT}' in object.metadata.annotations");
    // Without bootOrder only one disk boots: the disk named root, which a template adds, else the first disk, else the
    // first CD-ROM.
    let boots_by_default = "(variables.disks.exists(disk, disk.name == 'root' && has(disk.source)) \
                            || (variables.template == '' && !variables.hard.exists(disk, disk.name == 'root') \
                            && (size(variables.hard) > 0 ? has(variables.hard[0].source) \
                            : size(variables.cdroms) > 0 && has(variables.cdroms[0].source))))";
    let boots = format!(
        "{adopts} || 'network' in variables.order || (size(variables.order) == 0 ? {boots_by_default} \
         : ('disk' in variables.order && variables.hard.exists(disk, has(disk.source))) \
         || ('cdrom' in variables.order && variables.cdroms.exists(disk, has(disk.source))))"
    );
    let policy = policy(
        MACHINE_WARNINGS,
        ValidatingAdmissionPolicySpec {
            match_constraints: Some(matching([rule("vitistack.io", &["machines"], &["CREATE", "UPDATE"])])),
            match_conditions: Some(vec![MatchCondition {
                name: "spec-changed".to_owned(),
                expression: "oldObject == null || object.spec != oldObject.spec".to_owned(),
            }]),
            variables: Some(vec![
                variable(
                    "template",
                    &format!(
                        "has(object.spec.template) ? object.spec.template \
                         : ({label} ? object.metadata.labels['{LABEL_TEMPLATE}'] : '')"
                    ),
                ),
                variable("disks", "has(object.spec.disks) ? object.spec.disks : []"),
                variable("hard", "variables.disks.filter(disk, !has(disk.type) || disk.type != 'cdrom')"),
                variable("cdroms", "variables.disks.filter(disk, has(disk.type) && disk.type == 'cdrom')"),
                variable("order", "has(object.spec.bootOrder) ? object.spec.bootOrder : []"),
            ]),
            validations: Some(vec![
                Validation {
                    message_expression: Some(format!(
                        "'spec.template: unsupported value \"' + variables.template + '\"; supported values: {}'",
                        templates.join(", ")
                    )),
                    ..validation(
                        &format!("variables.template == '' || variables.template in [{}]", listed.join(", ")),
                        "spec.template: unsupported value",
                    )
                },
                validation(
                    &boots,
                    &format!(
                        "the boot disk is empty, so the guest has nothing to boot from; set the source of the disk, or \
                         boot an installer with bootOrder; see {}",
                        docs_url("first-machine.md")
                    ),
                ),
            ]),
            ..ValidatingAdmissionPolicySpec::default()
        },
    );
    // A warning that cannot be computed must not stop a request.
    let spec =
        policy.spec.map(|spec| ValidatingAdmissionPolicySpec { failure_policy: Some("Ignore".to_owned()), ..spec });
    ValidatingAdmissionPolicy { spec, ..policy }
}

/// Applies a policy everywhere, and only warns.
pub fn warning_binding(name: &str) -> ValidatingAdmissionPolicyBinding {
    let mut binding = binding(name);
    if let Some(spec) = &mut binding.spec {
        spec.validation_actions = Some(vec!["Warn".to_owned()]);
    }
    binding
}

/// Applies a policy everywhere.
pub fn binding(name: &str) -> ValidatingAdmissionPolicyBinding {
    ValidatingAdmissionPolicyBinding {
        metadata: metadata_named(name),
        spec: Some(ValidatingAdmissionPolicyBindingSpec {
            policy_name: Some(name.to_owned()),
            validation_actions: Some(vec!["Deny".to_owned()]),
            ..ValidatingAdmissionPolicyBindingSpec::default()
        }),
    }
}

fn policy(name: &str, spec: ValidatingAdmissionPolicySpec) -> ValidatingAdmissionPolicy {
    let spec = ValidatingAdmissionPolicySpec { failure_policy: Some("Fail".to_owned()), ..spec };
    ValidatingAdmissionPolicy { metadata: metadata_named(name), spec: Some(spec), status: None }
}

fn matching(rules: impl IntoIterator<Item = NamedRuleWithOperations>) -> MatchResources {
    MatchResources { resource_rules: Some(rules.into_iter().collect()), ..MatchResources::default() }
}

fn rule(group: &str, resources: &[&str], operations: &[&str]) -> NamedRuleWithOperations {
    let owned = |texts: &[&str]| Some(texts.iter().map(|text| (*text).to_owned()).collect());
    NamedRuleWithOperations {
        api_groups: owned(&[group]),
        api_versions: owned(&["*"]),
        resources: owned(resources),
        operations: owned(operations),
        // The API server's default. Without it `kubectl apply` finds a difference each time.
        scope: Some("*".to_owned()),
        ..NamedRuleWithOperations::default()
    }
}

fn variable(name: &str, expression: &str) -> Variable {
    Variable { name: name.to_owned(), expression: expression.to_owned() }
}

fn validation(expression: &str, message: &str) -> Validation {
    Validation {
        expression: expression.to_owned(),
        message: Some(message.to_owned()),
        reason: Some("Forbidden".to_owned()),
        message_expression: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rbac;

    /// A kind that RBAC lets the operator write and that no policy covers would be a way around the policy.
    #[test]
    fn the_policy_covers_everything_that_the_operator_may_write() {
        let without_objects_of_others =
            ["events", "machines/status", "machines/finalizers", "networkconfigurations/finalizers"];
        for rule in rbac::manager_rules() {
            let (groups, resources) = (rule.api_groups.unwrap(), rule.resources.unwrap());
            for (verb, operation) in
                [("create", "CREATE"), ("patch", "UPDATE"), ("update", "UPDATE"), ("delete", "DELETE")]
            {
                if !rule.verbs.iter().any(|have| have == verb) {
                    continue;
                }
                for resource in resources.iter().filter(|name| !without_objects_of_others.contains(&name.as_str())) {
                    let is_covered = WRITTEN.iter().any(|(group, covered, operations)| {
                        groups.iter().any(|have| have == group)
                            && covered.contains(&resource.as_str())
                            && operations.contains(&operation)
                    });
                    assert!(is_covered, "{verb} {resource}");
                }
            }
        }
    }
}
