//! The identity of a Machine.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::Adoption;
use crate::{Failure, ObjectKey, reason};

/// Namespace, name and UID of a Machine. None of them is empty. The identity is what the guest's MAC addresses and UUID are
/// derived from: the UID, or that of an earlier Machine whose place this one takes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MachineId {
    namespace: String,
    name: String,
    uid: String,
    identity: Option<String>,
}

impl MachineId {
    /// Fails if one of the three is missing. The API server sets all of them, so that is an error of the caller.
    pub fn from_metadata(metadata: &ObjectMeta) -> Result<Self, Failure> {
        let required = |field: &str, value: &Option<String>| {
            value.clone().filter(|value| !value.is_empty()).ok_or_else(|| {
                Failure::bug(
                    reason::UNREADABLE_ANSWER,
                    format!("Machine without metadata.{field} cannot be reconciled"),
                )
            })
        };
        Ok(Self {
            namespace: required("namespace", &metadata.namespace)?,
            name: required("name", &metadata.name)?,
            uid: required("uid", &metadata.uid)?,
            identity: Adoption::from_metadata(metadata).identity().map(str::to_owned),
        })
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn uid(&self) -> &str {
        &self.uid
    }

    pub fn identity(&self) -> &str {
        self.identity.as_deref().unwrap_or(&self.uid)
    }

    pub fn key(&self) -> ObjectKey {
        ObjectKey::namespaced(&self.namespace, &self.name)
    }

    /// The key of another object in the Machine's namespace.
    pub fn sibling(&self, name: &str) -> ObjectKey {
        ObjectKey::namespaced(&self.namespace, name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_needs_namespace_name_and_uid() {
        let some = |text: &str| Some(text.to_owned());
        let complete = ObjectMeta {
            namespace: some("shop"),
            name: some("web"),
            uid: some("5e6f5d0a-52a5-4a7c-9d38-2f1f0f6f3d11"),
            ..ObjectMeta::default()
        };
        let id = MachineId::from_metadata(&complete).unwrap();
        assert_eq!((id.key().to_string(), id.sibling("other").to_string()), ("shop/web".into(), "shop/other".into()));
        for (field, broken) in [
            ("namespace", ObjectMeta { namespace: None, ..complete.clone() }),
            ("name", ObjectMeta { name: some(""), ..complete.clone() }),
            ("uid", ObjectMeta { uid: None, ..complete }),
        ] {
            let failure = MachineId::from_metadata(&broken).unwrap_err();
            assert!(failure.message.contains(&format!("metadata.{field}")), "{failure}");
        }
    }
}
