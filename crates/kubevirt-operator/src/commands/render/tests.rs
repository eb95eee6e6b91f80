//! The seed's four examples as reviewed snapshots, and what is said about files that are wrong.

use super::*;

const BASIC: &str = include_str!("../../../../../examples/basic-vm.yaml");
const CUSTOM: &str = include_str!("../../../../../examples/custom-vm.yaml");
const NETWORKED: &str = include_str!("../../../../../examples/networked-vm.yaml");
const NETWORKS: &str = include_str!("../../../../../examples/networks.yaml");
const CLOUD_INIT: &str = include_str!("../../../../../examples/cloud-init-vm.yaml");

fn rendered(files: &[&str]) -> Rendered {
    render(files.iter().flat_map(|text| parse(text).unwrap()).collect()).unwrap()
}

fn text(files: &[&str]) -> String {
    let Rendered { objects, problems } = rendered(files);
    assert!(problems.is_empty(), "{problems:?}");
    write(&objects, Format::Yaml).unwrap()
}

fn problems(yaml: &str) -> Vec<String> {
    let Rendered { objects, problems } = rendered(&[yaml]);
    assert!(objects.is_empty());
    problems
}

#[test]
fn basic_vm() {
    insta::assert_snapshot!(text(&[BASIC]));
}

#[test]
fn custom_vm() {
    insta::assert_snapshot!(text(&[CUSTOM]));
}

#[test]
fn networked_vm() {
    insta::assert_snapshot!(text(&[NETWORKED, NETWORKS]));
}

#[test]
fn cloud_init_vm() {
    insta::assert_snapshot!(text(&[CLOUD_INIT]));
}

#[test]
fn what_is_printed_can_be_read_back() {
    for files in [&[BASIC][..], &[CUSTOM], &[NETWORKED, NETWORKS], &[CLOUD_INIT]] {
        let Rendered { objects, .. } = rendered(files);
        assert_eq!(parse(&write(&objects, Format::Yaml).unwrap()).unwrap(), objects);
        let list: Value = serde_json::from_str(&write(&objects, Format::Json).unwrap()).unwrap();
        assert_eq!(list["items"].as_array().unwrap(), &objects);
    }
}

#[test]
fn problems_are_told_with_their_reason() {
    let machine = |spec: &str| {
        format!("apiVersion: vitistack.io/v1alpha1\nkind: Machine\nmetadata: {{name: vm}}\nspec: {spec}\n")
    };
    for (spec, expected) in [
        ("{template: huge}", "Machine default/vm: TemplateNotFound: there is no template \"huge\""),
        ("{}", "Machine default/vm: Invalid: there is no template"),
        (
            "{template: small, networks: [{name: a, networkName: missing}]}",
            "Machine default/vm: NetworkConfigurationNotFound:",
        ),
        ("{template: small, cloudInit: {secretRef: {name: missing}}}", "Machine default/vm: SecretNotFound:"),
    ] {
        let problems = problems(&machine(spec));
        assert!(problems.len() == 1 && problems[0].starts_with(expected), "{spec}: {problems:?}");
    }
}

#[test]
fn files_supply_what_a_machine_refers_to() {
    let machine =
        "kind: Machine\nmetadata: {name: vm}\nspec: {template: small, cloudInit: {secretRef: {name: s, key: k}}}\n";
    let secret = "kind: Secret\nmetadata: {name: s}\nstringData: {k: hello}\n";
    let class = "kind: StorageClass\nmetadata: {name: best, annotations: {storageclass.kubernetes.io/is-default-class: \"true\"}}\nprovisioner: p\n";
    let objects = rendered(&[machine, secret, class]).objects;
    let find = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
    assert_eq!(find("Secret")["data"]["userdata"], "aGVsbG8=");
    assert_eq!(find("PersistentVolumeClaim")["spec"]["storageClassName"], "best");
}

#[test]
fn files_without_a_machine_are_an_error() {
    assert!(render(parse(NETWORKS).unwrap()).is_err());
    assert!(render(parse("kind: Pod\nmetadata: {name: x}\n").unwrap()).is_err());
    assert!(parse("a: [").is_err());
}
