//! Specs that the CRD refuses. They still occur: an object may be older than a rule, or the cluster may have an older
//! CRD. Nothing is created for them, nothing panics, and the message says what is wrong.

use std::sync::LazyLock;

use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use regex::Regex;
use serde_json::{Value, json};
use vitivirt_api::machine::{
    Machine, MachinePhase, MachineSpec,
    condition_type::{NETWORK_READY, READY, STORAGE_READY},
    machine_reason as reason,
};
use vitivirt_machine::{Observed, resolve::resolve, testing::machine_spec as spec};

use crate::simulated_cluster::SimulatedCluster;

/// Nothing is created for the spec, and the report is a bounded message with phase Failed.
fn check_refused(spec: MachineSpec) -> Result<(), TestCaseError> {
    let mut cluster = SimulatedCluster::new(spec).with_network("prod").with_network("storage");
    let (plan, _) = cluster.reconcile();
    prop_assert_eq!(plan.write_count(), 0, "{:?}", plan);
    let status = cluster.status();
    prop_assert_eq!(status.phase, Some(MachinePhase::Failed));
    let why = cluster.condition("Ready").1;
    prop_assert!([reason::INVALID, reason::TEMPLATE_NOT_FOUND].contains(&why.as_str()), "{}", why);
    let diagnosis = status.diagnosis.unwrap_or_default();
    prop_assert!(!diagnosis.is_empty() && diagnosis.len() <= 1024, "{}", diagnosis);
    Ok(())
}

fn word() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        Just("UPPER".to_owned()),
        Just("-a".to_owned()),
        Just("a.b/../c".to_owned()),
        Just("x".repeat(64)),
        Just("ø".repeat(5000)),
        "\\PC{0,40}"
            .prop_filter("is a label", |word| !word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')),
    ]
}

fn size() -> impl Strategy<Value = String> {
    prop_oneof![
        prop_oneof![
            "",
            "0",
            "-1Gi",
            "1.2.3Gi",
            "Gi",
            "NaN",
            "1e400",
            "20 Gi",
            "99999999999999999999Ei",
            "18446744073709551616"
        ]
        .prop_map(|text| text.to_string()),
        "[a-zA-Z!-]{1,30}",
        Just("9".repeat(100_000)),
    ]
}

/// One error in an otherwise valid spec.
fn invalid_part() -> impl Strategy<Value = InvalidPart> {
    prop_oneof![
        word().prop_map(InvalidPart::DiskName),
        word().prop_map(InvalidPart::NetworkName),
        word().prop_map(InvalidPart::Template),
        size().prop_map(InvalidPart::DiskSize),
        size().prop_map(InvalidPart::Memory),
        prop_oneof![Just(0u32), 513u32..].prop_map(InvalidPart::Cores),
        "[a-z!]{2,300}".prop_map(InvalidPart::Unsupported),
        "[0-9a-fA-F:]{0,20}".prop_map(|mac| InvalidPart::Mac(format!("{mac}!"))),
        Just(InvalidPart::Mac("01:00:5e:00:00:01".to_owned())),
        Just(InvalidPart::TwoDisks),
        Just(InvalidPart::TwoNetworks),
        Just(InvalidPart::TwoPods),
        Just(InvalidPart::CdromBoot),
        Just(InvalidPart::SecureBootAlone),
        Just(InvalidPart::TwoSources),
        Just(InvalidPart::NoSource),
        Just(InvalidPart::ReservedName),
        Just(InvalidPart::HugeData),
        Just(InvalidPart::EmptyReadOnly),
        (17usize..200).prop_map(InvalidPart::ManyDisks),
        Just(InvalidPart::NothingGiven),
    ]
}

#[derive(Clone, Debug)]
enum InvalidPart {
    DiskName(String),
    NetworkName(String),
    Template(String),
    DiskSize(String),
    Memory(String),
    Cores(u32),
    Unsupported(String),
    Mac(String),
    TwoDisks,
    TwoNetworks,
    TwoPods,
    CdromBoot,
    SecureBootAlone,
    TwoSources,
    NoSource,
    ReservedName,
    HugeData,
    EmptyReadOnly,
    ManyDisks(usize),
    NothingGiven,
}

impl InvalidPart {
    /// Every field with a fixed set of values, with an unsupported value.
    fn unsupported(word: &str) -> [Value; 5] {
        [
            json!({"powerState": word}),
            json!({"bootOrder": [word]}),
            json!({"disks": [{"name": "p", "size": "1Gi", "accessMode": word}]}),
            json!({"disks": [{"name": "p", "size": "1Gi", "type": word, "volumeMode": word, "onDelete": word}]}),
            json!({"networks": [{"name": "p", "networkName": "prod", "model": word}]}),
        ]
    }

