//! Network interfaces, and derived MAC addresses for those without one.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};
use vitivirt_api::{
    machine::{Network, POD_NETWORK},
    text::hex,
};

use super::{invalid, invalid_value, unsupported};
use crate::problem::Problem;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedNetwork {
    pub name: String,
    pub attachment: Attachment,
    pub model: String,
    pub mac: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// The pod network, with masquerading.
    Pod,
    /// The bridge of the NetworkConfiguration with this name.
    Configuration(String),
}

impl ResolvedNetwork {
    pub fn configuration(&self) -> Option<&str> {
        match &self.attachment {
            Attachment::Pod => None,
            Attachment::Configuration(name) => Some(name),
        }
    }
}

pub(super) fn resolve(uid: &str, given: &[Network]) -> Result<Vec<ResolvedNetwork>, Problem> {
    if given.is_empty() {
        return Ok(vec![resolve_network(uid, &default_network())?]);
    }
    let mut names = BTreeSet::new();
    for network in given {
        if !names.insert(&network.name) {
            return Err(invalid(format!(
                "spec.networks: two interfaces have the name {:?}; use unique names",
                network.name
            )));
        }
    }
    let resolved: Vec<ResolvedNetwork> =
        given.iter().map(|network| resolve_network(uid, network)).collect::<Result<_, _>>()?;
    if resolved.iter().filter(|network| network.attachment == Attachment::Pod).count() > 1 {
        return Err(invalid(
            "spec.networks: two interfaces use the pod network, but KubeVirt allows only one; remove one of them",
        ));
    }
    let mut macs = BTreeSet::new();
    for network in &resolved {
        if !macs.insert(&network.mac) {
            return Err(invalid(format!(
                "spec.networks: two interfaces have the MAC address {}; use unique addresses",
                network.mac
            )));
        }
    }
    Ok(resolved)
}

fn default_network() -> Network {
    Network { name: "default".to_owned(), network_name: POD_NETWORK.to_owned(), ..Network::default() }
}

fn resolve_network(uid: &str, network: &Network) -> Result<ResolvedNetwork, Problem> {
    let name = &network.name;
    let field = |part: &str| format!("spec.networks[{name}].{part}");
    let model = match network.model.as_deref() {
        None => "virtio",
        Some(model @ ("virtio" | "e1000" | "rtl8139")) => model,
        Some(other) => return Err(unsupported(&field("model"), other, &["virtio", "e1000", "rtl8139"])),
    };
    let mac = match &network.mac_address {
        None => derived_mac(uid, name),
        Some(text) => unicast(text).ok_or_else(|| {
            invalid_value(&field("macAddress"), text, "must be a unicast MAC address such as 52:54:00:12:34:56")
        })?,
    };
    let attachment = match network.network_name.as_str() {
        POD_NETWORK => Attachment::Pod,
        other => Attachment::Configuration(other.to_owned()),
    };
    Ok(ResolvedNetwork { name: name.clone(), attachment, model: model.to_owned(), mac })
}

/// The address in lower case, if it is six bytes in hexadecimal and not a multicast address.
fn unicast(text: &str) -> Option<String> {
    let bytes: Vec<u8> = text
        .split(':')
        .map(|part| (part.len() == 2).then(|| u8::from_str_radix(part, 16).ok())?)
        .collect::<Option<_>>()?;
    let first = *bytes.first()?;
    (bytes.len() == 6 && first & 1 == 0 && bytes.iter().any(|byte| *byte != 0)).then(|| text.to_lowercase())
}

/// A locally administered address that stays the same when the VM is created again.
pub fn derived_mac(uid: &str, interface: &str) -> String {
    let digest = Sha256::new().chain_update(uid).chain_update([0]).chain_update(interface).finalize();
    let bytes: Vec<String> = digest.iter().take(5).map(|byte| hex(&[*byte])).collect();
    format!("02:{}", bytes.join(":"))
}
