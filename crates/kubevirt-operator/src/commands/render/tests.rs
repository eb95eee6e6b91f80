//! The four examples as reviewed snapshots, and the errors of invalid files.

use anyhow::Result;
use vitivirt_cli::{ObjectFormat, write_objects};

use super::*;

const BASIC: &str = include_str!("../../../../../examples/basic-vm.yaml");
const CUSTOM: &str = include_str!("../../../../../examples/custom-vm.yaml");
const NETWORKED: &str = include_str!("../../../../../examples/networked-vm.yaml");
const NETWORKS: &str = include_str!("../../../../../examples/networks.yaml");
const CLOUD_INIT: &str = include_str!("../../../../../examples/cloud-init-vm.yaml");

fn files(texts: &[&str]) -> Result<Files> {
    let documents: Vec<_> =
        texts.iter().flat_map(|text| vitivirt_cli::parse_manifests("file", text).unwrap()).collect();
    Files::from_documents(&documents, DEFAULT_NAMESPACE)
}

fn rendered(texts: &[&str]) -> Rendered {
    render(files(texts).unwrap()).unwrap()
}

fn rendered_yaml(files: &[&str]) -> String {
    let Rendered { objects, problems, .. } = rendered(files);
    assert!(problems.is_empty(), "{problems:?}");
    write(&objects, ObjectFormat::Yaml)
}

fn write(objects: &[Value], format: ObjectFormat) -> String {
    let mut out = Vec::new();
    write_objects(&mut out, objects.iter().cloned().map(Ok), format).unwrap();
    String::from_utf8(out).unwrap()
}

fn problems(yaml: &str) -> Vec<String> {
    let Rendered { objects, problems, .. } = rendered(&[yaml]);
    assert!(objects.is_empty());
    problems
}

#[test]
fn basic_vm() {
    insta::assert_snapshot!(rendered_yaml(&[BASIC]));
}

#[test]
fn custom_vm() {
    insta::assert_snapshot!(rendered_yaml(&[CUSTOM]));
}

#[test]
fn networked_vm() {
    insta::assert_snapshot!(rendered_yaml(&[NETWORKED, NETWORKS]));
}

#[test]
fn cloud_init_vm() {
    insta::assert_snapshot!(rendered_yaml(&[CLOUD_INIT]));
}