    /// Invalid parts of a spec. Each of them alone makes the spec invalid.
    fn parts(&self) -> Vec<Value> {
        let disk = |disk: Value| vec![json!({"disks": [disk]})];
        let networks = |networks: Value| vec![json!({"networks": networks})];
        match self {
            InvalidPart::DiskName(name) => disk(json!({"name": name, "size": "1Gi"})),
            InvalidPart::NetworkName(name) => networks(json!([{"name": name, "networkName": "prod"}])),
            InvalidPart::Template(name) if name.is_empty() => vec![json!({"template": "x".repeat(64)})],
            InvalidPart::Template(name) => vec![json!({"template": name})],
            InvalidPart::DiskSize(size) => disk(json!({"name": "p", "size": size})),
            InvalidPart::Memory(size) => vec![json!({"resources": {"memory": {"size": size}}})],
            InvalidPart::Cores(cores) => vec![json!({"resources": {"cpu": {"cores": cores}}})],
            InvalidPart::Unsupported(word) => Self::unsupported(&format!("no-{word}")).to_vec(),
            InvalidPart::Mac(mac) => networks(json!([{"name": "p", "networkName": "prod", "macAddress": mac}])),
            InvalidPart::TwoDisks => {
                vec![json!({"disks": [{"name": "p", "size": "1Gi"}, {"name": "p", "size": "2Gi"}]})]
            }
            InvalidPart::TwoNetworks => {
                networks(json!([{"name": "p", "networkName": "prod"}, {"name": "p", "networkName": "storage"}]))
            }
            InvalidPart::TwoPods => {
                networks(json!([{"name": "p", "networkName": "pod"}, {"name": "q", "networkName": "pod"}]))
            }
            InvalidPart::CdromBoot => {
                vec![json!({"bootOrder": ["cdrom"], "disks": []}), json!({"bootOrder": ["disk", "disk"]})]
            }
            InvalidPart::SecureBootAlone => vec![json!({"domain": {"firmware": {"bootloader": {"secureBoot": true}}}})],
            InvalidPart::TwoSources => {
                disk(json!({"name": "p", "size": "1Gi", "source": {"pvc": {"name": "a"}, "snapshot": {"name": "b"}}}))
            }
            InvalidPart::NoSource => disk(json!({"name": "p", "size": "1Gi", "source": {}})),
            InvalidPart::ReservedName => disk(json!({"name": "cloudinitdisk", "size": "1Gi"})),
            InvalidPart::HugeData => vec![json!({"cloudInit": {"userData": "ø".repeat(32_769)}})],
            InvalidPart::EmptyReadOnly => disk(json!({"name": "p", "size": "1Gi", "accessMode": "ReadOnlyMany"})),
            InvalidPart::ManyDisks(many) => {
                let all: Vec<Value> = (0..*many).map(|n| json!({"name": format!("d{n}"), "size": "1Gi"})).collect();
                vec![json!({"disks": all})]
            }
            InvalidPart::NothingGiven => vec![json!({"template": null, "resources": null})],
        }
    }

