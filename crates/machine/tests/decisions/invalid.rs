//! Specs that the CRD refuses, as they come all the same: from before a rule, or past a server without it. Nothing is made
//! of them, nothing panics, and the message says what is wrong.

use api::machine::{Machine, MachineSpec, machine_reason as reason};
use machine::resolve::resolve;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::specs::spec;
use crate::world::World;

/// Nothing is made of it; what it says is bounded and told as a failure of the Machine.
fn refused(spec: MachineSpec) -> Result<(), TestCaseError> {
    let mut world = World::new(spec).with_network("prod").with_network("storage");
    let (plan, _) = world.pass();
    prop_assert_eq!(plan.write_count(), 0, "{:?}", plan);
    let status = world.status();
    prop_assert_eq!(status.phase.as_deref(), Some("Failed"));
    let why = world.condition("Ready").1;
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

/// One thing that is wrong in an otherwise good spec.
fn poison() -> impl Strategy<Value = Poison> {
    prop_oneof![
        word().prop_map(Poison::DiskName),
        word().prop_map(Poison::NetworkName),
        word().prop_map(Poison::Template),
        size().prop_map(Poison::DiskSize),
        size().prop_map(Poison::Memory),
        prop_oneof![Just(0u32), 513u32..].prop_map(Poison::Cores),
        "[a-z!]{2,300}".prop_map(Poison::Words),
        "[0-9a-fA-F:]{0,20}".prop_map(|mac| Poison::Mac(format!("{mac}!"))),
        Just(Poison::Mac("01:00:5e:00:00:01".to_owned())),
        Just(Poison::TwoDisks),
        Just(Poison::TwoNetworks),
        Just(Poison::TwoPods),
        Just(Poison::CdromBoot),
        Just(Poison::SecureBootAlone),
        Just(Poison::TwoSources),
        Just(Poison::NoSource),
        Just(Poison::ReservedName),
        Just(Poison::HugeData),
        Just(Poison::EmptyReadOnly),
        (17usize..200).prop_map(Poison::ManyDisks),
        Just(Poison::NothingGiven),
    ]
}

#[derive(Clone, Debug)]
enum Poison {
    DiskName(String),
    NetworkName(String),
    Template(String),
    DiskSize(String),
    Memory(String),
    Cores(u32),
    Words(String),
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

impl Poison {
    /// Every word that has a fixed set of values, with one that is none of them.
    fn words(word: &str) -> [Value; 5] {
        [
            json!({"powerState": word}),
            json!({"bootOrder": [word]}),
            json!({"disks": [{"name": "p", "size": "1Gi", "accessMode": word}]}),
            json!({"disks": [{"name": "p", "size": "1Gi", "type": word, "volumeMode": word, "onDelete": word}]}),
            json!({"networks": [{"name": "p", "networkName": "prod", "model": word}]}),
        ]
    }

    /// The parts of a spec that are wrong; each of them alone is enough.
    fn parts(&self) -> Vec<Value> {
        let disk = |disk: Value| vec![json!({"disks": [disk]})];
        let networks = |networks: Value| vec![json!({"networks": networks})];
        match self {
            Poison::DiskName(name) => disk(json!({"name": name, "size": "1Gi"})),
            Poison::NetworkName(name) => networks(json!([{"name": name, "networkName": "prod"}])),
            Poison::Template(name) if name.is_empty() => vec![json!({"template": "x".repeat(64)})],
            Poison::Template(name) => vec![json!({"template": name})],
            Poison::DiskSize(size) => disk(json!({"name": "p", "size": size})),
            Poison::Memory(size) => vec![json!({"resources": {"memory": {"size": size}}})],
            Poison::Cores(cores) => vec![json!({"resources": {"cpu": {"cores": cores}}})],
            Poison::Words(word) => Self::words(&format!("no-{word}")).to_vec(),
            Poison::Mac(mac) => networks(json!([{"name": "p", "networkName": "prod", "macAddress": mac}])),
            Poison::TwoDisks => vec![json!({"disks": [{"name": "p", "size": "1Gi"}, {"name": "p", "size": "2Gi"}]})],
            Poison::TwoNetworks => {
                networks(json!([{"name": "p", "networkName": "prod"}, {"name": "p", "networkName": "storage"}]))
            }
            Poison::TwoPods => {
                networks(json!([{"name": "p", "networkName": "pod"}, {"name": "q", "networkName": "pod"}]))
            }
            Poison::CdromBoot => {
                vec![json!({"bootOrder": ["cdrom"], "disks": []}), json!({"bootOrder": ["disk", "disk"]})]
            }
            Poison::SecureBootAlone => vec![json!({"domain": {"firmware": {"bootloader": {"secureBoot": true}}}})],
            Poison::TwoSources => {
                disk(json!({"name": "p", "size": "1Gi", "source": {"pvc": {"name": "a"}, "snapshot": {"name": "b"}}}))
            }
            Poison::NoSource => disk(json!({"name": "p", "size": "1Gi", "source": {}})),
            Poison::ReservedName => disk(json!({"name": "cloudinitdisk", "size": "1Gi"})),
            Poison::HugeData => vec![json!({"cloudInit": {"userData": "ø".repeat(131_073)}})],
            Poison::EmptyReadOnly => disk(json!({"name": "p", "size": "1Gi", "accessMode": "ReadOnlyMany"})),
            Poison::ManyDisks(many) => {
                let all: Vec<Value> = (0..*many).map(|n| json!({"name": format!("d{n}"), "size": "1Gi"})).collect();
                vec![json!({"disks": all})]
            }
            Poison::NothingGiven => vec![json!({"template": null, "resources": null})],
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
    fn an_invalid_spec_is_refused_and_nothing_is_made(good in spec(), poison in poison()) {
        for bad in poison.into_specs(&good) {
            refused(bad)?;
        }
    }

    /// An edit that makes a good Machine invalid changes nothing of it, and the way back is open.
    #[test]
    fn an_invalid_edit_touches_nothing_and_heals(good in spec(), poison in poison()) {
        let mut world = World::new(good.clone()).with_network("prod").with_network("storage");
        world.settle();
        let (vm, claims) = (world.observed.vm.clone(), world.observed.claims.clone());
        for bad in poison.into_specs(&good) {
            world.edit(bad);
            world.settle();
            prop_assert!(world.observed.vm == vm && world.observed.claims == claims);
            prop_assert!(world.status().phase.as_deref() == Some("Failed"));
        }
        world.edit(good);
        world.settle();
        prop_assert!(world.status().phase.as_deref() != Some("Failed"));
    }

    /// Whatever the words are: no panic, and either all of it or nothing.
    #[test]
    fn a_machine_is_made_whole_or_not_at_all(
        good in spec(), name in "\\PC{0,70}", words in proptest::collection::vec("\\PC{0,40}", 8),
    ) {
        let mut spec = json!(good);
        spec["disks"] = json!([{"name": words[0], "size": words[1], "storageClass": words[2]}]);
        spec["networks"] = json!([{"name": words[3], "networkName": words[4], "macAddress": words[5]}]);
        spec["domain"] = json!({"machine": {"type": words[6]}});
        spec["cloudInit"] = json!({"userData": words[7]});
        let mut world = World::new(serde_json::from_value(spec).unwrap());
        world.observed.machine.metadata.name = Some(name);
        let understood = resolve(&world.observed.machine).is_ok();
        let plan = machine::plan(&world.observed);
        prop_assert!(understood || plan.write_count() == 0, "{plan:?}");
        world.pass();
    }
}

/// Whatever the CRD says about a single field, `resolve` says too.
#[test]
fn resolve_knows_every_limit_of_the_definition() {
    let definition = &api::machine::crds()[0];
    let schema = serde_json::to_value(definition.spec.versions[0].schema.as_ref().unwrap()).unwrap();
    let mut tried = 0;
    each_limit("", &schema["openAPIV3Schema"]["properties"]["spec"], &mut |pointer, value| {
        let mut machine: Value = json!({
            "apiVersion": "vitistack.io/v1alpha1", "kind": "Machine", "metadata": {"name": "web", "namespace": "shop", "uid": "u"},
            "spec": {"template": "small", "cloudInit": {"secretRef": {"name": "s"}}, "disks": [{"name": "d", "size": "1Gi"}], "networks": [{"name": "n", "networkName": "pod"}]},
        });
        put(&mut machine["spec"], pointer, value.clone());
        let machine: Machine = serde_json::from_value(machine).unwrap();
        tried += 1;
        assert!(resolve(&machine).is_err(), "{pointer}: {}", value.to_string().chars().take(80).collect::<String>());
    });
    assert!(tried > 40, "only {tried} limits were found");
}

fn each_limit(path: &str, schema: &Value, check: &mut impl FnMut(&str, Value)) {
    if let Some(properties) = schema["properties"].as_object() {
        for (name, inner) in properties {
            each_limit(&format!("{path}/{name}"), inner, check);
        }
    }
    if let Some(most) = schema["maxItems"].as_u64().filter(|_| schema["items"]["properties"].is_object()) {
        let name = |n: u64| json!({"name": format!("x{n}"), "size": "1Gi", "networkName": "prod"});
        check(path, (0..=most).map(name).collect());
    }
    if schema["items"]["properties"].is_object() {
        each_limit(&format!("{path}/0"), &schema["items"], check);
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

fn put(document: &mut Value, pointer: &str, value: Value) {
    let mut place = document;
    for key in pointer.trim_start_matches('/').split('/') {
        place = match key.parse::<usize>() {
            Ok(index) => &mut place[index],
            Err(_) => &mut place[key],
        };
    }
    *place = value;
}