#[test]
fn only_the_examples_without_a_source_have_nothing_to_boot_from() {
    let example = |name: &str| {
        let path = format!("{}/../../examples/{name}.yaml", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    for (name, is_warned) in [
        ("container-disk-vm", false),
        ("http-image-vm", false),
        ("iso-vm", false),
        ("windows-vm", false),
        ("basic-vm", true),
        ("cloud-init-vm", true),
    ] {
        let Rendered { objects, problems, warnings, .. } = rendered(&[&example(name)]);
        assert!(problems.is_empty() && !objects.is_empty(), "{name}: {problems:?}");
        assert_eq!(!warnings.is_empty(), is_warned, "{name}: {warnings:?}");
        assert!(warnings.iter().all(|warning| warning.starts_with(&format!("Machine default/{name}: disk root "))));
    }
}

#[test]
fn printed_objects_can_be_parsed_again() {
    for files in [&[BASIC][..], &[CUSTOM], &[NETWORKED, NETWORKS], &[CLOUD_INIT]] {
        let Rendered { objects, .. } = rendered(files);
        for format in [ObjectFormat::Yaml, ObjectFormat::Json] {
            let printed = vitivirt_cli::parse_manifests("printed", &write(&objects, format)).unwrap();
            assert_eq!(printed.into_iter().map(|document| document.object).collect::<Vec<_>>(), objects);
        }
    }
}

#[test]
fn a_problem_starts_with_machine_and_reason() {
    let machine = |spec: &str| {
        format!("apiVersion: vitistack.io/v1alpha1\nkind: Machine\nmetadata: {{name: vm}}\nspec: {spec}\n")
    };
    for (spec, expected) in [
        ("{template: huge}", "Machine default/vm: TemplateNotFound: spec.template: unsupported value \"huge\""),
        ("{}", "Machine default/vm: Invalid: spec.resources.cpu.cores: required without a template"),
        (
            "{template: small, networks: [{name: a, networkName: missing}]}",
            "Machine default/vm: NetworkConfigurationNotFound:",
        ),
        ("{template: small, cloudInit: {secretRef: {name: missing}}}", "Machine default/vm: SecretNotFound:"),
    ] {
        let problems = problems(&machine(spec));
        assert!(problems.len() == 1 && problems[0].starts_with(expected), "{spec}: {problems:?}");
        let is_missing = spec.contains("missing");
        assert_eq!(problems[0].ends_with("add the object to them, or use plan"), is_missing, "{spec}: {problems:?}");
    }
}

#[test]
fn files_supply_what_a_machine_refers_to() {
    let machine = "apiVersion: vitistack.io/v1alpha1\nkind: Machine\nmetadata: {name: vm}\nspec: {template: small, cloudInit: {secretRef: {name: s, key: k}}}\n";
    let secret = "kind: Secret\nmetadata: {name: s}\nstringData: {k: hello}\n";
    let class = "kind: StorageClass\nmetadata: {name: best, annotations: {storageclass.kubernetes.io/is-default-class: \"true\"}}\nprovisioner: p\n";
    let objects = rendered(&[machine, secret, class]).objects;
    let find = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
    assert_eq!(find("Secret")["data"]["userdata"], "aGVsbG8=");
    assert_eq!(find("PersistentVolumeClaim")["spec"]["storageClassName"], "best");
}

#[test]
fn an_error_names_file_object_and_field() {
    let machine = |name: &str, spec: &str| {
        format!("apiVersion: vitistack.io/v1alpha1\nkind: Machine\nmetadata: {{name: {name}}}\nspec: {spec}\n")
    };
    for (text, expected) in [
        (NETWORKS.to_owned(), "no Machine found in the files; found: file, document 1: NetworkConfiguration"),
        (String::new(), "no Machine found in the files"),
        (
            machine("vm", "{template: small, disks: [{name: a, size: 5}]}"),
            "file: Machine vm: spec.disks[0].size: invalid value 5: must be a string",
        ),
        (
            machine("vm", "{template: small, netwroks: []}"),
            "file: Machine vm: spec.netwroks: unknown field; did you mean networks?",
        ),
        (machine("n", "{template: small}"), "file: Machine: metadata.name: invalid value false: must be a string"),
        (machine("vm", "[small]"), "file: Machine vm: spec: must be an object, not a list"),
        (
            machine("vm", "{template: small}").replace("vitistack.io/v1alpha1", "cluster.x-k8s.io/v1beta1"),
            "unsupported value \"cluster.x-k8s.io/v1beta1\"; supported values: vitistack.io/v1alpha1",
        ),
        (
            format!("{0}---\n{0}", machine("vm", "{template: small}")),
            "file, document 2: Machine vm: duplicate: Machine default/vm is already in the files",
        ),
        (
            machine("vm", "{template: small, resources: {cpu: {cores: 99999999999}}}"),
            "spec.resources.cpu.cores: invalid value 99999999999: must be at most",
        ),
    ] {
        let error = format!("{:#}", files(&[&text]).map(|_| ()).unwrap_err());
        assert!(error.contains(expected), "{text}: {error}");
    }
    let other = "kind: ConfigMap\nmetadata: {name: x}\n";
    let warnings = files(&[&machine("vm", "{template: small}"), other]).unwrap().warnings;
    assert!(warnings.len() == 1 && warnings[0].contains("file: ConfigMap x: ignored"), "{warnings:?}");
}

/// As in a cluster, the first Machine has it.
#[test]
fn machines_of_one_file_cannot_share_an_address_or_a_pvc() {
    let machine = |name: &str, spec: &str| {
        format!(
            "apiVersion: vitistack.io/v1alpha1\nkind: Machine\nmetadata: {{name: {name}}}\nspec: {{template: small, {spec}}}\n"
        )
    };
    let network = "networks: [{name: a, networkName: pod, macAddress: \"02:00:00:00:00:01\"}]";
    let Rendered { problems, .. } = rendered(&[&machine("one", network), &machine("two", network)]);
    assert!(problems.len() == 1 && problems[0].starts_with("Machine default/two: MacAddressInUse"), "{problems:?}");
    let disk = |name: &str| format!("disks: [{{name: {name}, size: 1Gi}}]");
    let Rendered { objects, problems, .. } = rendered(&[&machine("a", &disk("b-c")), &machine("a-b", &disk("c"))]);
    assert!(problems.len() == 1 && problems[0].contains("PersistentVolumeClaim default/a-b-c"), "{problems:?}");
    assert!(!objects.iter().any(|object| object["metadata"]["name"] == "a-b"), "part of the second Machine is printed");
    let [first, second] = ["one", "two"].map(|name| machine(name, "networks: [{name: a, networkName: pod}]"));
    let macs: Vec<Value> = rendered(&[&first, &second])
        .objects
        .iter()
        .filter_map(|object| object.pointer("/spec/template/spec/domain/devices/interfaces/0/macAddress").cloned())
        .collect();
    assert!(macs.len() == 2 && macs[0] != macs[1], "{macs:?}");
}

#[test]
fn the_youngest_of_two_default_storage_classes_is_used() {
    let class = |name: &str, created: &str, annotation: &str| {
        format!(
            "kind: StorageClass\nmetadata: {{name: {name}, creationTimestamp: {created}, annotations: {{{annotation}: \"true\"}}}}\nprovisioner: p\n"
        )
    };
    let old = class("old", "2025-01-01T00:00:00Z", "storageclass.kubernetes.io/is-default-class");
    let new = class("new", "2026-01-01T00:00:00Z", "storageclass.beta.kubernetes.io/is-default-class");
    let objects = rendered(&[BASIC, &old, &new]).objects;
    let pvc = objects.iter().find(|object| object["kind"] == "PersistentVolumeClaim").unwrap();
    assert_eq!(pvc["spec"]["storageClassName"], "new");
}

#[test]
fn an_object_without_a_namespace_is_in_the_given_one() {
    for metadata in ["{name: vm}", "{name: vm, namespace: \"\", uid: \"\"}"] {
        let machine = format!(
            "apiVersion: vitistack.io/v1alpha1\nkind: Machine\nmetadata: {metadata}\nspec: {{template: small}}\n"
        );
        let documents = vitivirt_cli::parse_manifests("file", &machine).unwrap();
        let objects = render(Files::from_documents(&documents, "elsewhere").unwrap()).unwrap().objects;
        assert!(!objects.is_empty() && objects.iter().all(|object| object["metadata"]["namespace"] == "elsewhere"));
    }
}