    fn into_specs(self, good: &MachineSpec) -> Vec<MachineSpec> {
        let merged = self.parts().into_iter().map(|part| {
            let mut spec = json!(good);
            for (key, value) in part.as_object().unwrap() {
                spec[key.as_str()] = value.clone();
            }
            serde_json::from_value(spec).unwrap()
        });
        merged.collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn nothing_is_created_for_an_invalid_spec(good in spec(), invalid_part in invalid_part()) {
        for bad in invalid_part.into_specs(&good) {
            check_refused(bad)?;
        }
    }

    #[test]
    fn an_invalid_edit_changes_nothing_and_can_be_corrected(good in spec(), invalid_part in invalid_part()) {
        let mut cluster = SimulatedCluster::new(good.clone()).with_network("prod").with_network("storage");
        cluster.reconcile_until_up_to_date();
        let (vm, pvcs) = (cluster.observed.vm.clone(), cluster.observed.pvcs.clone());
        for bad in invalid_part.into_specs(&good) {
            cluster.edit(bad);
            cluster.reconcile_until_up_to_date();
            prop_assert!(cluster.observed.vm == vm && cluster.observed.pvcs == pvcs);
            let is_stopped = cluster.observed.machine.spec.power_state.as_deref() == Some("Stopped");
            let expected = if is_stopped { MachinePhase::Stopped } else { MachinePhase::Failed };
            prop_assert_eq!(cluster.status().phase, Some(expected));
            prop_assert_eq!(cluster.condition(READY).0, "False");
            for part in [STORAGE_READY, NETWORK_READY] {
                let (status, reason, _) = cluster.condition(part);
                prop_assert!(status == "Unknown" && reason == "NotEvaluated", "{part}: {status} {reason}");
            }
        }
        cluster.edit(good);
        cluster.reconcile_until_up_to_date();
        prop_assert!(cluster.status().phase != Some(MachinePhase::Failed));
    }

    #[test]
    fn arbitrary_text_in_a_spec_does_not_panic_and_an_invalid_spec_has_no_plan(
        good in spec(), name in "\\PC{0,70}", texts in proptest::collection::vec("\\PC{0,40}", 8),
    ) {
        let mut spec = json!(good);
        spec["disks"] = json!([{"name": texts[0], "size": texts[1], "storageClass": texts[2]}]);
        spec["networks"] = json!([{"name": texts[3], "networkName": texts[4], "macAddress": texts[5]}]);
        spec["domain"] = json!({"machine": {"type": texts[6]}});
        spec["cloudInit"] = json!({"userData": texts[7]});
        let mut cluster = SimulatedCluster::new(serde_json::from_value(spec).unwrap());
        cluster.observed.machine.metadata.name = Some(name.clone());
        let is_valid = resolve(&cluster.observed.machine).is_ok();
        if name.is_empty() {
            prop_assert!(!is_valid);
            prop_assert!(Observed::new(cluster.observed.machine.clone(), Timestamp::UNIX_EPOCH).is_err());
            return Ok(());
        }
        let plan = cluster.plan();
        prop_assert!(is_valid || plan.write_count() == 0, "{plan:?}");
        cluster.reconcile();
    }
}

#[test]
fn resolve_checks_every_limit_of_the_crd() {
    let crd = &vitivirt_api::machine::crds()[0];
    let schema = serde_json::to_value(crd.spec.versions[0].schema.as_ref().unwrap()).unwrap();
    let mut tried = 0;
    for_each_limit("", &schema["openAPIV3Schema"]["properties"]["spec"], &mut |pointer, value| {
        let mut machine: Value = json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine", "metadata": {"name": "web", "namespace": "shop", "uid": "u"},
            "spec": {"template": "small", "cloudInit": {"secretRef": {"name": "s"}}, "disks": [{"name": "d", "size": "1Gi"}], "networks": [{"name": "n", "networkName": "pod"}]},
        });
        set_at(&mut machine["spec"], pointer, value.clone());
        let machine: Machine = serde_json::from_value(machine).unwrap();
        tried += 1;
        assert!(resolve(&machine).is_err(), "{pointer}: {}", value.to_string().chars().take(80).collect::<String>());
    });
    assert!(tried > 40, "only {tried} limits were found");
}

/// KubeVirt makes a container of each containerDisk, and adds 11 characters to its name.
#[test]
fn the_name_of_a_container_disk_fits_the_name_of_its_container() {
    for (length, is_valid) in [(52, true), (53, false)] {
        let disk = json!({"name": "d".repeat(length), "source": {"containerDisk": {"image": "x"}}});
        let machine: Machine = serde_json::from_value(json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine", "metadata": {"name": "web", "namespace": "shop", "uid": "u"},
            "spec": {"template": "small", "disks": [disk]},
        }))
        .unwrap();
        assert_eq!(resolve(&machine).is_ok(), is_valid, "{length} characters");
    }
}

/// The schemas of a size and of a bridge.
static SIZE: LazyLock<StringSchema> =
    LazyLock::new(|| StringSchema::from_crd(0, "/properties/disks/items/properties/size"));
static BRIDGE: LazyLock<StringSchema> = LazyLock::new(|| StringSchema::from_crd(1, "/properties/bridge"));

/// The schema of a field of the spec in the CRD with this index.
fn schema(number: usize, pointer: &str) -> Value {
    let crd = &vitivirt_api::machine::crds()[number];
    let schema = serde_json::to_value(crd.spec.versions[0].schema.as_ref().unwrap()).unwrap();
    schema.pointer(&format!("/openAPIV3Schema/properties/spec{pointer}")).unwrap().clone()
}

struct StringSchema {
    pattern: Regex,
    max_length: usize,
}

impl StringSchema {
    fn from_crd(number: usize, pointer: &str) -> Self {
        let schema = schema(number, pointer);
        let max_length = usize::try_from(schema["maxLength"].as_u64().unwrap()).unwrap();
        let rule = schema.pointer("/x-kubernetes-validations/0/rule").and_then(Value::as_str).map(pattern_of_rule);
        let pattern = schema["pattern"].as_str().map(str::to_owned).or(rule).unwrap();
        Self { pattern: Regex::new(&pattern).unwrap(), max_length }
    }

