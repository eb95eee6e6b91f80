//! The consent to take over objects that exist before the Machine: the annotation `vitistack.io/adopt`.
//!
//! Its value is a list, separated by commas. An item is the UID of an earlier Machine, whose objects become those of this
//! Machine; or `pvc/NAME` or `secret/NAME`, for an object that does not carry the UID of a Machine. The first UID is also
//! the identity of the guest: its MAC addresses and its UUID are derived from it, so that they stay as they were.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::ANNOTATION_ADOPT;
use crate::text::is_subdomain;

const PVC: &str = "pvc/";
const SECRET: &str = "secret/";
/// More than any Machine needs.
const MAX_ITEMS: usize = 64;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adoption {
    items: Vec<String>,
}

impl Adoption {
    pub fn from_metadata(metadata: &ObjectMeta) -> Self {
        let value = metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_ADOPT));
        let items = value.into_iter().flat_map(|value| value.split(',')).map(str::trim).filter(|item| !item.is_empty());
        Self { items: items.take(MAX_ITEMS).map(str::to_owned).collect() }
    }

    /// The first item that is neither the UID of a Machine nor the name of an object.
    pub fn invalid_item(&self) -> Option<&str> {
        let is_name = |item: &str, prefix: &str| item.strip_prefix(prefix).is_some_and(is_subdomain);
        let is_valid = |item: &str| is_uid(item) || is_name(item, PVC) || is_name(item, SECRET);
        self.items.iter().map(String::as_str).find(|item| !is_valid(item))
    }

    /// The UID that the guest's MAC addresses and UUID are derived from.
    pub fn identity(&self) -> Option<&str> {
        self.items.iter().map(String::as_str).find(|item| is_uid(item))
    }

    /// Whether the objects of the Machine with this UID may be taken over.
    pub fn includes_machine(&self, uid: &str) -> bool {
        is_uid(uid) && self.includes(uid)
    }

    /// The UIDs of Machines among the items.
    pub fn machines(&self) -> impl Iterator<Item = &str> {
        self.items.iter().map(String::as_str).filter(|item| is_uid(item))
    }

    pub fn includes_pvc(&self, name: &str) -> bool {
        self.pvcs().any(|pvc| pvc == name)
    }

    pub fn includes_secret(&self, name: &str) -> bool {
        self.secrets().any(|secret| secret == name)
    }

    /// The names of the PVCs among the items.
    pub fn pvcs(&self) -> impl Iterator<Item = &str> {
        self.items.iter().filter_map(|item| item.strip_prefix(PVC))
    }

    /// The names of the Secrets among the items.
    pub fn secrets(&self) -> impl Iterator<Item = &str> {
        self.items.iter().filter_map(|item| item.strip_prefix(SECRET))
    }

    /// The value of the annotation that also includes these items.
    pub fn with<'a>(&self, items: impl IntoIterator<Item = &'a str>) -> String {
        let mut all = self.items.clone();
        for item in items {
            if !all.iter().any(|have| have == item) {
                all.push(item.to_owned());
            }
        }
        all.join(",")
    }

    /// The item for a PVC without the UID of a Machine.
    pub fn pvc_item(name: &str) -> String {
        format!("{PVC}{name}")
    }

    /// The item for a Secret without the UID of a Machine.
    pub fn secret_item(name: &str) -> String {
        format!("{SECRET}{name}")
    }

    fn includes(&self, item: &str) -> bool {
        self.items.iter().any(|have| have == item)
    }
}

/// Whether this has the form of a UID: a UUID in lower case.
pub(crate) fn is_uid(text: &str) -> bool {
    let lengths = text.split('-').map(str::len);
    let is_digit = |byte: u8| byte == b'-' || byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    lengths.eq([8, 4, 4, 4, 12]) && text.bytes().all(is_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11";
    const OTHER: &str = "11111111-52a5-4a7c-9d38-2f1f0f6f3d11";

    fn adoption(value: &str) -> Adoption {
        let annotations = Some([(ANNOTATION_ADOPT.to_owned(), value.to_owned())].into());
        Adoption::from_metadata(&ObjectMeta { annotations, ..ObjectMeta::default() })
    }

    #[test]
    fn items_are_machines_pvcs_and_secrets() {
        let given = adoption(&format!("pvc/web-root, {UID},,{OTHER},secret/web-cloudinit"));
        assert_eq!(given.invalid_item(), None);
        assert_eq!(given.identity(), Some(UID));
        assert!(
            given.includes_machine(OTHER) && given.includes_pvc("web-root") && given.includes_secret("web-cloudinit")
        );
        assert!(
            !given.includes_machine("web-root") && !given.includes_pvc("web") && !given.includes_secret("web-root")
        );
        assert_eq!(given.with([UID, "pvc/a"]), format!("pvc/web-root,{UID},{OTHER},secret/web-cloudinit,pvc/a"));
        assert_eq!(adoption("").with([UID]), UID);
    }

    #[test]
    fn other_text_is_invalid_and_no_identity() {
        for text in ["all", "pvc/", "pvc/A", "secret/a/b", "vm/web", &UID.to_uppercase(), &UID[1..]] {
            let given = adoption(text);
            assert_eq!((given.invalid_item(), given.identity()), (Some(text), None));
            assert!(!given.includes_machine(text), "{text}");
        }
        assert_eq!(adoption(UID).invalid_item(), None);
    }
}