    fn accepts(&self, text: &str) -> bool {
        text.chars().count() <= self.max_length && self.pattern.is_match(text)
    }
}

/// The pattern of a CEL rule, in which a backslash is escaped.
fn pattern_of_rule(rule: &str) -> String {
    let pattern = rule.strip_prefix("self.matches('").and_then(|rest| rest.strip_suffix("')")).unwrap();
    pattern.replace(r"\\", r"\")
}

/// A Machine on a network with this bridge and VLAN.
fn on_network(bridge: &str, vlan: Option<u16>) -> SimulatedCluster {
    let spec = json!({"template": "small", "networks": [{"name": "a", "networkName": "prod"}]});
    let mut cluster = SimulatedCluster::new(serde_json::from_value(spec).unwrap()).with_network("prod");
    let network = cluster.observed.networks.get_mut("prod").unwrap();
    (network.bridge, network.vlan) = (Some(bridge.to_owned()), vlan);
    cluster
}

/// The diagnosis, if nothing is created.
fn network_error(bridge: &str, vlan: Option<u16>) -> Option<String> {
    let mut cluster = on_network(bridge, vlan);
    let (plan, _) = cluster.reconcile();
    let reasons = || ["Ready", "NetworkReady"].map(|condition| cluster.condition(condition).1);
    (plan.write_count() == 0).then(|| {
        assert_eq!(reasons(), ["NetworkConfigurationNotFound", "NetworkFailed"]);
        cluster.status().diagnosis.unwrap()
    })
}

/// The error of a size, if it is invalid.
fn size_error(size: &str) -> Option<String> {
    let mut cluster =
        SimulatedCluster::new(MachineSpec { template: Some("small".to_owned()), ..MachineSpec::default() });
    let disk = json!({"disks": [{"name": "p", "size": size}], "template": "small"});
    cluster.observed.machine.spec = serde_json::from_value(disk).unwrap();
    resolve(&cluster.observed.machine).err().map(|problem| problem.message)
}

#[test]
fn sizes_are_valid_in_the_forms_of_kubernetes_up_to_the_limit() {
    for good in ["20Gi", "0.5Gi", "1.5", "1.1Gi", "1.0000001Gi", "7Ei", "8070450532247928832", "500M", "0.50k"] {
        assert_eq!(size_error(good), None, "{good}");
    }
    for bad in ["010Gi", "4.", "4.Gi", ".5Gi", "0", "0.0Gi", "00.5Gi", "1.0000000001Gi", "4gi", "1e3", "+1Gi", ""] {
        assert!(
            size_error(bad).is_some_and(|message| message.contains("must be a number greater than 0")),
            "{bad}: {:?}",
            size_error(bad)
        );
    }
    for big in ["8Ei", "8070450532247928833", "9300P", "99999999999999999999Ei", "7.01Ei"] {
        assert!(
            size_error(big).is_some_and(|message| message.contains("must be at most 7Ei")),
            "{big}: {:?}",
            size_error(big)
        );
    }
    let long = "1.00000000000000000000000Gi";
    assert!(size_error(long).is_some_and(|message| message.contains("must be at most 24")), "{:?}", size_error(long));
}

#[test]
fn an_unsupported_value_is_reported_with_the_supported_ones() {
    for (part, supported) in [
        (
            json!({"disks": [{"name": "p", "size": "1Gi", "accessMode": "RWO"}]}),
            "ReadWriteOnce, ReadWriteMany, ReadOnlyMany",
        ),
        (json!({"disks": [{"name": "p", "size": "1Gi", "volumeMode": "RWO"}]}), "Filesystem, Block"),
        (json!({"disks": [{"name": "p", "size": "1Gi", "type": "RWO"}]}), "disk, cdrom"),
        (json!({"disks": [{"name": "p", "size": "1Gi", "onDelete": "RWO"}]}), "Delete, Retain"),
        (json!({"networks": [{"name": "p", "networkName": "pod", "model": "RWO"}]}), "virtio, e1000, rtl8139"),
        (json!({"bootOrder": ["RWO"]}), "disk, network, cdrom"),
        (json!({"powerState": "RWO"}), "Running, Stopped"),
        (json!({"template": "RWO"}), "small, medium, large"),
    ] {
        let mut spec = json!({"template": "small"});
        spec.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
        let problem =
            resolve(&SimulatedCluster::new(serde_json::from_value(spec).unwrap()).observed.machine).unwrap_err();
        let expected = format!("unsupported value \"RWO\"; supported values: {supported}");
        assert!(problem.message.ends_with(&expected), "{}", problem.message);
    }
}

#[test]
fn nothing_is_created_on_a_network_configuration_that_the_crd_refuses() {
    let contains = |message: Option<String>, parts: &[&str]| {
        let message = message.unwrap_or_default();
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} are not all in {message:?}");
    };
    assert_eq!(network_error("br-prod_0.1", Some(4094)), None);
    for name in ["", ".", "..", "br/../x", "abcdefghijklmnopqrstuvwxyz", "br 0", "brø", "b\n"] {
        assert!(!BRIDGE.accepts(name), "{name}");
        contains(network_error(name, None), &["NetworkConfiguration prod", "spec.bridge", "15 letters, digits"]);
    }
    let schema = schema(1, "/properties/vlan");
    let limit = |name: &str| schema[name].as_f64().unwrap() as u16;
    for tag in [limit("minimum") - 1, limit("maximum") + 1, 5000, u16::MAX] {
        contains(network_error("br0", Some(tag)), &["NetworkConfiguration prod", "spec.vlan", "from 1 to 4094"]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn a_size_is_valid_exactly_if_the_crd_accepts_it(
        size in prop_oneof![
            "[0-9]{0,22}(\\.[0-9]{0,11})?[kKMGTPE]?i?",
            "[0-9]{1,3}(\\.[0-9]{1,3})?(Ki|Mi|Gi|Ti|Pi|Ei)",
            "[0-9.kKMGTPEi]{0,25}",
            "[0-9]{17,26}",
        ],
    ) {
        let accepted = SIZE.accepts(&size) && is_in_range(&size);
        prop_assert_eq!(size_error(&size).is_none(), accepted, "{}: {:?}", &size, size_error(&size));
    }

    #[test]
    fn a_bridge_is_valid_exactly_if_the_crd_accepts_it(
        name in prop_oneof!["[a-zA-Z0-9_.-]{0,17}", "\\PC{0,17}"],
    ) {
        let created = on_network(&name, None).plan().write_count() > 0;
        prop_assert_eq!(created, BRIDGE.accepts(&name), "{:?}", &name);
    }
}

/// The CEL rule of the CRD: greater than 0 and at most 7Ei.
fn is_in_range(size: &str) -> bool {
    let (number, suffix) = size.split_at(size.trim_end_matches(|character: char| character.is_alphabetic()).len());
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let places = u32::try_from(fraction.len()).unwrap();
    let power = " kMGTPE".find(suffix.replace('K', "k").chars().next().unwrap_or(' ')).unwrap() as u32;
    let unit = if suffix.ends_with('i') { 1024u128 } else { 1000 }.pow(power);
    let digits: u128 = format!("{whole}{fraction}").parse().unwrap();
    let largest = (7u128 << 60) * 10u128.pow(places);
    digits.checked_mul(unit).is_some_and(|bytes| bytes > 0 && bytes <= largest)
}

fn for_each_limit(path: &str, schema: &Value, check: &mut impl FnMut(&str, Value)) {
    if let Some(properties) = schema["properties"].as_object() {
        for (name, inner) in properties {
            for_each_limit(&format!("{path}/{name}"), inner, check);
        }
    }
    if let Some(most) = schema["maxItems"].as_u64().filter(|_| schema["items"]["properties"].is_object()) {
        let name = |n: u64| json!({"name": format!("x{n}"), "size": "1Gi", "networkName": "prod"});
        check(path, (0..=most).map(name).collect());
    }
    if schema["items"]["properties"].is_object() {
        for_each_limit(&format!("{path}/0"), &schema["items"], check);
    }
    if let Some(most) = schema["maxLength"].as_u64() {
        check(path, "a".repeat(usize::try_from(most).unwrap() + 1).into());
    }
    if schema["minLength"].as_u64().is_some_and(|least| least > 0) {
        check(path, "".into());
    }
    if schema["pattern"].is_string() || schema["enum"].is_array() {
        check(path, "!no such!".into());
    }
    if let Some(most) = schema["maximum"].as_f64() {
        check(path, json!(most as u64 + 1));
        check(path, json!(0));
    }
}

fn set_at(document: &mut Value, pointer: &str, value: Value) {
    let mut place = document;
    for key in pointer.trim_start_matches('/').split('/') {
        place = match key.parse::<usize>() {
            Ok(index) => &mut place[index],
            Err(_) => &mut place[key],
        };
    }
    *place = value;
}
